"""Shapes of sampling from logits, timed: ``python -m benchmarks.tune_logits``. ``logits.CONFIG`` is read off it."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashsampling.impl.triton.logits import CONFIG, Config, pick, run
from flashsampling.step import PLAIN, Step
from tests.test_triton_logits import check
from tests.test_triton_pick import summaries_of

from .from_logits import REPEATS, filled, repeated, requests, spectrum
from .timing import Step as Call
from .timing import interleaved_medians


def candidates(which: str) -> dict[str, Config]:
    """Of the first launch ("scan") or the second ("pick"), the other as it is. Of the second, one thing changed at a time: it
    takes ten seconds to compile."""
    found = {}
    if which == "scan":
        for columns, reps, warps, registers in itertools.product((512, 1024), (1, 2, 4), (4, 8), (64, 80, 96, 128, 168)):
            per_thread = 4 * columns * reps // (32 * warps)
            if 8 <= per_thread <= 32 and registers >= 2 * per_thread + 48:
                shape = Config(columns=columns, reps=reps, scan_warps=warps, scan_registers=registers)
                found[f"{columns} x {reps}, {warps} warps, {registers}"] = shape
    else:
        found = {
            "no overlap": replace(CONFIG, pdl=False),
            "4 warps": replace(CONFIG, pick_warps=4, width=512, few=128, gathered=32, tile=512),
            "16 warps": replace(CONFIG, pick_warps=16, pick_registers=64, width=2048, gathered=128, tile=2048),
            "16 warps, 128 registers": replace(CONFIG, pick_warps=16, width=2048, gathered=128, tile=2048),
            "gathered 32": replace(CONFIG, gathered=32),
            "gathered 128": replace(CONFIG, gathered=128),
            "tile 512": replace(CONFIG, tile=512),
            "few 128": replace(CONFIG, few=128),
            "255 registers": replace(CONFIG, pick_registers=255),
        }
    return {"as it is": CONFIG} | found


def call(step: Step, config: Config, alone: bool) -> Call:
    """Both launches, or the second behind summaries that are there; after its tokens are the oracle's."""
    some = step.part(0, min(len(step.hidden_states), 8))
    check(some, config)
    if not alone:
        return functools.partial(run, step, config)
    drawn = run(step._replace(asked=PLAIN)).ids
    call = functools.partial(pick, step, summaries_of(step), drawn, config)
    assert (call().ids != run(step, config).ids).sum() <= 0.02 * len(drawn)  # sums of masses are rounded otherwise
    return call


def main(
    which: Annotated[str, typer.Argument(help="scan or pick")] = "scan",
    request: Annotated[str, typer.Option(help="Comma-separated, of benchmarks.from_logits.")] = "top-k top-p,top-p",
    vocab: Annotated[int, typer.Option()] = 151936,
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = "1,64,256",
    rounds: Annotated[int, typer.Option(min=3)] = 10,
    only: Annotated[str, typer.Option(help="Of the shapes, those with one of these words in their names.")] = "",
    alone: Annotated[bool, typer.Option(help="The second launch by itself, behind torch's summaries.")] = False,
    spectra: Annotated[Path | None, typer.Option(help="Of benchmarks.from_logits.")] = None,
    name: Annotated[str, typer.Option(help="Of benchmarks.from_logits.")] = "gemma3-270m",
) -> None:
    """Times every shape, the best first."""
    torch.manual_seed(0)
    words = [word for word in only.split(",") if word]
    configs = {key: one for key, one in candidates(which).items() if not words or any(word in key for word in words)}
    columns: dict[str, dict[str, float]] = {}
    for batch, asked in itertools.product(map(int, batches.split(",")), request.split(",")):
        logits = filled(*spectrum(spectra, name), batch, vocab, torch.float32)
        seed = torch.arange(batch, device="cuda")
        step = Step(logits, logits, 1.0, seed, 0, 1, vocab, asked=requests(batch)[asked], logits=logits)
        steps: dict[str, Call] = {key: repeated(call(step, config, alone)) for key, config in configs.items()}
        columns[f"{asked} {batch}"] = {key: ms / REPEATS * 1e3 for key, ms in interleaved_medians(steps, rounds).items()}
    table = Table(which, *columns, title=f"V={vocab}: us")
    for key in sorted(configs, key=lambda key: sum(times[key] / min(times.values()) for times in columns.values())):
        table.add_row(key, *(f"{times[key]:.1f}" for times in columns.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
