"""The LM head of a model, checked against the model's own logits. Model classes are not known by name."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ...inputs import example
from ...reference.logit_transforms import raw
from ...sampling import check_weight
from ...sampling_params import SamplingParams
from .plugin import Refused

FAST = ("cute", "triton")  # backends that are faster than what engines do
PROBE_ROWS = 4  # rows that are compared


class Layers(NamedTuple):
    """An engine's classes. A subclass may do something else."""

    processor: type  # of logits
    embedding: type  # of a head
    unquantized: type  # its ``quant_method``


class Head(NamedTuple):
    """An LM head and its logit transform, as arguments of ``flashsampling.sample``."""

    layer: Any  # its weight is read in every step: the engine may load another one into it
    vocab_size: int
    transform: Mapping[str, Any]  # numbers of ``sample`` by name
    has_bias: bool = False
    first_token: int = 0  # of this rank's shard
    ranks: int = 1

    @property
    def weight(self) -> Tensor:
        """(V, D), this rank's rows, padded."""
        return self.layer.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        """(V,), padded."""
        return self.layer.bias if self.has_bias else None

    def arguments(self) -> dict[str, Any]:
        """Returns the head's arguments of every call."""
        return {**self.transform, "bias": self.bias} if self.has_bias else dict(self.transform)


def check_speed(head: Head, engine: str) -> str:
    """Returns the backend of the head's plain steps. Refuses a head that only a slow backend takes."""
    chosen = ops.choose(example(head.weight), "").name
    if chosen not in FAST:
        only = f"for this head and GPU there is only the implementation {chosen!r}"
        raise Refused(f"{only}, which is no faster than {engine}")
    return chosen


def check_layer(name: str, layer: Any, layers: Layers) -> None:
    """Refuses a layer that multiplies otherwise than by its weight."""
    kind, method = type(layer), type(getattr(layer, "quant_method", None))
    if not issubclass(kind, layers.embedding):
        raise Refused(f"{name}'s LM head is a {kind.__name__} (LoRA on the head is one)")
    if method is not layers.unquantized:
        raise Refused(f"{name}'s LM head is quantised, or multiplies in a way of its own ({method.__name__})")
    try:
        check_weight(layer.weight)
    except (TypeError, ValueError) as error:
        raise Refused(f"{name}'s LM head: {error}") from None


def probe_states(dim: int) -> Tensor:
    """Returns hidden states, the same on all ranks."""
    return torch.randn(PROBE_ROWS, dim, generator=torch.Generator().manual_seed(0))


def compare_logits(name: str, head: Head, hidden_states: Tensor, logits: Tensor, dtype: torch.dtype, last: int) -> None:
    """Refuses a model whose logits (R, V) of hidden states (R, D) are others than its head, bias and transform make,
    but for a few roundings of the largest in ``dtype``. ``last``: the token behind this rank's last one."""
    rows = len(hidden_states)
    if logits.shape != (rows, head.vocab_size):
        raise Refused(f"{name} has logits of shape {tuple(logits.shape)}, for {rows} rows and {head.vocab_size} tokens")
    shard = slice(head.first_token, max(last, head.first_token))
    count = shard.stop - shard.start
    bias = None if head.bias is None else head.bias[:count].float()
    ours = raw(F.linear(hidden_states, head.weight[:count]).float(), SamplingParams(bias=bias, **head.transform))
    bound = 8 * torch.finfo(dtype).eps * float(ours.nan_to_num().abs().amax()) if ours.numel() else 0.0
    if not torch.allclose(ours, logits[:, shard].float(), rtol=0, atol=bound, equal_nan=True):
        made = "its head, bias and transform make of its hidden states"
        raise Refused(f"{name}'s logits are something else than {made}")
