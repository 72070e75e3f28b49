"""vLLM's state per slot, as a batch's rows need it on the device: nothing here waits for the device."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...token_counts import IN_PROMPT, Counted, num_token_groups
from ..engine.common import to_device

_BLOCK = 4096  # tokens of a program
PARAMETERS = 9  # rows of 32 bits: seeds have two


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


def rows_of(sampler: Any, slots: NDArray[np.int32], device: torch.device, room: Tensor | None = None) -> Rows:
    """What vLLM's sampler has for these slots. The host's copies are read: those on the device are made of them before every
    step, and would be gathered by a launch each, over PCIe. ``room``: (PARAMETERS, n up to a multiple of 4) int32 on the
    device, to be written to; rows beyond these slots' have the last one's parameters."""
    states, penalties = sampler.sampling_states, sampler.penalties_state
    columns = [
        states.temperature.np,
        states.top_k.np,
        states.top_p.np,
        states.min_p.np,
        penalties.repetition_penalty.np,
        penalties.frequency_penalty.np,
        penalties.presence_penalty.np,
    ]
    batch = len(slots)
    # every column begins at 16 bytes, as kernels are compiled for
    width = -(-batch // 4) * 4 if room is None else room.shape[1]
    filled = np.empty(width, np.int32)
    filled[:batch], filled[batch:] = slots, slots[-1]
    packed = np.empty((PARAMETERS, width), np.int32)
    packed[:2].reshape(-1).view(np.int64)[:] = states.seeds.np[filled]
    for row, column in enumerate(columns, 2):
        packed[row] = column.view(np.int32)[filled]
    return rows_in(to_device(packed, device, room), batch)


def rows_in(there: Tensor, batch: int) -> Rows:
    """The first of what ``rows_of`` has put there: (2 + columns, n) int32, of which the first two hold the seeds."""
    seed, columns = there[:2].view(-1).view(torch.int64)[:batch], there[2:, :batch]
    temperature, _, *others = columns.view(torch.float32).unbind(0)
    return Rows(seed, temperature, columns[1], *others)


def counts_of(
    penalties: Any, slots: Tensor, rows: Rows, vocab_size: int, tokens: tuple[int, int] | None = None
) -> Counted:
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
        return Counted(counts, None)
    from .kernels import counts_kernel

    seen = torch.empty((batch, num_token_groups(vocab_size)), dtype=torch.uint8, device=device)
    if count:
        counts_kernel[(batch, -(-(count + first % 16) // _BLOCK))](
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
            seen,
            seen.stride(0),
            first,
            first % 16,
            count,
            BLOCK=_BLOCK,
        )
    return Counted(counts, seen)
