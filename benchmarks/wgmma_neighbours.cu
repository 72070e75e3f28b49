// What arithmetic beside wgmma costs it: figures of results/hopper_profile.json (its tables say which).
//
//     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o /tmp/neighbours benchmarks/wgmma_neighbours.cu
//     /tmp/neighbours
//
// A CTA per multiprocessor. Two warpgroups multiply 64 x 256 x 16 products from shared memory in steps of four, 1024 cycles
// when undisturbed; four more warps, one per scheduler, do something else until they are done:
//
//     instructions   bursts of one instruction between plain logic: cycles that a warp's instruction costs its scheduler
//     rates          nothing but one instruction, in independent chains: cycles that it takes itself, per scheduler
//     Philox         blocks of the noise kernel's words, paced as a vocabulary tile of 128 x 256 needs them: 16 blocks per 16
//                    steps, warp and scheduler at D = 4096, 32 at D = 2048; with random operands, so that the power limit tells

#include <cstdint>
#include <cstdio>

#include "wgmma.cuh"

namespace {

constexpr int kNoiseThreads = 128, kThreads = 384, kSteps = 4000, kShared = 49152 + 2048;
constexpr unsigned kM0 = 0xD2511F53, kM1 = 0xCD9E8D57;
constexpr int kRateThreads = 512, kRateSteps = 1500;
enum Instruction { kNone, kImad, kImadWide, kImadHi, kFfma, kDfma };
enum Rate { kLop3, kMad, kShiftAdd, kMadShiftAdd, kMadFma, kPermute, kFma };

// the tile's matmul: cycles of so many steps of 64 in k. A thread that is given progress says how far it is
__device__ __forceinline__ long long multiply_steps(unsigned char* shared, int warpgroup, int steps, volatile int* progress) {
  float left[64] = {}, right[64] = {};
  uint32_t base = __cvta_generic_to_shared(shared);
  uint64_t a = descriptor(base + warpgroup * 8192), b = descriptor(base + 16384);
  long long start = clock64();
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) multiply128(left, a + 2 * k, b + 2 * k), multiply128(right, a + 2 * k, b + 1024 + 2 * k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (progress != nullptr) *progress = step;
  }
  long long cycles = clock64() - start;
  float sum = 0;
  for (int i = 0; i < 64; i++) sum += left[i] + right[i];
  return sum == 1.5f ? 0 : cycles;
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

template <unsigned C>
__device__ __forceinline__ unsigned mad(unsigned a, unsigned c) {
  unsigned d;
  asm volatile("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "n"(C), "r"(c));
  return d;
}

__device__ __forceinline__ unsigned add_upper(unsigned a, unsigned b) {
  unsigned d;
  asm volatile("{.reg .u32 t; shr.u32 t, %1, 16; add.u32 %0, t, %2;}" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// 32 x 32 -> 64 bits by one wide multiplication, or by narrow ones as flashsampling/kernels/hopper/noise.py does
template <bool Wide, unsigned C>
__device__ __forceinline__ void product(unsigned a, unsigned& high, unsigned& low) {
  if (Wide) {
    uint64_t p = uint64_t(a) * C;
    high = p >> 32, low = unsigned(p);
    return;
  }
  constexpr bool negate = C == kM1;
  constexpr unsigned c = negate ? 0u - C : C, ch = c >> 16, cl = c & 0xffff, sign = negate ? ~0u : 1, more = negate ? 4 : 0;
  unsigned ah = add_upper(a, more), not_low = mad<0u - C>(a, ~0u);
  unsigned m = mad<sign * (cl - (ch << 16))>(ah, mad<sign * ch>(a, negate ? more * cl - 0xffff : 0));
  high = add_upper(add_upper(not_low, m), mad<sign * ch>(ah, negate ? a : 0));
  low = ~not_low;
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
  long long cycles = multiply_steps(shared, threadIdx.x / 128 - 1, kSteps, threadIdx.x == kThreads - 1 ? &progress : nullptr);
  done = 1;
  if (threadIdx.x == kThreads - 1 && blockIdx.x == 0) out[0] = cycles;
}

template <Rate R>
__device__ __forceinline__ void one(unsigned& x, unsigned b, unsigned c) {
  if (R == kLop3) asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(x) : "r"(b), "r"(c));
  if (R == kMad) x = mad<0x2545f491>(x, b);
  if (R == kShiftAdd) x = add_upper(x, b);
  if (R == kMadShiftAdd) x = add_upper(mad<0x2545f491>(x, b), b);
  if (R == kMadFma) one<kMad>(x, b, c), one<kFma>(x, b, c);
  if (R == kPermute) asm volatile("prmt.b32 %0, %0, %1, 0x7632;" : "+r"(x) : "r"(b));
  if (R == kFma) asm volatile("{.reg .f32 f; mov.b32 f, %0; fma.rn.f32 f, f, f, f; mov.b32 %0, f;}" : "+r"(x));
}

// out: instructions of a warp, its cycles, cycles of the steps. warps: per scheduler, 1 or 2
template <Rate R, int Chains>
__global__ void __launch_bounds__(kRateThreads, 1) rate(unsigned long long* out, int warps, bool beside) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ volatile int done;
  for (unsigned i = threadIdx.x; i < 49152 / 4; i += kRateThreads) reinterpret_cast<unsigned*>(shared)[i] = 0;
  if (threadIdx.x == 0) done = 0;
  asm volatile("fence.proxy.async;");
  __syncthreads();
  if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x >= 128 * warps) return;
    unsigned long long count = 0;
    unsigned x[Chains], sum = 0;
    for (int i = 0; i < Chains; i++) x[i] = threadIdx.x * 77 + i;
    long long start = clock64();
    do {
#pragma unroll
      for (int i = 0; i < 128; i++) one<R>(x[i % Chains], threadIdx.x * 77, threadIdx.x * 99 + 1);
      count += 128;
    } while (beside ? done == 0 : count < 200000);
    long long end = clock64();
    for (int i = 0; i < Chains; i++) sum += x[i];
    if (sum == 0x12345) out[3] = sum;
    if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = count, out[1] = end - start;
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
  if (!beside) return;
  long long cycles = multiply_steps(shared, threadIdx.x / 128 - 2, kRateSteps, nullptr);
  done = 1;
  if (threadIdx.x == 256 && blockIdx.x == 0) out[2] = cycles;
}

template <Rate R, int Chains>
void run_rate(int warps, bool beside) {
  unsigned long long *out, said[3];
  cudaMalloc(&out, 64);
  cudaMemset(out, 0, 64);
  cudaFuncSetAttribute(rate<R, Chains>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  for (int i = 0; i < 3; i++) rate<R, Chains><<<132, kRateThreads, kShared>>>(out, warps, beside);
  cudaMemcpy(said, out, sizeof said, cudaMemcpyDeviceToHost);
  printf("  %5.2f", double(said[1]) / said[0] / warps);
  if (beside) printf(" (%4.0f)", double(said[2]) / kRateSteps);
  cudaFree(out);
}

template <Rate R>
void run_rates(const char* name) {
  printf("%-24s", name);
  run_rate<R, 8>(1, false), run_rate<R, 8>(2, false);
  run_rate<R, 1>(1, true), run_rate<R, 8>(1, true), run_rate<R, 8>(2, true);
  printf("  %s\n", cudaGetErrorString(cudaGetLastError()));
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
  printf("cycles an instruction takes: 8 chains, 1 and 2 warps; beside wgmma (cycles a step) 1, 8 chains, 2 warps of 8\n");
  run_rates<kLop3>("LOP3");
  run_rates<kMad>("IMAD");
  run_rates<kShiftAdd>("LEA.HI");
  run_rates<kMadShiftAdd>("IMAD, then LEA.HI");
  run_rates<kMadFma>("IMAD, then FFMA");
  run_rates<kPermute>("PRMT");
  run_rates<kFma>("FFMA");
  run<kNone, 1, false>("nothing", 0, true);
  run_philox<1, false>("narrow, 1 block at once");
  run_philox<2, false>("narrow, 2 blocks");
  run_philox<4, false>("narrow, 4 blocks");
  run_philox<1, true>("wide, 1 block");
  run_philox<2, true>("wide, 2 blocks");
  run_philox<4, true>("wide, 4 blocks");
  run<kNone, 1, false>("nothing", 0, true);
}
