"""One launch of the Hopper kernel."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...step import PLAIN, Drawn, Step
from ...workspace import zeroed_words
from ..device import multiprocessors
from . import slots
from .cache import kernel_for
from .config import TILE_V, TileConfig, choose_config, copy_engine_reads, ctas_per_row_block


@functools.lru_cache(maxsize=4096)
def _plan(
    batch: int,
    dim: int,
    first_token: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    config: TileConfig | None,
    plain: bool = True,
) -> tuple[Callable[..., Any], int, int, int]:
    """The kernel, the blocks of rows, the CTAs per block, and by how many tokens the first cluster's tiles start before the
    first token: a dictionary's worth of host time per call. ``plain``: the kernel has no ``Features.logits``."""
    config = choose_config(batch, dim) if config is None else config
    skip = first_token % (TILE_V * config.cluster)
    ctas = ctas_per_row_block(config, batch, skip + vocab_size, multiprocessors(device))
    return kernel_for(dtype, config, not plain), -(-batch // config.block_b), ctas, skip


def run(step: Step, config: TileConfig | None = None, outputs: tuple[int, ...] = ()) -> Drawn:
    """See ``backends``: one launch, where nothing is asked for. ``config`` in place of the shape that is chosen. ``outputs``:
    ``arguments.Outputs``, of a kernel that writes them, which may make no draws at all: of one token nobody knows what."""
    if step.asked is not PLAIN:
        from . import asked  # which makes such launches

        return asked.run(step, config)
    hidden_states, weight, shard = step.hidden_states, step.weight, step.shard
    num_samples, vocab_size = step.num_samples, step.vocab_size
    batch, dim = hidden_states.shape
    device = hidden_states.device
    if not copy_engine_reads(hidden_states):
        padded = torch.empty((batch, -(-dim // 8) * 8), dtype=hidden_states.dtype, device=device)
        hidden_states = padded[:, :dim].copy_(hidden_states)
    tokens = torch.empty(batch * num_samples or 1, dtype=torch.int64, device=device)
    kernel, row_blocks, ctas, skip = _plan(
        batch, dim, shard.first_token, vocab_size, hidden_states.dtype, device, config, not outputs
    )
    base, end = shard.first_token - skip, skip + vocab_size
    if vocab_size == 0:  # a shard without a token: the launch has something to read, and samples none of it
        weight, skip, end = hidden_states, TILE_V, TILE_V
    workspace = zeroed_words(slots.words(batch * num_samples, row_blocks), device)
    kernel(  # in the order of arguments.LaunchArguments
        hidden_states.data_ptr(),
        # of a single row the stride is torch's business, but TMA wants a multiple of 16 bytes
        hidden_states.stride()[0] if batch > 1 else -(-dim // 8) * 8,
        weight.data_ptr(),
        weight.stride()[0] if vocab_size > 1 else -(-dim // 8) * 8,
        vocab_size or 1,
        dim,
        row_blocks,
        ctas,
        *step.row_arguments(),
        tokens,
        workspace.data_ptr(),
        batch,
        base,
        skip,
        end,
        num_samples,
        shard.exchange,
        *outputs,
    )
    return Drawn(tokens)
