"""The LM head's input instead of its output, and whether a model's logits are that output.

The model stays as it is: its whole ``forward`` runs, with a pair of hooks on the LM head that act on this thread's own calls
alone. The first takes the head's input and hands on none of its positions, so that no logit is computed; the second puts a
``_Placeholder`` where the logits would be. A model that does anything to its logits does it to the placeholder, in every step,
and is refused there and then. (Calling the base model instead would miss what the model does between it and its head, and hooks
on the model; a ``TorchFunctionMode`` needs no hooks, but every torch function of the model would pass through it.)
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_T = TypeVar("_T")
_LINEAR_FORWARD = nn.Linear.forward


class _Placeholder(Tensor):
    """Stands where a model expects its LM head's logits, in their shape but without their memory.

    A change of dtype or layout returns it as it is. Whatever else is done to it raises, so a model whose logits are not what
    its LM head returned cannot pass for one whose are.
    """

    hidden_states: Tensor  # (B, T, D), what the LM head would have multiplied
    changed: str  # the error's words up to what was done

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PROPERTIES:
            return super().__torch_function__(func, types, args, kwargs)
        if args and isinstance(args[0], _Placeholder):
            if func in _SAME_LOGITS:
                return args[0]
            if func in _SCALINGS and not kwargs and args[1:] in ((1,), (1.0,)):
                return args[0]  # Granite's and Falcon-H1's default
        name = getattr(func, "__name__", str(func))
        placeholder = next((value for value in args if isinstance(value, _Placeholder)), None)
        changed = "the logits were used" if placeholder is None else placeholder.changed
        raise ValueError(f"{changed} ({name}), which the fused step cannot follow")


_SAME_LOGITS = frozenset((Tensor.float, Tensor.to, Tensor.contiguous, Tensor.detach))
_SCALINGS = frozenset((Tensor.mul, Tensor.__mul__, Tensor.div, Tensor.__truediv__))
_PROPERTIES = frozenset(
    (
        Tensor.size,
        Tensor.dim,
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    )
)


class HeadTap:
    """Takes the LM head's input from calls of the model that go through ``run``, and computes no logits in them.

    The hooks look at the thread and at whether ``run`` is at work, so all other calls of the model, from other threads or from
    this one's callbacks, see the model as it is. Registering and removing hooks is safe beside calls: torch copies them before
    it iterates, without giving up the GIL.
    """

    def __init__(self, model: Any, head: nn.Linear) -> None:
        self.model, self.head, self.weight = model, head, head.weight
        self.record: list[tuple[Tensor, Tensor]] | None = None  # the probe's: (head's input, head's output) of every call
        self._thread = threading.get_ident()
        self._running = False
        self._hidden_states: Tensor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "HeadTap":
        with self._stack:
            self._stack.callback(self.head.register_forward_pre_hook(self._before).remove)
            self._stack.callback(self.head.register_forward_hook(self._after).remove)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """``call``, which calls the model."""
        if _plain_lm_head(self.model) is not self.head or self.head.weight is not self.weight:
            raise ValueError(f"{type(self.model).__name__}'s LM head was replaced while it was generating")
        self._running = True
        try:
            return call(*args, **kwargs)
        finally:
            self._running = False
            self._hidden_states = None

    def last_hidden_states(self, logits: Any, batch: int) -> Tensor:
        """(B, D), what the LM head would have turned into the ``logits`` of each row's last position."""
        name = type(self.model).__name__
        if not isinstance(logits, _Placeholder):
            raise ValueError(
                f"{name} changes the logits after its LM head, or does not call it: it returned others, which the fused step "
                "cannot follow"
            )
        hidden_states = logits.hidden_states
        if hidden_states.dim() != 3 or hidden_states.shape[0] != batch or hidden_states.shape[1] < 1:
            shape = tuple(hidden_states.shape)
            raise ValueError(
                f"{name}'s LM head must be given hidden states of shape ({batch}, positions, dim), got shape {shape}"
            )
        if hidden_states.dtype != self.weight.dtype or torch.is_autocast_enabled(hidden_states.device.type):
            raise ValueError(
                f"{name}'s LM head would convert what it multiplies (autocast?): hidden states are {hidden_states.dtype}, its "
                f"weight {self.weight.dtype}; load the model in the dtype that you want and generate without autocast"
            )
        return hidden_states[:, -1]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if not self._running or threading.get_ident() != self._thread:
            return None
        if len(args) != 1:
            raise ValueError(
                f"{type(self.model).__name__}'s LM head must be called with one positional argument, got {len(args)}"
            )
        self._hidden_states = args[0]
        return None if self.record is not None else (args[0][..., :0, :],)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        hidden_states = self._hidden_states
        if not self._running or threading.get_ident() != self._thread or hidden_states is None:
            return None
        self._hidden_states = None
        if self.record is not None:
            self.record.append((hidden_states.clone(), output.clone()))
            return None
        shape = (*hidden_states.shape[:-1], output.shape[-1])
        placeholder = output.new_empty((1,) * len(shape)).expand(shape).as_subclass(_Placeholder)
        placeholder.hidden_states = hidden_states
        placeholder.changed = f"{type(self.model).__name__} changes the logits after its LM head"
        return placeholder


def _plain_lm_head(model: Any) -> nn.Linear:
    """The model's LM head, if it is seen to be ``hidden_states @ weight.T`` and nothing else. Cheap: done before every step."""
    head = model.get_output_embeddings()
    if model._compiled_call_impl is not None or hasattr(vars(model).get("forward"), "_torchdynamo_orig_callable"):
        raise ValueError("the model is compiled, its LM head too; compile the decoder alone: model.get_decoder().compile()")
    if type(head) is not nn.Linear:
        raise ValueError(
            f"the model's output embedding must be an nn.Linear, got {type(head).__module__}.{type(head).__name__}: adapters "
            "(LoRA) on it must be merged, quantised heads and subclasses are not supported"
        )
    if head.bias is not None:
        raise ValueError("the model's LM head must be a linear layer without bias, got one with a bias")
    if "forward" in vars(head) or nn.Linear.forward is not _LINEAR_FORWARD or head._compiled_call_impl is not None:
        raise ValueError(
            "the model's LM head has a forward of its own (accelerate puts one there for a device_map over several devices or "
            "with offloading, compile() another), which the fused step cannot follow"
        )
    hooks = (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
    others = [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), HeadTap)]
    if others:
        raise ValueError(f"the model's LM head has a forward hook, {others[0]!r}, which the fused step cannot follow")
    weight = head.weight
    plain = type(weight) in (nn.Parameter, Tensor) and weight.dim() == 2 and weight.is_floating_point() and not weight.is_meta
    if not plain:
        raise ValueError(
            f"the model's LM head must have a plain floating-point weight in memory, got {type(weight).__name__}, "
            f"{weight.dtype}, shape {tuple(weight.shape)} on {weight.device}: sharded (DTensor, FSDP, ZeRO-3), quantised and "
            "offloaded heads are not supported"
        )
    return head


# model -> its LM head, the head's weight and what else could change its logits, when ``checked_lm_head`` last compared numbers
_checked_models: "WeakKeyDictionary[nn.Module, tuple[ref[nn.Linear], ref[Tensor], tuple[object, ...]]]" = WeakKeyDictionary()


@torch.no_grad()
def checked_lm_head(model: Any) -> nn.Linear:
    """The LM head of a transformers causal LM, after a check that the model's logits are its output and nothing else.

    Looks at the head's structure every time, and compares numbers over four tokens once: again if the head, its weight or the
    hooks on the model change. Names of configuration fields are not looked at: a list of them would miss the next model family.

    Raises:
        TypeError: ``model`` has no ``get_output_embeddings``.
        ValueError: the model is an encoder-decoder or compiled as a whole, its LM head is not an ``nn.Linear`` without bias,
            hooks or a forward of its own and with a plain weight, or its logits are not what the head returns (Gemma 2's soft
            cap, Cohere's and Granite's scale).
    """
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"model must be a transformers causal LM, got {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"encoder-decoder models are not supported, got {name}")
    head = _plain_lm_head(model)
    hooks = (
        id(vars(model).get("forward")),
        *(tuple(hooks) for hooks in (model._forward_hooks, model._forward_pre_hooks)),
        *(tuple(hooks) for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)),
    )
    seen = _checked_models.get(model)
    if seen is not None and seen[0]() is head and seen[1]() is head.weight and seen[2] == hooks:
        return head

    embeddings = model.get_input_embeddings().weight
    tokens = torch.arange(1, 5, device=embeddings.device)[None] % embeddings.shape[0]
    with HeadTap(model, head) as tap:
        tap.record = []
        logits = tap.run(model, input_ids=tokens, use_cache=False, return_dict=True).logits
        if len(tap.record) != 1:
            raise ValueError(f"{name} must call its LM head once, it was called {len(tap.record)} times")
        ((hidden_states, output),) = tap.record
        if output.shape != logits.shape or not torch.allclose(output.float(), logits.float(), rtol=0, atol=0, equal_nan=True):
            raise ValueError(f"{name} changes the logits after its LM head, which the fused step cannot follow")
        # the same multiplication may be summed in another order: a few roundings of the largest logit
        expected = hidden_states.to(head.weight.dtype) @ head.weight.T
        bound = 8 * torch.finfo(output.dtype).eps * expected.float().nan_to_num().abs().amax().item()
        if not torch.allclose(output.float(), expected.float(), rtol=0, atol=bound, equal_nan=True):
            raise ValueError(f"{name}'s LM head returns something else than hidden_states @ weight.T")
        tap.record = None  # and as ``generate`` calls it, which sees also what leaves these four tokens' logits alone
        tap.last_hidden_states(tap.run(model, input_ids=tokens, use_cache=False, return_dict=True).logits, 1)
    _checked_models[model] = ref(head), ref(head.weight), hooks
    return head
