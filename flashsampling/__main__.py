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
    folder = cache.folder()
    yield f"{folder} (FLASHSAMPLING_CACHE_DIR is {os.environ.get('FLASHSAMPLING_CACHE_DIR') or 'not set'})"
    if not folder.exists():
        yield "none of the Hopper kernels is there yet"
        return
    cache.trusted_folder()
    intact, damaged = [], []
    for path in sorted(folder.glob("*.o")):
        try:
            intact.append(len(cache.read(path)))
        except OSError as error:
            damaged.append(f"not used: {error}")
    yield f"{len(intact)} of the {len(cache.KERNELS)} Hopper kernels, {sum(intact) / 1e6:.1f} MB"
    yield from damaged
    yield "folders beside it are of other versions, and can be deleted"


def precompile(workers: int, dtype: torch.dtype | None = None, max_batch_size: int | None = None) -> None:
    """Compiles the Hopper kernels that are missing from the cache folder: all, or those of a dtype and of batches of up
    to ``max_batch_size`` rows. Needs the cute extra, no GPU."""
    missing = BACKENDS["cute"].missing
    if missing:
        raise SystemExit(f"the Hopper kernels cannot be compiled: {missing}")
    started = time.perf_counter()
    kernels = cache.select_kernels(dtype, max_batch_size)
    try:
        print(f"{len(kernels)} kernels into {cache.folder()}, {workers} at a time, 15 s of a core each", flush=True)
        for done, (path, compiled) in enumerate(cache.precompile(workers, kernels), 1):
            seconds = time.perf_counter() - started
            state = "compiled" if compiled else "was there"
            print(f"{done} of {len(kernels)} kernels, {seconds:.0f} s: {path.stem} {state}", flush=True)
    except OSError as error:
        raise SystemExit(f"the kernels cannot be kept: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted; what is compiled is kept, and the next call goes on from there") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. ``arguments``: default is the process's."""
    parser = argparse.ArgumentParser("flashsampling", description="What runs here, and kernels ahead of time.")
    parser.add_argument("--version", action="version", version=f"flashsampling {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    help_doctor = "print versions, GPUs, what serves which problem and why not, and what the cache folder has"
    commands.add_parser("doctor", help=help_doctor, description=help_doctor)
    help_precompile = "compile the Hopper kernels into the cache folder, so that serving compiles none; needs no GPU"
    options = commands.add_parser("precompile", help=help_precompile, description=help_precompile)
    help_workers = "processes that compile (default %(default)s)"
    options.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help=help_workers)
    options.add_argument("--dtype", choices=("bfloat16", "float16"), help="of the LM head (default both)")
    help_batch = "rows of the largest batch: fewer of the kernels' shapes (default all of them)"
    options.add_argument("--max-batch-size", type=int, help=help_batch)
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
    elif chosen.command == "doctor":
        doctor()
    elif chosen.workers < 1 or (chosen.max_batch_size or 1) < 1:
        options.error("--workers and --max-batch-size must be at least 1")
    else:
        precompile(chosen.workers, chosen.dtype and getattr(torch, chosen.dtype), chosen.max_batch_size)


if __name__ == "__main__":
    main(sys.argv[1:])
