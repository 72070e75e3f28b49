"""Computes the contract's noise in Triton: Philox4x32-10 words and the base-2 Gumbel.

The functions are elementwise, so a caller keeps the register layout of its accumulator. A kernel compares logits plus
``-log2(E / ln 2)`` times ``ln 2 * T``: the constant ``log2(ln 2)`` is common to a row and drops out of the argmax, and
the logarithms are the hardware's own base-2 ones.

Accuracy: ``lg2.approx`` has an absolute error of 2**-22 next to 1. ``E = -log1p(-v)`` is therefore a polynomial below v
= 1/16 (truncation 1.6e-7 relative), and above it the logarithm of the complement, taken from the complemented word and
not from ``1 - v``. Both ends of the range keep full relative precision.
"""

import triton
import triton.language as tl

from ..jit import jit

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1: numpy on the CPU, no inline assembly

# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11: multipliers and Weyl increments.
_PHILOX_M0 = tl.constexpr(0xD2511F53)
_PHILOX_M1 = tl.constexpr(0xCD9E8D57)
_PHILOX_W0 = tl.constexpr(0x9E3779B9)
_PHILOX_W1 = tl.constexpr(0xBB67AE85)
REFINEMENT_BIT = tl.constexpr(0x80 << 24)  # the stream bit of the tail refinement's block

_TWO_POW_M32 = tl.constexpr(2.0**-32)
_TWO_POW_M33 = tl.constexpr(2.0**-33)
_TWO_POW_M64 = tl.constexpr(2.0**-64)
_TWO_POW_M65 = tl.constexpr(2.0**-65)
_TWO_POW_M100 = tl.constexpr(2.0**-100)  # 0f0D800000
_SMALL_WORD = tl.constexpr(1 << 28)  # words below this have v < 1/16

# E / ln 2 = v * (C0 + C1 v + C2 v^2 + ...), the series of -log1p(-v) times log2(e)
_C0 = tl.constexpr(1.4426950408889634)
_C1 = tl.constexpr(1.4426950408889634 / 2)
_C2 = tl.constexpr(1.4426950408889634 / 3)
_C3 = tl.constexpr(1.4426950408889634 / 4)
_C4 = tl.constexpr(1.4426950408889634 / 5)


@jit
def philox_words(group, stream_draw, offset_lo, offset_hi, key_lo, key_hi):
    """Computes Philox4x32-10 of counter (group, stream_draw, offset_lo, offset_hi): four uint32 words, one per lane of
    the group."""
    c0, c1, c2, c3 = group, stream_draw, offset_lo, offset_hi
    k0, k1 = key_lo, key_hi
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * _PHILOX_M0
        p1 = c2.to(tl.uint64) * _PHILOX_M1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 += _PHILOX_W0
        k1 += _PHILOX_W1
    return c0, c1, c2, c3


@jit
def _log2(x):
    """Computes the hardware's logarithm: absolute error 2**-22 in (1/2, 2). ``tl.log2`` is a subroutine of some 15
    instructions."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def _log2_neg(x):
    """Computes log2(-x); -100 for a zero. 2**-100 is far below the last bit of every other x."""
    if INTERPRETED:
        # assigned first: in the interpreter constexpr - tensor is a constexpr, which Triton 3.7 unwraps in assignments
        x = _TWO_POW_M100 - x
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; sub.f32 t, 0f0D800000, $1; lg2.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def scheduling_fence(x):
    """Returns x (uint32) behind a move that no compiler sees through, so that its uses are not hoisted out of a
    loop."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.uint32, is_pure=False, pack=1)


@jit
def minus_gumbel(word):
    """Computes minus the base-2 Gumbel of a uint32 word, plus log2(ln 2): log2(E / ln 2).

    The word 0, the one that needs the tail refinement, gives -100. That is below every refined value (the least is
    -64.5), so its score is a finite upper bound.
    """
    # explicit fused operations: every path that computes this must round alike
    # the word 0 wraps to the largest uint32 and takes the logarithm of a complement that rounds to 1
    small = word - 1 < _SMALL_WORD - 1
    # v, or its complement: selected before it is converted, which saves a conversion
    v = tl.fma(tl.where(small, word, word ^ 0xFFFFFFFF).to(tl.float32), _TWO_POW_M32, _TWO_POW_M33)
    series = tl.fma(tl.fma(tl.fma(tl.fma(v, -_C4, -_C3), v, -_C2), v, -_C1), v, -_C0)
    return _log2_neg(tl.where(small, series * v, _log2(v)))


@jit
def minus_gumbel_zero_word(refinement):
    """Computes ``minus_gumbel`` of the word 0 exactly. ``refinement``: the same lane of the block with the refinement
    bit set."""
    tail = refinement.to(tl.float32) * _TWO_POW_M64 + _TWO_POW_M65
    return _log2(tail * _C0)


@jit
def minus_gumbel_refined(word, refinement):
    """Computes ``minus_gumbel`` for every word; the word 0 by ``minus_gumbel_zero_word``."""
    return tl.where(word == 0, minus_gumbel_zero_word(refinement), minus_gumbel(word))
