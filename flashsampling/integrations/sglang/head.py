"""What an SGLang model makes of its hidden states: one ``LogitsProcessor``, its scale and soft cap, and an unquantised head.

Model classes are not known by name. Here the processor is held against its own logits; ``runner`` then sees, in the first
forward of each kind, whether the model gives it that head, and returns what it returns.
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...sampling import check_weight
from ..engine.common import Layers, fast_implementation
from ..engine.plugin import Refused

_SEEN = 4  # rows that are compared


class Head(NamedTuple):
    """An LM head, and what is done to its logits, as ``flashsampling.sample`` takes it."""

    processor: Any
    layer: Any  # its weight is asked for in every step: SGLang may load another one into it
    vocab_size: int
    transform: Mapping[str, float]

    @property
    def weight(self) -> Tensor:
        """(V, D), padded."""
        return self.layer.weight  # type: ignore[no-any-return]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(B, V) float32, SGLang's own, in memory of their own."""
        metadata = SimpleNamespace(next_token_logits_buffer=None)  # all that is read of a LogitsMetadata, on one rank
        return self.processor._get_logits(hidden_states, self.layer, metadata)  # type: ignore[no-any-return]


@torch.inference_mode()
def head_of(model: Any, layers: Layers) -> Head:
    """The head of a model that is loaded.

    Raises:
        Refused: its logits are something else than a head's, a scale's and a soft cap's, or that is not seen.
    """
    name = type(model).__name__
    processors = [part for part in model.modules() if isinstance(part, layers.processor)]
    if len(processors) != 1 or type(processors[0]) is not layers.processor:
        kinds = ", ".join(type(part).__name__ for part in processors) or "none"
        raise Refused(f"{name} must have one logits processor, SGLang's own, and has {kinds}")
    layer: Any = getattr(model, "lm_head", None)
    processor: Any = processors[0]
    if layer is None:
        raise Refused(f"{name} has no lm_head of its own")
    _check(name, layer, processor, layers)
    head = Head(processor, layer, processor.vocab_size, _transform(name, processor))
    _compare(name, head)
    return head


def check_speed(head: Head) -> str:
    """The implementation that takes the head's plain steps; Refused: only a slow one does."""
    try:
        return fast_implementation(head.weight, "SGLang")
    except ValueError as error:
        raise Refused(str(error)) from None


def _check(name: str, layer: Any, processor: Any, layers: Layers) -> None:
    kind, method = type(layer), type(getattr(layer, "quant_method", None))
    if not issubclass(kind, layers.embedding):
        raise Refused(f"{name}'s LM head is a {kind.__name__} (LoRA on the head is one)")
    if method is not layers.unquantized:
        raise Refused(f"{name}'s LM head is quantised, or multiplies in a way of its own ({method.__name__})")
    if layer.num_added_embeddings or layer.tp_size != 1 or processor.do_tensor_parallel_all_gather:
        raise Refused(f"{name}'s LM head has an added vocabulary, or is a part of one")
    if processor.return_full_logits:
        raise Refused(f"{name} returns logits of all positions")
    try:
        check_weight(layer.weight)
    except (TypeError, ValueError) as error:
        raise Refused(f"{name}'s LM head: {error}") from None
    if not 1 <= processor.vocab_size <= len(layer.weight):
        raise Refused(f"{name} has a vocabulary of {processor.vocab_size} tokens, its LM head {len(layer.weight)} rows")


def _transform(name: str, processor: Any) -> dict[str, float]:
    """SGLang's ``cap * tanh(scale * logit / cap)``, as ``sample`` has it too."""
    scale, cap = processor.logit_scale, processor.final_logit_softcapping
    made: dict[str, float] = {}
    if scale is not None and scale != 1.0:
        made["logit_scale"] = float(scale)
    if cap:  # SGLang: None and 0 are none
        made["soft_cap"] = float(cap)
    if not all(math.isfinite(value) for value in made.values()) or made.get("soft_cap", 1.0) <= 0:
        raise Refused(f"{name} scales its logits by {scale} and caps them at {cap}")
    return made


def _compare(name: str, head: Head) -> None:
    """Refuses a processor whose logits are others. A few roundings of the largest, in the weight's dtype, in which SGLang
    computes them."""
    weight = head.weight
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(_SEEN, weight.shape[1], generator=generator).to(weight)
    logits = head.logits(hidden_states.clone())
    if logits.shape != (_SEEN, head.vocab_size):
        raise Refused(
            f"{name} has logits of shape {tuple(logits.shape)}, for {_SEEN} rows and {head.vocab_size} tokens"
        )
    logits_gemm = F.linear(hidden_states, weight[: head.vocab_size]).float() * head.transform.get("logit_scale", 1.0)
    bound = 8 * torch.finfo(weight.dtype).eps * float(logits_gemm.nan_to_num().abs().amax())
    cap = head.transform.get("soft_cap", 0.0)
    if cap:
        logits_gemm = cap * torch.tanh(logits_gemm / cap)
    if not torch.allclose(logits_gemm, logits.float(), rtol=0, atol=bound, equal_nan=True):
        raise Refused(f"{name}'s logits are something else than its head, scale and soft cap make of its hidden states")
