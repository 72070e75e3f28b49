"""The oracle: the contract as plain code, with every score in memory. For tests and comparison, not for speed."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from .. import noise
from ..exchange_protocol import WHOLE
from ..inputs import SampleInputs
from ..outputs import SampleResult, layout
from ..sampling_params import SamplingParams
from . import logit_transforms
from .logit_transforms import GREEDY_BELOW


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context in which ``torch.autocast`` does not round matrices."""
    if not is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def may_round(states: Tensor) -> bool:
    """Returns whether a float32 matmul of these states may round them (``torch.set_float32_matmul_precision`` and newer
    settings). A GPU rounds to TF32, which holds every 16-bit number; some CPUs to bfloat16, which does not hold
    float16."""
    if states.dtype == torch.bfloat16 or (states.is_cuda and states.dtype == torch.float16):
        return False
    try:  # not allow_tf32, which raises once these newer settings were used
        precision = (torch.backends.cuda if states.is_cuda else torch.backends.mkldnn).matmul.fp32_precision
    except AttributeError:  # torch 2.8
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in ("none", "ieee")


def exact_logits(
    hidden_states: Tensor,  # (B, D)
    weight: Tensor,  # (V, D)
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns (B, V) logits accumulated in ``dtype``. 16-bit inputs are widened first, so no product or sum is rounded
    to 16 bits. If the process lets float32 matmuls round (``may_round``), inputs go through float64. Autocast is
    disabled."""
    with without_autocast(hidden_states.device):
        if may_round(hidden_states):
            return (hidden_states.double() @ weight.double().T).to(dtype)
        return hidden_states.to(dtype) @ weight.to(dtype).T


def scores_of_logits(
    logits: Tensor,  # (B, V) float32 or float64
    temperature: Tensor,  # (B,) float32
    gumbel: Tensor,  # (B, S, V)
) -> Tensor:
    """Returns (B, S, V) scores: ``logits / temperature + gumbel``, times ``min(temperature, 1)`` so that no finite
    logit overflows. One factor per row does not change the order. The scores of a greedy row are its logits."""
    temperature = torch.where(temperature < GREEDY_BELOW, 0.0, temperature)[:, None, None]
    return logits[:, None, :] / temperature.clamp(min=1.0) + temperature.clamp(max=1.0) * gumbel


class Logits(NamedTuple):
    """The logits of all tokens of some rows."""

    raw: Tensor  # (B, V) after the LM head's bias, scale and soft cap
    processed: Tensor  # (B, V) after logit bias, penalties and mask
    allowed: Tensor | None  # (B, V) bool; None: all
    kept: Tensor | None  # (B, V) bool, what the filters keep, before the mask's tokens are removed; None: all


def head_logits(step: SampleInputs, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns (B, V) in ``dtype``: the logits before any sampling parameter."""
    if step.logits is not None:
        return step.logits[:, : step.vocab_size].to(dtype)
    return exact_logits(step.hidden_states, step.weight[: step.vocab_size], dtype)


def transform_logits(
    logits: Tensor,  # (B, V)
    temperature: Tensor,  # (B,)
    params: SamplingParams,
) -> Logits:
    """Applies the sampling parameters that change or filter logits."""
    raw = logit_transforms.raw(logits, params)
    processed = logit_transforms.processed(raw, params)
    allowed = logit_transforms.allowed(params, raw.shape[1])
    kept = None
    if params.may_filter():
        kept = logit_transforms.kept(processed, temperature, **params.filter_values())
    return Logits(raw, processed, allowed, kept)


def token_scores(
    logits: Logits,
    step: SampleInputs,
    draws: Tensor,  # (S,) int64
) -> Tensor:
    """Returns (B, S, V) scores before the filters; -inf for a token that is not allowed."""
    rows = step.rows()
    gumbel = noise.gumbel(rows.seed, rows.offset, draws, 0, step.vocab_size, step.params.stream)
    scores = scores_of_logits(logits.processed, rows.temperature, gumbel.to(logits.processed.dtype))
    return scores if logits.allowed is None else scores.masked_fill(~logits.allowed[:, None], float("-inf"))


def scores(step: SampleInputs, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns every score, (B, num_samples, vocab_size) in ``dtype``, before the filters."""
    draws = torch.arange(step.num_samples, device=step.hidden_states.device)
    return token_scores(transform_logits(head_logits(step, dtype), step.rows().temperature, step.params), step, draws)


def winners(
    scores: Tensor,  # (..., V)
    kept: Tensor | None = None,  # (..., V) bool; None: all
) -> Tensor:
    """Returns (...) int64: the lowest id among the highest kept scores; -1 where any score is NaN or none is finite."""
    defined = scores.isfinite().any(dim=-1) & ~scores.isnan().any(dim=-1)
    if kept is not None:
        scores = scores.masked_fill(~kept, float("-inf"))
    best = scores.amax(dim=-1, keepdim=True)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    lowest = torch.where(scores == best, ids, scores.shape[-1]).amin(dim=-1)
    return torch.where(defined, lowest, -1)


def draw(
    logits: Logits,
    step: SampleInputs,
    draws: Tensor,  # (S,) int64
) -> Tensor:
    """Returns (B, S) int64 token ids; -1 also in a row with a filter that is NaN."""
    kept = logits.kept
    token_ids = winners(token_scores(logits, step, draws), None if kept is None else kept[:, None])
    undefined = logit_transforms.has_undefined_filter(step.params, token_ids.device)
    return token_ids.masked_fill(undefined[:, None], -1)


def outputs(
    token_ids: Tensor,  # (B, num_samples) int64
    logits: Logits,
    step: SampleInputs,
) -> dict[str, Tensor]:
    """Returns all outputs by the names of ``SampleOutput``, (B, columns)."""
    params, parts, drawn = step.params, {"token_ids": token_ids}, token_ids
    token_ids = token_ids if params.scored_ids is None else params.scored_ids
    if params.logprobs or params.top_logprobs or params.logprob_ids is not None:
        raw_logprobs = logit_transforms.logprobs(logits.raw)
    if params.logprobs:
        processed = logit_transforms.kept_logprobs(logits.processed, step.rows().temperature, logits.kept)
        parts["logprobs"] = logit_transforms.at(raw_logprobs, token_ids)
        no_token = (drawn < 0).all(1, keepdim=True)
        parts["processed_logprobs"] = logit_transforms.at(processed, token_ids).masked_fill(no_token, float("nan"))
        parts["ranks"] = logit_transforms.ranks(logits.raw, token_ids)
    if params.top_logprobs:
        parts["top_token_ids"] = logit_transforms.top(logits.raw, params.top_logprobs)
        parts["top_logprobs"] = logit_transforms.at(raw_logprobs, parts["top_token_ids"])
    if params.logprob_ids is not None:
        parts["given_logprobs"] = logit_transforms.at(raw_logprobs, params.logprob_ids)
    if params.kept_words:
        kept = logit_transforms.drawn_from(logits.processed, step.rows().temperature, logits.kept)
        undefined = logit_transforms.has_undefined_filter(params, kept.device) | (drawn[:, 0] < 0)
        kept = kept & ~undefined[:, None]
        parts["kept_counts"] = kept.sum(1, keepdim=True)
        parts["kept_mask"] = logit_transforms.pack_bits(kept)
    if params.logsumexp:
        parts["logsumexp"] = logits.raw.double().logsumexp(dim=-1, keepdim=True).float()
    return parts


def unsupported(step: SampleInputs) -> str | None:
    """Returns why the oracle cannot run a step, or None."""
    return None if step.shard == WHOLE else "a shard of a vocabulary: the oracle knows whole ones"


@torch.no_grad()
def run(step: SampleInputs) -> SampleResult:
    """Runs a step, as ``backends`` says."""
    logits = transform_logits(head_logits(step), step.rows().temperature, step.params)
    token_ids = draw(logits, step, torch.arange(step.num_samples, device=step.hidden_states.device))
    return layout(len(token_ids), step.num_samples, step.params).join(outputs(token_ids, logits, step))
