"""Applies the logit transforms to a tile in registers, before the search: the consumer warps.

The order is the contract's (section 5): bias, scale and soft cap of the LM head; the dense bias of all rows, then each
row's sparse bias; penalties; the token mask. A masked token has -inf, which ``candidate_search`` and ``dense_fallback``
pass over.

Every operation is the one of ``kernels.triton.filtered.transforms``: which multiplications are fused into sums, which
division is used. A logit is therefore the same bits in both kernels, and ``sample_from_logits`` of the raw logits gives
the tokens of ``sample``.

The operands are small beside the weight, but the weight has evicted them from L2. ``prefetch`` therefore requests a
tile's share before its matmul begins.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr, select_

from . import noise, ptx
from .arguments import Arguments, TransformArguments, Walk
from .config import TILE_V
from .fragments import Fragments
from .memory import global_pointer
from .reduction import INFINITY
from .shared_memory import CONSUMER_THREADS, Shared

_AT_ONCE = 32, 16  # unrolled logits of a thread that has one or both halves; more of 128 would spill
_LOG2_E = 1.4426950408889634
_LINE = 128  # bytes
_WORD = 8  # bytes of a word of ``kernels.triton.filtered.sparse_bias``
_TOKEN = 0x7F  # the token's bits in such a word
_FEW_WORDS = 3  # of three: if more of a thread's bound words have marks, all counts are read, which takes as long


class LogitTransforms:
    """The transforms of one tile shape."""

    def __init__(self, fragments: Fragments):
        self.fragments = fragments
        self.halves = fragments.halves
        self.block_b = fragments.block_b
        self.own_blocks = fragments.own_blocks
        most = max(_AT_ONCE[self.halves - 1] // (4 * self.halves), 1)
        self.few_words = max(fragments.vectors * fragments.vector // _FEW_WORDS, 1)
        self.blocks = next(n for n in range(min(most, self.own_blocks), 0, -1) if self.own_blocks % n == 0)  # at once

    @cute.jit
    def prefetch(self, args: Arguments, params: TransformArguments, walk: Walk, iteration, thread):
        """Prefetches a tile's per-row operands to L2: the consumers."""
        first = walk.first_token(iteration)
        rows = cutlass.min(args.batch - walk.first_row, self.block_b)
        if params.token_mask != Int64(0):
            words = cute.ceil_div(args.end, 32)
            for column in cutlass.range(thread, rows, CONSUMER_THREADS, unroll=1):
                row = params.token_mask + Int64(walk.first_row + column) * params.mask_stride
                ptx.prefetch(row + Int64(cutlass.min(first // 32, words - 1)) * 4)
        if params.sparse_bias != Int64(0):
            for column in cutlass.range(thread, rows, CONSUMER_THREADS, unroll=1):
                ptx.prefetch(self._word_at(args, params, walk, walk.first_row + column, iteration))
        if self._reads_all_counts(args, params):
            lines = TILE_V * 4 // _LINE
            for place in cutlass.range(thread, rows * lines, CONSUMER_THREADS, unroll=1):
                row = params.counts + counts_row(params, walk.first_row + place // lines) * params.counts_stride
                token = cutlass.min(first + place % lines * (_LINE // 4), args.end - 1)
                ptx.prefetch(row + Int64(token) * 4)

    @cute.jit
    def apply(
        self,
        args: Arguments,
        params: TransformArguments,
        walk: Walk,
        shared: Shared,
        logits,
        words,
        sparse_bias,
        iteration,
        thread,
    ):
        """Transforms the logits of the CTA's tile number ``iteration``: the consumers, 256 threads.

        ``logits``: (2 columns, 2 rows, column blocks of eight, token halves); those beyond the vocabulary become
        arbitrary. ``words``: the tile's first bound words; ``sparse_bias``: its sparse-bias words.
        """
        lane = thread % 32
        all_counts, marked = self._reads_all_counts(args, params), Uint32(0)
        if (params.counts != Int64(0)) & ~all_counts:
            marked = self._marked_words(shared, thread)
            if cute.arch.warp_redux_sync(Int32(cute.arch.popc(marked)), "max") > Int32(self.few_words):
                all_counts, marked = Boolean(True), Uint32(0)
                self._unmark_all(shared, thread)
        token0 = self.fragments.token(walk.first_token(iteration), thread)
        tokens = [
            cutlass.min(token0 + 8 * r + 64 * half, args.end - 1) for half in range(self.halves) for r in range(2)
        ]
        changes = (params.logit_scale != 1.0) | (params.soft_cap > 0.0)
        if changes | (params.bias | params.dense_bias != Int64(0)):
            for _ in cutlass.range(self.own_blocks // self.blocks, unroll=1):
                self._scale_and_cap(params, logits, tokens)
                if params.dense_bias != Int64(0):
                    self._add(params.dense_bias, logits, tokens)
                self._rotate(logits)
        if params.sparse_bias != Int64(0):
            self._add_sparse_bias(args, params, walk, logits, sparse_bias, ptx.scheduling_fence(thread))
        if all_counts:
            first_row = walk.first_row + 8 * self.fragments.first_block(thread // 32) + 2 * (lane % 4)
            for _ in cutlass.range(self.own_blocks // self.blocks, unroll=1):
                self._penalize_all(args, params, logits, tokens, first_row)
                self._rotate(logits)
                first_row += 8 * self.blocks
        if (params.nonzero_mask != Int64(0)) & (args.num_samples == 1):
            self._penalize_marked(args, params, walk, shared, logits, marked, iteration, ptx.scheduling_fence(thread))
            first = self.fragments.load_bounds(shared, 0, ptx.scheduling_fence(thread))  # without marks
            for v in range_constexpr(self.fragments.vector):
                words[v] = first[v]
        if params.token_mask != Int64(0):
            self._mask(args, params, walk, shared, logits, iteration, ptx.scheduling_fence(thread))

    def _reads_all_counts(self, args, params) -> Boolean:
        """Returns whether there are counts but no nonzero-count mask for them."""
        return (params.counts != Int64(0)) & ((params.nonzero_mask == Int64(0)) | (args.num_samples != 1))

    # -- the first column blocks

    def _logit_indices(self) -> list[tuple[int, int, int, int, int]]:
        """Lists column of two, row of two, column block, token half and token number of every logit."""
        return [
            (c, r, j, half, 2 * half + r)
            for j in range(self.blocks)
            for c in range(2)
            for half in range(self.halves)
            for r in range(2)
        ]

    def _rotate(self, logits):
        """Makes the next column blocks the first ones, and these the last."""
        if self.blocks == self.own_blocks:
            return
        for c in range(2):
            for r in range(2):
                for half in range(self.halves):
                    values = [logits[c, r, j, half] for j in range(self.own_blocks)]
                    for j in range(self.own_blocks):
                        logits[c, r, j, half] = values[(j + self.blocks) % self.own_blocks]

    @cute.jit
    def _add(self, address, logits, tokens):
        """Adds a (V,) float32 vector."""
        values = [global_pointer(Float32, address + Int64(token) * 4).load() for token in tokens]
        for c, r, j, half, n in self._logit_indices():
            logits[c, r, j, half] = ptx.add(logits[c, r, j, half], values[n])

    @cute.jit
    def _scale_and_cap(self, params, logits, tokens):
        if params.bias != Int64(0):
            self._add(params.bias, logits, tokens)
        if params.logit_scale != Float32(1.0):
            for c, r, j, half, _ in self._logit_indices():
                logits[c, r, j, half] = ptx.multiply(logits[c, r, j, half], params.logit_scale)
        if params.soft_cap > Float32(0.0):
            for c, r, j, half, _ in self._logit_indices():
                capped = _tanh(ptx.divide(logits[c, r, j, half], params.soft_cap))
                logits[c, r, j, half] = ptx.multiply(capped, params.soft_cap)

    @cute.jit
    def _penalize_all(self, args, params, logits, tokens, first_row):
        counts = cute.make_rmem_tensor(4 * self.blocks * self.halves, Int32)
        for at, (c, _, j, _, n) in enumerate(self._logit_indices()):
            of_counts = counts_row(params, cutlass.min(first_row + 8 * j + c, args.batch - 1))
            address = params.counts + of_counts * params.counts_stride
            counts[at] = global_pointer(Int32, address + Int64(tokens[n]) * 4).load()
        for j in range_constexpr(self.blocks):
            some = Int32(0)
            for at in range_constexpr(4 * self.halves):
                some = some | counts[4 * self.halves * j + at]
            if some != Int32(0):  # few threads
                for c in range_constexpr(2):
                    row = cutlass.min(first_row + 8 * j + c, args.batch - 1)
                    repetition = _row_param(params.repetition, params.repetition_value, row)
                    frequency = _row_param(params.frequency, params.frequency_value, row)
                    presence = _row_param(params.presence, params.presence_value, row)
                    for n in range_constexpr(2 * self.halves):
                        count = counts[4 * self.halves * j + 2 * self.halves * c + n]
                        r, half = n % 2, n // 2
                        logits[c, r, j, half] = _penalize(logits[c, r, j, half], count, repetition, frequency, presence)

    # -- tokens with an entry in the sparse bias

    @cute.jit
    def load_sparse_bias(self, args: Arguments, params: TransformArguments, walk: Walk, iteration, thread) -> list:
        """Loads a tile's words of the sparse bias (``kernels.triton.filtered.sparse_bias``): a lane has every 32nd of
        the warp's columns, two 32-bit numbers each, 0 for rows without any. All loads are issued at once, while the
        last wgmma runs."""
        column0 = 8 * self.fragments.first_block(thread // 32)
        words = []
        for k in range_constexpr(-(-self.own_blocks // 4)):
            column = 32 * k + thread % 32
            row = walk.first_row + column0 + column
            there = (params.sparse_bias != Int64(0)) & (column < 8 * self.own_blocks) & (row < args.batch)
            words += ptx.load_two_if(self._word_at(args, params, walk, row, iteration), there)
        return words

    def _word_at(self, args, params, walk, row, iteration) -> Int64:
        """Returns the address of a row's word of a tile; of the last tile for a cluster's surplus tiles."""
        tile = cutlass.min(walk.tile(iteration), (args.end - 1) // TILE_V)
        return params.sparse_bias + Int64(row) * params.sparse_bias_stride + Int64(tile) * _WORD

    @cute.jit
    def _add_sparse_bias(self, args, params, walk, logits, sparse_bias, thread):
        """Adds the entries column by column: few columns of a tile have any. Entries of other warps' tokens are
        skipped."""
        first_token = self.fragments.first_token(thread // 32)
        words = list(zip(sparse_bias[::2], sparse_bias[1::2]))
        waiting, some = [], Uint32(0)
        for info, _ in words:
            wanted = (_entry_count(info) > Uint32(1)) | ((info != Uint32(0)) & self._holds_token(first_token, info))
            waiting += [Uint32(cute.arch.vote_ballot_sync(wanted))]
            some = some | waiting[-1]
        if some != Uint32(0):
            for k in cutlass.range(len(words), unroll=1):
                (info, value), columns = words[0], waiting[0]
                for other in range_constexpr(1, len(words)):
                    info = Uint32(select_(k == other, words[other][0], info))
                    value = Uint32(select_(k == other, words[other][1], value))
                    columns = Uint32(select_(k == other, waiting[other], columns))
                while columns != Uint32(0):
                    lowest, columns = ptx.take_lowest(columns)
                    source = Int32(lowest)
                    tile_word = Uint32(cute.arch.shuffle_sync(info, source))
                    first_value = Uint32(cute.arch.shuffle_sync(value, source))
                    self._add_column(args, params, walk, logits, 32 * k + source, tile_word, first_value, thread)

    @cute.jit
    def _add_column(self, args, params, walk, logits, column, tile_word, first_value, thread):
        """Adds the entries of one of the warp's columns. ``tile_word``, ``first_value``: the tile's word, equal in all
        lanes.

        With several entries each lane loads every 32nd. The warp shuffles those of its own tokens, and the lane that
        holds the token adds the value.
        """
        lane = thread % 32
        first_token = self.fragments.first_token(thread // 32)
        row = walk.first_row + 8 * self.fragments.first_block(thread // 32) + column
        first = cute.ceil_div(args.end, TILE_V) + _first_entry(tile_word)
        at = params.sparse_bias + Int64(row) * params.sparse_bias_stride + Int64(first + lane) * _WORD
        count, done = Int32(_entry_count(tile_word)), Int32(0)
        number = Int32(
            select_(lane % 4 == column // 2 % 4, 2 * (column // 8) + column % 2, Int32(-1))
        )  # among the lane's columns
        found = self._take_column(logits, 2 * (column // 8) + column % 2)
        while done < count:
            there = done + lane < count
            info, bits = ptx.load_two_if(at + Int64(done) * _WORD, there & (count > 1))
            info = Uint32(select_(count > 1, info, tile_word))
            bits = Uint32(select_(count > 1, bits, first_value))
            own = Uint32(cute.arch.vote_ballot_sync(there & self._holds_token(first_token, info)))
            while own != Uint32(0):
                lowest, own = ptx.take_lowest(own)
                token = Int32(Uint32(cute.arch.shuffle_sync(info, Int32(lowest))) & Uint32(_TOKEN))
                value = Uint32(cute.arch.shuffle_sync(bits, Int32(lowest))).bitcast(Float32)
                for n in range_constexpr(2 * self.halves):
                    is_it = token == first_token + 64 * (n // 2) + 8 * (n % 2) + lane // 4
                    found[n] = Float32(select_(is_it, ptx.add(found[n], value), found[n]))
            done += 32
        self._put_column(logits, number, found)

    def _holds_token(self, first_token, info) -> Boolean:
        """Returns whether an entry's token is one of the warp's."""
        return Int32(info & Uint32(0x70 if self.halves == 1 else 0x30)) == first_token

    def _columns(self) -> list[list[tuple]]:
        """Lists, for each of a thread's columns, the indices of its logits by token half and row of two."""
        each = [(half, r) for half in range(self.halves) for r in range(2)]
        return [[(c, r, j, half) for half, r in each] for j in range(self.own_blocks) for c in range(2)]

    def _take_column(self, logits, number):
        """Returns the logits of a thread's column."""
        found = cute.make_rmem_tensor(2 * self.halves, Float32)
        for n, places in enumerate(zip(*self._columns())):
            found[n] = _select([logits[place] for place in places], number)
        return found

    def _put_column(self, logits, number, found):
        """Writes the logits of a thread's column."""
        for column, places in enumerate(self._columns()):
            for n, place in enumerate(places):
                logits[place] = Float32(select_(number == column, found[n], logits[place]))

    # -- tokens with a mark

    @cute.jit
    def _marked_words(self, shared, thread) -> Uint32:
        """Returns a bit for each of a thread's bound words that has marks."""
        marked = Uint32(0)
        for q in range_constexpr(self.fragments.vectors):
            words = self.fragments.load_bounds(shared, q, thread)
            for v in range_constexpr(self.fragments.vector):
                bit = Uint32(1 << q * self.fragments.vector + v)
                marked = marked | Uint32(select_(words[v] & Uint32(noise.MARKS) != Uint32(0), bit, Uint32(0)))
        return marked

    @cute.jit
    def _unmark_all(self, shared, thread):
        for w in cutlass.range(self.fragments.vectors * self.fragments.vector, unroll=1):
            at = self._bound_word(w, thread)
            shared.gumbel_bounds[at] = noise.remove_marks(shared.gumbel_bounds[at], Uint32(noise.MARKS))

    def _bound_word(self, w, thread):
        """Returns the index of a thread's bound word number w."""
        return (
            CONSUMER_THREADS * (w // self.fragments.vector) + thread
        ) * self.fragments.vector + w % self.fragments.vector

    @cute.jit
    def _penalize_marked(self, args, params, walk, shared, logits, marked, iteration, thread):
        """Applies penalties to the tokens of marked bound words, one token after the other; few threads have one or two
        words. Rejected alternatives: docs/kernels.md."""
        token0 = self.fragments.token(walk.first_token(iteration), thread)
        first_row = walk.first_row + 8 * self.fragments.first_block(thread // 32) + 2 * (thread % 4)
        done = Uint32(0)  # marks of the lowest marked word
        while cute.arch.vote_any_sync(marked != Uint32(0)):
            there = marked != Uint32(0)
            w = Int32(select_(there, Int32(ptx.take_lowest(marked)[0]), Int32(0)))
            at = self._bound_word(w, thread)
            word = shared.gumbel_bounds[at]
            marks = word & Uint32(noise.MARKS) & ~done
            mark = marks & (Uint32(0) - marks)
            i = Int32(select_(there, Int32(cute.arch.popc(mark - Uint32(1))) // 8, Int32(0)))
            column, row, block, half = i & 1, i >> 1, w // self.halves, w % self.halves
            batch_row = cutlass.min(first_row + 8 * block + column, args.batch - 1)
            token = cutlass.min(token0 + 8 * row + 64 * half, args.end - 1)
            of_row = params.counts + counts_row(params, batch_row) * params.counts_stride
            count = ptx.load_if(of_row + Int64(token) * 4, there)
            repetition = _row_param(params.repetition, params.repetition_value, batch_row)
            frequency = _row_param(params.frequency, params.frequency_value, batch_row)
            presence = _row_param(params.presence, params.presence_value, batch_row)
            n = 4 * w + i
            x = _penalize(self._take(logits, n), count, repetition, frequency, presence)
            self._put(logits, Int32(select_(there, n, Int32(-1))), x)
            if there:
                shared.gumbel_bounds[at] = noise.remove_marks(word, mark)
            last = marks == mark
            done = Uint32(select_(last, Uint32(0), done | mark))
            marked = Uint32(select_(last, marked & (marked - Uint32(1)), marked))

    def _in_order(self) -> list[tuple]:
        """Lists the indices of a thread's logits in the order of its bounds."""
        places = range(4 * self.fragments.vectors * self.fragments.vector)
        return [(n & 1, n >> 1 & 1, (n >> 2) // self.halves, (n >> 2) % self.halves) for n in places]

    def _take(self, logits, n) -> Float32:
        """Returns the logit number n."""
        return _select([logits[place] for place in self._in_order()], n)

    def _put(self, logits, n, x):
        """Writes the logit number n."""
        for number, place in enumerate(self._in_order()):
            logits[place] = Float32(select_(n == number, x, logits[place]))

    # -- all columns

    @cute.jit
    def _mask(self, args, params, walk, shared, logits, iteration, thread):
        """Applies the token mask. A mask word has 16 of a warp's tokens.

        A lane loads the words of every 32nd of the warp's columns, all at once. Pairs of 16 bits reach the lanes that
        need them by shuffles.
        """
        lane = thread % 32
        column0 = 8 * self.fragments.first_block(thread // 32)
        first_token = walk.first_token(iteration) + self.fragments.first_token(thread // 32)
        last_word = (args.end - 1) // 32
        words = []
        for k in range_constexpr(-(-self.own_blocks // 4)):
            row = cutlass.min(walk.first_row + column0 + 32 * k + lane, args.batch - 1)
            at = params.token_mask + Int64(row) * params.mask_stride
            for half in range_constexpr(self.halves):
                word = cutlass.min((first_token + 64 * half) // 32, last_word)
                words += [global_pointer(Uint32, at + Int64(word) * 4).load()]
        self._undefine(shared, logits, column0, lane)
        upper = first_token & 16 != 0
        words = [Uint32(select_(upper, word >> Uint32(16), word & Uint32(0xFFFF))) for word in words]
        pairs = [low | high << Uint32(16) for low, high in zip(words[::2], [*words[1::2], Uint32(0)])]
        together = 2 // self.halves  # groups of 32 columns in a pair
        for j in range_constexpr(0, self.own_blocks, 4 * together):
            for place in range_constexpr(4):
                for c in range_constexpr(2):
                    if const_expr(j + place < self.own_blocks):
                        source = 8 * place + 2 * (lane % 4) + c
                        bits = cute.arch.shuffle_sync(pairs[j // (4 * together)], source) >> Uint32(lane // 4)
                        self._apply_mask_bits(logits, bits, c, j + place)

    def _apply_mask_bits(self, logits, bits, c, first):
        """Sets masked tokens to -inf. ``bits``: 0 and 8 for two rows of two; 16 and 24 for the upper token half, or for
        four column blocks on."""
        for n in range(2):
            j, half = (first, n) if self.halves == 2 else (first + 4 * n, 0)
            for r in range(2):
                if j < self.own_blocks:
                    allowed = bits & Uint32(1 << 16 * n + 8 * r) != Uint32(0)
                    logits[c, r, j, half] = Float32(select_(allowed, logits[c, r, j, half], Float32(-INFINITY)))

    @cute.jit
    def _undefine(self, shared, logits, column0, lane):
        """Replaces -inf by NaN in rows of infinite temperature, where the slope is 0: -inf is no score there. Masked
        tokens are passed over."""
        some = Boolean(False)
        for k in range_constexpr(-(-self.own_blocks // 4)):
            some = some | (
                shared.rows[column0 + cutlass.min(32 * k + lane, 8 * self.own_blocks - 1), 0] == Float32(0.0)
            )
        if cute.arch.vote_any_sync(some):
            for j in range_constexpr(self.own_blocks):
                for c in range_constexpr(2):
                    undefined = shared.rows[column0 + 8 * j + 2 * (lane % 4) + c, 0] == Float32(0.0)
                    for half in range_constexpr(self.halves):
                        for r in range_constexpr(2):
                            x = logits[c, r, j, half]
                            lost = undefined & (x == Float32(-INFINITY))
                            logits[c, r, j, half] = Float32(select_(lost, Float32(math.nan), x))


def _select(some: list[Float32], n) -> Float32:
    """Returns the value number n."""
    bit = 0
    while len(some) > 1:
        odd = n >> bit & 1 != 0
        pairs = zip(some[::2], some[1::2])
        some = [Float32(select_(odd, high, low)) for low, high in pairs] + some[len(some) // 2 * 2 :]
        bit += 1
    return some[0]


def _entry_count(info) -> Uint32:
    """Returns how many entries a tile has, from its word (``kernels.triton.filtered.sparse_bias``)."""
    return info >> Uint32(7) & Uint32(0x7FF)


def _first_entry(info) -> Int32:
    """Returns the index of a tile's first entry, behind the words of all tiles."""
    return Int32(info >> Uint32(18))


def counts_row(params: TransformArguments, row) -> Int64:
    """Returns a row's row of counts. Row numbers have 31 bits: the low word of an int64 is loaded."""
    there = params.counts_rows != Int64(0)
    return Int64(select_(there, ptx.load_if(params.counts_rows + Int64(row) * 8, there), Int32(row)))


@cute.jit
def _row_param(address, value, row) -> Float32:
    """Returns a row's parameter: the scalar where there is no address."""
    found = value
    if address != Int64(0):
        found = global_pointer(Float32, address + Int64(row) * 4).load()
    return found


def _penalize(logit, count, repetition, frequency, presence) -> Float32:
    """Applies penalties to a token's logit. ``count``: see ``inputs.SamplingParams.counts``."""
    repeated = Float32(select_(logit > Float32(0.0), ptx.divide(logit, repetition), ptx.multiply(logit, repetition)))
    x = Float32(select_(count != Int32(0), repeated, logit))
    times = count & Int32(0x7FFFFFFF)
    less = ptx.subtract(cute.math.fma(-frequency, Float32(times), x), presence)
    return Float32(select_(times != Int32(0), less, x))


def _tanh(x) -> Float32:
    """Computes tanh as ``kernels.triton.filtered.transforms._tanh`` does."""
    x2 = ptx.multiply(x, x)
    above = ptx.multiply(x, cute.math.fma(x2, cute.math.fma(x, x, Float32(105.0)), Float32(945.0)))
    below = cute.math.fma(x2, cute.math.fma(x2, Float32(15.0), Float32(420.0)), Float32(945.0))
    e = ptx.exp2(ptx.multiply(cute.math.abs(x), Float32(-2.0 * _LOG2_E)))
    far = ptx.subtract(Float32(1.0), e)
    far = Float32(select_(x < Float32(0.0), -far, far))
    is_near = cute.math.abs(x) < Float32(0.6)  # one division, of the chosen pair
    return ptx.divide(Float32(select_(is_near, above, far)), Float32(select_(is_near, below, ptx.add(e, Float32(1.0)))))
