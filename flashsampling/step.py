"""A step as a value: what one call asks for, and what comes back.

``api`` builds it, once, from checked arguments; ``ops`` takes it apart for torch's dispatcher and puts it together again; an
implementation (``backends``) reads what it needs. A new parameter is a field here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .exchange import WHOLE, Shard
from .noise import Stream


class Rows(NamedTuple):
    """A value for every row."""

    temperature: Tensor  # (B,) float32
    seed: Tensor  # (B,) int64
    offset: Tensor  # (B,) int64


class Asked(NamedTuple):
    """What a step may be asked for beside one plain draw. A backend does of it what its ``DOES`` names; else it refuses."""

    stream: Stream = Stream.TOKEN  # of the noise

    def names(self) -> list[str]:
        """Fields that are not as they are where nothing is asked for."""
        fields = zip(self._fields, self, PLAIN)
        return [name for name, value, plain in fields if value is not plain and (isinstance(value, Tensor) or value != plain)]


PLAIN = Asked()  # this very object, where nothing is asked for: a call looks no further


class Step(NamedTuple):
    """One sampling step of a whole LM head, or of a shard. Arguments are checked: shapes, dtypes, ranges, devices."""

    hidden_states: Tensor  # (B, D)
    weight: Tensor  # (V, D), same dtype and device
    temperature: Tensor | float  # (B,) float32, or one number for all rows
    seed: Tensor | int  # (B,) int64, or one number
    offset: Tensor | int  # (B,) int64, or one number
    num_samples: int  # draws per row
    vocab_size: int  # only that many of the weight's rows are tokens; 0 of an empty shard
    shard: Shard = WHOLE  # of which the weight is a part, and what becomes of its winners
    asked: Asked = PLAIN

    def rows(self) -> Rows:
        """Its rows' parameters as tensors, numbers too."""
        batch, device = self.hidden_states.shape[0], self.hidden_states.device

        def column(value: Tensor | float, dtype: torch.dtype) -> Tensor:
            return value if isinstance(value, Tensor) else torch.full((batch,), value, dtype=dtype, device=device)

        return Rows(column(self.temperature, torch.float32), column(self.seed, torch.int64), column(self.offset, torch.int64))

    def row_arguments(self) -> tuple[int, float, int, int, int, int]:
        """Its rows' parameters as kernels take them: of each the address and 0, or 0 and the number for all rows."""
        temperature, seed, offset = self.temperature, self.seed, self.offset
        temperature_at, temperature = (temperature.data_ptr(), 0.0) if isinstance(temperature, Tensor) else (0, temperature)
        seed_at, seed = (seed.data_ptr(), 0) if isinstance(seed, Tensor) else (0, seed)
        offset_at, offset = (offset.data_ptr(), 0) if isinstance(offset, Tensor) else (0, offset)
        return temperature_at, temperature, seed_at, seed, offset_at, offset


class Drawn(NamedTuple):
    """What a step gives."""

    ids: Tensor  # (B * num_samples,) int64, row by row: token ids, or what ``Step.shard`` says
    values: Tensor | None = None  # float32: what else was asked for; nothing asks yet


def example(weight: Tensor) -> Step:
    """A step of one row for a weight, to ask what an implementation takes. Its values are nobody's."""
    return Step(weight.new_empty((1, weight.shape[1])), weight, 1.0, 0, 0, 1, weight.shape[0])
