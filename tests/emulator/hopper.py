"""This package's Hopper kernel on the machine, launched as ``kernels.hopper.launch`` launches it, with tensors on the
CPU."""

import ctypes
import functools
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from flashsampling.kernels.hopper import cache, config, launch
from flashsampling.kernels.hopper.config import KINDS, TILE_D, TILE_V, Features, TileConfig

from .machine import Machine, kept

_TENSOR_MAP_BYTES = 128
_FORMATS = {"Int32": "i", "Int64": "q", "Float32": "f"}
# in a process of its own: the compiler reads its target when it is imported
_COMPILE = """
import sys
import cutlass
from flashsampling.kernels.hopper.config import Features, TileConfig
from flashsampling.kernels.hopper.kernel import compile_kernel

dtype, config, features, architecture, folder = sys.argv[1:]
options = f"--gpu-arch {architecture} --keep-ptx --keep-cubin --dump-dir {folder}"
compile_kernel(getattr(cutlass, dtype), eval(config), options, **eval(features)._asdict())
"""


REAL = {"_device_cannot": config._device_cannot}  # of ``config``


def install() -> None:
    """From here on ``impl="cute"`` takes tensors on the CPU, in this process."""
    vars(launch)["kernel_for"] = machine_for
    vars(config)["_device_cannot"] = lambda device: None if device.type == "cpu" else f"tensors on {device.type}"


@functools.cache
def machine_for(dtype: torch.dtype, config: TileConfig, features: Features = KINDS["plain"]) -> "HopperKernel":
    """In place of ``cache.kernel_for``."""
    return HopperKernel(compiled(dtype, config, features, "ptx").read_text(), config)


def compiled(dtype: torch.dtype, config: TileConfig, features: Features, suffix: str) -> Path:
    """What the compiler makes of a kernel for Hopper, "ptx" or "cubin": files that are kept, by what they depend on."""
    element = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}[dtype]
    parts = (cache._fingerprint(), element, *(str(int(part)) for part in (*vars(config).values(), *features)))
    folder = kept() / "-".join(parts)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=kept()) as scratch:
                environment = os.environ | {"CUTE_DSL_ARCH": cache.ARCHITECTURE}
                made = Path(scratch) / "made"
                made.mkdir()
                words = [element, repr(config), repr(features), cache.ARCHITECTURE, made]
                command = [sys.executable, "-c", _COMPILE, *words]
                result = subprocess.run(
                    command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True
                )
                assert result.returncode == 0, result.stderr[-3000:]
                made.replace(folder)
    (path,) = folder.glob(f"*.{suffix}")
    return path


class HopperKernel:
    """Called as the compiled launch is: with the values of ``LaunchArguments``."""

    def __init__(self, ptx: str, config: TileConfig):
        self.config, self.machine = config, Machine(ptx)

    def __call__(self, *values: Any) -> None:
        """A launch."""
        from flashsampling.kernels.hopper.arguments import LaunchArguments  # which imports the compiler

        values = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values)
        of_host, args, params, out = LaunchArguments.of(values)
        cluster = self.config.cluster
        weight = _TensorMap(of_host.weight, of_host.weight_stride, of_host.weight_rows, of_host.dim, TILE_V)
        hidden = _TensorMap(
            of_host.hidden, of_host.hidden_stride, args.batch, of_host.dim, self.config.block_b // cluster
        )
        parameters = [  # of ``SampleKernel.kernel``
            weight.packed(),
            struct.pack("ii", of_host.weight_rows, of_host.dim),
            hidden.packed(),
            struct.pack("ii", args.batch, of_host.dim),
            b"\0",
            *(field for part in (args, params, out) if part is not None for field in _packed(part)),
            *(struct.pack("i", number) for number in (of_host.dim, of_host.row_blocks, of_host.ctas)),
        ]
        self.machine.launch(parameters, of_host.row_blocks * of_host.ctas, cluster)


class _TensorMap(ctypes.Structure):
    """``Tensor`` of machine.h: a matrix of 16-bit elements, and how many rows a copy has."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("address", "rows_apart")),
        *((name, ctypes.c_int32) for name in ("columns", "rows", "box_columns", "box_rows")),
    ]

    def __init__(self, address: int, stride: int, rows: int, columns: int, box_rows: int):
        super().__init__(address, 2 * stride, columns, rows, TILE_D, box_rows)

    def packed(self) -> bytes:
        return bytes(self).ljust(_TENSOR_MAP_BYTES, b"\0")


def _packed(part: Any) -> Iterator[bytes]:
    for name, hint in type(part).__annotations__.items():
        value, kind = getattr(part, name), _FORMATS[hint.__name__]
        if kind == "q":
            value = (int(value) + 2**63) % 2**64 - 2**63
        yield struct.pack(kind, value)
