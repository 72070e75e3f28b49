"""Rows with logits of +inf and masked NaN (contract, sections 5 and 7): every implementation gives the same numbers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flashsampling import ops, sample, verify, verify_from_logits
from flashsampling.inputs import SampleInputs
from flashsampling.outputs import SampleResult
from flashsampling.sampling_params import SamplingParams
from tests.conftest import DEVICE
from tests.kernels.test_filters import TORCH
from tests.mixes import INF, NAN
from tests.problems import KERNELS, NEEDS_CUTE, parts_of, require
from tests.tensor_parallel.test_drafts import REJECT, ranks  # noqa: F401, a fixture
from tests.tensor_parallel.test_filters import run, shared_memory  # noqa: F401, a fixture

TWO = [0.0, 0.0, INF, 0.0, INF, 0.0]
NOTHING = [0.0, 9.0, NAN, 1.0, -INF, -1.0]
# logits; tokens that the mask leaves in; the token that is drawn, None: one of several; its raw and processed
# log-probability and rank; the token with the highest raw logit; log-sum-exp
CASES: dict[str, Any] = {
    "one": ([0.0, INF, 0.0, 0.0, 0.0, 0.0], [0, 1, 2, 3, 4, 5], 1, NAN, 0.0, 1, 1, INF),
    "two": (TWO, [0, 1, 2, 3, 4, 5], 2, NAN, 0.0, 1, 2, INF),
    "the first is masked": (TWO, [0, 1, 3, 4, 5], 4, NAN, 0.0, 1, 2, INF),
    "both are masked": (TWO, [0, 1, 3, 5], None, -INF, math.log(0.25), 3, 2, INF),
    "a masked NaN": (NOTHING, [3, 4], 3, NAN, 0.0, 2, -1, NAN),
    "a masked NaN beside two": ([NAN, *TWO[1:]], [1, 2, 3, 4, 5], 2, NAN, 0.0, 1, -1, NAN),
}
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.5},
}
RANGES = [(3, 6), (0, 3)]  # one +inf of ``TWO`` on each rank


def request(cases: list[str], filtered: str) -> SamplingParams:
    """Of a row per case."""
    bits = [[sum(1 << token for token in CASES[case][1])] for case in cases]
    return SamplingParams(
        logprobs=True, top_logprobs=1, logsumexp=True, token_mask=torch.tensor(bits, dtype=torch.int32, device=DEVICE),
        logprob_ids=torch.arange(6, device=DEVICE).expand(len(cases), 6), **FILTERS[filtered],
    )  # fmt: skip


def check(drawn: SampleResult, step: SampleInputs, row: int, case: str, filtered: str) -> None:
    logits, allowed, token, raw, processed, rank, highest, logsumexp = CASES[case]
    own = {name: values[row].flatten().tolist() for name, values in parts_of(drawn, step).items()}
    if token is None:
        assert own["token_ids"][0] in allowed, case
        token = own["token_ids"][0]
        processed = math.log(0.5) if filtered == "top_k" else math.log(1 / 3) if filtered == "top_p" else processed
    assert (own["token_ids"], own["ranks"], own["top_token_ids"]) == ([token], [rank], [highest]), (case, own)
    given = [NAN if math.isnan(logsumexp) or x == INF else x - logsumexp for x in logits]
    ours = [*own["logprobs"], *own["processed_logprobs"], *own["logsumexp"], *own["given_logprobs"]]
    assert ours == pytest.approx([raw, processed, logsumexp, *given], rel=1e-5, abs=1e-8, nan_ok=True), (case, own)


@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("impl", ["streaming", "triton"])
def test_log_probabilities_and_ranks(impl, filtered):
    """Greedy and other rows in one step."""
    rows = [case for case in CASES for _ in range(2)]
    logits = torch.tensor([CASES[case][0] for case in rows], device=DEVICE)
    temperature = torch.tensor([0.0, 1.0] * len(CASES), device=DEVICE)
    seed, params = torch.arange(len(rows), device=DEVICE), request(rows, filtered)
    step = SampleInputs(logits, logits, temperature, seed, 0, 1, 6, params=params, logits=logits)
    drawn = ops.sample(step, require(impl))
    for row, case in enumerate(rows):
        check(drawn, step, row, case, filtered)


@pytest.mark.quick(10)
@pytest.mark.parametrize(
    ("impl", "is_cut", "filtered"),
    [("triton", True, "none"), pytest.param("cute", False, "top_p", marks=NEEDS_CUTE)],
)
@pytest.mark.parametrize("case", CASES)
def test_the_same_of_a_head(case, impl, is_cut, filtered):
    """Over two ranks, and by the Hopper kernel."""
    dtype = torch.bfloat16 if impl == "cute" else torch.float32
    weight, states = torch.tensor(CASES[case][0])[:, None].expand(6, 8) / 8, torch.ones(2, 8)
    temperature, params = torch.tensor([0.0, 1.0], device=DEVICE), request([case] * 2, filtered)
    step = SampleInputs(states.to(DEVICE, dtype), weight.to(DEVICE, dtype), temperature, 7, 0, 1, 6, params=params)
    drawn = run(step, RANGES, require(impl))[0] if is_cut else ops.sample(step, require(impl))
    for row in range(2):
        check(drawn, step, row, case, filtered)


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("place", [*TORCH, "ranks", "triton"])
def test_rejection_accepts_what_sample_draws(place, filtered, certain, monkeypatch, ranks):  # noqa: F811
    """p is 1 at the first +inf: that draft is always accepted, and takes the place of any other."""
    if place == "triton" and filtered in ("top_p", "min_p") and DEVICE.type == "cpu":
        pytest.skip("minutes in the interpreter, and the record that it reads is the same")
    times = 1 if place == "triton" and DEVICE.type == "cpu" else 10
    drafts = torch.tensor([[2], [4], [0], [5]]).repeat(times, 1)
    states, weight = torch.ones(4 * times, 2, 1), torch.tensor(TWO)[:, None]
    temperature = torch.tensor([0.7, 0.7, 0.7, 0.0] * times)
    options: dict[str, Any] = {
        "seed": torch.arange(4 * times),
        "temperature": temperature,
        **FILTERS[filtered],
        **REJECT,
    }
    options["draft_probs"] = None if certain else torch.full((4 * times, 1, 6), 1 / 6)
    if place == "ranks":
        out = verify(states, weight, drafts, tp=ranks(weight, RANGES), **options)
    elif place == "triton":
        monkeypatch.setattr("flashsampling.speculative.acceptance._runs_kernels", lambda states, given: True)
        options = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
        logits = torch.tensor(TWO, device=DEVICE).expand(4 * times, 2, 6)
        out = verify_from_logits(logits, drafts.to(DEVICE), impl=require(place), **options)
    else:
        out = verify(states, weight, drafts, impl=place, **options)
    assert out.num_accepted.tolist() == [1, 0, 0, 0] * times
    assert out.token_ids.tolist() == [[2, 2], [2, -1], [2, -1], [2, -1]] * times


@pytest.mark.parametrize("impl", [*KERNELS, "streaming", "reference"])
def test_entries_of_one_id_are_added_in_order(impl):
    """(1 + 2**30) - 2**30 is 0 in float32: the token loses to those of 0.5."""
    weight = torch.tensor([[0.5], [1.0], [0.25]]).repeat(1, 8).to(DEVICE, torch.bfloat16) / 8
    hidden_states = torch.ones(2, 8, device=DEVICE, dtype=torch.bfloat16)
    ids, values = torch.tensor([[1, 1], [1, -1]]), torch.tensor([[2.0**30, -(2.0**30)], [2.0, 0.0]])
    entries = ids.to(DEVICE), values.to(DEVICE)
    drawn = sample(hidden_states, weight, temperature=0.0, logit_bias=entries, impl=impl)
    assert drawn.token_ids.tolist() == [0, 1]
