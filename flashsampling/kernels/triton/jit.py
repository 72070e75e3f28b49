"""Wraps ``triton.jit``, so that any process may launch functions in any order and compile them before launching.

Triton hashes a function, with all functions that it calls, when a launch first needs it. A caller's hash contains the
globals that a callee reads only if the callee was hashed earlier: the path of a kernel on disk would depend on earlier
launches of the process and, with several threads, on chance. Here a function is hashed when it is defined: all its
callees are above it, or in a module that is imported there, and were hashed earlier. Hashing takes 1 ms.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, get_type_hints

import torch
import triton
from triton.runtime import _async_compile

_TYPES = {int: "i64", float: "fp32"}
_only_compiles = ContextVar("only_compiles", default=False)


class _Function(triton.JITFunction):  # type: ignore[misc] # it is Any
    def __init__(self, function: Any, structs: Mapping[str, type], **options: Any) -> None:
        super().__init__(function, **options)
        self.structs = structs
        for param in self.params:
            if param.name in structs:
                param.annotation_type = "fp32"  # any type that Triton takes without a look at the value

    def create_binder(self) -> Any:
        self.used_global_vals = {}  # which each launch would compare: 66 constants, that nobody changes
        *rest, bind = super().create_binder()
        return (*rest, with_struct_types(bind, [param.name for param in self.params], self.structs))

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.run, grid=grid, warmup=only_compiles())


def with_struct_types(bind: Callable[..., Any], names: list[str], structs: Mapping[str, type]) -> Callable[..., Any]:
    """Returns Triton's ``bind`` of a kernel with the types of its ``structs`` in place of those of their values."""
    types = {names.index(name): _types_of(struct) for name, struct in structs.items()}

    def bind_structs(*arguments: Any, **options: Any) -> Any:
        bound, specialization, options = bind(*arguments, **options)
        for index, of_struct in types.items():
            specialization[index] = of_struct
        return bound, specialization, options

    return bind_structs if types else bind


def _types_of(struct: type) -> tuple[Any, Any]:
    """Returns types and specializations of a NamedTuple whose fields are integers and numbers."""
    types = [_TYPES[hint] for hint in get_type_hints(struct).values()]
    return struct(*types), struct(*[None] * len(types))


def jit(function: Any = None, *, structs: Mapping[str, type] | None = None, **options: Any) -> Any:
    """Decorates a function as ``triton.jit`` does.

    ``structs`` names the parameters that are NamedTuples of ``int`` and ``float``: these are int64 and float32 at run
    time, whatever their values. Triton would compile another kernel for a 1, a multiple of 16 and a wide integer.
    """
    if function is None:
        return functools.partial(jit, structs=structs, **options)
    if triton.knobs.runtime.interpret:
        made = triton.jit(function, **options)
        made.structs = structs or {}
        return made
    made = _Function(function, structs or {}, **options)
    made.cache_key  # noqa: B018, a cached property
    return made


def only_compiles() -> bool:
    """Returns whether this thread's launches only compile: see ``compiling``."""
    return _only_compiles.get()


def _forget_cancelled(mode: triton.AsyncCompileMode) -> None:
    """Removes cancelled compilations, which Triton would wait for."""
    for future in mode.raw_futures:
        if future.cancelled():
            mode.future_kernels[future._key].result(ignore_errors=True)
    mode.raw_futures[:] = [future for future in mode.raw_futures if not future.cancelled()]


class _CompileAndLoad(triton.AsyncCompileMode):  # type: ignore[misc] # it is Any
    """Loads kernels in the threads that compile them. Each needs a launcher, for which gcc takes 0.3 s."""

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        if not torch.cuda.is_initialized():
            return super().submit(key, compile_fn, finalize_fn)
        device = torch.cuda.current_device()

        def compile_and_load() -> Any:
            kernel = compile_fn()
            with torch.cuda.device(device):
                kernel.run  # noqa: B018, a property
            return kernel

        return super().submit(key, compile_and_load, finalize_fn)


@contextlib.contextmanager
def compiling(at_once: int) -> Iterator[None]:
    """Makes this thread's launches compile missing kernels, in ``at_once`` threads, and run nothing: no output is
    written.

    At the end all kernels are compiled and loaded. A kernel that cannot be compiled raises at the launch that needs it.
    Less than a third of Triton's compilation is Python.
    """
    outer, before = _async_compile.active_mode.get(), _only_compiles.set(True)
    with ThreadPoolExecutor(at_once) as pool:
        mode = _CompileAndLoad(pool, ignore_errors=True)
        try:
            with mode:
                try:
                    yield
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    _forget_cancelled(mode)
                    raise
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            _only_compiles.reset(before)
            _async_compile.active_mode.set(outer)  # Triton 3.6 does not reset it when its waiting is interrupted
