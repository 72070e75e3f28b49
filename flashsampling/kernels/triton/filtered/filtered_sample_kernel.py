"""The second kernel of ``logits``: a program per row turns what the first one wrote into tokens and what else is asked
for.

no filter        the best of the blocks' best scores
a filter         from the chunks' maxima and masses a bound below which no token is kept; the tokens above it, read again,
                 are the candidates; boundaries of top-k and top-p among them; the best score of what is kept
one draw from    no boundary: a token is kept if little enough mass is before it, and if it is not, the best score of what is
a nucleus        before it is asked next (``draw_in_rounds``)
equal logits     in all of a row, as the zeros of a padded batch: the filters keep the first ids, and of their blocks the scan
                 has the best scores. What is left to draw from is less than a block: no more work than another row's
a flat row       whose candidates are more than there is room for, and not all equal: the row itself is searched

Behind a kernel that has drawn for rows without filters (``DRAWN``) there are chunks and its tokens, no blocks: rows
without filters take them, -1 says that a row is undefined, with filters too, and whether all logits of a row are equal
is looked up where all chunks have the same highest one. ``DEFERRED_DRAW`` is in a token's place where that kernel left
the draw to this one, of a row with a top-k: its chunks say whether it is undefined. Of a nucleus the row's token is
asked first, and the candidates are what is before it: it is kept as often as the nucleus has mass.
"""

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..constant import Constant
from ..fused.packed_argmax import NAN_KEY, NO_TOKEN, ORDERED_INF
from ..jit import jit
from .cache_warmup import ROOM, TOKENS, made_up_at, make_up, turn_of
from .candidates import (
    first_ties,
    gather,
    highest_of,
    kth_highest,
    load_chunks,
    lowest_of_tokens,
    masses_of,
    nucleus_bound,
    some_finite,
)
from .cutoff import Tokens, limit_of, mass_of_kept
from .draw import all_equal, any_finite, draw_from_candidates, draw_from_few, draw_from_row, draw_in_rounds
from .logit_source import (
    DEFERRED_DRAW,
    DEFERRED_TOP_K,
    GREEDY_BELOW,
    LARGEST,
    LOG2E,
    MINUS_INF,
    MIXED,
    NAN,
    NO_LOGIT,
    PLUS_INF,
    LogitSource,
    both_logits_of,
    chunks_in,
    key_of,
    mass_scale,
    row_f32,
    row_i64,
    row_top_k,
    stored,
    value_of,
    word_of,
)
from .logprobs import log_sum_exp, place_in_row, write_drawn, write_given, write_record, write_top

_LOWEST = Constant(-0x80000000)


@jit
def _limit(
    tokens, highest, row_mass, top_k, top_p, min_p, by_top_k, by_top_p, of_top_k,
    WHOLE: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The place from which on the filters keep what there is, but for min-p."""
    limit = tl.full((), 0, tl.int64)
    for stage in range(3):  # top-k, top-p, a min-p that leaves the first token alone
        by_mass = stage == 1
        params = tl.where(stage == 0, by_top_k, tl.where(by_mass, by_top_p, min_p > 1.0))
        if params:
            target = tl.where(stage == 0, top_k.to(tl.float64), 1.0)
            share = tl.maximum(top_p, 1e-30).to(tl.float64)
            target = tl.where(by_mass, tl.where(of_top_k, share, share * row_mass), target)
            is_share = by_mass & of_top_k
            limit = limit_of(tokens, highest, limit, by_mass, target, is_share, WHOLE, FEW, TILE, HEAD, ENTRIES)
    return limit


@jit
def _in_memory(source, token, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """A token and its key; -1 where its logit is not in memory."""
    tokens = token + tl.arange(0, 1)
    there = tl.max(stored(source, tokens, tokens >= 0).to(tl.int32), axis=0) != 0
    _raw, x = both_logits_of(source, token, HEAD, ENTRIES)
    return tl.where(there, token, -1), key_of(x)


@jit
def _kept_of_equal(vocab_size, top_k, top_p, min_p, by_top_k, by_top_p, of_top_k):
    """How many tokens the filters keep of a row whose logits are all equal: these are the first ids."""
    kept = tl.where(by_top_k, top_k, vocab_size).to(tl.int32)
    wanted = tl.maximum(top_p, 1e-30).to(tl.float64) * tl.where(of_top_k, kept, vocab_size).to(tl.float64)
    wanted = tl.minimum(tl.where(by_top_p, wanted, kept.to(tl.float64)), kept.to(tl.float64))
    kept = wanted.to(tl.int32)
    kept += (kept.to(tl.float64) < wanted).to(tl.int32)
    return tl.where(min_p > 1.0, 1, tl.maximum(kept, 1))


@jit(
    do_not_specialize=[
        "temperature_at", "temperature_value", "seed_at", "seed_value", "offset_at", "offset_value", "top_k_at", "top_k_value",
        "top_p_at", "top_p_value", "min_p_at", "min_p_value", "repetition_at", "repetition_value", "frequency_at",
        "frequency_value", "presence_at", "presence_value", "logit_scale", "soft_cap", "bias_count", "ids_stride",
        "values_stride", "num_samples", "stream", "blocks", "num_top", "num_given", "given_stride", "ahead",
    ],
    do_not_specialize_on_alignment=[
        "ids_ptr", "logprobs_ptr", "processed_ptr", "ranks_ptr", "top_ids_ptr", "top_logprobs_ptr", "given_ids", "given_ptr",
        "lse_ptr", "limits_ptr", "masses_ptr", "floors_ptr", "joint_ptr",
    ],
)  # fmt: skip
def filtered_sample_kernel(
    logits,  # as for block_stats_kernel, up to blocks; what it wrote is read here
    logits_stride,
    vocab_size,
    bias,
    logit_scale: tl.float32,
    soft_cap: tl.float32,
    dense_bias,
    bias_ids,
    bias_values,
    bias_count: tl.int32,
    ids_stride: tl.int64,
    values_stride: tl.int64,
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
    winners_ptr,  # if DRAWN: (B, num_samples) int64, tokens, or UNDRAWN of a row with a top-k
    marks_ptr,
    num_samples: tl.int32,
    stream: tl.int32,
    blocks: tl.int32,
    floors_ptr,  # if DRAWN, (B,) int32: logits of chunks with a lower key are not there, others lie by chunks; None: all are
    joint_ptr,  # (B,) int32, not 0: top-p's share is of all tokens, not of what top-k kept; None: as JOINT says
    candidates_ptr,  # (programs of a row, B, 3 * CAPACITY + LIST) int32: keys, ids, masses, a list of chunks;
    # behind them the made-up rows' rooms
    ids_ptr,  # (B, num_samples) int64, out
    logprobs_ptr,  # (B, num_samples) float32, out; None if nobody asks, as the following
    processed_ptr,
    ranks_ptr,  # (B, num_samples) int64, out
    top_ids_ptr,  # (B, num_top) int64, out
    top_logprobs_ptr,  # (B, num_top) float32, out
    num_top: tl.int32,
    given_ids,  # (B, num_given) int64
    given_stride: tl.int64,
    given_ptr,  # (B, num_given) float32, out
    num_given: tl.int32,
    lse_ptr,  # (B,) float32, out
    ahead: tl.int32,  # rows that are made up, see ``logits_ahead``: none or as many as there are
    limits_ptr,  # (B,) int64, out: what ``rejection`` reads of a row: the place of its last kept token
    masses_ptr,  # (B, 4) float32, out: least mass of a kept token, mass of all, highest logit, its only token
    COLUMNS: tl.constexpr,
    REPS: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEAD: tl.constexpr,
    FILTERS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    TOP_K_WIDE: tl.constexpr,
    JOINT: tl.constexpr,
    TOP_K: tl.constexpr,  # some row may have one. What only others need is left out: it would have to come from memory
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    PDL: tl.constexpr,  # this launch may begin before the last one's end
    DRAWN: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks, up to a power of two
    WIDTH: tl.constexpr,  # chunks side by side
    PARTS: tl.constexpr,  # times that
    LIST: tl.constexpr,  # room for a list of chunks, at least 3 * FEW
    ID_BITS: tl.constexpr,  # that ids need
    FEW: tl.constexpr,  # candidates that are compared with each other
    CAPACITY: tl.constexpr,  # candidates, not fewer
    TILE: tl.constexpr,  # candidates at a time
    WHOLE_TILE: tl.constexpr,  # tokens of a row at a time
    GATHERED: tl.constexpr,  # chunks at a time
    AT_FIRST: tl.constexpr,  # chunks with tokens before the one that is drawn without filters, not more
):
    """See the module's docstring. Grid: (B, 1), or (B, 2) where there are likeliest or given tokens beside what is
    drawn; (2 B, 1) with made-up rows."""
    vocabulary = vocab_size
    AHEAD: tl.constexpr = PDL and DRAWN and not LOGPROBS and raw_keys_ptr is None
    row = tl.program_id(0)
    draws, of_others = True, True
    if raw_keys_ptr is not None:
        draws = tl.program_id(1) == 0
        of_others = tl.program_id(1) == tl.num_programs(1) - 1
    is_made_up = False
    capacity = CAPACITY
    if AHEAD:
        is_made_up, row = turn_of(row, ahead)
    far = row.to(tl.int64)
    cand_keys = candidates_ptr + far * (3 * CAPACITY + LIST)
    if raw_keys_ptr is not None:
        cand_keys += tl.program_id(1).to(tl.int64) * tl.num_programs(0) * (3 * CAPACITY + LIST)
    temperature = row_f32(temperature_at, temperature_value, row)
    if AHEAD:
        rooms = candidates_ptr + (tl.num_programs(0) - ahead).to(tl.int64) * (3 * CAPACITY + LIST)
        made_up = made_up_at(rooms + row * (ROOM + 3 * FEW))
        if is_made_up:
            make_up(made_up, floors_ptr is not None)
        else:
            gdc_wait()
        cand_keys = tl.where(is_made_up, made_up.candidates, cand_keys)
        capacity = tl.where(is_made_up, TOKENS, CAPACITY)
        temperature = tl.where(is_made_up, 1.0, temperature)
        logits = tl.where(is_made_up, made_up.logits.to(logits.dtype), logits + far * logits_stride)
        chunk = far * chunks_in(vocab_size)
        keys_ptr = tl.where(is_made_up, made_up.keys, keys_ptr + chunk)
        if sums_ptr is not None:
            sums_ptr = tl.where(is_made_up, made_up.sums.to(sums_ptr.dtype), sums_ptr + chunk)
        winners_ptr = tl.where(is_made_up, made_up.winner.to(winners_ptr.dtype), winners_ptr + far * num_samples)
        if floors_ptr is not None:
            floors_ptr = tl.where(is_made_up, made_up.floor, floors_ptr + far)
        ids_ptr = tl.where(is_made_up, made_up.result.to(ids_ptr.dtype), ids_ptr + far * num_samples)
        vocab_size = tl.where(is_made_up, TOKENS, vocab_size)
        far = tl.full((), 0, tl.int64)  # these are the row's own
    elif PDL:
        gdc_wait()
    repetition = row_f32(repetition_at, repetition_value, row)
    frequency = row_f32(frequency_at, frequency_value, row)
    presence = row_f32(presence_at, presence_value, row)
    source = LogitSource(
        far, logits, logits_stride, vocab_size, bias, logit_scale, soft_cap, dense_bias, bias_ids, bias_values,
        bias_count, ids_stride, values_stride, counts, counts_stride, repetition, frequency, presence, token_mask,
        mask_stride, keys_ptr, floors_ptr,
    )  # fmt: skip
    scale = mass_scale(temperature)
    num_chunks = chunks_in(vocab_size)
    at_chunks = far * num_chunks
    cand_ids = cand_keys + capacity
    cand_masses = (cand_ids + capacity).to(tl.pointer_type(tl.float32))
    list_ptr = cand_ids + 2 * capacity
    ids_ptr += far * num_samples

    block = tl.arange(0, BLOCKS)
    lowest = tl.full((), _LOWEST, tl.int64)
    last = tl.full((), 0, tl.int32) + vocab_size  # tokens before it are looked at
    filtered = False
    undefined = False
    kept_mass = tl.full((), 0.0, tl.float32)
    least_mass = tl.full((), 0.0, tl.float32)
    first_kept = tl.full((), -(1 << 62), tl.int64)
    top = tl.full((), 0.0, tl.float32)
    first = tl.full((), -1, tl.int32)  # the row's token without filters, -1: its logit is not in memory
    first_key = tl.full((), _LOWEST, tl.int32)
    if TOP_P and DRAWN and not LOGPROBS:
        first = tl.load(winners_ptr + far * num_samples).to(tl.int32)
        first, first_key = _in_memory(source, first, HEAD, ENTRIES)  # on its way while the first numbers are added up
    if FILTERS or LOGPROBS:
        keys = load_chunks(keys_ptr + at_chunks, num_chunks, NO_LOGIT, WIDTH, PARTS)
        highest = tl.max(highest_of(keys), axis=0)
        top = value_of(highest)
        undefined = (highest == NAN) | (highest <= MINUS_INF) | (temperature != temperature)
        if DRAWN:
            drawn = tl.load(winners_ptr + far * num_samples)
            undrawn = TOP_K & (drawn == DEFERRED_DRAW)
            undefined = undefined | ((drawn < 0) & (undrawn == 0))
            if TOP_K:  # noqa: SIM102, the one is for the compiler
                if undrawn & (highest == PLUS_INF):
                    row_tokens = Tokens(
                        source, cand_keys, cand_ids, cand_masses, last, lowest, ID_BITS, top, scale, list_ptr
                    )
                    if some_finite(keys) == 0:
                        undefined = undefined | (any_finite(row_tokens, WHOLE_TILE // 2, HEAD, ENTRIES) == 0)
        else:
            marks = tl.load(marks_ptr + far * blocks + block, mask=block < blocks, other=MIXED)
            undefined = undefined | (tl.max(marks, axis=0) == NAN)
            if highest == PLUS_INF:
                finite = (marks == MIXED) | ((marks > MINUS_INF) & (marks < PLUS_INF))
                undefined = undefined | (tl.max((finite & (block < blocks)).to(tl.int32), axis=0) == 0)
    if FILTERS:
        top_k = row_top_k(top_k_at, top_k_value, row, TOP_K_WIDE)
        top_p = row_f32(top_p_at, top_p_value, row)
        min_p = row_f32(min_p_at, min_p_value, row)
        by_top_k = TOP_K & (top_k > 0) & (top_k < vocabulary)
        by_top_p = TOP_P & (top_p < 1.0)
        by_min_p = MIN_P & (min_p > 0.0)
        of_top_k = by_top_k  # top-p's share is of what top-k kept
        if JOINT:
            of_top_k = by_top_k & False
            if joint_ptr is not None:
                of_top_k = by_top_k & (tl.load(joint_ptr + row) == 0)
        if AHEAD:  # of the row's kind
            top_k = tl.where(is_made_up, 20, top_k)
            top_p = tl.where(is_made_up, 0.9, top_p)
            min_p = tl.where(is_made_up, 0.1, min_p)  # all of them leave few candidates, as of most rows
        filtered = by_top_k | by_top_p | by_min_p
        undefined = undefined | (top_p != top_p) | (min_p != min_p)
        if not LOGPROBS:
            filtered = filtered & ((temperature < GREEDY_BELOW) == 0)
            if DRAWN:  # the first infinite one is kept
                filtered = filtered & ((highest != PLUS_INF) | undrawn)
    if LOGPROBS or FILTERS:
        row_mass = tl.full((), 0.0, tl.float32)
        wants_mass = undefined == 0
        if LOGPROBS:
            wants_mass = wants_mass & draws
        else:
            wants_mass = wants_mass & filtered & by_top_p & (of_top_k == 0)
        if sums_ptr is not None:  # noqa: SIM102, the one is for the compiler
            if wants_mass:
                sums = load_chunks(sums_ptr + at_chunks, num_chunks, 0.0, WIDTH, PARTS)
                _, row_mass = masses_of(keys, sums, top, scale)
        kept_mass = row_mass

    seed = row_i64(seed_at, seed_value, row)
    offset = row_i64(offset_at, offset_value, row)
    whole = tl.full((), 0, tl.int32)  # draws from the row itself, with refined noise
    equal = False
    in_rounds = tl.full((), 0, tl.int1)  # one draw from a nucleus
    full = tl.full((), 0, tl.int32)  # blocks that are kept and whose best scores count
    if (filtered == 0) & draws:
        for draw in range(num_samples):
            if DRAWN:
                tl.store(ids_ptr + draw, tl.where(undefined, -1, tl.load(winners_ptr + far * num_samples + draw)))
            else:
                slots = winners_ptr + (far * num_samples + draw) * blocks + block
                block_keys = tl.load(slots, mask=block < blocks, other=0)
                key = tl.max(block_keys, axis=0)
                token = (key & NO_TOKEN) ^ NO_TOKEN
                defined = (key != 0) & (key != NAN_KEY) & (undefined == 0)
                if defined & (key >> 31 == ORDERED_INF):
                    infinite = block_keys >> 31 == ORDERED_INF
                    mark = tl.load(marks_ptr + far * blocks + block, mask=infinite, other=MIXED)
                    finite = tl.where(
                        infinite, (mark == MIXED) | ((mark > MINUS_INF) & (mark < PLUS_INF)), block_keys != 0
                    )
                    defined = tl.max(finite.to(tl.int32), axis=0) != 0
                tl.store(ids_ptr + draw, tl.where(defined, token, -1))
                if defined & (temperature >= GREEDY_BELOW):  # a word 0: is it the best still?
                    draw_word = (draw | (stream << 24)).to(tl.uint32)
                    word = word_of(
                        token.to(tl.int32), draw_word, offset.to(tl.uint32), (offset >> 32).to(tl.uint32),
                        seed.to(tl.uint32), (seed >> 32).to(tl.uint32),
                    )  # fmt: skip
                    whole = tl.maximum(whole, (word == 0).to(tl.int32))
    if FILTERS:
        filtered = filtered & draws
        if filtered & undefined:
            for draw in range(num_samples):
                tl.store(ids_ptr + draw, tl.full((), -1, tl.int64))
            filtered = False
        if filtered:
            if DRAWN:
                if (highest == lowest_of_tokens(keys, vocab_size)) & ((by_top_k == 0) | (top_k > num_chunks)):
                    row_tokens = Tokens(
                        source, cand_keys, cand_ids, cand_masses, last, lowest, ID_BITS, top, scale, list_ptr
                    )
                    equal = all_equal(row_tokens, highest, 2 * WHOLE_TILE, HEAD, ENTRIES)
            else:
                equal = tl.min(((marks == highest) | (block >= blocks)).to(tl.int32), axis=0) != 0
        if equal:
            last = _kept_of_equal(vocab_size, top_k, top_p, min_p, by_top_k, by_top_p, of_top_k)
            if not DRAWN:
                full = last // (4 * COLUMNS * REPS)
            whole = whole * 0 + 1
        elif filtered:
            rest = (1.0 - top_p) * row_mass
            least = tl.full((), MINUS_INF + 1, tl.int32)  # no token of -inf is drawn
            if by_min_p & ((of_top_k & by_top_p) == 0):
                at_least = tl.log2(tl.minimum(min_p, 1.0)) - 0.01
                lowest_kept = top + at_least / scale - tl.minimum(tl.abs(top), LARGEST) * 1e-6
                least = tl.maximum(key_of(tl.where(top == float("inf"), top, lowest_kept)), least)
            if floors_ptr is not None:  # what is kept is not lower, and chunks that are lower cannot be read
                least = tl.maximum(least, tl.load(floors_ptr + far))
            target = row_mass * top_p * 1.00001  # as the search will ask for, and what rounding may take
            bound = least
            count = tl.full((), 0, tl.int32)
            attempts = tl.full((), 2, tl.int32)
            if TOP_P and not LOGPROBS:
                in_rounds = (num_samples == 1) & by_top_p & (by_top_k == 0)
                attempts += (in_rounds & (first >= 0)).to(tl.int32)
            while attempts > 0:
                # read again: registers for all of them would be one program less per multiprocessor
                keys = load_chunks(keys_ptr + at_chunks, num_chunks, NO_LOGIT, WIDTH, PARTS)
                if attempts == 3:
                    bound = tl.maximum(first_key, least)
                elif by_top_k:
                    bound = tl.maximum(kth_highest(keys, highest, top_k, num_chunks), least)
                    if bound == highest:  # so many ties: those of the lowest ids
                        keys = first_ties(keys, highest, top_k)
                elif sums_ptr is not None:  # noqa: SIM102
                    if by_top_p:
                        sums = load_chunks(sums_ptr + at_chunks, num_chunks, 0.0, WIDTH, PARTS)
                        masses, _ = masses_of(keys, sums, top, scale)
                        guess = tl.where(attempts == 2, 0.8, 0.2)
                        bound = tl.maximum(nucleus_bound(keys, masses, top, scale, guess * rest, vocab_size), least)
                most = num_chunks
                if TOP_P and not LOGPROBS:  # the row itself is read in the time that twice so many chunks take
                    most = tl.where(in_rounds, tl.where(attempts == 3, AT_FIRST, 2 * AT_FIRST), num_chunks)
                count, mass = gather(
                    source, keys, bound, most, list_ptr, cand_keys, cand_ids, cand_masses, top, scale, by_top_k == 0,
                    False, CAPACITY, GATHERED, HEAD, ENTRIES,
                )  # fmt: skip
                attempts -= 1
                if attempts == 2:
                    attempts = tl.where(count <= CAPACITY, 0, attempts)
                elif by_top_k | (bound <= least) | (mass >= target):
                    attempts = attempts * 0
                elif (attempts == 0) | (count > CAPACITY):  # too many above a bound that is still too high
                    attempts = attempts * 0
                    count = count * 0 + CAPACITY + 1
                    bound = least
            lowest = bound.to(tl.int64)
            if in_rounds & (count <= CAPACITY):
                if TOP_P and not LOGPROBS:
                    tokens = Tokens(
                        source, cand_keys, cand_ids, cand_masses, count, lowest, ID_BITS, top, scale, list_ptr
                    )
                    token = draw_in_rounds(
                        tokens, tl.where(first_key >= bound, first, -1), top_p, row_mass, min_p, temperature, seed,
                        offset, (stream << 24).to(tl.uint32), False, FEW, FEW, HEAD, ENTRIES,
                    )  # fmt: skip
                    tl.store(ids_ptr, token.to(tl.int64))
            elif count <= FEW:
                tokens = Tokens(source, cand_keys, cand_ids, cand_masses, count, lowest, ID_BITS, top, scale, list_ptr)
                kept_mass, first_kept = draw_from_few(
                    tokens, row_mass, top_k, top_p, min_p, by_top_k, by_top_p, of_top_k, temperature, seed, offset,
                    stream, ids_ptr, num_samples, FEW,
                )  # fmt: skip
            elif count <= CAPACITY:
                tokens = Tokens(source, cand_keys, cand_ids, cand_masses, count, lowest, ID_BITS, top, scale, list_ptr)
                limit = _limit(
                    tokens, highest, row_mass, top_k, top_p, min_p, by_top_k, by_top_p, of_top_k, False, FEW, TILE,
                    HEAD, ENTRIES,
                )  # fmt: skip
                least_mass = tl.minimum(min_p, 1.0)
                draw_from_candidates(
                    tokens, limit, least_mass, temperature, seed, offset, stream, ids_ptr, num_samples, TILE
                )
                if LOGPROBS:
                    kept_mass = mass_of_kept(tokens, limit, least_mass, False, TILE, HEAD, ENTRIES)
                    first_kept = place_in_row(limit, lowest, ID_BITS)
            else:
                whole = whole * 0 + 1
    if whole != 0:
        row_tokens = Tokens(source, cand_keys, cand_ids, cand_masses, last, lowest, ID_BITS, top, scale, list_ptr)
        if in_rounds:
            if TOP_P and not LOGPROBS:
                token = draw_in_rounds(
                    row_tokens, tl.where(first_key >= lowest, first, -1), top_p, row_mass, min_p, temperature, seed,
                    offset, (stream << 24).to(tl.uint32), True, 2 * WHOLE_TILE, WHOLE_TILE, HEAD, ENTRIES,
                )  # fmt: skip
                tl.store(ids_ptr, token.to(tl.int64))
        else:
            limit = tl.full((), 0, tl.int64)
            asks = True  # for the row's token without filters
            if FILTERS:
                asks = (by_top_k & (top_k <= DEFERRED_TOP_K)) == 0
                least_mass = tl.minimum(min_p, 1.0)
                if filtered & (equal == 0):
                    limit = _limit(
                        row_tokens, highest, row_mass, top_k, top_p, min_p, by_top_k, by_top_p, of_top_k, True, FEW,
                        WHOLE_TILE // 2, HEAD, ENTRIES,
                    )  # fmt: skip
            draw_from_row(
                row_tokens, limit, least_mass, full * (4 * COLUMNS * REPS), temperature, seed, offset, stream,
                winners_ptr + far * num_samples * blocks, blocks, full, ids_ptr, num_samples, asks, DRAWN, BLOCKS,
                WHOLE_TILE, HEAD, ENTRIES,
            )  # fmt: skip
            if LOGPROBS and FILTERS:
                if equal:
                    kept_mass = last.to(tl.float32)
                    first_kept = (highest.to(tl.int64) << 31) | ((last - 1) ^ NO_TOKEN).to(tl.int64)
                elif filtered:
                    first_kept = place_in_row(limit, lowest, ID_BITS)
                    kept_mass = mass_of_kept(row_tokens, limit, least_mass, True, WHOLE_TILE // 2, HEAD, ENTRIES)

    if raw_keys_ptr is not None:
        raw_keys = load_chunks(raw_keys_ptr + at_chunks, num_chunks, NO_LOGIT, WIDTH, PARTS)
        raw_sums = load_chunks(raw_sums_ptr + at_chunks, num_chunks, 0.0, WIDTH, PARTS)
        raw_highest = tl.max(highest_of(raw_keys), axis=0)
        _, raw_mass = masses_of(raw_keys, raw_sums, value_of(raw_highest), LOG2E)
        lse = log_sum_exp(raw_highest, raw_mass)
        if of_others:
            if lse_ptr is not None:
                tl.store(lse_ptr + row, lse)
            if given_ids is not None:
                write_given(source, given_ids + far * given_stride, given_ptr + far * num_given, num_given, lse, HEAD)
            if top_ids_ptr is not None:
                raw_source = LogitSource(
                    far, logits, logits_stride, vocab_size, bias, logit_scale, soft_cap, None, None, None, 0, 0, 0,
                    None, 0, 1.0, 0.0, 0.0, None, 0, None, None,
                )  # fmt: skip
                write_top(
                    raw_source, raw_keys, raw_highest, lse, list_ptr, cand_keys, cand_ids, cand_masses,
                    top_ids_ptr + far * num_top, top_logprobs_ptr + far * num_top, num_top, FEW, CAPACITY, GATHERED,
                    TILE, WHOLE_TILE, HEAD,
                )  # fmt: skip
        if logprobs_ptr is not None:  # noqa: SIM102, the one is for the compiler
            if draws:
                tl.debug_barrier()  # the tokens are there
                for draw in range(num_samples):
                    out = far * num_samples + draw
                    write_drawn(
                        source, tl.load(ids_ptr + draw), raw_keys, raw_highest, lse, top, scale, kept_mass, list_ptr,
                        logprobs_ptr + out, processed_ptr + out, ranks_ptr + out, GATHERED, HEAD, ENTRIES,
                    )  # fmt: skip
    if limits_ptr is not None:  # of no step with the above
        if FILTERS:
            least_mass = tl.where(filtered, tl.minimum(min_p, 1.0), least_mass)
        write_record(
            limits_ptr + row, masses_ptr + far * 4, first_kept, least_mass,
            tl.where(undefined, float("nan"), kept_mass), top, temperature, ids_ptr,
        )  # fmt: skip
