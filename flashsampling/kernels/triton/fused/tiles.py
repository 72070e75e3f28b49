"""Computes a tile's logits, and splits a tile into blocks and Philox lanes."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..jit import jit


class TileShape(NamedTuple):
    """The tile that a kernel is compiled for: a compile-time constant."""

    block_v: int  # tokens
    block_b: int  # columns of the first block
    rest_b: int  # columns of the second block, or 0
    halves: bool  # the first block is two halves: see second_piece_row
    block_d: int
    chunk_b: int  # columns whose noise is in registers at a time
    preload: bool  # the rows' parameters stay in registers over all tiles
    use_tma: bool
    even_d: bool  # block_d divides the depth
    row_alignment: int  # elements: the hidden states' rows start at multiples of it
    upcast: bool
    rows_on_m: bool


class Matmul(NamedTuple):
    """The weight and the sizes of a matmul."""

    weight: object  # descriptor of blocks (block_v, block_d), or pointer to (V, D)
    batch: object
    vocab_size: object
    dim: object
    hidden_stride: object
    weight_stride: object


class TileWalk(NamedTuple):
    """The tiles of one program: the columns of a row block, and every ``stride``-th vocabulary tile."""

    first_row: object
    second_row: object  # see second_piece_row
    first_owned: object  # rows before it belong to the row block before
    first_tile: object
    end_tile: object
    stride: object


class ShardTokens(NamedTuple):
    """The shard's tokens, [skip, end), counted from the start of its first Philox group."""

    base: object  # id of the group's first token: a multiple of 128
    skip: object
    end: object


@triton.constexpr_function
def one_block(tile, columns):
    """Returns the tile with one block of so many columns, tokens on M."""
    # the interpreter passes a plain tuple
    return TileShape(*tile)._replace(block_b=columns, rest_b=0, halves=False, rows_on_m=False)


@jit
def second_piece_row(first_row, batch, TILE: tl.constexpr):
    """Returns the first row of a tile's second piece of columns: of the block's second half with halves, else of the
    second block.

    A piece that would reach beyond the batch ends with it. Some rows are then in both pieces, with equal scores, so
    that a maximum takes either. Loads of rows beyond the batch cost more than loads of rows.
    """
    SECOND: tl.constexpr = TILE.block_b // 2 if TILE.halves else TILE.rest_b
    return tl.maximum(tl.minimum(first_row + TILE.block_b + TILE.rest_b - SECOND, batch - SECOND), 0)


@jit
def _hidden_pointers(hidden, rows, batch, hidden_stride, BLOCK_D: tl.constexpr):
    """Points to (BLOCK_D, columns). Rows beyond the batch repeat the last one: their winners are not published."""
    rows = tl.minimum(rows, batch - 1).to(tl.int64)
    return hidden + rows[None, :] * hidden_stride + tl.arange(0, BLOCK_D)[:, None]


@jit
def _product(w, h, acc, ROWS_ON_M: tl.constexpr):
    if ROWS_ON_M:
        return tl.dot(h.T, w.T, acc, input_precision="ieee")
    else:
        return tl.dot(w, h, acc, input_precision="ieee")


@jit
def rows_in_block(first_row, second_row, TILE: tl.constexpr):
    """Returns the rows of a tile's first block of columns, (block_b,)."""
    column = tl.arange(0, TILE.block_b)
    if TILE.halves:
        return tl.where(column < TILE.block_b // 2, first_row + column, second_row + column - TILE.block_b // 2)
    else:
        return first_row + column


@jit
def tile_logits(
    hidden,  # descriptor of blocks (block_b, block_d), (2, block_b // 2, block_d) if halves, or pointer to (B, D)
    hidden_rest,  # as hidden, for blocks (rest_b, block_d)
    matmul,
    first_token,  # row of the weight; below 0 in a shard's first tile, if the shard starts within a Philox group
    first_row,
    second_row,  # see second_piece_row
    TILE: tl.constexpr,
):
    """Computes one tile's logits in fp32: (block_v, block_b), and (block_v, rest_b) or a placeholder of 16 columns.

    The two blocks of columns share one read of the weight. k runs upwards in one chain without a split: the same sum in
    any tile. Outside [0, vocab_size) the weight's rows read as zeros, whatever a padded vocabulary holds there.
    """
    weight, batch, dim, hidden_stride = matmul.weight, matmul.batch, matmul.dim, matmul.hidden_stride
    BLOCK_V: tl.constexpr = TILE.block_v
    BLOCK_B: tl.constexpr = TILE.block_b
    BLOCK_D: tl.constexpr = TILE.block_d
    REST_B: tl.constexpr = TILE.rest_b
    ROWS_ON_M: tl.constexpr = TILE.rows_on_m
    ROW_ALIGNMENT: tl.constexpr = TILE.row_alignment
    REST: tl.constexpr = REST_B if REST_B > 0 else 16
    acc = tl.zeros((BLOCK_B, BLOCK_V) if ROWS_ON_M else (BLOCK_V, BLOCK_B), dtype=tl.float32)
    rest = tl.zeros((REST, BLOCK_V) if ROWS_ON_M else (BLOCK_V, REST), dtype=tl.float32)
    if TILE.use_tma:
        for d in range(0, dim, BLOCK_D):
            w = weight.load([first_token, d])  # (BLOCK_V, BLOCK_D)
            if TILE.halves:  # one copy: the descriptor has both starts
                h = tl.reshape(hidden.load([0, 0, d]), (BLOCK_B, BLOCK_D))
            else:
                h = hidden.load([first_row, d])  # (BLOCK_B, BLOCK_D)
            acc = tl.dot(h, w.T, acc) if ROWS_ON_M else tl.dot(w, h.T, acc)
            if REST_B > 0:  # loaded before the first matmul, 144 and 160 rows take 8 % longer (H200)
                h_rest = hidden_rest.load([second_row, d])  # (REST_B, BLOCK_D)
                rest = tl.dot(h_rest, w.T, rest) if ROWS_ON_M else tl.dot(w, h_rest.T, rest)
    else:
        tokens = first_token + tl.arange(0, BLOCK_V)
        dims = tl.arange(0, BLOCK_D)
        if ROW_ALIGNMENT > 1:  # 16 bytes
            hidden_stride = tl.multiple_of(hidden_stride, ROW_ALIGNMENT)
            hidden = tl.multiple_of(hidden, 16)
        # tokens outside read a neighbour's row, and are dropped below
        w_rows = tl.maximum(tl.minimum(tokens, matmul.vocab_size - 1), 0).to(tl.int64)
        w_ptrs = weight + w_rows[:, None] * matmul.weight_stride + dims[None, :]
        rows = rows_in_block(first_row, second_row, TILE)
        h_ptrs = _hidden_pointers(hidden, rows, batch, hidden_stride, BLOCK_D)
        if REST_B > 0:
            rest_ptrs = _hidden_pointers(hidden, second_row + tl.arange(0, REST_B), batch, hidden_stride, BLOCK_D)
        for d in range(0, dim, BLOCK_D):
            if TILE.even_d:
                w = tl.load(w_ptrs)
                h = tl.load(h_ptrs)
            else:
                w = tl.load(w_ptrs, mask=dims[None, :] < dim - d, other=0.0)
                h = tl.load(h_ptrs, mask=dims[:, None] < dim - d, other=0.0)
            if TILE.upcast:
                w = w.to(tl.float32)
                h = h.to(tl.float32)
            acc = _product(w, h, acc, ROWS_ON_M)
            if REST_B > 0:
                if TILE.even_d:
                    h = tl.load(rest_ptrs)
                else:
                    h = tl.load(rest_ptrs, mask=dims[:, None] < dim - d, other=0.0)
                if TILE.upcast:
                    h = h.to(tl.float32)
                rest = _product(w, h, rest, ROWS_ON_M)
                rest_ptrs += BLOCK_D
            w_ptrs += BLOCK_D
            h_ptrs += BLOCK_D
        inside = (tokens >= 0) & (tokens < matmul.vocab_size)
        inside = inside[None, :] if ROWS_ON_M else inside[:, None]
        acc = tl.where(inside, acc, 0.0)
        if REST_B > 0:
            rest = tl.where(inside, rest, 0.0)
    if ROWS_ON_M:
        return acc.T, rest.T
    else:
        return acc, rest


@jit
def split_lanes(x, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr):
    """Splits (BLOCK_V, BLOCK_B) by token into four (BLOCK_V // 4, BLOCK_B) by Philox lane = bit 3 | bit 6 << 1 of the
    token id.

    In ``wgmma``'s accumulator with four warps the two bits are registers of one thread, so no data moves.
    """
    x = tl.reshape(x, (BLOCK_V // 128, 2, 4, 2, 8, BLOCK_B))  # token bits: 7 up | 6 | 5, 4 | 3 | 2..0
    x = tl.permute(x, (0, 2, 4, 5, 1, 3))
    x0, x1 = tl.split(x)  # bit 3
    lane0, lane2 = tl.split(x0)  # bit 6
    lane1, lane3 = tl.split(x1)
    return (
        tl.reshape(lane0, (BLOCK_V // 4, BLOCK_B)),
        tl.reshape(lane1, (BLOCK_V // 4, BLOCK_B)),
        tl.reshape(lane2, (BLOCK_V // 4, BLOCK_B)),
        tl.reshape(lane3, (BLOCK_V // 4, BLOCK_B)),
    )


@jit
def _split_all(x):
    """Splits (M, N, 2, ..., 2) into a tuple of (M, N), by the last index, then the one before it, and so on."""
    if len(x.shape) == 2:
        return (x,)
    else:
        first, second = tl.split(x)
        return _split_all(first) + _split_all(second)


@jit
def split_tokens(x, BLOCK_B: tl.constexpr):
    """Splits (128, BLOCK_B) by token into 32 blocks (4, BLOCK_B).

    A block's index has the token's bits 0, 6, 5, 4, 3, highest first; bits 2 and 1 stay. Where tokens are on N of
    ``wgmma`` the five bits are registers of one thread.
    """
    x = tl.reshape(x, (2, 2, 2, 2, 4, 2, BLOCK_B))  # token bits: 6 | 5 | 4 | 3 | 2, 1 | 0
    return _split_all(tl.permute(x, (4, 6, 3, 2, 1, 0, 5)))


@jit
def split_blocks(x, ROW_BLOCKS: tl.constexpr, COLUMN_BLOCKS: tl.constexpr):
    """Splits (M, N) into ROW_BLOCKS * COLUMN_BLOCKS neighbouring blocks, row by row; the bits are registers, so no data
    moves."""
    if ROW_BLOCKS > 1:
        upper, lower = tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))
        return split_blocks(upper, ROW_BLOCKS // 2, COLUMN_BLOCKS) + split_blocks(lower, ROW_BLOCKS // 2, COLUMN_BLOCKS)
    elif COLUMN_BLOCKS > 1:
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
        return split_blocks(left, 1, COLUMN_BLOCKS // 2) + split_blocks(right, 1, COLUMN_BLOCKS // 2)
    else:
        return (x,)


@jit
def lane0_tokens(first_token, BLOCK_V: tl.constexpr):
    """Returns the token ids of lane 0 of a tile's groups, (BLOCK_V // 4, 1); lanes 1, 2, 3 are 8, 64 and 72 above."""
    group = tl.arange(0, BLOCK_V // 4)
    return (first_token + (group & 7) + ((group >> 3) & 3) * 16 + (group >> 5) * 128)[:, None]


@jit
def rows_in_chunk(first_row, second_row, c: tl.constexpr, TILE: tl.constexpr):
    """Returns the rows of chunk c of a tile, (chunk_b,), or at most (rest_b,) in the second block of columns."""
    tl.static_assert(not TILE.halves or TILE.chunk_b <= TILE.block_b // 2, "a chunk has rows of one half")
    CHUNK_B: tl.constexpr = TILE.chunk_b
    CHUNKS: tl.constexpr = TILE.block_b // CHUNK_B
    FIRST: tl.constexpr = CHUNKS // 2 if TILE.halves else CHUNKS  # chunks of the first piece
    REST_CHUNK: tl.constexpr = CHUNK_B if TILE.rest_b > CHUNK_B else TILE.rest_b
    if c < FIRST:
        return first_row + c * CHUNK_B + tl.arange(0, CHUNK_B)
    elif c < CHUNKS:
        return second_row + (c - FIRST) * CHUNK_B + tl.arange(0, CHUNK_B)
    else:
        return second_row + (c - CHUNKS) * REST_CHUNK + tl.arange(0, REST_CHUNK)
