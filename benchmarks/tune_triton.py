"""Times the Triton kernel's tile shapes: ``python -m benchmarks.tune_triton``. ``choose_config`` is read off its output.

Every candidate is compiled first, in parallel processes, and must give the same tokens as the shape in use, bit for bit.
"""

import functools
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashsampling.impl.triton import choose_config, sample
from flashsampling.impl.triton.config import TileConfig

from .sample import CONFIGS, make_problem, make_weight
from .timing import Step, interleaved_medians


def candidates(batch: int) -> list[TileConfig]:
    """The shapes worth timing at a batch size."""
    rows = min(64, max(16, 1 << (batch - 1).bit_length()))
    found = [
        TileConfig(128, rows, depth, 4, stages, programs, True, chunk, registers)
        for (depth, stages, programs, registers), chunk in itertools.product(
            [(64, 3, 3, 168), (128, 2, 3, 168), (64, 5, 2, None), (64, 4, 2, None), (128, 3, 2, None)], [16, 32]
        )
        if chunk <= rows and (128 + rows) * depth * 2 * stages * programs <= 224 * 1024
    ]
    if batch >= 64:
        found += [
            TileConfig(256, 64, 64, 8, 5, 1, True, 64, None, True),
            TileConfig(128, 64, 64, 4, 3, 2, True, 64, None, True),
        ]
    if batch > 64:
        found += [
            TileConfig(128, 128, 64, 8, 6, 1, True, 128, None, True),
            TileConfig(128, 128, 64, 8, 6, 1, True, 64, None, True),
            TileConfig(128, 128, 128, 8, 3, 1, True, 128, None, True),
            TileConfig(256, 128, 64, 8, 4, 1, True, 128, None, True),
            TileConfig(256, 128, 64, 8, 4, 1, True, 64, None, True),
            TileConfig(256, 128, 64, 8, 3, 1, True, 128, None, True),
            TileConfig(128, 256, 64, 8, 4, 1, True, 256, None, True),
            TileConfig(128, 128, 64, 4, 3, 2, True, 16),
        ]
    return found


def _compile(config: TileConfig) -> str | None:
    try:
        problem = make_problem(4, torch.zeros(256, 4096, dtype=torch.bfloat16, device="cuda"))
        sample(problem.hidden_states, problem.weight, problem.temperature, problem.seed, problem.offset, 1, 256, config)
        torch.cuda.synchronize()
    except Exception as error:  # a shape that does not fit is a finding
        return f"{config}: {type(error).__name__}: {str(error)[:120]}"
    return None


def _time(batch: int, weight: torch.Tensor, failed: set[str], rounds: int) -> tuple[dict[str, float], str]:
    """Median ms per shape and of "cuBLAS alone"; and the shape in use."""
    problem = make_problem(batch, weight)
    call = (problem.hidden_states, weight, problem.temperature, problem.seed, problem.offset, 1, weight.shape[0])
    in_use = choose_config(problem.hidden_states, weight, 1)
    expected = sample(*call, in_use)
    shapes = list(dict.fromkeys([in_use, *(c for c in candidates(batch) if str(c) not in failed)]))
    for config in shapes:
        if not torch.equal(sample(*call, config), expected):
            raise RuntimeError(f"{config} gives other tokens than {in_use}")
    logits = torch.empty(batch, weight.shape[0], dtype=weight.dtype, device="cuda")
    steps: dict[str, Step] = {"cuBLAS alone": lambda: torch.mm(problem.hidden_states, weight.T, out=logits)}
    steps |= {str(config): functools.partial(sample, *call, config) for config in shapes}
    return interleaved_medians(steps, rounds), str(in_use)


def main(
    batches: Annotated[str, typer.Option(help="Comma-separated.")] = "1,16,32,64,128,256,512",
    rounds: Annotated[int, typer.Option(min=3)] = 25,
    best: Annotated[int, typer.Option(help="Rows to print per problem.")] = 4,
) -> None:
    """Times tile shapes against cuBLAS's bare matmul."""
    console = Console(width=220)
    sizes = [int(batch) for batch in batches.split(",")]
    shapes = list(dict.fromkeys(config for batch in sizes for config in candidates(batch)))
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        failures = [line for line in pool.map(_compile, shapes) if line]
    for line in failures:
        console.print(line)
    failed = {line.split(": ")[0] for line in failures}
    for vocab, dim in CONFIGS:
        weight = make_weight(vocab, dim)
        for batch in sizes:
            times, in_use = _time(batch, weight, failed, rounds)
            bare = times.pop("cuBLAS alone")
            table = Table("ms", "x cuBLAS", "", "shape", title=f"V={vocab} D={dim} B={batch}: cuBLAS alone {bare:.3f} ms")
            ranked = sorted(times, key=times.__getitem__)
            for name in dict.fromkeys([*ranked[:best], in_use]):
                table.add_row(f"{times[name]:.3f}", f"{times[name] / bare:.3f}", "in use" if name == in_use else "", name)
            console.print(table)


if __name__ == "__main__":
    typer.run(main)
