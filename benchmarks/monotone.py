"""Whether a step takes longer with fewer rows: ``python -m benchmarks.monotone``.

All batch sizes of an LM head in one run, interleaved, so that a drift of the clocks meets all alike. Nothing is timed
before its tokens equal the oracle's.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from tests.problems import assert_agreement

from .peers import peers
from .sample import CONFIGS, make_problem, make_weight
from .timing import Call, interleaved_medians, machine

BATCHES = [1, 2, 4, 8, *range(16, 513, 16)]
MONOTONE = 1.03  # a batch takes at most so many times what any larger one does


def not_monotone(ms: dict[int, float]) -> list[str]:
    """Batches of milliseconds that take more than 3 % longer than a larger one."""
    found = []
    for batch, own in ms.items():
        faster = [larger for larger in ms if larger > batch and ms[larger] < own / MONOTONE]
        if faster:
            found.append(
                f"B={batch} takes {own / min(ms[larger] for larger in faster):.3f} times what one of {faster} does"
            )
    return found


def main(
    implementation: Annotated[str, typer.Option()] = "triton",
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays per batch size.")] = 40,
    configs: Annotated[int, typer.Option(min=1, max=len(CONFIGS), help="How many of the LM heads.")] = len(CONFIGS),
    out: Annotated[Path, typer.Option(help="Folder for monotone.json.")] = Path("benchmarks/results"),
    rest: Annotated[
        bool, typer.Option(help="Read 2 GiB, 0.5 ms, before every replay: steps in a row heat the GPU.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Exit 1 if a batch takes 3 % longer than a larger one.")] = False,
) -> None:
    """Times one sampling step at 1, 2, 4, 8 rows and every multiple of 16 up to 512."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    console = Console(width=150)
    table = Table("B", title=f"{implementation}: ms, and times cuBLAS's bare matmul")
    columns, over = [], []
    result: dict[str, Any] = {
        "machine": machine(),
        "implementation": implementation,
        "rounds": rounds,
        "rest": rest,
        "heads": [],
    }
    data = torch.ones(1 << 13, (1 << 16) if rest else 1, device="cuda")
    for vocab, dim in CONFIGS[:configs]:
        weight, steps = make_weight(vocab, dim), dict[str, Call]()
        offsets = torch.arange(max(BATCHES), device="cuda")  # of all problems
        for batch in BATCHES:
            problem = replace(make_problem(batch, weight), offset=offsets[:batch])
            assert_agreement(problem.sample(implementation), problem)
            steps[f"{batch}"] = functools.partial(problem.sample, implementation)
            steps[f"{batch} cuBLAS"] = peers(problem.hidden_states, weight, ["cuBLAS alone"])["cuBLAS alone"]
        between = functools.partial(torch.sum, data, dim=1) if rest else None
        ms = interleaved_medians(steps, rounds, offsets=offsets, rest=between)
        ours = {batch: ms[f"{batch}"] for batch in BATCHES}
        columns.append([f"{own:.3f} ({own / ms[f'{batch} cuBLAS']:.2f})" for batch, own in ours.items()])
        table.add_column(f"V={vocab} D={dim}")
        over += [f"V={vocab} D={dim}: {line}" for line in not_monotone(ours)]
        result["heads"].append({"config": f"V={vocab} D={dim}", "ms": ms})
        del weight, steps
        torch.cuda.empty_cache()
    for batch, cells in zip(BATCHES, zip(*columns)):
        table.add_row(str(batch), *cells)
    console.print(table)
    console.print(result["machine"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "monotone.json").write_text(json.dumps(result, indent=1) + "\n")
    for line in over:
        console.print(f"[red]not monotone[/red] {line}")
    if check and over:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
