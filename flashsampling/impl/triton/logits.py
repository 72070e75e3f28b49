"""Tokens from logits that are in memory, with everything that a request may ask for, in two launches and without sorting.

    scan   reads every logit once: per chunk of 64 tokens the highest processed logit and its mass, per block of a row without
           filters the best score (``logits_scan``)
    pick   a program per row: reads again the chunks that can hold a kept token, from the level-2 cache for the most part
           (``logits_pick``, ``logits_search``); of a row of equal logits, as the zeros of a padded batch, less than a block;
           of another one that is too flat for candidates, the row itself, several times (``logits_row``)

What a row's chunks are depends on the vocabulary's size alone, and all sums run in a fixed order, so a row's result is the same
bits in any batch. Extra memory per row: 8 bytes per chunk, 16 where raw log-probabilities are asked for, and the candidates.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...exchange import WHOLE
from ...step import Asked, Drawn, Step, layout
from ..device import capability
from .logits_pick import pick_kernel
from .logits_scan import scan_kernel


@dataclass(frozen=True)
class Config:
    """Shapes of both launches. Sums are rounded as the first two say, so they must not depend on anything but V."""

    columns: int = 512  # Philox groups side by side: 8 of them are a chunk
    reps: int = 2  # rows of columns in a block
    scan_warps: int = 4
    scan_registers: int = 128  # per thread
    pick_warps: int = 8
    pick_registers: int = 128
    capacity: int = 8192  # candidates per row
    tile: int = 512  # of them at a time
    whole_tile: int = 2048  # of the row's tokens in a draw, twice as many as in a search
    gathered: int = 32  # of chunks

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return 4 * self.columns * self.reps


CONFIG = Config()


def unsupported(step: Step) -> str | None:
    """Why it cannot do a step, or None."""
    logits = step.logits
    if logits is None:
        return "it takes logits, not hidden states and a weight"
    if step.shard != WHOLE:
        return "a shard of a vocabulary: it knows whole ones"
    if logits.device.type == "cpu":
        return None if triton.knobs.runtime.interpret else "tensors on the CPU (TRITON_INTERPRET=1 is for tests)"
    if logits.device.type != "cuda" or torch.version.cuda is None:
        return f"tensors on {logits.device.type}, it runs on NVIDIA GPUs"
    if capability(logits.device) < (8, 0):
        return f"compute capability {capability(logits.device)}, it needs (8, 0)"
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"logits of {logits.dtype}"
    return None


def _row_argument(value: Tensor | float) -> tuple[int, float]:
    """An address and 0, or 0 and the number for all rows."""
    return (value.data_ptr(), 0) if isinstance(value, Tensor) else (0, value)


def _may_filter(asked: Asked) -> bool:
    """Whether any row may have a filter."""
    on = (asked.top_k, lambda k: k > 0), (asked.top_p, lambda p: not p >= 1), (asked.min_p, lambda p: not p <= 0)
    return any(isinstance(value, Tensor) or is_on(value) for value, is_on in on)


def _contiguous_rows(matrix: Tensor | None) -> Tensor | None:
    return matrix if matrix is None or matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()


def run(step: Step, config: Config = CONFIG) -> Drawn:
    """See ``backends``: two launches."""
    asked, num_samples, vocab_size = step.asked, step.num_samples, step.vocab_size
    logits = _contiguous_rows(step.logits)
    assert logits is not None
    batch, device = logits.shape[0], logits.device
    blocks = -(-vocab_size // config.block)
    chunks = blocks * (config.columns // 8)
    filters = _may_filter(asked)
    wants_raw = asked.logprobs or asked.top_logprobs > 0 or asked.logprob_ids is not None or asked.logsumexp
    places = layout(batch, num_samples, asked)
    ids = torch.empty(places.num_ids, dtype=torch.int64, device=device)
    values = torch.empty(places.num_values, dtype=torch.float32, device=device)
    # one allocation: what the second kernel is told by the first, and its candidates
    summaries = filters or asked.logprobs
    list_length = triton.next_power_of_2(chunks)
    sizes = [
        2 * batch * num_samples * blocks,
        batch * blocks,
        batch * chunks if summaries else 0,
        batch * chunks if summaries else 0,
        batch * chunks if wants_raw else 0,
        batch * chunks if wants_raw else 0,
        batch * (2 * config.capacity + list_length) if filters or wants_raw else 0,
    ]
    sizes = [-(-size // 4) * 4 for size in sizes]  # all of them at 16 bytes, in any batch: Triton compiles for it
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    winners, marks, keys, sums, raw_keys, raw_sums, candidates = parts

    top_k = asked.top_k
    wide = not isinstance(top_k, Tensor) or top_k.dtype == torch.int64
    given = asked.logprob_ids
    bias_count = 0 if asked.bias_ids is None else asked.bias_ids.shape[1]
    counts, token_mask = _contiguous_rows(asked.counts), _contiguous_rows(asked.token_mask)
    bias_ids, bias_values = (_contiguous_rows(part) if bias_count else None for part in (asked.bias_ids, asked.bias_values))
    given = _contiguous_rows(given)
    common = (
        logits,
        logits.stride(0),
        vocab_size,
        asked.bias,
        asked.logit_scale,
        asked.soft_cap,
        asked.dense_bias,
        bias_ids,
        bias_values,
        bias_count,
        0 if bias_ids is None else bias_ids.stride(0),
        0 if bias_values is None else bias_values.stride(0),
        counts,
        0 if counts is None else counts.stride(0),
        token_mask,
        0 if token_mask is None else token_mask.stride(0),
        *step.row_arguments(),
        *_row_argument(top_k),
        *_row_argument(asked.top_p),
        *_row_argument(asked.min_p),
        *_row_argument(asked.repetition_penalty),
        *_row_argument(asked.frequency_penalty),
        *_row_argument(asked.presence_penalty),
        keys,
        sums.view(torch.float32),
        raw_keys if wants_raw else None,
        raw_sums.view(torch.float32) if wants_raw else None,
        winners.view(torch.int64),
        marks,
        num_samples,
        int(asked.stream),
        blocks,
    )
    flags = {
        "COLUMNS": config.columns,
        "REPS": config.reps,
        "ENTRIES": triton.next_power_of_2(max(bias_count, 1)),
        "HEAD": asked.logit_scale != 1.0 or asked.soft_cap != 0.0,
        "FILTERS": filters,
        "LOGPROBS": asked.logprobs,
        "TOP_K_WIDE": wide,
    }
    scan_kernel[(batch * blocks,)](*common, 0, **flags, num_warps=config.scan_warps, maxnreg=config.scan_registers)

    def part(tensor: Tensor, name: str) -> Tensor | None:
        where = (places.ids if tensor is ids else places.values).get(name)
        return None if where is None else tensor[where.first :]

    pick_kernel[(batch,)](
        *common,
        candidates,
        ids,
        part(values, "logprobs"),
        part(values, "processed_logprobs"),
        part(ids, "ranks"),
        part(ids, "top_token_ids"),
        part(values, "top_logprobs"),
        asked.top_logprobs,
        given,
        0 if given is None else given.stride(0),
        part(values, "given_logprobs"),
        0 if given is None else given.shape[1],
        part(values, "logsumexp"),
        **flags,
        BLOCKS=triton.next_power_of_2(blocks),
        CHUNKS=list_length,
        ID_BITS=vocab_size.bit_length(),
        CAPACITY=config.capacity,
        TILE=config.tile,
        WHOLE_TILE=config.whole_tile,
        GATHERED=config.gathered,
        num_warps=config.pick_warps,
        maxnreg=config.pick_registers,
    )
    return Drawn(ids, values if places.num_values else None)
