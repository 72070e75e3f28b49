"""A model of the Hopper kernel's thresholds in exact float32: what the search leaves out cannot win, and what can is published.

``impl/cute/threshold.py`` says which inequalities hold; here random and adversarial rows try to break them, on the CPU."""

import numpy as np
import pytest

pytest.importorskip("cutlass")

from flashsampling.impl.cute import noise, threshold

F = np.float32
INF = F(np.inf)
LOG2_E, LN_2 = F(1.4426950408889634), F(0.6931471805599453)
MARGIN, RELATIVE = threshold._MARGIN, threshold._RELATIVE
UNKNOWN = F(np.nan)
LARGEST = np.finfo(F).max
TEMPERATURES = [
    1e-6,
    1.0000001e-6,
    7e-4,
    7.0443e-4,
    7.0444e-4,
    7.0445e-4,
    1e-3,
    0.5,
    0.99999994,
    1.0,
    1.0000001,
    2.0,
    1e6,
    1e20,
    3.4e38,
    np.inf,
]


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def fma(a, b, c, dtype=F):
    """Rounded once: the product of two float32 is exact in float64, the sum is rounded to odd there, then to ``dtype``."""
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
    return np.where(np.isnan(x), F(np.nan), (np.ascontiguousarray(x, F).view(np.uint32) & np.uint32(0xFFFF0000)).view(F))


# -- threshold.py


def is_sharp(slope):
    return slope >= F(threshold.SHARP)


def slope_of(temperature):
    slope = (LOG2_E / temperature).astype(F)
    power = (slope.view(np.uint32) & np.uint32(0x7F800000)).view(F)
    slope = np.where(slope >= F(threshold.SHARP), power, slope)
    return np.where(temperature < F(noise.GREEDY_BELOW), F(threshold.GREEDY_SLOPE), slope).astype(F)


def inverse(power):
    return F(1) / np.where(is_sharp(power), power, F(1))


def smooth(p, margin, relative):
    return fma(p, np.where(p >= 0, F(relative - 1.0), F(-relative - 1.0)), F(margin))


def clamp(t):
    return np.where(t > F(threshold._LIMIT), UNKNOWN, np.fmax(t + F(0), F(-threshold._LIMIT))).astype(F)


def height(t):
    """Thresholds as ``lower_threshold`` orders them: by their bits, NaN above all."""
    return np.where(np.isnan(t), INF, t)


def of_score(score, slope):
    p = (score * np.fmax(slope, LOG2_E)).astype(F)
    return clamp(np.where(is_sharp(slope), -score * slope, smooth(p, MARGIN, RELATIVE)).astype(F))


def after(score):
    bits = np.ascontiguousarray(score + F(0), F).view(np.int32)
    return (bits + np.where(bits < 0, -1, 1).astype(np.int32)).view(F)


def seed_of(logit, code, slope):
    gumbel = fma(code, F(noise.CODE_STEP), F(noise.GUMBEL_ABOVE))
    gumbel = np.where(code >= F(noise.HALF), gumbel, F(-5.1)).astype(F)
    half = (gumbel * np.where(is_sharp(slope), F(0.5), F(1))).astype(F)
    return np.where(logit == -INF, -INF, fma(logit, slope, np.fmin(gumbel, half)))


def of_seed(seed, slope):
    return clamp(np.where(is_sharp(slope), -seed, smooth(seed, MARGIN + 2.0**-10, 2 * RELATIVE)).astype(F))


def score_of(t, slope, ulps):
    low = ((F(noise.GUMBEL_BELOW) - t).astype(F) * rcp(np.fmax(slope, LOG2_E), ulps)).astype(F)
    return np.where(is_sharp(slope), -after((t * inverse(slope)).astype(F)), low)


def may_win(logit, code, slope, t):
    noisy = is_sharp(slope) & (slope != F(threshold.GREEDY_SLOPE))
    amplitude = np.where(noisy, inverse(slope), F(0))
    step = np.where(is_sharp(slope), F(0), F(noise.CODE_STEP))
    found = (t == F(threshold.INFINITE_FOUND)) | (t == F(threshold.INFINITE_ALONE))
    gumbel = fma(code, F(noise.CODE_STEP), F(MARGIN))
    score = fma(np.maximum(gumbel, F(0)), amplitude, logit)  # np.maximum: NaN above all
    above = fma(code, step, fma(score, slope, t))
    return ~(above < 0) & (t != -INF) & ~(np.isinf(logit) & found)


def may_win_smooth(logit, code, slope, t):
    return ~(fma(code, F(noise.CODE_STEP), fma(logit, slope, t)) < 0) & (t != -INF)


def coarse(logit, code, slope, t):
    """The search: whether a sum's sign is 0. The sign alone is wanted, and one rounding, to whatever precision, keeps it."""
    total = rz_bf16(fma(logit, slope, t)).astype(np.float64) + code.astype(np.float64) * noise.CODE_STEP
    return ~np.signbit(total) | np.isnan(total)


def some_may_win(logit, code, slope, t):
    without_found = may_win(logit, code, slope, t) | (np.isinf(logit) & ~(fma(logit, slope, t) < 0))
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


def exact_score(logit, temperature, word, error, ulps):
    greedy, hot = temperature < F(noise.GREEDY_BELOW), temperature > 1
    scale = np.where(hot, (rcp((temperature * F(0.0625)).astype(F), ulps) * F(0.0625)).astype(F), F(1))
    amplitude = np.where(greedy, F(0), np.where(hot, LN_2, (temperature * LN_2).astype(F)))
    return fma(-minus_gumbel(word, error), amplitude, (logit * scale).astype(F))


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
    slope, ulps = slope_of(t), rng.integers(-1, 2, n)
    first = logits(rng, n, t)
    both = []
    for logit in (first, neighbours(rng, first, t, n)):
        word = words(rng, n)
        both.append(
            (logit, word, code_of(word, t < F(noise.GREEDY_BELOW)), exact_score(logit, t, word, rng.uniform(-1, 1, n), ulps))
        )
    return t, slope, *both


ROUNDS, N = 4, 60_000


def assert_none(bad, **values):
    where = np.flatnonzero(bad)
    if len(where):
        lines = [", ".join(f"{k}={v[i]!r}" for k, v in values.items()) for i in where[:4]]
        raise AssertionError(f"{len(where)} of {len(bad)}\n" + "\n".join(lines))


def test_codes_bound_the_gumbel():
    octaves = 2.0 ** np.arange(2, 32)
    word = np.concatenate([o * q / 4 + d for o in octaves for q in (4, 5, 6, 7) for d in [np.arange(-2, 3)]])
    word = np.unique(np.concatenate([np.arange(3, 4096), np.clip(word, 3, 2**32 - 1), [2**32 - 1]]).astype(np.int64)).astype(
        np.uint32
    )
    code = code_of(word).astype(np.float64) * noise.CODE_STEP
    assert np.isfinite(code).all()
    assert (np.diff(code) <= 0).all()
    gumbel = -np.log2(-np.log1p(-(word + 0.5) * 2.0**-32) / 0.6931471805599453)
    assert (gumbel <= noise.GUMBEL_BELOW + code).all()
    likely = word < 2**31
    assert (gumbel[likely] >= noise.GUMBEL_ABOVE + code[likely]).all()
    assert (code_of(word)[likely] >= F(noise.HALF)).all()
    assert (gumbel > -5.09).all()
    assert np.isnan(code_of([0, 1, 2])).all()


def test_what_is_skipped_scores_less():
    """By thresholds of a score: less. By those of the next float: less or equally."""
    rng = np.random.default_rng(0)
    for _ in range(ROUNDS):
        t, slope, (_, _, _, s0), (l1, w1, c1, s1) = scored(rng, N)
        for strict in (False, True):
            known = of_score(after(s0) if strict else s0, slope)
            skips = ~coarse(l1, c1, slope, known) | ~may_win(l1, c1, slope, known)
            skips |= ~is_sharp(slope) & ~may_win_smooth(l1, c1, slope, known)
            skips |= ~some_may_win(l1, c1, slope, known)
            wins = s1 > s0 if strict else s1 >= s0
            assert_none(skips & wins & np.isfinite(s0), t=t, s0=s0, l1=l1, w1=w1, s1=s1, known=known)


def test_a_higher_score_has_no_higher_threshold():
    rng = np.random.default_rng(1)
    for _ in range(ROUNDS):
        slope = slope_of(temperatures(rng, N))
        s = logits(rng, N, np.full(N, 1, F))
        assert_none(height(of_score(after(s), slope)) > height(of_score(s, slope)), slope=slope, s=s)


def test_seeds_are_lower_bounds():
    """A seed's threshold is not below that of the token's score, and the score made of a threshold is reached."""
    rng = np.random.default_rng(2)
    for _ in range(ROUNDS):
        t, slope, (logit, word, code, s), _ = scored(rng, N)
        seed = seed_of(logit, code, slope)
        usable = np.isfinite(seed)
        known = of_seed(seed, slope)
        below = height(known) < height(of_score(s, slope))
        assert_none(usable & below, t=t, logit=logit, word=word, s=s, seed=seed)
        for thr in (known, of_score(s, slope)):
            for ulps in (-1, 1):
                made = score_of(thr, slope, ulps)
                shared = usable & (thr < F(threshold.INFINITE_ALONE)) & (thr > F(threshold.INFINITE_FOUND))
                assert_none(shared & ~(made <= s), t=t, logit=logit, word=word, s=s, thr=thr, made=made)


def test_a_shared_strict_threshold_is_a_reached_score():
    """``Learning.share`` reads whatever the evaluators have set by then, ``learn``'s thresholds of ``after`` too."""
    rng = np.random.default_rng(3)
    for _ in range(ROUNDS):
        t, slope, (logit, _, _, s), _ = scored(rng, N)
        thr = of_score(after(s), slope)
        shared = (thr < F(threshold.INFINITE_ALONE)) & (thr > F(threshold.INFINITE_FOUND))
        made = score_of(thr, slope, 1)
        assert_none(shared & ~(made <= s), t=t, logit=logit, s=s, thr=thr, made=made)


def _s_where_smooth_thresholds_are_near_zero(rng, n):
    t = np.clip(temperatures(rng, n, 0), F(7.1e-4), None)
    slope = slope_of(t)
    s = (MARGIN / np.fmax(slope, LOG2_E).astype(np.float64)).astype(F)
    return slope, (s.view(np.int32) + rng.integers(-20, 21, n).astype(np.int32)).view(F)


def test_what_is_best_leads():
    """Over what lower and equal scores, or the next float of an equal one, have set; also where thresholds pass zero."""
    rng = np.random.default_rng(4)
    for i in range(ROUNDS):
        if i % 2:
            slope, s = _s_where_smooth_thresholds_are_near_zero(rng, N)
        else:
            slope = slope_of(temperatures(rng, N))
            s = logits(rng, N, np.full(N, 1, F))
        lower = of_score(s, slope)
        assert leads(lower, np.full(N, INF)).all()
        assert leads(lower, np.full(N, UNKNOWN)).all()
        assert_none(~leads(lower, lower), slope=slope, s=s)
        assert_none(~leads(lower, of_score(-after(-s), slope)), slope=slope, s=s)
        known = of_score(after(s), slope)
        assert_none(~leads(lower, known), slope=slope, s=s, lower=lower, known=known)


def test_rows_of_infinite_scores_still_look_for_a_finite_one():
    """+inf wins if any score is finite: until one was seen, all that are finite must be evaluated and published."""
    rng = np.random.default_rng(5)
    t, slope, (logit, _, code, s), _ = scored(rng, N)
    known = np.full(N, F(threshold.INFINITE_ALONE))
    assert_none(np.isfinite(s) & ~may_win(logit, code, slope, known), t=t, slope=slope, logit=logit, s=s)
    assert_none(np.isfinite(s) & ~some_may_win(logit, code, slope, known), t=t, slope=slope, logit=logit, s=s)
    assert_none(np.isfinite(s) & ~leads(of_score(s, slope), known), t=t, slope=slope, logit=logit, s=s)


def test_nan_and_infinite_scores_are_candidates():
    rng = np.random.default_rng(6)
    t = temperatures(rng, N)
    t[:10] = np.nan
    slope, code = slope_of(t), code_of(words(rng, N))
    known = of_score(logits(rng, N, np.full(N, 1, F)), slope)
    for logit in (F(np.nan), INF, -INF):
        row = np.full(N, logit)
        with_nan = np.isnan(row) | np.isnan(t) | (np.isinf(row) & np.isinf(t))
        must = with_nan | (row == INF)
        for passes in (coarse, may_win, some_may_win):
            assert_none(must & ~passes(row, code, slope, known), t=t, slope=slope, known=known)
    undecided = code_of([0, 1, 2])[rng.integers(0, 3, N)]
    some = logits(rng, N, np.full(N, 1, F))
    assert coarse(some, undecided, slope, known).all()
    assert may_win(some, undecided, slope, known).all()


def test_what_is_greatest_may_win_if_any_token_may():
    """A thread's tokens of a column are looked at together first."""
    rng = np.random.default_rng(7)
    for _ in range(ROUNDS):
        t, slope, (logit, _, code, s), _ = scored(rng, N)
        known = of_score((s + rng.choice([0, 20, 1e6], N)).astype(F), slope)
        marks = rng.choice(np.array([UNKNOWN, threshold.INFINITE_FOUND, threshold.INFINITE_ALONE], F), N)
        known = np.where(rng.random(N) < 0.1, marks, known)
        tokens = [(logit, code)]
        for _ in range(3):
            other = np.where(rng.random(N) < 0.5, logit, logits(rng, N, np.full(N, 1, F)))
            other = np.where(rng.random(N) < 0.1, rng.choice(np.array([np.nan, np.inf, -np.inf], F), N), other)
            tokens.append((other, code_of(words(rng, N))))
        some = np.zeros(N, bool)
        for token in tokens:
            some |= may_win(*token, slope, known)
        greatest = [np.maximum.reduce([token[i] for token in tokens]) for i in range(2)]
        assert_none(some & ~some_may_win(*greatest, slope, known), t=t, slope=slope, known=known)
