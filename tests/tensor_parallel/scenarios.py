"""The scenarios of the tensor-parallel tests.

``run`` starts them; a scenario is a function of a ``Rank``, run by all alike."""

import contextlib
import functools
import os
import random
import re
import signal
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import flashsampling
from flashsampling import LMHeadSampler, exchange_protocol, ops
from flashsampling.inputs import SampleInputs
from flashsampling.outputs import SampleResult
from flashsampling.tensor_parallel import (
    Failure,
    TensorParallel,
    TensorParallelError,
    TensorParallelMismatch,
    TensorParallelTimeout,
    capabilities,
    construction,
    filtered_sampling,
    nccl,
    shard_lm_head,
    shard_range,
)
from flashsampling.tensor_parallel.nccl import Nccl
from flashsampling.tensor_parallel.transport import Collectives
from flashsampling.tensor_parallel.watchdog import read_heartbeats

from ..kernels.test_filters import differences
from ..mixes import Mix
from ..problems import Problem, assert_agreement, make_problem, rows_only


@dataclass
class Rank:
    rank: int
    world: int
    device: torch.device
    impl: str
    transport: str
    long: bool  # a GPU's share of repetitions, not CI's

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" and self.impl != "cute" else torch.bfloat16

    @property
    def timeout(self) -> float:
        """Seconds of a time-out that a scenario waits for. Where a kernel may be compiled meanwhile, it is longer."""
        return 8.0 if self.device.type == "cuda" else 4.0

    def problem(self, batch: int, vocab: int = 1000, dim: int = 64, **options) -> Problem:
        return make_problem(batch, vocab, dim, self.device, self.dtype, **options)

    def bounds(self, vocab: int, kind: str) -> list[int]:
        """Ends of the ranks' shards."""
        if kind == "shard_lm_head":
            return [shard_range(vocab, rank, self.world)[1] for rank in range(self.world)]
        if kind == "even":  # as DTensor cuts: in the middle of a Philox group, of a tile
            return [min((rank + 1) * -(-vocab // self.world), vocab) for rank in range(self.world)]
        cuts = sorted(random.Random(kind).choices(range(vocab + 1), k=self.world - 1))
        if kind.startswith("empty"):
            cuts[0] = 0 if kind == "empty first" else vocab
        return [*sorted(cuts), vocab]

    def shard(self, weight: Tensor, kind: str = "even") -> tuple[Tensor, int]:
        ends = self.bounds(weight.shape[0], kind)
        first = ends[self.rank - 1] if self.rank else 0
        return weight[first : ends[self.rank]].clone(), first

    def group(self, weight: Tensor, kind: str = "even", **options) -> tuple[TensorParallel, Tensor]:
        shard, first = self.shard(weight, kind)
        options = {"transport": self.transport, "impl": self.impl, "timeout": 60.0, "group": None} | options
        return TensorParallel(options.pop("group"), shard, first_token=first, **options), shard

    def checked_group(self, problem: Problem, **options) -> tuple[TensorParallel, Tensor]:
        """A group that has made a step."""
        tp, shard = self.group(problem.weight, **options)
        self.check(tp, shard, problem)
        return tp, shard

    def check_new_group(self, problem: Problem, **options) -> None:
        """Another group works, whatever happened to the one before."""
        self.checked_group(problem, **options)[0].close()

    def check(self, tp: TensorParallel, shard: Tensor, problem: Problem) -> Tensor:
        """The ranks' tokens are one rank's: bit for bit from a kernel, up to near ties from torch's matmul."""
        tokens = draw(tp, shard, problem)
        whole = problem.sample(self.impl)
        if self.impl == "streaming":
            assert_agreement(tokens, problem)
        else:
            assert torch.equal(tokens, whole), (self.impl, tokens.flatten()[:8], whole.flatten()[:8])
        assert (tokens < problem.vocab).all()
        return tokens


def draw(
    tp: TensorParallel, shard: Tensor, problem: Problem, impl: str | None = None, vocab_size: int | None = None
) -> Tensor:
    return replace(problem, weight=shard, vocab_size=vocab_size).sample(impl, tp)


def draw_with(tp: TensorParallel, shard: Tensor, problem: Problem, **params: Any) -> Tensor:
    """(B,) tokens with further parameters."""
    return flashsampling.sample(problem.hidden_states, shard, **rows_of(problem) | params, tp=tp).token_ids


def rows_of(problem: Problem) -> dict[str, Any]:
    """The arguments of ``sample`` that are one per row."""
    return {"temperature": problem.temperature, "seed": problem.seed, "offset": problem.offset}


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """It takes less than that."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


# -- scenarios

# Ranks come late by waiting for the others' word, not by sleeping, and what must not wait for a time-out of a minute
# has SOON: a loaded machine may stop a process for seconds.
SOON = 40.0  # seconds
_aside: list[dist.ProcessGroup] = []  # a group of all ranks, for the scenarios' own words


def same_tokens(rank: Rank) -> None:
    """Tokens are those of one rank, for any cut of the vocabulary, any batch, several draws and a padded vocabulary."""
    slow = rank.impl == "triton" and not rank.long
    sizes = ((1000, 64), (390, 40)) if slow else ((5003, 64), (390, 136), (7, 64))
    for kind in ("shard_lm_head", "even", "uneven 1", "uneven 2", "empty first", "empty last"):
        for vocab, dim in sizes:
            problem = rank.problem(70, vocab, dim)
            tp, shard = rank.group(problem.weight, kind)
            with tp:
                for batch in (70, 1, 17):
                    rank.check(tp, shard, problem.rows(slice(0, batch)))
                empty = problem.rows(slice(0, 0))
                assert draw(tp, shard, empty).shape == (0, 1)
    problem = rank.problem(9, 777, 64, num_samples=3)
    tp, shard = rank.group(problem.weight, max_batch_size=9, max_num_samples=3)  # winners fill a message
    rank.check(tp, shard, problem)
    for real in (500, 200, 1):  # the last shard, or all but the first, are padding
        padded = replace(rank.problem(9, 777, 64), vocab_size=real)
        tp, shard = rank.group(padded.weight, vocab_size=real)
        assert tp.vocab_size == real
        rank.check(tp, shard, padded)
    shard = shard_lm_head(problem.weight)
    # ranges from the order
    tp = TensorParallel(None, shard, max_num_samples=3, transport=rank.transport, impl=rank.impl)
    rank.check(tp, shard, problem)


def wide_batches(rank: Rank) -> None:
    """More rows than 128, and than one block of rows has: shapes of the kernels that smaller batches do not take."""
    problem = rank.problem(330, 1500, 72)
    tp, shard = rank.group(problem.weight, "uneven 1", max_batch_size=330)
    with tp:
        for batch in (330, 129, 150, 170, 190, 205, 220, 235, 256):
            rank.check(tp, shard, problem.rows(slice(0, batch)))


def delayed_ranks(rank: Rank) -> None:
    """Trap 20: each rank up to 100 ms late at every step; two steps may be in flight on a fast one."""
    problem = rank.problem(16, 600, 64)
    tp, shard = rank.group(problem.weight)
    late = random.Random(rank.rank)
    outs = []
    for step in range(40 if rank.long else 8):
        time.sleep(late.random() * 0.1)
        if rank.device.type == "cuda" and step % 3 == 0:
            torch.cuda._sleep(int(late.random() * 1e8))  # the device too, and the host runs ahead
        outs.append(draw(tp, shard, replace(problem, offset=problem.offset + step)))
    for step, out in enumerate(outs):
        assert torch.equal(out, replace(problem, offset=problem.offset + step).sample(rank.impl))


def many_steps(rank: Rank) -> None:
    """Another batch size and fresh offsets every step, the buffers made once."""
    problem = rank.problem(64, 600, 64)
    tp, shard = rank.group(problem.weight, max_batch_size=64)
    sizes = random.Random(1)
    for step in range(100_000 if rank.long and rank.transport == "p2p" else 2_000 if rank.long else 30):
        batch = problem.rows(slice(0, sizes.randint(1, 64)))
        batch.offset.add_(1)
        tokens = draw(tp, shard, batch)
        if step % 1000 > 990 or step < 10:
            assert torch.equal(tokens, batch.sample(rank.impl))
    tp.check()


def disagreements(rank: Rank) -> None:
    """An error that says so, on all ranks, at construction; the group works afterwards."""
    problem = rank.problem(4, 600, 64)
    shard, first = rank.shard(problem.weight)
    odd, wider = rank.rank == 1, torch.cat([shard, shard[:, :8]], 1)
    make = functools.partial(TensorParallel, None, transport=rank.transport, impl=rank.impl)
    cases = [
        ("same D on all ranks, got rank 0: 64, rank 1: 72", lambda: make(wider if odd else shard)),
        ("leave a hole at token", lambda: make(shard, first_token=first + 100 if odd or rank.rank > 1 else first)),
        ("overlap at token", lambda: make(shard, first_token=first - 1 if odd else first)),
        ("first_token must be given on all ranks or on none", lambda: make(shard, first_token=None if odd else first)),
        (r"weight must have shape \(V_shard, D\), got .* on rank 1", lambda: make(shard[0] if odd else shard)),
        ("hold from 1 to", lambda: make(shard[:0])),
    ]
    if rank.device.type == "cpu":
        for name, why in (("p2p", " .*shard is on cpu"), ("nccl", "")):
            unusable = functools.partial(TensorParallel, None, shard, transport=name)
            cases.append((f"transport='{name}' cannot be used{why}", unusable))
    for message, construct in cases:
        with pytest.raises(ValueError, match=message):
            construct()
    tp, shard = rank.group(problem.weight, max_batch_size=4)
    rank.check(tp, shard, problem)
    tp.close()
    tp.close()
    with pytest.raises(ValueError, match="has been closed"):
        draw(tp, shard, problem)


def memory_that_cannot_be_mapped(rank: Rank) -> None:
    """Found out when the buffers are made: another transport and a warning on all ranks, or an error if p2p was
    named."""

    class Refused:
        def __init__(self, *_: object, **__: object) -> None:
            if rank.rank == 1:
                raise RuntimeError("pidfd_getfd: Operation not permitted")

        def close(self, all_done: bool) -> None:
            assert all_done  # no step was made

    problem = rank.problem(4, 600, 64)
    shard, _ = rank.shard(problem.weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(construction, "PeerToPeer", Refused)
        patch.setattr(capabilities, "why_no_p2p", lambda *_: None)
        with pytest.raises(ValueError, match=r"transport='p2p' cannot be used \(rank 1: pidfd_getfd"):
            TensorParallel(None, shard, transport="p2p", impl=rank.impl)
        with pytest.warns(RuntimeWarning, match="transport 'p2p' cannot be used .* instead"):
            tp = TensorParallel(None, shard, impl=rank.impl)
    assert tp.transport == ("nccl" if rank.device.type == "cuda" else "gloo")
    rank.check(tp, shard, problem)


def generate(rank: Rank) -> None:
    """A transformer on every rank, its LM head sharded: the text of one rank."""
    transformers = pytest.importorskip("transformers")
    from flashsampling.integrations.transformers import generate as custom_generate

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=500, **sizes, num_key_value_heads=2, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False
    )
    model = transformers.LlamaForCausalLM(config).to(rank.device, rank.dtype).eval()
    ids = torch.arange(1, 13, device=rank.device).view(2, 6)
    tp, shard = rank.group(model.lm_head.weight.detach())
    options = {"custom_generate": custom_generate, "do_sample": True, "top_k": 0, "max_new_tokens": 8, "seed": [1, 2]}
    options |= {"attention_mask": torch.ones_like(ids)}
    some = {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3, "bad_words_ids": [[7], [450]]}
    for params in ({}, some):
        whole = LMHeadSampler(model.lm_head, max_batch_size=2, impl=rank.impl)
        expected = model.generate(ids, sampler=whole, **options | params)
        drawn = model.generate(ids, sampler=LMHeadSampler(shard, max_batch_size=2, tp=tp), **options | params)
        assert torch.equal(drawn, expected)


def sub_groups(rank: Rank) -> None:
    """Tensor parallelism inside data parallelism: halves of the world at work on problems of their own."""
    half = max(rank.world // 2, 1)
    members = [list(range(half)), list(range(half, rank.world))]
    groups = [dist.new_group(ranks) for ranks in members]
    local = 0 if rank.rank < half else 1
    problem = rank.problem(11, 600, 64, seed=local)
    part = replace(rank, rank=rank.rank - half * local, world=len(members[local]))
    tp, shard = part.group(problem.weight, group=groups[local])
    for _ in range(5 if rank.impl != "triton" or rank.long else 2):  # the interpreter takes a second for each
        problem.offset.add_(1)
        part.check(tp, shard, problem)


def two_at_once(rank: Rank) -> None:
    """Two groups over the same ranks; on a GPU each has a stream and neither waits for the other."""
    on_gpu = rank.device.type == "cuda"
    problems = [rank.problem(9, 600, 64, seed=1), rank.problem(33, 900, 64, seed=2)]
    groups = [rank.group(problem.weight) for problem in problems]
    streams = [torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext() for _ in problems]
    outs: list[tuple[Tensor, Problem]] = []
    if on_gpu:
        torch.cuda.synchronize()
    for step in range(20 if on_gpu else 6):
        # only p2p takes orders that differ between ranks
        swapped = (step + rank.rank if rank.transport == "p2p" else step) % 2
        for i in (1, 0) if swapped else (0, 1):
            with streams[i]:
                problem = replace(problems[i], offset=problems[i].offset + step)
                outs.append((draw(*groups[i], problem), problem))
    if on_gpu:
        torch.cuda.synchronize()
    for tokens, problem in outs:
        assert torch.equal(tokens, problem.sample(rank.impl))


def scored(rank: Rank, problem: Any, tp: Any, shard: Tensor) -> None:
    """``score``: bits of one rank's numbers; gradients, which are sums over the ranks."""
    ids = torch.randint(-1, 600, (6, 2), generator=torch.Generator().manual_seed(6)).to(rank.device)
    first, last = tp.first_token, tp.first_token + len(shard)
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for weight, group, out in ((shard, tp, found), (problem.weight, None, expected)):
        states, weight = (x.detach().clone().requires_grad_() for x in (problem.hidden_states, weight))
        returns = {"top_logprobs": 2, "return_entropy": True, "return_ranks": True}
        options: dict[str, Any] = {"top_k": 9, "tp": group, **returns}
        numbers = flashsampling.score(states, weight, ids, impl=None if group else rank.impl, **options)
        assert numbers.entropy is not None
        loss = (torch.where(numbers.logprobs.isnan(), 0.0, numbers.logprobs).sum(1) + 2 * numbers.logsumexp).sum()
        out += [*vars(numbers).values(), *torch.autograd.grad(loss + numbers.entropy.sum(), (states, weight))]
    *mine, of_states, of_shard = found
    *right, of_states_then, of_weight = expected
    interpreted = rank.impl == "triton" and rank.device.type == "cpu"  # numpy's products depend on the shard's shape
    for number, other, field in zip(mine, right, fields(flashsampling.ScoreOutput)):
        error = 1e-4 if interpreted or field.name == "entropy" else 0.0
        torch.testing.assert_close(number, other, atol=error, rtol=error, equal_nan=True)
    close = {"atol": 1e-2, "rtol": 1e-2} if of_states.dtype != torch.float32 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(of_states, of_states_then, **close)
    torch.testing.assert_close(of_shard, of_weight[first:last], **close)


def slots_and_scores(rank: Rank) -> None:
    """Slots of a pool, scores and kept sets are those of one rank."""
    problem = rank.problem(6, 600, 64)
    tp, shard = rank.group(problem.weight)
    sampler = LMHeadSampler(shard, max_batch_size=6, tp=tp, impl=rank.impl)
    one = LMHeadSampler(problem.weight, max_batch_size=6, impl=rank.impl)
    with pytest.raises(ValueError, match="seed must be given with tp"):
        sampler.pool.admit(0)
    mask = torch.full((-(-600 // 32),), 0x5A5A5A5A, dtype=torch.int32, device="cpu")
    for each in (sampler, one):
        each.pool.admit([0, 4], seed=[7, 8], temperature=[0.7, 1.5], top_p=[0.9, 1.0], repetition_penalty=[1.0, 1.4])
        each.pool.admit(2, seed=9, token_mask=mask, logit_bias=([[3, 599]], [[1.0, 2.0]]))
    for slots in ([4, -1, 0, 2], [2, 4, -1, -1], [0, 2, 4, -1]):
        states = problem.hidden_states[: len(slots)]
        on_device = torch.tensor(slots, device=rank.device)
        expected = one(states, slots=on_device).token_ids
        assert torch.equal(sampler(states, slots=on_device).token_ids, expected)
        assert torch.equal(sampler.offsets, one.offsets)
        assert torch.equal(sampler.pool.counts.counts, one.pool.counts.counts)
    drafts = torch.randint(0, 600, (2, 2), generator=torch.Generator().manual_seed(5)).to(rank.device)
    positions = problem.hidden_states.view(2, 3, 64)
    expected = one.verify(positions, drafts, slots=[4, 0]).token_ids
    assert torch.equal(sampler.verify(positions, drafts, slots=[4, 0]).token_ids, expected)
    scored(rank, problem, tp, shard)
    kept = [
        flashsampling.sample(problem.hidden_states, weight, seed=rows, top_p=0.8, return_kept=True, **where)
        for rows in (torch.arange(6, device=rank.device),)
        for weight, where in ((shard, {"tp": tp}), (problem.weight, {"impl": rank.impl}))
    ]
    assert kept[0].kept_mask is not None
    assert torch.equal(kept[0].kept_mask, kept[1].kept_mask)
    assert torch.equal(kept[0].kept_counts, kept[1].kept_counts)


def rejection(rank: Rank) -> None:
    """Drafts rejected over all ranks: one rank's answer for any cut. On GPUs also captured, and replayed with other
    drafts and seeds."""
    generator = torch.Generator().manual_seed(2)

    def whole_numbers(*shape: int) -> Tensor:  # whose products are exact in any order
        return torch.randint(-4, 5, shape, generator=generator).to(rank.device, rank.dtype)

    weight = whole_numbers(130, 16) / 4
    for kind in ("even", "uneven 2", "empty first") if rank.world < 4 else ("even",):
        tp, shard = rank.group(weight, kind, max_batch_size=64)
        accepted = 0
        with tp:
            for seed in range(12 if rank.long else 4):
                states = whole_numbers(16, 4, 16)
                drafts = (states.float() @ weight.float().T).argmax(dim=2)[:, :3]
                drafts[seed::5, seed % 3] = -1
                options: dict[str, Any] = {"seed": torch.arange(16, device=rank.device) + seed, "temperature": 2.0}
                options |= {"method": "rejection", "top_p": 0.9 if seed % 2 else 1.0}
                if seed > 1:
                    probs = torch.softmax(torch.randn(16, 3, 130, generator=generator), dim=2)
                    options["draft_probs"] = probs.to(rank.device)
                ours = flashsampling.verify(states, shard, drafts, tp=tp, **options)
                one = flashsampling.verify(states, weight, drafts, impl=rank.impl, **options)
                assert torch.equal(ours.token_ids, one.token_ids), (kind, seed)
                assert torch.equal(ours.num_accepted, one.num_accepted), (kind, seed)
                accepted += int(ours.num_accepted.sum())
            tp.check(collective=True)
        assert 10 < accepted < 48 * seed
    if rank.transport != "gloo" and rank.device.type == "cuda":
        _captured_verify(rank, method="rejection", top_p=0.9)
        _captured_verify(rank, method="match")


def _captured_verify(rank: Rank, **request: Any) -> None:
    """No host synchronisation in it, and replays verify what is there then, lengths too."""
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(1000, 64, generator=generator) * 0.3).to(rank.device, rank.dtype)
    states = torch.randn(16, 64, generator=generator).to(rank.device, rank.dtype)
    drafts = torch.zeros(12, dtype=torch.int64, device=rank.device)
    bounds = torch.tensor([0, 3, 6, 9, 12], device=rank.device)
    probs = torch.softmax(torch.randn(12, 1000, generator=generator), dim=1).to(rank.device)
    tp, shard = rank.group(weight)
    options = {"cu_draft_lengths": bounds, "max_draft_length": 3, **request}
    if request["method"] == "rejection":
        options["draft_probs"] = probs
    captured, eager = (LMHeadSampler(shard, max_batch_size=4, seed=[1, 2, 3, 4], tp=tp) for _ in range(2))
    flashsampling.warmup(shard, tp=tp, max_batch_size=16, top_p=request.get("top_p", 1.0))
    captured.verify(states, drafts, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.verify(states, drafts, **options)
    captured.reset([1, 2, 3, 4])
    accepted = 0
    for step in range(20):
        states.copy_(torch.randn(16, 64, generator=generator))
        likely = (states.float() @ weight.float().T).argmax(dim=1)
        drafts.copy_(likely[[0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]])
        bounds.copy_(torch.tensor([0, 3, 6, 9, 12] if step % 2 else [0, 3, 6, 9, 9]))
        graph.replay()
        tp.check()
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = eager.verify(states, drafts, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out.token_ids, expected.token_ids), step
        assert torch.equal(captured.offsets, eager.offsets)
        accepted += int(out.num_accepted.sum())
    assert accepted > 10
    tp.check(collective=True)
    tp.close()


def other_drafts(rank: Rank) -> None:
    """One rank has other drafts, or other probabilities, or another method: the error says what, and there is no
    token."""
    batch, n, vocab = 4, 2, 600
    problem = rank.problem(batch, vocab, 64)
    states = problem.hidden_states[:, None].expand(batch, n + 1, 64).contiguous()
    drafts = torch.tensor([[5, 6], [7, -1], [300, 599], [8, 9]], device=rank.device)
    generator = torch.Generator().manual_seed(1)
    probs = torch.softmax(torch.randn(batch, n, vocab, generator=generator), dim=2).to(rank.device)
    other_ids, elsewhere = drafts.clone(), probs.clone()
    other_ids[2, 1] = 598
    elsewhere[3, 1, 599] += 2.0**-20
    usual: dict[str, Any] = {"draft_token_ids": drafts, "draft_probs": probs, "method": "rejection", "top_k": 200}
    usual |= rows_of(problem)
    matched = usual | {"draft_probs": None, "method": "match", "top_k": 0}
    everything = ("method", "draft_token_ids", "cu_draft_lengths", "draft_probs")
    cases: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
        (usual, {"draft_token_ids": other_ids}, ("draft_token_ids",)),
        (usual, {"draft_probs": elsewhere}, ("draft_probs",)),
        (usual, {"draft_probs": None, "method": "match"}, everything),
        (matched, {"draft_token_ids": other_ids}, ("draft_token_ids",)),
    ]

    def verified(tp: TensorParallel, shard: Tensor, **drafts: Any) -> Tensor:
        return flashsampling.verify(states, shard, tp=tp, **drafts).token_ids

    odd = rank.world - 1
    for all_others, other, differs in cases:
        tp, shard = rank.group(problem.weight, timeout=20.0)
        with tp:
            step = functools.partial(verified, tp, shard)
            if rank.device.type == "cuda":  # what is compiled first keeps the others waiting
                flashsampling.warmup(shard, tp=tp, max_batch_size=batch * (n + 1), top_k=200)
            step(**all_others)
            if rank.transport == "p2p" and "seed" not in differs:
                differs = ("request",)
            given = all_others | other if rank.rank == odd else all_others
            _one_differs(tp, functools.partial(step, **given), odd, differs)


def parameters_of_the_first_rank(rank: Rank) -> None:
    """Parameters are the first rank's. If any rank's are invalid, all raise and nothing changes."""
    problem = rank.problem(4, 600, 64)
    tp, shard = rank.group(problem.weight)
    odd = rank.rank == 1
    local = torch.full((4,), rank.rank, device=rank.device)  # int64, on the device: what a broadcast might write into
    sampler = LMHeadSampler(
        shard, max_batch_size=4, seed=local, temperature=(local + 0.5).expand(4), impl=rank.impl, tp=tp
    )
    assert sampler.seeds.tolist() == [0] * 4
    assert sampler.temperature.tolist() == [0.5] * 4
    expanded = local[:1].expand(3)
    sampler.reset(expanded, expanded + 5, rows=[0, 1, 3], temperature=None if odd else [0.25, 0.5, 0.75])
    assert sampler.offsets.tolist() == [5, 5, 0, 5]
    assert sampler.temperature.tolist() == [0.25, 0.5, 0.5, 0.75]
    assert local.tolist() == [rank.rank] * 4
    assert LMHeadSampler(shard, max_batch_size=4, temperature=1.0 + rank.rank, tp=tp).temperature == 1.0

    make = functools.partial(LMHeadSampler, shard, max_batch_size=4, tp=tp)
    on_1 = "" if odd else "rank 1: ValueError: "  # on the others
    others = "the number of rows must be the same on all ranks, got "
    for message, call in (
        (on_1 + "seed must be one number or have shape", lambda: sampler.reset([1, 2] if odd else 3)),
        (on_1 + "rows must be from 0 to", lambda: sampler.reset(rows=[9] if odd else [0])),
        (on_1 + "temperature must be at least 0", lambda: sampler.reset(temperature=-1 if odd else 1)),
        (others + "rank 0: 1, rank 1: 2", lambda: sampler.reset(rows=[0, 1] if odd else [0])),
        (on_1 + "vocab_size must be given to TensorParallel", lambda: make(vocab_size=600 if odd else None)),
        (on_1 + "temperature must be a number or have shape", lambda: make(temperature=[1.0, 2.0] if odd else 1.0)),
        ("max_batch_size must be the same .* rank 0: 4, rank 1: 5", lambda: make(max_batch_size=5 if odd else 4)),
    ):
        with pytest.raises(ValueError, match="^" + message):
            call()
    assert sampler.seeds.tolist() == [0] * 4
    assert sampler.offsets.tolist() == [5, 5, 0, 5]
    # the same state everywhere, so the same tokens; ranks that gave another temperature would not have agreed
    tokens = sampler(problem.hidden_states).token_ids
    whole = LMHeadSampler(
        problem.weight, max_batch_size=4, seed=[0] * 4, temperature=[0.25, 0.5, 0.5, 0.75], impl=rank.impl
    )
    whole.reset([0] * 4, [5, 5, 0, 5])
    assert torch.equal(tokens, whole(problem.hidden_states).token_ids)


def _same_requests(rank: Rank, drawn: SampleResult, step: SampleInputs) -> None:
    """Compares a result with that of one rank with the whole vocabulary."""
    if rank.impl == "streaming":
        others = differences(drawn, ops.sample(step, "reference"), step, 2e-6)
        assert not others, (others, step.params.names())
    else:
        one = ops.sample(step, rank.impl)
        assert torch.equal(drawn.ids, one.ids), step.params.names()
        if one.values is not None:
            torch.testing.assert_close(drawn.values, one.values, rtol=1e-6, atol=1e-6, equal_nan=True)


def requests(rank: Rank) -> None:
    """Mixes of all sampling parameters, by group; on GPUs some also captured, and replayed with other seeds."""
    kinds = [("even", 130, 130), ("uneven 2", 130, 130), ("empty first", 70, 64)]
    for kind, rows, vocab in kinds if rank.world < 4 else kinds[:1]:
        mixes = [
            Mix(seed + 997 * rows, poisoned=rank.impl == "streaming", device=rank.device)
            for seed in range(12 if rank.long else 8)
        ]
        steps = [mix.of_a_head(mix.make(vocab=vocab)) for mix in mixes] * (10 if rank.long else 1)
        weight = torch.zeros(rows, 8, device=rank.device, dtype=rank.dtype)
        with pytest.MonkeyPatch.context() as patch:
            if kind != "even":  # a bulk message for each row
                patch.setattr(nccl, "LEAST_BULK_WORDS", 1)
            tp, shard = rank.group(weight, kind, vocab_size=vocab, max_batch_size=8, max_num_samples=5)
        with tp:
            for number, step in enumerate(steps):
                if not step.params.names():
                    continue
                step = step._replace(
                    hidden_states=step.hidden_states.to(rank.dtype), weight=step.weight[:vocab].to(rank.dtype)
                )
                first, last = tp.first_token, tp.last_token
                shard[: last - first] = step.weight[first:last]  # in place: another head, for this group
                params = step.params
                if params.bias is not None:
                    params = params._replace(bias=params.bias[first:last])
                part = step._replace(weight=shard, vocab_size=last - first, shard=tp.shard, params=params)
                if number % rank.world == rank.rank:  # a dry run of one rank does not involve the others
                    ops.dry_run(part, tp)
                drawn = ops.sample_sharded(part, tp)
                _same_requests(rank, drawn, step)
                if rank.transport != "gloo" and rank.device.type == "cuda" and number < 12:
                    _captured_requests(rank, part, step, tp)
            tp.check(collective=True)


def _captured_requests(rank: Rank, part: SampleInputs, step: SampleInputs, tp: TensorParallel) -> None:
    seeds = part.rows().seed.clone()
    part, step = part._replace(seed=seeds), step._replace(seed=seeds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = ops.sample_sharded(part, tp)
    for _ in range(3):
        seeds += 1
        graph.replay()
        _same_requests(rank, drawn, step)


def requests_of_a_sampler(rank: Rank) -> None:
    """A head with a bias and a soft cap, penalties over counts, log-probabilities, drafts, a warm-up: as with one
    rank."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randint(-4, 5, (5, 16), generator=generator).to(rank.device, rank.dtype)
    weight = torch.randint(-4, 5, (600, 16), generator=generator).to(rank.device, rank.dtype) / 4  # exact in any order
    bias = torch.randint(-4, 5, (600,), generator=generator).to(rank.device, rank.dtype)
    tp, shard = rank.group(weight, "uneven 1", max_batch_size=20)
    head, whole = (torch.nn.Linear(16, len(rows), device=rank.device, dtype=rank.dtype) for rows in (shard, weight))
    head.weight.data, whole.weight.data = shard, weight
    head.bias.data, whole.bias.data = bias[tp.first_token : tp.last_token], bias
    options: dict[str, Any] = {"max_batch_size": 5, "seed": range(5), "soft_cap": 20.0}
    sampler, one = LMHeadSampler(head, tp=tp, **options), LMHeadSampler(whole, impl=rank.impl, **options)
    names = flashsampling.warmup(shard, tp=tp, max_batch_size=5, top_k=20, top_p=0.9)
    assert bool(names) == (rank.device.type == "cuda" and rank.impl != "streaming")
    state, other = (flashsampling.TokenCounts(5, 600, rank.device) for _ in range(2))
    for counts in (state, other):
        counts.reset(prompt_token_ids=[[1, 2, 300]] * 5)
    params: dict[str, Any] = {"top_k": 20, "top_p": [0.5, 0.9, 1.0, 0.99, 0.3], "repetition_penalty": 1.2}
    params |= {"return_logprobs": True, "top_logprobs": 4, "logprob_ids": [0, 599, 600], "return_logsumexp": True}
    for _ in range(6 if not rank.long else 1000):
        ours, other_out = sampler(states, token_counts=state, **params), one(states, token_counts=other, **params)
        for name in ("token_ids", "ranks", "top_token_ids"):
            assert torch.equal(getattr(ours, name), getattr(other_out, name)), name
        for name in ("logprobs", "processed_logprobs", "top_logprobs", "given_logprobs", "logsumexp"):
            local, others = getattr(ours, name), getattr(other_out, name)
            torch.testing.assert_close(local, others, rtol=1e-5, atol=3e-5, equal_nan=True)
        assert torch.equal(state.counts, other.counts)
    drafted = torch.randint(0, 600, (5, 3), generator=generator).to(rank.device)
    out, expected = (
        each.verify(states[:, None].expand(5, 4, 16), drafted, top_k=[1, 2, 3, 4, 5], logit_bias=([7], [3.0]))
        for each in (sampler, one)
    )
    assert torch.equal(out.token_ids, expected.token_ids)
    tp.check()
    tp.close()


def other_requests(rank: Rank) -> None:
    """One rank asks for something else: the error says what, and there is no token."""
    problem = rank.problem(6, 600, 64)
    odd = rank.world - 1
    mask = torch.full((6, 19), -1, dtype=torch.int32, device=rank.device)
    holes = mask.clone()
    holes[4, 7] = 5
    cases: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
        ({"token_mask": mask}, {"token_mask": holes}, ("token_mask",)),
        ({}, {"token_mask": mask}, ("token_mask",)),  # what one launch does draws nothing on those who ask for nothing
    ]
    if rank.impl != "cute" or rank.device.type == "cuda":  # in rounds, which are the other implementations' as well
        cases += [
            ({"top_k": 5, "min_p": 0.5}, {"top_k": 6, "min_p": 0.25}, ("top_k", "min_p")),
            ({"return_logprobs": True}, {"top_logprobs": 3}, ("return_logprobs", "top_logprobs")),
        ]
    for usual, other, differs in cases:
        tp, shard = rank.group(problem.weight, timeout=20.0)
        with tp:
            step = functools.partial(draw_with, tp, shard, problem)
            if rank.device.type == "cuda":  # what is compiled first keeps the others waiting
                flashsampling.warmup(shard, tp=tp, max_batch_size=6, **usual)
            step(**usual)
            given = other if rank.rank == odd else usual
            differs = ("request",) if rank.transport == "p2p" else differs
            _one_differs(tp, functools.partial(step, **given), odd, differs)


def out_of_step_in_a_round(rank: Rank) -> None:
    """A rank's call raises between two messages, and it goes on: the others' wait ends with the error that says so."""
    last = rank.world - 1
    places: dict[str, list[tuple[object, str]]] = {
        "p2p": [(filtered_sampling, "_pack")],  # between logits and results
        "gloo": [(Collectives, "gather_logits")],  # between the comparison and the logits
        "nccl": [(nccl, "empty_rows"), (filtered_sampling, "_pack")],  # before the bulk messages; behind them
    }
    for place in places[rank.transport]:
        for odd in (0, last) if rank.transport == "gloo" else (last,):
            _out_of_step_in_a_round(rank, odd, *place)


def _out_of_step_in_a_round(rank: Rank, odd: int, where: object, name: str) -> None:
    problem = rank.problem(4, 600, 64)
    tp, shard = rank.group(problem.weight, timeout=30.0)
    expected = draw_with(tp, shard, problem, top_k=5)
    tp.check()  # a failure voids the steps that the host has issued and the device has not ended
    if rank.rank == odd:

        def no_memory(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                draw_with(tp, shard, problem, top_k=5)
    error = _fails(tp, functools.partial(draw_with, tp, shard, problem, top_k=5))
    assert error.rank == odd
    if rank.transport != "p2p":  # they know that the call took part
        assert f"rank {odd} left the group: OutOfMemoryError: CUDA out of memory" in str(error)
    else:
        assert isinstance(error, TensorParallelMismatch)
        assert "step" in error.failure.differs
    _assert_same_everywhere(error.failure)
    tp.close()
    tp, shard = rank.group(problem.weight)
    assert torch.equal(draw_with(tp, shard, problem, top_k=5), expected)
    tp.close()


def out_of_step_in_bulk(rank: Rank) -> None:
    """A rank is at a plain step where the others are at a filtered one, or the other way round. All learn it, also if a
    host issues more steps before it looks, and the next group works."""
    problem = rank.problem(40, 600, 64)
    odd = rank.world - 1
    filters: list[dict[str, Any]] = [{}, {"top_k": 200}]

    def of_the_caller() -> Failure | None:
        return None if threading.current_thread() is threading.main_thread() else Nccl.failure(transport)

    with pytest.MonkeyPatch.context() as small:
        small.setattr(nccl, "LEAST_BULK_WORDS", 1)  # three bulk messages a step
        for kind, blind in ((0, False), (1, False), (0, True), (1, True)):
            tp, shard = rank.group(problem.weight, timeout=30.0)
            assert isinstance(tp._transport, Nccl)
            transport = tp._transport
            if rank.device.type == "cuda":  # what is compiled first keeps the others waiting
                flashsampling.warmup(shard, tp=tp, max_batch_size=40, top_k=200)
            before = transport._progress().bulk
            expected = [draw_with(tp, shard, problem, **params) for params in filters]
            tp.check()
            assert transport._progress().bulk == before + 3
            own = kind if rank.rank == odd else 1 - kind
            if blind:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(transport, "failure", of_the_caller)
                    for number in range(4):
                        assert (draw_with(tp, shard, problem, **filters[(own + number) % 2]) == -1).all()
            error = _fails(tp, functools.partial(draw_with, tp, shard, problem, **filters[own]))
            assert isinstance(error, TensorParallelMismatch)
            _assert_same_everywhere(error.failure)
            counts: list[Any] = _agreed([transport._progress().begun, transport._progress().bulk])
            assert len(set(map(tuple, counts))) == 1, counts
            with within(SOON):
                tp.close()
            tp, shard = rank.group(problem.weight)
            for params, tokens in zip(filters, expected):
                assert torch.equal(draw_with(tp, shard, problem, **params), tokens)
            tp.close()


def steps_that_a_compiler_could_drop(rank: Rank) -> None:
    """Trap 33: tokens that one rank does not use, in functions compiled in every way; two groups in one of them."""
    if rank.world != 2:  # compiling takes each rank half a minute
        return
    problems = [rank.problem(6, 600, 64, seed=1), rank.problem(6, 600, 64, seed=2)]
    groups = [rank.group(problem.weight, timeout=120.0) for problem in problems]  # while the other rank compiles

    def draws(states: Tensor, offset: Tensor) -> list[Tensor]:
        drawn = []
        for i in (0, 1, 2):
            (tp, shard), rows = groups[i % 2], rows_of(problems[i % 2]) | {"offset": offset + i}
            drawn.append(flashsampling.sample(states + i // 2, shard, **rows, tp=tp).token_ids)
        return drawn

    def used(states: Tensor, offset: Tensor) -> tuple[Tensor, list[Tensor]]:
        return states + 1, draws(states, offset)

    def unused(states: Tensor, offset: Tensor) -> tuple[Tensor, list[Tensor]]:
        draws(states, offset)
        return states + 1, []

    ways: list[dict[str, Any]] = [{"backend": "aot_eager"}]
    if rank.device.type == "cuda":
        ways.append({"backend": "inductor"})
    if rank.transport != "gloo":  # whose exchange the host makes, so that no graph holds it
        ways.append({"mode": "reduce-overhead"})
    for options in ways:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(unused if rank.rank == 1 else used, fullgraph=True, **options)
        for turn in range(4):  # graph trees warm up, record, replay
            torch.compiler.cudagraph_mark_step_begin()
            states, offset = problems[0].hidden_states.clone(), problems[0].offset + turn
            if turn == 2:
                states *= -1
            expected = used(states, offset)
            moved, tokens = compiled(states, offset)
            assert torch.equal(moved, expected[0])
            assert len(tokens) == (0 if rank.rank == 1 else 3)
            for ours, eager in zip(tokens, expected[1]):
                assert torch.equal(ours, eager), (options, turn)
        skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        assert "mode" not in options or not skipped, f"{skipped} graphs were not recorded"
        for tp, _ in groups:
            tp.check()


def cuda_graphs(rank: Rank) -> None:
    """Captured on one batch size, replayed between eager calls of others."""
    problem = rank.problem(24, 600, 64)
    tp, shard = rank.group(problem.weight)
    part = problem.rows(slice(0, 10))
    offset = part.offset.clone()
    part = replace(part, offset=offset)
    draw(tp, shard, part)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = draw(tp, shard, part)
        part.offset.add_(1)
    for step in range(500 if rank.long else 20):
        before = part.offset.clone()
        graph.replay()
        if step % 10 == 0:
            assert torch.equal(out, replace(part, offset=before).sample(rank.impl)), step
        rank.check(tp, shard, problem.rows(slice(0, 1 + step % 24)))
    tp.check()


def one_node(rank: Rank) -> None:
    """The whole step, exchange included, is one kernel."""
    from ..kernels.test_cuda import kernel_nodes

    problem = rank.problem(24, 600, 64)
    tp, shard = rank.group(problem.weight)
    draw(tp, shard, problem)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        draw(tp, shard, problem)
    with tempfile.TemporaryDirectory() as folder:
        assert kernel_nodes(graph, Path(folder)) == (1, 0)


def no_sync(rank: Rank) -> None:
    """Trap 23."""
    problem = rank.problem(24, 600, 64)
    tp, shard = rank.group(problem.weight)
    draw(tp, shard, problem)
    half = torch.full((24,), 0.5, device=rank.device)
    mask = torch.full((24, 19), -1, dtype=torch.int32, device=rank.device)
    params = rows_of(problem) | {"tp": tp, "top_k": 20, "top_p": half, "min_p": half / 100}
    params |= {"token_mask": mask, "return_logprobs": True, "top_logprobs": 3}
    kept = flashsampling.sample(problem.hidden_states, shard, **params).token_ids
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = draw(tp, shard, problem)
        again = flashsampling.sample(problem.hidden_states, shard, **params).token_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens, problem.sample(rank.impl))
    assert torch.equal(again, kept)


def _agreed(value: object) -> list[object]:
    """The ranks' values, by a process group that is not under test: also while the one under test hangs."""
    return _agreed_in(_aside[0], value)


def _assert_same_everywhere(value: object) -> None:
    values = _agreed(value)
    assert values == [value] * len(values)


def _agreed_in(group: dist.ProcessGroup, value: object) -> list[object]:
    values: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _until(condition: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < SOON
        time.sleep(0.01)


def _fails(tp: TensorParallel, step: Callable[[], object]) -> TensorParallelError:
    """The error of a step and of all later ones, whose tokens are -1; the same failure each time."""
    tokens: list[Any] = []

    def steps() -> None:
        for _ in range(3):  # what is queued behind the first drains
            tokens.append(step())
        tp.check()

    with pytest.raises(TensorParallelError) as error:
        steps()
    # else the all-gather hangs, and who asks for tokens
    if tp.transport != "nccl" or error.value.failure.kind != "timeout":
        for out in tokens:
            assert (out == -1).all(), out
    for later in (step, tp.check, functools.partial(tp.check, collective=True)):
        with pytest.raises(TensorParallelError) as again:
            later()
        assert again.value.failure == error.value.failure
    assert error.value.rank == error.value.failure.rank
    assert "docs/tensor_parallel.md" in str(error.value)
    return error.value


def _one_differs(
    tp: TensorParallel, step: Callable[[], object], odd: int, *differs: tuple[str, ...]
) -> TensorParallelError:
    """The error of a step that rank ``odd`` takes with other parameters, one of these, named alike on all ranks."""
    error = _fails(tp, step)
    assert isinstance(error, TensorParallelMismatch)
    assert error.rank == odd
    assert error.failure.differs in differs, error
    _assert_same_everywhere(error.failure)
    return error


def _raises(tp: TensorParallel, call: Callable[[], object]) -> None:
    """A call that raises on this rank alone, as a serving loop would catch it."""
    before = tp.skipped_calls
    with pytest.raises(ValueError, match="at most"):
        call()
    assert tp.skipped_calls == before + 1


def out_of_step(rank: Rank) -> None:
    """Trap 31: a rank's call raises, and it goes on. All learn it at the next step, and another group goes on."""
    problem = rank.problem(4, 600, 64)
    tp, shard = rank.group(problem.weight, max_batch_size=4)
    bystander, _ = rank.group(problem.weight)

    def step(number: int) -> Tensor:
        return draw(tp, shard, replace(problem, offset=problem.offset + number))

    for number in range(3):
        assert torch.equal(step(number), replace(problem, offset=problem.offset + number).sample(rank.impl))
    for _ in range(2):  # all ranks' calls raise: they are in step
        _raises(tp, lambda: draw(tp, shard, rank.problem(5, 600, 64)))
    rank.check(tp, shard, problem)
    if rank.rank == 1:
        _raises(tp, lambda: draw(tp, shard, rank.problem(5, 600, 64)))
    error = _fails(tp, lambda: step(5))
    assert isinstance(error, TensorParallelMismatch)
    assert error.rank == 1
    assert "step" in error.failure.differs
    assert re.search("^rank 1 is out of step with", str(error))
    _assert_same_everywhere(error.failure)
    rank.check(bystander, shard, problem)
    bystander.close()
    tp.close()
    rank.check_new_group(problem)


def other_parameters(rank: Rank) -> None:
    """One rank calls with something else: never a token, on any rank, and the error says who and what."""
    six = rank.problem(6, 600, 64)
    two = replace(rank.problem(2, 600, 64), num_samples=3)
    offset, temperature = six.offset + 0, six.temperature.clone()
    offset[0] += 1
    temperature[2:4] = temperature[2:4].flip(0) + 0.25
    cases = [
        (two, ("batch size or num_samples",)),
        (replace(six, offset=offset, temperature=temperature), ("offset", "temperature")),
    ]
    odd = rank.world - 1
    for other, differs in cases:
        tp, shard = rank.group(six.weight, max_num_samples=3)
        with tp:
            rank.check(tp, shard, six)
            # p2p says what differs in one of the rows
            accepted = [(name,) for name in differs] if rank.transport == "p2p" else [differs]
            step = functools.partial(draw, tp, shard, other if rank.rank == odd else six)
            error = _one_differs(tp, step, odd, *accepted)
            assert f"rank {odd} called step" in str(error)
            assert f"with another {' and '.join(error.failure.differs)} than" in str(error)


def construction_that_fails(rank: Rank) -> None:
    """On one rank, for whatever reason: all hear of it at once, not after a time-out, and the next group works."""
    problem = rank.problem(4, 600, 64)
    shard, first = rank.shard(problem.weight)
    odd = rank.rank == 1

    def compile_on_odd(making: construction.Construction, weight: Tensor) -> None:
        if odd:
            raise RuntimeError("no such instruction")

    def no_memory(rank_capabilities: object, *_: object, **__: object) -> None:
        if odd:
            raise torch.OutOfMemoryError("CUDA out of memory")
        raise AssertionError("a rank met a peer that had none")

    def construct(weight: object = shard, **options: object) -> None:
        options = {"transport": rank.transport, "impl": rank.impl, "first_token": first, "timeout": 60.0} | options
        TensorParallel(None, weight, **options)

    started = time.monotonic()
    for message, options in (
        ("weight must be a torch.Tensor, got list", {"weight": [1.0]}),
        ("timeout must be a number, got NoneType", {"timeout": None}),
        ("max_batch_size must be an int, got float", {"max_batch_size": 256.0}),
    ):
        kind, named = (TypeError, message) if odd else (ValueError, f"^rank 1: TypeError: {message}")
        with pytest.raises(kind, match=named):
            construct(**options if odd else {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(construction.Construction, "_compile", compile_on_odd)
        said = "no such instruction" if odd else "^rank 1 left .*RuntimeError: no such"
        with pytest.raises(RuntimeError, match=said) as error:
            construct()
        assert odd or (type(error.value) is TensorParallelError and error.value.rank == 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capabilities, "rank_capabilities", no_memory) if odd else None
        with pytest.raises(RuntimeError, match="out of memory"):
            construct()
    assert time.monotonic() - started < 40  # of the 60 s of one of them
    tp, shard = rank.group(problem.weight, timeout=np.float32(50))
    assert tp.timeout == tp._rendezvous.seconds == 50
    rank.check(tp, shard, problem)


def messages_of_others(rank: Rank) -> None:
    """Point to point, with torch's default tag, on the way while a step is: it meets no step (gloo would abort the
    process)."""
    problem = rank.problem(4, 600, 64)
    tp, shard = rank.group(problem.weight)
    received = torch.zeros(3)
    sent = dist.isend(torch.ones(3), 0) if rank.rank == 1 else None
    rank.check(tp, shard, problem)
    if rank.rank == 0:
        dist.recv(received, 1)
        assert received.tolist() == [1, 1, 1]
    if sent is not None:
        sent.wait()
    tp.close()


def ranks_that_do_not_come(rank: Rank) -> None:
    """A rank misses construction, a broadcast or closing: all ranks get its name in time, and the next group works."""
    problem = rank.problem(4, 600, 64)
    odd = rank.world - 1
    # imports what a first construction does, which takes longer than the time-out
    rank.group(problem.weight)[0].close()

    def late(call: Callable[[], object], to: str) -> None:
        _agreed("all begin")
        if rank.rank == odd:
            _agreed("the others have raised")
        late_one = rf"^rank {odd} did not take part in .*{to} within {rank.timeout:g} s"
        with within(SOON), pytest.raises(TensorParallelTimeout, match=late_one) as error:
            call()
        assert error.value.rank == odd
        if rank.rank != odd:
            _agreed("the others have raised")
        _agreed("all have raised")

    late(lambda: rank.group(problem.weight, timeout=rank.timeout), "construction")
    tp, shard = rank.checked_group(problem, timeout=rank.timeout)
    late(lambda: tp.broadcast([1]), "a broadcast")
    assert _fails(tp, lambda: draw(tp, shard, problem)).rank == odd
    with within(SOON):
        tp.close()  # all ranks know the failure, so none raises

    tp, shard = rank.checked_group(problem, timeout=rank.timeout)
    if rank.rank == odd:  # to it the group has failed, and closing one that has raises nothing
        _agreed("all begin")
        _agreed("the others have raised")
        tp.close()
        _agreed("all have raised")
    else:
        late(tp.close, "closing")
    tp.close()
    with pytest.raises(ValueError, match="has been closed"):
        draw(tp, shard, problem)
    tp, shard = rank.checked_group(problem)
    # one is at another collective call than the others
    with pytest.raises(TensorParallelMismatch, match=r"^rank 1 called a broadcast where rank 0 called a collective"):
        tp.broadcast(1) if rank.rank == 1 else tp.check(collective=True)
    tp.close()


def ranks_that_are_busy(rank: Rank) -> None:
    """They are waited for, longer than the time-out, as long as they are; and what one raises meanwhile reaches all."""
    problem = rank.problem(4, 600, 64)
    odd = rank.world - 1
    rank.group(problem.weight)[0].close()
    tp, shard = rank.group(problem.weight, timeout=rank.timeout)
    started = time.monotonic()
    with tp.busy():
        if rank.rank == odd:
            time.sleep(1.5 * rank.timeout + 1)
    assert time.monotonic() - started > 1.5 * rank.timeout
    rank.check(tp, shard, problem)
    _agreed("all are here")
    if rank.rank == odd:
        with pytest.raises(KeyError), tp.busy():
            raise KeyError("no room")
    else:
        with pytest.raises(ValueError, match=rf"^rank {odd}: KeyError: 'no room'"), tp.busy():
            pass
    rank.check(tp, shard, problem)  # of no step's business
    tp.close()
    with pytest.raises(ValueError, match="has been closed"), tp.busy():
        raise AssertionError("minutes of useless work")


def leaving_while_others_wait(rank: Rank) -> None:
    """Peers in a step or a collective call hear of it at once, and the process group is as good as before."""
    problem = rank.problem(4, 600, 64)

    def leave_a_step(tp: TensorParallel, shard: Tensor) -> None:
        with tp:
            if rank.rank == 1:
                time.sleep(1.0)  # the others wait for this one
                raise KeyError("a request that is gone")
            draw(tp, shard, problem)
            tp.check(collective=True)

    def leave_a_collective_call(tp: TensorParallel, shard: Tensor) -> None:  # one rank closes one call later
        with tp:
            if rank.rank == 0:
                tp.check(collective=True)
            time.sleep(1.0)
            tp._transport.declare(Failure("mismatch", rank.world - 1, 3, ("seed",), "rank 0"))
            tp.check()

    def close_in_a_collective_call(tp: TensorParallel, shard: Tensor) -> None:  # those in the call then close alone
        tp.close() if rank.rank == 0 else tp.check(collective=True)

    gone = "a request that is gone" if rank.rank == 1 else "rank 1 left .*Key"
    for call, kind, message in (
        (leave_a_step, (KeyError, TensorParallelError), gone),
        (leave_a_collective_call, TensorParallelError, None),
        (close_in_a_collective_call, TensorParallelMismatch, None),
    ):
        tp, shard = rank.checked_group(problem, timeout=100.0)
        with within(SOON):
            with pytest.raises(kind, match=message):
                call(tp, shard)
            tp.close()
        rank.check_new_group(problem)


def one_request(rank: Rank) -> None:
    """One request works: torch calls one element of any stride contiguous."""
    problem = rank.problem(3, 600, 64)
    tp, shard = rank.group(problem.weight)
    states = problem.hidden_states[None]
    drafts = torch.tensor([[5, 6]], device=rank.device)
    state = torch.tensor([[7, 11]], device=rank.device)  # seed and offset
    with tp:
        for method in ("match", "rejection"):
            out = flashsampling.verify(states, shard, drafts, method=method, seed=7, tp=tp)
            whole = flashsampling.verify(states, problem.weight, drafts, method=method, seed=7, impl=rank.impl)
            assert torch.equal(out.token_ids, whole.token_ids)
        rows: dict[str, Any] = {"seed": state[:, 0], "offset": state[:, 1], "top_k": state[:, 0]}
        tokens = flashsampling.sample(states[0, :1], shard, **rows, tp=tp).token_ids
        expected = flashsampling.sample(states[0, :1], problem.weight, **rows, impl=rank.impl).token_ids
        assert torch.equal(tokens, expected)


def surroundings(rank: Rank) -> None:
    """A group that is made in inference mode, or under a default device, is as any other. A DTensor is no shard."""
    problem = rank.problem(4, 600, 64)
    for mode in (torch.inference_mode(), torch.device("meta")):
        with mode:
            tp, shard = rank.group(problem.weight)
        rank.check(tp, shard.clone() if shard.is_inference() else shard, problem)
        tp.close()
    if rank.world > 1:
        mesh = init_device_mesh(rank.device.type, (rank.world,))
        sharded = DTensor.from_local(rank.shard(problem.weight)[0], mesh, [Shard(0)])
        with pytest.raises(TypeError, match="weight must be a plain tensor, got a DTensor"):
            TensorParallel(None, sharded, transport=rank.transport, impl=rank.impl)


def device_mesh(rank: Rank) -> None:
    """A one-dimensional mesh is its group; parameters are the first rank's."""
    problem = rank.problem(4, 600, 64)
    shard, first = rank.shard(problem.weight)
    mesh = init_device_mesh(rank.device.type, (1, rank.world), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"one-dimensional DeviceMesh, got one of shape \(1, .*mesh\[.tp.\]"):
        TensorParallel(mesh, shard)
    assert torch.equal(shard_lm_head(problem.weight, mesh["tp"]), shard_lm_head(problem.weight))
    options = {"transport": rank.transport, "impl": rank.impl}
    with TensorParallel(mesh["tp"], shard, first_token=first, **options) as tp:
        rank.check(tp, shard, problem)
        kind, prefix = (TypeError, "^") if rank.rank == 0 else (ValueError, "^rank 0: TypeError: ")
        with pytest.raises(kind, match=f"{prefix}values must be None, bools, numbers, .* got function"):
            tp.broadcast(lambda: 0)
        # the others do not take the next call for that one
        assert tp.broadcast({"seeds": torch.arange(3) + rank.rank})["seeds"].tolist() == [0, 1, 2]
        local = ValueError("seed is wrong") if rank.rank == 1 else None
        with pytest.raises(ValueError, match="seed is wrong" if local else "^rank 1: ValueError: seed is wrong"):
            tp.broadcast(1, error=local)
        with pytest.raises(ValueError, match="rows must be the same on all ranks, got rank 0: 0, rank 1: 1"):
            tp.broadcast(1, must_match={"rows": rank.rank})
        rank.check(tp, shard, problem)
    with TensorParallel(mesh["dp"], problem.weight, impl=rank.impl) as alone:
        assert alone.world_size == 1
        assert alone.broadcast(rank.rank) == rank.rank
        alone.check(collective=True)
        assert torch.equal(draw(alone, problem.weight, problem), problem.sample(rank.impl))


class Interrupted(BaseException):
    """An exception of a signal handler, like KeyboardInterrupt."""


def a_signal_in_a_step(rank: Rank) -> None:
    """Its handler raises while the others are waited for. The next step of all ranks names this rank, at once,
    whichever it is; and the connections are as good as before."""

    def raises(*_: object) -> None:
        raise Interrupted("enough")

    problem = rank.problem(5, 600, 64)
    for rounds in (False, True):
        for odd in (0, rank.world - 1):
            tp, shard = rank.group(problem.weight, timeout=60.0)
            step = functools.partial(draw_with, tp, shard, problem, top_p=0.9 if rounds else 1.0)
            step()
            _agreed(None)
            started = time.monotonic()
            if rank.rank == odd:
                before = signal.signal(signal.SIGALRM, raises)
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                try:
                    with pytest.raises(Interrupted):
                        step()
                finally:
                    signal.signal(signal.SIGALRM, before)
            else:
                time.sleep(1.5)
                with contextlib.suppress(TensorParallelError):  # of one message it is whole: the handler ran behind it
                    step()
            error = _fails(tp, step)
            assert f"rank {odd} left the group: Interrupted: enough" in str(error)
            _assert_same_everywhere(error.failure)
            assert time.monotonic() - started < SOON
            tp.close()
            _agreed(None)
            rank.check_new_group(problem)


def a_process_group_that_is_destroyed(rank: Rank) -> None:
    """Under an open group, on one rank, on all, or while the others are in a step."""
    problem = rank.problem(5, 600, 64)
    for who in ("one", "all", "one, late"):
        destroyed = dist.new_group()
        odd = 0
        tp, shard = rank.checked_group(problem, group=destroyed)
        _agreed(None)
        with within(SOON):
            if who == "all" or rank.rank == odd:
                if who == "one, late":
                    time.sleep(1.0)
                dist.destroy_process_group(destroyed)
            error = _fails(tp, functools.partial(draw, tp, shard, problem))
        assert f"rank {error.rank} " in str(error)
        assert "left the group: its process group has been destroyed" in str(error)
        assert who == "all" or error.rank == odd
        _assert_same_everywhere(error.failure)
        tp.close()


def connections_that_are_closed(rank: Rank) -> None:
    """A new group over a process group whose connections a time-out closed is an error on all ranks, which says between
    whom."""
    problem = rank.problem(5, 600, 64)
    late = rank.world - 1
    broken = dist.new_group()
    first, shard = rank.group(problem.weight, group=broken, timeout=4.0)
    other, _ = rank.group(problem.weight, group=broken, timeout=60.0)
    rank.check(other, shard, problem)
    if rank.rank == late:
        _agreed("the others have raised")
    assert _fails(first, functools.partial(draw, first, shard, problem)).rank == late
    if rank.rank != late:
        _agreed("the others have raised")
    first.close()
    _agreed(None)
    started = time.monotonic()
    closed = r"process group's connection to rank \d .*is closed: make a new"
    with pytest.raises(TensorParallelError, match=closed) as error:
        rank.group(problem.weight, group=broken)
    _assert_same_everywhere(error.value.failure)
    assert _fails(other, functools.partial(draw, other, shard, problem)).rank == late  # one that was there before
    other.close()

    # closed by a time-out outside of the package, which declares no failure
    broken = dist.new_group()
    if rank.rank < 2:
        waiting = broken.recv([torch.zeros(1)], 1 - rank.rank, 5)
        with pytest.raises(RuntimeError):
            waiting.wait(timedelta(seconds=0.5))
    _agreed(None)
    with pytest.raises(TensorParallelError, match=closed) as error:
        rank.group(problem.weight, group=broken)
    _assert_same_everywhere(error.value.failure)
    assert time.monotonic() - started < SOON
    rank.check_new_group(problem, group=dist.new_group())


def a_rank_is_late(rank: Rank) -> None:
    """Trap 32: later than the time-out. The others say who, within the bound; it says so itself when it comes; a new
    process group goes on."""
    problem = rank.problem(5, 600, 64)
    tp, shard = rank.checked_group(problem, timeout=rank.timeout)
    late = rank.world - 1
    if rank.rank == late:
        _agreed("the others have raised")
    with within(SOON):
        error = _fails(tp, lambda: draw(tp, shard, problem))
    assert isinstance(error, TensorParallelTimeout)
    assert error.rank == late
    assert re.search(f"^rank {late} did not take part in a step within {rank.timeout:g} s", str(error))
    if rank.rank != late:
        _agreed("the others have raised")
    _agreed("all have raised")
    tp.close()
    if rank.transport == "nccl" and rank.device.type == "cuda":
        return  # what hangs on the device must be aborted first
    fresh = dist.new_group()
    assert _agreed_in(fresh, error.failure) == [error.failure] * rank.world
    rank.check_new_group(problem, group=fresh)


def hosts_that_learn_late(rank: Rank) -> None:
    """All ranks' devices know of a failure at the same step; a host that does not yet goes on, and issues all-gathers
    that the others do not. They end nevertheless, and tokens are -1."""
    problem = rank.problem(5, 600, 64)
    odd, slow = rank.world - 1, 0
    bystander, _ = rank.group(problem.weight)

    def group() -> tuple[TensorParallel, Callable[[], Tensor], Callable[[], Tensor]]:
        tp, shard = rank.group(problem.weight, timeout=rank.timeout)
        rank.check(tp, shard, problem)
        other = replace(problem, offset=problem.offset + (rank.rank == odd))
        return tp, functools.partial(draw, tp, shard, problem), functools.partial(draw, tp, shard, other)

    def transport_of(tp: TensorParallel) -> Nccl:
        assert isinstance(tp._transport, Nccl)
        return tp._transport

    def as_many_everywhere(tp: TensorParallel) -> None:
        counts = _agreed(transport_of(tp)._progress().begun)
        assert len(set(counts)) == 1, counts

    # parameters differ, and the slow host takes four steps before it looks
    tp, _, step = group()
    tokens = []
    if rank.rank == slow:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport_of(tp)._small, "state_view", torch.zeros(4, dtype=torch.int64).numpy())
            patch.setattr(tp._rendezvous, "declared", lambda: None)
            tokens = [step() for _ in range(4)]
            for out in tokens:
                assert (out == -1).all()
    assert isinstance(_fails(tp, step), TensorParallelMismatch)
    as_many_everywhere(tp)
    rank.check(bystander, rank.shard(problem.weight)[0], problem)
    tp.close()

    # it replays a graph after all have raised: who closes takes part
    if rank.device.type == "cpu":  # an all-gather that a graph was captured with asks no host
        tp, _, step = group()
        _fails(tp, step)
        _agreed(None)
        if rank.rank == slow:
            winners = exchange_protocol.pack(torch.ones(5), torch.arange(5), torch.ones(5, dtype=torch.bool))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tp._transport, "_capturing", lambda: True)
                for _ in range(2):
                    assert (tp.finish(winners, rows_only(5)) == -1).all()
        with within(SOON):
            tp.close()
        as_many_everywhere(tp)

    # a rank leaves by an exception where the others have issued a step
    tp, step, _ = group()
    _agreed(None)
    if rank.rank == odd:
        begun = transport_of(tp)._progress().begun
        others = [other for other in range(rank.world) if other != odd]

        def others_have_begun() -> bool:
            posts = read_heartbeats(tp._rendezvous)
            return all((post := posts[other]) and post.begun + post.issued > begun for other in others)

        _until(others_have_begun)
        with pytest.raises(KeyError), tp:
            raise KeyError("a request that is gone")
    else:
        assert (step() == -1).all()
        error = _fails(tp, step)
        assert error.failure.kind == "aborted"
        assert error.rank == odd
    as_many_everywhere(tp)
    tp.close()

    # a rank comes later than the time-out, and the group's all-gathers end
    tp, step, _ = group()
    drawn: Tensor | None = None
    if rank.rank == odd:
        _until(lambda: transport_of(tp)._failure is not None)  # its thread has heard
    else:
        drawn = step()
    error = _fails(tp, step)
    assert isinstance(error, TensorParallelTimeout)
    assert error.rank == odd
    _agreed("all have raised")
    assert drawn is None or (drawn == -1).all()
    as_many_everywhere(tp)
    tp.close()
    transport_of(tp)._watchdog_thread.join(SOON)
    assert not transport_of(tp)._watchdog_thread.is_alive()
    rank.check(bystander, rank.shard(problem.weight)[0], problem)
    tp, step, _ = group()
    tp.close()
    bystander.close()


def a_rank_dies(rank: Rank, dead: int = 1) -> None:
    """Killed in the middle of its work. Those that live close without waiting for it, and share its part."""
    problem = rank.problem(5, 600, 64)
    tp, shard = rank.group(problem.weight, timeout=rank.timeout)
    for _ in range(5):
        rank.check(tp, shard, problem)
    if rank.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    with within(SOON):
        error = _fails(tp, lambda: draw(tp, shard, problem))
        tp.close()
    assert isinstance(error, TensorParallelTimeout)
    assert error.rank == dead
    assert f"rank {dead} did not take part" in str(error)
    if dead == 0 or rank.device.type == "cuda":
        return  # without the store there is no new process group; on GPUs, NCCL may wait for the dead rank
    ranks = [other for other in range(rank.world) if other != dead]
    fresh = dist.new_group(ranks, use_local_synchronization=True)
    part = replace(rank, rank=ranks.index(rank.rank), world=len(ranks))
    part.check_new_group(problem, group=fresh, transport=None)


def the_first_rank_dies(rank: Rank) -> None:
    """The first rank dies, and the store with it."""
    a_rank_dies(rank, dead=0)


def p2p_is_chosen(rank: Rank) -> None:
    """p2p is chosen where it works, without a warning."""
    problem = rank.problem(5, 600, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tp, shard = rank.group(problem.weight, transport=None, impl=None)
    with tp:
        assert tp.transport == "p2p"
        assert torch.equal(draw(tp, shard, problem), problem.sample(tp.impl))


ON_GPU: list[Callable[[Rank], None]] = [
    same_tokens, wide_batches, delayed_ranks, many_steps, disagreements, memory_that_cannot_be_mapped, generate,
    sub_groups, two_at_once, rejection, other_drafts, requests, requests_of_a_sampler, other_requests,
    out_of_step_in_a_round, parameters_of_the_first_rank, steps_that_a_compiler_could_drop, out_of_step,
    other_parameters, construction_that_fails, messages_of_others, ranks_that_do_not_come, ranks_that_are_busy,
    leaving_while_others_wait, one_request, surroundings, device_mesh, hosts_that_learn_late, out_of_step_in_bulk,
    cuda_graphs, no_sync,
]  # fmt: skip
OF_GLOO = [a_signal_in_a_step, a_process_group_that_is_destroyed, connections_that_are_closed]
# they leave the ranks' group unusable: a group of processes each
LAST = [a_rank_is_late, a_rank_dies, the_first_rank_dies]


# -- starting ranks


def _work(rank: Rank, names: Sequence[str], port: int, pipe: Connection, shared: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank.rank)  # nothing may rest on equal generators
    backend = "gloo"
    if rank.device.type == "cpu" and rank.transport == "nccl":  # all but NCCL itself: gloo stands in for it
        capabilities.why_no_nccl = lambda members: None
    if shared:  # a kernel that waits for a peer's shares the GPU by time slices; nobody times it
        capabilities._gpu = lambda device: str(rank.rank)
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
        backend = "cpu:gloo,cuda:nccl"
    place = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank.rank, "world_size": rank.world}
    dist.init_process_group(backend, timeout=timedelta(seconds=120), **place)
    _aside.append(dist.new_group(backend="gloo"))
    for name in names:
        try:
            globals()[name](rank)
            if rank.device.type == "cuda" and globals()[name] not in LAST:  # NCCL would wait for a rank that is gone
                torch.cuda.synchronize()
            pipe.send((name, "ok"))
        except BaseException:
            pipe.send((name, traceback.format_exc()))
            break
    pipe.send(None)
    threading.Timer(5.0, os._exit, [0]).start()  # NCCL's destructors may wait for a rank that is dead
    if len(names) > 1:
        dist.destroy_process_group()
    os._exit(0)


def run(
    world: int,
    names: Sequence[str],
    *,
    device: str,
    impl: str,
    transport: str,
    long: bool,
    seconds: float | None = None,
    one_visible: bool = False,
) -> dict[str, dict[int, str]]:
    """Per scenario and rank: "ok", a traceback, or "died". ``one_visible``: no rank sees another's GPU. On fewer GPUs
    than ranks, these share them: ``p2p`` works so, NCCL does not.

    Without a GPU ranks are forks of a process that has imported all of this, which takes a core seconds. Ranks whose
    hashes of strings differ are those of ``tests/project/test_decode_tp.py``.

    A kind's scenarios take minutes on GPUs: the file that SCENARIO_LOG names has them, as they end, also of a run that
    is cut.
    """
    if seconds is None:  # on GPUs every group may compile kernels, for a minute or more where Triton's cache is empty
        seconds = 1200.0 if device == "cpu" else 900.0
    forked = device == "cpu"
    context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    if forked:
        context.set_forkserver_preload([__name__])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pipes, processes = {}, []
    gpus = torch.cuda.device_count() if device == "cuda" else world
    for rank in range(world):
        where = torch.device("cuda", 0 if one_visible else rank % gpus) if device == "cuda" else torch.device("cpu")
        ours, other_out = context.Pipe(duplex=False)
        arguments = (Rank(rank, world, where, impl, transport, long), list(names), port, other_out, gpus < world)
        process = context.Process(target=_work, args=arguments, daemon=True)
        with pytest.MonkeyPatch.context() as patch:  # what is imported first asks CUDA for the devices already
            if one_visible:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(world)))).split(",")
                patch.setenv("CUDA_VISIBLE_DEVICES", visible[rank])
            process.start()
        other_out.close()
        pipes[ours] = rank
        processes.append(process)
    results: dict[str, dict[int, str]] = {name: {} for name in names}
    started = time.monotonic()
    deadline = started + seconds
    log = os.environ.get("SCENARIO_LOG")
    while pipes and time.monotonic() < deadline:
        ready: list[Any] = wait(list(pipes), timeout=1.0)
        for pipe in ready:
            rank = pipes[pipe]
            try:
                reported = pipe.recv()
            except EOFError:
                reported = None
            if reported is None:
                del pipes[pipe]
            else:
                results[reported[0]][rank] = reported[1]
                if log is not None:
                    with open(log, "a", encoding="utf-8") as file:
                        when = f"rank {rank}, {time.monotonic() - started:.0f} s"
                        file.write(f"{world} {impl} {transport} {reported[0]} {when}: {reported[1]}\n")
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
    for per_rank in results.values():
        for rank in range(world):
            per_rank.setdefault(rank, "died")
    return results
