"""The benchmark of what requests ask for: ``python -m benchmarks.requests --spectra FOLDER``.

A whole step, from hidden states to token ids, with filters, masks, penalties and log-probabilities, on logits as real
models make them, beside our step without any of it, cuBLAS's bare matmul, and cuBLAS with FlashInfer's filters where it
is installed. Interleaved in one run; nothing is timed before its tokens are the oracle's.
"""

import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashsampling import TokenCounts, ops
from flashsampling.backends import BACKENDS
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from tests.kernels.triton.test_filtered import agrees

from .before import compile_together_before, sample_before
from .from_logits import filled, peers, requests, spectrum, spectrum_source
from .timing import Call, interleaved_medians, machine

HEADS = [(151936, 4096), (128256, 8192)]  # V, D
BATCHES = [1, 16, 64, 128, 256]
CHECKED = 8  # rows that are compared with the oracle


def head_of(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Hidden states (B, D) and a weight (V, D), bf16, whose products are these logits but for bf16's rounding."""
    states = torch.linalg.qr(torch.randn(dim, logits.shape[0], device=logits.device)).Q.T.contiguous()
    return states.bfloat16(), (logits.float().T @ states).bfloat16()


def more_requests(batch: int, vocab: int) -> dict[str, SamplingParams]:
    """Returns the kinds of requests that ``from_logits.requests`` does not have."""
    words = torch.randint(-(2**31), 2**31 - 1, (batch, -(-vocab // 32)), dtype=torch.int32, device="cuda")
    state = TokenCounts(batch, vocab, device="cuda")  # of texts of some 300 tokens
    state.counts.copy_(torch.rand(batch, vocab, device="cuda") < 0.002)
    state.recount()
    ids = torch.randint(0, vocab, (batch, 32), dtype=torch.int32, device="cuda")
    penalties = SamplingParams(
        **state.read(batch)._asdict(), repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1
    )
    filters = requests(batch)["top-k top-p"]
    everything = penalties._replace(
        token_mask=words,
        bias_ids=ids,
        bias_values=torch.ones_like(ids, dtype=torch.float32),
        top_k=filters.top_k,
        top_p=filters.top_p,
        min_p=0.02,
    )
    return {
        "mask": SamplingParams(token_mask=words),
        "penalties": penalties,
        "top_logprobs=5": SamplingParams(logprobs=True, top_logprobs=5),
        "everything": everything,
    }


def compile_together(steps: Iterable[SampleInputs], impl: str) -> None:
    """Compiles the Triton kernels that the steps lack, one per core at a time."""
    with BACKENDS[impl].module.compiling(os.cpu_count() or 1):
        for step in steps:
            ops.sample(step, impl)


def _theirs(states: Tensor, weight: Tensor, logits: Tensor, draw: Call) -> Any:
    logits.copy_(torch.mm(states, weight.T))
    return draw()


def _row(
    held: tuple[Tensor, Tensor, int],
    vocab: int,
    dim: int,
    batch: int,
    rounds: int,
    impls: list[str],
    checkout: Path | None,
    rest: Call | None,
) -> dict[str, Any]:
    """The correctness gate, then the times of every step."""
    logits = filled(*held, batch, vocab, torch.float32)
    states, weight = head_of(logits, dim)
    del logits
    ones, zeros = torch.ones(batch, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")
    seed = torch.randint(-(2**63), 2**63 - 1, (batch,), device="cuda")
    plain = SampleInputs(states, weight, ones, seed, zeros, 1, vocab)
    steps: dict[str, Call] = {"cute unfiltered": functools.partial(ops.sample, plain, "cute")}
    if checkout is not None:
        steps["before cute unfiltered"] = functools.partial(sample_before, checkout, plain, "cute")
    wanted = requests(batch) | more_requests(batch, vocab)
    asking = {name: plain._replace(params=params) for name, params in wanted.items() if params is not DEFAULT_PARAMS}
    for impl in impls:
        compile_together(asking.values(), impl)
        if checkout is not None:
            compile_together_before(checkout, asking.values(), impl)
    for name, step in asking.items():
        some = step.part(0, min(batch, CHECKED))
        for impl in impls:
            agrees(ops.sample(some, impl), some, tolerance=2e-3)  # sums of thousands of products
            named = f"{impl} {name}" if len(impls) > 1 else name
            steps[named] = functools.partial(ops.sample, step, impl)
            if checkout is not None:
                agrees(sample_before(checkout, some, impl), some, tolerance=2e-3)
                steps[f"before {named}"] = functools.partial(sample_before, checkout, step, impl)
    out16 = torch.empty(batch, vocab, dtype=torch.bfloat16, device="cuda")
    steps["cuBLAS alone"] = lambda: torch.mm(states, weight.T, out=out16)
    logits = torch.empty(batch, vocab, device="cuda")
    for name, draw in peers(logits).items():
        # a decode step with FlashInfer: 16-bit logits from the LM head, widened, filtered, drawn
        steps[f"FlashInfer {name}"] = functools.partial(_theirs, states, weight, logits, draw)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    next(step for name, step in steps.items() if name.endswith("top-k top-p"))()
    peak = torch.cuda.max_memory_allocated() - before
    ms = interleaved_medians(steps, rounds, offsets=zeros, rest=rest)
    return {"vocab": vocab, "dim": dim, "batch": batch, "ms": ms, "peak_bytes": peak}


def main(
    spectra: Annotated[
        Path | None, typer.Option(help="Folder of npz files of real logits; without it: Zipf's law.")
    ] = None,
    name: Annotated[str, typer.Option(help="Which of them.")] = "gemma3-270m",
    out: Annotated[Path, typer.Option(help="Folder for requests.json.")] = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays per step.")] = 40,
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = ",".join(map(str, BATCHES)),
    implementations: Annotated[str, typer.Option(help="Comma-separated: who does the requests.")] = "cute",
    heads: Annotated[int, typer.Option(min=1, max=len(HEADS), help="How many of the LM heads.")] = len(HEADS),
    checkout: Annotated[
        Path | None, typer.Option("--before", help="Another one, timed too: git worktree add FOLDER COMMIT.")
    ] = None,
    rest: Annotated[
        bool, typer.Option(help="Read 2 GiB before every replay, as a model does: caches hold nothing of ours.")
    ] = False,
) -> None:
    """Times steps with everything that a request may ask for."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    console = Console(width=230)
    out.mkdir(parents=True, exist_ok=True)
    held = spectrum(spectra, name)
    source = spectrum_source(spectra, name)
    result: dict[str, Any] = {"machine": machine(), "logits": source, "rounds": rounds, "rest": rest, "rows": []}
    impls, sizes = implementations.split(","), [int(batch) for batch in batches.split(",")]
    between = functools.partial(torch.sum, torch.ones(1 << 13, 1 << 16, device="cuda"), dim=1) if rest else None
    for vocab, dim in HEADS[:heads]:
        rows = []
        for batch in sizes:
            rows.append(_row(held, vocab, dim, batch, rounds, impls, checkout, between))
            result["rows"] += rows[-1:]
            # a run that is cut short keeps what it has
            (out / "requests.json").write_text(json.dumps(result, indent=1) + "\n")
        table = Table("B", *rows[0]["ms"], "MiB", title=f"V={vocab} D={dim}, {source}: ms (over cute unfiltered)")
        for row in rows:
            plain = row["ms"]["cute unfiltered"]
            cells = [f"{ms:.3f} ({ms / plain:.2f})" for ms in row["ms"].values()]
            table.add_row(str(row["batch"]), *cells, f"{row['peak_bytes'] / 2**20:.0f}")
        console.print(table)
    console.print(result["machine"])


if __name__ == "__main__":
    typer.run(main)
