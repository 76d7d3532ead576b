// The softmax of few query rows (16 or 32), whose scores are transposed (few_scores.cuh): what a thread has of a tile's scores, its rows'
// state, and their weights.
//
// The references of the softmax (see scores.cuh) are the same in all four warps. Whether any row's has to move is one
// barrier with an OR; only then are maxima reduced over lanes and warps.
#pragma once
#include <stdint.h>

#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "../ptx/shared.cuh"
#include "masking.cuh"
#include "shared_map.cuh"
#include "weight_factors.cuh"
#include "work.cuh"

namespace fm {

// A thread's share of a [64 tokens][Rows] accumulator: value(c, h) is token 16 warp + lane / 4 + 8 h, row(c).
template <int Rows>
struct FewLayout {
  static constexpr int kColumns = Rows / 4;
  static constexpr int kValues = Rows / 2;
  static __device__ __forceinline__ constexpr int value(int c, int h) { return c / 2 * 4 + 2 * h + c % 2; }
  static __device__ __forceinline__ int row(int c, int lane) { return c / 2 * 8 + 2 * (lane % 4) + c % 2; }
  static __device__ __forceinline__ int token(int h) {
    return warpgroup_thread() / 32 * 16 + warpgroup_thread() % 32 / 4 + 8 * h;
  }
};

// Reduces what threads found for rows to what the warps found, for the whole warpgroup to combine. `first_row`: where the rows begin.
template <class Layout, class Combine>
__device__ __forceinline__ void leave_warp_rows(const float (&of_columns)[Layout::kColumns], float (&of_warps)[4][32], Combine combine,
                                                int first_row = 0) {
  const int thread = warpgroup_thread(), lane = thread % 32;
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c) {
    float v = of_columns[c];
#pragma unroll
    for (int d = 4; d < 32; d *= 2) v = combine(v, __shfl_xor_sync(~0u, v, d));
    if (lane < 4) of_warps[thread / 32][first_row + Layout::row(c, lane)] = v;
  }
}

// The most that the warps have found of a row.
__device__ __forceinline__ float top_of_warps(const float (&of_warps)[4][32], int row) {
  return fmaxf(fmaxf(of_warps[0][row], of_warps[1][row]), fmaxf(of_warps[2][row], of_warps[3][row]));
}

// What the warps have found of a row, added up.
__device__ __forceinline__ float sum_of_warps(const float (&of_warps)[4][32], int row) {
  return (of_warps[0][row] + of_warps[1][row]) + (of_warps[2][row] + of_warps[3][row]);
}

// Softmax state of a thread's rows. Where V is converted to half (`Codes`), P is stored times what the token's row counts
// in, relative to a second reference, that of the products (weight_factors.cuh has the same for 64 rows).
template <int Rows, bool Peaks, bool Codes>
struct FewState {
  using Layout = FewLayout<Rows>;
  static constexpr float kWeightSlack = 4.f;
  float reference[Layout::kColumns];  // base-2 scaled scores; the same in all threads that share a row
  float limit[Codes ? 1 : Layout::kColumns];  // what scores may reach before it moves, or less (reference_limit)
  float sum[Layout::kColumns];        // of this thread's tokens
  float peak[Peaks ? Layout::kColumns : 1];  // highest scores of this thread's tokens, unscaled
  float weight_reference[Codes ? Layout::kColumns : 1];  // base 2
  float own_reference = kUnset, own_weight_reference = kNegInf;  // those of the row with this thread's number

  __device__ __forceinline__ FewState() {
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c)
      reference[c] = kUnset, limit[Codes ? 0 : c] = kUnset, sum[c] = 0.f, peak[Peaks ? c : 0] = kNegInf, weight_reference[Codes ? c : 0] = kNegInf;
  }

  // References of a step, by the scores of its first tile: nothing is kept of the tiles before. By the whole warpgroup, for which it is a
  // barrier.
  __device__ __forceinline__ void begin_step(const float (&s)[Layout::kValues], const float (&scale_log2)[Layout::kColumns],
                                             FewControl& control) {
    static_assert(!Codes && !Peaks, "parts of codes have no steps, nor sparse prefill's");
    const int thread = warpgroup_thread(), lane = thread % 32;
    float tops[Layout::kColumns];
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c) tops[c] = top_of(s, c) * scale_log2[c], sum[c] = 0.f;
    leave_warp_rows<Layout>(tops, control.warp_row, [](float a, float b) { return fmaxf(a, b); });
    named_barrier<kScoresBarrier, 128>();
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c)
      limit[c] = reference[c] = fmaxf(kUnset, top_of_warps(control.warp_row, Layout::row(c, lane)));
    own_reference = fmaxf(kUnset, top_of_warps(control.warp_row, thread % Rows));
  }

  // Whether a score of this thread exceeds its row's reference by more than the slack; keeps the highest ones. `units`: the logarithms of
  // what its tokens count in.
  __device__ __forceinline__ bool exceeds(const float (&s)[Layout::kValues], const float (&scale_log2)[Layout::kColumns], float2 units) {
    float over[Layout::kColumns];
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c) {
      const float top = top_of(s, c);
      if (Peaks) peak[c] = fmaxf(peak[c], top);
      over[c] = fmaf(top, scale_log2[c], -(Codes ? reference[c] + kReferenceSlack : limit[Codes ? 0 : c]));
      if (Codes) over[c] = fmaxf(over[c], top_weight_of(s, scale_log2, units, c) - weight_reference[Codes ? c : 0] - kWeightSlack);
    }
    return largest(over) > 0.f;
  }

  // Moves references that a score exceeds by more than the slack, and leaves what the rows' accumulators have to be
  // multiplied with. `first`: it is an item's first tile. By the whole warpgroup, a thread to each row, which tells the others: these
  // instructions run once or twice an item, and are waited for.
  __device__ __forceinline__ void move(const float (&s)[Layout::kValues], const float (&scale_log2)[Layout::kColumns],
                                       float2 units, FewControl& control, int tile, bool first) {
    const int thread = warpgroup_thread(), lane = thread % 32;
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    float tops[Layout::kColumns];
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c) tops[c] = top_of(s, c) * scale_log2[c];
    leave_warp_rows<Layout>(tops, control.warp_row, larger);
    if constexpr (Codes) {
      static_assert(Rows == 16, "the second half of warp_row");
#pragma unroll
      for (int c = 0; c < Layout::kColumns; ++c) tops[c] = top_weight_of(s, scale_log2, units, c);
      leave_warp_rows<Layout>(tops, control.warp_row, larger, Rows);
    }
    if (!Codes && !first) leave_warp_rows<Layout>(sum, control.warp_sum, [](float a, float b) { return a + b; });
    named_barrier<kScoresBarrier, 128>();
    if (thread < Rows) {
      const float top = top_of_warps(control.warp_row, thread);
      float most = own_reference + kReferenceSlack, other;
      if constexpr (!Codes) most = reference_limit(own_reference, first ? 0.f : sum_of_warps(control.warp_sum, thread));
      const float next = top > most ? top : own_reference;
      const float shrink = own_reference == kUnset ? 1.f : exp2_approx(own_reference - next);
      if constexpr (Codes) {
        control.factor[tile][thread] = move_weight_reference(top_of_warps(control.warp_row, Rows + thread), next != own_reference);
        other = own_weight_reference;
      } else {
        control.factor[tile][thread] = shrink;
        other = fmaxf(most, next);
      }
      own_reference = next;
      // Nobody else reads what was found for this row.
      control.warp_row[0][thread] = next, control.warp_row[1][thread] = shrink, control.warp_row[2][thread] = other;
    }
    named_barrier<kScoresBarrier, 128>();
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c) {
      const int row = Layout::row(c, lane);
      reference[c] = control.warp_row[0][row];
      sum[c] *= control.warp_row[1][row];
      (Codes ? weight_reference[Codes ? c : 0] : limit[Codes ? 0 : c]) = control.warp_row[2][row];
    }
  }

  // Unnormalised weights of scores.
  __device__ __forceinline__ void weigh(float (&weights)[Layout::kValues], const float (&s)[Layout::kValues],
                                        const float (&scale_log2)[Layout::kColumns]) const {
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = Layout::value(c, h);
        weights[i] = exp2_approx(fmaf(s[i], scale_log2[c], -reference[c]));
      }
  }
  __device__ __forceinline__ void add(const float (&weights)[Layout::kValues]) {
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c) sum[c] += weights[Layout::value(c, 0)], sum[c] += weights[Layout::value(c, 1)];
  }
  // Weights times what their tokens count in, relative to the second reference.
  __device__ __forceinline__ void count_weights(float (&s)[Layout::kValues], const float* of_token) const {
    const float first = of_token[Layout::token(0)], second = of_token[Layout::token(1)];
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c) {
      const float factor = weight_reference[c] == kNegInf
                               ? 0.f
                               : exp2_approx(reference[c] - weight_reference[c] + kWeightExponent);
      s[Layout::value(c, 0)] *= first * factor, s[Layout::value(c, 1)] *= second * factor;
    }
  }
  // What the accumulators of this thread's row count in, relative to its reference.
  __device__ __forceinline__ float own_unit() const {
    if (!Codes || own_weight_reference == kNegInf) return 1.f;
    return exp2_approx(own_weight_reference - own_reference - kWeightExponent);
  }

 private:
  static __device__ __forceinline__ float top_of(const float (&s)[Layout::kValues], int c) {
    return fmaxf(s[Layout::value(c, 0)], s[Layout::value(c, 1)]);
  }
  static __device__ __forceinline__ float top_weight_of(const float (&s)[Layout::kValues], const float (&scale_log2)[Layout::kColumns],
                                                        float2 units, int c) {
    return fmaxf(fmaf(s[Layout::value(c, 0)], scale_log2[c], units.x), fmaf(s[Layout::value(c, 1)], scale_log2[c], units.y));
  }
  // Returns what the accumulators of this thread's row have to be multiplied with.
  __device__ __forceinline__ float move_weight_reference(float top, bool reference_moved) {
    float& own = own_weight_reference;
    if (top == kNegInf || !(reference_moved || top > own + kWeightSlack)) return 1.f;
    const float shrink = own == kNegInf ? 1.f : exp2_approx(own - top);
    own = top;
    return shrink;
  }
};

// P^T as [row][token], rows of 128 bytes with the swizzle.
// `pair(i)`: what the accumulator's numbers 2 i and 2 i + 1 have become.
template <int Rows, class Pair>
__device__ __forceinline__ void store_few_weights(Pair pair, uint32_t to) {
  const int thread = warpgroup_thread(), lane = thread % 32, piece = thread / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int g = 0; g < Rows / 16; ++g) {  // 16 rows at a time: four 8 x 8 blocks
    const uint32_t at = to + swizzled(g * 16 + lane / 16 * 8 + lane % 8, piece);
    store_matrices<true>(at, pair(4 * g), pair(4 * g + 1), pair(4 * g + 2), pair(4 * g + 3));
  }
}

}  // namespace fm
