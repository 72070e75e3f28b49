"""What is set around a call changes nothing of it: autocast, torch's default dtype, inference mode."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import flashsampling
from tests.conftest import DEVICE

BATCH, VOCAB, DIM = 16, 700, 32


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast bfloat16": lambda: torch.autocast(DEVICE.type, torch.bfloat16),
    "autocast float16": lambda: torch.autocast(DEVICE.type, torch.float16),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default float64": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "draws": {"num_samples": 3},
    "filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "biases": {"logit_bias": ([1, 2, 3], [3.3, 0.1, -2.7]), "soft_cap": 30.0},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "token_counts": True},
    "values": {"return_logprobs": True, "top_logprobs": 3, "logprob_ids": [1, 2], "return_logsumexp": True},
}


def parts_of(out: Any) -> dict[str, torch.Tensor]:
    return {name: part for name, part in vars(out).items() if part is not None}


@pytest.mark.quick(101)
@pytest.mark.parametrize("around", list(SURROUNDINGS))
@pytest.mark.parametrize("request_name", list(REQUESTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["reference", "streaming", None])
def test_sample(impl, dtype, request_name, around):
    states, weight = (torch.randn(rows, DIM, device=DEVICE).to(dtype) for rows in (BATCH, VOCAB))
    request = dict(REQUESTS[request_name])
    if "token_counts" in request:
        request["token_counts"] = torch.randint(0, 3, (BATCH, VOCAB), dtype=torch.int32, device=DEVICE)
    request |= {"seed": torch.arange(BATCH, device=DEVICE), "temperature": 0.8, "impl": impl}

    def draw() -> dict[str, torch.Tensor]:
        return parts_of(flashsampling.sample(states, weight, **request))

    expected = draw()
    with SURROUNDINGS[around]():
        found = draw()
    for name, part in expected.items():
        assert found[name].dtype == part.dtype, name
        assert torch.equal(found[name], part), name


@pytest.mark.parametrize("around", list(SURROUNDINGS))
@pytest.mark.parametrize("method", ["match", "rejection"])
@pytest.mark.parametrize("impl", ["reference", "streaming", None])
def test_verify(impl, method, around):
    states, weight = (torch.randn(*shape, DIM, device=DEVICE).bfloat16() for shape in ((BATCH, 3), (VOCAB,)))
    seeds = torch.arange(BATCH, device=DEVICE)
    drafts = flashsampling.sample(states[:, 0], weight, seed=seeds).token_ids[:, None].expand(-1, 2)
    request: dict[str, Any] = {"seed": seeds, "method": method, "impl": impl}

    def draw() -> dict[str, torch.Tensor]:
        return parts_of(flashsampling.verify(states, weight, drafts, **request))

    expected = draw()
    with SURROUNDINGS[around]():
        found = draw()
    for name, part in expected.items():
        assert torch.equal(found[name], part), name


def test_default_device():
    """Whose lists become tensors: on the device of the state, not on torch's default one."""
    counts, weight = flashsampling.TokenCounts(2, VOCAB, device=DEVICE), torch.zeros(VOCAB, DIM, device=DEVICE)
    sampler = flashsampling.LMHeadSampler(weight, max_batch_size=2, seed=1)
    with torch.device("meta"):
        counts.reset(prompt_token_ids=[[1], [2, 3]])
        sampler.reset(seed=[5], rows=[1])
    assert (counts.counts != 0).sum(1).tolist() == [1, 2]
    assert sampler.seeds[1] == 5
