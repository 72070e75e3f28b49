"""The torch operator ``flashsampling::sample``: schema, fake, dispatch to the implementations.

``torch.library.Library`` and not ``torch.library.custom_op``, whose wrapper adds 12 us of host time to a call where this adds 1
(torch 2.13 on an EPYC core). Where nobody looks, no tracer, mode, transform, subclass or profiler, ``sample`` does not go
through torch's dispatcher at all, which saves another third of what a call costs.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .exchange import WHOLE

IMPLEMENTATIONS = ("reference", "streaming", "triton", "cute")
_KERNELS = ("cute", "triton")  # in the order in which they are tried

_MIN_CUTE = (4, 8, 1)  # the only one measured
_MIN_TRITON = (3, 6)  # 3.4 fails to compile the kernel; 3.6 is measured, 3.9 compiles in all its shapes

_logger = logging.getLogger(__name__)

_library = torch.library.Library("flashsampling", "DEF")
_library.define(
    "sample(Tensor hidden_states, Tensor weight, Tensor? temperature, float temperature_value, Tensor? seed, "
    "SymInt seed_value, Tensor? offset, SymInt offset_value, SymInt num_samples, SymInt vocab_size, str impl, str tp) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _sample(
    hidden_states: Tensor,  # (B, D)
    weight: Tensor,  # (V, D)
    temperature: Tensor | None,  # (B,) float32, or None: temperature_value for every row
    temperature_value: float,
    seed: Tensor | None,  # (B,) int64, or None: seed_value
    seed_value: int,
    offset: Tensor | None,  # (B,) int64, or None: offset_value
    offset_value: int,
    num_samples: int,
    vocab_size: int,
    impl: str,  # "": chosen here
    tp: str,  # name of a TensorParallel; "": the weight is whole
) -> Tensor:
    """(B * num_samples,) int64, row by row."""
    batch, device = hidden_states.shape[0], hidden_states.device
    if batch == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    finish: Callable[[Tensor], Tensor] = _as_it_is
    if tp:
        from . import distributed

        group = distributed.find(tp)
        group.raise_if_unusable()
        impl, shard, finish = group.impl, group.shard, group.finish
    else:
        shard = WHOLE
    if impl == "" or impl in _KERNELS:
        for name in (impl,) if impl else _KERNELS if hidden_states.is_cuda else ():
            reason = kernel_cannot(name, hidden_states, weight)
            if reason is None:
                if not impl:
                    _log_choice(name, hidden_states.dtype, device)
                temperature_or_value = temperature_value if temperature is None else temperature
                seeds, offsets = seed_value if seed is None else seed, offset_value if offset is None else offset
                sample = _kernels(name).sample
                arguments = hidden_states, weight, temperature_or_value, seeds, offsets, num_samples, vocab_size, shard
                # torch.cuda.current_device() less its asking whether there is CUDA
                if hidden_states.is_cuda and device.index != torch._C._cuda_getDevice():
                    with torch.cuda.device(device):
                        return finish(sample(*arguments))
                return finish(sample(*arguments))
            if impl:
                raise ValueError(f"impl={impl!r} cannot do this: {reason}")
        impl = "streaming"
        _log_choice(impl, hidden_states.dtype, device)

    if temperature is None:
        temperature = torch.full((batch,), temperature_value, dtype=torch.float32, device=device)
    if seed is None:
        seed = torch.full((batch,), seed_value, dtype=torch.int64, device=device)
    if offset is None:
        offset = torch.full((batch,), offset_value, dtype=torch.int64, device=device)
    if impl == "streaming":
        from .impl import streaming

        out = streaming.sample(hidden_states, weight, temperature, seed, offset, num_samples, vocab_size, shard)
        return finish(out.flatten())
    from .impl import reference

    return reference.sample(hidden_states, weight, temperature, seed, offset, num_samples, vocab_size).flatten()


@functools.cache  # once for each, and a call pays for a look-up
def _log_choice(name: str, dtype: torch.dtype, device: torch.device) -> None:
    _logger.debug("impl=None takes %s for %s on %s (python -m flashsampling doctor says why)", name, dtype, device)


def _as_it_is(tokens: Tensor) -> Tensor:
    return tokens


def sample(hidden_states: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    """``torch.ops.flashsampling.sample``, past the dispatcher where it would change nothing."""
    unobserved = (
        type(hidden_states) is Tensor
        and type(weight) in (Tensor, Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and not torch.autograd.profiler._is_profiler_enabled
        and not (torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad))
    )
    return (_sample if unobserved else torch.ops.flashsampling.sample.default)(hidden_states, weight, *arguments)


@functools.cache
def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _MIN_TRITON:
        return f"triton {triton.__version__} is installed, it needs {'.'.join(map(str, _MIN_TRITON))} or newer"
    return None


@functools.cache
def _cute_missing() -> str | None:
    # not "cutlass": the old C++ template package goes by that name too
    for module, package in (("nvidia_cutlass_dsl", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed (pip install flashsampling[cute])"
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:  # a bare folder on the path: whoever put it there knows
        return None
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _MIN_CUTE:
        return f"nvidia-cutlass-dsl {version} is installed, it needs {'.'.join(map(str, _MIN_CUTE))} or newer"
    return None


@functools.cache
def _kernels(name: str) -> ModuleType:
    return importlib.import_module(f".impl.{name}", __package__)


def kernel_cannot(name: str, hidden_states: Tensor, weight: Tensor) -> str | None:
    """Why "cute" or "triton" cannot do a problem, or None."""
    missing = _cute_missing() if name == "cute" else _triton_missing()
    return _kernels(name).unsupported(hidden_states, weight) if missing is None else missing


def _fake(
    hidden_states: Tensor,
    weight: Tensor,
    temperature: Tensor | None,
    temperature_value: float,
    seed: Tensor | None,
    seed_value: int,
    offset: Tensor | None,
    offset_value: int,
    num_samples: int,
    vocab_size: int,
    impl: str,
    tp: str,
) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape[0] * num_samples, dtype=torch.int64)


_library.impl("sample", _sample, "CompositeExplicitAutograd")
torch.library.register_fake("flashsampling::sample", _fake, lib=_library)
