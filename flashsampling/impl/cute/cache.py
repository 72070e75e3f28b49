"""Compiled kernels: made once, kept in memory and on disk.

In memory the key is what a kernel is specialised to, dtype and tile shape. On disk it is that and a fingerprint of everything a
compiled object depends on: this package's sources, the compiler's version, Python's, the architecture. The folder is
``$FLASHSAMPLING_CACHE_DIR``, or ``~/.cache/flashsampling``; objects are written beside their place and moved there, so
processes that compile the same kernel at once do no harm, and one that cannot be read is made again.

The first call for a dtype makes every tile shape, which takes half a minute on two cores with an empty folder
(``scripts/precompile`` does it ahead): after it no batch size compiles anything.
"""

import functools
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .config import CONFIGS, TileConfig

ARCHITECTURE = "sm_90a"
_SYMBOL = "flashsampling_sample"

_lock = threading.Lock()
_kernels: dict[tuple[torch.dtype, TileConfig], Callable[..., Any]] = {}


def folder() -> Path:
    """Where the compiled objects of this version of the sources lie."""
    root = os.environ.get("FLASHSAMPLING_CACHE_DIR") or Path.home() / ".cache" / "flashsampling"
    return Path(root) / "cute" / _fingerprint()


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        digest.update(f"{package} {_version(package)}".encode())
    digest.update(f"{sys.version_info[:2]} {sys.platform} {ARCHITECTURE}".encode())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a bare folder on the path
        import cutlass
        import tvm_ffi

        return str({"nvidia-cutlass-dsl": cutlass, "apache-tvm-ffi": tvm_ffi}[package].__version__)


def kernel_for(dtype: torch.dtype, config: TileConfig) -> Callable[..., Any]:
    """The compiled launch for a dtype (bfloat16 or float16) and a shape of ``CONFIGS``. Thread-safe."""
    kernel = _kernels.get((dtype, config))
    if kernel is None:
        with _lock:
            for shape in CONFIGS:
                if (dtype, shape) not in _kernels:
                    _kernels[dtype, shape] = _load_or_compile(dtype, shape)
        kernel = _kernels[dtype, config]
    return kernel


def _path(dtype: torch.dtype, config: TileConfig) -> Path:
    return folder() / f"{str(dtype).removeprefix('torch.')}_{config.block_b}_{config.cluster}_{config.code_buffers}.o"


def prepare(dtype: torch.dtype, config: TileConfig) -> tuple[Path, bool]:
    """Makes sure that a kernel is on disk: where, and whether it had to be compiled.

    Raises:
        OSError: the folder cannot be written.
    """
    path = _path(dtype, config)
    if path.exists():
        return path, False
    _write(_compile(dtype, config), path)
    return path, True


def _load_or_compile(dtype: torch.dtype, config: TileConfig) -> Callable[..., Any]:
    import cutlass.cute as cute

    path = _path(dtype, config)
    if path.exists():
        try:
            return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_SYMBOL]
        except Exception as error:
            warnings.warn(f"{path} does not load ({error}); it is compiled again", RuntimeWarning, stacklevel=2)
    compiled = _compile(dtype, config)
    try:
        _write(compiled, path)
    except OSError as error:
        warnings.warn(f"compiled kernels are not kept in {path.parent}: {error}", RuntimeWarning, stacklevel=2)
    return compiled


def _write(compiled: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / path.name
        compiled.export_to_c(str(written), function_name=_SYMBOL)
        written.replace(path)


def _compile(dtype: torch.dtype, config: TileConfig) -> Any:
    import cutlass

    from .kernel import compile_kernel

    element = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    return compile_kernel(element, config, f"--gpu-arch {ARCHITECTURE}")
