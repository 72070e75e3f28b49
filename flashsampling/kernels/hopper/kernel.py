"""The fused step on Hopper in one persistent launch: matmul, noise, argmax, reduction.

A CTA keeps one block of rows and walks every ``tile_stride``-th vocabulary tile of 128 rows. Roles, 16 warps:

    warp 0          producer      fills the ring of stages by TMA
    warps 1, 2      evaluators    exact score of every candidate, publication of those that lead, others' thresholds
    warp 3          finder        with ``Features.logits``: the rows' floors; else idle
    warps 4..7      noise         codes of a tile's noise, while the consumers multiply; at the end the reduction
    warps 8..15     consumers     wgmma, two warpgroups, each half of the tile; then the search of the tile's logits

Barriers:

    edge                    object                         filled by                     emptied by
    stage full              mbarrier per stage             TMA, by bytes                 -
    stage empty             mbarrier per stage             -                             8 consumer warps per CTA of the
                                                                                         cluster
    codes full              mbarrier per buffer            128 noise threads             -
    codes empty             mbarrier per buffer            -                             8 consumer warps, after the
                                                                                         search
    queue                   64-bit slots, 0 is free        consumers, compare-and-swap   the slot's evaluator thread,
                                                                                         exchange
    no more candidates      ``done``, release / acquire    8 consumer warps              evaluators, before a last look
    consumers               named barrier 1                256 threads                   the same
    prepared                named barrier 4                noise threads                 evaluators, finder, consumers
                                                                                         wait
    everything published    named barrier 2                these arrive                  noise threads wait
    counting sharp rows,    named barrier 3                128 noise threads             the same
    a tile's codes before
    its marks, finishing
    workspace               see ``reduction``              last CTA, by a counter        the same

A block of rows whose draws are left to ``pick`` (``cutoffs.defers_draw``) has no codes, but their barriers as ever: by
them the consumers' warps also wait for each other, and marks come. The evaluators, whose looks would be taken from the
noise, sleep on the codes' barriers. The named barriers are made here, the stages' in ``mainloop``, and what is between
the epilogue's roles in ``epilogue``.

The exposed part of a tile is the search, 2.75 instructions a logit. It wants registers: at 256 columns and four
instructions a logit ptxas hid its loads and results with 184 registers a thread, and not with 176, 650 static cycles a
warp and 1250.

Rejected designs, H200, B = 256, V = 151936, whole steps against cuBLAS's bare matmul in the same run:

    two ping-pong warpgroups of 128 x 128, and in           D = 4096: 1.148, 1.075 against 1.021; D = 2048: 1.175, 1.134
    clusters of two                                         against 1.067. A bare loop: fewer cycles, a lower clock
    the second warpgroup three stages behind at the end     D = 4096: 1.021 against 1.025, D = 2048: 1.071 against 1.067
    of a tile: one searches while the other multiplies
    candidates evaluated by the consumers that find them    D = 4096: 1.13, by warps of their own 1.11
    the columns in two parts, each searched while the       no faster: D = 2048 1.153 against 1.152, D = 2880 1.060
    other multiplies a tile's first or last two stages      against 1.061, D = 4096 1.070 against 1.038
    a code per Philox block: the search is free, its hits   D = 4096: 1.031 against 1.024; D = 2048: 1.091 against 1.065
    are four times as many
    a ring for the weights, six stages, and one for the     D = 4096: 1.075 against 1.039; B = 64, eleven and four
    hidden states, three, each with a producer              stages: 0.974 against 0.920
    weights prefetched into L2 four stages ahead            D = 2048: 1.171, without 1.146
    stages of 32 instead of 64, twice as many               D = 2048: 1.177 against 1.146
    four Philox blocks per noise thread at once, not two    D = 2048: 1.149 against 1.151; later 1.098 against 1.080
    codes handed back by the quarter of the columns         D = 2048: 1.129 against 1.124, with sleeping evaluators
                                                            1.103, 1.083
    two buffers of codes, and three stages instead of four  D = 2048: 1.124 against 1.086, D = 4096: 1.062 against 1.029
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
    """One tile shape and dtype. Called under ``cute.compile`` only."""

    def __init__(self, dtype, config: TileConfig, features: Features):
        self.dtype = dtype
        self.cluster = config.cluster
        self.block_b = config.block_b
        self.mainloop = Mainloop(dtype, config)
        self.epilogue = SampleEpilogue(config, features)
        # what 65536 registers allow beside 128 threads of the producer's warpgroup
        self.noise_registers, self.consumer_registers = (88, 192) if config.block_b == 256 else (104, 184)

    @cute.jit
    def __call__(self, *arguments):
        """Of ``LaunchArguments``, and the stream."""
        of_host, args, params, out = LaunchArguments.of(arguments[:-1])

        def matrix(address, rows, stride):
            pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
            return cute.make_tensor(
                pointer, cute.make_layout((rows, of_host.dim), stride=(cute.assume(stride, divby=8), 1))
            )

        w_layout, h_layout = self.mainloop.layouts()
        tma_w, tW, tma_h, tH = self.mainloop.copies(
            matrix(of_host.weight, of_host.weight_rows, of_host.weight_stride),
            matrix(of_host.hidden, args.batch, of_host.hidden_stride),
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
            of_host.dim,
            of_host.row_blocks,
            of_host.ctas,
        ).launch(
            grid=(of_host.row_blocks * of_host.ctas, 1, 1),
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

        # neighbouring clusters take the same tiles for different blocks of rows, neighbouring CTAs of a cluster
        # neighbouring tiles
        cluster = cute.arch.block_idx()[0] // self.cluster
        rank = (
            cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if const_expr(self.cluster > 1) else Int32(0)
        )
        row_block = cluster % row_blocks
        first = cluster // row_blocks * self.cluster  # of the cluster's tiles: all its CTAs make as many steps
        tiles_of_all = cute.ceil_div(args.end, self.mainloop.tile[0])
        walk = Walk(
            first_row=row_block * self.block_b,
            first_tile=first + rank,
            tile_stride=ctas,
            tiles=(tiles_of_all - first + ctas - 1) // ctas,
        )

        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        tW = cute.domain_offset((-args.skip, 0), tW)  # what TMA reads before the first row is zero, as after the last
        sW = storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        sH = storage.h.get_tensor(h_layout.outer, swizzle=h_layout.inner)
        shared = self.epilogue.open(storage.epilogue, thread)
        pipe = self.mainloop.make_pipeline(storage.stages.data_ptr())
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.cluster, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.cluster, 1))

        consumers = pipeline.NamedBarrier(barrier_id=1, num_threads=2 * _WARPGROUP)
        finder = const_expr(32 if self.epilogue.block_stats is not None else 0)
        published = pipeline.NamedBarrier(barrier_id=2, num_threads=3 * _WARPGROUP + QUEUE + finder)
        finishing = pipeline.NamedBarrier(barrier_id=3, num_threads=_WARPGROUP)
        prepared = pipeline.NamedBarrier(barrier_id=4, num_threads=3 * _WARPGROUP + QUEUE + finder)
        if const_expr(self.epilogue.block_stats is not None):
            ptx.launch_dependents()  # the filtered kernel finds no room before the first CTAs leave
        if warp_group == 0:
            cute.arch.setmaxregister_decrease(_PRODUCER_REGISTERS)
            if warp == 0:
                self.mainloop.produce(pipe, tma_w, tW, tma_h, tH, sW, sH, rank, row_block, row_blocks, walk, args.base)
            elif warp < 3:
                ptx.meet(prepared)
                self.epilogue.evaluate(args, walk, shared, thread - 32)
                published.arrive()
            else:
                if const_expr(finder):
                    ptx.meet(prepared)
                    self.epilogue.find_cutoffs(args, out, walk, shared, row_block, ctas, thread - 96)
                    published.arrive()
        elif warp_group == 1:
            cute.arch.setmaxregister_decrease(self.noise_registers)
            thread = thread - _WARPGROUP
            self.epilogue.prepare(args, out, walk, shared, thread, finishing)
            ptx.meet(prepared)
            self.epilogue.make_bounds(args, params, walk, shared, thread, finishing)
            self.epilogue.finish(args, out, shared, row_block, row_blocks, ctas, thread, published, finishing)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            thread = thread - 2 * _WARPGROUP
            ptx.meet(prepared)
            tCrW, tCrH, accumulator = self.mainloop.fragments(tiled_mma, sW, sH, warp_group - 2)
            logits = self.epilogue.logits_of(accumulator)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.mainloop.stages)
            release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.mainloop.stages)
            k_tiles = cute.ceil_div(dim, self.mainloop.tile[2])
            for i in cutlass.range(walk.tiles, unroll=1):
                sampled = self.epilogue.sampled(args, walk, i)
                self.epilogue.prefetch(args, params, walk, i, thread)
                state, release = self.mainloop.accumulate(
                    pipe, tiled_mma, tCrW, tCrH, accumulator, state, release, k_tiles
                )
                # while the last products are on their way
                of_tile, words, sparse_bias = self.epilogue.receive(args, params, walk, shared, i, thread)
                release = self.mainloop.drain(pipe, release)
                self.epilogue.search(
                    args, params, out, walk, of_tile, logits, words, sparse_bias, sampled, i, thread, consumers
                )
            self.epilogue.done(shared, thread)
            published.arrive()
        if const_expr(self.cluster > 1):  # no CTA leaves while another may still signal its barriers
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


def compile_kernel(dtype, config: TileConfig, options: str = "", **features: bool):
    """The compiled launch of a tile shape for ``CUTE_DSL_ARCH``, with ``Features`` by name. It is called with the
    values of ``LaunchArguments``, without a stream: it is torch's current one."""
    of_kernel = Features(**features)
    assert of_kernel.transforms or not of_kernel.logits, "LaunchArguments has what is written behind what is processed"
    return cute.compile(
        SampleKernel(dtype, config, of_kernel),
        *LaunchArguments.fakes(of_kernel),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}",
    )
