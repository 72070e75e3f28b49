"""The launch of the Hopper kernel passes its arguments in the order in which the kernel takes them. Nothing is compiled."""

import pytest
import torch

pytest.importorskip("cutlass")

from flashsampling import exchange
from flashsampling.exchange import WHOLE, Shard
from flashsampling.impl.cute import config, launch, slots
from flashsampling.impl.cute.arguments import Arguments, LaunchArguments, Operands
from flashsampling.step import Step

BATCH, DIM, VOCAB, SAMPLES = 5, 64, 300, 3


@pytest.fixture
def call(monkeypatch):
    """Runs a step with a kernel and a GPU that are played: the call's arguments, those that are checked here made None."""

    def run(step):
        call, words = [], []

        def zeroed_words(needed, device):
            words.append(torch.zeros(needed, dtype=torch.int64))
            return words[0]

        monkeypatch.setattr(launch, "kernel_for", lambda dtype, shape: lambda *values: call.extend(values))
        monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(launch, "zeroed_words", zeroed_words)
        launch._plan.cache_clear()
        tokens = launch.run(step).ids
        assert len(call) == len(LaunchArguments.names())
        operands, arguments = LaunchArguments.of(call)
        assert arguments.tokens is tokens
        assert len(words[0]) == slots.words(len(tokens), operands.row_blocks)
        assert arguments.workspace == words[0].data_ptr()
        return operands, arguments._replace(tokens=None, workspace=None)

    yield run
    launch._plan.cache_clear()


@pytest.fixture
def passed(call):
    """... of a step in whose matrices rows are apart: what every thread gets."""

    def run(temperature=0.5, seed=7, offset=11, num_samples=SAMPLES, shard=WHOLE, ctas=3):
        hidden = torch.zeros(BATCH, 96, dtype=torch.bfloat16)[:, :DIM]
        weight = torch.zeros(VOCAB, 128, dtype=torch.bfloat16)[:, :DIM]
        operands, arguments = call(Step(hidden, weight, temperature, seed, offset, num_samples, VOCAB, shard))
        assert operands == Operands(hidden.data_ptr(), 96, weight.data_ptr(), 128, VOCAB, DIM, 1, ctas)
        return arguments

    return run


def test_numbers(passed):
    assert passed() == Arguments(0, 0.5, 0, 7, 0, 11, None, None, BATCH, 0, 0, VOCAB, SAMPLES, exchange.TOKENS)


def test_tensors_and_a_shard(passed):
    rows = torch.full((BATCH,), 0.5), torch.arange(BATCH), torch.arange(BATCH) + 1
    addresses = [value for row in rows for value in (row.data_ptr(), 0)]
    expected = Arguments(*addresses, None, None, BATCH, 1000 - 104, 104, 104 + VOCAB, 1, exchange.PACKED)
    assert passed(*rows, num_samples=1, shard=Shard(1000, exchange.PACKED), ctas=4) == expected


def test_one_row_of_whatever_stride(call):
    matrix = torch.zeros(BATCH, 100, dtype=torch.bfloat16)
    operands, arguments = call(Step(matrix[:1], matrix[:1], 1.0, 7, 11, 1, 1))
    assert operands == Operands(matrix.data_ptr(), 104, matrix.data_ptr(), 104, 1, 100, 1, 1)
    assert (arguments.skip, arguments.end) == (0, 1)


def test_hidden_states_that_the_copy_engine_cannot_read_are_copied(call):
    matrix = torch.zeros(BATCH, 100, dtype=torch.bfloat16)
    for hidden in (matrix, matrix.T.contiguous().T):
        operands, _ = call(Step(hidden, matrix, 1.0, 7, 11, 1, BATCH))
        assert operands.hidden not in (hidden.data_ptr(), matrix.data_ptr())
        assert operands.hidden_stride == 104


def test_a_shard_without_a_token(call):
    """There is something to read, and none of it is sampled."""
    hidden, nothing = torch.zeros(BATCH, DIM, dtype=torch.bfloat16), torch.zeros(0, DIM, dtype=torch.bfloat16)
    operands, arguments = call(Step(hidden, nothing, 1.0, 7, 11, 1, 0, Shard(1000, exchange.PACKED)))
    assert operands == Operands(hidden.data_ptr(), DIM, hidden.data_ptr(), DIM, 1, DIM, 1, 1)
    assert (arguments.base, arguments.skip, arguments.end) == (1000 - 104, config.TILE_V, config.TILE_V)


def test_what_the_copy_engine_reads():
    """Of no row, or one, the stride is nobody's business: an empty shard is cut from whatever matrix."""

    def reads(matrix):
        return config.copy_engine_reads(matrix.data_ptr(), matrix.shape[0], *matrix.stride())

    matrix = torch.zeros(10, 100, dtype=torch.bfloat16)  # rows 200 bytes apart
    assert [reads(matrix[:rows]) for rows in (0, 1, 2)] == [True, True, False]
    assert reads(torch.zeros(10, 104, dtype=torch.bfloat16)[:, :100])
    assert not reads(matrix[:1, 1:])
    assert not reads(matrix.T)
    assert not config.copy_engine_reads(0, 2, 2**39, 1)  # its strides have 40 bits, of bytes
