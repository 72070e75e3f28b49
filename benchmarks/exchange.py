"""Splits the exchange between GPUs into its parts: ``torchrun --nproc_per_node 2 -m benchmarks.exchange``.

The Hopper kernel with time stamps in the thread that ends a launch, steps in a CUDA graph: from the arrival of the last
CTA to the winners (the same without an exchange), the sends, and the wait. Of the ranks' waits in a step the shortest
is that of the rank that came last: the way over NVLink and the polls. What the others wait longer they wait for it. The
ranks' clocks are not compared. Nothing is timed before the ranks' tokens equal those of one GPU with the whole weight.
"""

import os
from typing import Annotated
from unittest import mock

import cutlass
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from flashsampling.kernels.hopper import config, kernel, launch
from flashsampling.tensor_parallel import TensorParallel, shard_lm_head

from .sample import make_problem
from .timing import machine

STAMPS = ("winners", "sends", "wait")


def _stamped_times(
    tp: TensorParallel, weight: torch.Tensor, shard: torch.Tensor, batch: int, steps: int
) -> torch.Tensor:
    """(steps, 3) nanoseconds of this rank."""
    problem = make_problem(batch, weight)
    words = torch.zeros(1 << 14, dtype=torch.int64, device="cuda")
    stamps, workspace = words[:4], words[4:]
    log = torch.zeros(steps, 4, dtype=torch.int64, device="cuda")
    compiled = kernel.compile_kernel(cutlass.BFloat16, config.choose_config(batch, weight.shape[1]), stamps=True)
    launch._plan.cache_clear()
    with (
        mock.patch.object(launch, "kernel_for", return_value=compiled),
        mock.patch.object(launch, "zeroed_words", lambda needed, _: workspace[:needed]),
    ):

        def step() -> torch.Tensor:
            return launch.run(problem.step(weight=shard, vocab_size=shard.shape[0], shard=tp.shard)).ids

        assert torch.equal(step(), problem.sample("cute")[:, 0]), f"B={batch}: tokens differ"
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(steps):
                step()
                log[i].copy_(stamps)
        dist.barrier()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    launch._plan.cache_clear()
    return log.diff(dim=1)


def main(
    vocab: Annotated[int, typer.Option()] = 128256,
    dim: Annotated[int, typer.Option()] = 8192,
    batches: Annotated[str, typer.Option(help="Comma-separated.")] = "1,16,64,128,256",
    steps: Annotated[int, typer.Option(min=3, help="In one CUDA graph; the last of three replays counts.")] = 200,
) -> None:
    """Prints medians over the steps, microseconds."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(0)  # the same problem everywhere
    weight = (torch.randn(vocab, dim, device="cuda") * 0.02).bfloat16()
    shard = shard_lm_head(weight)
    table = Table(
        "B",
        *STAMPS[:2],
        "wait of the last rank",
        "of the first",
        title=f"V={vocab} D={dim}, TP {dist.get_world_size()}",
    )
    with TensorParallel(None, shard, transport="p2p", impl="cute") as tp:
        for batch in map(int, batches.split(",")):
            own = _stamped_times(tp, weight, shard, batch, steps)
            everybodys = own.new_empty(dist.get_world_size(), *own.shape)
            dist.all_gather_into_tensor(everybodys, own.contiguous())
            us = everybodys.double() / 1e3
            waits = us[:, :, 2]
            cells = (us[:, :, 0].amax(0), us[:, :, 1].amax(0), waits.amin(0), waits.amax(0))
            table.add_row(str(batch), *(f"{cell.median().item():.2f}" for cell in cells))
    if dist.get_rank() == 0:
        console = Console(width=120)
        console.print(table)
        console.print(machine())
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
