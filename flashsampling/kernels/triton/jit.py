"""``triton.jit`` of functions that any process may launch in any order, and compile ahead of launching.

Triton hashes a function, with all that it calls, when a launch first needs it. In a caller's hash are the globals that
a callee reads only if that was hashed before: where a kernel lies on disk would depend on what a process launched
before it, and, of several threads, on chance. Here a function is hashed when it is defined: all that it calls is above
it, or in a module that is imported there, and so was hashed before. It takes 1 ms.
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
    """A decorator, as ``triton.jit``."""
    if function is None:
        return functools.partial(jit, **options)
    if triton.knobs.runtime.interpret:
        return triton.jit(function, **options)
    made = _Function(function, **options)
    made.cache_key  # noqa: B018, it is kept
    return made


def only_compiles() -> bool:
    """Whether this thread's launches run nothing: see ``compiling``."""
    return _only_compiles.get()


def _forget_cancelled(mode: triton.AsyncCompileMode) -> None:
    """What nobody makes any more, and Triton would wait for."""
    for future in mode.raw_futures:
        if future.cancelled():
            mode.future_kernels[future._key].result(ignore_errors=True)
    mode.raw_futures[:] = [future for future in mode.raw_futures if not future.cancelled()]


@contextlib.contextmanager
def compiling(at_once: int) -> Iterator[None]:
    """Meanwhile this thread's launches compile what is missing, in as many threads, and run nothing: whatever they
    would have written is not written. At the end all is compiled; what cannot be is the error of the launch that
    needs it.

    Triton's compiler is Python for less than a tenth of its time.
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
