"""A model of the Hopper kernel's thresholds in exact float32, and random and adversarial rows for it.

As ``kernels/hopper/thresholds.py`` and ``kernels/hopper/noise.py`` have it, name by name; what holds of it is tried in
``test_threshold_model``."""

import numpy as np

from flashsampling.kernels.hopper import noise, thresholds

F = np.float32
INF = F(np.inf)
LOG2_E, LN_2 = F(1.4426950408889634), F(0.6931471805599453)
MARGIN, RELATIVE = thresholds._MARGIN, thresholds._RELATIVE
UNKNOWN = F(np.nan)
LARGEST = np.finfo(F).max
TEMPERATURES = [1e-6, 1.0000001e-6, 7e-4, 7.0443e-4, 7.0444e-4, 7.0445e-4, 1e-3, 0.5, 0.99999994, 1.0, 1.0000001, 2.0]
TEMPERATURES += [1e6, 1e20, 3.4e38, np.inf]


def fma(a, b, c, dtype=F):
    """Rounded once: the product of two float32 is exact in float64, the sum is rounded to odd there, then to
    ``dtype``."""
    product, c = np.float64(a) * np.float64(b), np.float64(c)
    total = product + c
    b_virtual = total - product
    error = (product - (total - b_virtual)) + (c - b_virtual)
    bits = np.atleast_1d(total).view(np.int64)
    inexact = np.atleast_1d(np.isfinite(total) & np.isfinite(error) & (error != 0)) & (bits & 1 == 0)
    away = np.atleast_1d((error > 0) == (total > 0))
    odd = np.where(inexact, np.where(away, bits + 1, bits - 1), bits).view(np.float64).reshape(np.shape(total))
    return odd.astype(dtype)


def rcp(x, ulps):
    inverse = (F(1) / F(x)).astype(F)
    return np.where((inverse == 0) | ~np.isfinite(inverse), inverse, (inverse.view(np.int32) + np.int32(ulps)).view(F))


def rz_bf16(x):
    """cvt.rz.bf16x2.f32."""
    cut = (np.ascontiguousarray(x, F).view(np.uint32) & np.uint32(0xFFFF0000)).view(F)
    return np.where(np.isnan(x), F(np.nan), cut)


# -- threshold.py


def is_low_temperature(slope):
    return slope >= F(thresholds.LOW_TEMPERATURE_SLOPE)


def search_slope(temperature):
    slope = (LOG2_E / temperature).astype(F)
    power = (slope.view(np.uint32) & np.uint32(0x7F800000)).view(F)
    slope = np.where(slope >= F(thresholds.LOW_TEMPERATURE_SLOPE), power, slope)
    return np.where(temperature < F(noise.GREEDY_BELOW), F(thresholds.GREEDY_SLOPE), slope).astype(F)


def inverse(power):
    return F(1) / np.where(is_low_temperature(power), power, F(1))


def ratio_of(temperature, slope):
    """From its byte, as it is in shared memory."""
    bits = np.ascontiguousarray(np.fmax(amplitude_of(temperature) * slope, F(0.5)), F).view(np.uint32)
    byte = np.where(is_low_temperature(slope), bits >> 16 & 0xFF, 0x80).astype(np.uint32)
    return (byte << 16 | np.uint32(0x3F000000)).view(F)


def smooth(p, margin, relative):
    return fma(p, np.where(p >= 0, F(relative - 1.0), F(-relative - 1.0)), F(margin))


def clamp(t):
    return np.where(t > F(thresholds._LIMIT), UNKNOWN, np.fmax(t + F(0), F(-thresholds._LIMIT))).astype(F)


def height(t):
    """Thresholds as ``lower_threshold`` orders them: by their bits, NaN above all."""
    return np.where(np.isnan(t), INF, t)


def threshold_from_score(score, slope):
    p = (score * np.fmax(slope, LOG2_E)).astype(F)
    return clamp(np.where(is_low_temperature(slope), -score * slope, smooth(p, MARGIN, RELATIVE)).astype(F))


def next_float(score):
    bits = np.ascontiguousarray(score + F(0), F).view(np.int32)
    return (bits + np.where(bits < 0, -1, 1).astype(np.int32)).view(F)


def warm_start_bound(logit, code, slope, ratio):
    gumbel = fma(code, F(noise.BOUND_STEP), F(noise.GUMBEL_ABOVE))
    gumbel = np.where(code >= F(noise.HALF), gumbel, F(-5.1)).astype(F)
    return np.where(logit == -INF, -INF, fma(logit, slope, np.fmin(gumbel, gumbel * ratio)))


def threshold_from_warm_start(seed, slope):
    return clamp(np.where(is_low_temperature(slope), -seed, smooth(seed, MARGIN + 2.0**-10, 2 * RELATIVE)).astype(F))


def score_from_threshold(t, slope, ulps):
    low = ((F(noise.GUMBEL_BELOW) - t).astype(F) * rcp(np.fmax(slope, LOG2_E), ulps)).astype(F)
    return np.where(is_low_temperature(slope), -next_float((t * inverse(slope)).astype(F)), low)


def may_win(logit, code, slope, t, ratio):
    noisy = is_low_temperature(slope) & (slope != F(thresholds.GREEDY_SLOPE))
    amplitude = np.where(noisy, (ratio + F(thresholds.RATIO_STEP)) * inverse(slope), F(0))
    step = np.where(is_low_temperature(slope), F(0), F(noise.BOUND_STEP))
    found = (t == F(thresholds.INFINITE_FOUND)) | (t == F(thresholds.INFINITE_ALONE))
    gumbel = fma(code, F(noise.BOUND_STEP), F(MARGIN))
    score = fma(np.maximum(gumbel, F(0)), amplitude, logit)  # np.maximum: NaN above all
    above = fma(code, step, fma(score, slope, t))
    return ~(above < 0) & (t != -INF) & ~(np.isinf(logit) & found)


def may_win_fast(logit, code, slope, t):
    return ~(fma(code, F(noise.BOUND_STEP), fma(logit, slope, t)) < 0) & (t != -INF)


def coarse(logit, code, slope, t):
    """The search: whether a sum's sign is 0. The sign alone is wanted, and one rounding, to whatever precision, keeps
    it."""
    total = rz_bf16(fma(logit, slope, t)).astype(np.float64) + code.astype(np.float64) * noise.BOUND_STEP
    return ~np.signbit(total) | np.isnan(total)


def some_may_win(logit, code, slope, t, ratio):
    without_found = may_win(logit, code, slope, t, ratio) | (np.isinf(logit) & ~(fma(logit, slope, t) < 0))
    return (without_found | (slope == 0)) & (t != -INF)


def leads(lower, known):
    return ~(fma((np.abs(lower) + F(64)).astype(F), F(-(2.0**-21)), lower) > known)


# -- noise.py


def code_of(word, greedy=False):
    """The float of a word's code."""
    word = np.asarray(word, np.uint32)
    as_float = word.astype(F)
    above = as_float.astype(np.float64) > word
    bits = np.where(above, as_float.view(np.uint32) - 1, as_float.view(np.uint32)).astype(np.uint32)  # cvt.rz
    byte = ~((((bits >> 16) * 8 + 0x7E00) & 0xFFFF) >> 8) & 0xFF
    byte = np.where(greedy, noise.GREEDY_BYTE, byte).astype(np.uint32)
    return (byte << 16 | np.uint32(0x7F000000)).view(F)


def minus_gumbel(word, error):
    """base-2, with an absolute error of the hardware's logarithm; words from 1 on, and 0 as refined."""
    refined = 12345.5 * 2.0**-64  # any tail
    v = np.where(word == 0, refined, (word.astype(np.float64) + 0.5) * 2.0**-32)
    exact = np.log2(-np.log1p(-v) * 1.4426950408889634)
    return (exact * (1 + error * 2.0**-24) + error * 2.0**-21).astype(F)


def amplitude_of(temperature):
    """Of ``noise.row_factors``."""
    some = np.where(temperature > 1, LN_2, (temperature * LN_2).astype(F))
    return np.where(temperature < F(noise.GREEDY_BELOW), F(0), some)


def exact_score(logit, temperature, word, error, ulps):
    hot = temperature > 1
    scale = np.where(hot, (rcp((temperature * F(0.0625)).astype(F), ulps) * F(0.0625)).astype(F), F(1))
    return fma(-minus_gumbel(word, error), amplitude_of(temperature), (logit * scale).astype(F))


# -- rows


def temperatures(rng, n, greedy=0.1):
    t = 10.0 ** rng.uniform(-6, 6, n)
    some = rng.random(n)
    t = np.where(some < 0.3, rng.choice(TEMPERATURES, n), t)
    t = np.where((some > 0.3) & (some < 0.4), 7.0444e-4 * (1 + rng.normal(0, 1e-6, n)), t)
    powers = 1.4426950408889634 / 2.0 ** rng.integers(0, 21, n)  # slopes next to powers of two
    t = np.where((some > 0.4) & (some < 0.6), powers * (1 + rng.integers(-3, 4, n) * 2.0**-24), t)
    t = np.maximum(t, F(1e-6)).astype(F)
    return np.where(rng.random(n) < greedy, F(0), t).astype(F)


def words(rng, n):
    w = rng.integers(0, 2**32, n)
    octave = (2.0 ** rng.uniform(0, 32, n)).astype(np.int64)
    edge = (2.0 ** rng.integers(1, 32, n) * (1 + rng.integers(0, 4, n) / 4)).astype(np.int64) + rng.integers(-2, 3, n)
    kind = rng.random(n)
    w = np.where(kind < 0.4, octave, np.where(kind < 0.7, edge, np.where(kind < 0.75, rng.integers(0, 6, n), w)))
    return np.clip(w, 0, 2**32 - 1).astype(np.uint32)


def logits(rng, n, temperature):
    scale = 10.0 ** rng.uniform(-45, 38.5, n)
    near = np.where(temperature > 0, np.minimum(temperature, 1e30), 1) * 2.0 ** rng.uniform(-2, 20, n)
    values = np.where(rng.random(n) < 0.6, near, scale) * rng.choice([-1, 1], n) * rng.uniform(0.5, 1, n)
    return np.clip(values, -LARGEST, LARGEST).astype(F)


def neighbours(rng, logit, temperature, n):
    """Another token's logit: ulps away, or as far as noise reaches."""
    ulps = (np.ascontiguousarray(logit).view(np.int32) + rng.integers(-3, 4, n).astype(np.int32)).view(F)
    reach = logit + np.minimum(temperature, F(1e30)) * rng.uniform(-45, 45, n).astype(F)
    other = np.where(rng.random(n) < 0.4, ulps, np.where(rng.random(n) < 0.8, reach, logit)).astype(F)
    return np.where(np.isfinite(other), other, logit).astype(F)


def scored(rng, n, greedy=0.1):
    """Two tokens of a row, whose scores are finite: temperature, slope, then logits, words, codes, scores of both."""
    t = temperatures(rng, n, greedy)
    slope, ulps = search_slope(t), rng.integers(-1, 2, n)
    first = logits(rng, n, t)
    both = []
    for logit in (first, neighbours(rng, first, t, n)):
        word = words(rng, n)
        score = exact_score(logit, t, word, rng.uniform(-1, 1, n), ulps)
        both.append((logit, word, code_of(word, t < F(noise.GREEDY_BELOW)), score))
    return t, slope, *both


def low_temperatures(rng, n):
    """Of all sharp slopes; half of them at the ends of their ranges, where a ratio is next to 1/2 or 1."""
    t = (10.0 ** rng.uniform(-6, np.log10(7.04e-4), n)).astype(F)
    ends = (1.4426950408889634 / 2.0 ** rng.integers(12, 21, n) * (1 + rng.integers(-3, 4, n) * 2.0**-24)).astype(F)
    return np.where(rng.random(n) < 0.5, t, ends)


def evaluations(t, logit, word, ratio, ratio_above, ctas=132, tile=128):
    """How many tokens of a row pass ``may_win``: those of the first tiles of all CTAs by the seeds of half of these,
    those of later tiles by what was found in all before. ``ratio_above``: what ``ratio`` and a step more is not
    above."""
    n = len(word) // (ctas * tile) * ctas * tile
    word, rows = word[:n].reshape(-1, ctas * tile), np.ones(ctas * tile, F)
    slope, code = search_slope(t * rows), code_of(word)
    score = exact_score(logit * rows, t * rows, word, 0.0, 0)
    seeds = threshold_from_warm_start(warm_start_bound(logit * rows, code[0], slope, ratio * rows), slope)
    known, below = np.fmin.reduce(seeds[: len(rows) // 2]), (ratio_above - F(thresholds.RATIO_STEP)) * rows
    count = 0
    for i in range(len(word)):
        count += may_win(logit * rows, code[i], slope, known * rows, below).sum()
        known = np.fmin(known, threshold_from_score(score[i].max() * rows, slope)[0])
    return int(count)
