"""``patch``, and what transformers' users give as ``custom_generate``."""

import copy
import pickle
import types
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import tokenizers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, pipeline

import flashsampling
from flashsampling.integrations import transformers as integration
from flashsampling.integrations.transformers import generate, patch, unpatch
from tests.conftest import DEVICE
from tests.integrations.transformers.test_head import llama, lora

PACKAGES: list[Any] = [flashsampling, integration]

PROMPTS = torch.arange(3, 9).view(2, 3).to(DEVICE)
OPTIONS = {"do_sample": True, "top_k": 0, "max_new_tokens": 5}


@pytest.fixture
def model():
    return llama()


@pytest.fixture(scope="module")
def expected():
    """Returns the tokens of a patched model with these seeds."""
    return llama().generate(PROMPTS, **OPTIONS, custom_generate=generate, seed=[1, 2])


def is_patched(model, expected):
    """Returns whether the model's own ``generate`` is ours."""
    try:
        return torch.equal(model.generate(input_ids=PROMPTS, **OPTIONS, seed=[1, 2]), expected)
    except ValueError as error:
        assert "model_kwargs" in str(error) and "seed" in str(error)  # noqa: PT017, PT018 # transformers' own
        return False


def test_patched_until_it_is_undone(model, expected):
    state = [*model.state_dict()]
    assert not is_patched(model, expected)
    patch(model)
    patch(model)
    assert is_patched(model, expected)
    assert [*model.state_dict()] == state
    unpatch(model)
    assert not is_patched(model, expected)
    unpatch(model)
    assert "generate" not in vars(model)


def test_as_a_context(model, expected):
    with patch(model) as inside:
        assert inside is model
        with patch(model):
            assert is_patched(model, expected)
        assert is_patched(model, expected)
    assert not is_patched(model, expected)

    patch(model)
    with pytest.raises(KeyError), patch(model):
        raise KeyError
    assert is_patched(model, expected)  # as before the block


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_generates_with_itself(model, expected, how):
    patch(model)
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert is_patched(other, expected)
    unpatch(model)
    assert not is_patched(model, expected)
    with patch(other):
        pass
    assert is_patched(other, expected)
    unpatch(other)
    assert not is_patched(other, expected)


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_within_peft(model, expected, wrapped_first):
    adapter = {"targets": ["o_proj", "down_proj"], "lora_alpha": 1000}
    patched = lora(model, **adapter) if wrapped_first else model
    patch(patched)
    adapted = patched if wrapped_first else lora(model, **adapter)
    drawn = model.generate(PROMPTS, **OPTIONS, custom_generate=generate, seed=[1, 2])
    assert not torch.equal(drawn, expected)  # the adapter is at work
    assert is_patched(adapted, drawn)
    with adapted.disable_adapter():
        assert is_patched(adapted, expected)
    unpatch(model if wrapped_first else adapted)
    assert not is_patched(adapted, drawn)


def test_a_pipeline(model):
    words = {f"w{token}": token for token in range(200)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w2", unk_token="w1")
    run = pipeline("text-generation", model=model, tokenizer=tokenizer, device=DEVICE)
    patch(model)
    (out,) = run("w3 w4 w5", **OPTIONS, temperature=1.3, seed=[1], return_tensors=True)
    alone = torch.tensor([[3, 4, 5]], device=DEVICE)
    drawn = model.generate(alone, **OPTIONS, temperature=1.3, seed=[1], eos_token_id=2, pad_token_id=0)
    assert out["generated_token_ids"] == drawn[0].tolist()
    with pytest.raises(ValueError, match="num_beams=3"):
        run("w3 w4 w5", num_beams=3, max_new_tokens=5)


UNSERVED: dict[str, Any] = {
    "paged": ({"cache_implementation": "paged"}, ValueError, "continuous.generate_batch"),
    "another loop": ({"custom_generate": lambda model, **_: None}, ValueError, "custom_generate must be None with"),
    "a misspelt argument": ({"seeds": 1}, ValueError, r"not used by the model: \['seeds'\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSERVED)
def test_what_a_patched_model_cannot_serve_is_an_error(model, case):
    options, error, message = UNSERVED[case]
    with patch(model), pytest.raises(error, match=message):
        model.generate(PROMPTS, **OPTIONS | options)


def test_what_it_takes_beside(model, expected):
    patch(model)
    config = GenerationConfig(**OPTIONS)
    assert torch.equal(model.generate(PROMPTS, config, seed=[1, 2], custom_generate=generate), expected)
    assert model.generate(PROMPTS, None, temperatures=[0.5, 0.0], **OPTIONS, custom_generate=None).shape == (2, 8)
    assert torch.equal(model.generate(PROMPTS, max_new_tokens=5), llama().generate(PROMPTS, max_new_tokens=5))  # greedy


def own_generate(model):
    model.generate = types.MethodType(lambda self, *args: None, model)


def no_model(model):
    model.__class__ = nn.Module


UNPATCHABLE = {
    own_generate: (ValueError, "LlamaForCausalLM has a generate of its own"),
    lora: (ValueError, "call merge_adapter"),
    no_model: (TypeError, "must be a transformers causal LM, got Module"),
}


@pytest.mark.parametrize("change", UNPATCHABLE, ids=lambda change: change.__name__)
def test_what_cannot_be_patched(model, change):
    change(model)
    before = vars(model).get("generate")
    error, message = UNPATCHABLE[change]
    with pytest.raises(error, match=message):
        patch(model)
    assert vars(model).get("generate") is before


def test_unpatch_leaves_what_is_not_ours(model):
    own_generate(model)
    unpatch(model)
    assert "generate" in vars(model)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda module: module.__name__)
def test_a_package_as_custom_generate_is_an_error(model, package):
    """transformers would ignore what cannot be called."""
    message = "custom_generate must be flashsampling.integrations.transformers.generate"
    with pytest.raises(TypeError, match=message):
        model.generate(PROMPTS, custom_generate=package, **OPTIONS, seed=3)
    with pytest.raises(TypeError, match=message):
        package(model)
