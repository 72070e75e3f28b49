"""A row's logits in memory: where they lie, what a request makes of them, and in which order they are compared.

    raw        after the head's bias, scale and soft cap
    processed  after the request's biases, penalties and token mask too: what filters and draws are about

Both kernels of ``logits`` read them through these functions, so a token's logit is the same bits wherever it is made.
"""

from typing import NamedTuple

import triton.language as tl

from .... import outputs
from ..constant import Constant
from ..fused.noise import INTERPRETED, philox_words
from ..jit import jit

LOG2E = Constant(1.4426950408889634)
LN2 = Constant(0.6931471805599453)
LARGEST = Constant(3.4028234663852886e38)  # finite number
GREEDY_BELOW = Constant(1e-6)
DEFERRED_DRAW = Constant(outputs.DEFERRED_DRAW)
DEFERRED_TOP_K = Constant(outputs.DEFERRED_TOP_K)
_AS_PROBABLE = Constant(-8.0e-17)  # a binary exponent: 2**-54 less than 1, from where on fp64 rounds to 1
# keys of -inf, +inf and NaN
MINUS_INF = Constant(-0x7F800001)
PLUS_INF = Constant(0x7F800000)
NAN = Constant(0x7FFFFFFF)
NO_LOGIT = Constant(-0x7FFFFFFF)  # below them
# likewise, and nowhere beside it: what a block's mark is if its logits are not all equal, and if none of them is finite
# either
MIXED = Constant(-0x80000000)
MIXED_INFINITE = Constant(-0x7FFFFFFF)


class LogitSource(NamedTuple):
    """What one row's logits are made of; None: not asked for."""

    row: object  # int64
    logits: object
    logits_stride: object
    vocab_size: object
    bias: object
    logit_scale: object
    soft_cap: object
    dense_bias: object
    bias_ids: object
    bias_values: object
    bias_count: object
    ids_stride: object
    values_stride: object
    counts: object
    counts_stride: object
    repetition: object
    frequency: object
    presence: object
    token_mask: object
    mask_stride: object
    chunk_keys: object  # (B, chunks) int32; of no account without ``floors``
    floors: object  # (B,) int32: the logits of chunks with a lower key are not there, see ``stored``


# -- chunks: the tokens that share a maximum and a sum


@jit
def column_tokens(COLUMNS: tl.constexpr):
    """Lane 0's tokens of a block's Philox groups, (COLUMNS,): lanes 1, 2, 3 lie 8, 64 and 72 above."""
    column = tl.arange(0, COLUMNS)
    return tl.max_contiguous(column % 8 + (column // 8 % 4) * 16 + (column // 32) * 128, 8)


@jit
def chunk_tokens(chunk):
    """Tokens of chunks (N,): (N, 32). A chunk is 16 tokens of a block of 128 and the 16 that are 64 above them."""
    first = chunk // 4 * 128 + chunk % 4 * 16
    e = tl.arange(0, 32)
    return tl.multiple_of(first, 16)[:, None] + tl.max_contiguous(e % 16 + e // 16 * 64, 16)[None, :]


@jit
def chunk_places(chunk):
    """Likewise ``place_in_memory``, beside floors."""
    return chunk[:, None] * 32 + tl.arange(0, 32)[None, :]


@jit
def chunk_of(token):
    """The chunk that a token is in."""
    return token // 128 * 4 + token // 16 % 4


@jit
def chunks_in(vocab_size):
    """How many a row has; those of the last block may be of no token."""
    return tl.cdiv(vocab_size, 128) * 4


# -- parameters and logits


@jit
def row_f32(address, value, row):
    """A row's float32 parameter; ``value`` where the address is 0."""
    pointer = (address + row.to(tl.int64) * 4).to(tl.pointer_type(tl.float32))
    return tl.load(pointer, mask=address != 0, other=value)


@jit
def row_i64(address, value, row):
    """A row's int64 parameter; ``value`` where the address is 0."""
    pointer = (address + row.to(tl.int64) * 8).to(tl.pointer_type(tl.int64))
    return tl.load(pointer, mask=address != 0, other=value)


@jit
def row_top_k(address, value, row, WIDE: tl.constexpr):
    """A row's top-k, int64 in a tensor of either width."""
    if WIDE:
        return row_i64(address, value, row)
    else:
        pointer = (address + row.to(tl.int64) * 4).to(tl.pointer_type(tl.int32))
        return tl.load(pointer, mask=address != 0, other=value.to(tl.int32)).to(tl.int64)


@jit
def exp2(x):
    """The hardware's, within 2**-22 of it; what is below 2**-126 is 0. ``tl.exp2`` takes three instructions more for
    those."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def scatter(pointer, value, mask):
    """Stores 32-bit values to pointers in no order. ``tl.store`` brings them into a layout of its own first, by shared
    memory and two barriers for each operand."""
    if INTERPRETED:
        tl.store(pointer, value, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointer.to(tl.int64), value.to(tl.int32, bitcast=True), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def _tanh(x):
    """Within 3e-7 of tanh, relatively: a continued fraction near 0, exponentials elsewhere. Triton has none of its
    own."""
    x2 = x * x
    e = exp2(tl.abs(x) * (-2.0 * LOG2E))
    is_near = tl.abs(x) < 0.6  # one division, of what is chosen
    above = tl.where(is_near, x * (945.0 + x2 * (105.0 + x2)), tl.where(x < 0.0, e - 1.0, 1.0 - e))
    below = tl.where(is_near, 945.0 + x2 * (420.0 + x2 * 15.0), 1.0 + e)
    return above / below


@jit
def place_in_memory(source, tokens, RUN: tl.constexpr):
    """Where logits lie in a row: beside floors by chunks, of which one is a line of the cache. ``RUN``, up to 16:
    tokens that are neighbours, from a multiple of it on."""
    place = tokens
    if source.floors is not None:
        place = (tokens & ~0x7F) | (tokens & 0x30) << 1 | (tokens >> 2) & 0x10 | tokens & 0xF
        if RUN > 1:
            place = tl.max_contiguous(tl.multiple_of(place, RUN), RUN)
    return place


@jit
def raw_logits_at(source, places, tokens, live, HEAD: tl.constexpr):
    """Raw logits of tokens whose ``place_in_memory`` is known, float32; -inf where not live. ``HEAD``: there is a scale
    or a soft cap."""
    x = tl.load(source.logits + source.row * source.logits_stride + places, mask=live, other=float("-inf")).to(
        tl.float32
    )
    if source.bias is not None:
        x += tl.load(source.bias + tokens, mask=live, other=0.0)
    if HEAD:
        x *= source.logit_scale
        if source.soft_cap > 0.0:
            x = _tanh(x / source.soft_cap) * source.soft_cap
        x = tl.where(live, x, float("-inf"))
    return x


@jit
def raw_logits(source, tokens, live, HEAD: tl.constexpr, RUN: tl.constexpr = 1):
    """Likewise of tokens wherever they lie. ``RUN``: see ``place_in_memory``."""
    return raw_logits_at(source, place_in_memory(source, tokens, RUN), tokens, live, HEAD)


@jit
def _dense(source, x, tokens, live):
    if source.dense_bias is not None:
        x += tl.load(source.dense_bias + tokens, mask=live, other=0.0)
    return x


@jit
def is_allowed(source, tokens, live):
    """Returns whether the token mask leaves tokens in; all, if there is none."""
    if source.token_mask is not None:
        word = tl.load(source.token_mask + source.row * source.mask_stride + (tokens >> 5), mask=live, other=0)
        live = live & (((word >> (tokens & 31)) & 1) != 0)
    return live


@jit
def _penalized(source, x, tokens, live):
    if source.counts is not None:
        counts = tl.load(source.counts + source.row * source.counts_stride + tokens, mask=live, other=0)
        x = tl.where(counts != 0, tl.where(x > 0.0, x / source.repetition, x * source.repetition), x)
        times = (counts & 0x7FFFFFFF).to(tl.float32)
        x = tl.where(times > 0.0, x - source.frequency * times - source.presence, x)
    if source.token_mask is not None:
        x = tl.where(is_allowed(source, tokens, live), x, float("-inf"))
    return x


@jit
def sparse_entries(source, ENTRIES: tl.constexpr):
    """Tokens of the row's sparse bias, (ENTRIES,) int32; -1: none. To be narrowed down to those of a tile."""
    index = tl.arange(0, ENTRIES)
    ids = tl.load(source.bias_ids + source.row * source.ids_stride + index, mask=index < source.bias_count, other=-1)
    return tl.where(ids < source.vocab_size, ids, -1)


@jit
def processed_logits(source, raw, tokens, live, entries, ENTRIES: tl.constexpr):
    """What a request makes of a tuple of tensors of raw logits, of as many tensors of tokens. ``entries`` (ENTRIES,):
    tokens of the sparse bias, -1 for those that are in none of the tensors."""
    done = ()
    for i in tl.static_range(len(raw)):
        done = done + (_dense(source, raw[i], tokens[i], live[i]),)
    if source.bias_ids is not None:
        index = tl.arange(0, ENTRIES)
        pending = entries >= 0
        for _ in range(tl.sum(pending.to(tl.int32), axis=0)):
            entry = tl.min(tl.where(pending, index, ENTRIES), axis=0)
            pending = pending & (index != entry)
            token = tl.load(source.bias_ids + source.row * source.ids_stride + entry)
            value = tl.load(source.bias_values + source.row * source.values_stride + entry)
            biased = ()
            for i in tl.static_range(len(raw)):
                biased = biased + (tl.where(tokens[i] == token, done[i] + value, done[i]),)
            done = biased
    penalized = ()
    for i in tl.static_range(len(raw)):
        x = _penalized(source, done[i], tokens[i], live[i])
        penalized = penalized + (x,)
    return penalized


@jit
def stored(source, tokens, live):
    """Which of the live tokens' logits are in memory: of a chunk below the row's floor nothing is, and what lies there
    is not to be read. All that reads a row without having chosen chunks by their keys asks, and takes those for
    -inf."""
    if source.floors is not None:
        keys = source.chunk_keys + source.row * chunks_in(source.vocab_size)
        live = live & (tl.load(keys + chunk_of(tokens), mask=live, other=0) >= tl.load(source.floors + source.row))
    return live


@jit
def both_logits_of(source, token, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Raw and processed logit of one token of the row, two numbers."""
    tokens = token + tl.arange(0, 1)
    live = (tokens >= 0) & (tokens < source.vocab_size)
    raw = raw_logits(source, tokens, stored(source, tokens, live), HEAD)
    entries = tl.full((ENTRIES,), -1, tl.int32)
    if source.bias_ids is not None:
        entries = sparse_entries(source, ENTRIES)
        entries = tl.where(entries == token, entries, -1)
    processed = processed_logits(source, (raw,), (tokens,), (live,), entries, ENTRIES)[0]
    return tl.max(raw, axis=0), tl.max(processed, axis=0)


# -- order and mass


@jit
def key_of(x):
    """int32 in the order of x; NaN above all, -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@jit
def value_of(key):
    """The x of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _smallest():
    """Above 0, of float32: the largest logit times it is 5e-7."""
    return tl.full((), 1, tl.int32).to(tl.float32, bitcast=True)


@jit
def mass_scale(temperature):
    """Per unit of logit, to the base 2. Never 0, so -inf stays -inf; a greedy row's masses are at temperature 1."""
    inverse = 1.0 / tl.where(temperature < GREEDY_BELOW, 1.0, temperature)
    return tl.maximum(inverse * LOG2E, _smallest())


@jit
def below(x, top, scale):
    """``(x - top) * scale``, of logits that are further apart than the largest float too. As many instructions: the
    compiler makes one of the halves' difference."""
    return (x * 0.5 - top * 0.5) * (scale * 2.0)


@jit
def mass_of(x, top, scale):
    """Probability of a logit over that of ``top``, the highest. Beside an infinite one no finite one has any."""
    return tl.where(x == top, 1.0, exp2(below(x, top, scale)))


@jit
def reaches(x, mass, least, top, scale):
    """Returns whether a token with this ``mass_of`` is at least ``least`` times as probable as that of ``top``. As probable is
    what fp64 cannot tell apart: in fp32 a mass comes to 1 from 2**-25 below."""
    nearest = tl.where(least < 1.0, float("-inf"), _AS_PROBABLE)
    return (mass >= least) & ((x == top) | (below(x, top, scale) >= nearest))


@jit
def score_factors(temperature):
    """Factors of the logit and of the base-2 noise, as ``rows.both_factors`` gives them; the first is never 0, so a
    token that is masked out keeps its -inf at an infinite temperature. What else is infinite then, the scan finds
    out."""
    hot = temperature > 1.0
    scale = tl.where(hot, 1.0 / tl.where(hot, temperature, 1.0), 1.0)
    scale = tl.maximum(scale, _smallest())
    noise = tl.where(temperature < GREEDY_BELOW, 0.0, temperature * LN2)
    return tl.where(temperature != temperature, temperature, scale), tl.where(hot, LN2, noise)


@jit
def word_of(token, draw_word, offset_lo, offset_hi, key_lo, key_hi):
    """The Philox words of tokens, or of one, each of a block of its own."""
    group = (token & 7) | (((token >> 4) & 3) << 3) | ((token >> 7) << 5)
    words = philox_words(group.to(tl.uint32), draw_word, offset_lo, offset_hi, key_lo, key_hi)
    lower = tl.where((token & 8) == 0, words[0], words[1])
    upper = tl.where((token & 8) == 0, words[2], words[3])
    return tl.where((token & 64) == 0, lower, upper)
