"""Of a row's tokens the boundary that a filter draws, found without sorting.

A token's place is one number, greater for the greater logit and then for the lower id, so what a filter keeps is all
places from a limit on.

    few tokens     each is compared with each: how many, and how much mass, are before it (``before``)
    more           a bracket of keys around the boundary is split in three by two thresholds; a pass over the tokens
                   says of each part how many it holds and how much mass, and the ends of the one with the boundary,
                   keys that occur. When few are left, they are compared with each other; when one key is left, a pass
                   in the order of ids follows

Thresholds lie close around where the target would be if the bracket were evenly filled, which leaves about twice the
root of how many there were; every third pass they lie evenly between the ends as bits, so that any row comes to one key
in 80. All numbers are kept per place of a tile until a pass ends, and few reductions follow.

The tokens are candidates in memory (``logits_chunks``), or, where those do not suffice, the row itself.
"""

from typing import NamedTuple

import triton.language as tl

from ..constant import Constant
from ..jit import jit
from ..reductions import lowest_and_highest, sum_three
from .logit_source import (
    LARGEST,
    LOG2E,
    key_of,
    mass_of,
    processed_logits,
    raw_logits,
    reaches,
    scatter,
    sparse_entries,
    stored,
    value_of,
)

_AT_A_TIME = Constant(8)  # loads on their way
_LEAST = Constant(-0x80000000)
_MOST = Constant(0x7FFFFFFF)
_LAST_PLACE = Constant(0x7FFFFFFFFFFFFFFF)


class Tokens(NamedTuple):
    """What a search goes over."""

    source: object
    keys: object  # (CAPACITY,) int32
    ids: object  # (CAPACITY,) int32
    masses: object  # (CAPACITY,) float32, relative to the highest logit's
    count: object  # of candidates; of the whole row, the vocabulary's size
    lowest: object  # key; tokens below it are left out
    id_bits: object  # that ids need, a constant
    top: object  # highest logit
    scale: object  # of masses
    room: object  # for 3 * FEW int32


@jit
def _row_tile(tokens, first, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Of a row: logits, ids and which of them there are, (TILE,) each, from a multiple of TILE on."""
    index = first + tl.arange(0, TILE)
    live = index < tokens.count
    raw = raw_logits(tokens.source, index, stored(tokens.source, index, live), HEAD, 16)
    entries = tl.full((ENTRIES,), -1, tl.int32)
    if tokens.source.bias_ids is not None:
        entries = sparse_entries(tokens.source, ENTRIES)
        entries = tl.where((entries >= first) & (entries < first + TILE), entries, -1)
    return processed_logits(tokens.source, (raw,), (index,), (live,), entries, ENTRIES)[0], index, live


@jit
def tile_of(tokens, first, WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Keys, ids and which of them there are, (TILE,) each."""
    if WHOLE:
        x, index, live = _row_tile(tokens, first, TILE, HEAD, ENTRIES)
        return key_of(x), index, live
    else:
        index = first + tl.arange(0, TILE)
        live = index < tokens.count
        return tl.load(tokens.keys + index, mask=live, other=0), tl.load(tokens.ids + index, mask=live, other=0), live


@jit
def values_of(tokens, first, WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Likewise logits."""
    if WHOLE:
        return _row_tile(tokens, first, TILE, HEAD, ENTRIES)
    else:
        key, index, live = tile_of(tokens, first, False, TILE, HEAD, ENTRIES)
        return value_of(key), index, live


@jit
def place_of(tokens, key, token):
    """int64 in the row's order, from 0 up; below 0 for a key that is left out."""
    last_id: tl.constexpr = (1 << tokens.id_bits) - 1
    return ((key.to(tl.int64) - tokens.lowest) << tokens.id_bits) | (token ^ last_id).to(tl.int64)


@jit
def before(key, token, keys_ptr, ids_ptr, masses_ptr, count):
    """How many of a few tokens in memory, and how much of their mass, are before each of those in ``key`` and
    ``token``. Sums run in the same order for each, and so what is before a token never weighs more than what is
    before the next one.

    Every thread reads all of them, which need no more than a cache: no thread waits for another."""
    rank = tl.zeros(key.shape, tl.int32)
    mass = tl.zeros(key.shape, tl.float32)
    for start in range(0, count, _AT_A_TIME):
        part = tl.zeros(key.shape, tl.float32)
        for j in tl.static_range(_AT_A_TIME):
            there = start + j < count
            other_key = tl.load(keys_ptr + start + j, mask=there, other=_LEAST)
            other_id = tl.load(ids_ptr + start + j, mask=there, other=0)
            other_mass = tl.load(masses_ptr + start + j, mask=there, other=0.0)
            earlier = (other_key > key) | ((other_key == key) & (other_id < token))
            rank += earlier.to(tl.int32)
            part += tl.where(earlier, other_mass, 0.0)
        mass += part
    return rank, mass


@jit
def _add(count, mass, low, high, there, key, this_mass):
    """A part's numbers, per place of a tile, and one tile more."""
    count += there.to(tl.int32)
    mass += tl.where(there, this_mass, 0.0).to(tl.float64)
    return count, mass, tl.minimum(low, tl.where(there, key, _MOST)), tl.maximum(high, tl.where(there, key, _LEAST))


@jit
def _parts(
    tokens,
    limit,
    low,
    first,
    second,
    high,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Of the tokens from the limit on, with keys in [second, high], [first, second) and [low, first): how many, their
    mass, the lowest and the highest key; all of them still per place of a tile."""
    none, nothing = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.float64)
    n0, m0, l0, h0 = none, nothing, none + _MOST, none + _LEAST
    n1, m1, l1, h1 = none, nothing, none + _MOST, none + _LEAST
    n2, m2, l2, h2 = none, nothing, none + _MOST, none + _LEAST
    for start in range(0, tokens.count, TILE):
        key, token, live = tile_of(tokens, start, WHOLE, TILE, HEAD, ENTRIES)
        live = live & (key >= low) & (key <= high) & (place_of(tokens, key, token) >= limit)
        mass = mass_of(value_of(key), tokens.top, tokens.scale)
        n0, m0, l0, h0 = _add(n0, m0, l0, h0, live & (key >= second), key, mass)
        n1, m1, l1, h1 = _add(n1, m1, l1, h1, live & (key >= first) & (key < second), key, mass)
        n2, m2, l2, h2 = _add(n2, m2, l2, h2, live & (key < first), key, mass)
    return (n0, m0, l0, h0), (n1, m1, l1, h1), (n2, m2, l2, h2)


@jit
def _threshold(low, high, share, by_value):
    """A key so much of the way from high down to low, by value or by bits; above low and up to high."""
    bottom, top = value_of(low), value_of(high)
    share = tl.minimum(tl.maximum(share, 0.0), 1.0)
    by_value = by_value & (tl.abs(bottom) < float("inf")) & (tl.abs(top) < float("inf"))
    between = key_of(top * (1.0 - share) + bottom * share).to(tl.int64)
    wide = low.to(tl.int64)
    by_bits = high.to(tl.int64) - ((high.to(tl.int64) - wide).to(tl.float32) * share).to(tl.int64)
    key = tl.where(by_value, between, by_bits)
    return tl.minimum(tl.maximum(key, wide + 1), high.to(tl.int64)).to(tl.int32)


@jit
def _last_tie(tokens, limit, key_of_ties, many, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Id of the ``many``-th token of a key, from the limit on, in the order of ids: of the row, also where there are
    candidates, which are in no order."""
    seen = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    last = tl.full((), -1, tl.int32)
    row = Tokens(
        tokens.source, tokens.keys, tokens.ids, tokens.masses, tokens.source.vocab_size, tokens.lowest, tokens.id_bits,
        tokens.top, tokens.scale, tokens.room,
    )  # fmt: skip
    while (start < row.count) & (last < 0):
        key, token, live = tile_of(row, start, True, TILE, HEAD, ENTRIES)
        tie = (live & (key == key_of_ties) & (place_of(row, key, token) >= limit)).to(tl.int32)
        here = tl.sum(tie, axis=0)
        if seen + here >= many:
            is_last = (tie != 0) & (tl.cumsum(tie, axis=0) == many - seen)
            last = tl.max(tl.where(is_last, token, -1), axis=0)
        seen += here
        start += TILE
    return last


@jit
def _limit_among(
    tokens, limit, low, high, many, by_mass, left,
    WHOLE: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The last place that is needed for what is left of the target, among the few tokens of a bracket of keys."""
    found = tl.full((), 0, tl.int32)
    keys_ptr, ids_ptr, masses_ptr = (
        tokens.room,
        tokens.room + FEW,
        (tokens.room + 2 * FEW).to(tl.pointer_type(tl.float32)),
    )
    tl.debug_barrier()
    for start in range(0, tokens.count, TILE):
        key, token, live = tile_of(tokens, start, WHOLE, TILE, HEAD, ENTRIES)
        there = live & (key >= low) & (key <= high) & (place_of(tokens, key, token) >= limit)
        ones = there.to(tl.int32)
        at = found + tl.cumsum(ones, axis=0) - ones
        scatter(keys_ptr + at, key, there)
        scatter(ids_ptr + at, token, there)
        scatter(masses_ptr + at, mass_of(value_of(key), tokens.top, tokens.scale), there)
        found += tl.sum(ones, axis=0)
    tl.debug_barrier()
    i = tl.arange(0, FEW)
    live = i < many
    key = tl.load(keys_ptr + i, mask=live, other=0)
    token = tl.load(ids_ptr + i, mask=live, other=0)
    place = tl.where(live, place_of(tokens, key, token), -1)
    rank, mass_before = before(key, token, keys_ptr, ids_ptr, masses_ptr, many)
    taken = tl.where(by_mass, mass_before.to(tl.float64), rank.to(tl.float64))
    kept = live & ((taken < left) | (rank == 0))
    return tl.min(tl.where(kept, place, _LAST_PLACE), axis=0)


@jit
def limit_of(
    tokens, highest, limit, by_mass, target, is_share,
    WHOLE: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The limit of the shortest prefix of what a limit keeps whose count or mass reaches the target, or, if
    ``is_share``, that times the mass of all that is kept; the old limit if all of it does not."""
    low = tokens.lowest.to(tl.int32)
    high = highest
    if WHOLE:
        first = tl.minimum(tl.maximum(key_of(tokens.top - tl.minimum(2.0 / tokens.scale, LARGEST)), low), high)
        second = highest
    else:  # the bound that the candidates have is a guess of where the boundary is
        floor = tl.maximum(low, key_of(tokens.top - tl.minimum(1.0 / tokens.scale * (40.0 * LOG2E), LARGEST)))
        first = _threshold(floor, high, 0.95, True)
        second = tl.maximum(_threshold(floor, high, 0.7, True), first)
    above = tl.full((), 0.0, tl.float64)
    many = tl.full((), 0, tl.int32)
    passes = tl.full((), 0, tl.int32)
    whole_bracket = tl.full((), 0, tl.int32)
    searching = tl.full((), 1, tl.int32)
    while searching != 0:
        part0, part1, part2 = _parts(tokens, limit, low, first, second, high, WHOLE, TILE, HEAD, ENTRIES)
        n0, n1, n2 = sum_three(part0[0], part1[0], part2[0])
        a0, a1, a2 = n0.to(tl.float64), n1.to(tl.float64), n2.to(tl.float64)
        if by_mass:
            a0, a1, a2 = sum_three(part0[1], part1[1], part2[1])
        if passes == 0:
            target = tl.where(is_share, target * (a0 + a1 + a2), target)
        in0 = (n0 > 0) & (above + a0 >= target)
        in1 = (n1 > 0) & (above + a0 + a1 >= target) & (in0 == 0)
        in2 = (n2 > 0) & (above + a0 + a1 + a2 >= target) & (in0 == 0) & (in1 == 0)
        if in0 | in1 | in2:
            above = tl.where(in0, above, tl.where(in1, above + a0, above + a0 + a1))
            many = tl.where(in0, n0, tl.where(in1, n1, n2))
            amount = tl.where(in0, a0, tl.where(in1, a1, a2))
            lows = tl.where(in0, part0[2], tl.where(in1, part1[2], part2[2]))
            low, high = lowest_and_highest(lows, tl.where(in0, part0[3], tl.where(in1, part1[3], part2[3])))
            share = ((target - above) / tl.where(amount > 0.0, amount, 1.0)).to(tl.float32)
            by_value = passes % 3 != 2
            share = tl.where(by_value, share, 0.5)
            around = tl.where(by_value, tl.minimum(1.0 / tl.sqrt(many.to(tl.float32)), 0.17), 0.17)
            first = _threshold(low, high, share + around, by_value)
            second = tl.maximum(_threshold(low, high, share - around, by_value), first)
            searching = ((low < high) & (many > FEW)).to(tl.int32)
        else:  # at first: all of it does not reach the target. Later: rounding, the whole bracket is kept
            many = tl.where(passes == 0, 0, many)
            whole_bracket = whole_bracket * 0 + 1
            searching = searching * 0
        passes += 1
    if many > 0:
        lowest_place = (low.to(tl.int64) - tokens.lowest) << tokens.id_bits
        if whole_bracket == 0:
            if low < high:
                left = target - above
                lowest_place = _limit_among(
                    tokens, limit, low, high, many, by_mass, left, WHOLE, FEW, TILE, HEAD, ENTRIES
                )
            else:
                each = tl.where(by_mass, mass_of(value_of(low), tokens.top, tokens.scale), 1.0).to(tl.float64)
                wanted = tl.where(each > 0.0, (target - above) / tl.where(each > 0.0, each, 1.0), 1.0)
                wanted = tl.minimum(tl.maximum(wanted, 1.0), many.to(tl.float64))
                ties = wanted.to(tl.int32)
                ties += (ties.to(tl.float64) < wanted).to(tl.int32)
                if ties < many:
                    lowest_place = place_of(tokens, low, _last_tie(tokens, limit, low, ties, 4 * TILE, HEAD, ENTRIES))
        limit = tl.maximum(limit, lowest_place)
    return limit


@jit
def mass_of_kept(
    tokens, limit, least_mass, WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr
):
    """Mass of what is kept of a row, or of its candidates."""
    total = tl.zeros((TILE,), tl.float64)
    for start in range(0, tokens.count, TILE):
        key, token, live = tile_of(tokens, start, WHOLE, TILE, HEAD, ENTRIES)
        x = value_of(key)
        mass = mass_of(x, tokens.top, tokens.scale)
        live = live & (place_of(tokens, key, token) >= limit) & reaches(x, mass, least_mass, tokens.top, tokens.scale)
        total += tl.where(live, mass, 0.0).to(tl.float64)
    return tl.sum(total, axis=0).to(tl.float32)
