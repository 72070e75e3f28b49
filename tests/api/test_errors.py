"""What users get wrong, and an error that says so: the argument, what came, and what to do."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flashsampling import LMHeadSampler, sample, sample_from_logits, verify, verify_from_logits
from flashsampling.sampling_params import SamplingOptions

BATCH, VOCAB, DIM, DRAFTS = 3, 70, 8, 2
STATES, WEIGHT = torch.ones(BATCH, DIM), torch.ones(VOCAB, DIM)
PLACES, IDS = torch.ones(BATCH, DRAFTS + 1, DIM), torch.ones(BATCH, DRAFTS, dtype=torch.int64)
SEEDS = {"seed": torch.arange(BATCH)}
HEAD = nn.Linear(DIM, VOCAB)


def _sampler():
    return LMHeadSampler(WEIGHT, max_batch_size=BATCH)


def _with_head(states=None, weight=WEIGHT, **options):
    return sample(STATES if states is None else states, weight, **SEEDS | options)


def _drafts(states=PLACES, weight=WEIGHT, **options):
    return verify(states, weight, IDS, **SEEDS | options)


CALLS = {  # everything that takes sampling parameters
    "sample": _with_head,
    "sample_from_logits": lambda **options: sample_from_logits(STATES @ WEIGHT.T, **SEEDS | options),
    "verify": _drafts,
    "verify_from_logits": lambda **options: verify_from_logits(PLACES @ WEIGHT.T, IDS, **SEEDS | options),
    "verify by rejection": lambda **options: _drafts(method="rejection", **options),
    "forward": lambda **options: _sampler()(STATES, **options),
    "forward of a head with a bias": lambda **options: LMHeadSampler(HEAD, max_batch_size=BATCH)(STATES, **options),
    "LMHeadSampler.verify": lambda **options: _sampler().verify(PLACES, IDS, **options),
}
SAMPLERS = [name for name in CALLS if name.startswith(("forward", "LMHead"))]
KEPT = (
    "the sampler keeps seeds and offsets per row; set them by LMHeadSampler(..., seed=...) or sampler.reset(seed=..., "
)
FORMS = "of a dict d pass (list(d), list(d.values())), of (id, value) pairs tuple(zip(*pairs))"
PAIR = "logit_bias must be a tensor (V,) or a pair of ids and values, got "
OF_ALL: dict[str, tuple[dict[str, Any], list[str]]] = {  # of every call: arguments, and the words of a TypeError
    "topk": ({"topk": 5}, ["unexpected argument 'topk'; did you mean top_k?", *SamplingOptions.__annotations__]),
    "temp": (
        {"temp": 0.5},
        ["unexpected argument 'temp'; did you mean temperature?", *SamplingOptions.__annotations__],
    ),
    "frequency": ({"freq_penalty": 0.5}, ["unexpected argument 'freq_penalty'; did you mean frequency_penalty?"]),
    "nothing like it": ({"xyz": 5}, ["unexpected argument 'xyz'. ", "temperature, "]),
    "a dict": ({"logit_bias": {3: 1.0}}, [PAIR + "dict; " + FORMS]),
    "two pairs of ints": ({"logit_bias": [(3, 1), (4, 2)]}, [PAIR + "list; " + FORMS]),
    "a tuple of pairs": ({"logit_bias": ((3, 1.0), (4, 2.0))}, ["logit_bias's ids must be int32 or int64, got", FORMS]),
    "a dict a row": ({"logit_bias": [{3: 1.0}, {4: 1.0}]}, [PAIR + "list; " + FORMS]),
}
OF_SAMPLERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "seed": ({"seed": 3}, ["seed must not be given to a call: " + KEPT]),
    "offset": ({"offset": 3}, ["offset must not be given to a call: " + KEPT]),
    "impl": ({"impl": "reference"}, ["impl must not be given to a call: the sampler has it, from its constructor"]),
    "vocab_size": ({"vocab_size": 5}, ["vocab_size must not be given to a call"]),
}
TRANSPOSED = (
    f"weight must have the {DIM} columns of hidden_states, got shape ({DIM}, {VOCAB}); it is (D, V): pass weight.T"
)
LOGITS = (
    f"hidden_states must have the {DIM} columns of weight, got shape ({BATCH}, {VOCAB}), that of logits; "
    "use sample_from_log"
)
LINEAR = "weight must be a torch.Tensor, got Linear; pass its .weight, and its .bias as bias"
OF_ONE = {
    "a transposed weight": (lambda: _with_head(weight=WEIGHT.T), ValueError, [TRANSPOSED]),
    "logits": (lambda: _with_head(STATES @ WEIGHT.T), ValueError, [LOGITS]),
    "logits of drafts": (lambda: _drafts(PLACES @ WEIGHT.T), ValueError, ["that of logits; use verify_from_logits"]),
    "a linear layer": (lambda: _with_head(weight=HEAD), TypeError, [LINEAR]),
    "an embedding": (
        lambda: LMHeadSampler(nn.Embedding(VOCAB, DIM)),
        TypeError,
        ["lm_head must be an nn.Linear or its weight, got Embedding; pass its .weight"],
    ),
    "the list of sample": (
        lambda: _with_head(sed=3),
        TypeError,
        ["'sed'; did you mean seed? sample takes hidden_states, weight, temperature, seed, offset, num_samples, "],
    ),
    "the list of verify": (
        lambda: _drafts(drafts=3),
        TypeError,
        [
            "verify takes hidden_states, weight, draft_token_ids, cu_draft_lengths, ",
            "temperature, seed, offset, vocab_size",
        ],
    ),
    "the list of a sampler": (
        lambda: _sampler()(STATES, temprature=0.5),
        TypeError,
        ["did you mean temperature? forward takes hidden_states, temperature, num_samples, slots, bias, "],
    ),
    "the list of a sampler's verify": (
        lambda: _sampler().verify(PLACES, IDS, temprature=0.5),
        TypeError,
        ["did you mean temperature? verify takes hidden_states, draft_token_ids, cu_draft_lengths, max_draft_length"],
    ),
}
TABLE: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {}
for _calls, _cases in ((CALLS, OF_ALL), (SAMPLERS, OF_SAMPLERS)):
    for _call in _calls:
        for _case, (_options, _words) in _cases.items():
            TABLE[f"{_call}, {_case}"] = functools.partial(CALLS[_call], **_options), TypeError, _words
TABLE |= OF_ONE


def _generate(patched=False, **options):
    transformers = pytest.importorskip("transformers")
    from flashsampling.integrations.transformers import generate, patch

    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=None)
    model, how = transformers.GPT2LMHeadModel(config), {} if patched else {"custom_generate": generate}
    if patched:
        patch(model)
    model.generate(IDS, **how, max_new_tokens=2, pad_token_id=0, **options)


def only_even(input_ids, scores):
    return scores


TABLE |= {
    "a function as a logits processor": (
        lambda: _generate(logits_processor=[only_even]),
        ValueError,
        ["the fused step cannot do all of this: switch off only_even, or keep it and generate without custom_generate"],
    ),
    "stop strings": (
        lambda: _generate(patched=True, stop_strings=["a"]),
        ValueError,
        ["stop_strings must be None", "stopping_criteria=[transformers.StopStringCriteria(tokenizer, stop_strings)]"],
    ),
    "misspelt in generate's request": (
        lambda: _generate(request={"topk": 3}),
        TypeError,
        ["unexpected argument 'topk'; did you mean top_k?", "A request takes logit_bias, "],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_error_says_what_is_wrong_and_what_to_do(case):
    call, error, words = TABLE[case]
    with pytest.raises(error) as raised:
        call()
    for part in words:
        assert part in str(raised.value)
    if "must not be given" in str(raised.value):
        assert raised.value.__suppress_context__  # the internal one
