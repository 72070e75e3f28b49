"""How many instructions the Hopper kernel's warps execute for a tile, counted without a GPU.

``python -m benchmarks.instructions``: of PTX, on the machine of ``tests.emulator``, what a launch of more tiles
executes more, over the tiles. No times: what a warp waits for, and what ptxas makes of it, is not in here. But
consumers' instructions between two tiles' products are exposed, two warps to a scheduler: 2 x 1000 of them are 2000
cycles of a tile, of which 1024 x D / 64 are products at 256 columns.
"""

import os
from collections.abc import Callable
from typing import Annotated

os.environ["TRITON_INTERPRET"] = "1"

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper import config, dispatch, launch
from flashsampling.kernels.hopper.config import KINDS, TILE_V
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from tests.emulator import hopper

CTAS = 4
FEW, MORE = 4, 12  # tiles of a CTA
ROLES = {"producer": (0, 1), "candidates": (1, 3), "cutoff": (3, 4), "noise": (4, 8), "consumers": (8, 16)}  # warps


def _step(batch: int, tiles: int) -> SampleInputs:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(batch, 64, generator=generator)
    weight = torch.randn(TILE_V * CTAS * tiles, 64, generator=generator) * 3 / 8
    rows = torch.arange(batch)
    temperature = torch.ones(batch)
    return SampleInputs(states.bfloat16(), weight.bfloat16(), temperature, rows, torch.zeros_like(rows), 1, len(weight))


def _processed(step: SampleInputs) -> object:
    return launch.run(step._replace(params=SamplingParams(soft_cap=30.0)))


def _leaving(step: SampleInputs, masses: tuple[bool, bool], filters: SamplingParams | None = None) -> object:
    cutoffs = None if filters is None else torch.empty(len(step.hidden_states), dtype=torch.int32)
    return dispatch.run_with_logits(
        step, 1, masses, None, dispatch.NO_TRANSFORMS, dispatch._cutoff_arguments(filters or DEFAULT_PARAMS, cutoffs)
    )


def _top_k(step: SampleInputs) -> object:  # one per row, as batches of several requests have it
    return _leaving(step, (True, False), SamplingParams(top_k=torch.full((len(step.hidden_states),), 5), top_p=0.9))


CASES: dict[str, tuple[str, Callable[[SampleInputs], object]]] = {
    "plain": ("plain", launch.run),
    "soft cap": ("processed", _processed),
    "logits, maxima": ("logits", lambda step: _leaving(step, (False, False))),
    "logits, maxima, masses": ("logits", lambda step: _leaving(step, (True, False))),
    "... at temperature 1 too": ("logits", lambda step: _leaving(step, (True, True))),
    "top-k, top-p": ("logits", _top_k),
    "min-p": ("logits", lambda step: _leaving(step, (False, False), SamplingParams(min_p=0.05))),
}


def _executed(batch: int, kind: str, run: Callable[[SampleInputs], object], tiles: int) -> list[float]:
    """By warp, over all CTAs."""
    run(_step(batch, tiles))
    shape = config.choose_config(batch, 64)
    counts = hopper.machine_for(torch.bfloat16, shape, KINDS[kind]).machine.executed
    return [sum(counts[warp::16]) for warp in range(16)]


def main(batches: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "8,64,128,256") -> None:
    """Prints a table: instructions of a warp of each role, for a tile."""
    hopper.install()
    vars(launch)["multiprocessors"] = lambda device: CTAS
    table = Table("batch", "launch", *ROLES, title="PTX instructions of a warp, for a tile")
    for batch in map(int, batches.split(",")):
        for name, (kind, run) in CASES.items():
            few, more = (_executed(batch, kind, run, tiles) for tiles in (FEW, MORE))
            per_tile = [(b - a) / ((MORE - FEW) * CTAS) for a, b in zip(few, more, strict=True)]
            means = [sum(per_tile[first:last]) / (last - first) for first, last in ROLES.values()]
            table.add_row(str(batch), name, *(f"{mean:.0f}" for mean in means))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
