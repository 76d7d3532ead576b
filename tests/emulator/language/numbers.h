// 16-bit numbers on the host.
#pragma once
#include <cstdint>
#include <cstring>

namespace emulation {

inline float bf16_to_float(uint16_t bits) {
  const uint32_t word = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
inline float half_to_float(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, sizeof value);
  return static_cast<float>(value);
}
inline float to_float(uint16_t bits, bool half) { return half ? half_to_float(bits) : bf16_to_float(bits); }

// Nearest even; NaN as the conversion instructions give it.
inline uint16_t to_half(float value) {
  if (value != value) return 0x7FFF;
  const _Float16 rounded = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return bits;
}
inline uint16_t to_bf16(float value) {
  if (value != value) return 0x7FFF;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

}  // namespace emulation
