// The quantised cache formats: what a token's bytes are and where they lie. Everything here is known to the
// compiler where the layout is.
#pragma once
#include "../params.h"
#include "codes.h"

namespace fm {

enum class Scales {
  kTensor,  // one number for the whole tensor, not in it
  kFloat,   // any float32
  kUe8m0,   // an exponent byte
  kE4m3,
};

// A row is `coded` numbers as codes, the scales of their groups, then the other numbers in bfloat16. In a
// split page the scales of all tokens come after all rows.
struct Layout {
  int width;  // numbers of a row
  int coded;
  int code_bits;
  Scales scales;
  int group;  // columns of one scale
  bool split;

  FM_BOTH_CONSTEXPR int code_bytes() const { return coded * code_bits / 8; }
  FM_BOTH_CONSTEXPR int scale_size() const { return scales == Scales::kTensor ? 0 : scales == Scales::kFloat ? 4 : 1; }
  // Of a token, padded to a multiple of 8.
  FM_BOTH_CONSTEXPR int scale_bytes() const { return (scale_size() * (coded / group) + 7) / 8 * 8; }
  FM_BOTH_CONSTEXPR int rope_bytes() const { return 2 * (width - coded); }
  FM_BOTH_CONSTEXPR int bytes() const { return code_bytes() + scale_bytes() + rope_bytes(); }
  FM_BOTH_CONSTEXPR int row_bytes() const { return split ? bytes() - scale_bytes() : bytes(); }

  // Bytes from the beginning of the page to the codes, scales and bfloat16 part of a token. Split pages have
  // dense rows: `token_stride` counts for the others.
  FM_BOTH_CONSTEXPR int64_t codes_at(int64_t offset, int64_t token_stride) const {
    return offset * (split ? row_bytes() : token_stride);
  }
  FM_BOTH_CONSTEXPR int64_t scales_at(int64_t offset, int64_t token_stride, int page_size) const {
    return split ? (int64_t)page_size * row_bytes() + offset * scale_bytes() : offset * token_stride + code_bytes();
  }
  FM_BOTH_CONSTEXPR int64_t rope_at(int64_t offset, int64_t token_stride) const {
    return codes_at(offset, token_stride) + code_bytes() + (split ? 0 : scale_bytes());
  }
};

FM_BOTH_CONSTEXPR Layout layout_of(int index) {
  switch (index) {
    case FM_LAYOUT_FP8_576: return {576, 576, 8, Scales::kTensor, 576, false};
    case FM_LAYOUT_FP8_512: return {512, 512, 8, Scales::kTensor, 512, false};
    case FM_LAYOUT_FP8_V32: return {576, 512, 8, Scales::kFloat, 128, false};
    case FM_LAYOUT_FP8_V4: return {512, 448, 8, Scales::kUe8m0, 64, true};
    case FM_LAYOUT_FP8_V41: return {512, 512, 8, Scales::kUe8m0, 32, false};
    case FM_LAYOUT_FP8_V41_SPLIT: return {512, 512, 8, Scales::kUe8m0, 32, true};
    default: return {512, 512, 4, Scales::kE4m3, 16, false};
  }
}

static_assert(layout_of(FM_LAYOUT_FP8_V32).bytes() == 656 && layout_of(FM_LAYOUT_FP8_V4).bytes() == 584, "bytes");
static_assert(layout_of(FM_LAYOUT_FP8_V41).bytes() == 528 && layout_of(FM_LAYOUT_FP4_V41).bytes() == 288, "bytes");
static_assert(layout_of(FM_LAYOUT_FP8_V4).row_bytes() == 576, "rows");

// A layout as a type, for code that is compiled for each.
template <int kLayout>
struct LayoutIndex {
  static constexpr Layout value = layout_of(kLayout);
};

// Calls `body` with the LayoutIndex of a number.
template <class Body>
FM_BOTH void with_layout(int index, Body&& body) {
  switch (index) {
    case FM_LAYOUT_FP8_576: return body(LayoutIndex<FM_LAYOUT_FP8_576>{});
    case FM_LAYOUT_FP8_512: return body(LayoutIndex<FM_LAYOUT_FP8_512>{});
    case FM_LAYOUT_FP8_V32: return body(LayoutIndex<FM_LAYOUT_FP8_V32>{});
    case FM_LAYOUT_FP8_V4: return body(LayoutIndex<FM_LAYOUT_FP8_V4>{});
    case FM_LAYOUT_FP8_V41: return body(LayoutIndex<FM_LAYOUT_FP8_V41>{});
    case FM_LAYOUT_FP8_V41_SPLIT: return body(LayoutIndex<FM_LAYOUT_FP8_V41_SPLIT>{});
    default: return body(LayoutIndex<FM_LAYOUT_FP4_V41>{});
  }
}

}  // namespace fm
