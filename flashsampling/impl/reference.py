"""The oracle: the contract written out, every score in memory. For tests and comparison, not for speed."""

import torch
from torch import Tensor

from .. import noise
from ..exchange import WHOLE
from ..step import Drawn, Step

DOES = ("stream",)
GREEDY_BELOW = 1e-6


def exact_logits(
    hidden_states: Tensor,  # (B, D)
    weight: Tensor,  # (V, D)
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(B, V) logits accumulated in ``dtype``: 16-bit inputs are widened first, so no product or sum is rounded to 16 bits.

    fp32 inputs on CUDA go through float64 when the process allows TF32, which would drop 13 bits of them. (16-bit inputs
    fit TF32's mantissa whole.)
    """
    if hidden_states.is_cuda and hidden_states.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
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


def scores(step: Step, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every score, (B, num_samples, vocab_size) in ``dtype``."""
    rows = step.rows()
    draws = torch.arange(step.num_samples, device=step.hidden_states.device)
    logits = exact_logits(step.hidden_states, step.weight[: step.vocab_size], dtype)
    gumbel = noise.gumbel(rows.seed, rows.offset, draws, 0, step.vocab_size, step.asked.stream)
    return scores_of_logits(logits, rows.temperature, gumbel.to(dtype))


def winners(
    scores: Tensor,  # (..., V)
) -> Tensor:
    """(...) int64: the lowest id among the highest scores; -1 where a score is NaN or none is finite."""
    best = scores.amax(dim=-1, keepdim=True)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    lowest = torch.where(scores == best, ids, scores.shape[-1]).amin(dim=-1)
    defined = scores.isfinite().any(dim=-1) & ~scores.isnan().any(dim=-1)
    return torch.where(defined, lowest, -1)


def unsupported(step: Step) -> str | None:
    """Why the oracle cannot do a step, or None."""
    return None if step.shard == WHOLE else "a shard of a vocabulary: the oracle knows whole ones"


def run(step: Step) -> Drawn:
    """See ``backends``."""
    return Drawn(winners(scores(step)).flatten())
