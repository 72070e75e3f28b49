"""``tensor_parallel/outputs`` and the hashes of requests by kernels: beside torch's, on the way of whole steps over
several ranks."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flashsampling import ops
from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import NAN as NAN_KEY
from flashsampling.exchange_protocol import NO_FINITE
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.triton.sharded import cutoffs, param_hash
from flashsampling.kernels.triton.sharded import outputs as by_kernels
from flashsampling.outputs import SampleResult, layout
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from flashsampling.tensor_parallel import outputs as by_torch
from flashsampling.tensor_parallel.cutoffs import FixedPointScale
from flashsampling.tensor_parallel.filtered_sampling import Kept, _Logits
from flashsampling.tensor_parallel.message import Hashes
from tests.conftest import DEVICE
from tests.kernels.test_filters import differences
from tests.mixes import INF, Mix
from tests.tensor_parallel.test_filters import cut, run

STEPS = 16 if DEVICE.type == "cpu" else 400


def draft_hash(ours: Tensor, theirs: Tensor) -> bool:
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    return torch.allclose(ours, theirs, rtol=2e-6, atol=2e-6, equal_nan=True)


class Both:
    """``shard_parts``: the kernels', beside torch's."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = dict.fromkeys(("first", "words", "conclude", "above", "put_ranks"), 0)

    def first(self, theirs: Tensor, params: SamplingParams) -> Any:
        self.calls["first"] += 1
        ours, expected = by_kernels.first(theirs, params), by_torch.first(theirs, params)
        defined = expected[2]
        assert torch.equal(ours[2], defined)
        assert torch.equal(ours[0], expected[0])
        assert torch.equal(ours[1].view(torch.int32)[defined], expected[1].view(torch.int32)[defined])
        return ours

    def words(self, kept: Any, winners: Tensor, mass: Tensor | None) -> Tensor:
        self.calls["words"] += 1
        ours, expected = by_kernels.words(kept, winners, mass), by_torch.words(kept, winners, mass)
        assert ours.shape == expected.shape
        columns = list(kept.columns.values())
        for name, mine, other in zip(kept.columns, ours.split(columns, dim=1), expected.split(columns, dim=1)):
            if name == "logsumexp":
                assert draft_hash(mine.contiguous().view(torch.float64), other.contiguous().view(torch.float64))
            elif name == "top":
                assert torch.equal(mine.sort(dim=1).values, other.sort(dim=1).values)
            elif name == "logits" and mass is not None:  # of no winner any
                there = winners != NO_FINITE
                assert torch.equal(mine[there], other[there])
            else:
                assert torch.equal(mine, other), name
        return ours

    def conclude(self, theirs: Tensor, kept: Any) -> tuple[SampleResult, Tensor | None]:
        self.calls["conclude"] += 1
        (ours, raw), (expected, expected_raw) = by_kernels.conclude(theirs, kept), by_torch.conclude(theirs, kept)
        placed = layout(len(kept.limit), kept.local.num_samples, kept.local.params)
        mine, other = placed.split(ours, len(kept.limit)), placed.split(expected, len(kept.limit))
        assert all(draft_hash(mine[name], other[name]) for name in other if name != "ranks")
        if raw is not None and expected_raw is not None:
            there = expected.ids[: raw.numel()].view(raw.shape) >= 0
            assert torch.equal(raw[there], expected_raw[there])
        return ours, raw

    def above(self, raw: Tensor, logits: Tensor) -> Tensor:
        self.calls["above"] += 1
        ours = by_kernels.above(raw, logits)
        assert torch.equal(ours, by_torch.above(raw, logits))
        return ours

    def put_ranks(self, drawn: SampleResult, theirs: Tensor, kept: Any) -> None:
        self.calls["put_ranks"] += 1
        other = SampleResult(drawn.ids.clone(), drawn.values)
        by_kernels.put_ranks(drawn, theirs, kept)
        by_torch.put_ranks(other, theirs, kept)
        assert torch.equal(drawn.ids, other.ids)


def test_whole_steps(monkeypatch):
    """Of the mixes of ``test_sharded_requests``: poisoned rows, shards of nothing, several draws; with small tiles
    here."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(cutoffs, "TILE", 64)
        monkeypatch.setattr(cutoffs, "CHUNK", 8)
    both, steps, seed = Both(), 0, 0
    monkeypatch.setitem(BACKENDS["triton"].__dict__, "shard_parts", both)
    while steps < STEPS:
        seed += 1
        mix = Mix(seed + 6 * 10**7, ranks=True)
        step = mix.of_a_head(mix.make())
        if step.params is DEFAULT_PARAMS or not step.params.names() or BACKENDS["triton"].unsupported(step) is not None:
            continue
        ours, _ = run(step, cut(mix, step.vocab_size), "triton", room=mix.random.choice((300, 4096)))
        assert not differences(ours, ops.sample(step, "reference"), step, 2e-6), seed
        steps += 1
    assert min(both.calls.values()) > STEPS // 4, both.calls


LOGPROBS = SamplingParams(logprobs=True, top_logprobs=3, logsumexp=True)


def kept_of(logits: Tensor, params: SamplingParams, num_samples: int) -> Any:
    """A shard of all tokens from 100 on."""
    batch = len(logits)
    local = SampleInputs(
        logits, logits, 1.0, 0, 0, num_samples, logits.shape[1], SimpleNamespace(first_token=100), params
    )
    scale = FixedPointScale(logits.amax(dim=1), torch.ones(batch, device=DEVICE), 1 << 40)
    undefined = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    defined = torch.ones(batch, dtype=torch.bool, device=DEVICE)
    return Kept(local, _Logits(logits, logits), None, undefined, scale, undefined, defined)


@pytest.mark.parametrize("num_samples", [1, 32, 33, 70])
@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_words_of_many_draws_and_ranks(num_samples, ranks):
    """Equal winners on several ranks, none on some, in all places of a program's turns."""
    torch.manual_seed(num_samples)
    logits = torch.randn(4, 500, device=DEVICE)
    kept = kept_of(logits, LOGPROBS, num_samples)
    winners = torch.randint(0, 500, (4, num_samples), device=DEVICE)
    keys = (torch.randint(1, 5, winners.shape, device=DEVICE) << 31) | (winners + 100) ^ (2**31 - 1)
    words = Both().words(kept, keys, torch.ones(4, 1, dtype=torch.int64, device=DEVICE))
    theirs = words.expand(ranks, -1, -1).clone()
    theirs[torch.rand(theirs.shape[:2], device=DEVICE) < 0.3, :num_samples] = NO_FINITE
    theirs[:, :, -3:] -= 1000 * torch.arange(ranks, device=DEVICE)[:, None, None]  # no token is on two ranks
    Both().conclude(theirs, kept)


HARD = [[-INF], [INF], [3e38], [-3e38], [0.0], [INF, math.nan], [INF] + 69 * [0.0], [math.nan] + 69 * [1.0]]


@pytest.mark.parametrize("row", [row * (70 // len(row)) for row in HARD])
def test_sums_of_rows_that_are_hard(row, monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(cutoffs, "TILE", 32)
        monkeypatch.setattr(cutoffs, "CHUNK", 8)
    logits = torch.tensor([row, list(reversed(row))], device=DEVICE)
    keys = torch.full((2, 1), (5 << 31) | 100 ^ (2**31 - 1), device=DEVICE)
    Both().words(kept_of(logits, LOGPROBS, 1), keys, torch.ones(2, 1, dtype=torch.int64, device=DEVICE))


def test_first_of_many_rows():
    """More rows than a program has; NaN, nothing finite, a top-p that is none."""
    theirs = torch.randint(0, 2**62, (3, 300, 2), device=DEVICE)
    theirs[..., 1] = torch.randint(0, 2, (3, 300), device=DEVICE) * torch.randint(0, 2, (300,), device=DEVICE)
    theirs[1, ::7, 0] = NAN_KEY
    for top_p in (1.0, 0.5, torch.rand(300, device=DEVICE).masked_fill(torch.rand(300, device=DEVICE) < 0.1, math.nan)):
        for min_p in (0.0, torch.rand(600, device=DEVICE)[::2]):
            Both().first(theirs, SamplingParams(top_p=top_p, min_p=min_p))


V = 640_010
REQUESTS: dict[str, SamplingParams] = {
    "top_p": SamplingParams(top_p=torch.rand(5)),
    "int32, zeros": SamplingParams(top_k=torch.arange(5, dtype=torch.int32), min_p=torch.tensor([0.0, -0.0, 1, -1, 2])),
    "int64": SamplingParams(top_k=torch.randint(-(2**63), 2**63 - 1, (5,))),
    "numbers": SamplingParams(top_k=7, top_p=0.5, presence_penalty=-0.5),
    "strides": SamplingParams(top_p=torch.rand(10)[::2], logprob_ids=torch.randint(-1, V, (3, 5)).T, logprobs=True),
    "mask": SamplingParams(token_mask=torch.randint(-(2**31), 2**31 - 1, (5, 20_001), dtype=torch.int32)),
    "biases": SamplingParams(bias_ids=torch.randint(-1, V, (5, 9), dtype=torch.int32), bias_values=torch.randn(5, 9)),
    "a bias of all": SamplingParams(dense_bias=torch.randn(V)),
    "counts": SamplingParams(counts=torch.ones(5, 8, dtype=torch.int32), repetition_penalty=torch.rand(5)),
}


def hash_of(params: SamplingParams, by: Any, draft_hash: Tensor | None = None) -> int:
    moved = {name: value.to(DEVICE) for name, value in params._asdict().items() if isinstance(value, Tensor)}
    step = SampleInputs(
        torch.zeros(5, 8, device=DEVICE),
        torch.zeros(1, 8, device=DEVICE),
        1.0,
        0,
        0,
        1,
        V,
        params=params._replace(**moved),
    )
    return int(by(Hashes(8, DEVICE), step._replace(draft_hash=draft_hash)))


@pytest.mark.parametrize("name", REQUESTS)
def test_hashes(name):
    params = REQUESTS[name]
    ours = hash_of(params, param_hash.of_request)
    assert ours == hash_of(params, Hashes.of_request)
    for field, value in params._asdict().items():  # every element counts
        if isinstance(value, Tensor) and field != "counts":
            other = value.clone(memory_format=torch.contiguous_format)
            other.view(-1)[-1] += 1
            assert hash_of(params._replace(**{field: other}), param_hash.of_request) != ours


@pytest.mark.parametrize("by", [param_hash.of_request, Hashes.of_request])
def test_a_hash_is_of_the_numbers_whatever_their_dtype(by):
    values = [-1, 0, 20, 2**31 - 1, -(2**31)]
    wide, narrow = (
        hash_of(SamplingParams(top_k=torch.tensor(values, dtype=dtype)), by) for dtype in (torch.int64, torch.int32)
    )
    assert wide == narrow
    assert hash_of(SamplingParams(top_k=torch.tensor([2**32 - 1, *values[1:]])), by) != wide


def test_hashes_of_drafts_to_be_matched():
    """Which come hashed."""
    found = set()
    for value in (0, 1, -(2**63), 2**63 - 1):
        draft_hash = torch.tensor(value, device=DEVICE)
        ours = hash_of(REQUESTS["top_p"], param_hash.of_request, draft_hash)
        assert ours == hash_of(REQUESTS["top_p"], Hashes.of_request, draft_hash)
        found.add(ours)
    assert len(found) == 4
