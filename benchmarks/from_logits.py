"""The benchmark of sampling from logits that are in memory: ``python -m benchmarks.from_logits --spectra FOLDER``.

Ours beside FlashInfer's four functions, where it is installed, interleaved in one run. Nothing is timed before its
tokens are the oracle's. Several steps are captured in one graph, so that what the host costs is out of the figures;
they read the same logits, so that up to 50 MB of these come from the level-2 cache, as they do behind a matmul.
"""

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashsampling.inputs import SampleInputs
from flashsampling.kernels.triton.filtered.dispatch import run
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from tests.kernels.triton.test_filtered import check

from .before import sample_before
from .timing import interleaved_medians, machine, read_bandwidth

VOCABS = [32000, 128256, 151936, 262144]
BATCHES = [1, 16, 64, 128, 256]
REPEATS = 10  # steps per graph
CHECKED = 16  # rows that are compared with the oracle
TOP_K, TOP_P, MIN_P = 50, 0.9, 0.05


def spectrum(folder: Path | None, name: str) -> tuple[Tensor, Tensor, int]:
    """Ranks (n,), logits at them (rows, n), sorted downwards, and the vocabulary that they are of."""
    if folder is None:  # Zipf's law, as text has it, and rows that differ in how sure they are
        ranks = torch.logspace(0, 5, 512, dtype=torch.float64) - 1
        sharpness = torch.linspace(1.0, 2.0, 64, dtype=torch.float64)
        return ranks, -sharpness[:, None] * torch.log1p(ranks), 100_000
    import numpy as np

    held = np.load(folder / f"{name}.npz")
    return torch.from_numpy(held["ranks"]).double(), torch.from_numpy(held["logits"]).double(), int(held["vocab"])


def spectrum_source(folder: Path | None, name: str) -> str:
    """Says where ``spectrum`` takes its logits from."""
    return f"{name} from {folder}" if folder else "synthetic: Zipf's law, exponents 1 to 2"


def filled(
    ranks: Tensor, logits: Tensor, vocab_of: int, batch: int, vocab: int, dtype: torch.dtype, device: str = "cuda"
) -> Tensor:
    """(B, V): rows of that spectrum, their ranks scaled to V, their tokens shuffled."""
    generator = torch.Generator(device).manual_seed(0)
    known = torch.log1p(ranks).to(device)
    wanted = torch.log1p(torch.arange(vocab, device=device, dtype=torch.float64) * ((vocab_of - 1) / max(vocab - 1, 1)))
    right = torch.searchsorted(known, wanted).clamp(1, len(known) - 1)
    share = ((wanted - known[right - 1]) / (known[right] - known[right - 1])).clamp(0, 1)
    out = torch.empty(batch, vocab, dtype=dtype, device=device)
    for row in range(batch):
        values = logits[row % len(logits)].to(device)
        filled_row = values[right - 1] + share * (values[right] - values[right - 1])
        out[row] = filled_row[torch.randperm(vocab, device=device, generator=generator)].to(dtype)
    return out


def requests(batch: int) -> dict[str, SamplingParams]:
    """Returns the sampling parameters of each kind of request, one value per row, as servers pass them."""

    def rows(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    return {
        "unfiltered": DEFAULT_PARAMS,
        "top-k top-p": SamplingParams(top_k=rows(TOP_K, torch.int64), top_p=rows(TOP_P)),
        "top-p": SamplingParams(top_p=rows(TOP_P)),
        "min-p": SamplingParams(min_p=rows(MIN_P)),
    }


def peers(logits: Tensor) -> dict[str, Callable[[], Any]]:
    """FlashInfer's function for each request; those that take probabilities with its softmax before them. From 0.7 on
    it has another one for top-k with top-p, k up to 1024: a radix select by clusters of blocks, of probabilities."""
    if importlib.util.find_spec("flashinfer") is None:
        return {}
    import flashinfer
    from flashinfer import sampling

    batch = logits.shape[0]
    top_k = torch.full((batch,), TOP_K, dtype=torch.int32, device="cuda")
    top_p, min_p = (torch.full((batch,), value, device="cuda") for value in (TOP_P, MIN_P))
    softmax = getattr(sampling, "softmax", None) or functools.partial(torch.softmax, dim=-1)
    found = {
        "unfiltered": lambda: sampling.sampling_from_logits(logits),
        "top-k top-p": lambda: sampling.top_k_top_p_sampling_from_logits(logits, top_k, top_p),  # top-k first
        "top-p": lambda: sampling.top_p_sampling_from_probs(softmax(logits), top_p),
        "min-p": lambda: sampling.min_p_sampling_from_probs(softmax(logits), min_p),
    }
    if hasattr(flashinfer, "cake_top_k_top_p_sampling_from_probs"):
        by_radix = functools.partial(flashinfer.cake_top_k_top_p_sampling_from_probs, top_k_max=TOP_K)
        found["top-k top-p by radix"] = lambda: by_radix(softmax(logits), top_k, top_p)
    return found


def repeated(step: Callable[[], Any]) -> Callable[[], Any]:
    """So many of them."""

    def several() -> None:
        for _ in range(REPEATS):
            step()

    return several


def _rows(
    logits: Tensor, wanted: list[str], before: Path | None, rounds: int, read_tb_s: float
) -> list[dict[str, Any]]:
    """Checks, then times, every request in ``wanted``."""
    (batch, vocab), device = logits.shape, logits.device
    temperature, offset = torch.ones(batch, device=device), torch.arange(batch, device=device)
    seed = torch.randint(-(2**63), 2**63 - 1, (batch,), device=device)
    theirs = peers(logits.float())
    steps: dict[str, Callable[[], Any]] = {}
    for name, params in requests(batch).items():
        if name not in wanted:
            continue
        step = SampleInputs(logits, logits, temperature, seed, offset, 1, vocab, params=params, logits=logits)
        some = check(step.part(0, min(batch, CHECKED))).ids
        assert torch.equal(run(step).ids[: len(some)], some), f"{name}: a row depends on its batch"
        steps[f"ours {name}"] = repeated(functools.partial(run, step))
        if before is not None:
            draw = functools.partial(sample_before, before, step, "triton")
            assert torch.equal(draw().ids, run(step).ids), f"{name}: the other checkout gives other tokens"
            steps[f"before {name}"] = repeated(draw)
        if name in theirs:
            steps[f"FlashInfer {name}"] = repeated(theirs[name])
    ms = {name: time / REPEATS for name, time in interleaved_medians(steps, rounds).items()}
    return [
        {
            "vocab": vocab,
            "batch": batch,
            "request": name,
            "us": ms[f"ours {name}"] * 1e3,
            "before_us": None if before is None else ms[f"before {name}"] * 1e3,
            "flashinfer_us": ms[f"FlashInfer {name}"] * 1e3 if name in theirs else None,
            "read_share": logits.nbytes / (ms[f"ours {name}"] * 1e-3) / 1e12 / read_tb_s,
        }
        for name in wanted
    ]


def main(
    spectra: Annotated[
        Path | None, typer.Option(help="Folder of npz files of real logits; without it: Zipf's law.")
    ] = None,
    name: Annotated[str, typer.Option(help="Which of them.")] = "gemma3-270m",
    out: Annotated[Path, typer.Option(help="Folder for from_logits.json.")] = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays per step.")] = 30,
    vocabs: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(map(str, VOCABS)),
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = ",".join(map(str, BATCHES)),
    dtype: Annotated[str, typer.Option(help="Of our logits; FlashInfer gets float32.")] = "float32",
    only: Annotated[str, typer.Option(help="Comma-separated requests.")] = "unfiltered,top-k top-p,top-p,min-p",
    before: Annotated[
        Path | None, typer.Option(help="Another checkout, timed too: git worktree add FOLDER COMMIT.")
    ] = None,
) -> None:
    """Times sampling from logits against FlashInfer."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    console = Console(width=150)
    out.mkdir(parents=True, exist_ok=True)
    held = spectrum(spectra, name)
    source = spectrum_source(spectra, name)
    read = read_bandwidth()
    wanted = only.split(",")
    result: dict[str, Any] = {"machine": machine(), "logits": source, "dtype": dtype, "read_tb_s": read, "rows": []}
    for vocab in map(int, vocabs.split(",")):
        table = Table(
            "B", *wanted, title=f"V={vocab} {dtype}, {source}: us (FlashInfer's over ours; share of read bandwidth)"
        )
        for batch in map(int, batches.split(",")):
            rows = _rows(filled(*held, batch, vocab, getattr(torch, dtype)), wanted, before, rounds, read)
            cells = []
            for row in rows:
                theirs = row["flashinfer_us"]
                ratio = "" if theirs is None else f"{theirs / row['us']:.1f}x, "
                ratio += "" if before is None else f"before {row['before_us']:.1f}, "
                cells.append(f"{row['us']:.1f} ({ratio}{row['read_share']:.0%})")
            table.add_row(str(batch), *cells)
            result["rows"] += rows
            # a run that is cut short keeps what it has
            (out / "from_logits.json").write_text(json.dumps(result, indent=1) + "\n")
        console.print(table)
    console.print(f"read bandwidth {read:.2f} TB/s; above 100 %: from the level-2 cache")
    console.print(result["machine"])


if __name__ == "__main__":
    typer.run(main)
