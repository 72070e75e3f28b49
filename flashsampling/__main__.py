"""The command ``flashsampling``, or ``python -m flashsampling``: ``doctor`` reports which backends run here,
``precompile`` fills the cache. It needs torch alone."""

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from . import __version__
from .backends import BACKENDS
from .inputs import example
from .kernels.hopper import cache

_PACKAGES = ("triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers")
_PROBLEMS = (  # what the choice of a backend depends on: dtype, D
    ("bf16", torch.bfloat16, 64),
    ("fp16", torch.float16, 64),
    ("fp32", torch.float32, 64),
    ("bf16 with D not divisible by 8", torch.bfloat16, 63),
)


def doctor() -> None:
    """Prints versions, GPUs, which backend serves which dtype and width and why no faster one does, and the
    cache folder."""
    print(f"flashsampling {__version__} in {Path(__file__).parent}")
    for title, lines in (
        ("versions", _versions),
        ("GPUs", _gpus),
        ("what impl=None takes", _choices),
        ("cache", _cache),
    ):
        print(f"\n{title}")
        for line in _even_if_it_fails(lines):
            print(f"  {line}")


def _even_if_it_fails(lines: Callable[[], Iterator[str]]) -> Iterator[str]:
    try:
        yield from lines()
    except Exception as error:  # the doctor must report a broken driver or package
        yield f"cannot be said: {type(error).__name__}: {error}"


def _versions() -> Iterator[str]:
    yield f"{'python':20} {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"{'torch':20} {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA")
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        yield f"{package:20} {version}"


def _gpus() -> Iterator[str]:
    if not torch.cuda.is_available():
        built = f"it is built for CUDA {torch.version.cuda}" if torch.version.cuda else "it is built without CUDA"
        yield f"none that torch can use ({built})"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index} {properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB"
        )


def _choices() -> Iterator[str]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] + devices
    for device in devices:
        same_choice: dict[tuple[str, ...], list[str]] = {}
        for name, dtype, dim in _PROBLEMS:
            same_choice.setdefault(_choice(torch.zeros(256, dim, dtype=dtype, device=device)), []).append(name)
        for (chosen, *reasons), names in same_choice.items():
            yield f"{device}: {chosen} for {', '.join(names)}"
            yield from (f"    not {reason}" for reason in reasons)


def _choice(weight: torch.Tensor) -> tuple[str, ...]:
    """Returns the backend that ``impl=None`` takes, and why it takes none of those before."""
    reasons: list[str] = []
    kind, step = weight.device.type, example(weight)
    for backend in [backend for backend in BACKENDS.values() if "cuda" in backend.chosen_on]:
        try:
            reason = backend.unsupported(step)
        except Exception as error:  # installed but broken
            reason = f"{type(error).__name__}: {error}"
        if reason is None and kind in backend.chosen_on:
            return backend.name, *reasons
        reasons.append(f"{backend.name}: {reason or 'on a CPU it runs in its interpreter, for tests'}")
    return "none", *reasons


def _cache() -> Iterator[str]:
    missing = BACKENDS["cute"].missing
    if missing:
        yield f"not needed: {missing}"
        return
    try:
        folder = cache.folder()
        doubt = cache.distrust_reason()
    except OSError as error:
        yield f"not used: {error}"
        return
    named = os.environ.get("FLASHSAMPLING_CACHE_DIR")
    yield f"{folder} (FLASHSAMPLING_CACHE_DIR is {repr(named) if named else 'not set'})"
    if doubt:
        yield f"not used: {doubt}"
    if not folder.is_dir():
        yield "none of the Hopper kernels is there yet"
    else:
        objects = sorted(folder.glob("*.o"))
        damaged = [(path, reason) for path in objects if (reason := cache.damage(path))]
        yield f"{len(objects) - len(damaged)} of the {len(cache.KERNELS)} Hopper kernels, {_megabytes(objects)}"
        yield from (f"{path.name} {reason}" for path, reason in damaged)
    left, others, unneeded = cache.leftovers(folder), cache.other_folders(folder), cache.unneeded(folder)
    if left:
        yield f"temporary folders of processes that ended as they wrote a kernel: {len(left)}"
    if others:
        size = _megabytes([path for other in others for path in other.glob("*.o")])
        yield f"folders of other versions beside it, which can be deleted: {len(others)}, {size}"
    if unneeded:
        age = "older than a day or unused for 90"
        yield f"of these folders the next kernel that is written removes {len(unneeded)}, {age}"


def _megabytes(paths: Sequence[Path]) -> str:
    return f"{sum(path.lstat().st_size for path in paths) / 1e6:.1f} MB"


def precompile(workers: int, dtype: torch.dtype | None = None, max_batch_size: int | None = None) -> None:
    """Compiles the Hopper kernels that are missing from the cache folder: all, or those of a dtype and of batches of up
    to ``max_batch_size`` rows. Needs the cute extra, no GPU."""
    missing = BACKENDS["cute"].missing
    if missing:
        raise SystemExit(f"the Hopper kernels cannot be compiled: {missing}")
    started = time.perf_counter()
    try:
        kernels = cache.select_kernels(dtype, max_batch_size)
        total, new = len(kernels), 0
        print(f"{total} kernels into {cache.folder()}, {workers} at a time, each some 15 s of a core", flush=True)
        with _Progress() as progress:
            progress.update(f"0 of {total} kernels")
            for done, (path, compiled) in enumerate(cache.precompile(workers, kernels), 1):
                new += compiled
                seconds = time.perf_counter() - started
                times = f"{seconds:.0f} s"
                if workers <= new and done < total:
                    times += f", about {seconds * (total - done) / new:.0f} s left"
                name = path.name.partition("-")[0]
                progress.update(
                    f"{done} of {total} kernels, {times}", f"{name} {'compiled' if compiled else 'was there'}"
                )
        print(f"{total} kernels in {cache.folder()}, {time.perf_counter() - started:.0f} s")
    except OSError as error:
        raise SystemExit(f"the kernels cannot be kept: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted; what is compiled is kept, and the next call goes on from there") from None


class _Progress:
    """Prints progress: one line that is rewritten on a terminal, elsewhere a line for each update with details."""

    def __init__(self) -> None:
        self.live, self.length = sys.stdout.isatty(), 0

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.length:
            print(flush=True)

    def update(self, text: str, detail: str = "") -> None:
        if self.live:
            print("\r" + text.ljust(self.length), end="", flush=True)
            self.length = len(text)
        elif detail:
            print(f"{text}: {detail}", flush=True)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. ``arguments``: default is the process's."""
    parser = argparse.ArgumentParser(
        "flashsampling", description="FlashSampling: what runs here, and kernels ahead of time."
    )
    parser.add_argument("--version", action="version", version=f"flashsampling {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    help_doctor = "print versions, GPUs, what serves which problem and why not, and what the cache folder has"
    commands.add_parser("doctor", help=help_doctor, description=help_doctor)
    help_precompile = "compile the Hopper kernels into the cache folder, so that serving compiles none; needs no GPU"
    parser_precompile = commands.add_parser("precompile", help=help_precompile, description=help_precompile)
    parser_precompile.add_argument(
        "--workers",
        type=_number,
        default=min(8, os.cpu_count() or 1),
        help="processes that compile (default %(default)s)",
    )
    parser_precompile.add_argument("--dtype", choices=("bfloat16", "float16"), help="of the LM head (default both)")
    help_batch = "rows of the largest batch: fewer of the kernels' shapes (default all of them)"
    parser_precompile.add_argument("--max-batch-size", type=_number, help=help_batch)
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
    elif chosen.command == "doctor":
        doctor()
    else:
        dtype = None if chosen.dtype is None else getattr(torch, chosen.dtype)
        precompile(chosen.workers, dtype, chosen.max_batch_size)


if __name__ == "__main__":
    main(sys.argv[1:])
