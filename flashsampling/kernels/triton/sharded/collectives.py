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

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....inputs import SampleInputs, row_argument
from ....sampling_params import DEFAULT_PARAMS, ROW_FIELDS, SamplingParams
from ..filtered.transforms import pointer_to
from ..jit import jit
from .peer_exchange import (
    active_ranks,
    conclude,
    details_and_tags,
    is_closed,
    mix,
    of_request,
    receive_words,
    send,
    shared_address,
    start_clock,
    steps_taken,
)

_BLOCK = 256  # words of a program
_PUSHED = 2048  # logits of a program
_FIELDS = tl.constexpr(len(ROW_FIELDS))
_REALS = tl.constexpr(sum(isinstance(getattr(DEFAULT_PARAMS, name), float) << i for i, name in enumerate(ROW_FIELDS)))
_WARPS = 4


@jit
def row_of_word(index, batch, num_samples):
    """Returns the row whose tags a word has: that of the plain draw there, else any. No product overflows."""
    row = index // num_samples
    return tl.where(row < batch, row, index % batch)


# the sampling parameters of rows: an address of (B,) values, or 0 and the number for all rows
RowNumbers = NamedTuple(  # type: ignore[misc]
    "RowNumbers",
    [
        pair
        for name in ROW_FIELDS
        for pair in ((f"{name}_at", int), (name, float if isinstance(getattr(DEFAULT_PARAMS, name), float) else int))
    ]
    + [("narrow", int)],  # bit i: the values of field i are int32 in memory, not int64
)


def row_numbers(params: SamplingParams) -> RowNumbers:
    """Returns the parameters of rows as kernels take them."""
    values = [getattr(params, name) for name in ROW_FIELDS]
    narrow = sum(isinstance(x, Tensor) and x.dtype == torch.int32 and 1 << i for i, x in enumerate(values))
    return RowNumbers(*(part for value in values for part in row_argument(value)), narrow)


@jit
def _load_rows(address, number, row, TYPE: tl.constexpr):
    """Loads a parameter of rows, (N,); the number where the address is 0."""
    there = address + row * 0 != 0  # a block: Triton's interpreter makes int32 of a scalar mask
    return tl.load(pointer_to(address, TYPE) + row, mask=there, other=number)


@jit
def hash_numbers(numbers, row):
    """Returns a hash of the rows' parameters, uint32. A number and a tensor of that number are the same."""
    hashed = tl.zeros(row.shape, tl.uint32)
    for i in tl.static_range(_FIELDS):
        address, number = numbers[2 * i], numbers[2 * i + 1]
        if (_REALS >> i) & 1:
            value = _load_rows(address, number, row, tl.float32) + 0.0  # -0.0 is 0.0
            hashed = mix(hashed, value.to(tl.uint32, bitcast=True))
        else:
            is_narrow = ((numbers.narrow >> i) & 1) != 0
            narrow = _load_rows(tl.where(is_narrow, address, 0), 0, row, tl.int32).to(tl.int64)
            value = tl.where(is_narrow, narrow, _load_rows(tl.where(is_narrow, 0, address), number, row, tl.int64))
            hashed = mix(mix(hashed, value.to(tl.uint32)), (value >> 32).to(tl.uint32))
    return hashed


@jit(
    structs={"numbers": RowNumbers},
    do_not_specialize=["table", "known", "batch", "num_samples", "count", "ranks_of_out", "blocks"],
    # a kernel of another alignment would be compiled, and loaded, while other ranks wait for this one
    do_not_specialize_on_alignment=[
        "words_ptr", "out_ptr", "request_ptr", "temperatures_ptr", "seeds_ptr", "offsets_ptr",
    ],
)  # fmt: skip
def all_gather_kernel(
    table: tl.int64,  # address of the exchange's table
    words_ptr,  # (count,) int64
    out_ptr,  # (ranks_of_out, count) int64, out; all -1 if the group has failed
    known: tl.int64,  # a hash of what all rows ask for, to which request_ptr's is added
    request_ptr,  # (1,) int64, or None
    numbers,
    temperatures_ptr,  # (B,) float32
    seeds_ptr,  # (B,) int64
    offsets_ptr,  # (B,) int64
    batch: tl.int32,
    num_samples: tl.int32,
    count: tl.int32,  # at least 1, and at most the table's capacity
    ranks_of_out: tl.int32,
    blocks: tl.int32,
    BLOCK: tl.constexpr,
):
    """Gathers words, each with the tags of a row: see ``row_of_word``. Grid: (blocks,)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = index < count
    row = row_of_word(index, batch, num_samples)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seeds_ptr + row)
    offset = tl.load(offsets_ptr + row)
    words = tl.load(words_ptr + index, mask=live, other=0)
    request = hash_numbers(numbers, row).to(tl.int64) + known
    if request_ptr is not None:
        request += tl.load(request_ptr)
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
        tl.debug_barrier()  # the thread that stored a word need not be the one that voids it
        for of_rank in range(ranks_of_out):
            tl.store(out_ptr + of_rank * count.to(tl.int64) + index, tl.full((BLOCK,), -1, tl.int64), mask=live)
    conclude(table, launches, blocks, out_ptr, ranks_of_out * count)


def all_gather(
    table: int,
    words: Tensor,  # (n,) int64, contiguous
    ranks: int,
    request: tuple[int, Tensor | None],  # a hash: of the host, and (1,) int64
    step: SampleInputs,  # whose rows are compared, with their parameters; one with the default ones compares none
) -> Tensor:
    """Returns all ranks' words, (ranks, n) int64; all -1 if the group has failed."""
    rows, count = step.rows(), len(words)
    out = torch.empty(ranks, count, dtype=torch.int64, device=words.device)
    blocks = triton.cdiv(count, _BLOCK)
    all_gather_kernel[(blocks,)](
        table, words, out, *request, row_numbers(step.params), rows.temperature, rows.seed, rows.offset,
        step.hidden_states.shape[0], step.num_samples, count, ranks, blocks, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
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
