"""The demo's command line: what a slip of the pen costs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
typer = pytest.importorskip("typer")

from scripts.demo_generate import load_model  # noqa: E402


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_mistyped_model_is_named_in_a_line():
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "scripts.demo_generate", "--model", "no/such-model"]
    run = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, env=environment)
    assert run.returncode == 2
    assert "Usage: ./scripts/demo [OPTIONS]" in run.stderr
    assert "Invalid value for --model: 'no/such-model' cannot be loaded: " in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) <= 8, run.stderr
    assert not run.stdout


@pytest.mark.parametrize("name", ["smollm", "./no/such/folder", "two words", "/dev/null", "a/b/c"])
def test_whatever_is_wrong_with_the_name(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it would try again for most of a minute
    with pytest.raises(typer.BadParameter, match=f"^'{name}' cannot be loaded: .+$") as raised:
        load_model(name, "cpu", torch.float32)
    assert raised.value.param_hint == "--model"
    assert "\n" not in str(raised.value)
