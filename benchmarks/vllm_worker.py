"""Functions that benchmarks run inside vLLM's worker by ``LLM.collective_rpc``, and a class whose import brings them
there.

vLLM starts its engine in a process of its own, so that is where the model runner is. Its class is the plug-in's or
vLLM's.
"""

import hashlib
import time
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from .random_models import spread


def use_plugin(worker: Any, wanted: bool) -> None:
    """The next requests are sampled by the plug-in's runner, or by vLLM's own."""
    runner = worker.model_runner
    kinds = runner.__dict__.setdefault("kinds", (type(runner).__mro__[2], type(runner)))  # vLLM's, the plug-in's
    runner.__class__ = kinds[wanted]


def spread_logits(worker: Any, deviation: float) -> None:
    """Spreads the logits of a model of random weights: ``random_models.expand``."""
    spread(worker.model_runner.model, deviation)


def start_timing(worker: Any, with_grammar: bool, with_memory: bool) -> None:
    """Notes every step's CUDA events, its host time and its tokens from here on. ``with_grammar``: every row has a mask
    of half the tokens. ``with_memory``: notes memory too, which takes the host so long that times mean little."""
    from vllm.v1.core.sched.output import GrammarOutput

    runner = worker.model_runner
    execute, sample, steps, peaks = runner.execute_model, runner.sample, [], [0]
    words = -(-runner.vocab_size // 32)
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (runner.max_num_reqs, words), np.int32)

    def timed_execute(*args: Any, **kwargs: Any) -> Any:
        start = _mark()
        result = execute(*args, **kwargs)
        timed_execute.start = start  # type: ignore[attr-defined]
        return result

    def timed_sample(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        if with_grammar:
            grammar_output = GrammarOutput(list(input_batch.req_ids), masks[: input_batch.num_reqs])
        took = 0
        if with_memory:
            peaks[0] = max(peaks[0], torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        before, began = _mark(), time.perf_counter()
        out = sample(hidden_states, input_batch, grammar_output)
        ended, after = time.perf_counter(), _mark()
        if with_memory:
            took = torch.cuda.max_memory_allocated() - held
        events = timed_execute.start, before, after  # type: ignore[attr-defined]
        tokens = out[0].sampled_token_ids.clone()
        steps.append(Timed(input_batch.num_tokens, input_batch.num_reqs, *events, 1e3 * (ended - began), took, tokens))
        return out

    runner.execute_model, runner.sample, runner.timed_steps = timed_execute, timed_sample, (steps, peaks)
    torch.cuda.reset_peak_memory_stats()


class Timed(NamedTuple):
    """A step."""

    tokens: int
    requests: int
    start: torch.cuda.Event
    before: torch.cuda.Event  # LM head and sampler
    after: torch.cuda.Event
    host_ms: float
    bytes: int
    drawn: torch.Tensor


def stop_timing(worker: Any, batch: int) -> dict[str, Any]:
    """Returns the times of the decode steps of ``batch`` rows in milliseconds, their memory in MiB, and a digest of all
    tokens.

    On the GPU's clock: the model; head and sampler; from its tokens to the next such step's. On the host's: the call
    that launches head and sampler. If memory was noted, the peak of what was allocated, and the most that head and
    sampler took in a step of so many rows, the last positions of their prompts' too."""
    runner = worker.model_runner
    steps, peaks = runner.timed_steps
    del runner.execute_model, runner.sample, runner.timed_steps
    torch.cuda.synchronize()
    full = [step.tokens == step.requests == batch for step in steps]
    some = [step for step, is_full in zip(steps, full) if is_full]
    both = [pair for pair, are_full in zip(pairwise(steps), pairwise(full)) if all(are_full)]
    return {
        "forward_ms": [step.start.elapsed_time(step.before) for step in some],
        "sample_ms": [step.before.elapsed_time(step.after) for step in some],
        "host_ms": [step.host_ms for step in some],
        "tpot_ms": [one.after.elapsed_time(other.after) for one, other in both],
        "peak_MiB": max(peaks[0], torch.cuda.max_memory_allocated()) / 2**20,
        "sample_MiB": max((step.bytes for step in steps if step.requests == batch), default=0) / 2**20,
        "drawn": hashlib.sha256(b"".join(step.drawn.cpu().numpy().tobytes() for step in steps)).hexdigest(),
    }


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class WorkerExtension:
    """Named to vLLM as ``worker_extension_cls``, has the engine's process import this module.

    CuTe DSL on the path without quack, as where it was unpacked by hand, lets vLLM warm up router kernels that want it.
    """


def _without_quack() -> None:
    import importlib.util

    if importlib.util.find_spec("vllm") and not importlib.util.find_spec("quack"):
        from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16

        ll_bf16._cutedsl_available = False


_without_quack()
