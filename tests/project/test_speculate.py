"""``scripts/speculate``: its drafters, and the comparison of its tokens."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")

from tests.conftest import load_script, run_python


@pytest.mark.quick(0)
def test_it_runs_and_compares():
    options = ["--random", "--compare", "--tokens", 6, "--drafts", 3, "--batch", 3]
    said = run_python("scripts/speculate", *options, COLUMNS="120", NO_COLOR="1", CUDA_VISIBLE_DEVICES="")
    assert "all 18 tokens are those of decoding without drafts" in said
    for drafter in ("no drafts", "n-grams", "first 2 layers"):
        assert drafter in said


def test_look_up():
    script = load_script("speculate")
    text = script.Text(torch.tensor([[1, 2, 3, 4, 1, 2], [5, 6, 5, 6, 5, 6], [1, 2, 3, 4, 5, 6]]), 5)
    assert script.look_up(text, 3).tolist() == [[3, 4, 1], [5, 6, -1], [-1, -1, -1]]
    assert script.look_up(script.Text(torch.tensor([[1]]), 5), 3).tolist() == [[-1, -1, -1]]
