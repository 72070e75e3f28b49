"""Computes the outputs of sharded rows once the cutoffs are known: each rank's words, and the result of all ranks'
words.

``filtered_sampling`` lists the collective rounds.

Log-probabilities are sums in float64, in the order of the ranks.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..exchange_protocol import NAN, NO_TOKEN
from ..outputs import SampleResult, layout
from ..reference import logit_transforms
from ..reference.logit_transforms import values_of
from ..sampling_params import SamplingParams
from . import cutoffs
from .cutoffs import by_rows

if TYPE_CHECKING:
    from .filtered_sampling import Kept

LOW = 0xFFFFFFFF


def first(
    theirs: Tensor,  # (ranks, B, 2) int64, as ``limits.highest`` of each
    params: SamplingParams,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what all ranks know of each row after the first round: the sort key of its first token, (B,) int64
    (``logit_transforms.places_of``), that token's logit, (B,) float32, and whether the row has a token, (B,) bool."""
    best, finite = theirs.amax(dim=0).unbind(dim=1)
    defined = (finite > 0) & (best != NAN)
    for limit in (params.top_p, params.min_p):
        if isinstance(limit, Tensor):
            defined &= ~limit.isnan()
    place = best - (2**31 << 31)
    return place, values_of(place >> 31), defined


def words(
    kept: "Kept",
    winners: Tensor,  # (B, num_samples) int64, packed: the shard's
    mass: Tensor | None,  # (B, 1) int64, of the shard's kept tokens; None without log-probabilities
) -> Tensor:
    """Returns this rank's payload, (B, n) int64, with ``Kept.columns`` in order."""
    params, (raw, processed), first_token = kept.local.params, kept.logits, kept.local.shard.first_token
    said = [winners]
    if mass is not None:
        own = (winners & NO_TOKEN ^ NO_TOKEN) - first_token
        said += [_at(raw, own) << 32 | _at(processed, own) & LOW, mass]
    if params.needs_raw_mass():
        said.append(_logsumexp(raw).view(torch.int64)[:, None])
    if params.top_logprobs:
        said.append(cutoffs.highest_places(raw, first_token, params.top_logprobs))
    if params.logprob_ids is not None:
        said.append(torch.where(params.logprob_ids >= 0, _at(raw, params.logprob_ids) & LOW | 1 << 32, 0))
    return torch.cat(said, dim=1)


def conclude(
    theirs: Tensor,  # (ranks, B, n): all ranks' ``words``
    kept: "Kept",
) -> tuple[SampleResult, Tensor | None]:
    """Returns the step's result without the winners' ranks (``put_ranks``), and the raw logits (B, S) if ranks are
    wanted."""
    params, scale, num_samples = kept.local.params, kept.scale, kept.local.num_samples
    said = dict(zip(kept.columns, theirs.split(list(kept.columns.values()), dim=2)))
    keys = said["winners"] & NAN
    best = keys.amax(dim=0)
    token_ids = torch.where(kept.defined[:, None], best & NO_TOKEN ^ NO_TOKEN, -1)
    parts, raw = {"token_ids": token_ids}, None
    if params.needs_raw_mass():
        lse = said["logsumexp"][:, :, 0].contiguous().view(torch.float64).logsumexp(dim=0)[:, None]
    if params.logprobs:
        owner = (keys == best).long().argmax(dim=0, keepdim=True)
        both = said["logits"].gather(0, owner)[0]
        raw, processed = _float32(both >> 32), _float32(both)
        below = logit_transforms.relative(processed, scale.temperature, scale.top[:, None])
        log_p = torch.where(scale.top.isposinf()[:, None], 0.0, below - scale.log(said["mass"].sum(dim=0)))
        no_token = token_ids < 0
        parts["logprobs"] = (raw.double() - lse).float().masked_fill(no_token, float("nan"))
        parts["processed_logprobs"] = log_p.float().masked_fill(no_token, float("nan"))
        parts["ranks"] = torch.zeros_like(token_ids)
    if params.top_logprobs:
        places = cutoffs.highest_of_all(said["top"])
        parts["top_token_ids"] = (places & NO_TOKEN ^ NO_TOKEN).masked_fill(lse.isnan(), -1)
        parts["top_logprobs"] = (values_of(places >> 31).double() - lse).float()
    if params.logprob_ids is not None:
        given = said["given"].amax(dim=0)
        parts["given_logprobs"] = torch.where(given > 0, (_float32(given).double() - lse).float(), float("nan"))
    if params.logsumexp:
        parts["logsumexp"] = lse.float()
    return layout(len(token_ids), num_samples, params).join(parts), raw


def above(
    raw: Tensor,  # (B, n) float32
    logits: Tensor,  # (B, S) float32
) -> Tensor:
    """Counts the shard's raw logits that are higher, (B, S) int64."""
    columns = [
        by_rows(lambda raw, one: (raw > one).sum(dim=1, keepdim=True), raw, one) for one in logits.split(1, dim=1)
    ]
    return torch.cat(columns, dim=1)


def put_ranks(
    drawn: SampleResult,  # its ranks are written to
    theirs: Tensor,  # (ranks, B, S): all ranks' ``above``
    kept: "Kept",
) -> None:
    """Writes the winners' ranks among all tokens."""
    parts = layout(theirs.shape[1], theirs.shape[2], kept.local.params).split(drawn, theirs.shape[1])
    parts["ranks"].copy_((1 + theirs.sum(dim=0)).masked_fill(parts["token_ids"] < 0, -1))


def _at(
    logits: Tensor,  # (B, n) float32
    index: Tensor,  # (B, m) int64
) -> Tensor:
    """Returns the bits of the logits at ``index``, (B, m) int64; any bits where the index is out of range."""
    columns = logits.shape[1]
    if columns == 0:
        return torch.zeros_like(index)
    return logits.gather(1, index.clamp(0, columns - 1)).contiguous().view(torch.int32).long()


def _float32(bits: Tensor) -> Tensor:
    """Returns the low halves of int64 as float32."""
    low = bits & LOW
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32).view(torch.float32)


def _logsumexp(raw: Tensor) -> Tensor:
    """Returns log(sum(exp(row))), (B,) float64."""
    if raw.shape[1] == 0:
        return torch.full((len(raw),), float("-inf"), dtype=torch.float64, device=raw.device)
    return by_rows(lambda raw: raw.double().logsumexp(dim=1), raw)
