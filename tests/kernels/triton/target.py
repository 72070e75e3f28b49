"""Triton's launches where there is no GPU: compiled for one, as they are launched, and not run, in a process of its
own; or looked up in no cache, by ``LaunchKeys``."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from flashsampling.kernels.triton.jit import with_struct_types


class _Driver:
    """Names a target and has no device."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int) -> list[Any]:
    """From now on launches compile for that GPU alone: the compiled kernels, to which each launch adds its own."""
    compiled: list[Any] = []
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(launch(self, *arguments, grid=grid, warmup=True, **options))

    triton.runtime.driver.set_active(_Driver(capability))
    JITFunction.run = run
    return compiled


class LaunchKeys:
    """Stands in for a kernel: collects the keys that Triton would look up in its cache, and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        jit = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        bind = create_function_from_signature(jit.signature, jit.params, make_backend(GPUTarget("cuda", 90, 32)))
        self.bind = with_struct_types(bind, [param.name for param in jit.params], kernel.structs)
        self.seen: set[str] = set()

    def __getitem__(self, grid: Any) -> "LaunchKeys":
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        _, specialization, options = self.bind(*arguments, **named)
        self.seen.add(str((specialization, options)))


def output_of(program: str, *arguments: Any, cache: Path | None = None) -> str:
    """What a program prints that compiles, by ``compile_only``. ``cache``: a folder of its own for its kernels."""
    from tests.conftest import run_python  # by which these programs, which import this module, would be interpreted

    own_cache = {} if cache is None else {"TRITON_CACHE_DIR": str(cache)}
    return run_python("-c", program, *arguments, TRITON_INTERPRET="0", **own_cache)


def spills_of(kernel: Any) -> int:
    """Bytes of stack that each thread of a compiled kernel has."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    (spills,) = re.findall(r"STACK:(\d+)", usage)
    return int(spills)
