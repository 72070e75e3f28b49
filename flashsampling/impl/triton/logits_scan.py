"""The first kernel of ``logits``: reads every logit once.

A program has a block of one row. It writes, per chunk, the highest processed logit and, where someone will ask, the sum of the
masses relative to it; and of a row without filters the block's best score per draw. Lanes of Philox groups are registers of one
thread, as in ``kernel``, and so are most of a chunk's tokens.
"""

import triton
import triton.language as tl

from .logits_source import (
    GREEDY_BELOW,
    Source,
    chunk_sums,
    column_tokens,
    exp2,
    key_of,
    mass_scale,
    processed_logits,
    raw_logits,
    row_f32,
    row_i64,
    row_top_k,
    score_factors,
    sparse_entries,
    value_of,
)
from .noise import minus_gumbel, philox_words
from .scores import NO_TOKEN, keep_better, pack_key, score_of

_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def chunk_summaries(lanes, scale, wants_mass):
    """Of a tuple of four lanes (columns, N): the highest key of every chunk, and the sum of its masses relative to it if
    someone wants it: (columns // 16, N) each."""
    COLUMNS: tl.constexpr = lanes[0].shape[0]
    N: tl.constexpr = lanes[0].shape[1]
    highest = lanes[0]
    for i in tl.static_range(1, 4):
        highest = tl.maximum(highest, lanes[i], propagate_nan=tl.PropagateNan.ALL)
    key = tl.max(tl.reshape(key_of(highest), (COLUMNS // 16, 16, N)), axis=1)
    total = tl.zeros(key.shape, tl.float32)
    if wants_mass:
        top = value_of(key)
        # a chunk of -inf has no mass; infinite ones have one each
        top = tl.minimum(tl.where(top == float("-inf"), 0.0, top), _LARGEST)
        top = tl.reshape(tl.broadcast_to(top[:, None, :], (COLUMNS // 16, 16, N)), (COLUMNS, N))
        mass = exp2((tl.minimum(lanes[0], _LARGEST) - top) * scale)
        for i in tl.static_range(1, 4):
            mass += exp2((tl.minimum(lanes[i], _LARGEST) - top) * scale)
        total = chunk_sums(tl.reshape(mass, (COLUMNS // 16, 2, 2, 2, 2, N)))
    return key, total


@triton.jit
def _summaries(logits, scale, keys_ptr, sums_ptr, wants_mass, chunks, COLUMNS: tl.constexpr):
    """Writes those of a tuple of (COLUMNS,) logits. ``chunks``: so many there are from the first one on."""
    for rep in tl.static_range(len(logits) // 4):
        lanes = ()
        for i in tl.static_range(4):
            lanes = lanes + (logits[rep * 4 + i][:, None],)
        key, total = chunk_summaries(lanes, scale, wants_mass)
        chunk = rep * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)[:, None]
        tl.store(keys_ptr + chunk, key, mask=chunk < chunks)
        if wants_mass:
            tl.store(sums_ptr + chunk, total, mask=chunk < chunks)


@triton.jit
def _after(index, done, zero):
    """uint32 numbers, but not before ``done`` (float32) is known, and in its register layout: see ``rows.after``."""
    return (index ^ (done.to(tl.int32, bitcast=True) & zero)).to(tl.uint32)


@triton.jit
def _best(
    logits, tokens, first, zero, draw_word, scale, noise_factor, key_lo, key_hi, offset_lo, offset_hi,
    COLUMNS: tl.constexpr, REPS: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Key of the block's best score. The word 0 counts for more than it is worth: who reads the key looks out for it."""
    best = tl.full((COLUMNS,), float("-inf"), tl.float32)
    best_id = tl.full((COLUMNS,), NO_TOKEN, tl.int32)
    for rep in tl.static_range(REPS):
        if NOISE:
            group = _after(first // 4 + rep * COLUMNS + tl.arange(0, COLUMNS), logits[0] if rep == 0 else best, zero)
            stream_draw = tl.zeros((COLUMNS,), tl.uint32) + draw_word
            words = philox_words(group, stream_draw, offset_lo, offset_hi, key_lo, key_hi)
        for lane in tl.static_range(4):
            x = logits[rep * 4 + lane]
            if NOISE:
                score = score_of(x, scale, 0.0, minus_gumbel(words[lane]), noise_factor)
            else:
                score = x * scale
            best, best_id = keep_better(best, best_id, score, tokens[rep * 4 + lane])
    return tl.max(tl.where(best != float("-inf"), pack_key(best, best_id), 0), axis=0)


@triton.jit(
    do_not_specialize=[
        "temperature_at", "temperature_value", "seed_at", "seed_value", "offset_at", "offset_value", "top_k_at", "top_k_value",
        "top_p_at", "top_p_value", "min_p_at", "min_p_value", "repetition_at", "repetition_value", "frequency_at",
        "frequency_value", "presence_at", "presence_value", "logit_scale", "soft_cap", "bias_count", "ids_stride",
        "values_stride", "num_samples", "stream", "blocks", "zero",
    ],
)  # fmt: skip
def scan_kernel(
    logits,  # (B, V)
    logits_stride,
    vocab_size,
    bias,  # (V,) float32, or None
    logit_scale: tl.float32,
    soft_cap: tl.float32,
    dense_bias,  # (V,) float32, or None
    bias_ids,  # (B, n) int32, or None
    bias_values,  # (B, n) float32
    bias_count: tl.int32,  # n
    ids_stride: tl.int64,
    values_stride: tl.int64,
    counts,  # (B, V) int32, or None
    counts_stride,
    token_mask,  # (B, ceil(V / 32)) int32, or None
    mask_stride,
    temperature_at: tl.int64,  # addresses of (B,) and numbers, as for the fused kernel
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
    keys_ptr,  # (B, chunks) int32, out: highest processed logits
    sums_ptr,  # (B, chunks) float32, out: masses relative to them
    raw_keys_ptr,  # (B, chunks) int32, out: highest raw logits; None if nobody asks
    raw_sums_ptr,  # (B, chunks) float32, out
    winners_ptr,  # (B, num_samples, blocks) int64, out: keys of best scores
    num_samples: tl.int32,
    stream: tl.int32,
    blocks: tl.int32,
    zero: tl.int32,  # 0: see rows.after
    COLUMNS: tl.constexpr,
    REPS: tl.constexpr,
    ENTRIES: tl.constexpr,  # n, up to a power of two
    HEAD: tl.constexpr,  # a scale or a soft cap
    FILTERS: tl.constexpr,  # some row may have a filter
    LOGPROBS: tl.constexpr,
    TOP_K_WIDE: tl.constexpr,
):
    """See the module's docstring. Grid: (blocks * B,)."""
    BLOCK: tl.constexpr = 4 * COLUMNS * REPS
    PARTS: tl.constexpr = 4 * REPS
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    first = block * BLOCK
    repetition = row_f32(repetition_at, repetition_value, row)
    frequency = row_f32(frequency_at, frequency_value, row)
    presence = row_f32(presence_at, presence_value, row)
    source = Source(
        row.to(tl.int64), logits, logits_stride, vocab_size, bias, logit_scale, soft_cap, dense_bias, bias_ids, bias_values,
        bias_count, ids_stride, values_stride, counts, counts_stride, repetition, frequency, presence, token_mask, mask_stride,
    )  # fmt: skip
    column = column_tokens(COLUMNS)
    tokens = ()
    live = ()
    raw = ()
    for part in tl.static_range(PARTS):
        token = first + (part // 4) * (4 * COLUMNS) + (part & 1) * 8 + (part // 2 % 2) * 64 + column
        inside = token < vocab_size
        tokens = tokens + (token,)
        live = live + (inside,)
        raw = raw + (raw_logits(source, token, inside, HEAD),)
    temperature = row_f32(temperature_at, temperature_value, row)
    chunks = 2 * tl.cdiv(vocab_size, 128)
    out = row.to(tl.int64) * chunks + first // 64
    chunks -= first // 64
    if raw_keys_ptr is not None:
        _summaries(raw, 1.4426950408889634, raw_keys_ptr + out, raw_sums_ptr + out, True, chunks, COLUMNS)
    entries = tl.full((ENTRIES,), -1, tl.int32)
    if bias_ids is not None:
        entries = sparse_entries(source, ENTRIES)
        entries = tl.where((entries >= first) & (entries < first + BLOCK), entries, -1)
    processed = processed_logits(source, raw, tokens, live, entries, ENTRIES)

    greedy = temperature < GREEDY_BELOW
    filtered = False
    wants_mass = LOGPROBS
    if FILTERS:
        top_k = row_top_k(top_k_at, top_k_value, row, TOP_K_WIDE)
        by_top_k = (top_k > 0) & (top_k < vocab_size)
        by_top_p = (row_f32(top_p_at, top_p_value, row) >= 1.0) == 0  # also if NaN
        by_min_p = (row_f32(min_p_at, min_p_value, row) <= 0.0) == 0
        if LOGPROBS:
            filtered = by_top_k | by_top_p | by_min_p
        else:
            filtered = (by_top_k | by_top_p | by_min_p) & (greedy == 0)
            wants_mass = filtered & by_top_p & (by_top_k == 0)
        _summaries(processed, mass_scale(temperature), keys_ptr + out, sums_ptr + out, wants_mass, chunks, COLUMNS)
    elif LOGPROBS:
        _summaries(processed, mass_scale(temperature), keys_ptr + out, sums_ptr + out, True, chunks, COLUMNS)
    if filtered == 0:
        scale, noise_factor = score_factors(temperature, token_mask is not None)
        seed = row_i64(seed_at, seed_value, row)
        offset = row_i64(offset_at, offset_value, row)
        key_lo, key_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
        offset_lo, offset_hi = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
        slots = winners_ptr + row.to(tl.int64) * num_samples * blocks + block
        if greedy:
            key = _best(
                processed, tokens, first, zero, 0, scale, noise_factor, key_lo, key_hi, offset_lo, offset_hi,
                COLUMNS, REPS, False,
            )  # fmt: skip
            for draw in range(num_samples):
                tl.store(slots + draw * blocks, key)
        else:
            for draw in range(num_samples):
                draw_word = (draw | (stream << 24)).to(tl.uint32)
                key = _best(
                    processed, tokens, first, zero, draw_word, scale, noise_factor, key_lo, key_hi, offset_lo, offset_hi,
                    COLUMNS, REPS, True,
                )  # fmt: skip
                tl.store(slots + draw * blocks, key)
