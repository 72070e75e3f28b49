"""Finds the LM head of an SGLang model: one ``LogitsProcessor``, its scale and soft cap, and an unquantised head.

The processor is compared with its own logits here. In the first forward of each kind ``runner`` then sees whether the
model gives it that head, and returns what it returns.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..engine.head import Head, Layers, check_layer, compare_logits, probe_states
from ..engine.plugin import Refused


def make_logits(processor: Any, layer: Any, hidden_states: Tensor) -> Tensor:
    """Returns SGLang's own logits (B, V) float32, in memory of their own."""
    metadata = SimpleNamespace(next_token_logits_buffer=None)  # on one rank nothing else of a LogitsMetadata is read
    return processor._get_logits(hidden_states, layer, metadata)  # type: ignore[no-any-return]


@torch.inference_mode()
def find_head(model: Any, layers: Layers) -> tuple[Head, Any]:
    """Returns the head of a loaded model, and its logits processor.

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
    check_layer(name, layer, layers)
    if layer.num_added_embeddings or layer.tp_size != 1 or processor.do_tensor_parallel_all_gather:
        raise Refused(f"{name}'s LM head has an added vocabulary, or is a part of one")
    if processor.return_full_logits:
        raise Refused(f"{name} returns logits of all positions")
    weight, vocab_size = layer.weight, processor.vocab_size
    if not 1 <= vocab_size <= len(weight):
        raise Refused(f"{name} has a vocabulary of {vocab_size} tokens, its LM head {len(weight)} rows")
    head = Head(layer, vocab_size, _transform(name, processor))
    hidden_states = probe_states(weight.shape[1]).to(weight)
    logits = make_logits(processor, layer, hidden_states.clone())
    compare_logits(name, head, hidden_states, logits, weight.dtype, vocab_size)
    return head, processor


def _transform(name: str, processor: Any) -> dict[str, float]:
    """Returns SGLang's ``cap * tanh(scale * logit / cap)`` as arguments of ``sample``."""
    scale, cap = processor.logit_scale, processor.final_logit_softcapping
    transform: dict[str, float] = {}
    if scale is not None and scale != 1.0:
        transform["logit_scale"] = float(scale)
    if cap:  # None and 0 are none
        transform["soft_cap"] = float(cap)
    if not all(math.isfinite(value) for value in transform.values()) or transform.get("soft_cap", 1.0) <= 0:
        raise Refused(f"{name} scales its logits by {scale} and caps them at {cap}")
    return transform
