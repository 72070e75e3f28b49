"""Splits the time of a filtered step on a Hopper GPU: ``python -m benchmarks.parts --spectra FOLDER``.

Beside the step without anything and whole steps: the kernel that leaves its logits, with draws and without, and the
launch behind it alone, on logits as real models make them. Interleaved in one run.
"""

import functools
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashsampling import ops
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper import dispatch as leaving
from flashsampling.kernels.triton.filtered import dispatch as filtered
from flashsampling.sampling_params import SamplingParams
from tests.kernels.triton.test_filtered import agrees

from .from_logits import filled, requests, spectrum
from .requests import CHECKED, head_of, more_requests
from .timing import Call, interleaved_medians, machine

DRAWN = "top-k top-p", "top-p", "min-p", "top_logprobs=5"  # of what the kernel leaves, by one launch


def _steps(plain: SampleInputs) -> dict[str, Call]:
    batch, vocab = plain.hidden_states.shape[0], plain.vocab_size
    params = requests(batch) | more_requests(batch, vocab)
    filters, one = params["top-k top-p"], torch.zeros(batch, -(-vocab // 32), dtype=torch.int32, device="cuda")
    one[:, 77] = 1
    both: dict[str, Any] = {"top_k": filters.top_k, "top_p": filters.top_p}
    params |= {
        "soft cap": SamplingParams(soft_cap=30.0),
        "mask of one token": SamplingParams(token_mask=one),
        "mask, top-k top-p": params["mask"]._replace(**both),
        "penalties, top-k top-p": params["penalties"]._replace(**both),
    }
    logits, block_stats, drawn = leaving.run_with_logits(plain, 1, (True, True))
    steps: dict[str, Call] = {
        "unfiltered": functools.partial(ops.sample, plain, "cute"),
        "kernel": functools.partial(leaving.run_with_logits, plain, 1, (False, False)),
        "kernel, mass": functools.partial(leaving.run_with_logits, plain, 1, (True, False)),
        "kernel, no draws": functools.partial(leaving.run_with_logits, plain, 0, None),
    }
    for name, wanted in params.items():
        step = plain._replace(params=wanted)
        if name in DRAWN:
            masses = wanted.needs_mass(vocab), wanted.needs_raw_mass()
            parts = [part if is_wanted else None for part, is_wanted in zip(block_stats[1:], masses)]
            of_blocks = filtered.BlockStats(block_stats[0], *parts)
            steps[f"draw, {name}"] = functools.partial(filtered.draw, step._replace(logits=logits), of_blocks, drawn)
        elif name in ("unfiltered", "everything"):
            continue
        some = step.part(0, min(batch, CHECKED))
        agrees(ops.sample(some, "cute"), some, tolerance=2e-3)
        steps[name] = functools.partial(ops.sample, step, "cute")
    return steps


def main(
    spectra: Annotated[
        Path | None, typer.Option(help="Folder of npz files of real logits; without it: Zipf's law.")
    ] = None,
    name: Annotated[str, typer.Option(help="Which of them.")] = "gemma3-270m",
    vocab: Annotated[int, typer.Option()] = 151936,
    dim: Annotated[int, typer.Option()] = 4096,
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = "1,16,64,128,256",
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays per step.")] = 25,
    out: Annotated[Path, typer.Option(help="Folder for parts.json.")] = Path("benchmarks/results"),
) -> None:
    """Times whole steps with requests, and their launches one by one."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    held = spectrum(spectra, name)
    result: dict[str, Any] = {"machine": machine(), "vocab": vocab, "dim": dim, "rounds": rounds, "us": {}}
    for batch in map(int, batches.split(",")):
        states, weight = head_of(filled(*held, batch, vocab, torch.float32), dim)
        ones, offsets = torch.ones(batch, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")
        seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), device="cuda")
        steps = _steps(SampleInputs(states, weight, ones, seeds, offsets, 1, vocab))
        result["us"][batch] = {of: ms * 1e3 for of, ms in interleaved_medians(steps, rounds, offsets=offsets).items()}
    table = Table("us (over unfiltered)", *map(str, result["us"]), title=f"V={vocab} D={dim}")
    for of in next(iter(result["us"].values())):
        table.add_row(of, *(f"{us[of]:.1f} ({us[of] / us['unfiltered']:.2f})" for us in result["us"].values()))
    Console(width=120).print(table, result["machine"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "parts.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
