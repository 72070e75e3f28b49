"""What a step gives beside tokens: log-probabilities, ranks, the likeliest tokens. Parts of ``logits_pick``'s
kernel."""

import triton.language as tl

from ..fused.packed_argmax import NO_TOKEN
from ..jit import jit
from .candidates import chunk_tile, first_ties, gather, kth_highest, list_chunks
from .cutoff import Tokens, before, tile_of
from .logit_source import (
    GREEDY_BELOW,
    LN2,
    LOG2E,
    MINUS_INF,
    NAN,
    below,
    both_logits_of,
    chunks_in,
    key_of,
    raw_logits,
    value_of,
)


@jit
def log_sum_exp(highest, mass):
    """Of a row's highest key and the mass relative to it."""
    top = value_of(highest)
    lse = tl.where(tl.abs(top) == float("inf"), top, top + tl.log2(mass) * LN2)
    return tl.where(highest == NAN, float("nan"), lse)


@jit
def write_given(source, ids, out, count, lse, HEAD: tl.constexpr):
    """Raw log-probabilities of the given ids."""
    for first in range(0, count, 128):
        index = first + tl.arange(0, 128)
        token = tl.load(ids + index, mask=index < count, other=-1)
        there = (token >= 0) & (token < source.vocab_size)
        x = raw_logits(source, tl.where(there, token, 0).to(tl.int32), there, HEAD)
        tl.store(out + index, tl.where(there, x - lse, float("nan")), mask=index < count)


@jit
def _top_ids(
    tokens, lse, top_ids_ptr, top_logprobs_ptr, num_top,
    WHOLE: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Writes the first ``num_top`` of the tokens in order, one after the other."""
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for i in range(num_top):
        best = tl.full((TILE,), -0x7FFFFFFFFFFFFFFF, tl.int64)
        for start in range(0, tokens.count, TILE):
            key, token, live = tile_of(tokens, start, WHOLE, TILE, HEAD, 1)
            # greater for the greater key, then for the lower id
            place = (key.to(tl.int64) << 32) | (token ^ 0x7FFFFFFF).to(tl.int64)
            best = tl.maximum(best, tl.where(live & (place < last), place, -0x7FFFFFFFFFFFFFFF))
        last = tl.max(best, axis=0)
        tl.store(top_ids_ptr + i, (last & 0x7FFFFFFF) ^ 0x7FFFFFFF)
        tl.store(top_logprobs_ptr + i, value_of((last >> 32).to(tl.int32)) - lse)


@jit
def write_top(
    source, chunk_keys, highest, lse, list_ptr, keys_ptr, cand_ids, masses_ptr, ids_ptr, logprobs_ptr, count,
    FEW: tl.constexpr, CAPACITY: tl.constexpr, GATHERED: tl.constexpr, TILE: tl.constexpr, WHOLE_TILE: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """The ids with the highest raw logits and their log-probabilities. ``source``: without what is the request's."""
    if highest == NAN:
        for i in range(count):
            tl.store(ids_ptr + i, tl.full((), -1, tl.int64))
            tl.store(logprobs_ptr + i, lse)
    else:
        top = value_of(highest)
        bound = tl.maximum(kth_highest(chunk_keys, highest, count, chunks_in(source.vocab_size)), MINUS_INF)
        if bound == highest:  # as in a row of zeros: the ties of the lowest ids
            chunk_keys = first_ties(chunk_keys, highest, count)
        gathered, _ = gather(
            source,
            chunk_keys,
            bound,
            chunks_in(source.vocab_size),
            list_ptr,
            keys_ptr,
            cand_ids,
            masses_ptr,
            top,
            LOG2E,
            False,
            True,
            CAPACITY,
            GATHERED,
            HEAD,
            1,
        )
        if gathered <= FEW:
            i = tl.arange(0, FEW)
            key = tl.load(keys_ptr + i, mask=i < gathered, other=0)
            token = tl.load(cand_ids + i, mask=i < gathered, other=0)
            rank, _mass_before = before(key, token, keys_ptr, cand_ids, masses_ptr, gathered)
            wanted = (i < gathered) & (rank < count)
            tl.store(ids_ptr + rank, token.to(tl.int64), mask=wanted)
            tl.store(logprobs_ptr + rank, value_of(key) - lse, mask=wanted)
        elif gathered <= CAPACITY:
            tokens = Tokens(source, keys_ptr, cand_ids, masses_ptr, gathered, MINUS_INF, 31, top, LOG2E, list_ptr)
            _top_ids(tokens, lse, ids_ptr, logprobs_ptr, count, False, TILE, HEAD)
        else:
            row = Tokens(source, keys_ptr, cand_ids, masses_ptr, source.vocab_size, MINUS_INF, 31, top, LOG2E, list_ptr)
            _top_ids(row, lse, ids_ptr, logprobs_ptr, count, True, WHOLE_TILE, HEAD)


@jit
def _higher(source, x, list_ptr, listed, first, CHUNKS: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr):
    """How many tokens of so many listed chunks, from ``first`` on, have a higher raw logit than x."""
    logit, _, live = chunk_tile(source, list_ptr, listed, first, True, CHUNKS, HEAD, ENTRIES)
    return tl.sum(tl.sum((live & (logit > x)).to(tl.int32), axis=1), axis=0)


@jit
def write_drawn(
    source, token, raw_keys, raw_highest, lse, top, scale, kept_mass, list_ptr, logprob_ptr, processed_ptr, rank_ptr,
    GATHERED: tl.constexpr, HEAD: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Both log-probabilities and the rank of a token that was drawn, or -1."""
    rank = tl.full((), -1, tl.int64)
    raw = tl.full((), float("nan"), tl.float32)
    processed = tl.full((), float("nan"), tl.float32)
    if token >= 0:
        x, y = both_logits_of(source, token.to(tl.int32), HEAD, ENTRIES)
        raw = tl.where(raw_highest == NAN, lse, x - lse)
        exponent = tl.where(y == top, 0.0, below(y, top, scale))
        processed = tl.where(top == float("inf"), 0.0, (exponent - tl.log2(kept_mass)) * LN2)
        listed = list_chunks(raw_keys, key_of(x) + 1, list_ptr)
        above = _higher(source, x, list_ptr, listed, 0, GATHERED, HEAD, ENTRIES)
        for first in range(GATHERED, listed, 4 * GATHERED):  # few rows come here, and all others wait for them
            above += _higher(source, x, list_ptr, listed, first, 4 * GATHERED, HEAD, ENTRIES)
        rank = 1 + above.to(tl.int64)
    tl.store(logprob_ptr, raw)
    tl.store(processed_ptr, processed)
    tl.store(rank_ptr, rank)


@jit
def place_in_row(limit, lowest, ID_BITS: tl.constexpr):
    """A place that is counted from the key ``lowest`` as one that is counted from none: the key, then 31 bits for the
    id."""
    last_id: tl.constexpr = (1 << ID_BITS) - 1
    token = (limit & last_id) ^ last_id
    return (((limit >> ID_BITS) + lowest) << 31) | (token ^ NO_TOKEN)


@jit
def write_record(limit_ptr, record, first_kept, least_mass, kept_mass, top, temperature, ids_ptr):
    """What ``rejection`` reads of a row: the place of its last kept token; least mass of one, mass of all, the highest
    logit, and the only token of a greedy row, or of a row with a logit of +inf; else -1."""
    only_token = tl.full((), -1, tl.int32)
    if (temperature < GREEDY_BELOW) | (top == float("inf")):
        tl.debug_barrier()  # the token is there
        only_token = tl.load(ids_ptr).to(tl.int32)
    tl.store(limit_ptr, first_kept)
    tl.store(record, least_mass)
    tl.store(record + 1, kept_mass)
    tl.store(record + 2, top)
    tl.store(record + 3, only_token.to(tl.float32, bitcast=True))
