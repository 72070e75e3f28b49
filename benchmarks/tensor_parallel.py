"""The tensor-parallel benchmark: ``python -m benchmarks.tensor_parallel``.

Starts torchrun for every size of the group in turn, on one host. Per size and batch: our step per transport, the same
kernel on the shard without an exchange, the local shard's bare cuBLAS matmul, and what a vocabulary-parallel LM head
does today, an all-gather of logits with Gumbel-max sampling after it. Several steps per CUDA graph, so that host
launches stay out of it. Nothing is timed before the ranks' tokens equal those of one GPU with the whole weight.
"""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import Shard
from flashsampling.tensor_parallel import TensorParallel, gather_flat, shard_range
from tests.problems import Problem

from . import plots
from .sample import make_problem
from .timing import Call, graph_of, machine, shuffled

BATCHES = "1,4,16,64,128,256"
SIZES = "1,2,4,8"


def _repeat(step: Call, times: int) -> None:
    for _ in range(times):
        step()


def medians_over_ranks(steps: dict[str, Call], per_graph: int, rounds: int) -> dict[str, float]:
    """Microseconds of a step: per round the slowest rank, over the rounds the median."""
    graphs = {name: graph_of(functools.partial(_repeat, step, per_graph)) for name, step in steps.items()}
    together = torch.zeros(1, device="cuda")
    times: list[list[float]] = []
    for names in shuffled(graphs, rounds):
        # not timed: while it runs the hosts get ahead of their devices; else their launches would be part of the first
        # figure
        next(iter(graphs.values())).replay()
        events = {}
        for name in names:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.all_reduce(together)  # the ranks' devices start together
            start.record()
            graphs[name].replay()
            end.record()
            events[name] = start, end
        torch.cuda.synchronize()
        times.append([events[name][0].elapsed_time(events[name][1]) for name in graphs])
    slowest = torch.tensor(times, device="cuda")  # (rounds, steps) ms
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    medians = [statistics.median(column) for column in slowest.T.tolist()]
    return {name: ms * 1e3 / per_graph for name, ms in zip(graphs, medians)}


def _draw(problem: Problem, weight: Tensor, tp: TensorParallel | None, impl: str) -> Tensor:
    return replace(problem, weight=weight).sample(impl, tp)


def _draw_alone(problem: Problem, shard: Tensor, impl: str, first_token: int) -> Tensor:
    """Draws from the shard alone: the same launch without an exchange."""
    return BACKENDS[impl].run(problem.step(weight=shard, vocab_size=shard.shape[0], shard=Shard(first_token))).ids


def _rank(
    vocab: int, dim: int, batches: list[int], implementations: list[str], per_graph: int, rounds: int
) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same problem everywhere
    weight = (torch.randn(vocab, dim, device="cuda") * 0.02).bfloat16()
    # equal shards where they can be, as an all-gather of logits needs them, though they may cut a tile
    first, last = (
        (rank * vocab // size, (rank + 1) * vocab // size) if vocab % size == 0 else shard_range(vocab, rank, size)
    )
    shard = weight[first:last].clone()
    groups = {}
    for impl in implementations:
        for transport in ("p2p", "nccl"):
            if size > 1 and (transport == "p2p" or impl == implementations[0]):
                groups[f"{transport} {impl}"] = TensorParallel(
                    None, shard, transport=transport, impl=impl, max_batch_size=512
                )
    gathered = torch.empty(max(batches) * vocab, dtype=torch.bfloat16, device="cuda")
    rows = []
    for batch in batches:
        problem = make_problem(batch, weight)
        expected = {impl: _draw(problem, weight, None, impl) for impl in implementations}
        steps: dict[str, Call] = {}
        for name, tp in groups.items():
            assert torch.equal(_draw(problem, shard, tp, tp.impl), expected[tp.impl]), (
                f"{name}, B={batch}: tokens differ"
            )
            steps[name] = functools.partial(_draw, problem, shard, tp, tp.impl)
        for impl in implementations:
            steps[f"no exchange {impl}"] = functools.partial(_draw_alone, problem, shard, impl, first)
        local = torch.empty(batch, shard.shape[0], dtype=torch.bfloat16, device="cuda")

        def matmul(states: Tensor = problem.hidden_states, out: Tensor = local) -> Tensor:
            return torch.mm(states, shard.T, out=out)

        def gather_and_sample(batch: int = batch, local: Tensor = local, matmul: Call = matmul) -> Tensor:
            matmul()
            everything = gathered[: size * local.numel()]
            if size > 1:
                gather_flat(everything, local)
                logits = everything.view(size, batch, -1).transpose(0, 1).reshape(batch, -1).float()
            else:
                logits = local.float()
            return (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)

        steps["cuBLAS alone"] = matmul
        if vocab % size == 0:
            steps["all-gather + Gumbel"] = gather_and_sample
        rows.append({"size": size, "batch": batch, "us": medians_over_ranks(steps, per_graph, rounds)})
    for tp in groups.values():
        tp.check()
        tp.close()
    return {"machine": machine(), "rows": rows} if rank == 0 else {}


def _start(size: int, arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
        command += ["-m", "benchmarks.tensor_parallel", *arguments]
        subprocess.run(command, check=True, env=os.environ | {"BENCHMARK_RANK_OUT": str(out)})
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def _print(console: Console, result: dict[str, Any]) -> None:
    first = result["implementations"][0]
    ours, without = f"p2p {first}", f"no exchange {first}"
    alone = {row["batch"]: row["us"][without] for row in result["rows"] if row["size"] == 1}
    for size in sorted({row["size"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["size"] == size]
        names = list(rows[0]["us"])
        columns = ["B", *names, f"{ours} / cuBLAS", "exchange, us", f"{ours} / ideal 1/{size}"]
        table = Table(*columns, title=f"TP {size}, V={result['vocab']} D={result['dim']}, us a step")
        for row in rows:
            us = row["us"]
            cells = [f"{us[name]:.1f}" if name in us else "" for name in names]
            if ours in us:
                cells += [f"{us[ours] / us['cuBLAS alone']:.3f}", f"{us[ours] - us[without]:.1f}"]
                cells.append(f"{us[ours] * size / alone[row['batch']]:.3f}" if row["batch"] in alone else "")
            table.add_row(str(row["batch"]), *cells)
        console.print(table)


def main(
    sizes: Annotated[
        str, typer.Option(help="Ranks, comma-separated; those above the GPUs of this host are left out.")
    ] = SIZES,
    batches: Annotated[str, typer.Option(help="Comma-separated.")] = BATCHES,
    vocab: Annotated[int, typer.Option()] = 128256,
    dim: Annotated[int, typer.Option()] = 8192,
    implementations: Annotated[str, typer.Option(help="Comma-separated; ratios are of the first.")] = "cute,triton",
    per_graph: Annotated[int, typer.Option(min=1, help="Steps per CUDA graph.")] = 10,
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays.")] = 30,
    out: Annotated[Path, typer.Option(help="Folder for tensor_parallel.json and tensor_parallel.png.")] = Path(
        "benchmarks/results"
    ),
) -> None:
    """Times one tensor-parallel sampling step against its peers."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs CUDA devices")
    names = implementations.split(",")
    if "BENCHMARK_RANK_OUT" in os.environ:  # a rank, started below
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        result = _rank(vocab, dim, [int(b) for b in batches.split(",")], names, per_graph, rounds)
        if result:
            Path(os.environ["BENCHMARK_RANK_OUT"]).write_text(json.dumps(result))
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        return
    console = Console(width=180)
    result = {
        "vocab": vocab,
        "dim": dim,
        "per_graph": per_graph,
        "rounds": rounds,
        "implementations": names,
        "rows": [],
    }
    for size in [int(size) for size in sizes.split(",")]:
        if size > torch.cuda.device_count():
            console.print(f"TP {size}: this host has {torch.cuda.device_count()} GPUs, not measured")
            continue
        part = _start(size, sys.argv[1:])
        result["machine"] = part["machine"]
        result["rows"] += part["rows"]
    _print(console, result)
    console.print(result["machine"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "tensor_parallel.json").write_text(json.dumps(result, indent=1) + "\n")
    plots.scaling(result, out / "tensor_parallel.png")


if __name__ == "__main__":
    typer.run(main)
