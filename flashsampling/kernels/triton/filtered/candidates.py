"""What the chunks' highest logits and masses say of a row, and the tokens that can lie on a filter's kept side: the
candidates.

A row's chunks are a tuple of (WIDTH,) tensors, so one per column of it is in the registers of one thread: what needs
all of them, and there are thousands, is added up there first, and threads wait for each other once per question, not
once per part. Where the highest of the columns will do, as for a small top-k, only those are looked at.
"""

import triton.language as tl

from ..constant import Constant
from ..jit import jit
from ..reductions import sum_three
from .logit_source import (
    LARGEST,
    LOG2E,
    MINUS_INF,
    NO_LOGIT,
    PLUS_INF,
    chunk_of,
    chunk_places,
    chunk_tokens,
    key_of,
    mass_of,
    processed_logits,
    raw_logits_at,
    scatter,
    sparse_entries,
    value_of,
)

_WAYS = Constant(4)  # thresholds at a time, 16 bits of a sum for each
_LOWEST = Constant(-0x80000000)


@jit
def load_chunks(pointer, chunks, other, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """A row's numbers of chunks, a tuple of (WIDTH,)."""
    parts = ()
    for i in tl.static_range(PARTS):
        chunk = tl.arange(0, WIDTH) + i * WIDTH
        parts = parts + (tl.load(pointer + chunk, mask=chunk < chunks, other=other),)
    return parts


@jit
def highest_of(keys):
    """Of a tuple, per column."""
    highest = keys[0]
    for i in tl.static_range(1, len(keys)):
        highest = tl.maximum(highest, keys[i])
    return highest


@jit
def some_finite(keys):
    """Returns whether the highest of some chunk is."""
    found = tl.full((), 0, tl.int1)
    for i in tl.static_range(len(keys)):
        finite = (keys[i] > MINUS_INF) & (keys[i] < PLUS_INF)
        found = found | (tl.max(finite.to(tl.int32), axis=0) != 0)
    return found


@jit
def lowest_of(keys):
    """Of a tuple, the lowest that is there."""
    lowest = tl.full(keys[0].shape, 0x7FFFFFFF, tl.int32)
    for i in tl.static_range(len(keys)):
        lowest = tl.minimum(lowest, tl.where(keys[i] > NO_LOGIT, keys[i], 0x7FFFFFFF))
    return tl.min(lowest, axis=0)


@jit
def lowest_of_tokens(keys, vocab_size):
    """Of a row's chunks, the lowest of those that hold a token: of the last 128 tokens' four some may hold none."""
    WIDTH: tl.constexpr = keys[0].shape[0]
    lowest = tl.full((WIDTH,), 0x7FFFFFFF, tl.int32)
    for i in tl.static_range(len(keys)):
        chunk = tl.arange(0, WIDTH) + i * WIDTH
        lowest = tl.minimum(lowest, tl.where(chunk // 4 * 128 + chunk % 4 * 16 < vocab_size, keys[i], 0x7FFFFFFF))
    return tl.min(lowest, axis=0)


@jit
def masses_of(keys, sums, top, scale):
    """Every chunk's mass relative to the row's highest logit, and all of it."""
    masses = ()
    total = tl.zeros(keys[0].shape, tl.float32)
    for i in tl.static_range(len(keys)):
        mass = tl.where(keys[i] > MINUS_INF, sums[i] * mass_of(value_of(keys[i]), top, scale), 0.0)
        masses = masses + (mass,)
        total += mass
    return masses, tl.sum(total, axis=0)


# -- bounds


@jit
def _reached(keys, k, low, highest):
    """A key that k of a tuple reach, and not many more if there is such a one; ``low`` is a key that k reach."""
    slack = k // 4 + 8
    low = low.to(tl.int64)
    step = (highest.to(tl.int64) - low) // (_WAYS + 1) + 1
    searching = tl.full((), 1, tl.int32)
    many = tl.full((), 0x7FFFFFFF, tl.int64)
    while searching != 0:
        reach = tl.zeros(keys[0].shape, tl.int64)
        for way in tl.static_range(_WAYS):
            threshold = tl.minimum(low + step * (way + 1), 0x7FFFFFFF).to(tl.int32)
            for i in tl.static_range(len(keys)):
                reach += tl.where(keys[i] >= threshold, 1 << (16 * way), 0).to(tl.int64)
        reach = tl.sum(reach, axis=0)
        passed = tl.full((), 0, tl.int64)
        for way in tl.static_range(_WAYS):
            here = (reach >> (16 * way)) & 0xFFFF
            many = tl.where(here >= k, here, many)
            passed += (here >= k).to(tl.int64)
        low += step * passed
        searching = ((step > 1) & (many > k + slack)).to(tl.int32)
        step = step // (_WAYS + 1) + 1
    return low.to(tl.int32)


@jit
def kth_highest(keys, highest, k, chunks):
    """A key that at least k of the chunks' highest reach, and so k tokens, or the lowest there is."""
    WIDTH: tl.constexpr = keys[0].shape[0]
    columns = highest_of(keys)
    bound = tl.full((), _LOWEST, tl.int32)
    if 2 * k <= tl.minimum(chunks, WIDTH):  # hardly two of the k highest tokens are in one column
        bound = _reached((columns,), k, lowest_of((columns,)), highest)
    elif (k <= chunks) & (len(keys) * WIDTH < 65536):
        bound = _reached(keys, k, lowest_of(keys), highest)
    return bound


@jit
def first_ties(keys, highest, many):
    """The keys of the chunks up to the block of 128 tokens by which ``many`` chunks have reached the highest key;
    NO_LOGIT behind it. There must be so many."""
    WIDTH: tl.constexpr = keys[0].shape[0]
    seen = tl.full((), 0, tl.int32)
    last = tl.full((), 0x7FFFFFFF, tl.int32)
    for i in tl.static_range(len(keys)):
        chunk = tl.arange(0, WIDTH) + i * WIDTH
        reached = seen + tl.cumsum((keys[i] == highest).to(tl.int32), axis=0)
        last = tl.minimum(last, tl.min(tl.where(reached >= many, chunk, 0x7FFFFFFF), axis=0))
        seen = tl.max(reached, axis=0)
    kept = ()
    for i in tl.static_range(len(keys)):
        chunk = tl.arange(0, WIDTH) + i * WIDTH
        kept = kept + (tl.where(chunk // 4 <= last // 4, keys[i], NO_LOGIT),)
    return kept


@jit
def nucleus_bound(keys, masses, top, scale, rest, vocab_size):
    """A key above which all but about ``rest`` of the row's mass lies: a guess, to be checked.

    Chunks are alike but for the few tokens that stand out, so what those without a token above a key hold is what every
    chunk holds below it.
    """
    live = tl.zeros(keys[0].shape, tl.float32)
    for i in tl.static_range(len(keys)):
        live += (keys[i] > MINUS_INF).to(tl.float32)
    chunks = tl.sum(live, axis=0)
    # in 64 steps, down to where no row has so much: below 2**-reach all tokens together do not hold the rest
    tokens = tl.full((), 0.0, tl.float32) + vocab_size  # a constant, where it is 1
    reach = tl.minimum(tl.maximum(tl.log2(tokens / tl.maximum(rest, 1e-30)), 1.0), 40.0 * LOG2E)
    reach = tl.minimum(reach / scale, LARGEST)  # what is infinite less that is infinite
    below = tl.full((), 64, tl.int32)  # steps below the top
    step = tl.full((), 16, tl.int32)
    for _ in range(3):
        excesses = ()
        for way in tl.static_range(1, 4):
            bound = key_of(top - reach * ((below - step * way).to(tl.float32) / 64.0))
            excess = tl.zeros(keys[0].shape, tl.float32)
            for i in tl.static_range(len(keys)):
                is_below = (keys[i] < bound) & (keys[i] > MINUS_INF)
                excess += tl.where(is_below, masses[i] * chunks - rest, 0.0)
            excesses = excesses + (excess,)
        first, second, third = sum_three(excesses[0], excesses[1], excesses[2])
        passed = (first <= 0.0).to(tl.int32) + (second <= 0.0).to(tl.int32) + (third <= 0.0).to(tl.int32)
        below -= step * passed
        step = step >> 2
    return key_of(top - reach * (below.to(tl.float32) / 64.0))


# -- candidates


@jit
def list_chunks(keys, bound, list_ptr):
    """Writes the numbers of the chunks that reach a bound, column by column. How many."""
    WIDTH: tl.constexpr = keys[0].shape[0]
    many = tl.zeros((WIDTH,), tl.int32)
    for i in tl.static_range(len(keys)):
        many += (keys[i] >= bound).to(tl.int32)
    place = tl.cumsum(many, axis=0) - many
    tl.debug_barrier()  # whoever reads the old list has done so
    for i in tl.static_range(len(keys)):
        there = keys[i] >= bound
        scatter(list_ptr + place, tl.arange(0, WIDTH) + i * WIDTH, there)
        place += there.to(tl.int32)
    tl.debug_barrier()
    return tl.sum(many, axis=0)


@jit
def chunk_tile(
    source,
    list_ptr,
    listed,
    first,
    RAW: tl.constexpr,
    GATHERED: tl.constexpr,
    HEAD: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Logits, tokens and which of them there are, of the listed chunks from ``first`` on: (GATHERED, tokens of a
    chunk)."""
    slot = first + tl.arange(0, GATHERED)
    chunk = tl.load(list_ptr + slot, mask=slot < listed, other=0)
    token = chunk_tokens(chunk)
    live = (token < source.vocab_size) & (slot < listed)[:, None]
    if source.floors is not None:
        places = chunk_places(chunk)
    else:
        places = token
    x = raw_logits_at(source, places, token, live, HEAD)
    if not RAW:
        entries = tl.full((ENTRIES,), -1, tl.int32)
        if source.bias_ids is not None:
            entries = sparse_entries(source, ENTRIES)
            near = (chunk[:, None] == chunk_of(entries)[None, :]) & (slot < listed)[:, None] & (entries >= 0)[None, :]
            entries = tl.where(tl.max(near.to(tl.int32), axis=0) != 0, entries, -1)
        x = processed_logits(source, (x,), (token,), (live,), entries, ENTRIES)[0]
    return x, token, live


@jit
def gather(
    source, chunk_keys, bound, most, list_ptr, keys_ptr, ids_ptr, masses_ptr, top, scale, wants_mass, RAW: tl.constexpr,
    CAPACITY: tl.constexpr, GATHERED: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Writes the candidates, the tokens with at least the key ``bound``: keys, ids, masses. How many, also where there
    is no room for them, and, if someone wants it, their mass. While it counts those of some chunks, the next are on
    their way. Of more than ``most`` chunks it writes none, and says that there is no room."""
    listed = list_chunks(chunk_keys, bound, list_ptr)
    count = tl.where(listed > most, CAPACITY + 1, 0)
    listed = tl.where(listed > most, 0, listed)
    mass = tl.zeros((GATHERED, 32), tl.float32)
    x, token, live = chunk_tile(source, list_ptr, listed, 0, RAW, GATHERED, HEAD, ENTRIES)
    for first in range(0, listed, GATHERED):
        next_x, next_token, next_live = chunk_tile(
            source, list_ptr, listed, first + GATHERED, RAW, GATHERED, HEAD, ENTRIES
        )
        key = key_of(x)
        there = live & (key >= bound)
        ones = there.to(tl.int32)
        per_chunk = tl.sum(ones, axis=1)
        place = count + (tl.cumsum(per_chunk, axis=0) - per_chunk)[:, None] + tl.cumsum(ones, axis=1) - ones
        fits = there & (place < CAPACITY)
        scatter(keys_ptr + place, key, fits)
        scatter(ids_ptr + place, token, fits)
        this_mass = mass_of(x, top, scale)
        scatter(masses_ptr + place, this_mass, fits)
        count += tl.sum(per_chunk, axis=0)
        mass += tl.where(there, this_mass, 0.0)
        x, token, live = next_x, next_token, next_live
    tl.debug_barrier()
    total = tl.full((), 0.0, tl.float32)
    if wants_mass:
        total = tl.sum(tl.sum(mass, axis=1), axis=0)
    return count, total
