"""Memory that a one-launch reduction needs to find zero, and leaves zero.

eager calls      one buffer per (device, stream), so two streams never share one; it grows when it must.
captured calls   a slice of a per-device arena that is never handed out twice: graphs may be replayed on any stream, at
                 the same time as each other and as eager calls. A graph so holds the kernel and nothing else. When the
                 arena is spent, or was never made because the first call of all was captured, the buffer comes from
                 the graph's own pool and the graph holds a memset before the kernel.

What is kept is allocated by a thread and a stream of its own, since whoever calls may have sent its allocations to a pool that
is not ours to keep: ``torch.cuda.use_mem_pool`` does, and ``torch.compile(mode="reduce-overhead")`` in the runs before it
records, which then takes for a leak what outlives them. The thread waits until the zeros are written, once per buffer, so no
stream and no capture need be ordered after that.

Who shares a buffer shares a stream, with two exceptions that are the caller's: a graph instantiated more than once by hand (its
executables share the tensors that they write as well, and so cannot run at the same time), and a stream that was destroyed
while a step still ran on it and whose handle CUDA gives to another (torch destroys none of its own). CUDA's per-thread default
stream, one handle for as many streams as there are threads, is for one thread: torch's allocator takes it for one stream too.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_ARENA_WORDS = 1 << 18  # 2 MiB: about 500 captured calls of batch 256, 330 of such with filters
_MIN_WORDS = 1 << 12
_MAX_KEPT_WORDS = 1 << 22

_lock = threading.Lock()
_per_stream: dict[tuple[int, int], Tensor] = {}
_arenas: dict[int, tuple[Tensor, list[int]]] = {}
_outgrown: list[Tensor] = []  # a launch may still use them; together they are no larger than what took their place


def zeroed_words(words: int, device: torch.device) -> Tensor:
    """At least ``words`` int64 zeros for one launch on the device's current stream; the launch zeroes them again."""
    index = device.index
    if index is None:  # as of the CPU's tensors, and of no GPU's
        if device.type == "cpu":  # the interpreter
            return torch.zeros(words, dtype=torch.int64, device=device)
        index = torch.cuda.current_device()
    if torch._C._cuda_isCurrentStreamCapturing():  # torch.cuda.is_current_stream_capturing() less a call
        return _captured(words, index)
    key = (
        index,
        torch._C._cuda_getCurrentRawStream(index),
    )  # as torch's own launchers ask for it: a tenth of current_stream()
    buffer = _per_stream.get(key)
    if buffer is None or (words > _MIN_WORDS and buffer.numel() < words):
        if words > _MAX_KEPT_WORDS:
            return torch.zeros(words, dtype=torch.int64, device=device)
        with _lock:
            if index not in _arenas:
                _arenas[index] = _kept_zeros(_ARENA_WORDS, index), [0]
            buffer = _per_stream.get(key)  # of a stream that threads share another may have made one meanwhile
            if buffer is None or buffer.numel() < words:
                if buffer is not None:
                    _outgrown.append(buffer)
                buffer = _per_stream[key] = _kept_zeros(max(_MIN_WORDS, 1 << (words - 1).bit_length()), index)
    return buffer


def _kept_zeros(words: int, index: int) -> Tensor:
    def allocate() -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream(index)):
            zeros = torch.zeros(words, dtype=torch.int64, device=torch.device("cuda", index))
            written = torch.cuda.Event()
            written.record()
            written.synchronize()
        return zeros

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate).result()


def _captured(words: int, index: int) -> Tensor:
    words = -(-words // 16) * 16  # slices start on a 128-byte line
    with _lock:
        if index in _arenas:
            arena, used = _arenas[index]
            if used[0] + words <= arena.numel():
                start = used[0]
                used[0] += words
                return arena[start : start + words]
    return torch.zeros(words, dtype=torch.int64, device=torch.device("cuda", index))
