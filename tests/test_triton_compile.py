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

capability, dtype, use_tma, size = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "tma", sys.argv[4]
config = {
    "fp32": TileConfig(128, 16, 32, 4, 2, 2, False),
    "small": TileConfig(128, 16, 128, 4, 2, 3, use_tma, max_registers=168),
    "middle": TileConfig(128, 64, 64, 4, 3, 3, use_tma, max_registers=168),
    "large": TileConfig(256, 128, 64, 8, 4, 1, use_tma, chunk_b=128, preload=True),
    "draws": TileConfig(128, 32, 64, 4, 3, 3, use_tma, chunk_b=32, max_registers=168),
}[size]
block_b, block_d = config.block_b, config.block_d
constants = {
    "BLOCK_V": config.block_v, "BLOCK_B": block_b, "BLOCK_D": block_d, "CHUNK_B": config.chunk_b, "USE_TMA": use_tma,
    "EVEN_D": True, "UPCAST": False, "ONE_DRAW": size != "draws", "PRELOAD": config.preload,
}
signature = {}
for name in sample_kernel.arg_names:
    if name in constants:
        signature[name] = "constexpr"
    elif name in ("hidden", "weight"):
        block = [block_b if name == "hidden" else config.block_v, block_d]
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
options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}
kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
ptx = kernel.asm["ptx"]
print("shared", kernel.metadata.shared)
print("matmul", "wgmma" if "wgmma.mma" in ptx else "tcgen05" if "tcgen05.mma" in ptx else "mma" if "mma.sync" in ptx else "fma")
print("bytes", len(kernel.asm["cubin"]))
"""

CASES = [  # the A100's shared memory, or Hopper's and Blackwell's
    (80, "bf16", "pointers", "middle", "mma", 164),
    (80, "fp32", "pointers", "fp32", "fma", 164),
    (90, "bf16", "tma", "small", "wgmma", 227),
    (90, "bf16", "tma", "middle", "wgmma", 227),
    (90, "bf16", "tma", "large", "wgmma", 227),
    (90, "fp16", "pointers", "draws", "wgmma", 227),
    (100, "bf16", "tma", "middle", "tcgen05", 227),
    (100, "bf16", "tma", "large", "tcgen05", 227),
]


@pytest.mark.parametrize(("capability", "dtype", "loads", "size", "matmul", "shared_kib"), CASES)
def test_compiles(capability, dtype, loads, size, matmul, shared_kib):
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, str(capability), dtype, loads, size]
    run = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    report = dict(line.split() for line in run.stdout.strip().splitlines()[-3:])
    assert report["matmul"] == matmul
    assert int(report["shared"]) <= shared_kib * 1024
    assert int(report["bytes"]) > 0
