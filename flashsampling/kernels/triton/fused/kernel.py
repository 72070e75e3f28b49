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

``score_tiles`` is one function although it has three parts: Triton inlines functions to the same PTX except for debug
labels, but ptxas (12.8) schedules another way around these. Apart, at B = 64 (sm_90) 124 bytes are spilled, not 120.
"""

import triton.language as tl

from .... import exchange_protocol as protocol
from ..filtered.transforms import Rows
from ..jit import jit
from ..sharded.peer_exchange import active_ranks, conclude, receive, send, start_clock, steps_taken
from .exact_pass import run_exact_pass
from .noise import minus_gumbel, philox_words
from .packed_argmax import NAN_KEY, NO_TOKEN, ORDERED_INF, compute_score, keep_better, pack_key, token_word
from .row_params import LoadedRows, fenced, order_after, row_params, row_tags, score_params
from .tiles import (
    Matmul,
    ShardTokens,
    TileWalk,
    lane0_tokens,
    one_block,
    rows_in_chunk,
    second_piece_row,
    split_blocks,
    split_lanes,
    split_tokens,
    tile_logits,
)

_NO_FINITE = tl.constexpr(protocol.NO_FINITE)
_TOKENS = tl.constexpr(protocol.TOKENS)
_EXCHANGE = tl.constexpr(2)  # not TOKENS or PACKED: an exchange through the table


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
    shard,
    params,
):
    """Updates the running winners with 64 tokens, every second one of 128."""
    key_lo, key_hi, offset_lo, offset_hi = params.key_lo, params.key_hi, params.offset_lo, params.offset_hi
    pair = tl.arange(0, 4)[:, None] * 2 + odd  # bits 2, 1 and 0
    no_draw = tl.zeros((1, 1), tl.uint32)
    for sixteen in tl.static_range(4):  # bits 5 and 4
        group = order_after((shard.base + first_token) // 4 + 8 * sixteen + pair, ready, zero).to(tl.uint32)
        words = philox_words(group, no_draw, offset_lo, offset_hi, key_lo, key_hi)
        # ascending ids and a strict comparison: ties keep the lowest id
        for lane in tl.static_range(4):
            token = first_token + 16 * sixteen + (lane & 1) * 8 + (lane >> 1) * 64 + pair
            bias = tl.where((token >= shard.skip) & (token < shard.end), 0.0, float("-inf"))
            logit = logits[16 * odd + 8 * (lane >> 1) + 2 * sixteen + (lane & 1)]
            score = compute_score(logit, params.scale, bias, minus_gumbel(words[lane]), params.noise_factor)
            if lane < 2:
                lower, lower_id = keep_better(lower, lower_id, score, token)
            else:
                upper, upper_id = keep_better(upper, upper_id, score, token)
        ready = lower
    return lower, lower_id, upper, upper_id


@jit
def best_of_blocks_rows_on_m(best, best_id, blocks, first_token, ready, zero, shard, params):
    """Updates the winners (4, columns) of a chunk with its blocks of 128 tokens, where tokens are on N."""
    # tokens by their bits 0 and 6: in each the ids ascend
    b0 = tl.full(best.shape, float("-inf"), tl.float32)
    i0 = tl.full(best.shape, NO_TOKEN, tl.int32)
    b1, b2, b3, i1, i2, i3 = b0, b0, b0, i0, i0, i0
    for block in tl.static_range(len(blocks)):
        logits = split_tokens(blocks[block], blocks[block].shape[1])
        first = first_token + 128 * block
        b0, i0, b1, i1 = update_winners(logits, 0, ready, zero, b0, i0, b1, i1, first, shard, params)
        b2, i2, b3, i3 = update_winners(logits, 1, ready, zero, b2, i2, b3, i3, first, shard, params)
        ready = b0
    b0, i0 = better(b0, i0, b1, i1)
    b2, i2 = better(b2, i2, b3, i3)
    b0, i0 = better(b0, i0, b2, i2)
    return keep_better(best, best_id, b0, i0)


@jit
def best_of_blocks(best, best_id, blocks, group, token0, shard, params):
    """Updates the winners (32, columns) of a chunk with its blocks of 128 tokens, where tokens are on M."""
    no_draw = tl.zeros((1, 1), tl.uint32)
    for block in tl.static_range(len(blocks)):
        logits = split_lanes(blocks[block], 128, blocks[block].shape[1])
        words = philox_words(
            group + 32 * block, no_draw, params.offset_lo, params.offset_hi, params.key_lo, params.key_hi
        )
        token = token0 + 128 * block
        # ascending ids and a strict comparison: ties keep the lowest id
        for lane in tl.static_range(4):
            lane_token = token + (lane & 1) * 8 + (lane >> 1) * 64
            bias = tl.where((lane_token >= shard.skip) & (lane_token < shard.end), 0.0, float("-inf"))
            minus = minus_gumbel(words[lane])
            score = compute_score(logits[lane], params.scale, bias, minus, params.noise_factor)
            best, best_id = keep_better(best, best_id, score, lane_token)
    return best, best_id


@jit
def score_tiles(
    hidden, hidden_rest, matmul, rows, workspace_ptr, base, skip, num_samples, zero,
    ONE_DRAW: tl.constexpr, TILE: tl.constexpr, ROW_TENSORS: tl.constexpr,
):  # fmt: skip
    """Runs the fast pass, publishes its winners and runs the exact pass, over a program's tiles."""
    BLOCK_B: tl.constexpr = TILE.block_b
    REST_B: tl.constexpr = TILE.rest_b
    WIDTH: tl.constexpr = BLOCK_B + REST_B
    NARROW: tl.constexpr = REST_B if REST_B > 0 else 16  # columns that the exact pass of one draw takes at once
    batch = matmul.batch
    row_blocks = tl.cdiv(batch, WIDTH)
    row_block = tl.program_id(0) % row_blocks  # neighbours share a weight tile through L2
    first_tile = tl.program_id(0) // row_blocks
    stride = tl.num_programs(0) // row_blocks
    end = skip + matmul.vocab_size
    vocab_tiles = tl.cdiv(end, TILE.block_v)
    # the last row block starts early enough to be whole, and leaves the rows that it shares to the one before: loads of
    # rows beyond the batch cost more than loads of rows (H200, 128 columns of which 64 are beyond: 1.33 times the time)
    first_owned = row_block * WIDTH
    first_row = tl.maximum(tl.minimum(first_owned, batch - WIDTH), 0)
    second_row = second_piece_row(first_row, batch, TILE)
    shard = ShardTokens(base, skip, end)
    walk = TileWalk(first_row, second_row, first_owned, first_tile, vocab_tiles, stride)

    FIRST_BLOCK: tl.constexpr = one_block(TILE, BLOCK_B)
    NARROW_BLOCK: tl.constexpr = one_block(TILE, NARROW)
    if ONE_DRAW:
        CHUNK_B: tl.constexpr = TILE.chunk_b
        CHUNKS: tl.constexpr = BLOCK_B // CHUNK_B
        REST_CHUNKS: tl.constexpr = (REST_B + CHUNK_B - 1) // CHUNK_B
        ROW_BLOCKS: tl.constexpr = TILE.block_v // 128
        best = ()
        best_id = ()
        loaded = ()
        for c in tl.static_range(CHUNKS + REST_CHUNKS):
            chunk_rows = rows_in_chunk(first_row, second_row, c, TILE)
            row = tl.minimum(chunk_rows, batch - 1)[None, :]
            nothing = tl.full((4 if TILE.rows_on_m else 32, row.shape[1]), float("-inf"), tl.float32)
            best = best + (nothing,)
            best_id = best_id + (tl.full(nothing.shape, NO_TOKEN, tl.int32),)
            if TILE.preload:
                loaded = loaded + (row_params(rows, order_after(row, nothing, zero), ROW_TENSORS),)
        for tile in range(first_tile, vocab_tiles, stride):
            first_token = tile * TILE.block_v
            acc, rest = tile_logits(hidden, hidden_rest, matmul, first_token - shard.skip, first_row, second_row, TILE)
            blocks = split_blocks(acc, ROW_BLOCKS, CHUNKS)
            if REST_CHUNKS > 0:
                rest_blocks = split_blocks(rest, ROW_BLOCKS, REST_CHUNKS)
            group = ((shard.base + first_token) // 4 + tl.arange(0, 32))[:, None].to(tl.uint32)
            token0 = lane0_tokens(first_token, 128)
            new_best = ()
            new_id = ()
            done = best[0]
            for c in tl.static_range(CHUNKS + REST_CHUNKS):
                if c == CHUNKS:  # another width, so ``done`` needs another shape
                    done = best[c]
                if TILE.preload:
                    params = score_params(fenced(LoadedRows(*loaded[c])))  # a sum of tuples forgets the fields' names
                else:
                    row = tl.minimum(rows_in_chunk(first_row, second_row, c, TILE), batch - 1)[None, :]
                    params = score_params(row_params(rows, order_after(row, done, zero), ROW_TENSORS))
                if c < CHUNKS:
                    of_chunk = blocks[c::CHUNKS]
                else:
                    of_chunk = rest_blocks[c - CHUNKS :: REST_CHUNKS]
                if TILE.rows_on_m:
                    b, i = best_of_blocks_rows_on_m(
                        best[c], best_id[c], of_chunk, first_token, done, zero, shard, params
                    )
                else:
                    b, i = best_of_blocks(best[c], best_id[c], of_chunk, group, token0, shard, params)
                done = b
                new_best = new_best + (b,)
                new_id = new_id + (i,)
            best = new_best
            best_id = new_id
        ambiguous_blocks = 0  # a bit for each NARROW columns
        for c in tl.static_range(len(best)):
            key = tl.max(tl.where(best[c] != float("-inf"), pack_key(best[c], shard.base + best_id[c]), 0), axis=0)
            row = rows_in_chunk(first_row, second_row, c, TILE)
            params = row_params(rows, tl.minimum(row, batch - 1), ROW_TENSORS)
            token = ((key & NO_TOKEN) ^ NO_TOKEN).to(tl.int32)
            word = token_word(token, params.offset_lo, params.offset_hi, params.key_lo, params.key_hi)
            known = (row < batch) & (row >= first_owned) & (key != 0)
            ambiguous = known & ((key >> 31 == ORDERED_INF) | ((word == 0) & (key != NAN_KEY)))
            slot = workspace_ptr + row.to(tl.int64) * num_samples
            tl.atomic_max(slot, key, mask=known & (ambiguous == 0), sem="relaxed")
            bits = tl.where(ambiguous, 1 << ((row - first_row) // NARROW), 0)
            ambiguous_blocks = ambiguous_blocks | tl.reduce_or(bits, axis=0)
        for narrow in range(WIDTH // NARROW):
            if (ambiguous_blocks >> narrow) & 1 != 0:
                run_exact_pass(
                    hidden_rest, matmul, rows, workspace_ptr, first_row + narrow * NARROW, walk, shard, num_samples,
                    NARROW_BLOCK, ROW_TENSORS,
                )  # fmt: skip
    else:
        tl.static_assert(not TILE.halves, "several draws walk blocks of neighbouring rows")
        run_exact_pass(
            hidden, matmul, rows, workspace_ptr, first_row, walk, shard, num_samples, FIRST_BLOCK, ROW_TENSORS
        )
        if REST_B > 0:
            run_exact_pass(
                hidden_rest, matmul, rows, workspace_ptr, second_row, walk, shard, num_samples, NARROW_BLOCK,
                ROW_TENSORS,
            )  # fmt: skip


@jit
def write_results(
    rows, tokens_ptr, table, row, live, slots, inf_slots, batch, num_samples, row_blocks,
    ROW_TENSORS: tl.constexpr, EXCHANGE: tl.constexpr,
):  # fmt: skip
    """Turns the keys of a row block into token ids or packed winners, and exchanges these."""
    if EXCHANGE == _EXCHANGE:
        ranks = active_ranks(table)
        launches, number = steps_taken(table)
        param_hash, tag0, tag1 = row_tags(number, rows, tl.minimum(row, batch - 1), batch, num_samples, ROW_TENSORS)
        start_clock(table)
    for draw in range(num_samples):
        best_key = tl.atomic_xchg(slots + draw, 0, mask=live, sem="relaxed")
        inf_key = tl.atomic_xchg(inf_slots + draw, 0, mask=live, sem="relaxed")
        index = row.to(tl.int64) * num_samples + draw
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
            index = row.to(tl.int64) * num_samples + draw
            out, wrong_here, waited_since = receive(
                table, ranks, launches, number, index, live, tag0, tag1, waited_since
            )
            tl.store(tokens_ptr + index, out, mask=live)
            wrong += wrong_here.to(tl.int32)
        if wrong != 0:
            for draw in range(num_samples):
                index = row.to(tl.int64) * num_samples + draw
                tl.store(tokens_ptr + index, tl.full(index.shape, -1, tl.int64), mask=live)
        conclude(table, launches, row_blocks, tokens_ptr, batch.to(tl.int64) * num_samples)


@jit(
    structs={"rows": Rows},
    do_not_specialize=["batch", "vocab_size", "base", "skip", "num_samples", "hidden_stride", "table", "zero"],
    do_not_specialize_on_alignment=["hidden", "hidden_rest", "tokens_ptr", "workspace_ptr"],
)
def sample_kernel(
    hidden,  # (B, D), or its descriptor
    hidden_rest,  # (B, D), or its descriptor for the second block of columns and the exact pass, NARROW rows
    weight,  # (V, D), or its descriptor
    rows,
    tokens_ptr,  # (B, num_samples) int64, out
    workspace_ptr,  # int64, zero between launches: slots (2, B, num_samples), then a counter per block of rows
    batch,
    vocab_size,  # tokens of the shard
    base,  # see tiles.ShardTokens
    skip,  # tokens of the first Philox group that are not the shard's
    dim,
    num_samples,
    hidden_stride: tl.int64,
    weight_stride,
    table: tl.int64,  # address of an exchange's table, if EXCHANGE says so
    zero: tl.int32,  # 0: see order_after
    TILE: tl.constexpr,
    ONE_DRAW: tl.constexpr,
    ROW_TENSORS: tl.constexpr,  # no address of row parameters is 0
    EXCHANGE: tl.constexpr,
):
    """Runs the algorithm of the module's docstring. Grid: (programs per row block * row blocks,)."""
    WIDTH: tl.constexpr = TILE.block_b + TILE.rest_b
    matmul = Matmul(weight, batch, vocab_size, dim, hidden_stride, weight_stride)
    score_tiles(
        hidden, hidden_rest, matmul, rows, workspace_ptr, base, skip, num_samples, zero, ONE_DRAW, TILE, ROW_TENSORS
    )
    row_blocks = tl.cdiv(batch, WIDTH)
    row_block = tl.program_id(0) % row_blocks
    stride = tl.num_programs(0) // row_blocks
    first_owned = row_block * WIDTH
    row = first_owned + tl.arange(0, 2 * TILE.block_b if TILE.rest_b > 0 else TILE.block_b)
    live = (row < batch) & (row < first_owned + WIDTH)
    slots = workspace_ptr + row.to(tl.int64) * num_samples
    inf_slots = slots + batch.to(tl.int64) * num_samples
    counter = workspace_ptr + 2 * batch.to(tl.int64) * num_samples + row_block

    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if arrived == stride - 1:
        write_results(
            rows, tokens_ptr, table, row, live, slots, inf_slots, batch, num_samples, row_blocks, ROW_TENSORS, EXCHANGE
        )
        tl.atomic_xchg(counter, 0, sem="relaxed")
