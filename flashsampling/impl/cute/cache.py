"""Compiled kernels: made once, kept in memory and on disk.

In memory the key is what a kernel is specialised to: dtype, tile shape, and what it has beside the draw. On disk it is that
and a fingerprint of everything a compiled object depends on: this folder's sources and whatever of the package they import
(found by reading their imports), the compiler's distributions, Python's version, the platform and its processor, the GPU's
architecture.
The root is ``$FLASHSAMPLING_CACHE_DIR``, or ``~/.cache/flashsampling``; where there is neither, nothing is kept. Objects are
written beside their place and moved there, so processes that compile the same kernel at once do no harm.

What lies there runs as native code, so it is trusted only where nobody else can have put it: the folders, from the root down,
and the objects belong to the user or to root, and neither group nor others may write. (To a folder with the sticky bit they
may: they cannot replace there what is not theirs.) A folder that is not so is not used, with a warning. The loader may end the
process over a damaged object, so an object's name ends in the SHA-256 of its bytes, which is compared before it is loaded; one
that does not match is removed and made again.

A shape is made when a batch first needs it. ``flashsampling.warmup`` makes those that batches up to a size need, one after the
other; ``python -m flashsampling precompile`` makes all, in parallel and without a GPU: some fifteen seconds of a core each.
"""

import ast
import contextlib
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
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from .config import CONFIGS, KINDS, Features, TileConfig, choose_config

ARCHITECTURE = "sm_90a"
Key = tuple[torch.dtype, TileConfig, Features]
KERNELS: tuple[Key, ...] = tuple(
    (dtype, config, features) for features in KINDS.values() for dtype in (torch.bfloat16, torch.float16) for config in CONFIGS
)
_PLAIN = KINDS["plain"]
_SYMBOL = "flashsampling_sample"
_HERE = Path(__file__).parent

_lock = threading.Lock()
_kernels: dict[Key, Callable[..., Any]] = {}


def kernel_for(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> Callable[..., Any]:
    """The compiled launch for a dtype (bfloat16 or float16), a shape of ``CONFIGS`` and one of ``KINDS``. Thread-safe."""
    kernel = _kernels.get((dtype, config, features))
    if kernel is None:
        with _lock:
            kernel = _kernels.get((dtype, config, features))
            if kernel is None:
                kernel = _kernels[dtype, config, features] = _load_or_compile(dtype, config, features)
    return kernel


def kernels_of(dtype: torch.dtype | None, max_batch_size: int | None) -> list[Key]:
    """Those of ``KERNELS`` that batches of up to so many rows need, whatever D; None: of every dtype, of any batch."""
    widest = CONFIGS[-1].block_b  # up to which all shapes occur
    batches = range(1, min(max_batch_size or widest, widest) + 1)
    shapes = {
        choose_config(batch, dim) for batch in batches for dim in (8, 1 << 20)
    }  # noise that takes long, and that does not
    return [kernel for kernel in KERNELS if dtype in (None, kernel[0]) and kernel[1] in shapes]


def precompile(workers: int, kernels: Sequence[Key] = KERNELS) -> Generator[tuple[Path, bool], None, None]:
    """Makes sure that kernels are on disk: for each, as it is done, where, and whether it had to be compiled. Needs no GPU.

    A caller that stops early, an interrupt among the reasons, ends the workers; what is on disk by then is whole.

    Raises:
        OSError: the folder cannot be written, or is not to be trusted.
    """
    trusted_folder()  # its error once, and here
    os.environ.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)  # where there is no GPU to ask; the workers inherit it
    others = set(active_children())
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for job in as_completed([pool.submit(prepare, *kernel) for kernel in kernels]):
                yield job.result()
        except BaseException:
            for worker in set(active_children()) - others:
                worker.terminate()  # or the pool would wait for what they are at and what is queued: minutes
            raise


def prepare(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> tuple[Path, bool]:
    """Makes sure that a kernel is on disk: where, and whether it had to be compiled.

    Raises:
        OSError: the folder cannot be written, or is not to be trusted.
    """
    where = trusted_folder()
    path = _find(where, dtype, config, features)
    if path is not None:
        return path, False
    return _write(_compile(dtype, config, features), where, dtype, config, features), True


def _load_or_compile(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> Callable[..., Any]:
    try:
        where = trusted_folder()
    except OSError as error:
        warnings.warn(f"compiled kernels are neither kept nor loaded: {error}", RuntimeWarning, stacklevel=2)
        return _compile(dtype, config, features)
    path = _find(where, dtype, config, features)
    if path is not None:
        try:
            return _load(path)
        except Exception as error:
            _discard(path, f"does not load ({error})")
    compiled = _compile(dtype, config, features)
    try:
        _write(compiled, where, dtype, config, features)
    except OSError as error:
        warnings.warn(f"compiled kernels are not kept in {where}: {error}", RuntimeWarning, stacklevel=2)
    return compiled


def _compile(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> Any:
    import cutlass

    from .kernel import compile_kernel

    element = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    return compile_kernel(element, config, f"--gpu-arch {ARCHITECTURE}", **features._asdict())


def _load(path: Path) -> Callable[..., Any]:
    import cutlass.cute as cute

    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_SYMBOL]


def folder() -> Path:
    """Where the compiled objects of this version of the sources belong. It need not exist, nor deserve trust.

    Raises:
        FileNotFoundError: ``$FLASHSAMPLING_CACHE_DIR`` is not set, and there is no home directory.
    """
    return _root() / "cute" / _fingerprint()


def trusted_folder() -> Path:
    """``folder``, made if need be.

    Raises:
        OSError: it cannot be made, or somebody else could write there.
    """
    place = folder()
    _root().parent.mkdir(parents=True, exist_ok=True)
    for level in _levels(place):
        level.mkdir(mode=0o700, exist_ok=True)
        doubt = _doubt_of_level(level)
        if doubt:
            raise PermissionError(doubt)
    return place


def doubt_of_folder() -> str | None:
    """Why ``folder`` would not be used, as far as it is there yet; or None."""
    there = [level for level in _levels(folder()) if os.path.lexists(level)]
    return next(filter(None, map(_doubt_of_level, there)), None)


def _levels(place: Path) -> tuple[Path, Path, Path]:
    return _root(), place.parent, place


def _doubt_of_level(level: Path) -> str | None:
    # the root may be a link, to a larger disk say; what lies below it may not
    doubt = _doubt(level.stat() if level == _root() else level.lstat(), stat.S_ISDIR)
    return doubt and f"{level} {doubt}"


def damage(path: Path) -> str | None:
    """Why an object must not be loaded, or None: what it is, whose it is, its checksum."""
    try:
        with open(path, "rb", opener=_open_no_link) as file:
            doubt = _doubt(os.fstat(file.fileno()), stat.S_ISREG)
            if doubt:
                return doubt
            intact = hashlib.sha256(file.read()).hexdigest() == path.stem.rpartition("-")[2]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if intact else "is damaged (its checksum is not the one in its name)"


def _open_no_link(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a named pipe does not wait for a writer


def _root() -> Path:
    named = os.environ.get("FLASHSAMPLING_CACHE_DIR")
    if named:
        return Path(named).absolute()
    try:
        return Path.home() / ".cache" / "flashsampling"
    except RuntimeError as error:  # a container's user without an entry in passwd, and no $HOME
        raise FileNotFoundError(f"no cache folder: FLASHSAMPLING_CACHE_DIR is not set, and {error}") from None


def _doubt(status: os.stat_result, kind: Callable[[int], bool]) -> str | None:
    if not kind(status.st_mode):
        return f"is not a plain {'folder' if kind is stat.S_ISDIR else 'file'}"
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if shared and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w makes it fit)"
    return None


def _name(dtype: torch.dtype, config: TileConfig, features: Features) -> str:
    kind = next(kind for kind, its in KINDS.items() if its == features)
    return f"{str(dtype).removeprefix('torch.')}_{config.block_b}_{config.cluster}_{config.code_buffers}_{kind}"


def _find(where: Path, dtype: torch.dtype, config: TileConfig, features: Features) -> Path | None:
    """A kernel's intact object. Two processes that compiled it at once may have left two."""
    for path in sorted(where.glob(f"{_name(dtype, config, features)}-*.o")):
        reason = damage(path)
        if reason is None:
            return path
        _discard(path, reason)
    return None


def _discard(path: Path, reason: str) -> None:
    warnings.warn(f"{path} {reason}; the kernel is compiled again", RuntimeWarning, stacklevel=3)
    with contextlib.suppress(OSError):  # in a read-only folder it stays, is found damaged again, and nothing worse
        path.unlink(missing_ok=True)


def _write(compiled: Any, where: Path, dtype: torch.dtype, config: TileConfig, features: Features) -> Path:
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        written = Path(scratch) / "kernel.o"
        compiled.export_to_c(str(written), function_name=_SYMBOL)
        written.chmod(0o600)  # whatever the umask
        checksum = hashlib.sha256(written.read_bytes()).hexdigest()
        return written.replace(where / f"{_name(dtype, config, features)}-{checksum}.o")


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for source in _sources(_HERE):
        code = source.read_bytes()
        digest.update(f"{source.relative_to(_HERE.parents[1])} {len(code)}\n".encode() + code)
    digest.update(repr([_compiler(), sys.version_info[:2], sys.platform, platform.machine(), ARCHITECTURE]).encode())
    return digest.hexdigest()[:16]


def _sources(here: Path) -> list[Path]:
    """The modules in ``here``, what they import of the package, and so on: of any of these a constant may be compiled in."""
    found: set[Path] = set()
    pending = list(here.glob("*.py"))
    while pending:
        source = pending.pop()
        if source not in found:
            found.add(source)
            pending += _imported(source, here.parents[1])
    return sorted(found)


def _imported(source: Path, package: Path) -> Iterator[Path]:
    """The files of the package that a source names in its import statements, wherever in it they stand."""
    for node in ast.walk(ast.parse(source.read_bytes(), source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            places = [package.parent.joinpath(*parts) for parts in names if parts[0] == package.name]
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            if not node.level and parts[0] != package.name:
                continue
            base = (source.parents[node.level - 1] if node.level else package.parent).joinpath(*parts)
            # a name is a submodule, or stands in the module itself
            places = [base / alias.name if _source_of(base / alias.name) else base for alias in node.names]
        else:
            continue
        yield from filter(None, map(_source_of, places))


def _source_of(place: Path) -> Path | None:
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _compiler() -> list[str]:
    """Names and versions of the compiler's distributions: the DSL, its libraries, the calling convention."""
    wanted = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
    found = {
        f"{name} {distribution.version}"
        for distribution in importlib.metadata.distributions()
        if (name := distribution.metadata["Name"] or "").startswith(wanted)
    }
    if not all(any(entry.startswith(f"{name} ") for entry in found) for name in wanted):  # bare folders on the path
        import cutlass
        import tvm_ffi

        found |= {f"cutlass {cutlass.__version__}", f"tvm_ffi {tvm_ffi.__version__}"}
    return sorted(found)
