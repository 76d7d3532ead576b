// What is compiled for the host and for the device, or, where nvcc is not at work, for the host alone.
#pragma once

#if defined(__CUDACC__)
#define FM_BOTH __host__ __device__ __forceinline__
#define FM_BOTH_CONSTEXPR __host__ __device__ constexpr
#else
#define FM_BOTH inline
#define FM_BOTH_CONSTEXPR constexpr
#endif
