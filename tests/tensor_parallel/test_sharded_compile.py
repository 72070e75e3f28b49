"""Kernels of filters over ranks compile without a GPU, once for all requests, in a process of its own.

``tests/kernels/triton`` compiles them for every supported architecture."""

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.target import output_of

COMPILE = """
import contextlib
import sys
import torch
from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import PACKED, Shard
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.triton import jit
from flashsampling.sampling_params import SamplingParams
from flashsampling.tensor_parallel.filtered_sampling import Part, draw
from flashsampling.tensor_parallel.message import Hashes
from flashsampling.tensor_parallel.p2p import PeerToPeer, _DryRun
from tests.kernels.triton.target import compile_only

compiled = compile_only(int(sys.argv[1]))
RANKS, BATCH, VOCAB, DIM = 2, 64, 1024, 64
hashes = Hashes(BATCH, torch.device("cpu"))


class Step(PeerToPeer):
    def __init__(self):
        self._hashes, self._table, self._buffer_at, self._row_stride = hashes, 1 << 40, 1 << 20, 2 * VOCAB
        self._rank, self._ranks, self.room, self.rows_at_once, self._failed = 0, RANKS, 1 << 16, BATCH, None
        self._buffer, self._vocab_size = torch.zeros(BATCH // RANKS, 2 * VOCAB), 2 * VOCAB


def names(make, batch=BATCH, **params):
    part = Part(make(), BACKENDS["triton"], [(0, VOCAB), (VOCAB, 2 * VOCAB)], 0, 2 * VOCAB)
    ones, ids = torch.ones(batch), torch.zeros(batch, dtype=torch.int64)
    states, weight = torch.zeros(batch, DIM, dtype=torch.bfloat16), torch.zeros(VOCAB, DIM, dtype=torch.bfloat16)
    known = {kernel.hash for kernel in compiled}
    draw(part, SampleInputs(states, weight, ones, ids, ids, 1, VOCAB, Shard(0, PACKED), SamplingParams(**params)))
    new = {kernel.hash: kernel for kernel in compiled if kernel.hash not in known}
    print(" ".join(sorted(kernel.name for kernel in new.values())) or "none")


def dry_run():
    return _DryRun(1 << 40, 0, 2 * VOCAB, hashes)


ones, few = torch.ones(BATCH), torch.ones(7)
mask = torch.zeros(BATCH, 2 * VOCAB // 32, dtype=torch.int32)
names(dry_run, top_k=20, top_p=ones)
for make in (Step, dry_run):
    names(make, top_k=torch.ones(BATCH, dtype=torch.int32), top_p=ones, min_p=ones)
    names(make, 7, top_k=3, top_p=few[:1].expand(7))
names(dry_run, logprobs=True, top_logprobs=5, token_mask=mask)
names(Step, logprobs=True, top_logprobs=3, logprob_ids=torch.zeros(BATCH, 4, dtype=torch.int64), token_mask=mask)
"""
FILTERS = "all_gather_kernel block_stats_kernel filtered_sample_kernel logits_gemm_kernel push_kernel"


@pytest.mark.quick(0)
def test_a_dry_run_compiles_all_that_a_step_launches(tmp_path):
    """Other ranks may wait by then. Another batch may take another tile, of which there are some."""
    printed = output_of(COMPILE, 90, cache=tmp_path)
    filters, *others, logprobs, given = printed.splitlines()
    assert filters == FILTERS
    assert others == ["none", "logits_gemm_kernel", "none", "none"]
    assert logprobs == "all_gather_kernel block_stats_kernel hash_kernel logprobs_kernel"
    assert given == "none"
