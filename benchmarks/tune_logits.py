"""Shapes of sampling from logits, timed: ``python -m benchmarks.tune_logits``. ``logits.CONFIG`` is read off it.

Of the second launch what counts is a step behind the Hopper kernel (``--fused``): by then the weight has pushed its
code and its data out of the caches. Launched over and over it takes half as long.
"""

import functools
import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashsampling import ops
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper import dispatch as cute_asked
from flashsampling.kernels.triton.filtered import dispatch as module
from flashsampling.kernels.triton.filtered.dispatch import CONFIG, Config, Room, pick, run
from flashsampling.outputs import SampleResult
from flashsampling.sampling_params import DEFAULT_PARAMS
from tests.kernels.triton.test_filtered import agrees, check
from tests.kernels.triton.test_filtered_kernel import summaries_of

from .from_logits import REPEATS, filled, repeated, requests, spectrum
from .requests import head_of, more_requests
from .timing import Call, interleaved_medians


def candidates(which: str) -> dict[str, Config]:
    """Returns shapes of the first launch ("scan") or the second ("pick"). The second differs from the present shape in
    one thing at a time: each takes ten seconds to compile."""
    found = {}
    if which == "scan":
        for columns, reps, warps, registers in itertools.product(
            (512, 1024), (1, 2, 4), (4, 8), (64, 80, 96, 128, 168)
        ):
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
            "16 warps, 128 registers, 1024 wide": replace(CONFIG, pick_warps=16, gathered=128),
            "gathered 32": replace(CONFIG, gathered=32),
            "gathered 128": replace(CONFIG, gathered=128),
            "tile 512": replace(CONFIG, tile=512),
            "few 128": replace(CONFIG, few=128),
            "255 registers": replace(CONFIG, pick_registers=255),
        }
    return {"as it is": CONFIG} | found


def call(step: SampleInputs, config: Config, alone: bool) -> Call:
    """Both launches, or the second behind summaries that are there; after its tokens are the oracle's."""
    some = step.part(0, min(len(step.hidden_states), 8))
    check(some, config)
    if not alone:
        return functools.partial(run, step, config)
    drawn = run(step._replace(params=DEFAULT_PARAMS)).ids
    call = functools.partial(pick, step, summaries_of(step), drawn, config)
    assert (call().ids != run(step, config).ids).sum() <= 0.02 * len(drawn)  # sums of masses are rounded otherwise
    return call


class _Shaped:
    """``filtered.dispatch`` as the Hopper kernel's steps have it, its second launch of another shape."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(module, name)

    def room_of(self, step: SampleInputs) -> Room | None:
        return module.room_of(step, self.config)

    def pick(self, *arguments: Any, **options: Any) -> SampleResult:
        return module.pick(*arguments, **options | {"config": self.config})


def _sample(step: SampleInputs, shaped: _Shaped) -> SampleResult:
    with mock.patch.object(cute_asked, "_filtered_module", return_value=shaped):
        return ops.sample(step, "cute")


def _compiled(config: Config, vocab: int, request: str) -> None:
    head = torch.zeros(vocab, 64, dtype=torch.bfloat16, device="cuda")
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    plain = SampleInputs(head[:1], head, torch.ones(1, device="cuda"), seed, seed, 1, vocab)
    _sample(plain._replace(params=(requests(1) | more_requests(1, vocab))[request]), _Shaped(config))


def fused(
    configs: dict[str, Config],
    held: tuple[torch.Tensor, torch.Tensor, int],
    request: str,
    vocab: int,
    batch: int,
    rounds: int,
) -> dict[str, float]:
    """Microseconds by which a step is longer than one without any request, of a head of 4096 columns."""
    states, weight = head_of(filled(*held, batch, vocab, torch.float32), 4096)
    offsets = torch.zeros(batch, dtype=torch.int64, device="cuda")
    seed = torch.randint(-(2**63), 2**63 - 1, (batch,), device="cuda")
    plain = SampleInputs(states, weight, torch.ones(batch, device="cuda"), seed, offsets, 1, vocab)
    step = plain._replace(params=(requests(batch) | more_requests(batch, vocab))[request])
    some = step.part(0, min(batch, 8))
    steps: dict[str, Call] = {"plain": functools.partial(ops.sample, plain, "cute")}
    for key, config in configs.items():
        shaped = _Shaped(config)
        agrees(_sample(some, shaped), some, tolerance=2e-3)  # sums of thousands of products
        steps[key] = functools.partial(_sample, step, shaped)
    ms = interleaved_medians(steps, rounds, offsets=offsets)
    return {key: (ms[key] - ms["plain"]) * 1e3 for key in configs} | {"plain": ms["plain"] * 1e3}


def main(
    which: Annotated[str, typer.Argument(help="scan or pick")] = "scan",
    request: Annotated[str, typer.Option(help="Comma-separated, of benchmarks.from_logits.")] = "top-k top-p,top-p",
    vocab: Annotated[int, typer.Option()] = 151936,
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = "1,64,256",
    rounds: Annotated[int, typer.Option(min=3)] = 10,
    only: Annotated[str, typer.Option(help="Of the shapes, those with one of these words in their names.")] = "",
    alone: Annotated[bool, typer.Option(help="The second launch by itself, behind torch's summaries.")] = False,
    behind: Annotated[
        bool, typer.Option("--fused", help="Of whole steps what a request adds, by the Hopper kernel.")
    ] = False,
    spectra: Annotated[Path | None, typer.Option(help="Of benchmarks.from_logits.")] = None,
    name: Annotated[str, typer.Option(help="Of benchmarks.from_logits.")] = "gemma3-270m",
) -> None:
    """Times every shape, the best first."""
    torch.manual_seed(0)
    words = [word for word in only.split(",") if word]
    configs = {key: one for key, one in candidates(which).items() if not words or any(word in key for word in words)}
    columns: dict[str, dict[str, float]] = {}
    held = spectrum(spectra, name)
    if behind:
        with ProcessPoolExecutor(16, mp_context=get_context("spawn")) as pool:  # a quarter of a minute each
            compiling = [
                pool.submit(_compiled, config, vocab, params)
                for (key, config), params in itertools.product(configs.items(), request.split(","))
            ]
            for job in compiling:
                job.result()
    for batch, params in itertools.product(map(int, batches.split(",")), request.split(",")):
        if behind:
            columns[f"{params} {batch}"] = fused(configs, held, params, vocab, batch, rounds)
            continue
        logits = filled(*held, batch, vocab, torch.float32)
        seed = torch.arange(batch, device="cuda")
        step = SampleInputs(logits, logits, 1.0, seed, 0, 1, vocab, params=requests(batch)[params], logits=logits)
        steps: dict[str, Call] = {key: repeated(call(step, config, alone)) for key, config in configs.items()}
        columns[f"{params} {batch}"] = {
            key: ms / REPEATS * 1e3 for key, ms in interleaved_medians(steps, rounds).items()
        }
    table = Table(which, *columns, title=f"V={vocab}: us")
    ranked = sorted(configs, key=lambda key: sum(times[key] / min(times.values()) for times in columns.values()))
    for key in [*ranked, "plain"] if behind else ranked:
        table.add_row(key, *(f"{times[key]:.1f}" for times in columns.values()))
    Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
