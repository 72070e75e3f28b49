"""Samples in one persistent Hopper launch: matmul, Gumbel noise, argmax and the reduction over tiles.

This module assigns roles to warps and owns the named barriers. ``mainloop`` computes logits, ``epilogue`` says which
module does what with them. The algorithm, for one CTA; it keeps one block of B rows and walks every ``tile_stride``-th
vocabulary tile of 128 tokens:

    for each tile of the CTA:
        noise warps      gumbel_bounds[token, row] = 7-bit upper bound of the noise    # while the tensor cores multiply
        consumer warps   logits[token, row] = wgmma(weight tile, hidden states), then logit transforms, if any
                         for each logit in registers:
                             if logit * slope[row] + bound + threshold[row] < 0: skip   # cannot win
                             else: push (token, row, logit) to the queue                # a candidate
        candidate warps  score = logit * scale + noise, exactly
                         if it leads its row in this CTA: red.max(winner[row], key); lower threshold[row]
    last CTA of a row block: winner[row] -> token id; the workspace is zero again

The code keeps minus the threshold, so a better score lowers it.

Roles, 16 warps:

    warp 0          producer          fills the ring of stages by TMA
    warps 1, 2      candidate warps   exact score of every candidate, publication of leaders, thresholds of other CTAs
    warp 3          cutoff warp       with ``Features.logits``: the rows' store cutoffs; else idle
    warps 4..7      noise warps       Gumbel bounds of a tile, while the consumers multiply; at the end the reduction
    warps 8..15     consumer warps    wgmma, two warpgroups, each half of the tile; then the search of the tile's logits

Barriers:

    edge                 object                       filled by                    emptied by
    stage full           mbarrier per stage           TMA, by bytes                -
    stage empty          mbarrier per stage           -                            8 consumer warps of every CTA
    bounds full          mbarrier per buffer          128 noise threads            -
    bounds empty         mbarrier per buffer          -                            8 consumer warps, after the search
    queue                64-bit slots, 0 is free      consumers, compare-and-swap  the slot's candidate thread, exchange
    no more candidates   ``done``, release / acquire  8 consumer warps             candidate warps, then a last look
    consumers            named barrier 1              256 consumer threads         the same
    all keys published   named barrier 2              all other roles              noise threads
    noise threads        named barrier 3              128 noise threads            the same
    memory prepared      named barrier 4              noise threads                candidate, cutoff and consumer warps
    workspace            table in ``reduction``       last CTA, by a counter       the same

Named barrier 3 counts low-temperature rows, orders a tile's bounds before its marks, and serves the reduction.

If all draws of a row block are deferred (``store_cutoff.defers_draw``), the noise warps make no bounds but use the same
barriers: the consumer warps also wait for each other through them, and the nonzero-count marks arrive with them. The
candidate warps sleep on the bounds' barriers, because polling would take issue slots from the noise warps.

The search is the exposed part of a tile: 2.75 instructions a logit. At 256 columns and four instructions a logit, ptxas
hid its loads with 184 registers a thread, but not with 176: 650 against 1250 static cycles a warp.

Rejected designs, H200, B = 256, V = 151936, whole steps over cuBLAS's bare matmul in the same run:

    two ping-pong warpgroups of 128 x 128, clusters of 2  D = 4096: 1.148, 1.075 against 1.021; D = 2048: 1.175, 1.134
                                                          against 1.067. A bare loop: fewer cycles, a lower clock
    the second warpgroup three stages behind at the end   D = 4096: 1.021 against 1.025, D = 2048: 1.071 against 1.067
    of a tile: one searches while the other multiplies
    candidates scored by the consumers that find them     D = 4096: 1.13, by warps of their own 1.11
    the columns in two parts, each searched while the     no faster: D = 2048 1.153 against 1.152, D = 2880 1.060
    other multiplies a tile's first or last two stages    against 1.061, D = 4096 1.070 against 1.038
    one bound per Philox block: the search is free, its   D = 4096: 1.031 against 1.024; D = 2048: 1.091 against 1.065
    hits are four times as many
    a ring for the weights, six stages, and one for the   D = 4096: 1.075 against 1.039; B = 64, eleven and four
    hidden states, three, each with a producer            stages: 0.974 against 0.920
    weights prefetched into L2 four stages ahead          D = 2048: 1.171, without 1.146
    stages of 32 instead of 64, twice as many             D = 2048: 1.177 against 1.146
    four Philox blocks per noise thread at once, not two  D = 2048: 1.149 against 1.151; another run 1.098 against 1.080
    bounds handed back by the quarter of the columns      D = 2048: 1.129 against 1.124; candidate warps asleep: 1.103
                                                          against 1.083
    two buffers of bounds, three stages instead of four   D = 2048: 1.124 against 1.086, D = 4096: 1.062 against 1.029
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from . import ptx
from .arguments import Arguments, LaunchArguments, Outputs, TransformArguments, Walk
from .config import SHARED_BYTES, Features, TileConfig
from .epilogue import SampleEpilogue
from .mainloop import Mainloop
from .shared_memory import QUEUE

_WARPGROUP = 128
_PRODUCER_REGISTERS = 40


class SampleKernel:
    """The kernel for one tile shape, dtype and set of features. ``cute.compile`` calls it."""

    def __init__(self, dtype, config: TileConfig, features: Features):
        self.dtype = dtype
        self.cluster = config.cluster
        self.block_b = config.block_b
        self.mainloop = Mainloop(dtype, config)
        self.epilogue = SampleEpilogue(config, features)
        # 65536 registers, less those of the producer's warpgroup
        self.noise_registers, self.consumer_registers = (88, 192) if config.block_b == 256 else (104, 184)

    @cute.jit
    def __call__(self, *arguments):
        """Builds the TMA descriptors and launches ``kernel``. Takes the values of ``LaunchArguments``, then the
        stream."""
        host, args, params, out = LaunchArguments.of(arguments[:-1])

        def matrix(address, rows, stride):
            pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
            return cute.make_tensor(
                pointer, cute.make_layout((rows, host.dim), stride=(cute.assume(stride, divby=8), 1))
            )

        w_layout, h_layout = self.mainloop.layouts()
        tma_w, tW, tma_h, tH = self.mainloop.copies(
            matrix(host.weight, host.weight_rows, host.weight_stride),
            matrix(host.hidden, args.batch, host.hidden_stride),
            w_layout,
            h_layout,
        )

        epilogue_storage = self.epilogue.storage()

        @cute.struct
        class Storage:
            stages: cute.struct.MemRange[Int64, 2 * self.mainloop.stages]
            epilogue: epilogue_storage
            w: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]
            h: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(h_layout)], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES, "TileConfig.stages leaves too little beside the stages"
        self.storage = Storage
        args = args._replace(tokens=args.tokens.iterator.toint())
        self.kernel(
            tma_w,
            tW,
            tma_h,
            tH,
            self.mainloop.tiled_mma(),
            w_layout,
            h_layout,
            args,
            params,
            out,
            host.dim,
            host.row_blocks,
            host.ctas,
        ).launch(
            grid=(host.row_blocks * host.ctas, 1, 1),
            block=(4 * _WARPGROUP, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=arguments[-1],
        )

    @cute.kernel
    def kernel(
        self,
        tma_w: cute.CopyAtom,
        tW: cute.Tensor,  # coordinates of (weight_rows, D)
        tma_h: cute.CopyAtom,
        tH: cute.Tensor,  # coordinates of (B, D)
        tiled_mma: cute.TiledMma,
        w_layout: cute.ComposedLayout,
        h_layout: cute.ComposedLayout,
        args: Arguments,
        params: TransformArguments | None,
        out: Outputs | None,
        dim: Int32,
        row_blocks: Int32,
        ctas: Int32,
    ):
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warp_group = cute.arch.make_warp_uniform(thread // _WARPGROUP)
        if warp == 0:
            cpasync.prefetch_descriptor(tma_w)
            cpasync.prefetch_descriptor(tma_h)

        # neighbouring clusters take the same tiles for different row blocks; CTAs of a cluster take neighbouring tiles
        cluster = cute.arch.block_idx()[0] // self.cluster
        rank = (
            cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if const_expr(self.cluster > 1) else Int32(0)
        )
        row_block = cluster % row_blocks
        first = cluster // row_blocks * self.cluster  # the cluster's first tile: all its CTAs make as many steps
        tiles_of_all = cute.ceil_div(args.end, self.mainloop.tile[0])
        walk = Walk(
            first_row=row_block * self.block_b,
            first_tile=first + rank,
            tile_stride=ctas,
            tiles=(tiles_of_all - first + ctas - 1) // ctas,
        )

        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        tW = cute.domain_offset((-args.skip, 0), tW)  # TMA reads zeros before the first row, as after the last
        sW = storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        sH = storage.h.get_tensor(h_layout.outer, swizzle=h_layout.inner)
        shared = self.epilogue.open(storage.epilogue, thread)
        pipe = self.mainloop.make_pipeline(storage.stages.data_ptr())
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.cluster, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.cluster, 1))

        consumers = pipeline.NamedBarrier(barrier_id=1, num_threads=2 * _WARPGROUP)
        cutoff_threads = const_expr(32 if self.epilogue.block_stats is not None else 0)
        published = pipeline.NamedBarrier(barrier_id=2, num_threads=3 * _WARPGROUP + QUEUE + cutoff_threads)
        finishing = pipeline.NamedBarrier(barrier_id=3, num_threads=_WARPGROUP)
        prepared = pipeline.NamedBarrier(barrier_id=4, num_threads=3 * _WARPGROUP + QUEUE + cutoff_threads)
        if const_expr(self.epilogue.block_stats is not None):
            ptx.launch_dependents()  # the filtered-sampling kernel, which fits once the first CTAs have left
        if warp_group == 0:
            cute.arch.setmaxregister_decrease(_PRODUCER_REGISTERS)
            if warp == 0:
                self.mainloop.produce(pipe, tma_w, tW, tma_h, tH, sW, sH, rank, row_block, row_blocks, walk, args.base)
            elif warp < 3:
                ptx.barrier_sync(prepared)
                self.epilogue.score_candidates(args, walk, shared, thread - 32)
                published.arrive()
            else:
                if const_expr(cutoff_threads):
                    ptx.barrier_sync(prepared)
                    self.epilogue.find_cutoffs(args, out, walk, shared, row_block, ctas, thread - 96)
                    published.arrive()
        elif warp_group == 1:
            cute.arch.setmaxregister_decrease(self.noise_registers)
            thread = thread - _WARPGROUP
            self.epilogue.prepare(args, out, walk, shared, thread, finishing)
            ptx.barrier_sync(prepared)
            self.epilogue.make_bounds(args, params, walk, shared, thread, finishing)
            self.epilogue.finish(args, out, shared, row_block, row_blocks, ctas, thread, published, finishing)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            thread = thread - 2 * _WARPGROUP
            ptx.barrier_sync(prepared)
            tCrW, tCrH, accumulator = self.mainloop.fragments(tiled_mma, sW, sH, warp_group - 2)
            logits = self.epilogue.view_logits(accumulator)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.mainloop.stages)
            release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.mainloop.stages)
            k_tiles = cute.ceil_div(dim, self.mainloop.tile[2])
            for i in cutlass.range(walk.tiles, unroll=1):
                sampled = self.epilogue.sampled(args, walk, i)
                self.epilogue.prefetch(args, params, walk, i, thread)
                state, release = self.mainloop.accumulate(
                    pipe, tiled_mma, tCrW, tCrH, accumulator, state, release, k_tiles
                )
                # overlaps the last stage's wgmma
                tile_memory, words, sparse_bias = self.epilogue.receive(args, params, walk, shared, i, thread)
                release = self.mainloop.drain(pipe, release)
                self.epilogue.search(
                    args, params, out, walk, tile_memory, logits, words, sparse_bias, sampled, i, thread, consumers
                )
            self.epilogue.done(shared, thread)
            published.arrive()
        if const_expr(self.cluster > 1):  # no CTA leaves while another may still signal its barriers
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


def compile_kernel(dtype, config: TileConfig, options: str = "", **features: bool):
    """Compiles the launch of a tile shape for ``CUTE_DSL_ARCH``, with ``Features`` by name.

    The result takes the values of ``LaunchArguments`` without a stream: it runs on torch's current one.
    """
    enabled = Features(**features)
    assert enabled.transforms or not enabled.logits, "a kernel with logits also has transforms"
    return cute.compile(
        SampleKernel(dtype, config, enabled),
        *LaunchArguments.fakes(enabled),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}",
    )
