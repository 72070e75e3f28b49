"""The torch operator ``flashsampling::sample``: schema, fake, dispatch to the implementations.

``torch.library.Library`` and not ``torch.library.custom_op``, whose wrapper adds 12 us of host time to a call where this adds 1
(torch 2.13 on an EPYC core).
"""

import functools
import importlib.util

import torch
from torch import Tensor

IMPLEMENTATIONS = ("reference", "streaming", "triton")

_MIN_TRITON = (3, 6)  # 3.4 fails to compile the kernel; 3.6 is measured, 3.9 compiles in all its shapes

_library = torch.library.Library("flashsampling", "DEF")
_library.define(
    "sample(Tensor hidden_states, Tensor weight, Tensor? temperature, float temperature_value, Tensor? seed, "
    "SymInt seed_value, Tensor? offset, SymInt offset_value, SymInt num_samples, SymInt vocab_size, str impl) -> Tensor",
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
) -> Tensor:
    """(B, num_samples) int64."""
    batch = hidden_states.shape[0]
    if batch == 0:
        return torch.empty((0, num_samples), dtype=torch.int64, device=hidden_states.device)
    if impl in ("", "triton"):
        reason = _triton_cannot(hidden_states, weight)
        if reason is None and (impl or hidden_states.is_cuda):
            from .impl.triton import sample

            temperature_or_value = temperature_value if temperature is None else temperature
            seeds, offsets = seed_value if seed is None else seed, offset_value if offset is None else offset
            return sample(hidden_states, weight, temperature_or_value, seeds, offsets, num_samples, vocab_size)
        if impl:
            raise ValueError(f"impl='triton' cannot do this: {reason}")
        impl = "streaming"

    device = hidden_states.device
    if temperature is None:
        temperature = torch.full((batch,), temperature_value, dtype=torch.float32, device=device)
    if seed is None:
        seed = torch.full((batch,), seed_value, dtype=torch.int64, device=device)
    if offset is None:
        offset = torch.full((batch,), offset_value, dtype=torch.int64, device=device)
    if impl == "streaming":
        from .impl import streaming

        return streaming.sample(hidden_states, weight, temperature, seed, offset, num_samples, vocab_size)
    from .impl import reference

    return reference.sample(hidden_states, weight, temperature, seed, offset, num_samples, vocab_size)


@functools.cache
def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _MIN_TRITON:
        return f"triton {triton.__version__} is installed, it needs {'.'.join(map(str, _MIN_TRITON))} or newer"
    return None


def _triton_cannot(hidden_states: Tensor, weight: Tensor) -> str | None:
    missing = _triton_missing()
    if missing is not None:
        return missing
    from .impl.triton import unsupported

    return unsupported(hidden_states, weight)


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
) -> Tensor:
    return hidden_states.new_empty((hidden_states.shape[0], num_samples), dtype=torch.int64)


_library.impl("sample", _sample, "CompositeExplicitAutograd")
torch.library.register_fake("flashsampling::sample", _fake, lib=_library)
