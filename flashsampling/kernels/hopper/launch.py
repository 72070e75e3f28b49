"""Launches the Hopper kernel once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...inputs import SampleInputs
from ...outputs import SampleResult
from ...sampling_params import DEFAULT_PARAMS
from ...workspace import zeroed_words
from ..device import multiprocessors
from . import workspace_layout
from .cache import kernel_for
from .config import KINDS, TILE_V, Features, TileConfig, choose_config, copy_engine_reads, ctas_per_row_block, skipped

_PLAIN = KINDS["plain"]


class _Plan(NamedTuple):
    """The values that all launches of a problem share."""

    kernel: Callable[..., Any]
    row_blocks: int
    ctas: int  # per block of rows
    base: int  # base, skip and end: see arguments.Arguments
    skip: int
    end: int
    words: int  # of the workspace


@functools.lru_cache(maxsize=4096)
def _plan(
    batch: int,
    dim: int,
    num_samples: int,
    vocab_size: int,
    first_token: int,
    dtype: torch.dtype,
    device: torch.device,
    config: TileConfig | None,
    features: Features = _PLAIN,
) -> _Plan:
    """Returns the cached plan of a problem; host time is one dictionary look-up."""
    config = choose_config(batch, dim) if config is None else config
    skip = skipped(first_token, config)
    row_blocks = -(-batch // config.block_b)
    ctas = ctas_per_row_block(config, batch, skip + vocab_size, multiprocessors(device))
    # a shard without tokens: the launch reads something, and samples nothing
    sampled = (skip, skip + vocab_size) if vocab_size else (TILE_V, TILE_V)
    words = workspace_layout.words(batch * num_samples, row_blocks, batch * features.logits)
    return _Plan(kernel_for(dtype, config, features), row_blocks, ctas, first_token - skip, *sampled, words)


def run(
    step: SampleInputs,
    config: TileConfig | None = None,
    features: Features = _PLAIN,
    extra_arguments: tuple[int | float, ...] = (),
) -> SampleResult:
    """Runs a step with default sampling parameters in one launch (``backends``); any other step goes to
    ``dispatch.run``.

    Args:
        step: the step.
        config: a tile shape that replaces the chosen one.
        features: options of the kernel.
        extra_arguments: ``arguments.TransformArguments`` and ``arguments.Outputs``, for a kernel with such features. A
            kernel with logits may draw nothing: the result then has one arbitrary token.
    """
    # each value is read once: an attribute of a tensor costs the host 0.1 us, a field of the step a third of that
    hidden_states, weight, _, _, _, num_samples, vocab_size, shard, params, _, _, _ = step
    if params is not DEFAULT_PARAMS:
        from .dispatch import run as run_with_params  # which calls this function again

        return run_with_params(step, config)
    (batch, dim), dtype, device = hidden_states.shape, hidden_states.dtype, hidden_states.device
    hidden, (hidden_stride, along_d) = hidden_states.data_ptr(), hidden_states.stride()
    if not copy_engine_reads(hidden, batch, hidden_stride, along_d):
        padded = torch.empty((batch, -(-dim // 8) * 8), dtype=dtype, device=device)
        hidden_states = padded[:, :dim].copy_(hidden_states)
        hidden, hidden_stride = padded.data_ptr(), padded.shape[1]
    first_token, exchange = shard
    kernel, row_blocks, ctas, base, skip, end, words = _plan(
        batch, dim, num_samples, vocab_size, first_token, dtype, device, config, features
    )
    tokens = torch.empty(batch * num_samples or 1, dtype=torch.int64, device=device)
    workspace = zeroed_words(words, device)  # a reference until the launch
    temperature_at, temperature, seed_at, seed, offset_at, offset = step.row_arguments()
    kernel(  # in the order of arguments.LaunchArguments
        hidden,
        # a single row's stride is arbitrary in torch, but TMA needs a multiple of 16 bytes
        hidden_stride if batch > 1 else -(-dim // 8) * 8,
        weight.data_ptr() if vocab_size else hidden,
        weight.stride()[0] if vocab_size > 1 else -(-dim // 8) * 8,
        vocab_size or 1,
        dim,
        row_blocks,
        ctas,
        temperature_at,
        temperature,
        seed_at,
        seed,
        offset_at,
        offset,
        tokens,
        workspace.data_ptr(),
        batch,
        base,
        skip,
        end,
        num_samples,
        exchange,
        *extra_arguments,
    )
    return SampleResult.__new__(SampleResult, tokens)  # half the host time of SampleResult(tokens)
