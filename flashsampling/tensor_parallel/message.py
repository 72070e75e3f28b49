"""The messages of ``nccl`` and ``gloo``: the packed winners of a step after a header that says which step it is.

A message is int64 and always of one size, because gloo aborts if sizes differ, and NCCL does worse:

    step  batch  num_samples  temperatures  seeds  offsets  failed  sampling parameters (a word each)  drafts  winners

Filters, log-probabilities and drafts take several messages (``filtered_sampling``), each a step of its own to the
counter and the comparison; with ``gloo`` logits take the place of the winners. Each sampling parameter is hashed by
itself, 0 if it is its default. Of token counts and of the LM head's bias, of which a rank reads its shard, only their
presence is compared. Drafts to be rejected are hashed with all of their probabilities, except those that belong to no
draft. Drafts to be matched come hashed (``SampleInputs.draft_hash``).

A hash is the sum, modulo 2**64, of the values' 32-bit halves times fixed odd numbers, one for every half of every row.
Lists that differ in one half never have the same hash, because odd numbers are invertible; others have with a
probability of at most 2**-32. (With whole values times odd numbers, the top bit of one row would weigh as much as that
of any other.)
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..inputs import DraftChains, SampleInputs
from ..sampling_params import DEFAULT_PARAMS, RANK_LOCAL_FIELDS, SamplingParams, argument_names
from .failures import Failure

STEP, BATCH, NUM_SAMPLES, TEMPERATURE, SEED, OFFSET, FAILED, FIRST_PARAM = range(8)
DRAFTED = ("method", "draft_token_ids", "cu_draft_lengths", "draft_probs")  # arguments of ``verify``
_DRAFTED = FIRST_PARAM + len(SamplingParams._fields)
HEADER = -(-(_DRAFTED + len(DRAFTED)) // 2) * 2  # even: what follows is at 16 bytes
HASHED = {"seed": SEED, "offset": OFFSET, "temperature": TEMPERATURE}
_PARAM_WORDS = {name: FIRST_PARAM + i for i, name in enumerate((*SamplingParams._fields, *DRAFTED))}
_AGAIN = 0x1E3779B97F4A7C15  # odd
_COLUMNS = 1 << 13  # columns with a factor of their own: a mask of 262,144 tokens


def odd_factors(count: int) -> Tensor:
    """Returns (count,) odd int64, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device="cpu") | 1


@functools.lru_cache(maxsize=64)
def temperature_bits(temperature: float) -> int:
    """Returns the int64 that a tensor's float32 temperature gives, for a temperature of all rows."""
    number = torch.tensor([temperature], dtype=torch.float32, device="cpu") + 0.0  # -0.0 becomes 0.0
    return int(number.view(torch.int32))


class Hashes:
    """Hashes parameters of up to ``max_rows`` rows: tensors on their device, numbers on the host."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        factors, along = odd_factors(2 * max_rows), odd_factors(_COLUMNS)
        self.factors = factors.to(device)  # for the halves of rows
        self.along = along.to(device)  # for the columns of a row, or for fields
        self.of_fields: dict[int, int] = dict(enumerate(along[: HEADER - FIRST_PARAM].tolist(), FIRST_PARAM))
        self.of_draft_hash = self.of_fields[_PARAM_WORDS["draft_token_ids"]]
        self.columns, self.again = _COLUMNS, _AGAIN
        # sums over the first rows
        self._sums = [[0, *half.cumsum(0).tolist()] for half in (factors[::2], factors[1::2])]

    def write(
        self,
        header: Tensor,  # (>= HEADER,) int64
        step: SampleInputs,
    ) -> None:
        """Fills in a header except step and failed, on the device in order of the current stream. Without sampling
        parameters their words stay as they are: ``clear`` left them 0."""
        if step.params is not DEFAULT_PARAMS or step.drafted is not None or step.draft_hash is not None:
            self._write_params(header, step)
        batch = step.hidden_states.shape[0]
        header[BATCH].fill_(batch)  # one kernel, where an assignment is two
        header[NUM_SAMPLES].fill_(step.num_samples)
        for field, value in ((TEMPERATURE, step.temperature), (SEED, step.seed), (OFFSET, step.offset)):
            if isinstance(value, Tensor):
                torch.sum(self._terms(value), 0, out=header[field])
            else:
                header[field].fill_(_signed(self._of_number(value, batch), 64))

    def _write_params(self, header: Tensor, step: SampleInputs) -> None:
        header[FIRST_PARAM:HEADER].zero_()
        for field, word, value in self.params(step):
            if value is None:
                header[field].fill_(word)
            else:
                torch.add(self._of_tensor(value), word, out=header[field])
        if step.drafted is not None:
            self._write_drafted(header[_DRAFTED:], step.drafted, step.vocab_size)
        elif step.draft_hash is not None:
            header[_PARAM_WORDS["draft_token_ids"]].copy_(step.draft_hash)

    def params(self, step: SampleInputs) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yields for each sampling parameter its word of the header, the part of the hash that the host knows, and the
        tensor whose hash is added to it, or None."""
        for name in step.params.names():
            field, value = _PARAM_WORDS[name], getattr(step.params, name)
            if not isinstance(value, Tensor):
                yield field, _signed(self._of_number(value, step.hidden_states.shape[0]) + 1, 64), None
            elif name in RANK_LOCAL_FIELDS:
                yield field, 1, None
            else:
                if name == "token_mask":
                    value = _of_tokens(value, step.vocab_size)
                elif name == "dense_bias":
                    value = value[None, : step.vocab_size]
                columns = value.shape[1] if value.dim() == 2 else 0
                yield field, 1 + (columns << 20), value  # not 0, so that it counts as given

    def _write_drafted(self, fields: Tensor, drafted: DraftChains, vocab_size: int) -> None:
        ids, rows, places, probs = drafted
        fields[0].fill_(1)
        torch.add(self._of_tensor(ids), 1 + (ids.shape[1] << 20), out=fields[1])
        torch.add(self._of_tensor(rows[:, 0]), 1, out=fields[2])
        if probs is not None:
            bits = probs[:, :vocab_size].view(torch.int32 if probs.dtype is torch.float32 else torch.int16)
            of_drafts = torch.where(ids >= 0, self._of_columns(bits)[places], 0)
            torch.add(self._of_tensor(of_drafts), 1, out=fields[3])

    def _of_number(self, value: float, batch: int) -> int:
        """Returns the hash of a number in every row, not yet modulo 2**64."""
        if isinstance(value, float):
            return temperature_bits(value) * self._sums[0][batch]
        low, high = _signed(int(value), 32), _signed(int(value) >> 32, 32)
        return low * self._sums[0][batch] + high * self._sums[1][batch]

    def _of_tensor(self, value: Tensor) -> Tensor:
        """Returns () int64, the hash of a tensor (B,) or (B, n), float32, int32 or int64. Integers of all dtypes
        have equal hashes."""
        if value.dim() == 2:
            value = self._of_columns((value + 0.0).view(torch.int32) if value.is_floating_point() else value)
        return self._terms(value).sum()

    def _terms(self, value: Tensor) -> Tensor:
        """Returns int64 whose sum is the hash of a tensor (B,)."""
        if value.is_floating_point():
            return (value + 0.0).view(torch.int32) * self.factors[: 2 * len(value) : 2]  # -0.0 becomes 0.0
        return _halves(value.long()) * self.factors[: 2 * len(value)]  # low half, high half

    def _of_columns(self, value: Tensor) -> Tensor:
        """Returns (B,) int64, the hashes of rows of integers (B, n)."""
        first, *others = (
            (part * self.along[: part.shape[1]]).sum(dim=1) for part in value.split(len(self.along), dim=1)
        )
        for other in others:
            first = first * _AGAIN + other
        return first

    def of_request(self, step: SampleInputs) -> Tensor:
        """Returns () int64, one hash of all sampling parameters. ``kernels.triton.sharded.param_hash`` computes the
        same."""
        header = torch.zeros(HEADER, dtype=torch.int64, device=self.factors.device)
        self._write_params(header, step)
        return (header[FIRST_PARAM:] * self.along[: HEADER - FIRST_PARAM]).sum()

    @staticmethod
    def clear(header: Tensor) -> None:
        """Zeroes the words of sampling parameters after a step that had some."""
        header[FIRST_PARAM:HEADER].zero_()


def _halves(value: Tensor) -> Tensor:
    """Returns (2 * B,) int32 of int64 (B,). torch calls any stride of one element contiguous but does not view it as
    two."""
    if value.stride(0) != 1:
        value = value.clone(memory_format=torch.contiguous_format)
    return value.view(torch.int32)


def _of_tokens(mask: Tensor, vocab_size: int) -> Tensor:
    """Returns a token mask's words without the bits of the last one that belong to no token."""
    words = mask[:, : -(-vocab_size // 32)]
    if vocab_size % 32:
        words = torch.cat([words[:, :-1], words[:, -1:] & (1 << vocab_size % 32) - 1], dim=1)
    return words


def _signed(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def difference(headers: Sequence[Sequence[int]]) -> Failure | None:
    """Returns which rank's header differs from the others' and in what, or None if they agree. ``headers``: by rank.

    The majority is right; in a tie the lowest rank is. All ranks conclude the same.
    """
    counts = Counter(tuple(header) for header in headers)
    if len(counts) == 1:
        return None
    failed = [rank for rank, header in enumerate(headers) if header[FAILED]]
    if failed:  # it knows more than the others
        return Failure("aborted", failed[0], headers[failed[0]][STEP], what="the group has failed there")
    right = max(counts, key=lambda header: counts[header])  # the first one in a tie
    like = next(rank for rank, header in enumerate(headers) if tuple(header) == right)
    odd = next(rank for rank, header in enumerate(headers) if tuple(header) != right)
    header = headers[odd]
    differs = ["step"] if header[STEP] != right[STEP] else []
    if header[BATCH] != right[BATCH] or header[NUM_SAMPLES] != right[NUM_SAMPLES]:
        differs.append("batch size or num_samples")
    else:  # hashes of equally many rows compare
        differs += [name for name, field in HASHED.items() if header[field] != right[field]]
        params = [name for name, field in _PARAM_WORDS.items() if header[field] != right[field]]
        differs += filter(None, argument_names(params).split(", "))
    return Failure("mismatch", odd, right[STEP], tuple(differs), f"rank {like}")
