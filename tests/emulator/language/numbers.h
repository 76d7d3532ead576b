// 16-bit numbers on the host.
#pragma once
#include <cstdint>
#include <cstring>

namespace emulation {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float bf16_to_float(uint16_t bits) { return bits_as<float>(uint32_t(bits) << 16); }
inline float half_to_float(uint16_t bits) { return static_cast<float>(bits_as<_Float16>(bits)); }
inline float to_float(uint16_t bits, bool half) { return half ? half_to_float(bits) : bf16_to_float(bits); }

// Nearest even; NaN as the conversion instructions give it.
inline uint16_t to_half(float value) {
  if (value != value) return 0x7FFF;
  return bits_as<uint16_t>(static_cast<_Float16>(value));
}
inline uint16_t to_bf16(float value) {
  if (value != value) return 0x7FFF;
  const uint32_t bits = bits_as<uint32_t>(value);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

}  // namespace emulation
