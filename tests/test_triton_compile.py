"""The kernel compiles for every architecture we name, without a GPU. In a process of its own: the others interpret it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flashsampling.impl.triton.config import TileConfig
from flashsampling.impl.triton.kernel import sample_kernel

capability, dtype, use_tma, one_draw = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "tma", sys.argv[4] == "one"
block_b, block_d, stages = (16, 32, 2) if dtype == "fp32" else (64, 64, 3) if one_draw else (32, 64, 3)
constants = {
    "BLOCK_V": 128, "BLOCK_B": block_b, "BLOCK_D": block_d, "CHUNK_B": 16, "USE_TMA": use_tma, "EVEN_D": True,
    "UPCAST": False, "ONE_DRAW": one_draw, "PRELOAD": False,
}
signature = {}
for name in sample_kernel.arg_names:
    if name in constants:
        signature[name] = "constexpr"
    elif name in ("hidden", "weight"):
        block = [block_b if name == "hidden" else 128, block_d]
        signature[name] = f"tensordesc<{dtype}{block}>".replace(" ", "") if use_tma else "*" + dtype
    elif name == "temperature_ptr":
        signature[name] = "*fp32"
    elif name.endswith("_ptr"):
        signature[name] = "*i64"
    elif name == "temperature_value":
        signature[name] = "fp32"
    else:
        signature[name] = "i64" if name.endswith("_value") else "i32"
attributes = {
    (i,): [["tt.divisibility", 16]]
    for i, name in enumerate(sample_kernel.arg_names)
    if signature[name][0] == "*" or name in ("dim", "hidden_stride", "weight_stride")
}
source = ASTSource(sample_kernel, signature, constants, attributes)
kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": stages})
ptx = kernel.asm["ptx"]
print("shared", kernel.metadata.shared)
print("matmul", "wgmma" if "wgmma.mma" in ptx else "tcgen05" if "tcgen05.mma" in ptx else "mma" if "mma.sync" in ptx else "fma")
print("bytes", len(kernel.asm["cubin"]))
"""

CASES = [
    (80, "bf16", "pointers", "one", "mma"),
    (80, "fp32", "pointers", "one", "fma"),
    (90, "bf16", "tma", "one", "wgmma"),
    (90, "fp16", "pointers", "several", "wgmma"),
    (100, "bf16", "tma", "one", "tcgen05"),
]


@pytest.mark.parametrize(("capability", "dtype", "loads", "draws", "matmul"), CASES)
def test_compiles(capability, dtype, loads, draws, matmul):
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, str(capability), dtype, loads, draws]
    run = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    report = dict(line.split() for line in run.stdout.strip().splitlines()[-3:])
    assert report["matmul"] == matmul
    assert int(report["shared"]) <= 164 * 1024  # an A100's
    assert int(report["bytes"]) > 0
