// The kernels of caches and indices on the host, as a library: each entry runs a grid of one over host memory.
#include "language/language.h"
#include "machine/whole.h"

#include "cache.cu"
#include "dequantise.cu"
#include "indices.cu"
#include "quantise.cu"

#define EMULATED(kernel, Params)                                                               \
  extern "C" void emulated_##kernel(const void* params, unsigned blocks, unsigned threads) {   \
    emulation::Grid grid;                                                                      \
    grid.x = blocks, grid.threads = threads;                                                   \
    emulation::run([=] { kernel(*static_cast<const Params*>(params)); }, grid);                \
  }

EMULATED(fm_append, FmAppendParams)
EMULATED(fm_offsets, FmOffsetsParams)
EMULATED(fm_gather, FmGatherParams)
EMULATED(fm_quantise_bf16, FmQuantiseParams)
EMULATED(fm_quantise_fp16, FmQuantiseParams)
EMULATED(fm_quantise_f32, FmQuantiseParams)
EMULATED(fm_dequantise_bf16, FmDequantiseParams)
EMULATED(fm_dequantise_f32, FmDequantiseParams)
EMULATED(fm_to_physical, FmToPhysicalParams)
EMULATED(fm_window_offsets, FmWindowParams)
EMULATED(fm_window_ids, FmWindowParams)
EMULATED(fm_combine_topk_window, FmCombineIndicesParams)

// What the kernels take a layout for: width, coded, group, bytes of a token and of a row.
extern "C" void emulated_layout(int index, int64_t* facts) {
  const fm::Layout layout = fm::layout_of(index);
  facts[0] = layout.width;
  facts[1] = layout.coded;
  facts[2] = layout.group;
  facts[3] = layout.bytes();
  facts[4] = layout.row_bytes();
  for (int offset = 0; offset < 3; ++offset) {
    facts[5 + 3 * offset] = layout.codes_at(offset, 1000);
    facts[6 + 3 * offset] = layout.scales_at(offset, 1000, 7);
    facts[7 + 3 * offset] = layout.rope_at(offset, 1000);
  }
}

extern "C" uint8_t emulated_encode_e4m3(float value) { return fm::encode_e4m3(value); }
extern "C" float emulated_decode_e4m3(uint8_t code) { return fm::decode_e4m3(code); }
// Of a number and its scale.
extern "C" uint32_t emulated_encode_e2m1(const float* pair) { return fm::encode_e2m1(pair[0], fm::HalfWays(pair[1])); }
extern "C" float emulated_decode_e2m1(uint32_t code) { return fm::decode_e2m1(code); }
extern "C" float emulated_decode_ue8m0(uint8_t byte) { return fm::decode_ue8m0(byte); }
extern "C" float emulated_half_to_float(uint16_t bits) { return fm::half_to_float(bits); }
extern "C" uint16_t emulated_float_to_bf16(float value) { return fm::float_to_bf16(value); }
// The quotient of four numbers, by the ways of `Divisor`.
extern "C" void emulated_divide(float scale, float* x) {
  float four[4] = {x[0], x[1], x[2], x[3]};
  fm::Divisor(scale).divide(four);
  for (int i = 0; i < 4; ++i) x[i] = four[i];
}
