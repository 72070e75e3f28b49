"""Computes the contract's noise in CuTe: Philox4x32-10 words, the base-2 Gumbel, and its 7-bit upper bound.

The Gumbel is ``-log2(E / ln 2)``. The constant ``log2(ln 2)`` is common to a row and drops out of the argmax, and the
logarithms are the hardware's own base-2 ones.

**Philox.** What depends on the row alone (round keys, its half of the first two rounds) is computed once per launch
(``row_constants``), what depends on the group of tokens alone (the other half of the first round) once per group
(``group_product``). A block then costs 17 multiplications and 19 three-input exclusive-ors, and no addition.

**Accuracy of ``minus_gumbel``.** ``lg2.approx`` has an absolute error of 2**-22 next to 1. ``E = -log1p(-v)`` is
therefore a polynomial below v = 1/16 (truncation 1.6e-7 relative), and above it the logarithm of the complement, formed
from the negated word and not from ``1 - v``. Both ends of the range keep full relative precision.

**No wide multiplications.** Beside ``wgmma`` an ``IMAD.WIDE`` costs the tensor cores six to nine cycles, an ``IMAD.HI``
eight to fourteen, a plain ``IMAD`` none (``benchmarks/wgmma_neighbours.cu``). The noise warps therefore build a product
from four plain ones (``_multiply_narrow``): seven instructions in place of one. Whole steps with wide ones (two groups
at once) over narrow ones, H200, V = 151936, one run:

    B            96      128     192     256
    D = 576      0.997   1.041   0.989   1.017
    D = 1024     1.05    1.07    1.04    1.09
    D = 2048     1.005   1.04    1.13    1.22

**The bound.** Almost no token can win, and seven bits of its noise show it. ``encode_bounds`` makes a byte of a word:
the word's logarithm in quarters, rounded down and counted from above, so that more noise gives a greater byte. A byte
below 128 becomes the upper half of the float ``w = (1 + byte / 128) * 2**127`` by a byte permutation, and

    GUMBEL_ABOVE + w * BOUND_STEP <= base-2 Gumbel <= GUMBEL_BELOW + w * BOUND_STEP        the left side for v <= 1/2

    upper   E >= v, and log2 is at least its linear interpolation between powers of two
    lower   E <= 2 ln(2) v up to v = 1/2 (0.471), a quarter, and 0.086 for the interpolation

The words 0, 1 and 2 give bytes from 129 on, whose w is NaN: they are always candidates. The word 0 is among them,
because it needs the tail refinement. A greedy row's byte is GREEDY_BYTE, for which the bounds, 0.73 and -0.09, hold for
a Gumbel of 0.

Source of the method: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11 (Philox).
"""

import struct

import cutlass.cute as cute
from cutlass import Float32, Uint32, Uint64, select_

GROUP_STEP = _M0 = 0xD2511F53  # multipliers and Weyl increments of Philox4x32
_M1 = 0xCD9E8D57
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85
ROW_CONSTANTS = 20  # words of row_constants
REFINEMENT_BIT = 0x80 << 24  # the stream bit of the tail refinement's block

GUMBEL_BELOW = -33.7787  # -33.25 - log2(log2(e)), rounded up
GUMBEL_ABOVE = -34.59  # GUMBEL_BELOW less 0.472 + 0.25 + 0.087, rounded down
BOUND_STEP = 2.0**-122  # Gumbel per unit of w
GREEDY_BYTE = 10
MARKS = 0x80808080  # the mark bits of four bounds, see ``add_marks``
_EXPONENT = 0x7F000000  # upper byte of every w
HALF = (1 + GREEDY_BYTE / 128) * 2.0**127  # w of the smallest byte whose words have v <= 1/2

_SMALL_WORD = 1 << 28  # words below this have v < 1/16
_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
GREEDY_BELOW = 1e-6


def _multiply(a: Uint32, constant: int) -> tuple[Uint32, Uint32]:
    """Returns the high and low half of the 64-bit product."""
    product = Uint64(a) * Uint64(constant)
    return Uint32(product >> Uint64(32)), Uint32(product)


def _multiply_narrow(a: Uint32, constant: int) -> tuple[Uint32, Uint32]:
    """Returns the high half, and the complement of the low half, of the 64-bit product: four 32-bit multiplications and
    three shifts with addition.

    With a = 2**16 ah + al, c = 2**16 ch + cl, m = al ch + ah cl and p = al cl:  a c = 2**32 ah ch + 2**16 m + p. The
    carry into the high half, besides ah ch, is k with 2**16 m + p = 2**32 k + low. It follows from ~low without p:

            2**16 m + ~low = 2**32 k + (2**32 - 1 - p)                    so k = (m + ~low / 2**16) / 2**16

    al is not needed either: modulo 2**32, m = a ch + ah (cl - 2**16 ch). The sum fits a word if ch + cl < 2**16. That
    holds for 0xD2511F53. For 0xCD9E8D57 it holds with 2**32 - c in place of c: a c = 2**32 a - a (2**32 - c) gives in
    the same way k = (-m - low / 2**16) / 2**16, to be added to a - ah ch. Then ah + 4 stands for ah, which keeps the
    sum positive. Checked on all 2**32 words for both constants.
    """
    ch, cl = constant >> 16, constant & 0xFFFF
    negate = ch + cl >= 2**16
    more = 0
    if negate:
        ch, cl = (2**32 - constant) >> 16, (2**32 - constant) & 0xFFFF
        more = 4
        assert ch + cl < more * ch < 2**16
    sign = -1 if negate else 1
    ah = _add_upper(a, _word(more))
    not_low = _mad(a, -constant, _word(-1))
    m = _mad(ah, sign * (cl - (ch << 16)), _mad(a, sign * ch, _word(more * cl - 0xFFFF if negate else 0)))
    rest = _mad(ah, sign * ch, a if negate else Uint32(0))
    return _add_upper(_add_upper(not_low, m), rest), not_low


def _word(value: int) -> Uint32:
    return Uint32(value % 2**32)


def _mad(a: Uint32, constant: int, c: Uint32) -> Uint32:
    """Computes a * constant + c in one instruction. Left to itself the compiler hoists the constants into registers."""
    ptx = f"mad.lo.u32 {{$w0}}, {{$r0}}, {constant % 2**32:#x}, {{$r1}};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[a, c])


def _add_upper(a: Uint32, b: Uint32) -> Uint32:
    """Computes a / 2**16 + b in one instruction."""
    ptx = "{.reg .u32 t; shr.u32 t, {$r0}, 16; add.u32 {$w0}, t, {$r1};}"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[a, b])


def _round(counter: tuple, key_lo: Uint32, key_hi: Uint32, multiply=_multiply) -> tuple:
    high0, low0 = multiply(counter[0], _M0)
    high1, low1 = multiply(counter[2], _M1)
    return high1 ^ counter[1] ^ key_lo, low1, high0 ^ counter[3] ^ key_hi, low0


def philox_words(group: Uint32, stream_draw: Uint32, offset: tuple, key: tuple) -> tuple:
    """Computes Philox4x32-10 of counter (group, stream_draw, *offset) under key (low, high): four Uint32 words, one per
    lane."""
    counter = (group, stream_draw, offset[0], offset[1])
    for i in range(10):
        counter = _round(counter, key[0] + Uint32(i * _W0 % 2**32), key[1] + Uint32(i * _W1 % 2**32))
    return counter


def row_constants(stream_draw: Uint32, offset: tuple, key: tuple) -> list:
    """Returns what Philox needs of a row: four words of the first two rounds, then the complements of the keys of
    rounds 3 to 10."""
    key_lo = [key[0] + Uint32(i * _W0 % 2**32) for i in range(10)]
    key_hi = [key[1] + Uint32(i * _W1 % 2**32) for i in range(10)]
    high1, low1 = _multiply(offset[0], _M1)
    high2, low2 = _multiply(high1 ^ stream_draw ^ key_lo[0], _M0)
    words = [offset[1] ^ key_hi[0], low1 ^ key_lo[1], high2 ^ key_hi[1], ~low2]
    for i in range(2, 10):
        words += [~key_lo[i], ~key_hi[i]]
    return words


def group_product(group: Uint32) -> Uint64:
    """Returns the part of Philox's first round that all rows share; GROUP_STEP more for the next group."""
    return Uint64(group) * Uint64(GROUP_STEP)


def philox_words_from_products(group_product: Uint64, row: list) -> tuple:
    """Computes the words of ``philox_words`` from ``group_product`` and ``row_constants``."""
    # words 1 and 3 of a counter are complemented low halves, and so are the keys that they meet
    high1, not_low1 = _multiply_narrow(Uint32(group_product >> Uint64(32)) ^ row[0], _M1)
    counter = (high1 ^ row[1], not_low1, row[2] ^ Uint32(group_product), row[3])
    for i in range(8):
        counter = _round(counter, row[4 + 2 * i], row[5 + 2 * i], _multiply_narrow)
    return counter[0], ~counter[1], counter[2], ~counter[3]


def _permute_bytes(a: Uint32, b: Uint32, selector: int) -> Uint32:
    """Selects bytes of b : a, the lowest by the lowest digit of the selector."""
    ptx = f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#06x};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[a, b])


def encode_bounds(words: list) -> Uint32:
    """Encodes four words as bound bytes, the first in the lowest byte."""
    upper = [
        cute.arch.inline_ptx("cvt.rz.f32.u32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word]).bitcast(
            Uint32
        )
        for word in words
    ]
    # the upper halves of two floats, three bits to the left: the upper byte is then the low six bits of the exponent
    # and two of the mantissa. With 0x7E00 added, it is at least 0x80 for words from 3 on, and less for 0, 1 and 2
    low, high = (_mad(_permute_bytes(*upper[i : i + 2], 0x7632), 8, _word(0x7E007E00)) for i in (0, 2))
    return ~_permute_bytes(low, high, 0x7531)


def add_marks(gumbel_bounds: Uint32, marks: Uint32) -> Uint32:
    """Adds marks, bits of ``MARKS``, to four bounds. A marked byte of 1 or 5 becomes one more, which bounds its noise
    as well, so that 129 and 133 stay the bytes of the words 0, 1 and 2 alone."""
    one_more = marks & _zero_byte_mask(gumbel_bounds & Uint32(0xFBFBFBFB) ^ Uint32(0x01010101))
    return gumbel_bounds + (one_more >> Uint32(7)) | marks


def remove_marks(gumbel_bounds: Uint32, marks: Uint32) -> Uint32:
    """Removes marks from four bounds, but not the high bit of the words 0, 1 and 2."""
    rare = _zero_byte_mask(gumbel_bounds & Uint32(0xFBFBFBFB) ^ Uint32(0x81818181))
    return gumbel_bounds ^ (gumbel_bounds & marks & (rare ^ Uint32(MARKS)))


def _zero_byte_mask(x: Uint32) -> Uint32:
    """Returns the high bit of every byte that is 0."""
    low = Uint32(0x7F7F7F7F)
    return ((x & low) + low | x | low) ^ Uint32(0xFFFFFFFF)


def bound_float(gumbel_bounds: Uint32, byte: int) -> Float32:
    """Returns w of one of four bounds."""
    return _permute_bytes(gumbel_bounds, Uint32(_EXPONENT), 0x7055 | byte << 8).bitcast(Float32)


def decode_bound(code: Uint32) -> Float32:
    """Returns w of a single bound byte."""
    return (code << Uint32(16) | Uint32(_EXPONENT)).bitcast(Float32)


def exponents(batch) -> Uint32:
    """Returns the upper byte of every ``bound_float`` as a run-time value (a batch is positive). As a constant it would
    become an operand, and each permutation would need one more instruction for its selector."""
    return Uint32(_EXPONENT) ^ (Uint32(batch) >> Uint32(31))


def add_bounds(base_low: Float32, base_high: Float32, gumbel_bounds: Uint32, pair: int, exponents: Uint32) -> Uint32:
    """Computes base + w * BOUND_STEP for two neighbouring bounds, bytes 2 ``pair`` and 2 ``pair`` + 1, as bfloat16.
    Only signs matter.

    A sign bit is 0 wherever the exact sum is not negative: a negative base is rounded upwards, the sum is rounded once,
    and w and BOUND_STEP are exact in bfloat16.
    """
    step = int.from_bytes(struct.pack(">f", BOUND_STEP)[:2], "big") * 0x00010001  # twice, as bfloat16
    ptx = (
        f"{{.reg .b32 w, base, step; mov.b32 step, {step:#x}; "
        "cvt.rz.bf16x2.f32 base, {$r1}, {$r0}; "
        f"prmt.b32 w, {{$r2}}, {{$r3}}, {0x7372 if pair else 0x7170:#x}; "
        "fma.rn.bf16x2 {$w0}, w, step, base;}"
    )
    return cute.arch.inline_ptx(
        ptx, write_only_types=[Uint32], read_only_args=[base_low, base_high, gumbel_bounds, exponents]
    )


def _log2(x: Float32) -> Float32:
    """Computes the hardware's logarithm: absolute error 2**-22 in (1/2, 2)."""
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def _fma(a: Float32, b: float | Float32, c: float | Float32) -> Float32:
    return cute.math.fma(a, Float32(b), Float32(c))


def minus_gumbel(word: Uint32) -> Float32:
    """Computes minus the base-2 Gumbel of a word, plus log2(ln 2): log2(E / ln 2). The word 0, which needs the tail
    refinement, gives NaN."""
    # spelled out as fused operations: every place that computes this must round alike
    negative = Uint32(0) - word  # modulo 2**32: 0 stays 0
    v = _fma(Float32(word), 2.0**-32, 2.0**-33)
    complement = _fma(Float32(negative), 2.0**-32, -(2.0**-33))  # below zero for the word 0: its logarithm is NaN
    series = Float32(-_LOG2_E / 5)
    for i in (4, 3, 2, 1):
        series = _fma(series, v, -_LOG2_E / i)
    small = negative > Uint32(2**32 - _SMALL_WORD)
    minus_e = Float32(select_(small, series * v, _log2(complement)))
    return _log2(-minus_e)


def minus_gumbel_refined(word: Uint32, refinement: Uint32) -> Float32:
    """Computes ``minus_gumbel`` for every word. ``refinement``: the same lane of the block with the refinement bit
    set."""
    tail = _fma(Float32(refinement), 2.0**-64, 2.0**-65)
    return Float32(select_(word == Uint32(0), _log2(tail * Float32(_LOG2_E)), minus_gumbel(word)))


def row_factors(temperature: Float32) -> tuple[Float32, Float32]:
    """Returns the factors of the logit and of the base-2 Gumbel in a row's scores, ``logit / T + gumbel`` times
    ``min(T, 1)``. The second is 0 in greedy rows. A finite logit never overflows."""
    greedy = temperature < Float32(GREEDY_BELOW)
    hot = temperature > Float32(1.0)
    # within an ulp; of a sixteenth, because the instruction flushes results below 2**-126
    inverse = cute.arch.rcp_approx(temperature * Float32(0.0625)) * Float32(0.0625)
    scale = Float32(select_(hot, inverse, Float32(1.0)))
    amplitude = Float32(select_(hot, Float32(_LN_2), temperature * Float32(_LN_2)))  # NaN for NaN
    return scale, Float32(select_(greedy, Float32(0.0), amplitude))


def score(logit: Float32, scale: Float32, minus_noise: Float32, amplitude: Float32) -> Float32:
    """Computes a score. The operations are explicit, so that every path rounds alike."""
    return cute.math.fma(-minus_noise, amplitude, logit * scale)
