"""Defines the epilogue's shared memory: its layout and its first values."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr, select_

from . import noise, ptx, store_cutoff, thresholds
from .arguments import Arguments, Outputs, Walk
from .reduction import INFINITY, LAST_WORDS

QUEUE = 64  # candidates that wait for their scores: one per thread of the two candidate warps
NOISE_THREADS = 128
CONSUMER_WARPS = 8
CONSUMER_THREADS = 32 * CONSUMER_WARPS


class Shared(NamedTuple):
    """The epilogue's shared memory as tensors."""

    rows: cute.Tensor  # (N, 2) float32: slope, threshold
    ratios: cute.Tensor  # (N,) uint8: ``thresholds.encode_ratio``
    gumbel_bounds: cute.Tensor  # uint32, of all buffers; in the search (32 N,), of its tile
    # (QUEUE,) int64: logit, then a valid bit, iteration (16 bits), token in the tile (7), column (8); 0: free
    queue: cute.Tensor
    done: cute.Tensor  # (1,) int32: consumer warps that have no more candidates
    degenerate: cute.Tensor  # (1,) int32: 1 if some row has a low temperature or a logit of +inf
    drawing: cute.Tensor  # (1,) int32: with ``Features.logits``, 0 if all rows' draws are deferred
    last: cute.Tensor  # (LAST_WORDS,) int32, of ``reduction``
    bounds_full: cute.Pointer  # an mbarrier per buffer, 128 noise threads arrive
    bounds_empty: cute.Pointer  # an mbarrier per buffer, the consumer warps arrive


def storage_type(block_b: int, bound_buffers: int, bound_words: int):
    """Returns the ``cute.struct`` of the epilogue's shared memory. ``bound_words``: bound words of all buffers."""

    @cute.struct
    class EpilogueStorage:
        bounds_full: cute.struct.MemRange[Int64, bound_buffers]
        bounds_empty: cute.struct.MemRange[Int64, bound_buffers]
        done: cute.struct.MemRange[Int32, 1]
        last: cute.struct.MemRange[Int32, LAST_WORDS]
        degenerate: cute.struct.MemRange[Int32, 1]
        drawing: cute.struct.MemRange[Int32, 1]
        queue: cute.struct.MemRange[Int64, QUEUE]
        rows: cute.struct.Align[cute.struct.MemRange[Float32, 2 * block_b], 16]
        ratios: cute.struct.Align[cute.struct.MemRange[Uint8, block_b], 2]
        gumbel_bounds: cute.struct.Align[cute.struct.MemRange[Uint32, bound_words], 16]

    return EpilogueStorage


@cute.jit
def open_storage(storage, block_b: cutlass.Constexpr, bound_words: cutlass.Constexpr) -> Shared:
    """Views an allocated ``storage_type`` as ``Shared``."""
    one = cute.make_layout(1)
    return Shared(
        rows=cute.make_tensor(storage.rows.data_ptr(), cute.make_layout((block_b, 2), stride=(2, 1))),
        ratios=cute.make_tensor(storage.ratios.data_ptr(), cute.make_layout(block_b)),
        gumbel_bounds=cute.make_tensor(storage.gumbel_bounds.data_ptr(), cute.make_layout(bound_words)),
        queue=cute.make_tensor(storage.queue.data_ptr(), cute.make_layout(QUEUE)),
        done=cute.make_tensor(storage.done.data_ptr(), one),
        degenerate=cute.make_tensor(storage.degenerate.data_ptr(), one),
        drawing=cute.make_tensor(storage.drawing.data_ptr(), one),
        last=cute.make_tensor(storage.last.data_ptr(), cute.make_layout(LAST_WORDS)),
        bounds_full=storage.bounds_full.data_ptr(),
        bounds_empty=storage.bounds_empty.data_ptr(),
    )


@cute.jit
def init_barriers(shared: Shared, bound_buffers: cutlass.Constexpr, thread):
    """Initialises the mbarriers, before the CTA's first barrier."""
    if thread == 0:
        for buffer in range_constexpr(bound_buffers):
            cute.arch.mbarrier_init(shared.bounds_full + buffer, NOISE_THREADS)
            cute.arch.mbarrier_init(shared.bounds_empty + buffer, CONSUMER_WARPS)


@cute.jit
def prepare(
    args: Arguments, out: Outputs | None, walk: Walk, shared: Shared, block_b: cutlass.Constexpr, thread, barrier
):
    """Writes first values, thresholds that every token passes, and an empty queue: the noise warps. ``barrier``: of
    their threads."""
    low_temperature, drawn = Boolean(False), Boolean(False)
    for column in cutlass.range(thread, block_b, NOISE_THREADS, unroll_full=True):
        row = walk.first_row + column
        live = row < args.batch
        row = cutlass.min(row, args.batch - 1)
        temperature = args.row(row)[0]
        slope = thresholds.search_slope(temperature)
        # rows beyond the batch have no candidates, whether a logit is 0 or, masked, -inf
        shared.rows[column, 0] = Float32(select_(live, slope, Float32(1.0)))
        shared.rows[column, 1] = Float32(select_(live, thresholds.unknown(), Float32(-INFINITY)))
        shared.ratios[column] = Uint8(thresholds.encode_ratio(noise.row_factors(temperature)[1], slope))
        low_temperature = low_temperature | (live & thresholds.is_low_temperature(slope))
        if const_expr(out is not None):
            drawn = drawn | (live & ~store_cutoff.defers_draw(args, out, row, temperature))
    if thread < QUEUE:
        shared.queue[thread] = Int64(0)
    if thread == 0:
        shared.done[0] = Int32(0)
    low_temperature_threads = ptx.barrier_count(barrier, low_temperature)
    if thread == 0:
        shared.degenerate[0] = Int32(select_(low_temperature_threads != 0, Int32(1), Int32(0)))
    if const_expr(out is not None):
        drawn_threads = ptx.barrier_count(barrier, drawn)
        if thread == 0:
            shared.drawing[0] = Int32(select_(drawn_threads != 0, Int32(1), Int32(0)))
