"""Hashes the parameters of a step over several ranks: ``tensor_parallel.message.Hashes.of_request`` in kernels, one
launch per tensor where torch needs four to eight."""

from typing import TYPE_CHECKING

import torch
import triton.language as tl
from torch import Tensor

from ....inputs import SampleInputs
from ....sampling_params import DEFAULT_PARAMS, ROW_FIELDS
from ..jit import jit

if TYPE_CHECKING:
    from ....tensor_parallel.message import Hashes

_WARPS = 8


@jit
def _integers(of_row, at, halves, live):
    """Loads the values at these places as int64, 0 where there is none."""
    low = tl.load(of_row + at * halves, mask=live, other=0)
    if low.dtype == tl.float32:
        return (low + 0.0).to(tl.int32, bitcast=True).to(tl.int64)  # -0.0 is 0.0
    else:
        high = tl.load(of_row + (at * halves + 1), mask=live & (tl.broadcast_to(halves, live.shape) == 2), other=0)
        return tl.where(halves == 2, (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF), low.to(tl.int64))


@jit(
    do_not_specialize=["stride", "columns", "halves", "again", "field"],
    do_not_specialize_on_alignment=["values_ptr", "out_ptr"],
)
def hash_kernel(
    values_ptr,  # float32, int32, or int64 by halves: (B,) or, with COLUMNS, (B, columns)
    stride: tl.int64,  # of rows, in words of 32 bits
    columns: tl.int32,
    halves: tl.int32,  # words of a value: 2 of int64; an int32 is hashed as the int64 of that number
    factors_ptr,  # (>= 2 * B,) int64
    along_ptr,  # (COLUMNS,) int64
    again: tl.int64,  # the factor of more columns
    field: tl.int64,  # that of the hash
    out_ptr,  # (1,) int64, in and out: the hash is added
    COLUMNS: tl.constexpr,  # that are weighted each by itself, a power of two; 0: there are none
):
    """Adds the hash of a tensor, as ``Hashes._of_tensor`` computes it. Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    of_row = values_ptr + row * stride
    if COLUMNS > 0:
        value = tl.zeros((1,), tl.int64)
        column = tl.arange(0, COLUMNS)
        along = tl.load(along_ptr + column)
        for first in range(0, columns, COLUMNS):
            x = _integers(of_row, first + column, halves, first + column < columns)
            value = value * again + tl.sum(x * along, axis=0)
    else:
        value = _integers(of_row, tl.arange(0, 1), halves, tl.arange(0, 1) == 0)
    hashed = value.to(tl.int32).to(tl.int64) * tl.load(factors_ptr + 2 * row)
    upper = (value >> 32) * tl.load(factors_ptr + 2 * row + 1)
    if COLUMNS > 0 or values_ptr.dtype.element_ty != tl.float32:  # of a float's bits there is no upper half
        hashed += upper
    tl.atomic_add(out_ptr + tl.arange(0, 1), hashed * field, sem="relaxed")


def of_request(hashes: "Hashes", step: SampleInputs) -> Tensor:
    """Returns the hash of a step's parameters, (1,) int64."""
    if step.drafted is not None:
        return hashes.of_request(step)[None]
    known, out = _hashed(hashes, step)
    return torch.full((1,), known, dtype=torch.int64, device=hashes.factors.device) if out is None else out


def besides_rows(hashes: "Hashes", step: SampleInputs) -> tuple[int, Tensor | None]:
    """Hashes all but the numbers of rows (``ROW_FIELDS``). Returns the host's part, and (1,) int64 to be added."""
    if step.drafted is not None:
        return 0, hashes.of_request(step)[None]
    defaults = {name: getattr(DEFAULT_PARAMS, name) for name in ROW_FIELDS}
    return _hashed(hashes, step._replace(params=step.params._replace(**defaults)))


def _hashed(hashes: "Hashes", step: SampleInputs) -> tuple[int, Tensor | None]:
    """Returns the hash: of the host alone, or 0 and the hash, (1,) int64."""
    known, tensors = 0, []
    for field, word, value in hashes.params(step):
        factor = hashes.of_fields[field]
        known += word * factor
        if value is not None:
            tensors.append((value, factor))
    known = (known + 2**63) % 2**64 - 2**63
    if not tensors and step.draft_hash is None:
        return known, None
    out = torch.full((1,), known, dtype=torch.int64, device=hashes.factors.device)
    for value, factor in tensors:
        if value.stride(-1) != 1:  # of one element too, which else is no two halves
            value = value.clone(memory_format=torch.contiguous_format)
        halves = value.element_size() // 4
        words = value if value.is_floating_point() else value.view(torch.int32)
        stride, columns, of_along = (
            (words.stride(0), value.shape[1], hashes.columns) if value.dim() == 2 else (halves, 1, 0)
        )
        hash_kernel[(len(value),)](
            words, stride, columns, halves, hashes.factors, hashes.along, hashes.again, factor, out, COLUMNS=of_along,
            num_warps=_WARPS,
        )  # fmt: skip
    return 0, out if step.draft_hash is None else out + step.draft_hash * hashes.of_draft_hash
