"""Where filters end in a row whose logits lie on several ranks: the last tokens that top-k, top-p and min-p keep.

A row's order is by place: the logit's key (int32 bits in the order of logits), then the lower id; as in
``reference/logit_transforms``. The
key of the last token that is kept is searched for digit by digit, from the highest bits: every rank counts, for each value of
the next digit, its tokens whose key begins with what is found (or sums their masses), all ranks get all ranks' counts, and take
the digit in which what is wanted is reached. After 32 bits the key is known, and how many tokens have it on each rank; of these
the lowest ids are kept, which a rank finds by how many there are on the shards before its own. So a search takes as many rounds
as there are digits, whatever the logits, k and p are, and nobody waits for the device.

Where one small k is known to the host, the ranks' first k tokens of each row are all that can be kept: one round, from which
top-k and top-p follow.

Masses are integers: multiples of 2**-62 * V, rounded up to a power of two, of the highest token's. Their sums are the same in
any order, so the kept set depends neither on how the vocabulary is cut, nor on the batch, nor on atomics; V * V * 2**-63 of the
highest mass is what rounding can amount to, 1e-8 of the sum for V = 262,144.

What a search takes: 13 bytes per logit of the shard, and temporary ones for some rows at a time.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..exchange_protocol import NAN
from ..inputs import SampleInputs
from ..reference import logit_transforms
from ..reference.logit_transforms import HIGHEST, LOWEST, column, keys_of, places_of, relative, share_of_best, values_of

FEW = 128  # tokens, at most, of which a rank sends the places: no more messages than a search takes
_DIGIT = 8  # bits, at most
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}  # logits


class Collective(Protocol):
    """A round."""

    def __call__(
        self,
        words: Tensor,  # (B, n) int64
        wanted: Tensor | None = None,  # (1,) int32, the same on all ranks: 0 if nobody reads what comes back; None: 1
    ) -> Tensor:
        """(ranks, B, n), contiguous: all ranks'."""
        ...


def are_few(top_k: Tensor | int) -> bool:
    """Whether it is one number for all rows, small enough for ``of_few``."""
    return isinstance(top_k, int) and 0 < top_k <= FEW


def rows_at_once(logits: Tensor) -> int:
    """How many rows of (B, n) may have temporary tensors."""
    return max(_AT_ONCE.get(logits.device.type, 1 << 18) // max(logits.shape[1], 1), 1)


def by_rows(rows: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``rows`` of some rows of all tensors at a time, of which the first is (B, n): for what takes much memory per logit."""
    batch, count = len(tensors[0]), rows_at_once(tensors[0])
    if batch <= count:
        return rows(*tensors)
    return torch.cat([rows(*(tensor[first : first + count] for tensor in tensors)) for first in range(0, batch, count)])


class FixedPointScale(NamedTuple):
    """What a row's masses are relative to."""

    top: Tensor  # (B,) float32: the highest logit
    temperature: Tensor  # (B,) float32
    unit: int  # the mass of the highest token, a power of two

    def at(self, rows: Tensor) -> "FixedPointScale":
        """Of some of the rows."""
        return FixedPointScale(self.top.index_select(0, rows), self.temperature.index_select(0, rows), self.unit)

    def share(self, logits: Tensor) -> Tensor:
        """(B, n) float64: what logits (B, n) have of the highest token's mass."""
        return share_of_best(relative(logits, self.temperature, self.top[:, None])).clamp(
            max=1.0
        )  # above are keys of no token

    def of(self, logits: Tensor) -> Tensor:
        """(B, n) int64: masses of logits (B, n)."""

        def some(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
            share = FixedPointScale(top, temperature, self.unit).share(logits)
            return (share * self.unit).round().nan_to_num(0.0).long()

        return by_rows(some, logits, self.top, self.temperature)

    def log(self, mass: Tensor) -> Tensor:
        """float64: the logarithm of masses over that of the highest token."""
        return (mass.double() / self.unit).log()


def fixed_point_scale_of(vocab_size: int) -> int:
    """The largest one with which the masses of so many tokens stay below 2**62."""
    return 1 << 62 - (vocab_size - 1).bit_length()


class Shards(NamedTuple):
    """Whose tokens are searched."""

    rank: int
    ranges: Sequence[tuple[int, int]]  # of ids, [first, last), by rank
    room: int  # words of a message

    @property
    def first(self) -> int:
        """This rank's first token."""
        return self.ranges[self.rank][0]

    def digit_width(self, batch: int) -> int:
        """Bits of a search's digits: all of a digit's amounts fit one message."""
        return min(_DIGIT, (self.room // batch).bit_length() - 1)

    def before(self) -> list[int]:
        """Ranks whose tokens have lower ids than this one's."""
        return [rank for rank, (first, last) in enumerate(self.ranges) if first < last <= self.first]


class _Found(NamedTuple):
    """The last key that is kept."""

    key: Tensor  # (B,) int64, as ``filters.keys_of``
    kept: Tensor  # (B,) int64: how many of its tokens are
    there: Tensor  # (ranks, B) int64: how many each rank has


def _histogram(keys: Tensor, amounts: Tensor | None, prefix: Tensor, done: int, width: int) -> Tensor:
    """(B, 2**width) int64: the next digit's amounts, 1 each if None; from the highest digit down."""
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
    """The token with which the amounts, in the row's order, reach the target."""
    batch, device = len(keys), keys.device
    digit = shards.digit_width(batch)
    prefix = torch.zeros(batch, dtype=torch.int64, device=device)
    left, done = prefix, 0
    while done < 32:
        width = min(digit, 32 - done)
        ends = done + width == 32  # a digit is a key then, whose tokens have the same mass
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
    """(B,) int64: the place from which on this rank's tokens are kept."""
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
    """(B, n) bool: which of a shard's tokens are at the limit (B,) or before it."""
    ids = torch.arange(first_token, first_token + logits.shape[1], device=logits.device)
    return by_rows(lambda logits, limit: places_of(keys_of(logits), ids) >= limit[:, None], logits, limit)


def highest(
    local: SampleInputs,
    logits: Tensor,  # (B, n) float32, the processed ones of a shard
) -> tuple[Tensor, Tensor | None]:
    """(B, 2) int64: the highest logit and its token as ``exchange.pack`` has them, 0 if none is above -inf; and 1 if one is
    finite, else 0. Also what those that follow want to know of the logits. NaN too where a score will be: an infinite logit
    over an infinite temperature, or a temperature that is none."""
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
    """(B, count) int64: places of a shard's highest logits, downwards; ``LOWEST`` where there are not so many tokens."""
    ids = torch.arange(first_token, first_token + logits.shape[1], device=logits.device)
    most = min(count, logits.shape[1])
    places = by_rows(lambda logits: places_of(keys_of(logits), ids).topk(most, dim=1).values, logits)
    return torch.nn.functional.pad(places, (0, count - most), value=LOWEST)


def highest_of_all(
    theirs: Tensor,  # (ranks, B, count): each rank's ``highest_places``
) -> Tensor:
    """(B, count) int64: the whole vocabulary's."""
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
    """(B,) int64 limits of top-k and, over what it keeps, of top-p: as ``of_top_k`` and ``of_top_p``."""
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
    """(B,) int64: a token is in the nucleus if the mass before it is below this."""
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
    """(B,) int64 limits of top-k, ``LOWEST`` where it is off."""
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
    """(B,) int64 limits of top-k and of top-p over what it keeps; where top-p is off, those of top-k."""
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
    """(B,) int64 limits of min-p, but for the first token, which it always keeps; ``LOWEST`` where it is off."""
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
    """(B, 1) int64: the mass of a shard's tokens from the limit on."""

    def some(logits: Tensor, limit: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
        masses = FixedPointScale(top, temperature, scale.unit).of(logits)
        return masses.masked_fill(~is_kept(logits, limit, first_token), 0).sum(dim=1, keepdim=True)

    return by_rows(some, logits, limit, scale.top, scale.temperature)
