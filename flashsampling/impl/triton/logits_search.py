"""Of a row's tokens the boundary that a filter draws, found without sorting; and the tokens that can lie on its kept side.

A token's place is one number, greater for the greater logit and then for the lower id, so what a filter keeps is all places
from a limit on. The limit is searched for digit by digit: how many tokens, and how much mass, are at or above each of 16 places
at once; it is found as soon as a digit leaves one token. Sums run in an order that is fixed by the row alone, and rounding is
monotone, so they never contradict each other.

The tokens are candidates in memory (``gather``), or, where those do not suffice, the row itself (``WHOLE``).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .logits_source import (
    MINUS_INF,
    chunk_of,
    chunk_tokens,
    key_of,
    mass_of,
    processed_logits,
    raw_logits,
    sparse_entries,
    value_of,
)

_DIGIT = tl.constexpr(4)  # bits
_WAYS = tl.constexpr(16)


class Tokens(NamedTuple):
    """What a search goes over."""

    source: object
    keys: object  # (CAPACITY,) int32
    ids: object  # (CAPACITY,) int32
    count: object  # of candidates; of the whole row, the vocabulary's size
    lowest: object  # key; tokens below it are left out
    id_bits: object  # that ids need, a constant
    top: object  # highest logit
    scale: object  # of masses


@triton.jit
def tile_of(tokens, first, WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Keys, ids and which of them there are, (TILE,) each."""
    index = first + tl.arange(0, TILE)
    live = index < tokens.count
    if WHOLE:
        raw = raw_logits(tokens.source, index, live, HEAD)
        entries = tl.full((ENTRIES,), -1, tl.int32)
        if tokens.source.bias_ids is not None:
            entries = sparse_entries(tokens.source, ENTRIES)
            entries = tl.where((entries >= first) & (entries < first + TILE), entries, -1)
        x = processed_logits(tokens.source, (raw,), (index,), (live,), entries, ENTRIES)[0]
        return key_of(x), index, live
    else:
        return tl.load(tokens.keys + index, mask=live, other=0), tl.load(tokens.ids + index, mask=live, other=0), live


@triton.jit
def place_of(tokens, key, token):
    """int64 in the row's order, from 0 up; below 0 for a key that is left out."""
    last_id: tl.constexpr = (1 << tokens.id_bits) - 1
    return ((key.to(tl.int64) - tokens.lowest) << tokens.id_bits) | (token ^ last_id).to(tl.int64)


@triton.jit
def _sums(tokens, low, step, limit, WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Counts int32 and masses float64 (WAYS,): of the places from the limit on that are at least low, low + step, ..."""
    thresholds = low + step * tl.arange(0, _WAYS).to(tl.int64)
    thresholds = tl.where(thresholds < low, 0x7FFFFFFFFFFFFFFF, thresholds)  # beyond 2**63
    counts = tl.zeros((_WAYS,), tl.int32)
    masses = tl.zeros((_WAYS,), tl.float64)
    for start in range(0, tokens.count, TILE):
        key, token, live = tile_of(tokens, start, WHOLE, TILE, HEAD, ENTRIES)
        place = place_of(tokens, key, token)
        live = live & (place >= limit)
        there = (place[:, None] >= thresholds[None, :]) & live[:, None]
        mass = mass_of(value_of(key), tokens.top, tokens.scale)
        counts += tl.sum(there.to(tl.int32), axis=0)
        masses += tl.sum(tl.where(there, mass[:, None], 0.0), axis=0).to(tl.float64)
    return counts, masses


@triton.jit
def limit_of(
    tokens, highest, limit, by_mass, target, is_share,
    WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The limit of the shortest prefix of what a limit keeps whose count or mass reaches the target, or, if ``is_share``, that
    times the mass of all that is kept; the old limit if all of it does not."""
    way = tl.arange(0, _WAYS)
    low = tl.full((), 0, tl.int64)
    step = tl.full((), 1 << 60, tl.int64)
    last = place_of(tokens, highest, tl.full((), 0, tl.int32))
    while step > last:
        step = step >> _DIGIT
    asks = tl.full((), 1, tl.int32)  # for the total still
    while step > 0:
        counts, masses = _sums(tokens, low, step, limit, WHOLE, TILE, HEAD, ENTRIES)
        if asks != 0:
            total = tl.sum(tl.where(way == 0, masses, 0.0), axis=0)
            target = tl.where(is_share, target * total, target)
            asks = asks * 0
        sums = tl.where(by_mass, masses, counts.to(tl.float64))
        passed = tl.sum((sums >= target).to(tl.int32), axis=0)
        if passed == 0:  # all of it does not reach the target
            step = step * 0
        else:
            low += step * (passed - 1).to(tl.int64)
            left = tl.sum(tl.where(way == passed - 1, counts, 0), axis=0) - tl.sum(tl.where(way == passed, counts, 0), axis=0)
            limit = tl.maximum(limit, low)
            step = tl.where(left == 1, 0, step >> _DIGIT)
    return limit


# -- candidates


@triton.jit
def list_chunks(there, list_ptr, CHUNKS: tl.constexpr):
    """Writes the numbers of the chunks that are there (CHUNKS,), upwards. How many."""
    tl.debug_barrier()  # whoever reads the old list has done so
    there = there.to(tl.int32)
    tl.store(list_ptr + tl.cumsum(there, axis=0) - there, tl.arange(0, CHUNKS), mask=there != 0)
    tl.debug_barrier()
    return tl.sum(there, axis=0)


@triton.jit
def chunk_tile(
    source, list_ptr, listed, first, RAW: tl.constexpr,
    GATHERED: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Logits, tokens and which of them there are, of the listed chunks from ``first`` on: (GATHERED, tokens of a chunk)."""
    slot = first + tl.arange(0, GATHERED)
    chunk = tl.load(list_ptr + slot, mask=slot < listed, other=0)
    token = chunk_tokens(chunk)
    live = (token < source.vocab_size) & (slot < listed)[:, None]
    x = raw_logits(source, token, live, HEAD)
    if not RAW:
        entries = tl.full((ENTRIES,), -1, tl.int32)
        if source.bias_ids is not None:
            entries = sparse_entries(source, ENTRIES)
            near = (entries >= 0) & (chunk_of(entries) >= tl.load(list_ptr + first))
            near = near & (chunk_of(entries) <= tl.max(chunk, axis=0))
            entries = tl.where(near, entries, -1)
        x = processed_logits(source, (x,), (token,), (live,), entries, ENTRIES)[0]
    return x, token, live


@triton.jit
def gather(
    source, chunk_keys, bound, list_ptr, keys_ptr, ids_ptr, top, scale, RAW: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNKS: tl.constexpr, GATHERED: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Writes the candidates, the tokens with at least the key ``bound``. How many, also where there is no room for them, and
    their mass."""
    listed = list_chunks(chunk_keys >= bound, list_ptr, CHUNKS)
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float32)
    for first in range(0, listed, GATHERED):
        x, token, live = chunk_tile(source, list_ptr, listed, first, RAW, GATHERED, HEAD, ENTRIES)
        key = key_of(x)
        there = live & (key >= bound)
        ones = there.to(tl.int32)
        per_chunk = tl.sum(ones, axis=1)
        place = count + (tl.cumsum(per_chunk, axis=0) - per_chunk)[:, None] + tl.cumsum(ones, axis=1) - ones
        fits = there & (place < CAPACITY)
        tl.store(keys_ptr + place, key, mask=fits)
        tl.store(ids_ptr + place, token, mask=fits)
        count += tl.sum(per_chunk, axis=0)
        mass += tl.sum(tl.sum(tl.where(there, mass_of(x, top, scale), 0.0), axis=1), axis=0)
    tl.debug_barrier()
    return count, mass


@triton.jit
def kth_highest(chunk_keys, k):
    """A key that at least k of the chunks' highest reach, and so k tokens, or the lowest there is; (CHUNKS,) -> number.

    The last 2**14 keys are one: a safe bound need not be the best.
    """
    low = tl.full((), -0x80000000, tl.int64)
    step = tl.full((), 1 << 30, tl.int64)
    highest = tl.max(chunk_keys, axis=0).to(tl.int64)
    for _ in range(9):
        if low + step <= highest:
            reach = tl.zeros(chunk_keys.shape, tl.int64)  # three counts of 21 bits, in one sum
            for way in tl.static_range(1, 4):
                threshold = tl.minimum(low + step * way, 0x7FFFFFFF).to(tl.int32)
                reach += (chunk_keys >= threshold).to(tl.int64) << (21 * (way - 1))
            reach = tl.sum(reach, axis=0)
            for way in tl.static_range(3):
                low += tl.where(((reach >> (21 * way)) & 0x1FFFFF) >= k, step, 0)
        step = step >> 2
    return low.to(tl.int32)


@triton.jit
def nucleus_bound(chunk_keys, chunk_mass, top, scale, rest):
    """A key above which all but about ``rest`` of the row's mass lies: a guess, to be checked.

    Chunks are alike but for the few tokens that stand out, so what those without a token above a key hold is what every chunk
    holds below it.
    """
    chunks = tl.sum((chunk_keys > MINUS_INF).to(tl.float32), axis=0)
    # in 1024 steps over what can matter: 40 nats
    reach = 40.0 * 1.4426950408889634 / scale
    below = tl.full((), 1024, tl.int32)  # steps below the top
    step = tl.full((), 256, tl.int32)
    for _ in range(5):
        passed = tl.full((), 0, tl.int32)
        for way in tl.static_range(1, 4):
            bound = key_of(top - reach * ((below - step * way).to(tl.float32) / 1024.0))
            is_below = (chunk_keys < bound) & (chunk_keys > MINUS_INF)
            held = tl.sum(tl.where(is_below, chunk_mass, 0.0), axis=0)
            many = tl.sum(is_below.to(tl.float32), axis=0)
            passed += (held * chunks <= rest * many).to(tl.int32)
        below -= step * passed
        step = step >> 2
    return key_of(top - reach * (below.to(tl.float32) / 1024.0))
