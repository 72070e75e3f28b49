"""What a vLLM model makes of its hidden states, found by calling ``compute_logits`` once and looking at the way they take.

Model classes are not known by name: what must hold is that ``compute_logits`` hands its argument to one ``LogitsProcessor`` as
it is, and returns what that returns as it is. The processor's scale and soft cap and the head's bias are then all there is,
and what comes of them is held against the model's logits.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...sampling import check_weight
from ..engine.common import Layers
from ..engine.plugin import Refused

_SEEN = 4  # rows that are compared


class Head(NamedTuple):
    """An LM head, and what is done to its logits, as ``flashsampling.sample`` takes it."""

    layer: Any  # its weight is asked for in every step: vLLM may load another one into it
    bias: Callable[[], Tensor | None]
    vocab_size: int
    transform: Mapping[str, float]
    first_token: int  # of this rank's shard
    ranks: int

    @property
    def weight(self) -> Tensor:
        """(V, D), this rank's rows, padded."""
        return self.layer.weight  # type: ignore[no-any-return]

    def request(self) -> dict[str, Any]:
        """What it asks of every step."""
        bias = self.bias()
        return {**self.transform, **({} if bias is None else {"bias": bias})}


class _Call(NamedTuple):
    processor: Any
    head: Any
    hidden_states: Tensor
    bias: Tensor | None
    logits: Tensor | None


@torch.inference_mode()
def head_of(model: Any, dim: int, dtype: torch.dtype, device: torch.device, layers: Layers) -> Head:
    """The head of a model that is loaded; with tensor parallelism all ranks call it.

    Raises:
        Refused: the model does something to its hidden states or logits that the fused step does not do, or that is not seen.
    """
    name = type(model).__name__
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(_SEEN, dim, generator=generator).to(dtype).to(device)
    call, logits = _seen(model, hidden_states, layers.processor)
    processor, head = call.processor, call.head
    kind = type(processor)
    if kind is not layers.processor:
        raise Refused(f"{name}'s logits come from a {kind.__name__} (LoRA on the head is one)")
    if call.hidden_states is not hidden_states or call.logits is not logits:
        what = "hidden states before" if call.hidden_states is not hidden_states else "logits after"
        raise Refused(f"{name} changes its {what} its logits processor")
    if processor.logits_as_input:
        raise Refused(f"{name} gives its logits processor logits, no hidden states")
    _check_head(name, head, processor, layers)
    vocab_size, indices = processor.org_vocab_size, head.shard_indices
    bias = call.bias
    if bias is not None and bias is not getattr(head, "bias", None):
        raise Refused(f"{name}'s logits get a bias that is not its head's")
    made = Head(
        layer=head,
        bias=(lambda: None) if bias is None else (lambda: head.bias),
        vocab_size=vocab_size,
        transform=_transform(name, processor.scale, processor.soft_cap),
        first_token=indices.padded_org_vocab_start_index,
        ranks=head.tp_size,
    )
    assert logits is not None
    _compare(name, made, hidden_states, logits, indices.org_vocab_end_index)
    return made


def _seen(model: Any, hidden_states: Tensor, processor: type) -> tuple[_Call, Tensor | None]:
    """The one call of a logits processor that computes these logits, and the logits."""
    calls: list[_Call] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor | None) -> None:
        given = dict(zip(("lm_head", "hidden_states", "embedding_bias"), args)) | kwargs
        calls.append(_Call(module, given["lm_head"], given["hidden_states"], given.get("embedding_bias"), output))

    # what wraps a processor, as LoRA does, is named after it
    found = [
        part for part in model.modules() if isinstance(part, processor) or "LogitsProcessor" in type(part).__name__
    ]
    hooks = [part.register_forward_hook(note, with_kwargs=True) for part in found]
    try:
        logits = model.compute_logits(hidden_states)
    except Exception as error:
        raise Refused(f"{type(model).__name__}.compute_logits could not be looked at: {error!r}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise Refused(f"{type(model).__name__}.compute_logits calls no logits processor")
    if len({id(call.processor) for call in calls}) != 1 or len(calls) != 1:
        raise Refused(f"{type(model).__name__}.compute_logits calls {len(calls)} logits processors")
    if not isinstance(logits, Tensor):
        raise Refused(f"{type(model).__name__}.compute_logits returns no logits on this rank")
    return calls[0], logits


def _check_head(name: str, head: Any, processor: Any, layers: Layers) -> None:
    kind, method = type(head), type(getattr(head, "quant_method", None))
    if not issubclass(kind, layers.embedding):
        raise Refused(f"{name}'s LM head is a {kind.__name__}")
    if method is not layers.unquantized:
        raise Refused(f"{name}'s LM head is quantised, or multiplies in a way of its own ({method.__name__})")
    if head.num_added_embeddings or processor.vocab_size != processor.org_vocab_size:
        raise Refused(f"{name} has an added vocabulary")
    try:
        check_weight(head.weight)
    except (TypeError, ValueError) as error:
        raise Refused(f"{name}'s LM head: {error}") from None
    if processor.head_dtype not in (None, head.weight.dtype):
        raise Refused(f"head_dtype is {processor.head_dtype}, and the head's weight {head.weight.dtype}")


def _transform(name: str, scale: float, soft_cap: float | None) -> dict[str, float]:
    """vLLM's ``scale * cap * tanh(logit / cap)`` as ``sample`` has it, whose scale is inside."""
    if not math.isfinite(scale) or (soft_cap is not None and not soft_cap > 0):
        raise Refused(f"{name} scales its logits by {scale} and caps them at {soft_cap}")
    made = {} if scale == 1.0 else {"logit_scale": float(scale)}
    if soft_cap is None:
        return made
    if scale <= 0:
        raise Refused(f"{name} caps its logits and scales them by {scale}")
    return made | {"soft_cap": float(scale * soft_cap)}


def _compare(name: str, head: Head, hidden_states: Tensor, logits: Tensor, last_token: int) -> None:
    """Refuses a model whose logits are others. A few roundings of the largest, in the dtype in which vLLM computes them."""
    if hidden_states.dtype != head.weight.dtype:
        raise Refused(f"{name}'s hidden states are {hidden_states.dtype}, its LM head's weight {head.weight.dtype}")
    if logits.shape[-1] != head.vocab_size:
        raise Refused(f"{name} has logits of {logits.shape[-1]} tokens, its logits processor of {head.vocab_size}")
    mine = slice(head.first_token, max(last_token, head.first_token))
    logits_gemm = F.linear(hidden_states, head.weight[: mine.stop - mine.start], None).float()
    bias, cap = head.bias(), head.transform.get("soft_cap", 0.0)
    if bias is not None:
        logits_gemm = logits_gemm + bias[: mine.stop - mine.start].float()
    logits_gemm = logits_gemm * head.transform.get("logit_scale", 1.0)
    bound = (
        8 * torch.finfo(logits.dtype).eps * float(logits_gemm.nan_to_num().abs().amax()) if logits_gemm.numel() else 0.0
    )
    if cap:
        logits_gemm = cap * torch.tanh(logits_gemm / cap)
    if not torch.allclose(logits_gemm, logits[:, mine].float(), rtol=0, atol=bound, equal_nan=True):
        raise Refused(
            f"{name}'s logits are something else than its head, bias, scale and soft cap make of its hidden states"
        )
