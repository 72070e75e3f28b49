"""A kernel from its PTX to launches: translated, compiled by gcc, run in turns."""

import contextlib
import ctypes
import dataclasses
import hashlib
import os
import random
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from torch._subclasses import FakeTensor

from .parse import parse
from .translate import translate

_HERE = Path(__file__).parent
# with -O1 it compiles twice as long, and a kernel runs as fast
_OPTIONS = ("-Og", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC", "-w", f"-I{_HERE}")
_ERROR_BYTES = 4000
_RUNNING, _DONE, _FAILED = range(3)


class Settings:
    """How launches run. ``seed`` says in which order; every launch takes the next one."""

    seed = 0
    # of 8 groups of products how many are computed when they are waited for, the others when they are complete
    late = 4
    rounds = 5_000_000  # after which a launch is taken not to end
    sloppy = 0  # how many units in the last place approximate instructions may be off, each by its operand
    watches = False  # for accesses that nothing orders: see races.h
    launches = 0


settings = Settings()
_together: ContextVar[list["_Launch"] | None] = ContextVar("_together", default=None)


class MachineError(RuntimeError):
    """What went wrong in a launch, and where."""


class Machine:
    """A kernel that can be launched."""

    def __init__(self, ptx: str):
        self.kernel = parse(ptx)
        translation = translate(self.kernel)
        self.lines = translation.lines
        # by the last launch, of every warp: instructions, less those that some threads left out
        self.executed: list[float] = []
        self.library = _compiled(translation.source)

    def launch(self, parameters: Sequence[bytes], ctas: int, cluster: int = 1) -> None:
        """Runs it to its end, or, within ``together``, to the end of that.

        Raises:
            MachineError: an access beside memory, a barrier that is misused, no end.
        """
        packed = bytearray(self.kernel.parameter_bytes)
        assert len(parameters) == len(self.kernel.parameters), (len(parameters), self.kernel.parameters)
        for part, (start, size) in zip(parameters, self.kernel.parameters.values(), strict=True):
            assert len(part) == size, (part, size)
            packed[start : start + size] = part
        settings.launches += 1
        launch = _Launch(self, bytes(packed), ctas, cluster, _tensors_of_callers())
        waiting = _together.get()
        if waiting is None:
            _run([launch])
        else:
            waiting.append(launch)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Launches that are made here run at the end, all at once, as those of several streams or GPUs."""
    launches: list[_Launch] = []
    token = _together.set(launches)
    try:
        yield
    finally:
        _together.reset(token)
    _run(launches)


class _Range(ctypes.Structure):
    _fields_ = [("start", ctypes.c_uint64), ("end", ctypes.c_uint64)]


class _Launch:
    """One that has begun."""

    def __init__(self, machine: Machine, parameters: bytes, ctas: int, cluster: int, tensors: list[Tensor]):
        self.library, self.lines, self.tensors = machine.library, machine.lines, tensors
        ranges = _ranges(tensors)
        self.ranges = (_Range * len(ranges))(*(_Range(*ends) for ends in ranges))
        self.machine = machine
        self.executed = (ctypes.c_uint64 * (ctas * machine.kernel.threads // 32))()
        seed = settings.seed + settings.launches
        how = seed, settings.late, settings.sloppy, settings.watches
        self.state = self.library.start(parameters, ctas, cluster, self.ranges, len(ranges), *how, self.executed)

    def advance(self, rounds: int) -> bool:
        """Whether it is over then."""
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        state = self.library.advance(self.state, rounds, error, _ERROR_BYTES)
        if state == _FAILED:
            raise MachineError(self._with_lines(error.value.decode()))
        self.machine.executed = [count / 32 for count in self.executed]
        return bool(state == _DONE)

    def give_up(self) -> str:
        """Ends it. Where it stood."""
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.library.give_up(self.state, error, _ERROR_BYTES)
        return self._with_lines(error.value.decode())

    def _with_lines(self, text: str) -> str:
        return re.sub(r"stretch (\d+)", lambda match: f"line {self.lines[int(match[1])]}", text)


def _run(launches: list[_Launch]) -> None:
    """To the end of all of them, in turns."""
    turns = random.Random(settings.seed + settings.launches)
    rounds = 0
    while launches:
        launch = turns.choice(launches)
        some = 100_000 if len(launches) == 1 else turns.randint(1, 5000)
        try:
            over = launch.advance(some)
        except MachineError:
            launches.remove(launch)
            for other in launches:
                other.give_up()
            raise
        rounds += some
        if over:
            launches.remove(launch)
        elif rounds > settings.rounds:
            raise MachineError("; ".join(each.give_up() for each in launches))


def _tensors_of_callers() -> list[Tensor]:
    """Those that who called knows of: whoever launches holds what the launch touches."""
    found: dict[int, Tensor] = {}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            _add_tensors(value, found)
        frame = frame.f_back
    return list(found.values())


def _add_tensors(value: Any, found: dict[int, Tensor], depth: int = 4) -> None:
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided and not isinstance(value, FakeTensor):
            found[id(value)] = value
    elif depth:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = getattr(value, "__dict__", {})
        if isinstance(value, (tuple, list, dict)) and len(value) < 100:
            for part in value.values() if isinstance(value, dict) else value:
                _add_tensors(part, found, depth - 1)


def _ranges(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Addresses of their memory, in order."""
    merged: list[tuple[int, int]] = []
    storages = (tensor.untyped_storage() for tensor in tensors)
    for start, end in sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def kept() -> Path:
    """The folder, among temporary files, of what takes long to make. It is loaded as code, so it must be nobody
    else's."""
    folder = Path(tempfile.gettempdir()) / f"flashsampling-ptx-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    nobody_elses = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    assert nobody_elses, f"{folder}: whose is it?"
    return folder


def _compiled(source: str) -> ctypes.CDLL:
    key = hashlib.sha256(
        "".join([source, *((_HERE / name).read_text() for name in ("machine.h", "races.h")), *_OPTIONS]).encode()
    ).hexdigest()[:24]
    library = kept() / f"{key}.so"
    with FileLock(f"{library}.lock"):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=kept()) as scratch:
                code, made = Path(scratch) / "kernel.c", Path(scratch) / "kernel.so"
                code.write_text(source)
                subprocess.run(["gcc", *_OPTIONS, "-o", made, code, "-lm"], check=True, capture_output=True)
                made.replace(library)
    loaded = ctypes.CDLL(str(library))
    loaded.start.restype = ctypes.c_void_p
    loaded.start.argtypes = [
        ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Range), ctypes.c_int, ctypes.c_uint64,
        ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64),
    ]  # fmt: skip
    loaded.advance.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int]
    loaded.give_up.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    return loaded
