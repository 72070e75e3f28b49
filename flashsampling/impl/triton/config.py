"""Which problems the Triton implementation takes, and the tile shape of each: a pure function of the problem.

``choose_config`` was read off ``python -m scripts.tune`` on an H200 (BENCHMARKS in the README); nothing is tuned while
serving. Per 128 rows of vocabulary one program holds 128 x block_b accumulators and the running winners in registers, so
what bounds a shape is registers first, shared memory second. Dead ends, against the shape kept, B = 256, V = 151936:

    128 x 256, 8 warps     no weight tile is read twice, but one program per multiprocessor overlaps nothing: 1.05x the time
    128 x 128, 4 warps     two programs with 255 registers each spill about 200 words per thread and tile: 1.15x
    256 x 64, 4 warps      as 128 x 128, and only 32-wide k blocks fit twice: 1.3x
    flattened tile loop    prefetches over the epilogue, but Triton 3.6 predicates the epilogue into the k loop: 1.05x to 1.1x
"""

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor


@dataclass(frozen=True)
class TileConfig:
    """Shape of one launch. Tokens do not depend on it."""

    block_v: int  # vocabulary rows of a tile: a multiple of 128
    block_b: int  # batch rows of a tile
    block_d: int  # depth of a pipeline stage
    num_warps: int  # 4 keeps a Philox block's four lanes in one thread
    num_stages: int
    ctas_per_sm: int  # persistent programs per multiprocessor
    use_tma: bool
    chunk_b: int = 16  # batch rows whose noise is in registers at a time
    max_registers: int | None = None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; the interpreter plays two."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def unsupported(hidden_states: Tensor, weight: Tensor) -> str | None:
    """Why the Triton implementation cannot take this problem, or None."""
    device = hidden_states.device
    if device.type == "cpu":
        return None if triton.knobs.runtime.interpret else "tensors on the CPU (TRITON_INTERPRET=1 is for tests)"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"tensors on {device.type}, it runs on NVIDIA GPUs"
    if _capability(device) < (8, 0):
        return f"compute capability {_capability(device)}, it needs (8, 0)"
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        return f"weight must be contiguous along D, got strides {weight.stride()}"
    return None


def _tma_addressable(matrix: Tensor) -> bool:
    rows_apart = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and rows_apart % 16 == 0 and 0 < rows_apart < 2**40


def choose_config(hidden_states: Tensor, weight: Tensor, num_samples: int) -> TileConfig:
    """The tile shape for a problem that ``unsupported`` does not refuse."""
    batch, dim = hidden_states.shape
    if hidden_states.dtype == torch.float32:  # no tensor cores: full fp32 products
        return TileConfig(128, 16, 32, 4, 2, 2, use_tma=False)
    hopper = hidden_states.is_cuda and _capability(hidden_states.device) >= (9, 0)
    use_tma = hopper and _tma_addressable(hidden_states) and _tma_addressable(weight)
    if batch <= 16:
        return TileConfig(128, 16, 128, 4, 2, 3, use_tma, max_registers=168)
    if batch <= 32 or num_samples > 1:
        return TileConfig(128, 32, 64, 4, 3, 3, use_tma, max_registers=168)
    if dim >= 6144 and batch <= 128:  # more k steps per epilogue: depth of the pipeline is worth more than a third program
        return TileConfig(128, 64, 64, 4, 4, 2, use_tma, chunk_b=32)
    return TileConfig(128, 64, 64, 4, 3, 3, use_tma, max_registers=168)
