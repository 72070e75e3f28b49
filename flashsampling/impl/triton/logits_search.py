"""Of a row's tokens the boundary that a filter draws, found without sorting; and the tokens that can lie on its kept side.

A boundary is a pair (key, id): kept is what has a greater key, or the same one and an id up to that one. Its key is searched for
digit by digit: how many tokens, or how much mass, have at least one of ``WAYS`` keys at once. Sums run in an order that is fixed
by the row alone, and rounding is monotone, so they never contradict each other.

The tokens are candidates in memory (``gather``), or, where those do not suffice, the row itself (``WHOLE``).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .logits_source import NO_LIMIT, chunk_of, chunk_tokens, key_of, mass_of, processed_logits, raw_logits, sparse_entries, value_of

COUNT = tl.constexpr(0)  # what a search adds up: tokens with at least a key,
MASS = tl.constexpr(1)  # their mass,
TIES = tl.constexpr(2)  # or tokens of one key below an id
WAYS = tl.constexpr(16)


class Tokens(NamedTuple):
    """What a search goes over."""

    source: object
    keys: object  # (CAPACITY,) int32
    ids: object  # (CAPACITY,) int32
    count: object  # of candidates; of the whole row, the vocabulary's size
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
def is_kept(key, token, limit_key, limit_id):
    """Whether tokens are on the kept side of a boundary."""
    return (key > limit_key) | ((key == limit_key) & (token <= limit_id))


@triton.jit
def _sums(
    tokens, first, step, limit_key, limit_id, tie,
    WHAT: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """(WAYS,) float32: of the kept tokens, the sums at first, first + step, ..."""
    thresholds = tl.minimum(first + step * tl.arange(0, WAYS).to(tl.int64), 0x7FFFFFFF).to(tl.int32)
    totals = tl.zeros((WAYS,), tl.float32)
    for start in range(0, tokens.count, TILE):
        key, token, live = tile_of(tokens, start, WHOLE, TILE, HEAD, ENTRIES)
        live = live & is_kept(key, token, limit_key, limit_id)
        if WHAT == TIES:
            there = (token[:, None] < thresholds[None, :]) & (live & (key == tie))[:, None]
            totals += tl.sum(there.to(tl.float32), axis=0)
        elif WHAT == COUNT:
            there = (key[:, None] >= thresholds[None, :]) & live[:, None]
            totals += tl.sum(there.to(tl.float32), axis=0)
        else:
            mass = tl.where(live, mass_of(value_of(key), tokens.top, tokens.scale), 0.0)
            totals += tl.sum(tl.where(key[:, None] >= thresholds[None, :], mass[:, None], 0.0), axis=0)
    return totals


@triton.jit
def _search(
    tokens, low, highest, target, limit_key, limit_id, tie,
    WHAT: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The greatest key from low to highest at which the sum reaches the target (it does at low); or the greatest id at which
    the ties below it are fewer."""
    low = tl.cast(low, tl.int64)
    step = tl.full((), 1 << 28, tl.int64)
    way = tl.arange(0, WAYS)
    for _ in range(8):
        if low + step <= highest:
            totals = _sums(tokens, low, step, limit_key, limit_id, tie, WHAT, WHOLE, TILE, HEAD, ENTRIES)
            if WHAT == TIES:
                passed = totals < target
            else:
                passed = totals >= target
            low += step * tl.sum((passed & (way > 0)).to(tl.int32), axis=0)
        step = step >> 4
    return low.to(tl.int32)


@triton.jit
def first_of_ties(
    tokens, tie, needed, limit_key, limit_id,
    WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The id up to which the kept tokens of one key are ``needed`` many; NO_LIMIT if there are no more."""
    way = tl.arange(0, WAYS)
    everything = tl.full((), 0x7FFFFFFF, tl.int64)
    totals = _sums(tokens, everything, 0, limit_key, limit_id, tie, TIES, WHOLE, TILE, HEAD, ENTRIES)
    last = tl.full((), NO_LIMIT, tl.int32)
    if tl.sum(tl.where(way == 0, totals, 0.0), axis=0) > needed:
        vocab_size = tl.cast(tokens.source.vocab_size, tl.int64)
        last = _search(tokens, 0, vocab_size, needed, limit_key, limit_id, tie, TIES, WHOLE, TILE, HEAD, ENTRIES)
    return last


@triton.jit
def boundary(
    tokens, low, highest, target, limit_key, limit_id,
    WHAT: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The boundary (key, id) of the shortest prefix of the kept tokens whose count or mass reaches the target; the old one if
    all of them do not. ``low``: no token has a lower key."""
    way = tl.arange(0, WAYS)
    key = limit_key
    last = limit_id
    low = tl.cast(low, tl.int64)
    totals = _sums(tokens, low, 0, limit_key, limit_id, 0, WHAT, WHOLE, TILE, HEAD, ENTRIES)
    if tl.sum(tl.where(way == 0, totals, 0.0), axis=0) >= target:
        found = _search(tokens, low, highest, target, limit_key, limit_id, 0, WHAT, WHOLE, TILE, HEAD, ENTRIES)
        totals = _sums(tokens, found.to(tl.int64) + 1, 0, limit_key, limit_id, 0, WHAT, WHOLE, TILE, HEAD, ENTRIES)
        needed = target - tl.sum(tl.where(way == 0, totals, 0.0), axis=0)
        if WHAT == MASS:
            needed = needed / mass_of(value_of(found), tokens.top, tokens.scale)
        needed = tl.maximum(tl.ceil(needed), 1.0)
        ties_end = first_of_ties(tokens, found, needed, limit_key, limit_id, WHOLE, TILE, HEAD, ENTRIES)
        last = tl.where(found == limit_key, tl.minimum(limit_id, ties_end), ties_end)
        key = found
    return key, last


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
    GATHERED: tl.constexpr, COLUMNS: tl.constexpr, REPS: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Logits, tokens and which of them there are, of the listed chunks from ``first`` on: (GATHERED, tokens of a chunk)."""
    slot = first + tl.arange(0, GATHERED)
    chunk = tl.load(list_ptr + slot, mask=slot < listed, other=0)
    token = chunk_tokens(chunk, COLUMNS, REPS)
    live = (token < source.vocab_size) & (slot < listed)[:, None]
    x = raw_logits(source, token, live, HEAD)
    if not RAW:
        entries = tl.full((ENTRIES,), -1, tl.int32)
        if source.bias_ids is not None:
            entries = sparse_entries(source, ENTRIES)
            near = (entries >= 0) & (chunk_of(entries, COLUMNS, REPS) >= tl.load(list_ptr + first))
            near = near & (chunk_of(entries, COLUMNS, REPS) <= tl.max(chunk, axis=0))
            entries = tl.where(near, entries, -1)
        x = processed_logits(source, (x,), (token,), (live,), entries, ENTRIES)[0]
    return x, token, live


@triton.jit
def gather(
    source, chunk_keys, bound, list_ptr, keys_ptr, ids_ptr, top, scale, RAW: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNKS: tl.constexpr, GATHERED: tl.constexpr, COLUMNS: tl.constexpr, REPS: tl.constexpr, HEAD: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Writes the candidates, the tokens with at least the key ``bound``. How many, which may be more than there is room for, and
    their mass."""
    listed = list_chunks(chunk_keys >= bound, list_ptr, CHUNKS)
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float32)
    for first in range(0, listed, GATHERED):
        x, token, live = chunk_tile(source, list_ptr, listed, first, RAW, GATHERED, COLUMNS, REPS, HEAD, ENTRIES)
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
        passed = tl.full((), 0, tl.int32)
        for way in tl.static_range(1, 4):
            threshold = low + step * way
            if threshold <= highest:
                reach = tl.sum((chunk_keys >= threshold.to(tl.int32)).to(tl.int32), axis=0)
                passed += (reach >= k).to(tl.int32)
        low += step * passed
        step = step >> 2
    return low.to(tl.int32)


@triton.jit
def nucleus_bound(chunk_keys, chunk_mass, chunks, top, scale, rest):
    """A key above which all but about ``rest`` of the row's mass lies: a guess, to be checked.

    Chunks are alike but for the few tokens that stand out, so what those without a token above a key hold is what every chunk
    holds below it.
    """
    # in 1024 steps over what can matter: 40 nats
    reach = 40.0 * 1.4426950408889634 / scale
    below = tl.full((), 1024, tl.int32)  # steps below the top
    step = tl.full((), 256, tl.int32)
    for _ in range(5):
        passed = tl.full((), 0, tl.int32)
        for way in tl.static_range(1, 4):
            bound = key_of(top - reach * ((below - step * way).to(tl.float32) / 1024.0))
            is_below = chunk_keys < bound
            held = tl.sum(tl.where(is_below, chunk_mass, 0.0), axis=0)
            many = tl.sum(is_below.to(tl.float32), axis=0)
            passed += (held * chunks <= rest * many).to(tl.int32)
        below -= step * passed
        step = step >> 2
    return key_of(top - reach * (below.to(tl.float32) / 1024.0))
