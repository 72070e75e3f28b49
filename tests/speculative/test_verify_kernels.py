"""Rejection by kernels, of the Hopper kernel's logits, of Triton's and of given ones, beside torch's operations in
float64, which ``tests/speculative/test_verify.py`` holds against the contract written out."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flashsampling import VerifyOutput
from flashsampling.inputs import SampleInputs
from flashsampling.kernels import hopper
from flashsampling.kernels.hopper import dispatch as of_cute
from flashsampling.outputs import FilteredLogits
from flashsampling.reference import oracle
from flashsampling.sampling_params import DEFAULT_PARAMS, FILTER_FIELDS
from flashsampling.speculative import acceptance
from tests.conftest import DEVICE
from tests.kernels.triton.test_filtered_kernel import block_stats_of
from tests.problems import KERNELS, NEEDS_CUTE
from tests.speculative.drafting import DraftChains, make_drafted, sure_of
from tests.speculative.test_verify import differences

CUDA = DEVICE.type == "cuda"
KINDS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {  # seed, n, V, what is asked for; each is kernels of its own
    "plain": (2, 4, 33, ()),
    "few tokens": (0, 3, 2, ("top_p",)),
    "top-k": (1, 4, 33, ("top_k",)),  # drafts that are certain
    "top-p, min-p": (0, 3, 389, ("top_p", "min_p")),
    "filters": (0, 2, 1001, ("top_k", "top_p", "min_p")),
    "all filters": (0, 2, 389, ("top_k", "top_p", "min_p", "epsilon_cutoff", "top_n_sigma")),
    "masks": (0, 4, 33, ("token_mask", "dense_bias", "top_p")),
    "penalties": (0, 4, 70, ("counts", "top_k")),
    "head": (0, 3, 33, ("bias", "logit_scale", "soft_cap", "min_p")),
    "biases": (0, 3, 389, ("bias_ids",)),
    "everything": (
        *(4, 4, 33),
        ("bias", "logit_scale", "soft_cap", "bias_ids", "counts", "token_mask", "top_k", "top_p", "min_p"),
    ),
}
IMPLS = {"logits": "triton", "triton": "triton", "cute": "cute"}


def of(out: VerifyOutput, rows: Tensor) -> VerifyOutput:
    return VerifyOutput(*(None if part is None else part[rows] for part in vars(out).values()))


def sources(drafted: DraftChains) -> dict[str, DraftChains]:
    """Who makes the logits, all the same bits: products of small multiples of 1/4, which bfloat16 holds."""
    assert drafted.weight is not None
    logits = replace(drafted, states=drafted.states @ drafted.weight.T, weight=None)
    narrow = replace(drafted, states=drafted.states.bfloat16(), weight=drafted.weight.bfloat16())
    return {"logits": logits, "triton": drafted} | ({"cute": narrow} if "cute" in KERNELS else {})


def check(kind: str, requests: int, seed: int | None = None) -> None:
    """Of a kind, by everyone."""
    own_seed, *of_each, wanted = KINDS[kind]
    seed, sizes = own_seed if seed is None else seed, (requests, *of_each)
    drafted = make_drafted(seed, "rejection", head=True, sizes=sizes, wanted=wanted, device=DEVICE)
    assert set(wanted) - {*FILTER_FIELDS} <= {
        *drafted.step.params.names(),
        *(() if drafted.masks is None else ("token_mask",)),
    }
    expected = drafted.verify("rejection", device=DEVICE, impl="reference")
    sure = sure_of(drafted, expected)
    for source, of_source in sources(drafted).items():
        for flat in (False, True):
            ours = of_source.verify("rejection", flat=flat, device=DEVICE, impl=IMPLS[source])
            assert not differences(of(ours, sure), of(expected, sure)), (source, flat, _first(ours, expected, sure))
    assert sure.float().mean() > 0.8
    assert set(range(drafted.ids.shape[1])) <= set(
        expected.num_accepted[sure].tolist()
    )  # outcomes of all kinds are there
    failed = int((expected.num_emitted == expected.num_accepted)[sure].sum())
    assert failed > 0 or kind not in ("plain", "masks", "everything")


def _first(ours: VerifyOutput, expected: VerifyOutput, sure: Tensor) -> Any:
    rows = ((ours.token_ids != expected.token_ids).any(dim=1) & sure).nonzero()[:, 0]
    return [(int(row), ours.token_ids[row].tolist(), expected.token_ids[row].tolist()) for row in rows[:3]], len(rows)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_requests(kind):
    """A thousand of each kind, in a few launches: what takes the time is to compile its kernels."""
    check(kind, 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "everything"])
def test_some_kinds(kind):
    check(kind, 200, seed=1)


@pytest.mark.gpu
@NEEDS_CUTE
def test_nobody_named_is_the_hopper_kernel(monkeypatch):
    """Its logits, and the same tokens; not where a compiler looks, nor of float32."""
    seen = []

    def recorded(step: SampleInputs) -> FilteredLogits:
        seen.append(step)
        return of_cute.recorded(step)

    monkeypatch.setattr(hopper, "recorded", recorded)
    drafted = make_drafted(1, "rejection", head=True, sizes=(40, 3, 33), wanted=("top_k",))
    by_name = sources(drafted)["cute"].verify("rejection", device=DEVICE, impl="cute")
    assert len(seen) == 1
    assert not differences(sources(drafted)["cute"].verify("rejection", device=DEVICE), by_name)
    assert len(seen) == 2
    assert not differences(drafted.verify("rejection", device=DEVICE), by_name)
    assert len(seen) == 2


def as_the_hopper_kernel(
    step: SampleInputs, draws: int, masses: tuple[bool, bool] | None, config: None = None
) -> tuple[Tensor, tuple[Tensor | None, ...], Tensor]:
    """``params.with_logits``, in torch."""
    product = oracle.head_logits(step)
    logits = torch.nn.functional.pad(product, (0, -step.vocab_size % 4))[:, : step.vocab_size]
    if not draws:
        assert masses is None
        return logits, (None, None, None), product.new_empty(0)
    of_blocks = block_stats_of(step._replace(hidden_states=product, weight=product, logits=product))
    wanted = [part if is_wanted else None for part, is_wanted in zip(of_blocks[1:], masses or (False, False))]
    return logits, (of_blocks.keys, *wanted), oracle.run(step._replace(params=DEFAULT_PARAMS)).ids


@pytest.mark.quick(1)
@pytest.mark.skipif(CUDA, reason="it is played, for where it is not")
@pytest.mark.parametrize("kind", ["plain", "top-p, min-p", "masks"])
def test_behind_the_hopper_kernel(kind, monkeypatch):
    """The launches after it, by requests of which it draws, and by those of which it makes logits alone."""
    monkeypatch.setattr(of_cute, "run_with_logits", as_the_hopper_kernel)
    monkeypatch.setattr(acceptance, "_recording_backend", lambda *_: SimpleNamespace(recorded=of_cute.recorded))
    *_, wanted = KINDS[kind]
    drafted = make_drafted(3, "rejection", head=True, sizes=(3, 2, 33), wanted=wanted)
    with monkeypatch.context() as patch:
        patch.setattr(acceptance, "_recording_backend", lambda *_: None)
        expected = drafted.verify("rejection", impl="reference")
    sure = sure_of(drafted, expected)
    assert sure.sum() >= 2
    below = (
        drafted.probs if drafted.probs is None else torch.where(drafted.probs == 0, -9.0, drafted.probs)
    )  # which is as 0
    ours = replace(drafted, probs=below).verify("rejection", device=DEVICE)
    assert not differences(of(ours, sure), of(expected, sure)), _first(ours, expected, sure)
