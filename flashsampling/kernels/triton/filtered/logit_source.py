"""Says where the logits of one row lie, and loads them: this GPU's store, or a caller's tensor."""

from typing import NamedTuple

import triton.language as tl

from ..jit import jit
from .order import LOWEST, block_of, count_blocks, first_token_of, lane_offset
from .transforms import aligned_pointer_to, pointer_to


class LogitSource(NamedTuple):
    """The processed logits of one row."""

    logits: object  # a pointer to the row's first logit, of any float dtype
    vocab_size: object  # int32
    by_block: object  # int32; not 0: a block's 32 logits lie side by side, at 32 times its number
    block_keys: object  # a pointer to the row's int32 keys, one a block
    cutoff: object  # int32 key; blocks with a lower key were not stored, and their memory holds anything


class StoredLogits(NamedTuple):
    """The processed logits of all rows in memory, and their block statistics; addresses, or 0."""

    stride: int  # elements from row to row
    vocab_size: int
    by_block: int  # ``LogitSource.by_block``
    keys_at: int  # (B, blocks) int32
    sums_at: int  # (B, blocks) float32; of rows with a top-p of all tokens, and of all rows where records are written
    cutoffs_at: int  # (B,) int32: ``LogitSource.cutoff``


@jit
def source_of(logits, stored, row):
    """Returns the ``LogitSource`` of a row."""
    keys = aligned_pointer_to(stored.keys_at, tl.int32) + row * count_blocks(stored.vocab_size)
    cutoff = tl.load(pointer_to(stored.cutoffs_at, tl.int32) + row, mask=stored.cutoffs_at != 0, other=LOWEST)
    first = logits + row * stored.stride.to(tl.int64)
    return LogitSource(first, stored.vocab_size.to(tl.int32), stored.by_block, keys, cutoff)


@jit
def load_blocks(source, list_ptr, listed, first, BLOCKS: tl.constexpr):
    """Loads listed blocks from place ``first`` of the list on, by 8 threads each. Returns logits in float32, tokens,
    and which exist: tuples of four (BLOCKS, 8)."""
    slot = first + tl.arange(0, BLOCKS)
    block = tl.load(list_ptr + slot, mask=slot < listed, other=0)
    first_token, lane = first_token_of(block)[:, None], tl.arange(0, 8)[None, :]
    start = tl.where(source.by_block != 0, block[:, None] * 32, first_token) + lane
    there = (slot < listed)[:, None]
    logits = ()
    tokens = ()
    live = ()
    for part in tl.static_range(4):
        offset = lane_offset(part)
        token = first_token + lane + offset
        inside = there & (token < source.vocab_size)
        place = start + tl.where(source.by_block != 0, part * 8, offset)
        logits = logits + (tl.load(source.logits + place, mask=inside, other=float("-inf")).to(tl.float32),)
        tokens = tokens + (token,)
        live = live + (inside,)
    return logits, tokens, live


@jit
def load_tokens(source, token, live):
    """Loads the logits of tokens, float32; -inf where not live, or not stored."""
    place = token
    if source.by_block != 0:
        place = (token & ~0x7F) | (token & 0x30) << 1 | (token >> 2) & 0x10 | token & 0xF
    cutoff = source.cutoff + tl.zeros(token.shape, tl.int32)
    asks = live & (cutoff != LOWEST)  # without a cutoff there may be no keys
    stored = tl.load(source.block_keys + block_of(token), mask=asks, other=LOWEST) >= cutoff
    return tl.load(source.logits + place, mask=live & stored, other=float("-inf")).to(tl.float32)


@jit
def load_token(source, token):
    """Loads the logit of one token, a number; -inf where it is no token, or not stored."""
    tokens = token + tl.arange(0, 1)
    x = load_tokens(source, tokens, (tokens >= 0) & (tokens < source.vocab_size))
    return tl.max(x, axis=0)
