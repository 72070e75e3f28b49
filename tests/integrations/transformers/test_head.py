"""A model's LM head that is replaced after a sampler was made from the model, and PEFT's adapters on it."""

import copy
import io
import pickle
import weakref
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from torch import nn
from transformers import LlamaForCausalLM

from flashsampling import LMHeadSampler
from flashsampling.integrations.transformers import checked_lm_head, generate
from tests.conftest import DEVICE
from tests.integrations.transformers.oracle import plain
from tests.integrations.transformers.test_generate import causal_lm

STATES = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
REPLACED = "LlamaForCausalLM's LM head was replaced"
ACTIVE = r"adapter \(LoRA\) that is active, .* call merge_adapter"


llama = partial(
    causal_lm, LlamaForCausalLM, vocab_size=200, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    eos_token_id=None,
)  # fmt: skip


def lora(model, targets=("lm_head",), **options):
    """``model`` with adapters that add something."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=list(targets), r=4, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).eval()


def sampled():
    """Returns a model, its sampler, and the sampler's first tokens."""
    model = llama()
    sampler = LMHeadSampler.from_model(model, max_batch_size=2, seed=[1, 2])
    return model, sampler, copy.deepcopy(sampler)(STATES).token_ids


def resized(model):
    model.resize_token_embeddings(256)


def resized_as_it_is(model):
    model.lm_head = copy.deepcopy(model.lm_head)


def set_by_name(model):
    model.set_output_embeddings(nn.Linear(32, 200, bias=False, device=DEVICE))


def deleted(model):
    del model.lm_head


REPLACEMENTS = {resized: REPLACED, resized_as_it_is: REPLACED, set_by_name: REPLACED, deleted: REPLACED, lora: ACTIVE}


@pytest.mark.parametrize("change", REPLACEMENTS, ids=lambda change: change.__name__)
def test_a_sampler_refuses_a_head_that_was_replaced(change):
    """A head that comes back is taken again."""
    model = llama()
    head = model.lm_head
    sampler = LMHeadSampler.from_model(model, max_batch_size=2)
    sampler(STATES)
    change(model)
    drafts = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    for call in (lambda: sampler(STATES), lambda: sampler.verify(STATES[None], drafts)):
        with pytest.raises(ValueError, match=REPLACEMENTS[change]):
            call()
    assert sampler.offsets.tolist() == [1, 1]
    model.lm_head = head
    sampler(STATES)


def test_a_parameter_that_is_replaced_is_followed():
    model = llama()
    sampler = LMHeadSampler.from_model(model, max_batch_size=2)
    with torch.no_grad():
        model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.lm_head.weight[7] = STATES[0]
    assert sampler(STATES, temperature=0.0).token_ids[0] == 7


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_it_refuses_without_a_graph_break(fullgraph):
    model, sampler, expected = sampled()
    torch._dynamo.reset()
    compiled = torch.compile(sampler, fullgraph=fullgraph, backend="eager")
    assert torch.equal(compiled(STATES).token_ids, expected)
    head = model.lm_head
    resized_as_it_is(model)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="LM head was replaced"):
        compiled(STATES)
    model.lm_head = head
    sampler.reset([1, 2])
    assert torch.equal(compiled(STATES).token_ids, expected)
    gone = weakref.ref(model)
    del model
    assert gone() is None
    sampler.reset([1, 2])
    assert torch.equal(compiled(STATES).token_ids, expected)


def test_compiled_over_a_disabled_adapter():
    model = llama()
    adapted = lora(model)
    adapted.base_model.disable_adapter_layers()
    sampler = LMHeadSampler.from_model(model, max_batch_size=2, seed=[1, 2])
    expected = copy.deepcopy(sampler)(STATES).token_ids
    torch._dynamo.reset()
    compiled = torch.compile(sampler, fullgraph=True, backend="eager")
    assert torch.equal(compiled(STATES).token_ids, expected)
    adapted.base_model.enable_adapter_layers()
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=ACTIVE):
        compiled(STATES)


def test_copies_and_pickles():
    model = llama()
    plain_state = [*model.state_dict()]
    model.sampler = LMHeadSampler.from_model(model, max_batch_size=2, seed=[1, 2])
    assert [*model.state_dict()] == plain_state == [name for name, _ in model.named_parameters()]
    expected = copy.deepcopy(model.sampler)(STATES).token_ids
    other = copy.deepcopy(model)
    resized_as_it_is(model)  # which is the copy's no concern
    assert torch.equal(other.sampler(STATES).token_ids, expected)

    model = llama()
    sampler = LMHeadSampler.from_model(model, max_batch_size=2, seed=[1, 2])
    file = io.BytesIO()
    torch.save(sampler, file)
    file.seek(0)
    for alone in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler)), torch.load(file, weights_only=False)):
        assert alone.weight is not model.lm_head.weight
        assert torch.equal(alone(STATES).token_ids, expected)
    assert file.getbuffer().nbytes < 4 * sum(parameter.numel() for parameter in model.parameters())  # the head's alone


def test_exports():
    _, sampler, expected = sampled()
    exported = torch.export.export(sampler, (STATES,)).module()
    assert torch.equal(exported(STATES).token_ids, expected)


@pytest.mark.parametrize("how", ["disabled", "merged", "merged and unloaded"])
def test_an_adapter_that_adds_nothing_is_accepted(how):
    model = llama()
    adapted = lora(model)
    with pytest.raises(ValueError, match=ACTIVE):
        LMHeadSampler.from_model(model)
    if how == "disabled":
        adapted.base_model.disable_adapter_layers()
    elif how == "merged":
        adapted.merge_adapter()
    else:
        adapted = adapted.merge_and_unload()
    sampler = LMHeadSampler.from_model(adapted, max_batch_size=2, seed=[1, 2])
    assert checked_lm_head(adapted).linear.weight is sampler.weight
    with torch.no_grad():
        logits = model.lm_head(STATES)
    assert torch.equal(sampler(STATES, temperature=0.0).token_ids, logits.argmax(-1))
    prompts = torch.arange(3, 9, device=DEVICE).view(2, 3)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 6}
    seeds = torch.tensor([1, 2], device=DEVICE)
    fused = adapted.generate(input_ids=prompts, **options, custom_generate=generate, seed=seeds)
    assert torch.equal(fused, plain(model, seeds, input_ids=prompts, **options))
    if how == "merged and unloaded":
        return
    if how == "disabled":
        adapted.base_model.enable_adapter_layers()
    else:
        adapted.unmerge_adapter()
    for call in (lambda: sampler(STATES), lambda: model.generate(prompts, custom_generate=generate, **options)):
        with pytest.raises(ValueError, match=ACTIVE):
            call()


def test_a_sampler_from_before_the_adapter():
    model = llama()
    sampler = LMHeadSampler.from_model(model, max_batch_size=2)
    adapted = lora(model)
    with adapted.disable_adapter():
        sampler(STATES)
    with pytest.raises(ValueError, match=ACTIVE):
        sampler(STATES)
    adapted.merge_adapter()
    assert torch.equal(sampler(STATES, temperature=0.0).token_ids, model.lm_head(STATES).argmax(-1))
    with adapted.disable_adapter(), pytest.raises(ValueError, match=r"merged and disabled: .* call unmerge_adapter"):
        sampler(STATES)  # whose next step of the model takes the adapter out of the weight
    adapted.unload()
    sampler(STATES)
    assert adapted.base_model.model.lm_head is model.lm_head


def test_what_else_lies_around_an_adapted_head_is_refused():
    model = llama()
    adapted = lora(model)
    adapted.merge_adapter()
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ValueError, match="has a forward hook"):
        checked_lm_head(model)
    peft = pytest.importorskip("peft")
    saved = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match=r"must be an nn.Linear, got .*ModulesToSaveWrapper"):
        checked_lm_head(saved)
