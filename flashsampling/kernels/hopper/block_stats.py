"""Writes a tile's logits and block statistics to memory: the consumer warps, for steps that see a row more than once.

A block is 32 tokens of a tile: the 16 that warp w of a warpgroup holds of one m64 instruction, w = 0..3, and the 16
that are 64 above. Its statistics are the highest logit and sums of exponentials relative to it. Up to 192 columns the
two halves of a block belong to two warps. Registers therefore hold statistics of half blocks, in every tile shape
alike, and the halves meet in shared memory. The sums are then the same bits in any shape: a half block adds a thread's
two tokens, then threads 16, 8 and 4 lanes apart, relative to the half's highest; then the lower half, scaled to the
block's highest, plus the upper one.

Shared memory has no space left (``TileConfig.stages``), but a warp that has searched a tile no longer needs its own
bounds of the tile. They hold four words per half block (``_word_index``):

    0, 1, 2    the highest logit; sums of exponentials at the row's temperature, and at temperature 1
    3          the factor of the former's exponents, times two

    edge                                         order
    a warp's bounds -> its words                 the warp's own search, ``sync_warp``
    all warps' words -> a thread per column      the consumers' named barrier
    that thread -> the next tile's bounds        the bounds' empty barrier, or the consumers' named barrier
    that thread -> the warps that store          the consumers' named barrier again

Logits are stored while the maxima are found: a store covers four columns by 8 tokens, four whole sectors of 32 bytes.
Rows with store cutoffs (``store_cutoff``) are stored after the statistics, without the blocks below their cutoffs. Such
a row lies block by block in memory, both halves of a block in one cache line.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr, select_

from . import noise, ptx, reduction, store_cutoff
from .arguments import Arguments, Outputs, Walk
from .fragments import Fragments
from .memory import global_pointer
from .reduction import INFINITY
from .shared_memory import Shared

_AT_ONCE = 8  # half blocks of a thread: as many as threads share their columns
_LOG2_E = 1.4426950408889634
_NAN_KEY = 0x7FFFFFFF
_HIGHEST, _SUM, _FACTOR = 0, 1, 3  # words of a half block
_STORED = _HIGHEST  # a column's bits of the blocks to be stored, once its keys are made


class BlockStatsWriter:
    """The writer of one tile shape."""

    def __init__(self, fragments: Fragments):
        self.fragments = fragments
        self.halves = fragments.halves
        self.own_blocks = fragments.own_blocks
        self.own_columns = 8 * fragments.own_blocks
        self.block_b = fragments.block_b
        self.run_bits = (32 * fragments.vector).bit_length() - 1  # log2 of a warp's consecutive bound words
        # column blocks of eight, as many at once as make _AT_ONCE half blocks: (first, count)
        self.groups = []
        at_once = _AT_ONCE // (2 * self.halves)
        first = 0
        while first < self.own_blocks:
            while at_once > self.own_blocks - first:
                at_once //= 2
            self.groups.append((first, at_once))
            first += at_once

    @cute.jit
    def write_tile(
        self, args: Arguments, out: Outputs, walk: Walk, shared: Shared, logits, sampled, iteration, thread, barrier
    ):
        """Writes one tile: the consumers, 256 threads, after the search and before the bounds' release.

        ``logits``: the thread's, (2 columns, 2 rows, column blocks of eight, token halves) float32, -inf beyond the
        vocabulary. ``sampled``: see ``CandidateSearch.sampled``; not 0. ``barrier``: of all consumers.
        """
        lane = thread % 32
        warp = thread // 32
        token0 = self.fragments.token(walk.first_token(iteration), thread)
        column0 = 8 * self.fragments.first_block(warp) + 2 * (lane % 4)
        row0 = walk.first_row + column0
        has_cutoffs = out.cutoffs != Int64(0)
        at = out.logits + Int64(row0) * out.stride + Int64(self._row_position(token0, has_cutoffs)) * 4
        if sampled == 1:
            self._store_some(args, out, logits, at, args.batch - row0, args.end - token0, has_cutoffs)
        rows_left = Int32(select_(sampled == 2, args.batch - row0, Int32(0)))
        own_row = cutlass.min(walk.first_row + thread, args.batch - 1)  # the column whose statistics this thread writes
        cutoff = store_cutoff.load(args, out, self.block_b, own_row)  # loaded while the maxima are found
        wants_masses = self._wants_masses(args, out, own_row)
        makes_masses = self._makes_masses(args, out, walk.first_row + column0 - 2 * (lane % 4), lane)
        temperatures = self._temperatures(args, out, walk, column0 - 2 * (lane % 4), lane)
        cute.arch.sync_warp()  # the bounds have been read
        if has_cutoffs:
            for first, count in self.groups:
                self._keep_highest(shared, logits, first, count, warp, lane)
        else:  # no branch in each turn: a CTA's first pass over code loads it from memory, line by line
            for first, count in self.groups:
                self._store(out, logits, at + out.stride * (8 * first), [rows_left] * (2 * count), first, count, 256)
                self._keep_highest(shared, logits, first, count, warp, lane)
        if makes_masses:
            self._keep_factors(shared, temperatures, warp, lane)
            cute.arch.sync_warp()
            first_kind = Int32(select_(out.sums != Int64(0), Int32(0), Int32(1)))
            last_kind = Int32(select_(out.raw_sums != Int64(0), Int32(1), Int32(0)))
            for kind in cutlass.range(first_kind, last_kind + 1, unroll=1):
                self._masses(shared, logits, kind, warp, lane)
        barrier.arrive_and_wait()
        thread = ptx.scheduling_fence(thread)
        row = walk.first_row + thread
        if (thread < self.block_b) & (row < args.batch):
            self._write(args, out, shared, row, walk.tile(iteration), thread, cutoff, wants_masses)
        if has_cutoffs | (args.num_samples != 1):  # without bounds, no barrier of theirs orders this
            barrier.arrive_and_wait()
        if has_cutoffs:
            if (iteration == 0) & (thread == 0):
                store_cutoff.count_first_tile(args, self.block_b, walk.first_row // self.block_b)
            for first, count in self.groups:
                left = self._left(shared, rows_left, first, count, warp, lane)
                self._store(out, logits, at + out.stride * (8 * first), left, first, count, 64)

    # -- logits

    def _row_position(self, token, has_cutoffs):
        """Returns the position of a token's logit in its row: block by block with store cutoffs, each block a cache
        line."""
        by_block = token & ~Int32(0x7F) | (token & 0x30) << 1 | token >> 2 & 0x10 | token & 0xF
        return Int32(select_(has_cutoffs, by_block, token))

    @cute.jit
    def _store(
        self, out, logits, at, left, first: cutlass.Constexpr, count: cutlass.Constexpr, half_bytes: cutlass.Constexpr
    ):
        """Stores all tokens of some column blocks. ``left``: rows, by column; ``half_bytes``: from one token half to
        the other."""
        for j in range_constexpr(first, first + count):
            for c in range_constexpr(2):
                values = [logits[c, r, j, half] for half in range(self.halves) for r in range(2)]
                places = [32 * r + half_bytes * half for half in range(self.halves) for r in range(2)]
                ptx.store_floats(at + out.stride * c, values, places, left[2 * (j - first) + c], 8 * j + c)
            at += out.stride * 8

    def _left(self, shared, rows_left, first, count, warp, lane) -> list:
        """Returns ``rows_left`` for columns whose block of this warp is to be stored, 0 for others."""
        left = []
        for j in range(first, first + count):
            stored = self._load_two(
                shared, self._word_index(_STORED, 0, 8 * j + 2 * (lane % 4), self._first_warp(warp))
            )
            bits = [each.bitcast(Uint32) >> Uint32(warp % 4) for each in stored]
            left += [Int32(select_(bit & Uint32(1) != Uint32(0), rows_left, Int32(0))) for bit in bits]
        return left

    def _first_warp(self, warp):
        """Returns the warp that has the first tokens of a warp's columns."""
        return Int32(0) if self.halves == 1 else warp // 4 * 4

    @cute.jit
    def _store_some(self, args, out, logits, at, rows_left, tokens_left, has_cutoffs):
        """Stores the tokens of all columns up to the vocabulary's end."""
        half_bytes = Int64(select_(has_cutoffs, Int64(64), Int64(256)))
        for j in range_constexpr(self.own_blocks):
            for c in range_constexpr(2):
                for half in range_constexpr(self.halves):
                    for r in range_constexpr(2):
                        left = Int32(select_(tokens_left > 8 * r + 64 * half, rows_left, Int32(0)))
                        ptx.store_floats(
                            at + out.stride * c + half_bytes * half, [logits[c, r, j, half]], [32 * r], left, 8 * j + c
                        )
            at += out.stride * 8

    # -- half blocks

    def _word_index(self, word, half, column, warp):
        """Returns the index, in a tile's bounds, of a word of a warp's half block. ``column``: among the warp's."""
        n = (word * self.halves + half) * self.own_columns + column
        return (n >> self.run_bits << self.run_bits + 3) + (warp << self.run_bits) + (n & (1 << self.run_bits) - 1)

    def _own_word_index(self, word, first, own, warp, lane):
        """Returns ``_word_index`` of the half block that a thread has after a ``reduction.scatter_max`` over a
        group."""
        by_half = self.halves - 1  # bits
        column = 8 * first + (own >> by_half + 1 << 3) + 2 * (lane & 3) + (own >> by_half & 1)
        return self._word_index(word, own & by_half, column, warp)

    def _ordered(self, of_column) -> list:
        """Lists a group's values by column block, column and token half."""
        return [of_column[key] for key in sorted(of_column)]

    def _keep_highest(self, shared, logits, first, count, warp, lane):
        """Stores the highest logits of a group's half blocks in shared memory."""
        highest, own = reduction.scatter_max(self._ordered(self._highest(logits, first, count)), lane)
        shared.gumbel_bounds[self._own_word_index(_HIGHEST, first, own, warp, lane)] = self._bits(highest)

    def _highest(self, logits, first, count) -> dict:
        """Returns the higher one of a thread's two tokens, for every half block."""
        return {
            (j, c, half): cute.arch.fmax(logits[c, 0, j, half], logits[c, 1, j, half], nan=True)
            for j in range(first, first + count)
            for c in range(2)
            for half in range(self.halves)
        }

    @cute.jit
    def _masses(self, shared, logits, kind, warp, lane):
        """Stores sums of exponentials of half blocks. ``kind`` 0: at the row's temperature, 1: at temperature 1."""
        for first, count in self.groups:
            sums = {}
            for j in range_constexpr(first, first + count):
                column = 8 * j + 2 * (lane % 4)
                factors = self._load_two(shared, self._word_index(_FACTOR, 0, column, warp))
                for half in range_constexpr(self.halves):
                    highest = self._load_two(shared, self._word_index(_HIGHEST, half, column, warp))
                    for c in range_constexpr(2):
                        factor = Float32(select_(kind == 0, factors[c], Float32(2.0 * _LOG2_E)))
                        sums[j, c, half] = self._mass(logits[c, 0, j, half], highest[c], factor) + self._mass(
                            logits[c, 1, j, half], highest[c], factor
                        )
            total, own = reduction.scatter_sum(self._ordered(sums), lane)
            highest = self._load(shared, self._own_word_index(_HIGHEST, first, own, warp, lane))
            total = Float32(select_(highest == Float32(-INFINITY), Float32(0.0), total))  # all are -inf
            shared.gumbel_bounds[self._own_word_index(_SUM + kind, first, own, warp, lane)] = self._bits(total)

    def _mass(self, logit, highest, factor) -> Float32:
        """Computes the exponential of a logit relative to the highest. ``factor``: of half the difference, which cannot
        overflow for finite logits. Equal infinities give NaN, and the minimum makes 0 of it: each counts as one."""
        below = cute.math.fma(logit, Float32(0.5), highest * Float32(-0.5))
        return ptx.exp2(cute.arch.fmin(below * factor, Float32(0.0)))

    @cute.jit
    def _wants_masses(self, args, out, row) -> Boolean:
        """Returns whether a row's sums are needed. With store cutoffs, rows with a top-k need none, except for a top-p
        of all tokens."""
        wants = (out.sums != Int64(0)) | (out.raw_sums != Int64(0))
        if out.masses_of_all == Int32(0):
            wants = wants & store_cutoff.without_top_k(args, out, row)
        return wants

    @cute.jit
    def _makes_masses(self, args, out, first_row, lane) -> Boolean:
        """Returns whether a warp computes sums, which it does for all of its columns if one needs them. ``first_row``:
        of its columns."""
        makes = (out.sums != Int64(0)) | (out.raw_sums != Int64(0))
        if out.masses_of_all == Int32(0):
            wants = Boolean(False)
            for k in range_constexpr(-(-self.own_columns // 32)):
                column = cutlass.min(lane + 32 * k, self.own_columns - 1)
                wants = wants | self._wants_masses(args, out, cutlass.min(first_row + column, args.batch - 1))
            makes = cute.arch.vote_any_sync(wants)
        return makes

    @cute.jit
    def _temperatures(self, args, out, walk, column0, lane):
        """Loads the temperatures of every 32nd of a warp's columns while the logits are stored; arbitrary where no row
        needs them. ``column0``: its first column."""
        temperatures = cute.make_rmem_tensor(-(-self.own_columns // 32), Float32)
        for k in range_constexpr(cute.size(temperatures)):
            temperatures[k] = args.temperature_value
            if (out.sums != Int64(0)) & (args.temperature != Int64(0)):
                row = cutlass.min(walk.first_row + column0 + lane + 32 * k, args.batch - 1)
                temperatures[k] = global_pointer(Float32, args.temperature + Int64(row) * 4).load()
        return temperatures

    @cute.jit
    def _keep_factors(self, shared, temperatures, warp, lane):
        """Stores every column's factor of base-2 exponents, per two units of logit. It is never 0, so that -inf stays
        -inf."""
        least = Uint32(2).bitcast(Float32)
        for k in range_constexpr(cute.size(temperatures)):
            column = lane + 32 * k
            if column < self.own_columns:
                greedy = temperatures[k] < Float32(noise.GREEDY_BELOW)
                # of a sixteenth, because the instruction flushes results below 2**-126
                inverse = cute.arch.rcp_approx(temperatures[k] * Float32(0.0625)) * Float32(0.125 * _LOG2_E)
                factor = cute.arch.fmax(Float32(select_(greedy, Float32(2.0 * _LOG2_E), inverse)), least)
                shared.gumbel_bounds[self._word_index(_FACTOR, 0, column, warp)] = self._bits(factor)

    def _bits(self, x: Float32) -> Uint32:
        return x.bitcast(Uint32)

    def _load(self, shared, at) -> Float32:
        return shared.gumbel_bounds[at].bitcast(Float32)

    def _load_halves(self, shared, word, column, warp) -> list:
        """Loads a word of both halves of a block. ``warp``: of the lower one."""
        if self.halves == 2:
            return [self._load(shared, self._word_index(word, half, column, warp)) for half in range(2)]
        return [self._load(shared, self._word_index(word, 0, column, warp + 4 * half)) for half in range(2)]

    @cute.jit
    def _load_two(self, shared, at):
        """Loads two neighbouring words from an even index on."""
        pair = cute.make_rmem_tensor(2, Uint32)
        tiled = cute.make_tensor(
            shared.gumbel_bounds.iterator, cute.make_layout((2, self.fragments.tile_words // 2), stride=(1, 2))
        )
        cute.autovec_copy(tiled[None, at >> 1], pair)
        return [pair[c].bitcast(Float32) for c in range(2)]

    # -- blocks

    @cute.jit
    def _write(self, args, out, shared, row, tile, column, cutoff, wants_masses):
        """Writes the statistics of a column's four blocks, which several warps may have made: one thread per column."""
        blocks_per_row = cute.ceil_div(args.end, 128) * 4
        place = (Int64(row) * blocks_per_row + Int64(tile) * 4) * 4
        own_column = column % self.own_columns
        warps = [self._column_warp(column, w) for w in range(4)]
        highest = [self._load_halves(shared, _HIGHEST, own_column, warp) for warp in warps]
        top = [cute.arch.fmax(*both, nan=True) for both in highest]
        keys = [self._key(x) for x in top]
        ptx.store_four(out.keys + place, keys)
        if wants_masses:
            factor = self._load(shared, self._word_index(_FACTOR, 0, own_column, self._column_warp(column, 0)))
            for kind in range_constexpr(2):
                address = out.sums if const_expr(kind == 0) else out.raw_sums
                if address != Int64(0):
                    sums = []
                    by = factor if const_expr(kind == 0) else Float32(2.0 * _LOG2_E)
                    for w in range_constexpr(4):
                        lower, upper = self._load_halves(shared, _SUM + kind, own_column, warps[w])
                        shares = [self._mass(x, top[w], by) for x in highest[w]]
                        sums += [cute.math.fma(upper, shares[1], lower * shares[0])]
                    ptx.store_four(address + place, [self._bits(total) for total in sums])
        stored = Uint32(0)
        for w in range_constexpr(4):
            stored = stored | Uint32(select_(keys[w] >= cutoff, Uint32(1 << w), Uint32(0)))
        shared.gumbel_bounds[self._word_index(_STORED, 0, own_column, self._column_warp(column, 0))] = stored

    def _column_warp(self, column, w):
        """Returns the warp that has the tokens from 16 w on of a column, in the lower half."""
        return Int32(w) if self.halves == 1 else w + 4 * (column // self.own_columns)

    def _key(self, x: Float32) -> Int32:
        """Returns the order-preserving int32 key of x: NaN above all, -0.0 as 0.0."""
        bits = (x + Float32(0.0)).bitcast(Int32)
        return Int32(select_(x != x, Int32(_NAN_KEY), bits ^ ((bits >> Int32(31)) & Int32(0x7FFFFFFF))))
