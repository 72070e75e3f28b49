"""Nothing compiles while vLLM serves over several ranks: first the warm-up, then batches of all kinds, compiled
for a GPU without one, and not run. In a process of its own."""

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.target import output_of

COMPILE = """
import itertools
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch

from tests.kernels.triton.target import compile_only

impl, compiled = sys.argv[1], compile_only(90)

import flashsampling.integrations.engine.step as module
from flashsampling.outputs import SampleOutput
from flashsampling.backends import BACKENDS
from flashsampling.tensor_parallel.message import Hashes
from flashsampling.tensor_parallel.filtered_sampling import Part, draw
from flashsampling.exchange_protocol import PACKED, Shard
from flashsampling.tensor_parallel.p2p import PeerToPeer
from flashsampling.param_parsers import BatchShape
from flashsampling.sampling_params import parse_sampling_params
from flashsampling.inputs import SampleInputs
from flashsampling.outputs import SampleResult
from flashsampling.sampling_params import DEFAULT_PARAMS
from flashsampling.integrations.vllm.step import VllmStep
from tests.integrations.vllm import fakes as vllm_fakes, test_step as test_vllm
from tests.integrations.vllm.fakes import SamplingParams

V, FIRST, LAST, DIM, MOST = 2005, 1000, 2005, 64, 8
RANGES, RANK = [(0, FIRST), (FIRST, LAST)], 1
weight = torch.nn.Parameter(torch.zeros(V, DIM, dtype=torch.bfloat16), requires_grad=False)
hashes = Hashes(64, torch.device("cpu"))


class Nobody(PeerToPeer):
    def __init__(self):
        self._hashes, self._table, self._buffer_at, self._row_stride = hashes, 1 << 40, 1 << 20, -(-V // 4) * 4
        self._rank, self._ranks, self.room, self.rows_at_once, self._failed = RANK, len(RANGES), 1 << 14, 64, None
        self._buffer, self._vocab_size = torch.zeros(32, self._row_stride), V


class Group:
    first_token, last_token = FIRST, LAST
    shard, vocab_size = Shard(FIRST, PACKED), V

    def check(self, *, collective):
        pass

    def __exit__(self, kind, error, trace):
        if error is not None:
            raise error


def step_of(states, params, temperature, seed, offset):
    return SampleInputs(states, weight[FIRST:LAST], temperature, seed, offset, 1, LAST - FIRST, Group.shard, params)


def drawn(step):
    if BACKENDS[impl].runs_on_shard(step):
        BACKENDS[impl].module.run(step)
    else:
        draw(Part(Nobody(), BACKENDS[impl], RANGES, RANK, V), step)


if impl == "cute":  # its own kernels are of the head alone
    from flashsampling.kernels.hopper import launch

    def launched(step, config=None, features=None, asked_for=()):
        if step.params is not DEFAULT_PARAMS:
            return real(step, config)
        return SampleResult(torch.zeros(len(step.hidden_states) * step.num_samples or 1, dtype=torch.int64))

    real, launch.run, BACKENDS["cute"].module.run = launch.run, launched, launched


def asked_for(request, batch):
    shape = BatchShape(batch, V, V, torch.device("cpu"), 1)
    return parse_sampling_params(request, shape) if request else DEFAULT_PARAMS


def warm_up(weight, requests, *, max_batch_size, tp):
    some = [asked_for(request, max_batch_size) for request in requests]
    some = [params for params in some if params is not DEFAULT_PARAMS]
    for params, batch in itertools.product(some, (1, max_batch_size)):
        states, zeros = torch.zeros(batch, DIM, dtype=weight.dtype), torch.zeros(batch, dtype=torch.int64)
        drawn(step_of(states, params.rows(0, batch), torch.ones(batch), zeros, zeros))
    return []


def sample(states, weight, *, tp, temperature, seed, offset, **request):
    global calls
    batch, params, top = len(states), asked_for(request, len(states)), request.get("top_logprobs", 0)
    if params is not DEFAULT_PARAMS:
        calls += 1
        drawn(step_of(states, params, temperature, seed, offset))
    ids, values = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch)
    return SampleOutput(ids, values, values, ids, torch.zeros(batch, top, dtype=torch.int64), torch.zeros(batch, top))


def runner_of():
    runner = test_vllm.runner_of(vocab_size=V)
    step = runner.flashsampling.step
    head = step.head._replace(layer=SimpleNamespace(weight=weight), has_bias=False, transform={})
    runner.flashsampling.step = VllmStep(head, step.sampler, step.state, step.device, Group())
    return runner


module.sample, module.warmup_mixes, calls = sample, warm_up, 0
module.FusedStep._draw_cached = lambda step, call, parsed: step._call(call)
runner_of().flashsampling.step._warm_up(MOST, torch.zeros(MOST, DIM, dtype=torch.bfloat16))
known, calls = {kernel.hash for kernel in compiled}, 0
print(*sorted({kernel.name for kernel in compiled}))

kinds = dict(test_vllm.SERVED) | {
    "k of 1": SamplingParams(seed=1, top_k=1),
    "k of 33": SamplingParams(seed=1, top_k=33, top_p=0.9),
    "k of 128": SamplingParams(seed=1, top_k=128),
    "k of 129": SamplingParams(seed=1, top_k=129),
    "k, p, logprobs": SamplingParams(seed=1, top_k=9, top_p=0.3, logprobs=20),
    "k, min_p": SamplingParams(seed=1, top_k=5, min_p=0.1),
    "allowed, logprobs": SamplingParams(seed=1, allowed_token_ids=[1, 2], logprobs=1, top_p=0.5),
    "penalty, bias": SamplingParams(seed=1, repetition_penalty=2.0, logit_bias={3: 1.0}),
    "allowed, bias, k": SamplingParams(seed=1, allowed_token_ids=[1, 2], logit_bias={3: 1.0}, top_k=40),
    "many biases": SamplingParams(seed=1, logit_bias={token: 1.0 for token in range(100)}),
    "many biases, logprobs": SamplingParams(seed=1, logit_bias={token: 1.0 for token in range(100)}, logprobs=7),
}
batches = [*((kind,) for kind in kinds), *itertools.combinations(kinds, 2)]
batches += [("k of 128",) * 5, ("plain", "logprobs") * 4]
for names in batches:
    runner = runner_of()
    requests = {str(i): (test_vllm.PROMPT, kinds[name]) for i, name in enumerate(names)}
    runner.add(**requests)
    batch = runner.batch(dict.fromkeys(requests, 1))
    states = torch.zeros(batch.num_tokens + 3, DIM, dtype=torch.bfloat16)
    mask = np.full((1, -(-V // 32)), 3, np.int32)
    runner.sample(states, batch, vllm_fakes.GrammarOutput(["0"], mask) if names[0] in ("plain", "top_k") else None)
print(calls)
print(*sorted({kernel.name for kernel in compiled if kernel.hash not in known}))
"""


@pytest.mark.quick(0)
@pytest.mark.parametrize(("impl", "entries"), [("triton", set()), ("cute", {"sparse_bias_kernel"})])
def test_nothing_compiles_while_it_serves(impl, entries, tmp_path):
    if impl == "cute":
        pytest.importorskip("cutlass")
    printed = output_of(COMPILE, impl, cache=tmp_path)
    warm, calls, compiled, _ = printed.split("\n")
    kernels = {"push_kernel", "all_gather_kernel", "filtered_sample_kernel", "hash_kernel", "block_stats_kernel"}
    assert kernels | entries <= set(warm.split())
    assert int(calls) > 300
    assert compiled == ""
