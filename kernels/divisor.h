// Division by a number that the host knows: two instructions instead of thirty.
#pragma once
#include <stdint.h>

#include "params.h"

namespace fm {

// x by `by`, rounded down, for x >= 0.
__device__ __forceinline__ int quotient(int x, const FmDivisor& by) {
  return (int)((uint64_t)(uint32_t)x * by.multiplier >> by.shift);
}

}  // namespace fm
