"""Private functions of torch, and substitutes if a release of torch lacks one.

A substitute assumes that a tracer, mode or transform sees the call, which then goes through torch's dispatcher: this
costs host time and changes no result.
"""

import importlib
from typing import Any

import torch


def _private(module: str, name: str, otherwise: Any) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return otherwise


def _register_dataclass(kind: type, *, serialized_type_name: str) -> None:
    import torch.export

    torch.export.register_dataclass(kind, serialized_type_name=serialized_type_name)


def _has_inner_tensors(value: object) -> bool:
    return all(hasattr(value, name) for name in ("__tensor_flatten__", "__tensor_unflatten__"))


tracing_state = _private("torch._C", "_get_tracing_state", lambda: torch.jit.is_tracing() or None)
dispatch_modes = _private("torch._C", "_len_torch_dispatch_stack", lambda: 1)
function_modes = _private("torch._C", "_len_torch_function_stack", lambda: 1)
functorch_is_active = _private("torch._C", "_are_functorch_transforms_active", lambda: True)
# torch.export.register_dataclass is public, but torch.export takes long to import
register_dataclass = _private("torch.utils._pytree", "register_dataclass", _register_dataclass)
is_traceable_wrapper_subclass = _private(
    "torch.utils._python_dispatch", "is_traceable_wrapper_subclass", _has_inner_tensors
)
