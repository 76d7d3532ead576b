// The scores role for few query rows (16 or 32): operands are swapped, S^T = K Q^T puts the 64 tokens on the M side and
// the rows on the N side, so that the matrix work is proportional to the rows. A thread holds two tokens of a quarter
// of the rows. The softmax: few_softmax.cuh.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "../ptx/wgmma.cuh"
#include "codes.cuh"
#include "few_softmax.cuh"
#include "masking.cuh"
#include "query_halves.cuh"
#include "shared_map.cuh"
#include "steps.cuh"
#include "weight_factors.cuh"
#include "work.cuh"

namespace fm {

// Q of an item to shared memory, rows that do not exist as zeros. Eight threads to a row. Short code: it runs once per
// item, and instructions that are not cached cost more than copies.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void load_few_query(const FmDecodeParams& p, const RowBlock& r, uint32_t shared) {
  const int piece = warpgroup_thread() % 8;
#pragma unroll 1
  for (int block_row = warpgroup_thread() / 8; block_row < Map::kRows; block_row += 16) {
    const QueryRow<T> row(p, r, block_row);
    const uint32_t to = shared + swizzled(block_row, piece);
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk)
      cp_async_16(to + chunk * Map::kQueryChunkBytes, row.nope + chunk * 64 + piece * 8, row.present);
    if (QkDim > kLatent) cp_async_16(to + 8 * Map::kQueryChunkBytes, row.rope + piece * 8, row.present);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_async_shared();
  named_barrier<kScoresBarrier, 128>();
}

// Waits for all of a tile: waits between products cost more than they save.
template <class Map>
__device__ __forceinline__ void wait_for_tile(DecodeControl& control, TilePlace<Map> place) {
  wait_together<Map>(shared_address(&control.tile_full[place.rope()]), place.rope_parity(), kScoresBarrier);
  if (!has_blocks<0, kTileBlocks>(control, place)) {
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) wait_for_block<Map>(control, place, i);
  }
  fence_copies<Map>();
}

// S^T = K Q^T of a tile, the rope part first. Calls meanwhile() while the tensor cores are at it.
template <class T, int QkDim, class Map, class Meanwhile>
__device__ __forceinline__ void multiply_key_query(float (&s)[Map::kRows / 2], uint32_t smem, DecodeControl& control,
                                                   TilePlace<Map> place, Meanwhile meanwhile) {
  constexpr bool kHasRope = QkDim > kLatent;
  const Operand q(smem + Map::kQueryOffset, 0, kAtomBytes);
  wait_for_tile<Map>(control, place);
  wgmma_fence();
  if (kHasRope) {
    const Operand keys(smem + Map::rope_offset(place.rope()), 0, kAtomBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_ss_few<0>(T(), s, keys.at(k * 32), q.at(8 * Map::kQueryChunkBytes + k * 32), k != 0);
  }
#pragma unroll
  for (int chunk = 0; chunk < 8; ++chunk) {
    const Operand keys(smem + block_offset(place.block(chunk / 2)), 0, kGroupBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_ss_few<0>(T(), s, keys.at(chunk % 2 * kAtomBytes + k * 32), q.at(chunk * Map::kQueryChunkBytes + k * 32),
                      kHasRope || chunk != 0 || k != 0);
  }
  wgmma_commit();
  meanwhile();
  wgmma_wait<0>();
}

// S^T of converted codes, without what Q counts in: a sum for each block, which may have a mantissa of its own, and one
// for the rope part.
template <class T, class M, int QkDim, class Map>
__device__ __forceinline__ void multiply_codes_query(float (&s)[Map::kRows / 2], uint8_t* shared,
                                                     DecodeControl& control, TilePlace<Map> place) {
  using Layout = FewLayout<Map::kRows>;
  constexpr bool kHasRope = QkDim > kLatent;
  static_assert(kRopeCounts<T>, "queries are bf16: the rope part counts in the row's unit");
  const uint32_t smem = shared_address(shared);
  const Operand q(smem + Map::kQueryOffset, 0, kAtomBytes), rope(smem + Map::rope_offset(place.rope()), 0, kAtomBytes);
  const Units& units = units_of<Map>(shared);
  float sums[kTileBlocks][Map::kRows / 2];
  wait_for_tile<Map>(control, place);
  wgmma_fence();
  const auto block_of = [&](int i) { return Operand(smem + block_offset(place.block(i)), 0, kGroupBytes); };
  const Operand keys[kTileBlocks] = {block_of(0), block_of(1), block_of(2), block_of(3)};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint32_t step = k % 4 * 32;
#pragma unroll
    for (int block = 0; block < kTileBlocks; ++block)
      wgmma_ss_few<0>(M(), sums[block], keys[block].at(k / 4 * kAtomBytes + step),
                      q.at((2 * block + k / 4) * Map::kQueryChunkBytes + step), k != 0);
    if (kHasRope && k >= 4)
      wgmma_ss_few<0>(T(), s, rope.at(step), q.at(8 * Map::kQueryChunkBytes + step), k != 4);
  }
  wgmma_commit();
  wgmma_wait<0>();
  const bool scaled = kHasRope && units.scaled[place.rope()] != 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = Layout::token(h);
    const float unit = units.of_tile[place.rope()].token[token];
    float factor[kTileBlocks];
#pragma unroll
    for (int block = 0; block < kTileBlocks; ++block)
      factor[block] = scaled ? units.of_tile[place.rope()].mantissa[block][token] : 1.f;
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c) {
      const int i = Layout::value(c, h);
      float sum = kHasRope ? s[i] : 0.f;
#pragma unroll
      for (int block = 0; block < kTileBlocks; ++block) sum = fmaf(factor[block], sums[block][i], sum);
      s[i] = sum * unit;
    }
  }
}

// Scores of absent tokens become -inf.
template <class Map>
__device__ __forceinline__ void mask_absent(float (&s)[Map::kRows / 2], uint64_t present) {
  using Layout = FewLayout<Map::kRows>;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool absent = !(present >> Layout::token(h) & 1);
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c)
      if (absent) s[Layout::value(c, h)] = kNegInf;
  }
}

// Those, and scores of keys that a row does not see.
template <class Map>
__device__ __forceinline__ void mask_unseen(const FmDecodeParams& p, const RowBlock& r, float (&s)[Map::kRows / 2],
                                         int tile, uint64_t present) {
  using Layout = FewLayout<Map::kRows>;
  const int lane = warpgroup_thread() % 32, token = Layout::token(0);
  const int in_sequence = r.seq_len - tile * kTileTokens - token;  // tokens from this thread's first on
  const int q_len = opaque(r.q_len), row_begin = opaque(r.row_begin);  // nothing of this is kept across tiles
  const bool causal = p.causal && q_len > 1;
  constexpr int kAtOnce = Map::kRaw ? 1 : Layout::kColumns;
  // A bit for each column.
  uint32_t hidden[2] = {present >> token & 1 ? 0 : ~0u, present >> token & 256 ? 0 : ~0u};
#pragma unroll kAtOnce
  for (int c = 0; c < Layout::kColumns; ++c) {
    const int row = Layout::row(c, lane);
    int seen = in_sequence;
    if (causal && row_begin + row < r.rows) seen += token_of(p, row_begin + row) + 1 - q_len;
    hidden[0] |= (uint32_t)(seen <= 0) << c, hidden[1] |= (uint32_t)(seen <= 8) << c;
  }
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (hidden[h] >> c & 1) s[Layout::value(c, h)] = kNegInf;
}

// Masks a tile. `shared`: some rows see tokens of it that others do not; where none does, single tokens are absent or not, those past the
// end, too.
template <class Map>
__device__ __forceinline__ void mask_few(const FmDecodeParams& p, const RowBlock& r, float (&s)[Map::kRows / 2], int tile, bool shared,
                                         uint64_t present) {
  if (Map::kTokens && !shared)
    mask_absent<Map>(s, present);
  else
    mask_unseen<Map>(p, r, s, tile, present);
}

// The logarithm of a power of two, or of 0.
__device__ __forceinline__ float log2_of_unit(float unit) {
  return unit == 0.f ? kNegInf : (float)((int)(__float_as_uint(unit) >> 23) - 127);
}

// Writes the rows' highest scores.
template <class Map>
__device__ __forceinline__ void write_few_peaks(const FmDecodeParams& p, const RowBlock& r,
                                                const float (&peaks)[Map::kRows / 4], uint8_t* smem, FewControl& control) {
  const int thread = warpgroup_thread();
  leave_warp_rows<FewLayout<Map::kRows>>(peaks, control.warp_row, [](float a, float b) { return fmaxf(a, b); });
  named_barrier<kScoresBarrier, 128>();
  if (thread < Map::kRows) {
    const float peak = top_of_warps(control.warp_row, thread);
    write_peak<Map>(p, r, thread, peak == kNegInf ? peak : peak * score_scale<Map>(p, smem, thread));
  }
  named_barrier<kScoresBarrier, 128>();
}

// Leaves reference and sum of each row; where no other CTA has a part, also the rows' lse and their last factor.
template <class Map>
__device__ __forceinline__ void finish_few_rows(const FmDecodeParams& p, const RowBlock& r,
                                                const FewState<Map::kRows, Map::kPeaks, Map::kCodes>& state,
                                                uint8_t* smem, FewControl& control, uint32_t result_parity) {
  using Layout = FewLayout<Map::kRows>;
  const int thread = warpgroup_thread();
  named_barrier<kScoresBarrier, 128>();  // every warp is done with what warp_row had: maxima, or the last item's sums
  if constexpr (Map::kPeaks)
    if (p.max_logits != nullptr) write_few_peaks<Map>(p, r, state.peak, smem, control);
  leave_warp_rows<Layout>(state.sum, control.warp_row, [](float a, float b) { return a + b; });
  mbarrier_wait(shared_address(&control.result_empty), result_parity);
  named_barrier<kScoresBarrier, 128>();
  if (thread >= Map::kRows) return;
  const float sum = sum_of_warps(control.warp_row, thread), unit = state.own_unit();
  if (kSharesTiles<Map>) {
    control.row_state[thread] = make_float2(state.own_reference, sum);
    if (Map::kCodes) control.unit[thread] = unit;
  } else {
    control.result[thread] = row_factor<Map>(p, r, thread, state.own_reference, sum) * unit;
  }
}

// The end of a step, `last`: of the item. Leaves what the values role needs to add it up, or to leave it in a slot.
template <class Map>
__device__ __forceinline__ void finish_step(const FmDecodeParams& p, const RowBlock& r,
                                            const FewState<Map::kRows, Map::kPeaks, Map::kCodes>& state, StepSum& part, int step, bool last,
                                            FewControl& control, uint32_t result_parity) {
  const int thread = warpgroup_thread();
  leave_warp_rows<FewLayout<Map::kRows>>(state.sum, control.warp_sum, [](float a, float b) { return a + b; });
  mbarrier_wait(shared_address(&control.result_empty), result_parity);
  named_barrier<kScoresBarrier, 128>();
  if (thread >= Map::kRows) return;
  const float sum = sum_of_warps(control.warp_sum, thread), lse = lse_of_sum<Map>(state.own_reference, sum);
  float4& of_row = static_cast<StepControl&>(control).step[thread];
  const auto leave_lse = [&](float of, int slot) {
    if (r.row_begin + thread < r.rows) p.partial_lse[slot_lse<Map>(p, r, thread) + slot] = of;
  };
  if (leaves_steps(p, r)) {
    leave_lse(lse, step);
    of_row.x = normaliser<Map>(sum);
    return;
  }
  const StepFactors factors = part.add(lse);
  of_row = make_float4(normaliser<Map>(sum), factors.before, factors.next, 1.f);
  if (!last) return;
  const float lse_of_part = lse_of_sum<Map>(part.top, part.sum);
  control.result[thread] = normaliser<Map>(part.sum);
  if (r.slot >= 0) return leave_lse(lse_of_part, 0);
  StepSum unit;  // of one part
  unit.add(lse_of_part);
  of_row.w = row_factor<Map>(p, r, thread, unit.top, unit.sum);
}

// T: of Q and the output; M: what is multiplied.
template <class T, class M, int QkDim, class Map>
__device__ __forceinline__ void compute_few_scores(const FmDecodeParams& p, const FirstItem& first, uint8_t* smem,
                                                   FewControl& control) {
  using Layout = FewLayout<Map::kRows>;
  TilePlace<Map> place;
  uint32_t result_parity = 1;
  for_each_row_block<Map>(p, first, [&](int, const RowBlock& r) {
    FewState<Map::kRows, Map::kPeaks, Map::kCodes> state;
    [[maybe_unused]] StepSum part;
    [[maybe_unused]] int step = 0;
    const int first_masked = r.first_masked(p);
    if (Map::kHandsQueryOn && kSharesTiles<Map>)  // the last item's part, which others read, lies where Q goes
      mbarrier_wait(shared_address(&control.result_empty), result_parity);
    if (!r.empty()) {
      if constexpr (Map::kCodes)
        load_query_halves<T, QkDim, Map>(p, r, smem);
      else
        load_few_query<T, QkDim, Map>(p, r, shared_address(smem) + Map::kQueryOffset);
    }
    float scale_log2[Layout::kColumns];
#pragma unroll
    for (int c = 0; c < Layout::kColumns; ++c)
      scale_log2[c] = score_scale<Map>(p, smem, Layout::row(c, warpgroup_thread() % 32));
    for (int tile = r.tile_begin; tile < r.tile_end; ++tile) {
      float s[Map::kRows / 2];
      float2 units = make_float2(0.f, 0.f);
      bool absent, masked, shared;
      const auto look = [&] {
        absent = opaque(control.present[place.rope()] != ~0ull);
        shared = opaque(r.rows_differ(p) & (tile >= first_masked));  // by some rows and not by others
        masked = Map::kTokens ? absent | shared : opaque(absent | (tile >= first_masked));
      };
      if constexpr (Map::kCodes) {
        multiply_codes_query<T, M, QkDim, Map>(s, smem, control, place);
        look();
        const float* of_token = units_of<Map>(smem).of_tile[place.rope()].token;
        units = make_float2(log2_of_unit(of_token[Layout::token(0)]), log2_of_unit(of_token[Layout::token(1)]));
      } else {
        multiply_key_query<M, QkDim, Map>(s, shared_address(smem), control, place, look);
      }
      // Tokens that some rows see and others do not; whole pages: those without a page, too, but not those past the end.
      const bool cleans = shared || (!Map::kTokens && absent);
      if (masked) mask_few<Map>(p, r, s, tile, shared, control.present[place.rope()]);
      const auto move = [&](bool first) {  // accumulators have nothing yet
        const bool moves = named_barrier_any<kScoresBarrier, 128>(state.exceeds(s, scale_log2, units));  // after it every warp has read K
        if (warpgroup_thread() == 0) control.rescale[place.rope()][0] = moves && !first;
        if (moves) state.move(s, scale_log2, units, control, place.rope(), first);
      };
      if constexpr (!Map::kSteps) {
        move(tile == r.tile_begin);
      } else if (!begins_step(r, tile)) {
        move(false);
      } else {
        state.begin_step(s, scale_log2, control);
        if (warpgroup_thread() == 0) control.rescale[place.rope()][0] = false;
      }
      float weights[Map::kRows / 2];
      state.weigh(weights, s, scale_log2);
      state.add(weights);
      if constexpr (Map::kCodes) state.count_weights(weights, units_of<Map>(smem).of_tile[place.rope()].token);
      store_few_weights<Map::kRows>([&](int i) { return pack(M(), weights[2 * i], weights[2 * i + 1]); },
                                    shared_address(smem) + Map::rope_offset(place.rope()));
      if constexpr (Map::kCodes && QkDim > kLatent) scale_values<Map>(smem, place);
      if (cleans) clean_values<M, Map>(p, r, smem, place, tile, control.present[place.rope()]);
      fence_async_shared();
      mbarrier_arrive(shared_address(&control.weights_full[place.rope()]));
      place.advance();
      if constexpr (Map::kSteps) {
        const bool last = tile + 1 == r.tile_end;
        if (!last && !begins_step(r, tile + 1)) continue;
        finish_step<Map>(p, r, state, part, step++, last, control, result_parity);
        mbarrier_arrive(shared_address(&control.result_full));
        result_parity ^= 1;
      }
    }
    if constexpr (Map::kSteps) {
      if (!r.empty()) return;
      named_barrier<kScoresBarrier, 128>();  // the sums of the item before have been read: nothing else has waited for that
      finish_step<Map>(p, r, state, part, 0, true, control, result_parity);
    } else {
      finish_few_rows<Map>(p, r, state, smem, control, result_parity);
    }
    mbarrier_arrive(shared_address(&control.result_full));
    result_parity ^= 1;
  });
}

}  // namespace fm
