"""Two versions of the package in one process, as ``benchmarks.sample --before`` times them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_another_checkout_beside_this_one():
    """In a process of its own: operators cannot be taken back."""
    program = f"""
import sys
from pathlib import Path
import torch, flashsampling
from benchmarks.before import import_before
before = import_before(Path({str(ROOT)!r}))
assert import_before(Path("nowhere")) is before and before.sample is not flashsampling.sample
states, weight = torch.randn(4, 16), torch.randn(300, 16)
call = {{"seed": torch.arange(4), "offset": torch.arange(4)}}
for module in (before, flashsampling):
    def draw(module=module):
        return module.sample(states, weight, **call).token_ids
    compiled = torch.compile(draw, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(), flashsampling.sample(states, weight, **call).token_ids)
assert "flashsampling_before" in before.__file__ and before.ops is not flashsampling.ops
assert torch.ops.flashsampling_before.sample.default is not torch.ops.flashsampling.sample.default
from flashsampling_before.kernels.hopper import cache
assert Path(cache.__file__).parents[2].name == "flashsampling_before"
from benchmarks.before import sample_before
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams
params = SamplingParams(top_k=5, top_p=torch.rand(4))
step = SampleInputs(states, weight, torch.ones(4), torch.arange(4), torch.arange(4), 1, 300, params=params)
for each in (step, step._replace(params=flashsampling.inputs.DEFAULT_PARAMS)):
    assert torch.equal(sample_before(Path("nowhere"), each, "streaming").ids, flashsampling.ops.sample(each, "streaming").ids)
print("both")
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "both\n", result.stderr[-2000:]
