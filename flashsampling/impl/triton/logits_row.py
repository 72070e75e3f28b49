"""Filters and draws over a whole row, for one whose candidates are more than there is room for. Parts of ``logits_pick``.

limit      a bracket of keys around the boundary is split in three by two thresholds; a pass over the row says of each part how
           many tokens it holds, how much mass and which keys at its ends. Thresholds lie evenly between the ends, by value
           and by bits in turn, so a spread row loses a good two thirds of the bracket in a pass and any row comes to one key
           in 45. The ends are keys that occur, so a row of few values is done in two or three. Where it stops is among
           equal logits: one pass in the order of ids
draw       a pass in Philox groups, as in the scan: four tokens for one block of noise

All numbers are kept per place of a tile until the pass ends, and one reduction follows; a search by digits that counts 16
thresholds at once reduces in every tile instead. Why one program does this alone: rows of equal logits, of which there may be
many, do not come here (``logits_pick``), and passes over several programs would have to wait for each other, pass by pass.
"""

import triton
import triton.language as tl

from .logits_search import place_of, tile_of
from .logits_source import column_tokens, key_of, mass_of, processed_logits, raw_logits, score_factors, sparse_entries, value_of
from .logits_source import word_of as word_of_token
from .noise import REFINEMENT_BIT, minus_gumbel_refined, philox_words
from .scores import NAN_KEY, NO_TOKEN, pack_key, score_of

_LEAST = tl.constexpr(-0x80000000)
_MOST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _add(count, mass, low, high, there, key, this_mass):
    """A part's numbers, per place of a tile, and one tile more."""
    count += there.to(tl.int32)
    mass += tl.where(there, this_mass, 0.0).to(tl.float64)
    return count, mass, tl.minimum(low, tl.where(there, key, _MOST)), tl.maximum(high, tl.where(there, key, _LEAST))


@triton.jit
def _whole(count, mass, low, high):
    """A part's numbers."""
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.min(low, axis=0), tl.max(high, axis=0)


@triton.jit
def _parts(tokens, limit, low, first, second, high, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Of the tokens from the limit on, with keys in [second, high], [first, second) and [low, first): how many, their mass, the
    lowest and the highest key; (4,) numbers each."""
    none, nothing = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.float64)
    n0, m0, l0, h0 = none, nothing, none + _MOST, none + _LEAST
    n1, m1, l1, h1 = none, nothing, none + _MOST, none + _LEAST
    n2, m2, l2, h2 = none, nothing, none + _MOST, none + _LEAST
    for start in range(0, tokens.count, TILE):
        key, token, live = tile_of(tokens, start, True, TILE, HEAD, ENTRIES)
        live = live & (key >= low) & (key <= high) & (place_of(tokens, key, token) >= limit)
        mass = mass_of(value_of(key), tokens.top, tokens.scale)
        n0, m0, l0, h0 = _add(n0, m0, l0, h0, live & (key >= second), key, mass)
        n1, m1, l1, h1 = _add(n1, m1, l1, h1, live & (key >= first) & (key < second), key, mass)
        n2, m2, l2, h2 = _add(n2, m2, l2, h2, live & (key < first), key, mass)
    return _whole(n0, m0, l0, h0), _whole(n1, m1, l1, h1), _whole(n2, m2, l2, h2)


@triton.jit
def _third(low, high, by_value, WHICH: tl.constexpr):
    """A key a third or two of the way, above low and up to high."""
    wide = low.to(tl.int64)
    key = wide + (high.to(tl.int64) - wide) * WHICH // 3
    bottom = value_of(low)
    by_value = by_value & (tl.abs(bottom) < float("inf")) & (tl.abs(value_of(high)) < float("inf"))
    between = key_of(bottom + (value_of(high) * (WHICH / 3.0) - bottom * (WHICH / 3.0)))
    key = tl.where(by_value, between.to(tl.int64), key)
    return tl.minimum(tl.maximum(key, wide + 1), high.to(tl.int64)).to(tl.int32)


@triton.jit
def _last_tie(tokens, limit, key_of_ties, many, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Id of the ``many``-th token of a key, from the limit on, in the order of ids."""
    seen = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    last = tl.full((), -1, tl.int32)
    while (start < tokens.count) & (last < 0):
        key, token, live = tile_of(tokens, start, True, TILE, HEAD, ENTRIES)
        tie = (live & (key == key_of_ties) & (place_of(tokens, key, token) >= limit)).to(tl.int32)
        here = tl.sum(tie, axis=0)
        if seen + here >= many:
            is_last = (tie != 0) & (tl.cumsum(tie, axis=0) == many - seen)
            last = tl.max(tl.where(is_last, token, -1), axis=0)
        seen += here
        start += TILE
    return last


@triton.jit
def row_limit_of(
    tokens, highest, limit, by_mass, target, is_share, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr
):
    """``limit_of``, for a row."""
    low = tokens.lowest.to(tl.int32)
    high = highest
    second = highest
    first = tl.minimum(tl.maximum(key_of(tokens.top - 2.0 / tokens.scale), low), high)
    above = tl.full((), 0.0, tl.float64)
    many = tl.full((), 0, tl.int32)
    passes = tl.full((), 0, tl.int32)
    searching = tl.full((), 1, tl.int32)
    while searching != 0:
        part0, part1, part2 = _parts(tokens, limit, low, first, second, high, TILE, HEAD, ENTRIES)
        n0, m0, l0, h0 = part0
        n1, m1, l1, h1 = part1
        n2, m2, l2, h2 = part2
        if passes == 0:
            target = tl.where(is_share, target * (m0 + m1 + m2), target)
        above1 = above + tl.where(by_mass, m0, n0.to(tl.float64))
        above2 = above1 + tl.where(by_mass, m1, n1.to(tl.float64))
        above3 = above2 + tl.where(by_mass, m2, n2.to(tl.float64))
        in0 = (n0 > 0) & (above1 >= target)
        in1 = (n1 > 0) & (above2 >= target) & (in0 == 0)
        in2 = (n2 > 0) & (above3 >= target) & (in0 == 0) & (in1 == 0)
        if in0 | in1 | in2:
            above = tl.where(in0, above, tl.where(in1, above1, above2))
            many = tl.where(in0, n0, tl.where(in1, n1, n2))
            low = tl.where(in0, l0, tl.where(in1, l1, l2))
            high = tl.where(in0, h0, tl.where(in1, h1, h2))
            first = _third(low, high, passes % 2 == 0, 1)
            second = tl.maximum(_third(low, high, passes % 2 == 0, 2), first)
            searching = (low < high).to(tl.int32)
        else:  # at first: all of it does not reach the target. Later: rounding, the whole bracket is kept
            many = tl.where(passes == 0, 0, many)
            high = tl.maximum(high, low + 1)
            searching = searching * 0
        passes += 1
    if many > 0:
        lowest_place = (low.to(tl.int64) - tokens.lowest) << tokens.id_bits
        if low == high:
            each = tl.where(by_mass, mass_of(value_of(low), tokens.top, tokens.scale), 1.0).to(tl.float64)
            wanted = tl.where(each > 0.0, (target - above) / tl.where(each > 0.0, each, 1.0), 1.0)
            wanted = tl.minimum(tl.maximum(wanted, 1.0), many.to(tl.float64))
            ties = wanted.to(tl.int32)
            ties += (ties.to(tl.float64) < wanted).to(tl.int32)
            if ties < many:
                lowest_place = place_of(tokens, low, _last_tie(tokens, limit, low, ties, 2 * TILE, HEAD, ENTRIES))
        limit = tl.maximum(limit, lowest_place)
    return limit


@triton.jit
def mass_of_kept(tokens, limit, least_mass, WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Mass of what is kept of a row, or of its candidates."""
    total = tl.zeros((TILE,), tl.float64)
    for start in range(0, tokens.count, TILE):
        key, token, live = tile_of(tokens, start, WHOLE, TILE, HEAD, ENTRIES)
        mass = mass_of(value_of(key), tokens.top, tokens.scale)
        live = live & (place_of(tokens, key, token) >= limit) & (mass >= least_mass)
        total += tl.where(live, mass, 0.0).to(tl.float64)
    return tl.sum(total, axis=0).to(tl.float32)


@triton.jit
def draw_from_row(
    tokens, limit, least_mass, first, temperature, seed, offset, stream, winners_ptr, blocks, full, ids_ptr, num_samples,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Writes the token with the best score among the kept ones, for every draw. ``first``, a multiple of 128: of the tokens
    below it the scan has the best scores, in the first ``full`` of a draw's ``blocks``."""
    GROUPS: tl.constexpr = TILE // 4
    scale, noise_factor = score_factors(temperature)
    key_lo, key_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    offset_lo, offset_hi = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    column = column_tokens(GROUPS)
    block = tl.arange(0, BLOCKS)
    for draw in range(num_samples):
        draw_number = (draw | (stream << 24)).to(tl.uint32)
        known = tl.max(tl.load(winners_ptr + draw * blocks + block, mask=block < full, other=0), axis=0)
        start = first
        if known != 0:  # the word 0 counts for too much there: all over again
            token = ((known & NO_TOKEN) ^ NO_TOKEN).to(tl.int32)
            is_zero = word_of_token(token, draw_number, offset_lo, offset_hi, key_lo, key_hi) == 0
            start = tl.where(is_zero, 0, first)
            known = tl.where(is_zero, 0, known)
        draw_word = tl.zeros((GROUPS,), tl.uint32) + draw_number
        best = tl.zeros((GROUPS,), tl.int64)
        while start < tokens.count:
            ids = ()
            there = ()
            raw = ()
            for lane in tl.static_range(4):
                id = start + (lane & 1) * 8 + (lane // 2) * 64 + column
                live = id < tokens.count
                ids = ids + (id,)
                there = there + (live,)
                raw = raw + (raw_logits(tokens.source, id, live, HEAD),)
            entries = tl.full((ENTRIES,), -1, tl.int32)
            if tokens.source.bias_ids is not None:
                entries = sparse_entries(tokens.source, ENTRIES)
                entries = tl.where((entries >= start) & (entries < start + TILE), entries, -1)
            logits = processed_logits(tokens.source, raw, ids, there, entries, ENTRIES)
            group = (start // 4 + tl.arange(0, GROUPS)).to(tl.uint32)
            words = philox_words(group, draw_word, offset_lo, offset_hi, key_lo, key_hi)
            tail0, tail1, tail2, tail3 = words  # of no account where no word is 0
            is_zero = (words[0] == 0) | (words[1] == 0) | (words[2] == 0) | (words[3] == 0)
            if tl.max(is_zero.to(tl.int32), axis=0) != 0:
                tail0, tail1, tail2, tail3 = philox_words(
                    group, draw_word | REFINEMENT_BIT, offset_lo, offset_hi, key_lo, key_hi
                )
            tails = (tail0, tail1, tail2, tail3)
            for lane in tl.static_range(4):
                x = logits[lane]
                live = there[lane] & (place_of(tokens, key_of(x), ids[lane]) >= limit)
                live = live & (mass_of(x, tokens.top, tokens.scale) >= least_mass) & (x != float("-inf"))
                score = score_of(x, scale, 0.0, minus_gumbel_refined(words[lane], tails[lane]), noise_factor)
                best = tl.maximum(best, tl.where(live, pack_key(score, ids[lane]), 0))
            start += TILE
        key = tl.maximum(tl.max(best, axis=0), known)
        tl.store(ids_ptr + draw, tl.where((key == 0) | (key == NAN_KEY), -1, (key & NO_TOKEN) ^ NO_TOKEN))
