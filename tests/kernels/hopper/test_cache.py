"""The compile cache, with a compiler and a loader that are played: what is loaded, what never is, and what the key
covers."""

import contextlib
import errno
import importlib
import os
import platform
import pwd
import shutil
import stat
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import flashsampling
from flashsampling import sources
from tests.conftest import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the Hopper kernel is for Linux")
cache = importlib.import_module("flashsampling.kernels.hopper.cache")

DTYPE, CONFIG = torch.bfloat16, cache.CONFIGS[0]
COMPILE = cache._compile
PAYLOAD = b"\x7fELF" + bytes(range(256)) * 8


class Compiled:
    """What the compiler returns."""

    def __init__(self, payload=PAYLOAD):
        self.payload = payload

    def export_to_c(self, path, function_name):
        assert function_name == cache._SYMBOL
        Path(path).write_bytes(self.payload)


@pytest.fixture
def played(monkeypatch, tmp_path):
    """(compiled, loaded): what was asked of the compiler, and the contents that reached the loader."""
    compiled, loaded = [], []

    def compile_(dtype, config, features):
        compiled.append((dtype, config) if features == cache.KINDS["plain"] else (dtype, config, features))
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


def belongs_to_another(path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(path, 4242, -1, follow_symlinks=False)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077, 0o277, 0o777])
def test_what_is_written_is_loaded_and_nobody_else_could_have_written_it(played, umask, monkeypatch, tmp_path):
    compiled, loaded = played
    monkeypatch.setenv("FLASHSAMPLING_CACHE_DIR", str(tmp_path / "above" / "root"))
    before = os.umask(umask)
    try:
        with no_warning():
            cache._load_or_compile(DTYPE, CONFIG)
            cache._load_or_compile(DTYPE, CONFIG)
    finally:
        os.umask(before)
    assert compiled == [(DTYPE, CONFIG)]
    assert loaded == [PAYLOAD]
    place = cache.folder()
    for folder in (place, *list(place.parents)[:3]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (path,) = place.iterdir()  # and no scratch folder is left
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_shape_is_made_when_it_is_needed_and_once(played):
    """A first token does not wait for the shapes of other batches."""
    compiled, loaded = played
    kernel = cache.kernel_for(DTYPE, cache.CONFIGS[3])
    assert compiled == [(DTYPE, cache.CONFIGS[3])]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda config: cache.kernel_for(DTYPE, config), cache.CONFIGS * 3))
    assert cache.kernel_for(DTYPE, cache.CONFIGS[3]) is kernel
    assert sorted(compiled, key=repr) == sorted(((DTYPE, config) for config in cache.CONFIGS), key=repr)
    assert not loaded
    compiled.clear()
    others = [features for kind, features in cache.KINDS.items() if kind != "plain"]
    assert len({kernel, *(cache.kernel_for(DTYPE, cache.CONFIGS[3], features) for features in others)}) == 3
    cache._kernels.clear()
    cache.kernel_for(DTYPE, cache.CONFIGS[3])
    for features in others:
        cache.kernel_for(DTYPE, cache.CONFIGS[3], features)
    assert compiled == [(DTYPE, cache.CONFIGS[3], features) for features in others]
    assert len(loaded) == 3


def overwrite(content):
    return lambda path: path.write_bytes(content)


def all_gather(make):
    def damage(path):
        path.rename(path.parent.parent / "aside.o")
        make(path)

    return damage


WRONG = {
    "empty": overwrite(b""),
    "garbage": overwrite(b"cut off"),
    "one bit": overwrite(PAYLOAD[:1000] + bytes([PAYLOAD[1000] ^ 1]) + PAYLOAD[1001:]),
    "longer": overwrite(PAYLOAD + b"\0"),
    **{f"cut at {end}": overwrite(PAYLOAD[:end]) for end in (4, len(PAYLOAD) - 1)},
}
DAMAGE = WRONG | {
    "link": all_gather(lambda path: path.symlink_to(path.parent.parent / "aside.o")),
    "dangling link": all_gather(lambda path: path.symlink_to("nowhere")),
    "pipe": all_gather(os.mkfifo),
    "others may write": lambda path: path.chmod(0o666),
    "the group may write": lambda path: path.chmod(0o620),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_object_is_not_loaded_but_made_again(played, damage):
    compiled, loaded = played
    path, _ = cache.prepare(DTYPE, CONFIG)
    damage(path)
    with pytest.warns(RuntimeWarning, match="compiled again"):
        cache._load_or_compile(DTYPE, CONFIG)
    assert (len(compiled), loaded) == (2, [])
    with no_warning():
        assert cache.prepare(DTYPE, CONFIG) == (path, False)
        cache._load_or_compile(DTYPE, CONFIG)
    assert (len(compiled), loaded) == (2, [PAYLOAD])


def test_what_cannot_be_replaced_is_compiled_in_memory(played):
    compiled, loaded = played
    path, _ = cache.prepare(DTYPE, CONFIG)
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning) as warned:
        cache._load_or_compile(DTYPE, CONFIG)
    assert ["Is a directory" in str(warned[0].message), "are not kept" in str(warned[1].message)] == [True, True]
    assert (len(compiled), loaded) == (2, [])


def test_an_intact_object_that_does_not_load_is_made_again(played, monkeypatch):
    compiled, _ = played
    path, _ = cache.prepare(DTYPE, CONFIG)

    def load(path):
        raise AttributeError("no such symbol")

    monkeypatch.setattr(cache, "_load", load)
    with pytest.warns(RuntimeWarning, match="does not load .no such symbol.; it stays"):
        assert isinstance(cache._load_or_compile(DTYPE, CONFIG), Compiled)
    assert len(compiled) == 2
    assert cache.damage(path) is None
    assert list(path.parent.iterdir()) == [path]


def no_descriptors(*_, **__):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("where", [(os, "open"), (Path, "glob"), (cache, "_load")], ids=lambda where: where[1])
def test_a_passing_fault_removes_nothing(played, monkeypatch, where):
    compiled, loaded = played
    path, _ = cache.prepare(DTYPE, CONFIG)
    inode = path.stat().st_ino
    with monkeypatch.context() as patched:
        patched.setattr(*where, no_descriptors)
        with pytest.warns(RuntimeWarning, match="Too many open files"):
            cache._load_or_compile(DTYPE, CONFIG)
    assert len(compiled) == 2
    if where == (cache, "_load"):
        assert path.stat().st_ino == inode  # nor written again
    with no_warning():
        cache._load_or_compile(DTYPE, CONFIG)
    assert (len(compiled), loaded) == (2, [PAYLOAD])


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_only_a_wrong_checksum_removes(played, monkeypatch, damage):
    path, _ = cache.prepare(DTYPE, CONFIG)
    damage(path)
    monkeypatch.setattr(cache, "_write", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="compiled again"):
        cache._load_or_compile(DTYPE, CONFIG)
    assert os.path.lexists(path) == (damage not in WRONG.values())


def test_an_intact_object_that_was_put_there_meanwhile_stays(played, monkeypatch):
    path, _ = cache.prepare(DTYPE, CONFIG)
    path.write_bytes(b"damaged")
    sha256 = cache.hashlib.sha256

    def replaced_as_it_is_read(content):
        path.rename(path.parent / "read.o")
        path.write_bytes(PAYLOAD)
        return sha256(content)

    monkeypatch.setattr(cache.hashlib, "sha256", replaced_as_it_is_read)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        list(cache._intact(path.parent, DTYPE, CONFIG, cache._PLAIN))
    monkeypatch.setattr(cache.hashlib, "sha256", sha256)
    assert cache.damage(path) is None


def test_what_is_checked_is_what_is_loaded(played, monkeypatch):
    """Another object is put in its place after the check and before the load."""
    compiled, loaded = played
    path, _ = cache.prepare(DTYPE, CONFIG)
    load = cache._load

    def replaced_before_it_is_loaded(what):
        path.unlink()
        path.write_bytes(b"hostile")
        return load(what)

    monkeypatch.setattr(cache, "_load", replaced_before_it_is_loaded)
    with no_warning():
        cache._load_or_compile(DTYPE, CONFIG)
    assert (len(compiled), loaded) == (1, [PAYLOAD])


def test_the_loader_is_given_the_bytes_alone(monkeypatch, tmp_path):
    """The compiler's loader reads a path: here that of a file in memory, without a name."""
    cute = pytest.importorskip("cutlass.cute")
    monkeypatch.chdir(tmp_path)
    paths = []

    def load_module(path, enable_tvm_ffi):
        paths.append(path)
        return {cache._SYMBOL: (Path(path).read_bytes(), enable_tvm_ffi)}

    monkeypatch.setattr(cute.runtime, "load_module", load_module)
    assert cache._load(PAYLOAD) == (PAYLOAD, True)
    assert not os.path.exists(paths[0])  # closed again
    assert not list(tmp_path.iterdir())


def test_another_users_object_in_a_shared_folder_is_not_loaded(played, monkeypatch):
    compiled, loaded = played
    path, _ = cache.prepare(DTYPE, CONFIG)
    path.parent.chmod(0o1777)  # sticky: fit as a folder
    with no_warning():
        assert cache.trusted_folder() == path.parent
    if os.geteuid() != 0:
        pytest.skip("only root can make an object another user's and keep the folder")
    os.chown(path, 4242, -1)
    with pytest.warns(RuntimeWarning, match="belongs to user 4242"):
        cache._load_or_compile(DTYPE, CONFIG)
    assert (len(compiled), loaded) == (2, [])


LEVELS = ["above", "above/root", "above/root/cute", "above/root/cute/0123456789abcdef"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "flaw",
    ["the group may write", "others may write", "another user's", "a link", "another user's link", "a loop", "a file"],
)
def test_a_folder_that_others_could_have_filled_is_not_used(played, monkeypatch, tmp_path, level, flaw):
    compiled, loaded = played
    monkeypatch.setenv("FLASHSAMPLING_CACHE_DIR", str(tmp_path / "above" / "root"))
    cache.prepare(DTYPE, CONFIG)
    place = tmp_path / level
    if flaw in ("the group may write", "others may write"):
        place.chmod(0o770 if "group" in flaw else 0o707)
        message = "can be written by others"
    elif "link" in flaw:
        place.rename(tmp_path / "elsewhere")
        place.symlink_to("../" * (len(place.relative_to(tmp_path).parts) - 1) + "elsewhere")
    elif flaw == "a loop":
        shutil.rmtree(place)
        place.symlink_to(place.name)
        message = "Too many levels of symbolic links"
    elif flaw == "a file":
        shutil.rmtree(place)
        place.write_text("")
        message = "is not a plain folder"
    if "another user's" in flaw:
        belongs_to_another(place, monkeypatch)
        message = "belongs to user"
    if flaw == "a link":  # to a larger disk: fine
        with no_warning():
            cache._load_or_compile(DTYPE, CONFIG)
        assert (len(compiled), loaded) == (1, [PAYLOAD])
        return
    with pytest.warns(RuntimeWarning, match=f"neither kept nor loaded: .*{message}"):
        assert isinstance(cache._load_or_compile(DTYPE, CONFIG), Compiled)
    assert not loaded
    with pytest.raises(OSError, match=message):
        cache.prepare(DTYPE, CONFIG)
    with pytest.raises(OSError, match=message):
        next(cache.precompile(1))
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("variable", "home", "root"),
    [
        (None, "/home/me", "/home/me/.cache/flashsampling"),
        ("", "/home/me", "/home/me/.cache/flashsampling"),
        ("~", "/home/me", "/home/me"),
        ("~/kernels", "/home/me", "/home/me/kernels"),
        ("~/kernels", "", "HOME is '', which is not an absolute path"),
        ("~nobody-of-this-name/kernels", "/home/me", "there is no home directory for '~nobody-of-this-name/kernels'"),
        (None, "", "HOME is '', which is not an absolute path"),
        (None, None, "there is no home directory for '~/.cache/flashsampling'"),
        (None, "me", "HOME is 'me', which is not an absolute path"),
        (None, ".", "HOME is '.', which is not an absolute path"),
        ("/kernels", "", "/kernels"),
        ("kernels", "", "{here}/kernels"),
        ("./~/kernels", "", "{here}/~/kernels"),
    ],
)
def test_where_the_root_is(played, monkeypatch, tmp_path, variable, home, root):
    """Never in the working directory but by name, whatever HOME is."""
    compiled, loaded = played
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as of a container's user without an entry in passwd
    for name, value in (("HOME", home), ("FLASHSAMPLING_CACHE_DIR", variable)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if root.startswith(("/", "{")):
        assert str(cache._root()) == root.format(here=tmp_path)
        return
    message = f"no cache folder: FLASHSAMPLING_CACHE_DIR is {repr(variable) if variable else 'not set'}, and {root}"
    with pytest.warns(RuntimeWarning, match=f"neither kept nor loaded: {message}"):
        assert isinstance(cache.kernel_for(DTYPE, CONFIG), Compiled)
    with pytest.raises(FileNotFoundError, match=message):
        cache.prepare(DTYPE, CONFIG)
    assert (compiled, loaded) == ([(DTYPE, CONFIG)], [])
    assert not list(tmp_path.iterdir())


def long_ago(path, days):
    then = time.time() - days * 86400
    os.utime(path, (then, then))


def test_what_nobody_needs_goes_when_something_is_written(played):
    place = cache.trusted_folder()
    made = {
        place / "tmpabcdefgh": 2, place / "tmpyounger0": 0.5, place.parent / ("a" * 16): 91,
        place.parent / ("b" * 16): 89, place.parent / "of_the_user": 1000, place.parent.parent / ("c" * 16): 1000,
    }  # fmt: skip
    for folder, days in made.items():
        folder.mkdir()
        (folder / "kernel.o").write_bytes(PAYLOAD)
        long_ago(folder, days)
    (place.parent / ("d" * 16)).symlink_to(place.parent.parent / ("c" * 16))
    (place / "tmpfile0").write_text("")
    long_ago(place / "tmpfile0", 1000)
    folders = list(made)
    assert cache.leftovers(place) == folders[:1]
    assert cache.unneeded(place) == [folders[0], folders[2]]
    with no_warning():
        assert cache.prepare(DTYPE, CONFIG)[1]
    assert [folder for folder in folders if not folder.exists()] == [folders[0], folders[2]]
    assert cache.unneeded(place) == []


def test_a_folder_that_is_used_says_so(played):
    path, _ = cache.prepare(DTYPE, CONFIG)
    long_ago(path.parent, 91)
    cache.prepare(DTYPE, CONFIG)  # reads alone
    assert path.parent.stat().st_mtime > time.time() - 3600


def test_many_at_once_leave_whole_objects(played, monkeypatch):
    """Compilers that differ in every object, all writing the same kernel, and readers: nothing is ever found
    damaged."""
    number = iter(range(1000))
    lock = threading.Lock()

    def compile_(dtype, config, logits):
        with lock:
            return Compiled(PAYLOAD * 50 + str(next(number)).encode())

    monkeypatch.setattr(cache, "_compile", compile_)
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        return [cache._load_or_compile(DTYPE, CONFIG) for _ in range(20)]

    with no_warning(), ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    left = list(cache.folder().iterdir())
    assert 1 <= len(left) <= 8
    assert [cache.damage(path) for path in left] == [None] * len(left)


# What the key covers


@pytest.fixture
def copied(monkeypatch, tmp_path):
    """A copy of the package whose sources the key is made of, and what the key would be of a process that imports
    them."""
    package = tmp_path / "flashsampling"
    shutil.copytree(Path(flashsampling.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "_HERE", package / "kernels" / "hopper")
    monkeypatch.setattr(cache, "_compiler", lambda: ["nvidia-cutlass-dsl 4.8.1"])
    return package, lambda: cache._hash_sources(sources.read(package), cache._HERE)


def test_only_covered_sources_change_the_key(copied):
    package, key = copied
    before = key()
    covered = set(cache._sources(sources.read(package), cache._HERE))
    assert {package / "exchange_protocol.py", package / "kernels" / "device.py", cache._HERE / "epilogue.py"} < covered
    others = set(package.rglob("*.py")) - covered
    assert {package / "reference" / "oracle.py", package / "kernels" / "triton" / "fused" / "kernel.py"} < others
    for source in others:
        source.write_bytes(source.read_bytes() + b"\n# changed\n")
    assert key() == before
    for source in covered:
        original = source.read_bytes()
        source.write_bytes(original + b"\n# changed\n")
        assert key() != before, source
        source.write_bytes(original)


def test_the_kernels_imports_when_it_runs_are_covered():
    """The modules of the package that the compiled ones hold objects of, found by importing them."""
    pytest.importorskip("cutlass")
    package = Path(flashsampling.__file__).parent
    covered = {str(source.relative_to(package)) for source in cache._imported_sources()}
    modules = [source.stem for source in (package / "kernels" / "hopper").glob("*.py")]
    assert {"kernel", "epilogue", "workspace_layout"} < set(modules)
    for name in modules:
        for value in vars(importlib.import_module(f"flashsampling.kernels.hopper.{name}")).values():
            module = getattr(value, "__module__", None) or getattr(value, "__name__", "")
            if isinstance(module, str) and module.startswith("flashsampling."):
                assert module.removeprefix("flashsampling.").replace(".", "/") + ".py" in covered, (name, module)


def test_processor_and_compiler_change_the_key(copied, monkeypatch):
    _, key = copied
    keys = {key()}
    monkeypatch.setattr(platform, "machine", lambda: "some other")
    keys.add(key())
    monkeypatch.setattr(cache, "_compiler", lambda: ["nvidia-cutlass-dsl 4.8.2"])
    keys.add(key())
    monkeypatch.setattr(cache, "ARCHITECTURE", "sm_90")
    keys.add(key())
    assert len(keys) == 4


def test_the_compilers_libraries_are_in_the_key(monkeypatch):
    pytest.importorskip("cutlass")
    assert any(entry.startswith("nvidia-cutlass-dsl-libs-") for entry in cache._compiler())
    monkeypatch.setattr(cache.importlib.metadata, "distributions", lambda: [])  # bare folders on the path
    assert [entry.split()[0] for entry in cache._compiler()] == ["cutlass", "tvm_ffi"]


KEY = "from flashsampling.kernels.hopper import cache; print(cache._fingerprint())"
UPGRADED = """
import sys
from pathlib import Path
import flashsampling
from flashsampling import sources
package = Path(flashsampling.__file__).parent
assert package.parent == Path.cwd(), package
(package / "kernels" / "hopper" / sys.argv[1]).write_text("raise SystemExit('imported after the upgrade')")
from flashsampling.kernels.hopper import cache
cache._run_compiler = lambda *_: 1 / 0
print(cache._fingerprint() == cache._hash_sources(sources.IMPORTED, cache._HERE) == sys.argv[2])
try:
    cache.prepare(cache.torch.bfloat16, cache.CONFIGS[0])
except RuntimeError as error:
    print(error)
print(list(Path("kept").rglob("*.o")))
"""


def test_an_upgrade_on_disk_does_not_reach_the_key_or_the_compiler(copied, tmp_path):
    """In a process that has imported the package, and not yet the kernel."""
    pytest.importorskip("cutlass")
    package, _ = copied
    key = _run_copy(tmp_path, KEY).strip()
    same, refused, left = _run_copy(tmp_path, "-c", UPGRADED, "kernel.py", key).splitlines()
    assert (same, left) == ("True", "[]")
    kernel = package / "kernels" / "hopper" / "kernel.py"
    assert refused.startswith(f"{kernel} has changed on disk since this process imported it")
    assert refused.endswith("restart the process")
    assert _run_copy(tmp_path, KEY).strip() != key


def _run_copy(tmp_path, *words):
    # the copy first; then where this process finds the compiler, which need not be installed
    places = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    path = os.pathsep.join([str(tmp_path), *places])
    return run_python(*words, cwd=tmp_path, PYTHONPATH=path, FLASHSAMPLING_CACHE_DIR=str(tmp_path / "kept"))


def test_what_is_compiled_while_the_sources_change_is_not_kept(played, copied, monkeypatch):
    package, _ = copied
    monkeypatch.setattr(sources, "IMPORTED", sources.read(package))
    monkeypatch.setattr(cache, "_imported_sources", lambda: cache._sources(sources.IMPORTED, cache._HERE))
    monkeypatch.setattr(cache, "_compile", COMPILE)
    monkeypatch.setattr(cache, "_run_compiler", lambda *_: Compiled())
    assert cache.prepare(DTYPE, CONFIG)[1]

    def upgraded_meanwhile(*_):
        (package / "exchange_protocol.py").unlink()
        return Compiled()

    monkeypatch.setattr(cache, "_run_compiler", upgraded_meanwhile)
    with pytest.raises(RuntimeError, match=r"exchange_protocol.py has changed on disk .* restart the process"):
        cache.prepare(DTYPE, cache.CONFIGS[1])
    assert len(list(cache.folder().iterdir())) == 1
