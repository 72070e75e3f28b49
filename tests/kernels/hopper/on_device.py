"""Functions of the Hopper kernel by themselves, over arrays: compiled as they are, for the GPU or the emulator."""

import functools
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Boolean, Float32, Int32

from tests.conftest import DEVICE

CTAS, THREADS = 8, 128


class _Elementwise:
    """A kernel that calls a function of 32-bit numbers with each row of a matrix. Its annotations say of which."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        *self.kinds, self.returns = function.__annotations__.values()

    @cute.jit
    def __call__(self, given: cute.Tensor, made: cute.Tensor, count: Int32, stream):
        self.kernel(given, made, count).launch(grid=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, given: cute.Tensor, made: cute.Tensor, count: Int32):
        first = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        for row in cutlass.range(first, count, CTAS * THREADS, unroll=1):
            result = self.function(*(given[row, n].bitcast(kind) for n, kind in enumerate(self.kinds)))
            for n, value in enumerate(result if isinstance(result, tuple) else (result,)):
                made[row, n] = Int32(value) if isinstance(value, Boolean) else value.bitcast(Int32)


def compile_elementwise(
    function: Callable[..., Any], outputs: int = 1, options: str = "", architecture: str = "sm_90a"
) -> Any:
    """Returns a launch of two matrices of int32, (N, arguments) and (N, outputs), and N."""
    kernel = _Elementwise(function)
    matrices = (
        cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int32(), columns), stride_order=(1, 0))
        for columns in (len(kernel.kinds), outputs)
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {architecture} {options}"
    return cute.compile(kernel, *matrices, Int32(1), stream, options=options)


@functools.cache
def _launch_of(function: Callable[..., Any], outputs: int) -> Callable[..., Any]:
    if DEVICE.type == "cuda":
        return compile_elementwise(function, outputs)
    from tests.emulator.machine import Machine

    with tempfile.TemporaryDirectory() as folder:
        compile_elementwise(function, outputs, f"--keep-ptx --dump-dir {folder}")
        (ptx,) = Path(folder).glob("*.ptx")
        machine = Machine(ptx.read_text())

    def launch(given: torch.Tensor, made: torch.Tensor, count: int) -> None:
        tensors = [struct.pack("qii", each.data_ptr(), count, 0) for each in (given, made)]
        machine.launch([*tensors, struct.pack("i", count)], CTAS)

    return launch


def on_device(function: Callable[..., Any], outputs: int = 1) -> Callable[..., Any]:
    """Returns the function of arrays, float32 or uint32, or numbers; of several ``outputs`` an array of each."""

    def of_arrays(*arrays: Any) -> Any:
        kernel = _Elementwise(function)
        dtypes = [np.float32 if kind is Float32 else np.uint32 for kind in kernel.kinds]
        columns = [np.asarray(array, dtype).view(np.int32) for array, dtype in zip(arrays, dtypes, strict=True)]
        given = torch.from_numpy(np.stack(np.broadcast_arrays(*columns), axis=-1).reshape(-1, len(columns))).to(DEVICE)
        made = torch.zeros(len(given), outputs, dtype=torch.int32, device=DEVICE)
        _launch_of(function, outputs)(given, made, len(given))
        returns = {Float32: np.float32, Boolean: np.int32}.get(kernel.returns, np.uint32)
        found = np.ascontiguousarray(made.cpu().numpy().T).view(returns)
        found = found != 0 if kernel.returns is Boolean else found
        return found[0] if outputs == 1 else found

    return of_arrays
