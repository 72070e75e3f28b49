"""When, and by what, a row's threshold falls.

A row's threshold (``threshold``) is what the bound must reach. It only falls: by candidates that lead (``candidates``),
by what other CTAs have published, and in a CTA's first tile by lower bounds of what all CTAs' first tiles hold
(``seed``, ``share``). When and where it falls decides how much is evaluated, never which token wins: what is skipped
scores strictly below something published, or equally and has a higher id.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr, select_

from . import noise, ptx, reduction, thresholds
from .arguments import Arguments, Walk
from .fragments import Fragments
from .reduction import INFINITY
from .shared_memory import QUEUE, Shared

_DENSE = 8  # rows of which a CTA in its first tile knows the best token of all: with more it waits for others
_POLLS = 8  # at what they know, at most
_MANY_CTAS = 16  # that work for a block of rows: of fewer there is less to learn


@cute.jit
def lower_threshold(shared, column, lower: Float32) -> Float32:
    """Lowers a row's threshold to that, and returns what it was."""
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
    """Lowers a threshold by a key that was published. ``first_token``: of those that are still to be searched."""
    if key == Int64(reduction.NAN_KEY):
        lower_threshold(shared, column, Float32(-INFINITY))
    elif key != Int64(0):
        score = reduction.score_of_key(key)
        loses_ties = reduction.token_of_key(key) < first_token
        score = Float32(select_(loses_ties, thresholds.after(score), score))
        lower_threshold(shared, column, thresholds.of_score(score, shared.rows[column, 0]))


class ThresholdUpdates:
    """What all columns of a tile shape learn at once."""

    def __init__(self, fragments: Fragments):
        self.fragments = fragments
        self.halves = fragments.halves
        self.own_blocks = fragments.own_blocks
        self.vector = fragments.vector
        self.block_b = fragments.block_b
        self.seeded_blocks = next(v for v in (4, 2, 1) if self.own_blocks % v == 0)  # of columns, at once

    @cute.jit
    def update_all(self, args: Arguments, walk: Walk, shared: Shared, iteration, thread):
        """The evaluators: what has been published by now lowers this CTA's thresholds. ``iteration``: a tile of the
        CTA's, before which everything is searched."""
        first_token = args.base + walk.first_token(iteration)
        for column in cutlass.range(thread, cutlass.min(self.block_b, args.batch - walk.first_row), QUEUE, unroll=1):
            slot = args.only_slot(walk.first_row + column)
            key = reduction.published(slot)
            infinite = reduction.published(args.only_infinite_slot(slot))
            update_threshold(shared, column, key, first_token)
            if (infinite != Int64(0)) & (reduction.token_of_key(infinite) < first_token):
                # +inf wins by the lowest id, which no token has that is still to be searched
                shared.special[0] = Int32(1)
                found, alone = Float32(thresholds.INFINITE_FOUND), Float32(thresholds.INFINITE_ALONE)
                lower_threshold(shared, column, Float32(select_(key != Int64(0), found, alone)))

    @cute.jit
    def seed(self, args: Arguments, walk: Walk, shared: Shared, logits, lane, warp):
        """The consumers, before the first tile is searched: a lower bound of every row's best score in half of it,
        since each warp does half of its columns. All of it takes twice the time, and saves less than that. Rows with
        a NaN are decided."""
        groups = self.own_blocks // self.seeded_blocks
        vectors = self.fragments.vectors // groups  # of a group
        for k in cutlass.range((groups + 1) // 2, unroll=1):
            group = (warp + 2 * k) % groups
            found = cute.make_rmem_tensor(4 * self.vector * vectors, Float32)
            self.fragments.pick(logits, group, found, 0, vectors)
            bests = []  # by column
            for i in range_constexpr(4 * self.vector * vectors):
                c, _, j, _ = self.fragments.place(0, i)
                if const_expr(i % (4 * self.vector) == 0):
                    words = self.fragments.load_bounds(
                        shared, group * vectors + i // (4 * self.vector), warp * 32 + lane
                    )
                if const_expr(i % (4 * self.halves) == 0):
                    block = self.fragments.first_block(warp) + group * self.seeded_blocks + j
                    pair = self.fragments.load_rows(shared, block, lane)
                    ratios = self.fragments.load_ratios(shared, block, lane)
                    bests += [Float32(-INFINITY), Float32(-INFINITY)]
                code = noise.bound_float(words[i // 4 % self.vector], i % 4)
                seed = thresholds.warm_start_of(found[i], code, pair[2 * c], ratios[c])
                bests[2 * j + c] = cute.arch.fmax(bests[2 * j + c], seed, nan=True)
            best, own = reduction.scatter_max(bests, lane)
            block = self.fragments.first_block(warp) + group * self.seeded_blocks + own // 2
            column = block * 8 + 2 * (lane % 4) + own % 2
            row = walk.first_row + column
            if row < args.batch:
                if best != best:
                    reduction.publish(args.only_slot(row), Int64(reduction.NAN_KEY))
                    lower_threshold(shared, column, Float32(-INFINITY))
                elif (best < Float32(INFINITY)) & (best > Float32(-INFINITY)):
                    lower_threshold(shared, column, thresholds.of_warm_start(best, shared.rows[column, 0]))
                elif best == Float32(INFINITY):
                    shared.special[0] = Int32(1)

    @cute.jit
    def share(self, args: Arguments, walk: Walk, shared: Shared, iteration, column, barrier):
        """The consumers, after ``seed``, a thread per column: tells other CTAs of the bounds and learns theirs. To the
        first ones nearly every row's best would be a candidate: they wait until others have come so far."""
        live = column < cutlass.min(self.block_b, args.batch - walk.first_row)
        slot = args.only_slot(walk.first_row + column)
        bound = Int64(-1)
        if live:
            known = shared.rows[column, 1]
            # not NaN, no mark, not decided
            if (known < Float32(thresholds.INFINITE_ALONE)) & (known > Float32(thresholds.INFINITE_FOUND)):
                # a score that some token of this CTA reaches; with no token's id it is below that token's key
                score = thresholds.score_of(known, shared.rows[column, 0])
                bound = reduction.pack_key(score, Int32(reduction.NO_TOKEN))
                reduction.publish(slot, bound)
        key = Int64(0)
        looks = Int32(1)
        if const_expr(self.block_b > 128):  # a smaller tile has few candidates, and its CTAs come far apart
            looks = Int32(select_(walk.tile_stride >= _MANY_CTAS, Int32(_POLLS), Int32(1)))
        while looks > 0:
            looks -= 1
            if live:
                key = reduction.published(slot)
            if ptx.count(barrier, live & (bound >= key)) <= _DENSE:
                looks = Int32(0)
        if live:
            update_threshold(shared, column, key, args.base + walk.first_token(iteration))
