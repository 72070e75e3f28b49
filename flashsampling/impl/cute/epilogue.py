"""What becomes of a tile's logits: codes of the noise, the search for tokens that can win, and their exact evaluation.

The seam of the kernel. ``Mainloop`` hands over accumulators and knows nothing else; whoever wants something of every logit (a
row's log-sum-exp, per-tile maxima, bias, masks, the logits of a few chosen tiles) adds it to ``search``, which sees them all
in registers, and what it keeps per row to ``rows``.

    make_codes   noise warpgroup        seven bits of every token's noise, into shared memory, while the matmul runs
    search       consumer warpgroups    bound = logit * scale + bound of the noise - threshold of the row, four instructions a
                                        logit; what is not below 0 is a candidate and goes to the queue
    evaluate     two warps              the exact score of a candidate; what leads its row in this CTA is published

A row's threshold is what the bound must reach: ``GUMBEL_BELOW`` less the best score known, and a margin for rounding. It only
falls: by candidates that lead, by what other CTAs have published (``learn_thresholds``), and in a CTA's first tile by a lower
bound of that tile's best (``seed_thresholds``). When and where it falls decides how much is evaluated, never which token
wins: what is skipped scores strictly below something published. NaN, +inf and the word 0 are candidates by construction, so
every rare case of the contract is decided in one place, ``consider``.

A thread holds of a tile the two tokens t and t + 8, t = 64 warpgroup + 16 warp + lane / 4, and columns 8 j + 2 (lane % 4) +
{0, 1}. Codes lie in shared memory as a consumer thread reads them: four bytes (column | row << 1) a word, ``vector`` words at
once.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64, const_expr, range_constexpr, select_

from . import noise, reduction
from .config import TILE_V, TileConfig
from .memory import global_pointer
from .reduction import INFINITY

QUEUE = 64  # candidates that wait for evaluation: one per thread of the two evaluating warps
_VALID = -(2**31)  # the top bit of an entry's lower half: 0 is a free slot
_NOISE_THREADS = 128
_CONSUMER_THREADS = 256


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
    codes: cute.Tensor  # (32 N,) uint32
    queue: cute.Tensor  # (QUEUE,) int64: logit, then valid, iteration (16 bits), token of the tile (7), column (8); 0: free
    ticket: cute.Tensor  # (1,) int32: where the next search for a free slot starts
    done: cute.Tensor  # (1,) int32: consumer warps that have no more candidates


def _half(value: Int64, upper: int) -> Uint32:
    return Uint32(value >> Int64(32 * upper))


class SampleEpilogue:
    """One winner per row of a block of ``block_b`` rows."""

    def __init__(self, config: TileConfig):
        self.block_b = block_b = config.block_b
        self.blocks = block_b // 8  # of eight columns
        self.vector = next(v for v in (4, 2, 1) if self.blocks % v == 0)  # code words that a consumer thread loads at once
        self.pairs = block_b // 2  # of columns
        self.threads_per_pair = 1  # that share the tile's groups
        while 2 * self.threads_per_pair * self.pairs <= _NOISE_THREADS:
            self.threads_per_pair *= 2
        self.code_words = TILE_V * block_b // 4

    # -- rows

    @cute.jit
    def row_params(self, args, row: Int32):
        """scale, noise switch, Philox key (low, high), offset (low, high) of a row below the batch size."""
        temperature = args.temperature_value
        if args.temperature != Int64(0):
            temperature = global_pointer(Float32, args.temperature + Int64(row) * 4).load()
        seed = args.seed_value
        if args.seed != Int64(0):
            seed = global_pointer(Int64, args.seed + Int64(row) * 8).load()
        offset = args.offset_value
        if args.offset != Int64(0):
            offset = global_pointer(Int64, args.offset + Int64(row) * 8).load()
        scale, switch = noise.row_scale(temperature)
        return scale, switch, _half(seed, 0), _half(seed, 1), _half(offset, 0), _half(offset, 1)

    @cute.jit
    def prepare(self, args: Arguments, walk: Walk, shared: Shared, thread):
        """The noise warpgroup: first values of the shared memory, thresholds that everything passes and an empty queue."""
        for column in cutlass.range(thread, self.block_b, _NOISE_THREADS, unroll_full=True):
            row = walk.first_row + column
            scale = self.row_params(args, cutlass.min(row, args.batch - 1))[0]
            live = row < args.batch
            # beyond the batch nothing is a candidate, whether its logit is 0 or, masked, -inf
            shared.rows[column, 0] = Float32(select_(live, scale, Float32(1.0)))
            shared.rows[column, 1] = Float32(select_(live, Float32(INFINITY), Float32(-INFINITY)))
        if thread < QUEUE:
            shared.queue[thread] = Int64(0)
        if thread == 0:
            shared.ticket[0] = Int32(0)
            shared.done[0] = Int32(0)

    # -- the noise warpgroup

    @cute.jit
    def make_codes(self, args: Arguments, walk: Walk, shared: Shared, full, empty, thread):
        """The noise warpgroup: codes of every tile's words, a tile at a time; ``full`` and ``empty`` are their barriers."""
        if const_expr(self.pairs != 96):
            constants = self.pair_constants(args, walk, thread % self.pairs)  # one pair for all tiles
        for i in cutlass.range(walk.tiles, unroll=1):
            tile = args.base // TILE_V + walk.first_tile + i * walk.tile_stride
            cute.arch.mbarrier_wait(empty, (i + 1) % 2)
            if const_expr(self.pairs == 96):  # a thread takes a third of three pairs' groups, and makes their constants anew
                for phase in cutlass.range(3, unroll=1):
                    item = phase * _NOISE_THREADS + thread
                    own = self.pair_constants(args, walk, item % self.pairs)
                    self.code_pair(shared, tile, item % self.pairs, own, item // self.pairs, 4)
            else:
                if thread // self.pairs < self.threads_per_pair:
                    self.code_pair(shared, tile, thread % self.pairs, constants, thread // self.pairs, self.threads_per_pair)
            self.learn_thresholds(args, walk, shared, thread, _NOISE_THREADS, False)
            cute.arch.mbarrier_arrive(full)

    def pair_constants(self, args, walk, pair):
        """Of two neighbouring columns: what Philox needs of each, and what is kept of their codes and set, for greedy ones."""
        of_rows = []
        keep, fixed = Uint32(0xFFFFFFFF), Uint32(0)
        for c in range(2):
            row = cutlass.min(walk.first_row + 2 * pair + c, args.batch - 1)
            _, switch, k0, k1, o0, o1 = self.row_params(args, row)
            of_rows.append(noise.row_constants(Uint32(0), (o0, o1), (k0, k1)))
            greedy = switch == Float32(0.0)
            keep = keep & Uint32(select_(greedy, Uint32(0xFF00FF00 >> 8 * c), Uint32(0xFFFFFFFF)))
            fixed = fixed | Uint32(select_(greedy, Uint32(noise.GREEDY_BYTE * 0x00010001 << 8 * c), Uint32(0)))
        return of_rows, keep, fixed

    @cute.jit
    def code_pair(self, shared, tile, pair, constants, first_group, group_stride: cutlass.Constexpr):
        """Codes of a pair of columns in every ``group_stride``-th of a tile's 32 groups (token bits 5, 4, 2, 1, 0)."""
        of_rows, keep, fixed = constants
        block = pair // 4
        at = (block // self.vector * 256 + 4 * first_group + pair % 4) * self.vector + block % self.vector
        product = noise.group_product(Uint32(tile * 32 + first_group))  # of the id, not of its place
        for _ in cutlass.range(32 // group_stride, unroll=1):
            words = [noise.philox_words_of_products(product, of_row) for of_row in of_rows]
            for half in range_constexpr(2):  # tokens without and with bit 6
                codes = noise.code_bytes([words[c][r + 2 * half] for r in range(2) for c in range(2)])
                shared.codes[at + 128 * half * self.vector] = codes & keep | fixed
            at += 4 * group_stride * self.vector
            product += Uint64(group_stride * noise.GROUP_STEP)

    @cute.jit
    def learn_thresholds(self, args, walk, shared, thread, threads: cutlass.Constexpr, teach: cutlass.Constexpr):
        """What other CTAs have published by now lowers this CTA's thresholds. With ``teach`` the others learn of this one's."""
        for column in cutlass.range(thread, cutlass.min(self.block_b, args.batch - walk.first_row), threads, unroll=1):
            address = args.workspace + Int64(walk.first_row + column) * 8
            key = cute.arch.load(global_pointer(Int64, address), Int64, sem="relaxed", scope="gpu")
            if const_expr(teach):
                threshold = shared.rows[column, 1]
                if threshold < Float32(INFINITY):
                    # a score that some token of this CTA reaches; with no token's id it is below that token's key
                    bound = reduction.pack_key(Float32(noise.GUMBEL_BELOW) - threshold, Int32(reduction.NO_TOKEN))
                    if bound > key:
                        reduction.publish(address, bound)
            if (key != Int64(0)) & (key != Int64(reduction.NAN_KEY)):
                self.lower_threshold(shared, column, reduction.score_of_key(key))

    # -- the consumers

    def holds_tokens(self, args, walk, iteration):
        """Whether anything of a tile is sampled. What a cluster rounds its tiles up by is not: searched, all of it would be
        candidates, since no threshold is known that -inf falls short of."""
        first_token = walk.tile(iteration) * TILE_V
        return (first_token + TILE_V > args.skip) & (first_token < args.end)

    @cute.jit
    def search(self, args: Arguments, walk: Walk, shared: Shared, logits, iteration, thread, barrier):
        """The consumers, 256 threads: queues the candidates of the CTA's tile number ``iteration``, which ``holds_tokens``.

        ``logits``: this thread's, (2 columns, 2 rows, N / 8) float32. ``barrier``: of all consumers.
        """
        lane = thread % 32
        warp = thread // 32  # 0 .. 7: token bits 6, 5, 4
        first_token = walk.tile(iteration) * TILE_V
        token0 = first_token + warp * 16 + lane // 4
        if (first_token + TILE_V > args.end) | (first_token < args.skip):
            for r in range_constexpr(2):
                if (token0 + 8 * r >= args.end) | (token0 + 8 * r < args.skip):
                    for j in range_constexpr(self.blocks):
                        for c in range_constexpr(2):
                            logits[c, r, j] = Float32(-INFINITY)
        if args.num_samples == 1:
            skipped = (walk.first_tile + 1) * TILE_V <= args.skip
            if iteration == Int32(skipped):
                self.seed_thresholds(shared, logits, lane, warp)
                barrier.arrive_and_wait()
                self.learn_thresholds(args, walk, shared, thread, _CONSUMER_THREADS, True)
                if const_expr(self.block_b > 128):  # again: the others are at their first tile too, and teach at the same time
                    self.learn_thresholds(args, walk, shared, thread, _CONSUMER_THREADS, False)
                barrier.arrive_and_wait()
            # first without a branch, so that loads and arithmetic of all vectors overlap; then what the few hits need
            hits = Uint32(0)
            for q in range_constexpr(self.blocks // self.vector):
                signs = Uint32(0x80000000)  # that of a NaN, as the hardware makes it, is 0
                for bound in self.bounds(shared, logits, q, lane, warp):
                    signs = signs & bound.bitcast(Uint32)
                hits = hits | Uint32(select_(signs != Uint32(0), Uint32(0), Uint32(1 << q)))
            if cute.arch.vote_any_sync(hits != Uint32(0)):
                for q in range_constexpr(self.blocks // self.vector):
                    if cute.arch.vote_any_sync((hits >> Uint32(q)) & Uint32(1) != Uint32(0)):
                        self.push_candidates(shared, logits, q, iteration, lane, warp)
        else:
            self.every_draw(args, walk, logits, token0, lane)

    def bounds(self, shared, logits, q, lane, warp):
        """Of a thread's logits in the columns 8 (vector q + v) + ..., for v below ``vector``: how far above its row's threshold
        a score can be at most, (column | row << 1) by v."""
        words = self.load_codes(shared, q, lane, warp)
        bounds = []
        for v in range(self.vector):
            j = q * self.vector + v
            pair = self.load_rows(shared, j, lane)
            for e in range(4):
                c, r = e % 2, e // 2
                base = cute.math.fma(logits[c, r, j], pair[2 * c], pair[2 * c + 1])
                bounds.append(cute.math.fma(noise.code_float(words[v], e), Float32(noise.CODE_STEP), base))
        return bounds

    @cute.jit
    def push_candidates(self, shared, logits, q: cutlass.Constexpr, iteration, lane, warp):
        """Queues what ``bounds`` makes a candidate."""
        bounds = self.bounds(shared, logits, q, lane, warp)
        mask = Uint32(0)
        for i in range_constexpr(4 * self.vector):
            mask = mask | Uint32(select_(bounds[i] < Float32(0.0), Uint32(0), Uint32(1 << i)))
        while mask != Uint32(0):
            lowest = mask & (Uint32(0) - mask)
            mask = mask ^ lowest
            logit = Float32(0.0)
            column = Int32(0)
            up = Int32(0)
            for i in range_constexpr(4 * self.vector):
                here = lowest == Uint32(1 << i)
                logit = Float32(select_(here, logits[i % 2, i // 2 % 2, q * self.vector + i // 4], logit))
                column = Int32(select_(here, Int32((q * self.vector + i // 4) * 8 + i % 2), column))
                up = Int32(select_(here, Int32(i // 2 % 2), up))
            token = warp * 16 + lane // 4 + 8 * up  # in the tile
            place = Int32(_VALID) | (iteration << 15) | (token << 8) | (column + 2 * (lane % 4))
            self.push(shared, Int64(logit.bitcast(Uint32)) << Int64(32) | Int64(Uint32(place)))

    @cute.jit
    def load_codes(self, shared, q, lane, warp):
        """Codes of a thread's tokens in the columns 8 (vector q + v) + ..., for v below ``vector``."""
        words = cute.make_rmem_tensor(self.vector, Uint32)
        start = (8 * q + warp) * 32 + lane
        layout = cute.make_layout((self.vector, self.code_words // self.vector), stride=(1, self.vector))
        tiled = cute.make_tensor(shared.codes.iterator, layout)
        cute.autovec_copy(tiled[None, start], words)
        return words

    @cute.jit
    def load_rows(self, shared, j, lane):
        """scale, threshold of a thread's two columns of block j."""
        pair = cute.make_rmem_tensor(4, Float32)
        tiled = cute.make_tensor(shared.rows.iterator, cute.make_layout((4, self.pairs), stride=(1, 4)))
        cute.autovec_copy(tiled[None, 4 * j + lane % 4], pair)
        return pair

    @cute.jit
    def seed_thresholds(self, shared, logits, lane, warp):
        """Before the first tile is searched: a lower bound of every row's best score in it."""
        for q in range_constexpr(self.blocks // self.vector):
            words = self.load_codes(shared, q, lane, warp)
            bests = []  # by column, c + 2 v
            for v in range_constexpr(self.vector):
                pair = self.load_rows(shared, q * self.vector + v, lane)
                for c in range_constexpr(2):
                    best = Float32(-INFINITY)
                    for r in range_constexpr(2):
                        w = noise.code_float(words[v], c + 2 * r)
                        gumbel = cute.math.fma(w, Float32(noise.CODE_STEP), Float32(noise.GUMBEL_ABOVE))
                        gumbel = Float32(select_(w >= Float32(noise.HALF), gumbel, Float32(-5.1)))  # E is at most 23
                        logit = logits[c, r, q * self.vector + v]
                        best = cute.arch.fmax(best, cute.math.fma(logit, pair[2 * c], gumbel))
                    bests.append(best)
            best, own = reduction.scatter_max(bests, lane)
            if (best < Float32(INFINITY)) & (best > Float32(-INFINITY)):
                column = (q * self.vector + own // 2) * 8 + 2 * (lane % 4) + own % 2
                self.lower_threshold(shared, column, best)

    @cute.jit
    def lower_threshold(self, shared, column, score) -> Boolean:
        """Records that a row's best is at least ``score``; false if that was known."""
        margin = cute.math.fma(cute.math.abs(score), Float32(2.0**-18), Float32(noise.GUMBEL_BELOW + 2.0**-10))
        threshold = margin - score
        pointer = shared.rows.iterator + 2 * column + 1
        old = Float32(0.0)
        if threshold >= Float32(0.0):
            was = cute.arch.atomic_min(
                cute.recast_ptr(pointer, dtype=Int32), threshold.bitcast(Int32), sem="relaxed", scope="cta"
            )
            old = was.bitcast(Float32)
        else:
            was = cute.arch.atomic_max(
                cute.recast_ptr(pointer, dtype=Uint32), threshold.bitcast(Uint32), sem="relaxed", scope="cta"
            )
            old = was.bitcast(Float32)
        return threshold <= old

    @cute.jit
    def score_of(self, args, logit, token, row, draw) -> Float32:
        """The score of a token id, exactly; ``row`` may lie beyond the batch."""
        scale, switch, k0, k1, o0, o1 = self.row_params(args, cutlass.min(row, args.batch - 1))
        group = Uint32((token & 7) | ((token >> 4) & 3) << 3 | (token >> 7) << 5)
        words = noise.philox_words(group, Uint32(draw), (o0, o1), (k0, k1))
        word = self.word_of_token(words, token)
        tail = Uint32(0)
        if word == Uint32(0):
            refined = Uint32(draw) | Uint32(noise.REFINEMENT_BIT)
            tail = self.word_of_token(noise.philox_words(group, refined, (o0, o1), (k0, k1)), token)
        return noise.score(logit, scale, noise.minus_gumbel_refined(word, tail), switch)

    @cute.jit
    def word_of_token(self, words, token) -> Uint32:
        """The word of a token's lane: bits 3 and 6."""
        low = Uint32(select_(token & 8 != 0, words[1], words[0]))
        high = Uint32(select_(token & 8 != 0, words[3], words[2]))
        return Uint32(select_(token & 64 != 0, high, low))

    @cute.jit
    def push(self, shared, entry: Int64):
        """Leaves a candidate for ``evaluate``; waits while the queue is full."""
        slot = cute.arch.atomic_add(shared.ticket.iterator, Int32(1), sem="relaxed", scope="cta") % QUEUE
        waiting = Int32(1)
        while waiting != 0:
            found = cute.arch.atomic_cas(shared.queue.iterator + slot, cmp=Int64(0), val=entry, sem="relaxed", scope="cta")
            if found == Int64(0):
                waiting = Int32(0)
            slot = (slot + 1) % QUEUE

    # -- the evaluating warps

    @cute.jit
    def evaluate(self, args: Arguments, walk: Walk, shared: Shared, thread):
        """Evaluates candidates exactly and publishes those that lead their row in this CTA, until the consumers are done.

        A thread owns one slot of the queue.
        """
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
                else:
                    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Uint32(200)])

    @cute.jit
    def consider(self, args, walk, shared, logit, token, column):
        """Every case of the contract, for one token."""
        row = walk.first_row + column
        if (row < args.batch) & (token < args.end) & (token >= args.skip):
            token = args.base + token
            score = self.score_of(args, logit, token, row, Int32(0))
            slot = args.workspace + Int64(row) * 8
            key = reduction.pack_key(score, token)
            if score == Float32(INFINITY):
                reduction.publish(slot + Int64(args.batch) * 8, key)
            else:
                if score != Float32(-INFINITY):
                    leads = score != score
                    if score == score:
                        leads = self.lower_threshold(shared, column, score)
                    if leads:
                        reduction.publish(slot, key)

    @cute.jit
    def every_draw(self, args, walk, logits, token0, lane):
        """Several draws per row: every token is evaluated exactly, draw by draw."""
        copy = cute.make_rmem_tensor((2, 2 * self.blocks), Float32)
        for j in range_constexpr(self.blocks):
            for c in range_constexpr(2):
                for r in range_constexpr(2):
                    copy[r, 2 * j + c] = logits[c, r, j]
        for column in cutlass.range(2 * self.blocks, unroll=1):
            row = walk.first_row + (column // 2) * 8 + (lane % 4) * 2 + column % 2
            for draw in cutlass.range(args.num_samples, unroll=1):
                best = Int64(0)
                best_inf = Int64(0)
                for r in range_constexpr(2):
                    token = token0 + 8 * r
                    score = self.score_of(args, copy[r, column], args.base + token, row, draw)
                    key = reduction.pack_key(score, args.base + token)
                    sampled = (row < args.batch) & (token < args.end) & (token >= args.skip)
                    is_inf = score == Float32(INFINITY)
                    counts = (score != Float32(INFINITY)) & (score != Float32(-INFINITY))  # finite, or NaN
                    best = reduction.max_key(best, Int64(select_(sampled & counts, key, Int64(0))))
                    best_inf = reduction.max_key(best_inf, Int64(select_(sampled & is_inf, key, Int64(0))))
                best = reduction.column_max(best)
                best_inf = reduction.column_max(best_inf)
                slot = args.workspace + (Int64(row) * args.num_samples + draw) * 8
                if lane < 4:
                    if best != Int64(0):
                        reduction.publish(slot, best)
                    if best_inf != Int64(0):
                        reduction.publish(slot + Int64(args.batch) * args.num_samples * 8, best_inf)
