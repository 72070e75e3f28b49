"""A plug-in that fuses nothing: one line in the log with "auto", the same words as an error with "require"."""

import logging

import pytest

from flashsampling.integrations.engine.plugin import Refused


class Panic(BaseException):
    """Stands for an error of a Rust extension."""


def refused_words(plugin, act, monkeypatch, caplog, error=Refused):
    """Returns the words in which ``act``, run in both modes, says why nothing is fused."""
    caplog.clear()
    monkeypatch.setenv(plugin.variable, "auto")
    act()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert line.startswith("flashsampling: nothing is fused: ")
    words = line.removeprefix("flashsampling: nothing is fused: ")
    monkeypatch.setenv(plugin.variable, "require")
    with pytest.raises(error) as refused:
        act()
    assert str(refused.value).removeprefix("flashsampling: ") == f"{words} ({plugin.variable}=require)"
    return words
