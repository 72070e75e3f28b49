"""What the steps of several engines share, and no engine: who draws, copies to the device, rows without a token, biases."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import ops
from ...inputs import example

FAST = ("cute", "triton")  # implementations that are faster than what engines do
_SETTLED = 256  # rows of a program


class Layers(NamedTuple):
    """Classes of an engine: others of their names' kind do something else."""

    processor: type  # of logits
    embedding: type  # of a head
    unquantized: type  # its ``quant_method``


def fast_implementation(weight: Tensor, engine: str) -> str:
    """Who takes a head's plain steps.

    Raises:
        ValueError: nobody, or only one that is no faster than the engine of that name.
    """
    chosen = ops.choose(example(weight), "").name
    if chosen not in FAST:
        raise ValueError(
            f"for this head and GPU there is only the implementation {chosen!r}, which is no faster than {engine}"
        )
    return chosen


def to_device(array: NDArray[Any], device: torch.device, room: Tensor | None = None) -> Tensor:
    """A copy, in ``room`` if there is one, which the host may forget: pinned memory is used again when the device has read
    it."""
    host = torch.from_numpy(array)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True, copy=True) if room is None else room.copy_(host, non_blocking=True)


def sanitize_token_ids(token_ids: Tensor, undefined: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of (B,) tokens with 0 for -1, of which is counted how many there were: engines look tokens up, and an id of -1
    would end the process for all requests. And how many tokens each row has, one: (B,) int32."""
    if token_ids.device.type != "cuda":
        lost = token_ids < 0
        undefined += lost.sum()
        return token_ids.masked_fill(lost, 0), torch.ones_like(token_ids, dtype=torch.int32)
    from .kernels import sanitize_kernel

    batch = len(token_ids)
    ids, ones = torch.empty_like(token_ids), torch.empty_like(token_ids, dtype=torch.int32)
    sanitize_kernel[(-(-batch // _SETTLED),)](token_ids, ids, ones, undefined, batch, BLOCK=_SETTLED)
    return ids, ones


class Biases(NamedTuple):
    """Of one request."""

    ids: NDArray[np.int32]  # (n,)
    values: NDArray[np.float32]  # (n,)
    stops: NDArray[np.int32]  # (m,), not to be drawn before the sequence has ``least`` tokens
    least: int


def biases_now(biases: Biases | None, length: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and values of a request whose sequence has so many tokens."""
    if biases is None:
        return np.empty(0, np.int32), np.empty(0, np.float32)
    if length >= biases.least or not len(biases.stops):
        return biases.ids, biases.values
    minus_infinity = np.full(len(biases.stops), -np.inf, np.float32)
    return np.concatenate((biases.ids, biases.stops)), np.concatenate((biases.values, minus_infinity))


def bias_of_rows(
    rows: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]], batch: int, count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids (``batch``, ``count``), -1 behind a row's last, and values of that shape, of what ``biases_now`` says of each row;
    ``rows`` may be empty."""
    ids = np.full((batch, count), -1, np.int32)
    values = np.zeros((batch, count), np.float32)
    for row, (some, theirs) in enumerate(rows):
        ids[row, : len(some)], values[row, : len(some)] = some, theirs
    return ids, values
