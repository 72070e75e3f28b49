"""The streaming implementation on a CPU beside plain torch, on the demo model's head: ``python -m
benchmarks.sample_cpu``."""

import functools
import statistics
import time

import torch
import typer
from rich.console import Console
from rich.table import Table

from flashsampling import sample
from flashsampling.reference.streaming import chunk_tokens
from tests.problems import assert_agreement, make_problem

from .timing import Call

VOCAB, DIM = 49152, 576  # SmolLM2-135M


def _plain(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(torch.softmax((states @ weight.T).float() / 0.8, dim=-1), 1)


def _interleaved_ms(steps: dict[str, Call], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[2:]) * 1e3 for name, values in times.items()}


def main(rounds: int = 25) -> None:
    """Medians of interleaved rounds, after the tokens were compared with the oracle's."""
    table = Table("dtype", "B", "matmul + softmax + multinomial, ms", "streaming, ms", "ratio", "extra memory, scores")
    for dtype in (torch.float32, torch.bfloat16):
        for batch in (1, 2, 4, 8):
            problem = make_problem(batch, VOCAB, DIM, torch.device("cpu"), dtype)
            assert_agreement(problem.sample("streaming"), problem)
            states, weight = problem.hidden_states, problem.weight
            ours = functools.partial(sample, states, weight, temperature=0.8, seed=problem.seed, impl="streaming")
            times = _interleaved_ms({"plain": functools.partial(_plain, states, weight), "ours": ours}, rounds)
            ratio = times["ours"] / times["plain"]
            memory = f"{batch} x {chunk_tokens(batch, VOCAB, 'cpu')} of {VOCAB}"
            table.add_row(
                str(dtype), str(batch), f"{times['plain']:.2f}", f"{times['ours']:.2f}", f"{ratio:.2f}", memory
            )
    console = Console(width=130)
    console.print(table)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    typer.run(main)
