"""Triton's launches where there is no GPU: compiled for one, as they are launched, and not run. In a process of its
own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


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


def output_of(program: str, *arguments: Any, cache: Path | None = None) -> str:
    """What a program prints that compiles, by ``compile_only``. ``cache``: a folder of its own for its kernels."""
    environment = os.environ | {"TRITON_INTERPRET": "0"} | ({} if cache is None else {"TRITON_CACHE_DIR": str(cache)})
    command = [sys.executable, "-c", program, *map(str, arguments)]
    run = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
