"""Finds store cutoffs while the launch runs: logits that no kept token of a filtered row lies below.

The first tiles of a row block's CTAs are a sample of the vocabulary. Once their block keys are in memory
(``block_stats``), the cutoff warp of every CTA finds the cutoffs of a share of the rows:

    top-k   the key of rank ``config.cutoff_rank``. At least k tokens reach it, and so does the cutoff that
            ``kernels.triton.filtered.filtered_sample_kernel`` finds. Its last eight bits are cleared, which lowers it
    min-p   the cutoff that kernel would find, from the highest logit so far; lowered by more than either rounds

Rows with a top-p alone, or a k too large for the sample, have none. From then on, blocks with a key below the row's
cutoff are not stored. The filtered-sampling kernel would not have read them, so no bit depends on when, or whether, a
cutoff was found.

    edge                                           order
    a CTA's keys of its first tile -> counter      the consumers' named barrier, then a release add at GPU scope
    counter -> the cutoff warps                    acquire loads at GPU scope, by every lane
    a cutoff -> consumers of all CTAs              a relaxed word: a late reader stores more
    cutoffs -> the last CTA                        the CTA's barrier ``published``, its counter (``reduction``)

The warp waits for other CTAs' first tiles. Where another launch occupies multiprocessors these may not have begun, so
it gives up when its own CTA's consumers are done.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, range_constexpr, select_

from . import noise, ptx, workspace_layout
from .arguments import Arguments, Outputs, Walk
from .config import CUTOFF_KEYS, TILE_V, cutoff_rank
from .memory import global_pointer

LOWEST = -0x80000000  # key: everything is stored
_KEYS = CUTOFF_KEYS // 32  # per lane
_SEARCHED_BITS = 24
_KNOWN = 1 << 32  # in a row's word, above its cutoff
_LARGEST = 3.4028234663852886e38
_LN2 = 0.6931471805599453
_INFINITE = 2.0**100  # from here on a temperature's inverse may be 0, which makes NaN of -inf


@cute.jit
def load(args: Arguments, out: Outputs, block_b: cutlass.Constexpr, row) -> Int32:
    """Loads a row's cutoff; LOWEST while none is known."""
    cutoff = Int32(LOWEST)
    if out.cutoffs != Int64(0):
        word = cute.arch.load(_pointer(args, block_b, row), Int64, sem="relaxed", scope="gpu")
        cutoff = Int32(select_(word != Int64(0), Int32(word), Int32(LOWEST)))
    return cutoff


@cute.jit
def without_top_k(args: Arguments, out: Outputs, row) -> Boolean:
    """Returns whether a row has no top-k."""
    return ~_filters(args, _top_k(out, row))


@cute.jit
def defers_draw(args: Arguments, out: Outputs, row, temperature: Float32) -> Boolean:
    """Returns whether a row's draw is deferred to the filtered-sampling kernel.

    Rows with a small top-k are: it draws from few tokens anyway and needs nothing else of this launch. Greedy rows are
    not, because it does not filter them, nor are rows of infinite temperature, where -inf is no score.
    """
    top_k = _top_k(out, row)
    warm = (temperature >= Float32(noise.GREEDY_BELOW)) & (temperature < Float32(_INFINITE))
    return warm & _filters(args, top_k) & (top_k <= Int64(CUTOFF_KEYS))


@cute.jit
def count_first_tile(args: Arguments, block_b: cutlass.Constexpr, row_block):
    """Counts a CTA's first tile: one thread, after a barrier of all threads that wrote its keys."""
    cute.arch.red(_counter(args, block_b, row_block), Int64(1), op="add", dtype="u64", sem="release", scope="gpu")


@cute.jit
def find(
    args: Arguments,
    out: Outputs,
    walk: Walk,
    done,
    consumers: cutlass.Constexpr,
    block_b: cutlass.Constexpr,
    row_block,
    ctas,
    lane,
):
    """Finds cutoffs: one warp of every CTA. ``done``: the shared counter of consumer warps that have finished, of
    ``consumers``."""
    if (out.cutoffs != Int64(0)) & (ctas < cute.ceil_div(args.end, TILE_V)):  # else no CTA has a second tile
        tiles = Int64(ctas)
        counter = _counter(args, block_b, row_block)
        seen, over = Boolean(False), Boolean(False)
        while (not seen) & (not over):
            ptx.sleep(500)
            seen = cute.arch.vote_all_sync(cute.arch.load(counter, Int64, sem="acquire", scope="gpu") == tiles)
            finished = cute.arch.load(done.iterator, Int32, sem="acquire", scope="cta") == consumers
            over = cute.arch.vote_any_sync(finished)
        if seen & (not over):
            rows = cutlass.min(args.batch - walk.first_row, block_b)
            for column in cutlass.range(walk.first_tile, rows, ctas, unroll=1):
                row = walk.first_row + column
                cutoff = _find_row_cutoff(args, out, row, Int32(tiles) * 4, lane)
                if (lane == 0) & (cutoff > Int32(LOWEST)):
                    word = Int64(_KNOWN) | Int64(cutoff) & Int64(_KNOWN - 1)
                    cute.arch.store(_pointer(args, block_b, row), word, sem="relaxed", scope="gpu")


@cute.jit
def finish(args: Arguments, out: Outputs, block_b: cutlass.Constexpr, row_block, thread, threads: cutlass.Constexpr):
    """Writes a row block's cutoffs to where they are read, and zeroes the workspace: its last CTA."""
    if out.cutoffs != Int64(0):
        first = row_block * block_b
        rows = cutlass.min(args.batch - first, block_b)
        for column in cutlass.range(thread, rows, threads, unroll=1):
            word = cute.arch.atomic_exch(_pointer(args, block_b, first + column), Int64(0), sem="relaxed", scope="gpu")
            cutoff = Int32(select_(word != Int64(0), Int32(word), Int32(LOWEST)))
            global_pointer(Int32, out.cutoffs + Int64(first + column) * 4).store(cutoff)
        if thread == 0:
            cute.arch.atomic_exch(_counter(args, block_b, row_block), Int64(0), sem="relaxed", scope="gpu")


def _counter(args, block_b, row_block):
    return global_pointer(
        Int64, workspace_layout.first_tiles(args.workspace, args.draws(), _row_blocks(args, block_b), row_block)
    )


def _pointer(args, block_b, row):
    return global_pointer(Int64, workspace_layout.cutoff(args.workspace, args.draws(), _row_blocks(args, block_b), row))


def _row_blocks(args, block_b) -> Int32:
    return cute.ceil_div(args.batch, block_b)


@cute.jit
def _top_k(out: Outputs, row) -> Int64:
    top_k = out.top_k_value
    if out.top_k != Int64(0):
        if out.top_k_wide != Int32(0):
            top_k = global_pointer(Int64, out.top_k + Int64(row) * 8).load()
        else:
            top_k = Int64(global_pointer(Int32, out.top_k + Int64(row) * 4).load())
    return top_k


def _filters(args: Arguments, top_k: Int64) -> Boolean:
    return (top_k > Int64(0)) & (top_k < Int64(args.end))


@cute.jit
def _find_row_cutoff(args, out, row, sample, lane) -> Int32:
    """Finds one row's cutoff from the first ``sample`` of its keys."""
    at = out.keys + Int64(row) * (cute.ceil_div(args.end, TILE_V) * 4) * 4
    keys = cute.make_rmem_tensor(_KEYS, Int32)
    for i in range_constexpr(_KEYS):
        keys[i] = Int32(LOWEST)
        place = lane + 32 * i
        if place < sample:
            keys[i] = cute.arch.load(global_pointer(Int32, at + Int64(place) * 4), Int32, sem="relaxed", scope="gpu")
    top_k = _top_k(out, row)
    min_p = out.min_p_value
    if out.min_p != Int64(0):
        min_p = global_pointer(Float32, out.min_p + Int64(row) * 4).load()
    cutoff = Int32(LOWEST)
    if _filters(args, top_k):
        if top_k <= Int64(CUTOFF_KEYS):
            rank = cutoff_rank(Int32(top_k))
            if rank <= cutlass.min(sample, CUTOFF_KEYS):
                cutoff = _kth_highest(keys, rank)
    else:
        if min_p > Float32(0.0):
            temperature = args.temperature_value
            if args.temperature != Int64(0):
                temperature = global_pointer(Float32, args.temperature + Int64(row) * 4).load()
            cutoff = _least_probable(keys, min_p, temperature)
    return cutoff


@cute.jit
def _kth_highest(keys, k) -> Int32:
    """Returns the k-th highest of all lanes' keys, rounded down: a radix search."""
    ordered = [keys[i].bitcast(Uint32) ^ Uint32(0x80000000) for i in range(_KEYS)]
    found = Uint32(0)
    for n in cutlass.range(_SEARCHED_BITS, unroll=1):
        tried = found | (Uint32(1) << Uint32(31 - n))
        many = Int32(0)
        for i in range_constexpr(_KEYS):
            many = many + Int32(ordered[i] >= tried)
        found = Uint32(select_(cute.arch.warp_redux_sync(many, "add") >= k, tried, found))
    return (found ^ Uint32(0x80000000)).bitcast(Int32)


@cute.jit
def _least_probable(keys, min_p, temperature) -> Int32:
    """Returns the key of a logit that is less than ``min_p`` times as probable as the highest."""
    highest = keys[0]
    for i in range_constexpr(1, _KEYS):
        highest = cutlass.max(highest, keys[i])
    highest = cute.arch.warp_redux_sync(highest, "max")
    top = (highest ^ ((highest >> Int32(31)) & Int32(0x7FFFFFFF))).bitcast(Float32)
    ratio = cute.math.log2(cute.arch.fmin(min_p, Float32(1.0)), fastmath=True) - Float32(0.02)
    magnitude = cute.arch.fmin(cute.math.abs(top), Float32(_LARGEST))
    below = ptx.multiply(
        ratio, ptx.multiply(temperature, Float32(_LN2))
    )  # overflows where the filtered-sampling kernel's does
    least = top + below - magnitude * Float32(2e-6)
    bits = least.bitcast(Int32)
    key = bits ^ ((bits >> Int32(31)) & Int32(0x7FFFFFFF))
    return Int32(select_(least != least, Int32(LOWEST), key))
