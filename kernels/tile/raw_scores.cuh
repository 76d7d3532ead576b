// Scores of raw rows: S^T = K Q^T (raw_products.cuh) and the softmax; a thread holds two tokens of a quarter of the rows, as with
// few rows of other caches (few_scores.cuh).
//
// The softmax keeps a reference per row, the same in all threads: it moves when a weight, counted in its token's unit, would
// leave the range of halves. P is 2^(s + log2 unit - reference); sums add weights without the units, which is P over the unit.
// A unit is 2^-74 or more (RowUnit) and P below 2^15, so that these stay below 2^90 and sums are in range.
#pragma once
#include <cuda_fp16.h>
#include <stddef.h>
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "few_scores.cuh"
#include "masking.cuh"
#include "numbers.cuh"
#include "raw_map.cuh"
#include "shared_map.cuh"
#include "weight_factors.cuh"
#include "work.cuh"

namespace fm {

// Base 2: the largest P of a tile when the reference moves. What is small beside it has 26 binades; where rows count in one nothing
// is small by its unit, and float32 rounds the exponents of small weights less.
template <class Map>
constexpr float kTopWeight = Map::kBare ? 3.f : 12.f;
constexpr float kMostTopWeight = 15.f;  // more than that makes it move

// Codes and scales of V of all tokens but the `clean` ones lose their NaNs. By the whole warpgroup when K has been read.
template <class Map>
__device__ __forceinline__ void clean_raw_values(const FmDecodeParams& p, uint32_t smem, int place, bool plain, uint64_t clean) {
  const int codes = plain ? Map::kPlain : kLatent;
#pragma unroll 1
  for (int token = warpgroup_thread() / 32; token < kTileTokens; token += 4) {
    if (clean >> token & 1) continue;
    const int lane = warpgroup_thread() % 32;
    const uint32_t at = RowLayout<Map>{p.box_shift}.piece(smem, place, token, lane * 16);
    const auto without_nan = [](uint32_t v) {
      const uint32_t nan = ((v & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u) >> 7;
      return v & ~(nan * 0xFF);
    };
    if (lane * 16 < codes) {
      const uint4 v = load_shared_4(at);
      store_shared(at, make_uint4(without_nan(v.x), without_nan(v.y), without_nan(v.z), without_nan(v.w)));
    } else if (plain && lane * 16 < Map::kPlain + 128) {
      const uint4 v = load_shared_4(at);
      store_shared(at, make_uint4(finite_or_zero(__half(), v.x), finite_or_zero(__half(), v.y),
                                  finite_or_zero(__half(), v.z), finite_or_zero(__half(), v.w)));
    }
    if (!Map::kBare && lane < Map::kGroups) {
      const uint32_t to = Map::value_scale(Map::scales(smem, place), lane, token);
      store_shared_bytes<2>(to, finite_or_zero(__half(), load_shared_half(to)));
    }
  }
}

// Masks S^T of tile `i` of an item: absent tokens, those past the end, too; and where rows see different ones, from tile `first_shared` of
// the item on, what some do not. Such tokens' V is cleaned, as weights are zero, and that of absent bare rows, where anything may lie (other
// absent rows are zeros): other warps see that after a barrier. `own`: finds which warpgroup this is.
template <class Map, class Control, class Own>
__device__ __forceinline__ void mask_raw_tile(float (&s)[Map::kRows / 2], const FmDecodeParams& p, int item, int i, int first_shared,
                                              uint32_t smem, const Control& control, int at, Own own) {
  uint64_t clean = control.present[at];
  if (i < first_shared) {
    mask_absent<Map>(s, clean);
    if (!Map::kBare) return;
  } else {
    const RowBlock r = load_row_block<Map>(p, item);
    const int start = (r.tile_begin + i) * kTileTokens;
    mask_unseen<Map>(p, r, s, r.tile_begin + i, clean);
    clean = existing(existing(clean, r.seq_len - start), r.visible(p, r.row_begin) - start);
  }
  named_barrier_of_warpgroup(kOwnBarrier + own());  // every warp has read K
  const bool plain = Map::kMayBePlain && control.format[at] == FM_KV_FP8_V4;
  clean_raw_values<Map>(p, smem, at, plain, clean);
}

// Leaves P of the tile in place `at`, at `to`; where it has the scales of V, once for each block of 128 columns. `units`: of this thread's
// tokens. When scales are there, and cleaned.
template <class Map>
__device__ __forceinline__ void store_raw_weights(const uint32_t (&weights)[Map::kRows / 4], uint32_t to, uint32_t smem, int at,
                                                  const OwnUnits& units) {
  if constexpr (!Map::kScaledWeights) {
    store_few_weights<Map::kRows>([&](int i) { return weights[i]; }, to);
  } else {
    // Pairs of weights are in turn of this thread's first token and of its other one.
    const uint32_t from = Map::value_scale(Map::scales(smem, at), 0, FewLayout<Map::kRows>::token(0));
    const uint4 all[2] = {load_shared_4(from), load_shared_4(from + 8 * Map::kGroups * 4)};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const auto scaled = [&](int i) {
        const uint4& v = all[i % 2];
        const auto twice = [&](uint32_t pair) { return __byte_perm(pair, 0, block % 2 ? 0x3232 : 0x1010); };
        const uint32_t weight = multiply_halves(weights[i], twice(block < 2 ? v.x : v.y));
        return units.needed ? multiply_halves(weight, twice(block < 2 ? v.z : v.w)) : weight;
      };
      store_few_weights<Map::kRows>(scaled, to + block * Map::kQueryChunkBytes);
    }
  }
}

// The softmax of a thread's rows; what rows have in common is in the control block.
template <class Map>
struct RawState {
  static constexpr int kColumns = FewLayout<Map::kRows>::kColumns;
  using Layout = FewLayout<Map::kRows>;
  // What lanes combine for all rows of a warp's tokens is that of rows 2 lane and 2 lane + 1 in the end; with few rows of this
  // thread's rows, in four lanes.
  static constexpr bool kSpread = kColumns == 16;
  static constexpr int kKept = kSpread ? 2 : kColumns;
  // Sums: of those two rows, as far as registers allow of half of this thread's columns, which takes fewer exchanges; with few rows of
  // its own tokens and columns.
  static constexpr bool kHalves = kSpread && Map::kBare;
  static constexpr int kSummed = kHalves ? kColumns / 2 : kKept;
  float sum[kSummed] = {};

  static __device__ __forceinline__ int row(int i) {
    const int lane = warpgroup_thread() % 32;
    return kSpread ? 2 * lane + i : Layout::row(i, lane);
  }

  static __device__ __forceinline__ int summed_row(int i) {
    const int lane = warpgroup_thread() % 32;
    return kHalves ? Layout::row(i + lane / 16 * 8, lane) : row(i);
  }

  // Turns scores into P, which has its tokens' units: `weights` are pairs of halves; `added` is for add(). Moves references
  // where some would not fit, and tries again; `first`: they have to. By the whole warpgroup; after it every warp has read K.
  template <class Control>
  __device__ __forceinline__ void weigh(uint32_t (&weights)[Map::kRows / 4], float (&added)[kColumns],
                                        const float (&s)[Map::kRows / 2], const OwnUnits& units, Control& control, int place,
                                        int barrier, bool first) {
    if (warpgroup_thread() == 0) control.rescale[place][0] = false;
    bool move = first;
#pragma unroll 1
    for (bool moved = first;; moved = true) {
      if (move) move_references(s, units, control, place, barrier, first);
      const bool over = weigh_once(weights, added, s, units, control);
      if (moved) break;
      move = named_barrier_any_of_warpgroup(barrier, over);
      if (!move) break;
    }
  }
  // Combines what lanes have found for the same rows, a number of each of a thread's columns: the first kKept become those of
  // row(0) and so on.
  template <class Combine>
  static __device__ __forceinline__ void combine_lanes(float (&v)[kColumns], Combine combine) {
    if constexpr (kSpread) {
      spread<16, 8>(v, combine), spread<8, 4>(v, combine), spread<4, 2>(v, combine);
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int d = 4; d < 32; d *= 2) v[c] = combine(v[c], __shfl_xor_sync(~0u, v[c], d));
    }
  }
  // Whether this lane is to leave what it has of row(0) and so on then.
  static __device__ __forceinline__ bool leaves() { return kSpread || warpgroup_thread() % 32 < 4; }

  // Adds this thread's weights of a tile.
  __device__ __forceinline__ void add(float (&added)[kColumns]) {
    const auto add = [](float a, float b) { return a + b; };
    if constexpr (kHalves)
      spread<16, 8>(added, add);
    else if constexpr (kSpread)
      combine_lanes(added, add);
#pragma unroll
    for (int i = 0; i < kSummed; ++i) sum[i] += added[i];
  }

  // When references have moved for the other warpgroup's tile.
  template <class Control>
  __device__ __forceinline__ void rescale(const Control& control, int place) {
#pragma unroll
    for (int i = 0; i < kSummed; ++i) sum[i] *= control.factor[place][summed_row(i)];
  }

  // What each warp finds for its rows.
  template <class OfWarps>
  __device__ __forceinline__ void leave_sums(OfWarps& of_warps) {
    const auto add = [](float a, float b) { return a + b; };
    if constexpr (kHalves)
      spread<8, 4>(sum, add), spread<4, 2>(sum, add);
    else if constexpr (!kSpread)
      combine_lanes(sum, add);
#pragma unroll
    for (int i = 0; i < kKept; ++i)
      if (leaves()) of_warps[warpgroup_thread() / 32][row(i)] = sum[i];
  }
  template <class OfWarps, class Combine>
  static __device__ __forceinline__ float found(const OfWarps& of_warps, int row, Combine combine) {
    return combine(combine(of_warps[0][row], of_warps[1][row]), combine(of_warps[2][row], of_warps[3][row]));
  }

  // Returns whether some weight is larger than P may have it. `added`: the weights of this thread's tokens.
  template <class Control>
  __device__ __forceinline__ bool weigh_once(uint32_t (&weights)[Map::kRows / 4], float (&added)[kColumns],
                                             const float (&s)[Map::kRows / 2], const OwnUnits& units, const Control& control) const {
    if constexpr (!Map::kBare)
      if (units.needed) return try_weigh<true>(weights, added, s, units, control);
    return try_weigh<false>(weights, added, s, units, control);
  }
  template <bool Units, class Control>
  __device__ __forceinline__ bool try_weigh(uint32_t (&weights)[Map::kRows / 4], float (&added)[kColumns],
                                            const float (&s)[Map::kRows / 2], const OwnUnits& units, const Control& control) const {
    __half2 top = __float2half2_rn(0.f);
    const uint32_t at = shared_address(&control.row[2 * (warpgroup_thread() % 4)]);
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      const uint4 v = load_shared_4(at + c / 2 * 64);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto weight = [&](int i, uint32_t scale, uint32_t minus_reference) {
          float offset = __uint_as_float(minus_reference);
          if (Units) offset += units.log2(h);
          const float w = exp2_approx(fmaf(s[Layout::value(c + i, h)], __uint_as_float(scale), offset));
          const float own = Units ? w * units.inverse(h) : w;
          added[c + i] = h == 0 ? own : added[c + i] + own;  // one multiply-add
          return w;
        };
        uint32_t& pair = weights[Layout::value(c, h) / 2];
        pair = pack(__half(), weight(0, v.x, v.y), weight(1, v.z, v.w));
        top = __hmax2(top, *reinterpret_cast<__half2*>(&pair));
      }
    }
    return __half2float(__hmax(__low2half(top), __high2half(top))) > kMostWeight;
  }

  // Moves references that the tile's weights would exceed, and sums with them; leaves the factors of accumulators, of which there are none
  // at the `first` tile of an item. By the whole warpgroup.
  template <class Control>
  __device__ __forceinline__ void move_references(const float (&s)[Map::kRows / 2], const OwnUnits& units, Control& control, int place,
                                                  int barrier, bool first) {
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const int thread = warpgroup_thread(), lane = thread % 32;
    float tops[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float scale = control.row[Layout::row(c, lane)].x;
      const auto counted = [&](int h) { return fmaf(s[Layout::value(c, h)], scale, units.log2(h)); };
      tops[c] = fmaxf(counted(0), counted(1));
    }
    combine_lanes(tops, larger);
#pragma unroll
    for (int i = 0; i < kKept; ++i)
      if (leaves()) control.warp_top[thread / 32][row(i)] = tops[i];
    named_barrier_of_warpgroup(barrier);
    if constexpr (!Map::kIndependent)
      if (thread == 0) control.rescale[place][0] = !first;
    if (thread < Map::kRows) {
      const float top = found(control.warp_top, thread, larger), old = control.row[thread].y;
      float shrink = 1.f;
      if (top + old > kMostTopWeight - 1.f) {  // exponents are rounded
        const float next = floorf(kTopWeight<Map> - top);  // an integer: see log2_sum
        shrink = exp2_approx(next - old);
        control.row[thread].y = next;
      }
      control.factor[place][thread] = shrink;
    }
    named_barrier_of_warpgroup(barrier);
    rescale(control, place);
  }

 private:
  // Of 2 Half columns each lane keeps those that its bit says, combined with what the lane beyond that bit has of them.
  template <int Bit, int Half, int Count, class Combine>
  static __device__ __forceinline__ void spread(float (&v)[Count], Combine combine) {
    const bool upper = opaque(block_thread()) & Bit;  // else the compiler makes branches of it, which diverge
#pragma unroll
    for (int i = 0; i < Half; ++i) {
      const float sent = upper ? v[i] : v[i + Half], kept = upper ? v[i + Half] : v[i];
      v[i] = combine(kept, __shfl_xor_sync(~0u, sent, Bit));
    }
  }
};

// The highest scaled scores so far, by warp, where they are wanted; base 2.
template <class Map, class Control>
__device__ __forceinline__ void keep_peaks(const float (&s)[Map::kRows / 2], Control& control, bool first) {
  using State = RawState<Map>;
  using Layout = typename State::Layout;
  const int thread = warpgroup_thread(), lane = thread % 32;
  float peaks[State::kColumns];
#pragma unroll
  for (int c = 0; c < State::kColumns; ++c) {
    const float scale = control.row[Layout::row(c, lane)].x;
    peaks[c] = fmaxf(s[Layout::value(c, 0)] * scale, s[Layout::value(c, 1)] * scale);
  }
  State::combine_lanes(peaks, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
  for (int i = 0; i < State::kKept; ++i) {
    float& peak = control.warp_peak[thread / 32][State::row(i)];
    if (State::leaves()) peak = first ? peaks[i] : fmaxf(peak, peaks[i]);
  }
}

// What warps have kept of a row.
template <class Control>
__device__ __forceinline__ float found_peak(const Control& control, int row) {
  return fmaxf(fmaxf(control.warp_peak[0][row], control.warp_peak[1][row]),
               fmaxf(control.warp_peak[2][row], control.warp_peak[3][row]));
}

// Leaves reference and sum of a row, and where it goes; where no other CTA has a part, also its lse and last factor.
template <class Map, class Control, class Peak>
__device__ __forceinline__ void leave_raw_row(const FmDecodeParams& p, const RowBlock& r, int block_row, float reference,
                                              float sum, Control& control, Peak peak) {
  if (p.max_logits != nullptr) write_peak<Map>(p, r, block_row, r.empty() ? kNegInf : peak());
  // Accumulators count in the rows' common unit: so does the sum from here on, and lse stays as it is.
  reference += Map::kResultUnitLog2, sum /= result_unit<Map>();
  if constexpr (kSharesTiles<Map>)
    control.row_state[block_row] = make_float2(r.empty() ? kNegInf : reference, sum);
  else
    control.result[block_row] = row_factor<Map>(p, r, block_row, reference, sum);
  const int row = r.row_begin + block_row;
  control.out_offset()[block_row] = row < r.rows ? row_offset(p, r, row, p.out_stride) : -1;
}

// The same for all rows. By both warpgroups, which have had different tiles; after it all may read. `place`: of the tile after the
// last, whose P nobody reads any more.
template <class Map, class Control>
__device__ __forceinline__ void finish_raw_rows(const FmDecodeParams& p, const RowBlock& r, RawState<Map>& state,
                                                uint32_t smem, int place, Control& control, int own) {
  const int thread = warpgroup_thread();
  const auto add = [](float a, float b) { return a + b; };
  auto& first_sums = *reinterpret_cast<float(*)[4][Map::kRows]>(__cvta_shared_to_generic(Map::weights(smem, place)));
  if (own == 1)
    state.leave_sums(control.warp_top);
  else
    state.leave_sums(first_sums);
  named_barrier<kRawBarrier, 256>();
  if (own == 0 && thread < Map::kRows) {
    const float sum = state.found(first_sums, thread, add) + state.found(control.warp_top, thread, add);
    leave_raw_row<Map>(p, r, thread, -control.row[thread].y, sum, control,
                       [&] { return found_peak(control, thread); });
  }
  named_barrier<kRawBarrier, 256>();
}

}  // namespace fm
