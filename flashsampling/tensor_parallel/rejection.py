"""Rejection sampling of drafts over sharded logits: section 7 of the contract, as ``reference/rejection`` does on one
rank.

Two collective rounds follow those of ``filtered_sampling``:

    round       payload of each rank
    drafts      per position: the mass of the shard's kept tokens; per draft: its share of its row's highest mass, from
                the rank that has the token, 0 from the others
    the end     per request: the packed winner behind its accepted drafts, and whether it comes from max(p - q, 0)

All ranks conclude from the same numbers which drafts are accepted. p is float64, a share over a sum of integers, so it
does not depend on the cut of the vocabulary; it may differ from one rank's p by a relative 1e-8. Every rank has all of
q, and messages hold a hash of it. A rank reads q at the drafts, and its shard's part of one row per request.

``shard_winners`` (``backends``) draws the last token: from the logits if all drafts are accepted, else from
log(max(p - q, 0)), or from log(p) if that is 0 on all ranks.
"""

import torch
from torch import Tensor

from .. import exchange_protocol, noise
from ..exchange_protocol import NAN, NO_TOKEN
from ..inputs import DraftChains, SampleInputs
from ..noise import Stream
from ..outputs import SampleResult
from ..reference.logit_transforms import GREEDY_BELOW, LOWEST, keys_of, places_of
from ..sampling_params import DEFAULT_PARAMS
from . import cutoffs
from .cutoffs import FixedPointScale, rows_at_once
from .filtered_sampling import Kept, Part, mass_of, prepare, rounds, winners_of


@torch.no_grad()  # q may have a gradient, from the drafter
def reject(part: Part, step: SampleInputs) -> SampleResult:
    """Verifies ``step.drafted``. Returns (2 * B,) int64 on every rank: the requests' last tokens, then accepted counts.

    Args:
        part: this rank's part of the group.
        step: a step over the shard, with a row per position and one draw; its parameters are the whole vocabulary's.
    """
    drafted = step.drafted
    assert drafted is not None
    with rounds(part, step):
        meet, kept = prepare(part, step)
        positions = len(kept.limit)
        met = meet(torch.cat([mass_of(part, kept)[:, 0], _shares(kept, drafted).flatten()]))
        mass = met[:, :positions].sum(dim=0).double() / kept.scale.unit
        shares = met[:, positions:].sum(dim=0).view(torch.float64).view(drafted.token_ids.shape)
        num_accepted = _accepted(kept, drafted, mass, shares, part.vocab_size)

        last = num_accepted[:, None]
        refused = torch.nn.functional.pad(drafted.token_ids, (0, 1), value=-1).gather(1, last)[:, 0]
        place = torch.nn.functional.pad(drafted.places, (0, 1)).gather(1, last)[:, 0]
        end = drafted.rows.gather(1, last)[:, 0]
        refused = torch.where(refused < part.vocab_size, refused, -1)  # an id that is no token is no draft
        winners, is_left = _winners(part, _at(kept, end), mass[end], refused, drafted.probs, place)
        theirs, left = meet(torch.stack([winners, is_left.long()], dim=1)).unbind(dim=2)
        usable = torch.where(left == left.amax(dim=0), theirs, exchange_protocol.NO_FINITE)
        best = (usable & NAN).amax(dim=0)
        # a request has no token if its row has none or, after a refusal, if q is undefined
        has_token = kept.defined[end] & ((refused < 0) | (usable.amax(dim=0) > 0) & (best != NAN))
        token_ids = torch.where(has_token, best & NO_TOKEN ^ NO_TOKEN, -1)
    failed = part.transport.end()
    if failed is not None:
        token_ids, num_accepted = token_ids.masked_fill(failed, -1), num_accepted.masked_fill(failed, 0)
    return SampleResult(torch.cat([token_ids, num_accepted]))


def _shares(kept: Kept, drafted: DraftChains) -> Tensor:
    """Returns the float64 bits of each draft's share, (B, n) int64; 0 unless the draft is in this shard and kept."""
    logits, first = kept.logits.processed, kept.local.shard.first_token
    ids, columns = drafted.token_ids, logits.shape[1]
    if columns == 0:
        return torch.zeros_like(ids)
    rows, own = drafted.rows[:, :-1].flatten(), (ids - first).flatten()
    there = (own >= 0) & (own < columns)
    logit = logits[rows, torch.where(there, own, 0)][:, None]
    there = there & (places_of(keys_of(logit)[:, 0], ids.flatten()) >= kept.limit[rows])
    share = kept.scale.at(rows).share(logit)[:, 0]
    return torch.where(there, share, 0.0).view(torch.int64).view(ids.shape)


def _is_certain(scale: FixedPointScale) -> Tensor:
    """Returns whether p is 1 at the row's first token, (B,) bool: greedy rows and rows with a logit of +inf."""
    return (scale.temperature < GREEDY_BELOW) | scale.top.isposinf()


def _accepted(kept: Kept, drafted: DraftChains, mass: Tensor, shares: Tensor, vocab_size: int) -> Tensor:
    """Counts the accepted drafts, (B,) int64: those before the first that its coin refuses."""
    ids, before, rows = drafted.token_ids, drafted.rows[:, :-1], kept.local.rows()
    p = torch.where(_is_certain(kept.scale)[before], (ids == kept.first[before]).double(), shares / mass[before])
    q: Tensor | float = 1.0
    if drafted.probs is not None:
        there = (ids >= 0) & (ids < vocab_size)
        q = torch.where(there, drafted.probs[drafted.places, torch.where(there, ids, 0)], 0.0).clamp(min=0.0).double()
    u = noise.coin(rows.seed, rows.offset)[before]
    holds = (ids >= 0) & kept.defined[before] & (u * q < p)
    return holds.cumprod(dim=1).sum(dim=1)


def _at(kept: Kept, rows: Tensor) -> Kept:
    """Selects rows. Keeps the logits' row stride, on which Triton kernels are specialised."""
    local, processed = kept.local, kept.logits.processed
    of_rows = {name: value.index_select(0, rows) for name, value in local.rows()._asdict().items()}
    some = _expand(processed.index_select(0, rows), processed.stride(0))
    return Kept(
        local._replace(hidden_states=some, params=DEFAULT_PARAMS, **of_rows),
        kept.logits._replace(raw=some, processed=some),
        None,
        kept.limit.index_select(0, rows),
        kept.scale.at(rows),
        kept.place.index_select(0, rows),
        kept.defined.index_select(0, rows),
    )


def _expand(logits: Tensor, stride: int) -> Tensor:
    columns = logits.shape[1]
    return logits if stride <= columns else torch.nn.functional.pad(logits, (0, stride - columns))[:, :columns]


def _winners(
    part: Part, ends: Kept, mass: Tensor, refused: Tensor, probs: Tensor | None, place: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the shard's packed winners behind accepted drafts, (B,), and whether max(p - q, 0) has anything left."""
    backend, local, processed = part.backend, ends.local, ends.logits.processed
    behind = winners_of(backend, local, processed, ends.limit)[:, 0]
    left, is_left = _left(ends, mass, refused, probs, place)
    recovery = local._replace(
        hidden_states=left,
        params=DEFAULT_PARAMS._replace(stream=Stream.RECOVERY),
        temperature=torch.ones_like(local.rows().temperature),
    )
    recovered = winners_of(backend, recovery, left, torch.full_like(ends.limit, LOWEST))[:, 0]
    recovered = recovered.masked_fill(left.isnan().any(dim=1), NAN)
    is_refused = refused >= 0
    return torch.where(is_refused, recovered, behind), is_refused & is_left


def _left(ends: Kept, mass: Tensor, refused: Tensor, probs: Tensor | None, place: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log(max(p - q, 0)) of this shard, (B, n) float32, or log(p) where the former is 0 everywhere, and whether
    it is the former, (B,) bool. NaN where q is NaN."""
    processed, first = ends.logits.processed, ends.local.shard.first_token
    batch, columns = processed.shape
    tokens = torch.arange(first, first + columns, device=processed.device)
    is_certain = _is_certain(ends.scale)
    out = _expand(torch.empty_like(processed, memory_format=torch.contiguous_format), processed.stride(0))
    is_left = torch.empty(batch, dtype=torch.bool, device=processed.device)
    at_once = rows_at_once(processed)
    for begins in range(0, batch, at_once):
        some = slice(begins, begins + at_once)
        scale = FixedPointScale(ends.scale.top[some], ends.scale.temperature[some], ends.scale.unit)
        kept = cutoffs.is_kept(processed[some], ends.limit[some], first)
        p = torch.where(kept, scale.share(processed[some]), 0.0) / mass[some, None]
        p = torch.where(is_certain[some, None], (tokens == ends.first[some, None]).double(), p)
        if probs is None:
            left = torch.where(tokens == refused[some, None], 0.0, p)
        else:
            left = (p - probs[place[some], first : first + columns].clamp(min=0.0).double()).clamp(min=0.0)
        has_any = ((left > 0) | left.isnan()).any(dim=1)
        out[some] = torch.where(has_any[:, None], left, p).log().float()
        is_left[some] = has_any
    return out, is_left
