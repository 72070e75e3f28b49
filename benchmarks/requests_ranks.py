"""Times requests over several GPUs: ``torchrun --nproc_per_node 2 -m benchmarks.requests_ranks --spectra FOLDER``.

A step from hidden states to token ids over ``p2p`` with filters, a mask, penalties and log-probabilities, beside our
step without any of it, the shard's bare cuBLAS matmul, and what is done without a fused step: 16-bit logits, an
all-gather, and then ``sample_from_logits``, and FlashInfer where it is installed. Several steps per CUDA graph, in one
run, on logits as real models make them. Nothing is timed before its tokens are the oracle's, on some of its rows.
"""

import functools
import json
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashsampling import ops
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from flashsampling.tensor_parallel import TensorParallel, gather_flat
from tests.kernels.triton.test_filtered import agrees

from .from_logits import TOP_K, TOP_P, filled, peers, requests, spectrum, spectrum_source
from .requests import CHECKED, head_of, more_requests
from .tensor_parallel import medians_over_ranks
from .timing import Call, machine

UNFILTERED = "unfiltered"


def _requests(batch: int, vocab: int) -> dict[str, SamplingParams]:
    """Those of one GPU, and one k and p for all rows, which take one round."""
    shared = {UNFILTERED: DEFAULT_PARAMS, "one top-k, top-p": SamplingParams(top_k=TOP_K, top_p=TOP_P)}
    return (
        shared
        | {name: params for name, params in requests(batch).items() if params is not DEFAULT_PARAMS}
        | more_requests(batch, vocab)
    )


def _gathered(states: Tensor, shard: Tensor, mine: Tensor, everything: Tensor, whole: Tensor, draw: Call) -> Any:
    """A decode step with logits: the shard's, all ranks', widened, drawn from."""
    torch.mm(states, shard.T, out=mine)
    gather_flat(everything, mine)
    whole.copy_(everything.view(-1, *mine.shape).transpose(0, 1).reshape(whole.shape))
    return draw()


def _row(
    held: tuple[Tensor, Tensor, int],
    vocab: int,
    dim: int,
    batch: int,
    tp: TensorParallel,
    ends: tuple[int, int],
    rounds: int,
) -> dict[str, Any]:
    torch.manual_seed(0)  # the same problem everywhere
    states, weight = head_of(filled(*held, batch, vocab, torch.float32), dim)
    for tensor in (states, weight):
        dist.broadcast(tensor, 0)
    shard = weight[slice(*ends)].clone()
    ones, zeros = torch.ones(batch, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")
    seed = torch.randint(-(2**63), 2**63 - 1, (batch,), device="cuda")
    whole = SampleInputs(states, weight, ones, seed, zeros, 1, vocab)
    mine = whole._replace(weight=shard, vocab_size=len(shard), shard=tp.shard)
    logits16 = torch.empty(batch, len(shard), dtype=torch.bfloat16, device="cuda")
    everything, logits = (
        torch.empty(batch * vocab, dtype=torch.bfloat16, device="cuda"),
        torch.empty(batch, vocab, device="cuda"),
    )
    behind = functools.partial(_gathered, states, shard, logits16, everything, logits)
    steps: dict[str, Call] = {}
    for name, params in _requests(batch, vocab).items():
        of_all, of_mine = whole._replace(params=params), mine._replace(params=params)
        some = min(batch, CHECKED)
        agrees(ops.sample_sharded(of_mine.part(0, some), tp), of_all.part(0, some), tolerance=2e-3)
        steps[name] = functools.partial(ops.sample_sharded, of_mine, tp)
        of_logits = of_all._replace(hidden_states=logits, weight=logits, logits=logits)
        steps[f"all-gather, {name}"] = functools.partial(behind, functools.partial(ops.sample, of_logits, "triton"))
    for name, draw in peers(logits).items():
        steps[f"all-gather, FlashInfer {name}"] = functools.partial(behind, draw)
    steps["cuBLAS on the shard"] = functools.partial(torch.mm, states, shard.T, out=logits16)
    us = medians_over_ranks(steps, 5, rounds)
    return {"vocab": vocab, "dim": dim, "batch": batch, "us": us}


def main(
    spectra: Annotated[
        Path | None, typer.Option(help="Folder of npz files of real logits; without it: Zipf's law.")
    ] = None,
    name: Annotated[str, typer.Option(help="Which of them.")] = "gemma3-270m",
    out: Annotated[Path, typer.Option(help="Folder for requests_ranks.json.")] = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays per step.")] = 20,
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = "1,16,64,256",
    vocab: Annotated[int, typer.Option()] = 151936,
    dim: Annotated[int, typer.Option()] = 4096,
) -> None:
    """Times steps over the ranks of torchrun, with everything that a request may ask for."""
    if "LOCAL_RANK" not in os.environ:
        raise typer.BadParameter("start it with torchrun, or python -m torch.distributed.run, on a host with GPUs")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    if vocab % size:
        raise typer.BadParameter(f"an all-gather needs equal shards: {vocab} tokens over {size} ranks are not")
    ends = (rank * vocab // size, (rank + 1) * vocab // size)
    held, most = spectrum(spectra, name), max(map(int, batches.split(",")))
    source = spectrum_source(spectra, name)
    result: dict[str, Any] = {"machine": machine(), "logits": source, "rounds": rounds, "size": size, "rows": []}
    some = torch.empty(ends[1] - ends[0], dim, dtype=torch.bfloat16, device="cuda")
    with TensorParallel(None, some, first_token=ends[0], vocab_size=vocab, transport="p2p", max_batch_size=most) as tp:
        for batch in map(int, batches.split(",")):
            result["rows"].append(_row(held, vocab, dim, batch, tp, ends, rounds))
        tp.check()
    if rank == 0:
        console = Console(width=150)
        title = f"V={vocab} D={dim}, TP {size}, us (over {UNFILTERED})"
        table = Table("", *(f"B={row['batch']}" for row in result["rows"]), title=title)
        for step in result["rows"][0]["us"]:
            cells = [f"{row['us'][step]:.0f} ({row['us'][step] / row['us'][UNFILTERED]:.2f})" for row in result["rows"]]
            table.add_row(step, *cells)
        console.print(table)
        console.print(result["machine"])
        out.mkdir(parents=True, exist_ok=True)
        (out / "requests_ranks.json").write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
