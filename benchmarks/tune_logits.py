"""Shapes of sampling from logits, timed: ``python -m benchmarks.tune_logits``. ``logits.CONFIG`` is read off it."""

import functools
import itertools
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashsampling.impl.triton.logits import CONFIG, Config, run
from flashsampling.step import Step

from .from_logits import REPEATS, filled, repeated, requests, spectrum
from .timing import Step as Call
from .timing import interleaved_medians


def candidates(which: str) -> dict[str, Config]:
    """Of the first launch ("scan") or the second ("pick"), the other as it is."""
    found = {}
    if which == "scan":
        for columns, reps, warps, registers in itertools.product((512, 1024), (1, 2, 4), (4, 8), (64, 80, 96, 128, 168)):
            per_thread = 4 * columns * reps // (32 * warps)
            if 8 <= per_thread <= 32 and registers >= 2 * per_thread + 48:
                fields = {"columns": columns, "reps": reps, "scan_warps": warps, "scan_registers": registers}
                found[f"{columns} x {reps}, {warps} warps, {registers}"] = Config(**fields)
    else:
        for warps, registers, tile, gathered in itertools.product((4, 8, 16), (128, 255), (256, 512), (16, 32, 64)):
            if warps * registers <= 16 * 128 and gathered <= 8 * warps:
                fields = {"pick_warps": warps, "pick_registers": registers, "tile": tile, "gathered": gathered}
                found[f"{warps} warps, {registers}, tile {tile}, {gathered} chunks"] = Config(**fields)
    return {"as it is": CONFIG} | found


def main(
    which: Annotated[str, typer.Argument(help="scan or pick")] = "scan",
    request: Annotated[str, typer.Option(help="Of benchmarks.from_logits.")] = "top-k top-p",
    vocab: Annotated[int, typer.Option()] = 151936,
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = "1,64,256",
    rounds: Annotated[int, typer.Option(min=3)] = 10,
) -> None:
    """Times every shape, the best first."""
    torch.manual_seed(0)
    configs = candidates(which)
    columns: dict[str, dict[str, float]] = {}
    for batch in map(int, batches.split(",")):
        logits = filled(*spectrum(None, ""), batch, vocab, torch.float32)
        seed = torch.arange(batch, device="cuda")
        step = Step(logits, logits, 1.0, seed, 0, 1, vocab, asked=requests(batch)[request], logits=logits)
        steps: dict[str, Call] = {name: repeated(functools.partial(run, step, config)) for name, config in configs.items()}
        columns[str(batch)] = {name: ms / REPEATS * 1e3 for name, ms in interleaved_medians(steps, rounds).items()}
    table = Table(which, *columns, title=f"{request}, V={vocab}: us")
    for name in sorted(configs, key=lambda name: sum(times[name] / min(times.values()) for times in columns.values())):
        table.add_row(name, *(f"{times[name]:.1f}" for times in columns.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
