"""The benchmark of the filters that are hardest to make: ``python -m benchmarks.hard_requests --spectra FOLDER``.

As ``benchmarks.requests``: nuclei of thousands of tokens or of most of the vocabulary, rows of equal logits, and every
row another mix of filters; each beside our step of the same head without filters, and cuBLAS with FlashInfer's function
for them.
"""

import functools
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashsampling import ops
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams
from tests.kernels.triton.test_filtered import agrees

from .from_logits import TOP_K, TOP_P, filled, spectrum, spectrum_source
from .requests import CHECKED, HEADS, compile_together, head_of
from .timing import Call, interleaved_medians, machine


def hard_requests(batch: int, vocab: int) -> dict[str, tuple[str, SamplingParams]]:
    """Returns (LM head, sampling parameters) of each hard request, one value per row."""
    generator = torch.Generator().manual_seed(0)

    def rows(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(0, len(values), (batch,), generator=generator)].cuda()

    counts = functools.partial(rows, dtype=torch.int64)
    mixed = SamplingParams(
        top_k=counts(vocab, 1, 20, 50, 1000), top_p=rows(1.0, 0.5, 0.9, 0.95, 0.999), min_p=rows(0.0, 0.0, 0.02, 0.1)
    )
    return {
        "top-k 1000, top-p": ("spectrum", SamplingParams(top_k=counts(1000), top_p=rows(TOP_P))),
        "top-k 20, top-p 0.95 of all": ("spectrum", SamplingParams(top_k=counts(20), top_p=rows(0.95), joint_top_p=1)),
        "top-p 0.999": ("spectrum", SamplingParams(top_p=rows(0.999))),
        "every row another mix": ("spectrum", mixed),
        "flat, top-k, top-p": ("flat", SamplingParams(top_k=counts(TOP_K), top_p=rows(TOP_P))),
        "flat, top-p": ("flat", SamplingParams(top_p=rows(TOP_P))),
        "equal, top-p": ("equal", SamplingParams(top_p=rows(TOP_P))),
    }


def _flashinfer(states: Tensor, weight: Tensor, logits: Tensor, params: SamplingParams) -> Call:
    """16-bit logits from the LM head, widened, filtered, drawn. A min-p beside the others it does not know."""
    sampling = importlib.import_module("flashinfer.sampling")
    top_k = params.top_k.int() if isinstance(params.top_k, Tensor) else None

    def call() -> Any:
        logits.copy_(torch.mm(states, weight.T))
        if top_k is None:
            return sampling.top_p_sampling_from_probs(sampling.softmax(logits), params.top_p)
        order = "joint" if params.may_be_joint() else "top_k_first"
        return sampling.top_k_top_p_sampling_from_logits(logits, top_k, params.top_p, filter_apply_order=order)

    return call


def _row(held: tuple[Tensor, Tensor, int], vocab: int, dim: int, batch: int, rounds: int) -> dict[str, Any]:
    """The correctness gate, then the times of every step."""
    logits = filled(*held, batch, vocab, torch.float32)
    heads = {
        "spectrum": head_of(logits, dim),
        "flat": head_of(0.1 * torch.randn_like(logits), dim),
        "equal": (
            torch.ones(batch, dim).bfloat16().cuda(),
            torch.zeros(vocab, dim, dtype=torch.bfloat16, device="cuda"),
        ),
    }
    ones, zeros = torch.ones(batch, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")
    seed = torch.randint(-(2**63), 2**63 - 1, (batch,), device="cuda")
    plain = {
        name: SampleInputs(states, weight, ones, seed, zeros, 1, vocab) for name, (states, weight) in heads.items()
    }
    steps: dict[str, Call] = {
        f"{name}, unfiltered": functools.partial(ops.sample, step, "cute") for name, step in plain.items()
    }
    wanted = hard_requests(batch, vocab)
    asking = {name: plain[head]._replace(params=params) for name, (head, params) in wanted.items()}
    compile_together(asking.values(), "cute")
    for name, step in asking.items():
        some = step.part(0, min(batch, CHECKED))
        agrees(ops.sample(some, "cute"), some, tolerance=2e-3)  # sums of thousands of products
        steps[name] = functools.partial(ops.sample, step, "cute")
        if importlib.util.find_spec("flashinfer") is not None:
            steps[f"FlashInfer {name}"] = _flashinfer(*heads[wanted[name][0]], logits, step.params)
    return {"vocab": vocab, "dim": dim, "batch": batch, "ms": interleaved_medians(steps, rounds, offsets=zeros)}


def main(
    spectra: Annotated[
        Path | None, typer.Option(help="Folder of npz files of real logits; without it: Zipf's law.")
    ] = None,
    name: Annotated[str, typer.Option(help="Which of them.")] = "gemma3-270m",
    out: Annotated[Path, typer.Option(help="Folder for hard_requests.json.")] = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays per step.")] = 15,
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = "1,64,256",
    heads: Annotated[
        int, typer.Option(min=1, max=len(HEADS), help="How many of the LM heads of benchmarks.requests.")
    ] = 1,
) -> None:
    """Times the steps whose filters keep most, or of every row something else."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    console = Console(width=200)
    out.mkdir(parents=True, exist_ok=True)
    source = spectrum_source(spectra, name)
    result: dict[str, Any] = {"machine": machine(), "logits": source, "rounds": rounds, "rows": []}
    for vocab, dim in HEADS[:heads]:
        rows = []
        for batch in map(int, batches.split(",")):
            rows.append(_row(spectrum(spectra, name), vocab, dim, batch, rounds))
            result["rows"] += rows[-1:]
            # a run that is cut short keeps what it has
            (out / "hard_requests.json").write_text(json.dumps(result, indent=1) + "\n")
        table = Table("step", *(f"B = {row['batch']}" for row in rows), title=f"V={vocab} D={dim}, {source}: ms")
        for step in rows[0]["ms"]:
            table.add_row(step, *(f"{row['ms'][step]:.3f}" for row in rows))
        console.print(table)
    console.print(result["machine"])


if __name__ == "__main__":
    typer.run(main)
