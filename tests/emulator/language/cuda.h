// The driver's header, as far as the kernels use it.
#pragma once
#include <cstdint>

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};
