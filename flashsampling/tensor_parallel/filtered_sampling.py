"""Filters and log-probabilities over sharded logits. Only candidates, maxima and masses cross ranks.

Every rank stores the logits of its shard. The ranks exchange payloads in collective rounds. The host knows the number
of rounds before the first one, and it is the same on all ranks. Each round is an all-gather to (ranks, B, words), from
which all ranks conclude the same, in integers or by sums in the order of the ranks:

    round       payload per row of each rank
    highest     the highest processed logit and its token, or that there is a NaN; whether any logit is finite
    few         for one small k of all rows: the sort keys of the shard's first k tokens, which settle top-p too
    top-k       else, if a row may have it: the number of tokens for each value of a digit, once per radix pass
    top-p       likewise: their masses; in the last pass the number of tokens
                (kernels have a first pass before each of these two, about floors or first tokens, and sums of masses)
    the draw    per draw the packed winner of the kept tokens. With log-probabilities its raw and processed logits, and
                the mass of the kept tokens. If wanted: the raw logits' log-sum-exp, the n highest, those of given ids
    ranks       with log-probabilities: per draw, how many raw logits are higher than the winner's

A round takes one message of the transport for every ``room`` words. Each message has a number, a comparison and
failures like the message of a plain step. This module reads nothing from the device, and no index is out of range,
whatever a failed step receives.

Backends compute the parts that round in their own way (``backends``): the shard's logits, and the winners of scores.
``cutoffs`` and ``outputs``, or modules with the same functions, do the rest.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import exchange_protocol
from ..backends import Backend
from ..exchange_protocol import NO_TOKEN, Shard
from ..inputs import SampleInputs
from ..outputs import SampleResult
from ..reference import logit_transforms
from ..sampling_params import SamplingParams
from . import cutoffs
from .cutoffs import Collective, FixedPointScale, Shards
from .transport import Collectives

ROW_WORDS = 16  # of a message, at least, for each row of the largest batch ...
LEAST_WORDS = 2048  # ... and in all


class Part(NamedTuple):
    """This rank's part of a group."""

    transport: Collectives
    backend: Backend
    ranges: list[tuple[int, int]]  # ids of every rank's tokens, [first, last)
    rank: int
    vocab_size: int  # of all ranks


class _Logits(NamedTuple):
    """The logits of a shard."""

    raw: Tensor  # (B, n) float32
    processed: Tensor  # (B, n) float32


class Kept(NamedTuple):
    """A step's rows once all ranks know the cutoffs."""

    local: SampleInputs  # this rank's
    logits: _Logits
    known: Tensor | None  # what ``cutoffs.highest`` found in the processed logits
    limit: Tensor  # (B,) int64: the cutoffs, the lowest sort keys that are kept of this shard
    scale: FixedPointScale
    place: Tensor  # (B,) int64, of the row's first token
    defined: Tensor  # (B,) bool: it has a token

    @property
    def columns(self) -> dict[str, int]:
        """The words of a rank's payload for the draw, per row and by part, in the order of the message."""
        params, num_samples = self.local.params, self.local.num_samples
        draws = num_samples if params.logprobs else 0
        given = 0 if params.logprob_ids is None else params.logprob_ids.shape[1]
        columns = {"winners": num_samples, "logits": draws, "mass": int(params.logprobs)}
        return columns | {"logsumexp": int(params.needs_raw_mass()), "top": params.top_logprobs, "given": given}

    @property
    def first(self) -> Tensor:
        """The ids of the rows' first tokens, (B,) int64."""
        return self.place & NO_TOKEN ^ NO_TOKEN


@torch.no_grad()  # parameters of rows may have a gradient
def draw(part: Part, step: SampleInputs) -> SampleResult:
    """Returns the result of ``backends.Backend.run`` over the whole vocabulary, on every rank.

    Args:
        part: this rank's part of the group.
        step: a step over the shard; its parameters are the whole vocabulary's.
    """
    with rounds(part, step):
        meet, kept = prepare(part, step)
        drawn = _drawn(meet, part, kept)
    failed = part.transport.end()
    if failed is not None:
        drawn.ids.masked_fill_(failed, -1)
        if drawn.values is not None:
            drawn.values.masked_fill_(failed, float("nan"))
    return drawn


@contextlib.contextmanager
def rounds(part: Part, step: SampleInputs) -> Iterator[None]:
    """Surrounds all rounds of a step.

    Ends the step (``Collectives.end``) if the block raises; else the caller ends it."""
    try:
        part.transport.begin(step._replace(vocab_size=part.vocab_size))
        yield
    except BaseException as error:  # the next step's messages must not hold this step's parameters
        with contextlib.suppress(RuntimeError):  # from a broken device; ``error`` says more
            part.transport.end(error)
        raise


def prepare(part: Part, step: SampleInputs) -> tuple[Collective, Kept]:
    """Runs the rounds before the draw. Returns the collective for later rounds, and the kept rows."""
    first, last = part.ranges[part.rank]
    transport = part.transport
    params = step.params.shard(first, last)
    rows = step.rows()
    local = step._replace(params=params, shard=Shard(first, exchange_protocol.PACKED), drafted=None, **rows._asdict())
    batch, device = step.hidden_states.shape[0], step.hidden_states.device
    if last > first:
        raw, processed = part.backend.module.shard_logits(local)
    else:
        raw = processed = torch.empty((batch, 0), dtype=torch.float32, device=device)
    logits = _Logits(raw, processed)

    def meet(words: Tensor, wanted: Tensor | None = None) -> Tensor:
        messages = [
            transport.all_gather(some, step, wanted) for some in words.contiguous().view(-1).split(transport.room)
        ]
        theirs = messages[0] if len(messages) == 1 else torch.cat(messages, dim=1)
        return theirs.contiguous().view(-1, *words.shape)  # kernels need it contiguous

    words, known = part.backend.shard_limits.highest(local, processed)
    place, top, defined = part.backend.shard_parts.first(meet(words), step.params)
    scale = FixedPointScale(top, rows.temperature, cutoffs.fixed_point_scale_of(part.vocab_size))
    shards = Shards(part.rank, part.ranges, transport.room)
    limit = torch.minimum(_limits(meet, part, processed, known, params, scale, shards), place)
    return meet, Kept(local, logits, known, limit, scale, place, defined)


def _limits(
    meet: Collective,
    part: Part,
    processed: Tensor,
    known: Tensor | None,
    params: SamplingParams,
    scale: FixedPointScale,
    shards: Shards,
) -> Tensor:
    """Returns the cutoffs of the filters for this rank's tokens, (B,) int64."""
    passes, limit = part.backend.shard_limits, None
    names = params.names()
    if "top_k" in names and not params.may_be_joint():
        if cutoffs.are_few(params.top_k):
            limit = passes.of_few(meet, processed, known, params.top_k, params.top_p, scale, shards)
        elif part.transport.skips:  # for a number too, because another rank may have a tensor of it
            vocab_size = part.vocab_size
            limit = passes.of_top_k_and_p(meet, processed, known, params.top_k, params.top_p, scale, vocab_size, shards)
    if limit is not None:
        names = [name for name in names if name not in ("top_k", "top_p")]
    if "top_k" in names:
        limit = passes.of_top_k(meet, processed, known, params.top_k, scale, part.vocab_size, shards)
    if "top_p" in names:
        before = limit
        if limit is not None and params.may_be_joint():  # the share is of all
            joint = params.joint_top_p
            before = torch.where(joint != 0, logit_transforms.LOWEST, limit) if isinstance(joint, Tensor) else None
        by_top_p = passes.of_top_p(meet, processed, known, scale, params.top_p, before, part.vocab_size, shards)
        limit = by_top_p if limit is None or before is limit else torch.maximum(limit, by_top_p)
    if "min_p" in names:
        by_min_p = passes.of_min_p(processed, known, scale, params.min_p)
        limit = by_min_p if limit is None else torch.maximum(limit, by_min_p)
    return torch.full_like(scale.top, logit_transforms.LOWEST, dtype=torch.int64) if limit is None else limit


def _drawn(meet: Collective, part: Part, kept: Kept) -> SampleResult:
    """Returns the result of a step whose cutoffs are known."""
    local, logits, parts = kept.local, kept.logits, part.backend.shard_parts
    winners = winners_of(part.backend, local, logits.processed, kept.limit, kept.known)
    words = parts.words(kept, winners, mass_of(part, kept) if local.params.logprobs else None)
    drawn, raw = parts.conclude(meet(words), kept)
    if raw is not None:
        parts.put_ranks(drawn, meet(parts.above(logits.raw, raw)), kept)
    return drawn  # type: ignore[no-any-return]


def winners_of(
    backend: Backend, local: SampleInputs, logits: Tensor, limit: Tensor, known: Tensor | None = None
) -> Tensor:
    """Returns the shard's packed winners among tokens from the cutoff ``limit`` (B,) on, (B, num_samples)."""
    shape = len(logits), local.num_samples
    if logits.shape[1] == 0:
        return torch.full(shape, exchange_protocol.NO_FINITE, device=logits.device)
    return backend.module.shard_winners(local, logits, limit, known).view(shape)  # type: ignore[no-any-return]


def mass_of(part: Part, kept: Kept) -> Tensor:
    """Returns the mass of the shard's kept tokens, (B, 1) int64."""
    processed, first = kept.logits.processed, kept.local.shard.first_token
    return part.backend.shard_limits.mass_of(processed, kept.limit, kept.scale, first)  # type: ignore[no-any-return]
