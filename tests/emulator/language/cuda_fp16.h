// Half precision, as far as the kernels use it.
#pragma once
#include "language/language.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half v) { return emulation::half_to_float(v.bits); }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline __half2 __float2half2_rn(float v) { return {{emulation::to_half(v)}, {emulation::to_half(v)}}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
// The one that is a number.
inline __half __hmax(__half a, __half b) { return {emulation::to_half(std::fmax(__half2float(a), __half2float(b)))}; }
inline __half2 __hmax2(__half2 a, __half2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
