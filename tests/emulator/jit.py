"""Triton's kernels on the machine, as they are compiled for Hopper. In a process of its own, without Triton's
interpreter: ``install`` makes every launch of the process, of tensors on the CPU, one of the machine."""

import os
import struct
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from flashsampling.inputs import SampleInputs
from flashsampling.kernels.triton.filtered import dispatch
from flashsampling.kernels.triton.fused import config
from tests.kernels.triton.target import compile_only

from .machine import Machine

_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
machines: dict[str, Machine] = {}  # by PTX


def install() -> None:
    """From here on."""
    assert os.environ.get("TRITON_INTERPRET") == "0", "TRITON_INTERPRET=0, before anything imports Triton"
    compiled = compile_only(90)
    compile_one = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, **options: Any) -> None:
        compile_one(self, *arguments, grid=grid, **options)
        kernel = compiled.pop()
        given = dict(zip((parameter.name for parameter in self.params), arguments)) | options
        ptx = kernel.asm["ptx"]
        if ptx not in machines:
            machines[ptx] = Machine(ptx)
        machine = machines[ptx]
        values = [_packed(kind, given[name]) for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        scratch = len(machine.kernel.parameters) - len(values)  # behind them, which no kernel here uses
        grid = grid(given) if callable(grid) else grid
        (programs,) = (size for size in (*grid, 1, 1)[:1])
        assert all(size == 1 for size in grid[1:])
        if programs:
            machine.launch([*values, *(bytes(8) for _ in range(scratch))], programs)

    JITFunction.run = run
    for module in (config, dispatch):
        vars(module)["unsupported"] = _as_interpreted(module.unsupported)


def _as_interpreted(unsupported: Callable[[SampleInputs], str | None]) -> Callable[[SampleInputs], str | None]:
    """Takes what Triton's interpreter would: tensors on the CPU."""

    def params(step: SampleInputs) -> str | None:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            return unsupported(step)

    return params


def _packed(kind: str, value: Any) -> bytes:
    if kind.startswith("*"):
        return struct.pack("Q", value.data_ptr() if isinstance(value, torch.Tensor) else value)
    if kind[0] == "i":
        bits = int(kind[1:])
        value = (int(value) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) if bits > 1 else bool(value)
    return struct.pack(_FORMATS[kind], value)
