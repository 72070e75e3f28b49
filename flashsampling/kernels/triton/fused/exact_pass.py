"""Scores tiles exactly: refined noise, every case of the contract, any number of draws (``kernel`` says when)."""

import triton.language as tl

from ..jit import jit
from .noise import REFINEMENT_BIT, minus_gumbel, minus_gumbel_zero_word, philox_words
from .packed_argmax import compute_score, pack_key
from .row_params import both_factors, row_params
from .tiles import lane0_tokens, split_lanes, tile_logits


@jit
def _publish_exact(
    acc,  # (BLOCK_V, BLOCK_B)
    first_token,  # counted from the start of the shard's first Philox group, as skip and end are
    slots,  # (BLOCK_B,) pointers: key of the best score that is not +inf
    inf_slots,  # (BLOCK_B,) pointers: key of the lowest id with score +inf
    live,  # (BLOCK_B,)
    base,
    skip,
    end,
    draw,
    scale,
    noise_factor,
    key_lo,
    key_hi,
    offset_lo,
    offset_hi,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Publishes one tile with the refined noise and every special case."""
    token0 = lane0_tokens(first_token, BLOCK_V)
    group = ((base + first_token) // 4 + tl.arange(0, BLOCK_V // 4))[:, None].to(tl.uint32)
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
        score = compute_score(lanes[lane], scale, 0.0, minus[lane], noise_factor)
        key = pack_key(score, base + token)
        sampled = (token >= skip) & (token < end)
        is_inf = score == float("inf")
        counts = sampled & (score != float("-inf")) & (score != float("inf"))  # finite, or NaN
        best = tl.maximum(best, tl.max(tl.where(counts, key, 0), axis=0))
        best_inf = tl.maximum(best_inf, tl.max(tl.where(sampled & is_inf, key, 0), axis=0))
    tl.atomic_max(slots, best, mask=live & (best != 0), sem="relaxed")
    tl.atomic_max(inf_slots, best_inf, mask=live & (best_inf != 0), sem="relaxed")


@jit
def run_exact_pass(
    hidden,  # of blocks (BLOCK_B, BLOCK_D)
    weight,
    temperature_at,
    temperature_value,
    seed_at,
    seed_value,
    offset_at,
    offset_value,
    workspace_ptr,
    first_row,
    first_owned,
    first_tile,
    stride,
    batch,
    vocab_size,
    base,
    skip,
    dim,
    num_samples,
    hidden_stride,
    weight_stride,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_D: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr,
    UPCAST: tl.constexpr,
    ROW_TENSORS: tl.constexpr,
):
    """Runs the exact pass over a program's tiles, for one block of columns."""
    rows = first_row + tl.arange(0, BLOCK_B)
    live = (rows < batch) & (rows >= first_owned)
    slots = workspace_ptr + rows.to(tl.int64) * num_samples
    inf_slots = slots + batch.to(tl.int64) * num_samples
    end = skip + vocab_size
    factors, key_lo, key_hi, offset_lo, offset_hi = row_params(
        tl.minimum(rows, batch - 1)[None, :],
        temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value, ROW_TENSORS,
    )  # fmt: skip
    scale, noise_factor = both_factors(factors)
    for tile in range(first_tile, tl.cdiv(end, BLOCK_V), stride):
        first_token = tile * BLOCK_V
        acc, _ = tile_logits(
            hidden, hidden, weight, first_token - skip, first_row, first_row, batch, vocab_size, dim, hidden_stride,
            weight_stride, BLOCK_V, BLOCK_B, 0, False, BLOCK_D, USE_TMA, EVEN_D, ROW_ALIGNMENT, UPCAST, False,
        )  # fmt: skip
        for draw in range(num_samples):
            _publish_exact(
                acc, first_token, slots + draw, inf_slots + draw, live, base, skip, end, draw,
                scale, noise_factor, key_lo, key_hi, offset_lo, offset_hi, BLOCK_V, BLOCK_B,
            )  # fmt: skip
