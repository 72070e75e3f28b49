"""Memory that a one-launch reduction needs to find zero, and leaves zero.

eager calls      one buffer per (device, stream), so two streams never share one; it grows when it must.
captured calls   a slice of a per-device arena that is never handed out twice: graphs may be replayed on any stream, at
                 the same time as each other and as eager calls. A graph so holds the kernel and nothing else. When the
                 arena is spent, or was never made because the first call of all was captured, the buffer comes from
                 the graph's own pool and the graph holds a memset before the kernel.
"""

import threading

import torch
from torch import Tensor

_ARENA_WORDS = 1 << 18  # 2 MiB: about 500 captured calls of batch 256
_MIN_WORDS = 1 << 12
_MAX_KEPT_WORDS = 1 << 22

_CPU = torch.device("cpu"), torch.device("cpu", 0)  # comparing is cheaper than asking for the type

_lock = threading.Lock()
_per_stream: dict[tuple[int, int], Tensor] = {}
_arenas: dict[int, tuple[Tensor, list[int]]] = {}


def zeroed_words(words: int, device: torch.device) -> Tensor:
    """At least ``words`` int64 zeros for one launch on the device's current stream; the launch zeroes them again."""
    if device in _CPU:  # the interpreter
        return torch.zeros(words, dtype=torch.int64, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        return _captured(words, index)
    if words > _MAX_KEPT_WORDS:
        return torch.zeros(words, dtype=torch.int64, device=device)
    key = index, torch._C._cuda_getCurrentRawStream(index)  # as torch's own launchers ask for it: a tenth of current_stream()
    buffer = _per_stream.get(key)
    if buffer is None or buffer.numel() < words:
        buffer = torch.zeros(max(_MIN_WORDS, 1 << (words - 1).bit_length()), dtype=torch.int64, device=device)
        with _lock:
            _per_stream[key] = buffer
            if index not in _arenas:
                _arenas[index] = torch.zeros(_ARENA_WORDS, dtype=torch.int64, device=device), [0]
    return buffer


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
