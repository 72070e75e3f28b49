"""Kernels of sharded requests compile for every supported architecture without a GPU, once for all requests.

Runs in a process of its own."""

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.target import output_of

COMPILE = """
import sys
import torch
from flashsampling.backends import BACKENDS
from flashsampling.tensor_parallel.message import Hashes
from flashsampling.tensor_parallel.filtered_sampling import Part, draw
from flashsampling.tensor_parallel.transport import DryRun
from flashsampling.exchange_protocol import PACKED, Shard
from flashsampling.kernels.triton.sharded.param_hash import of_request
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams
from tests.kernels.triton.target import compile_only

compiled = compile_only(int(sys.argv[1]))
RANKS, BATCH, VOCAB, DIM = 2, 64, 1024, 64
hashes = Hashes(BATCH, torch.device("cpu"))


class Nobody(DryRun):
    def begin(self, step):
        of_request(hashes, step)


def names(batch=BATCH, **params):
    part = Part(Nobody(RANKS, 1 << 16, True), BACKENDS["triton"], [(0, VOCAB), (VOCAB, 2 * VOCAB)], 0, 2 * VOCAB)
    ones, ids = torch.ones(batch), torch.zeros(batch, dtype=torch.int64)
    states, weight = torch.zeros(batch, DIM, dtype=torch.bfloat16), torch.zeros(VOCAB, DIM, dtype=torch.bfloat16)
    known = {kernel.hash for kernel in compiled}
    draw(part, SampleInputs(states, weight, ones, ids, ids, 1, VOCAB, Shard(0, PACKED), SamplingParams(**params)))
    new = {kernel.hash: kernel for kernel in compiled if kernel.hash not in known}
    print(" ".join(sorted(kernel.name for kernel in new.values())) or "none")


ones = torch.ones(BATCH)
names(top_k=20, top_p=ones)
names(top_k=torch.ones(BATCH, dtype=torch.int32), top_p=ones, min_p=ones)
names(logprobs=True, top_logprobs=5)
names(logprobs=True, top_logprobs=3, logprob_ids=torch.zeros(BATCH, 4, dtype=torch.int64), logsumexp=True)
counts, mask = torch.zeros(BATCH, 2 * VOCAB, dtype=torch.int32), torch.zeros(BATCH, 2 * VOCAB // 32, dtype=torch.int32)
names(counts=counts, repetition_penalty=ones, token_mask=mask)
few = torch.ones(7)
names(7, top_k=3, top_p=few[:1].expand(7))
names(7, logprobs=True, top_logprobs=20)
names(7, top_k=32)
print(min(len(kernel.asm["cubin"]) for kernel in compiled))
"""
FILTERS = (
    "conclude_kernel few_kernel first_kernel hash_kernel logits_gemm_kernel row_max_kernel top_kernel winners_kernel"
)


@pytest.mark.quick(0)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability, tmp_path):
    printed = output_of(COMPILE, capability, cache=tmp_path)
    few, all_filters, logprobs, given, changed, *others, least = printed.splitlines()
    assert few == FILTERS
    assert {"histogram_kernel", "radix_pass_kernel", "least_kernel"} <= set(all_filters.split())
    assert {"raw_kernel", "words_kernel", "above_kernel", "ranks_kernel", "mass_kernel"} <= set(logprobs.split())
    assert set(given.split()) == {"conclude_kernel", "words_kernel", "hash_kernel"}
    assert "block_stats_kernel" in changed
    assert others == [
        "logits_gemm_kernel",
        "none",
        "none",
    ]  # other numbers; another batch, of which there are some sizes
    assert int(least) > 1000


AHEAD = """
import torch
from flashsampling.backends import BACKENDS
from flashsampling.tensor_parallel.filtered_sampling import Part, draw
from flashsampling.tensor_parallel.transport import DryRun
from flashsampling.exchange_protocol import PACKED, Shard
from flashsampling.kernels.triton import jit
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams
from tests.kernels.triton.target import compile_only

compiled = compile_only(80)
RANKS, VOCAB, DIM = 2, 1024, 64


class Real(DryRun):
    def all_gather(self, words, step, wanted=None):  # memory of its own, as what a kernel or a collective wrote
        return torch.stack([words] * self.ranks)


def drawn(kind, batch):
    part = Part(kind(RANKS, 1 << 16, True), BACKENDS["triton"], [(0, VOCAB), (VOCAB, 2 * VOCAB)], 0, 2 * VOCAB)
    ones, ids = torch.ones(batch), torch.zeros(batch, dtype=torch.int64)
    states, weight = torch.zeros(batch, DIM, dtype=torch.bfloat16), torch.zeros(VOCAB, DIM, dtype=torch.bfloat16)
    top_k = torch.ones(batch, dtype=torch.int32)
    params = SamplingParams(top_k=top_k, top_p=ones, min_p=ones, logprobs=True, top_logprobs=2)
    draw(part, SampleInputs(states, weight, ones, ids, ids, 1, VOCAB, Shard(0, PACKED), params))


with jit.compiling(4):
    drawn(DryRun, 1)
    drawn(DryRun, 7)
ahead = {type(kernel).__name__ for kernel in compiled}
compiled.clear()
launched = []
compile_one = jit._Function._do_compile

def counted(self, *arguments, **named):
    launched.append(self.__name__)
    return compile_one(self, *arguments, **named)

jit._Function._do_compile = counted
drawn(Real, 1)
drawn(Real, 7)
print(*ahead, len(compiled) > 20, *launched)
"""


@pytest.mark.quick(0)
def test_what_is_rehearsed_ahead_is_all_that_a_step_compiles(tmp_path):
    """Several kernels compile at once, while nothing runs and no other rank takes part."""
    assert output_of(AHEAD, cache=tmp_path).split() == ["FutureKernel", "True"]
