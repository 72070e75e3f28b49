"""The launch that makes products and sums them up too: the bits of the two launches that it replaces."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flashsampling.impl.triton import logits, products_scan, steps
from flashsampling.impl.triton.config import TileConfig
from flashsampling.impl.triton.logits_pick import pick_kernel
from flashsampling.impl.triton.products import products
from flashsampling.step import Asked, Drawn, Step, layout
from tests.conftest import DEVICE
from tests.test_triton_logits import SMALL, agrees

CUDA = DEVICE.type == "cuda"
TILES = [
    None,
    TileConfig(128, 32, 32, 4, 2, 1, False),
    TileConfig(128, 16, 32, 4, 2, 1, False, rest_b=16),
    TileConfig(256, 64, 32, 8, 2, 1, False, chunk_b=32),
    TileConfig(128, 64, 32, 8, 2, 1, False, chunk_b=32, rest_b=32),
]
INF, NAN = float("inf"), float("nan")


def _step(batch: int, vocab: int, asked: Asked, num_samples: int = 1) -> Step:
    """Products that are exact in every order of summation; rows beyond the vocabulary are NaN; some rows are greedy."""
    states = torch.randint(-3, 4, (batch, 40), device=DEVICE).bfloat16() / 8
    weight = torch.randint(-3, 4, (vocab + 5, 40), device=DEVICE).bfloat16()
    weight[vocab:] = NAN
    seed, offset = (torch.randint(-(2**63), 2**63 - 1, (batch,), device=DEVICE) for _ in range(2))
    temperature = torch.rand(batch, device=DEVICE) * 1.6
    return Step(states, weight, temperature.masked_fill(temperature < 0.2, 0.0), seed, offset, num_samples, vocab, asked=asked)


def _asked(name: str, batch: int, vocab: int) -> Asked:
    mask = torch.randint(-(2**31), 2**31 - 1, (batch, -(-vocab // 32)), dtype=torch.int32, device=DEVICE)
    counts = torch.randint(-2, 3, (batch, vocab), dtype=torch.int32, device=DEVICE).clamp(min=0)
    counts |= (torch.rand(batch, vocab, device=DEVICE) < 0.1).int() << 31
    of = {
        "numbers": Asked(top_k=7, top_p=0.9),
        "top_k": Asked(top_k=torch.randint(-1, 9, (batch,), device=DEVICE)),
        "narrow": Asked(top_k=torch.randint(-1, 9, (batch,), dtype=torch.int32, device=DEVICE), min_p=0.01),
        "top_p": Asked(top_p=torch.rand(batch, device=DEVICE) * 1.5),
        "min_p": Asked(min_p=torch.rand(batch, device=DEVICE) - 0.5),
        "bias": Asked(bias=torch.randn(vocab, device=DEVICE)),
        "dense_bias": Asked(dense_bias=torch.randn(vocab, device=DEVICE), top_p=0.8),
        "head": Asked(logit_scale=0.5, soft_cap=3.0, logsumexp=True),
        "mask": Asked(token_mask=mask),
        "counts": Asked(counts=counts, repetition_penalty=1.2, presence_penalty=torch.rand(batch, device=DEVICE)),
        "logprobs": Asked(logprobs=True, top_logprobs=3),
    }
    if name != "everything":
        return of[name]
    return Asked(
        bias=of["bias"].bias,
        logit_scale=1.5,
        soft_cap=20.0,
        dense_bias=of["dense_bias"].dense_bias,
        counts=counts,
        repetition_penalty=torch.rand(batch, device=DEVICE) + 0.5,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        token_mask=mask,
        top_k=of["top_k"].top_k,
        top_p=of["top_p"].top_p,
        min_p=of["min_p"].min_p,
        logprobs=True,
        logsumexp=True,
    )


NAMES = [
    "numbers",
    "top_k",
    "narrow",
    "top_p",
    "min_p",
    "bias",
    "dense_bias",
    "head",
    "mask",
    "counts",
    "logprobs",
    "everything",
]


class _Summaries(Exception):
    """Thrown in place of the last launch, with what the first one gave it."""


def _summaries(step: Step, tiles: TileConfig | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What either first launch writes, by the names of the kernels' arguments; where nobody asks, zeros."""

    class Pick:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **_: Any) -> None:
                given = dict(zip(pick_kernel.arg_names, arguments))
                raise _Summaries({name: given[name] for name in (*SUMMARIES, "logits")})

            return launch

    with monkeypatch.context() as patched:
        patched.setattr(logits, "pick_kernel", Pick())
        patched.setattr(torch, "empty", torch.zeros)
        with pytest.raises(_Summaries) as caught:
            logits.run(step, SMALL, tiles)
    return caught.value.args[0]


SUMMARIES = ["keys_ptr", "sums_ptr", "raw_keys_ptr", "raw_sums_ptr", "winners_ptr"]


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor], step: Step) -> None:
    """Bit for bit, where it is read."""
    batch, asked = len(step.hidden_states), step.asked
    assert torch.equal(ours["logits"], theirs["logits"])
    for name in ("raw_keys_ptr", "raw_sums_ptr", "keys_ptr"):
        if ours[name] is not None or theirs[name] is not None:
            assert torch.equal(ours[name], theirs[name]), name

    def of_rows(value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, device=DEVICE).expand(batch)

    top_k, top_p, min_p = map(of_rows, (asked.top_k, asked.top_p, asked.min_p))
    by_top_k, by_top_p = (top_k > 0) & (top_k < step.vocab_size), ~(top_p >= 1)
    filtered = by_top_k | by_top_p | ~(min_p <= 0)
    mass = torch.ones_like(filtered)
    if not asked.logprobs:
        filtered &= step.rows().temperature >= 1e-6
        mass = filtered & by_top_p & ~by_top_k
    if ours["sums_ptr"].numel():
        sums = (found["sums_ptr"].view(batch, -1)[mass] for found in (ours, theirs))
        assert torch.equal(*(part.view(torch.int32) for part in sums))
    winners = (found["winners_ptr"].view(batch, step.num_samples, -1)[~filtered].amax(dim=2) for found in (ours, theirs))
    assert torch.equal(*winners)


@pytest.mark.parametrize(
    ("name", "batch", "vocab", "tiles"),
    [
        *((name, *shape) for name in NAMES for shape in [(3, 300, 0), (37, 257, 2)]),
        ("top_p", 1, 128, 0),
        ("everything", 1, 128, 0),
        ("everything", 130, 500, 4),
    ],
)
def test_summaries_are_the_scan_s(name, batch, vocab, tiles, monkeypatch):
    step = _step(batch, vocab, _asked(name, batch, vocab), num_samples=2 if batch < 10 else 1)
    there = step._replace(logits=products(step.hidden_states, step.weight, vocab))
    _same(_summaries(step, TILES[tiles], monkeypatch), _summaries(there, None, monkeypatch), step)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(("batch", "vocab"), [(5, 1), (20, 385), (67, 640)])
def test_any_tile(tiles, batch, vocab, monkeypatch):
    step = _step(batch, vocab, _asked("everything", batch, vocab))
    there = step._replace(logits=products(step.hidden_states, step.weight, vocab))
    _same(_summaries(step, tiles, monkeypatch), _summaries(there, None, monkeypatch), step)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
def test_special_values(value, monkeypatch):
    """In one row of the states, which leaves the others as they are."""
    step = _step(4, 300, Asked(top_p=0.9, token_mask=_asked("mask", 4, 300).token_mask, logprobs=True))
    step.hidden_states[2, :3] = value
    there = step._replace(logits=products(step.hidden_states, step.weight, 300))
    ours, theirs = (_summaries(one, None, monkeypatch) for one in (step, there))
    for name in SUMMARIES[:4]:
        assert torch.equal(ours[name].view(torch.int32), theirs[name].view(torch.int32)), name


def _equal(ours: Drawn, theirs: Drawn) -> None:
    assert torch.equal(ours.ids, theirs.ids)
    if ours.values is not None:
        assert theirs.values is not None
        assert torch.equal(ours.values.nan_to_num(7.0), theirs.values.nan_to_num(7.0))


@pytest.mark.parametrize("name", NAMES)
def test_steps(name):
    """Of both ways, and the oracle's."""
    step = _step(3, 300, _asked(name, 3, 300), num_samples=2)
    drawn = logits.run(step, SMALL)
    there = step._replace(logits=products(step.hidden_states, step.weight, 300))
    _equal(drawn, logits.run(there, SMALL))
    agrees(drawn, step)


def test_invariance():
    step = _step(37, 257, _asked("everything", 37, 257))
    whole = layout(37, 1, step.asked).split(steps.run(step), 37)
    some = step.part(30, 33)
    for name, part in layout(3, 1, some.asked).split(steps.run(some), 3).items():
        assert torch.equal(part.nan_to_num(7.0), whole[name][30:33].nan_to_num(7.0)), name


def test_a_sparse_bias_goes_the_other_way():
    ids = torch.zeros(2, 3, dtype=torch.int32)
    assert not products_scan.covers(Asked(bias_ids=ids, bias_values=ids.float()))
    assert products_scan.covers(Asked(bias_ids=ids[:, :0], bias_values=ids[:, :0].float()))
    assert products_scan.covers(_asked("everything", 2, 40))
