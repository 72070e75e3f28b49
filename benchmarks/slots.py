"""A step whose requests are in slots of a pool beside the same step by rows: ``python -m benchmarks.slots``.

Both draw the same tokens, which is checked first. GPU time: interleaved replays of CUDA graphs. Host time: eager calls
of a small LM head, so that the host is what they wait for.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashsampling import LMHeadSampler, TokenCounts
from flashsampling.backends import BACKENDS

from .timing import Call, host_microseconds, interleaved_medians, machine

VOCAB, DIM, SMALL_VOCAB = 151936, 4096, 4096
MIXES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-p": {"top_p": 0.9},
    "top-k, top-p": {"top_k": 50, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1},
}


def steps_of(weight: Tensor, batch: int, impl: str) -> dict[str, Call]:
    """Returns every mix by rows and by slots, which are in another order than the rows.

    Raises:
        AssertionError: their tokens differ.
    """
    states = torch.randn(batch, weight.shape[1], dtype=weight.dtype, device="cuda")
    slots = torch.randperm(batch, device="cuda")
    steps: dict[str, Call] = {}
    for name, mix in MIXES.items():
        by_rows, by_slots = (LMHeadSampler(weight, max_batch_size=batch, seed=1, impl=impl) for _ in range(2))
        seeds = by_rows.seeds.clone()
        by_slots.pool.admit(list(range(batch)), seed=[0] * batch, prompt_token_ids=[[]] * batch, **mix)
        by_slots.seeds[slots] = seeds
        given: dict[str, Any] = {
            key: torch.full((batch,), value, device="cuda", dtype=torch.int32 if key == "top_k" else torch.float32)
            for key, value in mix.items()
        }
        if name == "penalties":
            given["token_counts"] = TokenCounts(batch, len(weight), "cuda")

        def rows(sampler: LMHeadSampler = by_rows, given: dict[str, Any] = given) -> Tensor:
            return sampler(states, **given).token_ids

        def pooled(sampler: LMHeadSampler = by_slots) -> Tensor:
            return sampler(states, slots=slots).token_ids

        for _ in range(3):
            assert torch.equal(rows(), pooled()), (name, batch)
        steps |= {f"{name}, rows": rows, f"{name}, slots": pooled}
    return steps


def main(
    out: Annotated[Path, typer.Option(help="Folder for slots.json.")] = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays per step.")] = 31,
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = "1,16,64,256",
    impl: Annotated[str, typer.Option(help="The backend.")] = "cute",
) -> None:
    """Times steps by rows and by slots."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    missing = BACKENDS[impl].missing
    if missing:
        raise typer.BadParameter(missing)
    torch.manual_seed(0)
    weight = 0.03 * torch.randn(VOCAB, DIM, device="cuda").bfloat16()
    result: dict[str, Any] = {"machine": machine(), "vocab": VOCAB, "dim": DIM, "impl": impl, "rows": []}
    table = Table("B", "mix", "ms, rows", "slots / rows", "host us, rows", "slots - rows", title=f"V={VOCAB} D={DIM}")
    for batch in map(int, batches.split(",")):
        ms = interleaved_medians(steps_of(weight, batch, impl), rounds)
        small = steps_of(weight[:SMALL_VOCAB, :64].contiguous(), batch, impl)
        us = {name: host_microseconds(step) for name, step in small.items()}
        result["rows"].append({"batch": batch, "ms": ms, "host_us": us})
        for name in MIXES:
            rows, slots = f"{name}, rows", f"{name}, slots"
            ratio, extra = ms[slots] / ms[rows], us[slots] - us[rows]
            table.add_row(str(batch), name, f"{ms[rows]:.4f}", f"{ratio:.3f}", f"{us[rows]:.1f}", f"{extra:+.1f}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "slots.json").write_text(json.dumps(result, indent=1) + "\n")
    console = Console(width=160)
    console.print(table)
    console.print(result["machine"])


if __name__ == "__main__":
    typer.run(main)
