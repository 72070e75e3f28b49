"""Reads the parameters of a batch's requests from a ``request_pool.RequestPool`` in one small launch."""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from .jit import jit

_SLOTS, _TILE = 256, 1024


class Tables(NamedTuple):
    """Addresses of a pool's tensors, and of a batch's."""

    seeds_at: int  # (S,) int64
    offsets_at: int  # (S,) int64
    words_at: int  # (W, S) int32: flags, temperature, ...
    matrices_at: int  # (S, any) int32
    stride: int  # of its rows
    num_slots: int  # S
    longs_at: int  # (3, B) int64: row, seed and offset
    batch_words_at: int  # (W, B) int32
    batch_matrices_at: int  # (B, width) int32
    width: int  # 0: none
    inactive: int  # flags of parameters that the step does not take
    advance: int  # added to offsets


@jit
def _at(address, TYPE: tl.constexpr):
    return address.to(tl.pointer_type(TYPE))


@jit(structs={"tables": Tables}, do_not_specialize_on_alignment=["slots"])
def read_slots_kernel(
    slots,  # (B,) int32 or int64
    tables,
    WORDS: tl.constexpr,  # W
    ROOM: tl.constexpr,  # a power of two, W or more
    SLOTS: tl.constexpr,  # compared at once
    TILE: tl.constexpr,  # words of a matrix that are copied at once
):
    """Reads a row's request per program and advances its offset. Grid: (B,).

    A row has no token, by a temperature of NaN, if its slot is out of range, free, has a parameter that the step does
    not take, or occurs in an earlier row.
    """
    row, batch, num_slots = tl.program_id(0).to(tl.int64), tl.num_programs(0), tables.num_slots
    slot = tl.load(slots + row).to(tl.int64)
    there = (slot >= 0) & (slot < num_slots)
    for first in range(0, row, SLOTS):
        index = first + tl.arange(0, SLOTS)
        others = tl.load(slots + index, mask=index < row, other=-1).to(tl.int64)
        there = there & (tl.max((others == slot).to(tl.int32), axis=0) == 0)
    slot = tl.where(there, slot, 0)
    words, batch_words = _at(tables.words_at, tl.int32), _at(tables.batch_words_at, tl.int32)
    there = there & ((tl.load(words + slot) & tables.inactive.to(tl.int32)) == 0)
    offsets, longs = _at(tables.offsets_at, tl.int64) + slot, _at(tables.longs_at, tl.int64) + row
    offset = tl.load(offsets)
    tl.store(offsets, offset + tables.advance, mask=there & (tables.advance != 0))
    tl.store(longs, slot)
    # nothing of slot 0, whose own row may advance it now: ranks compare seeds and offsets
    tl.store(longs + batch, tl.where(there, tl.load(_at(tables.seeds_at, tl.int64) + slot), 0))
    tl.store(longs + 2 * batch, tl.where(there, offset, 0))
    number = tl.arange(0, ROOM)
    value = tl.load(words + number * num_slots + slot, mask=number < WORDS)
    value = tl.where((number == 1) & (there == 0), 0x7FC00000, value)
    tl.store(batch_words + number * batch + row, value, mask=number < WORDS)
    for first in range(0, tables.width, TILE):
        column = first + tl.arange(0, TILE)
        source = _at(tables.matrices_at, tl.int32) + slot * tables.stride + column
        target = _at(tables.batch_matrices_at, tl.int32) + row * tables.width + column
        tl.store(target, tl.load(source, mask=column < tables.width), mask=column < tables.width)


def read_slots(
    slots: Tensor,  # (B,) int32 or int64, B above 0
    seeds: Tensor,  # (S,) int64
    offsets: Tensor,  # (S,) int64, changed in place
    words: Tensor,  # (W, S) int32
    matrices: Tensor | None,  # (S, any) int32
    width: int,
    inactive: int,
    advance: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Returns rows, seeds and offsets (B,), words (W, B) and the first ``width`` columns of matrices, (B, width)."""
    batch, count, device = slots.shape[0], words.shape[0], slots.device
    longs = torch.empty((3, batch), dtype=torch.int64, device=device)
    batch_words = torch.empty((count, batch), dtype=torch.int32, device=device)
    batch_matrices = torch.empty((batch, width), dtype=torch.int32, device=device) if width else None
    tables = Tables(
        seeds.data_ptr(), offsets.data_ptr(), words.data_ptr(), 0 if matrices is None else matrices.data_ptr(),
        0 if matrices is None else matrices.stride(0), words.shape[1], longs.data_ptr(), batch_words.data_ptr(),
        0 if batch_matrices is None else batch_matrices.data_ptr(), width, inactive, advance,
    )  # fmt: skip
    with torch.cuda.device_of(slots):
        read_slots_kernel[(batch,)](
            slots, tables, WORDS=count, ROOM=1 << (count - 1).bit_length(), SLOTS=_SLOTS, TILE=_TILE, num_warps=4
        )
    rows, batch_seeds, batch_offsets = longs.unbind()
    return rows, batch_seeds, batch_offsets, batch_words, batch_matrices
