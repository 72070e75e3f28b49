"""The option ``--before`` of the benchmarks: another checkout draws what this one draws."""

import os
from pathlib import Path

import pytest
import torch

from benchmarks.before import sample_before
from flashsampling import ops
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams
from tests.conftest import run_python

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


def test_two_packages_in_one_process():
    """In a process of its own: operators cannot be taken back."""
    program = f"""
import sys
from pathlib import Path
import torch, flashsampling
from benchmarks.before import import_before
before = import_before(Path({str(ROOT)!r}))
assert import_before(Path("nowhere")) is before and before.sample is not flashsampling.sample
states, weight = torch.randn(4, 16), torch.randn(300, 16)
call = {{"seed": torch.arange(4), "offset": torch.arange(4)}}
for module in (before, flashsampling):
    def draw(module=module):
        return module.sample(states, weight, **call).token_ids
    compiled = torch.compile(draw, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(), flashsampling.sample(states, weight, **call).token_ids)
assert "flashsampling_before" in before.__file__ and before.ops is not flashsampling.ops
assert torch.ops.flashsampling_before.sample.default is not torch.ops.flashsampling.sample.default
from flashsampling_before.kernels.hopper import cache
assert Path(cache.__file__).parents[2].name == "flashsampling_before"
from benchmarks.before import sample_before
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
params = SamplingParams(top_k=5, top_p=torch.rand(4))
step = SampleInputs(states, weight, torch.ones(4), torch.arange(4), torch.arange(4), 1, 300, params=params)
for each in (step, step._replace(params=DEFAULT_PARAMS)):
    drawn = flashsampling.ops.sample(each, "streaming")
    assert torch.equal(sample_before(Path("nowhere"), each, "streaming").ids, drawn.ids)
print("both")
"""
    assert run_python(program) == "both\n"
