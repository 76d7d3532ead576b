#pragma once
#ifdef VAR_TRACE
__device__ unsigned long long g_trace[160 * 32];
struct Tr { long long last; bool on;
  __device__ __forceinline__ Tr(bool o) : on(o) { last = clock64(); }
  __device__ __forceinline__ void lap(int i) { const long long n = clock64(); if (on) atomicAdd(&g_trace[blockIdx.x * 32 + i], (unsigned long long)(n - last)); last = n; } };
#define TRACE_BEGIN(on) Tr tr(on);
#define LAP(i) tr.lap(i);
#else
#define TRACE_BEGIN(on)
#define LAP(i)
#endif
