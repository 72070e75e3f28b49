"""The benchmark of one sampling step: ``python -m benchmarks.sample``.

Ours per implementation, cuBLAS's bare matmul, compiled multinomial and FlashInfer (where installed), interleaved in one
run. Nothing of a configuration is timed before its tokens equal the oracle's.
"""

import functools
import json
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import flashsampling
from tests.problems import Problem, assert_agreement

from . import plots
from .before import import_before
from .peers import peers
from .timing import Call, host_microseconds, interleaved_medians, machine, read_bandwidth

CONFIGS = [(151936, 4096), (128256, 8192), (151936, 2048), (128256, 4096), (201088, 2880)]  # V, D
BATCHES = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512]
TENSOR_TFLOPS = 790  # bf16 on random data, as measured on an H200: for the speed-of-light column
LIMITS = {  # whole step over the bare cuBLAS matmul, up to that batch: what is reached, and a little for other machines
    "triton": {32: 1.03, 64: 1.06, 96: 1.35, 128: 1.30, 160: 1.98, 192: 1.95, 256: 1.65, 320: 1.80, 512: 1.65},
    "cute": {128: 1.00, 256: 1.08, 320: 1.13, 512: 1.08},  # the goal is 1.00 everywhere
}
# Peers that were faster than the Triton kernel while it padded the batch to blocks of 128 rows.
BEATEN_BY = {
    ("V=151936 D=4096", 160): {"FI2"},
    ("V=128256 D=4096", 160): {"FI2"},
    ("V=201088 D=2880", 160): {"FI2"},
    ("V=128256 D=8192", 160): {"FI1", "FI2", "multinomial"},
    ("V=128256 D=8192", 192): {"FI1", "FI2"},
    ("V=128256 D=8192", 320): {"FI2"},
}
READ_LIMITS = [
    0.95,
    0.95,
    0.92,
]  # of the read bandwidth, the Hopper kernel up to B = 64 on the first three configurations


def _limit(name: str, batch: int) -> float:
    return next((limit for largest, limit in LIMITS.get(name, {}).items() if batch <= largest), float("inf"))


def make_weight(vocab: int, dim: int) -> torch.Tensor:
    """Random bf16 LM head, (V, D)."""
    return (torch.randn(vocab, dim, device="cuda") * 0.02).bfloat16()


def make_problem(batch: int, weight: torch.Tensor) -> Problem:
    """Random hidden states over a given weight, every parameter a device tensor, temperature 1."""
    device = weight.device
    return Problem(
        torch.randn(batch, weight.shape[1], device=device, dtype=weight.dtype),
        weight,
        torch.ones(batch, device=device),
        torch.randint(-(2**63), 2**63 - 1, (batch,), device=device),
        torch.arange(batch, device=device),
    )


def _host_times(implementations: list[str], named: list[str], before: ModuleType | None) -> dict[str, float]:
    problem = make_problem(4, torch.randn(2048, 256, device="cuda", dtype=torch.bfloat16))
    one = torch.zeros(1, device="cuda")

    def call(name: str, package: ModuleType = flashsampling) -> Any:  # as a user calls it
        return package.sample(
            problem.hidden_states,
            problem.weight,
            temperature=problem.temperature,
            seed=problem.seed,
            offset=problem.offset,
            impl=name,
        )

    steps: dict[str, Call] = {name: functools.partial(call, name) for name in implementations}
    if before is not None:
        steps |= {f"{name} before": functools.partial(call, name, before) for name in implementations}
    steps |= {"an empty launch": one.zero_, **peers(problem.hidden_states, problem.weight, named)}
    return {name: host_microseconds(step) for name, step in steps.items()}


def _row(
    problem: Problem,
    implementations: list[str],
    named: list[str],
    before: ModuleType | None,
    rounds: int,
    read_tb_s: float,
) -> dict[str, Any]:
    """The correctness gate, then every step's time."""
    (vocab, dim), batch = problem.weight.shape, problem.hidden_states.shape[0]
    steps: dict[str, Call] = {name: functools.partial(problem.sample, name) for name in implementations}
    if before is not None:
        steps |= {f"{name} before": functools.partial(problem.sample, name, package=before) for name in implementations}
    excused = sum(assert_agreement(step(), problem) for step in steps.values())
    steps |= peers(problem.hidden_states, problem.weight, named)
    return {
        "config": f"V={vocab} D={dim}",
        "batch": batch,
        "ms": interleaved_medians(steps, rounds, offsets=problem.offset),
        "speed_of_light_ms": max(
            problem.weight.nbytes / read_tb_s / 1e9, 2 * batch * vocab * dim / TENSOR_TFLOPS / 1e9
        ),
        "weight_bytes": problem.weight.nbytes,
        "near_ties_excused": excused,
    }


def _over_the_limit(row: dict[str, Any], config: int, implementations: list[str], read_tb_s: float) -> list[str]:
    ms, found = row["ms"], []
    where = f"{row['config']} B={row['batch']}"
    for name in implementations:
        ratio, limit = ms[name] / ms["cuBLAS alone"], _limit(name, row["batch"])
        if ratio > limit:
            found.append(f"{where}: {name} takes {ratio:.3f}x cuBLAS, limit {limit:.2f}x")
        for peer in ("FI1", "FI2", "multinomial"):
            excused = name == "triton" and peer in BEATEN_BY.get((row["config"], row["batch"]), ())
            if name in LIMITS and not excused and ms[name] >= ms.get(peer, float("inf")):
                found.append(f"{where}: {name} is not faster than {peer}")
    if "cute" in ms and row["batch"] <= 64 and config < len(READ_LIMITS):
        share = row["weight_bytes"] / ms["cute"] / 1e9 / read_tb_s
        if share < READ_LIMITS[config]:
            found.append(f"{where}: cute reads at {share:.3f} of the bandwidth, limit {READ_LIMITS[config]:.2f}")
    return found


def main(
    out: Annotated[Path, typer.Option(help="Folder for sample.json, sample.png and bandwidth.png.")] = Path(
        "benchmarks/results"
    ),
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays per step.")] = 100,
    implementations: Annotated[
        str, typer.Option(help="Comma-separated; ratios in the table are of the first.")
    ] = "cute,triton",
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = ",".join(map(str, BATCHES)),
    configs: Annotated[int, typer.Option(min=1, max=len(CONFIGS), help="How many of the LM heads.")] = len(CONFIGS),
    before: Annotated[
        Path | None, typer.Option(help="Another checkout, timed too: git worktree add FOLDER COMMIT.")
    ] = None,
    against: Annotated[str, typer.Option("--peers", help="Comma-separated; all that are installed by default.")] = "",
    check: Annotated[bool, typer.Option(help="Exit 1 if a step misses a limit.")] = False,
) -> None:
    """Times one sampling step against its peers."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    console = Console(width=150)
    out.mkdir(parents=True, exist_ok=True)
    names, named = implementations.split(","), [name for name in against.split(",") if name]
    if named and "cuBLAS alone" not in named:
        raise typer.BadParameter("the peers must include 'cuBLAS alone', which the limits are of")
    sizes = sorted(int(batch) for batch in batches.split(","))
    package_before = None if before is None else import_before(before)
    read = read_bandwidth()
    result: dict[str, Any] = {
        "machine": machine(),
        "read_tb_s": read,
        "rounds": rounds,
        "rows": [],
        "host_us": _host_times(names, named, package_before),
    }
    missed = []
    for config, (vocab, dim) in enumerate(CONFIGS[:configs]):
        weight = make_weight(vocab, dim)
        rows = [_row(make_problem(batch, weight), names, named, package_before, rounds, read) for batch in sizes]
        table = Table("B", "SoL", *rows[0]["ms"], title=f"V={vocab} D={dim}: ms ({names[0]} over it)")
        for row in rows:
            ours = row["ms"][names[0]]
            cells = [f"{ms:.3f} ({ours / ms:.2f})" for ms in row["ms"].values()]
            table.add_row(str(row["batch"]), f"{row['speed_of_light_ms']:.3f}", *cells)
            missed += _over_the_limit(row, config, names, read)
        console.print(table)
        result["rows"] += rows
        (out / "sample.json").write_text(
            json.dumps(result, indent=1) + "\n"
        )  # a run that is cut short keeps what it has
        del weight
        torch.cuda.empty_cache()
    console.print(f"read bandwidth {read:.2f} TB/s; host time of an eager call on a tiny problem, us:")
    console.print({name: round(value, 1) for name, value in result["host_us"].items()})
    console.print(result["machine"])
    plots.over_cublas(result, out / "sample.png")
    plots.bandwidth(result, out / "bandwidth.png")
    for line in missed:
        console.print(f"[red]over the limit[/red] {line}")
    if check and missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
