"""Steps of which something is asked: one launch where the kernel can do all of it in registers (``Features.processing``),
else it stores logits (``Features.logits``), and ``impl.triton`` picks from them.

head, bias of all rows, penalties, token mask   one launch (``processing``)
filters, with any of these                      two: the kernel draws and summarises what it stores too (``summaries``), then
                                                ``impl.triton.logits.pick``
log-probabilities, with the head's own          likewise
a bias by row, with any of these                one before them: ``impl.triton.entries``
log-probabilities, with what a request changes, three: the kernel only stores products, then ``impl.triton.logits.run``; the
other noise, several draws with filters         former need two logits of a token, raw and processed
drafts to be rejected (``recorded``)            two or, of what is processed, three; what was drawn from is left behind
of a shard, what is one launch of all           one launch (``runs_on_shard``)
of a shard, with more                           the kernel only stores logits, processed where one of a token is enough, then
                                                ``impl.triton.shards``
"""

import functools
import importlib
from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch import Tensor

from ...exchange import WHOLE
from ...step import PLAIN, Asked, Drawn, Recorded, Step, row_argument
from . import launch
from .config import KINDS, NO_FLOORS, NO_PROCESSING, TILE_V, TileConfig, choose_config, skipped

_OF_REQUEST = "dense_bias", "bias_ids", "counts", "token_mask"  # what changes logits behind the raw ones


@functools.cache
def _picking() -> ModuleType:
    """Imported at the first use, and by name: what is compiled here does not depend on it, as ``cache`` would take it to."""
    return importlib.import_module("..triton.logits", __package__)


@functools.cache
def _of_shards() -> ModuleType:
    """Likewise."""
    return importlib.import_module("..triton.shards", __package__)


@functools.cache
def _entries() -> ModuleType:
    """Likewise."""
    return importlib.import_module("..triton.entries", __package__)


def _made_at_once(asked: Asked) -> bool:
    """Whether the kernel makes all logits that are needed: one of a token."""
    return not (asked.needs_raw_mass() and any(getattr(asked, name) is not None for name in _OF_REQUEST))


def _scanned(asked: Asked, num_samples: int) -> bool:
    """Whether the kernel leaves products, from which everything is made: what is said of it in the module's docstring."""
    return (
        not _made_at_once(asked)
        or asked.stream != PLAIN.stream
        or (num_samples > 1 and (asked.may_filter() or asked.needs_raw_mass()))
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


def _seen_of(asked: Asked, base: int) -> tuple[int, int]:
    """Address of ``Asked.seen`` from the token ``base`` on, and its rows' distance; of what does not lie at multiples of 8
    bytes none, so that all counts are read."""
    seen = asked.seen
    if asked.counts is None or seen is None or seen.stride(1) != 1 or (seen.data_ptr() | seen.stride(0)) % 8:
        return 0, 0
    return seen.data_ptr() + base // 16, seen.stride(0)


def _changes(asked: Asked) -> bool:
    """Whether ``processing`` has something to do."""
    of_head = asked.logit_scale != 1.0 or asked.soft_cap != 0.0 or asked.bias is not None
    return of_head or any(getattr(asked, name) is not None for name in _OF_REQUEST)


def processing_of(
    asked: Asked, vocab_size: int, base: int = 0, skip: int = 0
) -> tuple[tuple[int | float, ...], tuple[Tensor | None, ...]]:
    """``arguments.Processing``, and what must live until the launch. Its first tile starts at the token ``base``, a multiple of
    32, ``skip`` tokens before the shard, which has ``vocab_size``. Of the head's bias ``asked`` has the shard's part, of all
    else the whole vocabulary's. A bias by row is one launch more."""
    counts, counts_stride, of_counts = _rows_of(asked.counts)
    mask, mask_stride, of_mask = _rows_of(asked.token_mask)
    bias = asked.bias
    if bias is not None and skip:  # the first tile reads what is before it, though nobody draws that
        bias = torch.nn.functional.pad(bias, (skip, 0))
    entries = None
    if asked.bias_ids is not None:
        first = base + skip
        entries = _entries().by_block(asked, first, first + vocab_size, base)
    processing = (
        int(_changes(asked)),
        _address(bias),
        asked.logit_scale,
        asked.soft_cap,
        _address(asked.dense_bias, base),
        0 if entries is None else entries.data_ptr(),
        0 if entries is None else entries.stride(0) * 8,
        counts and counts + 4 * base,
        counts_stride,
        *_seen_of(asked, base),
        *row_argument(asked.repetition_penalty),
        *row_argument(asked.frequency_penalty),
        *row_argument(asked.presence_penalty),
        mask and mask + base // 8,
        mask_stride,
    )
    return processing, (of_counts, of_mask, bias, entries)


def run(step: Step, config: TileConfig | None = None) -> Drawn:
    """See ``launch.run``, of what is not PLAIN."""
    asked = step.asked
    if _scanned(asked, step.num_samples):
        logits, _, _ = with_logits(step, 0, None, config)
        return _picking().run(step._replace(logits=logits))  # type: ignore[no-any-return]
    if not (asked.may_filter() or asked.needs_raw_mass()):
        return _drawn_at_once(step, config)
    processing, _held = processing_of(asked, step.vocab_size)
    masses = asked.needs_mass(step.vocab_size), asked.needs_raw_mass()
    # the draws also say which rows are undefined, with filters and without
    floors, room = _floors_of(step), _picking().room_of(step)
    logits, summaries, drawn = with_logits(step, step.num_samples, masses, config, processing, _filters_of(asked, floors))
    of_chunks = _picking().Summaries(*summaries, floors)
    left = _left(asked) if processing[0] else asked
    return _picking().pick(step._replace(logits=logits, asked=left), of_chunks, drawn, room=room)  # type: ignore[no-any-return]


def runs_on_shard(step: Step) -> bool:
    """See ``backends``."""
    asked = step.asked
    return not (_scanned(asked, step.num_samples) or asked.may_filter() or asked.needs_raw_mass())


def _drawn_at_once(step: Step, config: TileConfig | None) -> Drawn:
    """One launch, also of a shard."""
    asked, plain = step.asked, step._replace(asked=PLAIN)
    if step.vocab_size == 0 or not _changes(asked):
        return launch.run(plain, config)
    config = choose_config(*step.hidden_states.shape) if config is None else config
    first_token = step.shard.first_token
    skip = skipped(first_token, config)
    processing, _held = processing_of(asked, step.vocab_size, first_token - skip, skip)
    return launch.run(plain, config, KINDS["processed"], processing)


def _left(asked: Asked) -> Asked:
    """What is to be done behind ``processing``."""
    return asked._replace(
        bias=None, logit_scale=1.0, soft_cap=0.0, dense_bias=None, bias_ids=None, bias_values=None, counts=None, token_mask=None
    )


def compiling(at_once: int) -> AbstractContextManager[None]:
    """See ``backends``: Triton's kernels. Those here are compiled in turn, and draw."""
    return importlib.import_module("..triton.jit", __package__).compiling(at_once)  # type: ignore[no-any-return]


def _floors_of(step: Step) -> Tensor | None:
    """Room for the rows' floors, where some row may get one, and what is below is asked for by nobody. It is a matter of the
    request's kind, not of numbers, since ``pick`` is compiled for it: also where a top-k is too great for the sample."""
    asked = step.asked
    by_top_k = isinstance(asked.top_k, Tensor) or 0 < asked.top_k < step.vocab_size
    by_min_p = isinstance(asked.min_p, Tensor) or asked.min_p > 0.0
    if asked.needs_raw_mass() or not (by_top_k or by_min_p):
        return None
    return torch.empty(len(step.hidden_states), dtype=torch.int32, device=step.hidden_states.device)


def recorded(step: Step) -> Recorded:
    """See ``backends``. Products are left behind, of which the kernels that reject make processed logits again."""
    records = _picking().empty_records(len(step.hidden_states), step.hidden_states.device)
    if _scanned(step.asked, step.num_samples) or _changes(step.asked):
        logits, _, _ = with_logits(step, 0, None)
        drawn = _picking().run(step._replace(logits=logits), records=records)
    else:
        logits, summaries, tokens = with_logits(step, step.num_samples, (True, False))
        drawn = _picking().pick(step._replace(logits=logits), _picking().Summaries(*summaries), tokens, records=records)
    return Recorded(drawn.ids, logits, *records)


def shard_logits(step: Step) -> tuple[Tensor, Tensor]:
    """See ``backends``."""
    at_once = _made_at_once(step.asked)
    processing, _held = processing_of(step.asked, step.vocab_size) if at_once else (NO_PROCESSING, ())
    logits, _, _ = with_logits(step._replace(shard=WHOLE), 0, None, processing=processing)
    return (logits, logits) if at_once else _of_shards().processed(step, logits)


def shard_winners(step: Step, processed: Tensor, limit: Tensor, known: Tensor | None = None) -> Tensor:
    """See ``backends``."""
    return _of_shards().shard_winners(step, processed, limit, known)  # type: ignore[no-any-return]


def with_logits(
    step: Step,
    draws: int,
    masses: tuple[bool, bool] | None,
    config: TileConfig | None = None,
    processing: tuple[int | float, ...] = NO_PROCESSING,
    filters: tuple[int | float, ...] = NO_FLOORS,
) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor | None], Tensor]:
    """One launch, for a whole vocabulary.

    Args:
        step: of which hidden states, weight and the rows' parameters matter.
        draws: how many of ``step.num_samples`` are wanted: all or none.
        masses: whether the chunks' are wanted, at the rows' temperatures and at 1.
        config: in place of the shape that is chosen.
        processing: ``arguments.Processing``, of what becomes of the products before all else.
        filters: ``_filters_of`` what is picked of them. One draw.

    Returns:
        logits: (B, V) float32, rows a multiple of 16 bytes apart; beside floors (B, 128 * ceil(V / 128)), by chunks.
        summaries: keys (B, chunks) int32 and as many float32 twice: see ``arguments.Outputs``.
        drawn: (B * num_samples,) int64, the tokens without any filter, or ``UNDRAWN`` of a row with a top-k among
            ``filters``; of no draws as ``launch.run`` says.
    """
    assert filters == NO_FLOORS or draws == 1, "the kernel's warps wait for each other by the codes of its one draw"
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
    drawn = launch.run(step._replace(asked=PLAIN, num_samples=draws), config, KINDS["logits"], processing + outputs).ids
    return logits if floored else logits[:, :vocab_size], (keys, sums, raw_sums), drawn


def _filters_of(asked: Asked, floors: Tensor | None) -> tuple[int | float, ...]:
    """``arguments.Outputs``, the part of ``NO_FLOORS``. ``floors`` (B,) int32, to be written to: chunks with lower keys may not
    be stored."""
    wide = not isinstance(asked.top_k, Tensor) or asked.top_k.dtype == torch.int64
    address, masses_of_all = (0, 1) if floors is None else (floors.data_ptr(), int(asked.may_be_joint()))
    return (address, *row_argument(asked.top_k), int(wide), *row_argument(asked.min_p), masses_of_all)
