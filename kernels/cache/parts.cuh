// A cached token of bytes: where its parts are.
#pragma once
#include "../format/layout.h"
#include "../format/scale.h"
#include "../params.h"
#include "tokens.cuh"

namespace fm {

// Names of 16-bit types.
struct Bf16 {};
struct Fp16 {};

template <class Byte>
struct Parts {
  Byte *codes, *scales, *rope;
};

template <class Byte, class Index>
__device__ __forceinline__ Parts<Byte> parts_of(const FmByteCache& cache, const Place& at) {
  constexpr Layout layout = Index::value;
  Byte* page = reinterpret_cast<Byte*>(cache.bytes) + at.page * cache.page_stride;
  return {page + layout.codes_at(at.offset, cache.token_stride),
          page + layout.scales_at(at.offset, cache.token_stride, cache.page_size),
          page + layout.rope_at(at.offset, cache.token_stride)};
}

}  // namespace fm
