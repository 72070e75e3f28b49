"""``triton.jit`` of functions that any thread may launch first, in any order.

Triton hashes a function, with all that it calls, when a launch first needs it. In a caller's hash are the globals that a callee
reads only if that was hashed before: where a kernel lies on disk would depend on what a process launched before it, and, of
several threads, on chance. Here a function is hashed when it is defined: all that it calls is above it, or in a module that is
imported there, and so was hashed before. It takes 1 ms.
"""

from typing import Any

import torch
import triton

_FUNCTIONS: list[Any] = []


def jit(function: Any = None, **options: Any) -> Any:
    """A decorator, as ``triton.jit``."""
    if function is None:
        return lambda function: jit(function, **options)
    made = triton.jit(function, **options)
    if isinstance(made, triton.JITFunction):  # and nothing interpreted
        _FUNCTIONS.append(made)
        made.cache_key  # noqa: B018, it is kept
    return made


def begin(device: torch.device) -> None:
    """Makes what Triton keeps of each function for a device: of two threads that begin one, one would write to what the other
    has replaced, and so what it compiled would be compiled again."""
    for function in _FUNCTIONS:
        function.device_caches[device.index]
