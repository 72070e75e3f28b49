"""Times batches with rows of NaN, zeros and equal logits: ``python -m benchmarks.rare_rows``.

A step with such rows over the same step without them, in one run. The contract (section 4) says that any number of them
costs little; tests count what the kernels evaluate because of them, and this takes the time. Nothing is timed before
the other rows' tokens are what they are without such rows, and such rows' own are right.
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

from tests.problems import Problem, assert_agreement

from .sample import make_problem, make_weight
from .timing import Call, interleaved_medians, machine

SHAPES = [(151936, 4096), (128256, 8192), (151936, 2048)]  # V, D
BATCH = 256
LIMIT = 1.2  # times the step without such rows
TEMPERATURES = {"T=1": 1.0, "greedy": 0.0, "T=1e-6": 1e-6}


def _with_rows(problem: Problem, kind: str, count: int) -> Problem:
    """The problem with ``count`` rows of a kind, from the first one on."""
    states = problem.hidden_states.clone()
    states[:count] = float("nan") if kind == "NaN" else 0.0
    if kind == "equal":
        states[:count, 0] = 8.0  # the weight's first column is the same in every row
    return replace(problem, hidden_states=states)


def _check(special: Problem, usual: torch.Tensor, kind: str, count: int, impl: str) -> None:
    tokens = special.sample(impl)
    assert torch.equal(tokens[count:], usual[count:]), f"{impl}: rows of {kind} change the others"
    if kind == "NaN":
        assert bool((tokens[:count] == -1).all()), f"{impl}: a row of NaN has a token"
    else:
        some = slice(0, 4)
        assert_agreement(tokens[some], special.rows(some))


def main(
    implementations: Annotated[str, typer.Option(help="Comma-separated.")] = "cute,triton",
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays per step.")] = 60,
    out: Annotated[Path, typer.Option(help="Folder for rare_rows.json.")] = Path("benchmarks/results"),
    check: Annotated[bool, typer.Option(help=f"Exit 1 if a step takes more than {LIMIT} times as long.")] = False,
) -> None:
    """Times steps with rows of NaN, zeros or equal logits."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    console = Console(width=150)
    found: list[dict[str, Any]] = []
    for vocab, dim in SHAPES:
        weight = make_weight(vocab, dim)
        weight[:, 0] = 0.02
        for impl in implementations.split(","):
            for name, temperature in TEMPERATURES.items():
                problem = make_problem(BATCH, weight)
                problem.temperature.fill_(temperature)
                usual = problem.sample(impl)
                steps: dict[str, Call] = {"without": functools.partial(problem.sample, impl)}
                for kind in ("NaN", "zeros", "equal"):
                    for count in (1, BATCH // 2, BATCH - 1):
                        special = _with_rows(problem, kind, count)
                        _check(special, usual, kind, count, impl)
                        steps[f"{kind} {count}"] = functools.partial(special.sample, impl)
                ms = interleaved_medians(steps, rounds, offsets=problem.offset)
                found.append({"config": f"V={vocab} D={dim}", "impl": impl, "rows": name, "ms": ms})
        del weight
        torch.cuda.empty_cache()
    names = [name for name in found[0]["ms"] if name != "without"]
    table = Table("LM head", "impl", "rows", "ms without", *names, title=f"B={BATCH}: times the step without such rows")
    over = []
    for row in found:
        ratios = {name: row["ms"][name] / row["ms"]["without"] for name in names}
        table.add_row(
            row["config"],
            row["impl"],
            row["rows"],
            f"{row['ms']['without']:.3f}",
            *(f"{r:.2f}" for r in ratios.values()),
        )
        where = f"{row['config']} {row['impl']} {row['rows']}"
        over += [f"{where}: {name} {ratio:.2f}" for name, ratio in ratios.items() if ratio > LIMIT]
    console.print(table)
    result = {"machine": machine(), "batch": BATCH, "rounds": rounds, "limit": LIMIT, "cells": found}
    console.print(result["machine"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "rare_rows.json").write_text(json.dumps(result, indent=1) + "\n")
    for line in over:
        console.print(f"[red]over the limit[/red] {line}")
    if check and over:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
