"""What becomes of a tile's logits: codes of the noise, the search for tokens that can win, and their exact evaluation.

The seam of the kernel. ``Mainloop`` hands over accumulators and knows nothing else; ``kernel`` gives each role its
threads and calls one method of it per step. Behind it is a room per subject:

    codes        noise warpgroup        seven bits of every token's noise, into shared memory, while the matmul runs
    search       consumer warpgroups    a bound of each logit's score; what may reach its row's threshold is a candidate
    candidates   two warps              the exact score of a candidate; what leads its row in this CTA is published
    processing   consumer warpgroups    with ``Features.transforms``: bias, soft cap, penalties, mask
    summaries    consumer warpgroups    with ``Features.logits``: logits to memory, and of chunks the highest and the
                                        mass
    floors       a warp                 with ``Features.logits``: below which logit of a row nothing need be stored
    crowds       consumer warpgroups    exact scores of whole tiles, where a crowd may win or there are several draws
    learning     all of these           when, and by what, a row's threshold falls; ``threshold`` says why no token is
                                        missed
    scores       all of these           the score of one token
    fragments                           who holds what of a tile
    shared                              shared memory
    arguments, slots                    what a launch is told, and its workspace
    reduction    noise warpgroup        the end of the launch: from what was published to ids

Whoever wants something of every logit (a row's log-sum-exp, per-tile maxima, bias, masks, the logits of a few chosen
tiles) adds a room: its options to ``config.Features``, which is part of what a kernel is compiled for, its arguments to
``arguments.Arguments``, its state to ``shared``, and its code to ``CandidateSearch.tile``, which sees all logits in
registers.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from . import ptx, reduction, shared_memory, store_cutoff
from .arguments import Arguments, Outputs, TransformArguments, Walk
from .block_stats import BlockStats
from .candidate_search import CandidateSearch
from .candidates import CandidateQueue
from .config import Features, TileConfig
from .dense_fallback import DenseFallback
from .fragments import Fragments
from .gumbel_bounds import GumbelBounds
from .logit_transforms import LogitTransforms
from .shared_memory import Shared
from .threshold_updates import ThresholdUpdates


class SampleEpilogue:
    """One winner per row of a block of ``block_b`` rows."""

    def __init__(self, config: TileConfig, features: Features):
        self.block_b = config.block_b
        self.stamps = features.stamps
        self.fragments = Fragments(config)
        self.gumbel_bounds = GumbelBounds(config, self.fragments)
        self.threshold_updates = ThresholdUpdates(self.fragments)
        self.queue = CandidateQueue(self.fragments, self.gumbel_bounds, self.threshold_updates, features)
        self.searching = CandidateSearch(
            self.fragments, self.threshold_updates, self.queue, DenseFallback(self.fragments, features), features
        )
        self.processed = LogitTransforms(self.fragments) if features.transforms else None
        self.block_stats = BlockStats(self.fragments) if features.logits else None

    # -- shared memory

    def storage(self):
        """The structure of what the epilogue has in shared memory, for the kernel's."""
        return shared_memory.storage_of(self.block_b, self.gumbel_bounds.buffers, self.gumbel_bounds.words)

    @cute.jit
    def open(self, storage, thread) -> Shared:
        """All threads, before the CTA's first barrier: what was allocated, its barriers begun."""
        opened = shared_memory.shared_of(storage, self.block_b, self.gumbel_bounds.words)
        shared_memory.init_barriers(opened, self.gumbel_bounds.buffers, thread)
        return opened

    # -- the noise warpgroup, 128 threads

    @cute.jit
    def prepare(self, args: Arguments, out: Outputs | None, walk: Walk, memory: Shared, thread, barrier):
        """First values of shared memory, which everybody waits for. ``barrier``: of these threads."""
        shared_memory.prepare(args, out, walk, memory, self.block_b, thread, barrier)

    @cute.jit
    def make_bounds(
        self, args: Arguments, params: TransformArguments | None, walk: Walk, memory: Shared, thread, barrier
    ):
        """The codes of all tiles, of one draw per row. ``barrier``: of these threads."""
        if args.num_samples == 1:
            self.gumbel_bounds.make(args, params, walk, memory, self.block_stats is not None, thread, barrier)

    @cute.jit
    def finish(
        self,
        args: Arguments,
        out: Outputs | None,
        memory: Shared,
        row_block,
        row_blocks,
        ctas,
        thread,
        published,
        barrier,
    ):
        """The end of the launch. ``published``: the barrier after which all of the CTA's keys are; ``barrier``: of
        these."""
        reduction.finish(
            args, out, self.block_b, self.stamps, row_block, row_blocks, ctas, memory, thread, published, barrier
        )

    # -- the finder, 32 threads

    @cute.jit
    def find_cutoffs(self, args: Arguments, out: Outputs, walk: Walk, memory: Shared, row_block, ctas, lane):
        """Once, with ``Features.logits``."""
        store_cutoff.find(
            args, out, walk, memory.done, shared_memory.CONSUMER_WARPS, self.block_b, row_block, ctas, lane
        )

    # -- the evaluators, 64 threads

    @cute.jit
    def evaluate(self, args: Arguments, walk: Walk, memory: Shared, thread):
        """Candidates, until the consumers are done."""
        self.queue.evaluate(args, walk, memory, thread)

    # -- the consumers, 256 threads

    def logits_of(self, accumulator):
        """A thread's accumulator: (2 columns, 2 rows, blocks of eight columns, halves of the tokens)."""
        return cute.make_tensor(accumulator.iterator, cute.make_layout(self.fragments.of_thread))

    def sampled(self, args: Arguments, walk: Walk, iteration):
        """For ``search``, before the tile's matmul: whether the tile is sampled."""
        return self.searching.sampled(args, walk, iteration)

    @cute.jit
    def prefetch(self, args: Arguments, params: TransformArguments | None, walk: Walk, iteration, thread):
        """For ``search``, before the tile's matmul: what it will read, on its way."""
        if const_expr(self.processed is not None):
            if params.any != 0:
                self.processed.prefetch(args, params, walk, iteration, thread)

    @cute.jit
    def receive(
        self, args: Arguments, params: TransformArguments | None, walk: Walk, memory: Shared, iteration, thread
    ):
        """For ``search``, while the last products are on their way: a tile's codes, the first words of them, and what a
        sparse bias has of the tile."""
        of_tile = self.gumbel_bounds.wait(memory, iteration, args.num_samples == 1)
        sparse_bias = []
        if const_expr(self.processed is not None):
            sparse_bias = self.processed.sparse_bias(args, params, walk, iteration, ptx.settled(thread))
        return of_tile, self.fragments.load_bounds(of_tile, 0, thread), sparse_bias

    @cute.jit
    def search(
        self,
        args: Arguments,
        params: TransformArguments | None,
        out: Outputs | None,
        walk: Walk,
        of_tile: Shared,
        logits,
        words,
        sparse_bias,
        sampled,
        iteration,
        thread,
        barrier,
    ):
        """The search of the CTA's tile number ``iteration``, and its codes' release. ``barrier``: of these threads."""
        if sampled != 0:
            if const_expr(self.processed is None):
                self.searching.tile(
                    args, walk, of_tile, logits, words, sampled, Boolean(False), iteration, thread, barrier
                )
            else:
                # what is made of the thread's number is made again for every tile: kept, it would be in local memory,
                # whose every load is exposed for 600 cycles
                if params.any != 0:
                    self.processed.tile(
                        args, params, walk, of_tile, logits, words, sparse_bias, iteration, ptx.settled(thread)
                    )
                if sampled == 1:
                    token0 = self.fragments.token(walk.first_token(iteration), ptx.settled(thread))
                    self.searching.mask(args, logits, token0)
                if self._draws(args, of_tile):
                    masked, same = params.token_mask != Int64(0), ptx.settled(thread)
                    self.searching.tile(args, walk, of_tile, logits, words, Int32(2), masked, iteration, same, barrier)
                if const_expr(self.block_stats is not None):
                    self.block_stats.tile(
                        args, out, walk, of_tile, logits, sampled, iteration, ptx.settled(thread), barrier
                    )
                thread = ptx.settled(thread)
        self.gumbel_bounds.release(of_tile, iteration, thread, args.num_samples == 1)

    @cute.jit
    def _draws(self, args: Arguments, memory: Shared) -> Boolean:
        """Whether tokens are drawn here."""
        draws = args.num_samples != 0
        if const_expr(self.block_stats is not None):
            draws = draws & (memory.drawing[0] != 0)
        return draws

    @cute.jit
    def done(self, memory: Shared, thread):
        """After the last tile."""
        if thread % 32 == 0:
            self.queue.close(memory)
