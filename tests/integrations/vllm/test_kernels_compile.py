"""The plug-in's two kernels compile for the oldest architecture, without a GPU. In a process of its own."""

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.target import output_of

pytestmark = pytest.mark.every_triton

COMPILE = """
import torch
from flashsampling.integrations.engine.kernels import sanitize_kernel
from flashsampling.integrations.vllm.kernels import counts_kernel
from tests.kernels.triton.target import compile_only

compiled = compile_only(80)
vocab = 151936
counts, mask = torch.zeros(3, vocab, dtype=torch.int32), torch.zeros(3, vocab // 32, dtype=torch.int32)
ones, slots = torch.ones(2), torch.zeros(2, dtype=torch.int32)
seen = torch.zeros(3, 8 * 1187, dtype=torch.uint8)
whole = counts, counts.stride(0), seen, seen.stride(0), vocab
counts_kernel[(2, 38)](counts, counts.stride(0), mask, mask.stride(0), slots, ones, ones, ones, *whole, BLOCK=4096)
ids, undefined = torch.zeros(5, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
sanitize_kernel[(1,)](ids, ids.clone(), ids.int(), undefined, 5, BLOCK=256)
vectors = [compiled[0].asm["ptx"].count(name) for name in ("ld.global.v4", "st.global.v4")]
print(len(compiled), min(len(kernel.asm["cubin"]) for kernel in compiled), *vectors)
"""


def test_compiles(tmp_path):
    printed = output_of(COMPILE, cache=tmp_path)
    count, least, loads, stores = map(int, printed.split())
    assert count == 2
    assert least > 1000
    assert loads >= 1  # four counts at a time
    assert stores >= 1
