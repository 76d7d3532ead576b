// bfloat16, as far as the kernels use it: as a type.
#pragma once
#include "language/language.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
