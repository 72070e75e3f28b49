"""What a request asks for, of a row whose logits lie on several ranks. What crosses is candidates, maxima and masses.

Every rank stores the logits of its shard, and nobody else sees them. The ranks meet in rounds, whose number is known to the
host before the first and the same on all ranks; after each one all have what all sent, (ranks, B, words), and conclude the same
from it, in integers or by sums in the order of the ranks:

    round       words per row of each rank
    highest     the highest processed logit and its token, or that there is a NaN; whether anything is finite
    few         if one small k is all rows': the places of the shard's first k tokens, which tell of top-p too (``limits``)
    top-k       else, if a row may have it: how many tokens for each value of a digit, once per digit
    top-p       likewise: their masses; in the last digit how many tokens
                (of modules of kernels, where each of these begins: of floors, or first tokens, and of the masses' sums)
    the draw    the packed winner of what is kept, per draw. For log-probabilities its logits, raw and processed, and the mass
                of what is kept. If wanted: the raw logits' log-sum-exp, the n highest of them, those of given ids
    ranks       for log-probabilities: how many raw logits are higher than the winner's, per draw

A round is one message of the transport for every ``room`` words, and what a transport promises of a plain step's message holds
for each of them: number, comparison, failure. Nothing here reads what is on the device; whatever a failed step
receives, no index is out of range.

An implementation does what it alone knows how to round (``backends``): the shard's logits, and the scores' winners. What is
found of these is in ``limits`` and ``parts``, or in modules of the same functions.
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
    """A rank's part in a group."""

    transport: Collectives
    backend: Backend
    ranges: list[tuple[int, int]]  # ids of every rank's tokens, [first, last)
    rank: int
    vocab_size: int  # of all ranks


class _Logits(NamedTuple):
    """Of a shard."""

    raw: Tensor  # (B, n) float32
    processed: Tensor  # (B, n) float32


class Kept(NamedTuple):
    """Of a step's rows, once all ranks know what is kept of them."""

    local: SampleInputs  # this rank's
    logits: _Logits
    known: Tensor | None  # of the processed ones, what ``limits.highest`` found
    limit: Tensor  # (B,) int64: the places from which on this rank's tokens are kept
    scale: FixedPointScale
    place: Tensor  # (B,) int64, of the row's first token
    defined: Tensor  # (B,) bool: it has a token

    @property
    def columns(self) -> dict[str, int]:
        """How many words a rank says of a row for the draw, by part, in the order of the message."""
        params, num_samples = self.local.params, self.local.num_samples
        draws = num_samples if params.logprobs else 0
        given = 0 if params.logprob_ids is None else params.logprob_ids.shape[1]
        columns = {"winners": num_samples, "logits": draws, "mass": int(params.logprobs)}
        return columns | {"logsumexp": int(params.needs_raw_mass()), "top": params.top_logprobs, "given": given}

    @property
    def first(self) -> Tensor:
        """(B,) int64: the ids of the rows' first tokens."""
        return self.place & NO_TOKEN ^ NO_TOKEN


@torch.no_grad()  # parameters of rows may have a gradient
def draw(part: Part, step: SampleInputs) -> SampleResult:
    """What ``backends.Backend.run`` gives, on every rank.

    Args:
        part: this rank's.
        step: of its shard; but what is asked for is the whole vocabulary's.
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
    """Around all rounds of a step, after which it is ended (``Collectives.end``): here, if something raises."""
    try:
        part.transport.begin(step._replace(vocab_size=part.vocab_size))
        yield
    except BaseException as error:  # the next step's messages say nothing of this one
        with contextlib.suppress(RuntimeError):  # a broken device's: what was raised says more
            part.transport.end(error)
        raise


def prepare(part: Part, step: SampleInputs) -> tuple[Collective, Kept]:
    """The rounds up to the draw, and how to meet in those that follow."""
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
        return theirs.contiguous().view(-1, *words.shape)  # kernels count on it

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
    """(B,) int64: the places from which on the filters keep this rank's tokens."""
    passes, limit = part.backend.shard_limits, None
    names = params.names()
    if "top_k" in names and not params.may_be_joint():
        if cutoffs.are_few(params.top_k):
            limit = passes.of_few(meet, processed, known, params.top_k, params.top_p, scale, shards)
        elif part.transport.skips:  # a number too: it may be another rank's tensor
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
    """All parts of what a step gives, once it is known what is kept."""
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
    """(B, num_samples) packed winners of the shard's tokens from ``limit`` (B,) on, of their logits (B, n)."""
    shape = len(logits), local.num_samples
    if logits.shape[1] == 0:
        return torch.full(shape, exchange_protocol.NO_FINITE, device=logits.device)
    return backend.module.shard_winners(local, logits, limit, known).view(shape)  # type: ignore[no-any-return]


def mass_of(part: Part, kept: Kept) -> Tensor:
    """(B, 1) int64: of what is kept of the shard."""
    processed, first = kept.logits.processed, kept.local.shard.first_token
    return part.backend.shard_limits.mass_of(processed, kept.limit, kept.scale, first)  # type: ignore[no-any-return]
