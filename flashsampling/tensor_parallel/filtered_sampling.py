"""Filters, log-probabilities and rejection of drafts over ranks, by the kernels of one GPU.

A filter needs all logits of a row. Ranks exchange their shards' logits, so that whole rows lie on one rank, and the
rank that has a row draws it as ``sample_from_logits`` does:

    every rank        logits of its shard (``backends.Backend.shard_logits``), without any sampling parameter
    all ranks         their logits to the ranks that draw the rows (``Collectives.gather_logits``)
    a row's rank      sampling parameters, filters, draws, log-probabilities: the step of one rank over stored logits
    all ranks         results to all (``Collectives.gather_results``), where not every rank draws every row

Logits are the bits that one rank with the whole vocabulary computes, and so are all results. The LM head's bias, of
which a rank has its shard's part, is added before the exchange: all other parameters are the whole vocabulary's.
Nothing is read from the device, and no index is out of range, whatever a failed step receives.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import Backend
from ..exchange_protocol import WHOLE
from ..inputs import SampleInputs
from ..outputs import SampleResult, layout
from . import rejection
from .transport import Collectives


class Part(NamedTuple):
    """This rank's part of a group."""

    transport: Collectives
    backend: Backend
    ranges: list[tuple[int, int]]  # ids of every rank's tokens, [first, last)
    rank: int
    vocab_size: int  # of all ranks


@torch.no_grad()  # parameters of rows, and q from a drafter, may have a gradient
def draw(part: Part, step: SampleInputs) -> SampleResult:
    """Returns the result of ``backends.Backend.run`` over the whole vocabulary, on every rank; with ``step.drafted``
    the requests' last tokens, then their numbers of accepted drafts, (2 * B,) int64.

    Args:
        part: this rank's part of the group.
        step: a step over the shard; its parameters are the whole vocabulary's, except for the LM head's bias.
    """
    with _messages(part, step):
        words = _row_words(part, step)
        result = (
            _unpack(words, step) if step.drafted is None else rejection.finish(words, step.drafted, part.vocab_size)
        )
    failed = part.transport.end()
    if failed is not None:
        drafts = 0 if step.drafted is None else len(step.drafted.token_ids)
        result.ids[: len(result.ids) - drafts].masked_fill_(failed, -1)
        result.ids[len(result.ids) - drafts :].masked_fill_(failed, 0)
        if result.values is not None:
            result.values.masked_fill_(failed, float("nan"))
    return result


@contextlib.contextmanager
def _messages(part: Part, step: SampleInputs) -> Iterator[None]:
    """Surrounds all messages of a step.

    Ends the step (``Collectives.end``) if the block raises; else the caller ends it."""
    try:
        part.transport.begin(step._replace(vocab_size=part.vocab_size))
        yield
    except BaseException as error:  # the next step's messages must not hold this step's parameters
        with contextlib.suppress(RuntimeError):  # from a broken device; ``error`` says more
            part.transport.end(error)
        raise


def _row_words(part: Part, step: SampleInputs) -> Tensor:
    """Returns the results of all rows, (B, n) int64."""
    first, last = part.ranges[part.rank]
    batch, device = step.hidden_states.shape[0], step.hidden_states.device
    logits, bias = torch.empty((batch, 0), dtype=torch.float32, device=device), None
    if last > first:
        logits = part.backend.shard_logits(step)
        bias = None if step.params.bias is None else step.params.bias[: last - first]
    step = step._replace(**step.rows()._asdict(), params=step.params._replace(bias=None))
    after = None if step.drafted is None else rejection.drafts_of_rows(step.drafted, batch)
    at_once = part.transport.rows_at_once or batch
    passes = [
        _pass(part, step.part(row, min(row + at_once, batch)), logits[row : row + at_once], bias, after, row)
        for row in range(0, batch, at_once)
    ]
    return passes[0] if len(passes) == 1 else torch.cat(passes)


def _pass(
    part: Part,
    step: SampleInputs,  # of the rows of this pass
    logits: Tensor,  # (rows, n) float32, of the shard
    bias: Tensor | None,  # (n,) float32
    after: rejection.RowDrafts | None,  # of all rows
    row: int,  # the first one's number
) -> Tensor:
    """Returns the results of some rows, (rows, n) int64."""
    transport, batch = part.transport, len(logits)
    whole = transport.gather_logits(logits, bias, part.ranges, step)
    first, last = transport.drawn_rows(batch)
    own = step.part(first, last)._replace(
        hidden_states=whole, weight=whole, logits=whole, vocab_size=part.vocab_size, shard=WHOLE, drafted=None,
        draft_hash=None,
    )  # fmt: skip
    own = own._replace(params=own.params.normalized())
    backend = part.backend.for_logits
    if first == last:
        count = 1 if after is not None else _columns(step)
        words = torch.empty((0, count), dtype=torch.int64, device=logits.device)
    elif after is not None:
        assert step.drafted is not None
        words = rejection.verify_rows(backend, own, after.part(row + first, row + last), step.drafted.probs)
    else:
        words = _pack(backend.run(own), own)
    return transport.gather_results(words, batch, step)


def _columns(step: SampleInputs) -> int:
    """Returns the words of a row's results."""
    sizes = layout(1, step.num_samples, step.params)
    return sizes.num_ids + sizes.num_values


def _pack(result: SampleResult, step: SampleInputs) -> Tensor:
    """Returns a result as (B, n) int64."""
    batch = step.hidden_states.shape[0]
    if not step.params.needs_raw_mass():
        return result.ids.view(batch, step.num_samples)
    parts = layout(batch, step.num_samples, step.params).split(result, batch)
    return torch.cat([part if part.dtype == torch.int64 else part.view(torch.int32) for part in parts.values()], dim=1)


def _unpack(words: Tensor, step: SampleInputs) -> SampleResult:
    """Returns the result that ``_pack`` packed."""
    if not step.params.needs_raw_mass():
        return SampleResult(words.flatten())
    places = layout(len(words), step.num_samples, step.params)
    names = {**places.ids, **places.values}
    parts = dict(zip(names, words.split([place.columns for place in names.values()], dim=1)))
    for name in places.values:
        parts[name] = parts[name].to(torch.int32).view(torch.float32)
    return places.join(parts)
