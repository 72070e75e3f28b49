"""Times the Triton kernel's tile shapes: ``python -m benchmarks.tune_triton``. ``choose_config`` is read off its
output.

Every candidate is compiled first, in parallel processes, and must give the same tokens as the shape in use, bit for
bit; those must be the oracle's. All batches of an LM head are timed in one interleaved run, so that they can be
compared with each other.
"""

import functools
import json
import multiprocessing
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashsampling.kernels.triton import choose_config
from flashsampling.kernels.triton.fused.config import TritonTileConfig, shape_for
from flashsampling.kernels.triton.fused.launch import run
from tests.problems import Problem, assert_agreement

from .before import import_before
from .sample import CONFIGS, make_problem, make_weight
from .timing import Call, interleaved_medians, machine

VOCABULARIES = {dim: vocab for vocab, dim in reversed(CONFIGS)}  # of two with the same D, the first
_LEAN = TritonTileConfig(128, 128, 64, 8, 6, 1, use_tma=True, chunk_b=64, preload=True)
_SMALL = TritonTileConfig(128, 64, 64, 4, 3, 3, use_tma=True, max_registers=168)
# Shapes that fit sm_90's shared memory and registers, and spill no more than the shapes in use.
CANDIDATES = [
    TritonTileConfig(128, 16, 128, 4, 2, 3, use_tma=True, max_registers=168),
    TritonTileConfig(128, 16, 128, 4, 3, 2, use_tma=True),
    TritonTileConfig(128, 32, 64, 4, 3, 3, use_tma=True, chunk_b=32, max_registers=168),
    TritonTileConfig(128, 32, 64, 4, 5, 2, use_tma=True, chunk_b=32),
    *(replace(_SMALL, block_b=32, rest_b=16, chunk_b=chunk) for chunk in (16, 32)),
    _SMALL,
    replace(_SMALL, chunk_b=32),
    TritonTileConfig(256, 64, 64, 8, 5, 1, use_tma=True, chunk_b=64, preload=True),
    *(replace(_LEAN, block_b=64, num_stages=7, rest_b=rest) for rest in (16, 32)),
    *(replace(_LEAN, block_v=256, block_b=64, num_stages=4, rest_b=rest) for rest in (16, 32)),
    *(replace(_SMALL, num_stages=3, ctas_per_sm=2, max_registers=None, rest_b=rest) for rest in (16, 32)),
    _LEAN,
    replace(_LEAN, halves=True),
    replace(_LEAN, halves=True, chunk_b=32),
    replace(_LEAN, halves=True, block_d=128, num_stages=3),
    replace(_LEAN, chunk_b=128),
    replace(_LEAN, block_d=128, num_stages=3),
    *(replace(_LEAN, block_v=256, num_stages=4, chunk_b=chunk) for chunk in (32, 64, 128)),
    *(replace(_LEAN, rest_b=rest, chunk_b=chunk) for rest in (16, 32) for chunk in (32, 64)),
    *(replace(_LEAN, rest_b=rest, block_d=128, num_stages=3) for rest in (16, 32)),
    *(replace(_LEAN, rest_b=64, num_stages=5, chunk_b=chunk) for chunk in (32, 64)),
    *(replace(_LEAN, rest_b=64, num_stages=5, chunk_b=chunk, preload=False) for chunk in (16, 32, 64)),
    *(replace(_LEAN, rest_b=32, chunk_b=chunk, preload=False) for chunk in (16, 32)),
    replace(_LEAN, rest_b=128, num_stages=4),
    TritonTileConfig(128, 128, 64, 8, 5, 1, use_tma=True, chunk_b=128, rest_b=64, rows_on_m=True),
    TritonTileConfig(256, 128, 64, 8, 4, 1, use_tma=True, chunk_b=128, rows_on_m=True),
]
_MOST_PADDING = 64  # rows of a batch beyond the least that some candidate needs


def _padded(config: TritonTileConfig, batch: int) -> int:
    return -(-batch // config.columns) * config.columns


def _fits(config: TritonTileConfig, batch: int) -> bool:
    return not config.halves or config.block_b // 2 < batch <= config.block_b


def candidates(batch: int) -> list[TritonTileConfig]:
    """The shapes worth timing at a batch size: few blocks of rows, and little padding."""
    fewest = -(-batch // max(config.columns for config in CANDIDATES))
    allowed = [config for config in CANDIDATES if _fits(config, batch) and -(-batch // config.columns) <= 2 * fewest]
    least = min(_padded(config, batch) for config in allowed)
    return [config for config in allowed if _padded(config, batch) <= least + _MOST_PADDING]


def _compile(config: TritonTileConfig) -> str | None:
    try:
        problem = make_problem(config.block_b, torch.zeros(256, 4096, dtype=torch.bfloat16, device="cuda"))
        run(problem.step(), config)
        torch.cuda.synchronize()
    except Exception as error:  # a shape that does not fit is a finding
        return f"{config}: {type(error).__name__}: {str(error)[:120]}"
    return None


def _compile_before(checkout: Path, batch: int, dim: int) -> None:
    """Compiles the other checkout's kernel for a batch in a process of its own, which leaves it in Triton's cache."""
    problem = make_problem(batch, torch.zeros(256, dim, dtype=torch.bfloat16, device="cuda"))
    problem.sample("triton", package=import_before(checkout))


def _checked(problem: Problem, shapes: list[TritonTileConfig], before: ModuleType | None) -> dict[str, Call]:
    """Steps of a batch, once their tokens are right: cuBLAS's bare matmul, every shape, the first of which is in use,
    and what is in use in another checkout."""
    batch, weight, step = problem.hidden_states.shape[0], problem.weight, problem.step()
    expected = run(step, shapes[0]).ids
    assert_agreement(expected[:, None], problem)
    for config in shapes[1:]:
        if not torch.equal(run(step, config).ids, expected):
            raise RuntimeError(f"B={batch}: {config} gives other tokens than {shapes[0]}")
    logits = torch.empty(batch, weight.shape[0], dtype=weight.dtype, device="cuda")
    steps: dict[str, Call] = {"cuBLAS": lambda: torch.mm(problem.hidden_states, weight.T, out=logits)}
    steps |= {str(config): functools.partial(run, step, config) for config in shapes}
    if before is not None:
        if not torch.equal(problem.sample("triton", package=before)[:, 0], expected):
            raise RuntimeError(f"B={batch}: the other checkout gives other tokens")
        steps["before"] = functools.partial(problem.sample, "triton", package=before)
    return steps


def _time(
    sizes: list[int],
    weight: torch.Tensor,
    shapes_of: Callable[[int], list[TritonTileConfig]],
    before: ModuleType | None,
    rounds: int,
) -> list[dict[str, Any]]:
    """Returns, for every batch, median ms of cuBLAS's bare matmul and of every shape, and the shape in use."""
    offsets, shapes, steps = (
        torch.arange(max(sizes), device="cuda"),
        dict[int, list[TritonTileConfig]](),
        dict[str, Call](),
    )
    for batch in sizes:
        problem = replace(make_problem(batch, weight), offset=offsets[:batch])
        in_use = choose_config(problem.hidden_states, weight, 1)
        shapes[batch] = list(dict.fromkeys([in_use, *shapes_of(batch)]))
        steps |= {f"{batch} {name}": step for name, step in _checked(problem, shapes[batch], before).items()}
    times = interleaved_medians(steps, rounds, offsets=offsets)
    rows = []
    for batch in sizes:
        found: list[dict[str, Any]] = [
            {"config": asdict(config), "ms": times[f"{batch} {config}"], "name": _short(config), "in_use": index == 0}
            for index, config in enumerate(shapes[batch])
        ]
        row = {"batch": batch, "cublas_ms": times[f"{batch} cuBLAS"], "before_ms": times.get(f"{batch} before")}
        rows.append(row | {"shapes": sorted(found, key=lambda shape: shape["ms"])})
    return rows


def _short(config: TritonTileConfig) -> str:
    """A shape in a table's cell."""
    width = f"{config.block_b}+{config.rest_b}" if config.rest_b else str(config.block_b)
    width = f"2*{config.block_b // 2}" if config.halves else width
    tile = f"{config.block_v}x{width} d{config.block_d} w{config.num_warps} s{config.num_stages} p{config.ctas_per_sm}"
    last = f"{' keys' if config.preload else ''}{' r' + str(config.max_registers) if config.max_registers else ''}"
    return f"{tile} c{config.chunk_b}{last}{' rows on M' if config.rows_on_m else ''}"


def main(
    batches: Annotated[
        str, typer.Option(help="Comma-separated.")
    ] = "1,16,32,48,64,80,96,128,144,160,176,192,208,224,256,272,288,320,384,448,512",
    dims: Annotated[str, typer.Option(help="Comma-separated: D of the LM heads of benchmarks.sample.")] = "4096",
    rounds: Annotated[int, typer.Option(min=3)] = 25,
    best: Annotated[int, typer.Option(help="Shapes to print per batch size, beside the one in use.")] = 2,
    workers: Annotated[int, typer.Option(help="Processes that compile.")] = min(16, os.cpu_count() or 1),
    only: Annotated[str, typer.Option(help="Shapes whose name, as printed, matches this; that in use always.")] = "",
    before: Annotated[Path | None, typer.Option(help="Another checkout, what is in use there timed too.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON of all times.")] = None,
) -> None:
    """Times tile shapes against cuBLAS's bare matmul; first, every shape must give the same tokens, bit for bit."""
    console = Console(width=250)
    sizes = [int(batch) for batch in batches.split(",")]
    package = None if before is None else import_before(before)
    wanted = re.compile(only)
    shapes = [config for batch in sizes for config in candidates(batch) if wanted.search(_short(config))]
    for dim in (int(dim) for dim in dims.split(",")):  # what is in use is compiled ahead too, as numbers alone tell it
        shapes += [shape_for(batch, dim, torch.bfloat16, 1, use_tma=True) for batch in sizes]
    shapes = list(dict.fromkeys(shapes))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        others = [] if before is None else [(before, size, int(dim)) for size in sizes for dim in dims.split(",")]
        waiting = [pool.submit(_compile_before, *other) for other in others]
        failures = [line for line in pool.map(_compile, shapes) if line]
        for future in waiting:
            future.result()
    for line in failures:
        console.print(line)
    failed = {line.split(": ")[0] for line in failures}
    result: dict[str, Any] = {"machine": machine(), "rounds": rounds, "failed": failures, "problems": []}
    for dim in (int(dim) for dim in dims.split(",")):
        vocab = VOCABULARIES[dim]
        weight = make_weight(vocab, dim)
        legend = "shape: tile, depth, warps, stages, programs, chunk, keys of rows in registers, most registers"
        columns = ("B", "cuBLAS ms", "before", "in use", "x", "against larger B", "best shapes (x cuBLAS)")
        table = Table(*columns, title=f"V={vocab} D={dim}")

        def shapes_of(batch: int) -> list[TritonTileConfig]:
            return [c for c in candidates(batch) if str(c) not in failed and wanted.search(_short(c))]

        rows = _time(sizes, weight, shapes_of, package, rounds)
        used = [next(shape for shape in row["shapes"] if shape["in_use"]) for row in rows]
        for row, shape, later in zip(rows, used, (used[index:] for index in range(len(used)))):
            bare = row["cublas_ms"]
            ranked = ", ".join(f"{other['name']} ({other['ms'] / bare:.3f})" for other in row["shapes"][:best])
            above = shape["ms"] / min(other["ms"] for other in later)
            other_ms = "" if row["before_ms"] is None else f"{row['before_ms'] / bare:.3f}"
            cells = (f"{bare:.4f}", other_ms, shape["name"], f"{shape['ms'] / bare:.3f}", f"{above:.3f}", ranked)
            table.add_row(str(row["batch"]), *cells)
        console.print(table)
        console.print(legend)
        result["problems"].append({"vocab": vocab, "dim": dim, "rows": rows})
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")
        del weight
        torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
