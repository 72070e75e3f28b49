"""How the plug-in gets into vLLM, without vLLM: the environment, releases, what is patched, forks."""

import importlib.metadata
import logging
import sys
from types import SimpleNamespace

import pytest

from flashsampling.integrations.vllm import Refused, counters, load, register, settings

from ..engine.refusals import Panic, refused_words

WORKER, EXECUTOR = "vllm.v1.worker.worker_base", "vllm.v1.executor.abstract"


class Worker:
    use_v2_model_runner, model_runner = False, None

    def load_model(self, *, load_dummy_weights=False):
        self.loaded = load_dummy_weights


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """A vLLM whose wrapper finds the worker's methods, and whose executor has one worker."""

    class WorkerWrapperBase:
        def __init__(self):
            self.worker = Worker()

        def __getattr__(self, name):
            return getattr(self.worker, name)

    class Executor:
        def __init__(self, workers=()):
            self.workers = workers or (Worker(),)

        def collective_rpc(self, method):
            return [method(worker) for worker in self.workers]

    modules = {WORKER: SimpleNamespace(WorkerWrapperBase=WorkerWrapperBase)}
    modules[EXECUTOR] = SimpleNamespace(Executor=Executor)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm": "0.26.0"}[name])
    for variable in (settings.PLUGIN.variable, settings.TENSOR_PARALLEL, settings.GRAPHS):
        monkeypatch.delenv(variable, raising=False)
    return SimpleNamespace(wrapper=WorkerWrapperBase, executor=Executor)


def is_patched(vllm):
    return "load_model" in vars(vllm.wrapper), hasattr(vllm.executor.__init__, "__wrapped__")


@pytest.mark.parametrize(
    ("mode", "patched"), [("off", (False, False)), ("auto", (True, False)), ("require", (True, True))]
)
def test_modes(mode, patched, vllm, monkeypatch, caplog):
    monkeypatch.setenv(settings.PLUGIN.variable, mode)
    with caplog.at_level(logging.DEBUG, "vllm.flashsampling"):
        register()
    assert is_patched(vllm) == patched
    assert not caplog.records


def test_nothing_set_does_nothing(vllm, monkeypatch):
    """Not even a look at vLLM's release."""
    monkeypatch.setattr(importlib.metadata, "version", pytest.fail)
    monkeypatch.setenv(settings.TENSOR_PARALLEL, "nonsense")
    register()
    assert is_patched(vllm) == (False, False)


@pytest.mark.parametrize("variable", [settings.TENSOR_PARALLEL, settings.GRAPHS])
def test_a_bad_value(variable, vllm, monkeypatch, caplog):
    monkeypatch.setenv(variable, "nonsense")
    words = refused_words(settings.PLUGIN, register, monkeypatch, caplog)
    assert words.startswith(f"{variable} must be 1/0")
    assert is_patched(vllm) == (False, False)


@pytest.mark.parametrize(
    ("version", "release"), [("0.26.1rc2.dev3+g123", "0.26"), ("0.26", "0.26"), ("0.33.0", "0.33")]
)
def test_known_releases(version, release):
    assert settings.check_version(version) is settings.KNOWN[release]


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "0.2.6", "1.26.0", "dev", "0.260", None])
def test_other_releases(version, vllm, monkeypatch, caplog):
    """None: files without metadata."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    words = refused_words(settings.PLUGIN, register, monkeypatch, caplog)
    known = "is not one of the releases that are known to work: 0.26.x, 0.33.x, with model runner v2"
    assert words == f"vLLM {version} {known}"
    assert is_patched(vllm) == (False, False)


def test_a_worker_is_fused_once_it_has_loaded_its_model(vllm, monkeypatch):
    seen: list[bool] = []
    monkeypatch.setattr(load, "attach", lambda worker: seen.append(worker.loaded))
    monkeypatch.setenv(settings.PLUGIN.variable, "auto")
    for _ in range(2):
        register()
    vllm.wrapper().load_model(load_dummy_weights=True)
    assert seen == [True]


class Hostile:
    """A worker that has nothing, takes nothing, and says so in its own way."""

    def __init__(self, error):
        object.__setattr__(self, "error", error)

    def __getattr__(self, name):
        raise self.error

    def __setattr__(self, name, value):
        raise ValueError("nothing is taken")


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (Worker(), "vLLM chose its model runner v1"),
        (SimpleNamespace(), "vLLM chose its model runner v1"),
        (SimpleNamespace(use_v2_model_runner=True), "AttributeError"),
        (Hostile(ValueError("no")), "ValueError('no')"),
        (Hostile(Panic("no")), "Panic('no')"),
    ],
    ids=["v1", "nothing", "no runner", "error", "panic"],
)
def test_workers_that_are_refused(worker, words, monkeypatch, caplog):
    """vLLM goes on without the plug-in, unless that was required."""
    said = refused_words(settings.PLUGIN, lambda: load.attach(worker), monkeypatch, caplog)
    assert said.startswith(words)
    assert isinstance(worker, Hostile) or counters(worker) == {"refused": said}


class Sealed(type):
    def __setattr__(cls, name, value):
        raise TypeError("sealed")


FORKS = {  # of vLLM's module with the wrapper
    "no module": (None, "ModuleNotFoundError"),
    "no wrapper": (SimpleNamespace(), "AttributeError"),
    "a class that is sealed": (SimpleNamespace(WorkerWrapperBase=Sealed("Wrapper", (), {})), "TypeError('sealed')"),
    "a getattr that raises": (Hostile(Panic("no")), "Panic('no')"),
}


@pytest.mark.parametrize("fork", FORKS)
def test_forks_of_vllm(fork, monkeypatch, caplog):
    """The engine stays as it is, with one line; where the plug-in is required that is an error."""
    module, words = FORKS[fork]
    monkeypatch.setitem(sys.modules, WORKER, module)
    assert refused_words(settings.PLUGIN, register, monkeypatch, caplog).startswith(words)


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
def test_workers_are_asked(workers, words, vllm, monkeypatch):
    """Where the plug-in is required: those too that the environment did not reach."""
    monkeypatch.setenv(settings.PLUGIN.variable, "require")
    register()
    if words is None:
        assert vllm.executor(workers).workers == workers
    else:
        with pytest.raises(Refused, match=words):
            vllm.executor(workers)
        vllm.executor.rpc_broadcast_mq = None  # another node's executor
        vllm.executor(workers)
