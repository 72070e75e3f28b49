"""Orders logits, turns them into masses and scores, and says which tokens share a block.

A logit's key is an int32 in the order of the logits. A sort key is an int64, greater for the greater logit and then for
the lower token id: what a filter keeps of a row is all sort keys from a limit on. A mass is a probability divided by
that of the row's highest logit.
"""

import triton.language as tl

from .... import outputs
from ..fused.noise import INTERPRETED, philox_words
from ..fused.packed_argmax import NO_TOKEN
from ..jit import jit

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(3.4028234663852886e38)  # finite number
GREEDY_BELOW = tl.constexpr(1e-6)
DEFERRED_DRAW = tl.constexpr(outputs.DEFERRED_DRAW)
# a mass of 1 in fixed point: 2**20 of them fit an int64, and sums do not depend on the order
UNIT = tl.constexpr(2.0**42)
_AS_PROBABLE = tl.constexpr(-8.0e-17)  # a binary exponent: 2**-54 less than 1, from where on fp64 rounds to 1
# keys of -inf, +inf and NaN
MINUS_INF = tl.constexpr(-0x7F800001)
PLUS_INF = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FFFFFFF)
NO_LOGIT = tl.constexpr(-0x7FFFFFFF)  # below them
LOWEST = tl.constexpr(-0x80000000)  # below all keys


# -- blocks: the 32 tokens that share a maximum and a sum


@jit
def column_tokens(COLUMNS: tl.constexpr):
    """Returns lane 0's tokens of a tile's Philox groups, (COLUMNS,)."""
    column = tl.arange(0, COLUMNS)
    return tl.max_contiguous(column % 8 + (column // 8 % 4) * 16 + (column // 32) * 128, 8)


@jit
def lane_offset(lane: tl.constexpr):
    """Returns how far a group's token of a lane lies above that of lane 0: 0, 8, 64, 72."""
    return (lane & 1) * 8 + (lane // 2) * 64


@jit
def first_token_of(block):
    """Returns the first tokens of blocks. A block is 16 tokens of a tile of 128 and the 16 that are 64 above them."""
    return block // 4 * 128 + block % 4 * 16


@jit
def block_of(token):
    """Returns the block that a token is in."""
    return token // 128 * 4 + token // 16 % 4


@jit
def count_blocks(vocab_size):
    """Returns how many blocks a row has; some of the last four may hold no token."""
    return tl.cdiv(vocab_size, 128) * 4


@jit
def exp2(x):
    """Computes the hardware's 2**x, within 2**-22 relatively; 0 below 2**-126, for which ``tl.exp2`` takes three
    instructions more."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def scatter(pointer, value, mask):
    """Stores int32 or int64 values to pointers in no order. ``tl.store`` brings them into a layout of its own first,
    through shared memory and two barriers for each operand."""
    if INTERPRETED:
        tl.store(pointer, value, mask=mask)
    elif value.dtype == tl.int64:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l,r",
            [pointer.to(tl.int64), value, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointer.to(tl.int64), value, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


# -- order and mass


@jit
def key_of(x):
    """Returns int32 keys in the order of x; NaN above all, -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@jit
def value_of(key):
    """Returns the logit of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def sort_key(key, token):
    """Returns int64 sort keys of tokens with these keys."""
    return (key.to(tl.int64) << 31) | (token ^ NO_TOKEN).to(tl.int64)


@jit
def token_of(sort_key):
    """Returns the token ids of sort keys, int32."""
    return (sort_key.to(tl.int32) & NO_TOKEN) ^ NO_TOKEN


@jit
def _smallest():
    """Returns the smallest float32 above 0: the largest logit times it is 5e-7."""
    return tl.full((), 1, tl.int32).to(tl.float32, bitcast=True)


@jit
def mass_scale(temperature):
    """Returns the base-2 exponent of a mass per unit of logit. It is never 0, so that -inf stays -inf. Masses of a
    greedy row are at temperature 1."""
    inverse = 1.0 / tl.where(temperature < GREEDY_BELOW, 1.0, temperature)
    return tl.maximum(inverse * LOG2E, _smallest())


@jit
def below(x, top, scale):
    """Computes ``(x - top) * scale``, also of logits further apart than the largest float. The compiler makes one
    instruction of the halves' difference."""
    return (x * 0.5 - top * 0.5) * (scale * 2.0)


@jit
def mass_of(x, top, scale):
    """Returns masses of logits beside ``top``, the highest. Beside an infinite logit no finite one has any mass."""
    return tl.where(x == top, 1.0, exp2(below(x, top, scale)))


@jit
def units_of(x, top, scale):
    """Returns masses in fixed point, int64."""
    return (mass_of(x, top, scale) * UNIT).to(tl.int64)


@jit
def reaches(x, mass, least, top, scale):
    """Returns whether a token of this mass is at least ``least`` times as probable as the one of ``top``. As probable
    is what fp64 cannot tell apart: in fp32 a mass comes to 1 from 2**-25 below."""
    nearest = tl.where(least < 1.0, float("-inf"), _AS_PROBABLE)
    return (mass >= least) & ((x == top) | (below(x, top, scale) >= nearest))


@jit
def score_factors(temperature):
    """Returns the factors of the logit and of the base-2 noise, as ``row_params.score_params`` does. The first is never
    0, so that a masked token keeps its -inf at an infinite temperature."""
    hot = temperature > 1.0
    scale = tl.where(hot, 1.0 / tl.where(hot, temperature, 1.0), 1.0)
    scale = tl.maximum(scale, _smallest())
    noise = tl.where(temperature < GREEDY_BELOW, 0.0, temperature * LN2)
    return tl.where(temperature != temperature, temperature, scale), tl.where(hot, LN2, noise)


@jit
def word_of(token, draw_word, offset, seed):
    """Returns the Philox words of tokens, each of a Philox block of its own."""
    group = (token & 7) | (((token >> 4) & 3) << 3) | ((token >> 7) << 5)
    words = philox_words(
        group.to(tl.uint32), draw_word, offset.to(tl.uint32), (offset >> 32).to(tl.uint32), seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    lower = tl.where((token & 8) == 0, words[0], words[1])
    upper = tl.where((token & 8) == 0, words[2], words[3])
    return tl.where((token & 64) == 0, lower, upper)
