"""Draws a token: the best score among the kept ones, of candidates or of a row.

From a row in Philox groups, four tokens for one block of noise. Scores have the same bits in all kernels of this
package.
"""

from typing import NamedTuple

import triton.language as tl

from ..fused.noise import REFINEMENT_BIT, minus_gumbel, minus_gumbel_refined, philox_words
from ..fused.packed_argmax import NAN_KEY, NO_TOKEN, ORDERED_INF, compute_score, keep_better, pack_key
from ..jit import jit
from .logit_source import load_tokens
from .order import DEFERRED_DRAW, column_tokens, key_of, mass_of, reaches, score_factors, sort_key, token_of, word_of
from .prefix import load_tile, logits_of
from .transforms import pointer_to


class Draws(NamedTuple):
    """The draws of a step: what is known of them, and where records go."""

    winners_at: int  # (B, num_samples, tiles) int64 of ``block_stats_kernel``; (B, num_samples) tokens if tiles = 0
    tiles: int
    num_samples: int
    stream: int
    limits_at: int  # (B,) int64, out: ``outputs.FilteredLogits.limits``, or 0
    masses_at: int  # (B, 4) float32, out: ``outputs.FilteredLogits.masses``


@jit
def id_of(key):
    """Returns the token of a packed score; -1 where there is none."""
    return tl.where((key == 0) | (key == NAN_KEY), -1, (key & NO_TOKEN) ^ NO_TOKEN)


@jit
def write_record(draws, row, limit, least_mass, kept_mass, top, only_token):
    """Writes what rejection and log-probabilities read of a row: the limit of its sort keys, the least mass of a kept
    token, the mass of all, the highest logit, and the only token of a row that has one, else -1."""
    if draws.limits_at != 0:
        tl.store(pointer_to(draws.limits_at, tl.int64) + row, limit)
        record = pointer_to(draws.masses_at, tl.float32) + row * 4
        tl.store(record, least_mass)
        tl.store(record + 1, kept_mass)
        tl.store(record + 2, top)
        tl.store(record + 3, only_token.to(tl.int32).to(tl.float32, bitcast=True))


@jit
def load_winner(draws, row, draw, TILES: tl.constexpr):
    """Returns the unfiltered token of a row's draw: -1 in an undefined row, DEFERRED_DRAW where a tile's best score is
    infinite."""
    words_ptr = pointer_to(draws.winners_at, tl.int64) + (row * draws.num_samples + draw) * tl.maximum(draws.tiles, 1)
    tile = tl.arange(0, TILES)
    words = tl.load(words_ptr + tile, mask=tile < tl.maximum(draws.tiles, 1), other=0)
    best = tl.max(words, axis=0)
    token = tl.where(best >> 31 == ORDERED_INF, DEFERRED_DRAW, id_of(best))
    # without tiles the one word is a token
    return tl.where(draws.tiles == 0, tl.sum(tl.where(tile == 0, words, 0), axis=0), token).to(tl.int32)


@jit(noinline=True)
def best_candidate(tokens, limit, min_p, temperature, draw_word, offset, seed, TILE: tl.constexpr):
    """Returns the best packed score of the candidates from ``limit`` on that a min-p keeps; NAN_KEY where the noise of
    one needs the refinement."""
    scale, noise_factor = score_factors(temperature)
    best = tl.zeros((TILE,), tl.int64)
    for start in range(0, tokens.count, TILE):
        words, live = load_tile(tokens, start, False, TILE)
        x, token = logits_of(words), token_of(words)
        live = (
            live & (words >= limit) & reaches(x, mass_of(x, tokens.top, tokens.scale), min_p, tokens.top, tokens.scale)
        )
        word = word_of(token, tl.zeros((TILE,), tl.uint32) + draw_word, offset, seed)
        key = pack_key(compute_score(x, scale, 0.0, minus_gumbel(word), noise_factor), token)
        best = tl.maximum(best, tl.where(live, tl.where(word == 0, NAN_KEY, key), 0))
    return tl.max(best, axis=0)


@jit
def _load_groups(tokens, start, GROUPS: tl.constexpr):
    """Returns ids, which tokens exist and logits of Philox groups, a tuple of four of each."""
    column = column_tokens(GROUPS)
    ids = ()
    there = ()
    logits = ()
    for lane in tl.static_range(4):
        id = start + (lane & 1) * 8 + (lane // 2) * 64 + column
        live = id < tokens.count
        ids = ids + (id,)
        there = there + (live,)
        logits = logits + (load_tokens(tokens.source, id, live),)
    return ids, there, logits


@jit(noinline=True)
def best_of_row(tokens, limit, min_p, first, temperature, draw_word, offset, seed, TILE: tl.constexpr):
    """Returns the best packed score of a row's tokens from the id ``first`` on, a multiple of 128, among those from
    ``limit`` on that a min-p keeps. A word 0, which one row in 30,000 has, is refined in a second turn."""
    GROUPS: tl.constexpr = TILE // 4
    scale, noise_factor = score_factors(temperature)
    draw_words = tl.zeros((GROUPS,), tl.uint32) + draw_word
    key_lo, key_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    offset_lo, offset_hi = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    best = tl.full((), 0, tl.int64)
    turn = tl.full((), 0, tl.int32)
    while turn < 2:
        score = tl.full((GROUPS,), float("-inf"), tl.float32)
        id = tl.full((GROUPS,), NO_TOKEN, tl.int32)
        zeros = tl.zeros((GROUPS,), tl.int32)
        for start in range(first, tokens.count, TILE):
            ids, there, logits = _load_groups(tokens, start, GROUPS)
            group = (start // 4 + tl.arange(0, GROUPS)).to(tl.uint32)
            words = philox_words(group, draw_words, offset_lo, offset_hi, key_lo, key_hi)
            tail0, tail1, tail2, tail3 = words  # unused where no word is 0
            if turn != 0:
                tail0, tail1, tail2, tail3 = philox_words(
                    group, draw_words | REFINEMENT_BIT, offset_lo, offset_hi, key_lo, key_hi
                )
            tails = (tail0, tail1, tail2, tail3)
            for lane in tl.static_range(4):
                x = logits[lane]
                live = there[lane] & (x != float("-inf")) & (sort_key(key_of(x), ids[lane]) >= limit)
                mass = mass_of(x, tokens.top, tokens.scale)
                live = live & reaches(x, mass, min_p, tokens.top, tokens.scale)
                zeros |= (live & (words[lane] == 0)).to(tl.int32)
                one = compute_score(x, scale, 0.0, minus_gumbel_refined(words[lane], tails[lane]), noise_factor)
                score, id = keep_better(score, id, tl.where(live, one, float("-inf")), ids[lane])
        best = tl.max(tl.where(score != float("-inf"), pack_key(score, id), 0), axis=0)
        turn += tl.where((turn == 0) & (tl.max(zeros, axis=0) != 0), 1, 2)
    return best
