"""What ranks do in the tensor-parallel tests. ``run`` starts them; a scenario is a function of a ``Rank``, run by all alike."""

import functools
import os
import random
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import flashsampling
from flashsampling import LMHeadSampler, distributed
from flashsampling.distributed import TensorParallel, TensorParallelTimeout, shard_lm_head, shard_range

from .problems import Problem, assert_agreement, make_problem


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
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

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


def draw(tp: TensorParallel, shard: Tensor, problem: Problem, impl: str | None = None, vocab_size: int | None = None) -> Tensor:
    return replace(problem, weight=shard, vocab_size=vocab_size).sample(impl, tp)


# -- scenarios


def same_tokens(rank: Rank) -> None:
    """As with one rank: any cut of the vocabulary, any batch, several draws, a padded vocabulary."""
    kinds = ["shard_lm_head", "even", "uneven 1", "uneven 2", "empty first", "empty last"]
    for kind in kinds:
        for vocab, dim in (
            ((1000, 64), (390, 40)) if rank.impl == "triton" and not rank.long else ((5003, 64), (390, 136), (7, 64))
        ):
            problem = rank.problem(70, vocab, dim)
            tp, shard = rank.group(problem.weight, kind)
            with tp:
                for batch in (70, 1, 17):
                    rank.check(tp, shard, problem.rows(slice(0, batch)))
                empty = problem.rows(slice(0, 0))
                assert draw(tp, shard, empty).shape == (0, 1)
    problem = rank.problem(9, 777, 64, num_samples=3)
    tp, shard = rank.group(problem.weight, max_num_samples=3)
    rank.check(tp, shard, problem)
    for real in (500, 200, 1):  # the last shard, or all but the first, are padding
        padded = replace(rank.problem(9, 777, 64), vocab_size=real)
        tp, shard = rank.group(padded.weight, vocab_size=real)
        assert tp.vocab_size == real
        rank.check(tp, shard, padded)
    shard = shard_lm_head(problem.weight)
    tp = TensorParallel(None, shard, max_num_samples=3, transport=rank.transport, impl=rank.impl)  # ranges from the order
    rank.check(tp, shard, problem)


def wide_batches(rank: Rank) -> None:
    """More rows than 128, and than one block of rows has: shapes of the kernels that smaller batches do not take."""
    problem = rank.problem(330, 1500, 72)
    tp, shard = rank.group(problem.weight, "uneven 1", max_batch_size=330)
    with tp:
        for batch in (330, 129, 150, 170, 190, 205, 220, 235, 256):
            rank.check(tp, shard, problem.rows(slice(0, batch)))


def rare_rows(rank: Rank) -> None:
    """NaN, +inf and -inf on one shard or on several."""
    vocab = 130 * rank.world
    inf = float("inf")
    rows = [
        {vocab - 1: float("nan")},
        {3: inf, vocab - 2: inf},
        {vocab - 2: inf},
        dict.fromkeys(range(vocab), -inf),
        {token: inf if token % 50 == 49 else -inf for token in range(vocab)},
        {token: -inf for token in range(vocab - 1)},
        {token: -inf for token in range(vocab - 130)} | {vocab - 1: inf},
    ]
    for row, logits in enumerate(rows):
        weight = torch.zeros(vocab, 8, dtype=rank.dtype, device=rank.device)
        for token, logit in logits.items():
            weight[token, 0] = logit
        one = replace(rank.problem(1, vocab, 8), weight=weight)
        one.hidden_states[:] = 1.0  # not 0: times inf it is NaN
        one.temperature[:] = 1.0
        expected = one.sample("reference")
        tp, shard = rank.group(one.weight)
        with tp:
            tokens = draw(tp, shard, one)
        assert torch.equal(tokens, expected), (row, tokens, expected)


def changing_batches(rank: Rank) -> None:
    """A size every step, the buffers made once."""
    problem = rank.problem(64, 600, 64)
    tp, shard = rank.group(problem.weight, max_batch_size=64)
    whole = problem.sample(rank.impl)
    sizes = random.Random(1)
    for _ in range(300 if rank.long else 12):
        batch = sizes.randint(1, 64)
        assert torch.equal(draw(tp, shard, problem.rows(slice(0, batch))), whole[:batch])


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
    """Fresh offsets every step, the last of every thousand checked."""
    problem = rank.problem(3, 300, 64)
    tp, shard = rank.group(problem.weight)
    for step in range(100_000 if rank.long and rank.transport == "p2p" else 2_000 if rank.long else 100):
        problem.offset.add_(1)
        tokens = draw(tp, shard, problem)
        if step % 1000 == 999 or step == 99:
            assert torch.equal(tokens, problem.sample(rank.impl))
    tp.check()


def disagreements(rank: Rank) -> None:
    """An error that says so, on all ranks, at construction; the group works afterwards."""
    problem = rank.problem(4, 600, 64)
    shard, first = rank.shard(problem.weight)
    odd = rank.rank == 1
    make = functools.partial(TensorParallel, None, transport=rank.transport, impl=rank.impl)
    cases = [
        (
            "same D on all ranks, got rank 0: 64, rank 1: 72",
            lambda: make(torch.cat([shard, shard[:, :8]], 1) if odd else shard),
        ),
        ("dtype must be the same on all ranks", lambda: make(shard.half() if odd else shard)),
        ("leave a hole at token", lambda: make(shard, first_token=first + 100 if odd or rank.rank > 1 else first)),
        ("overlap at token", lambda: make(shard, first_token=first - 1 if odd else first)),
        ("first_token must be given on all ranks or on none", lambda: make(shard, first_token=None if odd else first)),
        ("vocab_size must be the same on all ranks", lambda: make(shard, vocab_size=599 if odd else 600)),
        ("vocab_size must be from 1 to the 600 rows of all shards, got 601", lambda: make(shard, vocab_size=601)),
        ("max_batch_size must be the same", lambda: make(shard, max_batch_size=8 if odd else 9)),
        ("timeout must be the same", lambda: make(shard, timeout=8 if odd else 9)),
        ("timeout must be above 0", lambda: make(shard, timeout=0)),
        (r"weight must have shape \(V_shard, D\), got .* on rank 1", lambda: make(shard[0] if odd else shard)),
        ("hold from 1 to", lambda: make(shard[:0])),
        ("transport must be None or one of", lambda: TensorParallel(None, shard, transport="smoke")),
        ("impl must be None or one of", lambda: TensorParallel(None, shard, impl="reference")),
    ]
    if rank.device.type == "cpu":
        cases.append(("transport='p2p' cannot be used .*shard is on cpu", lambda: TensorParallel(None, shard, transport="p2p")))
        cases.append(("transport='nccl' cannot be used", lambda: TensorParallel(None, shard, transport="nccl")))
    for message, construct in cases:
        with pytest.raises(ValueError, match=message):
            construct()
    tp, shard = rank.group(problem.weight, max_batch_size=4)
    for message, call in (
        ("at most tp.max_batch_size = 4 rows, got 5", lambda: draw(tp, shard, rank.problem(5, 600, 64))),
        ("num_samples must be at most", lambda: draw(tp, shard, replace(problem, num_samples=2))),
        ("weight must be the shard", lambda: draw(tp, shard[:-1], problem)),
        ("vocab_size must be given to TensorParallel", lambda: draw(tp, shard, problem, vocab_size=600)),
        ("impl must be None or tp.impl", lambda: draw(tp, shard, problem, impl="reference")),
        ("seed must be given", lambda: flashsampling.sample(problem.hidden_states, shard, tp=tp)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="tp must be"):
        draw("tp", shard, problem)
    rank.check(tp, shard, problem)
    tp.close()
    tp.close()
    with pytest.raises(ValueError, match="has been closed"):
        draw(tp, shard, problem)


def memory_that_cannot_be_mapped(rank: Rank) -> None:
    """Found out when the buffers are made: another transport and a warning on all ranks, or an error if p2p was named."""

    class Refused:
        def __init__(self, *_: object) -> None:
            if rank.rank == 1:
                raise RuntimeError("pidfd_getfd: Operation not permitted")

    problem = rank.problem(4, 600, 64)
    shard, _ = rank.shard(problem.weight)
    real = distributed.PeerMemory, distributed._why_no_p2p
    distributed.PeerMemory, distributed._why_no_p2p = Refused, lambda *_: None
    try:
        with pytest.raises(ValueError, match=r"transport='p2p' cannot be used \(rank 1: pidfd_getfd"):
            TensorParallel(None, shard, transport="p2p", impl=rank.impl)
        with pytest.warns(RuntimeWarning, match="transport 'p2p' cannot be used .* instead"):
            tp = TensorParallel(None, shard, impl=rank.impl)
    finally:
        distributed.PeerMemory, distributed._why_no_p2p = real
    assert tp.transport == ("nccl" if rank.device.type == "cuda" else "gloo")
    rank.check(tp, shard, problem)


def generate(rank: Rank) -> None:
    """A transformer on every rank, its LM head sharded: the text of one rank."""
    transformers = pytest.importorskip("transformers")
    from flashsampling.integrations.transformers import generate as custom_generate

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).to(rank.device, rank.dtype).eval()
    ids = torch.arange(1, 13, device=rank.device).view(2, 6)
    tp, shard = rank.group(model.lm_head.weight.detach())
    options = {"custom_generate": custom_generate, "do_sample": True, "top_k": 0, "max_new_tokens": 8, "seeds": [1, 2]}
    options |= {"attention_mask": torch.ones_like(ids)}
    whole = LMHeadSampler(model.lm_head, max_batch_size=2, impl=rank.impl)
    expected = model.generate(ids, sampler=whole, **options)
    drawn = model.generate(ids, sampler=LMHeadSampler(shard, max_batch_size=2, tp=tp), **options)
    assert torch.equal(drawn, expected)


def sub_groups(rank: Rank) -> None:
    """Tensor parallelism inside data parallelism: halves of the world at work on problems of their own."""
    half = max(rank.world // 2, 1)
    members = [list(range(half)), list(range(half, rank.world))]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = 0 if rank.rank < half else 1
    problem = rank.problem(11, 600, 64, seed=mine)
    part = replace(rank, rank=rank.rank - half * mine, world=len(members[mine]))
    tp, shard = part.group(problem.weight, group=groups[mine])
    for _ in range(5):
        problem.offset.add_(1)
        part.check(tp, shard, problem)


def two_at_once(rank: Rank) -> None:
    """Two groups over the same ranks; on a GPU each has a stream and neither waits for the other."""
    problems = [rank.problem(9, 600, 64, seed=1), rank.problem(33, 900, 64, seed=2)]
    groups = [rank.group(problem.weight) for problem in problems]
    expected = [[replace(p, offset=p.offset + step).sample(rank.impl) for step in range(20)] for p in problems]
    if rank.device.type == "cpu":
        for step in range(10):
            order = (0, 1) if step % 2 else (1, 0)
            for i in order:
                tp, shard = groups[i]
                problem = replace(problems[i], offset=problems[i].offset + step)
                assert torch.equal(draw(tp, shard, problem), expected[i][step])
        return
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], []]
    for step in range(20):
        # the order differs between ranks; NCCL alone forbids that
        order = (0, 1) if rank.transport == "nccl" or (step + rank.rank) % 2 else (1, 0)
        for i in order:
            tp, shard = groups[i]
            with torch.cuda.stream(streams[i]):
                outs[i].append(draw(tp, shard, replace(problems[i], offset=problems[i].offset + step)))
    torch.cuda.synchronize()
    for i in range(2):
        for step in range(20):
            assert torch.equal(outs[i][step], expected[i][step]), (i, step)


def module(rank: Rank) -> None:
    """LMHeadSampler: seeds are the first rank's, offsets advance, and a compiled step is the same step."""
    problem = rank.problem(6, 600, 64)
    tp, shard = rank.group(problem.weight)
    sampler = LMHeadSampler(shard, max_batch_size=6, tp=tp, impl=rank.impl)
    one = LMHeadSampler(problem.weight, max_batch_size=6, impl=rank.impl)
    one.reset(seed=sampler.seeds.cpu())

    def step(states: Tensor, temperature: Tensor) -> Tensor:
        return sampler(states * 2, temperature).token_ids

    for _ in range(3):
        expected = one(problem.hidden_states * 2, problem.temperature).token_ids
        assert torch.equal(step(problem.hidden_states, problem.temperature), expected)
    if rank.world != 2:  # compiling takes each rank half a minute of a CI core
        return
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    for _ in range(3):
        expected = one(problem.hidden_states * 2, problem.temperature).token_ids
        assert torch.equal(compiled(problem.hidden_states, problem.temperature), expected)


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
    from .test_cuda import kernel_nodes

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
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = draw(tp, shard, problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens, problem.sample(rank.impl))


def a_rank_is_late(rank: Rank) -> None:
    """Later than the time-out: the others say who, within the bound, and so does every later call."""
    problem = rank.problem(5, 600, 64)
    tp, shard = rank.group(problem.weight, timeout=2.0)
    rank.check(tp, shard, problem)
    late = rank.world - 1
    if rank.rank == late:
        time.sleep(8)
        return
    tokens: list[Tensor] = []

    def steps() -> None:
        for _ in range(4):  # what is queued behind the first drains
            tokens.append(draw(tp, shard, problem))
        tp.check()

    started = time.monotonic()
    with pytest.raises(TensorParallelTimeout, match=f"rank {late} did not take part in a step within 2 s") as error:
        steps()
    assert time.monotonic() - started < 5
    assert error.value.rank == late
    for out in tokens:
        assert (out == -1).all()
    with pytest.raises(TensorParallelTimeout, match=f"rank {late}"):
        draw(tp, shard, problem)


def a_rank_dies(rank: Rank) -> None:
    """Killed in the middle of its work."""
    problem = rank.problem(5, 600, 64)
    tp, shard = rank.group(problem.weight, timeout=3.0)
    for _ in range(5):
        rank.check(tp, shard, problem)
    dead = min(1, rank.world - 1)
    if rank.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)

    def step() -> None:
        draw(tp, shard, problem)
        tp.check()

    started = time.monotonic()
    with pytest.raises(TensorParallelTimeout, match=f"rank {dead} did not take part") as error:
        step()
    assert time.monotonic() - started < 8
    assert error.value.rank == dead


ON_CPU: list[Callable[[Rank], None]] = [
    same_tokens,
    wide_batches,
    rare_rows,
    changing_batches,
    delayed_ranks,
    many_steps,
    disagreements,
    memory_that_cannot_be_mapped,
    generate,
    sub_groups,
    two_at_once,
    module,
]
ON_GPU = [*ON_CPU, cuda_graphs, no_sync]
LAST = [a_rank_is_late, a_rank_dies]  # they leave the ranks' group unusable: a group of processes each


# -- starting ranks


def _work(rank: Rank, names: Sequence[str], port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank.rank)  # nothing may rest on equal generators
    backend = "gloo"
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank.rank, world_size=rank.world, timeout=timedelta(seconds=120)
    )
    for name in names:
        try:
            globals()[name](rank)
            if rank.device.type == "cuda":
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
    world: int, names: Sequence[str], *, device: str, impl: str, transport: str, long: bool, seconds: float = 300.0
) -> dict[str, dict[int, str]]:
    """Per scenario and rank: "ok", a traceback, or "died"."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pipes, processes = {}, []
    for rank in range(world):
        where = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
        ours, theirs = context.Pipe(duplex=False)
        arguments = (Rank(rank, world, where, impl, transport, long), list(names), port, theirs)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes[ours] = rank
        processes.append(process)
    results: dict[str, dict[int, str]] = {name: {} for name in names}
    deadline = time.monotonic() + seconds
    while pipes and time.monotonic() < deadline:
        for pipe in wait(list(pipes), timeout=1.0):
            rank = pipes[pipe]
            try:
                said = pipe.recv()
            except EOFError:
                said = None
            if said is None:
                del pipes[pipe]
            else:
                results[said[0]][rank] = said[1]
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
    for per_rank in results.values():
        for rank in range(world):
            per_rank.setdefault(rank, "died")
    return results
