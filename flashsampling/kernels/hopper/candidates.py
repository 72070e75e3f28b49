"""Scores candidates exactly: a queue from the consumers to two candidate warps (memory orders: the table in
``kernel``).

A candidate that leads its row in this CTA is published. NaN, +inf and the word 0 are always candidates, so every rare
case of the contract is decided in one place, ``_score_candidate``. A row in which a NaN was published is not searched
any more.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr, select_

from . import noise, ptx, reduction, thresholds, workspace_layout
from .arguments import Arguments, Walk
from .config import TILE_V, Features
from .fragments import Fragments
from .gumbel_bounds import GumbelBounds
from .memory import global_pointer
from .reduction import INFINITY
from .scores import exact_score
from .shared_memory import CONSUMER_THREADS, CONSUMER_WARPS, QUEUE, Shared
from .threshold_updates import ThresholdUpdates, lower_threshold

_VALID = -(2**31)  # the top bit of an entry's lower half: 0 is a free slot


class CandidateQueue:
    """The queue of one tile shape."""

    def __init__(
        self, fragments: Fragments, gumbel_bounds: GumbelBounds, threshold_updates: ThresholdUpdates, features: Features
    ):
        self.fragments = fragments
        self.vector = fragments.vector
        self.gumbel_bounds = gumbel_bounds
        self.threshold_updates = threshold_updates
        self.counts_evaluations = features.counts_evaluations

    # -- the consumers

    @cute.jit
    def push_candidates(self, shared, logits, mask, degenerate, q, iteration, lane, warp):
        """Queues candidates, the bits of a mask. ``logits`` (4 ``vector``,): those of a thread's bound words number
        ``q``."""
        while mask != Uint32(0):
            which, mask = ptx.take_lowest(mask)
            some = [logits[i] for i in range(4 * self.vector)]
            for bit in range_constexpr(self.vector.bit_length() + 1):
                odd = which >> bit & 1 != 0
                some = [Float32(select_(odd, some[n + 1], some[n])) for n in range(0, len(some), 2)]
            of_two, row, block, half = self.fragments.logit_index(q, which)
            column = 8 * (self.fragments.first_block(warp) + block) + 2 * (lane % 4) + of_two
            token = self.fragments.first_token(warp) + lane // 4 + 8 * row + 64 * half  # position in the tile
            pushes = Boolean(True)
            if degenerate:  # the threshold may have fallen, by equal scores, while this thread waited for a slot
                at = cute.recast_ptr(shared.gumbel_bounds.iterator, dtype=Uint8)
                at += 4 * self.vector * (CONSUMER_THREADS * q + warp * 32 + lane) + which
                code = noise.decode_bound(Uint32(cute.make_tensor(at, cute.make_layout(1))[0]))
                ratio = thresholds.decode_ratio(Uint32(shared.ratios[column]))
                bound = thresholds.row_bound(shared.rows[column, 0], shared.rows[column, 1], ratio)
                pushes = thresholds.may_win(some[0], code, bound)
            if pushes:
                place = Int32(_VALID) | (iteration << 15) | (token << 8) | column
                entry = Int64(some[0].bitcast(Uint32)) << Int64(32) | Int64(Uint32(place))
                self._push(shared, entry, (warp * 32 + lane) % QUEUE)

    @cute.jit
    def _push(self, shared, entry: Int64, slot: Int32):
        """Stores a candidate in the first free slot from ``slot`` on; waits while the queue is full."""
        waiting = Int32(1)
        while waiting != 0:
            found = cute.arch.atomic_cas(
                shared.queue.iterator + slot, cmp=Int64(0), val=entry, sem="relaxed", scope="cta"
            )
            if found == Int64(0):
                waiting = Int32(0)
            slot = (slot + 1) % QUEUE

    def close(self, shared: Shared):
        """Says that a consumer warp has no more candidates; one of its threads calls it."""
        cute.arch.atomic_add(shared.done.iterator, Int32(1), sem="release", scope="cta")

    # -- the candidate warps

    @cute.jit
    def score_candidates(self, args: Arguments, walk: Walk, shared: Shared, thread):
        """Scores candidates and publishes those that lead their row in this CTA, until the consumers are done.

        A thread owns one slot of the queue. While all slots are empty the warps sleep, because a polling loop would
        take issue slots from the noise warps. They wake when a tile's bounds are complete, to update thresholds, and
        every microsecond.
        """
        updated = Int32(0)  # tiles whose bounds woke this warp
        running = Int32(1)
        while running != 0:
            # read before the slot, so that everything pushed before the consumers were done is seen. The warp decides
            # as one: a thread that returns late from a score may read a later count than the others
            done = cute.arch.load(shared.done.iterator, Int32, sem="acquire", scope="cta") == CONSUMER_WARPS
            finished = cute.arch.vote_all_sync(done)
            entry = cute.arch.load(shared.queue.iterator + thread, Int64, sem="relaxed", scope="cta")
            if cute.arch.vote_any_sync(entry != Int64(0)):
                if entry != Int64(0):
                    cute.arch.atomic_exch(shared.queue.iterator + thread, Int64(0), sem="relaxed", scope="cta")
                    logit = Uint32(entry >> Int64(32)).bitcast(Float32)
                    place = Int32(entry & Int64(0x7FFFFFFF))
                    tile = walk.tile(place >> 15)
                    token = tile * TILE_V + ((place >> 8) & (TILE_V - 1))
                    self._score_candidate(args, walk, shared, logit, token, place & 255)
            else:
                if finished:
                    running = Int32(0)
                elif updated == walk.tiles:
                    ptx.sleep(100)
                else:
                    if cute.arch.vote_any_sync(self.gumbel_bounds.are_ready(shared, updated)):
                        self.threshold_updates.update_all(
                            args, walk, shared, self.gumbel_bounds.first_unsearched(updated), thread
                        )
                        updated += 1

    @cute.jit
    def _score_candidate(self, args, walk, shared, logit, token, column):
        """Scores one token, and handles every case of the contract."""
        row = walk.first_row + column
        if (row < args.batch) & (token < args.end) & (token >= args.skip):
            token = args.base + token
            slope = shared.rows[column, 0]
            score = exact_score(args, logit, token, row, Int32(0))
            slot = args.only_slot(row)
            key = reduction.pack_key(score, token)
            if const_expr(self.counts_evaluations):
                counter = global_pointer(Int64, workspace_layout.before(args.workspace, workspace_layout.EVALUATED))
                cute.arch.atomic_add(counter, Int64(1), sem="relaxed", scope="gpu")
            if score == Float32(INFINITY):
                reduction.publish(args.only_infinite_slot(slot), key)
            elif score != score:
                reduction.publish(slot, key)
                lower_threshold(shared, column, Float32(-INFINITY))
            elif score != Float32(-INFINITY):
                lower = thresholds.threshold_from_score(score, slope)
                if thresholds.leads(lower, lower_threshold(shared, column, lower)):
                    reduction.publish(slot, key)
