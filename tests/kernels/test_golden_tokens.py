"""Tokens that must never change: 24 random mixes of sampling parameters, frozen in ``golden_tokens.json``.

Every logit is exact in fp32 whatever the order of its sum: hidden states are integers from -2 to 2, weights multiples
of 1/16 of at
most 1. So every backend draws these tokens, on every machine. After an intended change: ``python -m
tests.kernels.test_golden_tokens``.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import flashsampling
from tests.conftest import DEVICE
from tests.problems import KERNELS

FILE = Path(__file__).with_name("golden_tokens.json")
BATCH, VOCAB, DIM, MIXES = 5, 517, 64, 24


def mix(number: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Hidden states, a weight and keyword arguments of ``sample``."""
    choose, make = random.Random(number), torch.Generator().manual_seed(number)
    hidden_states = torch.randint(-2, 3, (BATCH, DIM), generator=make).bfloat16()
    weight = (torch.randint(-16, 17, (VOCAB, DIM), generator=make) / 16).bfloat16()

    def rows(low: float, high: float) -> Any:
        """One number, or one per row."""
        values = [round(choose.uniform(low, high), 3) for _ in range(BATCH)]
        return values[0] if choose.random() < 0.4 else torch.tensor(values, device=DEVICE)

    def sometimes() -> bool:
        return choose.random() < 0.35

    call: dict[str, Any] = {
        "seed": torch.tensor([choose.getrandbits(63) for _ in range(BATCH)], device=DEVICE),
        "offset": choose.randrange(2**40),
        "temperature": rows(0.5, 4.0),
    }
    if sometimes():
        call["logit_scale"] = 0.5
    if sometimes():
        call["soft_cap"] = 20.0
    if sometimes():
        call["bias"] = (torch.randint(-8, 9, (VOCAB,), generator=make) / 8).to(DEVICE)
    if sometimes():
        ids = torch.randint(0, VOCAB, (BATCH, 3), generator=make).to(DEVICE)
        call["logit_bias"] = ids, torch.tensor([[4.0, -100.0, 1.5]] * BATCH, device=DEVICE)
    if sometimes():
        counts = torch.where(torch.rand(BATCH, VOCAB, generator=make) < 0.1, 2, 0).int()
        call |= {"token_counts": counts.to(DEVICE), "presence_penalty": rows(-1, 1), "frequency_penalty": rows(-1, 1)}
        call["repetition_penalty"] = rows(0.8, 1.5)
    if sometimes():
        call["token_mask"] = torch.randint(-(2**31), 2**31, (BATCH, -(-VOCAB // 32)), generator=make).int().to(DEVICE)
    if sometimes():
        call["top_k"] = choose.choice([40, torch.tensor([1, 5, 0, 100, VOCAB], device=DEVICE)])
    if sometimes():
        call["top_p"] = rows(0.3, 0.99)
        call["joint_top_p"] = choose.random() < 0.3
    if sometimes():
        call["min_p"] = rows(0.01, 0.3)
    if sometimes() and "token_counts" not in call:
        call["num_samples"] = 3
    return hidden_states.to(DEVICE), weight.to(DEVICE), call


def tokens(number: int, impl: str) -> list[Any]:
    hidden_states, weight, call = mix(number)
    return flashsampling.sample(hidden_states, weight, impl=impl, **call).token_ids.tolist()


@pytest.mark.quick(8)
@pytest.mark.parametrize("impl", ["reference", "streaming", *KERNELS])
@pytest.mark.parametrize("number", range(MIXES))
def test_tokens_are_the_frozen_ones(impl: str, number: int) -> None:
    golden = json.loads(FILE.read_text())
    assert len(golden) == MIXES
    assert tokens(number, impl) == golden[number]


if __name__ == "__main__":
    FILE.write_text(json.dumps([tokens(number, "reference") for number in range(MIXES)]) + "\n")
