"""Connects the roles of ``kernel`` with the modules that process a tile's logits.

``Mainloop`` hands over accumulators. ``kernel`` gives each role its threads and calls one method here per step. The
modules behind it:

    gumbel_bounds      noise warps      7-bit upper bounds of the noise, into shared memory, while the matmul runs
    logit_transforms   consumer warps   with ``Features.transforms``: bias, scale, soft cap, penalties, mask
    candidate_search   consumer warps   the bound of each logit's score against its row's threshold
    candidates         candidate warps  exact scores of candidates; publication of those that lead their row in this CTA
    dense_fallback     consumer warps   exact scores of whole tiles: too many candidates, or several draws per row
    threshold_updates  all of these     when a row's threshold falls; ``thresholds`` proves that no winner is skipped
    block_stats        consumer warps   with ``Features.logits``: logits and block statistics to memory
    store_cutoff       cutoff warp      with ``Features.logits``: the logit below which no block of a row is stored
    scores             all of these     the exact score of one token
    reduction          noise warps      the end of the launch: winners to token ids
    fragments          -                which thread holds which logit and bound
    shared_memory      -                layout and first values
    arguments          -                what a launch passes to the kernel
    workspace_layout   -                addresses in the workspace

Code that needs every logit (log-sum-exp, maxima per tile, a new transform) is a class beside these: its options in
``config.Features``, its arguments in ``arguments.Arguments``, its state in ``shared_memory``, and a call in
``SampleEpilogue.search``, where all logits are in registers.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from . import ptx, reduction, shared_memory, store_cutoff
from .arguments import Arguments, Outputs, TransformArguments, Walk
from .block_stats import BlockStatsWriter
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
    """Finds one winner per row and draw of a block of ``block_b`` rows."""

    def __init__(self, config: TileConfig, features: Features):
        self.block_b = config.block_b
        self.stamps = features.stamps
        self.fragments = Fragments(config)
        self.gumbel_bounds = GumbelBounds(config, self.fragments)
        self.threshold_updates = ThresholdUpdates(self.fragments)
        self.queue = CandidateQueue(self.fragments, self.gumbel_bounds, self.threshold_updates, features)
        self.candidate_search = CandidateSearch(
            self.fragments, self.threshold_updates, self.queue, DenseFallback(self.fragments, features), features
        )
        self.transforms = LogitTransforms(self.fragments) if features.transforms else None
        self.block_stats = BlockStatsWriter(self.fragments) if features.logits else None

    # -- shared memory

    def storage(self):
        """Returns the ``cute.struct`` of the epilogue's shared memory."""
        return shared_memory.storage_type(self.block_b, self.gumbel_bounds.buffers, self.gumbel_bounds.words)

    @cute.jit
    def open(self, storage, thread) -> Shared:
        """Views allocated storage as ``Shared`` and initialises its mbarriers. All threads call it, before the CTA's
        first barrier."""
        opened = shared_memory.open_storage(storage, self.block_b, self.gumbel_bounds.words)
        shared_memory.init_barriers(opened, self.gumbel_bounds.buffers, thread)
        return opened

    # -- the noise warpgroup, 128 threads

    @cute.jit
    def prepare(self, args: Arguments, out: Outputs | None, walk: Walk, memory: Shared, thread, barrier):
        """Writes the first values of shared memory. ``barrier``: of the noise threads."""
        shared_memory.prepare(args, out, walk, memory, self.block_b, thread, barrier)

    @cute.jit
    def make_bounds(
        self, args: Arguments, params: TransformArguments | None, walk: Walk, memory: Shared, thread, barrier
    ):
        """Makes the Gumbel bounds of all tiles; nothing with several draws per row. ``barrier``: of the noise
        threads."""
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
        """Ends the launch. ``published``: the barrier after which all of the CTA's keys are published; ``barrier``: of
        the noise threads."""
        reduction.finish(
            args, out, self.block_b, self.stamps, row_block, row_blocks, ctas, memory, thread, published, barrier
        )

    # -- the cutoff warp, 32 threads

    @cute.jit
    def find_cutoffs(self, args: Arguments, out: Outputs, walk: Walk, memory: Shared, row_block, ctas, lane):
        """Finds the store cutoffs of some rows, once per launch."""
        store_cutoff.find(
            args, out, walk, memory.done, shared_memory.CONSUMER_WARPS, self.block_b, row_block, ctas, lane
        )

    # -- the candidate warps, 64 threads

    @cute.jit
    def score_candidates(self, args: Arguments, walk: Walk, memory: Shared, thread):
        """Scores candidates until the consumers are done."""
        self.queue.score_candidates(args, walk, memory, thread)

    # -- the consumers, 256 threads

    def view_logits(self, accumulator):
        """Views a thread's accumulator as (2 columns, 2 rows, column blocks of eight, token halves)."""
        return cute.make_tensor(accumulator.iterator, cute.make_layout(self.fragments.thread_shape))

    def sampled(self, args: Arguments, walk: Walk, iteration):
        """Returns whether all, some or none of a tile's tokens are sampled; called before the tile's matmul."""
        return self.candidate_search.sampled(args, walk, iteration)

    @cute.jit
    def prefetch(self, args: Arguments, params: TransformArguments | None, walk: Walk, iteration, thread):
        """Prefetches what ``search`` reads of a tile to L2; called before the tile's matmul."""
        if const_expr(self.transforms is not None):
            if params.any != 0:
                self.transforms.prefetch(args, params, walk, iteration, thread)

    @cute.jit
    def receive(
        self, args: Arguments, params: TransformArguments | None, walk: Walk, memory: Shared, iteration, thread
    ):
        """Waits for a tile's bounds while the last wgmma runs. Returns shared memory with them, their first words, and
        the tile's sparse-bias words."""
        tile_memory = self.gumbel_bounds.wait(memory, iteration, args.num_samples == 1)
        sparse_bias = []
        if const_expr(self.transforms is not None):
            sparse_bias = self.transforms.load_sparse_bias(args, params, walk, iteration, ptx.scheduling_fence(thread))
        return tile_memory, self.fragments.load_bounds(tile_memory, 0, thread), sparse_bias

    @cute.jit
    def search(
        self,
        args: Arguments,
        params: TransformArguments | None,
        out: Outputs | None,
        walk: Walk,
        tile_memory: Shared,
        logits,
        words,
        sparse_bias,
        sampled,
        iteration,
        thread,
        barrier,
    ):
        """Searches the CTA's tile number ``iteration`` and releases its bounds. ``barrier``: of the consumer
        threads."""
        if sampled != 0:
            if const_expr(self.transforms is None):
                self.candidate_search.search_tile(
                    args, walk, tile_memory, logits, words, sampled, Boolean(False), iteration, thread, barrier
                )
            else:
                # addresses made of the thread number are recomputed for every tile: kept, they would spill, and each
                # load from local memory is exposed for 600 cycles
                if params.any != 0:
                    self.transforms.apply(
                        args,
                        params,
                        walk,
                        tile_memory,
                        logits,
                        words,
                        sparse_bias,
                        iteration,
                        ptx.scheduling_fence(thread),
                    )
                if sampled == 1:
                    token0 = self.fragments.token(walk.first_token(iteration), ptx.scheduling_fence(thread))
                    self.candidate_search.mask(args, logits, token0)
                if self._draws(args, tile_memory):
                    masked, same = params.token_mask != Int64(0), ptx.scheduling_fence(thread)
                    self.candidate_search.search_tile(
                        args, walk, tile_memory, logits, words, Int32(2), masked, iteration, same, barrier
                    )
                if const_expr(self.block_stats is not None):
                    self.block_stats.write_tile(
                        args, out, walk, tile_memory, logits, sampled, iteration, ptx.scheduling_fence(thread), barrier
                    )
                thread = ptx.scheduling_fence(thread)
        self.gumbel_bounds.release(tile_memory, iteration, thread, args.num_samples == 1)

    @cute.jit
    def _draws(self, args: Arguments, memory: Shared) -> Boolean:
        """Returns whether this row block draws tokens."""
        draws = args.num_samples != 0
        if const_expr(self.block_stats is not None):
            draws = draws & (memory.drawing[0] != 0)
        return draws

    @cute.jit
    def done(self, memory: Shared, thread):
        """Says that a consumer warp has searched its last tile."""
        if thread % 32 == 0:
            self.queue.close(memory)
