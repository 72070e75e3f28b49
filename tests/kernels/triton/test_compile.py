"""The kernel compiles for every architecture we name, without a GPU. In a process of its own: the others interpret
it."""

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.target import output_of

pytestmark = pytest.mark.every_triton

COMPILE = """
import re
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flashsampling.kernels.triton.fused.config import shape_for
from flashsampling.kernels.triton.fused.kernel import sample_kernel
from flashsampling.kernels.triton.fused.launch import tile_shape
from flashsampling.kernels.triton.filtered.transforms import Rows

capability, dtype, use_tma = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "tma"
batch, dim, num_samples, exchange = (int(number) for number in sys.argv[4:8])
row_tensors = sys.argv[8:] != ["scalars"]
torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
config = shape_for(batch, dim, torch_dtype, num_samples, use_tma)
block_d = config.block_d
constants = {
    "TILE": tile_shape(config, dim, 4 if dtype == "fp32" else 8), "ONE_DRAW": num_samples == 1,
    "ROW_TENSORS": row_tensors, "EXCHANGE": exchange,
}
blocks = {"hidden": config.block_b, "hidden_rest": config.narrow, "weight": config.block_v}
signature = {}
for name in sample_kernel.arg_names:
    if name in constants:
        signature[name] = "constexpr"
    elif name in blocks:
        rows = f"2,{config.block_b // 2}" if config.halves and name == "hidden" else blocks[name]
        signature[name] = f"tensordesc<{dtype}[{rows},{block_d}]>" if use_tma else "*" + dtype
    elif name.endswith("_ptr"):
        signature[name] = "*i64"
    elif name == "rows":
        signature[name] = Rows("i64", "fp32", "i64", "i64", "i64", "i64")
    else:
        signature[name] = "i64" if name in ("table", "hidden_stride") else "i32"
attributes = {
    (i,): [["tt.divisibility", 16]]
    for i, name in enumerate(sample_kernel.arg_names)
    if name in ("dim", "weight_stride") or (name == "weight" and not use_tma)
}
source = ASTSource(sample_kernel, signature, constants, attributes)
options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}
kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
ptx = kernel.asm["ptx"]
print("shared", kernel.metadata.shared)
kinds = {"wgmma.mma": "wgmma", "tcgen05.mma": "tcgen05", "mma.sync": "mma"}
print("matmul", next((name for text, name in kinds.items() if text in ptx), "fma"))
print("bytes", len(kernel.asm["cubin"]))
waits = re.findall(r"warp_group_dot_wait .*pendings = (\\d+)", kernel.asm["ttgir"])
print("in_flight", max(map(int, waits), default=0))
print("loops_and_waits", kernel.asm["ttgir"].count("ttng.wait_barrier"))
print("ranks", ",".join(sorted(set(re.findall(r"cp.async.bulk.tensor.(\\d)d", ptx)))) or "none")
"""

# batch, dim, num_samples, exchange (2) or none (0), numbers for row parameters; shared memory of an A100, or of what
# came after
CASES = [
    (80, "bf16", "pointers", (64, 4096, 1, 0), "mma", 164),
    (80, "fp32", "pointers", (64, 4096, 1, 0), "fma", 164),
    (90, "bf16", "tma", (1, 4096, 1, 0), "wgmma", 227),
    (90, "bf16", "tma", (64, 4096, 1, 0), "wgmma", 227),
    (90, "bf16", "tma", (64, 8192, 1, 0), "wgmma", 227),
    (90, "bf16", "tma", (128, 4096, 1, 0), "wgmma", 227),
    (90, "bf16", "tma", (256, 4096, 1, 0), "wgmma", 227),
    (90, "fp16", "pointers", (32, 4096, 3, 0), "wgmma", 227),
    (90, "bf16", "tma", (80, 4096, 1, 2), "wgmma", 227),
    (100, "fp16", "tma", (127, 8192, 1, 0), "tcgen05", 227),
    (90, "bf16", "tma", (160, 4096, 1, 0), "wgmma", 227),
    (90, "fp16", "tma", (144, 4096, 1, 2), "wgmma", 227),
    (90, "bf16", "tma", (192, 4096, 1, 0), "wgmma", 227),
    (90, "bf16", "tma", (64, 4096, 1, 0, "scalars"), "wgmma", 227),
    (100, "bf16", "tma", (64, 4096, 1, 0), "tcgen05", 227),
    (100, "bf16", "tma", (160, 4096, 1, 0), "tcgen05", 227),
    (100, "bf16", "tma", (256, 4096, 1, 0), "tcgen05", 227),
    (80, "bf16", "pointers", (64, 4096, 3, 2), "mma", 164),
    (90, "bf16", "tma", (16, 8192, 1, 2), "wgmma", 227),
    (90, "bf16", "tma", (256, 4096, 1, 2), "wgmma", 227),
    (90, "fp16", "tma", (176, 4096, 1, 2), "wgmma", 227),
]


# of CASES, 13 s each, above 160 rows more than twice that: those of every architecture, load, number of draws, and kind
# of shape. The others are compiled where there is a GPU, and by ``scripts/sass-diff``
OFTEN = [1, 3, 7, 8, 9, 10, 17]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("capability", "dtype", "loads", "problem", "matmul", "shared_kib"),
    [pytest.param(*case, marks=[] if n in OFTEN else [pytest.mark.gpu]) for n, case in enumerate(CASES)],
)
def test_compiles(capability, dtype, loads, problem, matmul, shared_kib):
    printed = output_of(COMPILE, capability, dtype, loads, *problem)
    report = dict(line.split() for line in printed.strip().splitlines()[-6:])
    assert report["matmul"] == matmul
    assert int(report["shared"]) <= shared_kib * 1024
    assert int(report["bytes"]) > 0
    if capability == 90 and loads == "tma" and problem[2] == 1:
        # of the fast pass, of a second block's, of the careful one
        assert int(report["loops_and_waits"]) == (3 if 128 < problem[0] <= 192 else 2)
        assert report["ranks"] == ("2,3" if 64 < problem[0] < 128 else "2")  # two halves of rows by one copy
    if capability == 90 and 128 < problem[0] <= 192:  # both blocks' matmuls of a stage run while the next are issued
        assert int(report["in_flight"]) == 2
