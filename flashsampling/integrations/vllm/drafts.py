"""vLLM's drafts: every position that has a logit is a row of the step, and drafts hold while they are what it draws there.

That is ``flashsampling.verify`` by matching, of which ``sample`` and ``acceptance.verify_by_match`` are the two halves; between them a row
may ask for what ``verify`` has per request alone, or not at all: biases that end along the drafts, log-probabilities.

Drafts have to be certain, as vLLM's are unless it is told otherwise: the drafter's best tokens. The target's output begins with
them with one probability, that of its drawing them, whoever verifies; so matching accepts as many as anything that draws as the
target does. Of drafts that are drawn vLLM's sampler accepts more, by their probabilities: those are refused.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...speculative.drafts import DraftBatch
from ..engine.common import to_device
from ..engine.plugin import Refused


def most_drafts_of(runner: Any, rejection_sampler: type) -> int:
    """How many drafts a request may have in a step of a runner whose model is loaded; 0: no speculative decoding. Refused:
    their acceptance is something else than matching certain drafts."""
    if runner.vllm_config.speculative_config is None:
        return 0
    most, kind = int(runner.num_speculative_steps), type(runner.rejection_sampler)
    if runner.speculator is None or kind is not rejection_sampler:
        raise Refused(f"speculative decoding whose drafts go to a {kind.__name__}")
    unmet = (
        (
            runner.speculator.draft_logits is not None,
            "speculative decoding with draft_sample_method=probabilistic, where vLLM accepts more drafts than matching would",
        ),
        (
            runner.rejection_sampler.synthetic_conditional_rates is not None,
            "speculative decoding with rejection_sample_method=synthetic, which accepts drafts whatever they are",
        ),
        (runner.decode_query_len != most + 1, f"a step has {runner.decode_query_len} new tokens, and {most} drafts"),
    )
    for is_so, why in unmet:
        if is_so:
            raise Refused(why)
    return most


def given_of(input_batch: Any, most_drafts: int) -> DraftBatch:
    """A batch's drafts, which the model has read: of a request with n of them those at the last n of its n + 1 logits."""
    batch, bounds = input_batch.num_reqs, input_batch.cu_num_logits_np.astype(np.int64)
    rows = np.delete(np.arange(bounds[-1]), bounds[:-1])
    there = to_device(np.concatenate((bounds - np.arange(batch + 1), rows)), input_batch.logits_indices.device)
    places = input_batch.logits_indices.index_select(0, there[batch + 1 :])
    return DraftBatch(
        input_batch.input_ids.index_select(0, places).long(), None, there[: batch + 1], batch, most_drafts
    )


def with_stops_ended(
    values: Tensor,  # (R, n) float32; -inf of a stop token
    least: Tensor,  # (R,) int32: tokens that a sequence has to have before its stop tokens may be drawn
    positions: Tensor,  # (R,) int64: of the last token that it has
) -> Tensor:
    """Biases (R, n), 0 of stop tokens that may be drawn. The device alone knows: when vLLM's host schedules a step, it takes
    all drafts of the step before for accepted."""
    return values.masked_fill((positions + 1 >= least)[:, None] & values.isneginf(), 0.0)


def example_of_drafts(most_drafts: int, device: torch.device) -> tuple[DraftBatch, Tensor]:
    """Drafts of a request, and what was drawn beside them, as ``verify_by_match`` takes both."""
    ids = torch.zeros(most_drafts + 1, dtype=torch.int64, device=device)
    bounds = torch.tensor([0, most_drafts], device=device)
    return DraftBatch(ids[1:], None, bounds, 1, most_drafts), ids
