"""How the plug-in gets into vLLM, without vLLM: the environment, releases, the module that is waited for."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from flashsampling.integrations.vllm import Refused, counters, load, register, settings


@pytest.fixture(autouse=True)
def _as_it_was():
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders


def awaited():
    return [finder.name for finder in sys.meta_path if isinstance(finder, load._Awaited)]


@pytest.mark.parametrize("value", ["off", "auto", "require", "", None])
def test_the_environment(value, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm": "0.26.0"}[name])
    if value is None:
        monkeypatch.delenv(settings.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(settings.VARIABLE, value)
    register()
    register()
    assert awaited() == ([] if value == "off" else ["vllm.v1.worker.gpu_worker"])


@pytest.mark.parametrize("asked", ["auto", "require", None])
def test_a_release_that_no_gpu_has_run(asked, monkeypatch, caplog):
    """It is fused where somebody asks for that."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm": "0.33.0"}[name])
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    if asked is not None:
        monkeypatch.setenv(settings.VARIABLE, asked)
    with caplog.at_level(logging.INFO, "vllm.flashsampling"):
        register()
    assert bool(awaited()) == (asked is not None)
    assert ("the plug-in in vLLM 0.33.0 was not run and timed on a GPU" in caplog.text) == (asked is None)


@pytest.mark.parametrize(("asked", "seen", "refused"), [("", False, True), ("", True, False), ("auto", False, False)])
def test_what_is_fused_by_default(asked, seen, refused, monkeypatch):
    monkeypatch.setenv(settings.VARIABLE, asked)
    if refused:
        with pytest.raises(
            Refused, match=r"^that was not .*; FLASHSAMPLING_VLLM=auto fuses all the same, .*=off stays silent$"
        ):
            settings.check_default(seen, "that")
    else:
        settings.check_default(seen, "that")


def test_a_wrong_environment(monkeypatch):
    monkeypatch.setenv(settings.VARIABLE, "on")
    with pytest.raises(ValueError, match="must be one of off, auto, require, got 'on'"):
        register()


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.26.0", "0.26"), ("0.26.1rc2.dev3+g123", "0.26"), ("0.26", "0.26"), ("0.33.0", "0.33")],
)
def test_known_releases(version, release):
    assert settings.check_version(version) is settings.KNOWN[release]


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "0.32.0", "0.34.0", "0.2.6", "1.26.0", "dev", "0.260", "0.330.0"])
def test_other_releases(version, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setenv(settings.VARIABLE, "auto")
    with caplog.at_level(logging.INFO, "vllm.flashsampling"):
        register()
    assert not awaited()
    words = f"vLLM {version} is not one of the releases that are known to work: 0.26.x, 0.33.x, with model runner v2"
    assert [record.getMessage() for record in caplog.records] == [f"flashsampling: nothing is fused: {words}"]
    monkeypatch.setenv(settings.VARIABLE, "require")
    with pytest.raises(Refused) as refused:
        register()
    assert str(refused.value) == words
    assert not awaited()


@pytest.mark.parametrize("found", [importlib.metadata.PackageNotFoundError("vllm"), None])
def test_a_release_that_nobody_can_tell(found, monkeypatch, caplog):
    """A build of another name, files without metadata: vLLM starts, unless the plug-in was required."""

    def version(name):
        if found is not None:
            raise found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    register()
    assert not awaited()
    (record,) = caplog.records
    assert record.getMessage().startswith("flashsampling: nothing is fused: ")
    monkeypatch.setenv(settings.VARIABLE, "require")
    with pytest.raises((importlib.metadata.PackageNotFoundError, TypeError)):
        register()
    assert not awaited()


def test_other_signatures():
    def sample(self, hidden_states, input_batch):
        pass

    with pytest.raises(
        Refused, match=r"X\.sample takes self, hidden_states, input_batch here, not self, hidden_states, input_b"
    ):
        settings.check_signature("X.sample", sample, settings.RUNNER["sample"])


def test_a_module_that_is_waited_for(tmp_path, monkeypatch):
    """Not imported by waiting; what follows runs once, behind the module's own code, and the module is as it would be."""
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
    assert seen == [("awaited_package.part", 3)]
    assert module.__spec__.loader.get_source("awaited_package.part") == "value = 3\n"
    assert not awaited()
    load.when_imported("awaited_package.part", lambda module: seen.append("now"))
    assert seen[-1] == "now"
    importlib.reload(module)
    assert len(seen) == 2


def test_a_module_that_comes_the_second_time(tmp_path, monkeypatch):
    """Before that somebody only looked for it, and its import raised, as where something that it imports is not there yet."""
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


@pytest.mark.parametrize("chosen", ["auto", "require"])
def test_a_worker_that_is_refused(chosen, monkeypatch, caplog):
    module = worker_module()
    load.patch_worker(module)
    monkeypatch.setenv(settings.VARIABLE, chosen)
    worker = module.Worker()
    worker.use_v2_model_runner = False
    if chosen == "require":
        with pytest.raises(Refused, match=r"model runner v1 .* \(FLASHSAMPLING_VLLM=require\)"):
            worker.load_model()
    else:
        with caplog.at_level(logging.INFO, "vllm.flashsampling"):
            assert worker.load_model() == "loaded"
        (record,) = caplog.records
        assert "nothing is fused: vLLM chose its model runner v1" in record.getMessage()
    assert "model runner v1" in counters(worker)["refused"]


@pytest.mark.parametrize("chosen", ["auto", "require"])
def test_what_nobody_expected(chosen, monkeypatch, caplog):
    """vLLM goes on without the plug-in, unless that was required."""
    monkeypatch.setenv(settings.VARIABLE, chosen)
    worker = SimpleNamespace()  # without an attribute that is asked for
    if chosen == "require":
        with pytest.raises(AttributeError):
            load.attach(worker)
    else:
        load.attach(worker)
        assert "nothing is fused: AttributeError" in caplog.text
        assert "Traceback" in caplog.text
    assert "AttributeError" in counters(worker)["refused"]


def test_importing_it_takes_no_vllm():
    program = (
        "import sys; sys.modules['vllm'] = None; from flashsampling.integrations.vllm import register, runner; "
        "assert not any(name.split('.')[0] in ('triton', 'cutlass') for name in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
