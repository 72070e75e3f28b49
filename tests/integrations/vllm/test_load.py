"""How the plug-in gets into vLLM, without vLLM: the environment, releases, the module that is waited for, forks."""

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
import types
from types import SimpleNamespace

import pytest

from flashsampling.integrations.vllm import Refused, counters, load, register, settings

from ..engine.refusals import Panic, refused_words

WORKER, EXECUTOR = "vllm.v1.worker.gpu_worker", "vllm.v1.executor.abstract"


@pytest.fixture(autouse=True)
def vllm(tmp_path, monkeypatch):
    """A vLLM of files, whose worker and executor are to be written; what is imported of it is gone behind the test."""
    for name in (WORKER, EXECUTOR):
        folder = tmp_path.joinpath(*name.split(".")[:-1])
        folder.mkdir(parents=True)
        for each in (folder, folder.parent, folder.parent.parent):
            (each / "__init__.py").touch()

    def write(name, text):
        tmp_path.joinpath(*name.split(".")).with_suffix(".py").write_text(text)

    write(WORKER, "class Worker:\n    def load_model(self):\n        return 'loaded'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm": "0.26.0"}[name])
    for variable in (settings.PLUGIN.variable, settings.TENSOR_PARALLEL, settings.GRAPHS):
        monkeypatch.delenv(variable, raising=False)
    finders, modules = list(sys.meta_path), {name: sys.modules.pop(name) for name in _theirs()}
    yield write
    sys.meta_path[:] = finders
    for name in _theirs():
        del sys.modules[name]
    sys.modules.update(modules)


def _theirs():
    return [name for name in sys.modules if name.split(".")[0] == "vllm"]


def awaited():
    return [finder.name for finder in sys.meta_path if isinstance(finder, load._Awaited)]


def lines(caplog):
    """Returns the log's lines at INFO."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


@pytest.mark.parametrize(("mode", "wanted"), [("off", []), ("auto", [WORKER]), ("require", [EXECUTOR, WORKER])])
def test_modes(mode, wanted, monkeypatch, caplog):
    monkeypatch.setenv(settings.PLUGIN.variable, mode)
    with caplog.at_level(logging.DEBUG, "vllm.flashsampling"):
        register()
        register()
    assert sorted(awaited()) == wanted
    assert not caplog.records


def test_nothing_set_does_nothing(monkeypatch):
    """Not even a look at vLLM's release."""
    monkeypatch.setattr(importlib.metadata, "version", pytest.fail)
    monkeypatch.setattr(load, "when_imported", pytest.fail)
    monkeypatch.setenv(settings.TENSOR_PARALLEL, "nonsense")
    register()
    assert not _theirs()


@pytest.mark.parametrize("variable", [settings.TENSOR_PARALLEL, settings.GRAPHS])
def test_a_bad_value(variable, monkeypatch, caplog):
    monkeypatch.setenv(variable, "nonsense")
    words = refused_words(settings.PLUGIN, register, monkeypatch, caplog)
    assert words.startswith(f"{variable} must be 1/0")
    assert words.endswith("got 'nonsense'")
    assert not awaited()


@pytest.mark.parametrize(
    ("version", "release"), [("0.26.0", "0.26"), ("0.26.1rc2.dev3+g123", "0.26"), ("0.26", "0.26"), ("0.33.0", "0.33")]
)
def test_known_releases(version, release):
    assert settings.check_version(version) is settings.KNOWN[release]


@pytest.mark.parametrize(
    "version", ["0.25.1", "0.27.0", "0.32.0", "0.34.0", "0.2.6", "1.26.0", "dev", "0.260", "0.330.0"]
)
def test_other_releases(version, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    words = f"vLLM {version} is not one of the releases that are known to work: 0.26.x, 0.33.x, with model runner v2"
    assert refused_words(settings.PLUGIN, register, monkeypatch, caplog) == words
    assert not awaited()


@pytest.mark.parametrize("found", [importlib.metadata.PackageNotFoundError("vllm"), None])
def test_a_release_that_nobody_can_tell(found, monkeypatch, caplog):
    """A build of another name, files without metadata: unasked nothing is said, and vLLM starts unless it was
    required."""

    def version(name):
        if found is not None:
            raise found

    monkeypatch.setattr(importlib.metadata, "version", version)
    register()
    assert not caplog.records
    refused_words(settings.PLUGIN, register, monkeypatch, caplog)
    assert not awaited()


def test_a_module_that_is_waited_for(tmp_path, monkeypatch):
    """Not imported by waiting; what follows runs once, behind the module's own code, and the module is as it would
    be."""
    (tmp_path / "awaited_package").mkdir()
    (tmp_path / "awaited_package" / "__init__.py").write_text("")
    (tmp_path / "awaited_package" / "part.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[object] = []
    for _ in range(2):
        load.when_imported("awaited_package.part", lambda module: seen.append((module.__name__, module.value)))
    assert "awaited_package" not in sys.modules
    importlib.import_module("awaited_package")
    assert not seen
    module = importlib.import_module("awaited_package.part")
    assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert seen == [("awaited_package.part", 3)]
    assert module.__spec__.loader.get_source("awaited_package.part") == "value = 3\n"
    assert not awaited()
    load.when_imported("awaited_package.part", lambda module: seen.append("now"))
    assert seen[-1] == "now"
    importlib.reload(module)
    assert len(seen) == 2


def test_a_module_that_comes_the_second_time(tmp_path, monkeypatch):
    """Before that somebody only looked for it, and its import raised, as where something that it imports is not there
    yet."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "awaited_twice.py").write_text("import os\nvalue = int(os.environ['FLASHSAMPLING_TEST_VALUE'])\n")
    seen: list[int] = []
    load.when_imported("awaited_twice", lambda module: seen.append(module.value))
    assert importlib.util.find_spec("awaited_twice") is not None
    for value in ("x", "y", "5"):
        assert awaited() == ["awaited_twice"]
        monkeypatch.setenv("FLASHSAMPLING_TEST_VALUE", value)
        with contextlib.suppress(ValueError):
            importlib.import_module("awaited_twice")
    assert seen == [5]
    assert not awaited()


def test_a_module_that_never_comes(monkeypatch):
    load.when_imported("awaited_nowhere.part", pytest.fail)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("awaited_nowhere.part")


def worker_module():
    class Worker:
        def load_model(self, *, load_dummy_weights=False):
            self.loaded = load_dummy_weights
            return "loaded"

    return SimpleNamespace(Worker=Worker)


def test_the_worker_is_patched_once(monkeypatch):
    module, seen = worker_module(), []
    monkeypatch.setattr(load, "attach", lambda worker: seen.append(worker.loaded))
    load.patch_worker(module)
    load.patch_worker(module)
    assert module.Worker().load_model(load_dummy_weights=True) == "loaded"
    assert seen == [True]
    assert module.Worker.load_model.__name__ == "load_model"


def test_a_worker_that_is_refused(monkeypatch, caplog):
    module = worker_module()
    load.patch_worker(module)
    worker = module.Worker()
    worker.use_v2_model_runner = False
    words = refused_words(settings.PLUGIN, worker.load_model, monkeypatch, caplog)
    assert words.startswith("vLLM chose its model runner v1")
    assert counters(worker) == {"refused": words}


class Hostile:
    """A worker that has nothing, takes nothing, and says so in its own way."""

    def __init__(self, error):
        object.__setattr__(self, "error", error)

    def __getattr__(self, name):
        raise self.error

    def __setattr__(self, name, value):
        raise ValueError("nothing is taken")


@pytest.mark.parametrize(
    "worker", [SimpleNamespace(), Hostile(ValueError("no")), Hostile(Panic("no"))], ids=lambda each: str(type(each))
)
def test_workers_that_nobody_expected(worker, monkeypatch, caplog):
    """vLLM goes on without the plug-in, unless that was required."""
    words = refused_words(settings.PLUGIN, lambda: load.attach(worker), monkeypatch, caplog)
    if isinstance(worker, SimpleNamespace):
        assert words.startswith("AttributeError")
        assert counters(worker) == {"refused": words}
    else:
        assert words == repr(worker.error)


FORKS = {  # of vLLM's worker
    "no worker": ("value = 3", "there is no Worker.load_model here"),
    "no load_model": ("class Worker:\n    pass", "there is no Worker.load_model here"),
    "another kind of thing": ("Worker = 3", "there is no Worker.load_model here"),
    "a class that is sealed": (
        "class Sealed(type):\n    def __setattr__(self, name, value):\n        raise TypeError('sealed')\n"
        "class Worker(metaclass=Sealed):\n    def load_model(self):\n        return 'loaded'",
        "TypeError('sealed')",
    ),
    "a getattr that raises": (
        "class Panic(BaseException):\n    pass\n"
        "def __getattr__(name):\n    if name == 'Worker':\n        raise Panic('no')",
        "Panic('no')",
    ),
}


@pytest.mark.parametrize("imported", [False, True], ids=["comes later", "is there"])
@pytest.mark.parametrize("fork", FORKS)
def test_forks_of_vllm(fork, imported, vllm, monkeypatch, caplog):
    """The engine's module is imported as it is, with one line; where the plug-in is required its import is an error."""
    text, words = FORKS[fork]
    vllm(WORKER, text)

    def load_vllm():
        sys.modules.pop(WORKER, None)
        if imported:
            importlib.import_module(WORKER)
        register()
        importlib.import_module(WORKER)

    assert refused_words(settings.PLUGIN, load_vllm, monkeypatch, caplog).startswith(words)
    assert WORKER not in awaited()


def test_a_worker_whose_import_raises(vllm, monkeypatch, caplog):
    """The error is the same without the plug-in."""
    vllm(WORKER, "raise OSError('no driver')")
    monkeypatch.setenv(settings.PLUGIN.variable, "auto")
    register()
    with pytest.raises(OSError, match="no driver"):
        importlib.import_module(WORKER)
    assert not lines(caplog)


def test_a_loader_of_another_kind(vllm, monkeypatch):
    """The loader still answers other questions; a loader that cannot be followed is left."""

    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            return None if name != WORKER else importlib.machinery.ModuleSpec(name, Old())

    class Old:
        def load_module(self, name):
            sys.modules[name] = module = types.ModuleType(name)
            return module

    monkeypatch.setenv(settings.PLUGIN.variable, "auto")
    register()
    spec = importlib.util.find_spec(WORKER)
    assert "load_model" in spec.loader.get_source(WORKER)
    assert spec.loader.is_package(WORKER) is False
    (awaits,) = [finder for finder in sys.meta_path if isinstance(finder, load._Awaited)]
    sys.meta_path.insert(1, Finder)
    assert type(awaits.find_spec(WORKER, None).loader) is Old


# -- where it is required


def executor_module(workers):
    class Executor:
        def __init__(self, config):
            self.config = config

        def collective_rpc(self, method):
            return [method(worker) for worker in workers]

    return SimpleNamespace(Executor=Executor)


FUSED, REFUSING, ANOTHER = (
    SimpleNamespace(model_runner=SimpleNamespace(flashsampling=object())),
    SimpleNamespace(model_runner=SimpleNamespace(), flashsampling_refused="a head"),
    SimpleNamespace(),
)


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([FUSED, FUSED], None),
        ([FUSED, REFUSING], "1: 'a head'"),
        ([ANOTHER], "0: 'the plug-in is off, or was not loaded'"),
    ],
)
def test_workers_are_asked(workers, words, monkeypatch):
    """The executor asks workers of a class that was never patched too, and those in a process that the environment did
    not reach."""
    monkeypatch.setenv(settings.PLUGIN.variable, "require")
    module = executor_module(workers)
    for _ in range(2):
        load.patch_executor(module)
    if words is None:
        assert module.Executor("config").config == "config"
    else:
        with pytest.raises(Refused, match=words):
            module.Executor("config")


def test_another_nodes_executor_does_not_ask(monkeypatch):
    monkeypatch.setenv(settings.PLUGIN.variable, "require")
    module = executor_module([ANOTHER])
    module.Executor.rpc_broadcast_mq = None
    load.patch_executor(module)
    module.Executor("config")


@pytest.mark.parametrize("gone", [WORKER, EXECUTOR])
def test_a_vllm_without(gone, tmp_path, vllm, monkeypatch):
    monkeypatch.setenv(settings.PLUGIN.variable, "require")
    if gone == WORKER:
        tmp_path.joinpath(*WORKER.split(".")).with_suffix(".py").unlink()
        with pytest.raises(Refused, match=f"there is no module {WORKER} here"):
            register()
    else:
        vllm(EXECUTOR, "class ExecutorOfAFork:\n    pass\n")
        register()
        with pytest.raises(Refused, match=r"Executor.*\(FLASHSAMPLING_VLLM=require\)"):
            importlib.import_module(EXECUTOR)


def test_the_executor_of_a_worker_that_never_came(vllm, monkeypatch):
    """From the entry point to the error, and with "auto" nobody asks."""
    vllm(
        EXECUTOR,
        "class Mine:\n    model_runner = None\n"
        "class Executor:\n    def __init__(self):\n        self.worker = Mine()\n"
        "    def collective_rpc(self, method):\n        return [method(self.worker)]\n",
    )
    monkeypatch.setenv(settings.PLUGIN.variable, "auto")
    register()
    importlib.import_module(EXECUTOR).Executor()
    del sys.modules[EXECUTOR]
    monkeypatch.setenv(settings.PLUGIN.variable, "require")
    register()
    executor = importlib.import_module(EXECUTOR).Executor
    with pytest.raises(Refused, match="the plug-in is off, or was not loaded"):
        executor()
