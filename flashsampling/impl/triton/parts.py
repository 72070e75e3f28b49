"""``distributed/parts`` by kernels (``parts_kernels``): the same functions, a launch or a few each, where torch takes some
hundred, each of which costs the host as much as a kernel of ours."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...step import Asked, Drawn, layout
from . import limits
from .config import next_power_of_2
from .parts_kernels import above_kernel, conclude_kernel, first_kernel, ranks_kernel, raw_kernel, words_kernel

if TYPE_CHECKING:
    from ...distributed.requests import Kept

_BLOCK = 128  # rows, or words, of a program
_SOME = 128  # words of a row at once
_WARPS = 4
_MANY_WARPS = 8  # of a tile of logits


def _of_rows(value: Tensor | float, none: Tensor) -> tuple[Tensor, int]:
    """A parameter's tensor and its stride; if it is a number, ``none`` and -1."""
    return (value, value.stride(0)) if isinstance(value, Tensor) else (none, -1)


def first(theirs: Tensor, asked: Asked) -> tuple[Tensor, Tensor, Tensor]:
    """See ``distributed.parts``: one launch."""
    (ranks, batch, _), device = theirs.shape, theirs.device
    place = torch.empty(batch, dtype=torch.int64, device=device)
    top = torch.empty(batch, dtype=torch.float32, device=device)
    defined = torch.empty(batch, dtype=torch.bool, device=device)
    first_kernel[(-(-batch // _BLOCK),)](
        theirs,
        *_of_rows(asked.top_p, top),
        *_of_rows(asked.min_p, top),
        place,
        top,
        defined.view(torch.int8),
        batch,
        ranks,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return place, top, defined


def words(kept: "Kept", winners: Tensor, mass: Tensor | None) -> Tensor:
    """See ``distributed.parts``: none, two or three launches."""
    local, (raw, processed) = kept.local, kept.logits
    asked = local.asked
    if not asked.needs_raw_mass():
        return winners
    (batch, columns), device = raw.shape, raw.device
    blocks, chunks = limits.blocks_of(raw), -(-columns // limits.CHUNK)
    sums = torch.empty((batch, blocks), dtype=torch.float64, device=device)
    keys = torch.empty((batch, chunks), dtype=torch.int32, device=device) if asked.top_logprobs else None
    raw_kernel[(batch * blocks,)](
        raw, raw.stride(0), columns, sums, keys, chunks, blocks, TILE=limits.TILE, CHUNK=limits.CHUNK, num_warps=_MANY_WARPS
    )
    top = limits.first_places(raw, keys, asked.top_logprobs, local.shard.first_token) if asked.top_logprobs else None
    said = kept.columns
    width = sum(said.values())
    out = torch.empty((batch, width), dtype=torch.int64, device=device)
    words_kernel[(batch,)](
        raw,
        processed,
        raw.stride(0),
        columns,
        winners,
        mass,
        sums,
        top,
        None if asked.logprob_ids is None else asked.logprob_ids.contiguous(),
        out,
        local.shard.first_token,
        local.num_samples,
        asked.top_logprobs,
        said["given"],
        width,
        blocks,
        BLOCKS=next_power_of_2(blocks),
        SOME=_SOME,
        num_warps=_WARPS,
    )
    return out


def conclude(theirs: Tensor, kept: "Kept") -> tuple[Drawn, Tensor | None]:
    """See ``distributed.parts``: one launch."""
    (ranks, batch, width), device = theirs.shape, theirs.device
    asked, num_samples, scale = kept.local.asked, kept.local.num_samples, kept.scale
    placed = layout(batch, num_samples, asked)
    ids = torch.empty(placed.num_ids, dtype=torch.int64, device=device)
    values = torch.empty(placed.num_values, dtype=torch.float32, device=device) if placed.values else None
    drawn = Drawn(ids, values)
    parts = placed.split(drawn, batch)
    raw = torch.empty((batch, num_samples), dtype=torch.float32, device=device) if asked.logprobs else None
    conclude_kernel[(batch,)](
        theirs,
        kept.defined.view(torch.int8),
        scale.top,
        scale.temperature,
        parts["token_ids"],
        parts.get("logprobs"),
        parts.get("processed_logprobs"),
        raw,
        parts.get("top_token_ids"),
        parts.get("top_logprobs"),
        parts.get("given_logprobs"),
        parts.get("logsumexp"),
        batch,
        ranks,
        num_samples,
        asked.top_logprobs,
        kept.columns["given"],
        width,
        scale.unit,
        LOGSUMEXP=asked.needs_raw_mass(),
        RANKS=next_power_of_2(ranks),
        PLACES=next_power_of_2(ranks * limits.slots_of(asked.top_logprobs)),
        SOME=_SOME,
        num_warps=_WARPS,
    )
    return drawn, raw


def above(raw: Tensor, logits: Tensor) -> Tensor:
    """See ``distributed.parts``: one launch, and zeros."""
    (batch, columns), num_samples, blocks = raw.shape, logits.shape[1], limits.blocks_of(raw)
    out = torch.zeros((batch, num_samples), dtype=torch.int64, device=raw.device)
    above_kernel[(batch * blocks,)](
        raw, raw.stride(0), columns, logits, out, num_samples, blocks, TILE=limits.TILE, num_warps=_MANY_WARPS
    )
    return out


def put_ranks(drawn: Drawn, theirs: Tensor, kept: "Kept") -> None:
    """See ``distributed.parts``: one launch."""
    ranks, batch, num_samples = theirs.shape
    parts = layout(batch, num_samples, kept.local.asked).split(drawn, batch)
    count = batch * num_samples
    ranks_kernel[(-(-count // _BLOCK),)](
        theirs, parts["token_ids"], parts["ranks"], count, ranks, BLOCK=_BLOCK, num_warps=_WARPS
    )
