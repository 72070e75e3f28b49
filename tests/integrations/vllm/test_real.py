"""The plug-in against vLLM 0.26's and 0.33's own classes, on the CPU: where vLLM is not installed, as in CI, this is
skipped.

vLLM's kernels run in Triton's interpreter; pinned and mapped memory is plain memory. A wheel of vLLM that is unpacked
does, with its pure-Python requirements: ``PYTHONPATH=FOLDER python -m pytest tests/integrations/vllm/test_real.py``.
"""

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from . import fakes

if importlib.util.find_spec("vllm") is not None and not torch.cuda.is_available():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else vLLM turns Triton off
pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm import SamplingParams
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu import buffer_utils, warmup
from vllm.v1.worker.gpu.input_batch import (
    InputBatch,
    get_num_sampled_and_rejected,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample import sampler as sampler_module
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu_worker import Worker

import flashsampling
from flashsampling.integrations.engine.head import Layers
from flashsampling.integrations.engine.request_info import FallbackReason
from flashsampling.integrations.engine.request_info import RequestState as OwnState
from flashsampling.integrations.vllm import Refused, settings
from flashsampling.integrations.vllm.head import find_head
from flashsampling.integrations.vllm.request_info import VllmRules, parse_request
from flashsampling.integrations.vllm.runner import FusedRunner, Vllm, VllmSampler
from flashsampling.integrations.vllm.step import VllmStep

from .on_cpu import below_8_rows

RELEASE = settings.check_version(importlib.metadata.version("vllm"))
NEWER = not RELEASE.drafts_and_ranks
V, D, SLOTS = 331, 16, 8
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks.vllm_check is this on a GPU")


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch):
    class Buffer:
        def __init__(self, size, dtype):
            self.cpu = torch.zeros(size, dtype=dtype)
            self.uva = (lambda n=None: self.cpu[:n]) if NEWER else self.cpu
            self.np = self.cpu.numpy()

    def to_cpu(data, dtype, device):
        return torch.tensor(list(data), dtype=dtype)

    monkeypatch.setattr(buffer_utils, "UvaBuffer", Buffer)
    monkeypatch.setattr(buffer_utils, "async_tensor_h2d", to_cpu)
    monkeypatch.setattr("vllm.v1.worker.gpu.sample.penalties.async_tensor_h2d", to_cpu)
    monkeypatch.setattr(sampler_module, "flashinfer_sampler_supported", lambda: False)
    for module in ("sampler", "states"):
        monkeypatch.setattr(f"vllm.v1.worker.gpu.sample.{module}.apply_top_k_top_p", below_8_rows)
    # its noise is libdevice's, which the interpreter has not: what it is added to is what matters here
    monkeypatch.setattr(sampler_module, "gumbel_sample", lambda logits, *_, **__: logits.argmax(-1))


class Runner(FusedRunner, GPUModelRunner):
    def __init__(self, model, most_drafts=0):
        self.model, self.device, self.max_num_reqs, self.is_last_pp_rank = model, CPU, SLOTS, True
        self.req_states = RequestState(SLOTS, 128, 64, most_drafts, V, CPU)
        if NEWER:
            config = SimpleNamespace(reasoning_config=None)
            self.sampler = Sampler(config, SLOTS, V, CPU, self.req_states)
        else:
            self.sampler = Sampler(SLOTS, V, CPU, self.req_states)
        self.rejection_sampler, self.encoder_cache, self.pp_handler = None, None, None
        self.batch_sharder, self.adaptive_verification, self.pooling_runner = None, None, None
        nothing = SimpleNamespace(
            **dict.fromkeys(("add_request", "append_block_ids", "apply_staged_writes"), lambda *_, **__: None)
        )
        nothing.remove_request = nothing.add_request
        self.model_state = self.block_tables = self.lora_state = self.prompt_logprobs_worker = nothing
        layers = Layers(fakes.Processor, fakes.Embedding, fakes.Unquantized)
        head = find_head(model, D, torch.float32, CPU, layers)
        slots = OwnState(SLOTS, VllmRules(V, raw_logprobs=True))
        step = VllmStep(head, self.sampler, slots, CPU, None, most_drafts)
        vllm = Vllm(SamplerOutput, LogprobsTensors, get_num_sampled_and_rejected)
        self.flashsampling = VllmSampler(step, vllm)

    def add(self, **requests):
        new = [
            NewRequestData(name, prompt, [], params, None, (), 0, None, prefill_token_ids=prompt)
            for name, (prompt, params) in requests.items()
        ]
        self.add_requests(SimpleNamespace(scheduled_new_reqs=new))


def batch_of(runner, names):
    """The last tokens of requests that are past their prompts but for it."""
    count, slots = len(names), np.array([runner.req_states.req_id_to_index[name] for name in names], np.int32)
    lengths = runner.req_states.prefill_len.np[slots]
    there, zeros = torch.from_numpy(slots), torch.zeros(count, dtype=torch.int32)
    batch = InputBatch.make_dummy(count, count, SimpleNamespace(
        device=CPU, seq_lens=torch.zeros(SLOTS, dtype=torch.int32),
        query_start_loc=torch.zeros(SLOTS + 1, dtype=torch.int32),
        input_ids=torch.zeros(64, dtype=torch.int32), positions=torch.zeros(64, dtype=torch.int64),
        is_padding=torch.zeros(64, dtype=torch.bool),
    ))  # fmt: skip
    return dataclasses.replace(
        batch,
        req_ids=names,
        idx_mapping=there,
        idx_mapping_np=slots,
        expanded_idx_mapping=there,
        expanded_local_pos=zeros,
        seq_lens=torch.from_numpy(lengths),
        num_computed_tokens_np=lengths - 1,
        positions=torch.from_numpy(lengths - 1).long(),
    )


def test_recorded_signatures():
    for name, parameters in settings.RUNNER.items():
        settings.PLUGIN.check_signature(name, getattr(GPUModelRunner, name), parameters)
        assert tuple(inspect.signature(getattr(fakes.Runner, name)).parameters) == parameters
    settings.PLUGIN.check_signature("", get_num_sampled_and_rejected, settings.COUNTING)
    settings.PLUGIN.check_signature("", LogitsProcessor.forward, RELEASE.logits)
    assert tuple(inspect.signature(Worker.load_model).parameters) == ("self", "load_dummy_weights")


@pytest.mark.parametrize(
    ("real", "fake"),
    [
        (InputBatch, fakes.InputBatch),
        (SamplerOutput, fakes.SamplerOutput),
        (GrammarOutput, fakes.GrammarOutput),
        (LogprobsTensors, fakes.LogprobsTensors),
    ],
)
def test_fakes_have_fields_of_the_real_ones(real, fake):
    mine = [field.name for field in dataclasses.fields(fake)]
    theirs = real._fields if hasattr(real, "_fields") else [field.name for field in dataclasses.fields(real)]
    assert [name for name in theirs if name in mine] == mine


def test_requests_of_vllms_warm_up_are_known():
    """Their names cannot be a user's, and vLLM draws for them whatever they are called."""
    source = inspect.getsource(warmup)
    assert 'f"_warmup_{i}_"' in source
    assert "SamplingParams.for_sampler_warmup()" in source
    assert (
        parse_request(SamplingParams.for_sampler_warmup(), 4, VllmRules(V, raw_logprobs=True)).reason
        != FallbackReason.SERVED
    )


DRAWN_FROM = {  # what ``parse_request`` and ``read_rows`` read
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
    "min_tokens", "_all_stop_token_ids", "logprobs", "logprob_token_ids", "logit_bias", "allowed_token_ids",
    "_bad_words_token_ids", "thinking_token_budget",
}  # fmt: skip
AROUND_A_DRAW = {  # the front end's, the scheduler's, or ``compute_logits``'
    "n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "prompt_logprobs", "flat_logprobs", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "skip_clone",
    "output_text_buffer_length", "_eos_token_id", "structured_outputs", "extra_args", "routed_experts_prompt_start",
    "bad_words", "skip_reading_prefix_cache", "repetition_detection",
}  # fmt: skip
if NEWER:
    AROUND_A_DRAW |= {"prompt_logprob_token_ids", "prompt_logprob_start", "stream_interval"}
    AROUND_A_DRAW |= {"watermarking", "_watermarking_skipped", "trace_decode_token_ids"}  # ``check_runner``'s
BESIDE_A_GRAMMAR = {"structured_outputs"} if NEWER else set()  # see ``settings.Release.min_tokens_respects_grammar``


def test_every_field_of_sampling_params_is_known():
    """Every field is known, and fields that do not concern a draw are read nowhere where logits are."""
    assert set(SamplingParams.__struct_fields__) == DRAWN_FROM | AROUND_A_DRAW
    folder = Path(inspect.getfile(sampler_module)).parent
    source = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "prompt_logprob.py")
    read = (
        set(re.findall(r"sampling_params\.(\w+)", source))
        - {"SamplingParams", "trace_decode_token_ids"}
        - BESIDE_A_GRAMMAR
    )
    assert read - {"all_stop_token_ids", "bad_words_token_ids"} <= DRAWN_FROM - {
        "_all_stop_token_ids",
        "_bad_words_token_ids",
    }


def test_the_fake_state_is_as_the_real_one():
    runner, fake = Runner(fakes.Model(V, D)), fakes.Sampler(SLOTS, V)
    for part in ("sampling_states", "penalties_state"):
        for name, value in vars(getattr(fake, part)).items():
            real = getattr(getattr(runner.sampler, part), name)
            pairs = [(real.np, value.np), (real.gpu, value.gpu)] if isinstance(value, fakes.Backed) else [(real, value)]
            for theirs, mine in pairs:
                if not isinstance(mine, int):
                    assert (theirs.dtype, theirs.shape) == (mine.dtype, mine.shape), name
                    assert (theirs == mine).all(), name


def mappings(batch):
    """Returns the mappings that the sampler's methods take."""
    middle = [batch.idx_mapping] if NEWER else []
    return batch.expanded_idx_mapping, *middle, batch.idx_mapping_np


def lengths(batch):
    return [batch.seq_lens_cpu_upper_bound.numpy()] if NEWER else []


PROMPT = [5, 31, 7, 7, 200]
KINDS = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.5, "temperature": 2.0},
    "top_k_top_p": {"top_k": 9, "top_p": 0.8, "temperature": 2.0},
    "min_p": {"min_p": 0.1, "temperature": 2.0},
    "min_p_top_k": {"min_p": 0.02, "top_k": 30},
    "repetition": {"repetition_penalty": 3.0, "temperature": 0.7},
    "frequency": {"frequency_penalty": 1.5, "presence_penalty": -2.0},
    "bias": {"logit_bias": {4: 3.0, 330: 5.0, 31: -100.0}},
    "allowed": {"allowed_token_ids": [3, 31, 32, 330], "logit_bias": {31: 2.0}},
    "bad_words": {"_bad_words_token_ids": [[3], [31], [300]]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [31, 32, 200], "logit_bias": {31: 20.0}},
    "everything": {
        "temperature": 1.7, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.3, "frequency_penalty": 0.2,
        "presence_penalty": 0.1, "logit_bias": {9: 2.0}, "allowed_token_ids": [*range(0, V, 3)], "min_tokens": 1,
        "_bad_words_token_ids": [[9], [12]],
        "stop_token_ids": [15],
    },
}  # fmt: skip


@pytest.mark.parametrize("chosen", [list(KINDS)[:8], list(KINDS)[6:]])
def test_the_distribution_is_that_of_vllms_sampler(chosen, monkeypatch):
    """vLLM's processed logits give the tokens of 60 draws of every row the same log-probabilities, and the raw ones of
    vLLM's own top tokens are equal too."""
    runner = Runner(fakes.Model(V, D))
    extra = {"logprobs": 4, "seed": 11}
    runner.add(**{name: (PROMPT, SamplingParams(**KINDS[name], **extra)) for name in chosen})
    slots = [runner.req_states.req_id_to_index[name] for name in chosen]
    generator = torch.Generator().manual_seed(0)
    state = runner.sampler.penalties_state
    penalised = state.use_penalty[slots]
    assert state.prompt_bin_mask[slots].bool().any(1).tolist() == penalised.tolist()
    state.output_bin_counts[slots] = torch.randint(0, 3, (len(slots), V), dtype=torch.int32, generator=generator)
    assert (runner.flashsampling.step.request_state.reasons[slots] == FallbackReason.SERVED).all()
    batch = batch_of(runner, chosen)
    states = torch.randn(len(chosen), D, generator=generator)
    step = runner.flashsampling.step
    seen: dict[str, Any] = {}
    draw = step.draw
    monkeypatch.setattr(step, "draw", lambda each: seen.setdefault("out", draw(each)))
    processed = runner.sampler.sample(
        runner.model.compute_logits(states), *mappings(batch), batch.positions, batch.input_ids,
        batch.expanded_local_pos, *lengths(batch), return_logprobs=True,
    )[1].double().log_softmax(-1)  # fmt: skip
    own, *_ = GPUModelRunner.sample(runner, states, batch, None)
    drawn = []
    for offset in range(60):
        seen.clear()
        moved = dataclasses.replace(batch, positions=batch.positions + 1000 * offset)
        output, num_sampled, num_rejected = runner.sample(states, moved, None)
        out = seen["out"][0]
        drawn.append(out.token_ids.tolist())
        theirs = processed.gather(1, out.token_ids[:, None])[:, 0].float()
        torch.testing.assert_close(out.processed_logprobs, theirs, rtol=0, atol=1e-4)
        assert num_sampled.tolist() == [1] * len(chosen)
        assert num_rejected.tolist() == [0] * len(chosen)
        got = output.logprobs_tensors
        assert got.logprob_token_ids[:, 1:].tolist() == own.logprobs_tensors.logprob_token_ids[:, 1:].tolist()
        torch.testing.assert_close(got.logprobs[:, 1:], own.logprobs_tensors.logprobs[:, 1:], rtol=0, atol=1e-4)
    assert runner.flashsampling.counters()["fused"] == 60
    for name, tokens in zip(chosen, zip(*drawn)):  # enough of them to mean something
        assert len(set(tokens)) > 2, name


@pytest.fixture(scope="module")
def one_rank():
    """vLLM's groups of one process, and a configuration: layers ask for both when they are made."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:29611", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize(("bias", "processor"), [(False, {}), (True, {"scale": 0.5, "soft_cap": 4.0})])
def test_heads_of_vllms_own_layers(one_rank, bias, processor):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = ParallelLMHead(V, D, bias=bias, params_dtype=torch.float32)
            self.logits_processor = LogitsProcessor(V, **processor)

        def compute_logits(self, hidden_states):
            return self.logits_processor(self.lm_head, hidden_states, *((self.lm_head.bias,) if bias else ()))

    model, layers = Model(), Layers(LogitsProcessor, VocabParallelEmbedding, UnquantizedEmbeddingMethod)
    for parameter in model.parameters():
        parameter.data.normal_()
    head = find_head(model, D, torch.float32, CPU, layers)
    assert (head.vocab_size, head.first_token, head.ranks, head.weight.shape) == (V, 0, 1, (384, D))
    states = torch.randn(5, D)
    drawn = flashsampling.sample(states, head.weight, temperature=0.0, vocab_size=V, top_logprobs=3, **head.arguments())
    logits = model.compute_logits(states)
    assert drawn.token_ids.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(drawn.top_logprobs, logits.log_softmax(-1).topk(3).values, rtol=0, atol=1e-4)
    model.logits_processor.vocab_size += 8
    with pytest.raises(Refused, match="added vocabulary"):
        find_head(model, D, torch.float32, CPU, layers)
