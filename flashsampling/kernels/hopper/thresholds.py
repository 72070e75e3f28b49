"""When a token need not be evaluated: what the search compares, and why nothing that can win is left out.

A row has a slope and a threshold, two floats in shared memory. The search skips a token of logit l whose noise has a
code with float w (``noise``) if ``l * slope + w * BOUND_STEP + threshold < 0``. Both sums are rounded once and towards
that sign's own truth (a float is below zero exactly if the real number that it rounds is), so what is skipped fulfils
it in real numbers.

The score is ``fma(gumbel, amplitude, l * scale)`` of ``noise.row_factors``; S is one that some token of the row
reaches, or less. A row is of one of two kinds, told apart by its slope:

    smooth   slope = log2(e) / T < SHARP. The search works in units of the base-2 Gumbel, 1 / max(slope, log2 e) of the
             score's: threshold = GUMBEL_BELOW + 2**-10 - p (1 -+ 2**-20), p = S max(slope, log2 e). The Gumbel is at
             most GUMBEL_BELOW + w CODE_STEP; 2**-20 of p is more than what the roundings of slope, scale, amplitude, p,
             threshold and the score itself amount to (13 of 2**-24, some relative to l * slope, which a token that is
             near S has as large as p but for the Gumbel's 65 at most), 2**-10 more than the hardware's logarithm errs
             by and what these 65 add.
    sharp    T < 7e-4 or greedy; slope is a power of two, at most 1 / amplitude but for rounding. Noise is so small
             beside the logits that 24 bits of l * slope would not tell two scores apart, so nothing is added to it that
             could round: threshold = -S * slope, exactly. The search then leaves through what scores up to 33 units
             less, and ``may_win`` bounds the score itself, rounded as the score is: fma is monotone in its product, of
             Gumbel and amplitude, and what ``may_win`` takes for either is not less, and not negative. For the
             amplitude 1 / slope would do, up to twice as much; but then a row of equal logits has hundreds of
             candidates, for eight. So a byte of shared memory has amplitude * slope, which is exact, as ``ratio``:
             rounded down to a multiple of 2**-8, for lower bounds, and with a RATIO_STEP more above it.

``of_score`` is monotone: a higher score never has the higher threshold, by a formula of one rounding. So the row's best
score always gets by a threshold of a lower or equal one. ``of_score(after(S))``, the next float's, also skips what
equals S: for tokens whose ids are higher than that of one that reaches S.

Other thresholds: NaN, nothing is known of the row, or only scores below what a threshold can say; everything is looked
at. INFINITE_FOUND and INFINITE_ALONE, some token scores +inf, and a finite score was seen or was not; further infinite
ones, of higher ids, are skipped. -inf, the row is decided: there is a NaN.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, select_

from . import noise

INFINITY = float("inf")
SHARP = 2.0**11  # slopes of sharp rows are at least that
GREEDY_SLOPE = 2.0**22  # above that of any temperature that is not greedy
RATIO_STEP = 2.0**-8
INFINITE_FOUND, INFINITE_ALONE = -(2.0**127), INFINITY
_LIMIT = 2.0**126  # of finite thresholds
_LOG2_E = 1.4426950408889634
_MARGIN = noise.GUMBEL_BELOW + 2.0**-10
_RELATIVE = 2.0**-20


def slope_of(temperature: Float32) -> Float32:
    """A row's slope."""
    slope = Float32(_LOG2_E) / temperature
    power = (slope.bitcast(Uint32) & Uint32(0x7F800000)).bitcast(Float32)
    slope = Float32(select_(slope >= Float32(SHARP), power, slope))
    return Float32(select_(temperature < Float32(noise.GREEDY_BELOW), Float32(GREEDY_SLOPE), slope))


def unknown() -> Float32:
    """The threshold of a row of which nothing is known: as an integer it is above all others."""
    return Uint32(0x7FC00000).bitcast(Float32)


def is_sharp(slope: Float32) -> Boolean:
    """Which of the two kinds a row is."""
    return slope >= Float32(SHARP)


def _inverse(power: Float32) -> Float32:
    """Of a power of two; not of what ``is_sharp`` denies."""
    return (Uint32(254 << 23) - power.bitcast(Uint32)).bitcast(Float32)


def ratio_byte(amplitude: Float32, slope: Float32) -> Uint32:
    """Of a row with that factor of the Gumbel, what ``ratio_of_byte`` makes its ratio of: of a smooth one 1."""
    # the product is between 1/2 and 1 but for roundings, 2**-22 of it, and GUMBEL_ABOVE is rounded down by more
    ratio = cute.arch.fmax(amplitude * slope, Float32(0.5))
    ratio = Float32(select_(is_sharp(slope), ratio, Float32(1.0)))
    return ratio.bitcast(Uint32) >> Uint32(16) & Uint32(0xFF)


def ratio_of_byte(byte: Uint32) -> Float32:
    """A row's ratio: the byte is a bfloat16's lower one, whose upper one is that of 1/2 and of 1."""
    return (byte << Uint32(16) | Uint32(0x3F000000)).bitcast(Float32)


def _smooth(p: Float32, margin: float, relative: float) -> Float32:
    factor = Float32(select_(p >= Float32(0.0), Float32(relative - 1.0), Float32(-relative - 1.0)))
    return cute.math.fma(p, factor, Float32(margin))


def _clamp(threshold: Float32) -> Float32:
    """Higher is always safe: more is evaluated. Without a negative zero, whose bits are not between its neighbours'."""
    clamped = cute.arch.fmax(threshold + Float32(0.0), Float32(-_LIMIT))
    return Float32(select_(threshold > Float32(_LIMIT), unknown(), clamped))


def of_score(score: Float32, slope: Float32) -> Float32:
    """The threshold of rows in which some token has this score, finite, or a higher one."""
    smooth = _smooth(score * cute.arch.fmax(slope, Float32(_LOG2_E)), _MARGIN, _RELATIVE)
    return _clamp(Float32(select_(is_sharp(slope), -score * slope, smooth)))


def after(score: Float32) -> Float32:
    """The next float above a finite one."""
    bits = (score + Float32(0.0)).bitcast(Int32)  # + 0.0: -0.0 is 0.0
    return (bits + Int32(select_(bits < Int32(0), Int32(-1), Int32(1)))).bitcast(Float32)


def warm_start_of(logit: Float32, code: Float32, slope: Float32, ratio: Float32) -> Float32:
    """A lower bound of a token's score, in the search's units; NaN where the score is NaN, -inf where it is. ``code``:
    the float of its code."""
    gumbel = cute.math.fma(code, Float32(noise.BOUND_STEP), Float32(noise.GUMBEL_ABOVE))
    gumbel = Float32(select_(code >= Float32(noise.HALF), gumbel, Float32(-5.1)))  # E is at most 23
    # of a sharp row a Gumbel of 1 is at least ``ratio`` of these units, at most 1; of a greedy one it is nothing
    least = cute.math.fma(logit, slope, cute.arch.fmin(gumbel, gumbel * ratio))
    # what is not sampled is -inf as well, and 0 * inf of a row of infinite temperature no score of it
    return Float32(select_(logit == Float32(-INFINITY), Float32(-INFINITY), least))


def of_warm_start(seed: Float32, slope: Float32) -> Float32:
    """The threshold of a finite ``warm_start_of``: not below that of the token's score, which in a smooth row twice
    the margins make
    sure of."""
    smooth = _smooth(seed, _MARGIN + 2.0**-10, 2 * _RELATIVE)
    return _clamp(Float32(select_(is_sharp(slope), -seed, smooth)))


def score_of(threshold: Float32, slope: Float32) -> Float32:
    """A score that the token is sure to reach that a threshold, within +-_LIMIT, is of; also if it is of the float
    after."""
    smooth = (Float32(noise.GUMBEL_BELOW) - threshold) * cute.arch.rcp_approx(cute.arch.fmax(slope, Float32(_LOG2_E)))
    return Float32(select_(is_sharp(slope), -after(threshold * _inverse(slope)), smooth))


class Bound(NamedTuple):
    """What ``may_win`` needs of a row."""

    slope: Float32
    threshold: Float32
    amplitude: Float32  # or a little more, of what is added to a sharp row's logits: 0 in a smooth row or a greedy one
    step: Float32  # per unit of a code's float, of what is added to a smooth row's bound
    open: Boolean  # not decided
    infinite: Boolean  # +inf has been found: no other infinite score is wanted


def bound_of(slope: Float32, threshold: Float32, ratio: Float32) -> Bound:
    """Of a row's slope, threshold and ratio."""
    sharp = is_sharp(slope)
    above = (ratio + Float32(RATIO_STEP)) * _inverse(slope)
    amplitude = Float32(select_(sharp & (slope != Float32(GREEDY_SLOPE)), above, Float32(0.0)))
    step = Float32(select_(sharp, Float32(0.0), Float32(noise.BOUND_STEP)))
    found = (threshold == Float32(INFINITE_FOUND)) | (threshold == Float32(INFINITE_ALONE))
    return Bound(slope, threshold, amplitude, step, threshold != Float32(-INFINITY), found)


def may_win(logit: Float32, code: Float32, bound: Bound) -> Boolean:
    """Whether a token must be evaluated, by the finest bound there is. NaN scores, and words without a code, must."""
    gumbel = cute.math.fma(code, Float32(noise.BOUND_STEP), Float32(_MARGIN))
    score = cute.math.fma(cute.arch.fmax(gumbel, Float32(0.0), nan=True), bound.amplitude, logit)
    above = cute.math.fma(code, bound.step, cute.math.fma(score, bound.slope, bound.threshold))
    return ~(above < Float32(0.0)) & bound.open & ~((cute.math.abs(logit) == Float32(INFINITY)) & bound.infinite)


def may_win_smooth(logit: Float32, code: Float32, slope: Float32, threshold: Float32) -> Boolean:
    """``may_win`` of smooth rows in which no +inf was found."""
    above = cute.math.fma(code, Float32(noise.BOUND_STEP), cute.math.fma(logit, slope, threshold))
    return ~(above < Float32(0.0)) & (threshold != Float32(-INFINITY))


def some_may_win(logit: Float32, code: Float32, bound: Bound) -> Boolean:
    """False if ``may_win`` is, of all tokens of a row with logits up to that (or NaN) and codes up to that: it rises
    with both. But for what it says of infinite logits, and of a slope of 0, which makes NaN of -inf."""
    return may_win(logit, code, bound._replace(infinite=Boolean(False))) | (bound.open & (bound.slope == Float32(0.0)))


def leads(lower: Float32, known: Float32) -> Boolean:
    """Whether a score whose threshold is ``lower`` may be the best, its row's having been ``known``: also if that is of
    an equal one, or of the float after it, since whoever set it may have had the higher id. Too often is harmless."""
    size = cute.math.abs(lower) + Float32(64.0)  # of what _MARGIN may have cancelled
    return ~(cute.math.fma(size, Float32(-(2.0**-21)), lower) > known)  # true if either is NaN
