"""A kernel that computes nothing but the Hopper kernel's noise, elementwise: for tests, and to compile for other
GPUs."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr

from flashsampling.kernels.hopper import noise, reduction

INPUTS = 13  # per block: counter and key (6), 4 words, refinement, bits of two floats
# per block: 4 words, the same 4 from constants, codes, 4 w, 4 refined Gumbels, key, score of key, 2 sums of codes
OUTPUTS = 21


@cute.kernel
def _kernel(blocks: cute.Tensor, out: cute.Tensor, count: Int32):
    i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
    if i < count:
        group, stream_draw, o0, o1, k0, k1 = [Uint32(blocks[i, c]) for c in range(6)]
        words = noise.philox_words(group, stream_draw, (o0, o1), (k0, k1))
        constants = noise.row_constants(stream_draw, (o0, o1), (k0, k1))
        same = noise.philox_words_from_products(noise.group_product(group), constants)
        given = [Uint32(blocks[i, 6 + c]) for c in range(4)]  # words of the caller's choice
        gumbel_bounds = noise.encode_bounds(given)
        for c in range_constexpr(4):
            out[i, c] = Int64(words[c])
            out[i, 4 + c] = Int64(same[c])
            out[i, 9 + c] = Int64(noise.bound_float(gumbel_bounds, c).bitcast(Uint32))
            out[i, 13 + c] = Int64(noise.minus_gumbel_refined(given[c], Uint32(blocks[i, 10])).bitcast(Uint32))
        out[i, 8] = Int64(gumbel_bounds)
        key = reduction.pack_key(given[0].bitcast(Float32), Int32(i))
        out[i, 17] = key
        out[i, 18] = Int64(reduction.unpack_score(key).bitcast(Uint32))
        bases = [Uint32(blocks[i, 11 + c]).bitcast(Float32) for c in range(2)]
        for pair in range_constexpr(2):
            out[i, 19 + pair] = Int64(noise.add_bounds(bases[0], bases[1], gumbel_bounds, pair, noise.exponents(count)))


@cute.jit
def run(blocks: cute.Tensor, out: cute.Tensor, count: Int32, stream):
    """One block of ``blocks`` (n, INPUTS) int64 per thread; ``out`` (n, OUTPUTS) int64."""
    _kernel(blocks, out, count).launch(grid=((count + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream)


def compile_noise(architecture: str):
    """``run`` for an architecture, callable with two tensors and their length."""
    blocks, out = (
        cute.runtime.make_fake_compact_tensor(Int64, (cute.sym_int32(), n), stride_order=(1, 0))
        for n in (INPUTS, OUTPUTS)
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(run, blocks, out, Int32(1), stream, options=f"--enable-tvm-ffi --gpu-arch {architecture}")
