// Which mainloop leaves the tensor cores idle least: the table wgmma_mainloops of results/hopper_profile.json.
//
//     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o /tmp/mainloops benchmarks/wgmma_mainloops.cu -lcuda
//     /tmp/mainloops [CYCLES]
//
// A persistent CTA per multiprocessor, nine tiles of 128 x 256 each of a matmul with 256 rows, weights from HBM. After a tile a
// warpgroup is busy for CYCLES (1500) with its accumulators, as the search is. No noise, no reduction.
//
//     cooperative            both warpgroups multiply a tile, half of the columns each, and are then busy together
//     cooperative, tokens    half of the tokens each, by instructions of 256 columns
//     ping-pong 128 x 128    in turn, a tile and half of the columns each; another CTA has the other half
//     ping-pong 64 x 256     in turn, half of a tile each, by instructions of 256 columns
//
// hidden, weights: what a cluster of two CTAs loads once for both. Cycles per 128 x 256 x 64 products, 1024 when undisturbed, and
// the launch's time: first back to back, at the power limit, then every launch after a pause, at full clocks.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "wgmma.cuh"

namespace {

constexpr int kProcessors = 132, kThreads = 384, kTiles = 9, kDepths[] = {32, 64};
enum Shared { kNothing, kHidden, kWeights };

__device__ __forceinline__ void wait(uint32_t barrier, int phase) {
  asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L;}" ::"r"(barrier), "r"(phase)
               : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_at(uint32_t barrier, int rank) {  // a CTA of the cluster
  asm volatile(
      "{.reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [a];}" ::"r"(barrier), "r"(rank)
      : "memory");
}

// 64 rows of 64 elements; to both CTAs of the cluster or to this one
template <bool Both>
__device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map, int k, int row, uint32_t barrier) {
  if (Both)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(to), "l"(map), "r"(k * 64), "r"(row), "r"(barrier), "h"((unsigned short)3) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(k * 64), "r"(row), "r"(barrier) : "memory");
}

// W: weight rows of a stage, H: rows of hidden states; out: cycles of each warpgroup
template <bool PingPong, int W, int H, Shared S, int Stages, bool Tokens>
__global__ void __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap hidden, int depth, int busy,
           long long* out) {
  constexpr int kCluster = S == kNothing ? 1 : 2, kBlock = 8192, kStage = (W + H) * 128, kParts = PingPong ? 2 : 1;
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ __align__(8) unsigned long long barriers[2 * Stages + 2];
  const uint32_t base = (__cvta_generic_to_shared(raw) + 1023) & ~1023u, full = __cvta_generic_to_shared(barriers);
  const uint32_t empty = full + 8 * Stages, turn = empty + 8 * Stages;
  const int thread = threadIdx.x, warpgroup = thread / 128 - 1, rank = blockIdx.x % kCluster;
  if (thread == 0) {
    for (int i = 0; i < Stages; i++) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(full + 8 * i));
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(empty + 8 * i), "r"((PingPong ? 4 : 8) * kCluster));
    }
    for (int i = 0; i < 2; i++) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(turn + 8 * i));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (kCluster > 1) asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  const long long start = clock64();
  if (warpgroup < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == 0) {
      // CTAs with the same weights and other columns are neighbours, or neighbouring clusters
      const int columns = 256 / H, group = S == kHidden ? blockIdx.x / 2 / columns * 2 + rank : blockIdx.x / columns;
      const int column = (S == kHidden ? blockIdx.x / 2 : blockIdx.x) % columns * H, tiles = kTiles * kParts;
      for (int s = 0, i = 0, phase = 1, k = 0, tile = 0; s < tiles * depth; s++) {
        wait(empty + 8 * i, phase);
        const uint32_t at = base + i * kStage, barrier = full + 8 * i;
        const int row = (group * tiles + tile) * W;
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(kStage) : "memory");
        for (int r = S == kWeights ? rank : 0; r < W / 64; r += S == kWeights ? 2 : 1)
          load<S == kWeights>(at + r * kBlock, &weights, k, row + r * 64, barrier);
        for (int r = S == kHidden ? rank : 0; r < H / 64; r += S == kHidden ? 2 : 1)
          load<S == kHidden>(at + W * 128 + r * kBlock, &hidden, k, column + r * 64, barrier);
        if (++i == Stages) i = 0, phase ^= 1;
        if (++k == depth) k = 0, tile++;
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float sums[128], sum = 0;
    const int first = PingPong ? warpgroup * depth : 0;
    int i = first % Stages, phase = first / Stages & 1, last = 0;
    auto release = [&](int stage) {
      if (thread % 32 != 0) return;
      if (kCluster == 1) arrive(empty + 8 * stage);
      else arrive_at(empty + 8 * stage, 0), arrive_at(empty + 8 * stage, 1);
    };
    for (int t = 0; t < kTiles; t++) {
#pragma unroll
      for (int j = 0; j < 128; j++) sums[j] = 0;
      if (PingPong) wait(turn + 8 * warpgroup, (t + 1 - warpgroup) & 1);
#pragma unroll 1
      for (int k = 0; k < depth; k++) {
        wait(full + 8 * i, phase);
        const uint32_t at = base + i * kStage;
        const uint64_t a = descriptor(at + (Tokens ? warpgroup * kBlock : 0));
        const uint64_t b = descriptor(at + W * 128 + (PingPong || Tokens ? 0 : warpgroup * 128 * 128));
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int n = 0; n < 4; n++) {
          if (W == 64 || Tokens) multiply256(sums, a + 2 * n, b + 2 * n);
          else multiply128(sums, a + 2 * n, b + 2 * n), multiply128(sums + 64, a + 512 + 2 * n, b + 2 * n);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (k) release(last);
        last = i;
        if (++i == Stages) i = 0, phase ^= 1;
      }
      if (PingPong && thread % 128 == 0) arrive(turn + 8 * (1 - warpgroup));
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      release(last);
      if (PingPong) i += depth, phase ^= i / Stages & 1, i %= Stages;  // the other one's stages
      const long long from = clock64();
#pragma unroll
      for (int j = 0; j < 128; j++) sum += sums[j];
      while (clock64() - from < busy) {
      }
    }
    const long long cycles = clock64() - start;
    if (thread % 128 == 0) out[blockIdx.x * 2 + warpgroup] = sum == 1.5f ? 0 : cycles;
  }
  __syncthreads();
  if (kCluster > 1) asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

CUtensorMap map(void* data, int depth, int rows) {
  CUtensorMap map;
  cuuint64_t sizes[] = {cuuint64_t(depth) * 64, cuuint64_t(rows)}, strides[] = {cuuint64_t(depth) * 128};
  cuuint32_t box[] = {64, 64}, steps[] = {1, 1};
  CUresult error = cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, sizes, strides, box, steps,
                                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) std::printf("tensor map: error %d\n", int(error)), std::exit(1);
  return map;
}

struct Variant {
  const char* name;
  const void* function;
  int cluster, shared;
};

template <bool PingPong, int W, int H, Shared S, int Stages, bool Tokens = false>
Variant variant(const char* name) {
  const void* function = reinterpret_cast<const void*>(kernel<PingPong, W, H, S, Stages, Tokens>);
  const int shared = Stages * (W + H) * 128 + 1024;
  cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  return {name, function, S == kNothing ? 1 : 2, shared};
}

}  // namespace

int main(int argc, char** argv) {
  int busy = argc > 1 ? std::atoi(argv[1]) : 1500;
  const Variant variants[] = {
      variant<false, 128, 256, kHidden, 4>("cooperative, hidden"),
      variant<false, 128, 256, kHidden, 4, true>("cooperative, tokens, hidden"),
      variant<false, 128, 256, kHidden, 3>("cooperative, three stages of four"),
      variant<false, 128, 256, kNothing, 4>("cooperative, nothing"),
      variant<true, 128, 128, kNothing, 6>("ping-pong 128 x 128, nothing"),
      variant<true, 128, 128, kHidden, 6>("ping-pong 128 x 128, hidden"),
      variant<true, 128, 128, kWeights, 6>("ping-pong 128 x 128, weights"),
      variant<true, 64, 256, kHidden, 5>("ping-pong 64 x 256, hidden"),
  };
  const size_t elements = size_t(kProcessors) * kTiles * 128 * 64 * 64;
  std::vector<unsigned short> random(elements);
  unsigned state = 1;
  for (auto& x : random) state = state * 1664525 + 1013904223, x = (state >> 16 & 0x80ff) | 0x3c00;  // of either sign, about 1/64
  void *weights, *hidden;
  long long* out;
  cudaMalloc(&weights, elements * 2), cudaMalloc(&hidden, 256 * 64 * 64 * 2), cudaMalloc(&out, kProcessors * 16);
  cudaMemcpy(weights, random.data(), elements * 2, cudaMemcpyHostToDevice);
  cudaMemcpy(hidden, random.data(), 256 * 64 * 64 * 2, cudaMemcpyHostToDevice);
  cudaEvent_t start, end;
  cudaEventCreate(&start), cudaEventCreate(&end);
  for (int depth : kDepths) {
    for (bool pause : {false, true}) {
      for (const Variant& v : variants) {
        CUtensorMap w = map(weights, depth, kProcessors * kTiles * 128), h = map(hidden, depth, 256);
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {unsigned(v.cluster), 1, 1};
        cudaLaunchConfig_t config = {};
        config.gridDim = kProcessors, config.blockDim = kThreads, config.dynamicSmemBytes = v.shared;
        config.attrs = &attribute, config.numAttrs = 1;
        void* arguments[] = {&w, &h, &depth, &busy, &out};
        std::vector<float> times, cycles;
        const int launches = pause ? 1 : 10;
        for (int round = 0; round < 60; round++) {
          if (pause) {
            std::this_thread::sleep_for(std::chrono::milliseconds(4));
            cudaLaunchKernelExC(&config, v.function, arguments);  // the first one after a pause is slower
          }
          cudaEventRecord(start);
          for (int i = 0; i < launches; i++) cudaLaunchKernelExC(&config, v.function, arguments);
          cudaEventRecord(end);
          cudaEventSynchronize(end);
          if (round < 20) continue;
          float ms;
          long long said[2 * kProcessors];
          cudaEventElapsedTime(&ms, start, end);
          cudaMemcpy(said, out, sizeof said, cudaMemcpyDeviceToHost);
          double sum = 0;
          for (long long c : said) sum += c;
          times.push_back(ms * 1e3 / launches), cycles.push_back(sum / (2 * kProcessors * kTiles * depth));
        }
        std::sort(times.begin(), times.end()), std::sort(cycles.begin(), cycles.end());
        std::printf("D = %d, %s  %-32s %6.0f cycles %7.1f us  %s\n", depth * 64, pause ? "after a pause" : "back to back ", v.name,
                    cycles[cycles.size() / 2], times[times.size() / 2], cudaGetErrorString(cudaGetLastError()));
      }
    }
  }
}
