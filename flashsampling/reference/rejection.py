"""Rejection sampling of drafts: which are accepted, and which token replaces a refused one. Contract, section 7.

Pure torch on any device, a few rows of probabilities at a time, in float64: memory does not grow with the number of
rows. The arithmetic of logits is the oracle's, so p is the distribution that ``sample`` draws from. A q below 0 counts
as 0; otherwise drafts could be accepted, and tokens recovered, that ``sample`` never draws.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

import torch
from torch import Tensor

from .. import noise
from ..inputs import SampleInputs
from . import logit_transforms, oracle, streaming
from .logit_transforms import GREEDY_BELOW


def probabilities(
    logits: oracle.Logits,  # (B, V)
    step: SampleInputs,
) -> Tensor:
    """Returns (B, V) float64: the probability with which ``sample`` draws each token. 1 and 0 in a greedy row; NaN in a
    row without a token."""
    rows = step.rows()
    below = logit_transforms.relative(logits.processed, rows.temperature)
    scores = oracle.scores_of_logits(logits.processed, rows.temperature, below.new_zeros(1, 1, 1).float())[:, 0]
    kept = logits.allowed if logits.kept is None else logits.kept
    if kept is not None:
        below = below.masked_fill(~kept, float("-inf"))
    if logits.allowed is not None:
        scores = scores.masked_fill(~logits.allowed, float("-inf"))
    first = oracle.winners(scores)  # -1: none; a greedy row's token
    undefined = (first < 0) | logit_transforms.has_undefined_filter(step.params, first.device)
    tokens = torch.arange(below.shape[1], device=below.device)
    greedy = (tokens == first[:, None]).double()
    p = torch.where(rows.temperature[:, None] < GREEDY_BELOW, greedy, below.softmax(dim=-1))
    return torch.where(undefined[:, None], float("nan"), p)


def _at(values: Tensor, ids: Tensor) -> Tensor:
    """Returns (B,): one of each row's values (B, V), 0 for an id out of range."""
    there = (ids >= 0) & (ids < values.shape[1])
    return torch.where(there, values.gather(1, torch.where(there, ids, 0)[:, None])[:, 0], 0.0)


@torch.no_grad()
def accept(
    step: SampleInputs,
    draft_token_ids: Tensor,  # (B,) int64; -1 or out of range: never accepted
    draft_probs: Tensor | None,  # (N, V); None: each was certain
    draft_rows: Tensor,  # (B,) int64, in range: the row of ``draft_probs`` for each
) -> Tensor:
    """Returns (B,) bool: u q(x) < p(x) with a uniform coin u per row, which has probability min(1, p(x) / q(x))."""
    rows = step.rows()
    accepted = torch.empty(len(draft_token_ids), dtype=torch.bool, device=draft_token_ids.device)
    for some, part, logits in streaming.row_groups(step):
        p = probabilities(logits, part)
        ids = draft_token_ids[some]
        u = noise.coin(rows.seed[some], rows.offset[some])
        q: Tensor | float = 1.0
        if draft_probs is not None:
            q = draft_probs[draft_rows[some], ids.clamp(0, step.vocab_size - 1)].clamp(min=0.0).double()
        accepted[some] = u * q < _at(p, ids)
    return accepted


@torch.no_grad()
def recover(
    step: SampleInputs,  # the noise has its stream
    draft_token_ids: Tensor,  # (B,) int64: the refused drafts
    draft_probs: Tensor | None,  # (N, V); None: each was certain
    draft_rows: Tensor,  # (B,) int64, in range: the row of ``draft_probs`` for each
) -> Tensor:
    """Returns (B,) int64, drawn from max(p - q, 0), or from p if that is 0 everywhere, which needs a q that sums to
    more than 1. -1 in a row without a token, or with a NaN in q."""
    rows, draw = step.rows(), torch.zeros(1, dtype=torch.int64, device=draft_token_ids.device)
    token_ids = torch.empty_like(draft_token_ids)
    for some, part, logits in streaming.row_groups(step):
        p = probabilities(logits, part)
        if draft_probs is None:
            tokens = torch.arange(step.vocab_size, device=p.device)
            left = torch.where(tokens == draft_token_ids[some, None], 0.0, p)
        else:
            left = (p - draft_probs[draft_rows[some], : step.vocab_size].clamp(min=0.0).double()).clamp(min=0.0)
        left = torch.where((left == 0.0).all(dim=-1, keepdim=True), p, left)
        gumbel = noise.gumbel(rows.seed[some], rows.offset[some], draw, 0, step.vocab_size, part.params.stream)
        token_ids[some] = oracle.winners(left.log() + gumbel[:, 0].double())
    return token_ids
