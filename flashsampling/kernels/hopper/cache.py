"""Compiles kernels, and keeps them in memory and on disk.

In memory the key is dtype, tile shape and features. On disk it is these and a fingerprint of everything that a compiled
object depends on: the sources in this folder, in ``kernels`` and directly in the package, the compiler's distributions,
Python's version, the platform and its processor, the GPU's architecture. The root is ``$FLASHSAMPLING_CACHE_DIR`` or
``~/.cache/flashsampling``; without a home directory nothing is kept. Objects are written to a temporary folder and
moved into place, so processes may compile the same kernel at once.

A kept object runs as native code. It is trusted only where nobody else can have put it: every folder from / down to the
objects, every link among them, and the objects belong to the user or to root, and neither group nor others may write
there (except to a folder with the sticky bit, where they cannot replace files of others). Any other folder is not used,
with a warning. An object's name ends in the SHA-256 of its bytes, which are read once, compared with the name, and
loaded. Only an object with a wrong checksum is removed. One that cannot be read or loaded stays.

The fingerprint covers the sources as they were imported (``sources``). The compiler reads sources again as it works, so
nothing is compiled once those on disk differ: the process has to be restarted.

Writing an object removes temporary folders older than a day, left by processes that ended while writing, and folders of
other fingerprints that were not used for 90 days.

A shape is compiled when a batch first needs it. ``flashsampling.warmup`` compiles those that batches up to a size need,
one after the other; ``python -m flashsampling precompile`` compiles all, in parallel and without a GPU: some fifteen
seconds of a core each.
"""

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import itertools
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from ... import sources
from .config import CONFIGS, KINDS, Features, TileConfig, choose_config

ARCHITECTURE = "sm_90a"
Key = tuple[torch.dtype, TileConfig, Features]
KERNELS: tuple[Key, ...] = tuple(
    (dtype, config, features)
    for features in KINDS.values()
    for dtype in (torch.bfloat16, torch.float16)
    for config in CONFIGS
)
_PLAIN = KINDS["plain"]
_SYMBOL = "flashsampling_sample"
_HERE = Path(__file__).parent
_DAY = 86400.0
_MOST_LINKS = 40  # in a path, Linux's limit

_lock = threading.Lock()
_kernels: dict[Key, Callable[..., Any]] = {}


def kernel_for(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> Callable[..., Any]:
    """Returns the compiled launch for a dtype (bfloat16 or float16), a shape of ``CONFIGS`` and features of ``KINDS``.
    Thread-safe."""
    kernel = _kernels.get((dtype, config, features))
    if kernel is None:
        with _lock:
            kernel = _kernels.get((dtype, config, features))
            if kernel is None:
                kernel = _kernels[dtype, config, features] = _load_or_compile(dtype, config, features)
    return kernel


def select_kernels(dtype: torch.dtype | None, max_batch_size: int | None) -> list[Key]:
    """Returns those of ``KERNELS`` that batches of up to a number of rows need, whatever D; None: every dtype, any
    batch."""
    widest = CONFIGS[-1].block_b  # larger batches use the same shapes
    batches = range(1, min(max_batch_size or widest, widest) + 1)
    # a small and a large D: the noise takes longer than the matmul, or not
    shapes = {choose_config(batch, dim) for batch in batches for dim in (8, 1 << 20)}
    return [kernel for kernel in KERNELS if dtype in (None, kernel[0]) and kernel[1] in shapes]


def precompile(workers: int, kernels: Sequence[Key] = KERNELS) -> Generator[tuple[Path, bool], None, None]:
    """Makes sure that kernels are on disk. Yields for each, as it is done, its path and whether it was compiled. Needs
    no GPU.

    A caller that stops early, for instance by an interrupt, ends the workers; objects on disk by then are whole.

    Raises:
        OSError: the folder cannot be written, or is not trusted.
    """
    trusted_folder()  # raises once, before the workers start
    os.environ.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)  # where there is no GPU to ask; the workers inherit it
    others = set(active_children())
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for job in as_completed([pool.submit(prepare, *kernel) for kernel in kernels]):
                yield job.result()
        except BaseException:
            for worker in set(active_children()) - others:
                worker.terminate()  # else the pool waits for running and queued compilations: minutes
            raise


def prepare(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> tuple[Path, bool]:
    """Makes sure that a kernel is on disk. Returns its path and whether it was compiled.

    Raises:
        OSError: the folder cannot be written, or is not trusted.
    """
    where = trusted_folder()
    for path, _ in _intact(where, dtype, config, features):
        return path, False
    return _write(_compile(dtype, config, features), where, dtype, config, features), True


def _load_or_compile(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> Callable[..., Any]:
    try:
        where = trusted_folder()
    except OSError as error:
        _warn(f"compiled kernels are neither kept nor loaded: {error}")
        return _compile(dtype, config, features)
    kept = False
    for path, content in _intact(where, dtype, config, features):
        kept = True
        try:
            return _load(content)
        except Exception as error:  # for instance too many open files: the object may be intact
            _warn(f"{path} does not load ({error}); it stays, and this process compiles the kernel for itself")
    compiled = _compile(dtype, config, features)
    if not kept:
        try:
            _write(compiled, where, dtype, config, features)
        except OSError as error:
            _warn(f"compiled kernels are not kept in {where}: {error}")
    return compiled


def _compile(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> Any:
    """Compiles a kernel from the sources that were imported.

    Raises:
        RuntimeError: the sources on disk, which the compiler reads, have changed.
    """
    _require_unchanged_sources()
    compiled = _run_compiler(dtype, config, features)
    _require_unchanged_sources()
    return compiled


def _run_compiler(dtype: torch.dtype, config: TileConfig, features: Features) -> Any:
    import cutlass

    from .kernel import compile_kernel

    element = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    return compile_kernel(element, config, f"--gpu-arch {ARCHITECTURE}", **features._asdict())


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
    return _root() / "cute" / _fingerprint()


def trusted_folder() -> Path:
    """Returns ``folder`` after creating it if needed, and marks it as used.

    Raises:
        OSError: the folder cannot be created, or somebody else could write there.
    """
    place = folder()
    for step in _steps(place):
        if not os.path.lexists(step):
            with contextlib.suppress(FileExistsError):  # another process was faster
                step.mkdir(mode=0o700)
                step.chmod(0o700)  # whatever the umask
        reason = _step_distrust_reason(step)
        if reason:
            raise PermissionError(reason)
    if place.stat().st_mtime < time.time() - _DAY:
        with contextlib.suppress(OSError):  # a read-only folder is used all the same
            os.utime(place)
    return place


def distrust_reason() -> str | None:
    """Returns why ``folder``, as far as it exists, would not be used, or None."""
    existing = itertools.takewhile(os.path.lexists, _steps(folder()))
    return next(filter(None, map(_step_distrust_reason, existing)), None)


def _steps(place: Path) -> Iterator[Path]:
    """Yields the folders on the way from / to an absolute path, and the links among them, each before its target.

    / itself is left out: its owner also owns Python.
    """
    here, names, links = Path(place.anchor), [*place.parts[1:]], 0
    while names:
        name = names.pop(0)
        step = here.parent if name == ".." else here / name
        yield step
        if not step.is_symlink():
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place))
        target = Path(os.readlink(step))
        here = Path(target.anchor) if target.is_absolute() else here
        names[:0] = target.parts[1:] if target.is_absolute() else target.parts


def _step_distrust_reason(step: Path) -> str | None:
    status = step.lstat()
    is_link = stat.S_ISLNK(status.st_mode)
    reason = _owner_distrust_reason(status) if is_link else _status_distrust_reason(status, stat.S_ISDIR)
    return reason and f"{step} {reason}"


def damage(path: Path) -> str | None:
    """Returns why an object must not be loaded, or None: its kind, its owner, its checksum."""
    try:
        _read(path)
    except _UnfitError as error:
        return str(error)
    return None


class _UnfitError(Exception):
    """Says why an object must not be loaded."""


def _read(path: Path, discard: bool = False) -> bytes:
    """Returns the bytes of an object that may be loaded; ``discard`` removes one whose checksum is wrong.

    Raises:
        _UnfitError: it cannot be read, somebody else could have written it, or its checksum is wrong.
    """
    try:
        with open(path, "rb", opener=_open_no_link) as file:
            status = os.fstat(file.fileno())
            reason = _status_distrust_reason(status, stat.S_ISREG)
            if reason:
                raise _UnfitError(reason)
            content = file.read()
            if hashlib.sha256(content).hexdigest() == path.stem.rpartition("-")[2]:
                return content
            if discard:
                with contextlib.suppress(OSError):  # in a read-only folder it stays
                    if os.path.samestat(path.lstat(), status):  # another process may have put an intact one there
                        path.unlink()
    except OSError as error:
        raise _UnfitError(f"cannot be read ({error.strerror})") from None
    raise _UnfitError("is damaged (its checksum is not the one in its name)")


def _open_no_link(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a named pipe does not wait for a writer


def _root() -> Path:
    named = os.environ.get("FLASHSAMPLING_CACHE_DIR")
    wanted = named or "~/.cache/flashsampling"
    if not wanted.startswith("~"):
        return Path(wanted).absolute()
    home = os.environ.get("HOME")
    expanded = os.path.expanduser(wanted)
    if home is not None and not os.path.isabs(home):
        reason = f"HOME is {home!r}, which is not an absolute path"
    elif not os.path.isabs(expanded):  # a container's user without an entry in passwd, and no $HOME; or ~nobody
        reason = f"there is no home directory for {wanted!r}"
    else:
        return Path(expanded)
    which = f"is {named!r}" if named else "is not set"
    raise FileNotFoundError(
        f"no cache folder: FLASHSAMPLING_CACHE_DIR {which}, and {reason}; set it to an absolute path"
    )


def _status_distrust_reason(status: os.stat_result, kind: Callable[[int], bool]) -> str | None:
    if not kind(status.st_mode):
        return f"is not a plain {'folder' if kind is stat.S_ISDIR else 'file'}"
    reason = _owner_distrust_reason(status)
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if reason is None and shared and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w makes it fit)"
    return reason


def _owner_distrust_reason(status: os.stat_result) -> str | None:
    if status.st_uid in (0, os.geteuid()):
        return None
    return f"belongs to user {status.st_uid}, and this is user {os.geteuid()}"


def leftovers(place: Path) -> list[Path]:
    """Lists folders in ``folder`` where processes that have ended were writing an object."""
    return [path for path in place.glob("tmp*") if _unused_for(path, _DAY)]


def other_folders(place: Path) -> list[Path]:
    """Lists the folders of other versions of the sources beside ``folder``."""
    folders = (path for path in place.parent.glob("*") if re.fullmatch("[0-9a-f]{16}", path.name))
    return [path for path in folders if path.name != place.name]


def unneeded(place: Path) -> list[Path]:
    """Lists what the next write into ``folder`` removes: left-overs, and unused folders of other versions."""
    return leftovers(place) + [path for path in other_folders(place) if _unused_for(path, 90 * _DAY)]


def _unused_for(path: Path, seconds: float) -> bool:
    try:
        status = path.lstat()
    except OSError:  # removed by another process
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mtime < time.time() - seconds


def _name(dtype: torch.dtype, config: TileConfig, features: Features) -> str:
    kind = next(kind for kind, its in KINDS.items() if its == features)
    return f"{str(dtype).removeprefix('torch.')}_{config.block_b}_{config.cluster}_{config.bound_buffers}_{kind}"


def _intact(where: Path, dtype: torch.dtype, config: TileConfig, features: Features) -> Iterator[tuple[Path, bytes]]:
    """Yields a kernel's intact objects and their bytes. Two processes that compiled it at once may have left two."""
    try:
        paths = sorted(where.glob(f"{_name(dtype, config, features)}-*.o"))
    except OSError as error:  # too many open files
        _warn(f"{where} cannot be read ({error.strerror}); the kernel is compiled again")
        return
    for path in paths:
        try:
            yield path, _read(path, discard=True)
        except _UnfitError as error:
            _warn(f"{path} {error}; the kernel is compiled again")


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _write(compiled: Any, where: Path, dtype: torch.dtype, config: TileConfig, features: Features) -> Path:
    for path in unneeded(where):
        shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        Path(scratch).chmod(0o700)  # whatever the umask
        written = Path(scratch) / "kernel.o"
        compiled.export_to_c(str(written), function_name=_SYMBOL)
        written.chmod(0o600)
        checksum = hashlib.sha256(written.read_bytes()).hexdigest()
        return written.replace(where / f"{_name(dtype, config, features)}-{checksum}.o")


@functools.cache
def _fingerprint() -> str:
    return _hash_sources(sources.IMPORTED, _HERE)


def _hash_sources(files: Mapping[Path, bytes], here: Path) -> str:
    digest = hashlib.sha256()
    for source in _sources(files, here):
        digest.update(f"{source.relative_to(here.parents[1])} {len(files[source])}\n".encode() + files[source])
    digest.update(repr([_compiler(), sys.version_info[:2], sys.platform, platform.machine(), ARCHITECTURE]).encode())
    return digest.hexdigest()[:16]


def _require_unchanged_sources() -> None:
    for source in _imported_sources():
        try:
            same = source.read_bytes() == sources.IMPORTED[source]
        except OSError:
            same = False
        if not same:
            message = "has changed on disk since this process imported it; a kernel would mix both versions"
            raise RuntimeError(f"{source} {message}: restart the process")


@functools.cache
def _imported_sources() -> list[Path]:
    return _sources(sources.IMPORTED, _HERE)


def _sources(files: Mapping[Path, bytes], here: Path) -> list[Path]:
    """Returns the modules in ``here``, in ``kernels`` and directly in the package: no other constant is compiled in."""
    return sorted(source for source in files if source.parent in (here, here.parent, here.parents[1]))


def _compiler() -> list[str]:
    """Lists names and versions of the compiler's distributions: the DSL, its libraries, the calling convention."""
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
