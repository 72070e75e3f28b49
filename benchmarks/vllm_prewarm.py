"""Compiles the plug-in's kernels for some heads in processes side by side, as a cold start of vLLM does one after the other.

``python -m benchmarks.vllm_prewarm 151936x2048x256 1003x512x64``: tokens, hidden size, rows. Prints seconds of each mix.
"""

import concurrent.futures
import multiprocessing
import sys
import time

import torch

import flashsampling
from flashsampling.integrations.vllm.step import MIXES, Mix, example_of, no_rows


def _compiled(vocab_size: int, dim: int, batch: int, mix: Mix | None) -> tuple[str, float]:
    device = torch.device("cuda")
    weight = torch.zeros(-(-vocab_size // 64) * 64, dim, dtype=torch.bfloat16, device=device)
    stride = -(-vocab_size // 4) * 4
    counts = torch.zeros(batch, stride, dtype=torch.int32, device=device)[:, :vocab_size]
    request = {} if mix is None else example_of(mix, no_rows(batch, device), counts)
    start = time.perf_counter()
    flashsampling.warmup(weight, max_batch_size=batch, vocab_size=vocab_size, **request)  # type: ignore[arg-type]
    return f"{vocab_size}x{dim} {mix}", time.perf_counter() - start


def main(heads: list[str]) -> None:
    """All mixes of these heads."""
    jobs = [(*map(int, head.split("x")), mix) for head in heads for mix in (None, *MIXES)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(len(jobs), 16), mp_context=context) as pool:
        for done in concurrent.futures.as_completed([pool.submit(_compiled, *job) for job in jobs]):  # type: ignore[arg-type]
            print(*done.result(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
