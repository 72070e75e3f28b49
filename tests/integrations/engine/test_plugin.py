"""Variables of both plug-ins, errors of a host, and counts of steps."""

import asyncio
import logging
import sys

import pytest

from flashsampling.integrations import sglang, vllm
from flashsampling.integrations.engine import plugin
from flashsampling.integrations.engine.plugin import Plugin, Refused, StepCounts, describe, switch
from flashsampling.integrations.engine.request_info import FallbackReason
from tests.conftest import run_python

from .refusals import Panic

MINE = Plugin("Engine", "FLASHSAMPLING_TEST", "tests.plugin")


class Wordless(Exception):
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("mode", "values"),
    [
        ("off", (None, "", " ", "0", "false", "FALSE", "off", "Off")),
        ("auto", ("1", "true", "True", "on", "ON", "auto", "AUTO", " auto ")),
        ("require", ("require", "Require", "REQUIRE")),
    ],
)
def test_modes(mode, values, monkeypatch):
    for value in values:
        monkeypatch.delenv(MINE.variable, raising=False)
        if value is not None:
            monkeypatch.setenv(MINE.variable, value)
        assert MINE.mode() == mode
        assert MINE.required() is (mode == "require")


@pytest.mark.parametrize("value", ["yes", "2", "-1", "required", "auto,require", "no\nne"])
def test_bad_values(value, monkeypatch):
    monkeypatch.setenv(MINE.variable, value)
    assert not MINE.required()
    for read in (MINE.mode, lambda: switch(MINE.variable)):
        with pytest.raises(Refused, match=r"^FLASHSAMPLING_TEST must be .*1/0, true/false, on/off") as refused:
            read()
        assert str(refused.value).endswith(f"got {value!r}")


def test_switches(monkeypatch):
    values = {"1": True, "On": True, "TRUE": True, "0": False, "off": False, "False": False, "": None, "Auto": None}
    for value, wanted in values.items():
        monkeypatch.setenv("FLASHSAMPLING_TEST", value)
        assert switch("FLASHSAMPLING_TEST") is wanted
    monkeypatch.setenv("FLASHSAMPLING_TEST", "require")
    with pytest.raises(Refused, match="must be 1/0"):
        switch("FLASHSAMPLING_TEST")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Refused("no\nhead"), "no head"),
        (AttributeError("x"), "AttributeError('x')"),
        (Panic("x"), "Panic('x')"),
        (asyncio.CancelledError(), "CancelledError()"),
        (Wordless(), "Wordless"),
    ],
)
def test_errors_of_a_host(error, words, monkeypatch, caplog):
    """One line, whatever fails, and an error where the plug-in is required. A traceback at DEBUG."""

    class Full:
        __slots__ = ()

    owner = type("Owner", (), {})()
    assert describe(error) == words
    monkeypatch.setenv(MINE.variable, "auto")
    with caplog.at_level(logging.INFO, "tests.plugin"):
        MINE.leave(error, Full(), owner)
    (record,) = caplog.records
    assert record.getMessage() == f"flashsampling: nothing is fused: {words}"
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert owner.flashsampling_refused == words
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "tests.plugin"):
        MINE.leave(error)
    assert (caplog.records[0].exc_info is None) is isinstance(error, Refused)
    monkeypatch.setenv(MINE.variable, "require")
    with pytest.raises(Refused) as refused:
        MINE.leave(error)
    assert str(refused.value) == f"{words} (FLASHSAMPLING_TEST=require)"
    assert refused.value.__cause__ is error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("mode", ["auto", "require"])
def test_what_ends_the_process_ends_it(kind, mode, monkeypatch, caplog):
    monkeypatch.setenv(MINE.variable, mode)
    with pytest.raises(kind):
        MINE.leave(kind())
    assert not caplog.records


def test_counts(caplog):
    """Reasons are said once; all counts after 1024 steps, 2048, and so on. Nothing needs a function in the engine's
    workers."""
    counts = StepCounts(MINE, "fused", "left", "drafts")
    one, other = FallbackReason.THINKING, FallbackReason.BEAMS
    assert counts.read() == {"fused": 0, "left": 0, "drafts": 0, "reasons": {}}
    with caplog.at_level(logging.INFO, "tests.plugin"):
        for reasons in ((one,), (one, other), (one,)):
            counts.add("left", reasons)
        for _ in range(4096 - 3):
            counts.add("fused", drafts=2)
    assert counts.read() == {"fused": 4093, "left": 3, "drafts": 8186, "reasons": {one.text: 3, other.text: 1}}
    lines = [record.getMessage().removeprefix("flashsampling: ") for record in caplog.records]
    assert lines[:2] == [f"Engine samples where a request has {what} (said once)" for what in (one.text, other.text)]
    assert [line.split(",")[0] for line in lines[2:]] == [f"{{'fused': {at - 3}" for at in (1024, 2048, 4096)]
    assert lines[-1] == str(counts.read())
    counts.clear()
    assert counts.read()["fused"] == 0


def test_signatures():
    def sample(self, states):
        pass

    MINE.check_signature("X.sample", sample, ("self", "states"))
    for function, parameters, words in (
        (sample, ("self",), "X.sample takes self, states here, not self: this release of Engine is not known"),
        (None, ("self",), "there is no X.sample here: this release of Engine is not known"),
    ):
        with pytest.raises(Refused) as refused:
            MINE.check_signature("X.sample", function, parameters)
        assert str(refused.value) == words


def test_both_engines_share_one_error():
    assert vllm.Refused is sglang.Refused is plugin.Refused


@pytest.mark.parametrize("variable", ["FLASHSAMPLING_VLLM", "FLASHSAMPLING_SGLANG"])
def test_a_bad_value_at_an_entry_point(variable, monkeypatch, caplog):
    """The engine is as it is, and one line names the variable."""
    monkeypatch.setenv(variable, "nonsense")
    finders = list(sys.meta_path)
    (vllm if variable == "FLASHSAMPLING_VLLM" else sglang).register()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"flashsampling: nothing is fused: {variable} must be auto, require ")
    assert record.getMessage().endswith("got 'nonsense'")
    assert sys.meta_path == finders


def test_plug_ins_import_no_engine():
    """Where they are off, and no kernels."""
    code = "import sys; from flashsampling.integrations import sglang, vllm; sglang.register(); vllm.register(); "
    code += "from flashsampling.integrations.sglang import runner; from flashsampling.integrations.vllm import runner; "
    code += "tops = {name.split('.')[0] for name in sys.modules}; "
    run_python(code + "assert not tops & {'sglang', 'vllm', 'triton', 'cutlass'}")
