"""Takes the LM head's input from a model, and detects how the model changes the head's output.

The model does not change: its whole ``forward`` runs, with two hooks on the LM head that act only on this thread's own
calls. The first takes the head's input and passes on none of its positions, so no logit is computed. The second
replaces the logits by a ``_Placeholder``. The model applies to the placeholder what it would apply to its logits, in
every step. Factors and one soft cap are recorded, whatever the names of their configuration fields; any other operation
raises. A generation takes the transform of every step from the caller's own batch: a probe with other tokens would run
in the caller's hooks, which may depend on the batch (PEFT's ``adapter_names``, steering vectors).

Calling the base model instead would miss hooks on the model and operations between base model and head. A
``TorchFunctionMode`` needs no hooks, but intercepts every torch function of the model.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

_T = TypeVar("_T")
_LINEAR_FORWARD = nn.Linear.forward


class Transform(NamedTuple):
    """The logit transform of a model after its LM head, as ``flashsampling.sample`` takes it."""

    logit_scale: float = 1.0
    soft_cap: float = 0.0  # 0: none


class HeadInput(NamedTuple):
    """The input of the LM head at each row's last positions, and the transform of its output."""

    hidden_states: Tensor  # (B, positions, D)
    transform: Transform


class CheckedHead(NamedTuple):
    """An LM head and the model's logit transform: ``soft_cap * tanh(logit_scale * output / soft_cap)``."""

    linear: nn.Linear
    logit_scale: float
    soft_cap: float  # 0: none


class _Placeholder(Tensor):
    """Replaces the LM head's logits, with their shape but without their memory.

    A change of dtype or layout returns it unchanged. A product or quotient with a number, and a tanh, return one that
    records the operation. Any other operation raises, so no change of the logits is missed.
    """

    hidden_states: Tensor  # (B, T, D), the LM head's input
    changed: str  # beginning of the error message
    done: tuple[tuple[str, float], ...] = ()  # recorded operations in order: a factor, a divisor, or "tanh"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PROPERTIES:
            return super().__torch_function__(func, types, args, kwargs)
        if args and isinstance(args[0], _Placeholder):
            if func in _SAME_LOGITS and args[0]._is_exact(args[1:], kwargs):
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

    def _is_exact(self, arguments: Any, named: Any) -> bool:
        """Returns whether ``Tensor.to`` with these arguments does not round.

        Other functions of ``_SAME_LOGITS`` have none."""
        values = (*arguments, *(named or {}).values())
        dtypes = [value.dtype if isinstance(value, Tensor) else value for value in values]
        dtypes = [dtype for dtype in dtypes if isinstance(dtype, torch.dtype)]
        return all(torch.promote_types(dtype, self.dtype) == dtype for dtype in dtypes)

    def _after(self, kind: str, number: float) -> "_Placeholder":
        with torch._C.DisableTorchFunctionSubclass():
            other = self.detach().as_subclass(_Placeholder)
        other.hidden_states, other.changed, other.done = self.hidden_states, self.changed, (*self.done, (kind, number))
        return other

    def transform(self) -> Transform:
        """Returns the transform that the recorded operations make."""
        kinds = [kind for kind, _ in self.done]
        if "tanh" not in kinds:
            return Transform(_product(self.done))
        cut = kinds.index("tanh")
        before, after = self.done[:cut], self.done[cut + 1 :]
        cap = _product(after)
        if before and before[-1] == ("divisor", cap):  # not divided and multiplied again, which rounds
            return Transform(_product(before[:-1]), cap)
        return Transform(_product(before) * cap, cap)


def _product(done: tuple[tuple[str, float], ...]) -> float:
    product = 1.0
    for kind, number in done:
        product = product * number if kind == "factor" else product / number
    return product


_SAME_LOGITS = frozenset((Tensor.float, Tensor.to, Tensor.contiguous, Tensor.detach))
_FOLLOWED = {
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), "factor"),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), "divisor"),
    **dict.fromkeys((Tensor.tanh, torch.tanh), "tanh"),
}
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad")
_PROPERTIES = {Tensor.size, Tensor.dim, *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES)}


class HeadTap:
    """Takes the LM head's input from calls of the model that go through ``run``, which compute no logits.

    The hooks act only inside ``run`` and in its thread, so all other calls see the model unchanged. Hooks may be
    registered and removed while other threads call the model: torch copies them before it iterates, without releasing
    the GIL.
    """

    def __init__(self, model: Any, head: nn.Linear) -> None:
        self.model, self.head = model, head
        self._running_in: int | None = None  # the thread
        self._hidden_states: Tensor | None = None

    def __enter__(self) -> "HeadTap":
        head = self.head
        self._hooks = head.register_forward_pre_hook(self._before), head.register_forward_hook(self._after)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def run(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Runs ``call``, which calls the model."""
        self._running_in = threading.get_ident()
        try:
            return call(*args, **kwargs)
        finally:
            self._running_in = self._hidden_states = None

    def read(self, logits: Any, batch: int, positions: int = 1) -> HeadInput:
        """Returns what the logits of a run were to be made of, at each row's last positions."""
        name = type(self.model).__name__
        if not isinstance(logits, _Placeholder):
            raise ValueError(
                f"{name} changes the logits after its LM head, or does not call it: it returned others, which the "
                "fused step cannot follow"
            )
        hidden_states = logits.hidden_states
        if hidden_states.dim() != 3 or hidden_states.shape[0] != batch or hidden_states.shape[1] < positions:
            raise ValueError(
                f"{name}'s LM head must be given hidden states of shape ({batch}, {positions} or more positions, dim), "
                f"got shape {tuple(hidden_states.shape)}"
            )
        weight = self.head.weight
        if hidden_states.dtype != weight.dtype or torch.is_autocast_enabled(hidden_states.device.type):
            raise ValueError(
                f"{name}'s LM head would convert what it multiplies (autocast?): hidden states are "
                f"{hidden_states.dtype}, its weight {weight.dtype}; load the model in the dtype that you want and "
                "generate without autocast"
            )
        return HeadInput(hidden_states[:, -positions:], logits.transform())

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if self._running_in != threading.get_ident():
            return None
        self._hidden_states = args[0]
        return (args[0][..., :0, :],)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        hidden_states = self._hidden_states
        if self._running_in != threading.get_ident() or hidden_states is None:
            return None
        self._hidden_states = None
        shape = (*hidden_states.shape[:-1], output.shape[-1])
        placeholder = output.new_empty((1,) * len(shape)).expand(shape).as_subclass(_Placeholder)
        placeholder.hidden_states = hidden_states
        placeholder.changed = f"{type(self.model).__name__} changes the logits after its LM head"
        return placeholder


def _plain_lm_head(model: Any) -> nn.Linear:
    """Returns the model's LM head if it computes ``hidden_states @ weight.T + bias`` and nothing else, else raises."""
    outer = model.get_output_embeddings()
    head = base_linear(outer)
    if model._compiled_call_impl is not None or hasattr(vars(model).get("forward"), "_torchdynamo_orig_callable"):
        raise ValueError(
            "the model is compiled, its LM head too; compile the decoder alone: model.get_decoder().compile()"
        )
    if type(head) is not nn.Linear:
        raise ValueError(
            f"the model's output embedding must be an nn.Linear, got {type(head).__module__}.{type(head).__name__}: "
            "quantised heads, subclasses and adapters that are not PEFT's are not supported"
        )
    for module in {outer, head}:
        own_forward = "forward" in vars(module) or module._compiled_call_impl is not None
        if own_forward or nn.Linear.forward is not _LINEAR_FORWARD:
            raise ValueError(
                "the model's LM head has a forward of its own (accelerate puts one there for a device_map over several "
                "devices or with offloading, compile() another), which the fused step cannot follow"
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
                f"{tensor.dtype}, shape {tuple(tensor.shape)} on {tensor.device}: sharded (DTensor, FSDP, ZeRO-3), "
                "quantised and offloaded heads are not supported"
            )
    return head


def base_linear(module: Any) -> Any:
    """Returns the linear layer of ``module``: itself, or the base layer of a PEFT adapter that is merged or disabled.

    Raises:
        ValueError: the adapter changes the output, or may change it.
    """
    if not type(module).__module__.startswith("peft.") or not hasattr(module, "merged"):
        return module
    if module.merged and module.disable_adapters:
        raise ValueError(
            "the model's LM head has an adapter (LoRA) that is merged and disabled: the model's next call would take "
            "it out of the weight; call unmerge_adapter() first"
        )
    if not module.merged and not module.disable_adapters:
        raise ValueError(
            "the model's LM head has an adapter (LoRA) that is active, and the fused step multiplies with one weight: "
            "call merge_adapter(), or generate within disable_adapter()"
        )
    return module.base_layer


class HeadPlace:
    """Checks that a model still has the LM head that a sampler was made with. Holds the model weakly.

    A copy or a pickle of it is None: a copied sampler belongs to no model.
    """

    def __init__(self, model: Any) -> None:
        # a wrapper (PEFT, torch.compile) exposes the inner model's method
        model = getattr(model.get_output_embeddings, "__self__", model)
        outer = model.get_output_embeddings()
        # get_output_embeddings() costs a call 35 microseconds, a name 0.6
        self._names = next(name for name, module in model.named_modules() if module is outer).split(".")
        self._model = ref(model)

    def require(self, head: nn.Module) -> None:
        """Raises ValueError if the model has another head by now. ``torch.compile`` traces this."""
        model = self._model()
        if model is None:
            return
        module = model
        for name in self._names:
            module = None if module is None else module._modules.get(name)
        if module is not head and base_linear(module) is not head:
            raise ValueError(
                f"{type(model).__name__}'s LM head was replaced (resize_token_embeddings, an adapter, model.lm_head = "
                "...) after this sampler was made: make another, LMHeadSampler.from_model(model)"
            )

    def __reduce__(self) -> Any:
        return type(None), ()


def get_lm_head(model: Any) -> nn.Linear:
    """Returns the LM head of a transformers causal LM after a check of its structure.

    Raises as ``checked_lm_head`` does."""
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"model must be a transformers causal LM, got {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"encoder-decoder models are not supported, got {name}")
    return _plain_lm_head(model)


@torch.no_grad()
def checked_lm_head(model: Any) -> CheckedHead:
    """Returns the LM head of a transformers causal LM and the model's logit transform, after a check that there is no
    more.

    Runs the model over one row of four tokens, with all its hooks: hooks for another batch must be registered later.
    ``generate`` checks each of its steps instead. Names of configuration fields are not used: a list would miss the
    next model family.

    Raises:
        TypeError: ``model`` has no ``get_output_embeddings``.
        ValueError: the model is an encoder-decoder or compiled as a whole; its LM head is no ``nn.Linear`` with a plain
            weight and bias, or has hooks or a forward of its own; or its logits are not the head's output after factors
            and a soft cap.
    """
    head = get_lm_head(model)
    embeddings = model.get_input_embeddings().weight
    tokens = torch.arange(1, 5, device=embeddings.device)[None] % embeddings.shape[0]
    with HeadTap(model, head) as tap:
        logits = tap.run(model, input_ids=tokens, use_cache=False, return_dict=True).logits
    return CheckedHead(head, *tap.read(logits, 1).transform)
