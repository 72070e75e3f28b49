"""The Triton noise by itself, against float64 and the published vectors."""

import math

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from flashsampling import noise  # noqa: E402
from flashsampling.kernels.triton.fused.noise import minus_gumbel, minus_gumbel_refined, philox_words  # noqa: E402
from tests.api.test_noise import KNOWN_ANSWERS  # noqa: E402

pytestmark = pytest.mark.every_triton


@triton.jit
def _gumbel_kernel(words, refinements, plain, refined, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    word = tl.load(words + index).to(tl.uint32)
    tl.store(plain + index, minus_gumbel(word))
    tl.store(refined + index, minus_gumbel_refined(word, tl.load(refinements + index).to(tl.uint32)))


@triton.jit
def _philox_kernel(counter, key, out):
    c0, c1 = tl.load(counter).to(tl.uint32), tl.load(counter + 1).to(tl.uint32)
    c2, c3 = tl.load(counter + 2).to(tl.uint32), tl.load(counter + 3).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(c0, c1, c2, c3, tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32))
    tl.store(out, w0.to(tl.int64))
    tl.store(out + 1, w1.to(tl.int64))
    tl.store(out + 2, w2.to(tl.int64))
    tl.store(out + 3, w3.to(tl.int64))


def gumbels(words, refinements, device):
    """(plain, refined) natural Gumbels from the kernel's base-2 ones, float64."""
    size = 1024
    padded = torch.nn.functional.pad(words, (0, -len(words) % size), value=1).to(device)
    tails = torch.nn.functional.pad(refinements, (0, -len(words) % size), value=1).to(device)
    plain, refined = (torch.full(padded.shape, torch.nan, device=device) for _ in range(2))
    _gumbel_kernel[(len(padded) // size,)](padded, tails, plain, refined, SIZE=size)
    return [-(x[: len(words)].double() * math.log(2) + math.log(math.log(2))) for x in (plain, refined)]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected, device):
    out = torch.zeros(4, dtype=torch.int64, device=device)
    _philox_kernel[(1,)](torch.tensor(counter, device=device), torch.tensor(key, device=device), out)
    assert tuple(out.tolist()) == expected


def test_gumbel_error_over_the_word_range(device):
    """The hardware's logarithm included: 3e-6 * max(1, |g|), at both ends, at the branch of the series, and between."""
    edge = torch.arange(1, 1 << 14)
    pieces = [edge, 2**32 - 1 - edge, 2**28 - (1 << 13) + edge, 2**31 - (1 << 13) + edge]
    pieces += [
        torch.randint(1, 2**32, (1 << 16,)),
        torch.logspace(0, 31.99, 1 << 14, base=2, dtype=torch.float64).long(),
    ]
    words = torch.cat(pieces)
    plain, refined = gumbels(words, torch.zeros_like(words), device)
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-32)).to(device)
    for g in (plain, refined):
        assert ((g - exact).abs() / exact.abs().clamp(min=1.0)).max() <= 3e-6
    assert (
        (plain - noise.gumbel_from_words(words.to(device)).double()).abs() / exact.abs().clamp(min=1.0)
    ).max() <= 5e-6


def test_the_word_zero(device):
    """From the fast noise, by whose winner the kernel notices it: finite, and above every refined one. From the other,
    the refined tail."""
    deep = torch.tensor([0, 1, 12345, 2**31, 2**32 - 1])
    plain, refined = gumbels(torch.zeros_like(deep), deep, device)
    assert plain.isfinite().all()
    assert plain.min() > refined.max() + 20
    exact = -torch.log((deep.double() + 0.5) * 2.0**-64).to(device)
    assert ((refined - exact).abs() / exact).max() <= 3e-6
