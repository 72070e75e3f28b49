"""The option ``--before`` of the benchmarks: another checkout draws what this one draws."""

import os
from pathlib import Path

import pytest
import torch

from benchmarks.before import sample_before
from flashsampling import ops
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
BATCH, DIM, VOCAB = 3, 16, 100
CHECKOUT = Path(os.environ.get("FLASHSAMPLING_BEFORE", ROOT))
COUNTS = torch.arange(BATCH * VOCAB, dtype=torch.int32).view(BATCH, VOCAB) % 3
PARAMS = {
    "defaults": SamplingParams(),
    "filters": SamplingParams(top_k=torch.tensor([5, 0, 9]), top_p=0.9, min_p=torch.tensor([0.1, 0.0, 0.2])),
    "biases": SamplingParams(
        bias_ids=torch.zeros(BATCH, 1, dtype=torch.int32), bias_values=torch.full((BATCH, 1), 9.0), logit_scale=0.5
    ),
    "penalties": SamplingParams(counts=COUNTS, frequency_penalty=0.5, repetition_penalty=1.5),
    "log-probabilities": SamplingParams(
        logprobs=True, top_logprobs=4, logprob_ids=torch.arange(6).view(BATCH, 2), logsumexp=True
    ),
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("from_logits", [False, True])
def test_another_checkout_draws_the_same(name, from_logits):
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(rows, DIM, generator=generator) for rows in (BATCH, VOCAB))
    seeds = torch.arange(BATCH)
    step = SampleInputs(states, weight, torch.ones(BATCH), seeds, seeds, 1, VOCAB, params=PARAMS[name])
    if from_logits:
        logits = states @ weight.T
        step = step._replace(hidden_states=logits, weight=logits, logits=logits)
    drawn, other = ops.sample(step, "streaming"), sample_before(CHECKOUT, step, "streaming")
    assert torch.equal(drawn.ids, other.ids)
    if step.params.needs_raw_mass():
        assert torch.equal(drawn.values, other.values)
