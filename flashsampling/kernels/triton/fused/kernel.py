"""Samples in one Triton launch: LM-head matmul, noise, argmax and the reduction over tiles.

Tiles put the vocabulary on M and the batch on N of the tensor-core instruction; with ROWS_ON_M the other way round. The
grid is persistent: a program keeps one row block and walks every ``stride``-th vocabulary tile, so a score's rivals
meet in registers.

    fast pass     per tile: matmul, noise, running (score, id) per register. A NaN stays in the running score and is
                  published as one. A token with the Philox word 0, which needs the tail refinement, gets an upper bound
                  of its score, which is finite.
    exact pass    only for ambiguous rows: the fast pass's best is +inf (is there a finite score?), or a token whose
                  word is 0 (is it still the best?). The program walks its tiles again with the refined noise and every
                  case of the contract (``exact_pass``), for the few columns around such a row: 16 of 128 need an eighth
                  of the work. At B = 256, V = 151936 one program does so in about one step of a hundred; rows of NaN,
                  of zeros or of equal logits do not cause it.
    publish       one 64-bit key per row (order-preserving bits of the score, then the complement of the id) goes to the
                  row's slot by ``atomic_max``; maximum, ties and order of arrival are then one operation.
    finish        the last program of a row block, by a counter, turns keys into token ids and zeroes slots and counter
                  for the next launch or graph replay.

The fast pass has three epilogues. Without PRELOAD it goes through chunks of rows, in an order that
``row_params.order_after`` enforces: fewest registers, for small tiles of which several are resident. With PRELOAD the
rows' keys stay in registers over all tiles and nothing is ordered: for large tiles, one program per multiprocessor,
where latency hurts. With ROWS_ON_M a thread's logits belong to few rows, two of 128, whose parameters and winners take
few registers; the order is by sixteen tokens.

Memory order: a program's slot updates precede its counter increment (barrier, then acquire-release at GPU scope), so
the program that sees the last count sees every key.

The end of ``sample_kernel`` is not a function: Triton inlines it to the same PTX except for debug labels, but ptxas
(12.8) then allocates registers differently (B = 256 with an exchange, sm_90: 11740 of 12656 instructions; not timed).
"""

import triton.language as tl

from .... import exchange_protocol as protocol
from ..constant import Constant
from ..jit import jit
from ..sharded.peer_exchange import active_ranks, conclude, receive, send, start_clock, steps_taken
from .exact_pass import run_exact_pass
from .noise import minus_gumbel, philox_words, scheduling_fence
from .packed_argmax import NAN_KEY, NO_TOKEN, ORDERED_INF, compute_score, keep_better, pack_key, token_word
from .row_params import both_factors, order_after, row_params, row_tags
from .tiles import lane0_tokens, rows_in_chunk, second_piece_row, split_blocks, split_lanes, split_tokens, tile_logits

_NO_FINITE = Constant(protocol.NO_FINITE)
_TOKENS = Constant(protocol.TOKENS)
_EXCHANGE = Constant(2)  # not TOKENS or PACKED: an exchange through the table


@jit
def better(score, token, other, other_token):
    """Returns the better of two (score, id), elementwise: of equal scores the lower id; a NaN stays."""
    token = tl.where((other > score) | ((other == score) & (other_token < token)), other_token, token)
    return tl.maximum(score, other, propagate_nan=tl.PropagateNan.ALL), token


@jit
def update_winners(
    logits,  # 32 blocks (4, columns): see split_tokens
    odd: tl.constexpr,  # bit 0 of the tokens
    ready,  # (4, columns): see order_after; the noise of sixteen tokens at a time
    zero,
    lower,  # (4, columns): the running winner of tokens without bit 6, then its id
    lower_id,
    upper,  # the same for tokens with bit 6
    upper_id,
    first_token,
    base,
    skip,
    end,
    scale,
    noise_factor,
    key_lo,
    key_hi,
    offset_lo,
    offset_hi,
):
    """Updates the running winners with 64 tokens, every second one of 128."""
    pair = tl.arange(0, 4)[:, None] * 2 + odd  # bits 2, 1 and 0
    no_draw = tl.zeros((1, 1), tl.uint32)
    for sixteen in tl.static_range(4):  # bits 5 and 4
        group = order_after((base + first_token) // 4 + 8 * sixteen + pair, ready, zero).to(tl.uint32)
        words = philox_words(group, no_draw, offset_lo, offset_hi, key_lo, key_hi)
        # ascending ids and a strict comparison: ties keep the lowest id
        for lane in tl.static_range(4):
            token = first_token + 16 * sixteen + (lane & 1) * 8 + (lane >> 1) * 64 + pair
            bias = tl.where((token >= skip) & (token < end), 0.0, float("-inf"))
            logit = logits[16 * odd + 8 * (lane >> 1) + 2 * sixteen + (lane & 1)]
            score = compute_score(logit, scale, bias, minus_gumbel(words[lane]), noise_factor)
            if lane < 2:
                lower, lower_id = keep_better(lower, lower_id, score, token)
            else:
                upper, upper_id = keep_better(upper, upper_id, score, token)
        ready = lower
    return lower, lower_id, upper, upper_id


@jit(
    do_not_specialize=[
        "temperature_at", "temperature_value", "seed_at", "seed_value", "offset_at", "offset_value", "batch",
        "vocab_size", "base", "skip", "num_samples", "hidden_stride", "table", "zero",
    ],
    do_not_specialize_on_alignment=["hidden", "hidden_rest", "tokens_ptr", "workspace_ptr"],
)  # fmt: skip
def sample_kernel(
    hidden,  # (B, D), or its descriptor
    hidden_rest,  # (B, D), or its descriptor for the second block of columns and the exact pass, NARROW rows
    weight,  # (V, D), or its descriptor
    temperature_at: tl.int64,  # address of (B,) float32; 0: temperature_value for every row
    temperature_value: tl.float32,
    seed_at: tl.int64,  # address of (B,) int64; 0: seed_value
    seed_value: tl.int64,
    offset_at: tl.int64,  # address of (B,) int64; 0: offset_value
    offset_value: tl.int64,
    tokens_ptr,  # (B, num_samples) int64, out
    workspace_ptr,  # int64, zero between launches: slots (2, B, num_samples), then a counter per block of rows
    batch,
    vocab_size,  # tokens of the shard
    base,  # id of the first token of the shard's first Philox group: a multiple of 128
    skip,  # tokens of that group that are not the shard's
    dim,
    num_samples,
    hidden_stride: tl.int64,
    weight_stride,
    table: tl.int64,  # address of an exchange's table, if EXCHANGE says so
    zero: tl.int32,  # 0: see order_after
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    REST_B: tl.constexpr,  # columns of the second block, or 0
    HALVES: tl.constexpr,  # the first block is two halves: see second_piece_row
    BLOCK_D: tl.constexpr,
    CHUNK_B: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_D: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr,  # elements: the hidden states' rows start at multiples of it
    UPCAST: tl.constexpr,
    ROWS_ON_M: tl.constexpr,
    ONE_DRAW: tl.constexpr,
    PRELOAD: tl.constexpr,
    ROWS: tl.constexpr,  # BLOCK_B + REST_B, up to a power of two
    ROW_TENSORS: tl.constexpr,  # no address of row parameters is 0
    EXCHANGE: tl.constexpr,
):
    """Runs the algorithm of the module's docstring. Grid: (programs per row block * row blocks,)."""
    WIDTH: tl.constexpr = BLOCK_B + REST_B
    NARROW: tl.constexpr = REST_B if REST_B > 0 else 16  # columns that the exact pass of one draw takes at once
    row_blocks = tl.cdiv(batch, WIDTH)
    row_block = tl.program_id(0) % row_blocks  # neighbours share a weight tile through L2
    first_tile = tl.program_id(0) // row_blocks
    stride = tl.num_programs(0) // row_blocks
    end = skip + vocab_size
    vocab_tiles = tl.cdiv(end, BLOCK_V)
    # the last row block starts early enough to be whole, and leaves the rows that it shares to the one before: loads of
    # rows beyond the batch cost more than loads of rows (H200, 128 columns of which 64 are beyond: 1.33 times the time)
    first_owned = row_block * WIDTH
    first_row = tl.maximum(tl.minimum(first_owned, batch - WIDTH), 0)
    second_row = second_piece_row(first_row, batch, BLOCK_B, REST_B, HALVES)

    if ONE_DRAW:
        CHUNKS: tl.constexpr = BLOCK_B // CHUNK_B
        REST_CHUNK: tl.constexpr = CHUNK_B if CHUNK_B < REST_B else REST_B
        REST_CHUNKS: tl.constexpr = REST_B // REST_CHUNK if REST_B > 0 else 0
        best = ()
        best_id = ()
        params = ()
        for c in tl.static_range(CHUNKS + REST_CHUNKS):
            chunk_rows = rows_in_chunk(first_row, second_row, c, BLOCK_B, CHUNK_B, REST_CHUNK, HALVES)
            columns = tl.minimum(chunk_rows, batch - 1)[None, :]
            nothing = tl.full((4 if ROWS_ON_M else 32, columns.shape[1]), float("-inf"), tl.float32)
            best = best + (nothing,)
            best_id = best_id + (tl.full(nothing.shape, NO_TOKEN, tl.int32),)
            if PRELOAD:
                params = params + row_params(
                    order_after(columns, nothing, zero),
                    temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value, ROW_TENSORS,
                )  # fmt: skip
        no_draw = tl.zeros((1, 1), tl.uint32)
        for tile in range(first_tile, vocab_tiles, stride):
            first_token = tile * BLOCK_V
            acc, rest = tile_logits(
                hidden, hidden_rest, weight, first_token - skip, first_row, second_row, batch, vocab_size, dim,
                hidden_stride, weight_stride, BLOCK_V, BLOCK_B, REST_B, HALVES, BLOCK_D, USE_TMA, EVEN_D, ROW_ALIGNMENT,
                UPCAST, ROWS_ON_M,
            )  # fmt: skip
            blocks = split_blocks(acc, BLOCK_V // 128, CHUNKS)
            rest_blocks = ()
            if REST_B > 0:
                rest_blocks = split_blocks(rest, BLOCK_V // 128, REST_CHUNKS)
            group = ((base + first_token) // 4 + tl.arange(0, 32))[:, None].to(tl.uint32)
            token0 = lane0_tokens(first_token, 128)
            new_best = ()
            new_id = ()
            done = best[0]
            for c in tl.static_range(CHUNKS + REST_CHUNKS):
                if c == CHUNKS:  # another width, so ``done`` needs another shape
                    done = best[c]
                if PRELOAD:
                    factors = scheduling_fence(params[5 * c].to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
                    key_lo, key_hi = scheduling_fence(params[5 * c + 1]), scheduling_fence(params[5 * c + 2])
                    offset_lo, offset_hi = scheduling_fence(params[5 * c + 3]), scheduling_fence(params[5 * c + 4])
                else:
                    chunk_rows = rows_in_chunk(first_row, second_row, c, BLOCK_B, CHUNK_B, REST_CHUNK, HALVES)
                    columns = tl.minimum(chunk_rows, batch - 1)[None, :]
                    factors, key_lo, key_hi, offset_lo, offset_hi = row_params(
                        order_after(columns, done, zero),
                        temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value, ROW_TENSORS,
                    )  # fmt: skip
                scale, noise_factor = both_factors(factors)
                if ROWS_ON_M:
                    # tokens by their bits 0 and 6: in each the ids ascend
                    b0 = tl.full(best[c].shape, float("-inf"), tl.float32)
                    i0 = tl.full(best[c].shape, NO_TOKEN, tl.int32)
                    b1, b2, b3, i1, i2, i3 = b0, b0, b0, i0, i0, i0
                    ready = done
                    for block in tl.static_range(BLOCK_V // 128):
                        if c < CHUNKS:
                            tile_block = blocks[block * CHUNKS + c]
                        else:
                            tile_block = rest_blocks[block * REST_CHUNKS + c - CHUNKS]
                        logits = split_tokens(tile_block, tile_block.shape[1])
                        first = first_token + 128 * block
                        b0, i0, b1, i1 = update_winners(
                            logits, 0, ready, zero, b0, i0, b1, i1, first, base, skip, end, scale, noise_factor, key_lo,
                            key_hi, offset_lo, offset_hi,
                        )  # fmt: skip
                        b2, i2, b3, i3 = update_winners(
                            logits, 1, ready, zero, b2, i2, b3, i3, first, base, skip, end, scale, noise_factor, key_lo,
                            key_hi, offset_lo, offset_hi,
                        )  # fmt: skip
                        ready = b0
                    b0, i0 = better(b0, i0, b1, i1)
                    b2, i2 = better(b2, i2, b3, i3)
                    b0, i0 = better(b0, i0, b2, i2)
                    b, i = keep_better(best[c], best_id[c], b0, i0)
                    done = b
                    new_best = new_best + (b,)
                    new_id = new_id + (i,)
                else:
                    b, i = best[c], best_id[c]
                    for block in tl.static_range(BLOCK_V // 128):
                        if c < CHUNKS:
                            logits = split_lanes(blocks[block * CHUNKS + c], 128, CHUNK_B)
                        else:
                            logits = split_lanes(rest_blocks[block * REST_CHUNKS + c - CHUNKS], 128, REST_CHUNK)
                        words = philox_words(group + 32 * block, no_draw, offset_lo, offset_hi, key_lo, key_hi)
                        token = token0 + 128 * block
                        # ascending ids and a strict comparison: ties keep the lowest id
                        for lane in tl.static_range(4):
                            lane_token = token + (lane & 1) * 8 + (lane >> 1) * 64
                            bias = tl.where((lane_token >= skip) & (lane_token < end), 0.0, float("-inf"))
                            score = compute_score(logits[lane], scale, bias, minus_gumbel(words[lane]), noise_factor)
                            b, i = keep_better(b, i, score, lane_token)
                    done = b
                    new_best = new_best + (b,)
                    new_id = new_id + (i,)
            best = new_best
            best_id = new_id
        ambiguous_blocks = 0  # a bit for each NARROW columns
        for c in tl.static_range(CHUNKS + REST_CHUNKS):
            key = tl.max(tl.where(best[c] != float("-inf"), pack_key(best[c], base + best_id[c]), 0), axis=0)
            chunk_rows = rows_in_chunk(first_row, second_row, c, BLOCK_B, CHUNK_B, REST_CHUNK, HALVES)
            _, key_lo, key_hi, offset_lo, offset_hi = row_params(
                tl.minimum(chunk_rows, batch - 1),
                temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value, ROW_TENSORS,
            )  # fmt: skip
            word = token_word(((key & NO_TOKEN) ^ NO_TOKEN).to(tl.int32), offset_lo, offset_hi, key_lo, key_hi)
            known = (chunk_rows < batch) & (chunk_rows >= first_owned) & (key != 0)
            ambiguous = known & ((key >> 31 == ORDERED_INF) | ((word == 0) & (key != NAN_KEY)))
            slot = workspace_ptr + chunk_rows.to(tl.int64) * num_samples
            tl.atomic_max(slot, key, mask=known & (ambiguous == 0), sem="relaxed")
            ambiguous_blocks = ambiguous_blocks | tl.reduce_or(
                tl.where(ambiguous, 1 << ((chunk_rows - first_row) // NARROW), 0), axis=0
            )
        for narrow in range(WIDTH // NARROW):
            if (ambiguous_blocks >> narrow) & 1 != 0:
                run_exact_pass(
                    hidden_rest, weight, temperature_at, temperature_value, seed_at, seed_value, offset_at,
                    offset_value, workspace_ptr, first_row + narrow * NARROW, first_owned, first_tile, stride, batch,
                    vocab_size, base, skip, dim, num_samples, hidden_stride, weight_stride, BLOCK_V, NARROW, BLOCK_D,
                    USE_TMA, EVEN_D, ROW_ALIGNMENT, UPCAST, ROW_TENSORS,
                )  # fmt: skip
    else:
        tl.static_assert(not HALVES, "several draws walk blocks of neighbouring rows")
        run_exact_pass(
            hidden, weight, temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value,
            workspace_ptr, first_row, first_owned, first_tile, stride, batch, vocab_size, base, skip, dim, num_samples,
            hidden_stride, weight_stride, BLOCK_V, BLOCK_B, BLOCK_D, USE_TMA, EVEN_D, ROW_ALIGNMENT, UPCAST,
            ROW_TENSORS,
        )  # fmt: skip
        if REST_B > 0:
            run_exact_pass(
                hidden_rest, weight, temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value,
                workspace_ptr, second_row, first_owned, first_tile, stride, batch, vocab_size, base, skip, dim,
                num_samples, hidden_stride, weight_stride, BLOCK_V, REST_B, BLOCK_D, USE_TMA, EVEN_D, ROW_ALIGNMENT,
                UPCAST, ROW_TENSORS,
            )  # fmt: skip

    rows = first_owned + tl.arange(0, ROWS)
    live = (rows < batch) & (rows < first_owned + WIDTH)
    slots = workspace_ptr + rows.to(tl.int64) * num_samples
    inf_slots = slots + batch.to(tl.int64) * num_samples
    counter = workspace_ptr + 2 * batch.to(tl.int64) * num_samples + row_block

    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if arrived == stride - 1:
        if EXCHANGE == _EXCHANGE:
            ranks = active_ranks(table)
            launches, number = steps_taken(table)
            param_hash, tag0, tag1 = row_tags(
                number, tl.minimum(rows, batch - 1), batch, num_samples,
                temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value, ROW_TENSORS,
            )  # fmt: skip
            start_clock(table)
        for draw in range(num_samples):
            best_key = tl.atomic_xchg(slots + draw, 0, mask=live, sem="relaxed")
            inf_key = tl.atomic_xchg(inf_slots + draw, 0, mask=live, sem="relaxed")
            index = rows.to(tl.int64) * num_samples + draw
            if EXCHANGE == _TOKENS:
                winner = tl.where(inf_key != 0, inf_key, best_key)
                # a NaN, or no finite score at all
                undefined = (best_key == NAN_KEY) | (best_key == 0)
                out = tl.where(undefined, -1, (winner & NO_TOKEN) ^ NO_TOKEN)
            else:
                below = tl.where(best_key == 0, inf_key | _NO_FINITE, inf_key)
                out = tl.where((best_key == NAN_KEY) | ((inf_key == 0) & (best_key != 0)), best_key, below)
                if EXCHANGE == _EXCHANGE:
                    send(table, ranks, launches, index, live, out, param_hash, tag0, tag1)
            tl.store(tokens_ptr + index, out, mask=live)
        if EXCHANGE == _EXCHANGE:
            wrong = 0
            waited_since = launches * 0
            for draw in range(num_samples):
                index = rows.to(tl.int64) * num_samples + draw
                out, wrong_here, waited_since = receive(
                    table, ranks, launches, number, index, live, tag0, tag1, waited_since
                )
                tl.store(tokens_ptr + index, out, mask=live)
                wrong += wrong_here.to(tl.int32)
            if wrong != 0:
                for draw in range(num_samples):
                    index = rows.to(tl.int64) * num_samples + draw
                    tl.store(tokens_ptr + index, tl.full(index.shape, -1, tl.int64), mask=live)
            conclude(table, launches, row_blocks, tokens_ptr, batch.to(tl.int64) * num_samples)
        tl.atomic_xchg(counter, 0, sem="relaxed")
