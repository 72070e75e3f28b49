// What arithmetic beside wgmma costs it: the figures of docs/hopper_profile.md.
//
//     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o /tmp/neighbours benchmarks/wgmma_neighbours.cu
//     /tmp/neighbours
//
// A CTA per multiprocessor. Two warpgroups multiply 64 x 256 x 16 products from shared memory in steps of four, 1024 cycles
// when undisturbed; four more warps, one per scheduler, do something else until they are done:
//
//     instructions   bursts of one instruction between plain logic: cycles that a warp's instruction costs its scheduler
//     Philox         blocks of the noise kernel's words, paced as a vocabulary tile of 128 x 256 needs them: 16 blocks per 16
//                    steps, warp and scheduler at D = 4096, 32 at D = 2048; with random operands, so that the power limit tells

#include <cstdint>
#include <cstdio>

namespace {

constexpr int kNoiseThreads = 128, kThreads = 384, kSteps = 4000, kShared = 49152 + 2048;
constexpr unsigned kM0 = 0xD2511F53, kM1 = 0xCD9E8D57;
enum Instruction { kNone, kImad, kImadWide, kImadHi, kFfma, kDfma };

__device__ __forceinline__ void multiply(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "{wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63 "
      "}, %64, %65, 1, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b));
}

__device__ __forceinline__ uint64_t descriptor(uint32_t address) {  // K-major, 128-byte swizzle
  return uint64_t((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ unsigned logic(unsigned a, unsigned b, unsigned c) {
  asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(a) : "r"(b), "r"(c));
  return a;
}

template <Instruction I>
__device__ void burst(unsigned* x, float* f, double* e, unsigned c) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int j = i % 4;
    if (I == kImad) asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x[j]) : "r"(c), "r"(x[j + 4]));
    if (I == kImadHi) asm volatile("mul.hi.u32 %0, %0, %1;" : "+r"(x[j]) : "r"(c));
    if (I == kFfma) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(f[j]) : "f"(f[4]));
    if (I == kDfma) asm volatile("fma.rn.f64 %0, %0, %1, %1;" : "+d"(e[j]) : "d"(e[4]));
    if (I == kImadWide) {
      uint64_t product;
      asm volatile("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(x[j]), "r"(c));
      x[j] = unsigned(product), x[j + 4] ^= unsigned(product >> 32);
    }
  }
#pragma unroll
  for (int i = 0; i < 24; i++) x[4 + i % 4] = logic(x[4 + i % 4], c, c);
}

// 32 x 32 -> 64 bits by one wide multiplication, or by narrow ones as flashsampling/impl/cute/noise.py does
template <bool Wide, unsigned C>
__device__ __forceinline__ void product(unsigned a, unsigned& high, unsigned& low) {
  if (Wide) {
    uint64_t p = uint64_t(a) * C;
    high = p >> 32, low = unsigned(p);
    return;
  }
  constexpr bool negate = C == kM1;
  constexpr unsigned c = negate ? 0u - C : C, ch = c >> 16, cl = c & 0xffff, up = negate ? 0xffff : 0;
  unsigned ah = a >> 16, al = a & 0xffff;
  unsigned inner = ah * cl + (((al * cl + up) >> 16) + up);
  unsigned quotient = (al * ch + inner) >> 16;
  high = negate ? (ah * (0u - ch) + a) - quotient : ah * ch + quotient;
  low = a * C;
}

template <int AtOnce, bool Wide>
__device__ void philox(unsigned group, const unsigned* key, unsigned offset, volatile unsigned* out) {
  unsigned x[AtOnce][4];
#pragma unroll
  for (int i = 0; i < AtOnce; i++) x[i][0] = key[0] ^ (group + i), x[i][1] = key[1], x[i][2] = offset, x[i][3] = group + i;
#pragma unroll
  for (int r = 1; r < 10; r++) {
    unsigned h0[AtOnce], l0[AtOnce], h1[AtOnce], l1[AtOnce];
#pragma unroll
    for (int i = 0; i < AtOnce; i++) product<Wide, kM0>(x[i][0], h0[i], l0[i]), product<Wide, kM1>(x[i][2], h1[i], l1[i]);
#pragma unroll
    for (int i = 0; i < AtOnce; i++) {
      x[i][0] = h1[i] ^ x[i][1] ^ key[2 * r], x[i][2] = h0[i] ^ x[i][3] ^ key[2 * r + 1];
      x[i][1] = l1[i], x[i][3] = l0[i];
    }
  }
#pragma unroll
  for (int i = 0; i < AtOnce; i++) {  // four codes in a word
    unsigned s[4];
#pragma unroll
    for (int j = 0; j < 4; j++) s[j] = __float_as_uint(__uint2float_rz(x[i][j])) * 8 + 0x80000000u;
    out[i * kNoiseThreads] = __byte_perm(__byte_perm(s[0], s[1], 0x73), __byte_perm(s[2], s[3], 0x7300), 0x7610);
  }
}

// out: cycles, bursts or blocks of a warp. pace: blocks per 16 steps, 16 or 32; 0 for no Philox
template <Instruction I, int AtOnce, bool Wide>
__global__ void __launch_bounds__(kThreads, 1) kernel(unsigned long long* out, int pace, bool random) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ volatile int done, progress;
  __shared__ unsigned codes[kNoiseThreads * 8];
  for (unsigned i = threadIdx.x; i < 49152 / 4; i += kThreads) {
    unsigned h = i * 2654435761u;
    h = (h ^ h >> 15) * 2246822519u;
    reinterpret_cast<unsigned*>(shared)[i] = random ? (h & 0x80ff80ff) | 0x3f003f00 : 0;  // two bf16 of either sign about 1
  }
  if (threadIdx.x == 0) done = progress = 0;
  asm volatile("fence.proxy.async;");
  __syncthreads();
  if (threadIdx.x < kNoiseThreads) {
    unsigned count = 0, x[8], key[20];
    float f[5] = {};
    double e[5] = {};
    for (int i = 0; i < 8; i++) x[i] = threadIdx.x * 77 + i;
    for (int i = 0; i < 20; i++) key[i] = threadIdx.x * (i + 77) * 0x9E3779B9u;
    while (done == 0) {
      if (I != kNone) burst<I>(x, f, e, kM0 + threadIdx.x), count++;
      if (pace > 0) {
        while (done == 0 && int(count) > ((progress + 2) << (pace == 32))) __nanosleep(64);
        philox<AtOnce, Wide>(count, key, count >> 7, codes + threadIdx.x);
        count += AtOnce;
      }
      if (I == kNone && pace == 0) break;
    }
    if (threadIdx.x == 0 && blockIdx.x == 0) out[1] = count;
    for (int i = 0; i < 8; i++) count += x[i] + unsigned(f[i % 5]) + unsigned(e[i % 5]);
    if (count == 0x12345) out[2] = count;
    return;
  }
  float left[64] = {}, right[64] = {};
  uint32_t base = __cvta_generic_to_shared(shared), warpgroup = threadIdx.x / 128 - 1;
  uint64_t a = descriptor(base + warpgroup * 8192), b = descriptor(base + 16384);
  long long start = clock64();
#pragma unroll 1
  for (int step = 0; step < kSteps; step++) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) multiply(left, a + 2 * k, b + 2 * k), multiply(right, a + 2 * k, b + 1024 + 2 * k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (threadIdx.x == kThreads - 1) progress = step;
  }
  long long end = clock64();
  done = 1;
  float sum = 0;
  for (int i = 0; i < 64; i++) sum += left[i] + right[i];
  if (threadIdx.x == kThreads - 1 && blockIdx.x == 0) out[0] = end - start;
  if (sum == 1.5f) out[2] = 1;
}

template <Instruction I, int AtOnce, bool Wide>
void run(const char* name, int pace, bool random) {
  unsigned long long *out, said[2];
  cudaMalloc(&out, 64);
  cudaMemset(out, 0, 64);
  auto* function = kernel<I, AtOnce, Wide>;
  cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  cudaEvent_t start, end;
  cudaEventCreate(&start), cudaEventCreate(&end);
  for (int i = 0; i < 100; i++) {
    if (i == 60) cudaEventRecord(start);
    function<<<132, kThreads, kShared>>>(out, pace, random);
  }
  cudaEventRecord(end), cudaEventSynchronize(end);
  float ms;
  cudaEventElapsedTime(&ms, start, end);
  cudaMemcpy(said, out, sizeof said, cudaMemcpyDeviceToHost);
  double cycles = double(said[0]) / kSteps, count = double(said[1]) / kSteps;
  printf("%-24s %-7s %7.1f cycles a step, %.4f ms", name, random ? "random" : "zeros", cycles, ms / 40);
  if (I != kNone) printf(", %.2f cycles an instruction", (cycles - 1024) / (count * 8));
  if (pace > 0) printf(", %.1f blocks per 16 steps (%d asked for)", count * 16, pace);
  printf("  %s\n", cudaGetErrorString(cudaGetLastError()));
  cudaFree(out);
}

template <int AtOnce, bool Wide>
void run_philox(const char* name) {
  run<kNone, AtOnce, Wide>(name, 16, true);
  run<kNone, AtOnce, Wide>(name, 32, true);
}

}  // namespace

int main() {
  run<kNone, 1, false>("nothing", 0, false);
  run<kImad, 1, false>("IMAD", 0, false);
  run<kImadWide, 1, false>("IMAD.WIDE", 0, false);
  run<kImadHi, 1, false>("IMAD.HI", 0, false);
  run<kFfma, 1, false>("FFMA", 0, false);
  run<kDfma, 1, false>("DFMA", 0, false);
  run<kNone, 1, false>("nothing", 0, true);
  run_philox<1, false>("narrow, 1 block at once");
  run_philox<2, false>("narrow, 2 blocks");
  run_philox<4, false>("narrow, 4 blocks");
  run_philox<1, true>("wide, 1 block");
  run_philox<2, true>("wide, 2 blocks");
  run_philox<4, true>("wide, 4 blocks");
  run<kNone, 1, false>("nothing", 0, true);
}
