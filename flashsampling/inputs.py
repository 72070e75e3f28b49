"""The inputs of a sampling step as one value, which ``ops`` passes to a backend."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .exchange_protocol import WHOLE, Shard
from .sampling_params import DEFAULT_PARAMS, SamplingParams

_MAX_FILTERED_VOCAB = 2**20


class RowParams(NamedTuple):
    """A temperature, a seed and an offset for every row."""

    temperature: Tensor  # (B,) float32
    seed: Tensor  # (B,) int64
    offset: Tensor  # (B,) int64


class DraftChains(NamedTuple):
    """Draft chains of B requests, at positions that are the R rows of a step. No index is out of range."""

    token_ids: Tensor  # (B, n) int64; -1: no draft here, nor after it
    rows: Tensor  # (B, n + 1) int64: the row of the position before each draft, and of the one after the last
    places: Tensor  # (B, n) int64: each draft's row of ``probs``
    probs: Tensor | None  # (N, V or more) float: the distributions they were drawn from; None: each was certain


class SampleInputs(NamedTuple):
    """One sampling step of a whole LM head, or of a shard. Shapes, dtypes, ranges and devices are checked."""

    hidden_states: Tensor  # (B, D)
    weight: Tensor  # (V, D), same dtype and device
    temperature: Tensor | float  # (B,) float32, or one number for all rows
    seed: Tensor | int  # (B,) int64, or one number
    offset: Tensor | int  # (B,) int64, or one number
    num_samples: int  # draws per row
    vocab_size: int  # the first rows of the weight that are tokens; 0 of an empty shard
    shard: Shard = WHOLE  # which part of the vocabulary the weight is, and where its winners go
    params: SamplingParams = DEFAULT_PARAMS
    # (B, V), any float dtype: there is no LM head, and hidden_states and weight are this tensor too
    logits: Tensor | None = None
    # Under tensor parallelism:
    drafted: DraftChains | None = None  # draws by rejection of these drafts
    draft_hash: Tensor | None = None  # () int64, compared across ranks; a mismatch voids the step

    def rows(self) -> RowParams:
        """Returns temperature, seed and offset as tensors, a number repeated for every row."""
        batch, device = self.hidden_states.shape[0], self.hidden_states.device

        def column(value: Tensor | float, dtype: torch.dtype) -> Tensor:
            return value if isinstance(value, Tensor) else torch.full((batch,), value, dtype=dtype, device=device)

        return RowParams(
            column(self.temperature, torch.float32), column(self.seed, torch.int64), column(self.offset, torch.int64)
        )

    def too_wide_to_filter(self) -> str | None:
        """Returns why the filtered kernels, whose sums are of so many tokens at most, do not take these inputs, or
        None."""
        if self.vocab_size > _MAX_FILTERED_VOCAB and (self.params.may_filter() or self.params.needs_raw_mass()):
            wanted = f"of which it takes up to {_MAX_FILTERED_VOCAB}"
            return f"{self.vocab_size} tokens with filters or log-probabilities, {wanted}"
        return None

    def row_arguments(self) -> tuple[int, float, int, int, int, int]:
        """Returns temperature, seed and offset as kernels take them: an address and 0, or 0 and the number for all
        rows."""
        temperature_at, temperature = row_argument(self.temperature)
        seed_at, seed = row_argument(self.seed)
        offset_at, offset = row_argument(self.offset)
        return temperature_at, float(temperature), seed_at, int(seed), offset_at, int(offset)

    def part(self, first: int, last: int) -> "SampleInputs":
        """Returns the inputs of the rows [first, last)."""
        names = ("hidden_states", "logits", "temperature", "seed", "offset")
        rows: dict[str, Any] = {name: x[first:last] for name in names if isinstance(x := getattr(self, name), Tensor)}
        return self._replace(**rows, params=self.params.rows(first, last))


def row_argument(value: Tensor | float) -> tuple[int, float]:
    """Returns a scalar or per-row parameter as kernels take it: an address and 0, or 0 and the number for all rows."""
    return (value.data_ptr(), 0) if isinstance(value, Tensor) else (0, value)


def example(weight: Tensor) -> SampleInputs:
    """Returns inputs of one row for a weight, to ask a backend what it supports. The hidden states are
    uninitialised."""
    return SampleInputs(weight.new_empty((1, weight.shape[1])), weight, 1.0, 0, 0, 1, weight.shape[0])
