"""The compile cache, with a fake compiler and loader: what is loaded, what never is, and what the key covers."""

import contextlib
import errno
import importlib
import itertools
import os
import platform
import pwd
import shutil
import stat
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import flashsampling

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the Hopper kernel is for Linux")
cache = importlib.import_module("flashsampling.kernels.hopper.cache")

KEY, OTHER_KEY, *_ = cache.KERNELS
PAYLOAD = b"\x7fELF" + bytes(range(256)) * 8


class Compiled:
    """What the compiler returns."""

    def __init__(self, payload=PAYLOAD):
        self.payload = payload

    def export_to_c(self, path, function_name):
        assert function_name == cache._SYMBOL
        Path(path).write_bytes(self.payload)


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    """(compiled, loaded): the kernels that were compiled, and the bytes that reached the loader."""
    compiled, loaded = [], []

    def compile_(key):
        time.sleep(0.001)  # other threads come meanwhile
        compiled.append(key)
        return Compiled()

    def load(content):
        loaded.append(content)
        return load

    monkeypatch.setenv("FLASHSAMPLING_CACHE_DIR", str(tmp_path / "root"))
    monkeypatch.setattr(cache, "_fingerprint", lambda: "0123456789abcdef")
    monkeypatch.setattr(cache, "_compile", compile_)
    monkeypatch.setattr(cache, "_load", load)
    monkeypatch.setattr(cache, "_kernels", {})
    return compiled, loaded


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def give_to_another_user(path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(path, 4242, -1)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_is_written_is_loaded_and_nobody_else_could_have_written_it(fakes, umask):
    before = os.umask(umask)
    try:
        with no_warning():
            cache._load_or_compile(KEY)
            cache._load_or_compile(KEY)
    finally:
        os.umask(before)
    assert fakes == ([KEY], [PAYLOAD])
    assert stat.S_IMODE(cache.folder().stat().st_mode) == 0o700
    (path,) = cache.folder().iterdir()  # and no temporary folder is left
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_kernel_is_made_when_it_is_needed_and_once(fakes):
    """A first token does not wait for the shapes of other batches."""
    compiled, loaded = fakes
    kernel = cache.kernel_for(*KEY)
    assert compiled == [KEY]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: cache.kernel_for(*key), [key for key in cache.KERNELS for _ in range(4)]))
    assert cache.kernel_for(*KEY) is cache.kernel_for(*KEY[:2]) is kernel
    assert not loaded
    assert sorted(compiled, key=repr) == sorted(cache.KERNELS, key=repr)
    assert len(list(cache.folder().iterdir())) == len(cache.KERNELS)


def replace_by_link(path):
    path.rename(path.parent.parent / "aside.o")
    path.symlink_to(path.parent.parent / "aside.o")


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([PAYLOAD[-1] ^ 1])),
    "link": replace_by_link,
    "others may write": lambda path: path.chmod(0o602),
    "the group may write": lambda path: path.chmod(0o620),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_object_is_not_loaded_but_compiled_again(fakes, damage):
    compiled, loaded = fakes
    path, _ = cache.prepare(KEY)
    damage(path)
    with pytest.warns(RuntimeWarning, match="compiled again"):
        cache._load_or_compile(KEY)
    assert (len(compiled), loaded) == (2, [])
    with no_warning():
        assert cache.prepare(KEY) == (path, False)
        cache._load_or_compile(KEY)
    assert (len(compiled), loaded) == (2, [PAYLOAD])


def test_what_cannot_be_replaced_is_compiled_in_memory(fakes):
    path, _ = cache.prepare(KEY)
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning) as warned:
        assert isinstance(cache._load_or_compile(KEY), Compiled)
    assert ["Is a directory" in str(warned[0].message), "is not kept" in str(warned[1].message)] == [True, True]


@pytest.mark.parametrize("where", [(os, "open"), (cache, "_load")], ids=lambda where: where[1])
def test_a_passing_fault_removes_nothing(fakes, monkeypatch, where):
    """Trap 50."""
    compiled, loaded = fakes
    cache.prepare(KEY)

    def no_descriptors(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(*where, no_descriptors)
        patched.setattr(cache, "_write", no_descriptors)
        with pytest.warns(RuntimeWarning, match="Too many open files"):
            assert isinstance(cache._load_or_compile(KEY), Compiled)
    with no_warning():
        cache._load_or_compile(KEY)
    assert (len(compiled), loaded) == (2, [PAYLOAD])


def test_what_is_checked_is_what_is_loaded(fakes, monkeypatch):
    """Trap 50: another object is put in its place as its checksum is compared."""
    path, _ = cache.prepare(KEY)
    sha256 = cache.hashlib.sha256

    def replaced_as_it_is_checked(*content):
        if content:
            path.write_bytes(sha256(b"hostile").digest() + b"hostile")
        return sha256(*content)

    monkeypatch.setattr(cache.hashlib, "sha256", replaced_as_it_is_checked)
    with no_warning():
        cache._load_or_compile(KEY)
    assert fakes == ([KEY], [PAYLOAD])


def test_another_users_object_is_not_loaded(fakes, monkeypatch):
    path, _ = cache.prepare(KEY)
    give_to_another_user(path, monkeypatch)
    with pytest.raises(PermissionError, match="belongs to user"):
        cache.read(path)


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("group", "can be written by others"),
        ("others", "can be written by others"),
        ("another user", "belongs to user"),
        ("link", "is a link"),
        ("file", "File exists"),
    ],
)
def test_a_folder_that_others_could_have_filled_is_not_used(fakes, monkeypatch, flaw, message):
    """Trap 30."""
    _, loaded = fakes
    cache.prepare(KEY)
    place = cache.folder()
    if flaw in ("group", "others"):
        place.chmod(0o770 if flaw == "group" else 0o707)
    elif flaw == "another user":
        give_to_another_user(place, monkeypatch)
    else:
        place.rename(place.parent / "elsewhere")
        place.symlink_to("elsewhere") if flaw == "link" else place.write_text("")
    with pytest.warns(RuntimeWarning, match=f"neither kept nor loaded: .*{message}"):
        assert isinstance(cache._load_or_compile(KEY), Compiled)
    assert not loaded
    with pytest.raises(OSError, match=message):
        cache.prepare(KEY)
    with pytest.raises(OSError, match=message):
        next(cache.precompile(1))


@pytest.mark.parametrize(
    ("variable", "home", "root"),
    [
        (None, "/home/me", "/home/me/.cache/flashsampling"),
        ("~/kernels", "/home/me", "/home/me/kernels"),
        ("/kernels", None, "/kernels"),
        ("kernels", None, "{here}/kernels"),
        (None, None, None),
    ],
)
def test_where_the_root_is(fakes, monkeypatch, tmp_path, variable, home, root):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as of a container's user without an entry in passwd
    for name, value in (("HOME", home), ("FLASHSAMPLING_CACHE_DIR", variable)):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
    if root is not None:
        assert str(cache.folder().parents[1]) == root.format(here=tmp_path)
        return
    with pytest.warns(RuntimeWarning, match="neither kept nor loaded: there is no home directory"):
        assert isinstance(cache.kernel_for(*KEY), Compiled)
    with pytest.raises(FileNotFoundError, match="set FLASHSAMPLING_CACHE_DIR"):
        cache.prepare(KEY)
    assert not list(tmp_path.iterdir())


def test_many_at_once_leave_whole_objects(fakes, monkeypatch):
    """Compilers that differ in every object, all writing the same kernel, and readers: nothing is found damaged."""
    numbers = itertools.count()
    monkeypatch.setattr(cache, "_compile", lambda key: Compiled(PAYLOAD * 50 + str(next(numbers)).encode()))

    def work(_):
        path = cache.trusted_folder() / cache._name(KEY)
        for _ in range(20):
            cache._write(cache._compile(KEY), path)
            cache.read(path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(list(cache.folder().iterdir())) == 1


# What the key covers


@pytest.fixture
def copied(monkeypatch, tmp_path):
    """A copy of the package, whose sources the key is made of."""
    package = tmp_path / "flashsampling"
    shutil.copytree(Path(flashsampling.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "_PACKAGE", package)
    return package


def test_only_covered_sources_change_the_key(copied):
    before, covered = cache._hash_sources(), set(cache._sources())
    hopper = copied / "kernels" / "hopper"
    assert {copied / "exchange_protocol.py", copied / "kernels" / "device.py", hopper / "epilogue.py"} < covered
    others = set(copied.rglob("*.py")) - covered
    assert {copied / "reference" / "oracle.py", copied / "kernels" / "triton" / "fused" / "kernel.py"} < others
    for source in others:
        source.write_bytes(source.read_bytes() + b"\n# changed\n")
    assert cache._hash_sources() == before == cache._SOURCES
    for source in covered:
        original = source.read_bytes()
        source.write_bytes(original + b"\n# changed\n")
        assert cache._hash_sources() != before, source
        source.write_bytes(original)


def test_the_kernels_imports_when_it_runs_are_covered():
    """The modules of the package that the compiled ones hold objects of, found by importing them."""
    pytest.importorskip("cutlass")
    package = Path(flashsampling.__file__).parent
    covered = {str(source.relative_to(package)) for source in cache._sources()}
    modules = [source.stem for source in (package / "kernels" / "hopper").glob("*.py")]
    assert {"kernel", "epilogue", "workspace_layout"} < set(modules)
    for name in modules:
        for value in vars(importlib.import_module(f"flashsampling.kernels.hopper.{name}")).values():
            module = getattr(value, "__module__", None) or getattr(value, "__name__", "")
            if isinstance(module, str) and module.startswith("flashsampling."):
                assert module.removeprefix("flashsampling.").replace(".", "/") + ".py" in covered, (name, module)


def test_sources_processor_and_compiler_change_the_key(monkeypatch):
    fingerprint = cache._fingerprint.__wrapped__
    if importlib.util.find_spec("cutlass"):
        assert any(entry.startswith("nvidia-cutlass-dsl-libs-") for entry in cache._compiler())
    keys = {fingerprint()}
    monkeypatch.setattr(cache, "_SOURCES", "of another version")
    keys.add(fingerprint())
    monkeypatch.setattr(platform, "machine", lambda: "some other")
    keys.add(fingerprint())
    monkeypatch.setattr(cache, "_compiler", lambda: ["nvidia-cutlass-dsl 4.8.2"])
    keys.add(fingerprint())
    monkeypatch.setattr(cache, "ARCHITECTURE", "sm_90")
    keys.add(fingerprint())
    assert len(keys) == 5


def test_what_is_compiled_while_the_sources_change_is_not_kept(copied, monkeypatch, tmp_path):
    pytest.importorskip("cutlass")
    kernel = importlib.import_module("flashsampling.kernels.hopper.kernel")
    monkeypatch.setenv("FLASHSAMPLING_CACHE_DIR", str(tmp_path / "root"))
    monkeypatch.setattr(kernel, "compile_kernel", lambda *_, **__: Compiled())
    assert cache.prepare(KEY)[1]

    def upgraded_meanwhile(*_, **__):
        (copied / "exchange_protocol.py").unlink()
        return Compiled()

    monkeypatch.setattr(kernel, "compile_kernel", upgraded_meanwhile)
    with pytest.raises(RuntimeError, match=r"has changed on disk .* restart the process"):
        cache.prepare(OTHER_KEY)
    assert len(list(cache.folder().iterdir())) == 1
