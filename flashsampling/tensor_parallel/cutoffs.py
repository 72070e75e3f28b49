"""Cutoffs of sharded rows: the last tokens that top-k, top-p and min-p keep, by a radix search over all ranks.

A row is ordered by sort key: the logit's radix key (int32 bits in the order of logits), then the lower id, as in
``reference/logit_transforms``. The key of the last kept token is searched for digit by digit, from the highest bits. In
each radix pass, every rank counts its tokens (or sums their masses) for each value of the next digit, among tokens
whose key begins with the digits found so far. All ranks get all counts and take the digit that reaches the target.
After 32 bits the key and the number of its tokens on each rank are known. The lowest of these ids are kept; a rank
derives its share from the counts of the shards before it. The number of rounds depends only on the digits, not on
logits, k or p, and the host never waits for the device.

If the host knows one small k for all rows, one round of each rank's first k tokens settles top-k and top-p.

Masses are fixed-point integers: multiples of 2**-62 * V, rounded up to a power of two, of the highest token's mass.
Their sums do not depend on order, so the kept set does not depend on the cut of the vocabulary, the batch or atomics.
Rounding amounts to at most V * V * 2**-63 of the highest mass, 1e-8 of the sum for V = 262,144.

A search takes 13 bytes per logit of the shard, and temporary tensors for some rows at a time.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..exchange_protocol import NAN
from ..inputs import SampleInputs
from ..reference import logit_transforms
from ..reference.logit_transforms import HIGHEST, LOWEST, column, keys_of, places_of, relative, share_of_best, values_of

FEW = 128  # the most tokens whose sort keys a rank sends: no more messages than a search takes
_DIGIT = 8  # bits, at most
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}  # logits


class Collective(Protocol):
    """A collective round."""

    def __call__(
        self,
        words: Tensor,  # (B, n) int64
        wanted: Tensor | None = None,  # (1,) int32, the same on all ranks: 0 if no rank reads the result; None: 1
    ) -> Tensor:
        """Returns the words of all ranks, (ranks, B, n), contiguous."""
        ...


def are_few(top_k: Tensor | int) -> bool:
    """Returns whether ``top_k`` is one number for all rows and small enough for ``of_few``."""
    return isinstance(top_k, int) and 0 < top_k <= FEW


def rows_at_once(logits: Tensor) -> int:
    """Returns how many rows of (B, n) may have temporary tensors at once."""
    return max(_AT_ONCE.get(logits.device.type, 1 << 18) // max(logits.shape[1], 1), 1)


def by_rows(rows: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Applies ``rows`` to some rows of all tensors at a time, to bound temporary memory. The first tensor is (B, n)."""
    batch, count = len(tensors[0]), rows_at_once(tensors[0])
    if batch <= count:
        return rows(*tensors)
    return torch.cat([rows(*(tensor[first : first + count] for tensor in tensors)) for first in range(0, batch, count)])


class FixedPointScale(NamedTuple):
    """The fixed-point scale of each row's masses."""

    top: Tensor  # (B,) float32: the highest logit
    temperature: Tensor  # (B,) float32
    unit: int  # the mass of the highest token, a power of two

    def at(self, rows: Tensor) -> "FixedPointScale":
        """Selects rows."""
        return FixedPointScale(self.top.index_select(0, rows), self.temperature.index_select(0, rows), self.unit)

    def share(self, logits: Tensor) -> Tensor:
        """Returns the masses of logits (B, n) relative to the highest token's, (B, n) float64."""
        # a key of no token may be above the highest
        return share_of_best(relative(logits, self.temperature, self.top[:, None])).clamp(max=1.0)

    def of(self, logits: Tensor) -> Tensor:
        """Returns the masses of logits (B, n), (B, n) int64."""

        def some(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
            share = FixedPointScale(top, temperature, self.unit).share(logits)
            return (share * self.unit).round().nan_to_num(0.0).long()

        return by_rows(some, logits, self.top, self.temperature)

    def log(self, mass: Tensor) -> Tensor:
        """Returns the logarithm of masses relative to the highest token's, float64."""
        return (mass.double() / self.unit).log()


def fixed_point_scale_of(vocab_size: int) -> int:
    """Returns the largest unit with which the sum of ``vocab_size`` masses is at most 2**62."""
    return 1 << 62 - (vocab_size - 1).bit_length()


class Shards(NamedTuple):
    """The ranks' shards, and the size of a message."""

    rank: int
    ranges: Sequence[tuple[int, int]]  # of ids, [first, last), by rank
    room: int  # words of a message

    @property
    def first(self) -> int:
        """This rank's first token."""
        return self.ranges[self.rank][0]

    def digit_width(self, batch: int) -> int:
        """Returns the bits of a digit, such that its counts fit in one message."""
        return min(_DIGIT, (self.room // batch).bit_length() - 1)

    def before(self) -> list[int]:
        """Returns the ranks whose tokens have lower ids than this rank's."""
        return [rank for rank, (first, last) in enumerate(self.ranges) if first < last <= self.first]


class _Found(NamedTuple):
    """The last key that is kept."""

    key: Tensor  # (B,) int64, as ``logit_transforms.keys_of``
    kept: Tensor  # (B,) int64: number of its tokens that are kept
    there: Tensor  # (ranks, B) int64: number of its tokens on each rank


def _histogram(keys: Tensor, amounts: Tensor | None, prefix: Tensor, done: int, width: int) -> Tensor:
    """Sums the amounts (1 each if None) by the next digit, from the highest value down: (B, 2**width) int64."""
    shift, last = 32 - done - width, (1 << width) - 1

    def some(keys: Tensor, prefix: Tensor, *amounts: Tensor) -> Tensor:
        order = keys.long() + 2**31
        there = order >> shift + width == prefix[:, None]
        weights = torch.where(there, amounts[0], 0) if amounts else there.long()
        digits = last - (order >> shift & last)
        return torch.zeros(len(keys), last + 1, dtype=torch.int64, device=keys.device).scatter_add_(1, digits, weights)

    return by_rows(some, keys, prefix, *(() if amounts is None else (amounts,)))


def _search(
    meet: Collective,
    keys: Tensor,  # (B, n) int32
    amounts: Tensor | None,  # (B, n) int64; None: 1 each
    target: Callable[[Tensor], Tensor],  # (B,) from the sum of all amounts (B,)
    counted: Tensor | None,  # (B, n) bool: tokens that there are; None: all
    scale: FixedPointScale | None,  # of amounts that are masses
    shards: Shards,
) -> _Found:
    """Finds the token at which the cumulative amounts, in the row's order, reach the target."""
    batch, device = len(keys), keys.device
    digit = shards.digit_width(batch)
    prefix = torch.zeros(batch, dtype=torch.int64, device=device)
    left, done = prefix, 0
    while done < 32:
        width = min(digit, 32 - done)
        ends = done + width == 32  # the last pass: all tokens of a digit have the same key and mass
        theirs = meet(_histogram(keys, counted if ends else amounts, prefix, done, width))
        sums = theirs.sum(dim=0)
        if done == 0:
            left = target(sums.sum(dim=1))
        digits = (1 << width) - 1 - torch.arange(1 << width, device=device)
        if ends and scale is not None:
            each = scale.of(values_of((prefix[:, None] << width | digits) - 2**31))
            sums = sums * each
        up_to = sums.cumsum(dim=1)
        at = (up_to < left[:, None]).sum(dim=1, keepdim=True).clamp(max=len(digits) - 1)
        left = left - (up_to - sums).gather(1, at)[:, 0]
        prefix = prefix << width | digits[at[:, 0]]
        done += width
    there = theirs.gather(2, at.expand(len(theirs), batch, 1))[:, :, 0]
    if scale is not None:
        one = each.gather(1, at)[:, 0].clamp(min=1)
        left = (left + one - 1) // one
    return _Found(prefix - 2**31, torch.minimum(left.clamp(min=1), there.sum(dim=0)), there)


def _limit(found: _Found, keys: Tensor, shards: Shards) -> Tensor:
    """Returns this rank's cutoff, the lowest sort key that is kept, (B,) int64."""
    left = found.kept
    for rank in shards.before():
        left = left - found.there[rank]
    mine = torch.minimum(left.clamp(min=0), found.there[shards.rank])

    def index(keys: Tensor, key: Tensor, mine: Tensor) -> Tensor:
        equal = keys == key[:, None]
        return (equal.cumsum(dim=1) < mine[:, None]).sum(dim=1)

    last = shards.first + by_rows(index, keys, found.key, mine)
    return torch.where(mine > 0, places_of(found.key, last), found.key + 1 << 31)


def is_kept(logits: Tensor, limit: Tensor, first_token: int) -> Tensor:
    """Returns which of a shard's tokens reach the cutoff ``limit`` (B,), (B, n) bool."""
    ids = torch.arange(first_token, first_token + logits.shape[1], device=logits.device)
    return by_rows(lambda logits, limit: places_of(keys_of(logits), ids) >= limit[:, None], logits, limit)


def highest(
    local: SampleInputs,
    logits: Tensor,  # (B, n) float32, the processed ones of a shard
) -> tuple[Tensor, Tensor | None]:
    """Returns (B, 2) int64: the highest logit and its token as ``exchange_protocol.pack`` packs them (0 if none is
    above -inf), and whether a logit is finite; and what later functions know of the logits. The first word is NaN if a
    score will be NaN: an infinite logit over an infinite temperature, or a NaN temperature."""
    first, (batch, columns) = local.shard.first_token, logits.shape
    if columns == 0:
        return torch.zeros((batch, 2), dtype=torch.int64, device=logits.device), None
    ids = torch.arange(first, first + columns, device=logits.device)
    best = by_rows(lambda logits: places_of(keys_of(logits), ids).amax(dim=1), logits)
    value = values_of(best >> 31)
    finite = by_rows(lambda logits: logits.isfinite().any(dim=1), logits)
    infinite = logits.isinf()
    allowed = logit_transforms.allowed(local.params, columns)
    if allowed is not None:
        infinite &= allowed
    temperature = local.rows().temperature
    undefined = value.isnan() | temperature.isnan() | (temperature.isposinf() & infinite.any(dim=1))
    words = (best + (2**31 << 31)).masked_fill(value.isneginf(), 0).masked_fill(undefined, NAN)
    return torch.stack([words, finite.long()], dim=1), None


def highest_places(
    logits: Tensor,  # (B, n) float32
    first_token: int,
    count: int,
) -> Tensor:
    """Returns the sort keys of a shard's highest logits, (B, count) int64, descending, padded with ``LOWEST``."""
    ids = torch.arange(first_token, first_token + logits.shape[1], device=logits.device)
    most = min(count, logits.shape[1])
    places = by_rows(lambda logits: places_of(keys_of(logits), ids).topk(most, dim=1).values, logits)
    return torch.nn.functional.pad(places, (0, count - most), value=LOWEST)


def highest_of_all(
    theirs: Tensor,  # (ranks, B, count): each rank's ``highest_places``
) -> Tensor:
    """Returns the sort keys of the whole vocabulary's highest logits, (B, count) int64."""
    return theirs.permute(1, 0, 2).flatten(1).topk(theirs.shape[2], dim=1).values


def of_few(
    meet: Collective,
    logits: Tensor,  # (B, n) float32, of this rank's tokens
    known: Tensor | None,  # what ``highest`` found
    top_k: int,  # up to FEW, and below the vocabulary's size
    top_p: Tensor | float,
    scale: FixedPointScale,
    shards: Shards,
) -> Tensor:
    """Returns the cutoffs of top-k and then top-p, (B,) int64, as ``of_top_k`` and ``of_top_p`` do."""
    places = highest_of_all(meet(highest_places(logits, shards.first, top_k)))
    masses = scale.of(values_of(places >> 31))
    before = masses.cumsum(dim=1) - masses
    p = column(top_p, logits.device)[:, 0].double().expand(len(logits))
    wanted = torch.where(p < 1, _wanted(p, masses.sum(dim=1)), HIGHEST)
    last = (before < wanted[:, None]).sum(dim=1, keepdim=True) - 1
    return places.gather(1, last.clamp(min=0))[:, 0]


def _wanted(
    p: Tensor,  # (B,) float64
    mass: Tensor,  # (B,) int64
) -> Tensor:
    """Returns the target mass, (B,) int64: a token is in the nucleus if the mass before it is below the target."""
    return torch.minimum((p.nan_to_num(0.0).clamp(0.0, 1.0) * mass.double()).ceil().long(), mass).clamp(min=1)


def of_top_k(
    meet: Collective,
    logits: Tensor,  # (B, n) float32, of this rank's tokens
    known: Tensor | None,  # what ``highest`` found
    top_k: Tensor | int,
    scale: FixedPointScale,
    vocab_size: int,  # the whole one
    shards: Shards,
) -> Tensor:
    """Returns the cutoffs of top-k, (B,) int64; ``LOWEST`` where it is off."""
    keys = keys_of(logits)
    k = column(top_k, keys.device, torch.int64)[:, 0].long().expand(len(keys))
    on = (k > 0) & (k < vocab_size)
    wanted = torch.where(on, k, 1)
    found = _search(meet, keys, None, lambda _: wanted, None, None, shards)
    return torch.where(on, _limit(found, keys, shards), LOWEST)


def of_top_p(
    meet: Collective,
    logits: Tensor,  # (B, n) float32, of this rank's tokens
    known: Tensor | None,  # what ``highest`` found
    scale: FixedPointScale,
    top_p: Tensor | float,
    limit: Tensor | None,  # (B,) int64, of top-k; None: it keeps all
    vocab_size: int,  # the whole one
    shards: Shards,
) -> Tensor:
    """Returns the cutoffs of top-p over the tokens that top-k keeps, (B,) int64; those of top-k where top-p is off."""
    keys, masses, counted = keys_of(logits), scale.of(logits), None
    p = column(top_p, keys.device)[:, 0].double().expand(len(keys))
    if limit is not None:
        counted = is_kept(logits, limit, shards.first)
        masses = masses.masked_fill_(~counted, 0)
    found = _search(meet, keys, masses, lambda mass: _wanted(p, mass), counted, scale, shards)
    by_top_p = torch.where(p < 1, _limit(found, keys, shards), LOWEST)
    return by_top_p if limit is None else torch.maximum(limit, by_top_p)


def of_min_p(
    logits: Tensor,  # (B, n) float32
    known: Tensor | None,  # what ``highest`` found
    scale: FixedPointScale,
    min_p: Tensor | float,
) -> Tensor:
    """Returns the cutoffs of min-p, (B,) int64, apart from the first token, which is always kept; ``LOWEST`` if off."""
    ratio = column(min_p, logits.device)[:, 0].double().expand(len(logits))
    if logits.shape[1] == 0:
        return torch.full_like(ratio, LOWEST, dtype=torch.int64)

    def least(logits: Tensor, top: Tensor, temperature: Tensor, ratio: Tensor) -> Tensor:
        passes = share_of_best(relative(logits, temperature, top[:, None])) >= ratio[:, None]
        return torch.where(passes, keys_of(logits).long() << 31, HIGHEST).amin(dim=1)

    limits = by_rows(least, logits, scale.top, scale.temperature, ratio)
    return torch.where(ratio > 0, limits, LOWEST)


def mass_of(
    logits: Tensor,  # (B, n) float32
    limit: Tensor,  # (B,) int64
    scale: FixedPointScale,
    first_token: int,
) -> Tensor:
    """Returns the mass of a shard's tokens that reach the cutoff ``limit``, (B, 1) int64."""

    def some(logits: Tensor, limit: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
        masses = FixedPointScale(top, temperature, scale.unit).of(logits)
        return masses.masked_fill(~is_kept(logits, limit, first_token), 0).sum(dim=1, keepdim=True)

    return by_rows(some, logits, limit, scale.top, scale.temperature)
