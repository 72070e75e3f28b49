"""Compiles the plug-in's kernels for some heads in processes side by side, as a cold start of vLLM does one after the other.

``python -m benchmarks.vllm_prewarm 151936x2048x256 1003x512x64``: tokens, hidden size, rows. Prints seconds of each mix.
"""

import concurrent.futures
import multiprocessing
import os
import sys
import time

import torch

import flashsampling
from flashsampling.integrations.vllm.step import Mix, example_of, in_registers, mixes, no_rows

from .vllm_engine import SETTINGS

os.environ.setdefault("TRITON_CACHE_DIR", SETTINGS["TRITON_CACHE_DIR"])


def _compiled(vocab_size: int, dim: int, batch: int, mix: Mix) -> tuple[str, float]:
    device = torch.device("cuda")
    weight = torch.zeros(-(-vocab_size // 64) * 64, dim, dtype=torch.bfloat16, device=device)
    stride = -(-vocab_size // 4) * 4
    counts = torch.zeros(batch, stride, dtype=torch.int32, device=device)[:, :vocab_size]
    request = example_of(mix, no_rows(batch, device), counts)
    start = time.perf_counter()
    flashsampling.warmup(weight, max_batch_size=batch, vocab_size=vocab_size, **request)  # type: ignore[arg-type]
    return f"{vocab_size}x{dim} {mix}", time.perf_counter() - start


def main(heads: list[str]) -> None:
    """All mixes of these heads, those that compile most first."""
    kinds = mixes(in_registers(torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda")))
    jobs = [(*map(int, head.split("x")), mix) for mix in sorted(kinds, reverse=True) for head in heads]
    context = multiprocessing.get_context("spawn")
    failed = 0
    with concurrent.futures.ProcessPoolExecutor(min(len(jobs), 16), mp_context=context) as pool:
        for done in concurrent.futures.as_completed([pool.submit(_compiled, *job) for job in jobs]):  # type: ignore[arg-type]
            error = done.exception()
            failed += error is not None
            print(*(done.result() if error is None else (repr(error),)), flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
