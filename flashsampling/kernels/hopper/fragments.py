"""Maps logits and bounds to threads: logits in the consumers' registers, bounds in shared memory.

A thread holds tokens t and t + 8 of a tile, t = 64 half + 16 warp + lane / 4, and columns 8 j + 2 (lane % 4) + {0, 1}.
The two consumer warpgroups share a tile by token halves. Above 192 columns they share it by column halves, and a thread
has both token halves: it then uses what it loads for a column four times instead of twice. Bounds lie in shared memory
in the order in which a consumer thread reads them: four bytes (column | row << 1) a word, ``vector`` words at once,
token halves innermost.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32, Uint64, const_expr

from . import thresholds
from .config import TILE_V, TileConfig
from .shared_memory import CONSUMER_THREADS


class Fragments:
    """The mapping of one tile shape. q counts a thread's vectors of ``vector`` bound words; i counts the 4 ``vector``
    bytes of one.

    Device code reads these numbers off an object: as a local variable in a dynamic branch, an int would become a
    run-time value.
    """

    def __init__(self, config: TileConfig):
        self.block_b = block_b = config.block_b
        self.halves = config.halves  # token halves that a consumer thread has
        self.own_blocks = block_b // 8 // self.halves  # column blocks of eight that it has
        self.vector = next(v for v in (4, 2, 1) if block_b // 8 % v == 0)  # bound words that it loads at once
        self.vectors = block_b // 8 // self.vector
        self.pairs = block_b // 2  # of neighbouring columns
        self.column_mask_type = Uint32 if 2 * self.own_blocks <= 32 else Uint64  # a bit for each column of a thread
        self.tile_words = TILE_V * block_b // 4  # bound words of a tile
        # a thread's columns are neighbours among eight; its tokens differ in bit 3
        self.thread_shape = (2, 2, self.own_blocks, self.halves)

    def first_block(self, warp):
        """Returns the first column block of a consumer warp."""
        return Int32(0) if self.halves == 1 else warp // 4 * self.own_blocks

    def first_token(self, warp):
        """Returns the first token of a consumer warp in a tile."""
        return (warp if self.halves == 1 else warp % 4) * 16

    def token(self, first_token, thread):
        """Returns the first token of a consumer thread in the tile that begins with ``first_token``."""
        return first_token + self.first_token(thread // 32) + thread % 32 // 4

    def logit_index(self, q, i) -> tuple:
        """Returns the index of the logit of byte ``i`` of bound words number ``q``: column and row of two, column
        block, token half."""
        word = i >> 2
        return i & 1, i >> 1 & 1, q * self.vector // self.halves + word // self.halves, word % self.halves

    def column_logits(self, c: int, j: int) -> list[int]:
        """Lists the bytes of a thread's bound words whose logits are in one column: c of two, j of the column
        blocks."""
        return [i for i in range(4 * self.vector) if self.logit_index(0, i)[0] == c and self.logit_index(0, i)[2] == j]

    @cute.jit
    def select_logits(self, logits, q, found, at_least: cutlass.Constexpr, at_once: cutlass.Constexpr):
        """Copies a thread's logits of its bound words number q ``at_once`` and following into ``found`` (4 ``vector``
        ``at_once``,); q is at least ``at_least``."""
        if const_expr((at_least + 1) * at_once == self.vectors):
            self._copy(logits, at_least * at_once, found)
        else:
            if q == at_least:
                self._copy(logits, at_least * at_once, found)
            else:
                self.select_logits(logits, q, found, at_least + 1, at_once)

    def _copy(self, logits, first, found):
        for i in range(cute.size(found)):
            c, r, j, half = self.logit_index(first, i)
            found[i] = logits[c, r, j, half]

    @cute.jit
    def load_bounds(self, shared, q, thread):
        """Loads a consumer thread's bound words number ``q``, (``vector``,) uint32."""
        words = cute.make_rmem_tensor(self.vector, Uint32)
        layout = cute.make_layout((self.vector, self.tile_words // self.vector), stride=(1, self.vector))
        tiled = cute.make_tensor(shared.gumbel_bounds.iterator, layout)
        cute.autovec_copy(tiled[None, CONSUMER_THREADS * q + thread], words)
        return words

    @cute.jit
    def load_rows(self, shared, block, lane):
        """Loads slope and threshold of a thread's two columns of a column block."""
        pair = cute.make_rmem_tensor(4, Float32)
        tiled = cute.make_tensor(shared.rows.iterator, cute.make_layout((4, self.pairs), stride=(1, 4)))
        cute.autovec_copy(tiled[None, 4 * block + lane % 4], pair)
        return pair

    def load_ratios(self, shared, block, lane) -> list[Float32]:
        """Loads the ratios of a thread's two columns of a column block."""
        pairs = cute.make_tensor(cute.recast_ptr(shared.ratios.iterator, dtype=Uint16), cute.make_layout(self.pairs))
        pair = Uint32(pairs[4 * block + lane % 4])
        return [thresholds.decode_ratio(pair & Uint32(0xFF)), thresholds.decode_ratio(pair >> Uint32(8))]
