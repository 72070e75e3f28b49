"""What ``limits`` launches: where filters end in a row whose logits lie on several ranks.

A row's program does not depend on the batch, and masses are integers, so what is found depends on nothing else.
"""

import triton.language as tl

from ..filters import HIGHEST, LOWEST
from .constant import Constant
from .jit import jit
from .logits_source import GREEDY_BELOW, LOG2E, NO_LOGIT, key_of, value_of
from .scores import NAN_KEY, NO_TOKEN

RANKS = 63  # whose flags fit a word
_RANKS = Constant(RANKS)
LOWEST_PLACE = Constant(LOWEST)
_HIGHEST = Constant(HIGHEST)
ORDER = Constant(2**31)  # from a key to a number from 0 up
_SOME = Constant(6)  # digits whose amounts a program adds up before they go to memory


@jit
def _place(key, token):
    """As ``filters.places_of``."""
    return (key.to(tl.int64) << 31) | (token ^ NO_TOKEN).to(tl.int64)


@jit
def relative(x, top, temperature):
    """As ``filters.relative``, in the type of the logits."""
    divisor = tl.where(temperature < GREEDY_BELOW, 1.0, temperature).to(x.dtype)
    below = tl.where(x == top, 0.0, (x - top) / divisor)
    return tl.where(x == float("-inf"), x, below)


@jit
def _share(x, top, temperature):
    """float64: as ``distributed.limits.Scale.share``; 0 where that is NaN."""
    below = relative(x.to(tl.float64), top.to(tl.float64), temperature)
    share = tl.where(below > -(2.0**-30), 1.0 + below, tl.exp(below))  # as ``filters.share_of_best``
    return tl.where(below != below, 0.0, tl.where(share > 1.0, 1.0, share))


@jit
def _mass(x, top, temperature, unit):
    """int64 of float32 logits, as ``distributed.limits.Scale.of``: this function's on all ranks."""
    return tl.floor(_share(x, top, temperature) * unit.to(tl.float64) + 0.5).to(tl.int64)


@jit
def _rough_mass(x, top, temperature, unit):
    """``_mass`` but for 1e-6 of it: exponentials of float64 of a whole row take longer than its products."""
    below = relative(x, top, temperature)
    share = tl.minimum(tl.exp2(below * LOG2E), 1.0)
    return tl.floor(tl.where(below != below, 0.0, share).to(tl.float64) * unit.to(tl.float64) + 0.5).to(tl.int64)


@jit
def _wanted(p, mass):
    """int64: as ``distributed.limits._wanted``."""
    p = tl.where(p > 0.0, p, 0.0)  # NaN too
    p = tl.where(p < 1.0, p, 1.0).to(tl.float64)
    return tl.maximum(tl.minimum(tl.ceil(p * mass.to(tl.float64)).to(tl.int64), mass), 1)


@jit
def _first_of(places, count):
    """A number that ``count`` places, and no more, reach; one that all reach if there are not so many. No two are the same but
    those at ``LOWEST``, which are none."""
    low = tl.full((), -(2**62), tl.int64)
    shift = tl.full((), 61, tl.int32)
    searching = tl.full((), 1, tl.int32)
    while searching != 0:
        step = tl.full((), 1, tl.int64) << shift
        reach = tl.zeros(places.shape, tl.int64)
        for way in tl.static_range(3):
            reach += (places >= low + step * (way + 1)).to(tl.int64) << (21 * way)
        reach = tl.sum(reach, axis=0)
        passed = tl.full((), 0, tl.int64)
        exact = tl.full((), 0, tl.int32)
        for way in tl.static_range(3):
            here = (reach >> (21 * way)) & 0x1FFFFF
            passed += (here >= count).to(tl.int64)
            exact = tl.maximum(exact, (here == count).to(tl.int32))
        low += step * passed
        searching = ((exact == 0) & (shift > 0)).to(tl.int32)
        shift = tl.maximum(shift - 2, 0)
    return low


@jit(
    do_not_specialize=["columns", "mask_stride", "first_token", "chunks", "blocks"],
    do_not_specialize_on_alignment=["temperatures_ptr", "token_mask"],
)
def survey_kernel(
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    temperatures_ptr,  # (B,) float32
    token_mask,  # (B, ceil(n / 32)) int32, or None
    mask_stride: tl.int64,
    out_ptr,  # (B, 2) int64, zeros; out: as ``distributed.limits.highest``
    keys_ptr,  # (B, chunks) int32, out: the chunks' highest keys
    first_token: tl.int32,
    chunks: tl.int32,
    blocks: tl.int32,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (blocks * B,)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * TILE
    at = first + tl.arange(0, TILE)
    live = at < columns
    x = tl.load(logits + row * logits_stride + at, mask=live, other=float("-inf"))
    key = key_of(x)
    chunk = first // CHUNK + tl.arange(0, TILE // CHUNK)
    highest = tl.max(tl.reshape(tl.where(live, key, NO_LOGIT), (TILE // CHUNK, CHUNK)), axis=1)
    tl.store(keys_ptr + row * chunks + chunk, highest, mask=chunk < chunks)
    place = tl.where(live & (x != float("-inf")), _place(key, first_token + at) + (ORDER << 31), 0)
    best = tl.max(tl.where(x != x, NAN_KEY, place), axis=0)
    finite = tl.max((tl.abs(x) < float("inf")).to(tl.int32), axis=0)
    temperature = tl.load(temperatures_ptr + row)
    if temperature == float("inf"):  # which makes NaN of an infinite logit
        infinite = live & (tl.abs(x) == float("inf"))
        if token_mask is not None:
            word = tl.load(token_mask + row * mask_stride + (at >> 5), mask=live, other=0)
            infinite = infinite & (((word >> (at & 31)) & 1) != 0)
        best = tl.where(tl.max(infinite.to(tl.int32), axis=0) != 0, NAN_KEY, best)
    best = tl.where((temperature != temperature) & (columns > 0), NAN_KEY, best)
    tl.atomic_max(out_ptr + row * 2, best, sem="relaxed")
    tl.atomic_max(out_ptr + row * 2 + 1, finite.to(tl.int64), sem="relaxed")


@jit(do_not_specialize=["columns", "first_token", "chunks", "count"])
def top_kernel(
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    keys_ptr,  # (B, chunks) int32, of ``survey_kernel``
    list_ptr,  # (B, count) int32
    out_ptr,  # (B, count) int64, ``LOWEST``; out: places, in the order of ids
    first_token: tl.int32,
    chunks: tl.int32,
    count: tl.int32,
    CHUNKS: tl.constexpr,  # at least ``chunks``
    SLOTS: tl.constexpr,  # at least ``count``
    CHUNK: tl.constexpr,
):
    """Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    keys = tl.load(keys_ptr + row * chunks + chunk, mask=chunk < chunks, other=0)
    places = tl.where(chunk < chunks, _place(keys, chunk), LOWEST_PLACE)
    there = (places >= _first_of(places, count)).to(tl.int32)
    tl.store(list_ptr + row * count + tl.cumsum(there, axis=0) - 1, chunk, mask=there != 0)
    tl.debug_barrier()

    slot = tl.arange(0, SLOTS)
    listed = slot < tl.minimum(count, chunks)
    chunk = tl.load(list_ptr + row * count + slot, mask=listed, other=0)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    live = listed[:, None] & (token < columns)
    x = tl.load(logits + row * logits_stride + token, mask=live, other=0.0)
    places = tl.reshape(tl.where(live, _place(key_of(x), first_token + token), LOWEST_PLACE), (SLOTS * CHUNK,))
    there = (places >= _first_of(places, count)).to(tl.int32)
    tl.store(out_ptr + row * count + tl.cumsum(there, axis=0) - 1, places, mask=there != 0)


@jit(
    do_not_specialize=["batch", "ranks", "count", "unit", "top_p_stride"],
    do_not_specialize_on_alignment=["theirs_ptr", "top_p_ptr", "tops_ptr", "temperatures_ptr"],
)
def few_kernel(
    theirs_ptr,  # (ranks, B, count) int64
    top_p_ptr,  # (B,) or (1,) float32
    top_p_stride: tl.int64,
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    out_ptr,  # (B,) int64, out
    batch: tl.int32,
    ranks: tl.int32,
    count: tl.int32,
    unit: tl.int64,
    PLACES: tl.constexpr,  # at least ranks * count
):
    """Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PLACES)
    of_rank = theirs_ptr + ((index // count).to(tl.int64) * batch + row) * count + index % count
    places = tl.load(of_rank, mask=index < ranks * count, other=LOWEST_PLACE)
    places = tl.where(places >= _first_of(places, count), places, LOWEST_PLACE)
    limit = tl.min(tl.where(places == LOWEST_PLACE, _HIGHEST, places), axis=0)
    p = tl.load(top_p_ptr + row * top_p_stride)
    if p < 1.0:
        x = value_of((places >> 31).to(tl.int32))
        masses = _mass(x, tl.load(tops_ptr + row), tl.load(temperatures_ptr + row), unit)
        masses = tl.where(places == LOWEST_PLACE, 0, masses)
        left = _wanted(p, tl.sum(masses, axis=0))
        last = limit
        limit = tl.full((), _HIGHEST, tl.int64)
        while (left > 0) & (limit > last):
            limit = tl.max(tl.where(places < limit, places, LOWEST_PLACE), axis=0)
            left -= tl.sum(tl.where(places == limit, masses, 0), axis=0)
    tl.store(out_ptr + row, limit)


@jit(
    do_not_specialize=["target_stride", "vocab_size", "chunks"],
    do_not_specialize_on_alignment=["target_ptr", "out_ptr"],
)
def floor_kernel(
    keys_ptr,  # (B, chunks) int32, of ``survey_kernel``
    target_ptr,  # (B,) or (1,) int64: top-k
    target_stride: tl.int64,
    out_ptr,  # (B,) int64, out: a place that no token of the first k is below; ``LOWEST`` where top-k is off
    vocab_size: tl.int32,
    chunks: tl.int32,
    CHUNKS: tl.constexpr,  # at least ``chunks``
):
    """As many chunks have a token there, or above. Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(target_ptr + row * target_stride)
    floor = tl.full((), LOWEST_PLACE, tl.int64)
    if (k > 0) & (k < vocab_size) & (k <= chunks):
        chunk = tl.arange(0, CHUNKS)
        keys = tl.load(keys_ptr + row * chunks + chunk, mask=chunk < chunks, other=0)
        places = tl.where(chunk < chunks, _place(keys, chunk), LOWEST_PLACE)
        reached = places >= _first_of(places, k)
        floor = (tl.min(tl.where(reached, places, _HIGHEST), axis=0) >> 31) << 31
    tl.store(out_ptr + row, floor)


@jit
def _tokens_of(passing, chunk, columns, FEW: tl.constexpr, CHUNK: tl.constexpr):
    """(FEW * CHUNK,) int32: the tokens of the chunks that pass, FEW at most; behind them ``columns``."""
    nth = tl.cumsum(passing.to(tl.int32), axis=0) - 1
    slot = tl.arange(0, FEW)
    here = passing[None, :] & (nth[None, :] == slot[:, None])
    first = tl.sum(tl.where(here, chunk[None, :] * CHUNK, 0), axis=1)
    token = first[:, None] + tl.arange(0, CHUNK)[None, :]
    there = slot < tl.sum(passing.to(tl.int32), axis=0)
    return tl.reshape(tl.where(there[:, None], token, columns), (FEW * CHUNK,))


@jit
def _add_up(
    of_row, at, columns, found, limits_ptr, tops_ptr, temperatures_ptr, out_ptr, row, first_token, unit, done, width,
    MASSES: tl.constexpr,
):  # fmt: skip
    """The amounts of the tokens at some columns: see ``histogram_kernel``."""
    live = at < columns
    x = tl.load(of_row + at, mask=live, other=float("-inf"))
    key = key_of(x)
    order = key.to(tl.int64) + ORDER
    there = live & ((order >> (32 - done)) == found)
    if limits_ptr is not None:
        there = there & (_place(key, first_token + at) >= tl.load(limits_ptr + row))
    left = there.to(tl.int32)
    if tl.max(left, axis=0) != 0:
        if MASSES:
            amounts = _mass(x, tl.load(tops_ptr + row), tl.load(temperatures_ptr + row), unit)
        else:
            amounts = tl.full(x.shape, 1, tl.int64)
        bins = 1 << width
        digit = bins - 1 - ((order >> (32 - done - width)) & (bins - 1)).to(tl.int32)
        out = out_ptr + row * bins
        for _ in range(_SOME):
            one = tl.min(tl.where(left != 0, digit, bins), axis=0)
            same = (left != 0) & (digit == one)
            tl.atomic_add(out + one, tl.sum(tl.where(same, amounts, 0), axis=0), mask=one < bins, sem="relaxed")
            left = tl.where(same, 0, left)
        tl.atomic_add(out + digit, amounts, mask=left != 0, sem="relaxed")


@jit(
    do_not_specialize=["columns", "first_token", "unit", "done", "width", "chunks", "blocks"],
    do_not_specialize_on_alignment=["found_ptr", "limits_ptr", "tops_ptr", "temperatures_ptr", "out_ptr"],
)
def histogram_kernel(
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    keys_ptr,  # (B, chunks) int32, of ``survey_kernel``
    found_ptr,  # (B, 2) int64: of the key, from 0 up, the first ``done`` bits
    limits_ptr,  # (B,) int64: the least place of a token that counts; None: all do
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    out_ptr,  # (B, 2**width) int64, zeros; out: from the highest digit down
    first_token: tl.int32,
    unit: tl.int64,
    done: tl.int32,
    width: tl.int32,
    chunks: tl.int32,
    blocks: tl.int32,
    MASSES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
):
    """Grid: (blocks * B,). Of chunks that have no token with such a key, or from the limit on, no logit is read. A row's logits
    are mostly alike, so in the first digits many tokens share a few: their amounts are added up here, those of other digits in
    memory."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * (TILE // CHUNK)
    chunk = first + tl.arange(0, TILE // CHUNK)
    reach = tl.load(keys_ptr + row * chunks + chunk, mask=chunk < chunks, other=NO_LOGIT).to(tl.int64)
    found = tl.load(found_ptr + row * 2)
    passing = (chunk < chunks) & ((reach + ORDER) >> (32 - done) >= found)
    if limits_ptr is not None:
        passing = passing & (reach >= tl.load(limits_ptr + row) >> 31)
    passed = tl.sum(passing.to(tl.int32), axis=0)
    of_row = logits + row * logits_stride
    if passed > FEW:
        at = first * CHUNK + tl.arange(0, TILE)
        _add_up(
            of_row, at, columns, found, limits_ptr, tops_ptr, temperatures_ptr, out_ptr, row, first_token, unit, done, width,
            MASSES,
        )  # fmt: skip
    elif passed > 0:
        at = _tokens_of(passing, chunk, columns, FEW, CHUNK)
        _add_up(
            of_row, at, columns, found, limits_ptr, tops_ptr, temperatures_ptr, out_ptr, row, first_token, unit, done, width,
            MASSES,
        )  # fmt: skip


@jit(
    do_not_specialize=[
        "columns", "first_token", "target_stride", "unit", "vocab_size", "done", "width", "batch", "ranks", "rank", "before",
        "before_too",
    ],
    do_not_specialize_on_alignment=["theirs_ptr", "target_ptr", "found_ptr", "limits_ptr", "tops_ptr", "temperatures_ptr"],
)  # fmt: skip
def digit_kernel(
    theirs_ptr,  # (ranks, B, 2**width) int64
    target_ptr,  # (B,) or (1,): top-k, int64, or top-p, float32
    target_stride: tl.int64,
    found_ptr,  # (B, 2) int64, in and out: of the key the first bits; how much is still wanted of those that have them
    limits_ptr,  # (B,) int64, in and, after the last digit, out: it rises to the limit
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    first_token: tl.int32,
    unit: tl.int64,
    vocab_size: tl.int32,
    done: tl.int32,
    width: tl.int32,
    batch: tl.int32,
    ranks: tl.int32,
    rank: tl.int32,
    before: tl.int64,  # bits of ranks whose tokens come before this one's, ...
    before_too: tl.int64,  # ... from the 64th on
    MASSES: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    bins = 1 << width
    bin = tl.arange(0, BINS)
    of_row = theirs_ptr + row * bins + bin
    sums = tl.zeros((BINS,), tl.int64)
    for other in range(ranks):
        sums += tl.load(of_row + other * batch * bins, mask=bin < bins, other=0)
    target = tl.load(target_ptr + row * target_stride)
    if MASSES:
        on = target < 1.0
    else:
        on = (target > 0) & (target < vocab_size)
    prefix = tl.load(found_ptr + row * 2)
    left = tl.load(found_ptr + row * 2 + 1)
    if done == 0:
        if MASSES:
            left = _wanted(target, tl.sum(sums, axis=0))
        else:
            left = tl.where(on, target, 1)
    order = (prefix << width) | (bins - 1 - bin).to(tl.int64)
    each = tl.full((BINS,), 1, tl.int64)
    if MASSES:  # noqa: SIM102, the branch within is the device's
        if done + width == 32:  # a digit is a key then, whose tokens have the same mass, and they were counted
            x = value_of((order - ORDER).to(tl.int32))
            each = _mass(x, tl.load(tops_ptr + row), tl.load(temperatures_ptr + row), unit)
            sums *= each
    up_to = tl.cumsum(sums, axis=0)
    at = tl.minimum(tl.sum(((up_to < left) & (bin < bins)).to(tl.int32), axis=0), bins - 1)
    here = bin == at
    left -= tl.sum(tl.where(here, up_to - sums, 0), axis=0)
    prefix = tl.sum(tl.where(here, order, 0), axis=0)
    tl.store(found_ptr + row * 2, prefix)
    tl.store(found_ptr + row * 2 + 1, left)
    if (done + width == 32) & on:
        one = tl.maximum(tl.sum(tl.where(here, each, 0), axis=0), 1)
        of_key = theirs_ptr + row * bins + at
        kept = tl.maximum((left + one - 1) // one, 1)
        own = tl.load(of_key + rank * batch * bins)
        for other in range(ranks):
            comes_before = tl.where(
                other < _RANKS, before >> tl.minimum(other, 63), before_too >> tl.maximum(other - _RANKS, 0)
            )
            kept -= tl.load(of_key + other * batch * bins) * (comes_before & 1)
        mine = tl.minimum(tl.maximum(kept, 0), own)  # of this rank's tokens with the key, the first ones
        key = prefix - ORDER
        limit = tl.where(mine > 0, key << 31, (key + 1) << 31)
        if (mine > 0) & (mine < own):
            start = tl.full((), 0, tl.int32)
            while (mine > 0) & (start < columns):
                token = start + tl.arange(0, TILE)
                x = tl.load(logits + row * logits_stride + token, mask=token < columns, other=float("-inf"))
                equal = (token < columns) & (key_of(x) == key)
                nth = tl.cumsum(equal.to(tl.int32), axis=0)
                place = (key << 31) | ((first_token + token) ^ NO_TOKEN).to(tl.int64)
                found = tl.max(tl.where(equal & (nth == mine), place, LOWEST_PLACE), axis=0)
                limit = tl.where(found != LOWEST_PLACE, found, limit)
                mine -= tl.max(nth, axis=0).to(tl.int64)
                start += TILE
        tl.store(limits_ptr + row, tl.maximum(tl.load(limits_ptr + row), limit))


@jit
def _least_of(of_row, at, columns, top, temperature, min_p):
    """The lowest key from ``min_p`` on, of the tokens at some columns, as a place."""
    live = at < columns
    x = tl.load(of_row + at, mask=live, other=float("-inf"))
    passes = live & (_share(x, top, temperature) >= min_p.to(tl.float64))
    return tl.min(tl.where(passes, key_of(x).to(tl.int64) << 31, _HIGHEST), axis=0)


@jit(
    do_not_specialize=["columns", "min_p_stride", "chunks", "blocks"],
    do_not_specialize_on_alignment=["min_p_ptr", "tops_ptr", "temperatures_ptr", "out_ptr"],
)
def least_kernel(
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    keys_ptr,  # (B, chunks) int32, of ``survey_kernel``
    min_p_ptr,  # (B,) or (1,) float32
    min_p_stride: tl.int64,
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    out_ptr,  # (B,) int64, ``HIGHEST``; out
    chunks: tl.int32,
    blocks: tl.int32,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
):
    """Grid: (blocks * B,). Of chunks whose highest logit falls short by a hundredth no logit is read."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * (TILE // CHUNK)
    chunk = first + tl.arange(0, TILE // CHUNK)
    min_p = tl.load(min_p_ptr + row * min_p_stride)
    top, temperature = tl.load(tops_ptr + row), tl.load(temperatures_ptr + row)
    reach = value_of(tl.load(keys_ptr + row * chunks + chunk, mask=chunk < chunks, other=0))
    passing = (chunk < chunks) & (_share(reach, top, temperature) >= min_p.to(tl.float64) * 0.99)
    passed = tl.where(min_p > 0.0, tl.sum(passing.to(tl.int32), axis=0), 0)
    of_row = logits + row * logits_stride
    least = tl.full((), _HIGHEST, tl.int64)
    if passed > FEW:
        least = _least_of(of_row, first * CHUNK + tl.arange(0, TILE), columns, top, temperature, min_p)
    elif passed > 0:
        at = _tokens_of(passing, chunk, columns, FEW, CHUNK)
        least = _least_of(of_row, at, columns, top, temperature, min_p)
    tl.atomic_min(out_ptr + row, tl.where(min_p > 0.0, least, LOWEST_PLACE), sem="relaxed")


@jit(
    do_not_specialize=["columns", "first_token", "unit", "blocks"],
    do_not_specialize_on_alignment=["limits_ptr", "tops_ptr", "temperatures_ptr"],
)
def mass_kernel(
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    limits_ptr,  # (B,) int64
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    out_ptr,  # (B,) int64, zeros; out
    first_token: tl.int32,
    unit: tl.int64,
    blocks: tl.int32,
    ROUGH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (blocks * B,)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * logits_stride + at, mask=at < columns, other=float("-inf"))
    kept = (at < columns) & (_place(key_of(x), first_token + at) >= tl.load(limits_ptr + row))
    if tl.max(kept.to(tl.int32), axis=0) != 0:
        top, temperature = tl.load(tops_ptr + row), tl.load(temperatures_ptr + row)
        if ROUGH:
            masses = _rough_mass(x, top, temperature, unit)
        else:
            masses = _mass(x, top, temperature, unit)
        tl.atomic_add(out_ptr + row, tl.sum(tl.where(kept, masses, 0), axis=0), sem="relaxed")
