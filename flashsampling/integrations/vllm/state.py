"""vLLM's state per slot, as a batch's rows need it on the device: nothing here waits for the device."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...counts import IN_PROMPT

_BLOCK = 4096  # tokens of a program
_SETTLED = 256  # rows of a program


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy, which the host may forget: pinned memory is used again when the device has read it."""
    if device.type != "cuda":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


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


def plain_rows_of(sampler: Any, slots: NDArray[np.int32], device: torch.device) -> tuple[Tensor, Tensor]:
    """Seeds and temperatures alone: (B,) int64 and (B,) float32."""
    states = sampler.sampling_states
    seed, there = _unpacked(_packed(slots, states.seeds.np, [states.temperature.np]), len(slots), device)
    return seed, there.view(torch.float32)[0]


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


def counts_of(penalties: Any, slots: Tensor, rows: Rows, vocab_size: int) -> Tensor:
    """(B, V) int32, as ``token_counts`` is: vLLM keeps counts of the output and bits of the prompt by slot. Of rows without a
    penalty, whose counts change nothing, it may hold anything."""
    batch, output_counts, prompt_mask = len(slots), penalties.output_bin_counts, penalties.prompt_bin_mask
    stride = -(-vocab_size // 4) * 4
    if output_counts.device.type != "cuda":
        shifts = torch.arange(32, dtype=torch.int32)
        in_prompt = (prompt_mask[slots][:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size].bool()
        return output_counts[slots][:, :vocab_size] | torch.where(in_prompt, IN_PROMPT, 0).to(torch.int32)
    from .kernels import counts_kernel

    out = torch.empty((batch, stride), dtype=torch.int32, device=output_counts.device)
    counts_kernel[(batch, -(-vocab_size // _BLOCK))](
        output_counts,
        output_counts.stride(0),
        prompt_mask,
        prompt_mask.stride(0),
        slots,
        rows.repetition_penalty,
        rows.frequency_penalty,
        rows.presence_penalty,
        out,
        stride,
        vocab_size,
        BLOCK=_BLOCK,
    )
    return out[:, :vocab_size]


def settle(token_ids: Tensor, undefined: Tensor) -> None:
    """Makes 0 of -1, in place, and counts how many there were: vLLM looks tokens up, and an id of -1 would end the process for
    all requests."""
    if token_ids.device.type != "cuda":
        lost = token_ids < 0
        undefined += lost.sum()
        token_ids.masked_fill_(lost, 0)
        return
    from .kernels import settle_kernel

    batch = len(token_ids)
    settle_kernel[(-(-batch // _SETTLED),)](token_ids, undefined, batch, BLOCK=_SETTLED)
