// Cache operations: append new tokens, gather pages to contiguous rows. One warp per token, grid-stride, 16 bytes
// per lane and step. Row products are 64-bit; a slot, page or id outside the cache is absent: never written, read
// as zeros.
#include "cache/tokens.cuh"
#include "format/codes.h"

namespace fm {

// A row in two parts of 16-bit numbers, multiples of eight of them.
template <class T>
struct TwoParts {
  T *nope, *rope;

  __device__ __forceinline__ T* eight(int i) const { return i * 8 < FM_LATENT ? nope + i * 8 : rope + (i * 8 - FM_LATENT); }
};

// `elements` numbers of a row by a warp. All of a row is asked for before any of it is stored: the compiler cannot know that the two
// are elsewhere. (For hundreds of megabytes, as gather_kv moves them, that takes 4 % longer.)
__device__ __forceinline__ void copy_row(const TwoParts<uint16_t>& to, const TwoParts<const uint16_t>& from, int elements) {
  constexpr int kAtOnce = 3;
  for (int first = threadIdx.x % 32; first < elements / 8; first += 32 * kAtOnce) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (first + 32 * j < elements / 8) v[j] = *reinterpret_cast<const uint4*>(from.eight(first + 32 * j));
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (first + 32 * j < elements / 8) *reinterpret_cast<uint4*>(to.eight(first + 32 * j)) = v[j];
  }
}

__device__ __forceinline__ uint32_t half_pair_to_bf16(uint32_t v) {
  return floats_to_bf16(half_to_float((uint16_t)v), half_to_float((uint16_t)(v >> 16)));
}

// A cached row, or zeros when `from` is null, to bf16.
__device__ __forceinline__ void gather_row(uint16_t* to, const uint16_t* from, int elements, bool fp16) {
  for (int i = threadIdx.x % 32; i < elements / 8; i += 32) {
    uint4 v = from == nullptr ? make_uint4(0, 0, 0, 0) : reinterpret_cast<const uint4*>(from)[i];
    if (fp16)
      v = make_uint4(half_pair_to_bf16(v.x), half_pair_to_bf16(v.y), half_pair_to_bf16(v.z), half_pair_to_bf16(v.w));
    reinterpret_cast<uint4*>(to)[i] = v;
  }
}

__device__ __forceinline__ const uint16_t* row_at(const void* base, const int64_t (&stride)[2], int64_t page,
                                                  int64_t offset) {
  return reinterpret_cast<const uint16_t*>(base) + page * stride[0] + offset * stride[1];
}

}  // namespace fm

extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS) fm_append(const __grid_constant__ FmAppendParams p) {
  fm::follow_earlier_launches();
  for (int64_t t = fm::warp_index(); t < p.tokens; t += fm::warp_count()) {
    const auto [present, page, offset] = fm::place_of(p.slots[t * p.slots_stride], p.num_pages, p.page_size);
    if (!present) continue;
    const fm::TwoParts<uint16_t> to = {const_cast<uint16_t*>(fm::row_at(p.cache_nope, p.cache_nope_stride, page, offset)),
                                       const_cast<uint16_t*>(fm::row_at(p.cache_rope, p.cache_rope_stride, page, offset))};
    const fm::TwoParts<const uint16_t> from = {reinterpret_cast<const uint16_t*>(p.kv_c) + t * p.kv_c_stride,
                                               reinterpret_cast<const uint16_t*>(p.k_pe) + t * p.k_pe_stride};
    fm::copy_row(to, from, FM_LATENT + p.rope_dim);
  }
}

extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS) fm_gather(const __grid_constant__ FmGatherParams p) {
  fm::follow_earlier_launches();
  for (int64_t t = fm::warp_index(); t < p.tokens; t += fm::warp_count()) {
    const auto [present, page, offset] = fm::place_of(fm::source_id(p.source, t), p.num_pages, p.source.page_size);
    uint16_t* to = reinterpret_cast<uint16_t*>(p.out) + t * p.out_stride;
    fm::gather_row(to, present ? fm::row_at(p.cache_nope, p.cache_nope_stride, page, offset) : nullptr, FM_LATENT,
                   p.source_fp16);
    if (p.rope_dim > 0)
      fm::gather_row(to + FM_LATENT, present ? fm::row_at(p.cache_rope, p.cache_rope_stride, page, offset) : nullptr,
                     p.rope_dim, p.source_fp16);
  }
}

// One block: offsets[r] = sum of the clamped lengths before r.
extern "C" __global__ void __launch_bounds__(FM_OFFSETS_THREADS) fm_offsets(const __grid_constant__ FmOffsetsParams p) {
  fm::follow_earlier_launches();
  fm::running_sums(p.offsets, 1, p.batch, [&p](int r) -> int64_t {
    return min(max(p.seq_lens[r * p.seq_lens_stride], 0), p.max_seq_len);
  });
}
