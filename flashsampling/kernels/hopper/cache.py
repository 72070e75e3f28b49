"""Compiles kernels, and keeps them in memory and on disk.

In memory the key is dtype, tile shape and features. On disk it is these and a fingerprint of everything that a compiled
object depends on: the sources in this folder, in ``kernels`` and directly in the package, the compiler's distributions,
Python's version, the platform and its processor, the GPU's architecture. The root is ``$FLASHSAMPLING_CACHE_DIR`` or
``~/.cache/flashsampling``; without a home directory nothing is kept. A file holds an object's SHA-256 and then its
bytes. It is written to a temporary folder and moved into place, so processes may compile the same kernel at once.

A kept object runs as native code. It is loaded only if the folder of the fingerprint and the file belong to the user or
to root, are no links, and neither group nor others may write to them. A file is read once, and the bytes whose checksum
was compared are the bytes that are loaded. A file that is not loaded stays until the next compilation replaces it.

The fingerprint covers the sources on disk when this module is imported. The compiler reads sources as it works: if they
have changed when it is done, its result is neither used nor kept, and the process has to be restarted.

A shape is compiled when a batch first needs it. ``flashsampling.warmup`` compiles those that batches up to a size need,
one after the other; ``python -m flashsampling precompile`` compiles all, in parallel and without a GPU: some fifteen
seconds of a core each.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from .config import CONFIGS, KINDS, Features, TileConfig, choose_config

ARCHITECTURE = "sm_90a"
Key = tuple[torch.dtype, TileConfig, Features]
KERNELS: tuple[Key, ...] = tuple(
    (dtype, config, features)
    for features in KINDS.values()
    for dtype in (torch.bfloat16, torch.float16)
    for config in CONFIGS
)
_SYMBOL = "flashsampling_sample"
_PACKAGE = Path(__file__).parents[2]

_lock = threading.Lock()
_kernels: dict[Key, Callable[..., Any]] = {}


def kernel_for(dtype: torch.dtype, config: TileConfig, features: Features = KINDS["plain"]) -> Callable[..., Any]:
    """Returns the compiled launch for a dtype (bfloat16 or float16), a shape of ``CONFIGS`` and features of ``KINDS``.
    Thread-safe."""
    key = dtype, config, features
    if key not in _kernels:
        with _lock:
            if key not in _kernels:
                _kernels[key] = _load_or_compile(key)
    return _kernels[key]


def select_kernels(dtype: torch.dtype | None, max_batch_size: int | None) -> list[Key]:
    """Returns those of ``KERNELS`` that batches of up to a number of rows need, whatever D; None: every dtype, any
    batch."""
    widest = CONFIGS[-1].block_b  # larger batches use the same shapes
    batches = range(1, min(max_batch_size or widest, widest) + 1)
    # a small and a large D: the noise takes longer than the matmul, or not
    shapes = {choose_config(batch, dim) for batch in batches for dim in (8, 1 << 20)}
    return [kernel for kernel in KERNELS if dtype in (None, kernel[0]) and kernel[1] in shapes]


def precompile(workers: int, kernels: Sequence[Key] = KERNELS) -> Iterator[tuple[Path, bool]]:
    """Makes sure that kernels are on disk. Yields for each, as it is done, its path and whether it was compiled. Needs
    no GPU.

    Raises:
        OSError: the folder cannot be written, or is not trusted.
    """
    trusted_folder()  # raises once, before the workers start
    os.environ.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)  # where there is no GPU to ask; the workers inherit it
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for job in as_completed([pool.submit(prepare, kernel) for kernel in kernels]):
                yield job.result()
        finally:
            pool.shutdown(cancel_futures=True)  # after an interrupt only those that run are waited for


def prepare(key: Key) -> tuple[Path, bool]:
    """Makes sure that a kernel is on disk. Returns its path and whether it was compiled.

    Raises:
        OSError: the folder cannot be written, or is not trusted.
    """
    path = trusted_folder() / _name(key)
    if _read_or_warn(path) is not None:
        return path, False
    _write(_compile(key), path)
    return path, True


def _load_or_compile(key: Key) -> Callable[..., Any]:
    try:
        path = trusted_folder() / _name(key)
    except OSError as error:
        _warn(f"compiled kernels are neither kept nor loaded: {error}")
        return _compile(key)
    content = _read_or_warn(path)
    if content is not None:
        try:
            return _load(content)
        except Exception as error:  # for instance too many open files
            _warn(f"{path} does not load ({error}); the kernel is compiled again")
    compiled = _compile(key)
    try:
        _write(compiled, path)
    except OSError as error:
        _warn(f"{path} is not kept: {error}")
    return compiled


def _compile(key: Key) -> Any:
    """Compiles a kernel.

    Raises:
        RuntimeError: the sources on disk, which the compiler reads, have changed.
    """
    import cutlass

    from .kernel import compile_kernel

    dtype, config, features = key
    element = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    compiled = compile_kernel(element, config, f"--gpu-arch {ARCHITECTURE}", **features._asdict())
    if _hash_sources() != _SOURCES:
        raise RuntimeError(
            f"{_PACKAGE} has changed on disk since this process imported it; a kernel would mix both versions: "
            "restart the process"
        )
    return compiled


def _load(content: bytes) -> Callable[..., Any]:
    """Loads an object from its bytes. The loader takes a path, so the bytes go into a file in memory of this
    process."""
    import cutlass.cute as cute

    with open(os.memfd_create("flashsampling"), "wb") as copy:
        copy.write(content)
        copy.flush()
        return cute.runtime.load_module(f"/proc/self/fd/{copy.fileno()}", enable_tvm_ffi=True)[_SYMBOL]


def folder() -> Path:
    """Returns where the compiled objects of these sources belong. The folder need not exist, nor be trusted.

    Raises:
        FileNotFoundError: the root would be in a home directory, and there is none.
    """
    root = Path(os.environ.get("FLASHSAMPLING_CACHE_DIR") or "~/.cache/flashsampling")
    try:
        root = root.expanduser()
    except RuntimeError:  # for instance a container's user without an entry in passwd, and no $HOME
        raise FileNotFoundError(f"there is no home directory for {root}: set FLASHSAMPLING_CACHE_DIR") from None
    return root.absolute() / "cute" / _fingerprint()


def trusted_folder() -> Path:
    """Returns ``folder`` after creating it if needed.

    Raises:
        OSError: the folder cannot be created, or somebody else could write there.
    """
    place = folder()
    place.mkdir(0o700, parents=True, exist_ok=True)
    _require_trust(place, place.lstat())
    return place


def _require_trust(path: Path, status: os.stat_result) -> None:
    reason = None
    if stat.S_ISLNK(status.st_mode):
        reason = "is a link"
    elif status.st_uid not in (0, os.geteuid()):
        reason = f"belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w makes it fit)"
    if reason is not None:
        raise PermissionError(f"{path} {reason}")


def read(path: Path) -> bytes:
    """Returns the bytes of a kept object.

    Raises:
        OSError: the file cannot be read, somebody else could have written it, or its checksum is wrong.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
        _require_trust(path, os.fstat(file.fileno()))
        checksum, content = file.read(hashlib.sha256().digest_size), file.read()
    if hashlib.sha256(content).digest() != checksum:
        raise OSError(f"{path} is damaged: its checksum is wrong")
    return content


def _read_or_warn(path: Path) -> bytes | None:
    """Returns the bytes of a kept object, or None if there is none that may be loaded."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"{error}; the kernel is compiled again")
        return None


def _write(compiled: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        exported, written = Path(scratch) / "exported.o", Path(scratch) / "written"
        compiled.export_to_c(str(exported), function_name=_SYMBOL)
        content = exported.read_bytes()
        written.touch(0o600)
        written.write_bytes(hashlib.sha256(content).digest() + content)
        written.replace(path)


def _name(key: Key) -> str:
    dtype, config, features = key
    kind = next(kind for kind, its in KINDS.items() if its == features)
    shape = f"{config.block_b}_{config.cluster}_{config.bound_buffers}"
    return f"{str(dtype).removeprefix('torch.')}_{shape}_{kind}.o"


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


@functools.cache
def _fingerprint() -> str:
    parts = [_SOURCES, _compiler(), sys.version_info[:2], sys.platform, platform.machine(), ARCHITECTURE]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _sources() -> list[Path]:
    """Returns the modules in this folder, in ``kernels`` and directly in the package: no other constant is compiled
    in."""
    folders = _PACKAGE, _PACKAGE / "kernels", _PACKAGE / "kernels" / "hopper"
    return sorted(source for place in folders for source in place.glob("*.py"))


def _hash_sources() -> str:
    digest = hashlib.sha256()
    for source in _sources():
        content = source.read_bytes()
        digest.update(f"{source.relative_to(_PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _compiler() -> list[str]:
    """Lists names and versions of the compiler's distributions: the DSL, its libraries, the calling convention."""
    return sorted(
        f"{name} {distribution.version}"
        for distribution in importlib.metadata.distributions()
        if (name := distribution.metadata["Name"] or "").startswith(("nvidia-cutlass-dsl", "apache-tvm-ffi"))
    )


_SOURCES = _hash_sources()
