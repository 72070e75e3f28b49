"""Log-probabilities of given tokens and their gradients: ``python -m benchmarks.score``.

Beside ``score``: cuBLAS's bare matmul, which scores nothing; torch in chunks of rows, whose logits are made again for
the gradients; Liger's and cut-cross-entropy's fused losses, if they are installed. Time: medians of interleaved calls
between CUDA events. Memory: the peak above what inputs take.
"""

import importlib
import importlib.util
import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashsampling import score

from .timing import Call, machine, shuffled

HEADS = ((128256, 4096), (151936, 2048))
_CHUNK = 512  # rows


def _by_torch(states: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Returns (N,) float32 log-probabilities, with the logits of a chunk of rows in memory."""

    def some(states: Tensor, ids: Tensor) -> Tensor:
        return -torch.nn.functional.cross_entropy((states @ weight.T).float(), ids, reduction="none")

    parts = zip(states.split(_CHUNK), ids.split(_CHUNK))
    return torch.cat([checkpoint(some, *part, use_reentrant=False) for part in parts])  # type: ignore[misc]


def _peers() -> dict[str, Any]:
    """Returns functions (states, weight, ids) that return a loss, or log-probabilities."""
    peers: dict[str, Any] = {"torch in chunks": _by_torch}
    if importlib.util.find_spec("liger_kernel") is not None:
        loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        peers["Liger"] = lambda states, weight, ids: loss(weight, states, ids)
    if importlib.util.find_spec("cut_cross_entropy") is not None:
        peers["cut-cross-entropy"] = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return peers


def _measure(calls: dict[str, Call], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns median milliseconds, and the peak memory of a call in MiB."""
    memory: dict[str, float] = {}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for names in shuffled(calls, rounds):
        for name in names:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}, memory


def _cell(vocab: int, dim: int, rows: int, rounds: int) -> dict[str, Any]:
    """The correctness gate, then times and memory."""
    states = torch.randn(rows, dim, device="cuda").bfloat16()
    weight = (dim**-0.5 * torch.randn(vocab, dim, device="cuda")).bfloat16()
    ids = torch.randint(0, vocab, (rows,), device="cuda")
    with torch.no_grad():
        expected = torch.log_softmax(states[:64].double() @ weight.double().T, 1).gather(1, ids[:64, None])[:, 0]
        torch.testing.assert_close(score(states, weight, ids).logprobs[:64].double(), expected, atol=2e-3, rtol=1e-3)

    def product() -> None:
        for some in states.split(_CHUNK * 4):
            torch.mm(some, weight.T)

    def forward(function: Any) -> Call:
        @torch.no_grad()
        def call() -> None:
            function(states, weight, ids)

        return call

    def backward(function: Any) -> Call:
        own = [x.clone().requires_grad_() for x in (states, weight)]

        def call() -> None:
            out = function(*own, ids)
            torch.autograd.grad(out.sum() if out.ndim else out, own)

        return call

    functions = {"score": lambda states, weight, ids: score(states, weight, ids).logprobs, **_peers()}
    calls: dict[str, Call] = {"cuBLAS, bare": product}
    calls |= {f"{name}, forward": forward(function) for name, function in functions.items()}
    calls |= {f"{name}, both": backward(function) for name, function in functions.items()}
    ms, memory = _measure(calls, rounds)
    return {"vocab": vocab, "dim": dim, "rows": rows, "ms": ms, "MiB": memory, "logits_MiB": rows * vocab * 4 / 2**20}


def main(
    out: Annotated[Path, typer.Option(help="Folder for score.json.")] = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved calls of each.")] = 9,
    sizes: Annotated[str, typer.Option(help="Comma-separated rows.")] = "2048,8192",
) -> None:
    """Times scores and gradients."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    result: dict[str, Any] = {"machine": machine(), "rounds": rounds, "rows": []}
    console = Console(width=160)
    out.mkdir(parents=True, exist_ok=True)
    for vocab, dim in HEADS:
        for rows in map(int, sizes.split(",")):
            cell = _cell(vocab, dim, rows, rounds)
            result["rows"].append(cell)
            (out / "score.json").write_text(json.dumps(result, indent=1) + "\n")
            title = f"V={vocab} D={dim} N={rows}; all logits: {cell['logits_MiB']:.0f} MiB"
            table = Table("call", "ms", "cuBLAS / it", "peak MiB", title=title)
            for name, ms in cell["ms"].items():
                rate = cell["ms"]["cuBLAS, bare"] / ms
                table.add_row(name, f"{ms:.2f}", f"{rate:.2f}", f"{cell['MiB'][name]:.0f}")
            console.print(table)
    console.print(result["machine"])


if __name__ == "__main__":
    typer.run(main)
