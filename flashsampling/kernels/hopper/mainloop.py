"""The matmul of one tile: TMA fills a ring of stages, two warpgroups multiply them, each half of the tile's 128
vocabulary rows or, of more than 192 batch rows, half of these.

Vocabulary is M and batch is N of ``wgmma``; both operands are K-major as they lie in memory. k runs in one chain of m64
k16 instructions, in an order that depends on the token id and D alone, so a logit's bits do not depend on the tile's
shape, on the batch or on how the vocabulary is sharded.

One instruction multiplies all columns, up to the 192 that ptxas allows a kernel of 512 threads. Two of 96 read a block
of the weights twice, which takes no cycles but, I think, power: over cuBLAS in one run, H200, B = 192 and 384, D = 2048
1.054 and 1.088, with one instruction of 192 1.032 and 1.075; D = 2880 1.022 and 1.015, 1.014 and 1.016; D = 4096 1.033
and 1.016, 1.024 and 1.018.

Weights that one block of rows reads are read once, so they leave the level-2 cache first, and what a request has stored
stays there for ``pick`` (``block_stats``): docs/kernels.md has what that is worth.

The order: k runs upwards from a start of the tile's, and round. CTAs begin together, and if all of them begin at k = 0
they read addresses that are equal in their lowest bits: by timestamps 3.8 TB/s came in the first 30 us of a launch and
4.5 after, when they had drifted apart. Starts a multiple of 8 stages (1 KB) apart, one per pair of tiles, against all
at 0, over cuBLAS in one run (H200, steps in a row, B = 1 and 64): V = 32064, D = 8192 0.955 and 0.944, against 0.969
and 0.954; 128256, 8192 0.962 and 0.853, against 0.969 and 0.863; 151936, 4096 0.944 and 0.922, against 0.956 and 0.931;
151936, 2048 0.952 and 0.912, against 0.953 and 0.919. Which starts are best differs with D by 2 %; these were never the
worst.
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
# of createpolicy, for a whole access: as CUTLASS names them
_EVICT_NORMAL, _EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000


class Mainloop:
    """Layouts and loops of a tile shape."""

    def __init__(self, dtype, config: TileConfig):
        self.dtype = dtype
        self.stages = config.stages
        self.cluster = config.cluster
        self.tile = (TILE_V, config.block_b, TILE_D)
        self.halves = config.halves
        self.columns = config.block_b // config.halves  # of a warpgroup

    # -- host side of the launch

    def tiled_mma(self):
        """Instructions of m64: one of all columns per consumer warpgroup, or two of half the columns."""
        major = LayoutEnum.ROW_MAJOR.sm90_mma_major_mode()
        warpgroups = (2, 1, 1) if self.halves == 1 else (1, 2, 1)
        tiler = (64, self.columns)
        return sm90.make_trivial_tiled_mma(self.dtype, self.dtype, major, major, Float32, warpgroups, tiler_mn=tiler)

    def layouts(self):
        """Swizzled shared-memory layouts of the weight's and the hidden states' stages."""
        make = (sm90.make_smem_layout_a, sm90.make_smem_layout_b)
        return [layout(LayoutEnum.ROW_MAJOR, self.tile, self.dtype, self.stages) for layout in make]

    def copies(self, weight, hidden, w_layout, h_layout):
        """TMA atoms and their coordinate tensors. A cluster loads each block of hidden states once, a share per CTA."""
        one, shared = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        w_stage, h_stage = (cute.slice_(layout, (None, None, 0)) for layout in (w_layout, h_layout))
        tma_w = cpasync.make_tiled_tma_atom(one, weight, w_stage, (TILE_V, TILE_D))
        tma_h = cpasync.make_tiled_tma_atom(
            one if self.cluster == 1 else shared, hidden, h_stage, (self.tile[1], TILE_D), num_multicast=self.cluster
        )
        return *tma_w, *tma_h

    # -- device side

    def make_pipeline(self, barriers):
        """Stage barriers: full by the bytes of a stage, empty by every consumer warp of every CTA of the cluster."""
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
        """The producer warp: fills stages for every tile of the CTA's walk. ``base``: token id of tile 0."""
        gW = cute.local_tile(tW, (TILE_V, TILE_D), (None, None))  # (128, 64, V tiles, D tiles)
        gH = cute.local_tile(tH, (self.tile[1], TILE_D), (None, None))  # (N, 64, B tiles, D tiles)
        tWsW, tWgW = cpasync.tma_partition(
            tma_w, 0, cute.make_layout(1), cute.group_modes(sW, 0, 2), cute.group_modes(gW, 0, 2)
        )
        tHsH, tHgH = cpasync.tma_partition(
            tma_h, rank, cute.make_layout(self.cluster), cute.group_modes(sH, 0, 2), cute.group_modes(gH, 0, 2)
        )
        to_all = {} if self.cluster == 1 else {"mcast_mask": cutlass.Int16(2**self.cluster - 1)}
        # weights that one block of rows reads are read once: what else is in the level-2 cache may stay there
        policy = Int64(_EVICT_FIRST) if row_blocks == 1 else Int64(_EVICT_NORMAL)
        k_tiles = cute.size(gW, mode=[3])
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        starts = cutlass.max(k_tiles // _STARTS_APART, 1)
        for i in cutlass.range(walk.tiles, unroll=1):
            tile = walk.tile(i)
            pair = (base // TILE_V + tile) // 2  # a cluster's two CTAs share their loads, and so their k
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
        """Operand descriptors of a consumer warpgroup (0 or 1), and its accumulator, of a thread (2 columns, 2 rows,
        blocks of eight columns, halves of the tokens)."""
        thread_mma = tiled_mma.get_slice(cute.make_layout(2, stride=128)(warp_group))
        tCrW = tiled_mma.make_fragment_A(thread_mma.partition_A(sW))
        tCrH = tiled_mma.make_fragment_B(thread_mma.partition_B(sH))
        accumulator = cute.make_rmem_tensor(tiled_mma.partition_shape_C(self.tile[:2]), Float32)
        return tCrW, tCrH, accumulator

    @cute.jit
    def accumulate(self, pipe, tiled_mma, tCrW, tCrH, accumulator, state, release, k_tiles):
        """The logits of one tile, but for the last stage's products, which ``drain`` waits for; returns the advanced
        pipeline states. A stage is released once the next one's products are on their way."""
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
            warpgroup.fence()  # without it ptxas puts one of its own in, and serialises every wgmma (C7520)
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
        """Waits for all products and releases the last stage; returns the advanced state."""
        warpgroup.wait_group(0)
        pipe.consumer_release(release)
        release.advance()
        return release
