"""Steps of which something is asked: one launch where the kernel can do all of it in registers
(``Features.transforms``), else it stores logits (``Features.logits``), and ``kernels.triton`` picks from them.

head, bias of all rows, penalties, token mask   one launch (``transforms``)
filters, with any of these                      two: the kernel draws and writes block statistics, then
                                                ``kernels.triton.filtered.dispatch.pick``
log-probabilities, with the head's own          likewise
a bias by row, with any of these                one before them: ``kernels.triton.filtered.sparse_bias``
log-probabilities, with what a request changes, three: the kernel only stores products, then
``kernels.triton.filtered.dispatch.run``; the
other noise, several draws with filters         former need two logits of a token, raw and processed
drafts to be rejected (``recorded``)            two or, of what is processed, three; what was drawn from is left behind
of a shard, what is one launch of all           one launch (``runs_on_shard``)
of a shard, with more                           the kernel stores logits, processed where one of a token is enough, then
                                                ``kernels.triton.sharded.shard_logits``
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
from ...sampling_params import DEFAULT_PARAMS, SamplingParams
from . import launch
from .config import KINDS, NO_CUTOFFS, NO_TRANSFORMS, TILE_V, TileConfig, choose_config, skipped

_OF_REQUEST = "dense_bias", "bias_ids", "counts", "token_mask"  # what changes logits behind the raw ones


@functools.cache
def _picking() -> ModuleType:
    """Imported at the first use, and by name: what is compiled here does not depend on it, as ``cache`` would take it
    to."""
    return importlib.import_module("..triton.filtered.dispatch", __package__)


@functools.cache
def _of_shards() -> ModuleType:
    """Likewise."""
    return importlib.import_module("..triton.sharded.shard_logits", __package__)


@functools.cache
def _entries() -> ModuleType:
    """Likewise."""
    return importlib.import_module("..triton.filtered.sparse_bias", __package__)


def _made_at_once(params: SamplingParams) -> bool:
    """Whether the kernel makes all logits that are needed: one of a token."""
    return not (params.needs_raw_mass() and any(getattr(params, name) is not None for name in _OF_REQUEST))


def _scanned(params: SamplingParams, num_samples: int) -> bool:
    """Whether the kernel leaves products, from which everything is made: what is said of it in the module's
    docstring."""
    return (
        not _made_at_once(params)
        or params.stream != DEFAULT_PARAMS.stream
        or (num_samples > 1 and (params.may_filter() or params.needs_raw_mass()))
    )


def _rows_of(matrix: Tensor | None) -> tuple[int, int, Tensor | None]:
    """Address of a matrix of 32-bit elements, its rows' distance in bytes, and what holds them."""
    if matrix is None:
        return 0, 0, None
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    return matrix.data_ptr(), matrix.stride(0) * 4, matrix


def _address(vector: Tensor | None, first: int = 0) -> int:
    """Of a vector of 32-bit elements, from the ``first`` on."""
    return 0 if vector is None else vector.data_ptr() + 4 * first


def _seen_of(params: SamplingParams, base: int) -> tuple[int, int]:
    """Address of ``SamplingParams.seen`` from the token ``base`` on, and its rows' distance; of what does not lie at
    multiples of 8
    bytes none, so that all counts are read."""
    seen = params.seen
    if params.counts is None or seen is None or seen.stride(1) != 1 or (seen.data_ptr() | seen.stride(0)) % 8:
        return 0, 0
    return seen.data_ptr() + base // 16, seen.stride(0)


def _changes(params: SamplingParams) -> bool:
    """Whether ``transforms`` has something to do."""
    of_head = params.logit_scale != 1.0 or params.soft_cap != 0.0 or params.bias is not None
    return of_head or any(getattr(params, name) is not None for name in _OF_REQUEST)


def transforms_of(
    params: SamplingParams, vocab_size: int, base: int = 0, skip: int = 0
) -> tuple[tuple[int | float, ...], tuple[Tensor | None, ...]]:
    """``arguments.TransformArguments``, and what must live until the launch. Its first tile starts at the token
    ``base``, a multiple of 32, ``skip`` tokens before the shard, which has ``vocab_size``. Of the head's bias
    ``params`` has the shard's part, of all else the whole vocabulary's. A bias by row is one launch more."""
    counts, counts_stride, of_counts = _rows_of(params.counts)
    mask, mask_stride, of_mask = _rows_of(params.token_mask)
    bias = params.bias
    if bias is not None and skip:  # the first tile reads what is before it, though nobody draws that
        bias = torch.nn.functional.pad(bias, (skip, 0))
    sparse_bias = None
    if params.bias_ids is not None:
        first = base + skip
        sparse_bias = _entries().sort_by_tile(params, first, first + vocab_size, base)
    transforms = (
        int(_changes(params)),
        _address(bias),
        params.logit_scale,
        params.soft_cap,
        _address(params.dense_bias, base),
        0 if sparse_bias is None else sparse_bias.data_ptr(),
        0 if sparse_bias is None else sparse_bias.stride(0) * 8,
        counts and counts + 4 * base,
        counts_stride,
        *_seen_of(params, base),
        *row_argument(params.repetition_penalty),
        *row_argument(params.frequency_penalty),
        *row_argument(params.presence_penalty),
        mask and mask + base // 8,
        mask_stride,
    )
    return transforms, (of_counts, of_mask, bias, sparse_bias)


def run(step: SampleInputs, config: TileConfig | None = None) -> SampleResult:
    """See ``launch.run``, of what is not PLAIN."""
    params = step.params
    if _scanned(params, step.num_samples):
        logits, _, _ = with_logits(step, 0, None, config)
        return _picking().run(step._replace(logits=logits))  # type: ignore[no-any-return]
    if not (params.may_filter() or params.needs_raw_mass()):
        return _drawn_at_once(step, config)
    transforms, _held = transforms_of(params, step.vocab_size)
    masses = params.needs_mass(step.vocab_size), params.needs_raw_mass()
    # the draws also say which rows are undefined, with filters and without
    cutoffs, room = _cutoffs_of(step), _picking().room_of(step)
    logits, block_stats, drawn = with_logits(
        step, step.num_samples, masses, config, transforms, _filters_of(params, cutoffs)
    )
    of_chunks = _picking().BlockStats(*block_stats, cutoffs)
    left = _left(params) if transforms[0] else params
    return _picking().pick(step._replace(logits=logits, params=left), of_chunks, drawn, room=room)  # type: ignore[no-any-return]


def runs_on_shard(step: SampleInputs) -> bool:
    """See ``backends``."""
    params = step.params
    return not (_scanned(params, step.num_samples) or params.may_filter() or params.needs_raw_mass())


def _drawn_at_once(step: SampleInputs, config: TileConfig | None) -> SampleResult:
    """One launch, also of a shard."""
    params, plain = step.params, step._replace(params=DEFAULT_PARAMS)
    if step.vocab_size == 0 or not _changes(params):
        return launch.run(plain, config)
    config = choose_config(*step.hidden_states.shape) if config is None else config
    first_token = step.shard.first_token
    skip = skipped(first_token, config)
    transforms, _held = transforms_of(params, step.vocab_size, first_token - skip, skip)
    return launch.run(plain, config, KINDS["processed"], transforms)


def _left(params: SamplingParams) -> SamplingParams:
    """What is to be done behind ``transforms``."""
    return params._replace(
        bias=None,
        logit_scale=1.0,
        soft_cap=0.0,
        dense_bias=None,
        bias_ids=None,
        bias_values=None,
        counts=None,
        token_mask=None,
    )


def compiling(at_once: int) -> AbstractContextManager[None]:
    """See ``backends``: Triton's kernels. Those here are compiled in turn, and draw."""
    return importlib.import_module("..triton.jit", __package__).compiling(at_once)  # type: ignore[no-any-return]


def _cutoffs_of(step: SampleInputs) -> Tensor | None:
    """Room for the rows' floors, where some row may get one, and what is below is asked for by nobody. It is a matter
    of the request's kind, not of numbers, since ``pick`` is compiled for it: also where a top-k is too great for the
    sample."""
    params = step.params
    by_top_k = isinstance(params.top_k, Tensor) or 0 < params.top_k < step.vocab_size
    by_min_p = isinstance(params.min_p, Tensor) or params.min_p > 0.0
    if params.needs_raw_mass() or not (by_top_k or by_min_p):
        return None
    return torch.empty(len(step.hidden_states), dtype=torch.int32, device=step.hidden_states.device)


def recorded(step: SampleInputs) -> FilteredLogits:
    """See ``backends``. Products are left behind, of which the kernels that reject make processed logits again."""
    records = _picking().empty_records(len(step.hidden_states), step.hidden_states.device)
    if _scanned(step.params, step.num_samples) or _changes(step.params):
        logits, _, _ = with_logits(step, 0, None)
        drawn = _picking().run(step._replace(logits=logits), records=records)
    else:
        logits, block_stats, tokens = with_logits(step, step.num_samples, (True, False))
        drawn = _picking().pick(
            step._replace(logits=logits), _picking().BlockStats(*block_stats), tokens, records=records
        )
    return FilteredLogits(drawn.ids, logits, *records)


def shard_logits(step: SampleInputs) -> tuple[Tensor, Tensor]:
    """See ``backends``."""
    at_once = _made_at_once(step.params)
    transforms, _held = transforms_of(step.params, step.vocab_size) if at_once else (NO_TRANSFORMS, ())
    logits, _, _ = with_logits(step._replace(shard=WHOLE), 0, None, transforms=transforms)
    return (logits, logits) if at_once else _of_shards().processed(step, logits)


def shard_winners(step: SampleInputs, processed: Tensor, limit: Tensor, known: Tensor | None = None) -> Tensor:
    """See ``backends``."""
    return _of_shards().shard_winners(step, processed, limit, known)  # type: ignore[no-any-return]


def with_logits(
    step: SampleInputs,
    draws: int,
    masses: tuple[bool, bool] | None,
    config: TileConfig | None = None,
    transforms: tuple[int | float, ...] = NO_TRANSFORMS,
    filters: tuple[int | float, ...] = NO_CUTOFFS,
) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor | None], Tensor]:
    """One launch, for a whole vocabulary.

    Args:
        step: of which hidden states, weight and the rows' parameters matter.
        draws: how many of ``step.num_samples`` are wanted: all or none.
        masses: whether the chunks' are wanted, at the rows' temperatures and at 1.
        config: in place of the shape that is chosen.
        processing: ``arguments.TransformArguments``, of what becomes of the products before all else.
        filters: ``_filters_of`` what is picked of them. One draw.

    Returns:
        logits: (B, V) float32, rows a multiple of 16 bytes apart; beside floors (B, 128 * ceil(V / 128)), by chunks.
        summaries: keys (B, chunks) int32 and as many float32 twice: see ``arguments.Outputs``.
        drawn: (B * num_samples,) int64, the tokens without any filter, or ``DEFERRED_DRAW`` of a row with a top-k among
            ``filters``; of no draws as ``launch.run`` says.
    """
    assert filters == NO_CUTOFFS or draws == 1, "the kernel's warps wait for each other by the codes of its one draw"
    batch, vocab_size, device = step.hidden_states.shape[0], step.vocab_size, step.hidden_states.device
    chunks = -(-vocab_size // TILE_V) * 4
    floored = filters[0] != 0
    rounded = TILE_V if floored else 4
    logits = torch.empty((batch, -(-vocab_size // rounded) * rounded), dtype=torch.float32, device=device)
    keys = torch.empty((batch, chunks), dtype=torch.int32, device=device)
    sums, raw_sums = (
        torch.empty((batch, chunks), dtype=torch.float32, device=device) if wanted else None
        for wanted in (masses or (False, False))
    )
    outputs = (
        logits.data_ptr(),
        logits.stride(0) * 4,
        keys.data_ptr(),
        0 if sums is None else sums.data_ptr(),
        0 if raw_sums is None else raw_sums.data_ptr(),
        *filters,
    )
    drawn = launch.run(
        step._replace(params=DEFAULT_PARAMS, num_samples=draws), config, KINDS["logits"], transforms + outputs
    ).ids
    return logits if floored else logits[:, :vocab_size], (keys, sums, raw_sums), drawn


def _filters_of(params: SamplingParams, cutoffs: Tensor | None) -> tuple[int | float, ...]:
    """``arguments.Outputs``, the part of ``NO_CUTOFFS``. ``cutoffs`` (B,) int32, to be written to: chunks with lower
    keys may not
    be stored."""
    wide = not isinstance(params.top_k, Tensor) or params.top_k.dtype == torch.int64
    address, masses_of_all = (0, 1) if cutoffs is None else (cutoffs.data_ptr(), int(params.may_be_joint()))
    return (address, *row_argument(params.top_k), int(wide), *row_argument(params.min_p), masses_of_all)
