"""The oracle: the contract written out, every score in memory. For tests and comparison, not for speed."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from .. import noise
from ..exchange_protocol import WHOLE
from ..inputs import SampleInputs, SampleResult, SamplingParams, layout
from . import logit_transforms
from .logit_transforms import GREEDY_BELOW

DOES = (
    *(
        "stream",
        "bias",
        "logit_scale",
        "soft_cap",
        "dense_bias",
        "bias_ids",
        "bias_values",
        "counts",
        "repetition_penalty",
    ),
    *("frequency_penalty", "presence_penalty", "token_mask", "top_k", "top_p", "min_p", "joint_top_p"),
    *("logprobs", "top_logprobs", "logprob_ids", "logsumexp"),
)
DOES_OF_LOGITS = DOES


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Where matrices are multiplied as they are, also inside ``torch.autocast``."""
    if not is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def may_round(states: Tensor) -> bool:
    """Whether the process allows a float32 matmul on their device to round them: ``torch.set_float32_matmul_precision`` and its
    like. A GPU rounds to TF32, which holds 16-bit numbers whole; some CPUs to bfloat16, which does not hold float16."""
    if states.dtype == torch.bfloat16 or (states.is_cuda and states.dtype == torch.float16):
        return False
    try:  # allow_tf32 raises where the newer settings, these, have been used
        precision = (torch.backends.cuda if states.is_cuda else torch.backends.mkldnn).matmul.fp32_precision
    except AttributeError:  # torch 2.8
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in ("none", "ieee")


def exact_logits(
    hidden_states: Tensor,  # (B, D)
    weight: Tensor,  # (V, D)
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(B, V) logits accumulated in ``dtype``: 16-bit inputs are widened first, so no product or sum is rounded to 16 bits.

    Inputs go through float64 where the process lets float32 matmuls round them (``may_round``). Autocast, which would round
    the inputs to 16 bits, is left out.
    """
    with without_autocast(hidden_states.device):
        return _exact_logits(hidden_states, weight, dtype)


def _exact_logits(hidden_states: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if may_round(hidden_states):
        return (hidden_states.double() @ weight.double().T).to(dtype)
    return hidden_states.to(dtype) @ weight.to(dtype).T


def scores_of_logits(
    logits: Tensor,  # (B, V) float32 or float64
    temperature: Tensor,  # (B,) float32
    gumbel: Tensor,  # (B, S, V)
) -> Tensor:
    """(B, S, V) scores, ``logits / temperature + gumbel`` times ``min(temperature, 1)``: the same order, since a row's scores
    are all multiplied alike, and no finite logit overflows at any temperature. A greedy row's are its logits."""
    temperature = torch.where(temperature < GREEDY_BELOW, 0.0, temperature)[:, None, None]
    return logits[:, None, :] / temperature.clamp(min=1.0) + temperature.clamp(max=1.0) * gumbel


class Logits(NamedTuple):
    """Of all tokens of some rows, and what became of them."""

    raw: Tensor  # (B, V) after the head
    processed: Tensor  # (B, V) after the request's bias, penalties and mask
    allowed: Tensor | None  # (B, V) bool; None: all
    kept: Tensor | None  # (B, V) bool, what the filters keep, of tokens that are not allowed too; None: all


def product(step: SampleInputs, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B, V) in ``dtype``, whatever else is asked for."""
    if step.logits is not None:
        return step.logits[:, : step.vocab_size].to(dtype)
    return exact_logits(step.hidden_states, step.weight[: step.vocab_size], dtype)


def logits_of(
    product: Tensor,  # (B, V)
    temperature: Tensor,  # (B,)
    params: SamplingParams,
) -> Logits:
    """What the head and the request make of it."""
    raw = logit_transforms.raw(product, params)
    processed = logit_transforms.processed(raw, params)
    allowed = logit_transforms.allowed(params, raw.shape[1])
    kept = None
    if {"top_k", "top_p", "min_p"} & set(params.names()):
        kept = logit_transforms.kept(
            processed, temperature, params.top_k, params.top_p, params.min_p, params.joint_top_p
        )
    return Logits(raw, processed, allowed, kept)


def scores_of(
    logits: Logits,
    step: SampleInputs,
    draws: Tensor,  # (S,) int64
) -> Tensor:
    """(B, S, V): what is kept has the score that it has without filters; a token that is not allowed has none, -inf."""
    rows = step.rows()
    gumbel = noise.gumbel(rows.seed, rows.offset, draws, 0, step.vocab_size, step.params.stream)
    scores = scores_of_logits(logits.processed, rows.temperature, gumbel.to(logits.processed.dtype))
    return scores if logits.allowed is None else scores.masked_fill(~logits.allowed[:, None], float("-inf"))


def scores(step: SampleInputs, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every score, (B, num_samples, vocab_size) in ``dtype``, before top-k, top-p and min-p."""
    draws = torch.arange(step.num_samples, device=step.hidden_states.device)
    return scores_of(logits_of(product(step, dtype), step.rows().temperature, step.params), step, draws)


def winners(
    scores: Tensor,  # (..., V)
    kept: Tensor | None = None,  # (..., V) bool; None: all
) -> Tensor:
    """(...) int64: the lowest id among the highest scores of what is kept; -1 where any score is NaN or none is finite."""
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
    """(B, S) int64 token ids. Filters change which token it is, not whether there is one; but a NaN among them does."""
    kept = logits.kept
    token_ids = winners(scores_of(logits, step, draws), None if kept is None else kept[:, None])
    for limit in (step.params.top_p, step.params.min_p):
        if isinstance(limit, Tensor):
            token_ids = token_ids.masked_fill(limit.isnan()[:, None], -1)
    return token_ids


def outcome(
    token_ids: Tensor,  # (B, num_samples) int64
    logits: Logits,
    step: SampleInputs,
) -> dict[str, Tensor]:
    """All parts of what a step gives."""
    params, parts = step.params, {"token_ids": token_ids}
    if params.logprobs or params.top_logprobs or params.logprob_ids is not None:
        raw_logprobs = logit_transforms.logprobs(logits.raw)
    if params.logprobs:
        processed = logit_transforms.kept_logprobs(logits.processed, step.rows().temperature, logits.kept)
        parts["logprobs"] = logit_transforms.at(raw_logprobs, token_ids)
        parts["processed_logprobs"] = logit_transforms.at(processed, token_ids)
        parts["ranks"] = logit_transforms.ranks(logits.raw, token_ids)
    if params.top_logprobs:
        parts["top_token_ids"] = logit_transforms.top(logits.raw, params.top_logprobs)
        parts["top_logprobs"] = logit_transforms.at(raw_logprobs, parts["top_token_ids"])
    if params.logprob_ids is not None:
        parts["given_logprobs"] = logit_transforms.at(raw_logprobs, params.logprob_ids)
    if params.logsumexp:
        parts["logsumexp"] = logits.raw.double().logsumexp(dim=-1, keepdim=True).float()
    return parts


def unsupported(step: SampleInputs) -> str | None:
    """Why the oracle cannot do a step, or None."""
    return None if step.shard == WHOLE else "a shard of a vocabulary: the oracle knows whole ones"


@torch.no_grad()
def run(step: SampleInputs) -> SampleResult:
    """See ``backends``."""
    logits = logits_of(product(step), step.rows().temperature, step.params)
    token_ids = draw(logits, step, torch.arange(step.num_samples, device=step.hidden_states.device))
    return layout(len(token_ids), step.num_samples, step.params).join(outcome(token_ids, logits, step))
