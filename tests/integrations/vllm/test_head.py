"""The LM head of a model that is made up: which are refused, and that the step draws from the model's own logits."""

import contextlib

import pytest
import torch

from flashsampling.integrations.vllm import Refused
from flashsampling.integrations.vllm.head import find_head

from . import fakes
from .fakes import SamplingParams
from .test_step import LAYERS, PROMPT, D, V, runner_of, states_of


@pytest.mark.parametrize(
    ("bias", "processor"),
    [(True, {}), (False, {"scale": 0.25}), (True, {"scale": 2.0, "soft_cap": 3.0}), (False, {"soft_cap": 2.0})],
)
def test_heads(bias, processor):
    """The step draws from the model's own logits."""
    model = fakes.Model(V, D, bias, **processor)
    runner = runner_of(model)
    runner.add(a=(PROMPT, SamplingParams(temperature=0.0, logprobs=4)), b=(PROMPT, SamplingParams(temperature=0.0)))
    for names in (["a"], ["b"]):
        batch = runner.batch(dict.fromkeys(names, 1))
        states = states_of(batch)
        output, *_ = runner.sample(states, batch, None)
        logits = model.compute_logits(states[:1])
        assert int(output.sampled_token_ids) == int(logits.argmax())
        if names == ["a"]:
            best = logits.log_softmax(-1).topk(4)
            torch.testing.assert_close(output.logprobs_tensors.logprobs[0, 1:], best.values[0], rtol=0, atol=1e-4)
    model.lm_head.weight.data.mul_(-1)  # other weights are loaded into it
    assert int(runner.sample(states, batch, None)[0].sampled_token_ids) == int(
        model.compute_logits(states[:1]).argmax()
    )


def _compute(function):
    def change(model):
        original = model.compute_logits
        model.compute_logits = lambda hidden_states: function(original, hidden_states)

    return change


def _double_the_processors_logits(model):
    forward = model.logits_processor.forward
    model.logits_processor.forward = lambda *args: 2 * forward(*args)


class LogitsProcessorWithLoRA(fakes.Processor):
    pass


class Quantised(fakes.Unquantized):
    pass


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_compute(lambda original, states: original(states / 2)), "hidden states before"),
        (_compute(lambda original, states: original(states) / 2), "logits after"),
        (_compute(lambda original, states: original(original(states)[:, :D])), "calls 2 logits processors"),
        (_compute(lambda original, states: states @ torch.ones(D, V)), "calls no logits processor"),
        (_compute(lambda original, states: original(states, 1)), "could not be looked at"),
        (_double_the_processors_logits, "something else"),
        (lambda model: setattr(model, "logits_processor", LogitsProcessorWithLoRA(V)), "LogitsProcessorWithLoRA"),
        (lambda model: setattr(model.lm_head, "quant_method", Quantised()), "quantised"),
        (lambda model: setattr(model.lm_head, "num_added_embeddings", 3), "added vocabulary"),
        (lambda model: setattr(model.logits_processor, "head_dtype", torch.bfloat16), "head_dtype"),
        (lambda model: setattr(model.logits_processor, "logits_as_input", True), "no hidden states"),
        (lambda model: setattr(model.logits_processor, "scale", float("nan")), "scales"),
        (lambda model: setattr(model, "lm_head", torch.nn.Linear(D, V)), "LM head is a Linear"),
        (lambda model: model.lm_head.register_forward_hook(print), None),  # which nobody calls
        (lambda model: model.lm_head.bias.data.fill_(float("nan")), None),
    ],
)
def test_models_that_are_refused(change, why):
    model = fakes.Model(V, D, bias=True)
    change(model)
    with contextlib.nullcontext() if why is None else pytest.raises(Refused, match=why):
        find_head(model, D, torch.float32, torch.device("cpu"), LAYERS)
