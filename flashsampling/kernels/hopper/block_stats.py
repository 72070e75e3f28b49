"""A tile's logits to memory, and of every chunk the highest and the mass, for what needs to see a row more than once.

A chunk is 32 tokens of a tile: the 16 that warp w of a warpgroup holds of one m64 block, w = 0..3, and the 16 that lie
64 above. Up to 192 columns these are two warps', so what is made in registers is about half a chunk, in every shape
alike, and the two halves come together in shared memory. A row's sums are then the same bits in any shape: of half a
chunk the sum of a thread's two tokens, then over the threads 16, 8 and 4 lanes apart, relative to the half's highest;
then the lower half, scaled to the chunk's highest, plus the upper.

Shared memory has no room left (``TileConfig.stages``), but a warp that has searched a tile needs its own codes of it no
more: there are four words of them per half chunk, and here is what becomes of them (``_at``):

    0, 1, 2    the highest logit; sums of masses at the row's temperature, and at temperature 1
    3          the factor of the former's exponents, twice

    edge                                       order
    a warp's codes -> its words                the warp's own search, ``sync_warp``
    all warps' words -> a thread per column    the consumers' named barrier
    that thread -> the next tile's codes       the codes' empty barrier; without codes the consumers' named barrier once
                                               more
    that thread -> who stores its column       the consumers' named barrier once more

The logits are stored while the maxima are found: a store is four columns by 8 tokens, four whole sectors of 32 bytes.
Where rows have floors (``cutoffs``), after the keys: those of chunks that are below are not, and a row then lies by
chunks, the two halves of each side by side in a line of the cache.
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

_AT_ONCE = 8  # half chunks of a thread: as many as there are threads that share their columns
_LOG2_E = 1.4426950408889634
_NAN_KEY = 0x7FFFFFFF
_HIGHEST, _SUM, _FACTOR = 0, 1, 3  # words of a half chunk
_STORED = _HIGHEST  # of a column, once its keys are made: a bit for each chunk that is to be stored


class BlockStats:
    """Of a tile shape."""

    def __init__(self, fragments: Fragments):
        self.fragments = fragments
        self.halves = fragments.halves
        self.own_blocks = fragments.own_blocks
        self.own_columns = 8 * fragments.own_blocks
        self.block_b = fragments.block_b
        self.run_bits = (32 * fragments.vector).bit_length() - 1  # of the code words of a warp that lie together
        # blocks of eight columns, so many at once as make _AT_ONCE half chunks; (first, how many)
        self.groups = []
        at_once = _AT_ONCE // (2 * self.halves)
        first = 0
        while first < self.own_blocks:
            while at_once > self.own_blocks - first:
                at_once //= 2
            self.groups.append((first, at_once))
            first += at_once

    @cute.jit
    def tile(
        self, args: Arguments, out: Outputs, walk: Walk, shared: Shared, logits, sampled, iteration, thread, barrier
    ):
        """The consumers, 256 threads, after the search and before the codes' release. ``logits``: this thread's, (2
        columns, 2 rows, blocks of eight columns, halves of the tokens) float32, -inf for tokens beyond the
        vocabulary. ``sampled``: see ``CandidateSearch.sampled``; not 0. ``barrier``: of all consumers."""
        lane = thread % 32
        warp = thread // 32
        token0 = self.fragments.token(walk.first_token(iteration), thread)
        column0 = 8 * self.fragments.first_block(warp) + 2 * (lane % 4)
        row0 = walk.first_row + column0
        floored = out.cutoffs != Int64(0)
        at = out.logits + Int64(row0) * out.stride + Int64(self._place(token0, floored)) * 4
        if sampled == 1:
            self._store_some(args, out, logits, at, args.batch - row0, args.end - token0, floored)
        rows_left = Int32(select_(sampled == 2, args.batch - row0, Int32(0)))
        own_row = cutlass.min(walk.first_row + thread, args.batch - 1)  # of the column that the thread sums up
        cutoff = store_cutoff.load(args, out, self.block_b, own_row)  # on its way while the highest are found
        wants_masses = self._wants_masses(args, out, own_row)
        makes_masses = self._makes_masses(args, out, walk.first_row + column0 - 2 * (lane % 4), lane)
        temperatures = self._temperatures(args, out, walk, column0 - 2 * (lane % 4), lane)
        cute.arch.sync_warp()  # the codes have been read
        if floored:
            for first, count in self.groups:
                self._keep_highest(shared, logits, first, count, warp, lane)
        else:  # not a branch in each turn: code that a CTA has for the first time comes from memory, line after line
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
        thread = ptx.settled(thread)
        row = walk.first_row + thread
        if (thread < self.block_b) & (row < args.batch):
            self._write(args, out, shared, row, walk.tile(iteration), thread, cutoff, wants_masses)
        if floored | (args.num_samples != 1):  # nobody waits for the codes, which there are none of
            barrier.arrive_and_wait()
        if floored:
            if (iteration == 0) & (thread == 0):
                store_cutoff.count_first_tile(args, self.block_b, walk.first_row // self.block_b)
            for first, count in self.groups:
                left = self._left(shared, rows_left, first, count, warp, lane)
                self._store(out, logits, at + out.stride * (8 * first), left, first, count, 64)

    # -- logits

    def _place(self, token, floored):
        """Where in a row a token's logit lies: with floors by chunks, of which each is a line of the cache."""
        by_chunk = token & ~Int32(0x7F) | (token & 0x30) << 1 | token >> 2 & 0x10 | token & 0xF
        return Int32(select_(floored, by_chunk, token))

    @cute.jit
    def _store(
        self, out, logits, at, left, first: cutlass.Constexpr, count: cutlass.Constexpr, half_bytes: cutlass.Constexpr
    ):
        """Of some blocks of columns, all tokens. ``left``: rows, by column; ``half_bytes``: from one half of them to
        the other."""
        for j in range_constexpr(first, first + count):
            for c in range_constexpr(2):
                values = [logits[c, r, j, half] for half in range(self.halves) for r in range(2)]
                places = [32 * r + half_bytes * half for half in range(self.halves) for r in range(2)]
                ptx.store_floats(at + out.stride * c, values, places, left[2 * (j - first) + c], 8 * j + c)
            at += out.stride * 8

    def _left(self, shared, rows_left, first, count, warp, lane) -> list:
        """``rows_left`` of columns whose chunk of this warp is to be stored, none of others."""
        left = []
        for j in range(first, first + count):
            stored = self._load_two(shared, self._at(_STORED, 0, 8 * j + 2 * (lane % 4), self._first_warp(warp)))
            bits = [each.bitcast(Uint32) >> Uint32(warp % 4) for each in stored]
            left += [Int32(select_(bit & Uint32(1) != Uint32(0), rows_left, Int32(0))) for bit in bits]
        return left

    def _first_warp(self, warp):
        """Of those that have a warp's columns, that with their first tokens."""
        return Int32(0) if self.halves == 1 else warp // 4 * 4

    @cute.jit
    def _store_some(self, args, out, logits, at, rows_left, tokens_left, floored):
        """Of all columns, the tokens up to the vocabulary's end."""
        half_bytes = Int64(select_(floored, Int64(64), Int64(256)))
        for j in range_constexpr(self.own_blocks):
            for c in range_constexpr(2):
                for half in range_constexpr(self.halves):
                    for r in range_constexpr(2):
                        left = Int32(select_(tokens_left > 8 * r + 64 * half, rows_left, Int32(0)))
                        ptx.store_floats(
                            at + out.stride * c + half_bytes * half, [logits[c, r, j, half]], [32 * r], left, 8 * j + c
                        )
            at += out.stride * 8

    # -- half chunks

    def _at(self, word, half, column, warp):
        """Where in a tile's codes a word of a warp's half chunk stands. ``column``: of the warp's."""
        n = (word * self.halves + half) * self.own_columns + column
        return (n >> self.run_bits << self.run_bits + 3) + (warp << self.run_bits) + (n & (1 << self.run_bits) - 1)

    def _of_own(self, word, first, own, warp, lane):
        """``_at``, of what a thread has after a ``reduction.scatter_max`` over a group's half chunks."""
        by_half = self.halves - 1  # bits
        column = 8 * first + (own >> by_half + 1 << 3) + 2 * (lane & 3) + (own >> by_half & 1)
        return self._at(word, own & by_half, column, warp)

    def _each(self, of_column) -> list:
        """Of a group of blocks, by block, column and half of the tokens."""
        return [of_column[key] for key in sorted(of_column)]

    def _keep_highest(self, shared, logits, first, count, warp, lane):
        """Of a group of blocks' half chunks."""
        highest, own = reduction.scatter_max(self._each(self._highest(logits, first, count)), lane)
        shared.gumbel_bounds[self._of_own(_HIGHEST, first, own, warp, lane)] = self._bits(highest)

    def _highest(self, logits, first, count) -> dict:
        """Of a thread's two tokens."""
        return {
            (j, c, half): cute.arch.fmax(logits[c, 0, j, half], logits[c, 1, j, half], nan=True)
            for j in range(first, first + count)
            for c in range(2)
            for half in range(self.halves)
        }

    @cute.jit
    def _masses(self, shared, logits, kind, warp, lane):
        """Sums of masses of half chunks, ``kind`` 0: at the row's temperature, 1: at temperature 1."""
        for first, count in self.groups:
            sums = {}
            for j in range_constexpr(first, first + count):
                column = 8 * j + 2 * (lane % 4)
                factors = self._load_two(shared, self._at(_FACTOR, 0, column, warp))
                for half in range_constexpr(self.halves):
                    highest = self._load_two(shared, self._at(_HIGHEST, half, column, warp))
                    for c in range_constexpr(2):
                        factor = Float32(select_(kind == 0, factors[c], Float32(2.0 * _LOG2_E)))
                        sums[j, c, half] = self._mass(logits[c, 0, j, half], highest[c], factor) + self._mass(
                            logits[c, 1, j, half], highest[c], factor
                        )
            total, own = reduction.scatter_sum(self._each(sums), lane)
            highest = self._load(shared, self._of_own(_HIGHEST, first, own, warp, lane))
            total = Float32(select_(highest == Float32(-INFINITY), Float32(0.0), total))  # of nothing but -inf
            shared.gumbel_bounds[self._of_own(_SUM + kind, first, own, warp, lane)] = self._bits(total)

    def _mass(self, logit, highest, factor) -> Float32:
        """Relative to the highest. ``factor``: of half the difference, which no two finite logits are too far apart
        for. That of equal infinities is NaN, of which the minimum makes 0: one each."""
        below = cute.math.fma(logit, Float32(0.5), highest * Float32(-0.5))
        return ptx.exp2(cute.arch.fmin(below * factor, Float32(0.0)))

    @cute.jit
    def _wants_masses(self, args, out, row) -> Boolean:
        """Whether somebody asks for those of a row: where rows have floors, not of one with a top-k, but for a top-p of
        all tokens."""
        wants = (out.sums != Int64(0)) | (out.raw_sums != Int64(0))
        if out.masses_of_all == Int32(0):
            wants = wants & store_cutoff.without_top_k(args, out, row)
        return wants

    @cute.jit
    def _makes_masses(self, args, out, first_row, lane) -> Boolean:
        """Whether a warp does, of all of its columns: if somebody asks for those of one. ``first_row``: of its
        columns."""
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
        """Of every 32nd column of a warp, from the thread's on; where nobody asks, of no account. ``column0``: its
        first. They are on their way while the logits are stored."""
        temperatures = cute.make_rmem_tensor(-(-self.own_columns // 32), Float32)
        for k in range_constexpr(cute.size(temperatures)):
            temperatures[k] = args.temperature_value
            if (out.sums != Int64(0)) & (args.temperature != Int64(0)):
                row = cutlass.min(walk.first_row + column0 + lane + 32 * k, args.batch - 1)
                temperatures[k] = global_pointer(Float32, args.temperature + Int64(row) * 4).load()
        return temperatures

    @cute.jit
    def _keep_factors(self, shared, temperatures, warp, lane):
        """Of exponents to the base 2, per two units of logit: of every column of a warp. Never 0, so that -inf stays
        -inf."""
        least = Uint32(2).bitcast(Float32)
        for k in range_constexpr(cute.size(temperatures)):
            column = lane + 32 * k
            if column < self.own_columns:
                greedy = temperatures[k] < Float32(noise.GREEDY_BELOW)
                # of a sixteenth, since the instruction flushes what is below 2**-126
                inverse = cute.arch.rcp_approx(temperatures[k] * Float32(0.0625)) * Float32(0.125 * _LOG2_E)
                factor = cute.arch.fmax(Float32(select_(greedy, Float32(2.0 * _LOG2_E), inverse)), least)
                shared.gumbel_bounds[self._at(_FACTOR, 0, column, warp)] = self._bits(factor)

    def _bits(self, x: Float32) -> Uint32:
        return x.bitcast(Uint32)

    def _load(self, shared, at) -> Float32:
        return shared.gumbel_bounds[at].bitcast(Float32)

    def _load_halves(self, shared, word, column, warp) -> list:
        """Of both halves of a chunk. ``warp``: of the lower one."""
        if self.halves == 2:
            return [self._load(shared, self._at(word, half, column, warp)) for half in range(2)]
        return [self._load(shared, self._at(word, 0, column, warp + 4 * half)) for half in range(2)]

    @cute.jit
    def _load_two(self, shared, at):
        """Two words side by side, from an even place on."""
        pair = cute.make_rmem_tensor(2, Uint32)
        tiled = cute.make_tensor(
            shared.gumbel_bounds.iterator, cute.make_layout((2, self.fragments.tile_words // 2), stride=(1, 2))
        )
        cute.autovec_copy(tiled[None, at >> 1], pair)
        return [pair[c].bitcast(Float32) for c in range(2)]

    # -- chunks

    @cute.jit
    def _write(self, args, out, shared, row, tile, column, cutoff, wants_masses):
        """One thread, the four chunks of a column, which other warps may have made."""
        chunks = cute.ceil_div(args.end, 128) * 4
        place = (Int64(row) * chunks + Int64(tile) * 4) * 4
        of_own = column % self.own_columns
        warps = [self._of_column(column, w) for w in range(4)]
        highest = [self._load_halves(shared, _HIGHEST, of_own, warp) for warp in warps]
        top = [cute.arch.fmax(*both, nan=True) for both in highest]
        keys = [self._key(x) for x in top]
        ptx.store_four(out.keys + place, keys)
        if wants_masses:
            factor = self._load(shared, self._at(_FACTOR, 0, of_own, self._of_column(column, 0)))
            for kind in range_constexpr(2):
                address = out.sums if const_expr(kind == 0) else out.raw_sums
                if address != Int64(0):
                    sums = []
                    by = factor if const_expr(kind == 0) else Float32(2.0 * _LOG2_E)
                    for w in range_constexpr(4):
                        lower, upper = self._load_halves(shared, _SUM + kind, of_own, warps[w])
                        shares = [self._mass(x, top[w], by) for x in highest[w]]
                        sums += [cute.math.fma(upper, shares[1], lower * shares[0])]
                    ptx.store_four(address + place, [self._bits(total) for total in sums])
        stored = Uint32(0)
        for w in range_constexpr(4):
            stored = stored | Uint32(select_(keys[w] >= cutoff, Uint32(1 << w), Uint32(0)))
        shared.gumbel_bounds[self._at(_STORED, 0, of_own, self._of_column(column, 0))] = stored

    def _of_column(self, column, w):
        """The warp that has the tokens 16 w of a column, of the lower half."""
        return Int32(w) if self.halves == 1 else w + 4 * (column // self.own_columns)

    def _key(self, x: Float32) -> Int32:
        """int32 in the order of x; NaN above all, -0.0 as 0.0."""
        bits = (x + Float32(0.0)).bitcast(Int32)
        return Int32(select_(x != x, Int32(_NAN_KEY), bits ^ ((bits >> Int32(31)) & Int32(0x7FFFFFFF))))
