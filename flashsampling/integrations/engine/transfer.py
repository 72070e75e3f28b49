"""Copies between the host and the device. Nothing here waits for the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .kernel_variants import Rows

PACKED_ROWS = 9  # rows of 32 bits: two for seeds, one for each of seven parameters
_BLOCK = 256  # tokens of a program
INTEGERS = ("top_k", "joint_top_p")  # parameters; the others are float32


def to_device(array: NDArray[Any], device: torch.device, out: Tensor | None = None) -> Tensor:
    """Returns a copy, in ``out`` if given. Pinned memory is used again only once the device has read it."""
    host = torch.from_numpy(array)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True, copy=True) if out is None else out.copy_(host, non_blocking=True)


def pack_rows(seeds: NDArray[np.int64], columns: Sequence[NDArray[Any]], width: int) -> NDArray[np.int32]:
    """Returns (2 + columns, ``width``) int32: seeds, and columns of int32 or float32. Padding repeats the last row."""
    batch = len(seeds)
    packed = np.empty((2 + len(columns), width), np.int32)
    both_halves = packed[:2].reshape(-1).view(np.int64)
    both_halves[:batch], both_halves[batch:] = seeds, seeds[-1]
    for row, column in zip(packed[2:], columns, strict=True):
        row[:batch] = column.view(np.int32)
        row[batch:] = row[batch - 1]
    return packed


def aligned_width(batch: int) -> int:
    """Returns a width at which every column begins at 16 bytes, as kernels are compiled for."""
    return -(-batch // 4) * 4


def unpack_rows(packed: Tensor, batch: int, names: Sequence[str]) -> Rows:
    """Returns the first ``batch`` rows of what ``pack_rows`` made, by name."""
    columns = packed[2:, :batch].unbind(0)
    rows = {name: each if name in INTEGERS else each.view(torch.float32) for name, each in zip(names, columns)}
    return {"seed": packed[:2].view(-1).view(torch.int64)[:batch], **rows}


def sanitize_token_ids(token_ids: Tensor, undefined: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces -1 by 0 in (B,) tokens: an engine looks tokens up, and -1 would end the process for all requests.

    Adds the number of replaced tokens to ``undefined``. Returns copies of the tokens, and ones (B,) int32: how many
    tokens each row has.
    """
    if token_ids.device.type != "cuda":
        lost = token_ids < 0
        undefined += lost.sum()
        return token_ids.masked_fill(lost, 0), torch.ones_like(token_ids, dtype=torch.int32)
    from .kernels import sanitize_kernel

    batch = len(token_ids)
    ids, ones = torch.empty_like(token_ids), torch.empty_like(token_ids, dtype=torch.int32)
    sanitize_kernel[(-(-batch // _BLOCK),)](token_ids, ids, ones, undefined, batch, BLOCK=_BLOCK)
    return ids, ones
