"""What the Hopper kernel's search leaves out cannot win, and what can is published: by a model in exact float32.

``kernels/hopper/thresholds.py`` says which inequalities hold; here random and adversarial rows try to break them, on
the CPU."""

import numpy as np
import pytest

pytest.importorskip("cutlass")

from flashsampling.kernels.hopper import noise, thresholds
from tests.kernels.hopper.threshold_model import (
    INF,
    LOG2_E,
    MARGIN,
    UNKNOWN,
    F,
    amplitude_of,
    coarse,
    code_of,
    evaluations,
    exact_score,
    fma,
    height,
    is_low_temperature,
    leads,
    logits,
    low_temperatures,
    may_win,
    may_win_fast,
    minus_gumbel,
    next_float,
    ratio_of,
    score_from_threshold,
    scored,
    search_slope,
    some_may_win,
    temperatures,
    threshold_from_score,
    threshold_from_warm_start,
    warm_start_bound,
    words,
)


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


N = 240_000


def assert_none(bad, **values):
    where = np.flatnonzero(bad)
    if len(where):
        lines = [", ".join(f"{k}={v[i]!r}" for k, v in values.items()) for i in where[:4]]
        raise AssertionError(f"{len(where)} of {len(bad)}\n" + "\n".join(lines))


def test_codes_bound_the_gumbel():
    octaves = 2.0 ** np.arange(2, 32)
    word = np.concatenate([o * q / 4 + d for o in octaves for q in (4, 5, 6, 7) for d in [np.arange(-2, 3)]])
    word = np.unique(
        np.concatenate([np.arange(3, 4096), np.clip(word, 3, 2**32 - 1), [2**32 - 1]]).astype(np.int64)
    ).astype(np.uint32)
    code = code_of(word).astype(np.float64) * noise.BOUND_STEP
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
    t, slope, (_, _, _, s0), (l1, w1, c1, s1) = scored(rng, N)
    ratio = ratio_of(t, slope)
    for strict in (False, True):
        known = threshold_from_score(next_float(s0) if strict else s0, slope)
        skips = ~coarse(l1, c1, slope, known) | ~may_win(l1, c1, slope, known, ratio)
        skips |= ~is_low_temperature(slope) & ~may_win_fast(l1, c1, slope, known)
        skips |= ~some_may_win(l1, c1, slope, known, ratio)
        wins = s1 > s0 if strict else s1 >= s0
        assert_none(skips & wins & np.isfinite(s0), t=t, s0=s0, l1=l1, w1=w1, s1=s1, known=known)


def test_a_higher_score_has_no_higher_threshold():
    rng = np.random.default_rng(1)
    slope = search_slope(temperatures(rng, N))
    s = logits(rng, N, np.full(N, 1, F))
    higher, lower = threshold_from_score(next_float(s), slope), threshold_from_score(s, slope)
    assert_none(height(higher) > height(lower), slope=slope, s=s)


def test_seeds_are_lower_bounds():
    """A seed's threshold is not below that of the token's score, and the score made of a threshold is reached."""
    rng = np.random.default_rng(2)
    t, slope, (logit, word, code, s), _ = scored(rng, N)
    seed = warm_start_bound(logit, code, slope, ratio_of(t, slope))
    usable = np.isfinite(seed)
    known = threshold_from_warm_start(seed, slope)
    below = height(known) < height(threshold_from_score(s, slope))
    assert_none(usable & below, t=t, logit=logit, word=word, s=s, seed=seed)
    for thr in (known, threshold_from_score(s, slope)):
        for ulps in (-1, 1):
            made = score_from_threshold(thr, slope, ulps)
            shared = usable & (thr < F(thresholds.INFINITE_ALONE)) & (thr > F(thresholds.INFINITE_FOUND))
            assert_none(shared & ~(made <= s), t=t, logit=logit, word=word, s=s, thr=thr, made=made)


def test_a_shared_strict_threshold_is_a_reached_score():
    """``ThresholdUpdates.share`` reads whatever the evaluators have set by then, ``update_threshold``'s thresholds of
    ``after`` too."""
    rng = np.random.default_rng(3)
    t, slope, (logit, _, _, s), _ = scored(rng, N)
    thr = threshold_from_score(next_float(s), slope)
    shared = (thr < F(thresholds.INFINITE_ALONE)) & (thr > F(thresholds.INFINITE_FOUND))
    made = score_from_threshold(thr, slope, 1)
    assert_none(shared & ~(made <= s), t=t, logit=logit, s=s, thr=thr, made=made)


def _s_where_smooth_thresholds_are_near_zero(rng, n):
    t = np.clip(temperatures(rng, n, 0), F(7.1e-4), None)
    slope = search_slope(t)
    s = (MARGIN / np.fmax(slope, LOG2_E).astype(np.float64)).astype(F)
    return slope, (s.view(np.int32) + rng.integers(-20, 21, n).astype(np.int32)).view(F)


def test_what_is_best_leads():
    """Over what lower and equal scores, or the next float of an equal one, have set; also where thresholds pass
    zero."""
    rng = np.random.default_rng(4)
    ordinary = search_slope(temperatures(rng, N)), logits(rng, N, np.full(N, 1, F))
    for slope, s in (ordinary, _s_where_smooth_thresholds_are_near_zero(rng, N)):
        lower = threshold_from_score(s, slope)
        assert leads(lower, np.full(N, INF)).all()
        assert leads(lower, np.full(N, UNKNOWN)).all()
        assert_none(~leads(lower, lower), slope=slope, s=s)
        assert_none(~leads(lower, threshold_from_score(-next_float(-s), slope)), slope=slope, s=s)
        known = threshold_from_score(next_float(s), slope)
        assert_none(~leads(lower, known), slope=slope, s=s, lower=lower, known=known)


def test_what_is_greatest_may_win_if_any_token_may():
    """A thread's tokens of a column are looked at together first."""
    rng = np.random.default_rng(7)
    t, slope, (logit, _, code, s), _ = scored(rng, N)
    known = threshold_from_score((s + rng.choice([0, 20, 1e6], N)).astype(F), slope)
    marks = rng.choice(np.array([UNKNOWN, thresholds.INFINITE_FOUND, thresholds.INFINITE_ALONE], F), N)
    known = np.where(rng.random(N) < 0.1, marks, known)
    tokens = [(logit, code)]
    for _ in range(3):
        other = np.where(rng.random(N) < 0.5, logit, logits(rng, N, np.full(N, 1, F)))
        other = np.where(rng.random(N) < 0.1, rng.choice(np.array([np.nan, np.inf, -np.inf], F), N), other)
        tokens.append((other, code_of(words(rng, N))))
    some, ratio = np.zeros(N, bool), ratio_of(t, slope)
    for token in tokens:
        some |= may_win(*token, slope, known, ratio)
    greatest = [np.maximum.reduce([token[i] for token in tokens]) for i in range(2)]
    assert_none(some & ~some_may_win(*greatest, slope, known, ratio), t=t, slope=slope, known=known)


def test_ratios_bound_a_sharp_rows_amplitude():
    """From below within the roundings that ``warm_start_bound`` has room for, from above strictly, and by 1/128 of it
    at most."""
    rng = np.random.default_rng(8)
    t = np.maximum(low_temperatures(rng, N), F(1e-6))
    slope = search_slope(t)
    assert is_low_temperature(slope).all()
    ratio = ratio_of(t, slope).astype(np.float64)
    exact = amplitude_of(t).astype(np.float64) * slope.astype(np.float64)
    assert_none(~(ratio <= exact * (1 + 2.0**-20)), t=t, ratio=ratio, exact=exact)
    assert_none(~(ratio + thresholds.RATIO_STEP > exact), t=t, ratio=ratio, exact=exact)
    assert_none(ratio + thresholds.RATIO_STEP > exact * (1 + 2.0**-7 + 2.0**-20), t=t, ratio=ratio, exact=exact)
    others = temperatures(rng, N)
    others = others[~is_low_temperature(search_slope(others))]
    assert (ratio_of(others, search_slope(others)) == 1).all()


def test_equal_scores_of_sharp_rows_are_not_skipped():
    """Tokens that tie, or all but tie, by quite different noise, whose bound is next to it."""
    rng = np.random.default_rng(9)
    t = np.maximum(low_temperatures(rng, N), F(1e-6))
    slope = search_slope(t)
    ratio = ratio_of(t, slope)
    l0 = np.where(rng.random(N) < 0.3, F(0), logits(rng, N, t))
    w0 = words(rng, N)
    tight = (2.0 ** rng.integers(2, 32, N) * (1 + rng.integers(0, 4, N) / 4)).astype(np.uint32)  # next to a bound
    w1 = np.where(rng.random(N) < 0.7, tight, words(rng, N)).astype(np.uint32)
    s0, c1 = exact_score(l0, t, w0, rng.uniform(-1, 1, N), 0), code_of(w1)
    error = rng.uniform(-1, 1, N)
    l1 = fma(minus_gumbel(w1, error), amplitude_of(t), s0)
    l1 = (l1.view(np.int32) + rng.integers(-2, 3, N).astype(np.int32)).view(F)
    s1 = exact_score(l1, t, w1, error, 0)
    for strict in (False, True):
        known = threshold_from_score(next_float(s0) if strict else s0, slope)
        wins = (s1 > s0 if strict else s1 >= s0) & np.isfinite(s0)
        assert (wins & ~np.isnan(c1)).mean() > 0.2
        for looked_at in (
            coarse(l1, c1, slope, known),
            may_win(l1, c1, slope, known, ratio),
            some_may_win(l1, c1, slope, known, ratio),
        ):
            assert_none(wins & ~looked_at, t=t, l0=l0, w0=w0, s0=s0, l1=l1, w1=w1, s1=s1, known=known)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("t", "logit"), [(1e-6, 0.0), (1e-5, 0.16), (5e-4, 0.16)])
def test_a_sharp_row_of_equal_logits_has_no_more_candidates_than_others(t, logit):
    """As one of zeros at temperature 1: 8 of 151936 tokens in the mean. With 1 / slope for the amplitude there were 230
    to 280, most of them in the first tiles."""
    rng, t = np.random.default_rng(10), np.full(1, t, F)
    (ratio,) = ratio_of(t, search_slope(t))
    smooth_row = sharp_row = by_slope = 0
    for _ in range(8):
        word = rng.integers(0, 2**32, 151936).astype(np.uint32)
        smooth_row += evaluations(F(1), F(0), word, F(1), F(1))
        sharp_row += evaluations(t[0], F(logit), word, ratio, ratio + F(thresholds.RATIO_STEP))
        by_slope += evaluations(t[0], F(logit), word, F(0.5), F(1))
    assert sharp_row < 1.2 * smooth_row
    assert by_slope > 10 * sharp_row
