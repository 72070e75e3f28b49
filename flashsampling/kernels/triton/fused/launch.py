"""Launches the fused Triton kernel."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .... import exchange_protocol as protocol
from ....inputs import SampleInputs
from ....outputs import SampleResult
from ....workspace import zeroed_words
from ...device import multiprocessors
from ..filtered.transforms import Rows
from .config import TritonTileConfig, choose_config
from .kernel import _EXCHANGE, sample_kernel
from .noise import INTERPRETED
from .tiles import TileShape


def _aligned_rows(hidden_states: Tensor) -> Tensor:
    """Returns the hidden states, or a copy whose rows are contiguous and start at multiples of 16 bytes."""
    (batch, dim), (rows_apart, along_d) = hidden_states.shape, hidden_states.stride()
    unit = 16 // hidden_states.element_size()
    if along_d == 1 and rows_apart % unit == 0 and rows_apart > 0 and hidden_states.data_ptr() % 16 == 0:
        return hidden_states
    padded = torch.empty((batch, -(-dim // unit) * unit), dtype=hidden_states.dtype, device=hidden_states.device)
    return padded[:, :dim].copy_(hidden_states)


class Operands(NamedTuple):
    """The two matrices as kernels take them, and the tile that kernels are compiled for."""

    # hidden states, the same in blocks of ``narrow`` rows, weight: tensors or descriptors
    matrices: tuple[Any, Any, Any]
    strides: tuple[int, int]  # elements between rows of hidden states and of the weight
    tile: TileShape


def tile_shape(config: TritonTileConfig, dim: int, row_alignment: int) -> TileShape:
    """Returns the constant of a shape's kernels. ``row_alignment``: in elements, of the hidden states' rows."""
    return TileShape(
        config.block_v, config.block_b, config.rest_b, config.halves, config.block_d, config.chunk_b, config.preload,
        config.use_tma, dim % config.block_d == 0, row_alignment, INTERPRETED.value, config.rows_on_m,
    )  # fmt: skip


def tile_operands(hidden_states: Tensor, weight: Tensor, vocab_size: int, config: TritonTileConfig) -> Operands:
    """Returns the operands of a launch in tiles of a shape."""
    dim = hidden_states.shape[1]
    # one class of alignment per D: Triton then specialises on the weight alone
    row_alignment = 16 // hidden_states.element_size()
    if config.use_tma or dim % row_alignment == 0:
        hidden_states = _aligned_rows(hidden_states)
    else:
        row_alignment = 1
        if hidden_states.stride(1) != 1:
            hidden_states = hidden_states.contiguous()
    if vocab_size == 0:  # a shard without tokens: the launch reads something, and samples nothing
        weight = hidden_states
    hidden, hidden_rest, weights = hidden_states, hidden_states, weight
    if config.use_tma:
        shape, stride, depth = hidden_states.shape, hidden_states.stride(), config.block_d
        hidden = hidden_rest = TensorDescriptor(hidden_states, shape, stride, [config.block_b, depth])
        if config.narrow != config.block_b:
            hidden_rest = TensorDescriptor(hidden_states, shape, stride, [config.narrow, depth])
        if config.halves:  # the second half starts this far behind the first, and ends with the batch
            half = config.block_b // 2
            assert half < shape[0] <= config.block_b
            strides = [(shape[0] - half) * stride[0], *stride]
            hidden = TensorDescriptor(hidden_states, [2, half, dim], strides, [2, half, depth])
        # rows outside the vocabulary read as zeros; padding of the weight is not read
        weights = TensorDescriptor(weight, [max(vocab_size, 1), dim], weight.stride(), [config.block_v, depth])
    tile = tile_shape(config, dim, row_alignment)
    return Operands((hidden, hidden_rest, weights), (hidden_states.stride(0), weight.stride(0)), tile)


def programs(batch: int, tokens: int, config: TritonTileConfig, device: torch.device) -> tuple[int, int]:
    """Returns the number of programs per row block and of row blocks. In all they are at most as many as the device
    holds at once."""
    row_blocks = -(-batch // config.columns)
    tiles = -(-tokens // config.block_v)
    return max(1, min(tiles, config.ctas_per_sm * multiprocessors(device) // row_blocks)), row_blocks


def run(step: SampleInputs, config: TritonTileConfig | None = None) -> SampleResult:
    """Runs a step in one launch (``backends``). ``config`` replaces the chosen shape."""
    shard, num_samples, vocab_size = step.shard, step.num_samples, step.vocab_size
    batch, dim = step.hidden_states.shape
    device = step.hidden_states.device
    if config is None:
        config = choose_config(step.hidden_states, step.weight, num_samples)
    operands = tile_operands(step.hidden_states, step.weight, vocab_size, config)
    skip = shard.first_token % 128 if vocab_size else 0
    token_ids = torch.empty(batch * num_samples, dtype=torch.int64, device=device)
    programs_per_row_block, row_blocks = programs(batch, skip + vocab_size, config, device)
    slots = 2 * batch * num_samples
    workspace = zeroed_words(slots + row_blocks, device)
    rows = Rows(*step.row_arguments())
    sample_kernel[(programs_per_row_block * row_blocks,)](
        *operands.matrices, rows, token_ids, workspace, batch, vocab_size,
        shard.first_token - shard.first_token % 128, skip, dim, num_samples, *operands.strides, shard.exchange, 0,
        operands.tile, ONE_DRAW=num_samples == 1, ROW_TENSORS=all(rows[::2]),
        EXCHANGE=shard.exchange if shard.exchange in (protocol.TOKENS, protocol.PACKED) else _EXCHANGE.value,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers,
    )  # fmt: skip
    return SampleResult(token_ids)
