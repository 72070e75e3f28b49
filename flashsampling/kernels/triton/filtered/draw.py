"""Draws: from few candidates, from more of them, and from a row itself, where there are more than there is room for.

From a row in Philox groups, as in the scan: four tokens for one block of noise. Where the token that the row has
without filters is known and kept, it is drawn, and no noise is made. Why one program does this alone: rows of equal
logits, of which there may be many, are little work for most draws, and passes over several programs would have to wait
for each other.
"""

import triton.language as tl

from ..fused.noise import REFINEMENT_BIT, minus_gumbel, minus_gumbel_refined, philox_words
from ..fused.packed_argmax import NAN_KEY, NO_TOKEN, compute_score, keep_better, pack_key
from ..jit import jit
from .cutoff import before, place_of, tile_of, values_of
from .logit_source import (
    MINUS_INF,
    PLUS_INF,
    both_logits_of,
    column_tokens,
    key_of,
    mass_of,
    processed_logits,
    raw_logits,
    reaches,
    score_factors,
    sparse_entries,
    stored,
    value_of,
)
from .logit_source import word_of as word_of_token


@jit
def _id_of(key):
    """The token of a best key; -1 where there is none."""
    return tl.where((key == 0) | (key == NAN_KEY), -1, (key & NO_TOKEN) ^ NO_TOKEN)


@jit
def _keys_of_scores(
    x, token, live, draw_number, scale, noise_factor, offset_lo, offset_hi, key_lo, key_hi, REFINED: tl.constexpr
):
    """Of tokens (N,), each of a Philox block of its own. Not refined, a word 0 has a key above all others."""
    draw_word = tl.zeros(token.shape, tl.uint32) + draw_number
    word = word_of_token(token, draw_word, offset_lo, offset_hi, key_lo, key_hi)
    if REFINED:
        tail = word_of_token(token, draw_word | REFINEMENT_BIT, offset_lo, offset_hi, key_lo, key_hi)
        keys = pack_key(compute_score(x, scale, 0.0, minus_gumbel_refined(word, tail), noise_factor), token)
    else:
        keys = pack_key(compute_score(x, scale, 0.0, minus_gumbel(word), noise_factor), token)
        keys = tl.where(word == 0, NAN_KEY, keys)
    return tl.where(live & (x != float("-inf")), keys, 0)


@jit
def _best_kept(
    tokens, limit, least_mass, draw_number, scale, noise_factor, offset_lo, offset_hi, key_lo, key_hi,
    REFINED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best key of a score among the kept candidates."""
    best = tl.zeros((TILE,), tl.int64)
    for start in range(0, tokens.count, TILE):
        key, token, live = tile_of(tokens, start, False, TILE, False, 1)
        x = value_of(key)
        live = live & (place_of(tokens, key, token) >= limit)
        live = live & reaches(x, mass_of(x, tokens.top, tokens.scale), least_mass, tokens.top, tokens.scale)
        keys = _keys_of_scores(
            x, token, live, draw_number, scale, noise_factor, offset_lo, offset_hi, key_lo, key_hi, REFINED
        )
        best = tl.maximum(best, keys)
    return tl.max(best, axis=0)


@jit
def draw_from_few(
    tokens, row_mass, top_k, top_p, min_p, by_top_k, by_top_p, of_top_k, temperature, seed, offset, stream, ids_ptr,
    num_samples, FEW: tl.constexpr,
):  # fmt: skip
    """Writes the tokens that are drawn of few candidates, all filters at once. The mass of what is kept, and its last
    place."""
    scale, noise_factor = score_factors(temperature)
    key_lo, key_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    offset_lo, offset_hi = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    key, token, live = tile_of(tokens, 0, False, FEW, False, 1)
    x = value_of(key)
    mass = tl.load(tokens.masses + tl.arange(0, FEW), mask=live, other=0.0)  # all three now lie in the nearest cache
    rank, mass_before = before(key, token, tokens.keys, tokens.ids, tokens.masses, tokens.count)
    in_top_k = live & ((rank < top_k) | (by_top_k == 0))
    whole = row_mass.to(tl.float64)
    if of_top_k & by_top_p:
        whole = tl.sum(tl.where(in_top_k, mass, 0.0), axis=0).to(tl.float64)
    target = tl.maximum(top_p, 1e-30).to(tl.float64) * whole
    in_top_p = (mass_before.to(tl.float64) < target) | (by_top_p == 0)
    kept = in_top_k & ((in_top_p & reaches(x, mass, min_p, tokens.top, tokens.scale)) | (rank == 0))
    for draw in range(num_samples):
        draw_number = (draw | (stream << 24)).to(tl.uint32)
        keys = _keys_of_scores(
            x, token, kept, draw_number, scale, noise_factor, offset_lo, offset_hi, key_lo, key_hi, False
        )
        best = tl.max(keys, axis=0)
        if best == NAN_KEY:
            keys = _keys_of_scores(
                x, token, kept, draw_number, scale, noise_factor, offset_lo, offset_hi, key_lo, key_hi, True
            )
            best = tl.max(keys, axis=0)
        tl.store(ids_ptr + draw, _id_of(best))
    place = (key.to(tl.int64) << 31) | (token ^ NO_TOKEN).to(tl.int64)
    return tl.sum(tl.where(kept, mass, 0.0), axis=0), tl.min(tl.where(kept, place, 0x7FFFFFFFFFFFFFFF), axis=0)


@jit
def draw_from_candidates(
    tokens, limit, least_mass, temperature, seed, offset, stream, ids_ptr, num_samples, TILE: tl.constexpr
):
    """Writes the candidate with the best score among the kept ones, for every draw."""
    scale, noise_factor = score_factors(temperature)
    key_lo, key_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    offset_lo, offset_hi = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    for draw in range(num_samples):
        draw_number = (draw | (stream << 24)).to(tl.uint32)
        best = _best_kept(
            tokens,
            limit,
            least_mass,
            draw_number,
            scale,
            noise_factor,
            offset_lo,
            offset_hi,
            key_lo,
            key_hi,
            False,
            TILE,
        )
        if best == NAN_KEY:  # a word 0
            best = _best_kept(
                tokens,
                limit,
                least_mass,
                draw_number,
                scale,
                noise_factor,
                offset_lo,
                offset_hi,
                key_lo,
                key_hi,
                True,
                TILE,
            )
        tl.store(ids_ptr + draw, _id_of(best))


@jit
def all_equal(tokens, highest, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Returns whether every logit of a row is the highest one: its first other one ends the search."""
    equal = tl.full((), 1, tl.int32)
    start = tl.full((), 0, tl.int32)
    while (start < tokens.count) & (equal != 0):
        key, _, live = tile_of(tokens, start, True, TILE, HEAD, ENTRIES)
        equal = tl.min(((key == highest) | (live == 0)).to(tl.int32), axis=0)
        start += TILE
    return equal != 0


@jit
def any_finite(tokens, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """Returns whether a row has a finite logit: its first one ends the search."""
    found = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while (start < tokens.count) & (found == 0):
        key, _, live = tile_of(tokens, start, True, TILE, HEAD, ENTRIES)
        found = tl.max((live & (key > MINUS_INF) & (key < PLUS_INF)).to(tl.int32), axis=0)
        start += TILE
    return found != 0


@jit
def _groups_of(tokens, start, GROUPS: tl.constexpr, HEAD: tl.constexpr):
    """Of the Philox groups from the token ``start`` on: ids, which of them there are, raw logits, a tuple of four of
    each."""
    column = column_tokens(GROUPS)
    ids = ()
    there = ()
    raw = ()
    for lane in tl.static_range(4):
        id = start + (lane & 1) * 8 + (lane // 2) * 64 + column
        live = id < tokens.count
        ids = ids + (id,)
        there = there + (live,)
        raw = raw + (raw_logits(tokens.source, id, stored(tokens.source, id, live), HEAD, 8),)
    return ids, there, raw


@jit
def _best_of_row(
    tokens, limit, least_mass, first, draw_number, scale, noise_factor, offset_lo, offset_hi, key_lo, key_hi,
    TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The best key of a score among the kept tokens from ``first`` on, a multiple of 128. While scores of some are
    made, the next are on their way. A word 0, one row in 30,000 has one, is refined in a second turn.
    ``least_mass``: None is 0."""
    GROUPS: tl.constexpr = TILE // 4
    last_id: tl.constexpr = (1 << tokens.id_bits) - 1
    last_key = ((limit >> tokens.id_bits) + tokens.lowest).to(tl.int32)  # 32 bits are half as many instructions as 64
    last_token = ((limit & last_id) ^ last_id).to(tl.int32)
    draw_word = tl.zeros((GROUPS,), tl.uint32) + draw_number
    best = tl.full((), 0, tl.int64)
    turn = tl.full((), 0, tl.int32)
    while turn < 2:
        score = tl.full((GROUPS,), float("-inf"), tl.float32)
        id = tl.full((GROUPS,), NO_TOKEN, tl.int32)
        zeros = tl.zeros((GROUPS,), tl.int32)
        ids, there, raw = _groups_of(tokens, first, GROUPS, HEAD)
        for start in range(first, tokens.count, TILE):
            next_ids, next_there, next_raw = _groups_of(tokens, start + TILE, GROUPS, HEAD)
            entries = tl.full((ENTRIES,), -1, tl.int32)
            if tokens.source.bias_ids is not None:
                entries = sparse_entries(tokens.source, ENTRIES)
                entries = tl.where((entries >= start) & (entries < start + TILE), entries, -1)
            logits = processed_logits(tokens.source, raw, ids, there, entries, ENTRIES)
            group = (start // 4 + tl.arange(0, GROUPS)).to(tl.uint32)
            words = philox_words(group, draw_word, offset_lo, offset_hi, key_lo, key_hi)
            tail0, tail1, tail2, tail3 = words  # of no account where no word is 0
            if turn != 0:
                tail0, tail1, tail2, tail3 = philox_words(
                    group, draw_word | REFINEMENT_BIT, offset_lo, offset_hi, key_lo, key_hi
                )
            tails = (tail0, tail1, tail2, tail3)
            for lane in tl.static_range(4):
                x = logits[lane]
                key = key_of(x)
                live = there[lane] & ((key > last_key) | ((key == last_key) & (ids[lane] <= last_token)))
                if least_mass is not None:
                    live = live & reaches(x, mass_of(x, tokens.top, tokens.scale), least_mass, tokens.top, tokens.scale)
                live = live & (x != float("-inf"))
                zeros |= (live & (words[lane] == 0)).to(tl.int32)
                one = compute_score(x, scale, 0.0, minus_gumbel_refined(words[lane], tails[lane]), noise_factor)
                score, id = keep_better(score, id, tl.where(live, one, float("-inf")), ids[lane])
            ids, there, raw = next_ids, next_there, next_raw
        best = tl.max(tl.where(score != float("-inf"), pack_key(score, id), 0), axis=0)
        turn += tl.where((turn == 0) & (tl.max(zeros, axis=0) != 0), 1, 2)
    return best


@jit
def _mass_before(
    tokens, x_of_place, id_of_place, WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr
):
    """How much mass is before a token in the order of a row, or of its candidates. Sums run in the same order for each,
    and so what is before a token never weighs more than what is before the next one. While some are added, the next
    are on their way."""
    EACH: tl.constexpr = 4 if WHOLE else 1  # in fp32, what a thread has side by side
    total = tl.zeros((TILE // EACH,), tl.float64)
    x, token, live = values_of(tokens, 0, WHOLE, TILE, HEAD, ENTRIES)
    for start in range(0, tokens.count, TILE):
        next_x, next_token, next_live = values_of(tokens, start + TILE, WHOLE, TILE, HEAD, ENTRIES)
        live = live & ((x > x_of_place) | ((x == x_of_place) & (token < id_of_place)))
        mass = tl.where(live, mass_of(x, tokens.top, tokens.scale), 0.0)
        if WHOLE:
            mass = tl.sum(tl.reshape(mass, (TILE // EACH, EACH)), axis=1)
        total += mass.to(tl.float64)
        x, token, live = next_x, next_token, next_live
    return tl.sum(total, axis=0)


@jit
def draw_in_rounds(
    tokens, drawn, top_p, row_mass, least_mass, temperature, seed, offset, draw_number,
    WHOLE: tl.constexpr, TILE: tl.constexpr, DRAW_TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The token of one draw from a nucleus: of a row, or of candidates that hold all tokens before ``drawn`` in its
    order, or all that may be kept.

    What a filter keeps is a prefix of that order. So of a token it is enough to know how much mass is before it; and if
    it is not kept, nothing behind it is, and the draw is the best score of those before it. ``drawn``, which has the
    best score of the row, is asked first. Each round leaves what is before a token that was refused; of rows with a
    nucleus of mass p a fraction 1 - p need a second one.

    Args:
        drawn: the row's token without filters, int32, -1: it is not kept.
        row_mass: of all tokens; before a kept token is less than ``top_p`` times that.
        least_mass: of a kept token; the first token is kept whatever it is.
    """
    scale, noise_factor = score_factors(temperature)
    key_lo, key_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    offset_lo, offset_hi = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    target = tl.maximum(top_p, 1e-30).to(tl.float64) * row_mass
    token = drawn
    limit = tl.full((), -1, tl.int64)  # places from there on have been refused, and what is behind them
    searching = tl.full((), 1, tl.int32)
    while searching != 0:
        if token < 0:
            if WHOLE:
                best = _best_of_row(
                    tokens, limit + 1, None, tl.full((), 0, tl.int32), draw_number, scale, noise_factor, offset_lo,
                    offset_hi, key_lo, key_hi, DRAW_TILE, HEAD, ENTRIES,
                )  # fmt: skip
            else:
                best = _best_kept(  # refined at once: less code to come from memory than both
                    tokens, limit + 1, 0.0, draw_number, scale, noise_factor, offset_lo, offset_hi, key_lo, key_hi,
                    True, DRAW_TILE,
                )  # fmt: skip
            token = _id_of(best).to(tl.int32)
        _raw, x = both_logits_of(tokens.source, token, HEAD, ENTRIES)
        limit = place_of(tokens, key_of(x), token)
        before_it = _mass_before(tokens, x, token, WHOLE, TILE, HEAD, ENTRIES)  # 0: it is the first
        kept = (before_it < target) & reaches(
            x, mass_of(x, tokens.top, tokens.scale), least_mass, tokens.top, tokens.scale
        )
        searching = ((kept | (before_it == 0.0)) == 0).to(tl.int32)
        token = tl.where(searching != 0, -1, token)
    return token


@jit
def draw_from_row(
    tokens, limit, least_mass, first, temperature, seed, offset, stream, winners_ptr, blocks, full, ids_ptr,
    num_samples, asks, DRAWN: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Writes the token with the best score among the kept ones, for every draw. ``first``, a multiple of 128: of the
    tokens below it the scan has the best scores, in the first ``full`` of a draw's ``blocks``. ``DRAWN``: it has the
    row's tokens, of which the row ``asks``: if it may have none (UNDRAWN) it never does, since that kernel's noise
    is rounded otherwise."""
    scale, noise_factor = score_factors(temperature)
    key_lo, key_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    offset_lo, offset_hi = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    block = tl.arange(0, BLOCKS)
    for draw in range(num_samples):
        draw_number = (draw | (stream << 24)).to(tl.uint32)
        start = first
        known = tl.full((), 0, tl.int64)
        if DRAWN:
            drawn = tl.load(winners_ptr + draw).to(tl.int32)
            _raw, of_drawn = both_logits_of(tokens.source, drawn, HEAD, ENTRIES)
            is_kept = asks & (drawn < tokens.count) & (place_of(tokens, key_of(of_drawn), drawn) >= limit)
            of_top = mass_of(of_drawn, tokens.top, tokens.scale)
            if is_kept & reaches(of_drawn, of_top, least_mass, tokens.top, tokens.scale):
                known = known | (drawn ^ NO_TOKEN).to(tl.int64) | (1 << 32)  # any score
                start = tokens.count
        else:
            known = tl.max(
                tl.load(winners_ptr + draw * blocks.to(tl.int64) + block, mask=block < full, other=0), axis=0
            )
            if known != 0:  # the word 0 counts for too much there: all over again
                token = ((known & NO_TOKEN) ^ NO_TOKEN).to(tl.int32)
                is_zero = word_of_token(token, draw_number, offset_lo, offset_hi, key_lo, key_hi) == 0
                start = tl.where(is_zero, 0, first)
                known = tl.where(is_zero, 0, known)
        best = _best_of_row(
            tokens, limit, least_mass, start, draw_number, scale, noise_factor, offset_lo, offset_hi, key_lo, key_hi,
            TILE, HEAD, ENTRIES,
        )  # fmt: skip
        tl.store(ids_ptr + draw, _id_of(tl.maximum(best, known)))
