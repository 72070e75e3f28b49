"""The launch of the Hopper kernel passes its arguments in the order in which the kernel takes them. Nothing is compiled."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from flashsampling import exchange
from flashsampling.counts import groups_of
from flashsampling.exchange import WHOLE, Shard
from flashsampling.impl.cute import asked as module
from flashsampling.impl.cute import config, launch, slots
from flashsampling.impl.cute.arguments import Arguments, LaunchArguments, Operands, Processing
from flashsampling.impl.cute.config import FLOOR_KEYS, KINDS, NO_FLOORS, NO_PROCESSING
from flashsampling.noise import Stream
from flashsampling.step import PLAIN, Asked, Drawn, Step
from tests.conftest import DEVICE

BATCH, DIM, VOCAB, SAMPLES = 5, 64, 300, 3
ROOM = torch.zeros(1, dtype=torch.int32)


@pytest.fixture
def call(monkeypatch):
    """Runs a step with a kernel and a GPU that are played: the call's arguments, those that are checked here made None."""

    def run(step):
        call, words = [], []

        def zeroed_words(needed, device):
            words.append(torch.zeros(needed, dtype=torch.int64))
            return words[0]

        monkeypatch.setattr(launch, "kernel_for", lambda dtype, shape, features: lambda *values: call.extend(values))
        monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(launch, "zeroed_words", zeroed_words)
        launch._plan.cache_clear()
        tokens = launch.run(step).ids
        assert len(call) == len(LaunchArguments.names(KINDS["plain"]))
        operands, arguments, processing, outputs = LaunchArguments.of(call)
        assert processing is None
        assert outputs is None
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


@pytest.mark.parametrize("features", KINDS.values(), ids=KINDS)
def test_what_the_launch_is_compiled_with_has_every_name_once(features):
    names = LaunchArguments.names(features)
    assert len(set(names)) == len(names)
    assert len(LaunchArguments.fakes(features)) == len(names)
    parts = LaunchArguments.of(range(len(names)))
    assert [name for part in parts if part is not None for name in part._fields] == list(names)
    assert (parts.asked is not None, parts.outputs is not None) == features[:2]


def test_the_workspace_is_laid_out_without_gaps():
    draws, row_blocks, start = 15, 2, 1 << 20
    best = [slots.best(start, number) for number in range(draws)]
    infinite = [slots.infinite(address, draws) for address in best]
    counters = [slots.counter(start, draws, block) for block in range(row_blocks)]
    assert best + infinite + counters == [start + 8 * word for word in range(slots.words(draws, row_blocks))]
    assert [slots.before(start, word) for word in (1, 4)] == [start - 8, start - 32]
    rows = 7
    first_tiles = [slots.first_tiles(start, draws, row_blocks, block) for block in range(row_blocks)]
    floors = [slots.floor(start, draws, row_blocks, row) for row in range(rows)]
    assert best + infinite + counters + first_tiles + floors == [
        start + 8 * word for word in range(slots.words(draws, row_blocks, rows))
    ]


PROCESSED = "bias", "logit_scale", "soft_cap", "dense_bias", "bias_ids", "bias_values", "counts", "token_mask"
TENSOR, VECTOR, COUNTS = torch.zeros(BATCH), torch.zeros(VOCAB), torch.zeros(BATCH, VOCAB, dtype=torch.int32)
ENTRIES: dict[str, Any] = {  # which a kernel of Triton makes words of
    "bias_ids": torch.zeros(BATCH, 1, dtype=torch.int32, device=DEVICE),
    "bias_values": torch.zeros(BATCH, 1, device=DEVICE),
}


@pytest.mark.parametrize(
    ("asked", "temperature", "expected"),
    [  # draws, sums, raw sums
        (Asked(top_k=3), 0.5, (1, False, False)),
        (Asked(top_k=3), TENSOR, (1, False, False)),
        (Asked(top_k=3), 0.0, (1, False, False)),
        (Asked(top_k=VOCAB), 0.5, (1, False, False)),
        (Asked(top_k=VOCAB, min_p=0.5), 0.5, (1, False, False)),
        (Asked(top_k=TENSOR.int()), 0.5, (1, False, False)),
        (Asked(top_k=TENSOR.int(), top_p=0.9), 0.5, (1, True, False)),
        (Asked(top_k=3, top_p=TENSOR, min_p=TENSOR), 0.5, (1, False, False)),
        (Asked(top_k=3, top_p=TENSOR, joint_top_p=1), 0.5, (1, True, False)),
        (Asked(top_k=3, top_p=0.5, joint_top_p=TENSOR.int()), 0.5, (1, True, False)),
        (Asked(top_k=3, joint_top_p=1), 0.5, (1, False, False)),
        (Asked(top_p=TENSOR, min_p=TENSOR), 0.5, (1, True, False)),
        (Asked(top_p=float("nan")), 0.5, (1, True, False)),
        (Asked(min_p=0.1), 0.5, (1, False, False)),
        (Asked(top_logprobs=2), 0.5, (1, False, True)),
        (Asked(logsumexp=True), 0.5, (1, False, True)),
        (Asked(top_k=3, logprobs=True), 0.5, (1, True, True)),
        (Asked(top_k=3, soft_cap=1.0), 0.5, (1, False, False)),
        (Asked(top_k=3, token_mask=TENSOR.int()[:, None]), 0.5, (1, False, False)),
        (Asked(soft_cap=1.0, logit_scale=2.0, bias=VECTOR, logprobs=True), 0.5, (1, True, True)),
        (Asked(stream=Stream.RECOVERY), 0.5, None),
        (Asked(token_mask=TENSOR.int()[:, None], logprobs=True), 0.5, None),
        (Asked(counts=COUNTS, logsumexp=True), 0.5, None),
        (Asked(dense_bias=VECTOR, top_logprobs=2), 0.5, None),
        (Asked(top_k=3, **ENTRIES), 0.5, (1, False, False)),
        (Asked(logsumexp=True, **ENTRIES), 0.5, None),
    ],
)
@pytest.mark.parametrize("num_samples", [1, SAMPLES, None])
def test_what_a_request_makes_of_a_step(monkeypatch, asked, temperature, expected, num_samples):
    """How many draws, which summaries, and who does the rest; None: no draws, no summaries, all of it is done again. And of
    one draw with what it leaves behind, for which the mass of every row is needed; there is no raw one then."""
    calls: list[Any] = []
    picked: list[Any] = []
    leaves, num_samples = num_samples is None, num_samples or 1
    if num_samples > 1:  # of which the kernel would evaluate every token
        expected = None
    if leaves and expected is not None:  # what is processed is processed again
        changed = any(getattr(asked, name) is not getattr(PLAIN, name) for name in PROCESSED)
        expected = None if changed else (1, True, False)

    def room_of(step):
        assert not calls  # the second launch writes there while the first one runs
        return ROOM

    def pick(*parts, records=None, room=None):
        assert (records is None) != leaves
        assert room is (None if leaves or expected is None else ROOM)
        picked.append(parts)
        return Drawn(torch.zeros(BATCH, dtype=torch.int64))

    picking = SimpleNamespace(
        pick=pick,
        run=pick,
        room_of=room_of,
        Summaries=lambda *parts: parts,
        empty_records=lambda batch, device: (torch.zeros(batch), torch.zeros(batch, 4)),
    )

    def plan(batch, dim, num_samples, *rest):
        return launch._Plan(lambda *values: calls.append((rest[-1], values)), 2, 66, 0, 0, VOCAB, 8)

    monkeypatch.setattr(launch, "_plan", plan)
    monkeypatch.setattr(launch, "zeroed_words", lambda needed, device: torch.zeros(needed, dtype=torch.int64))
    monkeypatch.setattr(module, "_picking", lambda: picking)
    hidden, weight = (torch.zeros(rows, DIM, dtype=torch.bfloat16) for rows in (BATCH, VOCAB + 2))
    step = Step(hidden, weight, temperature, 7, 11, num_samples, VOCAB, asked=asked)
    if leaves:
        left = module.recorded(step)
        assert left.logits is picked[0][0].logits
        assert [len(part) for part in (left.ids, left.limits, left.masses)] == [BATCH] * 3
    else:
        assert isinstance(launch.run(step), Drawn)
    ((features, values),) = calls
    assert features == KINDS["logits"]
    _, arguments, processing, outputs = LaunchArguments.of(values)
    assert processing is not None
    assert outputs is not None
    ((whole, *rest),) = picked
    processed = {} if expected is None else {name: getattr(PLAIN, name) for name in PROCESSED}
    assert whole._replace(logits=None) == step._replace(asked=asked._replace(**processed))
    assert processing.any == (expected is not None and any(getattr(asked, name) is not processed[name] for name in PROCESSED))
    assert whole.logits.shape == (BATCH, -(-VOCAB // 128) * 128 if outputs.floors else VOCAB)
    assert outputs.stride == 4 * whole.logits.stride(0)
    assert outputs.stride % 16 == 0
    assert outputs.logits == whole.logits.data_ptr()
    assert arguments.num_samples == (0 if expected is None else expected[0])
    if expected is None:
        assert (outputs.sums, outputs.raw_sums, rest) == (0, 0, [])
        assert outputs[-len(NO_FLOORS) :] == NO_FLOORS
        return
    (keys, *sums), drawn = rest
    floors = sums.pop() if len(sums) == 3 else None
    by_top_k = not isinstance(asked.top_k, torch.Tensor) and 0 < asked.top_k < VOCAB
    some = (
        asked.top_k
        if by_top_k
        else isinstance(asked.top_k, torch.Tensor) or isinstance(asked.min_p, torch.Tensor) or asked.min_p
    )
    if leaves or expected[2] or not some:
        assert floors is None
        assert (outputs.floors, outputs.masses_of_all) == (0, 1)
    else:
        assert (floors.shape, floors.dtype, floors.data_ptr()) == ((BATCH,), torch.int32, outputs.floors)
        assert outputs.masses_of_all == asked.may_be_joint()
    if leaves:
        assert outputs[-len(NO_FLOORS) :] == NO_FLOORS
    else:
        for name, number in (("top_k", outputs.top_k_value), ("min_p", outputs.min_p_value)):
            value, address = getattr(asked, name), getattr(outputs, name)
            assert (address, number) == ((value.data_ptr(), 0) if isinstance(value, torch.Tensor) else (0, value))
        assert outputs.top_k_wide == (not isinstance(asked.top_k, torch.Tensor))
    assert (keys.shape, keys.dtype, keys.data_ptr()) == ((BATCH, 12), torch.int32, outputs.keys)
    for part, address, wanted in zip(sums, outputs[3:5], expected[1:], strict=True):
        assert (part is None, address == 0) == (not wanted, not wanted)
        assert not wanted or (part.shape, part.dtype, part.data_ptr()) == ((BATCH, 12), torch.float32, address)
    assert drawn.shape == (BATCH,)
    assert drawn is arguments.tokens


def test_the_sample_of_floors_is_in_columns_of_their_own():
    """Which ``floor_rank`` takes for granted: of a row's chunks those ``width`` apart share one."""
    logits = pytest.importorskip("flashsampling.impl.triton.logits")
    assert logits.CONFIG.width >= FLOOR_KEYS


def test_floors_are_made_room_for_by_kind():
    """Which ``pick`` is compiled for: a number's value is none, or a warm-up with another would not do."""
    matrix, of_rows, vocab = torch.zeros(BATCH, DIM, dtype=torch.bfloat16), torch.zeros(BATCH), 4 * FLOOR_KEYS
    step = Step(matrix, matrix, 1.0, 7, 11, 1, vocab)
    for asked, some in (
        *((Asked(top_k=k), True) for k in (1, 50, FLOOR_KEYS, vocab - 1)),
        *((Asked(top_k=k), False) for k in (-1, 0, vocab)),
        (Asked(top_k=vocab, min_p=of_rows), True),
        (Asked(top_k=of_rows.int()), True),
        (Asked(min_p=1e-30), True),
        (Asked(top_p=0.9), False),
        (Asked(top_k=5, logprobs=True), False),
    ):
        assert (module._floors_of(step._replace(asked=asked)) is not None) == some
    with pytest.raises(AssertionError):
        module.with_logits(step, 0, None, filters=module._filters_of(Asked(top_k=5), of_rows.int()))


@pytest.mark.parametrize("num_samples", [1, SAMPLES])
def test_what_changes_logits_alone_is_one_launch(monkeypatch, num_samples):
    """Of several draws too; and every part of it is where the kernel looks for it. (A bias by row is a small one before it.)"""
    calls = []
    entries = torch.zeros(BATCH, 3 + 2, dtype=torch.int64)

    def by_block(asked, first, last, base):
        assert (asked.bias_ids.shape, first, last, base) == ((BATCH, 2), 0, VOCAB, 0)
        return entries

    def plan(batch, dim, num_samples, *rest):
        return launch._Plan(lambda *values: calls.append((rest[-1], values)), 2, 66, 0, 0, VOCAB, 8)

    def refuse():
        raise AssertionError("nothing is to be picked")

    monkeypatch.setattr(launch, "_plan", plan)
    monkeypatch.setattr(launch, "zeroed_words", lambda needed, device: torch.zeros(needed, dtype=torch.int64))
    monkeypatch.setattr(module, "_picking", refuse)
    monkeypatch.setattr(module, "_entries", lambda: SimpleNamespace(by_block=by_block))
    hidden, weight = (torch.zeros(rows, DIM, dtype=torch.bfloat16) for rows in (BATCH, VOCAB))
    wide, mask = torch.zeros(BATCH, VOCAB + 7, dtype=torch.int32), torch.zeros(1, 13, dtype=torch.int32).expand(BATCH, -1)
    penalties = {"repetition_penalty": TENSOR, "frequency_penalty": 0.25, "presence_penalty": TENSOR + 1}
    seen = torch.zeros(BATCH, groups_of(VOCAB + 500), dtype=torch.uint8)
    of_vocabulary = {"dense_bias": VECTOR + 1, "bias_ids": wide[:, :2], "bias_values": torch.zeros(BATCH, 2)}
    of_vocabulary |= {"counts": wide, "seen": seen, "token_mask": mask}
    asked = Asked(bias=VECTOR, logit_scale=2.0, soft_cap=30.0, **penalties, **of_vocabulary)
    drawn = launch.run(Step(hidden, weight, 0.5, 7, 11, num_samples, VOCAB, asked=asked))
    ((features, values),) = calls
    assert features == KINDS["processed"]
    _, arguments, processing, outputs = LaunchArguments.of(values)
    assert arguments.num_samples == num_samples
    assert drawn.ids is arguments.tokens
    assert outputs is None
    assert processing == Processing(
        any=1,
        bias=VECTOR.data_ptr(),
        logit_scale=2.0,
        soft_cap=30.0,
        dense_bias=asked.dense_bias.data_ptr(),
        entries=entries.data_ptr(),
        entries_stride=8 * 5,
        counts=wide.data_ptr(),
        counts_stride=4 * (VOCAB + 7),
        seen=seen.data_ptr(),
        seen_stride=groups_of(VOCAB + 500),
        repetition=TENSOR.data_ptr(),
        repetition_value=0,
        frequency=0,
        frequency_value=0.25,
        presence=asked.presence_penalty.data_ptr(),
        presence_value=0,
        token_mask=mask.data_ptr(),
        mask_stride=0,
    )
    nothing = Processing(*NO_PROCESSING)
    assert nothing._replace(logit_scale=0.0, repetition_value=0.0) == (0,) * len(NO_PROCESSING)


def test_what_asks_for_nothing_takes_the_plain_kernel(monkeypatch):
    calls = []

    def plan(*rest):
        return launch._Plan(lambda *values: calls.append((rest[-1], values)), 2, 66, 0, 0, VOCAB, 8)

    monkeypatch.setattr(launch, "_plan", plan)
    monkeypatch.setattr(launch, "zeroed_words", lambda needed, device: torch.zeros(needed, dtype=torch.int64))
    hidden, weight = (torch.zeros(rows, DIM, dtype=torch.bfloat16) for rows in (BATCH, VOCAB))
    launch.run(Step(hidden, weight, 0.5, 7, 11, 1, VOCAB, asked=Asked(top_k=-1, repetition_penalty=TENSOR)))
    ((features, values),) = calls
    assert features == KINDS["plain"]
    assert len(values) == len(LaunchArguments.names(features))
