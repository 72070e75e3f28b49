"""Which of vLLM's runners become fused ones, and what becomes of one that fails later."""

import contextlib
import functools
import importlib.metadata
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from flashsampling.integrations.vllm import Refused, counters, load
from flashsampling.integrations.vllm import runner as plugin
from flashsampling.integrations.vllm.head import find_head
from flashsampling.integrations.vllm.runner import FusedRunner, check_runner, count_drafts
from flashsampling.integrations.vllm.settings import KNOWN, PLUGIN

from ..engine.refusals import refused_words
from . import fakes
from .fakes import LEFT, SamplingParams
from .test_step import LAYERS, PROMPT, SLOTS, D, V, Whole, runner_of, states_of


class PenaltiesState:
    """One of newer vLLM's own."""


class OnlyEven:
    """A user's logits processor."""


NamedAlike = type("BadWordsState", (), {"__module__": "somebody.plugin"})
TRIED, NEWER = KNOWN["0.26"], KNOWN["0.33"]


@pytest.fixture
def loaded(monkeypatch):
    """A runner that can be fused, with what is read of it."""
    for name in ("FLASHSAMPLING_VLLM_TP", "FLASHSAMPLING_VLLM_GRAPHS"):
        monkeypatch.delenv(name, raising=False)
    runner = fakes.Runner(fakes.Model(V, D), fakes.Sampler(SLOTS, V), [0])
    parallel = SimpleNamespace(tensor_parallel_size=1, prefill_context_parallel_size=1)
    runner.vllm_config = SimpleNamespace(parallel_config=parallel, speculative_config=None)
    runner.model_config = SimpleNamespace(logits_processors=None)
    runner.use_pp, runner.is_pooling_model, runner.decode_query_len = False, False, 1
    runner.device = torch.device("cuda")
    return runner


def change(runner, where, value):
    *path, last = where.split("__")
    setattr(functools.reduce(getattr, path, runner), last, value)


def check(runner, why, release=TRIED, kind=fakes.Runner, **changes):
    """Refuses a runner with these changes for this reason; None: it is not refused."""
    for where, value in changes.items():
        change(runner, where, value)
    with contextlib.nullcontext() if why is None else pytest.raises(Refused, match=why):
        check_runner(runner, release, kind, fakes.Sampler)


RANKS, DRAFTS = "vllm_config__parallel_config__tensor_parallel_size", "vllm_config__speculative_config"


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        ("use_pp", True, "pipeline parallelism"),
        ("is_pooling_model", True, "does not generate"),
        ("device", torch.device("cpu"), "not an NVIDIA GPU"),
        ("sampler", None, "samples nothing"),
        ("sampler", SimpleNamespace(compute_nans=False), "sampler of its own"),
        ("decode_query_len", 3, "3 new tokens"),
        ("sampler__compute_nans", True, "VLLM_COMPUTE_NANS_IN_LOGITS"),
        ("sampler__logits_processors", [PenaltiesState(), OnlyEven()], r"custom logits processors: .*\.OnlyEven"),
        ("sampler__logits_processors", [NamedAlike()], "custom logits processors: somebody.plugin.BadWordsState"),
        ("sampler__return_sampling_mask", True, "return_sampling_mask"),
        ("sampler__trace_replay_state", OnlyEven(), "enable_trace_replay"),
        ("model_config__logits_processors", ["some.module:Class"], "custom logits processors"),
        (RANKS, 4, "tensor parallelism, but for two ranks"),
        ("vllm_config__parallel_config__prefill_context_parallel_size", 2, "context parallelism"),
    ],
)
def test_runners_that_are_refused(where, value, why, loaded):
    check(loaded, None)
    check(loaded, why, **{where: value})


def test_ranks_and_drafts_as_they_were_timed(loaded, monkeypatch):
    two_ranks = "tensor parallelism, but for two ranks"
    check(loaded, "model runner is a Runner", kind=Whole)
    check(loaded, None, **{RANKS: 2})
    for name in ("GRAPHS", "TP"):
        monkeypatch.setenv(f"FLASHSAMPLING_VLLM_{name}", "0")
        check(loaded, two_ranks)
        monkeypatch.delenv(f"FLASHSAMPLING_VLLM_{name}")
    check(loaded, "no drafts", **{DRAFTS: SimpleNamespace()})
    monkeypatch.setenv("FLASHSAMPLING_VLLM_TP", "1")
    check(loaded, None, **{RANKS: 4})
    check(loaded, "tensor parallelism with this release", NEWER, **{RANKS: 2, DRAFTS: None})
    check(loaded, "speculative decoding with this release", NEWER, **{RANKS: 1, DRAFTS: SimpleNamespace()})


class Verifier:
    synthetic_conditional_rates = None


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        ("speculator", None, "whose drafts go to a Verifier"),
        ("rejection_sampler", None, "whose drafts go to a NoneType"),
        ("rejection_sampler", type("Own", (Verifier,), {})(), "whose drafts go to a Own"),
        ("rejection_sampler__synthetic_conditional_rates", torch.ones(3), "rejection_sample_method=synthetic"),
        ("speculator__draft_logits", torch.ones(1), "draft_sample_method=probabilistic"),
        ("decode_query_len", 6, "6 new tokens, and 3 drafts"),
    ],
)
def test_drafts_that_are_refused(where, value, why, loaded):
    loaded.rejection_sampler, loaded.speculator = Verifier(), SimpleNamespace(draft_logits=None)
    check(loaded, "4 new tokens", num_speculative_steps=3, decode_query_len=4)
    assert count_drafts(loaded, Verifier) == 0
    check(loaded, None, **{DRAFTS: SimpleNamespace()})
    assert count_drafts(loaded, Verifier) == 3
    change(loaded, where, value)
    with pytest.raises(Refused, match=why):
        count_drafts(loaded, Verifier)


def test_a_warm_up_that_fails(monkeypatch, caplog):
    """vLLM serves without the plug-in, unless that was required."""
    runners = []

    def fails(*args):
        raise torch.OutOfMemoryError("no room")

    def serve():
        runners.append(runner := runner_of())
        monkeypatch.setattr(runner.flashsampling.step, "warm_up", fails)
        runner._dummy_sampler_run(torch.randn(2, D))

    assert refused_words(PLUGIN, serve, monkeypatch, caplog) == "OutOfMemoryError('no room')"
    runner = runners[0]
    assert type(runner) is fakes.Runner
    runner.add(a=(PROMPT, SamplingParams()))
    batch = runner.batch({"a": 4})
    assert runner.sample(states_of(batch), batch, None)[0].sampled_token_ids.tolist() == [[LEFT]]
    assert counters(SimpleNamespace(model_runner=runner)) == {"refused": "OutOfMemoryError('no room')"}


def test_counters_that_cannot_be_read_at_the_end(caplog):
    """vLLM shuts down all the same, for example after a device's error."""
    runner = runner_of()
    runner.flashsampling.step.undefined = "lost"
    runner.shutdown()
    assert not hasattr(runner, "model")
    assert "invalid literal" in caplog.text


def test_a_runner_that_is_fused(monkeypatch, caplog):
    """From the worker on."""
    gpu = {
        "input_batch": {"get_num_sampled_and_rejected": fakes.get_num_sampled_and_rejected},
        "model_runner": {"GPUModelRunner": fakes.Runner},
        "sample.output": {"SamplerOutput": fakes.SamplerOutput},
        "sample.sampler": {"Sampler": fakes.Sampler},
        "spec_decode.rejection_sampler": {"RejectionSampler": object},
    }
    layers = {"logits_processor": {"LogitsProcessor": LAYERS.processor}}
    layers["vocab_parallel_embedding"] = {"UnquantizedEmbeddingMethod": object, "VocabParallelEmbedding": object}
    modules = {f"vllm.v1.worker.gpu.{name}": names for name, names in gpu.items()}
    modules |= {f"vllm.model_executor.layers.{name}": names for name, names in layers.items()}
    modules["vllm"] = {"envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False)}
    modules["vllm.distributed"] = {"get_tp_group": None}
    modules["vllm.v1.outputs"] = {"LogprobsTensors": fakes.LogprobsTensors}
    for name, names in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))
    monkeypatch.setenv("FLASHSAMPLING_VLLM_GRAPHS", "off")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.26.0")
    monkeypatch.setattr(PLUGIN, "check_signature", lambda *_: None)
    model = fakes.Model(V, D)
    monkeypatch.setattr(plugin, "find_head", lambda *_: find_head(model, D, torch.float32, torch.device("cpu"), LAYERS))
    for name in ("check_runner", "check_speed"):
        monkeypatch.setattr(plugin, name, lambda *_: None)
    runner = fakes.Runner(model, fakes.Sampler(SLOTS, V), [0])
    runner.vllm_config, runner.dtype = SimpleNamespace(speculative_config=None), torch.float32
    runner.model_config, runner.vocab_size = SimpleNamespace(get_hidden_size=lambda: D), V
    worker = SimpleNamespace(use_v2_model_runner=True, model_runner=runner)
    with caplog.at_level(logging.INFO, "vllm.flashsampling"):
        load.attach(worker)
    assert caplog.messages[0].startswith("flashsampling: LM head")
    assert type(runner).__mro__[1:3] == (FusedRunner, fakes.Runner)
    assert counters(worker)["fused"] == 0
