"""Multiplies hidden states and weight and stores the logits, for steps that need a row's logits more than once.

It uses the tiles of ``kernel``, so a logit is the same bits in any batch. A program keeps one row block, as there.
"""

import torch
import triton.language as tl
from torch import Tensor

from ..jit import jit
from .config import TritonTileConfig, choose_config
from .launch import programs, tile_operands
from .tiles import Matmul, rows_in_block, second_piece_row, tile_logits


@jit
def _store(out, out_stride, tile, first_token, rows, first_owned, batch, vocab_size):
    """Stores a tile (tokens, rows) transposed, row by row."""
    tokens = first_token + tl.arange(0, tile.shape[0])[:, None]
    rows = rows[None, :]
    wanted = (tokens < vocab_size) & (rows < batch) & (rows >= first_owned)
    tl.store(out + rows.to(tl.int64) * out_stride + tokens, tile, mask=wanted)


@jit(
    do_not_specialize=["batch", "vocab_size", "hidden_stride"],
    do_not_specialize_on_alignment=["hidden", "hidden_rest"],
)
def logits_gemm_kernel(
    hidden,  # (B, D), or its descriptor
    hidden_rest,  # (B, D), or its descriptor for the second block of columns, if there is one
    weight,  # (V, D), or its descriptor
    out,  # (B, V) float32
    batch,
    vocab_size,
    dim,
    hidden_stride: tl.int64,
    weight_stride,
    out_stride: tl.int64,
    TILE: tl.constexpr,
):
    """Computes logits with the tiles of ``kernel.sample_kernel``. Grid: (programs per row block * row blocks,)."""
    WIDTH: tl.constexpr = TILE.block_b + TILE.rest_b
    row_blocks = tl.cdiv(batch, WIDTH)
    row_block = tl.program_id(0) % row_blocks
    first_owned = row_block * WIDTH
    first_row = tl.maximum(tl.minimum(first_owned, batch - WIDTH), 0)
    second_row = second_piece_row(first_row, batch, TILE)
    rows = rows_in_block(first_row, second_row, TILE)
    matmul = Matmul(weight, batch, vocab_size, dim, hidden_stride, weight_stride)
    tiles = tl.cdiv(vocab_size, TILE.block_v)
    for tile in range(tl.program_id(0) // row_blocks, tiles, tl.num_programs(0) // row_blocks):
        first_token = tile * TILE.block_v
        acc, rest = tile_logits(hidden, hidden_rest, matmul, first_token, first_row, second_row, TILE)
        _store(out, out_stride, acc, first_token, rows, first_owned, batch, vocab_size)
        if TILE.rest_b > 0:
            rest_rows = second_row + tl.arange(0, TILE.rest_b)
            _store(out, out_stride, rest, first_token, rest_rows, first_owned, batch, vocab_size)


def logits_gemm(
    hidden_states: Tensor,  # (B, D)
    weight: Tensor,  # (V, D)
    vocab_size: int,
    config: TritonTileConfig | None = None,
) -> Tensor:
    """Returns logits (B, vocab_size) float32, rows a multiple of 16 bytes apart, in one launch. ``config`` replaces the
    chosen shape."""
    batch = hidden_states.shape[0]
    config = choose_config(hidden_states, weight, 1) if config is None else config
    operands = tile_operands(hidden_states, weight, vocab_size, config)
    programs_per_row_block, row_blocks = programs(batch, vocab_size, config, weight.device)
    out = torch.empty((batch, -(-vocab_size // 4) * 4), dtype=torch.float32, device=weight.device)
    logits_gemm_kernel[(programs_per_row_block * row_blocks,)](
        *operands.matrices,
        out,
        batch,
        vocab_size,
        weight.shape[1],
        *operands.strides,
        out.stride(0),
        operands.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    return out[:, :vocab_size]
