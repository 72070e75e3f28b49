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
def passed(monkeypatch):
    """Runs a step with a kernel that is played: the call's arguments by name, less those that are checked here."""

    def run(temperature=0.5, seed=7, offset=11, num_samples=SAMPLES, shard=WHOLE, skip=0):
        call, words = [], []

        def zeroed_words(needed, device):
            words.append(torch.zeros(needed, dtype=torch.int64))
            return words[0]

        monkeypatch.setattr(launch, "_plan", lambda *_: (lambda *values: call.extend(values), 2, 66, skip))
        monkeypatch.setattr(launch, "zeroed_words", zeroed_words)
        hidden = torch.zeros(BATCH, 96, dtype=torch.bfloat16)[:, :DIM]
        weight = torch.zeros(VOCAB, 128, dtype=torch.bfloat16)[:, :DIM]
        tokens = launch.run(Step(hidden, weight, temperature, seed, offset, num_samples, VOCAB, shard)).ids
        assert len(call) == len(LaunchArguments.names())
        operands, arguments, outputs = LaunchArguments.of(call)
        assert outputs is None
        assert operands == Operands(hidden.data_ptr(), 96, weight.data_ptr(), 128, VOCAB, DIM, 2, 66)
        assert arguments.tokens is tokens
        assert (arguments.workspace, len(words[0])) == (words[0].data_ptr(), 2 * BATCH * num_samples + 2)
        return arguments._replace(tokens=None, workspace=None)

    return run


def test_numbers(passed):
    assert passed() == Arguments(0, 0.5, 0, 7, 0, 11, None, None, BATCH, 0, 0, VOCAB, SAMPLES, exchange.TOKENS)


def test_tensors_and_a_shard(passed):
    rows = torch.full((BATCH,), 0.5), torch.arange(BATCH), torch.arange(BATCH) + 1
    addresses = [value for row in rows for value in (row.data_ptr(), 0)]
    expected = Arguments(*addresses, None, None, BATCH, 1000 - 104, 104, 104 + VOCAB, 1, exchange.PACKED)
    assert passed(*rows, num_samples=1, shard=Shard(1000, exchange.PACKED), skip=104) == expected


def test_what_the_copy_engine_reads():
    """Of no row, or one, the stride is nobody's business: an empty shard is cut from whatever matrix."""
    matrix = torch.zeros(10, 100, dtype=torch.bfloat16)  # rows 200 bytes apart
    assert [config.copy_engine_reads(matrix[:rows]) for rows in (0, 1, 2)] == [True, True, False]
    assert config.copy_engine_reads(torch.zeros(10, 104, dtype=torch.bfloat16)[:, :100])
    assert not config.copy_engine_reads(matrix[:1, 1:])
    assert not config.copy_engine_reads(matrix.T)


@pytest.mark.parametrize("logits", [False, True])
def test_what_the_launch_is_compiled_with_has_every_name_once(logits):
    names = LaunchArguments.names(logits)
    assert len(set(names)) == len(names)
    assert len(LaunchArguments.fakes(logits)) == len(names)


def test_the_workspace_is_laid_out_without_gaps():
    draws, row_blocks, start = 15, 2, 1 << 20
    best = [slots.best(start, number) for number in range(draws)]
    infinite = [slots.infinite(address, draws) for address in best]
    counters = [slots.counter(start, draws, block) for block in range(row_blocks)]
    assert best + infinite + counters == [start + 8 * word for word in range(slots.words(draws, row_blocks))]
    assert [slots.before(start, word) for word in (1, 4)] == [start - 8, start - 32]
