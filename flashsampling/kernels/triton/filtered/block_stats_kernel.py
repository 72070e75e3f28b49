"""The first kernel of ``logits``: reads every logit once.

A program has a block of one row. It writes, per chunk of 32 tokens, the highest processed logit and, where someone will ask,
the sum of the masses relative to it; and of a row without filters the block's best score per draw, which it writes also if all
logits of the block are equal: of a row that is nothing but such blocks the filters keep the first ids, so they are what the
draw needs (``logits_pick``). Lanes of Philox groups are registers of one thread, as in ``kernel``, and so are most of a
chunk's tokens.

A block's mark says whether all its logits are equal, and whether any is finite. It is found with a few comparisons of the
chunks' highest logits, unless those leave it open.
"""

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..fused.noise import INTERPRETED, minus_gumbel, philox_words
from ..fused.packed_argmax import NAN_KEY, NO_TOKEN, ORDERED_INF, keep_better, pack_key, with_noise
from ..jit import jit
from .logit_source import (
    GREEDY_BELOW,
    MINUS_INF,
    MIXED,
    MIXED_INFINITE,
    NAN,
    PLUS_INF,
    LogitSource,
    below,
    chunks_in,
    column_tokens,
    exp2,
    is_allowed,
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


@jit
def _at_most_0(x):
    """0 for NaN too, as the difference of equal infinities is; the interpreter's minimum keeps that."""
    if INTERPRETED:
        x = tl.where(x == x, x, 0.0)
    return tl.minimum(x, 0.0)


@jit
def _summaries(logits, scale, keys_ptr, sums_ptr, wants_mass, chunks, COLUMNS: tl.constexpr):
    """Writes the chunks' highest keys and sums of masses, of a tuple of (COLUMNS,) logits, if they are among the first
    ``chunks`` ones. The lowest and the highest key of all."""
    PER_REP: tl.constexpr = COLUMNS // 8
    lowest = tl.full((PER_REP,), NAN, tl.int32)
    overall = tl.full((PER_REP,), MIXED, tl.int32)
    for rep in tl.static_range(len(logits) // 4):
        highest = logits[4 * rep]
        for i in tl.static_range(1, 4):
            highest = tl.maximum(highest, logits[4 * rep + i], propagate_nan=tl.PropagateNan.ALL)
        key = tl.max(tl.reshape(key_of(highest), (PER_REP, 8)), axis=1)
        chunk = rep * PER_REP + tl.arange(0, PER_REP)
        tl.store(keys_ptr + chunk, key, mask=chunk < chunks)
        lowest = tl.minimum(lowest, key)
        overall = tl.maximum(overall, key)
        if wants_mass:
            top = value_of(key)
            # a chunk of -inf has no mass; infinite ones have one each, and beside them no finite one has any
            top = tl.where(top == float("-inf"), 0.0, top)
            top = tl.reshape(tl.broadcast_to(top[:, None], (PER_REP, 8)), (COLUMNS,))
            mass = exp2(_at_most_0(below(logits[4 * rep], top, scale)))
            for i in tl.static_range(1, 4):
                mass += exp2(_at_most_0(below(logits[4 * rep + i], top, scale)))
            tl.store(sums_ptr + chunk, tl.sum(tl.reshape(mass, (PER_REP, 8)), axis=1), mask=chunk < chunks)
    return tl.min(lowest, axis=0), tl.max(overall, axis=0)


@jit
def _mark(logits, live, COLUMNS: tl.constexpr):
    """The key of all of a block's logits, or one of the two marks that say that they are not equal."""
    lowest = tl.full((COLUMNS,), NAN, tl.int32)
    highest = tl.full((COLUMNS,), MIXED, tl.int32)
    finite = tl.zeros((COLUMNS,), tl.int32)
    for i in tl.static_range(len(logits)):
        key = key_of(logits[i])
        lowest = tl.minimum(lowest, tl.where(live[i], key, NAN))
        highest = tl.maximum(highest, tl.where(live[i], key, MIXED))
        finite = tl.maximum(finite, (live[i] & (key > MINUS_INF) & (key < PLUS_INF)).to(tl.int32))
    common = tl.max(highest, axis=0)
    mixed = tl.where(tl.max(finite, axis=0) != 0, MIXED, MIXED_INFINITE)
    return tl.where(common == tl.min(lowest, axis=0), common, mixed)


@jit
def _any_infinite(source, logits, tokens, later):
    """Whether a token that the mask leaves in has an infinite logit. ``later`` is 0, and may be known only when this is needed:
    nothing that the tokens are looked up by can then be computed sooner, and take registers until here."""
    found = tl.zeros(logits[0].shape, tl.int32)
    for i in tl.static_range(len(logits)):
        token = tokens[i] + later
        infinite = is_allowed(source, token, token < source.vocab_size) & (tl.abs(logits[i]) == float("inf"))
        found = tl.maximum(found, infinite.to(tl.int32))
    return tl.max(found, axis=0)


@jit
def _any_finite(logits):
    """Whether one is neither infinite nor NaN."""
    least = tl.abs(logits[0])
    for i in tl.static_range(1, len(logits)):
        least = tl.minimum(least, tl.abs(logits[i]))
    return tl.min(least, axis=0) < float("inf")


@jit
def _after(index, done, zero):
    """uint32 numbers, but not before ``done`` (float32) is known, and in its register layout: see ``rows.after``."""
    return (index ^ (done.to(tl.int32, bitcast=True) & zero)).to(tl.uint32)


@jit
def _best(
    scaled, tokens, first, zero, draw_word, noise_factor, key_lo, key_hi, offset_lo, offset_hi,
    COLUMNS: tl.constexpr, REPS: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Key of the block's best score, from logits times the row's factor. The word 0 counts for more than it is worth: who reads
    the key looks out for it."""
    best = tl.full((COLUMNS,), float("-inf"), tl.float32)
    best_id = tl.full((COLUMNS,), NO_TOKEN, tl.int32)
    for rep in tl.static_range(REPS):
        if NOISE:
            group = _after(first // 4 + rep * COLUMNS + tl.arange(0, COLUMNS), scaled[0] if rep == 0 else best, zero)
            stream_draw = tl.zeros((COLUMNS,), tl.uint32) + draw_word
            words = philox_words(group, stream_draw, offset_lo, offset_hi, key_lo, key_hi)
        for lane in tl.static_range(4):
            score = scaled[rep * 4 + lane]
            if NOISE:
                score = with_noise(score, minus_gumbel(words[lane]), noise_factor)
            best, best_id = keep_better(best, best_id, score, tokens[rep * 4 + lane])
    return tl.max(tl.where(best != float("-inf"), pack_key(best, best_id), 0), axis=0)


@jit(
    do_not_specialize=[
        "temperature_at", "temperature_value", "seed_at", "seed_value", "offset_at", "offset_value", "top_k_at", "top_k_value",
        "top_p_at", "top_p_value", "min_p_at", "min_p_value", "repetition_at", "repetition_value", "frequency_at",
        "frequency_value", "presence_at", "presence_value", "logit_scale", "soft_cap", "bias_count", "ids_stride",
        "values_stride", "num_samples", "stream", "blocks", "zero",
    ],
)  # fmt: skip
def block_stats_kernel(
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
    marks_ptr,  # (B, blocks) int32, out; where a best score is infinite, or where there are summaries
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
    JOINT: tl.constexpr,  # a top-p may be of all tokens where there is a top-k
    PDL: tl.constexpr,  # the next launch need not wait for this one's end to begin
):
    """See the module's docstring. Grid: (blocks * B,)."""
    if PDL:
        gdc_launch_dependents()
    BLOCK: tl.constexpr = 4 * COLUMNS * REPS
    PARTS: tl.constexpr = 4 * REPS
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    first = block * BLOCK
    repetition = row_f32(repetition_at, repetition_value, row)
    frequency = row_f32(frequency_at, frequency_value, row)
    presence = row_f32(presence_at, presence_value, row)
    source = LogitSource(
        row.to(tl.int64), logits, logits_stride, vocab_size, bias, logit_scale, soft_cap, dense_bias, bias_ids,
        bias_values, bias_count, ids_stride, values_stride, counts, counts_stride, repetition, frequency, presence,
        token_mask, mask_stride, None, None,
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
    out = row.to(tl.int64) * chunks_in(vocab_size) + first // 32
    chunks = chunks_in(vocab_size) - first // 32  # from here on
    if raw_keys_ptr is not None:
        _summaries(raw, 1.4426950408889634, raw_keys_ptr + out, raw_sums_ptr + out, True, chunks, COLUMNS)
    entries = tl.full((ENTRIES,), -1, tl.int32)
    if bias_ids is not None:
        entries = sparse_entries(source, ENTRIES)
        entries = tl.where((entries >= first) & (entries < first + BLOCK), entries, -1)
    processed = processed_logits(source, raw, tokens, live, entries, ENTRIES)

    greedy = temperature < GREEDY_BELOW
    undefined = tl.full((), 0, tl.int32)
    draws = True
    mark_ptr = marks_ptr + row.to(tl.int64) * blocks + block
    if FILTERS or LOGPROBS:
        if temperature == float("inf"):  # which would make NaN of it
            undefined = _any_infinite(source, processed, tokens, 0)
        filtered = False
        wants_mass = LOGPROBS
        if FILTERS:
            top_k = row_top_k(top_k_at, top_k_value, row, TOP_K_WIDE)
            by_top_k = (top_k > 0) & (top_k < vocab_size)
            by_top_p = (row_f32(top_p_at, top_p_value, row) >= 1.0) == 0  # also if NaN
            by_min_p = (row_f32(min_p_at, min_p_value, row) <= 0.0) == 0
            filtered = by_top_k | by_top_p | by_min_p
            if not LOGPROBS:
                filtered = filtered & (greedy == 0)
                wants_mass = filtered & by_top_p
                if not JOINT:
                    wants_mass = wants_mass & (by_top_k == 0)
        lowest, highest = _summaries(
            processed, mass_scale(temperature), keys_ptr + out, sums_ptr + out, wants_mass, chunks, COLUMNS
        )
        mark = tl.full((), MIXED, tl.int32)
        if (highest == lowest) | (highest == PLUS_INF) | (block == blocks - 1):  # a row's end may be of no token
            mark = _mark(processed, live, COLUMNS)
        tl.store(mark_ptr, tl.where(undefined != 0, NAN, mark))
        draws = (filtered == 0) | (mark >= MINUS_INF)
    if draws:
        scale, noise_factor = score_factors(temperature)
        seed = row_i64(seed_at, seed_value, row)
        offset = row_i64(offset_at, offset_value, row)
        key_lo, key_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
        offset_lo, offset_hi = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
        slots = winners_ptr + row.to(tl.int64) * num_samples * blocks + block
        to_next = blocks.to(tl.int64)  # of a vocabulary of 2**20 tokens, 2**24 draws have more than 2**31 slots
        scaled = ()
        for part in tl.static_range(PARTS):
            scaled = scaled + (tl.fma(processed[part], scale, 0.0),)
        best_key = tl.full((), 0, tl.int64)
        if greedy:
            best_key = _best(
                scaled, tokens, first, zero, 0, noise_factor, key_lo, key_hi, offset_lo, offset_hi,
                COLUMNS, REPS, False,
            )  # fmt: skip
            for draw in range(num_samples):
                tl.store(slots + draw * to_next, best_key)
        else:
            for draw in range(num_samples):
                draw_word = (draw | (stream << 24)).to(tl.uint32)
                key = _best(
                    scaled, tokens, first, zero, draw_word, noise_factor, key_lo, key_hi, offset_lo, offset_hi,
                    COLUMNS, REPS, True,
                )  # fmt: skip
                tl.store(slots + draw * to_next, tl.where(undefined != 0, NAN_KEY, key))
                best_key = tl.maximum(best_key, key)
        if not (FILTERS or LOGPROBS):
            # behind the draws, and from what these need anyway: in their loop, the compiler makes all of it ready before the
            # first draw, whether or not it is needed (sm_90: 1911 instructions per thread and draw instead of 1485)
            if best_key >> 31 == ORDERED_INF:
                tl.store(mark_ptr, tl.where(_any_finite(scaled), MIXED, MIXED_INFINITE))
            if temperature == float("inf"):  # noqa: SIM102, a branch, and a reduction behind it
                if _any_infinite(source, scaled, tokens, best_key.to(tl.int32) & zero) != 0:
                    for draw in range(num_samples):
                        tl.store(slots + draw * to_next, NAN_KEY)
