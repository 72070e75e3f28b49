"""Scores tiles exactly: refined noise, every case of the contract, any number of draws (``kernel`` says when)."""

import triton.language as tl

from ..jit import jit
from .noise import REFINEMENT_BIT, minus_gumbel, minus_gumbel_zero_word, philox_words
from .packed_argmax import compute_score, pack_key
from .row_params import row_params, score_params
from .tiles import lane0_tokens, split_lanes, tile_logits


@jit
def _publish_exact(
    acc,  # (BLOCK_V, BLOCK_B)
    first_token,  # counted from the start of the shard's first Philox group
    slots,  # (BLOCK_B,) pointers: key of the best score that is not +inf
    inf_slots,  # (BLOCK_B,) pointers: key of the lowest id with score +inf
    live,  # (BLOCK_B,)
    shard,
    draw,
    params,
):
    """Publishes one tile with the refined noise and every special case."""
    BLOCK_V: tl.constexpr = acc.shape[0]
    BLOCK_B: tl.constexpr = acc.shape[1]
    key_lo, key_hi, offset_lo, offset_hi = params.key_lo, params.key_hi, params.offset_lo, params.offset_hi
    token0 = lane0_tokens(first_token, BLOCK_V)
    group = ((shard.base + first_token) // 4 + tl.arange(0, BLOCK_V // 4))[:, None].to(tl.uint32)
    stream_draw = tl.full((1, 1), draw, tl.uint32)
    words = philox_words(group, stream_draw, offset_lo, offset_hi, key_lo, key_hi)
    minus = (minus_gumbel(words[0]), minus_gumbel(words[1]), minus_gumbel(words[2]), minus_gumbel(words[3]))
    least = tl.minimum(tl.minimum(words[0], words[1]), tl.minimum(words[2], words[3]))
    if tl.min(tl.min(least, axis=1), axis=0) == 0:  # one tile of 128 x 128 in 2**18; the tails are half of the noise
        tails = philox_words(group, stream_draw | REFINEMENT_BIT, offset_lo, offset_hi, key_lo, key_hi)
        minus = (
            tl.where(words[0] == 0, minus_gumbel_zero_word(tails[0]), minus[0]),
            tl.where(words[1] == 0, minus_gumbel_zero_word(tails[1]), minus[1]),
            tl.where(words[2] == 0, minus_gumbel_zero_word(tails[2]), minus[2]),
            tl.where(words[3] == 0, minus_gumbel_zero_word(tails[3]), minus[3]),
        )
    lanes = split_lanes(acc, BLOCK_V, BLOCK_B)
    best = tl.zeros((BLOCK_B,), tl.int64)
    best_inf = tl.zeros((BLOCK_B,), tl.int64)
    for lane in tl.static_range(4):
        token = token0 + (lane & 1) * 8 + (lane >> 1) * 64
        score = compute_score(lanes[lane], params.scale, 0.0, minus[lane], params.noise_factor)
        key = pack_key(score, shard.base + token)
        sampled = (token >= shard.skip) & (token < shard.end)
        is_inf = score == float("inf")
        counts = sampled & (score != float("-inf")) & (score != float("inf"))  # finite, or NaN
        best = tl.maximum(best, tl.max(tl.where(counts, key, 0), axis=0))
        best_inf = tl.maximum(best_inf, tl.max(tl.where(sampled & is_inf, key, 0), axis=0))
    tl.atomic_max(slots, best, mask=live & (best != 0), sem="relaxed")
    tl.atomic_max(inf_slots, best_inf, mask=live & (best_inf != 0), sem="relaxed")


@jit
def run_exact_pass(
    hidden,  # of blocks (block_b, block_d)
    matmul,
    rows,
    workspace_ptr,
    first_row,
    walk,
    shard,
    num_samples,
    TILE: tl.constexpr,  # of one block
    ROW_TENSORS: tl.constexpr,
):
    """Runs the exact pass over a program's tiles, for the one block of columns from ``first_row`` on."""
    row = first_row + tl.arange(0, TILE.block_b)
    batch = matmul.batch
    live = (row < batch) & (row >= walk.first_owned)
    slots = workspace_ptr + row.to(tl.int64) * num_samples
    inf_slots = slots + batch.to(tl.int64) * num_samples
    params = score_params(row_params(rows, tl.minimum(row, batch - 1)[None, :], ROW_TENSORS))
    for tile in range(walk.first_tile, walk.end_tile, walk.stride):
        first_token = tile * TILE.block_v
        acc, _ = tile_logits(hidden, hidden, matmul, first_token - shard.skip, first_row, first_row, TILE)
        for draw in range(num_samples):
            _publish_exact(acc, first_token, slots + draw, inf_slots + draw, live, shard, draw, params)
