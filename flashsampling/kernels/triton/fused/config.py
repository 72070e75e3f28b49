"""Chooses the tile shape of a problem, and says which problems the Triton backend takes: pure functions of the problem.

``choose_config`` was read off ``python -m benchmarks.tune_triton`` on an H200; nothing is tuned while serving.
Registers bound a shape: per thread the accumulator, a Philox block's words, and the running winners. Three families are
good:

    four warps, rows in chunks     a small tile, three programs per multiprocessor; the noise of one overlaps the matmul
                                   of another
    eight warps, rows preloaded    a large tile that rereads little through L2. The noise is exposed, so it must be
                                   lean: keys stay in registers and nothing orders it; it starts before the matmul ends
    eight warps, rows on M         a larger one, from 161 rows on: a thread has two rows of 128 and many tokens of each,
                                   so keys and winners take few registers

Triton's blocks are powers of two. A tile between two powers is two blocks of columns, for instance 128 + 32, that share
the weight's tile: two accumulators, with the matmuls of both in flight. Above 192 rows it is blocks of 128, and the
last block takes rows of the one before in place of rows beyond the batch (``kernel``). Over cuBLAS, H200, V = 151936, D
= 4096; the lines below the first are one run of a prototype:

    B                                      112    128    144    160    176    192    208    256    320    384    512
    vocabulary on M                        1.11   1.10          1.39          1.39   1.53   1.27   1.53   1.28   1.27

    vocabulary on M                                      1.20   1.24   1.59   1.52   1.44   1.23
    rows on M: 128 x (128 + 64), 8 warps                 1.35   1.34   1.31   1.27
               256 x 128, 8 warps                                                    1.35   1.15
    dead ends: 128 x 128, 8 warps                                                    1.44   1.23
               128 x 128, 4 warps, 2 programs                                        1.44   1.24
               128 x 64, 4 warps, 3 programs             1.40   1.33   1.54   1.39   1.46   1.31
               the same, rows preloaded                  1.43   1.32   1.56   1.47   1.45   1.45
               256 x 64, 4 warps, 2 programs             1.83   1.80   1.83   1.73   1.98   1.73
               128 x (128 + 64), 4 warps, 2 programs     1.79   1.78   1.77   1.65
               the same, 64 deep                                       1.75   1.71

Rows on M are used from 161 rows on where D is below 6144. Over cuBLAS (``benchmarks.monotone``; other D are not timed):

    B                                      176    192    208    256    272    320    384    512
    rows on M                              1.32   1.26   1.34   1.14   1.56   1.37   1.18   1.15

From 65 to 127 rows the block of 128 is two halves of 64 rows, the second of which ends with the batch: one copy, by a
descriptor of two starts. Rows in both halves are scored twice. 80, 96, 112 and 128 rows take 1.12, 1.11, 1.12 and 1.10
times as long as cuBLAS (H200, ``benchmarks.tune_triton``). Alternatives over the time of 128 rows
(``benchmarks.monotone``):

    B                                               80     96
    64 + 16 or 64 + 32 columns                      1.08   1.09
    the shape of 128, with rows beyond the batch    1.21   1.09

Loads of rows beyond the batch cost more than loads of rows, and copying rows there would be a second launch. Two blocks
that waited for their copies at one barrier took 1.09 and 1.07 times as long at 144 and 160 rows.

Dead ends, vocabulary on M, each against another shape in the same run (B = 256, V = 151936, D = 4096, H200, Triton
3.6):

    128 x 256, 8 warps               1.14x the time of 256 x 128: a warp's noise is for 256 rows, whose keys do not fit
    128 x 128, 4 warps, 2 programs   1.04x the time of 128 x 64: 255 registers spill about 100 words per thread and tile
    256 x 64, 4 warps, 2 programs    1.28x the time of 128 x 64: two programs leave room for 32-deep stages only
    256 x 128 instead of 128 x 128   B = 256: 1.22x, 384: 1.24x, 512: 1.19x: 161 words spilled per thread and tile
    2 x (128 + 32) for 320 rows      1.06x the time of 3 x 128; 2 x (128 + 64) for 384 1.16x
    128 + 64 for 192 rows            1.04x the time of 3 x 64 with four warps; row parameters by chunk: 1.03x and more
    flattened tile loop              1.15x for 128 x 64: loads run across the epilogue, but Triton predicates the
                                     epilogue into the k loop
    noise inside the k loop          ptxas then serialises wgmma (a wait after each); not timed
"""

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ....inputs import SampleInputs
from ...device import capability


@dataclass(frozen=True)
class TritonTileConfig:
    """The tile shape of one launch. Tokens do not depend on it."""

    block_v: int  # vocabulary rows of a tile: a multiple of 128
    block_b: int  # batch rows of a tile: a power of two
    block_d: int  # depth of a pipeline stage
    num_warps: int
    num_stages: int
    ctas_per_sm: int  # persistent programs per multiprocessor
    use_tma: bool
    chunk_b: int = 16  # batch rows whose noise is in registers at a time
    max_registers: int | None = None  # per thread
    preload: bool = False  # keep the row parameters in registers over all tiles
    rest_b: int = 0  # batch rows of a second block on the same weight tile: 0, or a power of two from 16 up to block_b
    halves: bool = (
        False  # one draw: the second half of the block ends with the batch, which is larger than the first half
    )
    rows_on_m: bool = False  # batch rows on M of the tensor-core instruction, the vocabulary on N

    @property
    def columns(self) -> int:
        """Batch rows of a tile."""
        return self.block_b + self.rest_b

    @property
    def narrow(self) -> int:
        """Batch rows of the second block, and rows that the exact pass takes at once: 16 if there is no second
        block."""
        return self.rest_b or 16


def next_power_of_2(n: int) -> int:
    """Returns the least power of two that is at least ``n`` >= 1; ``triton.next_power_of_2`` costs the host 4 us
    more."""
    return 1 << (n - 1).bit_length()


# rows beside a block of 128 that share its weight tile -> stages that 227 KiB of shared memory hold
_STAGES = {0: 6, 16: 6, 32: 6, 64: 5}


def unsupported(step: SampleInputs) -> str | None:
    """Returns why the Triton backend cannot run a step, or None."""
    weight = step.weight
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        return f"weight must be contiguous along D, got strides {weight.stride()}"
    return device_unsupported(step.hidden_states.device)


def device_unsupported(device: torch.device) -> str | None:
    """Returns why the Triton backend cannot run on a device, or None."""
    if device.type == "cpu":
        return None if triton.knobs.runtime.interpret else "tensors on the CPU (TRITON_INTERPRET=1 is for tests)"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"tensors on {device.type}, it runs on NVIDIA GPUs"
    if capability(device) < (8, 0):
        return f"compute capability {capability(device)}, it needs (8, 0)"
    return None


def _tma_addressable(matrix: Tensor) -> bool:
    rows_apart = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and rows_apart % 16 == 0 and 0 < rows_apart < 2**40


def choose_config(hidden_states: Tensor, weight: Tensor, num_samples: int) -> TritonTileConfig:
    """Chooses the tile shape for a problem that ``unsupported`` does not refuse."""
    batch, dim = hidden_states.shape
    # sm_90 and sm_100: bulk tensor copies, and 227 KiB of shared memory for the large tiles' stages
    big = hidden_states.is_cuda and capability(hidden_states.device)[0] in (9, 10)
    use_tma = big and _tma_addressable(weight)  # the hidden states are copied if they must be
    return shape_for(batch, dim, hidden_states.dtype, num_samples, use_tma)


@functools.cache
def shape_for(batch: int, dim: int, dtype: torch.dtype, num_samples: int, use_tma: bool) -> TritonTileConfig:
    """Chooses the tile shape from numbers alone, so that it can be compiled without a GPU."""
    if dtype == torch.float32:  # no tensor cores: full fp32 products
        return TritonTileConfig(128, 16, 32, 4, 2, 2, use_tma=False)
    deep = use_tma and dim >= 6144  # more k steps per epilogue: stages are worth more than a third program
    if batch <= 16:
        if deep:
            return TritonTileConfig(128, 16, 128, 4, 3, 2, use_tma)
        return TritonTileConfig(128, 16, 128, 4, 2, 3, use_tma, max_registers=168)
    if batch <= 32 or num_samples > 1:
        return TritonTileConfig(128, 32, 64, 4, 3, 3, use_tma, chunk_b=32, max_registers=168)
    if batch <= 64 or not use_tma:
        if deep:
            return TritonTileConfig(256, 64, 64, 8, 5, 1, use_tma, chunk_b=64, preload=True)
        return TritonTileConfig(128, 64, 64, 4, 3, 3, use_tma, max_registers=168)
    if batch <= 128:
        return TritonTileConfig(128, 128, 64, 8, 6, 1, use_tma, chunk_b=64, preload=True, halves=batch < 128)
    if batch > 192 and not deep:
        return TritonTileConfig(256, 128, 64, 8, 4, 1, use_tma, chunk_b=128, rows_on_m=True)
    if batch > 160 and not deep:
        return TritonTileConfig(128, 128, 64, 8, 5, 1, use_tma, chunk_b=128, rest_b=64, rows_on_m=True)
    # with a large D and above 192 rows: more blocks of 128
    rest_b = next((rest for rest in _STAGES if batch <= 128 + rest), 0)
    return TritonTileConfig(128, 128, 64, 8, _STAGES[rest_b], 1, use_tma, chunk_b=64, preload=True, rest_b=rest_b)


def compiled_for(weight: Tensor, max_batch_size: int, num_samples: int) -> tuple[list[str], list[int]]:
    """Lists the kernels that a warm-up compiles and a batch size that uses each (``backends``): per shape two of the
    fused kernel, or one that stores logits."""
    batches: dict[object, int] = {}
    for batch in range(1, max_batch_size + 1):  # TMA may be usable on some ranks only
        shapes = tuple(
            shape_for(batch, weight.shape[1], weight.dtype, num_samples, use_tma) for use_tma in (False, True)
        )
        batches.setdefault(shapes, batch)
    rows = [weight.new_empty(1, weight.shape[1]).expand(batch, -1) for batch in batches.values()]
    configs = dict.fromkeys(choose_config(states, weight, num_samples) for states in rows)
    dtype = str(weight.dtype).removeprefix("torch.")
    kinds = ["parameters per row", "some parameter a number"] if num_samples else ["logits"]
    return [f"triton {dtype} {config}, {kind}" for config in configs for kind in kinds], list(batches.values())
