"""``scripts/speculate``: the loop, its drafters, and that ``--compare`` says what it says."""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "speculate"


@pytest.fixture(scope="module")
def script():
    loader = SourceFileLoader("speculate_script", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("speculate_script", loader))
    loader.exec_module(module)
    return module


def test_it_runs_and_compares():
    options = ["--random", "--compare", "--tokens", "6", "--drafts", "3", "--batch", "3"]
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all 18 tokens are those of decoding without drafts" in run.stdout
    for drafter in ("no drafts", "n-grams", "first 2 layers"):
        assert drafter in run.stdout


def test_look_up(script):
    text = script.Text(torch.tensor([[1, 2, 3, 4, 1, 2], [5, 6, 5, 6, 5, 6], [1, 2, 3, 4, 5, 6]]), 5)
    assert script.look_up(text, 3).tolist() == [[3, 4, 1], [5, 6, -1], [-1, -1, -1]]


def test_text_that_grows_by_rows(script):
    text = script.Text(torch.tensor([[1, 2], [3, 4]]), 4)
    text.append(torch.tensor([[7, -1], [8, 9]]))
    text.append(torch.tensor([[-1, -1], [5, -1]]))
    assert text.ids.tolist() == [[1, 2, 7, -1, -1, -1], [3, 4, 8, 9, 5, -1]]
    assert text.lengths.tolist() == [3, 5]
