"""Lowers the rows' thresholds: the warm start, updates by published keys, and the exchange between CTAs.

A row's threshold (``thresholds``) is stored negated and only falls. It falls by candidates that lead (``candidates``),
by keys that other CTAs have published, and in a CTA's first tile by lower bounds of the scores in all CTAs' first tiles
(``warm_start``, ``exchange_thresholds``). When it falls decides how many tokens are scored, never which token wins: a
skipped token scores strictly below a published one, or equally with a higher id.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr, select_

from . import noise, ptx, reduction, thresholds
from .arguments import Arguments, Walk
from .fragments import Fragments
from .reduction import INFINITY
from .shared_memory import QUEUE, Shared

_LEADING_ROWS = 8  # rows that a CTA leads after its first tile: with more it waits for other CTAs
_POLLS = 8  # of other CTAs' thresholds, at most
_MANY_CTAS = 16  # per row block: fewer have less to exchange


@cute.jit
def lower_threshold(shared, column, lower: Float32) -> Float32:
    """Lowers a row's threshold to ``lower`` and returns the one before."""
    pointer = shared.rows.iterator + 2 * column + 1
    old = Float32(0.0)
    if lower.bitcast(Int32) >= Int32(0):  # NaN too
        was = cute.arch.atomic_min(
            cute.recast_ptr(pointer, dtype=Int32), lower.bitcast(Int32), sem="relaxed", scope="cta"
        )
        old = was.bitcast(Float32)
    else:
        was = cute.arch.atomic_max(
            cute.recast_ptr(pointer, dtype=Uint32), lower.bitcast(Uint32), sem="relaxed", scope="cta"
        )
        old = was.bitcast(Float32)
    return old


@cute.jit
def update_threshold(shared, column, key: Int64, first_token):
    """Lowers a threshold by a published key. ``first_token``: the first token id that is still to be searched."""
    if key == Int64(reduction.NAN_KEY):
        lower_threshold(shared, column, Float32(-INFINITY))
    elif key != Int64(0):
        score = reduction.unpack_score(key)
        loses_ties = reduction.unpack_token(key) < first_token
        score = Float32(select_(loses_ties, thresholds.next_float(score), score))
        lower_threshold(shared, column, thresholds.threshold_from_score(score, shared.rows[column, 0]))


class ThresholdUpdates:
    """Updates of all columns of a tile shape at once."""

    def __init__(self, fragments: Fragments):
        self.fragments = fragments
        self.halves = fragments.halves
        self.own_blocks = fragments.own_blocks
        self.vector = fragments.vector
        self.block_b = fragments.block_b
        self.warm_start_blocks = next(v for v in (4, 2, 1) if self.own_blocks % v == 0)  # column blocks at once

    @cute.jit
    def update_all(self, args: Arguments, walk: Walk, shared: Shared, iteration, thread):
        """Lowers this CTA's thresholds by the keys published so far: the candidate warps. All tiles before
        ``iteration`` have been searched."""
        first_token = args.base + walk.first_token(iteration)
        for column in cutlass.range(thread, cutlass.min(self.block_b, args.batch - walk.first_row), QUEUE, unroll=1):
            slot = args.only_slot(walk.first_row + column)
            key = reduction.load_key(slot)
            infinite = reduction.load_key(args.only_infinite_slot(slot))
            update_threshold(shared, column, key, first_token)
            if (infinite != Int64(0)) & (reduction.unpack_token(infinite) < first_token):
                # +inf wins by the lowest id, and all unsearched tokens have higher ids
                shared.degenerate[0] = Int32(1)
                found, alone = Float32(thresholds.INFINITE_FOUND), Float32(thresholds.INFINITE_ALONE)
                lower_threshold(shared, column, Float32(select_(key != Int64(0), found, alone)))

    @cute.jit
    def warm_start(self, args: Arguments, walk: Walk, shared: Shared, logits, lane, warp):
        """Finds a lower bound of every row's best score in half of the first tile: the consumers, before they search
        it.

        Each warp covers half of its columns: all of them would take twice the time and save less than that. Rows with a
        NaN are decided here.
        """
        groups = self.own_blocks // self.warm_start_blocks
        vectors = self.fragments.vectors // groups  # per group
        for k in cutlass.range((groups + 1) // 2, unroll=1):
            group = (warp + 2 * k) % groups
            found = cute.make_rmem_tensor(4 * self.vector * vectors, Float32)
            self.fragments.select_logits(logits, group, found, 0, vectors)
            bests = []  # by column
            for i in range_constexpr(4 * self.vector * vectors):
                c, _, j, _ = self.fragments.logit_index(0, i)
                if const_expr(i % (4 * self.vector) == 0):
                    words = self.fragments.load_bounds(
                        shared, group * vectors + i // (4 * self.vector), warp * 32 + lane
                    )
                if const_expr(i % (4 * self.halves) == 0):
                    block = self.fragments.first_block(warp) + group * self.warm_start_blocks + j
                    pair = self.fragments.load_rows(shared, block, lane)
                    ratios = self.fragments.load_ratios(shared, block, lane)
                    bests += [Float32(-INFINITY), Float32(-INFINITY)]
                code = noise.bound_float(words[i // 4 % self.vector], i % 4)
                bound = thresholds.warm_start_bound(found[i], code, pair[2 * c], ratios[c])
                bests[2 * j + c] = cute.arch.fmax(bests[2 * j + c], bound, nan=True)
            best, own = reduction.scatter_max(bests, lane)
            block = self.fragments.first_block(warp) + group * self.warm_start_blocks + own // 2
            column = block * 8 + 2 * (lane % 4) + own % 2
            row = walk.first_row + column
            if row < args.batch:
                if best != best:
                    reduction.publish(args.only_slot(row), Int64(reduction.NAN_KEY))
                    lower_threshold(shared, column, Float32(-INFINITY))
                elif (best < Float32(INFINITY)) & (best > Float32(-INFINITY)):
                    lower_threshold(shared, column, thresholds.threshold_from_warm_start(best, shared.rows[column, 0]))
                elif best == Float32(INFINITY):
                    shared.degenerate[0] = Int32(1)

    @cute.jit
    def exchange_thresholds(self, args: Arguments, walk: Walk, shared: Shared, iteration, column, barrier):
        """Publishes the warm-start bounds and reads those of other CTAs: the consumers, a thread per column.

        In the first CTAs nearly every row's best would be a candidate: they wait until others have come as far.
        """
        live = column < cutlass.min(self.block_b, args.batch - walk.first_row)
        slot = args.only_slot(walk.first_row + column)
        bound = Int64(-1)
        if live:
            known = shared.rows[column, 1]
            # finite: not NaN, no infinite score found, not decided
            if (known < Float32(thresholds.INFINITE_ALONE)) & (known > Float32(thresholds.INFINITE_FOUND)):
                # a score that some token of this CTA reaches; without an id it is below that token's key
                score = thresholds.score_from_threshold(known, shared.rows[column, 0])
                bound = reduction.pack_key(score, Int32(reduction.NO_TOKEN))
                reduction.publish(slot, bound)
        key = Int64(0)
        polls = Int32(1)
        if const_expr(self.block_b > 128):  # a smaller tile has few candidates, and its CTAs finish it far apart
            polls = Int32(select_(walk.tile_stride >= _MANY_CTAS, Int32(_POLLS), Int32(1)))
        while polls > 0:
            polls -= 1
            if live:
                key = reduction.load_key(slot)
            if ptx.barrier_count(barrier, live & (bound >= key)) <= _LEADING_ROWS:
                polls = Int32(0)
        if live:
            update_threshold(shared, column, key, args.base + walk.first_token(iteration))
