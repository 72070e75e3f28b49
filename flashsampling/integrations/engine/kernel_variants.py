"""Calls that compile every kernel that an engine's batches may need.

A parameter is a value at run time, whether a row has it or not, so a batch has no more than its rows need. A call's
kernels depend on whether it changes logits, filters tokens or returns log-probabilities. The Hopper kernel also sorts
biases, of which there are two sizes.
"""

from typing import Any

import torch
from torch import Tensor

from ...param_parsers import MAX_BIASED
from ...token_counts import Counted

FEW_BIASES = 64  # biased tokens of a row; MAX_BIASED if a row has more
FILTERS = ("top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")

Rows = dict[str, Tensor]  # sampling parameters of a batch, (B,) each, by name


def example_calls(rows: Rows, vocab_size: int, counts: Counted | None = None) -> list[dict[str, Any]]:
    """Returns the arguments of calls, as ``warmup`` takes them. The last has everything. ``counts``: None in an engine
    without penalties."""
    device, batch = rows["seed"].device, len(rows["seed"])

    def biases(count: int) -> dict[str, Any]:
        ids = torch.full((batch, count), -1, dtype=torch.int32, device=device)
        return {"logit_bias": (ids, torch.zeros(ids.shape, device=device))}

    mask = torch.full((batch, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
    changes = {"token_mask": mask, **biases(MAX_BIASED)}
    if counts is not None:
        changes |= {"token_counts": counts, **{name: rows[name] for name in PENALTIES}}
    filters = {name: rows[name] for name in FILTERS}
    everything = {**changes, **filters, "return_logprobs": True, "top_logprobs": 1}
    return [{}, biases(FEW_BIASES), changes, filters, everything]


def default_rows(batch: int, device: torch.device) -> Rows:
    """Returns parameters that are off."""
    zeros, ones = torch.zeros(batch, device=device), torch.ones(batch, device=device)
    filters = {"top_k": zeros.int(), "top_p": ones, "min_p": zeros}
    penalties = {"repetition_penalty": ones, "frequency_penalty": zeros, "presence_penalty": zeros}
    return {"seed": zeros.long(), "temperature": ones, **filters, **penalties}
