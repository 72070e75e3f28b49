"""Loads row parameters: temperature, seed and offset, as factors and Philox key, and as the tags that an exchange
compares."""

from typing import NamedTuple

import triton.language as tl

from ..jit import jit
from ..sharded.peer_exchange import details_and_tags
from .noise import INTERPRETED, scheduling_fence

_GREEDY_BELOW = tl.constexpr(1e-6)
_LN2 = tl.constexpr(0.6931471805599453)


class LoadedRows(NamedTuple):
    """Parameters of rows in registers, all of one shape."""

    factors: object  # of logit and noise, in one number: see ``score_params``
    key_lo: object  # Philox key
    key_hi: object
    offset_lo: object
    offset_hi: object


class ScoreParams(NamedTuple):
    """The parameters that turn logits of rows into scores."""

    scale: object  # of the logit
    noise_factor: object  # of the base-2 noise
    key_lo: object
    key_hi: object
    offset_lo: object
    offset_hi: object


@jit
def _load_b64(address, index, value, ROW_TENSORS: tl.constexpr):
    """Loads the low and high half of 64-bit elements; of ``value`` where the address may be, and is, 0."""
    pointers = address + index.to(tl.int64) * 8
    if INTERPRETED:
        given = tl.full(index.shape, 1, tl.int1) & (address != 0)
        x = tl.load(pointers.to(tl.pointer_type(tl.int64)), mask=given, other=value)
        return x.to(tl.uint32), (x.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)
    if ROW_TENSORS:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];",
            "=r,=r,l",
            [pointers],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s64 p, $4, 0; mov.b64 {$0, $1}, $3; @p ld.global.nc.v2.b32 {$0, $1}, [$2]; }",
        "=&r,=&r,l,l,l",
        [pointers, tl.full(index.shape, value, tl.int64), tl.full(index.shape, address, tl.int64)],
        dtype=(tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )


@jit
def _load_f32(address, index, value, ROW_TENSORS: tl.constexpr):
    pointers = address + index.to(tl.int64) * 4
    if INTERPRETED:
        given = tl.full(index.shape, 1, tl.int1) & (address != 0)
        return tl.load(pointers.to(tl.pointer_type(tl.float32)), mask=given, other=value)
    if ROW_TENSORS:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s64 p, $3, 0; mov.f32 $0, $2; @p ld.global.nc.f32 $0, [$1]; }",
        "=&f,l,f,l",
        [pointers, tl.full(index.shape, value, tl.float32), tl.full(index.shape, address, tl.int64)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def row_params(rows, row, ROW_TENSORS: tl.constexpr):
    """Loads the parameters of the rows ``row`` (any shape, within the batch) from ``transforms.Rows``.

    The loads are inline assembly: Triton would choose a layout for them and reach the shape's own through shared
    memory.
    """
    temperature = _load_f32(rows.temperature_at, row, rows.temperature, ROW_TENSORS)
    key_lo, key_hi = _load_b64(rows.seed_at, row, rows.seed, ROW_TENSORS)
    offset_lo, offset_hi = _load_b64(rows.offset_at, row, rows.offset, ROW_TENSORS)
    hot = temperature > 1.0
    # a NaN makes the row's scores NaN too
    noise_factor = tl.where(temperature < _GREEDY_BELOW, 0.0, temperature * _LN2)
    factors = tl.where(hot, -1.0 / tl.where(hot, temperature, 1.0), noise_factor)
    return LoadedRows(factors, key_lo, key_hi, offset_lo, offset_hi)


@jit
def row_tags(number, rows, row, batch, num_samples, ROW_TENSORS: tl.constexpr):
    """Returns what an exchange compares of the rows ``row`` (N,) in step ``number``: parameter hash and both tags."""
    temperature = _load_f32(rows.temperature_at, row, rows.temperature, ROW_TENSORS)
    seed_lo, seed_hi = _load_b64(rows.seed_at, row, rows.seed, ROW_TENSORS)
    offset_lo, offset_hi = _load_b64(rows.offset_at, row, rows.offset, ROW_TENSORS)
    return details_and_tags(number, batch, num_samples, temperature, seed_lo, seed_hi, offset_lo, offset_hi)


@jit
def score_params(loaded):
    """Unpacks the factors of the logit and of the base-2 noise.

    A score is ``logit / max(T, 1) + min(T, 1) * gumbel``, as in the oracle: ``logit / T + gumbel`` times ``min(T, 1)``,
    so no finite logit overflows at any temperature. One of the two factors is 1 or ln 2. The sign bit says which and
    the rest is the other, so a row takes one register over all tiles.
    """
    factors = loaded.factors
    hot = factors.to(tl.int32, bitcast=True) < 0  # also of -0.0, an infinite temperature
    scale, noise_factor = tl.where(hot, -factors, 1.0), tl.where(hot, _LN2, factors)
    return ScoreParams(scale, noise_factor, loaded.key_lo, loaded.key_hi, loaded.offset_lo, loaded.offset_hi)


@jit
def fenced(loaded):
    """Returns the parameters behind ``scheduling_fence``."""
    factors = scheduling_fence(loaded.factors.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
    key_lo, key_hi = scheduling_fence(loaded.key_lo), scheduling_fence(loaded.key_hi)
    return LoadedRows(factors, key_lo, key_hi, scheduling_fence(loaded.offset_lo), scheduling_fence(loaded.offset_hi))


@jit
def order_after(row, done, zero):
    """Returns int32 row numbers that depend on ``done`` (float32, (M, N)): ``zero`` is 0 at run time, which no compiler
    can know.

    The noise does not depend on the logits. Without this function the compiler starts the noise of every column at
    once, hoists ten round keys per row out of the tile loop, and spills. The function also puts the noise into the
    register layout of ``done``, the logits' own, which avoids a trip through shared memory for every score.
    """
    return row ^ (done.to(tl.int32, bitcast=True) & zero)
