"""Gathers all ranks' words through the peers' memory: a round of ``tensor_parallel/filtered_sampling``, one launch.

Each round is a step of the protocol in ``flashsampling.exchange_protocol``, with words in the place of packed winners:
number, tags, time-out and verdict are those of a sampling kernel's exchange, so a rank that draws without sampling
parameters meanwhile is detected.
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
    of_request,
    receive_words,
    send,
    start_clock,
    steps_taken,
)

_BLOCK = 256  # words of a program
_WARPS = 4


@jit
def row_of_word(index, batch, num_samples):
    """Returns the row whose tags a word has: that of the plain draw there, else any. No product overflows."""
    row = index // num_samples
    return tl.where(row < batch, row, index % batch)


@jit(
    do_not_specialize=["table", "batch", "num_samples", "count", "blocks"],
    # a kernel of another alignment would be compiled, and loaded, while other ranks wait for this one
    do_not_specialize_on_alignment=[
        "words_ptr", "out_ptr", "failed_ptr", "request_ptr", "wanted_ptr", "temperatures_ptr", "seeds_ptr",
        "offsets_ptr",
    ],
)  # fmt: skip
def all_gather_kernel(
    table: tl.int64,  # address of the exchange's table
    words_ptr,  # (count,) int64
    out_ptr,  # (ranks, count) int64, out
    failed_ptr,  # (1,) int64, out: not 0 if the group has failed; else left alone
    request_ptr,  # (1,) int64: a hash of what is asked for
    wanted_ptr,  # (1,) int32: 0 on all ranks if nobody reads the words, and then this launch is no step
    temperatures_ptr,  # (B,) float32
    seeds_ptr,  # (B,) int64
    offsets_ptr,  # (B,) int64
    batch: tl.int32,
    num_samples: tl.int32,
    count: tl.int32,  # at least 1, and at most the table's capacity
    blocks: tl.int32,
    BLOCK: tl.constexpr,
):
    """Gathers words, each with the tags of a row: see ``row_of_word``. Grid: (blocks,)."""
    if tl.load(wanted_ptr) == 0:
        return
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
    wanted: Tensor,  # (1,) int32
    step: SampleInputs,
) -> Tensor:
    """Returns all ranks' words, (ranks, n) int64."""
    rows, count = step.rows(), len(words)
    out = torch.empty(ranks, count, dtype=torch.int64, device=words.device)
    blocks = triton.cdiv(count, _BLOCK)
    all_gather_kernel[(blocks,)](
        table,
        words,
        out,
        failed,
        request,
        wanted,
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
