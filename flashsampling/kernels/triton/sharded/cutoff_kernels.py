"""Kernels of ``cutoffs``: find the cutoffs of filters in a row whose logits lie on several ranks.

A row's program does not depend on the batch, and masses are integers, so a cutoff depends on its row alone.
"""

import triton.language as tl

from ....reference.logit_transforms import HIGHEST, LOWEST
from ..constant import Constant
from ..filtered.order import GREEDY_BELOW, LN2, LOG2E, MINUS_INF, NAN, NO_LOGIT, key_of, value_of
from ..fused.packed_argmax import NAN_KEY, NO_TOKEN
from ..jit import jit

RANKS = 63  # whose flags fit a word
_RANKS = Constant(RANKS)
LOWEST_PLACE = Constant(LOWEST)
_HIGHEST = Constant(HIGHEST)
ORDER = Constant(2**31)  # from a key to a number from 0 up
_SOME = Constant(6)  # digits whose amounts a program adds up before they go to memory, ...
_MANY = Constant(256)  # ... while more tokens than these are left
STATE = 3  # int64 of a row that is searched: see ``_open``
_STATE = Constant(STATE)


@jit
def _place(key, token):
    """Computes ``filters.places_of``."""
    return (key.to(tl.int64) << 31) | (token ^ NO_TOKEN).to(tl.int64)


@jit
def relative(x, top, temperature):
    """Computes ``filters.relative``, in the type of the logits."""
    divisor = tl.where(temperature < GREEDY_BELOW, 1.0, temperature).to(x.dtype)
    below = tl.where(x == top, 0.0, (x - top) / divisor)
    return tl.where(x == float("-inf"), x, below)


@jit
def _share(x, top, temperature):
    """float64: as ``tensor_parallel.cutoffs.Scale.share``; 0 where that is NaN."""
    below = relative(x.to(tl.float64), top.to(tl.float64), temperature)
    share = tl.where(below > -(2.0**-30), 1.0 + below, tl.exp(below))  # as ``filters.share_of_best``
    return tl.where(below != below, 0.0, tl.where(share > 1.0, 1.0, share))


@jit
def _mass(x, top, temperature, unit):
    """int64 of float32 logits: this function's on all ranks. As ``tensor_parallel.cutoffs.Scale.of`` but for 5e-7 of
    it: float64 exponentials of whole rows take longer than their products, and float32 differences would lose as
    much as they span."""
    divisor = tl.where(temperature < GREEDY_BELOW, 1.0, temperature).to(tl.float64)
    rate = 2.0 * LOG2E / divisor
    high = rate.to(tl.float32)
    low = (rate - high.to(tl.float64)).to(tl.float32)
    half, half_top = 0.5 * x, 0.5 * top  # whose difference is not above float32
    below = half - half_top
    back = below - half
    lost = (half - (below - back)) - (half_top + back)  # of the difference
    power = below * high
    share = tl.exp2(power) * (1.0 + LN2 * (tl.fma(below, high, -power) + below * low + lost * high))
    share = tl.where(power < -200.0, 0.0, tl.where(x == top, 1.0, share))
    share = tl.where(share != share, 0.0, tl.minimum(share, 1.0))
    return (share * unit.to(tl.float32) + 0.5).to(tl.int64)


@jit
def _wanted(p, mass):
    """int64: as ``tensor_parallel.cutoffs._wanted``."""
    p = tl.where(p > 0.0, p, 0.0)  # NaN too
    p = tl.where(p < 1.0, p, 1.0).to(tl.float64)
    return tl.maximum(tl.minimum(tl.ceil(p * mass.to(tl.float64)).to(tl.int64), mass), 1)


@jit
def _bits(span):
    """How many a number from 0 up has."""
    return tl.sum(((span >> tl.arange(0, 64)) > 0).to(tl.int32), axis=0)


@jit
def _first_of(places, count):
    """A number that ``count`` places, and no more, reach; one that all reach if there are not so many. No two are the
    same but those at ``LOWEST``, which are none."""
    low = tl.min(tl.where(places == LOWEST_PLACE, _HIGHEST, places), axis=0)
    low = tl.where(low == _HIGHEST, 0, low)
    shift = tl.maximum(_bits(tl.maximum(tl.max(places, axis=0), low) - low) - 2, 0)
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


@jit
def _last_of(places, masses, wanted):
    """The place with which masses, from the highest place down, reach what is wanted, which is no more than there is.
    Those at ``LOWEST`` have none."""
    low = tl.min(tl.where(places == LOWEST_PLACE, _HIGHEST, places), axis=0)
    shift = _bits(tl.maximum(tl.max(places, axis=0), low) - low) - 1
    searching = (shift >= 0).to(tl.int32)
    while searching != 0:
        middle = low + (tl.full((), 1, tl.int64) << shift)
        reached = tl.sum(tl.where(places >= middle, masses, 0), axis=0)
        low = tl.where(reached >= wanted, middle, low)
        within = (places >= low) & (places < low + (tl.full((), 1, tl.int64) << shift))
        searching = ((tl.sum(within.to(tl.int32), axis=0) > 1) & (shift > 0)).to(tl.int32)
        shift = tl.maximum(shift - 1, 0)
    return tl.min(tl.where(places >= low, places, _HIGHEST), axis=0)


@jit(
    do_not_specialize=["columns", "mask_stride", "first_token", "chunks", "blocks"],
    do_not_specialize_on_alignment=["temperatures_ptr", "token_mask"],
)
def row_max_kernel(
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    temperatures_ptr,  # (B,) float32
    token_mask,  # (B, ceil(n / 32)) int32, or None
    mask_stride: tl.int64,
    out_ptr,  # (B, 2) int64, zeros; out: as ``tensor_parallel.cutoffs.highest``
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
    most = tl.max(highest, axis=0)
    token = first_token + tl.min(tl.where(live & (key == most), at, columns), axis=0)
    best = _place(most, token) + (ORDER << 31)
    best = tl.where(most == NAN, NAN_KEY, tl.where(most > MINUS_INF, best, 0))
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


@jit
def _put_first(places, count, out):
    """The first ``count`` of them."""
    there = (places >= _first_of(places, count)).to(tl.int32)
    tl.store(out + tl.cumsum(there, axis=0) - 1, places, mask=there != 0)


@jit(do_not_specialize=["columns", "out_stride", "first_token", "chunks", "count"])
def top_kernel(
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    keys_ptr,  # (B, chunks) int32, of ``row_max_kernel``
    list_ptr,  # (B, count) int32
    some_ptr,  # (B, SOME) int32
    out_ptr,  # (B, count) int64, ``LOWEST``; out: places, in the order of ids
    out_stride: tl.int64,
    first_token: tl.int32,
    chunks: tl.int32,
    count: tl.int32,
    CHUNKS: tl.constexpr,  # at least ``chunks``
    SLOTS: tl.constexpr,  # at least ``count``
    CHUNK: tl.constexpr,
    SOME: tl.constexpr,
):
    """Of the tokens of the chunks with the highest keys, hardly more than ``count`` reach the lowest of these. Grid:
    (B,)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    keys = tl.load(keys_ptr + row * chunks + chunk, mask=chunk < chunks, other=0)
    places = tl.where(chunk < chunks, _place(keys, chunk), LOWEST_PLACE)
    there = places >= _first_of(places, count)
    reach = tl.min(tl.where(there, keys, NAN), axis=0)
    there = there.to(tl.int32)
    tl.store(list_ptr + row * count + tl.cumsum(there, axis=0) - 1, chunk, mask=there != 0)
    tl.debug_barrier()

    slot = tl.arange(0, SLOTS)
    listed = slot < tl.minimum(count, chunks)
    chunk = tl.load(list_ptr + row * count + slot, mask=listed, other=0)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    live = listed[:, None] & (token < columns)
    x = tl.load(logits + row * logits_stride + token, mask=live, other=0.0)
    near = tl.reshape((live & (key_of(x) >= reach)).to(tl.int32), (SLOTS * CHUNK,))
    nth = tl.cumsum(near, axis=0)
    some = tl.max(nth, axis=0)
    if (chunks >= count) & (some <= SOME):
        tl.store(some_ptr + row * SOME + nth - 1, tl.reshape(token, (SLOTS * CHUNK,)), mask=near != 0)
        tl.debug_barrier()
        at = tl.arange(0, SOME)
        near_token = tl.load(some_ptr + row * SOME + at, mask=at < some, other=0)
        near_key = key_of(tl.load(logits + row * logits_stride + near_token, mask=at < some, other=0.0))
        near_place = tl.where(at < some, _place(near_key, first_token + near_token), LOWEST_PLACE)
        _put_first(near_place, count, out_ptr + row * out_stride)
    else:
        place = tl.where(live, _place(key_of(x), first_token + token), LOWEST_PLACE)
        _put_first(tl.reshape(place, (SLOTS * CHUNK,)), count, out_ptr + row * out_stride)


@jit(
    do_not_specialize=["words", "batch", "ranks", "count", "unit", "top_k_stride", "top_p_stride", "vocab_size"],
    do_not_specialize_on_alignment=["theirs_ptr", "top_k_ptr", "top_p_ptr", "tops_ptr", "temperatures_ptr"],
)
def few_kernel(
    theirs_ptr,  # (ranks, B, words) int64, of which ``count`` are places
    words: tl.int32,
    top_k_ptr,  # (B,) or (1,) int64; None: it is ``count``
    top_k_stride: tl.int64,
    top_p_ptr,  # (B,) or (1,) float32
    top_p_stride: tl.int64,
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    out_ptr,  # (B,) int64, out: ``LOWEST`` where the row is not settled
    settled_ptr,  # (B,) int32, out: whether a row has its limit; None: all have theirs
    live_ptr,  # (1,) int32, zero; out: how many rows are not settled and have a top-p; None: all are
    batch: tl.int32,
    ranks: tl.int32,
    count: tl.int32,
    vocab_size: tl.int32,
    unit: tl.int64,
    PLACES: tl.constexpr,  # at least ranks * count
):
    """Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    k = count.to(tl.int64)
    p = tl.load(top_p_ptr + row * top_p_stride)
    settled = tl.full((), 1, tl.int32)
    if top_k_ptr is not None:
        k = tl.load(top_k_ptr + row * top_k_stride)
        on = (k > 0) & (k < vocab_size)
        settled = (on & (k <= count)).to(tl.int32)
        tl.store(settled_ptr + row, settled)
        if (settled == 0) & (p < 1.0):
            tl.atomic_add(live_ptr, 1, sem="relaxed")
    limit = tl.full((), LOWEST_PLACE, tl.int64)
    if settled != 0:
        index = tl.arange(0, PLACES)
        of_rank = theirs_ptr + ((index // count).to(tl.int64) * batch + row) * words + index % count
        places = tl.load(of_rank, mask=index < ranks * count, other=LOWEST_PLACE)
        places = tl.where(places >= _first_of(places, k), places, LOWEST_PLACE)
        limit = tl.min(tl.where(places == LOWEST_PLACE, _HIGHEST, places), axis=0)
        if p < 1.0:
            x = value_of((places >> 31).to(tl.int32))
            masses = _mass(x, tl.load(tops_ptr + row), tl.load(temperatures_ptr + row), unit)
            masses = tl.where(places == LOWEST_PLACE, 0, masses)
            limit = _last_of(places, masses, _wanted(p, tl.sum(masses, axis=0)))
    tl.store(out_ptr + row, limit)


@jit
def _open(state_ptr, live_ptr, row, on, top, lowest, wanted):
    """Begins the search of a row, if it is ``on``: among tokens from the place ``lowest`` on, whose amounts are to
    reach ``wanted``, all this alike on all ranks. The state: how far below the highest key what is searched begins,
    what is still wanted there, and how many bits it has, none of a row that is not searched."""
    least = tl.maximum(lowest >> 31, -ORDER)
    bits = _bits(tl.maximum(key_of(top).to(tl.int64) - least, 1))
    tl.store(state_ptr + row * _STATE, tl.zeros((), tl.int64))
    tl.store(state_ptr + row * _STATE + 1, wanted)
    tl.store(state_ptr + row * _STATE + 2, tl.where(on, bits, 0).to(tl.int64))
    if on:
        tl.atomic_add(live_ptr, 1, sem="relaxed")


@jit(
    do_not_specialize=["target_stride", "out_stride", "few", "vocab_size", "chunks"],
    do_not_specialize_on_alignment=["target_ptr", "out_ptr"],
)
def floor_kernel(
    keys_ptr,  # (B, chunks) int32, of ``row_max_kernel``
    target_ptr,  # (B,) or (1,) int64: top-k
    target_stride: tl.int64,
    out_ptr,  # (B,) int64, out: a place that no token of the first k is below; ``LOWEST`` where top-k is off, or few
    out_stride: tl.int64,
    few: tl.int32,
    vocab_size: tl.int32,
    chunks: tl.int32,  # 0: more than a program compares
    CHUNKS: tl.constexpr,  # at least ``chunks``
):
    """As many chunks have a token there, or above. Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(target_ptr + row * target_stride)
    floor = tl.full((), LOWEST_PLACE, tl.int64)
    if (k > few) & (k < vocab_size) & (k <= chunks):
        chunk = tl.arange(0, CHUNKS)
        keys = tl.load(keys_ptr + row * chunks + chunk, mask=chunk < chunks, other=0)
        places = tl.where(chunk < chunks, _place(keys, chunk), LOWEST_PLACE)
        reached = places >= _first_of(places, k)
        floor = (tl.min(tl.where(reached, places, _HIGHEST), axis=0) >> 31) << 31
    tl.store(out_ptr + row * out_stride, floor)


@jit(
    do_not_specialize=["words", "target_stride", "few", "vocab_size", "batch", "ranks"],
    do_not_specialize_on_alignment=["floors_ptr", "target_ptr", "tops_ptr", "lowest_ptr", "state_ptr", "live_ptr"],
)
def open_kernel(
    floors_ptr,  # (ranks, B) int64, every ``words``th: of ``floor_kernel``
    words: tl.int32,
    target_ptr,  # (B,) or (1,) int64: top-k
    target_stride: tl.int64,
    tops_ptr,  # (B,) float32
    lowest_ptr,  # (B,) int64, out: the highest floor
    state_ptr,  # (B, STATE) int64, out
    live_ptr,  # (1,) int32, zero; out: how many rows are searched
    few: tl.int32,  # a k up to this is not searched for
    vocab_size: tl.int32,
    batch: tl.int32,
    ranks: tl.int32,
):
    """Begins the searches for top-k. Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(target_ptr + row * target_stride)
    lowest = tl.full((), LOWEST_PLACE, tl.int64)
    for other in range(ranks):
        lowest = tl.maximum(lowest, tl.load(floors_ptr + (other * batch.to(tl.int64) + row) * words))
    tl.store(lowest_ptr + row, lowest)
    _open(state_ptr, live_ptr, row, (k > few) & (k < vocab_size), tl.load(tops_ptr + row), lowest, k)


@jit(
    do_not_specialize=["top_p_stride", "unit", "vocab_size", "batch", "ranks"],
    do_not_specialize_on_alignment=[
        "theirs_ptr", "top_p_ptr", "settled_ptr", "tops_ptr", "temperatures_ptr", "limits_ptr", "out_ptr", "state_ptr",
        "live_ptr",
    ],
)  # fmt: skip
def nucleus_kernel(
    theirs_ptr,  # (ranks, B) int64: masses of the tokens that count
    top_p_ptr,  # (B,) or (1,) float32
    top_p_stride: tl.int64,
    settled_ptr,  # (B,) int32, of ``few_kernel``; None: no row is
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    limits_ptr,  # (B,) int64: the least place of a token that counts
    out_ptr,  # (B,) int64, out: a place that no token of the nucleus is below, nor one that does not count
    state_ptr,  # (B, STATE) int64, out
    live_ptr,  # (1,) int32, zero; out: how many rows are searched
    unit: tl.int64,
    vocab_size: tl.int32,
    batch: tl.int32,
    ranks: tl.int32,
):
    """The nucleus's last token and those behind it, no more than the vocabulary has, have together what the nucleus
    leaves, and none of them more than that one; so it has their average or more. Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.load(top_p_ptr + row * top_p_stride)
    on = p < 1.0
    if settled_ptr is not None:
        on = on & (tl.load(settled_ptr + row) == 0)
    mass = tl.zeros((), tl.int64)
    for other in range(ranks):
        mass += tl.load(theirs_ptr + other * batch.to(tl.int64) + row)
    wanted = _wanted(p, mass)
    top, temperature = tl.load(tops_ptr + row), tl.load(temperatures_ptr + row)
    divisor = tl.where(temperature < GREEDY_BELOW, 1.0, temperature).to(tl.float64)
    share = (mass - wanted + 1).to(tl.float64) / vocab_size.to(tl.float64) - 1.0  # less what rounding adds
    least = top.to(tl.float64) + divisor * (tl.log(tl.maximum(share, 1e-9) / unit.to(tl.float64)) - 1e-3)
    least = (least - 1e-6 * tl.abs(least)).to(tl.float32)
    lowest = tl.where((share > 0.0) & (least == least), key_of(least).to(tl.int64) << 31, LOWEST_PLACE)
    tl.store(out_ptr + row, tl.maximum(lowest, tl.load(limits_ptr + row)))
    _open(state_ptr, live_ptr, row, on, top, lowest, wanted)


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
    of_row, at, columns, highest, last, lowest, tops_ptr, temperatures_ptr, out, row, first_token, unit, width, shift,
    MASSES: tl.constexpr,
):  # fmt: skip
    """The amounts of the tokens at some columns: see ``histogram_kernel``."""
    live = at < columns
    x = tl.load(of_row + at, mask=live, other=float("-inf"))
    key = key_of(x)
    below = highest - key.to(tl.uint32, bitcast=True)  # modulo 2**32
    left = (live & (below <= last) & (_place(key, first_token + at) >= lowest)).to(tl.int32)
    many = tl.sum(left, axis=0)
    if many > 0:
        amounts = tl.full(x.shape, 1, tl.int64)
        if MASSES:  # noqa: SIM102, the branch within is the device's
            if shift > 0:  # a digit is a key otherwise, whose tokens have the same mass
                amounts = _mass(x, tl.load(tops_ptr + row), tl.load(temperatures_ptr + row), unit)
        bins = 1 << width
        digit = tl.where(left != 0, (below >> shift.to(tl.uint32)).to(tl.int32), bins)
        some = tl.full((), 0, tl.int32)
        while (many > _MANY) & (some < _SOME):
            one = tl.min(digit, axis=0)
            same = digit == one
            tl.atomic_add(out + one, tl.sum(tl.where(same, amounts, 0), axis=0), sem="relaxed")
            digit = tl.where(same, bins, digit)
            many -= tl.sum(same.to(tl.int32), axis=0)
            some += 1
        tl.atomic_add(out + digit, amounts, mask=digit < bins, sem="relaxed")


@jit(
    do_not_specialize=["columns", "first_token", "unit", "width", "chunks", "tiles", "blocks"],
    do_not_specialize_on_alignment=[
        "live_ptr", "state_ptr", "lowest_ptr", "tops_ptr", "temperatures_ptr", "out_ptr",
    ],
)  # fmt: skip
def histogram_kernel(
    live_ptr,  # (1,) int32: how many rows are searched
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    keys_ptr,  # (B, chunks) int32, of ``row_max_kernel``
    state_ptr,  # (B, STATE) int64: see ``_open``
    lowest_ptr,  # (B,) int64: the least place of a token that counts
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    out_ptr,  # (B, 2**width) int64, zeros; out: from the highest keys down
    first_token: tl.int32,
    unit: tl.int64,
    width: tl.int32,
    chunks: tl.int32,
    tiles: tl.int32,  # of a program
    blocks: tl.int32,
    MASSES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
):
    """Grid: (blocks * B,). Of chunks that have no token that is searched no logit is read. Where many tokens share a
    few digits, their amounts are added up here, others in memory."""
    if tl.load(live_ptr) == 0:
        return
    row = (tl.program_id(0) // blocks).to(tl.int64)
    bits = tl.load(state_ptr + row * _STATE + 2).to(tl.int32)
    if bits == 0:
        return
    highest = key_of(tl.load(tops_ptr + row)).to(tl.int64) - tl.load(state_ptr + row * _STATE)
    last = (tl.full((), 1, tl.int64) << bits) - 1
    lowest = tl.load(lowest_ptr + row)
    of_row = logits + row * logits_stride
    out = out_ptr + row * (1 << width)
    shift = tl.maximum(bits - width, 0)
    for tile in range(tiles):
        first = (tl.program_id(0) % blocks * tiles + tile) * (TILE // CHUNK)
        chunk = first + tl.arange(0, TILE // CHUNK)
        reach = tl.load(keys_ptr + row * chunks + chunk, mask=chunk < chunks, other=NO_LOGIT).to(tl.int64)
        passing = (chunk < chunks) & (highest - reach <= last) & (reach >= lowest >> 31)
        passed = tl.sum(passing.to(tl.int32), axis=0)
        if passed > FEW:
            at = first * CHUNK + tl.arange(0, TILE)
            _add_up(
                of_row, at, columns, highest.to(tl.uint32), last.to(tl.uint32), lowest, tops_ptr, temperatures_ptr,
                out, row, first_token, unit, width, shift, MASSES,
            )  # fmt: skip
        elif passed > 0:
            at = _tokens_of(passing, chunk, columns, FEW, CHUNK)
            _add_up(
                of_row, at, columns, highest.to(tl.uint32), last.to(tl.uint32), lowest, tops_ptr, temperatures_ptr,
                out, row, first_token, unit, width, shift, MASSES,
            )  # fmt: skip


@jit(
    do_not_specialize=["columns", "first_token", "unit", "width", "batch", "ranks", "rank", "before", "before_too"],
    do_not_specialize_on_alignment=[
        "live_ptr", "next_ptr", "theirs_ptr", "state_ptr", "limits_ptr", "tops_ptr", "temperatures_ptr",
    ],
)  # fmt: skip
def radix_pass_kernel(
    live_ptr,  # (1,) int32: how many rows are searched
    next_ptr,  # (1,) int32, zero; out: in how many of them the search goes on
    theirs_ptr,  # (ranks, B, 2**width) int64
    state_ptr,  # (B, STATE) int64, in and out: see ``_open``
    limits_ptr,  # (B,) int64, in and, after the last digit, out: it rises to the limit
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    first_token: tl.int32,
    unit: tl.int64,
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
    if tl.load(live_ptr) == 0:
        return
    row = tl.program_id(0).to(tl.int64)
    bits = tl.load(state_ptr + row * _STATE + 2).to(tl.int32)
    if bits == 0:
        return
    bins = 1 << width
    bin = tl.arange(0, BINS)
    of_row, to_next = theirs_ptr + row * bins + bin, batch.to(tl.int64) * bins
    sums = tl.zeros((BINS,), tl.int64)
    for other in range(ranks):
        sums += tl.load(of_row + other * to_next, mask=bin < bins, other=0)
    shift = tl.maximum(bits - width, 0)
    begin = tl.load(state_ptr + row * _STATE)
    left = tl.load(state_ptr + row * _STATE + 1)
    top = tl.load(tops_ptr + row)
    topmost = key_of(top).to(tl.int64)
    each = tl.full((BINS,), 1, tl.int64)
    if MASSES:  # noqa: SIM102, the branch within is the device's
        if shift == 0:  # a digit is a key then, whose tokens have the same mass, and they were counted
            x = value_of((topmost - begin - bin).to(tl.int32))
            each = _mass(x, top, tl.load(temperatures_ptr + row), unit)
            sums *= each
    up_to = tl.cumsum(sums, axis=0)
    occupied = tl.max(tl.where(sums > 0, bin, 0), axis=0)  # the sum of masses may fall short by what rounding is
    at = tl.minimum(tl.sum(((up_to < left) & (bin < bins)).to(tl.int32), axis=0), occupied)
    here = bin == at
    left -= tl.sum(tl.where(here, up_to - sums, 0), axis=0)
    begin += at.to(tl.int64) << shift
    tl.store(state_ptr + row * _STATE, begin)
    tl.store(state_ptr + row * _STATE + 1, left)
    tl.store(state_ptr + row * _STATE + 2, shift.to(tl.int64))
    if shift > 0:
        tl.atomic_add(next_ptr, 1, sem="relaxed")
    else:
        one = tl.maximum(tl.sum(tl.where(here, each, 0), axis=0), 1)
        of_key = theirs_ptr + row * bins + at
        kept = tl.maximum((left + one - 1) // one, 1)
        own = tl.load(of_key + rank * to_next)
        for other in range(ranks):
            comes_before = tl.where(
                other < _RANKS, before >> tl.minimum(other, 63), before_too >> tl.maximum(other - _RANKS, 0)
            )
            kept -= tl.load(of_key + other * to_next) * (comes_before & 1)
        mine = tl.minimum(tl.maximum(kept, 0), own)  # of this rank's tokens with the key, the first ones
        key = topmost - begin
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
    keys_ptr,  # (B, chunks) int32, of ``row_max_kernel``
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
    do_not_specialize=["columns", "first_token", "top_p_stride", "unit", "chunks", "blocks"],
    do_not_specialize_on_alignment=[
        "limits_ptr",
        "top_p_ptr",
        "settled_ptr",
        "tops_ptr",
        "temperatures_ptr",
        "out_ptr",
    ],
)
def mass_kernel(
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    keys_ptr,  # (B, chunks) int32, of ``row_max_kernel``; None: they are not known
    limits_ptr,  # (B,) int64
    top_p_ptr,  # (B,) or (1,) float32: a row where it is off is passed over; None: no row is
    top_p_stride: tl.int64,
    settled_ptr,  # (B,) int32: likewise, of ``few_kernel``; None: no row is
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    out_ptr,  # (B,) int64, zeros; out
    first_token: tl.int32,
    unit: tl.int64,
    chunks: tl.int32,
    blocks: tl.int32,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (blocks * B,)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    if top_p_ptr is not None:  # noqa: SIM102, the branch within is the device's
        if (tl.load(top_p_ptr + row * top_p_stride) < 1.0) == 0:
            return
    if settled_ptr is not None:  # noqa: SIM102
        if tl.load(settled_ptr + row) != 0:
            return
    first = tl.program_id(0) % blocks * TILE
    lowest = tl.load(limits_ptr + row)
    if keys_ptr is not None:
        chunk = first // CHUNK + tl.arange(0, TILE // CHUNK)
        reach = tl.load(keys_ptr + row * chunks + chunk, mask=chunk < chunks, other=NO_LOGIT)
        if tl.max(reach, axis=0).to(tl.int64) < lowest >> 31:
            return
    at = first + tl.arange(0, TILE)
    x = tl.load(logits + row * logits_stride + at, mask=at < columns, other=float("-inf"))
    kept = at < columns
    if lowest != LOWEST_PLACE:
        kept = kept & (_place(key_of(x), first_token + at) >= lowest)
    if tl.max(kept.to(tl.int32), axis=0) != 0:
        masses = _mass(x, tl.load(tops_ptr + row), tl.load(temperatures_ptr + row), unit)
        tl.atomic_add(out_ptr + row, tl.sum(tl.where(kept, masses, 0), axis=0), sem="relaxed")
