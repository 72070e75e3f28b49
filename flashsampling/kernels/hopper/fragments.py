"""Who holds what of a tile: logits in the consumers' registers, codes in shared memory.

A thread holds of a tile the tokens t and t + 8, t = 64 half + 16 warp + lane / 4, and columns 8 j + 2 (lane % 4) + {0,
1}. The two consumer warpgroups share a tile by halves of its tokens; where it has more than 192 columns, by halves of
these, and a thread has both halves of the tokens: what it loads of a column is then used four times, not twice. Codes
lie in shared memory as a consumer thread reads them: four bytes (column | row << 1) a word, ``vector`` words at once,
the halves innermost.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32, Uint64, const_expr

from . import thresholds
from .config import TILE_V, TileConfig
from .shared_memory import CONSUMER_THREADS


class Fragments:
    """Of a tile shape. Rooms read its numbers off an object: in a local variable, a dynamic branch makes an int the
    device's.

    q counts a thread's code words, ``vector`` at a time; i counts the 4 ``vector`` bytes of these."""

    def __init__(self, config: TileConfig):
        self.block_b = block_b = config.block_b
        self.halves = config.halves  # of the tile's tokens that a consumer thread has
        self.own_blocks = block_b // 8 // self.halves  # of eight columns, that it has
        self.vector = next(v for v in (4, 2, 1) if block_b // 8 % v == 0)  # code words that it loads at once
        self.vectors = block_b // 8 // self.vector
        self.pairs = block_b // 2  # of columns
        self.columns_of = Uint32 if 2 * self.own_blocks <= 32 else Uint64  # bits, one for each that a thread has
        self.tile_words = TILE_V * block_b // 4  # of a tile's codes
        # a thread's columns come as neighbours out of eight; its tokens differ in bit 3
        self.of_thread = (2, 2, self.own_blocks, self.halves)

    def first_block(self, warp):
        """Of eight columns: the first one of a consumer warp."""
        return Int32(0) if self.halves == 1 else warp // 4 * self.own_blocks

    def first_token(self, warp):
        """Of a tile, that a consumer warp has."""
        return (warp if self.halves == 1 else warp % 4) * 16

    def token(self, first_token, thread):
        """The first token that a consumer thread has of a tile, whose first is given."""
        return first_token + self.first_token(thread // 32) + thread % 32 // 4

    def place(self, q, i) -> tuple:
        """Where the logit of byte ``i`` of a thread's code words number ``q`` stands: column and row of two, block of
        columns, half of the tokens."""
        word = i >> 2
        return i & 1, i >> 1 & 1, q * self.vector // self.halves + word // self.halves, word % self.halves

    def logits_of(self, c: int, j: int) -> list[int]:
        """Those of a thread's code words, of (4 ``vector``,), that are of one column: c of two, j of the blocks of
        eight."""
        return [i for i in range(4 * self.vector) if self.place(0, i)[0] == c and self.place(0, i)[2] == j]

    @cute.jit
    def pick(self, logits, q, found, at_least: cutlass.Constexpr, at_once: cutlass.Constexpr):
        """``found`` (4 ``vector`` ``at_once``,) becomes a thread's logits of its code words number q ``at_once`` and
        next ones; q is ``at_least`` that."""
        if const_expr((at_least + 1) * at_once == self.vectors):
            self._copy(logits, at_least * at_once, found)
        else:
            if q == at_least:
                self._copy(logits, at_least * at_once, found)
            else:
                self.pick(logits, q, found, at_least + 1, at_once)

    def _copy(self, logits, first, found):
        for i in range(cute.size(found)):
            c, r, j, half = self.place(first, i)
            found[i] = logits[c, r, j, half]

    @cute.jit
    def load_bounds(self, shared, q, thread):
        """A consumer thread's code words number ``q``, (``vector``,) uint32."""
        words = cute.make_rmem_tensor(self.vector, Uint32)
        layout = cute.make_layout((self.vector, self.tile_words // self.vector), stride=(1, self.vector))
        tiled = cute.make_tensor(shared.gumbel_bounds.iterator, layout)
        cute.autovec_copy(tiled[None, CONSUMER_THREADS * q + thread], words)
        return words

    @cute.jit
    def load_rows(self, shared, block, lane):
        """slope, threshold of a thread's two columns of a block of eight."""
        pair = cute.make_rmem_tensor(4, Float32)
        tiled = cute.make_tensor(shared.rows.iterator, cute.make_layout((4, self.pairs), stride=(1, 4)))
        cute.autovec_copy(tiled[None, 4 * block + lane % 4], pair)
        return pair

    def load_ratios(self, shared, block, lane) -> list[Float32]:
        """Of the same two columns."""
        pairs = cute.make_tensor(cute.recast_ptr(shared.ratios.iterator, dtype=Uint16), cute.make_layout(self.pairs))
        pair = Uint32(pairs[4 * block + lane % 4])
        return [thresholds.ratio_of_byte(pair & Uint32(0xFF)), thresholds.ratio_of_byte(pair >> Uint32(8))]
