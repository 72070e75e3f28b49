"""Scores whole tiles exactly: the consumer warps, where too many of a tile's tokens may win.

Equal logits of a greedy row, or infinite logits, make most tokens of a tile candidates. The consumers that hold them
score them themselves, which is many times faster than the queue. Whole steps with 1, 128 or 255 such rows (NaN, zeros,
equal logits) take 0.98 to 1.09 times as long as without at D = 4096, and 0.95 to 1.11 at D = 2048, at any temperature
(H200, V = 151936, B = 256, ``benchmarks.rare_rows``). Without this module 255 rows of NaN took 28 times as long, in
another shape. Without ``thresholds.encode_ratio``, low-temperature rows of equal logits had 250 candidates instead of
eight, by the tests' model: 1.28 times as long at D = 2048, T = 1e-6.

With several draws per row there are neither bounds nor a search: every tile is scored here.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr, select_

from . import reduction, thresholds, workspace_layout
from .config import Features
from .fragments import Fragments
from .memory import global_pointer
from .reduction import INFINITY
from .scores import exact_score
from .threshold_updates import update_threshold


class DenseFallback:
    """Exact scores of the columns of one tile shape."""

    def __init__(self, fragments: Fragments, features: Features):
        self.fragments = fragments
        self.halves = fragments.halves
        self.own_blocks = fragments.own_blocks
        self.vector = fragments.vector
        self.counts_evaluations = features.counts_evaluations
        self.masks = features.transforms  # -inf may be a masked token, see ``candidate_search``

    @cute.jit
    def is_dense(self, mask: Uint32) -> Uint32:
        """Returns the columns, as bits, in which at least six threads of a warp have only tokens that may win.
        ``mask``: the search's bits."""
        is_dense = Uint32(0)
        for n in range_constexpr(2 * self.vector // self.halves):
            whole = Uint32(sum(1 << i for i in self.fragments.column_logits(n % 2, n // 2)))
            threads = cute.arch.popc(cute.arch.vote_ballot_sync(mask & whole == whole))
            is_dense = is_dense | Uint32(select_(threads >= 6, Uint32(1 << n), Uint32(0)))
        return is_dense

    def without_dense(self, mask: Uint32, dense_columns: Uint32) -> Uint32:
        """Removes the tokens of scored columns (bits) from the search's mask."""
        for i in range(4 * self.vector):
            c, _, j, _ = self.fragments.logit_index(0, i)
            evaluated = dense_columns >> Uint32(2 * j + c) & Uint32(1)
            mask = mask & ~(evaluated << Uint32(i))
        return mask

    @cute.jit
    def score_greedy_columns(self, args, walk, shared, logits, columns: Uint32, token0, q, lane, warp) -> Uint32:
        """Publishes the best token of some columns (bits) of a thread's bound words number ``q``, if all of these are
        greedy rows with finite or NaN logits: their scores are their logits. Returns the columns that are not done."""
        first_block = self.fragments.first_block(warp) + q * (self.vector // self.halves)
        plain = Boolean(True)
        keys = []
        for j in range_constexpr(self.vector // self.halves):
            pair = self.fragments.load_rows(shared, first_block + j, lane)
            for c in range_constexpr(2):
                wanted = columns >> Uint32(2 * j + c) & Uint32(1) != Uint32(0)
                wanted = wanted & (pair[2 * c + 1] != Float32(-INFINITY))
                key = Int64(0)
                for i in self.fragments.column_logits(c, j):
                    _, r, _, half = self.fragments.logit_index(0, i)
                    token = token0 + 8 * r + 64 * half
                    sampled = (token < args.end) & (token >= args.skip)
                    this = reduction.pack_key(logits[i], args.base + token)
                    key = reduction.max_key(key, Int64(select_(sampled, this, Int64(0))))
                    infinite = (logits[i] == Float32(INFINITY)) | (logits[i] == Float32(-INFINITY))
                    plain = plain & ~(wanted & sampled & infinite)
                plain = plain & (~wanted | (pair[2 * c] == Float32(thresholds.GREEDY_SLOPE)))
                keys += [Int64(select_(wanted, key, Int64(0)))]
        left = columns
        if cute.arch.vote_all_sync(plain):
            left = Uint32(0)
            key, own = reduction.scatter_max_keys(keys, lane)
            column = 8 * (first_block + own // 2) + 2 * (lane % 4) + own % 2
            if key != Int64(0):
                reduction.publish(args.only_slot(walk.first_row + column), key)
                # other warps may have equal scores and lower ids in this tile
                update_threshold(shared, column, key, Int32(0))
        return left

    @cute.jit
    def score_columns(self, args, walk, shared, logits, token0, columns, masked, warp, lane):
        """Scores every token of a warp's tile in some of its threads' columns (bits), and publishes the best, draw by
        draw."""
        one_draw = args.num_samples == 1
        bit = self.fragments.column_mask_type
        copy = cute.make_rmem_tensor((2 * self.halves, 2 * self.own_blocks), Float32)
        for j in range_constexpr(self.own_blocks):
            for c in range_constexpr(2):
                for r in range_constexpr(2 * self.halves):
                    copy[r, 2 * j + c] = logits[c, r % 2, j, r // 2]
        for number in cutlass.range(2 * self.own_blocks, unroll=1):
            column = (self.fragments.first_block(warp) + number // 2) * 8 + (lane % 4) * 2 + number % 2
            row = walk.first_row + column
            live = (row < args.batch) & (shared.rows[column, 1] != Float32(-INFINITY))
            wanted = (columns >> bit(number)) & bit(1) != bit(0)
            draws = Int32(select_(wanted & cute.arch.vote_any_sync(live), args.num_samples, Int32(0)))
            noisy = cute.arch.vote_any_sync(live & (shared.rows[column, 0] != Float32(thresholds.GREEDY_SLOPE)))
            for draw in cutlass.range(draws, unroll=1):
                best = Int64(0)
                best_inf = Int64(0)
                for r in range_constexpr(2 * self.halves):
                    token = token0 + 8 * (r % 2) + 64 * (r // 2)
                    score = copy[r, number]
                    if noisy:
                        score = exact_score(args, copy[r, number], args.base + token, row, draw)
                    key = reduction.pack_key(score, args.base + token)
                    sampled = live & (token < args.end) & (token >= args.skip)
                    is_inf = score == Float32(INFINITY)
                    counts = (score != Float32(INFINITY)) & (score != Float32(-INFINITY))  # finite, or NaN
                    if const_expr(self.masks):
                        counts = counts & ~(masked & (copy[r, number] == Float32(-INFINITY)))
                    best = reduction.max_key(best, Int64(select_(sampled & counts, key, Int64(0))))
                    best_inf = reduction.max_key(best_inf, Int64(select_(sampled & is_inf, key, Int64(0))))
                if const_expr(self.counts_evaluations):
                    if live:
                        counter = global_pointer(
                            Int64, workspace_layout.before(args.workspace, workspace_layout.EVALUATED_WHOLE)
                        )
                        cute.arch.atomic_add(counter, Int64(2 * self.halves), sem="relaxed", scope="gpu")
                best = reduction.column_max(best)
                best_inf = reduction.column_max(best_inf)
                slot = args.slot(row, draw)
                if lane < 4:
                    if best != Int64(0):
                        reduction.publish(slot, best)
                        if one_draw:  # other warps may have equal scores and lower ids in this tile
                            update_threshold(shared, column, best, Int32(0))
                    if best_inf != Int64(0):
                        reduction.publish(args.infinite_slot(slot), best_inf)
