"""Sampling from logits compiles for every architecture we name, without a GPU, as it is launched. In a process of its
own."""

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.target import output_of

pytestmark = pytest.mark.every_triton

# the launch itself, with a driver that names a target and has no device; compiled and not run
COMPILE = """
import re
import sys
import torch
from flashsampling.kernels.triton.filtered import dispatch
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams
from tests.kernels.triton.target import compile_only, spills_of

capability, dtype, case, vocab = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3], int(sys.argv[4])

compiled = compile_only(capability)

def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)

filters = {"top_k": ints(2, dtype=torch.int64), "top_p": torch.ones(2), "min_p": torch.zeros(2)}
params = SamplingParams()
if case in ("filters", "everything", "drawn"):
    params = params._replace(**filters)
if case == "logprobs":
    params = params._replace(logprobs=True)
if case == "everything":
    params = params._replace(
        bias=torch.zeros(vocab), logit_scale=2.0, soft_cap=30.0, dense_bias=torch.zeros(vocab), bias_ids=ints(2, 20),
        bias_values=torch.zeros(2, 20), counts=ints(2, vocab), repetition_penalty=1.2,
        token_mask=ints(2, -(-vocab // 32)), logprobs=True, top_logprobs=5, logprob_ids=ints(2, 7, dtype=torch.int64),
        logsumexp=True, kept_words=-(-vocab // 32),
    )
dispatch._pdl = lambda device, config: config.pdl and capability >= 90
values = torch.empty(2, vocab, dtype=dtype)
seeds = ints(2, dtype=torch.int64)
step = SampleInputs(values, values, torch.ones(2), seeds, 0, 1, vocab, params=params, logits=values)
dispatch.run(step)
scan, *others = compiled
overlap = [kernel.asm["ptx"].count("griddepcontrol") > 0 for kernel in compiled]
assert overlap == [capability >= 90] * len(compiled)
assert all(kernel.metadata.launch_pdl == (capability >= 90) for kernel in others)
if case == "drawn":  # behind a kernel that has drawn, with cutoffs and without: the same kernel
    blocks = 4 * -(-vocab // 128)
    for cutoffs in (None, ints(2)):
        block_stats = dispatch.BlockStats(ints(2, blocks), torch.ones(2, blocks), torch.ones(2, blocks), cutoffs)
        dispatch.draw(step, block_stats, ints(2, dtype=torch.int64))
        assert compiled.pop() is others[0]
if case == "filters":  # another vocabulary, another batch, numbers instead of tensors: the same kernels
    values = torch.empty(3, vocab - 16, dtype=dtype)
    params = SamplingParams(top_k=1, top_p=0.5)
    dispatch.run(SampleInputs(values, values, 0.0, 1, 2**40, 1, vocab - 16, params=params, logits=values))
    assert compiled[len(others) + 1 :] == [scan, *others]
    del compiled[len(others) + 1 :]
vectors = re.findall(r"ld.global.v(\\d).b32", scan.asm["ptx"])
print("vectors", len(vectors))
print("bytes", min(len(kernel.asm["cubin"]) for kernel in compiled))
print("shared", max(kernel.metadata.shared for kernel in compiled))
print("barriers", scan.asm["ptx"].count("bar.sync"))
print("spills", spills_of(scan))
print("conversions", scan.asm["ttgir"].count("tensor<512xf32, #blocked1> -> tensor<512xf32, #blocked>"))
"""

CASES = [
    (90, "bfloat16", "plain"),
    (80, "float32", "filters"),
    (90, "float32", "drawn"),
    (90, "float32", "everything"),
    (100, "float16", "filters"),
]


@pytest.mark.quick(0)
@pytest.mark.parametrize(("capability", "dtype", "case"), CASES)
def test_compiles(capability, dtype, case):
    printed = output_of(COMPILE, capability, dtype, case, 151936)
    report = dict(line.split() for line in printed.strip().splitlines()[-6:])
    assert int(report["vectors"]) >= 8  # a block's logits, four tokens at a time
    assert int(report["conversions"]) == 0  # no score goes through shared memory
    assert int(report["shared"]) <= 48 * 1024
    assert int(report["bytes"]) > 0
    if case == "plain":
        # two of the greedy draw and three of the other; whether anything is finite, and infinite, is asked where it
        # matters
        assert int(report["barriers"]) <= 11
        assert int(report["spills"]) == 0


BARRIERS = """
import re
import sys
import torch
from flashsampling.kernels.triton.filtered import dispatch
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams
from tests.kernels.triton.target import compile_only

compiled = compile_only(90)
values, seeds = torch.empty(2, 50_000), torch.zeros(2, dtype=torch.int64)
params = SamplingParams(top_p=torch.ones(2), logprobs=True, top_logprobs=5, kept_words=1563)
dispatch.run(SampleInputs(values, values, torch.ones(2), seeds, 0, 1, 50_000, params=params, logits=values))
functions = {}  # name: its accesses and barriers of shared memory, in their order
for kernel in compiled:
    inside = False
    for line in kernel.asm["ptx"].splitlines():
        if line.startswith(".func"):
            name = re.findall(r"[\\w$]{20,}", line)[-1]
        inside = (inside or line == "{") and line != "}"
        if inside:
            functions.setdefault(name, []).extend(re.findall("bar[.]sync|st[.]shared|ld[.]shared", line))
        elif line.startswith(".visible .entry"):
            name = "kernel"
functions.pop("kernel")
for name, shared in functions.items():
    assert not shared or shared[-1] != "bar.sync" or shared[0] == "bar.sync", name
assert any("gather" in name and shared[-1] == "bar.sync" for name, shared in functions.items()), list(functions)
assert len(functions) >= 8, list(functions)
"""


def test_a_function_that_ends_with_a_barrier_begins_with_one():
    """Triton takes it for one that uses no shared memory, and puts no barrier before its call, behind which a warp may
    still read what another wrote (Trap 54)."""
    output_of(BARRIERS)
