"""Which problems the Hopper kernel takes, and the tile shape of each: a pure function of the batch size and D.

Nothing is tuned while serving, and there are sixteen shapes per dtype in all, of three kinds of kernel, so
``scripts/precompile`` can make every one that will ever be asked for. Above 128 columns they are 16 apart: there the
tensor cores are the limit, and what pads a batch costs its share of the time (H200, over cuBLAS: B = 136, 208 and 320,
D = 4096 1.16, 1.18 and 1.20 with shapes of 192 and 256 only, 0.92, 1.06 and 1.06 now). Rejected designs are recorded in
``kernel``.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...exchange_protocol import WHOLE
from ...inputs import SampleInputs
from ...sampling_params import DEFAULT_PARAMS, argument_names
from ..device import capability, multiprocessors

TILE_V = 128  # vocabulary rows of a tile: two m64 wgmma blocks
TILE_D = 64  # depth of a pipeline stage: one 128-byte swizzle atom of 16-bit elements

SHARED_BYTES = 232_448  # what a CTA may have on sm_90
_MAX_STAGES = 13
_WIDEST_INSTRUCTION = 192  # columns: ptxas serialises one of 256 in a kernel of 512 threads (C7602)
# D up to which the noise of 192 columns takes longer than their matmul, or than their weight takes to read: with
# several blocks of rows a CTA finds it in L2
_LONG_NOISE, _LONG_NOISE_SHARED = 1792, 2304
_MAX_TILES_PER_CTA = 2**16  # a candidate's entry in the queue has 16 bits for it


@dataclass(frozen=True)
class TileConfig:
    """Shape of one launch. Tokens do not depend on it."""

    block_b: int  # batch rows of a tile: a multiple of 8, at most 256
    cluster: int  # CTAs, neighbours in the vocabulary, that share each load of hidden states
    bound_buffers: int = (
        1  # tiles whose codes have room: with two the noise of one need not wait for the search of another
    )

    @property
    def halves(self) -> int:
        """Halves of a tile's 128 tokens that a consumer warpgroup has: with both, it has half of the columns."""
        return 1 if self.block_b <= _WIDEST_INSTRUCTION else 2

    @property
    def stages(self) -> int:
        """Pipeline stages: what shared memory holds beside the codes, thresholds, queue and barriers."""
        others = 736 + (9 + TILE_V * self.bound_buffers) * self.block_b
        room = SHARED_BYTES - -(-others // 1024) * 1024
        return min(_MAX_STAGES, room // ((TILE_V + self.block_b) * TILE_D * 2))


class Features(NamedTuple):
    """What a kernel has beside the draw. With the dtype and ``TileConfig`` it is all that a kernel is compiled for, and
    so the key of a compiled one; ``cache`` keeps those of ``KINDS``."""

    transforms: bool = False  # makes ``arguments.TransformArguments`` of its logits
    logits: bool = False  # writes ``arguments.Outputs``
    counts_evaluations: bool = False  # for tests: into ``slots.EVALUATED`` and ``slots.EVALUATED_WHOLE``
    stamps: bool = (
        False  # for ``benchmarks.exchange``: times of the launch's last CTA, into ``slots.RECEIVED`` and so on
    )


# With logits always both: at 256 columns what would tell them apart at run time cost registers, of which ten and more a
# thread went to local memory and back within the k loop.
KINDS = {"plain": Features(), "processed": Features(transforms=True), "logits": Features(transforms=True, logits=True)}
# ``arguments.TransformArguments``, where nothing is asked for
NO_TRANSFORMS = (0, 0, 1.0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0, 0, 0.0, 0, 0.0, 0, 0)
CUTOFF_KEYS = 512  # of a row, by which its floor is found: see ``cutoffs``
NO_CUTOFFS = (
    0,
    0,
    0,
    1,
    0,
    0.0,
    1,
)  # the last of ``arguments.Outputs``, where nothing is filtered, and all logits are stored
CONFIGS = (
    TileConfig(8, 1),
    TileConfig(16, 1),
    TileConfig(32, 1),
    TileConfig(48, 2),
    TileConfig(64, 2),
    TileConfig(96, 2),
    TileConfig(128, 2),
    TileConfig(144, 2),
    TileConfig(160, 2, bound_buffers=2),
    TileConfig(176, 2),
    TileConfig(192, 2),
    TileConfig(192, 2, bound_buffers=2),
    TileConfig(208, 2),
    TileConfig(224, 2),
    TileConfig(240, 2),
    TileConfig(256, 2),
)


def choose_config(batch: int, dim: int) -> TileConfig:
    """The fewest blocks of rows, and the smallest shape that takes them. Of 192 columns there are two: where the noise
    takes longer than the matmul, a second buffer of codes is worth the pipeline stage in whose place it is."""
    row_blocks = max(1, -(-batch // CONFIGS[-1].block_b))
    block_b = next(config.block_b for config in CONFIGS if batch <= row_blocks * config.block_b)
    shapes = [config for config in CONFIGS if config.block_b == block_b]
    long_noise = dim <= (_LONG_NOISE if row_blocks == 1 else _LONG_NOISE_SHARED)
    return shapes[-1] if long_noise else shapes[0]


def skipped(first_token: int, config: TileConfig) -> int:
    """By how many tokens the first cluster's tiles start before a shard's first one."""
    return first_token % (TILE_V * config.cluster)


def ctas_per_row_block(config: TileConfig, batch: int, vocab_size: int, processors: int) -> int:
    """CTAs that walk the vocabulary for one block of rows: a multiple of the cluster, one CTA per multiprocessor in
    all."""
    clusters = -(-vocab_size // (TILE_V * config.cluster))
    row_blocks = -(-batch // config.block_b)
    return max(1, min(clusters, processors // (config.cluster * row_blocks))) * config.cluster


def copy_engine_reads(address: int, rows: int, rows_apart: int, along_d: int) -> bool:
    """Whether TMA can address so many rows of a matrix of 16-bit elements: 16-byte aligned, contiguous along D. The
    last two are its strides."""
    return along_d == 1 and address % 16 == 0 and ((rows_apart % 8 == 0 and 0 < rows_apart < 2**39) or rows <= 1)


@functools.cache
def _device_cannot(device: torch.device) -> str | None:
    """Why nothing can be done on a device, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"tensors on {device.type}, it runs on NVIDIA GPUs"
    if capability(device) != (9, 0):
        return f"compute capability {capability(device)}, it needs (9, 0)"
    return None


def unsupported(step: SampleInputs) -> str | None:
    """Why the Hopper kernel cannot do a step, or None. Misaligned hidden states it copies; the weight it does not."""
    weight = step.weight
    if step.params is not DEFAULT_PARAMS and step.shard != WHOLE:
        return f"a shard of a vocabulary with {argument_names(step.params.names())}"
    reason = _device_cannot(weight.device)
    if reason is not None:
        return reason
    if weight.dtype is torch.float32:
        return "float32, it takes bfloat16 and float16"
    vocab = step.vocab_size
    rows_apart, along_d = weight.stride()
    if not copy_engine_reads(weight.data_ptr(), vocab, rows_apart, along_d):
        return (
            "the rows of weight must be contiguous and start at multiples of 16 bytes (D divisible by 8), "
            f"got strides {tuple(weight.stride())} at address {weight.data_ptr():#x}"
        )
    if vocab > _MAX_TILES_PER_CTA * TILE_V:
        batch = step.hidden_states.shape[0]
        ctas = ctas_per_row_block(choose_config(batch, weight.shape[1]), batch, vocab, multiprocessors(weight.device))
        if vocab > _MAX_TILES_PER_CTA * TILE_V * ctas:
            return (
                f"{vocab} vocabulary rows, for a batch of {batch} it takes up to {_MAX_TILES_PER_CTA * TILE_V * ctas}"
            )
    return step.too_wide_to_pick()


def compiled_for(weight: Tensor, max_batch_size: int, num_samples: int) -> tuple[list[str], list[int]]:
    """See ``backends``: a kernel for every shape."""
    batches: dict[TileConfig, int] = {}
    for batch in range(1, max_batch_size + 1):
        batches.setdefault(choose_config(batch, weight.shape[1]), batch)
    dtype = str(weight.dtype).removeprefix("torch.")
    return [f"cute {dtype} {config}" for config in batches], list(batches.values())


def cutoff_rank(top_k: Any) -> Any:
    """Which of the sampled keys, from the highest on, is a floor for a top-k: an int, or an Int32 on the device. The
    bound that ``kernels.triton.filtered.candidates.kth_highest`` finds is reached by fewer columns of chunks than
    this, or is the k-th highest: it is not below the floor, and what follows from it does not depend on whether
    there is one."""
    return top_k + top_k // 4 + 9
