"""examples/: each script runs as its first lines say. What it claims it asserts itself; seconds each on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
PRINTS = {  # what shows that it came to its end
    "sample": r"^three draws, \(B, 3\) \[\[\d+, \d+, \d+\]",
    "module_graph": r"^again \[\[\d+, \d+, \d+, \d+\], ",
    "generate": r"^greedy, cool, hot \[\[\d+, ",
    "continuous_batching": r"^30 requests, \d+ tokens, \d+ a second; each has the tokens of its run alone",
    "grpo_logprobs": r"^after 30 steps: reward (1|0\.[6-9])",
    "tensor_parallel": r"(?s)rank 0 of 2: ids 0 to 15999; .*rank 1 of 2|rank 1 of 2.*rank 0 of 2: ids 0 to 15999; ",
}


@pytest.mark.quick(0)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path):
    if name in ("generate", "continuous_batching"):
        pytest.importorskip("transformers")
    path = ROOT / "examples" / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    command = re.findall(r"``python (.*?)``", text)[0].split()
    assert command[-1] == f"examples/{name}.py"
    assert len(text.splitlines()) < {"continuous_batching": 120, "grpo_logprobs": 65}.get(name, 40)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)  # which conftest sets for the tests' own process
    command = [sys.executable, *command[:-1], str(path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.search(PRINTS[name], run.stdout, re.MULTILINE), run.stdout
