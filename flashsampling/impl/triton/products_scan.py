"""Products of hidden states and weight to memory, and in the same launch what ``logits_scan`` would write of them.

A tile's logits are in registers, so nothing is read to sum them up: per chunk the highest processed logit and its mass, and of
rows without filters a tile's best score. All of it is the bits that ``logits_scan`` gives: the same functions, chunks that lie
within 128 tokens, sums in a fixed order. Every product is stored: which of them ``logits_pick`` reads is known only once all
chunks are.

What is the same for all of a program's rows is decided once: noise and masses are made where one of the rows of a column chunk
wants them. A sparse bias is left to ``logits_scan``: all threads would have to look for every row's tokens in every tile.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...step import Asked, Step
from ..device import multiprocessors
from .config import TileConfig, choose_config
from .launch import tile_operands
from .logits_scan import chunk_summaries
from .logits_source import (
    GREEDY_BELOW,
    LOG2E,
    Source,
    after_head,
    biased,
    masked,
    mass_scale,
    penalized,
    row_top_k,
    score_factors,
)
from .noise import minus_gumbel, opaque, philox_words
from .products import store_tile
from .rows import after, load_b64, load_f32
from .scores import NO_TOKEN, keep_better, pack_key, score_of
from .tiles import lane0_tokens, rows_of_chunk, split_blocks, split_lanes, tile_logits


@triton.jit
def _load_i32(pointer, index):
    """Into the registers that ``index`` has."""
    return load_f32(pointer.to(tl.int64), index, 0.0, True).to(tl.int32, bitcast=True)


@triton.jit
def _wants(
    rows, temperature_at, temperature_value, top_k_at, top_k_value, top_p_at, top_p_value, min_p_at, min_p_value, vocab_size,
    FILTERS: tl.constexpr, LOGPROBS: tl.constexpr, TOP_K_WIDE: tl.constexpr,
):  # fmt: skip
    """Whether any of the rows (N,) draws without a filter, and whether any of them is asked for its mass: as in
    ``scan_kernel``."""
    if FILTERS:
        top_k = row_top_k(top_k_at, top_k_value, rows, TOP_K_WIDE)
        by_top_k = (top_k > 0) & (top_k < vocab_size)
        by_top_p = (load_f32(top_p_at, rows, top_p_value, False) >= 1.0) == 0  # also if NaN
        by_min_p = (load_f32(min_p_at, rows, min_p_value, False) <= 0.0) == 0
        filtered = by_top_k | by_top_p | by_min_p
        mass = filtered | True
        if not LOGPROBS:
            filtered = filtered & ((load_f32(temperature_at, rows, temperature_value, False) < GREEDY_BELOW) == 0)
            mass = filtered & by_top_p & (by_top_k == 0)
        return tl.min(filtered.to(tl.int32), axis=0) == 0, tl.max(mass.to(tl.int32), axis=0) != 0
    else:
        everyone = rows >= 0
        return tl.max(everyone.to(tl.int32), axis=0) != 0, (tl.max(everyone.to(tl.int32), axis=0) != 0) & LOGPROBS


@triton.jit
def _store_summaries(keys_ptr, sums_ptr, first_chunk, chunks, rows, owned, key, total, wants_mass):
    """Of two chunks (2, N), for rows (N,)."""
    chunk = first_chunk + tl.arange(0, 2)[:, None]
    place = rows.to(tl.int64)[None, :] * chunks + chunk
    there = owned[None, :] & (chunk < chunks)
    tl.store(keys_ptr + place, key, mask=there)
    if wants_mass:
        tl.store(sums_ptr + place, total, mask=there)


@triton.jit
def _block(
    block,  # (128, N): a block of tokens, N rows
    first_token, rows, owned, batch, source, temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value,
    repetition_at, repetition_value, frequency_at, frequency_value, presence_at, presence_value, keys_ptr, sums_ptr,
    raw_keys_ptr, raw_sums_ptr, winners_ptr, num_samples, stream, blocks, zero, draws, wants_mass,
    HEAD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """What ``scan_kernel`` does, of a block of 128 tokens of several rows."""
    N: tl.constexpr = block.shape[1]
    vocab_size = source.vocab_size
    chunks = 2 * tl.cdiv(vocab_size, 128)
    token0 = lane0_tokens(first_token, 128)  # (32, 1)
    products = split_lanes(block, 128, N)
    columns = after(tl.minimum(rows, batch - 1)[None, :], products[0], zero)  # (32, N), in the products' registers
    raw = ()
    for lane in tl.static_range(4):
        token = token0 + (lane & 1) * 8 + (lane >> 1) * 64
        live = token < vocab_size
        x = tl.where(live, products[lane], float("-inf"))
        raw = raw + (after_head(source, x, token, live, HEAD),)
    if raw_keys_ptr is not None:
        key, total = chunk_summaries(raw, LOG2E, True)
        _store_summaries(raw_keys_ptr, raw_sums_ptr, first_token // 64, chunks, rows, owned, key, total, True)
    if source.counts is not None:
        repetition = load_f32(repetition_at, columns, repetition_value, False)
        frequency = load_f32(frequency_at, columns, frequency_value, False)
        presence = load_f32(presence_at, columns, presence_value, False)
    if source.token_mask is not None:  # lanes 0 and 1 are bits of one word, 2 and 3 of another
        last_word = (vocab_size - 1) >> 5
        words_of_row = columns.to(tl.int64) * source.mask_stride
        lower_word = _load_i32(source.token_mask, words_of_row + tl.minimum(token0 >> 5, last_word))
        upper_word = _load_i32(source.token_mask, words_of_row + tl.minimum((token0 + 64) >> 5, last_word))
    processed = ()
    for lane in tl.static_range(4):
        token = token0 + (lane & 1) * 8 + (lane >> 1) * 64
        live = token < vocab_size
        x = biased(source, raw[lane], token, live)
        if source.counts is not None:
            place = columns.to(tl.int64) * source.counts_stride + tl.minimum(token, vocab_size - 1)
            counts = _load_i32(source.counts, place)
            x = penalized(x, tl.where(live, counts, 0), repetition, frequency, presence)
        if source.token_mask is not None:
            x = masked(x, token, lower_word if lane < 2 else upper_word)
        processed = processed + (x,)
    temperature = load_f32(temperature_at, columns, temperature_value, False)
    if KEYS:
        key, total = chunk_summaries(processed, mass_scale(temperature), wants_mass)
        _store_summaries(keys_ptr, sums_ptr, first_token // 64, chunks, rows, owned, key, total, wants_mass)
    if draws:
        scale, noise_factor = score_factors(temperature, source.token_mask is not None)
        key_lo, key_hi = load_b64(seed_at, columns, seed_value, False)
        offset_lo, offset_hi = load_b64(offset_at, columns, offset_value, False)
        group = (first_token // 4 + tl.arange(0, 32))[:, None].to(tl.uint32)
        slots = winners_ptr + rows.to(tl.int64) * num_samples * blocks + first_token // 128
        for draw in range(num_samples):
            draw_word = tl.zeros((1, 1), tl.uint32) + (draw | (stream << 24)).to(tl.uint32)
            # ten round keys per row are not to be kept over the draws
            words = philox_words(group, draw_word, offset_lo, offset_hi, opaque(key_lo), opaque(key_hi))
            best = tl.full((32, N), float("-inf"), tl.float32)
            best_id = tl.full((32, N), NO_TOKEN, tl.int32)
            for lane in tl.static_range(4):
                token = token0 + (lane & 1) * 8 + (lane >> 1) * 64
                score = score_of(processed[lane], scale, 0.0, minus_gumbel(words[lane]), noise_factor)
                best, best_id = keep_better(best, best_id, score, token)
            winner = tl.max(tl.where(best != float("-inf"), pack_key(best, best_id), 0), axis=0)
            tl.store(slots + draw * blocks, winner, mask=owned)


@triton.jit(
    do_not_specialize=[
        "batch", "hidden_stride", "logit_scale", "soft_cap", "temperature_at", "temperature_value", "seed_at", "seed_value",
        "offset_at", "offset_value", "top_k_at", "top_k_value", "top_p_at", "top_p_value", "min_p_at", "min_p_value",
        "repetition_at", "repetition_value", "frequency_at", "frequency_value", "presence_at", "presence_value", "num_samples",
        "stream", "blocks", "zero",
    ],
    do_not_specialize_on_alignment=["hidden", "hidden_rest"],
)  # fmt: skip
def products_scan_kernel(
    hidden,  # (B, D), or its descriptor
    hidden_rest,  # descriptor for the second block of columns; hidden again if there is none
    weight,  # (V, D), or its descriptor
    batch,
    dim,
    hidden_stride: tl.int64,
    weight_stride,
    out,  # (B, V) float32, out: products
    out_stride,
    vocab_size,
    bias,  # from here on as for ``scan_kernel``
    logit_scale: tl.float32,
    soft_cap: tl.float32,
    dense_bias,
    counts,
    counts_stride,
    token_mask,
    mask_stride,
    temperature_at: tl.int64,
    temperature_value: tl.float32,
    seed_at: tl.int64,
    seed_value: tl.int64,
    offset_at: tl.int64,
    offset_value: tl.int64,
    top_k_at: tl.int64,
    top_k_value: tl.int64,
    top_p_at: tl.int64,
    top_p_value: tl.float32,
    min_p_at: tl.int64,
    min_p_value: tl.float32,
    repetition_at: tl.int64,
    repetition_value: tl.float32,
    frequency_at: tl.int64,
    frequency_value: tl.float32,
    presence_at: tl.int64,
    presence_value: tl.float32,
    keys_ptr,
    sums_ptr,
    raw_keys_ptr,
    raw_sums_ptr,
    winners_ptr,  # (B, num_samples, blocks) int64, out: blocks of 128 tokens
    num_samples: tl.int32,
    stream: tl.int32,
    blocks: tl.int32,
    zero: tl.int32,  # 0: see rows.after
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    REST_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK_B: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_D: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr,
    UPCAST: tl.constexpr,
    HEAD: tl.constexpr,
    FILTERS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    TOP_K_WIDE: tl.constexpr,
):
    """See the module's docstring. Grid: as ``products_kernel``'s."""
    WIDTH: tl.constexpr = BLOCK_B + REST_B
    CHUNKS: tl.constexpr = BLOCK_B // CHUNK_B
    REST_CHUNK: tl.constexpr = CHUNK_B if CHUNK_B < REST_B else REST_B
    REST_CHUNKS: tl.constexpr = REST_B // REST_CHUNK if REST_B > 0 else 0
    row_blocks = tl.cdiv(batch, WIDTH)
    row_block = tl.program_id(0) % row_blocks
    first_owned = row_block * WIDTH
    first_row = tl.maximum(tl.minimum(first_owned, batch - WIDTH), 0)
    source = Source(
        0, out, out_stride, vocab_size, bias, logit_scale, soft_cap, dense_bias, None, None, 0, 0, 0, counts, counts_stride,
        1.0, 0.0, 0.0, token_mask, mask_stride,
    )  # fmt: skip
    wants = ()
    for c in tl.static_range(CHUNKS + REST_CHUNKS):
        columns = tl.minimum(rows_of_chunk(first_row, c, BLOCK_B, CHUNK_B, REST_CHUNK), batch - 1)
        wants = wants + _wants(
            columns, temperature_at, temperature_value, top_k_at, top_k_value, top_p_at, top_p_value, min_p_at, min_p_value,
            vocab_size, FILTERS, LOGPROBS, TOP_K_WIDE,
        )  # fmt: skip
    for tile in range(tl.program_id(0) // row_blocks, tl.cdiv(vocab_size, BLOCK_V), tl.num_programs(0) // row_blocks):
        first_token = tile * BLOCK_V
        acc, rest = tile_logits(
            hidden, hidden_rest, weight, first_token, first_row, batch, vocab_size, dim, hidden_stride, weight_stride,
            BLOCK_V, BLOCK_B, REST_B, BLOCK_D, USE_TMA, EVEN_D, ROW_ALIGNMENT, UPCAST,
        )  # fmt: skip
        tiles = split_blocks(acc, BLOCK_V // 128, CHUNKS)
        rest_tiles = ()
        if REST_B > 0:
            rest_tiles = split_blocks(rest, BLOCK_V // 128, REST_CHUNKS)
        for c in tl.static_range(CHUNKS + REST_CHUNKS):
            # of this tile, to every compiler: addresses computed before the loop would be 90 spilled words (sm_90, B = 64)
            rows = rows_of_chunk(first_row + (tile & zero), c, BLOCK_B, CHUNK_B, REST_CHUNK)
            owned = (rows < batch) & (rows >= first_owned)
            for b in tl.static_range(BLOCK_V // 128):
                if c < CHUNKS:
                    block = tiles[b * CHUNKS + c]
                else:
                    block = rest_tiles[b * REST_CHUNKS + c - CHUNKS]
                store_tile(out, out_stride, block, first_token + 128 * b, rows, owned, vocab_size)
                # the last tile's second block may lie beyond the vocabulary
                inside = owned & (first_token + 128 * b < vocab_size)
                _block(
                    block, first_token + 128 * b, rows, inside, batch, source, temperature_at, temperature_value, seed_at,
                    seed_value, offset_at, offset_value, repetition_at, repetition_value, frequency_at, frequency_value,
                    presence_at, presence_value, keys_ptr, sums_ptr, raw_keys_ptr, raw_sums_ptr, winners_ptr, num_samples,
                    stream, blocks, zero, wants[2 * c], wants[2 * c + 1], HEAD, FILTERS or LOGPROBS,
                )  # fmt: skip


def covers(asked: Asked) -> bool:
    """Whether it does what is asked for."""
    return asked.bias_ids is None or asked.bias_ids.shape[1] == 0


def products_scan(
    step: Step,
    logits: Tensor,  # (B, V) float32, out
    arguments: tuple[Any, ...],  # of ``products_scan_kernel``, from vocab_size up to blocks
    flags: dict[str, Any],
    config: TileConfig | None = None,
) -> None:
    """One launch, in place of ``products`` and ``scan_kernel``. ``config`` replaces the shape that is chosen."""
    hidden_states, weight, vocab_size = step.hidden_states, step.weight, step.vocab_size
    batch = hidden_states.shape[0]
    config = choose_config(hidden_states, weight, 1) if config is None else config
    operands = tile_operands(hidden_states, weight, vocab_size, config)
    row_blocks = -(-batch // config.columns)
    tiles = -(-vocab_size // config.block_v)
    programs = max(1, min(tiles, config.ctas_per_sm * multiprocessors(weight.device) // row_blocks))
    products_scan_kernel[(programs * row_blocks,)](
        *operands.matrices,
        batch,
        weight.shape[1],
        *operands.strides,
        logits,
        logits.stride(0),
        *arguments,
        0,
        **operands.shapes,
        **flags,
        CHUNK_B=config.chunk_b,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
