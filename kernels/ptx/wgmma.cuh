// wgmma: warpgroup matrix multiply-accumulate, float32 accumulators, 16-bit inputs (PTX ISA, "Asynchronous
// Warpgroup Level Matrix Instructions"). Shapes are named by N; A comes from shared memory (SS) or registers (RS).
//
// Accumulator of m64nN, thread `lane` of warp `w`: d[4g + 2r + e] is row 16w + 8r + lane / 4, column
// 8g + 2 (lane % 4) + e. The A registers of k16: a[0], a[1] hold columns 2 (lane % 4) + {0, 1} of rows lane / 4
// and lane / 4 + 8, a[2], a[3] the same rows eight columns on.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace fm {

// A shared-memory matrix descriptor for the 128-byte swizzle. K-major operands: `stride` is the distance in
// bytes between groups of eight rows, `leading` is ignored. MN-major operands: `stride` is the distance between
// groups of eight k, `leading` between blocks of 64 along M or N.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
         1ull << 62;
}

// Orders register accesses before the first wgmma that uses them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// clang-format off
#define FM_ACC_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FM_ACC_64 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FM_ACC_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FM_ACC_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FM_OUT_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define FM_OUT_16 FM_OUT_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
  "+f"(d[14]), "+f"(d[15])
#define FM_OUT_32 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FM_OUT_64 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
// clang-format on

#define FM_DEFINE_WGMMA(TYPE, PTX)                                                                              \
  /* D[64, 64] (+)= A[64, 16] B[16, 64], both in shared memory, K-major. */                                     \
  __device__ __forceinline__ void wgmma_ss_n64(TYPE, float (&d)[32], uint64_t a, uint64_t b, bool accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." PTX "." PTX " {" FM_ACC_32                       \
                 "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                               \
                 : FM_OUT_32                                                                                    \
                 : "l"(a), "l"(b), "r"((int)accumulate));                                                       \
  }                                                                                                             \
  /* D[64, 128] += A[64, 16] B[16, 128], A K-major, B N-major, both in shared memory. */                        \
  __device__ __forceinline__ void wgmma_ss_n128_bn(TYPE, float (&d)[64], uint64_t a, uint64_t b) {              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." PTX "." PTX " {" FM_ACC_64                      \
                 "}, %64, %65, 1, 1, 1, 0, 1;"                                                                  \
                 : FM_OUT_64                                                                                    \
                 : "l"(a), "l"(b));                                                                             \
  }

/* D[64, N] (+)= A[64, 16] B[16, N], both in shared memory, B K-major; A K-major, or M-major with TransA 1. */
#define FM_DEFINE_WGMMA_FEW(TYPE, PTX, N, D, ACC, OUT, A, B, P, T)                                               \
  template <int TransA>                                                                                         \
  __device__ __forceinline__ void wgmma_ss_few(TYPE, float (&d)[D], uint64_t a, uint64_t b, bool accumulate) {  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." PTX "." PTX " {" ACC                          \
                 "}, " A ", " B ", p, 1, 1, " T ", 0;\n}"                                                      \
                 : OUT                                                                                          \
                 : "l"(a), "l"(b), "r"((int)accumulate), "n"(TransA));                                          \
  }

/* D[64, N] (+)= A[64, 16] B[16, N], A in registers, B in shared memory, K-major. */
#define FM_DEFINE_WGMMA_RS(TYPE, PTX, N, D, ACC, OUT, A0, A1, A2, A3, B, P)                                      \
  __device__ __forceinline__ void wgmma_rs(TYPE, float (&d)[D], const uint32_t (&a)[4], uint64_t b,             \
                                           bool accumulate) {                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." PTX "." PTX " {" ACC                          \
                 "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1, 0;\n}"                                   \
                 : OUT                                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));                   \
  }

FM_DEFINE_WGMMA(__nv_bfloat16, "bf16")
FM_DEFINE_WGMMA(__half, "f16")
FM_DEFINE_WGMMA_FEW(__nv_bfloat16, "bf16", "16", 8, FM_ACC_8, FM_OUT_8, "%8", "%9", "%10", "%11")
FM_DEFINE_WGMMA_FEW(__nv_bfloat16, "bf16", "32", 16, FM_ACC_16, FM_OUT_16, "%16", "%17", "%18", "%19")
FM_DEFINE_WGMMA_FEW(__half, "f16", "16", 8, FM_ACC_8, FM_OUT_8, "%8", "%9", "%10", "%11")
FM_DEFINE_WGMMA_FEW(__half, "f16", "32", 16, FM_ACC_16, FM_OUT_16, "%16", "%17", "%18", "%19")
FM_DEFINE_WGMMA_RS(__nv_bfloat16, "bf16", "16", 8, FM_ACC_8, FM_OUT_8, "%8", "%9", "%10", "%11", "%12", "%13")
FM_DEFINE_WGMMA_RS(__nv_bfloat16, "bf16", "32", 16, FM_ACC_16, FM_OUT_16, "%16", "%17", "%18", "%19", "%20", "%21")
FM_DEFINE_WGMMA_RS(__nv_bfloat16, "bf16", "64", 32, FM_ACC_32, FM_OUT_32, "%32", "%33", "%34", "%35", "%36", "%37")
FM_DEFINE_WGMMA_RS(__half, "f16", "16", 8, FM_ACC_8, FM_OUT_8, "%8", "%9", "%10", "%11", "%12", "%13")
FM_DEFINE_WGMMA_RS(__half, "f16", "32", 16, FM_ACC_16, FM_OUT_16, "%16", "%17", "%18", "%19", "%20", "%21")
FM_DEFINE_WGMMA_RS(__half, "f16", "64", 32, FM_ACC_32, FM_OUT_32, "%32", "%33", "%34", "%35", "%36", "%37")

}  // namespace fm
