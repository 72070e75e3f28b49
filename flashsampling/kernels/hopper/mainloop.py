"""Computes the logits of one tile: TMA fills a ring of stages, two warpgroups multiply them.

The vocabulary is M and the batch is N of ``wgmma``. Both operands are K-major, as they lie in memory. Up to 192 rows, a
warpgroup has 64 of the tile's 128 tokens and all rows; above, all tokens and half of the rows. One instruction
multiplies up to 192 columns, the most that ptxas allows a kernel of 512 threads.

k runs in one chain of m64 k16 instructions, in an order that depends on the token id and D alone. A logit's bits
therefore do not depend on the tile shape, the batch, or the sharding of the vocabulary.

Two instructions of 96 columns in place of one of 192 read a weight block twice. Over cuBLAS, H200, one run:

                  D = 2048         D = 2880         D = 4096
    B             192     384      192     384      192     384
    2 x 96        1.054   1.088    1.022   1.015    1.033   1.016
    1 x 192       1.032   1.075    1.014   1.016    1.024   1.018

With one row block, weights are loaded with the evict-first policy: each is read once, and stored logits stay in L2 for
the filtered-sampling kernel. docs/kernels.md has the gain.

The k order starts at a stage that depends on the tile, and wraps around. CTAs begin together; if all began at k = 0,
they would read addresses with equal low bits. By timestamps, 3.8 TB/s arrived in the first 30 us of such a launch and
4.5 TB/s later. Starts are multiples of 8 stages (1 KB), one per pair of tiles. Over cuBLAS, H200, steps in a row, B = 1
and 64, one run:

    V, D             all at 0         apart
    32064, 8192      0.969, 0.954     0.955, 0.944
    128256, 8192     0.969, 0.863     0.962, 0.853
    151936, 4096     0.956, 0.931     0.944, 0.922
    151936, 2048     0.953, 0.919     0.952, 0.912

Which starts are best differs with D by 2 %; these were never the worst.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from .config import TILE_D, TILE_V, TileConfig

_CONSUMER_WARPS = 8
_STARTS_APART = 8  # stages
# encoded L2 policies, with CUTLASS's names
_EVICT_NORMAL, _EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000


class Mainloop:
    """Layouts and loops of one tile shape."""

    def __init__(self, dtype, config: TileConfig):
        self.dtype = dtype
        self.stages = config.stages
        self.cluster = config.cluster
        self.tile = (TILE_V, config.block_b, TILE_D)
        self.halves = config.halves
        self.columns = config.block_b // config.halves  # per warpgroup

    # -- host side of the launch

    def tiled_mma(self):
        """Returns m64 instructions: two warpgroups along M with all columns each, or along N with half of the
        columns."""
        major = LayoutEnum.ROW_MAJOR.sm90_mma_major_mode()
        warpgroups = (2, 1, 1) if self.halves == 1 else (1, 2, 1)
        tiler = (64, self.columns)
        return sm90.make_trivial_tiled_mma(self.dtype, self.dtype, major, major, Float32, warpgroups, tiler_mn=tiler)

    def layouts(self):
        """Returns the swizzled shared-memory layouts of the stages of weight and hidden states."""
        make = (sm90.make_smem_layout_a, sm90.make_smem_layout_b)
        return [layout(LayoutEnum.ROW_MAJOR, self.tile, self.dtype, self.stages) for layout in make]

    def copies(self, weight, hidden, w_layout, h_layout):
        """Returns TMA atoms and coordinate tensors. A cluster loads each block of hidden states once, a share per
        CTA."""
        one, shared = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        w_stage, h_stage = (cute.slice_(layout, (None, None, 0)) for layout in (w_layout, h_layout))
        tma_w = cpasync.make_tiled_tma_atom(one, weight, w_stage, (TILE_V, TILE_D))
        tma_h = cpasync.make_tiled_tma_atom(
            one if self.cluster == 1 else shared, hidden, h_stage, (self.tile[1], TILE_D), num_multicast=self.cluster
        )
        return *tma_w, *tma_h

    # -- device side

    def make_pipeline(self, barriers):
        """Creates the stage barriers: full by bytes, empty by every consumer warp of every CTA of the cluster."""
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, _CONSUMER_WARPS * self.cluster),
            tx_count=(self.tile[0] + self.tile[1]) * TILE_D * 2,
            cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)),
            defer_sync=True,
        )

    @cute.jit
    def produce(self, pipe, tma_w, tW, tma_h, tH, sW, sH, rank, row_block, row_blocks, walk, base):
        """Fills stages for every tile of the CTA's walk: the producer warp. ``base``: token id of tile 0."""
        gW = cute.local_tile(tW, (TILE_V, TILE_D), (None, None))  # (128, 64, V tiles, D tiles)
        gH = cute.local_tile(tH, (self.tile[1], TILE_D), (None, None))  # (N, 64, B tiles, D tiles)
        tWsW, tWgW = cpasync.tma_partition(
            tma_w, 0, cute.make_layout(1), cute.group_modes(sW, 0, 2), cute.group_modes(gW, 0, 2)
        )
        tHsH, tHgH = cpasync.tma_partition(
            tma_h, rank, cute.make_layout(self.cluster), cute.group_modes(sH, 0, 2), cute.group_modes(gH, 0, 2)
        )
        to_all = {} if self.cluster == 1 else {"mcast_mask": cutlass.Int16(2**self.cluster - 1)}
        # one row block reads each weight once, so weights need not stay in L2
        policy = Int64(_EVICT_FIRST) if row_blocks == 1 else Int64(_EVICT_NORMAL)
        k_tiles = cute.size(gW, mode=[3])
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        starts = cutlass.max(k_tiles // _STARTS_APART, 1)
        for i in cutlass.range(walk.tiles, unroll=1):
            tile = walk.tile(i)
            pair = (base // TILE_V + tile) // 2  # a cluster's two CTAs share loads, and so k
            k = pair % starts * _STARTS_APART
            for _ in cutlass.range(k_tiles, unroll=1):
                pipe.producer_acquire(state)
                full = pipe.producer_get_barrier(state)
                cute.copy(tma_w, tWgW[None, tile, k], tWsW[None, state.index], tma_bar_ptr=full, cache_policy=policy)
                cute.copy(tma_h, tHgH[None, row_block, k], tHsH[None, state.index], tma_bar_ptr=full, **to_all)
                state.advance()
                k += 1
                if k == k_tiles:
                    k = Int32(0)
        pipe.producer_tail(state)

    def fragments(self, tiled_mma, sW, sH, warp_group):
        """Returns the operand descriptors of a consumer warpgroup (0 or 1) and its accumulator: per thread (2 columns,
        2 rows, column blocks of eight, token halves)."""
        thread_mma = tiled_mma.get_slice(cute.make_layout(2, stride=128)(warp_group))
        tCrW = tiled_mma.make_fragment_A(thread_mma.partition_A(sW))
        tCrH = tiled_mma.make_fragment_B(thread_mma.partition_B(sH))
        accumulator = cute.make_rmem_tensor(tiled_mma.partition_shape_C(self.tile[:2]), Float32)
        return tCrW, tCrH, accumulator

    @cute.jit
    def accumulate(self, pipe, tiled_mma, tCrW, tCrH, accumulator, state, release, k_tiles):
        """Computes the logits of one tile, all but the last stage's wgmma, which ``drain`` waits for. Returns the
        advanced pipeline states. A stage is released once the next one's wgmma is issued."""
        pipe.consumer_wait(state)
        warpgroup.fence()
        for kb in range_constexpr(TILE_D // 16):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, kb != 0)
            k16 = (None, None, kb, state.index)
            cute.gemm(tiled_mma, accumulator, tCrW[k16], tCrH[k16], accumulator)
        warpgroup.commit_group()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        state.advance()
        for _ in cutlass.range(1, k_tiles, unroll=1):
            pipe.consumer_wait(state)
            warpgroup.fence()  # without it ptxas inserts its own and serialises every wgmma (C7520)
            for kb in range_constexpr(TILE_D // 16):
                k16 = (None, None, kb, state.index)
                cute.gemm(tiled_mma, accumulator, tCrW[k16], tCrH[k16], accumulator)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            pipe.consumer_release(release)
            release.advance()
            state.advance()
        return state, release

    @cute.jit
    def drain(self, pipe, release):
        """Waits for all wgmma and releases the last stage. Returns the advanced state."""
        warpgroup.wait_group(0)
        pipe.consumer_release(release)
        release.advance()
        return release
