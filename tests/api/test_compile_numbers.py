"""Python numbers under ``torch.compile``: however many values of every number there are, two graphs at most."""

import functools
import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from flashsampling import LMHeadSampler, sample, sample_from_logits, verify, verify_from_logits

pytestmark = pytest.mark.filterwarnings("ignore:one seed and one offset")
BATCH, VOCAB, DIM, DRAFTS, TIMES = 3, 90, 8, 12, 10


def _expand(first, last, *among):
    """Ten values, the ones named among them."""
    values = [first + (last - first) * i / (TIMES - 1) for i in range(TIMES)]
    values[TIMES - len(among) :] = among
    return values


# Ten values of every number, those that switch it off among them. torch makes graphs of their own of the ints 0 and 1,
# and one symbol of two ints that are equal, so there are none.
NUMBERS = {
    "temperature": _expand(0.5, 1.5, 0.0, 1.0),
    "seed": [*range(1000, 1009), -5],
    "offset": [*range(2000, 2009), -7],
    "num_samples": range(2, 12),
    "vocab_size": range(VOCAB - 20, VOCAB - 10),
    "max_draft_length": [3, *range(5, DRAFTS + 2)],
    "logit_scale": _expand(0.5, 1.5, 1.0, -2.0),
    "soft_cap": _expand(5.0, 9.0, 0.0, 3.0),
    "repetition_penalty": _expand(1.1, 2.0, 1.0, 0.5),
    "frequency_penalty": _expand(0.1, 0.9, 0.0, -1.0),
    "presence_penalty": _expand(0.2, 0.8, -1.0, 0.0),
    "top_k": [*range(31, 39), -1, VOCAB + 40],
    "top_p": _expand(0.2, 0.95, 1.0, 0.0),
    "min_p": _expand(0.01, 0.2, 0.0, 1.0),
    "epsilon_cutoff": _expand(0.001, 0.2, 0.0, 0.99),
    "top_n_sigma": _expand(0.5, 3.0, 0.0, -1.0),
    "top_logprobs": range(4, 14),
}
LARGE = ("temperature", "soft_cap", "repetition_penalty", "frequency_penalty")  # reals that may be ints of any size
OTHERS = {
    *("hidden_states", "weight", "logits", "target_logits", "draft_token_ids", "cu_draft_lengths", "parents", "method"),
    *("draft_probs", "impl", "tp", "bias", "logit_bias", "token_counts", "token_mask", "joint_top_p"),
    *("return_logprobs", "logprob_ids", "return_logsumexp", "return_kept", "slots"),
}
torch.manual_seed(0)
WEIGHT, STATES = torch.randn(VOCAB, DIM), torch.randn(BATCH, DIM)
PLACES = torch.randn(BATCH * (DRAFTS + 1), DIM)
IDS = torch.randint(VOCAB, (BATCH * DRAFTS,))
COUNTS = {"token_counts": torch.randint(3, (BATCH, VOCAB), dtype=torch.int32)}
CHAINS = {"cu_draft_lengths": torch.arange(BATCH + 1) * DRAFTS, **COUNTS}
TREES = CHAINS | {"parents": torch.arange(DRAFTS).sub(2).clamp(min=-1).repeat(BATCH)}
HEAD = nn.Linear(DIM, VOCAB, bias=False)


def _sampler():
    return LMHeadSampler(HEAD, max_batch_size=BATCH, seed=range(BATCH))


def _call(function, *arguments, **others):
    return function, lambda: lambda **numbers: function(*arguments, **others, **numbers)


def _method(name, *arguments, **others):
    """Of a sampler of its own for every use."""
    return getattr(LMHeadSampler, name), lambda: functools.partial(getattr(_sampler(), name), *arguments, **others)


CALLS = {  # what is called, and what makes a function of numbers by name
    "verify": _call(verify, PLACES, WEIGHT, IDS, **CHAINS),
    "verify, of trees": _call(verify, PLACES, WEIGHT, IDS, **TREES),
    "verify, by rejection": _call(verify, PLACES, WEIGHT, IDS, **CHAINS, method="rejection"),
    "verify_from_logits": _call(verify_from_logits, PLACES @ WEIGHT.T, IDS, **CHAINS, method="rejection"),
    "sample": _call(sample, STATES, WEIGHT, **COUNTS),
    "sample_from_logits": _call(sample_from_logits, STATES @ WEIGHT.T, **COUNTS),
    "LMHeadSampler.forward": _method("forward", STATES, **COUNTS),
    "LMHeadSampler.verify": _method("verify", PLACES, IDS, **CHAINS),
}


def _numbers_of(function):
    """The names that are numbers among its arguments; every other one must be in ``OTHERS``."""
    names = set(inspect.signature(function).parameters) - {"self", "unknown", "options"}
    if function is LMHeadSampler.verify:
        names |= set(inspect.signature(verify).parameters) - {"seed", "offset", "vocab_size"}
    assert names <= NUMBERS.keys() | OTHERS, "an argument that is in neither table"
    return sorted(names & NUMBERS.keys())


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("call", "dynamic"),  # None makes a second graph, in which every number is a symbol as in that of True
    [*((call, None) for call in [*CALLS, "sample, of ints"]), ("sample", True), ("verify", True)],
)
def test_ten_values_of_every_number_are_two_graphs(call, dynamic):
    function, make = CALLS[call.removesuffix(", of ints")]
    names, graphs = _numbers_of(function), []
    if "draft_token_ids" in inspect.signature(function).parameters:
        names.remove("top_logprobs")  # which verify has not
    torch._dynamo.reset()

    # AOTAutograd, as Inductor has it, makes constants of numbers that Dynamo leaves
    def noted(graph, _):
        graphs.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=noted)
    compiled, eager = torch.compile(make(), fullgraph=True, dynamic=dynamic, backend=backend), make()
    for time in range(TIMES):
        numbers = {name: NUMBERS[name][time] for name in names}
        if call.endswith("of ints"):
            numbers |= {name: 1000 * (place + 3) + time for place, name in enumerate(LARGE)}
        assert torch.equal(compiled(**numbers).token_ids, eager(**numbers).token_ids), time
    assert len(graphs) <= (1 if dynamic else 2)
