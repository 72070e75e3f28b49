// wgmma for the microbenchmarks: d (64 x n, float) += a (64 x 16) b (n x 16), both bf16, K-major in shared memory.
#pragma once

#include <cstdint>

__device__ __forceinline__ uint64_t descriptor(uint32_t address) {  // K-major, 128-byte swizzle
  return uint64_t((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// 64 floats of d as operands: those from number i on, and what they are called as the first 64 and the next ones
#define WGMMA_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_32(d, i) WGMMA_8(d, i), WGMMA_8(d, i + 8), WGMMA_8(d, i + 16), WGMMA_8(d, i + 24)
#define WGMMA_64(d, i) WGMMA_32(d, i), WGMMA_32(d, i + 32)
#define WGMMA_FIRST                                                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "           \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63"
#define WGMMA_NEXT                                                                                                           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "                     \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, "                 \
  "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"

__device__ __forceinline__ void multiply128(float* d, uint64_t a, uint64_t b) {
  asm volatile("{wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_FIRST "}, %64, %65, 1, 1, 1, 0, 0;}"
               : WGMMA_64(d, 0)
               : "l"(a), "l"(b));
}

__device__ __forceinline__ void multiply256(float* d, uint64_t a, uint64_t b) {
  asm volatile("{wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_FIRST ", " WGMMA_NEXT
               "}, %128, %129, 1, 1, 1, 0, 0;}"
               : WGMMA_64(d, 0), WGMMA_64(d, 64)
               : "l"(a), "l"(b));
}

#undef WGMMA_8
#undef WGMMA_32
#undef WGMMA_64
#undef WGMMA_FIRST
#undef WGMMA_NEXT
