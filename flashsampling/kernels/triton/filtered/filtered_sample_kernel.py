"""Turns block statistics into tokens: one program per row, for all rows but rare ones.

    if the row has no filter:  token = its unfiltered token
    cutoff = a key that no kept token is below: k tokens reach it (top-k), a fraction of the highest probability
        (min-p), the key of the unfiltered token or a guess of the nucleus' end (top-p)
    tokens = the candidates: sort keys of the tokens from the cutoff on, of the blocks that reach it;
        the whole row, in place, where they do not fit
    if the unfiltered token is known and kept:  token = that one
    else:  limit = end of the shortest prefix that top-k and top-p keep; token = best score of what is kept

A filter keeps a prefix of the row's order. The unfiltered token has the best score of all: if it is kept it is the
token, and otherwise all kept tokens are before it. Of a row with an infinite logit it is the first such token. Of a
row of equal logits, as in a padded batch, the filters keep the first ids, in closed form.

No bit of a result depends on the cutoff: masses are integers, and a prefix is the same among any candidates that hold
it.
"""

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..fused.packed_argmax import NO_TOKEN
from ..jit import jit
from .candidates import (
    column_cutoff,
    column_masses,
    column_maxima,
    gather,
    list_blocks,
    min_p_cutoff,
    nucleus_cutoff,
    top_k_cutoff,
)
from .draw import Draws, Record, best_of, load_winner, row_extent, write_record
from .logit_source import StoredLogits, load_token, source_of
from .order import (
    DEFERRED_DRAW,
    GREEDY_BELOW,
    LOG2E,
    LOWEST,
    MINUS_INF,
    NAN,
    NO_LOGIT,
    PLUS_INF,
    UNIT,
    count_blocks,
    exp2,
    key_of,
    mass_of,
    mass_scale,
    reaches,
    sort_key,
    value_of,
    word_of,
)
from .prefix import (
    ABOVE_ALL,
    FEW,
    Tokens,
    find_limit,
    find_limit_of_few,
    least_mass_of,
    least_mass_of_rest,
    mass_from,
    nucleus_target,
    sigma_cutoff,
    to_mass,
)
from .transforms import Filters, Rows, aligned_pointer_to, load_f32, load_filters, load_i64


@jit
def _find_candidates(
    source, sums_ptr, columns, masses, filters, least, highest, scale, row_mass, list_ptr, candidates_ptr, capacity,
    WIDTH: tl.constexpr, GATHERED: tl.constexpr, MANY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gathers the tokens that may be kept, of those with at least the key ``least``; where a top-p or a large top-k has
    too many of these, those above a guess that hold the mass, or are as many. Returns the ``Tokens``: the row's, if
    these do not fit."""
    top = value_of(highest)
    blocks = count_blocks(source.vocab_size)
    cutoff = least
    if filters.by_top_k & (filters.of_top_k | (filters.by_sigma == 0)):
        reached = filters.top_k.to(tl.float32)
        guesses_count = reached > 128.0  # so many tokens share columns: k of them reach what fewer columns reach
        width = tl.minimum(blocks, WIDTH).to(tl.float32)
        reached = tl.where(guesses_count, width * (1.0 - exp2(reached / width * (-1.2 * LOG2E))), reached)
        cutoff = tl.maximum(least, top_k_cutoff(columns, reached.to(tl.int64)))
        least = tl.where(guesses_count, least, cutoff)
    wanted = nucleus_target(filters.top_p, (row_mass * UNIT).to(tl.int64))
    rest = (1.0 - filters.top_p) * row_mass * 0.95
    fair_share = (1.0 - filters.top_p) * row_mass * 0.8 / source.vocab_size.to(tl.float32)
    guesses_mass = filters.by_top_p & (filters.of_top_k == 0) & (filters.by_sigma == 0)
    guesses = tl.where(guesses_mass, 2, 0)
    if guesses_mass & (blocks > MANY):
        guess = column_cutoff(columns, masses, tl.minimum(blocks, WIDTH), top, scale, rest, source.vocab_size)
        cutoff = tl.maximum(least, guess)
    count = tl.full((), 0, tl.int32)
    complete = tl.full((), 0, tl.int1)
    searching = tl.full((), 1, tl.int32)
    listed = blocks + tl.full((), 0, tl.int32)
    while searching != 0:
        if (listed <= MANY) | (guesses == 0) | (cutoff > MINUS_INF + 1):
            listed = list_blocks(source.block_keys, blocks, cutoff, list_ptr, WIDTH)
        if (guesses > 0) & (listed > MANY) & (cutoff == least):
            guess = nucleus_cutoff(source.block_keys, sums_ptr, blocks, top, scale, rest, source.vocab_size, WIDTH)
            cutoff = tl.maximum(least, guess)
            guesses = tl.where(cutoff == least, 0, guesses - 1)
            rest = rest * 0.2
        else:
            from_cutoff, above_all = cutoff.to(tl.int64) << 31, tl.full((), ABOVE_ALL, tl.int64)
            count = gather(source, list_ptr, listed, from_cutoff, above_all, candidates_ptr, capacity, GATHERED)
            fits = count <= capacity
            complete = fits & (cutoff == least)
            if fits & (cutoff > least):
                tokens = Tokens(source, 0, candidates_ptr, count, cutoff, highest, top, scale)
                all_of_them = tl.full((), LOWEST, tl.int64) << 31
                mass = mass_from(tokens, all_of_them, tl.full((), 0.0, tl.float32), TILE)
                complete = (guesses_mass & (mass >= wanted)) | (filters.by_top_k & (count >= filters.top_k))
            searching = (fits & (complete == 0)).to(tl.int32)  # the guess was too high
            cutoff = tl.where(searching != 0, least, cutoff)
    if guesses_mass & (filters.top_p < 0.9999):  # tokens of less than a fair share of the rest have less than it
        least = tl.maximum(least, min_p_cutoff(fair_share, top, scale))
    count, least = tl.where(complete, count, source.vocab_size), tl.where(complete, cutoff, least)
    return Tokens(source, (complete == 0).to(tl.int32), candidates_ptr, count, least, highest, top, scale)


@jit
def _kept_of_equal(filters, vocab_size):
    """Returns how many tokens the filters keep of a row of equal logits: the first ids."""
    kept = tl.where(filters.by_top_k, filters.top_k, vocab_size).to(tl.int32)
    whole = tl.where(filters.of_top_k, kept, vocab_size).to(tl.float64)
    wanted = tl.ceil(tl.maximum(filters.top_p, 1e-30).to(tl.float64) * whole).to(tl.int32)
    kept = tl.where(filters.by_top_p, tl.minimum(tl.maximum(wanted, 1), kept), kept)
    return tl.where(filters.min_p > 1.0, 1, kept)


@jit(noinline=True)
def _write_unfiltered(
    source, keys_at, draws, row, ids_ptr, temperature, offset, seed, TILES: tl.constexpr, TILE: tl.constexpr
):
    """Writes the tokens of a row without filters: the best of its tiles. One that an infinite logit or a word 0 makes
    doubtful is drawn from the row."""
    greedy = temperature < GREEDY_BELOW
    row_tokens = Tokens(source, 1, ids_ptr, source.vocab_size, MINUS_INF + 1, PLUS_INF, 0.0, 1.0)
    for draw in range(draws.num_samples):
        token = load_winner(draws, row, draw, TILES)
        draw_word = (draw | (draws.stream << 24)).to(tl.uint32)
        redraw = (word_of(token, draw_word, offset, seed) == 0) & (draws.tiles != 0) & (greedy == 0) & (token >= 0)
        if token == DEFERRED_DRAW:
            _, token = row_extent(source, keys_at, count_blocks(source.vocab_size), TILE)
            redraw = token == NO_TOKEN
        if redraw:
            limit, least = tl.full((), LOWEST, tl.int64) << 31, tl.full((), 0.0, tl.float32)
            token = best_of(row_tokens, limit, least, temperature, draw_word, offset, seed, TILE).to(tl.int32)
        tl.store(ids_ptr + draw, token.to(tl.int64))


@jit
def _draw_row(
    source, stored, draws, row, filters, temperature, offset, seed, ids_ptr, list_ptr, candidates_ptr, capacity,
    TILES: tl.constexpr, WIDTH: tl.constexpr, GATHERED: tl.constexpr, MANY: tl.constexpr,
    TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Writes the tokens and the record of a row."""
    num_samples, blocks = draws.num_samples, count_blocks(source.vocab_size)
    scale, greedy, wants_record = mass_scale(temperature), temperature < GREEDY_BELOW, draws.limits_at != 0
    sums_ptr = aligned_pointer_to(stored.sums_at, tl.float32) + row * blocks
    filtered = filters.filtered
    winner = tl.full((), -1, tl.int32)
    if (draws.tiles == 0) | (filtered == 0) | greedy:  # else there is none
        winner = load_winner(draws, row, 0, TILES)
    undefined = temperature != temperature
    infinite = tl.full((), 0, tl.int1)
    highest = tl.full((), MINUS_INF + 1, tl.int32)
    columns = tl.full((WIDTH,), NO_LOGIT, tl.int32)
    if stored.keys_at != 0:
        columns = column_maxima(source.block_keys, blocks, WIDTH)
        highest = tl.max(columns, axis=0)
        undefined = undefined | (highest == NAN) | (highest <= MINUS_INF) | filters.undefined
        infinite = highest == PLUS_INF
    if draws.tiles == 0:
        undefined = undefined | (winner == -1)
        infinite = infinite & (wants_record | (winner == DEFERRED_DRAW))
        filtered = filtered & (highest != PLUS_INF)  # the winner is the first infinite token, which is kept
    top = value_of(highest)
    limit = tl.full((), LOWEST, tl.int64) << 31
    row_mass = tl.full((), 1.0, tl.float32)
    masses = tl.zeros((WIDTH,), tl.float32)
    needs_mass = wants_record | (filtered & ((filters.by_top_p & (filters.of_top_k == 0)) | filters.of_all))
    if (stored.sums_at != 0) & needs_mass & (highest < PLUS_INF):
        masses = column_masses(source.block_keys, sums_ptr, blocks, top, scale, WIDTH)
        row_mass = tl.sum(masses, axis=0)
    kept_mass = row_mass
    least_mass = least_mass_of(filters, row_mass)
    min_p = tl.minimum(least_mass, 1.0)
    only_token = tl.where(greedy, winner, -1)

    if undefined | infinite:
        only_token = tl.full((), -1, tl.int32)
        if undefined == 0:
            _, only_token = row_extent(source, stored.keys_at, blocks, TILE)
        kept_mass = tl.where(only_token >= 0, 1.0, float("nan"))
        for draw in range(num_samples):
            tl.store(ids_ptr + draw, only_token.to(tl.int64))
    else:
        if filtered & (wants_record | (greedy == 0)):
            least = tl.maximum(source.cutoff, MINUS_INF + 1)
            if filters.by_min_p & (((filters.of_top_k | filters.by_sigma) & filters.by_top_p) == 0):
                least = tl.maximum(least, min_p_cutoff(min_p, top, scale))
            if filters.by_sigma:
                least = tl.maximum(least, sigma_cutoff(source, highest, filters.sigmas, 2 * WIDTH))
            has_winner = (num_samples == 1) & (draws.tiles == 0) & (filters.by_top_k == 0) & (filters.is_rare == 0)
            x = load_token(source, tl.where(has_winner, winner, -1))
            winner_key = key_of(x)
            winner_word = sort_key(winner_key, winner)
            has_winner = has_winner & reaches(x, mass_of(x, top, scale), least_mass, top, scale)
            if has_winner & (wants_record == 0):
                least = tl.maximum(least, winner_key)
            tokens = _find_candidates(
                source, sums_ptr, columns, masses, filters, least, highest, scale, row_mass, list_ptr, candidates_ptr,
                capacity, WIDTH, GATHERED, MANY, TILE,
            )  # fmt: skip
            none = tl.full((), 0.0, tl.float32)
            if filters.by_sigma & filters.by_top_p & (filters.of_top_k == 0):  # all that it keeps are among the tokens
                row_mass = to_mass(mass_from(tokens, limit, none, TILE))
            equal = tl.full((), 0, tl.int1)
            if tokens.count > FEW:
                # of a block without a token the key is that of -inf
                alike = tl.min(tl.where(columns > MINUS_INF, columns, highest), axis=0) == highest
                if alike:
                    lowest, _ = row_extent(source, stored.keys_at, blocks, TILE)
                    equal = lowest == highest
            kept = has_winner & (winner_key >= tokens.lowest) & (wants_record == 0) & (equal == 0)
            if kept & filters.by_top_p:
                wanted = nucleus_target(filters.top_p, (row_mass * UNIT).to(tl.int64))
                kept = mass_from(tokens, winner_word + 1, none, TILE) < wanted
            if kept == 0:
                if equal:
                    limit = sort_key(highest, _kept_of_equal(filters, source.vocab_size) - 1)
                elif (tokens.whole == 0) & (tokens.count <= FEW) & (filters.by_top_k | filters.by_top_p):
                    limit = find_limit_of_few(tokens, filters, row_mass)
                else:
                    limit = find_limit(tokens, filters, row_mass, list_ptr, capacity, WIDTH, GATHERED, TILE, WAYS)
                kept = has_winner & (winner_word >= limit)
            min_p = least_mass_of_rest(filters, tokens, limit, min_p, TILE)
            if greedy == 0:
                for draw in range(num_samples):
                    token = winner.to(tl.int64)
                    if kept == 0:
                        draw_word = (draw | (draws.stream << 24)).to(tl.uint32)
                        token = best_of(tokens, limit, min_p, temperature, draw_word, offset, seed, TILE)
                    tl.store(ids_ptr + draw, token)
            if wants_record:
                kept_mass = to_mass(mass_from(tokens, limit, min_p, TILE))
        if (filtered == 0) | greedy:
            _write_unfiltered(source, stored.keys_at, draws, row, ids_ptr, temperature, offset, seed, TILES, TILE)
    record = Record(limit, tl.where(filters.filtered, min_p, 0.0), kept_mass, top, only_token)
    write_record(draws.limits_at, draws.masses_at, row, record)


@jit(
    structs={"stored": StoredLogits, "rows": Rows, "filters": Filters, "draws": Draws},
    do_not_specialize=["capacity"],
    do_not_specialize_on_alignment=["logits", "candidates_ptr", "list_ptr", "ids_ptr"],
)
def filtered_sample_kernel(
    logits,  # (B, V), any float dtype
    stored,
    rows,
    filters,
    draws,
    candidates_ptr,  # (B, capacity) int64, scratch
    capacity: tl.int32,
    list_ptr,  # (B, blocks) int32, scratch
    ids_ptr,  # (B, num_samples) int64, out
    TILES: tl.constexpr,  # at least ``Draws.tiles``
    WIDTH: tl.constexpr,  # blocks side by side
    GATHERED: tl.constexpr,  # blocks that are read at once
    MANY: tl.constexpr,  # blocks from which on a top-p guesses its cutoff
    TILE: tl.constexpr,  # tokens at a time
    WAYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Runs the algorithm that the module describes. Grid: (B,)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    source = source_of(logits, stored, row)
    temperature = load_f32(rows.temperature_at, rows.temperature, row)
    seed, offset = load_i64(rows.seed_at, rows.seed, row), load_i64(rows.offset_at, rows.offset, row)
    filters = load_filters(filters, row, source.vocab_size)
    ids_ptr += row * draws.num_samples
    _draw_row(
        source, stored, draws, row, filters, temperature, offset, seed, ids_ptr,
        list_ptr + row * count_blocks(source.vocab_size), candidates_ptr + row * capacity, capacity,
        TILES, WIDTH, GATHERED, MANY, TILE, WAYS,
    )  # fmt: skip
