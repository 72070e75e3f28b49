"""How the plug-in gets into SGLang, without SGLang: the environment, releases, signatures, the hooks, forks."""

import importlib.metadata
import inspect
import logging
import sys
from types import SimpleNamespace

import pytest

from flashsampling.integrations.sglang import Refused, counters, load, register, settings

from ..engine.refusals import Panic, refused_words
from . import fakes


class Registry:
    """SGLang's ``HookRegistry``."""

    hooks: list[tuple[str, object, str]]

    @classmethod
    def register(cls, target, hook, hook_type):
        cls.hooks.append((target, hook, hook_type))


class Sampler:
    def forward(self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions):
        pass


CLASSES = {name: getattr(fakes, name) for name in load._CLASSES} | {"Sampler": Sampler}


@pytest.fixture(autouse=True)
def _sglang(monkeypatch):
    Registry.hooks = []
    for module in load._CLASSES.values():
        names = {other: CLASSES[other] for other, place in load._CLASSES.items() if place == module}
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))
    hooks = SimpleNamespace(HookRegistry=Registry, HookType=SimpleNamespace(AFTER="after", BEFORE="before"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"sglang": "0.5.15.post1"}[name])


@pytest.fixture
def newer(monkeypatch):
    """SGLang 0.5.23, by its methods' parameters."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"sglang": "0.5.23"}[name])
    methods: dict[str, dict[str, object]] = {}
    for name, parameters in settings.KNOWN["0.5.23"].signatures.items():
        owner, _, method = name.partition(".")
        methods.setdefault(owner, {})[method] = taking(parameters.split())
    for name, module in load._CLASSES.items():
        monkeypatch.setattr(sys.modules[module], name, type(name, (), methods[name]))
    worker = SimpleNamespace(capture_pre_sample_logits=taking(settings.BEAMS))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.tp_worker", worker)
    return worker


def taking(parameters):
    def function(*arguments):
        pass

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__dict__["__signature__"] = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
    return function


HOOKS = [
    ("sglang.srt.model_executor.model_runner.ModelRunner.load_model", load.after_load_model, "after"),
    ("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", load.after_init_new, "after"),
]
REQUIRED = [("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", load.before_launch, "before")]


@pytest.mark.parametrize(("mode", "hooks"), [("off", []), ("auto", HOOKS), ("require", HOOKS + REQUIRED)])
def test_modes(mode, hooks, monkeypatch, caplog):
    monkeypatch.setenv(settings.PLUGIN.variable, mode)
    with caplog.at_level(logging.DEBUG, "sglang.flashsampling"):
        register()
    assert Registry.hooks == hooks
    assert not caplog.records


def test_nothing_set_does_nothing(monkeypatch):
    """Not even a look at SGLang's release."""
    monkeypatch.delenv(settings.PLUGIN.variable, raising=False)
    monkeypatch.setattr(importlib.metadata, "version", pytest.fail)
    register()


@pytest.mark.parametrize(("version", "release"), [("0.5.15rc1", "0.5.15"), ("0.5.23.post2", "0.5.23")])
def test_known_releases(version, release):
    assert settings.check_version(version) is settings.KNOWN[release]


def test_a_release_with_beam_search(newer, monkeypatch):
    """Whose logits are taken before the draw: there is a hook before that."""
    monkeypatch.setenv(settings.PLUGIN.variable, "auto")
    register()
    assert Registry.hooks[2:] == [
        ("sglang.srt.managers.tp_worker.capture_pre_sample_logits", load.before_logits_are_taken, "before")
    ]
    assert len(Registry.hooks) == 3


def test_beam_search_in_another_way(newer, monkeypatch, caplog):
    newer.capture_pre_sample_logits = taking(("batch", "logits_output"))
    said = "capture_pre_sample_logits takes batch, logits_output here, not batch, forward_batch, logits_output"
    assert words_of(monkeypatch, caplog) == f"{said}: this release of SGLang is not known"
    del newer.capture_pre_sample_logits
    assert words_of(monkeypatch, caplog).startswith("there is no capture_pre_sample_logits here")


def test_the_methods_of_another_release(newer, monkeypatch, caplog):
    """Each of the known ones is held against its own."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.15")
    assert words_of(monkeypatch, caplog).startswith(
        "ForwardBatch.init_new takes batch, model_runner, capture_hidden_mode, "
    )


def words_of(monkeypatch, caplog):
    """Returns why ``register`` puts no hooks in."""
    words = refused_words(settings.PLUGIN, register, monkeypatch, caplog, SystemExit)
    assert not Registry.hooks
    return words


@pytest.mark.parametrize("version", ["0.5.14", "0.5.150", "0.5.1", "dev"])
def test_other_releases(version, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    words = f"SGLang {version} is not one of the releases that are known: 0.5.15, 0.5.23"
    assert words_of(monkeypatch, caplog) == words


class Hostile:
    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        raise self.error


@pytest.mark.parametrize("error", [ImportError("no"), Panic("no")], ids=["import", "panic"])
@pytest.mark.parametrize("place", ["release", "classes", "registry"])
def test_forks_of_sglang(place, error, monkeypatch, caplog):
    """An error while the engine is inspected leaves it as it is, with one line."""

    def fails(*args):
        raise error

    if place == "release":
        monkeypatch.setattr(importlib.metadata, "version", fails)
    else:
        where = load._RUNNER if place == "classes" else "sglang.srt.plugins.hook_registry"
        monkeypatch.setitem(sys.modules, where, Hostile(error))
    assert words_of(monkeypatch, caplog) == repr(error)


@pytest.mark.parametrize(
    "runner",
    [SimpleNamespace(is_draft_worker=False), SimpleNamespace(), Hostile(ValueError("no")), Hostile(Panic("no"))],
    ids=["no modules", "nothing", "error", "panic"],
)
def test_runners_that_nobody_expected(runner, monkeypatch, caplog):
    """While the model is looked at."""
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.logits_processor", None)
    said = refused_words(settings.PLUGIN, lambda: load.after_load_model(None, runner), monkeypatch, caplog)
    assert runner.flashsampling_refused == said


def test_engines_where_it_is_required(monkeypatch):
    """Ray's schedulers load no plug-ins: the process that starts them says so."""
    monkeypatch.setenv(settings.PLUGIN.variable, "require")
    ours, rays = (
        type("Engine", (), {"__module__": f"sglang.srt.{name}"}) for name in ("entrypoints.engine", "ray.engine")
    )
    load.before_launch(ours, "arguments", port_args=None)
    with pytest.raises(Refused, match=r"^with Ray .*require\)$"):
        load.before_launch(rays, "arguments", port_args=None)


def test_counters_without_the_plug_in():
    assert counters(SimpleNamespace()) == {"refused": "the plug-in is off, or was not loaded"}
