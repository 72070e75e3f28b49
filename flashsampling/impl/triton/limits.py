"""``distributed/limits`` by kernels (``limits_kernels``): the same functions, the same rounds, and no tensor as large as a
shard's logits, which each of them reads at most once.

    survey     the highest place, whether anything is finite; and the chunks' highest keys, by which those that follow pass over
               chunks that have nothing for them
    floor      of a top-k: the key that as many chunks reach
    top        the first k tokens: those of as many chunks, whose highest places are highest
    few        where top-k and top-p end among all ranks' first tokens
    histogram  of those that begin with what is found of the key, how many or how much mass have each next digit
    digit      the digit in which what is wanted is reached; after the last one, the limit
    least      the lowest key that min-p keeps
    mass       of what is kept
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...step import Step
from ..filters import HIGHEST, LOWEST, column, keys_of, places_of
from .config import next_power_of_2
from .limits_kernels import (
    RANKS,
    digit_kernel,
    few_kernel,
    floor_kernel,
    histogram_kernel,
    least_kernel,
    mass_kernel,
    survey_kernel,
    top_kernel,
)

if TYPE_CHECKING:
    from ...distributed.limits import Meet, Scale, Shards

TILE = 2048  # tokens of a program that has some of a row's
CHUNK = 64  # tokens that have a highest key
_FEW = 8  # chunks that a program looks at in place of all of a tile's
_MOST = 1 << 20  # tokens whose chunks one program compares
_BINS = 256
_SLOTS = 32, 128  # places of a row: for log-probabilities and most values of top-k; for all that ``of_few`` takes
_WARPS = 8


def blocks_of(logits: Tensor) -> int:
    """Programs that share a row."""
    return max(-(-logits.shape[1] // TILE), 1)


def slots_of(count: int) -> int:
    """Room for so many places of a row: of few sizes, so that hardly a request has a kernel of its own compiled."""
    return next((slots for slots in _SLOTS if count <= slots), next_power_of_2(count))


def _stride(values: Tensor) -> int:
    """Of a ``filters.column``, whose number is every row's."""
    return values.stride(0) if len(values) > 1 else 0


def highest(local: Step, logits: Tensor) -> tuple[Tensor, Tensor]:
    """See ``distributed.limits``: one launch, and zeros."""
    batch, columns = logits.shape
    blocks, mask = blocks_of(logits), local.asked.token_mask
    words = torch.zeros((batch, 2), dtype=torch.int64, device=logits.device)
    keys = torch.empty((batch, -(-columns // CHUNK)), dtype=torch.int32, device=logits.device)
    survey_kernel[(batch * blocks,)](
        logits,
        logits.stride(0),
        columns,
        local.rows().temperature,
        mask,
        0 if mask is None else mask.stride(0),
        words,
        keys,
        local.shard.first_token,
        keys.shape[1],
        blocks,
        TILE=TILE,
        CHUNK=CHUNK,
        num_warps=_WARPS,
    )
    return words, keys


def first_places(
    logits: Tensor,
    keys: Tensor,  # of chunks
    count: int,
    first_token: int,
) -> Tensor:
    """(B, count) int64: those of the first tokens, ``LOWEST`` where there are not so many."""
    (batch, columns), device = logits.shape, logits.device
    if columns > _MOST:
        ids = torch.arange(first_token, first_token + columns, device=device)
        return torch.stack([places_of(keys_of(row), ids).topk(count).values for row in logits])
    chunks = keys.shape[1]
    places = torch.full((batch, count), LOWEST, dtype=torch.int64, device=device)
    top_kernel[(batch,)](
        logits,
        logits.stride(0),
        columns,
        keys,
        torch.empty((batch, count), dtype=torch.int32, device=device),
        places,
        first_token,
        chunks,
        count,
        CHUNKS=next_power_of_2(max(chunks, 1)),
        SLOTS=slots_of(count),
        CHUNK=CHUNK,
        num_warps=_WARPS,
    )
    return places


def of_few(
    meet: "Meet", logits: Tensor, keys: Tensor, top_k: int, top_p: Tensor | float, scale: "Scale", shards: "Shards"
) -> Tensor:
    """See ``distributed.limits``: two launches."""
    theirs = meet(first_places(logits, keys, top_k, shards.first))
    batch = len(logits)
    p = column(top_p, logits.device)
    limit = torch.empty(batch, dtype=torch.int64, device=logits.device)
    few_kernel[(batch,)](
        theirs,
        p,
        _stride(p),
        scale.top,
        scale.temperature,
        limit,
        batch,
        len(theirs),
        top_k,
        scale.unit,
        PLACES=next_power_of_2(len(theirs) * slots_of(top_k)),
        num_warps=_WARPS,
    )
    return limit


def _of_three(theirs: Tensor, shards: "Shards") -> Tensor:
    """(3, B, n) of (ranks, B, n), of more ranks than have flags: the sum of those before this one, its own, and the others'."""
    own = theirs[shards.rank]
    before = sum((theirs[rank] for rank in shards.before()), torch.zeros_like(own))
    return torch.stack([before, own, theirs.sum(dim=0) - before - own])


def _search(
    meet: "Meet",
    logits: Tensor,
    keys: Tensor,  # of chunks
    target: Tensor,  # (B, 1) or (1, 1)
    limit: Tensor | None,  # (B,) int64, of the tokens that count
    scale: "Scale",
    vocab_size: int,
    shards: "Shards",
    masses: bool,
) -> Tensor:
    """(B,) int64: the limit, or a higher one. Two launches a digit, and zeros."""
    (batch, columns), device = logits.shape, logits.device
    raised = torch.full((batch,), LOWEST, dtype=torch.int64, device=device) if limit is None else limit.clone()
    blocks, most, done = blocks_of(logits), shards.digit_width(batch), 0
    rank, before = shards.rank, sum(1 << rank for rank in shards.before())
    widths = [min(most, 32 - first) for first in range(0, 32, most)]
    found, *histograms = torch.zeros(
        batch * sum([2, *(1 << width for width in widths)]), dtype=torch.int64, device=device
    ).split([2 * batch, *(batch << width for width in widths)])
    for width, amounts in zip(widths, histograms):
        histogram_kernel[(batch * blocks,)](
            logits,
            logits.stride(0),
            columns,
            keys,
            found,
            limit,
            scale.top,
            scale.temperature,
            amounts,
            shards.first,
            scale.unit,
            done,
            width,
            keys.shape[1],
            blocks,
            MASSES=masses and done + width < 32,
            **_shapes(),
            num_warps=_WARPS,
        )
        theirs = meet(amounts.view(batch, -1))
        if len(theirs) > 2 * RANKS:
            theirs, rank, before = _of_three(theirs, shards), 1, 1
        digit_kernel[(batch,)](
            theirs,
            target,
            _stride(target),
            found,
            raised,
            logits,
            logits.stride(0),
            columns,
            scale.top,
            scale.temperature,
            shards.first,
            scale.unit,
            vocab_size,
            done,
            width,
            batch,
            len(theirs),
            rank,
            before & (1 << RANKS) - 1,
            before >> RANKS,
            MASSES=masses,
            BINS=_BINS,
            TILE=TILE,
            num_warps=_WARPS,
        )
        done += width
    return raised


def _shapes() -> dict[str, int]:
    """Of kernels that look at some chunks."""
    return {"TILE": TILE, "CHUNK": CHUNK, "FEW": min(_FEW, TILE // CHUNK // 4)}


def _floor(keys: Tensor, columns: int, top_k: Tensor, vocab_size: int) -> Tensor | None:
    """(B,) int64: see ``floor_kernel``. The first k tokens of all ranks are not below what k tokens of one reach. None: a
    program does not compare so many chunks."""
    batch, chunks = keys.shape
    if columns > _MOST:
        return None
    floor = torch.empty(batch, dtype=torch.int64, device=keys.device)
    floor_kernel[(batch,)](
        keys, top_k, _stride(top_k), floor, vocab_size, chunks, CHUNKS=next_power_of_2(max(chunks, 1)), num_warps=_WARPS
    )
    return floor


def of_top_k(
    meet: "Meet", logits: Tensor, keys: Tensor, top_k: Tensor | int, scale: "Scale", vocab_size: int, shards: "Shards"
) -> Tensor:
    """See ``distributed.limits``: a launch more than the search."""
    k = column(top_k, logits.device, torch.int64).long()
    floor = _floor(keys, logits.shape[1], k, vocab_size)
    return _search(meet, logits, keys, k, floor, scale, vocab_size, shards, False)


def of_top_p(
    meet: "Meet",
    logits: Tensor,
    keys: Tensor,
    scale: "Scale",
    top_p: Tensor | float,
    limit: Tensor | None,
    vocab_size: int,
    shards: "Shards",
) -> Tensor:
    """See ``distributed.limits``."""
    return _search(meet, logits, keys, column(top_p, logits.device), limit, scale, vocab_size, shards, True)


def of_min_p(logits: Tensor, keys: Tensor, scale: "Scale", min_p: Tensor | float) -> Tensor:
    """See ``distributed.limits``: one launch."""
    batch, columns = logits.shape
    ratio, blocks = column(min_p, logits.device), blocks_of(logits)
    limit = torch.full((batch,), HIGHEST, dtype=torch.int64, device=logits.device)
    least_kernel[(batch * blocks,)](
        logits,
        logits.stride(0),
        columns,
        keys,
        ratio,
        _stride(ratio),
        scale.top,
        scale.temperature,
        limit,
        keys.shape[1],
        blocks,
        **_shapes(),
        num_warps=_WARPS,
    )
    return limit


def mass_of(logits: Tensor, limit: Tensor, scale: "Scale", first_token: int, rough: bool) -> Tensor:
    """See ``distributed.limits``: one launch, and zeros."""
    batch, columns = logits.shape
    blocks = blocks_of(logits)
    out = torch.zeros((batch, 1), dtype=torch.int64, device=logits.device)
    mass_kernel[(batch * blocks,)](
        logits,
        logits.stride(0),
        columns,
        limit,
        scale.top,
        scale.temperature,
        out,
        first_token,
        scale.unit,
        blocks,
        ROUGH=rough,
        TILE=TILE,
        num_warps=_WARPS,
    )
    return out
