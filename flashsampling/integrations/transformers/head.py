"""The LM head's input instead of its output, and what a model makes of that output.

The model stays as it is: its whole ``forward`` runs, with a pair of hooks on the LM head that act on this thread's own calls
alone. The first takes the head's input and hands on none of its positions, so that no logit is computed; the second puts a
``_Placeholder`` where the logits would be. What a model does to its logits it does to the placeholder, in every step: factors
and one soft cap are followed, so they need not be known by the names of configuration fields, which differ from family to
family; anything else is refused there and then. A generation learns them in its first step, from the caller's own batch: a
probe of other tokens would run in the caller's hooks, which may know the batch (PEFT's ``adapter_names``, steering vectors).

Calling the base model instead would miss what the model does between it and its head, and hooks on the model; a
``TorchFunctionMode`` needs no hooks, but every torch function of the model would pass through it.
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
            if func in _SAME_LOGITS and args[0]._is_kept_by(args[1:], kwargs):
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

    def _is_kept_by(self, arguments: Any, named: Any) -> bool:
        """Whether ``Tensor.to`` with these arguments rounds nothing. The others of ``_SAME_LOGITS`` have none of them."""
        values = (*arguments, *(named or {}).values())
        dtypes = [value.dtype if isinstance(value, Tensor) else value for value in values]
        return all(
            torch.promote_types(dtype, self.dtype) == dtype for dtype in dtypes if isinstance(dtype, torch.dtype)
        )

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

    def __init__(
        self,
        model: Any,
        head: nn.Linear,
        transform: Transform | None = None,
        learned: Callable[[float, float], None] | None = None,
    ) -> None:
        """``transform``: what the model makes of the head's output; None: the first step tells, and ``learned`` is called with
        it, after the head's numbers were compared."""
        self.model, self.head, self.weight, self.bias = model, head, head.weight, head.bias
        self.transform, self._learned = transform, learned
        self._compares = False
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
        self._running, self._compares = True, self.transform is None and not _is_compared(head)
        try:
            return call(*args, **kwargs)
        finally:
            self._running = False
            self._hidden_states = None

    def last_hidden_states(self, logits: Any, batch: int, positions: int = 1) -> Tensor:
        """(B, positions, D), what the LM head would have turned into the ``logits`` of each row's last positions."""
        name = type(self.model).__name__
        if not isinstance(logits, _Placeholder):
            raise ValueError(
                f"{name} changes the logits after its LM head, or does not call it: it returned others, which the fused step "
                "cannot follow"
            )
        made = logits.transform()
        if self.transform is not None and made != self.transform:
            raise ValueError(
                f"{name} changes the logits after its LM head by {made}, where it was by {self.transform} when it was looked "
                "at; generate anew, with a sampler made anew"
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
        if self.transform is None:
            self.transform = made
            if self._learned is not None:
                self._learned(*made)
        return hidden_states[:, -positions:]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if not self._running or threading.get_ident() != self._thread:
            return None
        if len(args) != 1:
            raise ValueError(
                f"{type(self.model).__name__}'s LM head must be called with one positional argument, got {len(args)}"
            )
        self._hidden_states = args[0]
        return (self._compared(args[0]) if self._compares else args[0][..., :0, :],)

    def _compared(self, hidden_states: Tensor) -> Tensor:
        """(n, D), the last few, of which the head computes its output while numbers are compared."""
        return hidden_states.reshape(-1, hidden_states.shape[-1])[-4:]

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        hidden_states = self._hidden_states
        if not self._running or threading.get_ident() != self._thread or hidden_states is None:
            return None
        self._hidden_states = None
        if self._compares:
            _compare(type(self.model).__name__, self.head, self._compared(hidden_states), output)
            self._compares = False
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
        raise ValueError(
            "the model is compiled, its LM head too; compile the decoder alone: model.get_decoder().compile()"
        )
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
            raise ValueError(
                f"the model's LM head has a forward hook, {others[0]!r}, which the fused step cannot follow"
            )
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


_compared_heads: "WeakKeyDictionary[nn.Linear, tuple[ref[Tensor], ref[Tensor] | None, tuple[object, ...]]]"
_compared_heads = (
    WeakKeyDictionary()
)  # -> what it had when numbers were compared, and what else could change its output


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


def _global_hooks() -> tuple[object, ...]:
    return (*torch_module._global_forward_hooks, None, *torch_module._global_forward_pre_hooks)


def _is_compared(head: nn.Linear) -> bool:
    compared = _compared_heads.get(head)
    if compared is None:
        return False
    weight, bias, hooks = compared
    return weight() is head.weight and (None if bias is None else bias()) is head.bias and hooks == _global_hooks()


def _compare(name: str, head: nn.Linear, hidden_states: Tensor, output: Tensor) -> None:
    """ValueError unless that is what the head makes of these (n, D), whatever hooks and patches of torch there are."""
    expected = hidden_states.to(head.weight.dtype) @ head.weight.T
    expected = expected if head.bias is None else expected + head.bias
    # the same multiplication may be summed in another order: a few roundings of the largest logit
    bound = 8 * torch.finfo(output.dtype).eps * expected.float().nan_to_num().abs().amax().item()
    if not torch.allclose(output.float(), expected.float(), rtol=0, atol=bound, equal_nan=True):
        raise ValueError(f"{name}'s LM head returns something else than hidden_states @ weight.T + bias")
    if output.isfinite().all():  # else it says little: the next one is compared, too
        bias: ref[Tensor] | None = None if head.bias is None else ref(head.bias)
        _compared_heads[head] = ref(head.weight), bias, _global_hooks()


def lm_head_of(model: Any) -> nn.Linear:
    """The LM head of a transformers causal LM, whose structure is looked at; see ``checked_lm_head`` for what is raised."""
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"model must be a transformers causal LM, got {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"encoder-decoder models are not supported, got {name}")
    return _plain_lm_head(model)


@torch.no_grad()
def checked_lm_head(model: Any) -> CheckedHead:
    """The LM head of a transformers causal LM, and what the model makes of its output, after a check that this is all.

    Runs the model over one row of four tokens, with the hooks that it has: those that know another batch must come later.
    ``generate`` does without, and looks at its first step. Names of configuration fields are not looked at: a list of them
    would miss the next model family.

    Raises:
        TypeError: ``model`` has no ``get_output_embeddings``.
        ValueError: the model is an encoder-decoder or compiled as a whole, its LM head is not an ``nn.Linear`` without hooks or
            a forward of its own and with a plain weight and bias, or its logits are something else than what the head returns
            after factors and a soft cap.
    """
    head = lm_head_of(model)
    embeddings = model.get_input_embeddings().weight
    tokens = torch.arange(1, 5, device=embeddings.device)[None] % embeddings.shape[0]
    with HeadTap(model, head) as tap:
        tap.last_hidden_states(tap.run(model, input_ids=tokens, use_cache=False, return_dict=True).logits, 1)
    assert tap.transform is not None
    return CheckedHead(head, *tap.transform)
