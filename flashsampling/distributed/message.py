"""What ``nccl`` and ``gloo`` send: the packed winners of a step behind a header that says which step it is.

A message is int64 and always of the same size, since gloo aborts where sizes differ:

    step  batch  num_samples  temperatures  seeds  offsets  failed  winners: (capacity,)

Parameters of rows are hashed, each by itself, so that what differs has a name: the sum, modulo 2**64, of the values' 32-bit
halves times fixed odd numbers, one for every half of every row. Lists that differ in one half never have the same hash, since
odd numbers are invertible; others have with a probability of 2**-32 at most. (Whole values times odd numbers: the top bit of
one row would weigh as much as that of any other.)
"""

import functools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..step import Step
from .failure import Failure

STEP, BATCH, NUM_SAMPLES, TEMPERATURE, SEED, OFFSET, FAILED, HEADER = range(8)
HASHED = {"seed": SEED, "offset": OFFSET, "temperature": TEMPERATURE}  # a step's parameters of rows


def odd_factors(count: int) -> Tensor:
    """(count,) int64, odd: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) | 1


@functools.lru_cache(maxsize=64)
def bits_of(temperature: float) -> int:
    """A temperature for all rows, as the int64 that a tensor's float32 gives."""
    return int((torch.tensor([temperature], dtype=torch.float32) + 0.0).view(torch.int32))  # -0.0 is 0.0


class Hashes:
    """Hashes of rows' parameters, of tensors on their device and of numbers on the host.

    Args:
        max_rows: of the largest batch.
        device: of tensors.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        factors = odd_factors(2 * max_rows)
        self._factors = factors.to(device)
        self._sums = [[0, *half.cumsum(0).tolist()] for half in (factors[::2], factors[1::2])]  # of the first rows

    def write(
        self,
        header: Tensor,  # (>= HEADER,) int64
        step: Step,
    ) -> None:
        """Fills in all of a header but step and failed. The device's work alone, in order of the current stream."""
        batch, temperature = step.hidden_states.shape[0], step.temperature
        header[BATCH].fill_(batch)  # one kernel, where an assignment is two
        header[NUM_SAMPLES].fill_(step.num_samples)
        if isinstance(temperature, Tensor):
            torch.sum((temperature + 0.0).view(torch.int32) * self._factors[: 2 * batch : 2], 0, out=header[TEMPERATURE])
        else:
            header[TEMPERATURE].fill_(_signed(bits_of(temperature) * self._sums[0][batch], 64))
        for field, value in ((SEED, step.seed), (OFFSET, step.offset)):
            if isinstance(value, Tensor):  # low half, high half
                torch.sum(value.contiguous().view(torch.int32) * self._factors[: 2 * batch], 0, out=header[field])
            else:
                low, high = _signed(value, 32), _signed(value >> 32, 32)
                header[field].fill_(_signed(low * self._sums[0][batch] + high * self._sums[1][batch], 64))


def _signed(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def difference(headers: Sequence[Sequence[int]]) -> Failure | None:
    """Which rank's header is not like the others', and in what; None if they agree. By rank; all ranks conclude the same.

    Right is what most ranks say; of as many, what the lowest rank says.
    """
    counts = Counter(tuple(header) for header in headers)
    if len(counts) == 1:
        return None
    failed = [rank for rank, header in enumerate(headers) if header[FAILED]]
    if failed:  # it knows more than the others, who hear of it
        return Failure("left", failed[0], headers[failed[0]][STEP], what="the group has failed there")
    right = max(counts, key=lambda header: counts[header])  # the first of as many
    like = next(rank for rank, header in enumerate(headers) if tuple(header) == right)
    odd = next(rank for rank, header in enumerate(headers) if tuple(header) != right)
    header = headers[odd]
    differs = ["step"] if header[STEP] != right[STEP] else []
    if header[BATCH] != right[BATCH] or header[NUM_SAMPLES] != right[NUM_SAMPLES]:
        differs.append("batch size or num_samples")
    else:  # hashes of as many rows
        differs += [name for name, field in HASHED.items() if header[field] != right[field]]
    return Failure("differs", odd, right[STEP], tuple(differs), f"rank {like}")
