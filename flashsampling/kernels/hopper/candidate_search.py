"""Searches a tile's logits for tokens that can win: the consumer warps, 2.75 instructions a logit.

The bound of a score is ``logit * slope + noise's bound + threshold`` (``thresholds``; the threshold is stored negated).
A token whose bound is not below 0 is a candidate: it goes to the queue (``candidates``) or is scored with its tile
(``dense_fallback``).
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, range_constexpr, select_

from . import noise, ptx, thresholds
from .arguments import Arguments, Walk
from .candidates import CandidateQueue
from .config import TILE_V, Features
from .dense_fallback import DenseFallback
from .fragments import Fragments
from .reduction import INFINITY
from .shared_memory import Shared
from .threshold_updates import ThresholdUpdates


class CandidateSearch:
    """The search of one tile shape."""

    def __init__(
        self,
        fragments: Fragments,
        threshold_updates: ThresholdUpdates,
        queue: CandidateQueue,
        dense_fallback: DenseFallback,
        features: Features,
    ):
        self.fragments = fragments
        self.halves = fragments.halves
        self.own_blocks = fragments.own_blocks
        self.vector = fragments.vector
        self.threshold_updates = threshold_updates
        self.queue = queue
        self.dense_fallback = dense_fallback
        self.masks = features.transforms  # -inf may be a masked token: no score at any temperature, and no candidate

    def sampled(self, args, walk, iteration):
        """Returns 2 if all of a tile's tokens are sampled, 1 if some are, 0 if none.

        A cluster's surplus tiles have none. They are not searched: no threshold is known that -inf falls short of, so
        all their tokens would be candidates.
        """
        first_token = walk.first_token(iteration)
        some = (first_token + TILE_V > args.skip) & (first_token < args.end)
        everything = (first_token + TILE_V <= args.end) & (first_token >= args.skip)
        return Int32(select_(everything, Int32(2), Int32(select_(some, Int32(1), Int32(0)))))

    @cute.jit
    def search_tile(
        self,
        args: Arguments,
        walk: Walk,
        shared: Shared,
        logits,
        first_words,
        sampled,
        masked: Boolean,
        iteration,
        thread,
        barrier,
    ):
        """Queues or scores the candidates of the CTA's tile number ``iteration``: the consumers, 256 threads.

        ``logits``: the thread's, (2 columns, 2 rows, column blocks of eight, token halves) float32. ``first_words``:
        its bound words number 0. ``sampled``: the result of ``sampled``, not 0. ``masked``: -inf marks masked tokens.
        ``barrier``: of all consumers.
        """
        lane = thread % 32
        warp = thread // 32
        first_token = walk.first_token(iteration)
        token0 = first_token + self.fragments.first_token(warp) + lane // 4
        if sampled == 1:
            self.mask(args, logits, token0)
        column_mask_type = self.fragments.column_mask_type
        dense_columns = column_mask_type(2 ** (2 * self.own_blocks) - 1)
        if args.num_samples == 1:
            dense_columns = column_mask_type(0)
            if iteration == Int32((walk.first_tile + 1) * TILE_V <= args.skip):
                self.threshold_updates.warm_start(args, walk, shared, logits, lane, warp)
                barrier.arrive_and_wait()
                self.threshold_updates.exchange_thresholds(args, walk, shared, iteration, thread, barrier)
                barrier.arrive_and_wait()
            # first without a branch, so that loads and arithmetic of all vectors overlap; then the few hits. A hit
            # has the sign 0, as the hardware's NaN has
            hits = Uint32(0)
            exponents = noise.exponents(args.batch)
            for q in range_constexpr(self.fragments.vectors):
                signs = Uint32(0x80008000)
                words = first_words if const_expr(q == 0) else self.fragments.load_bounds(shared, q, thread)
                for i in range_constexpr(0, 4 * self.vector, 2):
                    _, r, j, half = self.fragments.logit_index(q, i)
                    if const_expr(i % (4 * self.halves) == 0):
                        pair = self.fragments.load_rows(shared, self.fragments.first_block(warp) + j, lane)
                    bases = [cute.math.fma(logits[c, r, j, half], pair[2 * c], pair[2 * c + 1]) for c in range(2)]
                    signs = signs & noise.add_bounds(*bases, words[i // 4], r, exponents)
                hits = hits | Uint32(select_(signs == Uint32(0x80008000), Uint32(0), Uint32(1 << q)))
            if cute.arch.vote_any_sync(hits != Uint32(0)):
                hits = cute.arch.warp_redux_sync(hits, "or")
                while hits != Uint32(0):
                    q, hits = ptx.take_lowest(hits)
                    # one copy of this code: rare code is rarely in the instruction cache
                    found = cute.make_rmem_tensor(4 * self.vector, Float32)
                    self.fragments.select_logits(logits, q, found, 0, 1)
                    degenerate = cute.arch.vote_any_sync(shared.degenerate[0] != 0)
                    mask = self._candidates(shared, found, degenerate, masked, q, lane, warp)
                    if degenerate:
                        columns = self.dense_fallback.is_dense(mask)
                        if columns != Uint32(0):
                            mask = self.dense_fallback.without_dense(mask, columns)
                            columns = self.dense_fallback.score_greedy_columns(
                                args, walk, shared, found, columns, token0, q, lane, warp
                            )
                            dense_columns = dense_columns | column_mask_type(columns) << column_mask_type(
                                q * (2 * self.vector // self.halves)
                            )
                    self.queue.push_candidates(shared, found, mask, degenerate, q, iteration, lane, warp)
        if dense_columns != column_mask_type(0):
            self.dense_fallback.score_columns(args, walk, shared, logits, token0, dense_columns, masked, warp, lane)

    @cute.jit
    def mask(self, args: Arguments, logits, token0):
        """Sets the logits of a tile's tokens that are not sampled to -inf. ``token0``: the thread's first token."""
        for r in range_constexpr(2):
            for half in range_constexpr(self.halves):
                token = token0 + 8 * r + 64 * half
                if (token >= args.end) | (token < args.skip):
                    for j in range_constexpr(self.own_blocks):
                        for c in range_constexpr(2):
                            logits[c, r, j, half] = Float32(-INFINITY)

    @cute.jit
    def _candidates(self, shared, logits, degenerate, masked, q, lane, warp) -> Uint32:
        """Returns a bit for each of a thread's logits (4 ``vector``,) of bound words number ``q`` that may win.

        This code is exposed in most tiles: 24 more instructions cost 1.5 % of a step at D = 2048, B = 128.
        """
        blocks = self.vector // self.halves
        words = self.fragments.load_bounds(shared, q, warp * 32 + lane)
        first_block = self.fragments.first_block(warp) + q * blocks
        rows = [self.fragments.load_rows(shared, first_block + j, lane) for j in range(blocks)]
        rows = [(row[2 * c], row[2 * c + 1]) for row in rows for c in range(2)]  # (slope, threshold) by column
        mask = Uint32(0)
        if degenerate:
            ratios = [self.fragments.load_ratios(shared, first_block + j, lane) for j in range(blocks)]
            ratios = [ratio for pair in ratios for ratio in pair]
            mask = self._degenerate_candidates(logits, words, rows, ratios)
        else:
            for n in range_constexpr(len(rows)):
                for i in self.fragments.column_logits(n % 2, n // 2):
                    wins = thresholds.may_win_fast(logits[i], noise.bound_float(words[i // 4], i % 4), *rows[n])
                    mask = mask | Uint32(select_(wins, Uint32(1 << i), Uint32(0)))
        if const_expr(self.masks):
            for i in range_constexpr(4 * self.vector):
                out = masked & (logits[i] == Float32(-INFINITY))
                mask = mask & ~Uint32(select_(out, Uint32(1 << i), Uint32(0)))
        return mask

    @cute.jit
    def _degenerate_candidates(self, logits, words, rows, ratios) -> Uint32:
        """Finds candidates like ``_candidates``, by the finer bound of ``thresholds.may_win``."""
        bounds = [thresholds.row_bound(*row, ratio) for row, ratio in zip(rows, ratios)]
        mask = Uint32(0)
        # rows of zeros, and low-temperature rows of equal logits, hit in every tile: test each column's greatest first
        noisy = Boolean(False)
        for n in range_constexpr(len(bounds)):
            logit = code = Float32(-INFINITY)
            for i in self.fragments.column_logits(n % 2, n // 2):
                logit = cute.arch.fmax(logit, logits[i], nan=True)
                code = cute.arch.fmax(code, noise.bound_float(words[i // 4], i % 4), nan=True)
            noisy = noisy | thresholds.some_may_win(logit, code, bounds[n])
        if cute.arch.vote_any_sync(noisy):
            for n in range_constexpr(len(bounds)):
                for i in self.fragments.column_logits(n % 2, n // 2):
                    wins = thresholds.may_win(logits[i], noise.bound_float(words[i // 4], i % 4), bounds[n])
                    mask = mask | Uint32(select_(wins, Uint32(1 << i), Uint32(0)))
        return mask
