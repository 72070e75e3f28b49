"""What the Hopper kernel's search leaves out cannot win, and what can is published.

``kernels/hopper/thresholds.py`` says which inequalities hold; here random and adversarial rows try to break them, by
its own functions (``on_device``). An error of the hardware's logarithm is added to each score."""

import numpy as np
import pytest

pytest.importorskip("cutlass")

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from flashsampling.kernels.hopper import noise, thresholds
from tests.conftest import DEVICE
from tests.kernels.hopper.on_device import on_device
from tests.problems import NEEDS_CUTE

pytestmark = NEEDS_CUTE

F = np.float32
INF, NAN = F(np.inf), F(np.nan)
N = 240_000
TEMPERATURES = [1e-6, 1.0000001e-6, 7e-4, 7.0443e-4, 7.0444e-4, 7.0445e-4, 1e-3, 0.5, 0.99999994, 1.0, 1.0000001, 2.0]
TEMPERATURES += [1e6, 1e20, 3.4e38, np.inf]


@pytest.fixture(autouse=True)
def _inexact(monkeypatch):
    """On the emulator approximate instructions are off by a unit in the last place."""
    if DEVICE.type == "cpu":
        from tests.emulator.machine import settings

        monkeypatch.setattr(settings, "sloppy", 1)
    with np.errstate(all="ignore"):
        yield


def _ratio(temperature: Float32, slope: Float32) -> Float32:
    return thresholds.decode_ratio(thresholds.encode_ratio(noise.row_factors(temperature)[1], slope))


def _bound(word: Uint32) -> Float32:
    return noise.bound_float(noise.encode_bounds([word] * 4), 0)


def _score(logit: Float32, temperature: Float32, word: Uint32, error: Float32) -> Float32:
    scale, amplitude = noise.row_factors(temperature)
    return noise.score(logit, scale, noise.minus_gumbel_refined(word, Uint32(12345)) + error, amplitude)


def _searched(logit: Float32, bound: Float32, slope: Float32, threshold: Float32) -> Boolean:
    """The search's first look."""
    base, exponents = cute.math.fma(logit, slope, threshold), noise.exponents(Int32(1))
    bounds = bound.bitcast(Uint32) >> Uint32(16) & Uint32(0xFF)
    return noise.add_bounds(base, base, bounds, 0, exponents) & Uint32(0x8000) == Uint32(0)


def _may_win(logit: Float32, bound: Float32, slope: Float32, threshold: Float32, ratio: Float32) -> Boolean:
    return thresholds.may_win(logit, bound, thresholds.row_bound(slope, threshold, ratio))


def _some_may_win(logit: Float32, bound: Float32, slope: Float32, threshold: Float32, ratio: Float32) -> Boolean:
    return thresholds.some_may_win(logit, bound, thresholds.row_bound(slope, threshold, ratio))


search_slope, ratio_of, score_of = on_device(thresholds.search_slope), on_device(_ratio), on_device(_score)
searched, may_win, some_may_win = on_device(_searched), on_device(_may_win), on_device(_some_may_win)
may_win_fast, leads, next_float = (
    on_device(function) for function in (thresholds.may_win_fast, thresholds.leads, thresholds.next_float)
)
threshold_from_score, warm_start_bound = (
    on_device(function) for function in (thresholds.threshold_from_score, thresholds.warm_start_bound)
)
threshold_from_warm_start, score_from_threshold = (
    on_device(function) for function in (thresholds.threshold_from_warm_start, thresholds.score_from_threshold)
)


def bound_of(word, temperature):
    return np.where(temperature < F(noise.GREEDY_BELOW), F(noise.HALF), on_device(_bound)(word))


def is_low_temperature(slope):
    return slope >= F(thresholds.LOW_TEMPERATURE_SLOPE)


def height(threshold):
    """As the kernel orders thresholds: by their bits, NaN above all."""
    return np.where(np.isnan(threshold), INF, threshold)


# -- rows


def temperatures(rng, greedy=0.1):
    t, some = 10.0 ** rng.uniform(-6, 6, N), rng.random(N)
    t = np.where(some < 0.3, rng.choice(TEMPERATURES, N), t)
    t = np.where((some > 0.3) & (some < 0.4), 7.0444e-4 * (1 + rng.normal(0, 1e-6, N)), t)
    powers = 1.4426950408889634 / 2.0 ** rng.integers(0, 21, N)  # slopes next to powers of two
    t = np.where((some > 0.4) & (some < 0.6), powers * (1 + rng.integers(-3, 4, N) * 2.0**-24), t)
    return np.where(rng.random(N) < greedy, F(0), np.maximum(t, F(1e-6)).astype(F)).astype(F)


def low_temperatures(rng):
    """Half of them at the ends of a slope's range, where a ratio is next to 1/2 or 1."""
    t = (10.0 ** rng.uniform(-6, np.log10(7.04e-4), N)).astype(F)
    ends = (1.4426950408889634 / 2.0 ** rng.integers(12, 21, N) * (1 + rng.integers(-3, 4, N) * 2.0**-24)).astype(F)
    return np.maximum(np.where(rng.random(N) < 0.5, t, ends), F(1e-6))


def words(rng):
    octave = (2.0 ** rng.uniform(0, 32, N)).astype(np.int64)
    edge = (2.0 ** rng.integers(1, 32, N) * (1 + rng.integers(0, 4, N) / 4)).astype(np.int64) + rng.integers(-2, 3, N)
    kind, any_word = rng.random(N), rng.integers(0, 2**32, N)
    w = np.where(kind < 0.4, octave, np.where(kind < 0.7, edge, np.where(kind < 0.75, any_word % 6, any_word)))
    return np.clip(w, 0, 2**32 - 1).astype(np.uint32)


def logits(rng, temperature):
    scale, largest = 10.0 ** rng.uniform(-45, 38.5, N), np.finfo(F).max
    near = np.where(temperature > 0, np.minimum(temperature, 1e30), 1) * 2.0 ** rng.uniform(-2, 20, N)
    values = np.where(rng.random(N) < 0.6, near, scale) * rng.choice([-1, 1], N) * rng.uniform(0.5, 1, N)
    return np.clip(values, -largest, largest).astype(F)


def neighbours(rng, logit, temperature):
    """Another token's logit: ulps away, or as far as noise reaches."""
    ulps = (logit.view(np.int32) + rng.integers(-3, 4, N).astype(np.int32)).view(F)
    reach = logit + np.minimum(temperature, F(1e30)) * rng.uniform(-45, 45, N).astype(F)
    other = np.where(rng.random(N) < 0.4, ulps, np.where(rng.random(N) < 0.8, reach, logit)).astype(F)
    return np.where(np.isfinite(other), other, logit).astype(F)


def errors(rng):
    return rng.uniform(-1, 1, N) * 2.0**-21


def scored(rng):
    """Two tokens of a row: temperature, slope, then logits, words, bounds and scores of both."""
    t = temperatures(rng)
    first, both = logits(rng, t), []
    for logit in (first, neighbours(rng, first, t)):
        word = words(rng)
        both.append((logit, word, bound_of(word, t), score_of(logit, t, word, errors(rng))))
    return t, search_slope(t), *both


def tied(rng):
    """The same of low temperatures, where both tie, or all but tie, by quite different noise, whose bound is next to
    it."""
    t = low_temperatures(rng)
    l0, w0 = np.where(rng.random(N) < 0.3, F(0), logits(rng, t)), words(rng)
    tight = (2.0 ** rng.integers(2, 32, N) * (1 + rng.integers(0, 4, N) / 4)).astype(np.uint32)  # next to a bound
    w1 = np.where(rng.random(N) < 0.7, tight, words(rng))
    s0, error = score_of(l0, t, w0, errors(rng)), errors(rng)
    l1 = -score_of(-s0, t, w1, error)
    l1 = (l1.view(np.int32) + rng.integers(-2, 3, N).astype(np.int32)).view(F)
    tokens = ((l0, w0, s0), (l1, w1, score_of(l1, t, w1, error)))
    return t, search_slope(t), *((logit, word, bound_of(word, t), s) for logit, word, s in tokens)


def assert_none(bad, **values):
    where = np.flatnonzero(bad)
    if len(where):
        lines = [", ".join(f"{k}={v[i]!r}" for k, v in values.items()) for i in where[:4]]
        raise AssertionError(f"{len(where)} of {len(bad)}\n" + "\n".join(lines))


@pytest.mark.parametrize("rows", [scored, tied])
def test_what_is_skipped_scores_less(rows):
    """By thresholds of a score: less. By those of the next float: less or equally."""
    t, slope, (_, _, _, s0), (l1, w1, b1, s1) = rows(np.random.default_rng(0))
    ratio = ratio_of(t, slope)
    for strict in (False, True):
        known = threshold_from_score(next_float(s0) if strict else s0, slope)
        skips = ~searched(l1, b1, slope, known) | ~may_win(l1, b1, slope, known, ratio)
        skips |= ~is_low_temperature(slope) & ~may_win_fast(l1, b1, slope, known)
        skips |= ~some_may_win(l1, b1, slope, known, ratio)
        wins = (s1 > s0 if strict else s1 >= s0) & np.isfinite(s0)
        assert (wins & ~np.isnan(b1)).mean() > 0.1
        assert_none(skips & wins, t=t, s0=s0, l1=l1, w1=w1, s1=s1, known=known)


def test_a_higher_score_has_no_higher_threshold():
    rng = np.random.default_rng(1)
    slope, s = search_slope(temperatures(rng)), np.where(rng.random(N) < 0.01, F(0), logits(rng, F(1)))
    higher, lower = threshold_from_score(next_float(s), slope), threshold_from_score(s, slope)
    assert_none(height(higher) > height(lower), slope=slope, s=s)
    assert_none(np.signbit(lower) & (lower == 0), slope=slope, s=s)  # whose bits are not between its neighbours'


def test_seeds_are_lower_bounds():
    """A seed's threshold is not below that of the token's score, and the score made of a threshold is reached, also if
    it is that of the next float."""
    t, slope, (logit, word, bound, s), _ = scored(np.random.default_rng(2))
    seed = warm_start_bound(logit, bound, slope, ratio_of(t, slope))
    usable = np.isfinite(seed)
    known, of_score = threshold_from_warm_start(seed, slope), threshold_from_score(s, slope)
    assert_none(usable & (height(known) < height(of_score)), t=t, logit=logit, word=word, s=s, seed=seed)
    for threshold in (known, of_score, threshold_from_score(next_float(s), slope)):
        made = score_from_threshold(threshold, slope)
        shared = usable & (threshold < F(thresholds.INFINITE_ALONE)) & (threshold > F(thresholds.INFINITE_FOUND))
        assert_none(shared & ~(made <= s), t=t, logit=logit, word=word, s=s, threshold=threshold, made=made)


def test_what_is_best_leads():
    """Over what lower and equal scores, or the next float of an equal one, have set; also where thresholds pass
    zero."""
    rng = np.random.default_rng(4)
    ordinary = search_slope(np.clip(temperatures(rng, 0), F(7.1e-4), None))
    near_zero = (thresholds._MARGIN / np.fmax(ordinary, F(thresholds._LOG2_E)).astype(np.float64)).astype(F)
    near_zero = (near_zero.view(np.int32) + rng.integers(-20, 21, N).astype(np.int32)).view(F)
    for slope, s in ((search_slope(temperatures(rng)), logits(rng, F(1))), (ordinary, near_zero)):
        lower, *others = (threshold_from_score(score, slope) for score in (s, next_float(s), -next_float(-s)))
        for known in (INF, NAN, lower, *others):
            assert_none(~leads(lower, known), slope=slope, s=s, lower=lower)


def test_what_is_greatest_may_win_if_any_token_may():
    """A thread's tokens of a column are looked at together first."""
    rng = np.random.default_rng(7)
    t, slope, (logit, _, bound, s), _ = scored(rng)
    known = threshold_from_score((s + rng.choice([0, 20, 1e6], N)).astype(F), slope)
    marks = rng.choice(np.array([NAN, thresholds.INFINITE_FOUND, thresholds.INFINITE_ALONE], F), N)
    known = np.where(rng.random(N) < 0.1, marks, known)
    tokens = [(logit, bound)]
    for _ in range(3):
        other = np.where(rng.random(N) < 0.5, logit, logits(rng, F(1)))
        other = np.where(rng.random(N) < 0.1, rng.choice(np.array([NAN, INF, -INF], F), N), other)
        tokens.append((other, bound_of(words(rng), F(1))))
    ratio = ratio_of(t, slope)
    some = np.logical_or.reduce([may_win(*token, slope, known, ratio) for token in tokens])
    greatest = [np.maximum.reduce([token[i] for token in tokens]) for i in range(2)]
    assert_none(some & ~some_may_win(*greatest, slope, known, ratio), t=t, slope=slope, known=known)


@pytest.mark.parametrize(("t", "logit"), [(1e-6, 0.0), (1e-5, 0.16), (5e-4, 0.16)])
def test_a_low_temperature_row_of_equal_logits_has_no_more_candidates_than_others(t, logit):
    """As one of zeros at temperature 1, behind the first tiles of all CTAs. With 1 / slope for the amplitude there
    would be many times as many."""
    word = np.random.default_rng(10).integers(0, 2**32, N).astype(np.uint32)

    def candidates(temperature, logit, ratio=None):
        slope, t = search_slope(temperature), F(temperature)
        best = score_of(logit, t, word[: 132 * 128], 0.0).max()
        ratio = ratio_of(t, slope) if ratio is None else ratio
        return int(may_win(logit, bound_of(word, t), slope, threshold_from_score(best, slope), ratio).sum())

    assert candidates(t, logit) < 1.5 * candidates(1.0, 0.0) + 10 < candidates(t, logit, ratio=F(1))
