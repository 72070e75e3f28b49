"""The Hopper kernel's noise and keys by themselves, against float64 and the published vectors."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Float32, Int32, Uint32

from flashsampling import noise as reference
from flashsampling.kernels.hopper import noise, reduction
from tests.api.test_noise import KNOWN_ANSWERS
from tests.conftest import DEVICE
from tests.kernels.hopper.on_device import on_device
from tests.problems import NEEDS_CUTE

pytestmark = NEEDS_CUTE
MANY = 1 << (20 if DEVICE.type == "cuda" else 16)


def _plain(c0: Uint32, c1: Uint32, c2: Uint32, c3: Uint32, k0: Uint32, k1: Uint32) -> Uint32:
    return noise.philox_words(c0, c1, (c2, c3), (k0, k1))


def _from_products(c0: Uint32, c1: Uint32, c2: Uint32, c3: Uint32, k0: Uint32, k1: Uint32) -> Uint32:
    return noise.philox_words_from_products(noise.group_product(c0), noise.row_constants(c1, (c2, c3), (k0, k1)))


@pytest.mark.parametrize("function", [_plain, _from_products])
def test_philox(function):
    """Known answers; and random counters, with zeros and all ones, where carries and roundings live."""
    words = on_device(function, 4)
    counters, keys, expected = zip(*KNOWN_ANSWERS, strict=True)
    assert words(*np.array([[*c, *k] for c, k in zip(counters, keys)]).T).T.tolist() == [list(e) for e in expected]
    blocks = torch.randint(0, 2**32, (6, MANY))
    edges = torch.tensor([0, 1, 2, 0xFFFF, 0x10000, 0xFFFF0000, 0xFFFFFFFE, 0xFFFFFFFF])
    blocks[:, : MANY // 16] = edges[torch.randint(0, len(edges), (6, MANY // 16))]
    exact = reference.philox4x32_10(tuple(blocks[:4]), tuple(blocks[4:]))
    assert np.array_equal(words(*blocks.numpy()), torch.stack(exact).numpy())


def word_range():
    edge, random = np.arange(0, 1 << 14), np.random.default_rng(0).integers(0, 2**32, MANY // 4)
    near = edge, 2**32 - 1 - edge, 2**28 - (1 << 13) + edge, 2**31 - (1 << 13) + edge
    return np.concatenate([*near, random, np.logspace(0, 31.99, 1 << 16, base=2)]).astype(np.uint32)


def base2_gumbel(words):
    """Up to log2(ln 2), which drops out."""
    return -np.log2(-np.log1p(-(words.astype(np.float64) + 0.5) * 2.0**-32) / math.log(2))


def test_gumbel_error_over_the_word_range():
    """The hardware's logarithm included: 3e-6 * max(1, |g|), at both ends, at the branch of the series, and between.
    The word 0 by its refinement."""
    minus_gumbel, words = on_device(noise.minus_gumbel_refined), word_range()
    words = words[words > 0]

    def natural(base2):
        return -(base2.astype(np.float64) * math.log(2) + math.log(math.log(2)))

    g, exact = natural(minus_gumbel(words, 0)), base2_gumbel(words) * math.log(2) - math.log(math.log(2))
    assert (abs(g - exact) / abs(exact).clip(1)).max() <= 3e-6
    oracle = reference.gumbel_from_words(torch.from_numpy(words.astype(np.int64))).double().numpy()
    assert (abs(g - oracle) / abs(exact).clip(1)).max() <= 5e-6
    tails = np.array([0, 1, 12345, 2**31, 2**32 - 1], np.uint32)
    exact = -np.log((tails + 0.5) * 2.0**-64)
    assert (abs(natural(minus_gumbel(0, tails)) - exact) <= 3e-6 * exact).all()


def _bounds(w0: Uint32, w1: Uint32, w2: Uint32, w3: Uint32) -> Uint32:
    bounds = noise.encode_bounds([w0, w1, w2, w3])
    return (bounds, *(noise.bound_float(bounds, byte).bitcast(Uint32) for byte in range(4)))


@np.errstate(invalid="ignore")
def test_the_bounds_hold_for_every_word():
    """The whole search rests on this: the code's bound is never below the Gumbel, and what has no code has no bound."""
    words = word_range()
    words = np.concatenate([words, np.full(-len(words) % 4, 5, np.uint32)])
    bounds, *floats = on_device(_bounds, 5)(*words.reshape(-1, 4).T)
    byte = np.stack([bounds >> 8 * n & 0xFF for n in range(4)], axis=1).reshape(-1)
    w = np.stack(floats, axis=1).reshape(-1).view(np.float32).astype(np.float64)
    coded = words >= 3
    assert np.array_equal(byte < 0x80, coded)
    assert np.array_equal(np.isnan(w), ~coded)
    assert np.array_equal(w[coded], (1 + byte[coded] / 128) * 2.0**127)
    gumbel = base2_gumbel(words)
    assert (gumbel <= noise.GUMBEL_BELOW + w * noise.BOUND_STEP)[coded].all()
    half = coded & (words < 2**31)
    assert np.array_equal(half, w >= noise.HALF)
    assert (gumbel >= noise.GUMBEL_ABOVE + w * noise.BOUND_STEP)[half].all()
    assert (gumbel >= -5.1).all()
    assert noise.GUMBEL_ABOVE + noise.HALF * noise.BOUND_STEP <= 0 <= noise.GUMBEL_BELOW + noise.HALF * noise.BOUND_STEP


def _sums(low: Float32, high: Float32, w0: Uint32, w1: Uint32, w2: Uint32, w3: Uint32) -> Uint32:
    bounds, exponents = noise.encode_bounds([w0, w1, w2, w3]), noise.exponents(Int32(1))
    floats = (noise.bound_float(bounds, byte).bitcast(Uint32) for byte in range(4))
    return (*(noise.add_bounds(low, high, bounds, pair, exponents) for pair in range(2)), *floats)


@np.errstate(invalid="ignore")
def test_signs_of_bounds_in_bfloat16_miss_no_candidate():
    """What is at least 0, or NaN, never gets the sign of what is below; what does is at most rounding above it."""
    rng = np.random.default_rng(0)
    words = np.concatenate([rng.integers(0, 4, 4096), np.logspace(0, 31.99, 1 << 16, base=2)]).astype(np.uint32)
    words = rng.permutation(words).reshape(-1, 4).T
    near = -34 * (rng.random((2, words.shape[1])) * 2)  # near what cancels a bound, and at all magnitudes
    special = np.array([math.inf, -math.inf, math.nan, 3e38, -3e38, 0.0, 1e-40, -1e-40])
    bases = np.where(rng.random(near.shape) < 0.1, rng.choice(special, near.shape), near).astype(np.float32)
    *pairs, w0, w1, w2, w3 = on_device(_sums, 6)(*bases, *words)
    for place, w in enumerate((w0, w1, w2, w3)):
        exact = bases[place % 2].astype(np.float64) + w.view(np.float32).astype(np.float64) * noise.BOUND_STEP
        below = pairs[place // 2] >> (15 + 16 * (place % 2)) & 1 == 1
        assert not (below & ~(exact < 0)).any()
        assert below[exact < -0.26].all()


def _key(score: Float32, token: Uint32) -> Uint32:
    key = reduction.pack_key(score, Int32(token))
    return Uint32(key >> 32), Uint32(key & 0xFFFFFFFF), reduction.unpack_score(key).bitcast(Uint32)


def test_keys_order_as_scores_and_give_them_back():
    random = np.random.default_rng(0).normal(size=4096) * 50
    floats = np.array([*random, 0.0, -0.0, 3e38, -3e38, 1e-40, -1e-40, math.inf, -math.inf], np.float32)
    high, low, back = on_device(_key, 3)(floats, np.arange(len(floats)))
    keys = high.astype(np.int64) << 32 | low
    assert np.array_equal(back.view(np.float32), floats)
    assert (keys > 0).all()
    order = sorted(range(len(floats)), key=lambda i: (floats[i], -i))  # ties: the lower id is the greater key
    assert keys.argsort().tolist() == order
    high, low, _ = on_device(_key, 3)(math.nan, 0)
    assert (int(high[0]) << 32 | int(low[0])) == 2**63 - 1
