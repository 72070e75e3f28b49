"""Chooses the tile shape of a problem, and says which problems the kernel takes: pure functions of the batch size and
D.

Nothing is tuned while serving. There are sixteen shapes per dtype, of three variants, so that ``flashsampling
precompile`` can make every kernel. Above 128 columns the shapes are 16 apart: the tensor cores are the limit there, and
padded rows cost their share of the time. Over cuBLAS, H200, D = 4096:

    B                                136    208    320
    shapes of 192 and 256 only       1.16   1.18   1.20
    shapes 16 apart                  0.92   1.06   1.06

``kernel`` records rejected designs.
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

SHARED_BYTES = 232_448  # per CTA on sm_90
_MAX_STAGES = 13
_WIDEST_INSTRUCTION = 192  # columns: ptxas serialises one of 256 in a kernel of 512 threads (C7602)
# D up to which the noise of 192 columns takes longer than their matmul, or than reading their weight; with several row
# blocks the weight comes from L2
_LONG_NOISE, _LONG_NOISE_SHARED = 1792, 2304
_MAX_TILES_PER_CTA = 2**16  # a candidate's queue entry has 16 bits for the iteration


@dataclass(frozen=True)
class TileConfig:
    """The tile shape of one launch. Tokens do not depend on it."""

    block_b: int  # batch rows of a tile: a multiple of 8, at most 256
    cluster: int  # CTAs, neighbours in the vocabulary, that share each load of hidden states
    bound_buffers: int = 1  # of a tile's noise bounds; with two, a tile's noise overlaps the search of the one before

    @property
    def halves(self) -> int:
        """Token halves of a tile that a consumer warpgroup has: one, with all columns, or both, with half of the
        columns."""
        return 1 if self.block_b <= _WIDEST_INSTRUCTION else 2

    @property
    def stages(self) -> int:
        """Pipeline stages: what shared memory holds beside noise bounds, thresholds, queue and barriers."""
        others = 736 + (9 + TILE_V * self.bound_buffers) * self.block_b
        room = SHARED_BYTES - -(-others // 1024) * 1024
        return min(_MAX_STAGES, room // ((TILE_V + self.block_b) * TILE_D * 2))


class Features(NamedTuple):
    """Options of a kernel. With dtype and ``TileConfig`` they are the key of a compiled kernel; ``cache`` keeps those
    of ``KINDS``."""

    transforms: bool = False  # applies ``arguments.TransformArguments`` to logits
    logits: bool = False  # writes ``arguments.Outputs``
    # for tests: counts scores into the words EVALUATED and EVALUATED_WHOLE of ``workspace_layout``
    counts_evaluations: bool = False
    # for ``benchmarks.exchange``: times of the launch's last CTA, into the words RECEIVED and so on
    stamps: bool = False


# A kernel with logits always has transforms too: at 256 columns a run-time choice cost registers, and ten and more a
# thread were spilled within the k loop
KINDS = {"plain": Features(), "processed": Features(transforms=True), "logits": Features(transforms=True, logits=True)}
CUTOFF_KEYS = 512  # block keys of a row that its store cutoff is found from: see ``store_cutoff``
# the last fields of ``arguments.Outputs``, where no row has a store cutoff
NO_CUTOFFS = (0, 0, 0, 1, 0, 0.0, 1)
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
    """Chooses the fewest row blocks, and the smallest shape that takes them.

    192 columns have two shapes: where the noise takes longer than the matmul, a second buffer of bounds replaces a
    pipeline stage.
    """
    row_blocks = max(1, -(-batch // CONFIGS[-1].block_b))
    block_b = next(config.block_b for config in CONFIGS if batch <= row_blocks * config.block_b)
    shapes = [config for config in CONFIGS if config.block_b == block_b]
    long_noise = dim <= (_LONG_NOISE if row_blocks == 1 else _LONG_NOISE_SHARED)
    return shapes[-1] if long_noise else shapes[0]


def skipped(first_token: int, config: TileConfig) -> int:
    """Returns how many tokens before a shard's first token the first cluster's tiles start."""
    return first_token % (TILE_V * config.cluster)


def ctas_per_row_block(config: TileConfig, batch: int, vocab_size: int, processors: int) -> int:
    """Returns how many CTAs walk the vocabulary for one row block: a multiple of the cluster, one CTA per
    multiprocessor in all."""
    clusters = -(-vocab_size // (TILE_V * config.cluster))
    row_blocks = -(-batch // config.block_b)
    return max(1, min(clusters, processors // (config.cluster * row_blocks))) * config.cluster


def copy_engine_reads(address: int, rows: int, rows_apart: int, along_d: int) -> bool:
    """Returns whether TMA can address that many rows of a matrix of 16-bit elements: 16-byte aligned, contiguous along
    D. ``rows_apart`` and ``along_d`` are its strides."""
    return along_d == 1 and address % 16 == 0 and ((rows_apart % 8 == 0 and 0 < rows_apart < 2**39) or rows <= 1)


@functools.cache
def _device_cannot(device: torch.device) -> str | None:
    """Returns why the kernel cannot run on a device, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"tensors on {device.type}, it runs on NVIDIA GPUs"
    if capability(device) != (9, 0):
        return f"compute capability {capability(device)}, it needs (9, 0)"
    return None


def unsupported(step: SampleInputs) -> str | None:
    """Returns why the kernel cannot run a step, or None. Misaligned hidden states are copied; a misaligned weight is
    refused."""
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
    return step.too_wide_to_filter()


def compiled_for(weight: Tensor, max_batch_size: int, num_samples: int) -> tuple[list[str], list[int]]:
    """Lists the kernels that a warm-up compiles, one per shape, and a batch size that uses each (``backends``)."""
    batches: dict[TileConfig, int] = {}
    for batch in range(1, max_batch_size + 1):
        batches.setdefault(choose_config(batch, weight.shape[1]), batch)
    dtype = str(weight.dtype).removeprefix("torch.")
    return [f"cute {dtype} {config}" for config in batches], list(batches.values())


def cutoff_rank(top_k: Any) -> Any:
    """Returns the rank, among the sampled keys, of the store cutoff of a top-k: an int, or an Int32 on the device.

    The bound that ``kernels.triton.filtered.candidates.top_k_cutoff`` finds is reached by fewer columns of blocks than
    this rank, or is the k-th highest key. It is therefore not below the cutoff, and the result does not depend on
    whether there is one.
    """
    return top_k + top_k // 4 + 9
