"""Gathers a row's candidates: the tokens at or above a cutoff that no kept token is below.

A cutoff follows from block statistics: the highest logit and the mass of each block of 32 tokens. Where the highest of
each of WIDTH columns of blocks will do, only those are compared: a column is in the registers of one thread, so that
threads wait for each other once per question.
"""

import triton.language as tl

from ..jit import jit
from .logit_source import load_blocks
from .order import (
    LARGEST,
    LOG2E,
    LOWEST,
    MINUS_INF,
    NO_LOGIT,
    key_of,
    mass_of,
    scatter,
    sort_key,
    value_of,
)

_WAYS = tl.constexpr(4)  # thresholds at a time
_PARTS = tl.constexpr(5)  # of WIDTH blocks, which are on their way together


@jit
def _load_keys(keys_ptr, start, blocks, WIDTH: tl.constexpr):
    """Returns the keys of some parts of WIDTH blocks, a tuple of (WIDTH,)."""
    keys = ()
    for part in tl.static_range(_PARTS):
        block = start + part * WIDTH + tl.arange(0, WIDTH)
        keys = keys + (tl.load(keys_ptr + block, mask=block < blocks, other=LOWEST),)
    return keys


@jit
def column_maxima(keys_ptr, blocks, WIDTH: tl.constexpr):
    """Returns the highest key of each column of blocks, (WIDTH,)."""
    highest = tl.full((WIDTH,), NO_LOGIT, tl.int32)
    for start in range(0, blocks, _PARTS * WIDTH):
        keys = _load_keys(keys_ptr, start, blocks, WIDTH)
        for part in tl.static_range(_PARTS):
            highest = tl.maximum(highest, keys[part])
    return highest


@jit
def _load_masses(keys_ptr, sums_ptr, start, blocks, top, scale, WIDTH: tl.constexpr):
    """Returns keys and masses of some parts of WIDTH blocks, masses relative to ``top``."""
    keys = _load_keys(keys_ptr, start, blocks, WIDTH)
    sums = ()
    for part in tl.static_range(_PARTS):
        block = start + part * WIDTH + tl.arange(0, WIDTH)
        sums = sums + (tl.load(sums_ptr + block, mask=block < blocks, other=0.0),)
    masses = ()
    for part in tl.static_range(_PARTS):
        mass = sums[part] * mass_of(value_of(keys[part]), top, scale)
        masses = masses + (tl.where(keys[part] > MINUS_INF, mass, 0.0),)
    return keys, masses


@jit
def column_masses(keys_ptr, sums_ptr, blocks, top, scale, WIDTH: tl.constexpr):
    """Returns the mass of each column of blocks, (WIDTH,) float32."""
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, blocks, _PARTS * WIDTH):
        _, masses = _load_masses(keys_ptr, sums_ptr, start, blocks, top, scale, WIDTH)
        for part in tl.static_range(_PARTS):
            total += masses[part]
    return total


# -- cutoffs


@jit
def top_k_cutoff(columns, k):
    """Returns a key that k of the columns reach, and so k tokens, and hardly more than k + k // 4 + 8 columns; the
    lowest where there are not so many columns."""
    there = columns > NO_LOGIT
    low = tl.min(tl.where(there, columns, 0x7FFFFFFF), axis=0).to(tl.int64)
    highest = tl.max(columns, axis=0).to(tl.int64)
    many = tl.sum(there.to(tl.int32), axis=0)
    enough = k <= many
    step = (highest - low) // (_WAYS + 1) + 1
    searching = enough.to(tl.int32)
    while searching != 0:
        thresholds = tl.minimum(low + step * (tl.arange(0, _WAYS) + 1), 0x7FFFFFFF).to(tl.int32)
        reach = tl.sum((columns[:, None] >= thresholds[None, :]).to(tl.int32), axis=0)
        many = tl.min(tl.where(reach >= k, reach, many), axis=0)
        low += step * tl.sum((reach >= k).to(tl.int32), axis=0)
        searching = ((step > 1) & (many > k + k // 4 + 8)).to(tl.int32)
        step = step // (_WAYS + 1) + 1
    return tl.where(enough, low, LOWEST).to(tl.int32)


@jit
def min_p_cutoff(min_p, top, scale):
    """Returns the lowest key that a min-p keeps, a little less for rounding."""
    at_least = tl.log2(tl.minimum(min_p, 1.0)) - 0.01
    return key_of(top + at_least / scale - tl.minimum(tl.abs(top), LARGEST) * 1e-6)


@jit
def _nucleus_reach(scale, rest, vocab_size):
    """Returns how far below the highest logit all tokens together do not hold ``rest``."""
    tokens = tl.full((), 0.0, tl.float32) + vocab_size
    reach = tl.minimum(tl.maximum(tl.log2(tokens / tl.maximum(rest, 1e-30)), 1.0), 40.0 * LOG2E)
    return tl.minimum(reach / scale, LARGEST)  # what is infinite less that is infinite


@jit
def column_cutoff(columns, masses, many, top, scale, rest, vocab_size):
    """Guesses as ``nucleus_cutoff`` does, by ``many`` columns of blocks: without a load, for a nucleus that leaves some
    columns without a token. ``masses``: of the columns."""
    reach = _nucleus_reach(scale, rest, vocab_size)
    excess = tl.where(columns > MINUS_INF, masses * many.to(tl.float32) - rest, 0.0)
    below = tl.full((), 81, tl.int32)  # steps below the top
    step = tl.full((), 9, tl.int32)
    for _ in range(2):
        steps = below - step * (tl.arange(0, 8) + 1)
        thresholds = key_of(top - reach * (steps.to(tl.float32) / 81.0))
        is_below = columns[:, None] < thresholds[None, :]
        excesses = tl.sum(tl.where(is_below, excess[:, None], 0.0), axis=0)
        below -= step * tl.sum((excesses <= 0.0).to(tl.int32), axis=0)
        step = step // 9
    return key_of(top - reach * (below.to(tl.float32) / 81.0))


@jit(noinline=True)
def nucleus_cutoff(keys_ptr, sums_ptr, blocks, top, scale, rest, vocab_size, WIDTH: tl.constexpr):
    """Guesses a key above which all but about ``rest`` of the row's mass lies; the mass above it is to be checked.

    Blocks are alike but for the few tokens that stand out: what those without a token above a key hold is what every
    block holds below it.
    """
    reach = _nucleus_reach(scale, rest, vocab_size)
    below = tl.full((), 125, tl.int32)  # steps below the top
    step = tl.full((), 25, tl.int32)
    way = tl.arange(0, _WAYS)
    for _ in range(3):
        thresholds = key_of(top - reach * ((below - step * (way + 1)).to(tl.float32) / 125.0))
        excesses = tl.zeros((WIDTH, _WAYS), tl.float32)
        for start in range(0, blocks, _PARTS * WIDTH):
            keys, masses = _load_masses(keys_ptr, sums_ptr, start, blocks, top, scale, WIDTH)
            for part in tl.static_range(_PARTS):
                excess = tl.where(keys[part] > MINUS_INF, masses[part] * blocks.to(tl.float32) - rest, 0.0)
                excesses += tl.where(keys[part][:, None] < thresholds[None, :], excess[:, None], 0.0)
        below -= step * tl.sum((tl.sum(excesses, axis=0) <= 0.0).to(tl.int32), axis=0)
        step = step // 5
    return key_of(top - reach * (below.to(tl.float32) / 125.0))


# -- candidates


@jit(noinline=True)
def list_blocks(keys_ptr, blocks, cutoff, list_ptr, WIDTH: tl.constexpr):
    """Writes the numbers of the blocks that reach a cutoff, column by column. Returns how many."""
    column = tl.arange(0, WIDTH)
    many = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, blocks, _PARTS * WIDTH):
        keys = _load_keys(keys_ptr, start, blocks, WIDTH)
        for part in tl.static_range(_PARTS):
            many += (keys[part] >= cutoff).to(tl.int32)
    place = tl.cumsum(many, axis=0) - many
    tl.debug_barrier()  # whoever reads the old list has done so
    for start in range(0, blocks, _PARTS * WIDTH):
        keys = _load_keys(keys_ptr, start, blocks, WIDTH)
        for part in tl.static_range(_PARTS):
            there = keys[part] >= cutoff
            scatter(list_ptr + place, start + part * WIDTH + column, there)
            place += there.to(tl.int32)
    tl.debug_barrier()
    return tl.sum(many, axis=0)


@jit
def _is_in(x, token, live, low, high):
    """Returns sort keys, and which are from ``low`` on and below ``high``."""
    words = sort_key(key_of(x), token)
    return words, live & (words >= low) & (words < high)


@jit(noinline=True)
def gather(source, list_ptr, listed, low, high, out_ptr, capacity, BLOCKS: tl.constexpr):
    """Writes the sort keys from ``low`` on and below ``high`` of the listed blocks, in no order, unless there are more
    than ``capacity``. Returns how many there are. Every thread counts its own, and writes them behind those of the
    threads before it; while it counts some, the next are on their way."""
    # Triton takes a function that ends with a barrier for one that uses no shared memory, and puts none before its call
    tl.debug_barrier()
    counts = tl.zeros((BLOCKS, 8), tl.int32)
    first = tl.full((), 0, tl.int32)
    x, token, live = load_blocks(source, list_ptr, listed, first, BLOCKS)
    while first < listed:
        first += BLOCKS
        next_x, next_token, next_live = load_blocks(source, list_ptr, listed, first, BLOCKS)
        for part in tl.static_range(4):
            _, there = _is_in(x[part], token[part], live[part], low, high)
            counts += there.to(tl.int32)
        x, token, live = next_x, next_token, next_live
    counts = tl.reshape(counts, (BLOCKS * 8,))
    place = tl.reshape(tl.cumsum(counts, axis=0) - counts, (BLOCKS, 8))
    count = tl.sum(counts, axis=0)
    if count <= capacity:
        for again in range(0, listed, BLOCKS):
            x, token, live = load_blocks(source, list_ptr, listed, again, BLOCKS)
            for part in tl.static_range(4):
                words, there = _is_in(x[part], token[part], live[part], low, high)
                scatter(out_ptr + place, words, there)
                place += there.to(tl.int32)
    tl.debug_barrier()
    return count
