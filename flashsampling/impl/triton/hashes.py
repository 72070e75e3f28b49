"""What is asked for of a step over several ranks, hashed: ``distributed.message.Hashes.of_request`` by kernels, a launch for
every tensor, of which torch makes four to eight."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...step import Step

if TYPE_CHECKING:
    from ...distributed.message import Hashes

_BLOCK = 1024  # columns at once, a divisor of those that are weighted each by itself
_WARPS = 4


@triton.jit(
    do_not_specialize=["stride", "columns", "again", "field"],
    do_not_specialize_on_alignment=["values_ptr", "out_ptr"],
)
def hash_kernel(
    values_ptr,  # float32, int32 or int64, (B,) or, with COLUMNS, (B, columns)
    stride: tl.int64,  # of rows
    columns: tl.int32,
    factors_ptr,  # (>= 2 * B,) int64
    along_ptr,  # (COLUMNS,) int64
    again: tl.int64,  # the factor of more columns
    field: tl.int64,  # that of the hash
    out_ptr,  # (1,) int64, in and out: the hash is added
    COLUMNS: tl.constexpr,  # that are weighted each by itself; 0: there are none
    BLOCK: tl.constexpr,
):
    """``Hashes._of_tensor``. Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    of_row = values_ptr + row * stride
    if COLUMNS > 0:
        value = tl.zeros((1,), tl.int64)
        for first in range(0, columns, COLUMNS):
            part = tl.zeros((BLOCK,), tl.int64)
            for start in range(first, tl.minimum(first + COLUMNS, columns), BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = _integers(tl.load(of_row + at, mask=at < columns, other=0))
                part += x.to(tl.int64) * tl.load(along_ptr + (at - first), mask=at < columns, other=0)
            value = value * again + tl.sum(part, axis=0)
    else:
        value = _integers(tl.load(of_row + tl.arange(0, 1)))
    low = value.to(tl.int32).to(tl.int64) * tl.load(factors_ptr + 2 * row)
    if value.dtype == tl.int64:
        low += (value >> 32) * tl.load(factors_ptr + 2 * row + 1)
    tl.atomic_add(out_ptr + tl.arange(0, 1), low * field, sem="relaxed")


@triton.jit
def _integers(x):
    if x.dtype == tl.float32:
        return (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    else:
        return x


def of_request(hashes: "Hashes", step: Step) -> Tensor:
    """(1,) int64."""
    if step.drafted is not None:
        return hashes.of_request(step)[None]
    known, tensors = 0, []
    for field, word, value in hashes.asked(step):
        factor = hashes.of_fields[field]
        known += word * factor
        if value is not None:
            tensors.append((value, factor))
    out = torch.full((1,), (known + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=hashes.factors.device)
    for value, factor in tensors:
        if value.dim() == 2 and value.stride(1) != 1:
            value = value.contiguous()
        hash_kernel[(len(value),)](
            value,
            value.stride(0),
            value.shape[1] if value.dim() == 2 else 1,
            hashes.factors,
            hashes.along,
            hashes.again,
            factor,
            out,
            COLUMNS=hashes.columns if value.dim() == 2 else 0,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return out if step.alike is None else out + step.alike * hashes.of_alike
