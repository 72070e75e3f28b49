"""Computes scores and the 64-bit keys that publish a row's best score and token; both passes share it."""

import triton.language as tl

from .... import exchange_protocol as protocol
from ..jit import jit
from .noise import philox_words

NO_TOKEN = tl.constexpr(protocol.NO_TOKEN)
NAN_KEY = tl.constexpr(protocol.NAN)
ORDERED_INF = tl.constexpr(0x7F800000 + 2**31)  # a key's high bits if its score is +inf


@jit
def with_noise(scaled, minus_noise, noise_factor):
    """Adds the noise to a scaled logit: the second half of ``compute_score``."""
    return tl.fma(-minus_noise, noise_factor, scaled)


@jit
def compute_score(logit, scale, bias, minus_noise, noise_factor):
    """Computes logit * scale + bias + noise * noise_factor. The operations are explicit, so that every pass and tile
    shape rounds alike."""
    return with_noise(tl.fma(logit, scale, bias), minus_noise, noise_factor)


@jit
def keep_better(best, best_id, score, token):
    """Updates the running winners, (score, id) per register, with one more score each. A NaN stays."""
    best_id = tl.where(score > best, token, best_id)
    return tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL), best_id


@jit
def pack_key(score, token):
    """Packs an order-preserving 64-bit key: positive int64, greater for the greater score, then for the lower id; NaN
    above all."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0.0 and 0.0 tie
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2**31  # 0 .. 2**32 - 1
    # the score's low bit is kept: ids need 31 bits, so the key is 32 + 31 bits and never negative
    key = (ordered << 31) | (token ^ NO_TOKEN).to(tl.int64)
    return tl.where(score != score, NAN_KEY, key)


@jit
def token_word(token, offset_lo, offset_hi, key_lo, key_hi):
    """Returns the Philox word of a token, draw 0: its group is the id without bits 3 and 6, and these are its lane."""
    group = (token & 7) | (((token >> 4) & 3) << 3) | ((token >> 7) << 5)
    no_draw = tl.zeros(token.shape, tl.uint32)
    words = philox_words(group.to(tl.uint32), no_draw, offset_lo, offset_hi, key_lo, key_hi)
    lower = tl.where((token & 8) == 0, words[0], words[1])
    upper = tl.where((token & 8) == 0, words[2], words[3])
    return tl.where((token & 64) == 0, lower, upper)
