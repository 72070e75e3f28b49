"""``tensor_parallel/outputs`` by kernels (``parts_kernels``): the same functions, a launch or a few each, where torch
takes some
hundred, each of which costs the host as much as a kernel of ours."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....outputs import SampleResult, layout
from ....sampling_params import SamplingParams
from ..fused.config import next_power_of_2
from . import cutoffs
from .output_kernels import above_kernel, conclude_kernel, first_kernel, ranks_kernel, raw_kernel, words_kernel

if TYPE_CHECKING:
    from ....tensor_parallel.filtered_sampling import Kept

_BLOCK = 128  # rows, or words, of a program
_SOME = 128  # words of a row at once
_WARPS = 4
_MANY_WARPS = 8  # of a tile of logits


def _of_rows(value: Tensor | float, none: Tensor) -> tuple[Tensor, int]:
    """A parameter's tensor and its stride; if it is a number, ``none`` and -1."""
    return (value, value.stride(0)) if isinstance(value, Tensor) else (none, -1)


def first(theirs: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """Implements the function of ``tensor_parallel.outputs``: one launch."""
    (ranks, batch, _), device = theirs.shape, theirs.device
    place = torch.empty(batch, dtype=torch.int64, device=device)
    top = torch.empty(batch, dtype=torch.float32, device=device)
    defined = torch.empty(batch, dtype=torch.bool, device=device)
    first_kernel[(-(-batch // _BLOCK),)](
        theirs,
        *_of_rows(params.top_p, top),
        *_of_rows(params.min_p, top),
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
    """Implements the function of ``tensor_parallel.outputs``: none, two or three launches."""
    local, (raw, processed) = kept.local, kept.logits
    params = local.params
    if not params.needs_raw_mass():
        return winners
    (batch, columns), device = raw.shape, raw.device
    blocks, chunks = cutoffs.blocks_of(raw), -(-columns // cutoffs.CHUNK)
    sums = torch.empty((batch, blocks), dtype=torch.float64, device=device)
    keys = torch.empty((batch, chunks), dtype=torch.int32, device=device) if params.top_logprobs else None
    raw_kernel[(batch * blocks,)](
        raw,
        raw.stride(0),
        columns,
        sums,
        keys,
        chunks,
        blocks,
        TILE=cutoffs.TILE,
        CHUNK=cutoffs.CHUNK,
        num_warps=_MANY_WARPS,
    )
    top = cutoffs.first_places(raw, keys, params.top_logprobs, local.shard.first_token) if params.top_logprobs else None
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
        None if params.logprob_ids is None else params.logprob_ids.contiguous(),
        out,
        local.shard.first_token,
        local.num_samples,
        params.top_logprobs,
        said["given"],
        width,
        blocks,
        BLOCKS=next_power_of_2(blocks),
        SOME=_SOME,
        num_warps=_WARPS,
    )
    return out


def conclude(theirs: Tensor, kept: "Kept") -> tuple[SampleResult, Tensor | None]:
    """Implements the function of ``tensor_parallel.outputs``: one launch."""
    (ranks, batch, width), device = theirs.shape, theirs.device
    params, num_samples, scale = kept.local.params, kept.local.num_samples, kept.scale
    placed = layout(batch, num_samples, params)
    ids = torch.empty(placed.num_ids, dtype=torch.int64, device=device)
    values = torch.empty(placed.num_values, dtype=torch.float32, device=device) if placed.values else None
    drawn = SampleResult(ids, values)
    parts = placed.split(drawn, batch)
    raw = torch.empty((batch, num_samples), dtype=torch.float32, device=device) if params.logprobs else None
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
        params.top_logprobs,
        kept.columns["given"],
        width,
        scale.unit,
        LOGSUMEXP=params.needs_raw_mass(),
        RANKS=next_power_of_2(ranks),
        PLACES=next_power_of_2(ranks * cutoffs.slots_of(params.top_logprobs)),
        SOME=_SOME,
        num_warps=_WARPS,
    )
    return drawn, raw


def above(raw: Tensor, logits: Tensor) -> Tensor:
    """Implements the function of ``tensor_parallel.outputs``: one launch, and zeros."""
    (batch, columns), num_samples, blocks = raw.shape, logits.shape[1], cutoffs.blocks_of(raw)
    out = torch.zeros((batch, num_samples), dtype=torch.int64, device=raw.device)
    above_kernel[(batch * blocks,)](
        raw, raw.stride(0), columns, logits, out, num_samples, blocks, TILE=cutoffs.TILE, num_warps=_MANY_WARPS
    )
    return out


def put_ranks(drawn: SampleResult, theirs: Tensor, kept: "Kept") -> None:
    """Implements the function of ``tensor_parallel.outputs``: one launch."""
    ranks, batch, num_samples = theirs.shape
    parts = layout(batch, num_samples, kept.local.params).split(drawn, batch)
    count = batch * num_samples
    ranks_kernel[(-(-count // _BLOCK),)](
        theirs, parts["token_ids"], parts["ranks"], count, ranks, BLOCK=_BLOCK, num_warps=_WARPS
    )
