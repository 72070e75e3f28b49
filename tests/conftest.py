import importlib
import importlib.util
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its kernels then run in numpy
    # pytest's workers share the cores: threads of torch beyond that wait for each other, and take a core to wait
    threads = max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of processes that tests start

import pytest

from tests import emulator

# by name: benchmarks, which import this too, need not what it needs
hopper = (
    importlib.import_module("tests.emulator.hopper")
    if not torch.cuda.is_available() and emulator.why_not() is None
    else None
)
if hopper is not None:
    hopper.install()

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
INTERPRETED = DEVICE.type == "cpu" and importlib.util.find_spec("triton") is not None


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hopper kernel takes what it takes, also where there is no GPU."""
    if hopper is not None:
        from flashsampling.kernels.hopper import config

        monkeypatch.setattr(config, "_device_cannot", hopper.REAL["_device_cannot"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def process_group() -> Iterator[None]:
    """torch's default process group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def load_script(name: str) -> Any:
    """Returns a script without a suffix as a module."""
    loader = SourceFileLoader(name, str(Path(__file__).parents[1] / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def run_python(*words: object, cwd: Path = Path(__file__).parents[1], **environment: str) -> str:
    """Returns what Python prints in a process of its own, which must end well: run with these words, or as ``-c`` with
    one that is a program."""
    words = ("-c", *words) if len(words) == 1 and isinstance(words[0], str) else words
    command, variables = [sys.executable, *map(str, words)], os.environ | environment
    run = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=variables)
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    return run.stdout


def _no_tensor_in_a_constexpr(patched: pytest.MonkeyPatch) -> None:
    """To Triton's interpreter ``constexpr - tensor`` is a constexpr. Up to 3.6 a builtin takes that, from 3.7 on
    (triton-lang/triton#8785) it does not; torch's CPU builds are tested with 3.6, and 3.7 is what PyPI's bring."""
    from triton.language.core import constexpr
    from triton.language.semantic import TritonSemantic

    take = TritonSemantic.to_tensor

    def to_tensor(self: TritonSemantic, x: object, check_type: bool = True) -> object:
        if check_type and isinstance(x, constexpr) and isinstance(x.value, self.tensor):
            raise TypeError("a tensor in a constexpr: assign it to a name, or write the tensor first")
        return take(self, x, check_type)

    patched.setattr(TritonSemantic, "to_tensor", to_tensor)


def _masks_are_bool(patched: pytest.MonkeyPatch) -> None:
    """Triton's interpreter broadcasts a comparison of scalars as int32. As a mask Triton 3.6 takes that, 3.9 does
    not."""
    from triton.runtime.interpreter import InterpreterBuilder

    def checked(name: str, place: int) -> Any:
        of_triton = getattr(InterpreterBuilder, name)

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            mask = arguments[place]
            held = mask if mask is None or hasattr(mask, "astype") else mask.data  # of a tensor descriptor an array
            if held is not None and held.dtype != bool:
                raise TypeError(f"a mask of {held.dtype}: compare blocks, not scalars")
            return of_triton(self, *arguments, **named)

        return call

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        patched.setattr(InterpreterBuilder, name, checked(name, place))


def _language_patched_once_a_launch(patched: pytest.MonkeyPatch) -> None:
    """Triton's interpreter patches its language anew whenever a device function is called, which takes 40 % of its time
    in these tests. Here the first call of each module's functions in a launch does; the launch takes it back as
    ever."""
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()  # by the modules' names

    def once(function: Any) -> Any:
        names = id(function.__globals__)
        if names not in done:
            done.add(names)
            return patch(function)

    def launched(self: Any, *arguments: Any, **named: Any) -> None:
        done.clear()
        try:
            launch(self, *arguments, **named)
        finally:
            done.clear()

    patched.setattr(interpreter, "_patch_lang", once)
    patched.setattr(interpreter.GridExecutor, "__call__", launched)


def _types_made_when_asked_for(patched: pytest.MonkeyPatch) -> None:
    """To Triton's interpreter every value has a type and a shape of constexprs, made anew, and a shape is a tuple,
    whose type has a name: hardly anybody asks for these, and they take half of its time in these tests, with a table of
    all dtypes that is made whenever one is looked up. And of whatever integers it adds it finds whether the sum is
    right, which takes five operations more, and says so to nobody, since its options have no debugging."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    assert not interpreter.InterpreterOptions().debug
    look_up, known = interpreter._get_np_dtype, {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    def make_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def tuple_type(self: Any) -> Any:
        if "_type" not in vars(self):
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    unwrap, wrapped = core._unwrap_if_constexpr, (list, tuple, core.tuple)

    def unwrapped(value: Any) -> Any:
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, wrapped) else value

    shapes: dict[tuple[int, ...], Any] = {(): (core.constexpr(1), core.tuple([]))}  # which nobody changes

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self._size = size = tuple([value.value if isinstance(value, core.constexpr) else value for value in shape])
        if not size:
            raise TypeError("0d block_type is forbidden")
        if size not in shapes:
            count = core.validate_block_shape(size)
            shapes[size] = core.constexpr(count), core.tuple([core.constexpr(number) for number in size])
        self.shape, self.numel = core.tuple(size), shapes[size][0].value

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[type._size if type.is_block() else ()]

    patched.setattr(interpreter, "_get_np_dtype", np_dtype)
    patched.setattr(core, "_unwrap_if_constexpr", unwrapped)
    patched.setattr(core.tuple, "__init__", make_tuple)
    patched.setattr(
        core.tuple, "type", property(tuple_type, lambda self, type: setattr(self, "_type", type)), raising=False
    )
    patched.setattr(core.block_type, "__init__", make_block)
    patched.setattr(core.block_type, "name", property(lambda self: f"<{self.shape}, {self.element_ty}>"), raising=False)
    patched.setattr(core.tensor, "__init__", make_tensor)
    patched.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda self, lhs, rhs, binary_op: None)


@pytest.fixture(autouse=True, scope="session")
def _interpreter() -> Iterator[None]:
    """Triton's interpreter is as strict as its compiler, and faster than it comes."""
    with pytest.MonkeyPatch.context() as patched:
        if INTERPRETED:
            _no_tensor_in_a_constexpr(patched)
            _masks_are_bool(patched)
            _language_patched_once_a_launch(patched)
            _types_made_when_asked_for(patched)
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="every case; without it a test marked quick(n) runs n of its own"
    )
    parser.addoption(
        "--part", default="1/1", metavar="K/N", help="one of N parts of the tests, by a hash of their names"
    )
    parser.addoption(
        "--passed",
        action="append",
        default=[],
        metavar="LOG",
        help="without those that this log of pytest -v has as passed",
    )


def left_for_all(items):
    """Ids of the cases that a quick run leaves out. Of a test marked ``quick(n)`` it runs n, spread evenly over
    them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = set()
    for some in cases.values():
        n = some[0].get_closest_marker("quick").args[0]
        kept = {(2 * i + 1) * len(some) // (2 * n) for i in range(n)}
        left |= {item.nodeid for place, item in enumerate(some) if place not in kept}
    return left


def pytest_collection_modifyitems(config, items):
    part, parts = map(int, config.option.part.split("/"))
    passed = {
        name
        for log in config.option.passed
        for name in re.findall(r"PASSED (tests/.*?) *$", Path(log).read_text(errors="replace"), re.M)
    }
    named = any("::" in argument for argument in config.args)  # a test that is named runs, however long it takes
    left = set() if config.option.all or named or DEVICE.type == "cuda" else left_for_all(items)
    by_part: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
    for item in items:
        is_ours = zlib.crc32(item.nodeid.encode()) % parts == part - 1 and item.nodeid not in passed | left
        by_part[is_ours].append(item)
    others, items[:] = by_part
    if others:
        config.hook.pytest_deselected(items=others)
    if DEVICE.type == "cpu":
        skip, later = pytest.mark.skip(reason="needs a CUDA device"), pytest.mark.skip(reason="takes minutes: -m slow")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
            elif "slow" in item.keywords and not config.option.markexpr:
                item.add_marker(later)
