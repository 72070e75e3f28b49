"""Memory that a one-launch reduction finds zero and leaves zero.

eager calls      One buffer per (device, stream), so two streams never share one; it grows when needed.
captured calls   A slice of a per-device arena that is never handed out twice: graphs may be replayed on any stream,
                 concurrently with each other and with eager calls. A graph then holds the kernel and nothing else. If
                 the arena is used up, or does not exist because the first call of all was captured, the buffer comes
                 from the graph's own pool and the graph holds a memset before the kernel.

A thread and a stream of their own allocate the memory that is kept, because the caller may have redirected its
allocations to a pool that must not hold it: ``torch.cuda.use_mem_pool`` does, and
``torch.compile(mode="reduce-overhead")`` in the runs before it records, which then takes memory that outlives them for
a leak. The thread waits until the zeros are written, once per buffer, so no stream and no capture needs to be ordered
after that.

Two users of a buffer share a stream, with two exceptions that are the caller's responsibility: a graph that is
instantiated more than once by hand (its executables also share the tensors that they write, so they cannot run
concurrently), and a stream that was destroyed while a step still ran on it and whose handle CUDA gives to another
(torch destroys no streams). CUDA's per-thread default stream, one handle for many streams, is for one thread only:
torch's allocator also takes it for one stream.
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
_outgrown: list[Tensor] = []  # launches may still use them; together they are no larger than their successors


def zeroed_words(words: int, device: torch.device) -> Tensor:
    """Returns at least ``words`` int64 zeros for one launch on the current stream, which zeroes them again."""
    index = device.index
    if index is None:
        if device.type == "cpu":  # the interpreter
            return torch.zeros(words, dtype=torch.int64, device=device)
        index = torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        return _captured(words, index)
    # torch's own launchers call this private function too; torch.cuda.current_stream() takes ten times as long
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    buffer = _per_stream.get(key)
    if buffer is None or (words > _MIN_WORDS and buffer.numel() < words):
        if words > _MAX_KEPT_WORDS:
            return torch.zeros(words, dtype=torch.int64, device=device)
        with _lock:
            if index not in _arenas:
                _arenas[index] = _kept_zeros(_ARENA_WORDS, index), [0]
            buffer = _per_stream.get(key)  # another thread on this stream may have made one meanwhile
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
