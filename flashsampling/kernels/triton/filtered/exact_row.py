"""Draws rare rows from all of their logits.

    infinite logits     the first token at +inf, if any logit is finite; otherwise the row is undefined
    equal logits        as in a padded batch: the filters keep the first ids, in closed form
    a flat row          more candidates than fit: the prefix is searched in the row itself
    a word 0            noise that needs the refinement

A row is read once for its extent, and a few times more where a prefix is searched. The function is called, not inlined:
its instructions are fetched for rare rows alone.
"""

import triton.language as tl

from ..fused.packed_argmax import NO_TOKEN
from ..jit import jit
from .candidates import sum_masses
from .draw import best_of_row, id_of, load_winner, write_record
from .logit_source import load_token, load_tokens
from .order import (
    DEFERRED_DRAW,
    GREEDY_BELOW,
    LOWEST,
    MINUS_INF,
    NAN,
    PLUS_INF,
    UNIT,
    count_blocks,
    key_of,
    mass_of,
    mass_scale,
    reaches,
    sort_key,
    value_of,
    word_of,
)
from .prefix import (
    Tokens,
    find_limit,
    least_mass_of,
    least_mass_of_rest,
    mass_before,
    mass_of_kept,
    nucleus_target,
    sigma_cutoff,
)
from .transforms import aligned_pointer_to, pointer_to


@jit(noinline=True)
def _row_extent(source, keys_at, blocks, TILE: tl.constexpr):
    """Returns a row's highest and lowest key, whether a logit is finite, and the lowest id at +inf."""
    highest = tl.full((TILE,), LOWEST, tl.int32)
    lowest = tl.full((TILE,), NAN, tl.int32)
    finite = tl.zeros((TILE,), tl.int32)
    infinite = tl.full((TILE,), NO_TOKEN, tl.int32)
    for start in range(0, source.vocab_size, TILE):
        token = start + tl.arange(0, TILE)
        live = token < source.vocab_size
        key = key_of(load_tokens(source, token, live))
        highest = tl.maximum(highest, tl.where(live, key, LOWEST))
        lowest = tl.minimum(lowest, tl.where(live, key, NAN))
        finite |= (live & (key > MINUS_INF) & (key < PLUS_INF)).to(tl.int32)
        infinite = tl.minimum(infinite, tl.where(live & (key == PLUS_INF), token, NO_TOKEN))
    if keys_at != 0:  # of blocks that were not stored too
        for start in range(0, blocks, TILE):
            block = start + tl.arange(0, TILE)
            key = tl.load(source.block_keys + block, mask=block < blocks, other=MINUS_INF)
            finite |= ((key > MINUS_INF) & (key < PLUS_INF)).to(tl.int32)
    return tl.max(highest, axis=0), tl.min(lowest, axis=0), tl.max(finite, axis=0) != 0, tl.min(infinite, axis=0)


@jit(noinline=True)
def _mass_of_row(keys_ptr, sums_ptr, blocks, top, scale, WIDTH: tl.constexpr):
    return sum_masses(keys_ptr, sums_ptr, blocks, top, scale, WIDTH)


@jit(noinline=True)
def _mass_before(tokens, sort_key, TILE: tl.constexpr):
    return mass_before(tokens, sort_key, True, TILE)


@jit
def _kept_of_equal(filters, vocab_size):
    """Returns how many tokens the filters keep of a row of equal logits: the first ids."""
    kept = tl.where(filters.by_top_k, filters.top_k, vocab_size).to(tl.int32)
    whole = tl.where(filters.of_top_k, kept, vocab_size).to(tl.float64)
    wanted = tl.ceil(tl.maximum(filters.top_p, 1e-30).to(tl.float64) * whole).to(tl.int32)
    kept = tl.where(filters.by_top_p, tl.minimum(tl.maximum(wanted, 1), kept), kept)
    return tl.where(filters.min_p > 1.0, 1, kept)


@jit(noinline=True)
def draw_exactly(
    source, stored, draws, row, filters, temperature, offset, seed,
    ids_ptr,  # (num_samples,) int64; those of DEFERRED_DRAW are replaced
    TILES: tl.constexpr, STATS_TILE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Draws the deferred tokens of a row, and writes its record."""
    tl.debug_barrier()  # they are there
    num_samples = draws.num_samples
    vocab_size, blocks = source.vocab_size, count_blocks(source.vocab_size)
    scale = mass_scale(temperature)
    greedy = temperature < GREEDY_BELOW
    wants_record = draws.limits_at != 0
    filtered = filters.filtered & (wants_record | (greedy == 0))
    highest, lowest, finite, infinite = _row_extent(source, stored.keys_at, blocks, TILE)
    top = value_of(highest)
    least_mass = tl.where(filtered, tl.minimum(filters.min_p, 1.0), 0.0)
    if highest == PLUS_INF:
        token = tl.where(finite, infinite, -1)
        for draw in range(num_samples):
            tl.store(ids_ptr + draw, token.to(tl.int64))
        kept_mass = tl.where(finite, 1.0, float("nan"))
        write_record(draws, row, tl.full((), LOWEST, tl.int64) << 31, least_mass, kept_mass, top, token)
    else:
        row_mass = tl.full((), 1.0, tl.float32)
        if stored.sums_at != 0:
            sums_ptr = aligned_pointer_to(stored.sums_at, tl.float32) + row * blocks
            row_mass = _mass_of_row(source.block_keys, sums_ptr, blocks, top, scale, WIDTH)
        kept_mass = row_mass
        limit = tl.full((), LOWEST, tl.int64) << 31
        first_kept = tl.full((), MINUS_INF + 1, tl.int32)
        if filtered & filters.by_sigma:
            first_kept = sigma_cutoff(source, highest, filters.sigmas, 2 * WIDTH)
        tokens = Tokens(source, ids_ptr, vocab_size, first_kept, highest, top, scale)
        if filtered & filters.by_sigma:
            row_mass = mass_of_kept(tokens, limit, tl.full((), 0.0, tl.float32), True, TILE)
        least = least_mass_of(filters, row_mass)
        least_mass = tl.where(filtered, tl.minimum(least, 1.0), 0.0)
        last = vocab_size
        winner = load_winner(draws, row, 0, TILES)
        has_winner = (draws.tiles == 0) & (num_samples == 1) & (winner >= 0) & (filters.by_top_k == 0)
        has_winner = has_winner & (filters.is_rare == 0)
        winner_word = tl.full((), 0, tl.int64)
        if has_winner:
            x = load_token(source, winner)
            winner_word = sort_key(key_of(x), winner)
            has_winner = reaches(x, mass_of(x, top, scale), least, top, scale)
        kept = has_winner & (filtered == 0)
        if filtered:
            if highest == lowest:
                last = _kept_of_equal(filters, vocab_size)
                limit = sort_key(highest, last - 1)
                kept_mass = last.to(tl.float32)
                kept = has_winner & (winner < last)
            else:
                if has_winner & (wants_record == 0):
                    wanted = nucleus_target(filters.top_p, (row_mass * UNIT).to(tl.int64))
                    kept = (_mass_before(tokens, winner_word, TILE) < wanted) | (filters.by_top_p == 0)
                if kept == 0:
                    limit = find_limit(tokens, filters, row_mass, True, TILE, WAYS)
                    kept = has_winner & (winner_word >= limit)
                least_mass = least_mass_of_rest(filters, tokens, limit, least_mass, True, TILE)
                if wants_record:
                    kept_mass = mass_of_kept(tokens, limit, least_mass, True, TILE)
        tokens = Tokens(source, ids_ptr, last, tokens.lowest, highest, top, scale)
        only_token = tl.where(greedy, winner, -1)
        for draw in range(num_samples):
            if tl.load(ids_ptr + draw) == DEFERRED_DRAW:
                best = (winner ^ NO_TOKEN).to(tl.int64) | (1 << 32)
                if kept == 0:
                    draw_word = (draw | (draws.stream << 24)).to(tl.uint32)
                    first = tl.full((), 0, tl.int32)
                    known = tl.full((), 0, tl.int64)
                    if filtered & (highest == lowest) & (draws.tiles > 0):  # whole tiles that are kept have their best
                        tile = tl.arange(0, TILES)
                        words = pointer_to(draws.winners_at, tl.int64)
                        words += (row * num_samples + draw) * draws.tiles
                        known = tl.max(tl.load(words + tile, mask=tile < last // STATS_TILE, other=0), axis=0)
                        token = id_of(known).to(tl.int32)
                        word = word_of(token, draw_word, offset, seed)
                        if (known != 0) & (word == 0):  # it counts for too much there
                            known = tl.full((), 0, tl.int64)
                        else:
                            first = last // STATS_TILE * STATS_TILE
                    best = tl.maximum(
                        known, best_of_row(tokens, limit, least_mass, first, temperature, draw_word, offset, seed, TILE)
                    )
                tl.store(ids_ptr + draw, id_of(best))
                only_token = tl.where(greedy, id_of(best).to(tl.int32), only_token)
        write_record(draws, row, limit, least_mass, kept_mass, top, only_token)
