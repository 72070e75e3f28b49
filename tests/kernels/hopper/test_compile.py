"""The Hopper kernel compiles in every shape without a GPU, its matmul is not serialised, nothing spills; what Blackwell
could use of it compiles for sm_100a. In processes of their own: the compiler reads its target when it is imported."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not all(importlib.util.find_spec(name) for name in ("cutlass", "tvm_ffi")):
    pytest.skip("needs the cute extra", allow_module_level=True)
pytest.importorskip("filelock")

from flashsampling.kernels.hopper.config import CONFIGS, KINDS
from tests.conftest import run_python
from tests.emulator import hopper

ROOT = Path(__file__).parents[3]
WIDTHS = (8, 16, 32, 48, 64, 96, 128, 144, 160, 176, 192, 192, 208, 224, 240, 256)
SHAPES = [("bf16", index, n) for index, n in enumerate(WIDTHS)] + [("fp16", 4, 64)]
# what is compiled here, 20 s each, and half of it for other tests in any case; the others where there is a GPU
OFTEN = [("plain", "bf16", 8), ("plain", "bf16", 256), ("processed", "bf16", 256)]
OFTEN += [("logits", "bf16", 8), ("logits", "fp16", 192), ("logits", "bf16", 256)]
OF_KIND = {
    "plain": SHAPES,
    "processed": [("bf16", 15, 256), ("fp16", 10, 192)],
    "logits": [("bf16", 0, 8), ("bf16", 6, 128), ("bf16", 15, 256), ("fp16", 10, 192)],
}


def test_every_batch_has_a_shape():
    """As few blocks of rows as there can be, and no shape that is less wide would do."""
    code = (
        "from flashsampling.kernels.hopper.config import CONFIGS, choose_config\n"
        "print([config.block_b for config in CONFIGS])\n"
        "print([choose_config(batch, 4096).block_b for batch in range(1, 1100)])"
    )
    widths, chosen = map(ast.literal_eval, run_python(code, CUTE_DSL_ARCH="sm_90a").splitlines())
    assert tuple(widths) == WIDTHS
    for batch, width in enumerate(chosen, start=1):
        row_blocks = -(-batch // max(WIDTHS))
        assert width == min(n for n in WIDTHS if n * row_blocks >= batch), batch


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("dtype", "index", "block_b", "kind"),
    [
        pytest.param(
            *shape, kind, marks=[] if (kind, shape[0], shape[2]) in OFTEN else [pytest.mark.gpu, pytest.mark.slow]
        )
        for kind, shapes in OF_KIND.items()
        for shape in shapes
    ],
)
def test_compiles_for_hopper(dtype, index, block_b, kind):
    triton = pytest.importorskip("triton")  # for its disassembler
    shape = CONFIGS[index]
    assert shape.stages >= 4
    cubin = hopper.compiled({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], shape, KINDS[kind], "cubin")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    sass = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    logits_gemm = re.findall(r"HGMMA\.64x(\d+)x16", sass)
    assert logits_gemm == ([str(block_b)] * 8 if block_b <= 192 else [str(block_b // 2)] * 16)
    # one wait inside the k loop and one after it; a wait after every product is ptxas serialising them
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == 2
    assert len(re.findall(r"UTMALDG\.2D", sass)) == 2
    # several draws per row keep a copy of the logits in local memory; the registers of the one-draw path hardly ever go
    # there, and never between products
    copies = block_b // 2
    assert len(re.findall(r"\bSTL", sass)) <= copies + 8
    first, last = sass.index("HGMMA"), sass.rindex("HGMMA")
    assert not re.findall(r"\b(?:STL|LDL)\S*", sass[first:last])


@pytest.mark.quick(1)
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_noise_and_keys_compile(architecture):
    code = (
        "from tests.kernels.hopper.on_device import compile_elementwise\n"
        "from tests.kernels.hopper.test_noise import _bounds, _from_products, _key\n"
        "for function, outputs in (_from_products, 4), (_bounds, 5), (_key, 3):\n"
        f"    compile_elementwise(function, outputs, architecture={architecture!r})"
    )
    run_python(code, CUTE_DSL_ARCH=architecture)


def test_which_kernels_are_compiled_ahead():
    from flashsampling.kernels.hopper import cache

    assert cache.select_kernels(None, None) == list(cache.KERNELS)
    assert len(cache.KERNELS) == 6 * len(WIDTHS)
    assert {dtype for dtype, *_ in cache.select_kernels(torch.float16, None)} == {torch.float16}
    for most, widths in ((1, {8}), (8, {8}), (9, {8, 16}), (192, set(WIDTHS[:12])), (193, {*WIDTHS[:12], 208})):
        assert {config.block_b for _, config, _ in cache.select_kernels(None, most)} == widths
    assert cache.select_kernels(None, 1000) == list(cache.KERNELS)  # blocks of at most 256 rows


@pytest.mark.quick(0)
def test_precompile_fills_the_cache(tmp_path):
    environment = {"FLASHSAMPLING_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "default"}
    for state in "compiled", "was there":
        words = "--workers", 2, "--dtype", "bfloat16", "--max-batch-size", 8
        printed = run_python("-m", "flashsampling", "precompile", *words, **environment)
        assert printed.count(state) == 3  # of every kind
    assert len(list(tmp_path.glob("cute/*/*.o"))) == 3
    code = (
        "import torch; from flashsampling.kernels.hopper import cache\n"
        "from flashsampling.kernels.hopper.config import CONFIGS, KINDS\n"
        "cache._compile = None\n"  # what is on disk is not compiled again
        "print([callable(cache.kernel_for(torch.bfloat16, CONFIGS[0], kind)) for kind in KINDS.values()])\n"
        # an object without the symbol that is wanted is compiled again; what else is damaged, test_cache plays
        "cache._compile, cache._SYMBOL, cache._write = lambda *_: 'compiled again', 'another_name', lambda *_: None\n"
        "print(cache._load_or_compile((torch.bfloat16, CONFIGS[0], KINDS['plain'])))\n"
    )
    environment = os.environ | environment | {"CUTE_DSL_ARCH": "sm_90a"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.stdout == "[True, True, True]\ncompiled again\n", result.stderr[-3000:]
    assert result.stderr.count("does not load") == 1
