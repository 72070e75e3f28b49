"""The torch operators: schemas, fakes, dispatch to the implementations.

    flashsampling::sample           a whole weight; a pure function
    flashsampling::sample_sharded   one step of a ``TensorParallel``; it has a side effect, the exchange with the other ranks

``torch.library.Library`` and not ``torch.library.custom_op``, whose wrapper adds 12 us of host time to a call where this adds 1
(torch 2.13 on an EPYC core). Where nobody looks, no tracer, mode, transform, subclass or profiler, they do not go through
torch's dispatcher at all, which saves another third of what a call costs.

A compiler removes a pure operator whose result nobody uses, and moves one that nothing orders; the ranks that kept theirs
would wait. So ``sample_sharded`` says that it writes to ``order``: one int64 per device for all groups, because two groups'
steps that trade places on one rank may wait for each other. Nothing is written in fact. AOTAutograd threads it through the
steps as data, FX's and Inductor's passes keep what changes an input, and it costs neither a copy nor a kernel there (seen with
torch 2.8 and 2.13). An exported program would refuse a constant that is written to, so it has an overload without, which
``torch.fx.has_side_effect`` keeps (Inductor from torch 2.10 on). Rejected: effect tokens (``_register_effectful_op`` of
torch.library), private, and not kept by FX before torch 2.10; ``has_side_effect`` alone, which does not order.
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
import torch.fx
from torch import Tensor
from torch.nn import Parameter

from . import registry
from .exchange import WHOLE, Shard

IMPLEMENTATIONS = ("reference", "streaming", "triton", "cute")
_KERNELS = ("cute", "triton")  # in the order in which they are tried

_MIN_CUTE = (4, 8, 1)  # the only one measured
_MIN_TRITON = (3, 6)  # 3.4 fails to compile the kernel; 3.6 is measured, 3.9 compiles in all its shapes

_logger = logging.getLogger(__name__)

_library = torch.library.Library("flashsampling", "DEF")
_ROWS = (
    "Tensor hidden_states, Tensor weight, Tensor? temperature, float temperature_value, Tensor? seed, SymInt seed_value, "
    "Tensor? offset, SymInt offset_value, SymInt num_samples"
)
for _schema in (
    f"sample({_ROWS}, SymInt vocab_size, str impl) -> Tensor",
    f"sample_sharded({_ROWS}, str tp, Tensor(a!) order) -> Tensor",
    f"sample_sharded.exported({_ROWS}, str tp) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


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
    shard: Shard = WHOLE,
) -> Tensor:
    """(B * num_samples,) int64, row by row: token ids, or what ``shard`` says."""
    batch, device = hidden_states.shape[0], hidden_states.device
    if batch == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    if impl == "" or impl in _KERNELS:
        for name in (impl,) if impl else _KERNELS if hidden_states.is_cuda else ():
            reason = kernel_cannot(name, hidden_states, weight)
            if reason is None:
                if not impl:
                    _log_choice(name, hidden_states.dtype, device)
                temperature_or_value = temperature_value if temperature is None else temperature
                seeds, offsets = seed_value if seed is None else seed, offset_value if offset is None else offset
                sample = kernels(name).sample
                arguments = hidden_states, weight, temperature_or_value, seeds, offsets, num_samples, vocab_size, shard
                # torch.cuda.current_device() less its asking whether there is CUDA
                if hidden_states.is_cuda and device.index != torch._C._cuda_getDevice():
                    with torch.cuda.device(device):
                        return sample(*arguments)
                return sample(*arguments)
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

        return streaming.sample(hidden_states, weight, temperature, seed, offset, num_samples, vocab_size, shard).flatten()
    from .impl import reference

    return reference.sample(hidden_states, weight, temperature, seed, offset, num_samples, vocab_size).flatten()


def _sample_sharded(
    hidden_states: Tensor,  # (B, D)
    weight: Tensor,  # (V_shard, D)
    temperature: Tensor | None,
    temperature_value: float,
    seed: Tensor | None,
    seed_value: int,
    offset: Tensor | None,
    offset_value: int,
    num_samples: int,
    tp: str,  # name of a TensorParallel
    order: Tensor | None = None,  # what is said to be written: the module's docstring
) -> Tensor:
    """The same from a shard. A call that raises before it took part in a step, or has no rows, counts as left out."""
    group = registry.find(tp)
    try:
        group.raise_if_unusable()
        # here, not where a tracer looks once: compiled functions and exported programs come with whatever batch
        group.check_call(weight, hidden_states.shape[0], num_samples)
        if hidden_states.shape[0] == 0:
            group.count_left_out()
        vocab_size, shard = group.last_token - group.first_token, group.shard
        rows = temperature, temperature_value, seed, seed_value, offset, offset_value
        out = _sample(hidden_states, weight, *rows, num_samples, vocab_size, group.impl, shard)
        if out.numel() == 0:
            return out
        finish = (
            out,
            temperature_value if temperature is None else temperature,
            seed_value if seed is None else seed,
            offset_value if offset is None else offset,
            num_samples,
        )
        if hidden_states.is_cuda and hidden_states.device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(hidden_states.device):
                return group.finish(*finish)
        return group.finish(*finish)
    except BaseException as error:
        count_left_out(group, error)
        raise


def count_left_out(group: Any, error: BaseException) -> None:
    """Counts a call that raised, once, however many of its callers come here: so ranks that are out of step are found out.

    An error in the exchange itself comes here too: it has failed the group for good, where one more does no harm.
    """
    if getattr(error, "_left_out_of", None) != group.name:
        error._left_out_of = group.name  # type: ignore[attr-defined]
        group.count_left_out()


@functools.cache  # once for each, and a call pays for a look-up
def _log_choice(name: str, dtype: torch.dtype, device: torch.device) -> None:
    _logger.debug("impl=None takes %s for %s on %s (python -m flashsampling doctor says why)", name, dtype, device)


@functools.cache
def order_of(device: torch.device) -> Tensor:
    """(1,) int64: what every ``sample_sharded`` on a device is said to write."""
    with torch.inference_mode(False):  # what is made inside could not be "written" outside
        order = torch.zeros(1, dtype=torch.int64, device=device)
    # torch._dynamo.mark_static_address, less importing torch._dynamo (1 s): CUDA graphs are not made of functions that change
    # an input, unless it stays where it is
    order._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return order


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
def kernels(name: str) -> ModuleType:
    """The package of an implementation that has kernels, "cute" or "triton"."""
    return importlib.import_module(f".impl.{name}", __package__)


def kernel_cannot(name: str, hidden_states: Tensor, weight: Tensor) -> str | None:
    """Why "cute" or "triton" cannot do a problem, or None."""
    missing = _cute_missing() if name == "cute" else _triton_missing()
    return kernels(name).unsupported(hidden_states, weight) if missing is None else missing


def _fake(hidden_states: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    num_samples = arguments[6]
    return hidden_states.new_empty(hidden_states.shape[0] * num_samples, dtype=torch.int64)


for _name, _function in (
    ("sample", _sample),
    ("sample_sharded", _sample_sharded),
    ("sample_sharded.exported", _sample_sharded),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashsampling::{_name}", _fake, lib=_library)


def _past_dispatcher(function: Callable[..., Tensor], operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator, past torch's dispatcher where that would change nothing."""

    def call(hidden_states: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
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
        return (function if unobserved else operator)(hidden_states, weight, *arguments)

    return call


sample = _past_dispatcher(_sample, torch.ops.flashsampling.sample.default)
sample_sharded = _past_dispatcher(_sample_sharded, torch.ops.flashsampling.sample_sharded.default)
sample_exported = torch.fx.has_side_effect(torch.ops.flashsampling.sample_sharded.exported)
