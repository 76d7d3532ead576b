// dequantize_kv, and gather_kv from caches of bytes. One warp per token, grid-stride; a lane takes eight
// neighbouring numbers at a time, so that every access of the warp is one stretch. Absent tokens are zeros.
#include "cache/parts.cuh"

namespace fm {

// Eight numbers to bfloat16 or float32. Stores stream through the L2: 4 % faster where they are more than fits.
template <class T>
struct Output;

template <>
struct Output<Bf16> {
  static constexpr int kSize = 2;
  static __device__ __forceinline__ void store(uint4* to, const float (&x)[8]) {
    store_bf16(to, make_uint4(floats_to_bf16(x[0], x[1]), floats_to_bf16(x[2], x[3]), floats_to_bf16(x[4], x[5]),
                              floats_to_bf16(x[6], x[7])));
  }
  static __device__ __forceinline__ void store_bf16(uint4* to, const uint4& v) { __stcs(to, v); }
};

template <>
struct Output<float> {
  static constexpr int kSize = 4;
  static __device__ __forceinline__ void store(uint4* to, const float (&x)[8]) {
    for (int i = 0; i < 2; ++i)
      __stcs(to + i, make_uint4(bits_of(x[4 * i]), bits_of(x[4 * i + 1]), bits_of(x[4 * i + 2]), bits_of(x[4 * i + 3])));
  }
  static __device__ __forceinline__ void store_bf16(uint4* to, const uint4& v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    float x[8];
    for (int i = 0; i < 8; ++i) x[i] = bf16_to_float((uint16_t)(words[i / 2] >> 16 * (i % 2)));
    store(to, x);
  }
};

// Eight columns on their way.
template <class Index>
struct Piece {
  static constexpr Layout kLayout = Index::value;
  uint32_t codes[kLayout.code_bits / 4];
  uint4 rope;
  float scale;

  static __device__ __forceinline__ bool coded(int column) { return column < kLayout.coded; }

  __device__ __forceinline__ void load(const Parts<const uint8_t>& from, int column, float tensor_scale) {
    if (!coded(column)) {
      rope = *reinterpret_cast<const uint4*>(from.rope + 2 * (column - kLayout.coded));
      return;
    }
    const uint8_t* at = from.codes + column * kLayout.code_bits / 8;
    if constexpr (kLayout.code_bits == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(at);
      codes[0] = v.x, codes[1] = v.y;
    } else {
      codes[0] = *reinterpret_cast<const uint32_t*>(at);
    }
    scale = read_scale<kLayout.scales>(from.scales, column / kLayout.group, tensor_scale);
  }
  template <class T>
  __device__ __forceinline__ void store(uint8_t* out, int column) const {
    uint4* to = reinterpret_cast<uint4*>(out + column * Output<T>::kSize);
    if (!coded(column)) {
      Output<T>::store_bf16(to, rope);
      return;
    }
    float x[8];
    decode_piece<kLayout.code_bits>(codes, scale, x);
    Output<T>::store(to, x);
  }
};

// A token. All of it is asked for before any of it is stored: the compiler cannot know that the two are elsewhere.
template <class T, class Index>
__device__ __forceinline__ void dequantise_token(uint8_t* out, const Parts<const uint8_t>& from, float tensor_scale) {
  constexpr int kWidth = Piece<Index>::kLayout.width, kPieces = (kWidth + 255) / 256;
  const int first = 8 * (threadIdx.x % 32);
  Piece<Index> piece[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    if (first + 256 * i < kWidth) piece[i].load(from, first + 256 * i, tensor_scale);
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    if (first + 256 * i < kWidth) piece[i].template store<T>(out, first + 256 * i);
}

template <class T>
__device__ __forceinline__ void write_zeros(uint8_t* out, int width) {
  for (int i = threadIdx.x % 32; i < width * Output<T>::kSize / 16; i += 32)
    reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
}

template <class T, class Index>
__device__ __forceinline__ void dequantise(const FmDequantiseParams& p) {
  constexpr Layout layout = Index::value;
  const FmByteCache& cache = p.cache;
  for (int64_t t = warp_index(); t < p.tokens; t += warp_count()) {
    const Place at = place_of(source_id(p.source, t), cache.num_pages, cache.page_size);
    const auto [page, offset] = divided(t, p.out_page);
    uint8_t* out = reinterpret_cast<uint8_t*>(p.out) +
                   (page * p.out_stride[0] + offset * p.out_stride[1]) * Output<T>::kSize;
    if (!at.present) {
      write_zeros<T>(out, layout.width);
      continue;
    }
    dequantise_token<T, Index>(out, parts_of<const uint8_t, Index>(cache, at), cache.tensor_scale);
  }
}

template <class T>
__device__ __forceinline__ void dequantise_any(const FmDequantiseParams& p) {
  with_layout(p.cache.layout, [&p](auto index) { dequantise<T, decltype(index)>(p); });
}

}  // namespace fm

// Eight blocks to an SM: as many warps as there can be are worth the few registers that are spilled.
extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS, 8) fm_dequantise_bf16(const __grid_constant__ FmDequantiseParams p) {
  fm::follow_earlier_launches();
  fm::dequantise_any<fm::Bf16>(p);
}
extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS, 8) fm_dequantise_f32(const __grid_constant__ FmDequantiseParams p) {
  fm::follow_earlier_launches();
  fm::dequantise_any<float>(p);
}
