"""Draws with each filter, penalty, bias and mask follow the distribution that section 5 of the contract gives them,
written out here once more: G-tests of the power that ``tests/kernels/test_distribution.py`` asserts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashsampling import sample_from_logits
from tests.conftest import DEVICE
from tests.kernels.test_distribution import assert_distribution

VOCAB, ROWS, DRAWS = 96, 64, 400
TEMPERATURE = 0.8
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 2


def softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits.double() / TEMPERATURE, 0)


def only(kept: Tensor, logits: Tensor = LOGITS) -> Tensor:
    p = torch.zeros(VOCAB, dtype=torch.float64)
    p[kept] = softmax(logits)[kept]
    return p / p.sum()


def nucleus(p: float, among: Tensor | None = None) -> Tensor:
    order = LOGITS.argsort(descending=True) if among is None else among
    masses = softmax(LOGITS)[order]
    masses = masses / masses.sum()
    return order[: 1 + int((masses.cumsum(0) < p).sum())]


def penalised(logits: Tensor) -> Tensor:
    out = logits.clone()
    out[:8] = torch.where(out[:8] > 0, out[:8] / 1.5, out[:8] * 1.5)
    out[4:8] -= 0.3 * 2 + 0.5
    return out


TOP = LOGITS.argsort(descending=True)
IN_SIGMA = torch.nonzero(LOGITS.max() - LOGITS <= 1.75 * LOGITS.std(correction=0))[:, 0]
BIAS = torch.linspace(-1.5, 1.5, VOCAB)
COUNTS = torch.zeros(VOCAB, dtype=torch.int32)
COUNTS[:4], COUNTS[4:8] = -(2**31), 2
BITS = torch.tensor([0x0F0F0F0F, -1, 0x7FFF0000], dtype=torch.int32)
ALLOWED = torch.tensor([token for token in range(VOCAB) if int(BITS[token // 32]) >> token % 32 & 1])
SPARSE = (torch.tensor([int(TOP[0]), int(TOP[20])]), torch.tensor([-3.0, 4.0]))
SPARSELY = LOGITS.index_add(0, *SPARSE)

CASES: dict[str, tuple[dict[str, Any], Tensor]] = {
    "top_k": ({"top_k": 7}, only(TOP[:7])),
    "top_p": ({"top_p": 0.9}, only(nucleus(0.9))),
    "min_p": ({"min_p": 0.1}, only((softmax(LOGITS) >= 0.1 * softmax(LOGITS).max()).nonzero()[:, 0])),
    "top_k and top_p": ({"top_k": 20, "top_p": 0.95}, only(nucleus(0.95, TOP[:20]))),
    "joint top_p": ({"top_k": 20, "top_p": 0.7, "joint_top_p": True}, only(nucleus(0.7)[:20])),
    "joint top_k": ({"top_k": 5, "top_p": 0.99, "joint_top_p": [True]}, only(TOP[:5])),
    "epsilon": ({"epsilon_cutoff": 0.0178}, only(torch.nonzero(softmax(LOGITS) >= 0.0178)[:, 0])),
    "epsilon of a nucleus": (
        {"top_p": 0.9, "epsilon_cutoff": 0.0145},
        only(torch.nonzero(only(nucleus(0.9)) >= 0.0145)[:, 0]),
    ),
    "top-n-sigma": ({"top_n_sigma": 1.75}, only(IN_SIGMA)),
    "nucleus of top-n-sigma": ({"top_n_sigma": 1.75, "top_p": 0.9}, only(nucleus(0.9, TOP[: len(IN_SIGMA)]))),
    "mask": ({"token_mask": BITS}, only(ALLOWED)),
    "dense bias": ({"logit_bias": BIAS}, softmax(LOGITS + BIAS)),
    "sparse bias": ({"logit_bias": SPARSE}, softmax(SPARSELY)),
    "penalties": (
        {"token_counts": COUNTS, "repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.5},
        softmax(penalised(LOGITS)),
    ),
    "head": ({"bias": BIAS, "logit_scale": 1.5, "soft_cap": 3.0}, softmax(3 * torch.tanh(1.5 * (LOGITS + BIAS) / 3))),
    "nothing kept out": ({"top_k": VOCAB - 1, "top_p": 1 - 1e-6, "min_p": 1e-9}, softmax(LOGITS)),
}


@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_what_was_asked_for(case, impl):
    """A distribution 0.075 away is caught with a probability of 0.999; with the next best filter it is further away."""
    request, probabilities = CASES[case]
    if "token_counts" in request:
        request = request | {"token_counts": request["token_counts"].expand(ROWS, -1).to(DEVICE)}
    request = {
        name: tuple(part.to(DEVICE) for part in value) if isinstance(value, tuple)
        else value.to(DEVICE) if isinstance(value, Tensor) else value
        for name, value in request.items()
    }  # fmt: skip
    out = sample_from_logits(
        LOGITS.to(DEVICE).expand(ROWS, -1), temperature=TEMPERATURE, seed=torch.arange(ROWS, device=DEVICE),
        num_samples=DRAWS, impl=impl, **request,
    )  # fmt: skip
    counts = torch.bincount(out.token_ids.flatten(), minlength=VOCAB).cpu()
    assert not counts[probabilities == 0].any()
    some = probabilities > 0
    assert_distribution(counts[some], probabilities[some], distance=0.075)


@pytest.mark.parametrize("case", CASES)
def test_the_test_would_notice(case):
    """What is expected of each case is further from that of every other than the distance that is caught."""
    probabilities = CASES[case][1]
    for other, (_, theirs) in CASES.items():
        if other != case:
            some = probabilities > 0
            outside = theirs[~some].sum()
            distance = ((theirs - probabilities)[some] ** 2 / probabilities[some]).sum().sqrt()
            assert outside > 0.001 or distance > 0.075, other
