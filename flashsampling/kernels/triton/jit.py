"""A ``triton.jit`` whose cache keys do not depend on the order of launches, and compilation ahead of launches.

Triton hashes a function and its callees when a launch first needs the function. A caller's hash contains the globals of
a callee only if the callee was hashed first. The path of a kernel in the disk cache would therefore depend on the
earlier launches of the process, and with several threads on chance. ``jit`` hashes a function when the function is
defined: its callees are defined above it or in an imported module, so they are hashed already. A hash takes 1 ms.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import triton
from triton.runtime import _async_compile

_only_compiles = ContextVar("only_compiles", default=False)


class _Function(triton.JITFunction):  # type: ignore[misc] # it is Any
    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.run, grid=grid, warmup=only_compiles())


def jit(function: Any = None, **options: Any) -> Any:
    """Decorates a function as ``triton.jit`` does, and hashes it at once."""
    if function is None:
        return functools.partial(jit, **options)
    if triton.knobs.runtime.interpret:
        return triton.jit(function, **options)
    made = _Function(function, **options)
    made.cache_key  # noqa: B018, it is kept
    return made


def only_compiles() -> bool:
    """Returns whether this thread's launches only compile (``compiling``)."""
    return _only_compiles.get()


def _forget_cancelled(mode: triton.AsyncCompileMode) -> None:
    """Removes cancelled compilations, for which Triton would wait."""
    for future in mode.raw_futures:
        if future.cancelled():
            mode.future_kernels[future._key].result(ignore_errors=True)
    mode.raw_futures[:] = [future for future in mode.raw_futures if not future.cancelled()]


@contextlib.contextmanager
def compiling(at_once: int) -> Iterator[None]:
    """Compiles the kernels that this thread launches, in ``at_once`` threads, and runs none of them.

    The launches write no output. All kernels are compiled at the exit of the context. A failed compilation raises in
    the later launch that needs the kernel.

    Threads help because Triton's compiler spends less than a tenth of its time in Python.
    """
    outer, before = _async_compile.active_mode.get(), _only_compiles.set(True)
    with ThreadPoolExecutor(at_once) as pool:
        mode = triton.AsyncCompileMode(pool, ignore_errors=True)
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
            _async_compile.active_mode.set(outer)  # Triton 3.6 leaves it as it is where its waiting is interrupted
