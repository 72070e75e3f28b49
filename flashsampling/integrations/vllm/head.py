"""Finds the LM head of a vLLM model in one call of ``compute_logits``.

``compute_logits`` must hand its argument to one ``LogitsProcessor`` as it is, and return what that returns as it is.
Then the head's bias and the processor's scale and soft cap are all that is done to logits.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.head import Head, Layers, check_layer, compare_logits, probe_states
from ..engine.plugin import Refused


class _Call(NamedTuple):
    processor: Any
    head: Any
    hidden_states: Tensor
    bias: Tensor | None
    logits: Tensor | None


@torch.inference_mode()
def find_head(model: Any, dim: int, dtype: torch.dtype, device: torch.device, layers: Layers) -> Head:
    """Returns the head of a loaded model. With tensor parallelism all ranks make this call.

    Raises:
        Refused: the model does something to its hidden states or logits that the fused step does not do, or that is not
        seen.
    """
    name = type(model).__name__
    hidden_states = probe_states(dim).to(dtype).to(device)
    call, logits = _watch_call(name, model, hidden_states, layers.processor)
    layer, bias = call.head, call.bias
    processor: Any = call.processor
    kind: Any = type(processor)
    if kind is not layers.processor:
        raise Refused(f"{name}'s logits come from a {kind.__name__} (LoRA on the head is one)")
    if call.hidden_states is not hidden_states or call.logits is not logits:
        what = "hidden states before" if call.hidden_states is not hidden_states else "logits after"
        raise Refused(f"{name} changes its {what} its logits processor")
    if processor.logits_as_input:
        raise Refused(f"{name} gives its logits processor logits, no hidden states")
    check_layer(name, layer, layers)
    if layer.num_added_embeddings or processor.vocab_size != processor.org_vocab_size:
        raise Refused(f"{name} has an added vocabulary")
    if processor.head_dtype not in (None, layer.weight.dtype):
        raise Refused(f"head_dtype is {processor.head_dtype}, and the head's weight {layer.weight.dtype}")
    if bias is not None and bias is not getattr(layer, "bias", None):
        raise Refused(f"{name}'s logits get a bias that is not its head's")
    if dtype != layer.weight.dtype:
        raise Refused(f"{name}'s hidden states are {dtype}, its LM head's weight {layer.weight.dtype}")
    indices, transform = layer.shard_indices, _transform(name, processor.scale, processor.soft_cap)
    first = indices.padded_org_vocab_start_index
    head = Head(layer, processor.org_vocab_size, transform, bias is not None, first, layer.tp_size)
    compare_logits(name, head, hidden_states, logits, logits.dtype, indices.org_vocab_end_index)
    return head


def _watch_call(name: str, model: Any, hidden_states: Tensor, processor: type) -> tuple[_Call, Tensor]:
    """Returns the one call of a logits processor that computes these logits, and the logits."""
    calls: list[_Call] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor | None) -> None:
        given = dict(zip(("lm_head", "hidden_states", "embedding_bias"), args)) | kwargs
        calls.append(_Call(module, given["lm_head"], given["hidden_states"], given.get("embedding_bias"), output))

    # a wrapper of a processor, such as LoRA's, is named after the processor
    found = [
        part for part in model.modules() if isinstance(part, processor) or "LogitsProcessor" in type(part).__name__
    ]
    hooks = [part.register_forward_hook(note, with_kwargs=True) for part in found]
    try:
        logits = model.compute_logits(hidden_states)
    except Exception as error:
        raise Refused(f"{name}.compute_logits could not be looked at: {error!r}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != 1:
        raise Refused(f"{name}.compute_logits calls {len(calls) or 'no'} logits processor{'s' * (len(calls) > 1)}")
    if not isinstance(logits, Tensor):
        raise Refused(f"{name}.compute_logits returns no logits on this rank")
    return calls[0], logits


def _transform(name: str, scale: float, soft_cap: float | None) -> dict[str, float]:
    """Returns vLLM's ``scale * cap * tanh(logit / cap)`` as arguments of ``sample``, whose scale is inside."""
    if not math.isfinite(scale) or (soft_cap is not None and not soft_cap > 0):
        raise Refused(f"{name} scales its logits by {scale} and caps them at {soft_cap}")
    transform = {} if scale == 1.0 else {"logit_scale": float(scale)}
    if soft_cap is None:
        return transform
    if scale <= 0:
        raise Refused(f"{name} caps its logits and scales them by {scale}")
    return transform | {"soft_cap": float(scale * soft_cap)}
