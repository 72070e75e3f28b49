"""Makes 7-bit upper bounds of every token's noise in shared memory: the noise warps, while the matmul runs.

A tile's bounds lie in one of ``TileConfig.bound_buffers`` buffers, in turn. Only this module knows which buffer a tile
uses and in which phase its mbarriers are (``kernel`` has the table of all barriers). With several draws per row there
are no bounds, and nobody waits for them.

A bound is a byte. Its top bit is a mark: the token has counts, and ``logit_transforms`` applies penalties to it. The
transforms remove the mark before the search.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64, const_expr, range_constexpr, select_

from . import noise, ptx
from .arguments import Arguments, TransformArguments, Walk
from .config import TILE_V, TileConfig
from .fragments import Fragments
from .logit_transforms import counts_row
from .memory import global_pointer
from .shared_memory import NOISE_THREADS, Shared

_LAST_WARP = NOISE_THREADS // 32 - 1  # the last noise warp
_CONSTANTS = 2 * noise.ROW_CONSTANTS + 2  # words for a pair of columns


class GumbelBounds:
    """Assigns columns and tokens to noise threads, and synchronises them with the consumers."""

    def __init__(self, config: TileConfig, fragments: Fragments):
        self.fragments = fragments
        self.pairs = fragments.pairs  # of neighbouring columns
        self.threads_per_pair = 1  # threads that share the groups of a pair
        while 2 * self.threads_per_pair * self.pairs <= NOISE_THREADS:
            self.threads_per_pair *= 2
        # groups of each pair that the last warp takes over, so that all four warps have equal work
        self.helped_groups = {72: 10, 80: 10, 88: 7, 96: 7, 104: 5, 112: 3}.get(self.pairs, 0)
        # warps with 32 pairs each (the last perhaps fewer), and the remaining pairs
        self.pair_warps, self.pairs_left = divmod(self.pairs, 32)
        if self.pairs_left > 16:
            self.pair_warps, self.pairs_left = self.pair_warps + 1, 0
        self.buffers = config.bound_buffers
        self.words = self.buffers * fragments.tile_words

    # -- buffers

    def _buffer(self, iteration):
        """Returns the buffer of the CTA's tile number ``iteration``, and how often it was used before."""
        return iteration % self.buffers, iteration // self.buffers

    def _buffer_bounds(self, shared, buffer):
        """Returns the words of a buffer, (32 N,) uint32."""
        words = self.fragments.tile_words
        return cute.make_tensor(shared.gumbel_bounds.iterator + buffer * words, cute.make_layout(words))

    @cute.jit
    def wait(self, shared: Shared, iteration, one_draw) -> Shared:
        """Waits for a tile's bounds, as a consumer. Returns shared memory whose ``gumbel_bounds`` are that tile's."""
        buffer, use = self._buffer(iteration)
        tile_memory = shared._replace(gumbel_bounds=self._buffer_bounds(shared, buffer))
        if one_draw:
            cute.arch.mbarrier_wait(shared.bounds_full + buffer, use % 2)
        return tile_memory

    @cute.jit
    def release(self, shared: Shared, iteration, thread, one_draw):
        """Releases a tile's bounds, as a consumer warp."""
        cute.arch.sync_warp()
        if one_draw & (thread % 32 == 0):
            cute.arch.mbarrier_arrive(shared.bounds_empty + self._buffer(iteration)[0])

    def are_ready(self, shared: Shared, iteration) -> Boolean:
        """Returns whether a tile's bounds are complete; waits a microsecond at most."""
        buffer, use = self._buffer(iteration)
        return ptx.phase_is_over(Uint32((shared.bounds_full + buffer).toint()), Uint32(use & 1)) != Uint32(0)

    def first_unsearched(self, iteration) -> Int32:
        """Returns the first tile that may be unsearched when the bounds of tile ``iteration`` are complete."""
        return cutlass.max(iteration - (self.buffers - 1), 0)

    # -- bounds

    @cute.jit
    def make(
        self,
        args: Arguments,
        params: TransformArguments | None,
        walk: Walk,
        shared: Shared,
        may_not_draw: cutlass.Constexpr,
        thread,
        barrier,
    ):
        """Makes the bounds of every tile, tile by tile: the noise warps. ``barrier``: of their threads. With
        ``may_not_draw`` and ``Shared.drawing`` 0, it makes marks only."""
        draws = Boolean(True)
        if const_expr(may_not_draw):
            draws = shared.drawing[0] != 0
        turns = self._turns(thread)
        constants = cute.make_rmem_tensor(_CONSTANTS, Uint32)
        for i in cutlass.range(walk.tiles, unroll=1):
            tile = args.base // TILE_V + walk.tile(i)
            buffer, use = self._buffer(i)
            cute.arch.mbarrier_wait(shared.bounds_empty + buffer, (use + 1) % 2)
            if draws:
                for turn in cutlass.range(turns, unroll=1):
                    pair, first, stride, steps = self._assignment(thread, turn)
                    if (i == 0) | (turns > 1):
                        self._pair_constants(args, walk, pair, constants)
                    self._bound_pair(self._buffer_bounds(shared, buffer), tile, pair, constants, first, stride, steps)
            if const_expr(params is not None):
                if params.nonzero_mask != Int64(0):
                    if ~draws:
                        self._clear(self._buffer_bounds(shared, buffer), thread)
                    barrier.arrive_and_wait()
                    self._mark(args, params, walk, self._buffer_bounds(shared, buffer), i, thread)
            cute.arch.mbarrier_arrive(shared.bounds_full + buffer)

    @cute.jit
    def _clear(self, gumbel_bounds, thread):
        """Zeroes a buffer's bounds, which ``block_stats`` has overwritten, so that it holds no marks."""
        for at in cutlass.range(thread, self.fragments.tile_words, NOISE_THREADS, unroll=1):
            gumbel_bounds[at] = Uint32(0)

    def _turns(self, thread) -> Int32:
        """Returns how many pairs of columns a noise thread serves in turn: one, or those that it helps with."""
        if not self.helped_groups:
            return Int32(1)
        turns = self.pair_warps + (self.pairs_left > 0 and self.pair_warps == _LAST_WARP)
        return Int32(select_(thread >= 32 * _LAST_WARP, Int32(turns), Int32(1)))

    def _assignment(self, thread, turn) -> tuple:
        """Returns a noise thread's pair of columns, its first group of four tokens, the stride between its groups, and
        their number.

        Threads share a pair evenly where their number allows it. Otherwise each warp has 32 pairs, another warp has the
        remaining pairs, several threads each, and the last warp takes the last groups of all pairs of whole warps.
        """
        if not self.helped_groups:
            each = self.threads_per_pair
            first = thread // self.pairs
            return thread % self.pairs, first, Int32(each), Int32(select_(first < each, Int32(32 // each), Int32(0)))
        warps, left = self.pair_warps, self.pairs_left
        own = Int32(32 - self.helped_groups)
        turn_of_left = 0 if left and warps == _LAST_WARP else -1  # the turn in which the last warp does not help
        warp, lane = thread // 32, thread % 32
        helps = (warp == _LAST_WARP) & (turn != turn_of_left)
        pair = Int32(select_(helps, 32 * (turn - turn_of_left - 1) + lane, thread))
        first = Int32(select_(helps, own, Int32(0)))
        steps = Int32(select_(helps, Int32(self.helped_groups), own))
        steps = Int32(select_(pair < self.pairs, steps, Int32(0)))
        if left == 0:
            return pair, first, Int32(1), steps
        each = 32 // left
        shares = (warp == warps) & ~helps
        return (
            Int32(select_(shares, 32 * warps + lane % left, pair)),
            Int32(select_(shares, lane // left, first)),
            Int32(select_(shares, Int32(each), Int32(1))),
            Int32(select_(shares, Int32(32 // each), steps)),
        )

    @cute.jit
    def _pair_constants(self, args, walk, pair, constants):
        """Fills ``constants`` for two neighbouring columns: the row constants of Philox, then the AND and OR masks of
        their bounds, which make greedy rows' bounds constant."""
        keep, fixed = Uint32(0xFFFFFFFF), Uint32(0)
        for c in range_constexpr(2):
            row = cutlass.min(walk.first_row + 2 * pair + c, args.batch - 1)
            temperature, k0, k1, o0, o1 = args.row(row)
            words = noise.row_constants(Uint32(0), (o0, o1), (k0, k1))
            for n in range_constexpr(noise.ROW_CONSTANTS):
                constants[noise.ROW_CONSTANTS * c + n] = words[n]
            greedy = temperature < Float32(noise.GREEDY_BELOW)
            keep = keep & Uint32(select_(greedy, Uint32(0xFF00FF00 >> 8 * c), Uint32(0xFFFFFFFF)))
            fixed = fixed | Uint32(select_(greedy, Uint32(noise.GREEDY_BYTE * 0x00010001 << 8 * c), Uint32(0)))
        constants[_CONSTANTS - 2], constants[_CONSTANTS - 1] = keep, fixed

    @cute.jit
    def _bound_pair(self, gumbel_bounds, tile, pair, constants, first, stride, steps):
        """Makes the bounds of a pair of columns in ``steps`` of a tile's 32 groups (token bits 5, 4, 2, 1, 0), from
        ``first`` on and ``stride`` apart, where ``Fragments.load_bounds`` reads them."""
        vector = self.fragments.vector
        of_rows = [[constants[noise.ROW_CONSTANTS * c + n] for n in range(noise.ROW_CONSTANTS)] for c in range(2)]
        keep, fixed = constants[_CONSTANTS - 2], constants[_CONSTANTS - 1]
        at, to_half = self._word_index(pair, first)
        product = noise.group_product(Uint32(tile * 32 + first))  # by token id, not by position in the tile
        for _ in cutlass.range(steps, unroll=2 if self.fragments.block_b == 256 else 1):  # no faster for fewer columns
            words = [noise.philox_words_from_products(product, of_row) for of_row in of_rows]
            for half in range_constexpr(2):  # token bit 6
                word = noise.encode_bounds([words[c][r + 2 * half] for r in range(2) for c in range(2)])
                gumbel_bounds[at + half * to_half] = word & keep | fixed
            at += 4 * stride * vector
            product += Uint64(stride) * Uint64(noise.GROUP_STEP)

    def _word_index(self, pair, group) -> tuple:
        """Returns the index of the word of a pair of columns and a group of four tokens, without bit 6, and the
        distance to the word with bit 6."""
        vector, halves, own_blocks = self.fragments.vector, self.fragments.halves, self.fragments.own_blocks
        first_word = pair // 4 % own_blocks * halves  # of a consumer thread
        warpgroup = pair // 4 // own_blocks
        start = first_word // vector * 256 + warpgroup * 128 + 4 * group + pair % 4
        return start * vector + first_word % vector, 128 * vector if halves == 1 else 1

    # -- marks

    @cute.jit
    def _mark(self, args: Arguments, params: TransformArguments, walk: Walk, gumbel_bounds, iteration, thread):
        """Marks the bounds of a tile's tokens that have counts (``noise.add_marks``): the noise warps, behind a
        barrier.

        Their loads of counts delay nobody. A thread has a pair of columns, and all words of the pair, or a share of its
        groups of 16 tokens.
        """
        parts = const_expr(min(8, NOISE_THREADS // self.pairs))
        pair, part = thread % self.pairs, thread // self.pairs
        first_row = walk.first_row + 2 * pair
        tile = cutlass.min(walk.tile(iteration), (args.end - 1) // TILE_V)
        own = Uint64(0)  # a byte for each of the thread's groups
        if part < parts:
            own = Uint64(sum(0xFF << 8 * group for group in range(0, 8, parts))) << Uint64(8 * cutlass.min(part, 7))
        flags = []
        for c in range_constexpr(2):
            of_row = Uint64(0)
            if (first_row + c < args.batch) & (part < parts):
                marks = params.nonzero_mask + counts_row(params, first_row + c) * params.nonzero_mask_stride
                of_row = global_pointer(Uint64, marks + Int64(tile) * 8).load()
            flags += [of_row & own]
        some = flags[0] | flags[1]
        while some != Uint64(0):
            below = (some & (Uint64(0) - some)) - Uint64(1)
            group = (cute.arch.popc(Uint32(below)) + cute.arch.popc(Uint32(below >> Uint64(32)))) // 8
            some = some & ~(Uint64(0xFF) << Uint64(8 * group))
            masks = []
            for c in range_constexpr(2):
                row = counts_row(params, cutlass.min(first_row + c, args.batch - 1))
                counts = []
                for n in range_constexpr(16):
                    token = cutlass.min(tile * TILE_V + 16 * group + n, args.end - 1)
                    counts += [
                        global_pointer(Int32, params.counts + row * params.counts_stride + Int64(token) * 4).load()
                    ]
                mask = Uint32(0)
                for n in range_constexpr(16):
                    mask = mask | Uint32(select_(counts[n] != Int32(0), Uint32(1 << n), Uint32(0)))
                # no marks in a row without penalties, whatever its counts
                seen = flags[c] >> Uint64(8 * group) & Uint64(0xFF)
                masks += [Uint32(select_(seen != Uint64(0), mask, Uint32(0)))]
            of_words = (masks[0] | masks[0] >> Uint32(8) | masks[1] | masks[1] >> Uint32(8)) & Uint32(0xFF)
            at, to_half = self._word_index(pair, 8 * (group % 4))
            at += group // 4 * to_half
            while of_words != Uint32(0):
                n, of_words = ptx.take_lowest(of_words)
                marks = Uint32(0)
                for c in range_constexpr(2):
                    of_two = masks[c] >> Uint32(n)
                    low, high = of_two & Uint32(1), of_two >> Uint32(8) & Uint32(1)
                    marks = marks | low << Uint32(7 + 8 * c) | high << Uint32(23 + 8 * c)
                place = at + 4 * self.fragments.vector * n
                gumbel_bounds[place] = noise.add_marks(gumbel_bounds[place], marks)
