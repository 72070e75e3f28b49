"""Draws follow softmax(logits / temperature): G-tests whose power is stated and checked.

A G-test with N draws against a distribution that is off by a chi-square distance of w**2 (sum of (q - p)**2 / p) has
non-centrality N * w**2. ``assert_distribution`` asserts with scipy that a stated w would be caught with probability
0.999 or more at the level it uses, so that a passing test says something; ``test_the_test_catches_a_small_bias`` shows
it.
"""

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scipy import stats

import flashsampling
from flashsampling import noise
from tests.conftest import DEVICE
from tests.problems import KERNELS

LEVEL = 1e-6  # of a false alarm, per test
POWER = 0.999


def g_test(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    """p-value and degrees of freedom; the least likely cells are merged until each expects 10 draws."""
    draws = counts.sum().item()
    order = probabilities.argsort(descending=True)
    expected, seen = probabilities[order].double() * draws, counts[order].double()
    rare = int((expected >= 10).sum())
    if rare < len(expected):
        expected = torch.cat([expected[:rare], expected[rare:].sum()[None]])
        seen = torch.cat([seen[:rare], seen[rare:].sum()[None]])
        if expected[-1] < 10 and len(expected) > 1:
            expected = torch.cat([expected[:-2], expected[-2:].sum()[None]])
            seen = torch.cat([seen[:-2], seen[-2:].sum()[None]])
    expected = expected * (seen.sum() / expected.sum())
    result = stats.power_divergence(seen.cpu().numpy(), expected.cpu().numpy(), lambda_="log-likelihood")
    return float(result.pvalue), len(expected) - 1


def assert_distribution(counts: torch.Tensor, probabilities: torch.Tensor, distance: float) -> None:
    """The counts fit, and a distribution ``distance`` (w) away would have been caught."""
    pvalue, freedom = g_test(counts, probabilities)
    critical = stats.chi2.isf(LEVEL, freedom)
    power = stats.ncx2.sf(critical, freedom, counts.sum().item() * distance**2)
    assert power >= POWER, f"the test is too weak: power {power:.3f}"
    assert pvalue > LEVEL, f"p = {pvalue:.3g} with {freedom} degrees of freedom"


def draw_counts(
    impl, logits, temperature, rows, draws_per_row, calls: Iterable[int], dtype=torch.float32, device=DEVICE
):
    """Counts of every token over rows * draws_per_row draws at every offset in ``calls``, from one row of logits, exact
    in ``dtype``."""
    vocab = logits.shape[0]
    weight = torch.zeros(vocab, 8, device=device, dtype=dtype)
    weight[:, 0] = logits.to(device)
    states = torch.ones(rows, 8, device=device, dtype=dtype)
    counts = torch.zeros(vocab, dtype=torch.int64, device=device)
    seeds = torch.arange(rows, device=device)
    for call in calls:
        out = flashsampling.sample(
            states, weight, temperature=temperature, seed=seeds, offset=call, num_samples=draws_per_row, impl=impl
        )
        counts += torch.bincount(out.token_ids.flatten(), minlength=vocab)
    return counts


def logit_shapes(vocab):
    generator = torch.Generator().manual_seed(3)
    ranks = torch.arange(1, vocab + 1).float()
    return {
        "flat": torch.zeros(vocab),
        "peaked": -1.3 * ranks[torch.randperm(vocab, generator=generator)].log(),
        "normal": torch.randn(vocab, generator=generator) * 2,
    }


@pytest.mark.quick(1)
@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("shape", ["flat", "peaked", "normal"])
def test_torch_implementations(impl, shape):
    logits, temperature = logit_shapes(1000)[shape], 0.6
    on_gpu = DEVICE.type == "cuda"
    counts = draw_counts(impl, logits, temperature, 64, 128, range(100 if on_gpu else 5))
    probabilities = torch.softmax(logits.double() / temperature, 0).to(DEVICE)
    assert_distribution(counts, probabilities, distance=0.03 if on_gpu else 0.12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("draws_per_row", [1, pytest.param(16, marks=pytest.mark.gpu)])
def test_kernels(impl, draws_per_row):
    """Both of its paths: one draw per row, and several. Under the interpreter few draws, so little power."""
    on_gpu = DEVICE.type == "cuda"
    rows, calls = (4096, 400) if on_gpu else (64, 4)
    logits = logit_shapes(1000 if on_gpu else 100)["peaked"].bfloat16().float()
    dtype = torch.bfloat16 if impl == "cute" else torch.float32
    counts = draw_counts(impl, logits, 0.9, rows, draws_per_row, range(calls), dtype)
    distance = 0.02 if on_gpu else 1.2 if draws_per_row == 1 else 0.3
    assert_distribution(counts, torch.softmax(logits.double() / 0.9, 0).to(DEVICE), distance)


def test_the_test_catches_a_small_bias():
    """Trap 13: scores kept in bf16, as some fused samplers keep them, fail the same test."""
    logits = torch.full((64,), 30.0)
    g = noise.gumbel(torch.arange(500), torch.zeros(500, dtype=torch.int64), torch.arange(200), 0, 64)
    for scores, passes in ((logits + g, True), ((logits + g).bfloat16(), False)):
        counts = torch.bincount(scores.argmax(-1).flatten(), minlength=64)
        pvalue, _ = g_test(counts, torch.softmax(logits.double(), 0))
        assert (pvalue > LEVEL) == passes


def test_rare_token_next_to_flat_ones():
    """Trap 2: how often a token 4 nats below the sum of 1,000 flat ones wins. A generator whose Gumbel stops short, or
    steps coarsely where the race is decided, moves this count."""
    draws = 400_000
    g = noise.gumbel(
        torch.arange(draws // 1000), torch.zeros(draws // 1000, dtype=torch.int64), torch.arange(1000), 0, 1
    )
    # the best of n flat Gumbels is a Gumbel shifted by log n: played in float64, so only the rare token's noise is ours
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    rest = -torch.log(-torch.log(uniform)) + math.log(1000)
    wins = int((g.flatten().double() + math.log(1000) - 4 > rest).sum())
    odds = math.exp(-4)
    assert stats.binomtest(wins, draws, odds / (1 + odds)).pvalue > LEVEL


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["flat", "peaked"])
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("impl", ["triton", "cute"])
def test_very_many_draws(impl, shape):
    """At V = 128,256, on the tensor cores: 1e8 draws, or FLASHSAMPLING_DRAWS of them, by all GPUs of this host."""
    if impl not in KERNELS:
        pytest.skip("needs a Hopper GPU and the CuTe DSL")
    draws = int(float(os.environ.get("FLASHSAMPLING_DRAWS", 1e8)))
    logits = logit_shapes(128_256)[shape].bfloat16().float()
    rows = 4096
    gpus = torch.cuda.device_count()
    calls = range(-(-draws // rows))
    with ThreadPoolExecutor(gpus) as pool:
        jobs = [
            pool.submit(
                draw_counts, impl, logits, 1.0, rows, 1, calls[gpu::gpus], torch.bfloat16, torch.device("cuda", gpu)
            )
            for gpu in range(gpus)
        ]
        counts = sum(job.result().to(DEVICE) for job in jobs)
    assert counts.sum() >= draws
    distance = 0.0066 * (1e8 / draws) ** 0.5
    assert_distribution(counts, torch.softmax(logits.double(), 0).to(DEVICE), distance)
