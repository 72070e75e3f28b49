"""What the host decides of a launch of the Hopper kernel: which kernel, which draws and sums it makes, which logits it
stores. Nothing is compiled."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper import config, launch
from flashsampling.kernels.hopper import dispatch as module
from flashsampling.kernels.hopper.arguments import LaunchArguments
from flashsampling.kernels.hopper.config import CUTOFF_KEYS, KINDS, NO_CUTOFFS
from flashsampling.noise import Stream
from flashsampling.sampling_params import SamplingParams
from tests.conftest import DEVICE

BATCH, DIM, VOCAB, SAMPLES = 5, 64, 300, 3


@pytest.fixture
def launches(monkeypatch):
    """(features, values) of each launch, of which nothing runs."""
    calls: list[tuple[config.Features, tuple[Any, ...]]] = []

    def plan(*problem):
        return launch._Plan(lambda *values: calls.append((problem[-1], values)), 2, 66, 896, 104, 104 + VOCAB, 8)

    monkeypatch.setattr(launch, "_plan", plan)
    monkeypatch.setattr(launch, "zeroed_words", lambda needed, device: torch.zeros(needed, dtype=torch.int64))
    return calls


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


TENSOR, VECTOR, COUNTS = torch.zeros(BATCH), torch.zeros(VOCAB), torch.zeros(BATCH, VOCAB, dtype=torch.int32)
ENTRIES: dict[str, Any] = {  # which a kernel of Triton makes words of
    "bias_ids": torch.zeros(BATCH, 1, dtype=torch.int32, device=DEVICE),
    "bias_values": torch.zeros(BATCH, 1, device=DEVICE),
}


def make_step(params, num_samples=1):
    hidden, weight = (torch.zeros(rows, DIM, dtype=torch.bfloat16) for rows in (BATCH, VOCAB + 2))
    return SampleInputs(hidden, weight, 0.5, 7, 11, num_samples, VOCAB, params=params)


@pytest.fixture
def made(monkeypatch):
    """(draws, sums wanted, cutoffs made) of each launch with logits, of which nothing runs."""
    calls: list[tuple[Any, ...]] = []

    def run_with_logits(step, draws, masses, config=None, transforms=(0,), filters=NO_CUTOFFS):
        calls.append((draws, masses, filters[0] != 0))
        return torch.zeros(BATCH, VOCAB), (None, None, None), torch.zeros(BATCH, dtype=torch.int64)

    def draw(step, *others, records=None):
        return SimpleNamespace(ids=torch.zeros(BATCH, dtype=torch.int64))

    filtered = SimpleNamespace(
        draw=draw,
        run=draw,
        run_with_processed=lambda step, records: (draw(step), step.logits),
        BlockStats=lambda *parts: parts,
        empty_records=lambda batch, device: (torch.zeros(batch), torch.zeros(batch, 4)),
    )
    monkeypatch.setattr(module, "run_with_logits", run_with_logits)
    monkeypatch.setattr(module, "_filtered_module", lambda: filtered)
    return calls


@pytest.mark.parametrize(
    ("params", "sums", "cutoffs"),
    [  # sums and raw sums, or None: logits are stored as they are, and all else is done again
        (SamplingParams(top_k=3), (False, False), True),
        (SamplingParams(top_k=VOCAB), (False, False), False),
        (SamplingParams(top_k=VOCAB, min_p=0.5), (False, False), True),
        (SamplingParams(top_k=TENSOR.int(), top_p=0.9), (True, False), True),
        (SamplingParams(top_k=3, top_p=TENSOR, min_p=TENSOR), (False, False), True),
        (SamplingParams(top_k=3, top_p=TENSOR, joint_top_p=1), (True, False), True),
        (SamplingParams(top_k=3, top_p=0.5, joint_top_p=TENSOR.int()), (True, False), True),
        (SamplingParams(top_p=TENSOR, min_p=TENSOR), (True, False), True),
        (SamplingParams(top_p=float("nan")), (True, False), False),
        (SamplingParams(min_p=0.1), (False, False), True),
        (SamplingParams(top_logprobs=2), (False, True), False),
        (SamplingParams(logsumexp=True), (False, True), False),
        (SamplingParams(top_k=3, logprobs=True), (True, True), False),
        (SamplingParams(soft_cap=1.0, logit_scale=2.0, bias=VECTOR, logprobs=True), (True, True), False),
        (SamplingParams(stream=Stream.RECOVERY), None, False),
        (SamplingParams(token_mask=TENSOR.int()[:, None], logprobs=True), None, False),
        (SamplingParams(counts=COUNTS, logsumexp=True), None, False),
        (SamplingParams(dense_bias=VECTOR, top_logprobs=2), None, False),
        (SamplingParams(top_k=3, **ENTRIES), (False, False), True),
        (SamplingParams(logsumexp=True, **ENTRIES), None, False),
    ],
)
def test_what_a_request_makes_of_a_step(made, params, sums, cutoffs):
    """Of several draws the kernel would evaluate every token; what rejection reads needs the mass of every row."""
    launch.run(make_step(params))
    launch.run(make_step(params, SAMPLES))
    stored = (0, None, False)
    assert made == [stored if sums is None else (1, sums, cutoffs), stored]
    made.clear()
    module.recorded(make_step(params))
    assert made == [stored if sums is None or module._has_transforms(params) else (1, (True, False), False)]


def test_the_sample_of_cutoffs_is_in_columns_of_their_own():
    """Which ``cutoff_rank`` takes for granted: of a row's blocks those ``width`` apart share one."""
    logits = pytest.importorskip("flashsampling.kernels.triton.filtered.dispatch")
    assert logits.CONFIG.width >= CUTOFF_KEYS


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (SamplingParams(top_k=-1, repetition_penalty=TENSOR), "plain"),  # which have no counts
        (SamplingParams(bias=VECTOR, soft_cap=30.0, counts=COUNTS, repetition_penalty=TENSOR), "processed"),
    ],
)
@pytest.mark.parametrize("num_samples", [1, SAMPLES])
def test_what_changes_logits_alone_is_one_launch(launches, made, params, kind, num_samples):
    """Of several draws too. (A bias by row is a small one before it.)"""
    launch.run(make_step(params, num_samples))
    ((features, values),) = launches
    assert features == KINDS[kind]
    assert len(values) == len(LaunchArguments.names(features))
    assert not made
