"""The fused step in Triton: LM-head matmul, noise, argmax and the reduction over tiles in one launch.

Tiles put the vocabulary on M and the batch on N of the tensor-core instruction. The grid is persistent: a program keeps
one block of rows and walks every ``stride``-th vocabulary tile, so a score's rivals meet in registers:

    fast pass     per tile: matmul, noise, running (score, id) per register. Assumes the ordinary: finite logits and no
                  Philox word that needs the tail refinement. Whatever is not ordinary (NaN, +inf, the word 0, which the
                  fast noise maps to +inf) leaves a NaN or an infinity in the running score, and costs nothing to notice.
    careful pass  only if the fast pass met one of those: the program walks its tiles again with the refined noise and
                  every case of the contract told apart. At B = 256, V = 151936 about one step in a hundred has one
                  program that does.
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
from ...exchange import WHOLE, Shard
from ...workspace import zeroed_words
from ..device import multiprocessors
from .config import TileConfig, choose_config
from .exchange import receive, send
from .noise import INTERPRETED, REFINEMENT_BIT, minus_gumbel, minus_gumbel_refined, opaque, philox_words

_GREEDY_BELOW = tl.constexpr(1e-6)
_NO_TOKEN = tl.constexpr(protocol.NO_TOKEN)
_NAN_KEY = tl.constexpr(protocol.NAN)
_NO_FINITE = tl.constexpr(protocol.NO_FINITE)
_EXCHANGE = tl.constexpr(2)  # beside TOKENS and PACKED: through the table
_TOKENS = tl.constexpr(protocol.TOKENS)


@triton.jit
def _load_b64(ptr, index):
    """Low and high half of 64-bit elements."""
    if INTERPRETED:
        x = tl.load(ptr + index).to(tl.uint64, bitcast=True)
        return x.to(tl.uint32), (x >> 32).to(tl.uint32)
    return tl.inline_asm_elementwise(
        "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [ptr + index], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
    )


@triton.jit
def _load_f32(ptr, index):
    if INTERPRETED:
        return tl.load(ptr + index)
    return tl.inline_asm_elementwise(
        "ld.global.nc.f32 $0, [$1];", "=f,l", [ptr + index], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _row_params(
    rows,  # any shape, within the batch
    temperature_ptr,
    temperature_value,
    seed_ptr,
    seed_value,
    offset_ptr,
    offset_value,
):
    """Per-row scale (base 2), noise switch (0 or 1), Philox key (low, high) and offset (low, high), in the shape of rows.

    The loads are inline assembly because Triton would otherwise choose a layout for them, and reach the shape's own through
    shared memory.
    """
    if temperature_ptr is None:
        temperature = tl.full(rows.shape, temperature_value, tl.float32)
    else:
        temperature = _load_f32(temperature_ptr, rows)
    if seed_ptr is None:
        key_lo = tl.full(rows.shape, seed_value, tl.int64).to(tl.uint32)
        key_hi = tl.full(rows.shape, seed_value >> 32, tl.int64).to(tl.uint32)
    else:
        key_lo, key_hi = _load_b64(seed_ptr, rows)
    if offset_ptr is None:
        offset_lo = tl.full(rows.shape, offset_value, tl.int64).to(tl.uint32)
        offset_hi = tl.full(rows.shape, offset_value >> 32, tl.int64).to(tl.uint32)
    else:
        offset_lo, offset_hi = _load_b64(offset_ptr, rows)
    greedy = temperature < _GREEDY_BELOW
    scale = tl.where(greedy, 1.0, 1.4426950408889634 / tl.where(greedy, 1.0, temperature))
    return scale, tl.where(greedy, 0.0, 1.0), key_lo, key_hi, offset_lo, offset_hi


@triton.jit
def _tile_logits(
    hidden,  # descriptor of blocks (BLOCK_B, BLOCK_D), or pointer to (B, D)
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
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Logits of one tile in fp32, (BLOCK_V, BLOCK_B). k runs upwards in one chain: no split, the same sum in any tile."""
    acc = tl.zeros((BLOCK_V, BLOCK_B), dtype=tl.float32)
    if USE_TMA:
        for d in range(0, dim, BLOCK_D):
            w = weight.load([first_token, d])  # (BLOCK_V, BLOCK_D)
            h = hidden.load([first_row, d])  # (BLOCK_B, BLOCK_D)
            acc = tl.dot(w, h.T, acc)
    else:
        # rows past the end repeat the last one instead of a mask: their scores are dropped later
        tokens = tl.maximum(tl.minimum(first_token + tl.arange(0, BLOCK_V), vocab_size - 1), 0).to(tl.int64)
        rows = tl.minimum(first_row + tl.arange(0, BLOCK_B), batch - 1).to(tl.int64)
        dims = tl.arange(0, BLOCK_D)
        w_ptrs = weight + tokens[:, None] * weight_stride + dims[None, :]
        h_ptrs = hidden + rows[None, :] * hidden_stride + dims[:, None]
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
            w_ptrs += BLOCK_D
            h_ptrs += BLOCK_D
    return acc


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
def _score(logit, scale, bias, minus_noise, noise_on):
    """logit * scale + bias + noise, or without the noise in greedy rows. The operations are spelled out, so that every pass
    and every tile shape rounds alike."""
    return tl.fma(-minus_noise, noise_on, tl.fma(logit, scale, bias))


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
    noise_on,
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
        score = _score(lanes[lane], scale, 0.0, minus_noise, noise_on)
        key = _pack_key(score, base + token)
        sampled = (token >= skip) & (token < end)
        is_inf = score == float("inf")
        counts = sampled & (score != float("-inf")) & (score != float("inf"))  # finite, or NaN
        best = tl.maximum(best, tl.max(tl.where(counts, key, 0), axis=0))
        best_inf = tl.maximum(best_inf, tl.max(tl.where(sampled & is_inf, key, 0), axis=0))
    tl.atomic_max(slots, best, mask=live & (best != 0), sem="relaxed")
    tl.atomic_max(inf_slots, best_inf, mask=live & (best_inf != 0), sem="relaxed")


@triton.jit(
    do_not_specialize=[
        "batch", "vocab_size", "base", "skip", "num_samples", "temperature_value", "seed_value", "offset_value", "table", "zero"
    ]
)  # fmt: skip
def sample_kernel(
    hidden,  # (B, D), or its descriptor
    weight,  # (V, D), or its descriptor
    temperature_ptr,  # (B,) float32 or None: then temperature_value
    temperature_value: tl.float32,
    seed_ptr,  # (B,) int64 or None: then seed_value
    seed_value: tl.int64,
    offset_ptr,  # (B,) int64 or None: then offset_value
    offset_value: tl.int64,
    tokens_ptr,  # (B, num_samples) int64, out
    workspace_ptr,  # int64, zero between launches: slots (2, B, num_samples), then a counter per block of rows
    batch,
    vocab_size,  # tokens of the shard
    base,  # id of the first token of the shard's first Philox group: a multiple of 128
    skip,  # tokens of that group that are not the shard's
    dim,
    num_samples,
    hidden_stride,
    weight_stride,
    table: tl.int64,  # address of an exchange's table, if EXCHANGE says so
    zero: tl.int32,  # 0: see _after
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK_B: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_D: tl.constexpr,
    UPCAST: tl.constexpr,
    ONE_DRAW: tl.constexpr,
    PRELOAD: tl.constexpr,
    EXCHANGE: tl.constexpr,
):
    """See the module's docstring. Grid: (programs per block of rows * blocks of rows,)."""
    row_blocks = tl.cdiv(batch, BLOCK_B)
    row_block = tl.program_id(0) % row_blocks  # neighbours share a weight tile through L2
    first_tile = tl.program_id(0) // row_blocks
    stride = tl.num_programs(0) // row_blocks
    end = skip + vocab_size
    vocab_tiles = tl.cdiv(end, BLOCK_V)

    first_row = row_block * BLOCK_B
    rows = first_row + tl.arange(0, BLOCK_B)
    live = rows < batch
    slots = workspace_ptr + rows.to(tl.int64) * num_samples
    inf_slots = slots + batch.to(tl.int64) * num_samples
    counter = workspace_ptr + 2 * batch.to(tl.int64) * num_samples + row_block

    careful = True
    if ONE_DRAW:
        CHUNKS: tl.constexpr = BLOCK_B // CHUNK_B
        best = ()
        best_id = ()
        for _ in tl.static_range(CHUNKS):
            best = best + (tl.full((32, CHUNK_B), float("-inf"), tl.float32),)
            best_id = best_id + (tl.full((32, CHUNK_B), _NO_TOKEN, tl.int32),)
        params = ()
        if PRELOAD:
            for c in tl.static_range(CHUNKS):
                columns = tl.minimum(first_row + c * CHUNK_B + tl.arange(0, CHUNK_B), batch - 1)[None, :]
                params = params + _row_params(
                    _after(columns, best[c], zero),
                    temperature_ptr, temperature_value, seed_ptr, seed_value, offset_ptr, offset_value,
                )  # fmt: skip
        no_draw = tl.zeros((1, 1), tl.uint32)
        for tile in range(first_tile, vocab_tiles, stride):
            first_token = tile * BLOCK_V
            acc = _tile_logits(
                hidden, weight, first_token - skip, first_row, batch, vocab_size, dim, hidden_stride, weight_stride,
                BLOCK_V, BLOCK_B, BLOCK_D, USE_TMA, EVEN_D, UPCAST,
            )  # fmt: skip
            blocks = _split_blocks(acc, BLOCK_V // 128, CHUNKS)
            group = ((base + first_token) // 4 + tl.arange(0, 32))[:, None].to(tl.uint32)
            token0 = _lane0_tokens(first_token, 128)
            new_best = ()
            new_id = ()
            done = best[0]
            for c in tl.static_range(CHUNKS):
                if PRELOAD:
                    scale, noise_on = params[6 * c], params[6 * c + 1]
                    key_lo, key_hi = opaque(params[6 * c + 2]), opaque(params[6 * c + 3])
                    offset_lo, offset_hi = opaque(params[6 * c + 4]), opaque(params[6 * c + 5])
                else:
                    columns = tl.minimum(first_row + c * CHUNK_B + tl.arange(0, CHUNK_B), batch - 1)[None, :]
                    scale, noise_on, key_lo, key_hi, offset_lo, offset_hi = _row_params(
                        _after(columns, done, zero),
                        temperature_ptr, temperature_value, seed_ptr, seed_value, offset_ptr, offset_value,
                    )  # fmt: skip
                b, i = best[c], best_id[c]
                for block in tl.static_range(BLOCK_V // 128):
                    logits = _split_lanes(blocks[block * CHUNKS + c], 128, CHUNK_B)
                    words = philox_words(group + 32 * block, no_draw, offset_lo, offset_hi, key_lo, key_hi)
                    token = token0 + 128 * block
                    # ascending ids and a strict comparison: ties keep the lowest id
                    for lane in tl.static_range(4):
                        lane_token = token + (lane & 1) * 8 + (lane >> 1) * 64
                        bias = tl.where((lane_token >= skip) & (lane_token < end), 0.0, float("-inf"))
                        score = _score(logits[lane], scale, bias, minus_gumbel(words[lane]), noise_on)
                        b, i = _keep_better(b, i, score, lane_token)
                done = b
                new_best = new_best + (b,)
                new_id = new_id + (i,)
            best = new_best
            best_id = new_id
        careful = False
        for c in tl.static_range(CHUNKS):
            ordinary = best[c] < float("inf")  # false for +inf and for NaN
            careful = careful | (tl.min(tl.min(ordinary.to(tl.int32), axis=0), axis=0) == 0)
        if not careful:
            for c in tl.static_range(CHUNKS):
                row_best = tl.max(tl.where(best[c] > float("-inf"), _pack_key(best[c], base + best_id[c]), 0), axis=0)
                chunk_rows = first_row + c * CHUNK_B + tl.arange(0, CHUNK_B)
                slot = workspace_ptr + chunk_rows.to(tl.int64) * num_samples
                tl.atomic_max(slot, row_best, mask=(chunk_rows < batch) & (row_best != 0), sem="relaxed")
    if careful:
        scale, noise_on, key_lo, key_hi, offset_lo, offset_hi = _row_params(
            tl.minimum(rows, batch - 1)[None, :],
            temperature_ptr, temperature_value, seed_ptr, seed_value, offset_ptr, offset_value,
        )  # fmt: skip
        for tile in range(first_tile, vocab_tiles, stride):
            first_token = tile * BLOCK_V
            acc = _tile_logits(
                hidden, weight, first_token - skip, first_row, batch, vocab_size, dim, hidden_stride, weight_stride,
                BLOCK_V, BLOCK_B, BLOCK_D, USE_TMA, EVEN_D, UPCAST,
            )  # fmt: skip
            for draw in range(num_samples):
                _publish_careful(
                    acc, first_token, slots + draw, inf_slots + draw, live, base, skip, end, draw,
                    scale, noise_on, key_lo, key_hi, offset_lo, offset_hi, BLOCK_V, BLOCK_B,
                )  # fmt: skip

    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if arrived == stride - 1:
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
                    send(table, index, live, out)
            tl.store(tokens_ptr + index, out, mask=live)
        if EXCHANGE == _EXCHANGE:
            for draw in range(num_samples):
                index = rows.to(tl.int64) * num_samples + draw
                tl.store(tokens_ptr + index, receive(table, index, live), mask=live)
        tl.atomic_xchg(counter, 0, sem="relaxed")


def sample(
    hidden_states: Tensor,  # (B, D)
    weight: Tensor,  # (V, D), contiguous along D
    temperature: Tensor | float,  # (B,) float32
    seed: Tensor | int,  # (B,) int64
    offset: Tensor | int,  # (B,) int64
    num_samples: int,
    vocab_size: int,
    shard: Shard = WHOLE,
    config: TileConfig | None = None,
) -> Tensor:
    """(B * num_samples,) int64 token ids or packed winners, B > 0: one launch on the current stream of the current device."""
    if hidden_states.stride(1) != 1:
        hidden_states = hidden_states.contiguous()
    skip = shard.first_token % 128
    base = shard.first_token - skip
    if vocab_size == 0:  # a shard without a token: the launch has something to read, and samples none of it
        weight, skip = hidden_states, 0
    if config is None:
        config = choose_config(hidden_states, weight, num_samples)
    batch, dim = hidden_states.shape
    device = hidden_states.device
    token_ids = torch.empty(batch * num_samples, dtype=torch.int64, device=device)
    row_blocks = -(-batch // config.block_b)
    vocab_tiles = -(-(skip + vocab_size) // config.block_v)
    programs_per_row_block = max(1, min(vocab_tiles, config.ctas_per_sm * multiprocessors(device) // row_blocks))
    slots = 2 * batch * num_samples
    workspace = zeroed_words(slots + row_blocks, device)
    if config.use_tma:
        hidden = TensorDescriptor(hidden_states, hidden_states.shape, hidden_states.stride(), [config.block_b, config.block_d])
        weights = TensorDescriptor(weight, weight.shape, weight.stride(), [config.block_v, config.block_d])
    else:
        hidden, weights = hidden_states, weight
    temperature_ptr, temperature_value = (temperature, 0.0) if isinstance(temperature, Tensor) else (None, temperature)
    seed_ptr, seed_value = (seed, 0) if isinstance(seed, Tensor) else (None, seed)
    offset_ptr, offset_value = (offset, 0) if isinstance(offset, Tensor) else (None, offset)
    sample_kernel[(programs_per_row_block * row_blocks,)](
        hidden,
        weights,
        temperature_ptr,
        temperature_value,
        seed_ptr,
        seed_value,
        offset_ptr,
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
        BLOCK_D=config.block_d,
        CHUNK_B=config.chunk_b,
        USE_TMA=config.use_tma,
        EVEN_D=dim % config.block_d == 0,
        UPCAST=INTERPRETED.value,
        ONE_DRAW=num_samples == 1,
        PRELOAD=config.preload,
        EXCHANGE=shard.exchange if shard.exchange in (protocol.TOKENS, protocol.PACKED) else _EXCHANGE.value,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    return token_ids
