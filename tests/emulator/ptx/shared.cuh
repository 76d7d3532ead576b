// As kernels/ptx/shared.cuh.
#pragma once
#include "language/language.h"

namespace fm {

inline uint8_t* launch_shared() { return emulation::cta().shared; }

inline float2 load_shared_2(uint32_t from) { return emulation::load<float2>(from); }
inline uint32_t load_shared_word(uint32_t from) { return emulation::load<uint32_t>(from); }
inline uint2 load_shared_8(uint32_t from) { return emulation::load<uint2>(from); }
inline uint32_t load_shared_byte(uint32_t from) { return emulation::load<uint8_t>(from); }
inline uint4 load_shared_4(uint32_t from) { return emulation::load<uint4>(from); }
inline uint16_t load_shared_half(uint32_t from) { return emulation::load<uint16_t>(from); }
inline void store_shared(uint32_t to, uint2 v) { emulation::store(to, v); }
inline void store_shared(uint32_t to, uint4 v) { emulation::store(to, v); }
inline void store_shared(uint32_t to, float v) { emulation::store(to, v); }
inline void store_shared_if(bool store, uint32_t to, uint4 v) {
  if (store) emulation::store(to, v);
}
inline void store_shared_if(bool store, uint32_t to, float v) {
  if (store) emulation::store(to, v);
}
template <int Bytes>
void store_shared_bytes(uint32_t to, uint32_t v) {
  static_assert(Bytes == 1 || Bytes == 2);
  if (Bytes == 1)
    emulation::store(to, uint8_t(v));
  else
    emulation::store(to, uint16_t(v));
}

// Four 8 x 8 matrices and the lanes that hold them: number e of word m of lane l is element (l / 4, 2 (l % 4) + e) of matrix m, or
// of its transpose. Row r of matrix m is at the address that lane 8 m + r gives.
struct Matrices {
  uint32_t at;
  uint32_t words[4];
};
template <bool Transposed, class Visit>
void visit_matrices(Matrices** lanes, Visit visit) {
  for (int m = 0; m < 4; ++m)
    for (int lane = 0; lane < 32; ++lane)
      for (int e = 0; e < 2; ++e) {
        const int i = lane / 4, j = lane % 4 * 2 + e;
        const uint32_t row = lanes[8 * m + (Transposed ? j : i)]->at;
        if (row % 16 != 0) emulation::fail("a matrix's row is not aligned");
        visit(lanes[lane]->words[m], 16 * e, row + 2 * (Transposed ? i : j));
      }
}
template <bool Transposed>
void load_matrices(uint32_t (&v)[4], uint32_t from) {
  Matrices own{from, {}};
  emulation::together("ldmatrix", own, [](Matrices** lanes) {
    visit_matrices<Transposed>(lanes, [](uint32_t& word, int shift, uint32_t at) {
      word |= uint32_t(emulation::load<uint16_t>(at)) << shift;
    });
  });
  std::memcpy(v, own.words, sizeof v);
}
template <bool Transposed>
void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  Matrices own{to, {a, b, c, d}};
  emulation::together("stmatrix", own, [](Matrices** lanes) {
    visit_matrices<Transposed>(lanes, [](uint32_t& word, int shift, uint32_t at) { emulation::store(at, uint16_t(word >> shift)); });
  });
}

}  // namespace fm
