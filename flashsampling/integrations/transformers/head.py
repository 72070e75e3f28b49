"""The LM head's input instead of its output, and what a model makes of that output.

The model stays as it is: its whole ``forward`` runs, with a pair of hooks on the LM head that act on this thread's own calls
alone. The first takes the head's input and hands on none of its positions, so that no logit is computed; the second puts a
``_Placeholder`` where the logits would be. What a model does to its logits it does to the placeholder, in every step: factors
and one soft cap are followed, so they need not be known by the names of configuration fields, which differ from family to
family; anything else is refused there and then. (Calling the base model instead would miss what the model does between it and
its head, and hooks on the model; a ``TorchFunctionMode`` needs no hooks, but every torch function of the model would pass
through it.)
"""

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_T = TypeVar("_T")
_LINEAR_FORWARD = nn.Linear.forward


class Transform(NamedTuple):
    """What a model makes of its LM head's output, as ``flashsampling.sample`` takes it."""

    logit_scale: float = 1.0
    soft_cap: float = 0.0  # 0: none

    def __str__(self) -> str:
        return f"logit_scale={self.logit_scale:g}, soft_cap={self.soft_cap:g}"

    def of(self, output: Tensor) -> Tensor:
        """The logits, in the dtype of the output."""
        logits = output * self.logit_scale
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits


class CheckedHead(NamedTuple):
    """An LM head, and what a model makes of its output: ``soft_cap * tanh(logit_scale * output / soft_cap)``."""

    linear: nn.Linear
    logit_scale: float
    soft_cap: float  # 0: none


class _Placeholder(Tensor):
    """Stands where a model expects its LM head's logits, in their shape but without their memory.

    A change of dtype or layout returns it as it is; a product or quotient with a number, and a tanh, one that has it noted.
    Whatever else is done to it raises, so a model whose logits are something else cannot pass for one whose are these.
    """

    hidden_states: Tensor  # (B, T, D), what the LM head would have multiplied
    changed: str  # the error's words up to what was done
    done: tuple[tuple[str, float], ...] = ()  # to the logits, in order: a factor, a divisor, or "tanh"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PROPERTIES:
            return super().__torch_function__(func, types, args, kwargs)
        if args and isinstance(args[0], _Placeholder):
            if func in _SAME_LOGITS:
                return args[0]
            if func in _FOLLOWED and not kwargs:
                kind = _FOLLOWED[func]
                if kind == "tanh" and len(args) == 1 and not any(kind == "tanh" for kind, _ in args[0].done):
                    return args[0]._after(kind, 0.0)
                if kind != "tanh" and len(args) == 2 and type(args[1]) in (int, float):
                    return args[0] if args[1] == 1 else args[0]._after(kind, float(args[1]))
        name = getattr(func, "__name__", str(func))
        placeholder = next((value for value in args if isinstance(value, _Placeholder)), None)
        changed = "the logits were used" if placeholder is None else placeholder.changed
        raise ValueError(f"{changed} ({name}), which the fused step cannot follow")

    def _after(self, kind: str, number: float) -> "_Placeholder":
        with torch._C.DisableTorchFunctionSubclass():
            other = self.detach().as_subclass(_Placeholder)
        other.hidden_states, other.changed, other.done = self.hidden_states, self.changed, (*self.done, (kind, number))
        return other

    def transform(self) -> Transform:
        """What was done, all of it."""
        kinds = [kind for kind, _ in self.done]
        cut = kinds.index("tanh") if "tanh" in kinds else len(kinds)
        before, after = self.done[:cut], self.done[cut + 1 :]
        if cut == len(kinds):
            made = Transform(_product(before))
        elif before and before[-1] == ("divisor", _product(after)):
            made = Transform(_product(before[:-1]), _product(after))
        else:
            made = Transform(_product(before) * _product(after), _product(after))
        if not all(map(math.isfinite, made)) or made.soft_cap < 0 or (cut < len(kinds) and made.soft_cap == 0):
            raise ValueError(f"{self.changed} ({made}), which the fused step cannot follow")
        return made


def _product(done: tuple[tuple[str, float], ...]) -> float:
    product = 1.0
    for kind, number in done:
        product = product * number if kind == "factor" else product / number if number else math.nan
    return product


_SAME_LOGITS = frozenset((Tensor.float, Tensor.to, Tensor.contiguous, Tensor.detach))
_FOLLOWED = {
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), "factor"),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), "divisor"),
    **dict.fromkeys((Tensor.tanh, torch.tanh), "tanh"),
}
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
        self.model, self.head, self.weight, self.bias = model, head, head.weight, head.bias
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
        head = _plain_lm_head(self.model)
        if head is not self.head or head.weight is not self.weight or head.bias is not self.bias:
            raise ValueError(f"{type(self.model).__name__}'s LM head was replaced while it was generating")
        self._running = True
        try:
            return call(*args, **kwargs)
        finally:
            self._running = False
            self._hidden_states = None

    def last_hidden_states(self, logits: Any, batch: int, transform: Transform | None = None, positions: int = 1) -> Tensor:
        """(B, positions, D), what the LM head would have turned into the ``logits`` of each row's last positions, by way of
        ``transform``; None: of any."""
        name = type(self.model).__name__
        if not isinstance(logits, _Placeholder):
            raise ValueError(
                f"{name} changes the logits after its LM head, or does not call it: it returned others, which the fused step "
                "cannot follow"
            )
        made = logits.transform()
        if transform is not None and made != transform:
            _checked_models.pop(self.model, None)
            raise ValueError(
                f"{name} changes the logits after its LM head by {made}, where it was by {transform} when it was looked at; "
                "generate anew, with a sampler made anew"
            )
        hidden_states = logits.hidden_states
        if hidden_states.dim() != 3 or hidden_states.shape[0] != batch or hidden_states.shape[1] < positions:
            least = f"{positions} or more positions" if positions > 1 else "positions"
            raise ValueError(
                f"{name}'s LM head must be given hidden states of shape ({batch}, {least}, dim), got shape "
                f"{tuple(hidden_states.shape)}"
            )
        if hidden_states.dtype != self.weight.dtype or torch.is_autocast_enabled(hidden_states.device.type):
            raise ValueError(
                f"{name}'s LM head would convert what it multiplies (autocast?): hidden states are {hidden_states.dtype}, its "
                f"weight {self.weight.dtype}; load the model in the dtype that you want and generate without autocast"
            )
        return hidden_states[:, -positions:]

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
    """The model's LM head, if it is seen to be ``hidden_states @ weight.T + bias`` and nothing else. Cheap: done before every
    step."""
    outer = model.get_output_embeddings()
    head = linear_under(outer)
    if model._compiled_call_impl is not None or hasattr(vars(model).get("forward"), "_torchdynamo_orig_callable"):
        raise ValueError("the model is compiled, its LM head too; compile the decoder alone: model.get_decoder().compile()")
    if type(head) is not nn.Linear:
        raise ValueError(
            f"the model's output embedding must be an nn.Linear, got {type(head).__module__}.{type(head).__name__}: quantised "
            "heads, subclasses and adapters that are not PEFT's are not supported"
        )
    for module in {outer, head}:
        own_forward = "forward" in vars(module) or module._compiled_call_impl is not None
        if own_forward or nn.Linear.forward is not _LINEAR_FORWARD:
            raise ValueError(
                "the model's LM head has a forward of its own (accelerate puts one there for a device_map over several devices "
                "or with offloading, compile() another), which the fused step cannot follow"
            )
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        others = [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), HeadTap)]
        if others:
            raise ValueError(f"the model's LM head has a forward hook, {others[0]!r}, which the fused step cannot follow")
    for name, tensor, dims in (("weight", head.weight, 2), ("bias", head.bias, 1)):
        if tensor is None and name == "bias":
            continue
        plain = type(tensor) in (nn.Parameter, Tensor) and tensor.dim() == dims and tensor.is_floating_point()
        if not plain or tensor.is_meta:
            raise ValueError(
                f"the model's LM head must have a plain floating-point {name} in memory, got {type(tensor).__name__}, "
                f"{tensor.dtype}, shape {tuple(tensor.shape)} on {tensor.device}: sharded (DTensor, FSDP, ZeRO-3), quantised "
                "and offloaded heads are not supported"
            )
    return head


def linear_under(module: Any) -> Any:
    """The layer that computes what ``module`` returns: ``module`` itself, or the base layer of one of PEFT's adapter layers
    that adds nothing, because it is merged or disabled.

    Raises:
        ValueError: the adapter layer adds something, or may.
    """
    if not type(module).__module__.startswith("peft.") or not hasattr(module, "merged"):
        return module
    if module.merged and module.disable_adapters:
        raise ValueError(
            "the model's LM head has an adapter (LoRA) that is merged and disabled: the model's next call would take it out of "
            "the weight; call unmerge_adapter() first"
        )
    if not module.merged and not module.disable_adapters:
        raise ValueError(
            "the model's LM head has an adapter (LoRA) that is active, and the fused step multiplies with one weight: call "
            "merge_adapter(), or generate within disable_adapter()"
        )
    return module.base_layer


class HeadPlace:
    """Where a model has the LM head that a sampler was made with. Holds the model weakly.

    A deep copy belongs to the model's copy where the model is copied with it, and is None elsewhere; a pickle is None.
    """

    def __init__(self, model: Any) -> None:
        # a wrapper (PEFT, torch.compile) hands out the method of the model within
        model = getattr(model.get_output_embeddings, "__self__", model)
        outer = model.get_output_embeddings()
        names = [name for name, module in model.named_modules(remove_duplicate=False) if module is outer]
        # get_output_embeddings() costs a call 35 microseconds, a name 0.6
        self._model, self._names = ref(model), names[0].split(".") if len(names) == 1 else []

    def require(self, head: nn.Module) -> None:
        """ValueError where the model has another head by now. ``torch.compile`` traces this."""
        model = self._model()
        if model is None:
            return
        module = model if self._names else model.get_output_embeddings()
        for name in self._names:
            module = None if module is None else module._modules.get(name)
        if module is not head and linear_under(module) is not head:
            raise ValueError(
                f"{type(model).__name__}'s LM head was replaced (resize_token_embeddings, an adapter, model.lm_head = ...) "
                "after this sampler was made: make another, LMHeadSampler.from_model(model)"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadPlace | None":
        model = memo.get(id(self._model()))
        if model is None:
            return None
        other = object.__new__(HeadPlace)
        other._model, other._names = ref(model), self._names
        return other

    def __reduce__(self) -> Any:
        return type(None), ()


class _Seen(NamedTuple):
    """What ``checked_lm_head`` compared when it last compared numbers, and what else could change a model's logits."""

    linear: "ref[nn.Linear]"
    weight: "ref[Tensor]"
    bias: "ref[Tensor] | None"
    hooks: tuple[object, ...]
    transform: Transform

    def is_of(self, head: nn.Linear, hooks: tuple[object, ...]) -> bool:
        bias = None if self.bias is None else self.bias()
        return self.linear() is head and self.weight() is head.weight and bias is head.bias and self.hooks == hooks


_checked_models: "WeakKeyDictionary[nn.Module, _Seen]" = WeakKeyDictionary()


@torch.no_grad()
def checked_lm_head(model: Any) -> CheckedHead:
    """The LM head of a transformers causal LM, and what the model makes of its output, after a check that this is all.

    Looks at the head's structure every time, and compares numbers over four tokens once: again if the head, its weight or bias
    or the hooks on the model change. Names of configuration fields are not looked at: a list of them would miss the next model
    family. What is done to the logits is followed instead, and what comes of it compared with the model's.

    Raises:
        TypeError: ``model`` has no ``get_output_embeddings``.
        ValueError: the model is an encoder-decoder or compiled as a whole, its LM head is not an ``nn.Linear`` without hooks or
            a forward of its own and with a plain weight and bias, or its logits are something else than what the head returns
            after factors and a soft cap.
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
    if seen is not None and seen.is_of(head, hooks):
        return CheckedHead(head, *seen.transform)

    embeddings = model.get_input_embeddings().weight
    tokens = torch.arange(1, 5, device=embeddings.device)[None] % embeddings.shape[0]
    with HeadTap(model, head) as tap:
        tap.record = []
        logits = tap.run(model, input_ids=tokens, use_cache=False, return_dict=True).logits
        if len(tap.record) != 1:
            raise ValueError(f"{name} must call its LM head once, it was called {len(tap.record)} times")
        ((hidden_states, output),) = tap.record
        tap.record = None  # and as ``generate`` calls it, which sees also what leaves these four tokens' logits alone
        placeholder = tap.run(model, input_ids=tokens, use_cache=False, return_dict=True).logits
        tap.last_hidden_states(placeholder, 1)
        transform = placeholder.transform()
        if output.shape != logits.shape or not _same(logits, output, transform):
            raise ValueError(f"{name} changes the logits after its LM head, which the fused step cannot follow")
        # the same multiplication may be summed in another order: a few roundings of the largest logit
        expected = hidden_states.to(head.weight.dtype) @ head.weight.T
        expected = expected if head.bias is None else expected + head.bias
        if not torch.allclose(output.float(), expected.float(), rtol=0, atol=_roundings(expected, output), equal_nan=True):
            raise ValueError(f"{name}'s LM head returns something else than hidden_states @ weight.T + bias")
    bias: ref[Tensor] | None = None if head.bias is None else ref(head.bias)
    _checked_models[model] = _Seen(ref(head), ref(head.weight), bias, hooks, transform)
    return CheckedHead(head, *transform)


def _same(logits: Tensor, output: Tensor, transform: Transform) -> bool:
    """Whether this is what was made of the head's output: to the bit where that is nothing, else but for roundings."""
    expected = transform.of(output.float())
    bound = 0.0 if transform == Transform() else _roundings(output.float() * transform.logit_scale, output)
    return torch.allclose(logits.float(), expected, rtol=0, atol=bound, equal_nan=True)


def _roundings(values: Tensor, computed: Tensor) -> float:
    """Some roundings of the largest value, in the dtype in which it was ``computed``."""
    return 8 * torch.finfo(computed.dtype).eps * values.float().nan_to_num().abs().amax().item()
