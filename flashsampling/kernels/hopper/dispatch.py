"""Runs steps with sampling parameters.

One launch suffices where the kernel applies everything in registers (``Features.transforms``). Otherwise it stores
logits (``Features.logits``), and ``kernels.triton`` draws from them. Launches of a step:

    scale, soft cap, biases, penalties, token mask      one (``Features.transforms``)
    filters, also with these                            two: the kernel draws and writes block statistics, then
                                                        ``kernels.triton.filtered.dispatch.draw``
    log-probabilities, also with filters and the        three, the same
    LM head's scale, soft cap and bias
    a sparse bias, in a step of one launch or two       one more before them: ``kernels.triton.filtered.sparse_bias``
    another noise stream, several draws with filters    three: the kernel only stores raw logits, then
                                                        ``kernels.triton.filtered.dispatch.run``
    log-probabilities beside a logit bias, penalties    four, the same. Beside transforms they need two logits of a
    or a mask, or with several draws                    token, raw and transformed
    a kept set (``return_kept``)                        one more behind log-probabilities
    drafts for rejection (``recorded``)                 two, or three with transforms; records stay for the next stage
    a shard's step that takes one launch                one (``runs_on_shard``)
    a shard's step with more                            the kernel only stores logits, from which
                                                        ``tensor_parallel.filtered_sampling`` draws
"""

import functools
import importlib
from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch import Tensor

from ...exchange_protocol import WHOLE
from ...inputs import SampleInputs, row_argument
from ...outputs import FilteredLogits, SampleResult
from ...sampling_params import DEFAULT_PARAMS, HEAD_NUMBERS, SamplingParams, head_numbers
from . import launch
from .config import KINDS, NO_CUTOFFS, TILE_V, TileConfig, choose_config, skipped

_PER_REQUEST = "dense_bias", "bias_ids", "counts", "token_mask"  # these change logits after the raw ones
# replaces the sampling parameters that ``logit_transforms`` applies
_TRANSFORMED = {name: getattr(DEFAULT_PARAMS, name) for name in (*HEAD_NUMBERS, "bias", "bias_values", *_PER_REQUEST)}


@functools.cache
def _filtered_module() -> ModuleType:
    """Imports the filtered kernels at the first use, and by name: ``cache`` must not take the Hopper kernel to depend
    on them."""
    return importlib.import_module("..triton.filtered.dispatch", __package__)


@functools.cache
def _sparse_bias_module() -> ModuleType:
    """Imports the sparse-bias kernel at the first use, and by name."""
    return importlib.import_module("..triton.filtered.sparse_bias", __package__)


def _makes_all_logits(params: SamplingParams) -> bool:
    """Returns whether the kernel makes all logits that the step needs: one of each token."""
    return not (params.needs_raw_mass() and any(getattr(params, name) is not None for name in _PER_REQUEST))


def _needs_stored_logits(params: SamplingParams, num_samples: int) -> bool:
    """Returns whether the kernel only stores raw logits, from which the filtered kernels make everything."""
    return (
        not _makes_all_logits(params)
        or params.stream != DEFAULT_PARAMS.stream
        or (num_samples > 1 and (params.may_filter() or params.needs_raw_mass()))
    )


def _matrix_argument(matrix: Tensor | None) -> tuple[int, int, Tensor | None]:
    """Returns the address of a matrix of 32-bit elements, the distance of its rows in bytes, and the tensor that holds
    them."""
    if matrix is None:
        return 0, 0, None
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    return matrix.data_ptr(), matrix.stride(0) * 4, matrix


def _address(vector: Tensor | None, first: int = 0) -> int:
    """Returns the address of a vector of 32-bit elements, from element ``first`` on; 0 for None."""
    return 0 if vector is None else vector.data_ptr() + 4 * first


def _nonzero_mask_argument(params: SamplingParams, base: int) -> tuple[int, int]:
    """Returns the address of ``SamplingParams.seen`` from token ``base`` on, and the distance of its rows; 0 where it
    is not aligned to 8 bytes, so that all counts are read."""
    seen = params.seen
    if params.counts is None or seen is None or seen.stride(1) != 1 or (seen.data_ptr() | seen.stride(0)) % 8:
        return 0, 0
    return seen.data_ptr() + base // 16, seen.stride(0)


def _has_transforms(params: SamplingParams) -> bool:
    """Returns whether ``logit_transforms`` has anything to apply."""
    of_head = head_numbers(params) != head_numbers(DEFAULT_PARAMS) or params.bias is not None
    return of_head or any(getattr(params, name) is not None for name in _PER_REQUEST)


def transform_arguments(
    params: SamplingParams, vocab_size: int, base: int = 0, skip: int = 0
) -> tuple[tuple[int | float, ...], tuple[Tensor | None, ...]]:
    """Returns ``arguments.TransformArguments``, and the tensors that must live until the launch.

    The first tile starts at token ``base``, a multiple of 32, ``skip`` tokens before the shard, which has
    ``vocab_size`` tokens. ``params`` has the shard's part of the LM head's bias, and everything else for the whole
    vocabulary. A sparse bias costs one more launch.
    """
    counts, counts_stride, of_counts = _matrix_argument(params.counts)
    mask, mask_stride, of_mask = _matrix_argument(params.token_mask)
    bias = params.bias
    if bias is not None and skip:  # the first tile also reads the tokens before the shard, which are not sampled
        bias = torch.nn.functional.pad(bias, (skip, 0))
    sparse_bias, sparse_bias_stride = None, 0
    if params.bias_ids is not None:
        first = base + skip
        sparse_bias = _sparse_bias_module().sort_by_tile(params, first, first + vocab_size, base)
        sparse_bias_stride = sparse_bias.stride(0) * 8
    transforms = (
        int(_has_transforms(params)),
        _address(bias),
        *head_numbers(params),
        _address(params.dense_bias, base),
        _address(sparse_bias),
        sparse_bias_stride,
        counts and counts + 4 * base,
        counts_stride,
        *_nonzero_mask_argument(params, base),
        *row_argument(params.repetition_penalty),
        *row_argument(params.frequency_penalty),
        *row_argument(params.presence_penalty),
        mask and mask + base // 8,
        mask_stride,
        _address(params.counts_rows),
    )
    return transforms, (of_counts, of_mask, bias, sparse_bias)


NO_TRANSFORMS = transform_arguments(DEFAULT_PARAMS, 0)[0]


def run(step: SampleInputs, config: TileConfig | None = None) -> SampleResult:
    """Runs a step whose sampling parameters are not the defaults. Returns the same as ``launch.run``."""
    params = step.params
    if _needs_stored_logits(params, step.num_samples):
        logits, _, _ = run_with_logits(step, 0, None, config)
        return _filtered_module().run(step._replace(logits=logits))  # type: ignore[no-any-return]
    if not (params.may_filter() or params.needs_raw_mass()):
        return _run_in_one_launch(step, config)
    transforms, _held = transform_arguments(params, step.vocab_size)
    masses = params.needs_mass(step.vocab_size), params.needs_raw_mass()
    # the draws also mark undefined rows, with and without filters
    cutoffs = _allocate_cutoffs(step)
    logits, block_stats, drawn = run_with_logits(
        step, step.num_samples, masses, config, transforms, _cutoff_arguments(params, cutoffs)
    )
    stats = _filtered_module().BlockStats(*block_stats, cutoffs)
    step = step._replace(logits=logits, params=params._replace(**_TRANSFORMED) if transforms[0] else params)
    return _filtered_module().draw(step, stats, drawn)  # type: ignore[no-any-return]


def runs_on_shard(step: SampleInputs) -> bool:
    """Returns whether a shard's step takes one launch (``backends``)."""
    params = step.params
    return not (_needs_stored_logits(params, step.num_samples) or params.may_filter() or params.needs_raw_mass())


def _run_in_one_launch(step: SampleInputs, config: TileConfig | None) -> SampleResult:
    """Runs a step, also of a shard, in one launch."""
    params, plain = step.params, step._replace(params=DEFAULT_PARAMS)
    if step.vocab_size == 0 or not _has_transforms(params):
        return launch.run(plain, config)
    config = choose_config(*step.hidden_states.shape) if config is None else config
    first_token = step.shard.first_token
    skip = skipped(first_token, config)
    transforms, _held = transform_arguments(params, step.vocab_size, first_token - skip, skip)
    return launch.run(plain, config, KINDS["processed"], transforms)


def compiling(at_once: int) -> AbstractContextManager[None]:
    """Returns a context in which Triton's kernels compile ahead (``backends``). The Hopper kernels compile one by one,
    and draw."""
    return importlib.import_module("..triton.jit", __package__).compiling(at_once)  # type: ignore[no-any-return]


def _allocate_cutoffs(step: SampleInputs) -> Tensor | None:
    """Allocates the rows' store cutoffs, or returns None where no row may have one, or all logits are needed.

    A top-k too large for the sample has cutoffs as well.
    """
    params = step.params
    by_top_k = isinstance(params.top_k, Tensor) or 0 < params.top_k < step.vocab_size
    by_min_p = isinstance(params.min_p, Tensor) or params.min_p > 0.0
    if params.needs_all_logits() or not (by_top_k or by_min_p):
        return None
    return torch.empty(len(step.hidden_states), dtype=torch.int32, device=step.hidden_states.device)


def recorded(step: SampleInputs) -> FilteredLogits:
    """Runs a step of drafts for rejection (``backends``)."""
    module = _filtered_module()
    records = module.empty_records(len(step.hidden_states), step.hidden_states.device)
    if _needs_stored_logits(step.params, step.num_samples) or _has_transforms(step.params):
        logits, _, _ = run_with_logits(step, 0, None)
        drawn, logits = module.run_with_processed(step._replace(logits=logits), records=records)
    else:
        logits, block_stats, tokens = run_with_logits(step, step.num_samples, (True, False))
        drawn = module.draw(step._replace(logits=logits), module.BlockStats(*block_stats), tokens, records=records)
    return FilteredLogits(drawn.ids, logits, *records)


def shard_logits(step: SampleInputs) -> Tensor:
    """Computes a shard's logits (``backends``)."""
    logits, _, _ = run_with_logits(step._replace(shard=WHOLE), 0, None)
    return logits


def run_with_logits(
    step: SampleInputs,
    draws: int,
    masses: tuple[bool, bool] | None,
    config: TileConfig | None = None,
    transforms: tuple[int | float, ...] = NO_TRANSFORMS,
    filters: tuple[int | float, ...] = NO_CUTOFFS,
) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor | None], Tensor]:
    """Runs one launch that stores logits, for a whole vocabulary.

    Args:
        step: hidden states, weight and row parameters are used.
        draws: the draws to make: all of ``step.num_samples``, or 0.
        masses: whether to write the blocks' sums of exponentials, at the rows' temperatures and at 1.
        config: a tile shape that replaces the chosen one.
        transforms: ``arguments.TransformArguments``.
        filters: the result of ``_cutoff_arguments``. One draw.

    Returns:
        logits: (B, V) float32, rows a multiple of 16 bytes apart; with store cutoffs (B, 128 ceil(V / 128)), by blocks.
        block_stats: keys (B, blocks) int32, and two tensors of as many float32: see ``arguments.Outputs``.
        drawn: (B * num_samples,) int64, the tokens without filters, or ``DEFERRED_DRAW`` in a row with a top-k among
            ``filters``. Without draws one arbitrary token.
    """
    assert filters == NO_CUTOFFS or draws == 1, (
        "the kernel's warps wait for each other through the bounds of its one draw"
    )
    batch, vocab_size, device = step.hidden_states.shape[0], step.vocab_size, step.hidden_states.device
    blocks = -(-vocab_size // TILE_V) * 4
    has_cutoffs = filters[0] != 0
    rounded = TILE_V if has_cutoffs else 4
    logits = torch.empty((batch, -(-vocab_size // rounded) * rounded), dtype=torch.float32, device=device)
    keys = torch.empty((batch, blocks), dtype=torch.int32, device=device)
    sums, raw_sums = (
        torch.empty((batch, blocks), dtype=torch.float32, device=device) if wanted else None
        for wanted in (masses or (False, False))
    )
    outputs = (logits.data_ptr(), logits.stride(0) * 4, keys.data_ptr(), _address(sums), _address(raw_sums), *filters)
    plain = step._replace(params=DEFAULT_PARAMS, num_samples=draws)
    drawn = launch.run(plain, config, KINDS["logits"], transforms + outputs).ids
    return logits if has_cutoffs else logits[:, :vocab_size], (keys, sums, raw_sums), drawn


def _cutoff_arguments(params: SamplingParams, cutoffs: Tensor | None) -> tuple[int | float, ...]:
    """Returns the fields of ``arguments.Outputs`` that ``NO_CUTOFFS`` covers. ``cutoffs`` (B,) int32, to be written:
    blocks with lower keys may not be stored."""
    wide = not isinstance(params.top_k, Tensor) or params.top_k.dtype == torch.int64
    address, masses_of_all = (0, 1) if cutoffs is None else (cutoffs.data_ptr(), int(params.may_be_joint()))
    return (address, *row_argument(params.top_k), int(wide), *row_argument(params.min_p), masses_of_all)
