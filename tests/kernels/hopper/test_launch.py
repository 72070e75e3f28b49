"""The launch of the Hopper kernel passes its arguments in the order in which the kernel takes them. Nothing is
compiled."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from flashsampling import exchange_protocol
from flashsampling.exchange_protocol import WHOLE, Shard
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper import config, launch, workspace_layout
from flashsampling.kernels.hopper import dispatch as module
from flashsampling.kernels.hopper.arguments import Arguments, HostArguments, LaunchArguments, TransformArguments
from flashsampling.kernels.hopper.config import CUTOFF_KEYS, KINDS, NO_CUTOFFS
from flashsampling.noise import Stream
from flashsampling.outputs import SampleResult
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from flashsampling.token_counts import num_token_groups
from tests.conftest import DEVICE

BATCH, DIM, VOCAB, SAMPLES = 5, 64, 300, 3


@pytest.fixture
def call(monkeypatch):
    """Runs a step with a kernel and a GPU that are played: the call's arguments, those that are checked here made
    None."""

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
        operands, arguments, transforms, outputs = LaunchArguments.of(call)
        assert transforms is None
        assert outputs is None
        assert arguments.tokens is tokens
        assert len(words[0]) == workspace_layout.words(len(tokens), operands.row_blocks)
        assert arguments.workspace == words[0].data_ptr()
        return operands, arguments._replace(tokens=None, workspace=None)

    yield run
    launch._plan.cache_clear()


@pytest.fixture
def launches(monkeypatch):
    """(features, values) of each launch, of which nothing runs."""
    calls: list[tuple[config.Features, tuple[Any, ...]]] = []

    def plan(*problem):
        return launch._Plan(lambda *values: calls.append((problem[-1], values)), 2, 66, 0, 0, VOCAB, 8)

    monkeypatch.setattr(launch, "_plan", plan)
    monkeypatch.setattr(launch, "zeroed_words", lambda needed, device: torch.zeros(needed, dtype=torch.int64))
    return calls


def make_step(params, temperature=0.5, num_samples=1):
    hidden, weight = (torch.zeros(rows, DIM, dtype=torch.bfloat16) for rows in (BATCH, VOCAB + 2))
    return SampleInputs(hidden, weight, temperature, 7, 11, num_samples, VOCAB, params=params)


@pytest.fixture
def passed(call):
    """... of a step in whose matrices rows are apart: what every thread gets."""

    def run(temperature=0.5, seed=7, offset=11, num_samples=SAMPLES, shard=WHOLE, ctas=3):
        hidden = torch.zeros(BATCH, 96, dtype=torch.bfloat16)[:, :DIM]
        weight = torch.zeros(VOCAB, 128, dtype=torch.bfloat16)[:, :DIM]
        operands, arguments = call(SampleInputs(hidden, weight, temperature, seed, offset, num_samples, VOCAB, shard))
        assert operands == HostArguments(hidden.data_ptr(), 96, weight.data_ptr(), 128, VOCAB, DIM, 1, ctas)
        return arguments

    return run


def test_numbers(passed):
    assert passed() == Arguments(0, 0.5, 0, 7, 0, 11, None, None, BATCH, 0, 0, VOCAB, SAMPLES, exchange_protocol.TOKENS)


def test_tensors_and_a_shard(passed):
    rows = torch.full((BATCH,), 0.5), torch.arange(BATCH), torch.arange(BATCH) + 1
    addresses = [value for row in rows for value in (row.data_ptr(), 0)]
    expected = Arguments(*addresses, None, None, BATCH, 1000 - 104, 104, 104 + VOCAB, 1, exchange_protocol.PACKED)
    assert passed(*rows, num_samples=1, shard=Shard(1000, exchange_protocol.PACKED), ctas=4) == expected


def test_one_row_of_whatever_stride(call):
    matrix = torch.zeros(BATCH, 100, dtype=torch.bfloat16)
    operands, arguments = call(SampleInputs(matrix[:1], matrix[:1], 1.0, 7, 11, 1, 1))
    assert operands == HostArguments(matrix.data_ptr(), 104, matrix.data_ptr(), 104, 1, 100, 1, 1)
    assert (arguments.skip, arguments.end) == (0, 1)


def test_hidden_states_that_the_copy_engine_cannot_read_are_copied(call):
    matrix = torch.zeros(BATCH, 100, dtype=torch.bfloat16)
    for hidden in (matrix, matrix.T.contiguous().T):
        operands, _ = call(SampleInputs(hidden, matrix, 1.0, 7, 11, 1, BATCH))
        assert operands.hidden not in (hidden.data_ptr(), matrix.data_ptr())
        assert operands.hidden_stride == 104


def test_a_shard_without_a_token(call):
    """There is something to read, and none of it is sampled."""
    hidden, nothing = torch.zeros(BATCH, DIM, dtype=torch.bfloat16), torch.zeros(0, DIM, dtype=torch.bfloat16)
    operands, arguments = call(SampleInputs(hidden, nothing, 1.0, 7, 11, 1, 0, Shard(1000, exchange_protocol.PACKED)))
    assert operands == HostArguments(hidden.data_ptr(), DIM, hidden.data_ptr(), DIM, 1, DIM, 1, 1)
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
    assert (parts.params is not None, parts.outputs is not None) == features[:2]


def test_the_workspace_is_laid_out_without_gaps():
    draws, row_blocks, rows, start = 15, 2, 7, 1 << 20
    places = [workspace_layout.best(start, number) for number in range(draws)]
    places += [workspace_layout.infinite(address, draws) for address in places]
    places += [workspace_layout.counter(start, draws, block) for block in range(row_blocks)]
    assert len(places) == workspace_layout.words(draws, row_blocks)
    places += [workspace_layout.first_tiles(start, draws, row_blocks, block) for block in range(row_blocks)]
    places += [workspace_layout.cutoff(start, draws, row_blocks, row) for row in range(rows)]
    assert places == [start + 8 * word for word in range(workspace_layout.words(draws, row_blocks, rows))]
    assert [workspace_layout.before(start, word) for word in (1, 4)] == [start - 8, start - 32]


PROCESSED = "bias", "logit_scale", "soft_cap", "dense_bias", "bias_ids", "bias_values", "counts", "token_mask"
TENSOR, VECTOR, COUNTS = torch.zeros(BATCH), torch.zeros(VOCAB), torch.zeros(BATCH, VOCAB, dtype=torch.int32)
ENTRIES: dict[str, Any] = {  # which a kernel of Triton makes words of
    "bias_ids": torch.zeros(BATCH, 1, dtype=torch.int32, device=DEVICE),
    "bias_values": torch.zeros(BATCH, 1, device=DEVICE),
}


@pytest.mark.parametrize(
    ("params", "temperature", "expected"),
    [  # draws, sums, raw sums
        (SamplingParams(top_k=3), 0.5, (1, False, False)),
        (SamplingParams(top_k=3), TENSOR, (1, False, False)),
        (SamplingParams(top_k=3), 0.0, (1, False, False)),
        (SamplingParams(top_k=VOCAB), 0.5, (1, False, False)),
        (SamplingParams(top_k=VOCAB, min_p=0.5), 0.5, (1, False, False)),
        (SamplingParams(top_k=TENSOR.int()), 0.5, (1, False, False)),
        (SamplingParams(top_k=TENSOR.int(), top_p=0.9), 0.5, (1, True, False)),
        (SamplingParams(top_k=3, top_p=TENSOR, min_p=TENSOR), 0.5, (1, False, False)),
        (SamplingParams(top_k=3, top_p=TENSOR, joint_top_p=1), 0.5, (1, True, False)),
        (SamplingParams(top_k=3, top_p=0.5, joint_top_p=TENSOR.int()), 0.5, (1, True, False)),
        (SamplingParams(top_k=3, joint_top_p=1), 0.5, (1, False, False)),
        (SamplingParams(top_p=TENSOR, min_p=TENSOR), 0.5, (1, True, False)),
        (SamplingParams(top_p=float("nan")), 0.5, (1, True, False)),
        (SamplingParams(min_p=0.1), 0.5, (1, False, False)),
        (SamplingParams(top_logprobs=2), 0.5, (1, False, True)),
        (SamplingParams(logsumexp=True), 0.5, (1, False, True)),
        (SamplingParams(top_k=3, logprobs=True), 0.5, (1, True, True)),
        (SamplingParams(top_k=3, soft_cap=1.0), 0.5, (1, False, False)),
        (SamplingParams(top_k=3, token_mask=TENSOR.int()[:, None]), 0.5, (1, False, False)),
        (SamplingParams(soft_cap=1.0, logit_scale=2.0, bias=VECTOR, logprobs=True), 0.5, (1, True, True)),
        (SamplingParams(stream=Stream.RECOVERY), 0.5, None),
        (SamplingParams(token_mask=TENSOR.int()[:, None], logprobs=True), 0.5, None),
        (SamplingParams(counts=COUNTS, logsumexp=True), 0.5, None),
        (SamplingParams(dense_bias=VECTOR, top_logprobs=2), 0.5, None),
        (SamplingParams(top_k=3, **ENTRIES), 0.5, (1, False, False)),
        (SamplingParams(logsumexp=True, **ENTRIES), 0.5, None),
    ],
)
@pytest.mark.parametrize("num_samples", [1, SAMPLES, None])
def test_what_a_request_makes_of_a_step(monkeypatch, launches, params, temperature, expected, num_samples):
    """How many draws, which block statistics, and who does the rest; None: none, and all of it is done again.
    And of one draw with what it leaves behind, for which the mass of every row is needed; there is no raw one then."""
    filtered_calls: list[Any] = []
    leaves, num_samples = num_samples is None, num_samples or 1
    if num_samples > 1:  # of which the kernel would evaluate every token
        expected = None
    if leaves and expected is not None:  # what is processed is processed again
        changed = any(getattr(params, name) is not getattr(DEFAULT_PARAMS, name) for name in PROCESSED)
        expected = None if changed else (1, True, False)

    def draw(*parts, records=None):
        assert (records is None) != leaves
        filtered_calls.append(parts)
        return SampleResult(torch.zeros(BATCH, dtype=torch.int64))

    filtered = SimpleNamespace(
        draw=draw,
        run=draw,
        run_with_processed=lambda step, records: (draw(step, records=records), step.logits),
        BlockStats=lambda *parts: parts,
        empty_records=lambda batch, device: (torch.zeros(batch), torch.zeros(batch, 4)),
    )

    monkeypatch.setattr(module, "_filtered_module", lambda: filtered)
    step = make_step(params, temperature, num_samples)
    if leaves:
        left = module.recorded(step)
        assert left.logits is filtered_calls[0][0].logits
        assert [len(part) for part in (left.ids, left.limits, left.masses)] == [BATCH] * 3
    else:
        assert isinstance(launch.run(step), SampleResult)
    ((features, values),) = launches
    assert features == KINDS["logits"]
    _, arguments, transforms, outputs = LaunchArguments.of(values)
    assert transforms is not None
    assert outputs is not None
    ((whole, *rest),) = filtered_calls
    processed = {} if expected is None else {name: getattr(DEFAULT_PARAMS, name) for name in PROCESSED}
    assert whole._replace(logits=None) == step._replace(params=params._replace(**processed))
    assert transforms.any == (
        expected is not None and any(getattr(params, name) is not processed[name] for name in PROCESSED)
    )
    assert whole.logits.shape == (BATCH, -(-VOCAB // 128) * 128 if outputs.cutoffs else VOCAB)
    assert outputs.stride == 4 * whole.logits.stride(0)
    assert outputs.stride % 16 == 0
    assert outputs.logits == whole.logits.data_ptr()
    assert arguments.num_samples == (0 if expected is None else expected[0])
    if expected is None:
        assert (outputs.sums, outputs.raw_sums, rest) == (0, 0, [])
        assert outputs[-len(NO_CUTOFFS) :] == NO_CUTOFFS
        return
    (keys, *sums), drawn = rest
    cutoffs = sums.pop() if len(sums) == 3 else None
    by_row = isinstance(params.top_k, torch.Tensor) or isinstance(params.min_p, torch.Tensor)
    if leaves or expected[2] or not (by_row or 0 < params.top_k < VOCAB or params.min_p > 0):
        assert cutoffs is None
        assert (outputs.cutoffs, outputs.masses_of_all) == (0, 1)
    else:
        assert (cutoffs.shape, cutoffs.dtype, cutoffs.data_ptr()) == ((BATCH,), torch.int32, outputs.cutoffs)
        assert outputs.masses_of_all == params.may_be_joint()
    if leaves:
        assert outputs[-len(NO_CUTOFFS) :] == NO_CUTOFFS
    else:
        for name, number in (("top_k", outputs.top_k_value), ("min_p", outputs.min_p_value)):
            value, address = getattr(params, name), getattr(outputs, name)
            assert (address, number) == ((value.data_ptr(), 0) if isinstance(value, torch.Tensor) else (0, value))
        assert outputs.top_k_wide == (not isinstance(params.top_k, torch.Tensor))
    assert (keys.shape, keys.dtype, keys.data_ptr()) == ((BATCH, 12), torch.int32, outputs.keys)
    for part, address, wanted in zip(sums, outputs[3:5], expected[1:], strict=True):
        assert (part is None, address == 0) == (not wanted, not wanted)
        assert not wanted or (part.shape, part.dtype, part.data_ptr()) == ((BATCH, 12), torch.float32, address)
    assert drawn.shape == (BATCH,)
    assert drawn is arguments.tokens


def test_the_sample_of_cutoffs_is_in_columns_of_their_own():
    """Which ``cutoff_rank`` takes for granted: of a row's blocks those ``width`` apart share one."""
    logits = pytest.importorskip("flashsampling.kernels.triton.filtered.dispatch")
    assert logits.CONFIG.width >= CUTOFF_KEYS


def test_cutoffs_are_made_room_for_by_kind():
    """By which parameters are set."""
    matrix, of_rows, vocab = torch.zeros(BATCH, DIM, dtype=torch.bfloat16), torch.zeros(BATCH), 4 * CUTOFF_KEYS
    step = SampleInputs(matrix, matrix, 1.0, 7, 11, 1, vocab)
    for params, some in (
        *((SamplingParams(top_k=k), True) for k in (1, 50, CUTOFF_KEYS, vocab - 1)),
        *((SamplingParams(top_k=k), False) for k in (-1, 0, vocab)),
        (SamplingParams(top_k=vocab, min_p=of_rows), True),
        (SamplingParams(top_k=of_rows.int()), True),
        (SamplingParams(min_p=1e-30), True),
        (SamplingParams(top_p=0.9), False),
        (SamplingParams(top_k=5, logprobs=True), False),
    ):
        assert (module._allocate_cutoffs(step._replace(params=params)) is not None) == some
    with pytest.raises(AssertionError):
        module.run_with_logits(step, 0, None, filters=module._cutoff_arguments(SamplingParams(top_k=5), of_rows.int()))


@pytest.mark.parametrize("num_samples", [1, SAMPLES])
def test_what_changes_logits_alone_is_one_launch(monkeypatch, launches, num_samples):
    """Of several draws too; and every part of it is where the kernel looks for it. (A bias by row is a small one before
    it.)"""
    sparse_bias = torch.zeros(BATCH, 3 + 2, dtype=torch.int64)

    def sort_by_tile(params, first, last, base):
        assert (params.bias_ids.shape, first, last, base) == ((BATCH, 2), 0, VOCAB, 0)
        return sparse_bias

    monkeypatch.setattr(module, "_filtered_module", lambda: pytest.fail("nothing is to be filtered"))
    monkeypatch.setattr(module, "_sparse_bias_module", lambda: SimpleNamespace(sort_by_tile=sort_by_tile))
    wide = torch.zeros(BATCH, VOCAB + 7, dtype=torch.int32)
    mask = torch.zeros(1, 13, dtype=torch.int32).expand(BATCH, -1)
    penalties = {"repetition_penalty": TENSOR, "frequency_penalty": 0.25, "presence_penalty": TENSOR + 1}
    seen = torch.zeros(BATCH, num_token_groups(VOCAB + 500), dtype=torch.uint8)
    of_vocabulary = {"dense_bias": VECTOR + 1, "bias_ids": wide[:, :2], "bias_values": torch.zeros(BATCH, 2)}
    of_vocabulary |= {"counts": wide, "seen": seen, "token_mask": mask}
    params = SamplingParams(bias=VECTOR, logit_scale=2.0, soft_cap=30.0, **penalties, **of_vocabulary)
    drawn = launch.run(make_step(params, num_samples=num_samples))
    ((features, values),) = launches
    assert features == KINDS["processed"]
    _, arguments, transforms, outputs = LaunchArguments.of(values)
    assert arguments.num_samples == num_samples
    assert drawn.ids is arguments.tokens
    assert outputs is None
    assert transforms == TransformArguments(
        any=1,
        bias=VECTOR.data_ptr(),
        logit_scale=2.0,
        soft_cap=30.0,
        dense_bias=params.dense_bias.data_ptr(),
        sparse_bias=sparse_bias.data_ptr(),
        sparse_bias_stride=8 * 5,
        counts=wide.data_ptr(),
        counts_stride=4 * (VOCAB + 7),
        nonzero_mask=seen.data_ptr(),
        nonzero_mask_stride=num_token_groups(VOCAB + 500),
        repetition=TENSOR.data_ptr(),
        repetition_value=0,
        frequency=0,
        frequency_value=0.25,
        presence=params.presence_penalty.data_ptr(),
        presence_value=0,
        token_mask=mask.data_ptr(),
        mask_stride=0,
    )
    nothing = TransformArguments(*module.NO_TRANSFORMS)
    assert nothing._replace(logit_scale=0.0, repetition_value=0.0) == (0,) * len(module.NO_TRANSFORMS)


def test_what_asks_for_nothing_takes_the_plain_kernel(launches):
    launch.run(make_step(SamplingParams(top_k=-1, repetition_penalty=TENSOR)))
    ((features, values),) = launches
    assert features == KINDS["plain"]
    assert len(values) == len(LaunchArguments.names(features))
