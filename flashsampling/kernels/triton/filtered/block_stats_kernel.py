"""Reads every logit once: block statistics, processed logits, and draws of rows without filters.

A program has a tile of one row. It writes per block of 32 tokens the highest processed key and the sum of the masses
relative to it; the processed logits where they differ from what the caller has; and of a row without filters the
tile's best score per draw. Lanes of Philox groups are registers of one thread, and so are most of a block's tokens.
"""

from typing import NamedTuple

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..fused.noise import INTERPRETED, minus_gumbel, philox_words
from ..fused.packed_argmax import NAN_KEY, NO_TOKEN, keep_better, pack_key, with_noise
from ..jit import jit
from .order import (
    GREEDY_BELOW,
    LOG2E,
    NAN,
    below,
    column_tokens,
    count_blocks,
    exp2,
    key_of,
    lane_offset,
    mass_scale,
    score_factors,
    value_of,
)
from .transforms import (
    Filters,
    HeadTransform,
    RequestTransforms,
    Rows,
    is_allowed,
    load_f32,
    load_filters,
    load_i64,
    pointer_to,
    processed_logits,
    raw_logits,
)


class StatsOutputs(NamedTuple):
    """The outputs of ``block_stats_kernel``: addresses, or 0 where not wanted."""

    raw_at: int  # (B, V) float32
    processed_at: int  # (B, V) float32
    stride: int  # of both, in elements
    keys_at: int  # (B, blocks) int32
    sums_at: int  # (B, blocks) float32
    raw_keys_at: int  # (B, blocks) int32, of raw logits
    raw_sums_at: int  # (B, blocks) float32
    winners_at: int  # (B, num_samples, tiles) int64: packed best scores, of rows without filters


@jit
def _at_most_0(x):
    """Returns the lesser of x and 0; 0 for NaN too, the difference of equal infinities, which the interpreter's
    minimum keeps."""
    if INTERPRETED:
        x = tl.where(x == x, x, 0.0)
    return tl.minimum(x, 0.0)


@jit
def _write_stats(logits, scale, undefined, keys_at, sums_at, at, blocks, COLUMNS: tl.constexpr):
    """Writes keys and sums of the tile's blocks that are among the first ``blocks``."""
    PER_REP: tl.constexpr = COLUMNS // 8
    keys_ptr = pointer_to(keys_at, tl.int32) + at
    sums_ptr = pointer_to(sums_at, tl.float32) + at
    for rep in tl.static_range(len(logits) // 4):
        highest = logits[4 * rep]
        for i in tl.static_range(1, 4):
            highest = tl.maximum(highest, logits[4 * rep + i], propagate_nan=tl.PropagateNan.ALL)
        key = tl.max(tl.reshape(key_of(highest), (PER_REP, 8)), axis=1)
        block = rep * PER_REP + tl.arange(0, PER_REP)
        tl.store(keys_ptr + block, tl.where(undefined, NAN, key), mask=block < blocks)
        if sums_at != 0:
            top = value_of(key)
            # a block of -inf has no mass; infinite ones have one each, and beside them no finite one has any
            top = tl.where(top == float("-inf"), 0.0, top)
            top = tl.reshape(tl.broadcast_to(top[:, None], (PER_REP, 8)), (COLUMNS,))
            mass = exp2(_at_most_0(below(logits[4 * rep], top, scale)))
            for i in tl.static_range(1, 4):
                mass += exp2(_at_most_0(below(logits[4 * rep + i], top, scale)))
            tl.store(sums_ptr + block, tl.sum(tl.reshape(mass, (PER_REP, 8)), axis=1), mask=block < blocks)


@jit
def _write_logits(logits, tokens, live, address, place):
    """Writes a tuple of logits to a row from element ``place`` on, if there is an address."""
    if address != 0:
        out = pointer_to(address, tl.float32) + place
        for i in tl.static_range(len(logits)):
            tl.store(out + tokens[i], logits[i], mask=live[i])


@jit
def _any_infinite(transforms, row, vocab_size, logits, tokens):
    """Returns whether a token that the mask allows has an infinite logit."""
    found = tl.zeros(logits[0].shape, tl.int32)
    for i in tl.static_range(len(logits)):
        infinite = tl.abs(logits[i]) == float("inf")
        allowed = is_allowed(transforms, row, tokens[i], tokens[i] < vocab_size)
        found = tl.maximum(found, (infinite & allowed).to(tl.int32))
    return tl.max(found, axis=0) != 0


@jit
def _order_after(index, done, zero):
    """Returns uint32 numbers that depend on ``done`` (float32), in its layout: ``row_params.order_after``."""
    return (index ^ (done.to(tl.int32, bitcast=True) & zero)).to(tl.uint32)


@jit
def _best(
    scaled, tokens, first, zero, draw_word, noise_factor, seed, offset,
    COLUMNS: tl.constexpr, REPS: tl.constexpr,
):  # fmt: skip
    """Returns the packed best score of the tile. The word 0 counts for more than it is worth: readers look for it."""
    best = tl.full((COLUMNS,), float("-inf"), tl.float32)
    best_id = tl.full((COLUMNS,), NO_TOKEN, tl.int32)
    for rep in tl.static_range(REPS):
        group = _order_after(first // 4 + rep * COLUMNS + tl.arange(0, COLUMNS), scaled[0] if rep == 0 else best, zero)
        words = philox_words(
            group, tl.zeros((COLUMNS,), tl.uint32) + draw_word, offset.to(tl.uint32), (offset >> 32).to(tl.uint32),
            seed.to(tl.uint32), (seed >> 32).to(tl.uint32),
        )  # fmt: skip
        for lane in tl.static_range(4):
            score = with_noise(scaled[rep * 4 + lane], minus_gumbel(words[lane]), noise_factor)
            best, best_id = keep_better(best, best_id, score, tokens[rep * 4 + lane])
    return tl.max(tl.where(best != float("-inf"), pack_key(best, best_id), 0), axis=0)


@jit(
    structs={
        "head": HeadTransform,
        "transforms": RequestTransforms,
        "rows": Rows,
        "filters": Filters,
        "outputs": StatsOutputs,
    },
    do_not_specialize=["logits_stride", "vocab_size", "num_samples", "stream", "tiles", "zero"],
)
def block_stats_kernel(
    logits,  # (B, V), any float dtype
    logits_stride: tl.int64,
    vocab_size: tl.int32,
    head,
    transforms,
    rows,
    filters,
    outputs,
    num_samples: tl.int32,
    stream: tl.int32,
    tiles: tl.int32,
    zero: tl.int32,  # 0: see ``_order_after``
    ALIGNED: tl.constexpr,  # rows are a multiple of 16 elements long, and apart
    STATS: tl.constexpr,  # ``outputs`` may have keys
    TRANSFORMS: tl.constexpr,  # there may be a head transform or a request's
    COLUMNS: tl.constexpr,  # Philox groups side by side
    REPS: tl.constexpr,  # rows of columns in a tile
    PDL: tl.constexpr,  # the next launch need not wait for this one's end to begin
):
    """Runs the pass that the module describes. Grid: (tiles * B,)."""
    if PDL:
        gdc_launch_dependents()
    TILE: tl.constexpr = 4 * COLUMNS * REPS
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    first = tile * TILE
    if ALIGNED:  # a mask that is the same for neighbours leaves loads of 16 bytes
        logits_stride = logits_stride // 16 * 16
        vocab_size = vocab_size // 16 * 16
    column = column_tokens(COLUMNS)
    tokens = ()
    live = ()
    raw = ()
    for part in tl.static_range(4 * REPS):
        token = first + (part // 4) * (4 * COLUMNS) + lane_offset(part % 4) + column
        inside = token < vocab_size
        x = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
        tokens = tokens + (token,)
        live = live + (inside,)
        raw = raw + (x,)
    at = row * count_blocks(vocab_size) + first // 32
    blocks = count_blocks(vocab_size) - first // 32  # from here on
    if TRANSFORMS:
        raw = raw_logits(head, raw, tokens, live)
        _write_logits(raw, tokens, live, outputs.raw_at, row * outputs.stride)
    if STATS:  # noqa: SIM102, the one is for the compiler
        if outputs.raw_keys_at != 0:
            no = tl.full((), 0, tl.int1)
            _write_stats(raw, LOG2E, no, outputs.raw_keys_at, outputs.raw_sums_at, at, blocks, COLUMNS)
    processed = raw
    if TRANSFORMS:
        processed = processed_logits(transforms, row, raw, tokens, live, first, first + TILE)
        _write_logits(processed, tokens, live, outputs.processed_at, row * outputs.stride)

    temperature = load_f32(rows.temperature_at, rows.temperature, row)
    undefined = tl.full((), 0, tl.int1)
    if temperature == float("inf"):  # which would make NaN of an infinite logit
        undefined = _any_infinite(transforms, row, vocab_size, processed, tokens)
    draws = tl.full((), 1, tl.int1)
    if STATS:  # noqa: SIM102, the one is for the compiler
        if outputs.keys_at != 0:
            row_filters = load_filters(filters, row, vocab_size)
            _write_stats(
                processed, mass_scale(temperature), undefined, outputs.keys_at, outputs.sums_at, at, blocks, COLUMNS
            )
            draws = (row_filters.filtered == 0) | (temperature < GREEDY_BELOW)
    if draws:
        scale, noise_factor = score_factors(temperature)
        seed, offset = load_i64(rows.seed_at, rows.seed, row), load_i64(rows.offset_at, rows.offset, row)
        winners = pointer_to(outputs.winners_at, tl.int64) + row * num_samples * tiles + tile
        scaled = ()
        for part in tl.static_range(4 * REPS):
            scaled = scaled + (tl.fma(processed[part], scale, 0.0),)
        for draw in range(num_samples):
            draw_word = (draw | (stream << 24)).to(tl.uint32)
            key = _best(scaled, tokens, first, zero, draw_word, noise_factor, seed, offset, COLUMNS, REPS)
            tl.store(winners + draw * tiles.to(tl.int64), tl.where(undefined, NAN_KEY, key))
