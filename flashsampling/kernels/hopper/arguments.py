"""Declares the arguments of a launch, each once, and the tiles of a CTA.

A new argument goes into ``Arguments`` (every thread has it) or ``HostArguments`` (the host side of the launch), and
into the call in ``launch``. That call is positional: a named tuple of 22 fields costs 0.8 us more, its conversion to an
argument of TVM FFI another 0.6 to 1.7 us (CPython 3.11, TVM FFI 0.1.15, a busy host).
``tests/kernels/hopper/test_launch.py`` checks the order.
"""

from typing import Any, NamedTuple, get_type_hints

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ...sampling_params import HEAD_NUMBERS
from . import workspace_layout
from .config import TILE_V, Features
from .memory import global_pointer


class HostArguments(NamedTuple):
    """The matrices and the grid: arguments of the launch's host side."""

    hidden: Int64  # address of (B, D), rows hidden_stride elements apart
    hidden_stride: Int64
    weight: Int64  # address of (weight_rows, D), rows weight_stride elements apart
    weight_stride: Int64
    weight_rows: Int32
    dim: Int32
    row_blocks: Int32
    ctas: Int32  # per row block: a multiple of the cluster


class Arguments(NamedTuple):
    """Arguments of every thread; addresses are of device memory."""

    temperature: Int64  # of (B,) float32, or 0: temperature_value
    temperature_value: Float32
    seed: Int64  # of (B,) int64, or 0: seed_value
    seed_value: Int64
    offset: Int64  # of (B,) int64, or 0: offset_value
    offset_value: Int64
    tokens: Int64  # of (B, num_samples) int64, out
    workspace: Int64  # zero between launches: see workspace_layout
    batch: Int32
    # Tiles are whole Philox groups, so a shard need not start where a tile does. Tokens count from the first tile's
    # start: those from ``skip`` up to ``end`` are sampled. ``base`` (a multiple of 128, and of the cluster) makes ids
    base: Int32
    skip: Int32
    end: Int32
    num_samples: Int32  # draws; 0 only in a kernel with ``Features.logits``
    exchange: Int64  # TOKENS, PACKED or the address of an exchange's table

    @cute.jit
    def row(self, row: Int32):
        """Loads temperature, Philox key (low, high) and offset (low, high) of a row below the batch size."""
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
        """Returns the number of draws of all rows."""
        return Int64(self.batch) * self.num_samples

    def slot(self, row, draw) -> Int64:
        """Returns the address of a row's best key."""
        return workspace_layout.best(self.workspace, Int64(row) * self.num_samples + draw)

    def infinite_slot(self, slot: Int64) -> Int64:
        """Returns the address of a row's key of +inf, from that of its best key."""
        return workspace_layout.infinite(slot, self.draws())

    def only_slot(self, row) -> Int64:
        """Returns ``slot`` for one draw per row."""
        return workspace_layout.best(self.workspace, Int64(row))

    def only_infinite_slot(self, slot: Int64) -> Int64:
        """Returns ``infinite_slot`` for one draw per row."""
        return workspace_layout.infinite(slot, Int64(self.batch))


# Operands of ``logit_transforms``, for a kernel with ``Features.transforms``, of a whole vocabulary. Addresses are of
# float32 unless noted; 0: none.
TransformArguments = NamedTuple(  # type: ignore[misc]
    "TransformArguments",
    [
        ("any", Int32),  # 0: no transform
        ("bias", Int64),  # of (V,)
        *((name, Float32) for name in HEAD_NUMBERS),
        ("dense_bias", Int64),  # of (V,)
        ("sparse_bias", Int64),  # of (B, tiles + n) int64, see ``kernels.triton.filtered.sparse_bias``
        ("sparse_bias_stride", Int64),  # of its rows, in bytes
        ("counts", Int64),  # of (B, V) int32: ``SamplingParams.counts``
        ("counts_stride", Int64),  # of its rows, in bytes
        ("nonzero_mask", Int64),  # of (B, 8 ceil(V / 128)) uint8: ``SamplingParams.seen``; 0: every count is read
        ("nonzero_mask_stride", Int64),  # of its rows, in bytes
        ("repetition", Int64),  # of (B,), or 0: repetition_value; the others alike
        ("repetition_value", Float32),
        ("frequency", Int64),
        ("frequency_value", Float32),
        ("presence", Int64),
        ("presence_value", Float32),
        ("token_mask", Int64),  # of (B, ceil(V / 32)) int32
        ("mask_stride", Int64),  # of its rows, in bytes
        ("counts_rows", Int64),  # of (B,) int64: each row's row of ``counts`` and ``nonzero_mask``; 0: its own
    ],
)


class Outputs(NamedTuple):
    """Addresses of the logits and block statistics, for a kernel with ``Features.logits``, of a whole vocabulary.
    Blocks: see ``block_stats``."""

    logits: Int64  # address of (B, V) float32
    stride: Int64  # of its rows, in bytes: a multiple of 16
    keys: Int64  # address of (B, 4 * ceil(V / 128)) int32: each block's highest logit as an order-preserving key
    # address of as many float32: each block's sum of exponentials relative to its highest logit, at the row's
    # temperature (a greedy row's at 1); 0: none
    sums: Int64
    raw_sums: Int64  # the same at temperature 1; 0: none
    # address of (B,) int32: blocks with lower keys may not be stored; 0: all are. ``store_cutoff`` reads the rest
    cutoffs: Int64
    top_k: Int64  # of (B,), or 0: top_k_value
    top_k_value: Int64
    top_k_wide: Int32  # 0: int32, else int64
    min_p: Int64  # of (B,) float32, or 0: min_p_value
    min_p_value: Float32
    masses_of_all: Int32  # 0: with store cutoffs, sums only of rows without a top-k


class LaunchArguments(NamedTuple):
    """The arguments of the compiled launch, in this order; TVM FFI appends the stream."""

    operands: HostArguments
    arguments: Arguments
    params: TransformArguments | None = None
    outputs: Outputs | None = None

    @classmethod
    def names(cls, features: Features) -> tuple[str, ...]:
        """Returns the names of the positional arguments."""
        names = HostArguments._fields + Arguments._fields
        return names + TransformArguments._fields * features.transforms + Outputs._fields * features.logits

    @classmethod
    def of(cls, values) -> "LaunchArguments":
        """Groups positional arguments by name."""
        parts, rest = [], list(values)
        for part in (HostArguments, Arguments, TransformArguments, Outputs):
            some, rest = rest[: len(part._fields)], rest[len(part._fields) :]
            parts += [part(*some)] if some else []
        return cls(*parts)

    @classmethod
    def fakes(cls, features: Features) -> list[Any]:
        """Returns placeholders to compile with. ``tokens`` is the one tensor, by which the launch finds the current
        stream."""
        types = {}
        for part in (HostArguments, Arguments, TransformArguments, Outputs):
            types |= get_type_hints(part)
        values = {name: types[name](1) for name in cls.names(features)}
        return list((values | {"tokens": cute.runtime.make_fake_compact_tensor(Int64, (cute.sym_int32(),))}).values())


class Walk(NamedTuple):
    """The tiles of a CTA."""

    first_row: Int32
    first_tile: Int32
    tile_stride: Int32
    tiles: Int32

    def tile(self, iteration):
        """Returns the number of the CTA's tile number ``iteration``, counted from the launch's first tile."""
        return self.first_tile + iteration * self.tile_stride

    def first_token(self, iteration):
        """Returns that tile's first token, counted from the launch's first tile."""
        return self.tile(iteration) * TILE_V


def _half(value: Int64, upper: int) -> Uint32:
    return Uint32(value >> Int64(32 * upper))
