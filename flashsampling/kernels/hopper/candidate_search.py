"""The consumers' search of a tile, three instructions a logit: bound = logit * scale + noise's bound - row's threshold.

What is not below 0 is a candidate, and goes to the queue (``candidates``) or is evaluated with its tile
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
    """Of a tile shape."""

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
        self.masks = (
            features.transforms
        )  # -inf may be what is masked out: no score, whatever the temperature, and no candidate

    def sampled(self, args, walk, iteration):
        """2 if all of a tile's tokens are sampled, 1 if some are, 0 if none. What a cluster rounds its tiles up by is
        not: searched, all of it would be candidates, since no threshold is known that -inf falls short of."""
        first_token = walk.first_token(iteration)
        some = (first_token + TILE_V > args.skip) & (first_token < args.end)
        everything = (first_token + TILE_V <= args.end) & (first_token >= args.skip)
        return Int32(select_(everything, Int32(2), Int32(select_(some, Int32(1), Int32(0)))))

    @cute.jit
    def tile(
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
        """The consumers, 256 threads: queues the candidates of the CTA's tile number ``iteration``.

        ``logits``: this thread's, (2 columns, 2 rows, blocks of eight columns, halves of the tokens) float32.
        ``first_words``: the code words number 0. ``sampled``: what it says of the tile, not 0. ``masked``: -inf is what
        is masked out. ``barrier``: of all consumers.
        """
        lane = thread % 32
        warp = thread // 32
        first_token = walk.first_token(iteration)
        token0 = first_token + self.fragments.first_token(warp) + lane // 4
        if sampled == 1:
            self.mask(args, logits, token0)
        columns_of = self.fragments.columns_of
        crowd = columns_of(2 ** (2 * self.own_blocks) - 1)
        if args.num_samples == 1:
            crowd = columns_of(0)
            if iteration == Int32((walk.first_tile + 1) * TILE_V <= args.skip):
                self.threshold_updates.seed(args, walk, shared, logits, lane, warp)
                barrier.arrive_and_wait()
                self.threshold_updates.share(args, walk, shared, iteration, thread, barrier)
                barrier.arrive_and_wait()
            # first without a branch, so that loads and arithmetic of all vectors overlap; then what the few hits need.
            # A hit is a sign of 0, and so is a NaN, as the hardware makes it
            hits = Uint32(0)
            exponents = noise.exponents(args.batch)
            for q in range_constexpr(self.fragments.vectors):
                signs = Uint32(0x80008000)
                words = first_words if const_expr(q == 0) else self.fragments.load_bounds(shared, q, thread)
                for i in range_constexpr(0, 4 * self.vector, 2):
                    _, r, j, half = self.fragments.place(q, i)
                    if const_expr(i % (4 * self.halves) == 0):
                        pair = self.fragments.load_rows(shared, self.fragments.first_block(warp) + j, lane)
                    bases = [cute.math.fma(logits[c, r, j, half], pair[2 * c], pair[2 * c + 1]) for c in range(2)]
                    signs = signs & noise.add_bounds(*bases, words[i // 4], r, exponents)
                hits = hits | Uint32(select_(signs == Uint32(0x80008000), Uint32(0), Uint32(1 << q)))
            if cute.arch.vote_any_sync(hits != Uint32(0)):
                hits = cute.arch.warp_redux_sync(hits, "or")
                while hits != Uint32(0):
                    q, hits = ptx.take_lowest(hits)
                    # one copy, since what is seldom run is seldom cached
                    found = cute.make_rmem_tensor(4 * self.vector, Float32)
                    self.fragments.pick(logits, q, found, 0, 1)
                    special = cute.arch.vote_any_sync(shared.special[0] != 0)
                    mask = self._candidates(shared, found, special, masked, q, lane, warp)
                    if special:
                        columns = self.dense_fallback.is_dense(mask)
                        if columns != Uint32(0):
                            mask = self.dense_fallback.without_dense(mask, columns)
                            columns = self.dense_fallback.evaluate_greedy(
                                args, walk, shared, found, columns, token0, q, lane, warp
                            )
                            crowd = crowd | columns_of(columns) << columns_of(q * (2 * self.vector // self.halves))
                    self.queue.push_candidates(shared, found, mask, special, q, iteration, lane, warp)
        if crowd != columns_of(0):
            self.dense_fallback.every_score(args, walk, shared, logits, token0, crowd, masked, warp, lane)

    @cute.jit
    def mask(self, args: Arguments, logits, token0):
        """Makes -inf of a tile's tokens that are not sampled. ``token0``: the thread's first one."""
        for r in range_constexpr(2):
            for half in range_constexpr(self.halves):
                token = token0 + 8 * r + 64 * half
                if (token >= args.end) | (token < args.skip):
                    for j in range_constexpr(self.own_blocks):
                        for c in range_constexpr(2):
                            logits[c, r, j, half] = Float32(-INFINITY)

    @cute.jit
    def _candidates(self, shared, logits, special, masked, q, lane, warp) -> Uint32:
        """Of a thread's code words number ``q``, whose logits (4 ``vector``,) are given, a bit for each that may win.
        What is here is exposed, in most tiles: 24 instructions more were 1.5 % of a step at D = 2048, B = 128."""
        blocks = self.vector // self.halves
        words = self.fragments.load_bounds(shared, q, warp * 32 + lane)
        first_block = self.fragments.first_block(warp) + q * blocks
        rows = [self.fragments.load_rows(shared, first_block + j, lane) for j in range(blocks)]
        rows = [(row[2 * c], row[2 * c + 1]) for row in rows for c in range(2)]  # by column: slope, threshold
        mask = Uint32(0)
        if special:
            ratios = [self.fragments.load_ratios(shared, first_block + j, lane) for j in range(blocks)]
            ratios = [ratio for pair in ratios for ratio in pair]
            mask = self._special_candidates(logits, words, rows, ratios)
        else:
            for n in range_constexpr(len(rows)):
                for i in self.fragments.logits_of(n % 2, n // 2):
                    wins = thresholds.may_win_smooth(logits[i], noise.bound_float(words[i // 4], i % 4), *rows[n])
                    mask = mask | Uint32(select_(wins, Uint32(1 << i), Uint32(0)))
        if const_expr(self.masks):
            for i in range_constexpr(4 * self.vector):
                out = masked & (logits[i] == Float32(-INFINITY))
                mask = mask & ~Uint32(select_(out, Uint32(1 << i), Uint32(0)))
        return mask

    @cute.jit
    def _special_candidates(self, logits, words, rows, ratios) -> Uint32:
        """``_candidates`` by the finer bound."""
        bounds = [thresholds.bound_of(*row, ratio) for row, ratio in zip(rows, ratios)]
        mask = Uint32(0)
        # rows of zeros, and sharp ones of equal logits, hit in every tile: first whether what is greatest could win
        noisy = Boolean(False)
        for n in range_constexpr(len(bounds)):
            logit = code = Float32(-INFINITY)
            for i in self.fragments.logits_of(n % 2, n // 2):
                logit = cute.arch.fmax(logit, logits[i], nan=True)
                code = cute.arch.fmax(code, noise.bound_float(words[i // 4], i % 4), nan=True)
            noisy = noisy | thresholds.some_may_win(logit, code, bounds[n])
        if cute.arch.vote_any_sync(noisy):
            for n in range_constexpr(len(bounds)):
                for i in self.fragments.logits_of(n % 2, n // 2):
                    wins = thresholds.may_win(logits[i], noise.bound_float(words[i // 4], i % 4), bounds[n])
                    mask = mask | Uint32(select_(wins, Uint32(1 << i), Uint32(0)))
        return mask
