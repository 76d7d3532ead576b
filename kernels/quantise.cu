// append_kv and quantize_kv into caches of bytes. One warp per token, grid-stride; a lane takes eight
// neighbouring numbers at a time, so that every access of the warp is one stretch. A slot outside the cache is
// skipped.
#include <type_traits>

#include "cache/parts.cuh"

namespace fm {

// Eight numbers as the source has them.
template <class T>
struct Source {
  static constexpr int kSize = 2;
  uint4 raw;

  __device__ __forceinline__ void load(const uint8_t* from) { raw = *reinterpret_cast<const uint4*>(from); }
  __device__ __forceinline__ void widen(float (&x)[8]) const {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    for (int i = 0; i < 8; ++i) {
      const uint16_t bits = (uint16_t)(words[i / 2] >> 16 * (i % 2));
      x[i] = std::is_same_v<T, Fp16> ? half_to_float(bits) : bf16_to_float(bits);
    }
  }
};

template <>
struct Source<float> {
  static constexpr int kSize = 4;
  uint4 raw[2];

  __device__ __forceinline__ void load(const uint8_t* from) {
    for (int i = 0; i < 2; ++i) raw[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  __device__ __forceinline__ void widen(float (&x)[8]) const {
    for (int i = 0; i < 2; ++i) {
      const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
      for (int j = 0; j < 4; ++j) x[4 * i + j] = float_of(words[j]);
    }
  }
};

// As bfloat16: bit for bit where the source is that, signalling NaN included.
template <class T>
__device__ __forceinline__ uint4 rope_piece(const Source<T>& source) {
  if constexpr (std::is_same_v<T, Bf16>) return source.raw;
  float x[8];
  source.widen(x);
  uint32_t words[4];
  for (int i = 0; i < 4; ++i) words[i] = float_to_bf16(x[2 * i]) | (uint32_t)float_to_bf16(x[2 * i + 1]) << 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The scale of the group that this lane's piece belongs to. Lanes of a group are neighbours.
template <Scales kScales, int kGroup>
__device__ __forceinline__ float scale_of(const float (&x)[8], float tensor_scale, bool round_scale) {
  if constexpr (kScales == Scales::kTensor) return tensor_scale;
  float amax = 0.0f;
  for (int i = 0; i < 8; ++i) amax = larger(amax, x[i]);
  for (int distance = 1; distance < kGroup / 8; distance *= 2)
    amax = larger(amax, __shfl_xor_sync(~0u, amax, distance));
  return group_scale<kScales>(amax, round_scale);
}

template <Scales kScales>
__device__ __forceinline__ void write_scale(uint8_t* scales, int group, float scale) {
  if constexpr (kScales == Scales::kFloat) reinterpret_cast<float*>(scales)[group] = scale;
  if constexpr (kScales == Scales::kUe8m0) scales[group] = encode_ue8m0(scale);
  if constexpr (kScales == Scales::kE4m3) scales[group] = encode_e4m3(scale);
}

template <int kBits>
__device__ __forceinline__ void write_codes(uint8_t* to, const float (&x)[8], float scale) {
  uint32_t words[kBits / 4];
  encode_piece<kBits>(x, scale, words);
  if constexpr (kBits == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint32_t*>(to) = words[0];
  }
}

// The lanes' pieces of the latent part: columns 256 * round + 8 * lane and on. All lanes of the warp.
template <class T, class Index>
__device__ __forceinline__ void write_latent(const Parts<uint8_t>& to, int column, const Source<T>& source,
                                             const FmQuantiseParams& p) {
  constexpr Layout layout = Index::value;
  float x[8];
  source.widen(x);
  const float scale = scale_of<layout.scales, layout.group>(x, p.cache.tensor_scale, p.round_scale);
  if (column < layout.coded) {
    write_codes<layout.code_bits>(to.codes + column * layout.code_bits / 8, x, scale);
    if (column % layout.group == 0) write_scale<layout.scales>(to.scales, column / layout.group, scale);
  } else {
    *reinterpret_cast<uint4*>(to.rope + 2 * (column - layout.coded)) = rope_piece(source);
    // The scales' padding.
    constexpr int kScalesUsed = layout.coded / layout.group * layout.scale_size();
    if (kScalesUsed < layout.scale_bytes() && column == layout.coded) to.scales[kScalesUsed] = 0;
  }
}

template <class T, class Index>
__device__ __forceinline__ void write_token(const Parts<uint8_t>& to, const uint8_t* kv_c, const uint8_t* k_pe,
                                            const FmQuantiseParams& p) {
  constexpr Layout layout = Index::value;
  const int lane = threadIdx.x % 32;
  const bool has_pe = layout.width == 576 && lane < 8;
  Source<T> latent[2], rotary;
#pragma unroll
  for (int round = 0; round < 2; ++round) latent[round].load(kv_c + (256 * round + 8 * lane) * Source<T>::kSize);
  if (has_pe) rotary.load(k_pe + 8 * lane * Source<T>::kSize);
#pragma unroll
  for (int round = 0; round < 2; ++round) write_latent<T, Index>(to, 256 * round + 8 * lane, latent[round], p);
  if (!has_pe) return;
  if constexpr (layout.coded == 576) {
    float x[8];
    rotary.widen(x);
    write_codes<8>(to.codes + 512 + 8 * lane, x, p.cache.tensor_scale);
  } else {
    *reinterpret_cast<uint4*>(to.rope + 16 * lane) = rope_piece(rotary);
  }
}

template <class T>
__device__ __forceinline__ const uint8_t* source_row(const void* base, const int64_t (&stride)[2], const Division& at) {
  return reinterpret_cast<const uint8_t*>(base) + (at.quotient * stride[0] + at.remainder * stride[1]) * Source<T>::kSize;
}

template <class T, class Index>
__device__ __forceinline__ void quantise(const FmQuantiseParams& p) {
  const FmByteCache& cache = p.cache;
  for (int64_t t = warp_index(); t < p.tokens; t += warp_count()) {
    const int64_t slot = p.slots == nullptr ? t : p.slots[t * p.slots_stride];
    const Place at = place_of(slot, cache.num_pages, cache.page_size);
    if (!at.present) continue;
    const Division from = divided(t, p.source_page);
    const auto to = parts_of<uint8_t, Index>(cache, at);
    write_token<T, Index>(to, source_row<T>(p.kv_c, p.kv_c_stride, from), source_row<T>(p.k_pe, p.k_pe_stride, from),
                          p);
  }
}

template <class T>
__device__ __forceinline__ void quantise_any(const FmQuantiseParams& p) {
  with_layout(p.cache.layout, [&p](auto index) { quantise<T, decltype(index)>(p); });
}

}  // namespace fm

extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS) fm_quantise_bf16(const __grid_constant__ FmQuantiseParams p) {
  fm::follow_earlier_launches();
  fm::quantise_any<fm::Bf16>(p);
}
extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS) fm_quantise_fp16(const __grid_constant__ FmQuantiseParams p) {
  fm::follow_earlier_launches();
  fm::quantise_any<fm::Fp16>(p);
}
extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS) fm_quantise_f32(const __grid_constant__ FmQuantiseParams p) {
  fm::follow_earlier_launches();
  fm::quantise_any<float>(p);
}
