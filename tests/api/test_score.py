"""``score``: the numbers of given tokens are those that ``sample`` returns, with the gradients of their formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashsampling
from flashsampling import TokenCounts, sample, score
from tests.conftest import DEVICE
from tests.problems import require

NAMES = ("logprobs", "processed_logprobs", "ranks", "logsumexp", "top_token_ids", "top_logprobs")
VOCAB = 300


def make(rows: int, vocab: int = VOCAB, dtype: torch.dtype = torch.float32, dim: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    states, weight = 2 * torch.randn(rows, dim, device=DEVICE), torch.randn(vocab, dim, device=DEVICE)
    return states.to(dtype), weight.to(dtype)


def mixes(rows: int) -> list[dict[str, Any]]:
    """Sampling parameters, for all rows and per row."""
    index = torch.arange(rows, device=DEVICE)
    counts = TokenCounts(rows, VOCAB, DEVICE)
    counts.reset(prompt_token_ids=[[row % VOCAB, 5] for row in range(rows)])
    mask = torch.full((rows, -(-VOCAB // 32)), 0x1F5A5A5A, dtype=torch.int32, device=DEVICE)
    return [
        {},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
        {"top_p": (index % 5).float() / 4, "top_k": index % 7, "epsilon_cutoff": 0.01},
        {"top_n_sigma": 1.0, "soft_cap": 5.0, "logit_scale": 0.5},
        {"token_mask": mask, "logit_bias": (index[:, None] % VOCAB, torch.ones(rows, 1, device=DEVICE)), "top_p": 0.9},
        {"token_counts": counts.read(rows), "repetition_penalty": 1.3, "presence_penalty": 0.5, "top_k": 20},
    ]


@pytest.mark.quick(3)
@pytest.mark.parametrize("mix", range(6))
@pytest.mark.parametrize("impl", [None, "reference", "triton", "cute"])
def test_numbers_of_drawn_tokens_are_those_of_sample(impl, mix):
    """Bit for bit, alone and among other rows."""
    if impl == "cute" and DEVICE.type == "cpu":
        pytest.skip("needs a CUDA device")
    rows = 9 if require(impl or "streaming") == "triton" and DEVICE.type == "cpu" else 37
    states, weight = make(rows, dtype=torch.bfloat16)
    temperature = torch.tensor([0.0, 0.5, 1.0, 3.0], device=DEVICE)[torch.arange(rows, device=DEVICE) % 4]
    options: dict[str, Any] = {"temperature": temperature, "top_logprobs": 3, "impl": impl, **mixes(rows)[mix]}
    seeds = torch.arange(rows, device=DEVICE)
    drawn = sample(states, weight, seed=seeds, return_logprobs=True, return_logsumexp=True, **options)
    options["return_ranks"] = True
    scored = score(states, weight, drawn.token_ids, **options)
    for name in NAMES:
        assert torch.equal(getattr(scored, name), getattr(drawn, name)), name
    if not mix:
        alone = score(states[:1], weight, drawn.token_ids[:1], **{**options, "temperature": temperature[:1]})
        for name in NAMES:
            assert torch.equal(getattr(alone, name), getattr(drawn, name)[:1]), name


@pytest.mark.quick(1)
@pytest.mark.parametrize("mix", range(6))
@pytest.mark.parametrize("impl", [None, "triton", "cute"])
def test_numbers_of_any_token_are_the_oracle_s(impl, mix):
    """-inf for tokens that filters exclude; NaN and -1 for ids that are none."""
    if impl == "cute" and DEVICE.type == "cpu":
        pytest.skip("needs a CUDA device")
    rows = 6 if require(impl or "streaming") == "triton" and DEVICE.type == "cpu" else 40
    states, weight = make(rows)
    states, weight = (states.bfloat16(), weight.bfloat16()) if impl == "cute" else (states, weight)
    best = (states.float() @ weight.float().T).topk(6).indices
    ids = torch.cat([best, torch.tensor([[-1, VOCAB, 2**31 + 3, 7]], device=DEVICE).expand(rows, -1)], dim=1)
    options = {"temperature": 0.7, "return_ranks": True, **mixes(rows)[mix]}
    scored, expected = (
        score(states, weight, ids, impl=impl, **options),
        score(states, weight, ids, impl="reference", **options),
    )
    assert scored.logprobs.shape == ids.shape
    assert scored.logprobs[:, 6:9].isnan().all()
    assert scored.ranks is not None
    assert (scored.ranks[:, 6:9] == -1).all()
    torch.testing.assert_close(scored.logprobs, expected.logprobs, atol=2e-5, rtol=2e-5, equal_nan=True)
    differs = scored.processed_logprobs.isneginf() != expected.processed_logprobs.isneginf()
    assert differs.sum() <= 1  # a token at a filter's edge
    found, wanted = (out.processed_logprobs.masked_fill(differs, 0.0) for out in (scored, expected))
    torch.testing.assert_close(found, wanted, atol=3e-5, rtol=3e-5, equal_nan=True)
    assert bool(expected.processed_logprobs.isneginf().any()) == (mix in (1, 2, 3, 4, 5)) or mix == 3


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257, 600])
def test_any_number_of_rows(rows):
    states, weight = make(max(rows, 1))
    ids = torch.randint(0, VOCAB, (rows,), device=DEVICE)
    options = {"top_k": torch.arange(rows, device=DEVICE) % 9, "return_entropy": True, "return_ranks": True}
    out = score(states[:rows], weight, ids.int(), **options)
    assert [getattr(out, name).shape for name in NAMES[:4]] == [(rows,)] * 4
    logprobs = (states[:rows].double() @ weight.T.double()).log_softmax(1)
    expected = logprobs.gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(out.logprobs, expected.float(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(out.entropy, -(logprobs.exp() * logprobs).sum(1).float(), atol=2e-5, rtol=2e-5)
    assert not out.processed_logprobs.isnan().any()


def by_float64(states: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, options: dict[str, float]) -> list[Tensor]:
    """Log-probabilities (0 for no token), log-sum-exp and entropy."""
    logits = (states @ weight.T + bias) * options.get("logit_scale", 1.0)
    if "soft_cap" in options:
        logits = options["soft_cap"] * torch.tanh(logits / options["soft_cap"])
    logprobs = logits.log_softmax(1)
    there = (ids >= 0) & (ids < weight.shape[0])
    of_ids = torch.where(there, logprobs.gather(1, torch.where(there, ids, 0)), 0.0)
    return [of_ids, logits.logsumexp(1), -(logprobs.exp() * logprobs).sum(1)]


def weighted(numbers: list[Tensor], weights: list[Tensor]) -> Tensor:
    return torch.stack([(x * weight).sum() for x, weight in zip(numbers, weights)]).sum()


@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.5, "soft_cap": 3.0}])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_gradients_are_those_of_float64(dtype, error, options):
    """Of some rows, behind filters, which change no raw number; a vocabulary of several parts."""
    states, weight = make(19, 20_000, dtype)
    bias = torch.randn(20_000, device=DEVICE)
    ids = torch.randint(-1, 20_002, (19, 3), device=DEVICE)
    upstream = [torch.randn(shape, device=DEVICE) for shape in ((19, 3), (19,), (19,))]
    for each in upstream:
        each[::3] = 0.0
    ours = [x.requires_grad_() for x in (states, weight, bias)]
    out = score(states, weight, ids, bias=bias, top_k=5, return_entropy=True, **options)
    assert out.entropy is not None
    numbers = [torch.where(out.logprobs.isnan(), 0.0, out.logprobs), out.logsumexp, out.entropy]
    found = torch.autograd.grad(weighted(numbers, upstream), ours)
    wide = [x.detach().double().requires_grad_() for x in ours]
    wanted = by_float64(*wide, ids, options)
    expected = torch.autograd.grad(weighted(wanted, upstream), wide)
    for mine, right, given in zip(found, expected, ours):
        assert mine.dtype == given.dtype
        assert (mine.double() - right).abs().max() <= error * right.abs().max()


def test_gradients_by_finite_differences():
    """Of every number by itself, in float32: the function is evaluated in float64."""
    states, weight = make(3, 40)
    bias, ids = torch.randn(40, device=DEVICE), torch.tensor([[1, 39], [0, 0], [7, -1]], device=DEVICE)

    def numbers(states: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return tuple(by_float64(states, weight, bias, ids, {}))

    assert torch.autograd.gradcheck(numbers, [x.double().requires_grad_() for x in (states, weight, bias)])
    for number, name in enumerate(("logprobs", "logsumexp", "entropy")):
        ours = [x.clone().requires_grad_() for x in (states, weight, bias)]
        out = score(*ours[:2], ids, bias=ours[2], return_entropy=True)
        of_one = torch.where(out.logprobs.isnan(), 0.0, out.logprobs) if number == 0 else getattr(out, name)
        wide = [x.detach().double().requires_grad_() for x in ours]
        expected = torch.autograd.grad(numbers(*wide)[number].sum(), wide)
        for mine, right in zip(torch.autograd.grad(of_one.sum(), ours), expected):
            torch.testing.assert_close(mine.double(), right, atol=1e-5, rtol=1e-4)


def test_rows_without_an_upstream_gradient_contribute_nothing():
    """Nor do they where their hidden states are NaN; a NaN upstream reaches its own row alone."""
    states, weight = make(4)
    with torch.no_grad():
        states[1] = torch.nan
    states.requires_grad_()
    weight.requires_grad_()
    out = score(states, weight, torch.tensor([1, 2, 3, 4], device=DEVICE), return_entropy=True)
    keep = torch.tensor([1.0, 0.0, 1.0, 0.0], device=DEVICE)
    by_state, by_weight = torch.autograd.grad(
        (out.logprobs.nan_to_num(0.0) * keep).sum(), (states, weight), retain_graph=True
    )
    assert by_weight.isfinite().all()
    assert (by_state[[1, 3]] == 0).all()
    assert (by_state[[0, 2]] != 0).any()
    undefined = torch.tensor([torch.nan, 0.0, 0.0, 0.0], device=DEVICE)
    (by_state,) = torch.autograd.grad(out.logprobs, states, undefined)
    assert by_state[0].isnan().all()
    assert (by_state[1:] == 0).all()


def test_no_gradient_where_none_is_wanted():
    states, weight = make(2)
    ids = torch.tensor([1, 2], device=DEVICE)
    assert not score(states, weight, ids).logprobs.requires_grad
    weight.requires_grad_()
    with torch.no_grad():
        assert not score(states, weight, ids).logprobs.requires_grad
    out = score(states, weight, ids, return_ranks=True)
    assert out.logprobs.requires_grad
    assert not out.processed_logprobs.requires_grad
    assert not out.ranks.requires_grad
    out.logsumexp.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        ([1, 2], {}, TypeError, "token_ids must be a torch.Tensor, got list"),
        (torch.ones(2), {}, TypeError, "token_ids must be int32 or int64, got torch.float32"),
        (torch.ones(2, dtype=torch.int64), {"return_logprobs": True}, TypeError, "return_logprobs must be left out"),
        (torch.ones(3, dtype=torch.int64), {}, ValueError, r"shape \(2,\) or \(2, m\), got shape \(3,\)"),
        (
            torch.ones(2, dtype=torch.int64),
            {"top_pp": 0.5},
            TypeError,
            "unexpected argument .*; did you mean top_p",
        ),
        (torch.ones(2, dtype=torch.int64), {"temperature": -1}, ValueError, "temperature must be at least 0"),
        (torch.ones(2, dtype=torch.int64), {"impl": "none"}, ValueError, "impl must be None or one of"),
    ],
)
def test_errors(ids, options, error, message):
    states, weight = make(2)
    with pytest.raises(error, match=message):
        score(states, weight, ids.to(DEVICE) if isinstance(ids, Tensor) else ids, **options)


def test_a_rollout_scored_with_its_kept_set_as_a_mask():
    """Masked to what filters kept, the renormalised log-probabilities are those of the filters."""
    states, weight = make(8)
    drawn = sample(states, weight, seed=torch.arange(8, device=DEVICE), top_k=6, return_logprobs=True)
    kept = torch.zeros(8, VOCAB, dtype=torch.int64, device=DEVICE)
    kept.scatter_(1, (states @ weight.T).topk(6).indices, 1)
    kept = torch.nn.functional.pad(kept, (0, -VOCAB % 32)).view(8, -1, 32)
    words = (kept << torch.arange(32, device=DEVICE)).sum(2)
    mask = torch.where(words >= 2**31, words - 2**32, words).int()
    scored = score(states, weight, drawn.token_ids, token_mask=mask)
    torch.testing.assert_close(scored.processed_logprobs, drawn.processed_logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_rows_that_draw_no_token_have_no_processed_numbers(impl):
    weight, ids = torch.zeros(40, 8, device=DEVICE), torch.tensor([[5, 6]] * 4, device=DEVICE)
    bias = torch.full((40,), -torch.inf, device=DEVICE)
    bias[5] = torch.inf
    out = score(torch.zeros(4, 8, device=DEVICE), weight, ids, bias=bias, impl=require(impl))
    assert out.processed_logprobs.isnan().all()
    temperature = torch.tensor([1.0, torch.nan, 1.0, 1.0], device=DEVICE)
    top_p = torch.tensor([1.0, 1.0, torch.nan, 0.5], device=DEVICE)
    out = score(torch.zeros(4, 8, device=DEVICE), weight, ids, temperature=temperature, top_p=top_p, impl=impl)
    assert out.processed_logprobs.isnan().any(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_gradients_under_another_default_dtype_and_autocast(default):
    states, weight = make(4)
    ids = torch.tensor([1, 2, 3, 4], device=DEVICE)
    expected = torch.autograd.grad(
        score(states.requires_grad_(), weight.requires_grad_(), ids).logprobs.sum(), (states, weight)
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            found = torch.autograd.grad(score(states, weight, ids).logprobs.sum(), (states, weight))
    finally:
        torch.set_default_dtype(before)
    for mine, right in zip(found, expected):
        torch.testing.assert_close(mine, right, atol=1e-6, rtol=1e-6)


def test_there_is_no_second_derivative():
    states, weight = make(2)
    loss = score(states.requires_grad_(), weight, torch.tensor([1, 2], device=DEVICE)).logprobs.sum()
    with pytest.raises(RuntimeError, match="score has no second derivatives"):
        torch.autograd.grad(loss, states, create_graph=True)


def test_compiles():
    states, weight = make(5)
    ids = torch.arange(5, device=DEVICE)
    compiled = torch.compile(flashsampling.score, fullgraph=True, backend="aot_eager")
    out, eager = compiled(states, weight, ids, top_k=3), score(states, weight, ids, top_k=3)
    assert torch.equal(out.processed_logprobs, eager.processed_logprobs)
    assert out.ranks is None  # nobody asked for them
