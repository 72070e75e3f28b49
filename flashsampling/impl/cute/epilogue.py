"""What becomes of a tile's logits: codes of the noise, the search for tokens that can win, and their exact evaluation.

The seam of the kernel. ``Mainloop`` hands over accumulators and knows nothing else; whoever wants something of every logit (a
row's log-sum-exp, per-tile maxima, bias, masks, the logits of a few chosen tiles) adds it to ``search``, which sees them all
in registers, and what it keeps per row to ``rows``.

    make_codes   noise warpgroup        seven bits of every token's noise, into shared memory, while the matmul runs
    search       consumer warpgroups    bound = logit * scale + bound of the noise - threshold of the row, three instructions a
                                        logit; what is not below 0 is a candidate and goes to the queue
    evaluate     two warps              the exact score of a candidate; what leads its row in this CTA is published; and what
                                        others have published lowers thresholds (``learn_thresholds``)

A row's threshold (``threshold``) is what the bound must reach. It only falls: by candidates that lead, by what other CTAs have
published, and in a CTA's first tile by lower bounds of what all CTAs' first tiles hold (``seed_thresholds``,
``share_thresholds``). When and where it falls decides how much is evaluated, never which token wins: what is skipped scores
strictly below something published, or equally and has a higher id. NaN, +inf and the word 0 are candidates by construction, so
every rare case of the contract is decided in one place, ``consider``; a row in which a NaN was published is looked at no more.

Where a crowd of a tile's tokens may win, equal logits of a greedy row or infinite ones, the consumers that hold it evaluate it
themselves (``evaluate_greedy``, ``every_score``), which is many times faster than the queue: in 255 rows of infinite logits an
eighth of all tokens are such. Whole steps, H200, V = 151936, D = 4096, B = 256, over that without such rows: 128 or 255 rows of
NaN, zeros or equal logits 0.87 to 1.06 at T = 1, 0.96 to 1.11 greedy, 0.95 to 1.19 at T = 1e-6; D = 2048 0.89 to 1.09, 1.03 to
1.20, 1.02 to 1.35. Before there were crowds and decided rows: 28 times as long (255 rows of NaN, another shape).

A thread holds of a tile the tokens t and t + 8, t = 64 half + 16 warp + lane / 4, and columns 8 j + 2 (lane % 4) + {0, 1}.
The two consumer warpgroups share a tile by halves of its tokens; where it has more than 192 columns, by halves of these, and a
thread has both halves of the tokens: what it loads of a column is then used four times, not twice. Codes lie in shared memory
as a consumer thread reads them: four bytes (column | row << 1) a word, ``vector`` words at once, the halves innermost.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, Uint64, const_expr, range_constexpr, select_

from . import noise, reduction, threshold
from .config import TILE_V, TileConfig
from .memory import global_pointer
from .reduction import INFINITY

QUEUE = 64  # candidates that wait for evaluation: one per thread of the two evaluating warps
_VALID = -(2**31)  # the top bit of an entry's lower half: 0 is a free slot
_NOISE_THREADS = 128
_LAST_WARP = _NOISE_THREADS // 32 - 1  # of the noise warpgroup
_CONSUMER_THREADS = 256
_CONSTANTS = 2 * noise.ROW_CONSTANTS + 2  # of a pair of columns
_CROWD = 8  # rows of which a CTA in its first tile knows the best token of all: with more it waits for others
_LOOKS = 8  # at what they know, at most
_MANY_CTAS = 16  # that work for a block of rows: of fewer there is less to learn


class Arguments(NamedTuple):
    """What a launch passes to every thread; addresses are of device memory."""

    temperature: Int64  # of (B,) float32, or 0: temperature_value
    temperature_value: Float32
    seed: Int64  # of (B,) int64, or 0: seed_value
    seed_value: Int64
    offset: Int64  # of (B,) int64, or 0: offset_value
    offset_value: Int64
    tokens: Int64  # of (B, num_samples) int64, out
    workspace: Int64  # of int64, zero between launches: slots (2, B, num_samples), then a counter per block of rows
    batch: Int32
    # Tiles are whole Philox groups, so a shard need not start where one does. Tokens are counted from the first one's start:
    # those from ``skip`` up to ``end`` are sampled, and ``base`` (a multiple of 128, and of the cluster) makes them ids.
    base: Int32
    skip: Int32
    end: Int32
    num_samples: Int32
    exchange: Int64  # TOKENS, PACKED or the address of an exchange's table

    def slot(self, row):
        """Address of a row's first slot, of one draw."""
        return self.workspace + Int64(row) * 8


class Walk(NamedTuple):
    """Which tiles are this CTA's."""

    first_row: Int32
    first_tile: Int32
    tile_stride: Int32
    tiles: Int32

    def tile(self, iteration):
        """Number of the CTA's tile number ``iteration``, from the launch's first one."""
        return self.first_tile + iteration * self.tile_stride


class Shared(NamedTuple):
    """The epilogue's shared memory."""

    rows: cute.Tensor  # (N, 2) float32: scale, threshold
    codes: cute.Tensor  # uint32, of all buffers; for ``search`` (32 N,), its tile's
    queue: cute.Tensor  # (QUEUE,) int64: logit, then valid, iteration (16 bits), token of the tile (7), column (8); 0: free
    done: cute.Tensor  # (1,) int32: consumer warps that have no more candidates
    special: cute.Tensor  # (1,) int32: 1 if a row is sharp or has a logit of +inf


def _happened(barrier: Uint32, phase: Uint32) -> Uint32:
    """1 once a phase of an mbarrier, at an address in shared memory, is over; 0 if it is not within a microsecond or so."""
    ptx = "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}, 1000; selp.u32 {$w0}, 1, 0, p;}"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[barrier, phase])


def _count(barrier, condition: Boolean) -> Int32:
    """Of a named barrier's threads, which it waits for, those for which a condition holds."""
    ptx = (
        "{.reg .pred p; setp.ne.u32 p, {$r0}, 0; "
        f"bar.red.popc.u32 {{$w0}}, {barrier.barrier_id}, {barrier.num_threads}, p;}}"
    )
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[Uint32(condition)])


def _take_lowest(bits: Uint32) -> tuple:
    """Which bit of some is the lowest, and the others."""
    lowest = cute.arch.popc((bits & (Uint32(0) - bits)) - Uint32(1))
    return lowest, bits & (bits - Uint32(1))


def _half(value: Int64, upper: int) -> Uint32:
    return Uint32(value >> Int64(32 * upper))


class SampleEpilogue:
    """One winner per row of a block of ``block_b`` rows."""

    def __init__(self, config: TileConfig, counts_evaluations: bool = False):
        # for tests: of queued candidates in the word before the workspace, of whole tiles in the one before that
        self.counts_evaluations = counts_evaluations
        self.block_b = block_b = config.block_b
        self.blocks = block_b // 8  # of eight columns
        self.halves = config.halves  # of the tile's tokens that a consumer thread has
        self.own_blocks = self.blocks // self.halves  # that it has
        self.vector = next(v for v in (4, 2, 1) if self.blocks % v == 0)  # code words that it loads at once
        self.vectors = self.blocks // self.vector
        self.seeded_blocks = next(v for v in (4, 2, 1) if self.own_blocks % v == 0)  # of columns, at once
        self.pairs = block_b // 2  # of columns
        self.threads_per_pair = 1  # that share the tile's groups
        while 2 * self.threads_per_pair * self.pairs <= _NOISE_THREADS:
            self.threads_per_pair *= 2
        # groups that the noise warpgroup's last warp takes over from whole warps of pairs, which keeps all four equally busy
        self.helped_groups = {72: 10, 80: 10, 88: 7, 96: 7, 104: 5, 112: 3}.get(self.pairs, 0)
        # warps that have 32 pairs of their own, the last of them perhaps a few less, and pairs that are left
        self.pair_warps, self.pairs_left = divmod(self.pairs, 32)
        if self.pairs_left > 16:
            self.pair_warps, self.pairs_left = self.pair_warps + 1, 0
        self.code_buffers = config.code_buffers
        self.buffer_words = TILE_V * block_b // 4
        self.code_words = self.code_buffers * self.buffer_words

    # -- rows

    @cute.jit
    def row_params(self, args, row: Int32):
        """temperature, Philox key (low, high), offset (low, high) of a row below the batch size."""
        temperature = args.temperature_value
        if args.temperature != Int64(0):
            temperature = global_pointer(Float32, args.temperature + Int64(row) * 4).load()
        seed = args.seed_value
        if args.seed != Int64(0):
            seed = global_pointer(Int64, args.seed + Int64(row) * 8).load()
        offset = args.offset_value
        if args.offset != Int64(0):
            offset = global_pointer(Int64, args.offset + Int64(row) * 8).load()
        return temperature, _half(seed, 0), _half(seed, 1), _half(offset, 0), _half(offset, 1)

    @cute.jit
    def prepare(self, args: Arguments, walk: Walk, shared: Shared, thread, barrier):
        """The noise warpgroup: first values of the shared memory, thresholds that everything passes and an empty queue."""
        sharp = Boolean(False)
        for column in cutlass.range(thread, self.block_b, _NOISE_THREADS, unroll_full=True):
            row = walk.first_row + column
            slope = threshold.slope_of(self.row_params(args, cutlass.min(row, args.batch - 1))[0])
            live = row < args.batch
            # beyond the batch nothing is a candidate, whether its logit is 0 or, masked, -inf
            shared.rows[column, 0] = Float32(select_(live, slope, Float32(1.0)))
            shared.rows[column, 1] = Float32(select_(live, threshold.unknown(), Float32(-INFINITY)))
            sharp = sharp | (live & threshold.is_sharp(slope))
        if thread < QUEUE:
            shared.queue[thread] = Int64(0)
        if thread == 0:
            shared.done[0] = Int32(0)
        sharp_threads = _count(barrier, sharp)
        if thread == 0:
            shared.special[0] = Int32(select_(sharp_threads != 0, Int32(1), Int32(0)))

    # -- the noise warpgroup

    @cute.jit
    def make_codes(self, args: Arguments, walk: Walk, shared: Shared, full, empty, thread):
        """The noise warpgroup: codes of every tile's words, a tile at a time; ``full`` and ``empty``: their barriers."""
        turns = self.noise_turns(thread)
        constants = cute.make_rmem_tensor(_CONSTANTS, Uint32)
        for i in cutlass.range(walk.tiles, unroll=1):
            tile = args.base // TILE_V + walk.tile(i)
            buffer, use = self.buffer_of(i)
            cute.arch.mbarrier_wait(empty + buffer, (use + 1) % 2)
            for turn in cutlass.range(turns, unroll=1):
                pair, first, stride, steps = self.noise_share(thread, turn)
                if (i == 0) | (turns > 1):
                    self.pair_constants(args, walk, pair, constants)
                self.code_pair(self.codes_of(shared, buffer), tile, pair, constants, first, stride, steps)
            cute.arch.mbarrier_arrive(full + buffer)

    def noise_turns(self, thread) -> Int32:
        """How many pairs of columns a noise thread has in turn: one, for all tiles, or those that it helps with."""
        if not self.helped_groups:
            return Int32(1)
        turns = self.pair_warps + (self.pairs_left > 0 and self.pair_warps == _LAST_WARP)
        return Int32(select_(thread >= 32 * _LAST_WARP, Int32(turns), Int32(1)))

    def noise_share(self, thread, turn) -> tuple:
        """A noise thread's pair of columns, the first of its groups of four tokens, how far apart these are, and how many.

        Threads share a pair evenly where their number allows it. Else a warp has 32 pairs, another one, if need be, those that
        are left, several threads each; and the last warp takes the last groups of all pairs of whole warps."""
        if not self.helped_groups:
            each = self.threads_per_pair
            first = thread // self.pairs
            return thread % self.pairs, first, Int32(each), Int32(select_(first < each, Int32(32 // each), Int32(0)))
        warps, left = self.pair_warps, self.pairs_left
        own = Int32(32 - self.helped_groups)
        turn_of_left = 0 if left and warps == _LAST_WARP else -1  # the last warp's that is not for helping
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

    def buffer_of(self, iteration):
        """Of the codes of the CTA's tile number ``iteration``, and how often it was used before."""
        return iteration % self.code_buffers, iteration // self.code_buffers

    def codes_of(self, shared, buffer):
        """A buffer's, (32 N,) uint32."""
        return cute.make_tensor(shared.codes.iterator + buffer * self.buffer_words, cute.make_layout(self.buffer_words))

    @cute.jit
    def pair_constants(self, args, walk, pair, constants):
        """Of two neighbouring columns: what Philox needs of each, then what is kept of their codes and set, for greedy ones."""
        keep, fixed = Uint32(0xFFFFFFFF), Uint32(0)
        for c in range_constexpr(2):
            row = cutlass.min(walk.first_row + 2 * pair + c, args.batch - 1)
            temperature, k0, k1, o0, o1 = self.row_params(args, row)
            words = noise.row_constants(Uint32(0), (o0, o1), (k0, k1))
            for n in range_constexpr(noise.ROW_CONSTANTS):
                constants[noise.ROW_CONSTANTS * c + n] = words[n]
            greedy = temperature < Float32(noise.GREEDY_BELOW)
            keep = keep & Uint32(select_(greedy, Uint32(0xFF00FF00 >> 8 * c), Uint32(0xFFFFFFFF)))
            fixed = fixed | Uint32(select_(greedy, Uint32(noise.GREEDY_BYTE * 0x00010001 << 8 * c), Uint32(0)))
        constants[_CONSTANTS - 2], constants[_CONSTANTS - 1] = keep, fixed

    @cute.jit
    def code_pair(self, codes, tile, pair, constants, first, stride, steps):
        """Codes of a pair of columns in ``steps`` of a tile's 32 groups (token bits 5, 4, 2, 1, 0), from ``first`` on and
        ``stride`` apart."""
        of_rows = [[constants[noise.ROW_CONSTANTS * c + n] for n in range(noise.ROW_CONSTANTS)] for c in range(2)]
        keep, fixed = constants[_CONSTANTS - 2], constants[_CONSTANTS - 1]
        first_word = pair // 4 % self.own_blocks * self.halves  # of a consumer thread's
        warpgroup = pair // 4 // self.own_blocks
        to_half = const_expr(128 * self.vector if self.halves == 1 else 1)
        start = first_word // self.vector * 256 + warpgroup * 128 + 4 * first + pair % 4
        at = start * self.vector + first_word % self.vector
        product = noise.group_product(Uint32(tile * 32 + first))  # of the id, not of its place
        for _ in cutlass.range(steps, unroll=2 if self.block_b == 256 else 1):  # no faster for fewer columns
            words = [noise.philox_words_of_products(product, of_row) for of_row in of_rows]
            for half in range_constexpr(2):  # tokens without and with bit 6
                word = noise.code_bytes([words[c][r + 2 * half] for r in range(2) for c in range(2)])
                codes[at + half * to_half] = word & keep | fixed
            at += 4 * stride * self.vector
            product += Uint64(stride) * Uint64(noise.GROUP_STEP)

    @cute.jit
    def learn_thresholds(self, args, walk, shared, iteration, thread):
        """The evaluators: what has been published by now lowers this CTA's thresholds. ``iteration``: a tile of the CTA's,
        before which everything is searched."""
        first_token = self.first_token_of(args, walk, iteration)
        for column in cutlass.range(thread, cutlass.min(self.block_b, args.batch - walk.first_row), QUEUE, unroll=1):
            slot = args.slot(walk.first_row + column)
            key = reduction.published(slot)
            infinite = reduction.published(slot + Int64(args.batch) * 8)
            self.learn(shared, column, key, first_token)
            if (infinite != Int64(0)) & (reduction.token_of_key(infinite) < first_token):
                # +inf wins by the lowest id, which no token has that is still to be searched
                shared.special[0] = Int32(1)
                found, alone = Float32(threshold.INFINITE_FOUND), Float32(threshold.INFINITE_ALONE)
                self.lower_threshold(shared, column, Float32(select_(key != Int64(0), found, alone)))

    @cute.jit
    def learn(self, shared, column, key: Int64, first_token):
        """Lowers a threshold by a key that was published. ``first_token``: of those that are still to be searched."""
        if key == Int64(reduction.NAN_KEY):
            self.lower_threshold(shared, column, Float32(-INFINITY))
        elif key != Int64(0):
            score = reduction.score_of_key(key)
            loses_ties = reduction.token_of_key(key) < first_token
            score = Float32(select_(loses_ties, threshold.after(score), score))
            self.lower_threshold(shared, column, threshold.of_score(score, shared.rows[column, 0]))

    def first_token_of(self, args, walk, iteration):
        """Id of the first token of the CTA's tile number ``iteration``."""
        return args.base + walk.tile(iteration) * TILE_V

    # -- the consumers

    def sampled(self, args, walk, iteration):
        """2 if all of a tile's tokens are sampled, 1 if some are, 0 if none. What a cluster rounds its tiles up by is not:
        searched, all of it would be candidates, since no threshold is known that -inf falls short of."""
        first_token = walk.tile(iteration) * TILE_V
        some = (first_token + TILE_V > args.skip) & (first_token < args.end)
        everything = (first_token + TILE_V <= args.end) & (first_token >= args.skip)
        return Int32(select_(everything, Int32(2), Int32(select_(some, Int32(1), Int32(0)))))

    @cute.jit
    def search(self, args: Arguments, walk: Walk, shared: Shared, logits, first_words, sampled, iteration, thread, barrier):
        """The consumers, 256 threads: queues the candidates of the CTA's tile number ``iteration``.

        ``logits``: this thread's, (2 columns, 2 rows, blocks of eight columns, halves of the tokens) float32. ``first_words``:
        the code words number 0. ``sampled``: what it says of the tile, not 0. ``barrier``: of all consumers.
        """
        lane = thread % 32
        warp = thread // 32
        first_token = walk.tile(iteration) * TILE_V
        token0 = first_token + self.first_token(warp) + lane // 4
        if sampled == 1:
            for r in range_constexpr(2):
                for half in range_constexpr(self.halves):
                    token = token0 + 8 * r + 64 * half
                    if (token >= args.end) | (token < args.skip):
                        for j in range_constexpr(self.own_blocks):
                            for c in range_constexpr(2):
                                logits[c, r, j, half] = Float32(-INFINITY)
        crowd = Uint64(2**64 - 1)
        if args.num_samples == 1:
            crowd = Uint64(0)
            if iteration == Int32((walk.first_tile + 1) * TILE_V <= args.skip):
                self.seed_thresholds(args, walk, shared, logits, lane, warp)
                barrier.arrive_and_wait()
                self.share_thresholds(args, walk, shared, iteration, thread, barrier)
                barrier.arrive_and_wait()
            # first without a branch, so that loads and arithmetic of all vectors overlap; then what the few hits need. A hit is
            # a sign of 0, and so is a NaN, as the hardware makes it
            hits = Uint32(0)
            exponents = noise.exponents(args.batch)
            for q in range_constexpr(self.vectors):
                signs = Uint32(0x80008000)
                words = first_words if const_expr(q == 0) else self.load_codes(shared, q, thread)
                for i in range_constexpr(0, 4 * self.vector, 2):
                    _, r, j, half = self.place(q, i)
                    if const_expr(i % (4 * self.halves) == 0):
                        pair = self.load_rows(shared, self.first_block(warp) + j, lane)
                    bases = [cute.math.fma(logits[c, r, j, half], pair[2 * c], pair[2 * c + 1]) for c in range(2)]
                    signs = signs & noise.add_codes(*bases, words[i // 4], r, exponents)
                hits = hits | Uint32(select_(signs == Uint32(0x80008000), Uint32(0), Uint32(1 << q)))
            if cute.arch.vote_any_sync(hits != Uint32(0)):
                hits = cute.arch.warp_redux_sync(hits, "or")
                while hits != Uint32(0):
                    q, hits = _take_lowest(hits)
                    # one copy, since what is seldom run is seldom cached
                    found = cute.make_rmem_tensor(4 * self.vector, Float32)
                    self.pick(logits, q, found, 0, 1)
                    special = cute.arch.vote_any_sync(shared.special[0] != 0)
                    mask = self.candidates(shared, found, special, q, lane, warp)
                    if special:
                        columns = self.crowded(mask)
                        if columns != Uint32(0):
                            mask = self.without_crowd(mask, columns)
                            columns = self.evaluate_greedy(args, walk, shared, found, columns, token0, q, lane, warp)
                            crowd = crowd | Uint64(columns) << Uint64(q * (2 * self.vector // self.halves))
                    self.push_candidates(shared, found, mask, special, q, iteration, lane, warp)
        if crowd != Uint64(0):
            self.every_score(args, walk, shared, logits, token0, crowd, warp, lane)

    def first_block(self, warp):
        """Of eight columns: the first one of a consumer warp."""
        return Int32(0) if self.halves == 1 else warp // 4 * self.own_blocks

    def first_token(self, warp):
        """Of a tile, that a consumer warp has."""
        return (warp if self.halves == 1 else warp % 4) * 16

    def place(self, q, i) -> tuple:
        """Where the logit of byte ``i`` (of 4 ``vector``) of a thread's code words number ``q`` stands: column and row of two,
        block of columns, half of the tokens."""
        word = i >> 2
        return i & 1, i >> 1 & 1, q * self.vector // self.halves + word // self.halves, word % self.halves

    @cute.jit
    def pick(self, logits, q, found, at_least: cutlass.Constexpr, at_once: cutlass.Constexpr):
        """``found`` (4 ``vector`` ``at_once``,) becomes a thread's logits of its code words number q ``at_once`` and next ones;
        q is ``at_least`` that."""
        if const_expr((at_least + 1) * at_once == self.vectors):
            self.copy(logits, at_least * at_once, found)
        else:
            if q == at_least:
                self.copy(logits, at_least * at_once, found)
            else:
                self.pick(logits, q, found, at_least + 1, at_once)

    def copy(self, logits, first, found):
        for i in range(cute.size(found)):
            c, r, j, half = self.place(first, i)
            found[i] = logits[c, r, j, half]

    def logits_of(self, c: int, j: int) -> list[int]:
        """Those of a thread's code words, of (4 ``vector``,), that are of one column: c of two, j of the blocks of eight."""
        return [i for i in range(4 * self.vector) if self.place(0, i)[0] == c and self.place(0, i)[2] == j]

    @cute.jit
    def candidates(self, shared, logits, special, q, lane, warp) -> Uint32:
        """Of a thread's code words number ``q``, whose logits (4 ``vector``,) are given, a bit for each that may win. What is
        here is exposed, in most tiles: 24 instructions more were 1.5 % of a step at D = 2048, B = 128."""
        words = self.load_codes(shared, q, warp * 32 + lane)
        first_block = self.first_block(warp) + q * (self.vector // self.halves)
        rows = [self.load_rows(shared, first_block + j, lane) for j in range(self.vector // self.halves)]
        rows = [(row[2 * c], row[2 * c + 1]) for row in rows for c in range(2)]  # by column: slope, threshold
        mask = Uint32(0)
        for n in range_constexpr(len(rows)):
            for i in self.logits_of(n % 2, n // 2):
                wins = threshold.may_win_smooth(logits[i], noise.code_float(words[i // 4], i % 4), *rows[n])
                mask = mask | Uint32(select_(wins, Uint32(1 << i), Uint32(0)))
        if special:
            mask = self.special_candidates(logits, words, rows)
        return mask

    @cute.jit
    def special_candidates(self, logits, words, rows) -> Uint32:
        """``candidates`` by the finer bound."""
        bounds = [threshold.bound_of(*row) for row in rows]
        mask = Uint32(0)
        # rows of zeros hit in every tile: first whether a logit reaches what was found, of greedy rows
        noisy = Boolean(False)
        for n in range_constexpr(len(bounds)):
            greatest = Float32(-INFINITY)
            for i in self.logits_of(n % 2, n // 2):
                greatest = cute.arch.fmax(greatest, logits[i], nan=True)
            noisy = noisy | threshold.needs_a_look(greatest, bounds[n])
        if cute.arch.vote_any_sync(noisy):
            for n in range_constexpr(len(bounds)):
                for i in self.logits_of(n % 2, n // 2):
                    wins = threshold.may_win(logits[i], noise.code_float(words[i // 4], i % 4), bounds[n])
                    mask = mask | Uint32(select_(wins, Uint32(1 << i), Uint32(0)))
        return mask

    @cute.jit
    def crowded(self, mask: Uint32) -> Uint32:
        """Columns, bits, in which six threads or more of a warp have tokens of which all may win, bits of ``candidates``'."""
        crowded = Uint32(0)
        for n in range_constexpr(2 * self.vector // self.halves):
            whole = Uint32(sum(1 << i for i in self.logits_of(n % 2, n // 2)))
            threads = cute.arch.popc(cute.arch.vote_ballot_sync(mask & whole == whole))
            crowded = crowded | Uint32(select_(threads >= 6, Uint32(1 << n), Uint32(0)))
        return crowded

    @cute.jit
    def evaluate_greedy(self, args, walk, shared, logits, columns: Uint32, token0, q, lane, warp) -> Uint32:
        """Publishes the best of the tokens of a thread's code words number ``q`` in some columns, bits, if all these are of
        greedy rows and finite or NaN: their scores are their logits. Returns the columns of which it did not."""
        first_block = self.first_block(warp) + q * (self.vector // self.halves)
        plain = Boolean(True)
        keys = []
        for j in range_constexpr(self.vector // self.halves):
            pair = self.load_rows(shared, first_block + j, lane)
            for c in range_constexpr(2):
                wanted = columns >> Uint32(2 * j + c) & Uint32(1) != Uint32(0)
                wanted = wanted & (pair[2 * c + 1] != Float32(-INFINITY))
                key = Int64(0)
                for i in self.logits_of(c, j):
                    _, r, _, half = self.place(0, i)
                    token = token0 + 8 * r + 64 * half
                    sampled = (token < args.end) & (token >= args.skip)
                    this = reduction.pack_key(logits[i], args.base + token)
                    key = reduction.max_key(key, Int64(select_(sampled, this, Int64(0))))
                    infinite = (logits[i] == Float32(INFINITY)) | (logits[i] == Float32(-INFINITY))
                    plain = plain & ~(wanted & sampled & infinite)
                plain = plain & (~wanted | (pair[2 * c] == Float32(threshold.GREEDY_SLOPE)))
                keys += [Int64(select_(wanted, key, Int64(0)))]
        left = columns
        if cute.arch.vote_all_sync(plain):
            left = Uint32(0)
            key, own = reduction.scatter_max_keys(keys, lane)
            column = 8 * (first_block + own // 2) + 2 * (lane % 4) + own % 2
            if key != Int64(0):
                reduction.publish(args.slot(walk.first_row + column), key)
                # other warps may have lower ids, of this tile, and as high a score
                self.learn(shared, column, key, Int32(0))
        return left

    def without_crowd(self, mask: Uint32, crowd: Uint32) -> Uint32:
        """``candidates``' mask, less the columns of which every score has been evaluated: bits of ``crowd``."""
        for i in range(4 * self.vector):
            c, _, j, _ = self.place(0, i)
            evaluated = crowd >> Uint32(2 * j + c) & Uint32(1)
            mask = mask & ~(evaluated << Uint32(i))
        return mask

    @cute.jit
    def push_candidates(self, shared, logits, mask, special, q, iteration, lane, warp):
        """Queues candidates, the bits of a mask: ``logits`` (4 ``vector``,) are those of a thread's code words number ``q``."""
        while mask != Uint32(0):
            which, mask = _take_lowest(mask)
            some = [logits[i] for i in range(4 * self.vector)]
            for bit in range_constexpr(self.vector.bit_length() + 1):
                odd = which >> bit & 1 != 0
                some = [Float32(select_(odd, some[n + 1], some[n])) for n in range(0, len(some), 2)]
            of_two, row, block, half = self.place(q, which)
            column = 8 * (self.first_block(warp) + block) + 2 * (lane % 4) + of_two
            token = self.first_token(warp) + lane // 4 + 8 * row + 64 * half  # in the tile
            pushes = Boolean(True)
            if special:  # while this thread waited for room others may have been evaluated, with equal scores
                at = cute.recast_ptr(shared.codes.iterator, dtype=Uint8)
                at += 4 * self.vector * (_CONSUMER_THREADS * q + warp * 32 + lane) + which
                code = noise.float_of_code(Uint32(cute.make_tensor(at, cute.make_layout(1))[0]))
                bound = threshold.bound_of(shared.rows[column, 0], shared.rows[column, 1])
                pushes = threshold.may_win(some[0], code, bound)
            if pushes:
                place = Int32(_VALID) | (iteration << 15) | (token << 8) | column
                entry = Int64(some[0].bitcast(Uint32)) << Int64(32) | Int64(Uint32(place))
                self.push(shared, entry, (warp * 32 + lane) % QUEUE)

    @cute.jit
    def load_codes(self, shared, q, thread):
        """A consumer thread's code words number ``q``, (``vector``,) uint32."""
        words = cute.make_rmem_tensor(self.vector, Uint32)
        layout = cute.make_layout((self.vector, self.buffer_words // self.vector), stride=(1, self.vector))
        tiled = cute.make_tensor(shared.codes.iterator, layout)
        cute.autovec_copy(tiled[None, _CONSUMER_THREADS * q + thread], words)
        return words

    @cute.jit
    def load_rows(self, shared, block, lane):
        """scale, threshold of a thread's two columns of a block of eight."""
        pair = cute.make_rmem_tensor(4, Float32)
        tiled = cute.make_tensor(shared.rows.iterator, cute.make_layout((4, self.pairs), stride=(1, 4)))
        cute.autovec_copy(tiled[None, 4 * block + lane % 4], pair)
        return pair

    @cute.jit
    def seed_thresholds(self, args, walk, shared, logits, lane, warp):
        """Before the first tile is searched: a lower bound of every row's best score in half of it, since each warp does half
        of its columns. All of it takes twice the time, and saves less than that. Rows with a NaN are decided."""
        groups = self.own_blocks // self.seeded_blocks
        vectors = self.vectors // groups  # of a group
        for k in cutlass.range((groups + 1) // 2, unroll=1):
            group = (warp + 2 * k) % groups
            found = cute.make_rmem_tensor(4 * self.vector * vectors, Float32)
            self.pick(logits, group, found, 0, vectors)
            bests = []  # by column
            for i in range_constexpr(4 * self.vector * vectors):
                c, _, j, _ = self.place(0, i)
                if const_expr(i % (4 * self.vector) == 0):
                    words = self.load_codes(shared, group * vectors + i // (4 * self.vector), warp * 32 + lane)
                if const_expr(i % (4 * self.halves) == 0):
                    pair = self.load_rows(shared, self.first_block(warp) + group * self.seeded_blocks + j, lane)
                    bests += [Float32(-INFINITY), Float32(-INFINITY)]
                code = noise.code_float(words[i // 4 % self.vector], i % 4)
                seed = threshold.seed_of(found[i], code, pair[2 * c])
                bests[2 * j + c] = cute.arch.fmax(bests[2 * j + c], seed, nan=True)
            best, own = reduction.scatter_max(bests, lane)
            block = self.first_block(warp) + group * self.seeded_blocks + own // 2
            column = block * 8 + 2 * (lane % 4) + own % 2
            row = walk.first_row + column
            if row < args.batch:
                if best != best:
                    reduction.publish(args.slot(row), Int64(reduction.NAN_KEY))
                    self.lower_threshold(shared, column, Float32(-INFINITY))
                elif (best < Float32(INFINITY)) & (best > Float32(-INFINITY)):
                    self.lower_threshold(shared, column, threshold.of_seed(best, shared.rows[column, 0]))
                elif best == Float32(INFINITY):
                    shared.special[0] = Int32(1)

    @cute.jit
    def share_thresholds(self, args, walk, shared, iteration, column, barrier):
        """After ``seed_thresholds``, a thread per column: tells other CTAs of the bounds and learns theirs. To the first ones
        nearly every row's best would be a candidate: they wait until others have come so far."""
        live = column < cutlass.min(self.block_b, args.batch - walk.first_row)
        slot = args.slot(walk.first_row + column)
        bound = Int64(-1)
        if live:
            known = shared.rows[column, 1]
            # not NaN, no mark, not decided
            if (known < Float32(threshold.INFINITE_ALONE)) & (known > Float32(threshold.INFINITE_FOUND)):
                # a score that some token of this CTA reaches; with no token's id it is below that token's key
                score = threshold.score_of(known, shared.rows[column, 0])
                bound = reduction.pack_key(score, Int32(reduction.NO_TOKEN))
                reduction.publish(slot, bound)
        key = Int64(0)
        looks = Int32(1)
        if const_expr(self.block_b > 128):  # a smaller tile has few candidates, and its CTAs come far apart
            looks = Int32(select_(walk.tile_stride >= _MANY_CTAS, Int32(_LOOKS), Int32(1)))
        while looks > 0:
            looks -= 1
            if live:
                key = reduction.published(slot)
            if _count(barrier, live & (bound >= key)) <= _CROWD:
                looks = Int32(0)
        if live:
            self.learn(shared, column, key, self.first_token_of(args, walk, iteration))

    @cute.jit
    def lower_threshold(self, shared, column, lower: Float32) -> Float32:
        """Lowers a row's threshold to that, and returns what it was."""
        pointer = shared.rows.iterator + 2 * column + 1
        old = Float32(0.0)
        if lower.bitcast(Int32) >= Int32(0):  # NaN too
            was = cute.arch.atomic_min(cute.recast_ptr(pointer, dtype=Int32), lower.bitcast(Int32), sem="relaxed", scope="cta")
            old = was.bitcast(Float32)
        else:
            was = cute.arch.atomic_max(
                cute.recast_ptr(pointer, dtype=Uint32), lower.bitcast(Uint32), sem="relaxed", scope="cta"
            )
            old = was.bitcast(Float32)
        return old

    @cute.jit
    def score_of(self, args, logit, token, row, draw) -> Float32:
        """The score of a token id, exactly; ``row`` may lie beyond the batch."""
        temperature, k0, k1, o0, o1 = self.row_params(args, cutlass.min(row, args.batch - 1))
        group = Uint32((token & 7) | ((token >> 4) & 3) << 3 | (token >> 7) << 5)
        words = noise.philox_words(group, Uint32(draw), (o0, o1), (k0, k1))
        word = self.word_of_token(words, token)
        tail = Uint32(0)
        if word == Uint32(0):
            refined = Uint32(draw) | Uint32(noise.REFINEMENT_BIT)
            tail = self.word_of_token(noise.philox_words(group, refined, (o0, o1), (k0, k1)), token)
        scale, amplitude = noise.row_factors(temperature)
        return noise.score(logit, scale, noise.minus_gumbel_refined(word, tail), amplitude)

    @cute.jit
    def word_of_token(self, words, token) -> Uint32:
        """The word of a token's lane: bits 3 and 6."""
        low = Uint32(select_(token & 8 != 0, words[1], words[0]))
        high = Uint32(select_(token & 8 != 0, words[3], words[2]))
        return Uint32(select_(token & 64 != 0, high, low))

    @cute.jit
    def push(self, shared, entry: Int64, slot: Int32):
        """Leaves a candidate for ``evaluate`` in the first free slot from ``slot`` on; waits while the queue is full."""
        waiting = Int32(1)
        while waiting != 0:
            found = cute.arch.atomic_cas(shared.queue.iterator + slot, cmp=Int64(0), val=entry, sem="relaxed", scope="cta")
            if found == Int64(0):
                waiting = Int32(0)
            slot = (slot + 1) % QUEUE

    # -- the evaluating warps

    @cute.jit
    def evaluate(self, args: Arguments, walk: Walk, shared: Shared, full, thread):
        """Evaluates candidates exactly and publishes those that lead their row in this CTA, until the consumers are done.

        A thread owns one slot of the queue. With none filled the warps sleep: the instructions of a loop that looks would be
        taken from the noise. They wake when a tile's codes are complete, to learn thresholds, and every microsecond.
        """
        learned = Int32(0)  # tiles
        running = Int32(1)
        while running != 0:
            # before the slot is looked at: what was pushed before the consumers were done is then seen. The warp decides as
            # one, since a thread that comes late from an evaluation may read a later count than the others did
            done = cute.arch.load(shared.done.iterator, Int32, sem="acquire", scope="cta") == 8
            finished = cute.arch.vote_all_sync(done)
            entry = cute.arch.load(shared.queue.iterator + thread, Int64, sem="relaxed", scope="cta")
            if cute.arch.vote_any_sync(entry != Int64(0)):
                if entry != Int64(0):
                    cute.arch.atomic_exch(shared.queue.iterator + thread, Int64(0), sem="relaxed", scope="cta")
                    logit = Uint32(entry >> Int64(32)).bitcast(Float32)
                    place = Int32(entry & Int64(0x7FFFFFFF))
                    tile = walk.tile(place >> 15)
                    token = tile * TILE_V + ((place >> 8) & (TILE_V - 1))
                    self.consider(args, walk, shared, logit, token, place & 255)
            else:
                if finished:
                    running = Int32(0)
                elif learned == walk.tiles:
                    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Uint32(100)])
                else:
                    buffer, use = self.buffer_of(learned)
                    if cute.arch.vote_any_sync(_happened(Uint32((full + buffer).toint()), Uint32(use & 1)) != Uint32(0)):
                        # with two buffers the tile before may still be searched
                        searched = cutlass.max(learned - (self.code_buffers - 1), 0)
                        self.learn_thresholds(args, walk, shared, searched, thread)
                        learned += 1

    @cute.jit
    def consider(self, args, walk, shared, logit, token, column):
        """Every case of the contract, for one token."""
        row = walk.first_row + column
        if (row < args.batch) & (token < args.end) & (token >= args.skip):
            token = args.base + token
            slope = shared.rows[column, 0]
            score = self.score_of(args, logit, token, row, Int32(0))
            slot = args.slot(row)
            key = reduction.pack_key(score, token)
            if const_expr(self.counts_evaluations):
                cute.arch.atomic_add(global_pointer(Int64, args.workspace - 8), Int64(1), sem="relaxed", scope="gpu")
            if score == Float32(INFINITY):
                reduction.publish(slot + Int64(args.batch) * 8, key)
            elif score != score:
                reduction.publish(slot, key)
                self.lower_threshold(shared, column, Float32(-INFINITY))
            elif score != Float32(-INFINITY):
                lower = threshold.of_score(score, slope)
                if threshold.leads(lower, self.lower_threshold(shared, column, lower)):
                    reduction.publish(slot, key)

    @cute.jit
    def every_score(self, args, walk, shared, logits, token0, columns: Uint64, warp, lane):
        """Evaluates exactly, and publishes the best of, every token of a warp's tile in some of its threads' columns, given by
        bits; draw by draw."""
        one_draw = args.num_samples == 1
        copy = cute.make_rmem_tensor((2 * self.halves, 2 * self.own_blocks), Float32)
        for j in range_constexpr(self.own_blocks):
            for c in range_constexpr(2):
                for r in range_constexpr(2 * self.halves):
                    copy[r, 2 * j + c] = logits[c, r % 2, j, r // 2]
        for number in cutlass.range(2 * self.own_blocks, unroll=1):
            column = (self.first_block(warp) + number // 2) * 8 + (lane % 4) * 2 + number % 2
            row = walk.first_row + column
            live = (row < args.batch) & (shared.rows[column, 1] != Float32(-INFINITY))
            wanted = (columns >> Uint64(number)) & Uint64(1) != Uint64(0)
            draws = Int32(select_(wanted & cute.arch.vote_any_sync(live), args.num_samples, Int32(0)))
            noisy = cute.arch.vote_any_sync(live & (shared.rows[column, 0] != Float32(threshold.GREEDY_SLOPE)))
            for draw in cutlass.range(draws, unroll=1):
                best = Int64(0)
                best_inf = Int64(0)
                for r in range_constexpr(2 * self.halves):
                    token = token0 + 8 * (r % 2) + 64 * (r // 2)
                    score = copy[r, number]
                    if noisy:
                        score = self.score_of(args, copy[r, number], args.base + token, row, draw)
                    key = reduction.pack_key(score, args.base + token)
                    sampled = live & (token < args.end) & (token >= args.skip)
                    is_inf = score == Float32(INFINITY)
                    counts = (score != Float32(INFINITY)) & (score != Float32(-INFINITY))  # finite, or NaN
                    best = reduction.max_key(best, Int64(select_(sampled & counts, key, Int64(0))))
                    best_inf = reduction.max_key(best_inf, Int64(select_(sampled & is_inf, key, Int64(0))))
                if const_expr(self.counts_evaluations):
                    if live:
                        counter = global_pointer(Int64, args.workspace - 16)
                        cute.arch.atomic_add(counter, Int64(2 * self.halves), sem="relaxed", scope="gpu")
                best = reduction.column_max(best)
                best_inf = reduction.column_max(best_inf)
                slot = args.workspace + (Int64(row) * args.num_samples + draw) * 8
                if lane < 4:
                    if best != Int64(0):
                        reduction.publish(slot, best)
                        if one_draw:  # other warps may have lower ids, of this tile, and as high a score
                            self.learn(shared, column, best, Int32(0))
                    if best_inf != Int64(0):
                        reduction.publish(slot + Int64(args.batch) * args.num_samples * 8, best_inf)
