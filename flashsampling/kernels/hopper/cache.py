"""Compiled kernels: made once, kept in memory and on disk.

In memory the key is what a kernel is specialised to: dtype, tile shape, and what it has beside the draw. On disk it is
that and a fingerprint of everything a compiled object depends on: this folder's sources and whatever of the package
they import (found by reading their imports), the compiler's distributions, Python's version, the platform and its
processor, the GPU's architecture. The root is ``$FLASHSAMPLING_CACHE_DIR``, or ``~/.cache/flashsampling``; without a
home directory nothing is kept. Objects are written beside their place and moved there, so processes that compile the
same kernel at once do no harm.

A kept object runs as native code, so it is trusted only where nobody else can have put it: every folder from / down to
the objects, every link among them, and the objects belong to the user or to root, and neither group nor others may
write there. (To a folder with the sticky bit they may: they cannot replace there what is not theirs.) A folder that is
not so is not used, with a warning. An object's name ends in the SHA-256 of its bytes. These are read once, compared
with the name, and loaded. Only an object whose checksum is wrong is removed. One that cannot be read or loaded stays.

The fingerprint is of the sources as they were imported (``sources``). The compiler reads sources again as it works, so
nothing is compiled once those on disk are others: the process has to be restarted.

Writing an object removes what nobody needs: temporary folders older than a day, which a process leaves that ends as it
writes, and folders of other fingerprints that nobody has used for 90 days.

A shape is made when a batch first needs it. ``flashsampling.warmup`` makes those that batches up to a size need, one
after the other; ``python -m flashsampling precompile`` makes all, in parallel and without a GPU: some fifteen seconds
of a core each.
"""

import ast
import contextlib
import errno
import functools
import hashlib
import importlib.metadata
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
_MOST_LINKS = 40  # of a path, as Linux has it

_lock = threading.Lock()
_kernels: dict[Key, Callable[..., Any]] = {}


def kernel_for(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> Callable[..., Any]:
    """The compiled launch for a dtype (bfloat16 or float16), a shape of ``CONFIGS`` and one of ``KINDS``.
    Thread-safe."""
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
    """Makes sure that kernels are on disk: for each, as it is done, where, and whether it had to be compiled. Needs no
    GPU.

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
    for path, _ in _intact(where, dtype, config, features):
        return path, False
    return _write(_compile(dtype, config, features), where, dtype, config, features), True


def _load_or_compile(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> Callable[..., Any]:
    try:
        where = trusted_folder()
    except OSError as error:
        warnings.warn(f"compiled kernels are neither kept nor loaded: {error}", RuntimeWarning, stacklevel=2)
        return _compile(dtype, config, features)
    kept = False
    for path, content in _intact(where, dtype, config, features):
        kept = True
        try:
            return _load(content)
        except Exception as error:  # too many open files, say: no fault of the object's
            _warn(f"{path} does not load ({error}); it stays, and this process compiles the kernel for itself")
    compiled = _compile(dtype, config, features)
    if not kept:
        try:
            _write(compiled, where, dtype, config, features)
        except OSError as error:
            warnings.warn(f"compiled kernels are not kept in {where}: {error}", RuntimeWarning, stacklevel=2)
    return compiled


def _compile(dtype: torch.dtype, config: TileConfig, features: Features = _PLAIN) -> Any:
    """Compiles a kernel from the sources that were imported.

    Raises:
        RuntimeError: those on disk are others, and the compiler reads them.
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
    """Loads an object from its bytes: the loader takes a path, which leads here to a file in memory that is this
    process's."""
    import cutlass.cute as cute

    with open(os.memfd_create("flashsampling"), "wb") as copy:
        copy.write(content)
        copy.flush()
        return cute.runtime.load_module(f"/proc/self/fd/{copy.fileno()}", enable_tvm_ffi=True)[_SYMBOL]


def folder() -> Path:
    """Where the compiled objects of this version of the sources belong. It need not exist, nor deserve trust.

    Raises:
        FileNotFoundError: the root is to be in a home directory, and there is none.
    """
    return _root() / "cute" / _fingerprint()


def trusted_folder() -> Path:
    """``folder``, made if need be, and marked as used.

    Raises:
        OSError: it cannot be made, or somebody else could write there.
    """
    place = folder()
    for step in _steps(place):
        if not os.path.lexists(step):
            with contextlib.suppress(FileExistsError):  # another process was faster
                step.mkdir(mode=0o700)
                step.chmod(0o700)  # whatever the umask
        doubt = _doubt_of_step(step)
        if doubt:
            raise PermissionError(doubt)
    if place.stat().st_mtime < time.time() - _DAY:
        with contextlib.suppress(OSError):  # a read-only folder is used all the same
            os.utime(place)
    return place


def doubt_of_folder() -> str | None:
    """Why ``folder`` would not be used, as far as it is there yet; or None."""
    for step in _steps(folder()):
        if not os.path.lexists(step):
            return None
        doubt = _doubt_of_step(step)
        if doubt:
            return doubt
    return None


def _steps(place: Path) -> Iterator[Path]:
    """The folders on the way from / to an absolute path, and the links among them, each before what it leads to.

    / itself is not among them: its owner owns Python too."""
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


def _doubt_of_step(step: Path) -> str | None:
    status = step.lstat()
    doubt = _doubt_of_owner(status) if stat.S_ISLNK(status.st_mode) else _doubt(status, stat.S_ISDIR)
    return doubt and f"{step} {doubt}"


def damage(path: Path) -> str | None:
    """Why an object must not be loaded, or None: what it is, whose it is, its checksum."""
    try:
        _read(path)
    except _UnfitError as error:
        return str(error)
    return None


class _UnfitError(Exception):
    """Says why an object must not be loaded."""


def _read(path: Path, discard: bool = False) -> bytes:
    """The bytes of an object that may be loaded; ``discard`` removes one whose checksum is wrong.

    Raises:
        _UnfitError: it cannot be read, somebody else could have written it, or its checksum is wrong.
    """
    try:
        with open(path, "rb", opener=_open_no_link) as file:
            status = os.fstat(file.fileno())
            doubt = _doubt(status, stat.S_ISREG)
            if doubt:
                raise _UnfitError(doubt)
            content = file.read()
            if hashlib.sha256(content).hexdigest() == path.stem.rpartition("-")[2]:
                return content
            if discard:
                with contextlib.suppress(
                    OSError
                ):  # in a read-only folder it stays, is found damaged again, and nothing worse
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


def _doubt(status: os.stat_result, kind: Callable[[int], bool]) -> str | None:
    if not kind(status.st_mode):
        return f"is not a plain {'folder' if kind is stat.S_ISDIR else 'file'}"
    doubt = _doubt_of_owner(status)
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if doubt is None and shared and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w makes it fit)"
    return doubt


def _doubt_of_owner(status: os.stat_result) -> str | None:
    if status.st_uid in (0, os.geteuid()):
        return None
    return f"belongs to user {status.st_uid}, and this is user {os.geteuid()}"


def leftovers(place: Path) -> list[Path]:
    """Folders in ``folder`` where processes that have ended were writing an object."""
    return [path for path in place.glob("tmp*") if _unused_for(path, _DAY)]


def other_folders(place: Path) -> list[Path]:
    """Those of other versions of the sources beside ``folder``."""
    return [
        path for path in place.parent.glob("*") if re.fullmatch("[0-9a-f]{16}", path.name) and path.name != place.name
    ]


def unneeded(place: Path) -> list[Path]:
    """What the next object that is written into ``folder`` removes: left-overs, and other versions' folders of no
    use."""
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
    """A kernel's intact objects and their bytes. Two processes that compiled it at once may have left two."""
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
    return _fingerprint_of(sources.IMPORTED, _HERE)


def _fingerprint_of(files: Mapping[Path, bytes], here: Path) -> str:
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
            message = (
                "has changed on disk since this process imported it, and a kernel would be compiled of both versions"
            )
            raise RuntimeError(f"{source} {message}: restart the process")


@functools.cache
def _imported_sources() -> list[Path]:
    return _sources(sources.IMPORTED, _HERE)


def _sources(files: Mapping[Path, bytes], here: Path) -> list[Path]:
    """The modules in ``here``, what they import of the package, and so on: of any of these a constant may be compiled
    in."""
    found: set[Path] = set()
    pending = [source for source in files if source.parent == here]
    while pending:
        source = pending.pop()
        if source not in found:
            found.add(source)
            pending += _imported(files, source, here.parents[1])
    return sorted(found)


def _imported(files: Mapping[Path, bytes], source: Path, package: Path) -> Iterator[Path]:
    """The files of the package that a source names in its import statements, wherever in it they stand."""
    for node in ast.walk(ast.parse(files[source], source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            places = [package.parent.joinpath(*parts) for parts in names if parts[0] == package.name]
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            if not node.level and parts[0] != package.name:
                continue
            base = (source.parents[node.level - 1] if node.level else package.parent).joinpath(*parts)
            # a name is a submodule, or stands in the module itself
            places = [base / alias.name if _source_of(files, base / alias.name) else base for alias in node.names]
        else:
            continue
        yield from filter(None, (_source_of(files, place) for place in places))


def _source_of(files: Mapping[Path, bytes], place: Path) -> Path | None:
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path in files), None)


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
