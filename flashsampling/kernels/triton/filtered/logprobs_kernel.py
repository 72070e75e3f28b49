"""Writes what a step returns besides token ids: log-probabilities, ranks, the likeliest tokens.

Two programs per row: one for the drawn tokens, one for the likeliest and the given ones. Raw log-probabilities divide
by the mass of all raw logits, processed ones by the mass that the filters kept (``write_record``).
"""

from typing import NamedTuple

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..jit import jit
from .candidates import column_masses, column_maxima, gather, list_blocks, top_k_cutoff
from .draw import is_kept, load_record
from .logit_source import StoredLogits, load_blocks, load_token, load_tokens, source_of
from .order import (
    LN2,
    LOG2E,
    MINUS_INF,
    NAN,
    PLUS_INF,
    below,
    count_blocks,
    key_of,
    mass_of,
    mass_scale,
    token_of,
    value_of,
)
from .prefix import ABOVE_ALL, BELOW_ALL, Tokens, load_tile, logits_of
from .transforms import Rows, aligned_pointer_to, load_f32, pointer_to


class LogprobOutputs(NamedTuple):
    """Addresses of the outputs, or 0: not wanted."""

    logprobs_at: int  # (B, num_tokens) float32
    processed_at: int  # (B, num_tokens) float32
    ranks_at: int  # (B, num_tokens) int64
    top_ids_at: int  # (B, num_top) int64
    top_logprobs_at: int  # (B, num_top) float32
    num_top: int
    given_ids_at: int  # (B, num_given) int64, input
    given_stride: int
    given_at: int  # (B, num_given) float32
    num_given: int
    lse_at: int  # (B,) float32
    num_tokens: int  # per row, whose log-probabilities are wanted
    limits_at: int  # (B,) int64, input: ``write_record``
    masses_at: int  # (B, 4) float32, input


@jit
def _log_sum_exp(highest, mass):
    """Returns the log-sum-exp of a row from its highest key and the mass relative to that."""
    top = value_of(highest)
    lse = tl.where(tl.abs(top) == float("inf"), top, top + tl.log2(mass) * LN2)
    return tl.where(highest == NAN, float("nan"), lse)


@jit
def _count_higher(source, x, list_ptr, listed, BLOCKS: tl.constexpr):
    """Returns how many tokens of the listed blocks have a higher logit than x."""
    above = tl.zeros((BLOCKS, 8), tl.int32)
    for first in range(0, listed, BLOCKS):
        logits, _, live = load_blocks(source, list_ptr, listed, first, BLOCKS)
        for part in tl.static_range(4):
            above += (live[part] & (logits[part] > x)).to(tl.int32)
    return tl.sum(tl.sum(above, axis=1), axis=0)


@jit
def _write_drawn(
    raw, processed, blocks, raw_highest, lse, outputs, ids_ptr, row, temperature, list_ptr,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes both log-probabilities of each token, and its rank where wanted; NaN and -1 for no token."""
    limits, masses = pointer_to(outputs.limits_at, tl.int64), pointer_to(outputs.masses_at, tl.float32)
    record = load_record(limits, masses, row)
    kept_mass, top = record.kept_mass, record.top
    scale = mass_scale(temperature)
    for number in range(outputs.num_tokens):
        place = row * outputs.num_tokens + number
        token = tl.load(ids_ptr + place)
        x, y = load_token(raw, token.to(tl.int32)), load_token(processed, token.to(tl.int32))
        there = token >= 0
        logprob = tl.where(raw_highest == NAN, lse, x - lse)
        exponent = tl.where(y == top, 0.0, below(y, top, scale))
        kept = is_kept(record, y, mass_of(y, top, scale), token.to(tl.int32), scale)
        kept = tl.where(top == float("inf"), token == record.only_token, kept)
        of_kept = tl.where(top == float("inf"), 0.0, (exponent - tl.log2(kept_mass)) * LN2)
        of_kept = tl.where(kept, of_kept, float("-inf"))
        of_kept = tl.where(kept_mass != kept_mass, float("nan"), of_kept)  # of a row without a token
        nan = float("nan")
        tl.store(pointer_to(outputs.logprobs_at, tl.float32) + place, tl.where(there, logprob, nan))
        tl.store(pointer_to(outputs.processed_at, tl.float32) + place, tl.where(there, of_kept, nan))
        if outputs.ranks_at != 0:
            higher = tl.minimum(key_of(x), PLUS_INF) + 1  # a NaN's key has no successor
            listed = list_blocks(raw.block_keys, tl.where(there, blocks, 0), higher, list_ptr, WIDTH)
            rank = 1 + _count_higher(raw, x, list_ptr, listed, BLOCKS).to(tl.int64)
            tl.store(pointer_to(outputs.ranks_at, tl.int64) + place, tl.where(there, rank, -1))


@jit
def _write_given(source, outputs, row, lse):
    """Writes the raw log-probabilities of the given ids; NaN for no token."""
    ids = pointer_to(outputs.given_ids_at, tl.int64) + row * outputs.given_stride
    out = pointer_to(outputs.given_at, tl.float32) + row * outputs.num_given
    for first in range(0, outputs.num_given, 128):
        index = first + tl.arange(0, 128)
        token = tl.load(ids + index, mask=index < outputs.num_given, other=-1)
        there = (token >= 0) & (token < source.vocab_size)
        x = load_tokens(source, tl.where(there, token, 0).to(tl.int32), there)
        tl.store(out + index, tl.where(there, x - lse, float("nan")), mask=index < outputs.num_given)


@jit
def _write_first(tokens, lse, ids_ptr, logprobs_ptr, count, TILE: tl.constexpr):
    """Writes the first ``count`` tokens in order, one after the other."""
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for i in range(count):
        best = tl.full((TILE,), BELOW_ALL, tl.int64)
        for start in range(0, tokens.count, TILE):
            words, live = load_tile(tokens, start, TILE)
            best = tl.maximum(best, tl.where(live & (words < last), words, BELOW_ALL))
        last = tl.max(best, axis=0)
        tl.store(ids_ptr + i, token_of(last).to(tl.int64))
        tl.store(logprobs_ptr + i, logits_of(last) - lse)


@jit
def _write_top(
    source, blocks, columns, highest, lse, outputs, row, list_ptr, candidates_ptr, capacity,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes the tokens with the highest raw logits, and their log-probabilities; -1 and NaN in a row with a NaN."""
    ids_ptr = pointer_to(outputs.top_ids_at, tl.int64) + row * outputs.num_top
    logprobs_ptr = pointer_to(outputs.top_logprobs_at, tl.float32) + row * outputs.num_top
    if highest == NAN:
        for i in range(outputs.num_top):
            tl.store(ids_ptr + i, tl.full((), -1, tl.int64))
            tl.store(logprobs_ptr + i, lse)
    else:
        top = value_of(highest)
        cutoff = tl.maximum(top_k_cutoff(columns, outputs.num_top), MINUS_INF)
        listed = list_blocks(source.block_keys, blocks, cutoff, list_ptr, WIDTH)
        from_cutoff, above_all = cutoff.to(tl.int64) << 31, tl.full((), ABOVE_ALL, tl.int64)
        count = gather(source, list_ptr, listed, from_cutoff, above_all, candidates_ptr, capacity, BLOCKS)
        whole = count > capacity
        count = tl.where(whole, source.vocab_size, count)
        tokens = Tokens(source, whole.to(tl.int32), candidates_ptr, count, cutoff, highest, top, LOG2E)
        _write_first(tokens, lse, ids_ptr, logprobs_ptr, outputs.num_top, TILE)


@jit(
    structs={"raw_stored": StoredLogits, "stored": StoredLogits, "rows": Rows, "outputs": LogprobOutputs},
    do_not_specialize=["capacity"],
    do_not_specialize_on_alignment=["raw_logits", "logits", "candidates_ptr", "list_ptr", "ids_ptr"],
)
def logprobs_kernel(
    raw_logits,  # (B, V), any float dtype
    raw_stored,
    logits,  # processed ones
    stored,
    rows,
    outputs,
    candidates_ptr,  # (B, capacity) int64, scratch
    capacity: tl.int32,
    list_ptr,  # (2, B, blocks) int32, scratch
    ids_ptr,  # (B, num_tokens) int64: drawn tokens, or those to score
    WIDTH: tl.constexpr,
    GATHERED: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the outputs. Grid: (B, 2)."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    source = source_of(raw_logits, raw_stored, row)
    blocks = count_blocks(source.vocab_size)
    list_ptr += (tl.program_id(1) * tl.num_programs(0) + row) * blocks
    columns = column_maxima(source.block_keys, blocks, WIDTH)
    highest = tl.max(columns, axis=0)
    sums_ptr = aligned_pointer_to(raw_stored.sums_at, tl.float32) + row * blocks
    masses = column_masses(source.block_keys, sums_ptr, blocks, value_of(highest), LOG2E, WIDTH)
    lse = _log_sum_exp(highest, tl.sum(masses, axis=0))
    if tl.program_id(1) == 0:
        if outputs.logprobs_at != 0:
            processed = source_of(logits, stored, row)
            temperature = load_f32(rows.temperature_at, rows.temperature, row)
            _write_drawn(
                source, processed, blocks, highest, lse, outputs, ids_ptr, row, temperature, list_ptr, WIDTH, GATHERED
            )
    else:
        if outputs.lse_at != 0:
            tl.store(pointer_to(outputs.lse_at, tl.float32) + row, lse)
        if outputs.num_given > 0:
            _write_given(source, outputs, row, lse)
        if outputs.num_top > 0:
            _write_top(
                source, blocks, columns, highest, lse, outputs, row, list_ptr, candidates_ptr + row * capacity,
                capacity, WIDTH, GATHERED, TILE,
            )  # fmt: skip
