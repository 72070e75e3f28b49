"""What a launch is told: its arguments, of which each stands here once, and which tiles are a CTA's.

An argument is added to ``Arguments`` (every thread has it) or to ``Operands`` (the host's side of the launch), and to
the call in ``launch``. That call is positional: to make a named tuple of 22 fields takes 0.8 us more, to convert one to
an argument of TVM FFI another 0.6 to 1.7 (CPython 3.11, TVM FFI 0.1.15, a busy host).
``tests/kernels/hopper/test_launch.py`` holds the order.
"""

from typing import Any, NamedTuple, get_type_hints

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from . import workspace_layout
from .config import TILE_V, Features
from .memory import global_pointer


class Operands(NamedTuple):
    """The matrices, and the grid: what the host's side of a launch makes of it."""

    hidden: Int64  # address of (B, D), rows hidden_stride elements apart
    hidden_stride: Int64
    weight: Int64  # address of (weight_rows, D), rows weight_stride elements apart
    weight_stride: Int64
    weight_rows: Int32
    dim: Int32
    row_blocks: Int32
    ctas: Int32  # per row block: a multiple of the cluster


class Arguments(NamedTuple):
    """What a launch passes to every thread; addresses are of device memory."""

    temperature: Int64  # of (B,) float32, or 0: temperature_value
    temperature_value: Float32
    seed: Int64  # of (B,) int64, or 0: seed_value
    seed_value: Int64
    offset: Int64  # of (B,) int64, or 0: offset_value
    offset_value: Int64
    tokens: Int64  # of (B, num_samples) int64, out
    workspace: Int64  # zero between launches: see slots
    batch: Int32
    # Tiles are whole Philox groups, so a shard need not start where one does. Tokens are counted from the first one's
    # start: those from ``skip`` up to ``end`` are sampled, and ``base`` (a multiple of 128, and of the cluster) makes
    # them ids.
    base: Int32
    skip: Int32
    end: Int32
    num_samples: Int32  # draws; 0: none, which only a kernel with ``Features.logits`` is asked for
    exchange: Int64  # TOKENS, PACKED or the address of an exchange's table

    @cute.jit
    def row(self, row: Int32):
        """temperature, Philox key (low, high), offset (low, high) of a row below the batch size."""
        temperature = self.temperature_value
        if self.temperature != Int64(0):
            temperature = global_pointer(Float32, self.temperature + Int64(row) * 4).load()
        seed = self.seed_value
        if self.seed != Int64(0):
            seed = global_pointer(Int64, self.seed + Int64(row) * 8).load()
        offset = self.offset_value
        if self.offset != Int64(0):
            offset = global_pointer(Int64, self.offset + Int64(row) * 8).load()
        return temperature, _half(seed, 0), _half(seed, 1), _half(offset, 0), _half(offset, 1)

    def draws(self) -> Int64:
        """Of all rows."""
        return Int64(self.batch) * self.num_samples

    def slot(self, row, draw) -> Int64:
        """Address of a row's best key."""
        return workspace_layout.best(self.workspace, Int64(row) * self.num_samples + draw)

    def infinite_slot(self, slot: Int64) -> Int64:
        """Address of a row's key of +inf, from that of its best key."""
        return workspace_layout.infinite(slot, self.draws())

    def only_slot(self, row) -> Int64:
        """``slot`` of one draw per row."""
        return workspace_layout.best(self.workspace, Int64(row))

    def only_infinite_slot(self, slot: Int64) -> Int64:
        """``infinite_slot`` of one draw per row."""
        return workspace_layout.infinite(slot, Int64(self.batch))


class TransformArguments(NamedTuple):
    """What a kernel with ``Features.transforms`` makes of its logits before it looks at them: see ``transforms``. Of a
    whole vocabulary. Addresses are of float32 where nothing is said; 0: none."""

    any: Int32  # 0: nothing
    bias: Int64  # of (V,)
    logit_scale: Float32
    soft_cap: Float32  # 0: none
    dense_bias: Int64  # of (V,)
    sparse_bias: Int64  # of (B, tiles + n) int64: a sparse bias, see ``kernels.triton.filtered.sparse_bias``
    entries_stride: Int64  # of its rows, in bytes
    counts: Int64  # of (B, V) int32: see ``step.SamplingParams.counts``
    counts_stride: Int64  # of its rows, in bytes
    seen: Int64  # of (B, 8 ceil(V / 128)) uint8: see ``step.SamplingParams.seen``; 0: every count is looked at
    seen_stride: Int64  # of its rows, in bytes
    repetition: Int64  # of (B,), or 0: repetition_value; likewise the others
    repetition_value: Float32
    frequency: Int64
    frequency_value: Float32
    presence: Int64
    presence_value: Float32
    token_mask: Int64  # of (B, ceil(V / 32)) int32
    mask_stride: Int64  # of its rows, in bytes


class Outputs(NamedTuple):
    """Where a kernel with ``Features.logits`` writes, of a whole vocabulary, beside the tokens. Chunks: see
    ``block_stats``."""

    logits: Int64  # address of (B, V) float32
    stride: Int64  # of its rows, in bytes: a multiple of 16
    keys: Int64  # address of (B, 4 * ceil(V / 128)) int32: of each chunk the highest logit, as int32 in its order
    # address of as many float32: masses relative to it at the row's temperature, a greedy row's at 1; 0: none
    sums: Int64
    raw_sums: Int64  # at temperature 1; 0: none
    # address of (B,) int32: the logits of a block with a lower key may not be stored; 0: all are. See ``store_cutoff``
    cutoffs: Int64
    top_k: Int64  # of (B,), or 0: top_k_value
    top_k_value: Int64
    top_k_wide: Int32  # 0: int32, else int64
    min_p: Int64  # of (B,) float32, or 0: min_p_value
    min_p_value: Float32
    masses_of_all: Int32  # 0: with floors, sums only of rows without a top-k


class LaunchArguments(NamedTuple):
    """What the compiled launch is called with, in this order, and then the stream, which TVM FFI adds."""

    operands: Operands
    arguments: Arguments
    params: TransformArguments | None = None
    outputs: Outputs | None = None

    @classmethod
    def names(cls, features: Features) -> tuple[str, ...]:
        """Of the positional arguments."""
        names = Operands._fields + Arguments._fields
        return names + TransformArguments._fields * features.transforms + Outputs._fields * features.logits

    @classmethod
    def of(cls, values) -> "LaunchArguments":
        """Positional arguments by their names."""
        parts, rest = [], list(values)
        for part in (Operands, Arguments, TransformArguments, Outputs):
            some, rest = rest[: len(part._fields)], rest[len(part._fields) :]
            parts += [part(*some)] if some else []
        return cls(*parts)

    @classmethod
    def fakes(cls, features: Features) -> list[Any]:
        """What it is compiled with. ``tokens`` is the one tensor, by which the launch finds the current stream."""
        types = {}
        for part in (Operands, Arguments, TransformArguments, Outputs):
            types |= get_type_hints(part)
        values = {name: types[name](1) for name in cls.names(features)}
        return list((values | {"tokens": cute.runtime.make_fake_compact_tensor(Int64, (cute.sym_int32(),))}).values())


class Walk(NamedTuple):
    """Which tiles are this CTA's."""

    first_row: Int32
    first_tile: Int32
    tile_stride: Int32
    tiles: Int32

    def tile(self, iteration):
        """Number of the CTA's tile number ``iteration``, from the launch's first one."""
        return self.first_tile + iteration * self.tile_stride

    def first_token(self, iteration):
        """Of that tile, from the launch's first tile."""
        return self.tile(iteration) * TILE_V


def _half(value: Int64, upper: int) -> Uint32:
    return Uint32(value >> Int64(32 * upper))
