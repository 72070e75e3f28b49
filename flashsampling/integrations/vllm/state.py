"""vLLM's state per slot, as a batch's rows need it on the device: nothing here waits for the device."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...counts import IN_PROMPT
from ..engines import to_device

_BLOCK = 4096  # tokens of a program


class Rows(NamedTuple):
    """Parameters of a batch's rows, (B,) each, copied to the device together."""

    seed: Tensor  # int64
    temperature: Tensor  # float32, as the following
    top_k: Tensor  # int32
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor


def rows_of(sampler: Any, slots: NDArray[np.int32], device: torch.device) -> Rows:
    """What vLLM's sampler has for these slots. The host's copies are read: those on the device are made of them before every
    step, and would be gathered by a launch each, over PCIe."""
    states, penalties = sampler.sampling_states, sampler.penalties_state
    columns = (
        states.temperature,
        states.top_k,
        states.top_p,
        states.min_p,
        penalties.repetition_penalty,
        penalties.frequency_penalty,
        penalties.presence_penalty,
    )
    packed = _packed(slots, states.seeds.np, [column.np for column in columns])
    seed, there = _unpacked(packed, len(slots), device)
    temperature, _, *others = there.view(torch.float32).unbind(0)
    return Rows(seed, temperature, there[1], *others)


def _packed(slots: NDArray[np.int32], seeds: NDArray[np.int64], columns: list[NDArray[Any]]) -> NDArray[np.int32]:
    """(2 + columns, B up to a multiple of 4) int32: every column begins at 16 bytes, as kernels are compiled for. The first two
    hold the seeds."""
    batch = len(slots)
    packed = np.empty((2 + len(columns), -(-batch // 4) * 4), np.int32)
    packed[:2].reshape(-1)[: 2 * batch].view(np.int64)[:] = seeds[slots]
    for row, column in enumerate(columns, 2):
        packed[row, :batch] = column.view(np.int32)[slots]
    return packed


def _unpacked(packed: NDArray[np.int32], batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """On the device: seeds (B,), and the columns (n, B) int32."""
    there = to_device(packed, device)
    return there[:2].view(-1).view(torch.int64)[:batch], there[2:, :batch]


def counts_of(penalties: Any, slots: Tensor, rows: Rows, vocab_size: int, tokens: tuple[int, int] | None = None) -> Tensor:
    """(B, V) int32, as ``token_counts`` is: vLLM keeps counts of the output and bits of the prompt by slot.

    Args:
        penalties: vLLM's state of them.
        slots: (B,) int32, on the device.
        rows: their parameters. Of rows without a penalty, whose counts change nothing, what comes back may be anything.
        vocab_size: V.
        tokens: [first, last), a shard's: only these columns are written, since of several ranks each reads its own; the others
            hold anything. None: all columns.
    """
    first, last = tokens or (0, vocab_size)
    batch, count, device = len(slots), last - first, slots.device
    output_counts, prompt_mask = penalties.output_bin_counts, penalties.prompt_bin_mask
    stride = -(-vocab_size // 4) * 4
    counts = torch.empty((batch, stride), dtype=torch.int32, device=device)[:, :vocab_size]
    mine = counts[:, first:last]
    if device.type != "cuda":
        shifts = torch.arange(32, dtype=torch.int32)
        in_prompt = (prompt_mask[slots][:, :, None] >> shifts & 1).flatten(1)[:, first:last].bool()
        mine.copy_(output_counts[slots][:, first:last] | torch.where(in_prompt, IN_PROMPT, 0).to(torch.int32))
        return counts
    from .kernels import counts_kernel

    if count:
        counts_kernel[(batch, -(-count // _BLOCK))](
            output_counts,
            output_counts.stride(0),
            prompt_mask,
            prompt_mask.stride(0),
            slots,
            rows.repetition_penalty,
            rows.frequency_penalty,
            rows.presence_penalty,
            mine,
            stride,
            first,
            count,
            BLOCK=_BLOCK,
        )
    return counts
