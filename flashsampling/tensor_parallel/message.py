"""The messages of ``nccl`` and ``gloo``: a header with step number and parameter hashes, then the packed winners.

A message is int64 and always has the same size: gloo aborts if sizes differ, and NCCL's behaviour is undefined.

    step  batch  num_samples  temperature  seed  offset  failed  sampling parameters (a word each)  drafts  winners
    (capacity)

A step with filters or log-probabilities takes several messages (``filtered_sampling``). Each has a step number of its
own and is compared; its words take the place of the winners. Sampling parameters are hashed one by one, 0 if not given.
Of token counts and of the head's bias, which differ between shards, only their presence is compared. Drafts for
rejection sampling are hashed with all their probabilities, but without entries that belong to no draft. Drafts to be
matched come hashed (``SampleInputs.draft_hash``).

A parameter hash is the sum, modulo 2**64, of the values' 32-bit halves times fixed odd numbers, one for every half of
every row. Lists that differ in one half never collide, because odd numbers are invertible; other lists collide with a
probability of at most 2**-32. (With a factor per whole value, the top bit of any two rows would weigh the same.)
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..inputs import ARGUMENTS, DEFAULT_PARAMS, DraftChains, SampleInputs, SamplingParams
from .cutoffs import FEW
from .failures import Failure

STEP, BATCH, NUM_SAMPLES, TEMPERATURE, SEED, OFFSET, FAILED, ASKED = range(8)
DRAFTED = ("method", "draft_token_ids", "cu_draft_lengths", "draft_probs")  # arguments of ``verify``
_DRAFTED = ASKED + len(SamplingParams._fields)
HEADER = -(-(_DRAFTED + len(DRAFTED)) // 2) * 2  # even: what follows is at 16 bytes
HASHED = {"seed": SEED, "offset": OFFSET, "temperature": TEMPERATURE}  # a step's parameters of rows
_ASKED = {name: ASKED + i for i, name in enumerate((*SamplingParams._fields, *DRAFTED))}
GIVEN = ("bias", "counts")  # of which it matters only that they are there
_AGAIN = 0x1E3779B97F4A7C15  # odd
_COLUMNS = 1 << 13  # of a row that are weighted each by itself: a mask's of 262,144 tokens


def odd_factors(count: int) -> Tensor:
    """Returns (count,) odd int64, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device="cpu") | 1


@functools.lru_cache(maxsize=64)
def bits_of(temperature: float) -> int:
    """Returns the float32 bits of a scalar temperature, as a tensor of temperatures gives them."""
    return int((torch.tensor([temperature], dtype=torch.float32, device="cpu") + 0.0).view(torch.int32))  # -0.0 is 0.0


class Hashes:
    """Computes parameter hashes: of tensors on their device, of numbers on the host.

    Args:
        max_rows: rows of the largest batch.
        device: device of the tensors.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        factors = odd_factors(2 * max_rows)
        along = odd_factors(_COLUMNS)
        # factors of the rows' halves; factors of a row's columns, or of fields
        self.factors, self.along = factors.to(device), along.to(device)
        self.of_fields: dict[int, int] = dict(enumerate(along[: HEADER - ASKED].tolist(), ASKED))
        self.of_draft_hash = self.of_fields[_ASKED["draft_token_ids"]]
        self.columns, self.again = _COLUMNS, _AGAIN
        self._sums = [[0, *half.cumsum(0).tolist()] for half in (factors[::2], factors[1::2])]  # of the first rows

    def write(
        self,
        header: Tensor,  # (>= HEADER,) int64
        step: SampleInputs,
    ) -> None:
        """Fills in all of a header but step and failed, by device work in order of the current stream.

        Leaves the words of sampling parameters alone if there are none: they are 0 before such a step (``clear``)."""
        if step.params is not DEFAULT_PARAMS or step.drafted is not None or step.draft_hash is not None:
            self._write_asked(header, step)
        batch, temperature = step.hidden_states.shape[0], step.temperature
        header[BATCH].fill_(batch)  # one kernel, where an assignment is two
        header[NUM_SAMPLES].fill_(step.num_samples)
        if isinstance(temperature, Tensor):
            torch.sum((temperature + 0.0).view(torch.int32) * self.factors[: 2 * batch : 2], 0, out=header[TEMPERATURE])
        else:
            header[TEMPERATURE].fill_(_signed(bits_of(temperature) * self._sums[0][batch], 64))
        for field, value in ((SEED, step.seed), (OFFSET, step.offset)):
            if isinstance(value, Tensor):  # low half, high half
                torch.sum(_halves(value) * self.factors[: 2 * batch], 0, out=header[field])
            else:
                low, high = _signed(value, 32), _signed(value >> 32, 32)
                header[field].fill_(_signed(low * self._sums[0][batch] + high * self._sums[1][batch], 64))

    def _write_asked(self, header: Tensor, step: SampleInputs) -> None:
        header[ASKED:HEADER].zero_()
        for field, word, value in self.params(step):
            if value is None:
                header[field].fill_(word)
            else:
                torch.add(self._of_tensor(value), word, out=header[field])
        if step.drafted is not None:
            self._write_drafted(header[_DRAFTED:], step.drafted, step.vocab_size)
        elif step.draft_hash is not None:
            header[_ASKED["draft_token_ids"]].copy_(step.draft_hash)

    def params(self, step: SampleInputs) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yields, per sampling parameter: its field of the header, the host's part of the word, the tensor to hash or
        None."""
        for name in step.params.names():
            field, value = _ASKED[name], getattr(step.params, name)
            if not isinstance(value, Tensor):
                hashed = self._of_number(value, step.hidden_states.shape[0])
                if name == "top_k" and value <= FEW:  # other rounds than of a tensor of that number
                    hashed ^= 1 << 62
                yield field, hashed, None
            elif name in GIVEN:
                yield field, 1, None
            else:
                if name == "token_mask":
                    value = _of_tokens(value, step.vocab_size)
                elif name == "dense_bias":
                    value = value[None, : step.vocab_size]
                columns = value.shape[1] if value.dim() == 2 else 0
                yield field, 1 + (columns << 20), value  # not 0: it is given

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
        """Hashes a scalar like a tensor with that value in every row."""
        low, high = bits_of(value) if isinstance(value, float) else _signed(int(value), 32), 0
        if not isinstance(value, float):
            high = _signed(int(value) >> 32, 32)
        return _signed(low * self._sums[0][batch] + high * self._sums[1][batch] + 1, 64)

    def _of_tensor(self, value: Tensor) -> Tensor:
        """Hashes float32, int32 or int64, (B,) or (B, n), to () int64. Integers of equal value hash equally."""
        is_real = value.is_floating_point()
        if is_real:
            value = (value + 0.0).view(torch.int32)  # -0.0 is 0.0
        if value.dim() == 2:
            value = self._of_columns(value)
        elif is_real:
            return (value * self.factors[: 2 * len(value) : 2]).sum()
        return (_halves(value.long()) * self.factors[: 2 * len(value)]).sum()

    def _of_columns(self, value: Tensor) -> Tensor:
        """Hashes the columns of integers (B, n) to (B,) int64."""
        first, *others = (
            (part * self.along[: part.shape[1]]).sum(dim=1) for part in value.split(len(self.along), dim=1)
        )
        for other in others:
            first = first * _AGAIN + other
        return first

    def of_request(self, step: SampleInputs) -> Tensor:
        """Returns the hash of all sampling parameters, () int64.

        ``kernels.triton.sharded.param_hash`` computes it by kernels."""
        header = torch.zeros(HEADER, dtype=torch.int64, device=self.factors.device)
        self._write_asked(header, step)
        return (header[ASKED:] * self.along[: HEADER - ASKED]).sum()

    @staticmethod
    def clear(header: Tensor) -> None:
        """Clears the words of sampling parameters, after a step that had some."""
        header[ASKED:HEADER].zero_()


def _halves(value: Tensor) -> Tensor:
    """Views int64 (B,) as (2 * B,) int32. torch calls one element of any stride contiguous, but does not view it as
    two."""
    if value.stride(0) != 1:
        value = value.clone(memory_format=torch.contiguous_format)
    return value.view(torch.int32)


def _of_tokens(mask: Tensor, vocab_size: int) -> Tensor:
    """Returns a token mask's words without bits that belong to no token."""
    words = mask[:, : -(-vocab_size // 32)]
    if vocab_size % 32:
        words = torch.cat([words[:, :-1], words[:, -1:] & (1 << vocab_size % 32) - 1], dim=1)
    return words


def _signed(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def difference(headers: Sequence[Sequence[int]]) -> Failure | None:
    """Compares the ranks' headers. Returns the mismatch, or None. All ranks conclude the same.

    The header of most ranks is right; a tie goes to the lowest rank's.
    """
    counts = Counter(tuple(header) for header in headers)
    if len(counts) == 1:
        return None
    failed = [rank for rank, header in enumerate(headers) if header[FAILED]]
    if failed:  # that rank knows of a failure, and its peers learn of it
        return Failure("aborted", failed[0], headers[failed[0]][STEP], what="the group has failed there")
    right = max(counts, key=lambda header: counts[header])  # the first one among equals
    like = next(rank for rank, header in enumerate(headers) if tuple(header) == right)
    odd = next(rank for rank, header in enumerate(headers) if tuple(header) != right)
    header = headers[odd]
    differs = ["step"] if header[STEP] != right[STEP] else []
    if header[BATCH] != right[BATCH] or header[NUM_SAMPLES] != right[NUM_SAMPLES]:
        differs.append("batch size or num_samples")
    else:  # hashes of equally many rows
        differs += [name for name, field in HASHED.items() if header[field] != right[field]]
        params = [name for name, field in _ASKED.items() if header[field] != right[field]]
        differs += dict.fromkeys(ARGUMENTS.get(name, name) for name in params)
    return Failure("mismatch", odd, right[STEP], tuple(differs), f"rank {like}")
