"""A sparse bias by blocks of 128 tokens, for a kernel that makes logits a block at a time
(``kernels.hopper.logit_transforms``).

A row has as many ids as its request names, anywhere in the vocabulary and in any order. Whoever has a block in its
hands wants those of that block: one word says whether there are any, and the only one, as it mostly is, with it. Of a
row, in 64-bit words:

    words                  what
    0 .. blocks            of each block: its first entry's token, how many entries it has, and the place of the first;
                           0: none
    blocks ..              the entries by their tokens, and of one token in the row's order, in which they are added

    bits                   of a block's word                    of an entry
    0 .. 7                 token, from the block's first one    token, from the first block's first one, up to bit 32
    7 .. 18                how many
    18 .. 32               place of the first
    32 .. 64               value, float32                       value
"""

import torch
import triton.language as tl
from torch import Tensor

from ....sampling_params import SamplingParams
from ..fused.config import next_power_of_2
from ..jit import jit, only_compiles
from .dispatch import contiguous_rows

_TOKEN_BITS = tl.constexpr(7)
_COUNT = tl.constexpr(7)  # the first of its bits
_PLACE = tl.constexpr(18)
_NO_TOKEN = tl.constexpr(2**31 - 1)  # above all
_CLEARED = 1024  # words at a time


@jit(
    do_not_specialize=["count", "ids_stride", "values_stride", "out_stride", "first", "last", "base", "blocks"],
    do_not_specialize_on_alignment=["ids", "values", "out"],
)
def sparse_bias_kernel(
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
    LOG: tl.constexpr,  # of it, to the base 2
    CLEARED: tl.constexpr,
):
    """A program per row."""
    row = tl.program_id(0).to(tl.int64)
    out += row * out_stride
    for start in range(0, blocks, CLEARED):
        word = start + tl.arange(0, CLEARED)
        tl.store(out + word, tl.zeros((CLEARED,), tl.int64), mask=word < blocks)
    place = tl.arange(0, ENTRIES)
    id = tl.load(ids + row * ids_stride + place, mask=place < count, other=-1)
    there = (place < count) & (id >= first) & (id < last)
    token = tl.where(there, id - base, _NO_TOKEN).to(tl.int64)
    in_order = tl.sort(token * ENTRIES + place)
    token, index = (in_order // ENTRIES).to(tl.int32), (in_order % ENTRIES).to(tl.int32)
    there = token != _NO_TOKEN
    value = tl.load(values + row * values_stride + index, mask=there, other=0.0)
    high = value.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.store(out + blocks + place, high | token.to(tl.int64), mask=there)
    tl.debug_barrier()  # other threads have cleared the words, and stored the entries beside one's own
    tokens = (out + blocks).to(tl.pointer_type(tl.int32))  # every second word of 32 bits
    block = token >> _TOKEN_BITS
    before = tl.load(tokens + 2 * (place - 1), mask=there & (place > 0), other=-1)
    until = place  # the last entry of the block
    known = tl.sum(there.to(tl.int32), axis=0)
    for step in tl.static_range(LOG):
        further = until + (ENTRIES >> (step + 1))
        after = tl.load(tokens + 2 * further, mask=there & (further < known), other=-1)
        until = tl.where(after >> _TOKEN_BITS == block, further, until)
    of_block = token - (block << _TOKEN_BITS) | until + 1 - place << _COUNT | place << _PLACE
    is_first = there & (before >> _TOKEN_BITS != block)
    tl.store(out + block, high | of_block.to(tl.int64), mask=is_first)


def sort_by_tile(
    params: SamplingParams,
    first: int,  # of the tokens' ids
    last: int,  # behind them
    base: int,  # a multiple of 128, not above ``first``: where the first block starts
) -> Tensor:
    """(B, blocks + n) int64, in one launch: what the module says of ``params``'s sparse bias."""
    ids, values = contiguous_rows(params.bias_ids), contiguous_rows(params.bias_values)
    assert ids is not None
    assert values is not None
    batch, count = ids.shape
    blocks = -(-(last - base) // 2**_TOKEN_BITS.value)
    room = max(next_power_of_2(count), 2)
    # what is only compiled writes nothing, and a kernel behind it may read this
    allocate = torch.zeros if only_compiles() else torch.empty
    words = allocate((batch, blocks + count), dtype=torch.int64, device=ids.device)
    sparse_bias_kernel[(batch,)](
        ids, ids.stride(0), values, values.stride(0), count, words, words.stride(0), first, last, base, blocks,
        ENTRIES=room, LOG=room.bit_length() - 1, CLEARED=_CLEARED, num_warps=4,
    )  # fmt: skip
    return words
