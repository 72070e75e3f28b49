"""Kernels of messages with logits compile for every architecture we name, without a GPU, as they are launched."""

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.target import output_of

pytestmark = pytest.mark.every_triton

# the launches themselves, with a driver that names a target and has no device; compiled and not run
COMPILE = """
import sys
import torch
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.triton.sharded import collectives
from flashsampling.kernels.triton.speculative import rejection
from flashsampling.outputs import FilteredLogits
from flashsampling.sampling_params import SamplingParams
from tests.kernels.triton.target import compile_only

compiled = compile_only(int(sys.argv[1]))

def ints(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)

logits, bias = torch.empty(5, 50_000), torch.zeros(50_001)
for place, batch, of_bias in (((1, 2), 5, None), ((0, 4), 1, bias[:-1]), ((0, 4), 0, bias[1:])):
    collectives.push_logits(1 << 40, 1 << 20, logits[:batch or 3], of_bias, place, batch, 50_000, 100_000)
print("push_kernel", *(compiled[0].asm["ptx"].count(f"{name}.global.v4") for name in ("ld", "st")))
step = SampleInputs(logits, logits, torch.ones(5), ints(5), ints(5), 3, 50_000)
collectives.all_gather(1 << 40, ints(5), 8, (5, None), step)
collectives.all_gather(1 << 40, ints(5), 8, (5, ints(1)), step)
known = {kernel.hash for kernel in compiled}
rows = {"top_k": ints(6)[1:], "top_p": torch.ones(6)[1:], "min_p": 0.5, "joint_top_p": 1}
for params in (rows, {"top_k": 7}, {"top_k": ints(5, dtype=torch.int32), "presence_penalty": 0.5}):
    own = step._replace(params=SamplingParams(**params))
    collectives.all_gather(1 << 40, ints(4097)[1:], 2, (1 << 40, ints(2)[1:]), own)
assert {kernel.hash for kernel in compiled} == known  # of no other numbers or alignment, as other ranks may wait
recorded = FilteredLogits(ints(5), logits, ints(5), torch.zeros(5, 4))
for probs in (None, torch.zeros(3, 50_000)):
    rejection.verify_rows(step, recorded, ints(5), ints(5), probs)
for kernel in {kernel.hash: kernel for kernel in compiled}.values():
    assert kernel.metadata.shared <= 48 * 1024
    print(kernel.metadata.name, len(kernel.asm["cubin"]))
"""


@pytest.mark.quick(0)
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles(capability):
    vectors, *kernels = output_of(COMPILE, capability).strip().splitlines()
    assert vectors == "push_kernel 4 4"
    assert all(int(line.split()[1]) > 0 for line in kernels)
    names = ["push", "push", "all_gather", "all_gather", "accept_rows", "recover_rows", "pack_rows"]
    assert [line.split()[0] for line in kernels] == [f"{name}_kernel" for name in [*names, *names[4:6]]]
