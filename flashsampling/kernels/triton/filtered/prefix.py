"""Finds what filters keep of a row: a prefix of its tokens in the order of their sort keys.

Nothing is sorted. A bracket of sort keys around the last kept token is split in WAYS at a time, by how many tokens, and
how much mass, are at or above each threshold, until one token is in it. Masses are integers, so that a sum is the same
in any order. Equal logits are told apart by the ids in the same words.
"""

from typing import NamedTuple

import triton.language as tl

from ..fused.packed_argmax import NO_TOKEN
from ..jit import jit
from .candidates import gather, list_blocks
from .logit_source import load_tokens
from .order import LARGEST, MINUS_INF, UNIT, count_blocks, key_of, mass_of, reaches, sort_key, units_of, value_of

_FEW_BITS = tl.constexpr(8)
FEW = tl.constexpr(1 << 8)  # candidates that are compared with each other
_AT_ONCE = tl.constexpr(8)  # of them
BELOW_ALL = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below all sort keys
ABOVE_ALL = tl.constexpr(0x7FFFFFFFFFFFFFFF)


class Tokens(NamedTuple):
    """The tokens to search: candidates in memory, or all of a row."""

    source: object
    whole: object  # int32; not 0: all of a row
    sort_keys: object  # a pointer to the candidates'; unused for a row
    count: object  # how many candidates, or ids
    lowest: object  # int32 key; no token is below it
    highest: object  # int32 key of the highest logit
    top: object  # its value
    scale: object  # of masses


@jit
def load_tile(tokens, start, TILE: tl.constexpr):
    """Returns sort keys and which tokens exist, (TILE,) each."""
    index = start + tl.arange(0, TILE)
    live = index < tokens.count
    if tokens.whole != 0:
        key = key_of(load_tokens(tokens.source, index, live))
        words = sort_key(key, index)
        live = live & (key >= tokens.lowest)
    else:
        words = tl.load(tokens.sort_keys + index, mask=live, other=0)
    return words, live


@jit
def logits_of(sort_keys):
    """Returns the logits of sort keys."""
    return value_of((sort_keys >> 31).to(tl.int32))


@jit(noinline=True)
def mass_from(tokens, limit, least, TILE: tl.constexpr):
    """Returns the mass of the tokens from the sort key ``limit`` on of a mass of at least ``least``, in fixed point."""
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, tokens.count, TILE):
        words, live = load_tile(tokens, start, TILE)
        x = logits_of(words)
        mass = mass_of(x, tokens.top, tokens.scale)
        live = live & (words >= limit) & reaches(x, mass, least, tokens.top, tokens.scale)
        total += tl.where(live, units_of(x, tokens.top, tokens.scale), 0)
    return tl.sum(total, axis=0)


@jit
def to_mass(units):
    """Returns a mass in fixed point as float32."""
    return (units.to(tl.float64) / UNIT).to(tl.float32)


@jit
def _threshold(low, high, way, by_value, WAYS: tl.constexpr):
    """Returns the threshold of a way: they part [low, high) at equal distances, of logits or else of sort keys. A flat
    row has its tokens at the former."""
    threshold = tl.minimum(low + ((high - low - 1) // WAYS + 1) * way, high)
    if by_value:
        lowest = value_of((low >> 31).to(tl.int32))
        highest = tl.minimum(value_of((high >> 31).to(tl.int32)), LARGEST)
        value = tl.fma(highest * 0.5 - lowest * 0.5, way.to(tl.float32) * (2.0 / WAYS), lowest)
        threshold = tl.minimum(tl.maximum(key_of(value).to(tl.int64) << 31, low), high - 1)
    return tl.where(way == 0, low, threshold)


@jit(noinline=True)
def _split(
    tokens, low, high, by_value, left_out, mass_left_out, by_mass, target, TILE: tl.constexpr, WAYS: tl.constexpr
):
    """Parts a bracket in WAYS and returns the part that holds the last kept token, and whether it reaches the target.
    ``left_out``, and their mass: tokens above the bracket that ``tokens`` lack."""
    way = tl.arange(0, WAYS)
    thresholds = _threshold(low, high, way, by_value, WAYS)
    counts = tl.zeros((TILE, WAYS), tl.int32)
    masses = tl.zeros((TILE, WAYS), tl.int64)
    for start in range(0, tokens.count, TILE):
        words, live = load_tile(tokens, start, TILE)
        there = (words[:, None] >= thresholds[None, :]) & live[:, None]
        units = units_of(logits_of(words), tokens.top, tokens.scale)
        counts += there.to(tl.int32)
        masses += tl.where(there, units[:, None], 0)
    counts_here = tl.sum(counts, axis=0).to(tl.int64) + left_out
    masses_here = tl.sum(masses, axis=0) + mass_left_out
    passed = tl.sum((tl.where(by_mass, masses_here, counts_here) >= target).to(tl.int32), axis=0)
    last = tl.maximum(passed - 1, 0)
    count = tl.sum(tl.where(way == last, counts_here, 0), axis=0)
    mass = tl.sum(tl.where(way == last, masses_here, 0), axis=0)
    above = tl.sum(tl.where(way == passed, counts_here, 0), axis=0)
    mass_above = tl.sum(tl.where(way == passed, masses_here, 0), axis=0)
    next_high = tl.where(passed < WAYS, _threshold(low, high, passed, by_value, WAYS), high)
    return _threshold(low, high, last, by_value, WAYS), next_high, count, mass, above, mass_above, passed


@jit
def shortest_prefix(
    tokens, limit, by_mass, target, list_ptr, capacity,
    WIDTH: tl.constexpr, GATHERED: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Finds the shortest prefix of the tokens from ``limit`` on whose count or mass reaches ``target`` (int64), or all
    of them where these do not. Returns a sort key that its last token reaches and no later one, and its mass. Of a row
    those in the bracket are copied once there is room for them."""
    first_id = tokens.source.vocab_size.to(tl.int64) * -1 + NO_TOKEN + 1  # no sort key has lower id bits
    low = tl.maximum(limit, tokens.lowest.to(tl.int64) << 31)
    high = (tokens.highest.to(tl.int64) + 1) << 31
    zero = tl.full((), 0, tl.int64)
    above, mass_above, left_out, mass_left_out, mass = zero, zero, zero, zero, zero
    whole, count = tokens.whole + tl.full((), 0, tl.int32), tokens.count + tl.full((), 0, tl.int32)
    turn = tl.full((), 0, tl.int32)
    searching = tl.full((), 1, tl.int32)
    while searching != 0:
        low = tl.maximum(low, ((low >> 31) << 31) + first_id)
        high = tl.where((high & NO_TOKEN) <= first_id, (high >> 31) << 31, high)
        rest = Tokens(
            tokens.source, whole, tokens.sort_keys, count, tokens.lowest, tokens.highest, tokens.top, tokens.scale
        )
        by_value = (whole != 0) & (turn < 4)
        low, high, within, mass, above_now, mass_above_now, passed = _split(
            rest, low, high, by_value, left_out, mass_left_out, by_mass, target, TILE, WAYS
        )
        if passed < WAYS:
            above, mass_above = above_now, mass_above_now
        searching = ((passed > 0) & (within - above > 1) & (high - low > 1)).to(tl.int32)
        turn += 1
        if (searching != 0) & (whole != 0) & (within - above <= capacity):
            blocks = count_blocks(tokens.source.vocab_size)
            listed = list_blocks(tokens.source.block_keys, blocks, (low >> 31).to(tl.int32), list_ptr, WIDTH)
            count = gather(tokens.source, list_ptr, listed, low, high, tokens.sort_keys, capacity, GATHERED)
            whole = tl.full((), 0, tl.int32)
            left_out, mass_left_out = above, mass_above
    return low, mass


@jit
def least_mass_of(filters, row_mass):
    """Returns the least mass of a kept token: a min-p, or an epsilon cutoff of all tokens. A min-p above 1 stays."""
    return tl.where(filters.of_all, tl.minimum(filters.epsilon * row_mass, 1.0), filters.min_p)


@jit
def least_mass_of_rest(filters, tokens, limit, least, TILE: tl.constexpr):
    """Returns the least mass of a kept token once the other filters keep those from ``limit`` and ``least`` on."""
    if filters.by_epsilon & (filters.of_all == 0):
        kept_mass = to_mass(mass_from(tokens, limit, least, TILE))
        least = tl.maximum(least, tl.minimum(filters.epsilon * kept_mass, 1.0))
    return least


@jit(noinline=True)
def sigma_cutoff(source, highest, sigmas, TILE: tl.constexpr):
    """Returns the lowest key that a top-n-sigma keeps of a row without infinite or undefined logits but -inf. Sums of
    distances from the highest logit, which is at 0, lose no more than 1e-9 of the variance."""
    top = value_of(highest).to(tl.float64)
    counts = tl.zeros((TILE,), tl.int32)
    sums = tl.zeros((TILE,), tl.float64)
    squares = tl.zeros((TILE,), tl.float64)
    for start in range(0, source.vocab_size, TILE):
        token = start + tl.arange(0, TILE)
        x = load_tokens(source, token, token < source.vocab_size)
        there = x != float("-inf")
        distance = tl.where(there, top - x.to(tl.float64), 0.0)
        counts += there.to(tl.int32)
        sums += distance
        squares += distance * distance
    count = tl.sum(counts, axis=0).to(tl.float64)
    mean = tl.sum(sums, axis=0) / count
    variance = tl.maximum(tl.sum(squares, axis=0) / count - mean * mean, 0.0)
    cutoff = top - tl.minimum(sigmas, LARGEST).to(tl.float64) * tl.sqrt(variance)
    return tl.maximum(key_of(tl.maximum(cutoff, -LARGEST).to(tl.float32)), MINUS_INF + 1)


@jit
def nucleus_target(top_p, whole):
    """Returns the mass that a nucleus has to reach, of a whole, both in fixed point: at least a token, at most all."""
    wanted = tl.ceil(tl.maximum(top_p, 1e-30).to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(wanted, whole), 1)


@jit
def find_limit(
    tokens, filters, row_mass, list_ptr, capacity,
    WIDTH: tl.constexpr, GATHERED: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Returns the sort key from which on top-k and top-p keep tokens. ``row_mass``: of all tokens, float32."""
    limit = tokens.lowest.to(tl.int64) << 31
    mass = (row_mass * UNIT).to(tl.int64)
    for stage in range(2):
        by_mass = stage == 1
        alone = filters.min_p > 1.0  # keeps the first token alone
        if tl.where(by_mass, filters.by_top_p, filters.by_top_k | alone):
            wanted = nucleus_target(filters.top_p, tl.where(filters.of_top_k, mass, (row_mass * UNIT).to(tl.int64)))
            target = tl.where(by_mass, wanted, tl.where(alone, 1, filters.top_k))
            limit, mass = shortest_prefix(
                tokens, limit, by_mass, target, list_ptr, capacity, WIDTH, GATHERED, TILE, WAYS
            )
    return limit


@jit
def find_limit_of_few(tokens, filters, row_mass):
    """Returns what ``find_limit`` does, of at most FEW candidates: each is compared with each, in a third of the time
    of two searches."""
    words, live = load_tile(tokens, 0, FEW)
    units = tl.where(live, units_of(logits_of(words), tokens.top, tokens.scale), 0)
    sums = tl.zeros((FEW, _AT_ONCE), tl.int64)  # of what is before: mass, and in the last bits how many
    for start in range(0, tokens.count, _AT_ONCE):
        index = start + tl.arange(0, _AT_ONCE)
        others = tl.load(tokens.sort_keys + index, mask=index < tokens.count, other=BELOW_ALL)
        earlier = others[None, :] > words[:, None]
        other = units_of(logits_of(others), tokens.top, tokens.scale) << _FEW_BITS | 1
        sums += tl.where(earlier, other[None, :], 0)
    before = tl.sum(sums, axis=1)
    rank, mass = before & (FEW - 1), before >> _FEW_BITS
    most = tl.where(filters.min_p > 1.0, 1, tl.where(filters.by_top_k, filters.top_k, FEW))
    kept = live & (rank < most)
    whole = tl.where(filters.of_top_k, tl.sum(tl.where(kept, units, 0), axis=0), (row_mass * UNIT).to(tl.int64))
    kept = kept & ((mass < nucleus_target(filters.top_p, whole)) | (filters.by_top_p == 0))
    return tl.min(tl.where(kept, words, 0x7FFFFFFFFFFFFFFF), axis=0)
