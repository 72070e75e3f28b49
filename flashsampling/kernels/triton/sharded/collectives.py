"""Messages of ``tensor_parallel/filtered_sampling`` through the peers' memory, one launch each.

``all_gather`` is a step of the protocol in ``flashsampling.exchange_protocol``, with words in the place of packed
winners: number, tags, time-out and verdict are those of a sampling kernel's exchange, so a rank that draws plainly
meanwhile is found out.

``push_logits`` stores rows of a shard's logits into the memory of the ranks that draw them, without waiting. An
``all_gather`` follows, and orders it:

    edge                                          order
    the stores -> the owner's reads               the launch of the stores ends before that of the messages begins (one
                                                  stream); a message's release at system scope -> the owner's acquire,
                                                  whose launch ends before those that read begin
    the owner's reads -> the stores of a later    the owner sends its results after its reads; a rank stores again once
    step                                          it has received all ranks' results

A rank whose group is closed stores nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....inputs import SampleInputs
from ..jit import jit
from .peer_exchange import (
    active_ranks,
    conclude,
    details_and_tags,
    is_closed,
    of_request,
    receive_words,
    send,
    shared_address,
    start_clock,
    steps_taken,
)

_BLOCK = 256  # words of a program
_PUSHED = 2048  # logits of a program
_WARPS = 4


@jit
def row_of_word(index, batch, num_samples):
    """The row whose tags a word has: of the draw that a plain step has in its place, else any. No product overflows."""
    row = index // num_samples
    return tl.where(row < batch, row, index % batch)


@jit(
    do_not_specialize=["table", "batch", "num_samples", "count", "blocks"],
    # a kernel of another alignment would be compiled, and loaded, while other ranks wait for this one
    do_not_specialize_on_alignment=[
        "words_ptr", "out_ptr", "failed_ptr", "request_ptr", "temperatures_ptr", "seeds_ptr", "offsets_ptr",
    ],
)  # fmt: skip
def all_gather_kernel(
    table: tl.int64,  # address of the exchange's table
    words_ptr,  # (count,) int64
    out_ptr,  # (ranks, count) int64, out
    failed_ptr,  # (1,) int64, out: not 0 if the group has failed; else left alone
    request_ptr,  # (1,) int64: a hash of what is asked for
    temperatures_ptr,  # (B,) float32
    seeds_ptr,  # (B,) int64
    offsets_ptr,  # (B,) int64
    batch: tl.int32,
    num_samples: tl.int32,
    count: tl.int32,  # at least 1, and at most the table's capacity
    blocks: tl.int32,
    BLOCK: tl.constexpr,
):
    """Grid: (blocks,). A word has the tags of a row: where a plain step has a draw of some row, of that row."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = index < count
    row = row_of_word(index, batch, num_samples)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seeds_ptr + row)
    offset = tl.load(offsets_ptr + row)
    words = tl.load(words_ptr + index, mask=live, other=0)
    request = tl.load(request_ptr)
    index = index.to(tl.int64)
    ranks = active_ranks(table)
    launches, number = steps_taken(table)
    param_hash, tag0, tag1 = details_and_tags(
        number, batch, num_samples, temperature, seed.to(tl.uint32), (seed >> 32).to(tl.uint32), offset.to(tl.uint32),
        (offset >> 32).to(tl.uint32),
    )  # fmt: skip
    tag0, tag1 = of_request(tag0, tag1, request)
    start_clock(table)
    send(table, ranks, launches, index, live, words, param_hash, tag0, tag1)
    wrong = receive_words(
        table, ranks, launches, number, index, live, tag0, tag1, launches * 0, out_ptr, count.to(tl.int64)
    )
    if (wrong != 0) | (ranks == 0):
        tl.store(failed_ptr, tl.full((), -1, tl.int64))
    conclude(table, launches, blocks, failed_ptr, 1)


def all_gather(
    table: int,
    words: Tensor,  # (n,) int64, contiguous
    ranks: int,
    failed: Tensor,  # (1,) int64, written to if the group has failed
    request: Tensor,  # (1,) int64
    step: SampleInputs,
) -> Tensor:
    """(ranks, n) int64: all ranks' words."""
    rows, count = step.rows(), len(words)
    out = torch.empty(ranks, count, dtype=torch.int64, device=words.device)
    blocks = triton.cdiv(count, _BLOCK)
    all_gather_kernel[(blocks,)](
        table,
        words,
        out,
        failed,
        request,
        rows.temperature,
        rows.seed,
        rows.offset,
        step.hidden_states.shape[0],
        step.num_samples,
        count,
        blocks,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return out


@jit(
    do_not_specialize=["table", "buffer_at", "rank", "ranks", "batch", "share", "blocks", "first_token", "row_stride"],
    do_not_specialize_on_alignment=["bias_ptr"],
)
def push_kernel(
    table: tl.int64,  # address of the exchange's table
    buffer_at: tl.int64,  # where the rows are in a rank's shared memory, bytes, a multiple of 16
    logits_ptr,  # (B, tokens) float32, of this rank's shard
    logits_stride,
    bias_ptr,  # (tokens,) float32, to be added; None: nothing is
    rank: tl.int32,
    ranks: tl.int32,
    batch: tl.int32,
    share: tl.int32,  # rows of a rank
    blocks: tl.int32,  # of a row
    first_token: tl.int32,
    tokens,
    row_stride: tl.int64,  # of the rows in shared memory, floats, a multiple of 4
    ALIGNED: tl.constexpr,  # whether all stores begin at 16 bytes
    BLOCK: tl.constexpr,
):
    """Stores logits into the memory of their rows' owners. Grid: (ranks * share * blocks,), neighbours for different
    owners."""
    number = tl.program_id(0) // blocks
    owner = (rank + 1 + number) % ranks
    of_owner = number // ranks
    row = owner * share + of_owner
    if (row < batch) & (is_closed(table) == 0):
        token = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        live = token < tokens
        x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + token, mask=live, other=0.0)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + token, mask=live, other=0.0)
        at = of_owner.to(tl.int64) * row_stride + first_token
        if ALIGNED:
            at = tl.multiple_of(at, 4)
        rows = tl.multiple_of(shared_address(table, owner, buffer_at).to(tl.pointer_type(tl.float32)), 16)
        tl.store(rows + at + token, x, mask=live)


def push_logits(
    table: int,
    buffer_at: int,
    logits: Tensor,  # (B, n) float32, of this rank's shard
    bias: Tensor | None,  # (n,) float32
    place: tuple[int, int],  # rank, ranks
    batch: int,  # rows that are stored: all of them, or 0 in a dry run
    first_token: int,
    row_stride: int,
) -> None:
    """Launches ``push_kernel``."""
    rows, tokens = logits.shape
    rank, ranks = place
    share, blocks = triton.cdiv(rows, ranks), triton.cdiv(tokens, _PUSHED)
    push_kernel[(ranks * share * blocks,)](
        table, buffer_at, logits, logits.stride(0), bias, rank, ranks, batch, share, blocks, first_token, tokens,
        row_stride, ALIGNED=first_token % 4 == 0, BLOCK=_PUSHED, num_warps=_WARPS,
    )  # fmt: skip
