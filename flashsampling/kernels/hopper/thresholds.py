"""Defines slopes and thresholds: when a token need not be scored, and why no winner is skipped.

A row has a slope and a threshold, two floats in shared memory. The search skips a token with logit l whose noise bound
is the float w (``noise``) if ``l * slope + w * BOUND_STEP + threshold < 0``. Both sums are rounded once, and a float is
below zero exactly if the real number that it rounds is. A skipped token therefore fulfils the inequality in real
numbers.

The score is ``fma(gumbel, amplitude, l * scale)`` with ``noise.row_factors``. Let S be a score that some token of the
row reaches, or less. The slope tells two kinds of rows apart:

    ordinary         slope = log2(e) / T < LOW_TEMPERATURE_SLOPE. The search works in units of the base-2 Gumbel, which
                     are 1 / max(slope, log2 e) of the score's. threshold = GUMBEL_BELOW + 2**-10 - p (1 -+ 2**-20) with
                     p = S max(slope, log2 e). The Gumbel is at most GUMBEL_BELOW + w BOUND_STEP. The margin 2**-20 p
                     exceeds the roundings of slope, scale, amplitude, p, threshold and score: 13 of 2**-24, some
                     relative to l * slope, which for a token near S is as large as p but for the Gumbel, 65 at most.
                     The margin 2**-10 exceeds the error of the hardware's logarithm and what these 65 add.
    low temperature  T < 7e-4 or greedy. The slope is a power of two, at most 1 / amplitude but for rounding. The noise
                     is so small beside the logits that 24 bits of l * slope would not tell two scores apart. Nothing is
                     therefore added that could round: threshold = -S * slope, exactly. The search lets tokens with up
                     to 33 units less pass, and ``may_win`` bounds the score itself, rounded as the score is: fma is
                     monotone in its product of Gumbel and amplitude, and ``may_win`` takes neither too low, nor
                     negative. 1 / slope would do as the amplitude, up to twice as much; but then a row of equal logits
                     has hundreds of candidates instead of eight. A byte of shared memory therefore holds
                     amplitude * slope, which is exact, as ``ratio``: rounded down to a multiple of 2**-8 for lower
                     bounds, and with one RATIO_STEP more for upper bounds.

``threshold_from_score`` is monotone: a higher score never has the higher threshold, by a formula of one rounding. The
row's best score therefore always passes the threshold of a lower or equal one. ``threshold_from_score(next_float(S))``
also skips scores equal to S: for tokens whose ids are higher than that of one that reaches S.

Other values of a threshold:

    NaN               nothing is known of the row, or its scores are below every threshold: every token is a candidate
    INFINITE_FOUND    some token scores +inf, and a finite score was seen; +inf with a higher id is skipped
    INFINITE_ALONE    the same, and no finite score was seen
    -inf              the row is decided: it has a NaN
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, select_

from . import noise

INFINITY = float("inf")
LOW_TEMPERATURE_SLOPE = 2.0**11  # the least slope of a low-temperature row
GREEDY_SLOPE = 2.0**22  # above that of every temperature that is not greedy
RATIO_STEP = 2.0**-8
INFINITE_FOUND, INFINITE_ALONE = -(2.0**127), INFINITY
_LIMIT = 2.0**126  # of a finite threshold's magnitude
_LOG2_E = 1.4426950408889634
_MARGIN = noise.GUMBEL_BELOW + 2.0**-10
_RELATIVE = 2.0**-20


def search_slope(temperature: Float32) -> Float32:
    """Returns a row's slope."""
    slope = Float32(_LOG2_E) / temperature
    power = (slope.bitcast(Uint32) & Uint32(0x7F800000)).bitcast(Float32)
    slope = Float32(select_(slope >= Float32(LOW_TEMPERATURE_SLOPE), power, slope))
    return Float32(select_(temperature < Float32(noise.GREEDY_BELOW), Float32(GREEDY_SLOPE), slope))


def unknown() -> Float32:
    """Returns the threshold of a row of which nothing is known: as an integer it is above all others."""
    return Uint32(0x7FC00000).bitcast(Float32)


def is_low_temperature(slope: Float32) -> Boolean:
    """Returns whether a slope is that of a low-temperature row."""
    return slope >= Float32(LOW_TEMPERATURE_SLOPE)


def _inverse(power: Float32) -> Float32:
    """Inverts a power of two. The slope of an ordinary row gives no meaningful result."""
    return (Uint32(254 << 23) - power.bitcast(Uint32)).bitcast(Float32)


def encode_ratio(amplitude: Float32, slope: Float32) -> Uint32:
    """Encodes ``amplitude * slope`` of a row as a byte for ``decode_ratio``; 1 in an ordinary row."""
    # the product is between 1/2 and 1 but for roundings, 2**-22 of it, and GUMBEL_ABOVE is rounded down by more
    ratio = cute.arch.fmax(amplitude * slope, Float32(0.5))
    ratio = Float32(select_(is_low_temperature(slope), ratio, Float32(1.0)))
    return ratio.bitcast(Uint32) >> Uint32(16) & Uint32(0xFF)


def decode_ratio(byte: Uint32) -> Float32:
    """Returns a row's ratio: the byte is the lower one of a bfloat16 whose upper byte is that of 1/2 and of 1."""
    return (byte << Uint32(16) | Uint32(0x3F000000)).bitcast(Float32)


def _ordinary_threshold(p: Float32, margin: float, relative: float) -> Float32:
    factor = Float32(select_(p >= Float32(0.0), Float32(relative - 1.0), Float32(-relative - 1.0)))
    return cute.math.fma(p, factor, Float32(margin))


def _clamp(threshold: Float32) -> Float32:
    """Clamps a threshold. Higher is always safe: more tokens are scored. -0.0 becomes 0.0, because its bits are not
    between its neighbours'."""
    clamped = cute.arch.fmax(threshold + Float32(0.0), Float32(-_LIMIT))
    return Float32(select_(threshold > Float32(_LIMIT), unknown(), clamped))


def threshold_from_score(score: Float32, slope: Float32) -> Float32:
    """Returns the threshold of rows in which some token has this finite score, or a higher one."""
    ordinary = _ordinary_threshold(score * cute.arch.fmax(slope, Float32(_LOG2_E)), _MARGIN, _RELATIVE)
    return _clamp(Float32(select_(is_low_temperature(slope), -score * slope, ordinary)))


def next_float(score: Float32) -> Float32:
    """Returns the next float above a finite one."""
    bits = (score + Float32(0.0)).bitcast(Int32)  # + 0.0: -0.0 is 0.0
    return (bits + Int32(select_(bits < Int32(0), Int32(-1), Int32(1)))).bitcast(Float32)


def warm_start_bound(logit: Float32, code: Float32, slope: Float32, ratio: Float32) -> Float32:
    """Returns a lower bound of a token's score, in the search's units: NaN where the score is NaN, -inf where it is.
    ``code``: the float w of its noise bound."""
    gumbel = cute.math.fma(code, Float32(noise.BOUND_STEP), Float32(noise.GUMBEL_ABOVE))
    gumbel = Float32(select_(code >= Float32(noise.HALF), gumbel, Float32(-5.1)))  # E is at most 23
    # in a low-temperature row a Gumbel of 1 is between ``ratio`` and 1 of these units; in a greedy row it is 0
    least = cute.math.fma(logit, slope, cute.arch.fmin(gumbel, gumbel * ratio))
    # a token that is not sampled is -inf too, and 0 * inf, at an infinite temperature, is not its score
    return Float32(select_(logit == Float32(-INFINITY), Float32(-INFINITY), least))


def threshold_from_warm_start(bound: Float32, slope: Float32) -> Float32:
    """Returns the threshold of a finite ``warm_start_bound``. It is not below that of the token's score: twice the
    margins ensure this in an ordinary row."""
    ordinary = _ordinary_threshold(bound, _MARGIN + 2.0**-10, 2 * _RELATIVE)
    return _clamp(Float32(select_(is_low_temperature(slope), -bound, ordinary)))


def score_from_threshold(threshold: Float32, slope: Float32) -> Float32:
    """Returns a score that the token behind a threshold within +-_LIMIT surely reaches, also if the threshold is of the
    float after the token's score."""
    ordinary = (Float32(noise.GUMBEL_BELOW) - threshold) * cute.arch.rcp_approx(cute.arch.fmax(slope, Float32(_LOG2_E)))
    return Float32(select_(is_low_temperature(slope), -next_float(threshold * _inverse(slope)), ordinary))


class Bound(NamedTuple):
    """The operands of ``may_win`` for one row."""

    slope: Float32
    threshold: Float32
    amplitude: Float32  # or a little more, in a low-temperature row; 0 in an ordinary or greedy one
    step: Float32  # BOUND_STEP in an ordinary row, else 0
    open: Boolean  # not decided
    infinite: Boolean  # +inf has been found: no other infinite score is wanted


def row_bound(slope: Float32, threshold: Float32, ratio: Float32) -> Bound:
    """Makes a ``Bound`` from a row's slope, threshold and ratio."""
    low_temperature = is_low_temperature(slope)
    above = (ratio + Float32(RATIO_STEP)) * _inverse(slope)
    amplitude = Float32(select_(low_temperature & (slope != Float32(GREEDY_SLOPE)), above, Float32(0.0)))
    step = Float32(select_(low_temperature, Float32(0.0), Float32(noise.BOUND_STEP)))
    found = (threshold == Float32(INFINITE_FOUND)) | (threshold == Float32(INFINITE_ALONE))
    return Bound(slope, threshold, amplitude, step, threshold != Float32(-INFINITY), found)


def may_win(logit: Float32, code: Float32, bound: Bound) -> Boolean:
    """Returns whether a token must be scored, by the finest bound. Tokens with a NaN score or a NaN bound must."""
    gumbel = cute.math.fma(code, Float32(noise.BOUND_STEP), Float32(_MARGIN))
    score = cute.math.fma(cute.arch.fmax(gumbel, Float32(0.0), nan=True), bound.amplitude, logit)
    above = cute.math.fma(code, bound.step, cute.math.fma(score, bound.slope, bound.threshold))
    return ~(above < Float32(0.0)) & bound.open & ~((cute.math.abs(logit) == Float32(INFINITY)) & bound.infinite)


def may_win_fast(logit: Float32, code: Float32, slope: Float32, threshold: Float32) -> Boolean:
    """Computes ``may_win`` for ordinary rows in which no +inf was found."""
    above = cute.math.fma(code, Float32(noise.BOUND_STEP), cute.math.fma(logit, slope, threshold))
    return ~(above < Float32(0.0)) & (threshold != Float32(-INFINITY))


def some_may_win(logit: Float32, code: Float32, bound: Bound) -> Boolean:
    """Returns False if ``may_win`` is False for all tokens of a row whose logits and bounds are at most these (or NaN).

    ``may_win`` rises with both, except for infinite logits and for a slope of 0, which makes NaN of -inf.
    """
    return may_win(logit, code, bound._replace(infinite=Boolean(False))) | (bound.open & (bound.slope == Float32(0.0)))


def leads(lower: Float32, known: Float32) -> Boolean:
    """Returns whether a score whose threshold is ``lower`` may be the best of a row whose threshold was ``known``.

    That includes equal scores and the float after, because the token behind ``known`` may have the higher id. A
    needless True is harmless.
    """
    size = cute.math.abs(lower) + Float32(64.0)  # the magnitude that _MARGIN may have cancelled
    return ~(cute.math.fma(size, Float32(-(2.0**-21)), lower) > known)  # True if either is NaN
