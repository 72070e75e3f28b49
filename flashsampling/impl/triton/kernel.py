"""The fused step in Triton: LM-head matmul, noise, argmax and the reduction over tiles in one launch.

Tiles put the vocabulary on M and the batch on N of the tensor-core instruction. The grid is persistent: a program keeps
one block of rows and walks every ``stride``-th vocabulary tile, so a score's rivals meet in registers:

    fast pass     per tile: matmul, noise, running (score, id) per register. A NaN stays in the running score and is published
                  as one. Of a Philox word 0, which needs the tail refinement, the score is an upper bound, and finite.
    careful pass  only if the fast pass' best of a row is +inf (is there a finite score?) or a token whose word is 0 (is it
                  the best still?): the program walks its tiles again with the refined noise and every case of the
                  contract told apart. At B = 256, V = 151936 about one step in a hundred has one program that does; rows
                  of NaN, of zeros or of equal logits cause none.
    publish       one 64-bit key per row (order-preserving bits of the score, then the complement of the id) goes to the
                  row's slot by ``atomic_max``; max, ties and order of arrival are then one operation.
    finish        the last program of a block of rows, by a counter, turns keys into token ids and resets slots and
                  counter, so that the next launch, or the next replay of a graph, finds them zero.

The epilogue of the fast pass exists twice. Without PRELOAD it goes chunk by chunk of rows, in an order that ``_after``
enforces: least registers, for small tiles of which several are resident. With PRELOAD the rows' keys stay in registers over
all tiles and nothing is ordered: for large tiles, one program per multiprocessor, where latency is what hurts.

Memory order: a program's slot updates happen before its counter increment (barrier, then acquire-release at GPU scope),
so the program that sees the last count sees every key.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ... import exchange as protocol
from ...step import Drawn, Step
from ...workspace import zeroed_words
from ..device import multiprocessors
from .config import TileConfig, choose_config
from .exchange import active_ranks, conclude, details_and_tags, receive, send, start_clock, steps_taken
from .noise import INTERPRETED, REFINEMENT_BIT, minus_gumbel, minus_gumbel_refined, opaque, philox_words

_GREEDY_BELOW = tl.constexpr(1e-6)
_LN2 = tl.constexpr(0.6931471805599453)
_NO_TOKEN = tl.constexpr(protocol.NO_TOKEN)
_NAN_KEY = tl.constexpr(protocol.NAN)
_NO_FINITE = tl.constexpr(protocol.NO_FINITE)
_EXCHANGE = tl.constexpr(2)  # beside TOKENS and PACKED: through the table
_TOKENS = tl.constexpr(protocol.TOKENS)
_ORDERED_INF = tl.constexpr(0x7F800000 + 2**31)  # a key's high bits if its score is +inf


@triton.jit
def _load_b64(address, index, value, ROW_TENSORS: tl.constexpr):
    """Low and high half of 64-bit elements; of ``value`` where the address may be, and is, 0."""
    pointers = address + index.to(tl.int64) * 8
    if INTERPRETED:
        given = tl.full(index.shape, 1, tl.int1) & (address != 0)
        x = tl.load(pointers.to(tl.pointer_type(tl.int64)), mask=given, other=value)
        return x.to(tl.uint32), (x.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)
    if ROW_TENSORS:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [pointers], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s64 p, $4, 0; mov.b64 {$0, $1}, $3; @p ld.global.nc.v2.b32 {$0, $1}, [$2]; }",
        "=&r,=&r,l,l,l",
        [pointers, tl.full(index.shape, value, tl.int64), tl.full(index.shape, address, tl.int64)],
        dtype=(tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _load_f32(address, index, value, ROW_TENSORS: tl.constexpr):
    pointers = address + index.to(tl.int64) * 4
    if INTERPRETED:
        given = tl.full(index.shape, 1, tl.int1) & (address != 0)
        return tl.load(pointers.to(tl.pointer_type(tl.float32)), mask=given, other=value)
    if ROW_TENSORS:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s64 p, $3, 0; mov.f32 $0, $2; @p ld.global.nc.f32 $0, [$1]; }",
        "=&f,l,f,l",
        [pointers, tl.full(index.shape, value, tl.float32), tl.full(index.shape, address, tl.int64)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _row_params(
    rows,  # any shape, within the batch
    temperature_at,
    temperature_value,
    seed_at,
    seed_value,
    offset_at,
    offset_value,
    ROW_TENSORS: tl.constexpr,
):
    """Per-row factors of logit and noise in one number (see ``_factors``), Philox key (low, high) and offset (low, high), in
    the shape of rows.

    The loads are inline assembly because Triton would otherwise choose a layout for them, and reach the shape's own through
    shared memory.
    """
    temperature = _load_f32(temperature_at, rows, temperature_value, ROW_TENSORS)
    key_lo, key_hi = _load_b64(seed_at, rows, seed_value, ROW_TENSORS)
    offset_lo, offset_hi = _load_b64(offset_at, rows, offset_value, ROW_TENSORS)
    hot = temperature > 1.0
    # a NaN stays one: the row's scores are then NaN too
    noise_factor = tl.where(temperature < _GREEDY_BELOW, 0.0, temperature * _LN2)
    factors = tl.where(hot, -1.0 / tl.where(hot, temperature, 1.0), noise_factor)
    return factors, key_lo, key_hi, offset_lo, offset_hi


@triton.jit
def _row_tags(
    number,
    rows,  # (N,), within the batch
    batch,
    num_samples,
    temperature_at,
    temperature_value,
    seed_at,
    seed_value,
    offset_at,
    offset_value,
    ROW_TENSORS: tl.constexpr,
):
    """What an exchange compares of rows, in the step of that number: details and both tags."""
    temperature = _load_f32(temperature_at, rows, temperature_value, ROW_TENSORS)
    seed_lo, seed_hi = _load_b64(seed_at, rows, seed_value, ROW_TENSORS)
    offset_lo, offset_hi = _load_b64(offset_at, rows, offset_value, ROW_TENSORS)
    return details_and_tags(number, batch, num_samples, temperature, seed_lo, seed_hi, offset_lo, offset_hi)


@triton.jit
def _factors(factors):
    """Factor of the logit and of the base-2 noise.

    A score is ``logit / max(T, 1) + min(T, 1) * gumbel``, as the oracle's: ``logit / T + gumbel`` times ``min(T, 1)``, so no
    finite logit overflows at any temperature. One of the two factors is 1 or ln 2: the sign bit says which, the rest is the
    other, so a row takes one register over all tiles.
    """
    hot = factors.to(tl.int32, bitcast=True) < 0  # also of -0.0, an infinite temperature
    return tl.where(hot, -factors, 1.0), tl.where(hot, _LN2, factors)


@triton.jit
def _hidden_pointers(hidden, first_row, batch, hidden_stride, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK_D, BLOCK_B); rows past the end repeat the last one: their winners are not published."""
    rows = tl.minimum(first_row + tl.arange(0, BLOCK_B), batch - 1).to(tl.int64)
    return hidden + rows[None, :] * hidden_stride + tl.arange(0, BLOCK_D)[:, None]


@triton.jit
def _tile_logits(
    hidden,  # descriptor of blocks (BLOCK_B, BLOCK_D), or pointer to (B, D)
    hidden_rest,  # as hidden, for blocks (REST_B, BLOCK_D)
    weight,  # descriptor of blocks (BLOCK_V, BLOCK_D), or pointer to (V, D)
    first_token,  # row of the weight; below 0 in the first tile of a shard that does not start where a Philox group does
    first_row,
    batch,
    vocab_size,
    dim,
    hidden_stride,
    weight_stride,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    REST_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_D: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Logits of one tile in fp32, (BLOCK_V, BLOCK_B) and (BLOCK_V, REST_B or a placeholder's 16): two blocks of columns, one
    read of the weight. k runs upwards in one chain: no split, the same sum in any tile. Outside [0, vocab_size) the weight's
    rows read as zeros, whatever a padded vocabulary has there."""
    acc = tl.zeros((BLOCK_V, BLOCK_B), dtype=tl.float32)
    rest = tl.zeros((BLOCK_V, REST_B if REST_B > 0 else 16), dtype=tl.float32)
    if USE_TMA:
        for d in range(0, dim, BLOCK_D):
            w = weight.load([first_token, d])  # (BLOCK_V, BLOCK_D)
            h = hidden.load([first_row, d])  # (BLOCK_B, BLOCK_D)
            acc = tl.dot(w, h.T, acc)
            if REST_B > 0:
                h = hidden_rest.load([first_row + BLOCK_B, d])  # (REST_B, BLOCK_D)
                rest = tl.dot(w, h.T, rest)
    else:
        tokens = first_token + tl.arange(0, BLOCK_V)
        dims = tl.arange(0, BLOCK_D)
        if ROW_ALIGNMENT > 1:  # 16 bytes
            hidden_stride = tl.multiple_of(hidden_stride, ROW_ALIGNMENT)
            hidden = tl.multiple_of(hidden, 16)
        # what is outside reads a neighbour's row, and is dropped below
        w_rows = tl.maximum(tl.minimum(tokens, vocab_size - 1), 0).to(tl.int64)
        w_ptrs = weight + w_rows[:, None] * weight_stride + dims[None, :]
        h_ptrs = _hidden_pointers(hidden, first_row, batch, hidden_stride, BLOCK_B, BLOCK_D)
        if REST_B > 0:
            rest_ptrs = _hidden_pointers(hidden, first_row + BLOCK_B, batch, hidden_stride, REST_B, BLOCK_D)
        for d in range(0, dim, BLOCK_D):
            if EVEN_D:
                w = tl.load(w_ptrs)
                h = tl.load(h_ptrs)
            else:
                w = tl.load(w_ptrs, mask=dims[None, :] < dim - d, other=0.0)
                h = tl.load(h_ptrs, mask=dims[:, None] < dim - d, other=0.0)
            if UPCAST:
                w = w.to(tl.float32)
                h = h.to(tl.float32)
            acc = tl.dot(w, h, acc, input_precision="ieee")
            if REST_B > 0:
                if EVEN_D:
                    h = tl.load(rest_ptrs)
                else:
                    h = tl.load(rest_ptrs, mask=dims[:, None] < dim - d, other=0.0)
                if UPCAST:
                    h = h.to(tl.float32)
                rest = tl.dot(w, h, rest, input_precision="ieee")
                rest_ptrs += BLOCK_D
            w_ptrs += BLOCK_D
            h_ptrs += BLOCK_D
        inside = ((tokens >= 0) & (tokens < vocab_size))[:, None]
        acc = tl.where(inside, acc, 0.0)
        if REST_B > 0:
            rest = tl.where(inside, rest, 0.0)
    return acc, rest


@triton.jit
def _split_lanes(x, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr):
    """(BLOCK_V, BLOCK_B) by token -> four (BLOCK_V // 4, BLOCK_B) by Philox lane = bit 3 | bit 6 << 1 of the token id.

    In ``wgmma``'s accumulator with four warps the two bits are registers of one thread, so this moves nothing.
    """
    x = tl.reshape(x, (BLOCK_V // 128, 2, 4, 2, 8, BLOCK_B))  # token bits: 7 up | 6 | 5, 4 | 3 | 2..0
    x = tl.permute(x, (0, 2, 4, 5, 1, 3))
    x0, x1 = tl.split(x)  # bit 3
    lane0, lane2 = tl.split(x0)  # bit 6
    lane1, lane3 = tl.split(x1)
    return (
        tl.reshape(lane0, (BLOCK_V // 4, BLOCK_B)),
        tl.reshape(lane1, (BLOCK_V // 4, BLOCK_B)),
        tl.reshape(lane2, (BLOCK_V // 4, BLOCK_B)),
        tl.reshape(lane3, (BLOCK_V // 4, BLOCK_B)),
    )


@triton.jit
def _split_blocks(x, ROW_BLOCKS: tl.constexpr, COLUMN_BLOCKS: tl.constexpr):
    """(M, N) -> tuple of ROW_BLOCKS * COLUMN_BLOCKS neighbouring blocks, row by row; register bits again, nothing moves."""
    if ROW_BLOCKS > 1:
        upper, lower = tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))
        return _split_blocks(upper, ROW_BLOCKS // 2, COLUMN_BLOCKS) + _split_blocks(lower, ROW_BLOCKS // 2, COLUMN_BLOCKS)
    elif COLUMN_BLOCKS > 1:
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
        return _split_blocks(left, 1, COLUMN_BLOCKS // 2) + _split_blocks(right, 1, COLUMN_BLOCKS // 2)
    else:
        return (x,)


@triton.jit
def _lane0_tokens(first_token, BLOCK_V: tl.constexpr):
    """Token ids of lane 0 of a tile's groups, (BLOCK_V // 4, 1); lanes 1, 2, 3 lie 8, 64 and 72 above."""
    group = tl.arange(0, BLOCK_V // 4)
    return (first_token + (group & 7) + ((group >> 3) & 3) * 16 + (group >> 5) * 128)[:, None]


@triton.jit
def _after(rows, done, zero):
    """int32 row numbers, but not before ``done`` (float32, (M, N)) is known: ``zero`` is 0 at run time, which no compiler
    can know.

    It does two things. The noise does not depend on the logits, so without it the compiler starts the noise of every
    column at once, hoists ten round keys per row out of the tile loop, and spills. And the noise is computed in the
    register layout of ``done``, the logits' own, instead of in another one that every score leaves through shared memory.
    """
    return rows ^ (done.to(tl.int32, bitcast=True) & zero)


@triton.jit
def _score(logit, scale, bias, minus_noise, noise_factor):
    """logit * scale + bias + noise * noise_factor. The operations are spelled out, so that every pass and every tile shape
    rounds alike."""
    return tl.fma(-minus_noise, noise_factor, tl.fma(logit, scale, bias))


@triton.jit
def _keep_better(best, best_id, score, token):
    best_id = tl.where(score > best, token, best_id)
    return tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL), best_id


@triton.jit
def _pack_key(score, token):
    """Order-preserving 64-bit key: positive int64, greater for the greater score, then for the lower id; NaN above all."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0.0 and 0.0 tie
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2**31  # 0 .. 2**32 - 1
    # the score's low bit is kept: ids need 31 bits, so the key is 32 + 31 bits and never negative
    key = (ordered << 31) | (token ^ _NO_TOKEN).to(tl.int64)
    return tl.where(score != score, _NAN_KEY, key)


@triton.jit
def _word_of(token, offset_lo, offset_hi, key_lo, key_hi):
    """The Philox word of a token, draw 0: its group is the id less bits 3 and 6, and they are its lane."""
    group = (token & 7) | (((token >> 4) & 3) << 3) | ((token >> 7) << 5)
    no_draw = tl.zeros(token.shape, tl.uint32)
    words = philox_words(group.to(tl.uint32), no_draw, offset_lo, offset_hi, key_lo, key_hi)
    lower = tl.where((token & 8) == 0, words[0], words[1])
    upper = tl.where((token & 8) == 0, words[2], words[3])
    return tl.where((token & 64) == 0, lower, upper)


@triton.jit
def _publish_careful(
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
    """Publishes one tile with the refined noise and every special case told apart."""
    token0 = _lane0_tokens(first_token, BLOCK_V)
    group = ((base + first_token) // 4 + tl.arange(0, BLOCK_V // 4))[:, None].to(tl.uint32)
    stream_draw = tl.full((1, 1), draw, tl.uint32)
    words = philox_words(group, stream_draw, offset_lo, offset_hi, key_lo, key_hi)
    tails = philox_words(group, stream_draw | REFINEMENT_BIT, offset_lo, offset_hi, key_lo, key_hi)
    lanes = _split_lanes(acc, BLOCK_V, BLOCK_B)
    best = tl.zeros((BLOCK_B,), tl.int64)
    best_inf = tl.zeros((BLOCK_B,), tl.int64)
    for lane in tl.static_range(4):
        token = token0 + (lane & 1) * 8 + (lane >> 1) * 64
        minus_noise = minus_gumbel_refined(words[lane], tails[lane])
        score = _score(lanes[lane], scale, 0.0, minus_noise, noise_factor)
        key = _pack_key(score, base + token)
        sampled = (token >= skip) & (token < end)
        is_inf = score == float("inf")
        counts = sampled & (score != float("-inf")) & (score != float("inf"))  # finite, or NaN
        best = tl.maximum(best, tl.max(tl.where(counts, key, 0), axis=0))
        best_inf = tl.maximum(best_inf, tl.max(tl.where(sampled & is_inf, key, 0), axis=0))
    tl.atomic_max(slots, best, mask=live & (best != 0), sem="relaxed")
    tl.atomic_max(inf_slots, best_inf, mask=live & (best_inf != 0), sem="relaxed")


@triton.jit
def _chunk_rows(first_row, c: tl.constexpr, BLOCK_B: tl.constexpr, CHUNK_B: tl.constexpr, REST_CHUNK: tl.constexpr):
    """Rows of chunk c of a tile, (CHUNK_B,), or (REST_CHUNK,) in the second block of columns."""
    if c < BLOCK_B // CHUNK_B:
        return first_row + c * CHUNK_B + tl.arange(0, CHUNK_B)
    else:
        return first_row + BLOCK_B + (c - BLOCK_B // CHUNK_B) * REST_CHUNK + tl.arange(0, REST_CHUNK)


@triton.jit
def _walk_carefully(
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
    """The careful pass over a program's tiles, for one block of columns."""
    rows = first_row + tl.arange(0, BLOCK_B)
    live = (rows < batch) & (rows >= first_owned)
    slots = workspace_ptr + rows.to(tl.int64) * num_samples
    inf_slots = slots + batch.to(tl.int64) * num_samples
    end = skip + vocab_size
    factors, key_lo, key_hi, offset_lo, offset_hi = _row_params(
        tl.minimum(rows, batch - 1)[None, :],
        temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value, ROW_TENSORS,
    )  # fmt: skip
    scale, noise_factor = _factors(factors)
    for tile in range(first_tile, tl.cdiv(end, BLOCK_V), stride):
        first_token = tile * BLOCK_V
        acc, _ = _tile_logits(
            hidden, hidden, weight, first_token - skip, first_row, batch, vocab_size, dim, hidden_stride, weight_stride,
            BLOCK_V, BLOCK_B, 0, BLOCK_D, USE_TMA, EVEN_D, ROW_ALIGNMENT, UPCAST,
        )  # fmt: skip
        for draw in range(num_samples):
            _publish_careful(
                acc, first_token, slots + draw, inf_slots + draw, live, base, skip, end, draw,
                scale, noise_factor, key_lo, key_hi, offset_lo, offset_hi, BLOCK_V, BLOCK_B,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "temperature_at", "temperature_value", "seed_at", "seed_value", "offset_at", "offset_value", "batch", "vocab_size",
        "base", "skip", "num_samples", "hidden_stride", "table", "zero",
    ],
    do_not_specialize_on_alignment=["hidden", "hidden_rest", "tokens_ptr", "workspace_ptr"],
)  # fmt: skip
def sample_kernel(
    hidden,  # (B, D), or its descriptor
    hidden_rest,  # descriptor for the second block of columns; hidden again if there is none
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
    zero: tl.int32,  # 0: see _after
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    REST_B: tl.constexpr,  # columns of the second block, or 0
    BLOCK_D: tl.constexpr,
    CHUNK_B: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_D: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr,  # elements: the hidden states' rows start at multiples of it
    UPCAST: tl.constexpr,
    ONE_DRAW: tl.constexpr,
    PRELOAD: tl.constexpr,
    ROWS: tl.constexpr,  # BLOCK_B + REST_B, up to a power of two
    ROW_TENSORS: tl.constexpr,  # no address of row parameters is 0
    EXCHANGE: tl.constexpr,
):
    """See the module's docstring. Grid: (programs per block of rows * blocks of rows,)."""
    WIDTH: tl.constexpr = BLOCK_B + REST_B
    row_blocks = tl.cdiv(batch, WIDTH)
    row_block = tl.program_id(0) % row_blocks  # neighbours share a weight tile through L2
    first_tile = tl.program_id(0) // row_blocks
    stride = tl.num_programs(0) // row_blocks
    end = skip + vocab_size
    vocab_tiles = tl.cdiv(end, BLOCK_V)
    # the last block of rows starts early enough to be whole, and leaves the rows that it shares to the one before: loads of
    # rows beyond the batch cost more than those of rows (H200, 128 columns of which 64 are beyond it: 1.33 times the time)
    first_owned = row_block * WIDTH
    first_row = tl.maximum(tl.minimum(first_owned, batch - WIDTH), 0)

    careful = True
    if ONE_DRAW:
        CHUNKS: tl.constexpr = BLOCK_B // CHUNK_B
        REST_CHUNK: tl.constexpr = CHUNK_B if CHUNK_B < REST_B else REST_B
        REST_CHUNKS: tl.constexpr = REST_B // REST_CHUNK if REST_B > 0 else 0
        best = ()
        best_id = ()
        params = ()
        for c in tl.static_range(CHUNKS + REST_CHUNKS):
            columns = tl.minimum(_chunk_rows(first_row, c, BLOCK_B, CHUNK_B, REST_CHUNK), batch - 1)[None, :]
            nothing = tl.full((32, columns.shape[1]), float("-inf"), tl.float32)
            best = best + (nothing,)
            best_id = best_id + (tl.full(nothing.shape, _NO_TOKEN, tl.int32),)
            if PRELOAD:
                params = params + _row_params(
                    _after(columns, nothing, zero),
                    temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value, ROW_TENSORS,
                )  # fmt: skip
        no_draw = tl.zeros((1, 1), tl.uint32)
        for tile in range(first_tile, vocab_tiles, stride):
            first_token = tile * BLOCK_V
            acc, rest = _tile_logits(
                hidden, hidden_rest, weight, first_token - skip, first_row, batch, vocab_size, dim, hidden_stride,
                weight_stride, BLOCK_V, BLOCK_B, REST_B, BLOCK_D, USE_TMA, EVEN_D, ROW_ALIGNMENT, UPCAST,
            )  # fmt: skip
            blocks = _split_blocks(acc, BLOCK_V // 128, CHUNKS)
            rest_blocks = ()
            if REST_B > 0:
                rest_blocks = _split_blocks(rest, BLOCK_V // 128, REST_CHUNKS)
            group = ((base + first_token) // 4 + tl.arange(0, 32))[:, None].to(tl.uint32)
            token0 = _lane0_tokens(first_token, 128)
            new_best = ()
            new_id = ()
            done = best[0]
            for c in tl.static_range(CHUNKS + REST_CHUNKS):
                if PRELOAD:
                    factors = opaque(params[5 * c].to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
                    key_lo, key_hi = opaque(params[5 * c + 1]), opaque(params[5 * c + 2])
                    offset_lo, offset_hi = opaque(params[5 * c + 3]), opaque(params[5 * c + 4])
                else:
                    columns = tl.minimum(_chunk_rows(first_row, c, BLOCK_B, CHUNK_B, REST_CHUNK), batch - 1)[None, :]
                    if c == CHUNKS:  # another width, so ``done`` has another shape; nothing to wait for in its own
                        done = best[c]
                    factors, key_lo, key_hi, offset_lo, offset_hi = _row_params(
                        _after(columns, done, zero),
                        temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value, ROW_TENSORS,
                    )  # fmt: skip
                scale, noise_factor = _factors(factors)
                b, i = best[c], best_id[c]
                for block in tl.static_range(BLOCK_V // 128):
                    if c < CHUNKS:
                        logits = _split_lanes(blocks[block * CHUNKS + c], 128, CHUNK_B)
                    else:
                        logits = _split_lanes(rest_blocks[block * REST_CHUNKS + c - CHUNKS], 128, REST_CHUNK)
                    words = philox_words(group + 32 * block, no_draw, offset_lo, offset_hi, key_lo, key_hi)
                    token = token0 + 128 * block
                    # ascending ids and a strict comparison: ties keep the lowest id
                    for lane in tl.static_range(4):
                        lane_token = token + (lane & 1) * 8 + (lane >> 1) * 64
                        bias = tl.where((lane_token >= skip) & (lane_token < end), 0.0, float("-inf"))
                        score = _score(logits[lane], scale, bias, minus_gumbel(words[lane]), noise_factor)
                        b, i = _keep_better(b, i, score, lane_token)
                done = b
                new_best = new_best + (b,)
                new_id = new_id + (i,)
            best = new_best
            best_id = new_id
        careful = False
        for c in tl.static_range(CHUNKS + REST_CHUNKS):
            key = tl.max(tl.where(best[c] != float("-inf"), _pack_key(best[c], base + best_id[c]), 0), axis=0)
            chunk_rows = _chunk_rows(first_row, c, BLOCK_B, CHUNK_B, REST_CHUNK)
            _, key_lo, key_hi, offset_lo, offset_hi = _row_params(
                tl.minimum(chunk_rows, batch - 1),
                temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value, ROW_TENSORS,
            )  # fmt: skip
            word = _word_of(((key & _NO_TOKEN) ^ _NO_TOKEN).to(tl.int32), offset_lo, offset_hi, key_lo, key_hi)
            known = (chunk_rows < batch) & (chunk_rows >= first_owned) & (key != 0)
            doubtful = known & ((key >> 31 == _ORDERED_INF) | ((word == 0) & (key != _NAN_KEY)))
            slot = workspace_ptr + chunk_rows.to(tl.int64) * num_samples
            tl.atomic_max(slot, key, mask=known & (doubtful == 0), sem="relaxed")
            careful = careful | (tl.max(doubtful.to(tl.int32), axis=0) != 0)
    if careful:
        _walk_carefully(
            hidden, weight, temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value, workspace_ptr,
            first_row, first_owned, first_tile, stride, batch, vocab_size, base, skip, dim, num_samples, hidden_stride,
            weight_stride, BLOCK_V, BLOCK_B, BLOCK_D, USE_TMA, EVEN_D, ROW_ALIGNMENT, UPCAST, ROW_TENSORS,
        )  # fmt: skip
        if REST_B > 0:
            _walk_carefully(
                hidden_rest, weight, temperature_at, temperature_value, seed_at, seed_value, offset_at, offset_value,
                workspace_ptr, first_row + BLOCK_B, first_owned, first_tile, stride, batch, vocab_size, base, skip, dim,
                num_samples, hidden_stride, weight_stride, BLOCK_V, REST_B, BLOCK_D, USE_TMA, EVEN_D, ROW_ALIGNMENT, UPCAST,
                ROW_TENSORS,
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
            details, tag0, tag1 = _row_tags(
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
                undefined = (best_key == _NAN_KEY) | (best_key == 0)
                out = tl.where(undefined, -1, (winner & _NO_TOKEN) ^ _NO_TOKEN)
            else:
                below = tl.where(best_key == 0, inf_key | _NO_FINITE, inf_key)
                out = tl.where((best_key == _NAN_KEY) | ((inf_key == 0) & (best_key != 0)), best_key, below)
                if EXCHANGE == _EXCHANGE:
                    send(table, ranks, launches, index, live, out, details, tag0, tag1)
            tl.store(tokens_ptr + index, out, mask=live)
        if EXCHANGE == _EXCHANGE:
            wrong = 0
            waited_since = launches * 0
            for draw in range(num_samples):
                index = rows.to(tl.int64) * num_samples + draw
                out, wrong_here, waited_since = receive(table, ranks, launches, number, index, live, tag0, tag1, waited_since)
                tl.store(tokens_ptr + index, out, mask=live)
                wrong += wrong_here.to(tl.int32)
            if wrong != 0:
                for draw in range(num_samples):
                    index = rows.to(tl.int64) * num_samples + draw
                    tl.store(tokens_ptr + index, tl.full(index.shape, -1, tl.int64), mask=live)
            conclude(table, launches, row_blocks, tokens_ptr, batch.to(tl.int64) * num_samples)
        tl.atomic_xchg(counter, 0, sem="relaxed")


def _aligned_rows(hidden_states: Tensor) -> Tensor:
    """The hidden states, or a copy of them, with rows that are contiguous and start at multiples of 16 bytes."""
    (batch, dim), (rows_apart, along_d) = hidden_states.shape, hidden_states.stride()
    unit = 16 // hidden_states.element_size()
    if along_d == 1 and rows_apart % unit == 0 and rows_apart > 0 and hidden_states.data_ptr() % 16 == 0:
        return hidden_states
    padded = torch.empty((batch, -(-dim // unit) * unit), dtype=hidden_states.dtype, device=hidden_states.device)
    return padded[:, :dim].copy_(hidden_states)


def run(step: Step, config: TileConfig | None = None) -> Drawn:
    """See ``backends``: one launch. ``config`` in place of the shape that is chosen."""
    hidden_states, weight, num_samples, vocab_size, shard = (
        step.hidden_states,
        step.weight,
        step.num_samples,
        step.vocab_size,
        step.shard,
    )
    temperature, seed, offset = step.temperature, step.seed, step.offset
    batch, dim = hidden_states.shape
    device = hidden_states.device
    if config is None:
        config = choose_config(hidden_states, weight, num_samples)
    # one class of alignment per D: what Triton specialises on is then decided by the weight
    row_alignment = 16 // hidden_states.element_size()
    if config.use_tma or dim % row_alignment == 0:
        hidden_states = _aligned_rows(hidden_states)
    else:
        row_alignment = 1
        if hidden_states.stride(1) != 1:
            hidden_states = hidden_states.contiguous()
    skip = shard.first_token % 128
    base = shard.first_token - skip
    if vocab_size == 0:  # a shard without a token: the launch has something to read, and samples none of it
        weight, skip = hidden_states, 0
    token_ids = torch.empty(batch * num_samples, dtype=torch.int64, device=device)
    row_blocks = -(-batch // config.columns)
    vocab_tiles = -(-(skip + vocab_size) // config.block_v)
    programs_per_row_block = max(1, min(vocab_tiles, config.ctas_per_sm * multiprocessors(device) // row_blocks))
    slots = 2 * batch * num_samples
    workspace = zeroed_words(slots + row_blocks, device)
    hidden, hidden_rest, weights = hidden_states, hidden_states, weight
    if config.use_tma:
        shape, stride, depth = hidden_states.shape, hidden_states.stride(), config.block_d
        hidden = hidden_rest = TensorDescriptor(hidden_states, shape, stride, [config.block_b, depth])
        if config.rest_b:
            hidden_rest = TensorDescriptor(hidden_states, shape, stride, [config.rest_b, depth])
        # rows outside the vocabulary read as zeros, and nothing of a padded one is read
        weights = TensorDescriptor(weight, [max(vocab_size, 1), dim], weight.stride(), [config.block_v, depth])
    temperature_at, temperature_value = (temperature.data_ptr(), 0.0) if isinstance(temperature, Tensor) else (0, temperature)
    seed_at, seed_value = (seed.data_ptr(), 0) if isinstance(seed, Tensor) else (0, seed)
    offset_at, offset_value = (offset.data_ptr(), 0) if isinstance(offset, Tensor) else (0, offset)
    sample_kernel[(programs_per_row_block * row_blocks,)](
        hidden,
        hidden_rest,
        weights,
        temperature_at,
        temperature_value,
        seed_at,
        seed_value,
        offset_at,
        offset_value,
        token_ids,
        workspace,
        batch,
        vocab_size,
        base,
        skip,
        dim,
        num_samples,
        hidden_states.stride(0),
        weight.stride(0),
        shard.exchange,
        0,
        BLOCK_V=config.block_v,
        BLOCK_B=config.block_b,
        REST_B=config.rest_b,
        BLOCK_D=config.block_d,
        CHUNK_B=config.chunk_b,
        USE_TMA=config.use_tma,
        EVEN_D=dim % config.block_d == 0,
        ROW_ALIGNMENT=row_alignment,
        UPCAST=INTERPRETED.value,
        ONE_DRAW=num_samples == 1,
        PRELOAD=config.preload,
        ROWS=1 << (config.columns - 1).bit_length(),
        ROW_TENSORS=temperature_at != 0 and seed_at != 0 and offset_at != 0,
        EXCHANGE=shard.exchange if shard.exchange in (protocol.TOKENS, protocol.PACKED) else _EXCHANGE.value,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    return Drawn(token_ids)
