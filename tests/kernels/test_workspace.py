"""Zeros that launches share, where there is no GPU: who gets which buffer, and what is kept."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from flashsampling import workspace


def test_threads_that_share_a_stream(monkeypatch):
    """Whoever is first makes the buffer; who needs a larger one keeps the smaller, which a launch may still use."""
    made = []

    def kept_zeros(words, index):
        time.sleep(0.05)  # the others come meanwhile
        made.append(torch.zeros(words, dtype=torch.int64))
        return made[-1]

    monkeypatch.setattr(workspace, "_kept_zeros", kept_zeros)
    monkeypatch.setattr(workspace, "_per_stream", {})
    monkeypatch.setattr(workspace, "_arenas", {})
    monkeypatch.setattr(workspace, "_outgrown", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    sizes = [10, 5000, 9000, 20_000, 4096, 4097]
    together = threading.Barrier(len(sizes))

    def ask(words):
        together.wait(timeout=60)
        return workspace.zeroed_words(words, torch.device("cuda", 0))

    with ThreadPoolExecutor(len(sizes)) as pool:
        buffers = list(pool.map(ask, sizes))
    assert all(buffer.numel() >= words for buffer, words in zip(buffers, sizes, strict=True))
    kept = [*workspace._per_stream.values(), *workspace._outgrown]
    arena, *ours = made
    assert arena.numel() == workspace._ARENA_WORDS
    assert sorted(map(id, kept)) == sorted(map(id, ours))  # each once
    assert workspace.zeroed_words(20_000, torch.device("cuda", 0)) is workspace._per_stream[0, 7]
