"""A sparse bias by blocks of 128 tokens, for a kernel that makes logits a block at a time (``impl.cute.processing``).

A row has as many ids as its request names, anywhere in the vocabulary and in any order. Whoever has a block in its hands wants
those of that block: one word says whether there are any, and the only one, as it mostly is, with it. Of a row, in 64-bit words:

    words                  what
    0 .. blocks            of each block: its first entry's token, how many entries it has, and the place of the first; 0: none
    blocks ..              the entries, block after block, and of a block in the row's order, in which they are added

    bits                   of a block's word           of an entry
    0 .. 7                 token, from the block's first one (both)
    7 .. 18                how many                    0
    18 .. 32               place of the first          0
    32 .. 64               value, float32 (both)
"""

import torch
import triton.language as tl
from torch import Tensor

from ...step import Asked
from .constant import Constant
from .jit import jit, only_compiles
from .logits import contiguous_rows, entries_of

BLOCK = Constant(128)
COUNT = Constant(7)  # the first of its bits
PLACE = Constant(18)
_OTHERS = 8  # entries with which all are compared at a time: of 32, 1024 entries would spill
_CLEARED = 1024  # words at a time


@jit
def _blocks_of(ids, index, count, first, last, base, blocks):
    """Tokens of entries from ``base`` on, and the blocks they are in; those of no token in one behind the others."""
    token = tl.load(ids + index, mask=index < count, other=-1)
    there = (index < count) & (token >= first) & (token < last)
    token = tl.where(there, token - base, 0)
    return token, tl.where(there, token // BLOCK, blocks)


@jit(
    do_not_specialize=["count", "ids_stride", "values_stride", "out_stride", "first", "last", "base", "blocks"],
    do_not_specialize_on_alignment=["ids", "values", "out"],
)
def entries_kernel(
    ids,  # (B, count) int32
    ids_stride: tl.int64,
    values,  # (B, count) float32
    values_stride: tl.int64,
    count: tl.int32,
    out,  # (B, blocks + count) int64
    out_stride: tl.int64,
    first: tl.int32,  # ids from here on
    last: tl.int32,  # and below this are of tokens
    base: tl.int32,  # where the first block starts
    blocks: tl.int32,
    ENTRIES: tl.constexpr,  # a power of two, count or more
    OTHERS: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """A program per row."""
    row = tl.program_id(0).to(tl.int64)
    ids += row * ids_stride
    values += row * values_stride
    out += row * out_stride
    for start in range(0, blocks, CLEARED):
        word = start + tl.arange(0, CLEARED)
        tl.store(out + word, tl.zeros((CLEARED,), tl.int64), mask=word < blocks)
    index = tl.arange(0, ENTRIES)
    token, block = _blocks_of(ids, index, count, first, last, base, blocks)
    place = tl.zeros((ENTRIES,), tl.int32)
    earlier = tl.zeros((ENTRIES,), tl.int32)  # of its block
    together = tl.zeros((ENTRIES,), tl.int32)
    for start in range(0, count, OTHERS):
        other = start + tl.arange(0, OTHERS)
        others = _blocks_of(ids, other, count, first, last, base, blocks)[1]
        same = block[:, None] == others[None, :]
        before = same & (other[None, :] < index[:, None])
        place += tl.sum(((others[None, :] < block[:, None]) | before).to(tl.int32), axis=1)
        earlier += tl.sum(before.to(tl.int32), axis=1)
        together += tl.sum(same.to(tl.int32), axis=1)
    there = block < blocks
    value = tl.load(values + index, mask=there, other=0.0).to(tl.int32, bitcast=True).to(tl.int64) << 32
    entry = value | (token % BLOCK).to(tl.int64)
    tl.store(out + blocks + place, entry, mask=there)
    tl.debug_barrier()  # other threads have cleared these words
    of_block = entry | (together << COUNT | place << PLACE).to(tl.int64)
    tl.store(out + block, of_block, mask=there & (earlier == 0))


def by_block(
    asked: Asked,
    first: int,  # of the tokens' ids
    last: int,  # behind them
    base: int,  # a multiple of 128, not above ``first``: where the first block starts
) -> Tensor:
    """(B, blocks + n) int64, in one launch: what the module says of ``asked``'s sparse bias."""
    ids, values = contiguous_rows(asked.bias_ids), contiguous_rows(asked.bias_values)
    assert ids is not None
    assert values is not None
    batch, count = ids.shape
    blocks = -(-(last - base) // BLOCK.value)
    # what is only compiled writes nothing, and a kernel behind it may read this
    allocate = torch.zeros if only_compiles() else torch.empty
    words = allocate((batch, blocks + count), dtype=torch.int64, device=ids.device)
    entries_kernel[(batch,)](
        ids, ids.stride(0), values, values.stride(0), count, words, words.stride(0), first, last, base, blocks,
        ENTRIES=entries_of(asked), OTHERS=_OTHERS, CLEARED=_CLEARED, num_warps=4,
    )  # fmt: skip
    return words
