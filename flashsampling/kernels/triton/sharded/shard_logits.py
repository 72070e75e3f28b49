"""A shard of a vocabulary, of which more is asked than one draw: its logits to memory, and their winners among what is
kept.

What comes between is the ranks' (``tensor_parallel/filtered_sampling``). Logits and scores are made by the functions
by which one rank with
the whole vocabulary makes them, so they are the same bits.
"""

import torch
import triton.language as tl
from torch import Tensor

from ....exchange_protocol import NO_FINITE
from ....inputs import SampleInputs
from ..filtered.block_stats_kernel import StatsOutputs
from ..filtered.dispatch import block_stats, changes_logits, head_transform, request_transforms
from ..filtered.order import NO_LOGIT, column_tokens, key_of, score_factors
from ..fused.config import next_power_of_2
from ..fused.logits_gemm import logits_gemm
from ..fused.noise import REFINEMENT_BIT, minus_gumbel_refined, philox_words
from ..fused.packed_argmax import NO_TOKEN, compute_score, pack_key
from ..jit import jit
from . import cutoffs

_BLOCK = 1024  # tokens of a program
_WARPS = 4


@jit(
    do_not_specialize=["base", "skip", "num_samples", "stream", "chunks", "blocks"],
    # a kernel of another alignment would be compiled while other ranks wait for this one
    do_not_specialize_on_alignment=["limits_ptr", "temperatures_ptr", "seeds_ptr", "offsets_ptr"],
)
def winners_kernel(
    logits,  # (B, V) float32
    logits_stride,
    vocab_size,
    limits_ptr,  # (B,) int64: the least place of a kept token
    temperatures_ptr,  # (B,) float32
    seeds_ptr,  # (B,) int64
    offsets_ptr,  # (B,) int64
    keys_ptr,  # (B, chunks) int32: the highest keys of as many tokens each; None: they are not known
    out_ptr,  # (B, num_samples) int64, ``NO_FINITE``; out: keys of the best scores, where any is above -inf
    base: tl.int32,  # a multiple of 128: the global id from which groups are counted
    skip: tl.int32,  # the first token's, from there
    num_samples: tl.int32,
    stream: tl.int32,
    chunks: tl.int32,
    blocks: tl.int32,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # at least as many as a block may have a part of
):
    """Grid: (blocks * B,), blocks of the ids from ``base`` on. Of a block without a chunk that has a kept token no
    logit is read."""
    GROUPS: tl.constexpr = BLOCK // 4
    row = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK
    limit = tl.load(limits_ptr + row)
    if keys_ptr is not None:
        chunk = tl.maximum(start - skip, 0) // CHUNK + tl.arange(0, CHUNKS)
        here = (chunk < chunks) & (chunk * CHUNK < start - skip + BLOCK)
        reach = tl.load(keys_ptr + row.to(tl.int64) * chunks + chunk, mask=here, other=NO_LOGIT)
        if tl.max(reach, axis=0).to(tl.int64) < limit >> 31:
            return
    column = column_tokens(GROUPS)
    from_row = logits + row.to(tl.int64) * logits_stride
    ids = ()
    kept = ()
    values = ()
    any_kept = tl.zeros((GROUPS,), tl.int32)
    for lane in tl.static_range(4):
        at = start + (lane & 1) * 8 + (lane // 2) * 64 + column
        live = (at >= skip) & (at < skip + vocab_size)
        x = tl.load(from_row + (at - skip), mask=live, other=float("-inf"))
        id = base + at
        place = (key_of(x).to(tl.int64) << 31) | (id ^ NO_TOKEN).to(tl.int64)
        live = live & (place >= limit) & (x != float("-inf"))
        any_kept = any_kept | live.to(tl.int32)
        ids = ids + (id,)
        kept = kept + (live,)
        values = values + (x,)
    if tl.max(any_kept, axis=0) != 0:
        scale, noise_factor = score_factors(tl.load(temperatures_ptr + row))
        seed = tl.load(seeds_ptr + row)
        offset = tl.load(offsets_ptr + row)
        key_lo, key_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
        offset_lo, offset_hi = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
        group = ((base + start) // 4 + tl.arange(0, GROUPS)).to(tl.uint32)
        for draw in range(num_samples):
            draw_word = tl.zeros((GROUPS,), tl.uint32) + (draw | (stream << 24)).to(tl.uint32)
            words = philox_words(group, draw_word, offset_lo, offset_hi, key_lo, key_hi)
            tail0, tail1, tail2, tail3 = words  # of no account where no word is 0
            is_zero = (words[0] == 0) | (words[1] == 0) | (words[2] == 0) | (words[3] == 0)
            if tl.max(is_zero.to(tl.int32), axis=0) != 0:
                tail0, tail1, tail2, tail3 = philox_words(
                    group, draw_word | REFINEMENT_BIT, offset_lo, offset_hi, key_lo, key_hi
                )
            tails = (tail0, tail1, tail2, tail3)
            best = tl.zeros((GROUPS,), tl.int64)
            for lane in tl.static_range(4):
                score = compute_score(
                    values[lane], scale, 0.0, minus_gumbel_refined(words[lane], tails[lane]), noise_factor
                )
                best = tl.maximum(best, tl.where(kept[lane], pack_key(score, ids[lane]), 0))
            highest = tl.max(best, axis=0)
            tl.atomic_max(out_ptr + row.to(tl.int64) * num_samples + draw, highest, mask=highest > 0, sem="relaxed")


def shard_logits(step: SampleInputs) -> tuple[Tensor, Tensor]:
    """Implements the function of ``backends``: one launch, or two."""
    return processed(step, logits_gemm(step.hidden_states, step.weight, step.vocab_size))


def processed(
    step: SampleInputs,
    logits: Tensor,  # (B, V) float32: products of the shard
) -> tuple[Tensor, Tensor]:
    """Raw and processed logits of a shard, (B, V) float32 each, the same one where they are the same."""
    params = step.params
    head = head_transform(params)
    transforms, _held = request_transforms(params)
    changes_raw, changes = changes_logits(head, transforms)
    if not changes_raw and not changes:
        return logits, logits
    batch, stride, device = len(logits), logits.stride(0), logits.device
    raw, out = (
        torch.empty((batch, stride), dtype=torch.float32, device=device)[:, : step.vocab_size] if wanted else None
        for wanted in (changes_raw, changes)
    )
    addresses = (0 if store is None else store.data_ptr() for store in (raw, out))
    block_stats(step, logits, head, transforms, StatsOutputs(*addresses, stride, 0, 0, 0, 0, 0))
    raw = logits if raw is None else raw
    return raw, raw if out is None else out


def shard_winners(step: SampleInputs, processed: Tensor, limit: Tensor, known: Tensor | None = None) -> Tensor:
    """Implements the function of ``backends``: one launch."""
    rows, first = step.rows(), step.shard.first_token
    skip = first % 128
    blocks = -(-(skip + step.vocab_size) // _BLOCK)
    batch = len(processed)
    keys = torch.full((batch * step.num_samples,), NO_FINITE, dtype=torch.int64, device=processed.device)
    winners_kernel[(batch * blocks,)](
        processed,
        processed.stride(0),
        step.vocab_size,
        limit,
        rows.temperature,
        rows.seed,
        rows.offset,
        known,
        keys,
        first - skip,
        skip,
        step.num_samples,
        int(step.params.stream),
        0 if known is None else known.shape[1],
        blocks,
        BLOCK=_BLOCK,
        CHUNK=cutoffs.CHUNK,
        CHUNKS=next_power_of_2(_BLOCK // cutoffs.CHUNK + 2),
        num_warps=_WARPS,
    )
    return keys
