"""Draws a token: the best score among the kept ones, of candidates or of a row. Scores have the same bits in all
kernels of this package."""

from typing import NamedTuple

import triton.language as tl

from ..fused.noise import REFINEMENT_BIT, minus_gumbel_refined
from ..fused.packed_argmax import NAN_KEY, NO_TOKEN, ORDERED_INF, compute_score, pack_key
from ..jit import jit
from .logit_source import load_tokens
from .order import (
    DEFERRED_DRAW,
    MINUS_INF,
    NAN,
    PLUS_INF,
    key_of,
    mass_of,
    reaches,
    score_factors,
    sort_key,
    token_of,
    word_of,
)
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


class Record(NamedTuple):
    """The record of a row: what its filters kept. Rejection, log-probabilities and kept sets read it."""

    limit: object  # int64, the lowest sort key of a kept token
    least_mass: object  # of a kept token, float32
    kept_mass: object  # of all kept tokens; NaN in an undefined row
    top: object  # the highest logit
    only_token: object  # int32, of a row that has one, else -1


@jit
def write_record(limits_at, masses_at, row, record):
    """Writes a row's record, where there is an address."""
    if limits_at != 0:
        tl.store(pointer_to(limits_at, tl.int64) + row, record.limit)
        masses = pointer_to(masses_at, tl.float32) + row * 4
        tl.store(masses, record.least_mass)
        tl.store(masses + 1, record.kept_mass)
        tl.store(masses + 2, record.top)
        tl.store(masses + 3, record.only_token.to(tl.int32).to(tl.float32, bitcast=True))


@jit
def load_record(limits, masses, row):
    """Loads a row's record."""
    masses += row * 4
    only_token = tl.load(masses + 3).to(tl.int32, bitcast=True)
    return Record(tl.load(limits + row), tl.load(masses), tl.load(masses + 1), tl.load(masses + 2), only_token)


@jit
def is_kept(record, x, mass, token, scale):
    """Returns which tokens with these logits and masses are kept."""
    return (sort_key(key_of(x), token) >= record.limit) & reaches(x, mass, record.least_mass, record.top, scale)


@jit
def load_winner(draws, row, draw, TILES: tl.constexpr):
    """Returns the unfiltered token of a row's draw: -1 in an undefined row, DEFERRED_DRAW where a tile's best score is
    infinite."""
    words_ptr = pointer_to(draws.winners_at, tl.int64) + (row * draws.num_samples + draw) * tl.maximum(draws.tiles, 1)
    token = tl.load(words_ptr)  # without tiles the one word is a token
    if draws.tiles != 0:
        tile = tl.arange(0, TILES)
        best = tl.max(tl.load(words_ptr + tile, mask=tile < draws.tiles, other=0), axis=0)
        token = tl.where(best >> 31 == ORDERED_INF, DEFERRED_DRAW, id_of(best))
    return token.to(tl.int32)


@jit(noinline=True)
def best_of(tokens, limit, least, temperature, draw_word, offset, seed, TILE: tl.constexpr):
    """Returns the token with the best score among those from the sort key ``limit`` on whose mass is at least
    ``least``; -1 where there is none. A word 0, which one row in 30,000 has, is refined in a second turn."""
    scale, noise_factor = score_factors(temperature)
    best = tl.full((), 0, tl.int64)
    turn = tl.full((), 0, tl.int32)
    while turn < 2:
        keys = tl.zeros((TILE,), tl.int64)
        for start in range(0, tokens.count, TILE):
            words, live = load_tile(tokens, start, TILE)
            x, token = logits_of(words), token_of(words)
            mass = mass_of(x, tokens.top, tokens.scale)
            live = live & (words >= limit) & reaches(x, mass, least, tokens.top, tokens.scale)
            word, tail = tl.zeros((TILE,), tl.uint32), tl.zeros((TILE,), tl.uint32)
            for refines in range(turn, -1, -1):
                tail = word
                bit = (tl.zeros((TILE,), tl.int32) + refines).to(tl.uint32) * REFINEMENT_BIT
                word = word_of(token, draw_word | bit, offset, seed)
            key = pack_key(compute_score(x, scale, 0.0, minus_gumbel_refined(word, tail), noise_factor), token)
            key = tl.where((turn == 0) & (word == 0), NAN_KEY, key)
            keys = tl.maximum(keys, tl.where(live, key, 0))
        best = tl.max(keys, axis=0)
        turn += tl.where(best == NAN_KEY, 1, 2)
    return id_of(best)


@jit(noinline=True)
def row_extent(source, keys_at, blocks, TILE: tl.constexpr):
    """Returns a row's lowest key, and its first token at +inf: NO_TOKEN where none is, -1 where no logit is finite."""
    lowest = tl.full((TILE,), NAN, tl.int32)
    finite = tl.zeros((TILE,), tl.int32)
    infinite = tl.full((TILE,), NO_TOKEN, tl.int32)
    for start in range(0, source.vocab_size, TILE):
        token = start + tl.arange(0, TILE)
        live = token < source.vocab_size
        key = tl.where(live, key_of(load_tokens(source, token, live)), NAN)
        lowest = tl.minimum(lowest, key)
        finite |= ((key > MINUS_INF) & (key < PLUS_INF)).to(tl.int32)
        infinite = tl.minimum(infinite, tl.where(key == PLUS_INF, token, NO_TOKEN))
    if keys_at != 0:  # of blocks that were not stored too
        for start in range(0, blocks, TILE):
            block = start + tl.arange(0, TILE)
            key = tl.load(source.block_keys + block, mask=block < blocks, other=MINUS_INF)
            finite |= ((key > MINUS_INF) & (key < PLUS_INF)).to(tl.int32)
    return tl.min(lowest, axis=0), tl.where(tl.max(finite, axis=0) != 0, tl.min(infinite, axis=0), -1)
