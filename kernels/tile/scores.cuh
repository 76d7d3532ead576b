// The scores role: one warpgroup computes S = Q K^T of a 64 x 64 tile, the online softmax, and hands P to the
// values role through shared memory. Of the nine chunks of Q as many live in registers as A operands as the loader leaves
// room for (six with pages, five with single tokens), so that most of QK^T reads shared memory once per K byte; the rest
// are read from shared memory.
//
// Where codes are converted, the latent parts of Q and K are halves that count in a power of two per row: S is multiplied
// with both, P with that of the token (weight_factors.cuh). What float32 scales have besides a power of two, a mantissa of
// each block of a token, is multiplied with where numbers are float32, and with V before P V.
//
// The softmax keeps a reference per row, not the exact running maximum: it moves only when a score exceeds a limit above
// it (reference_limit; at most kReferenceSlack, in powers of two), so that accumulators are rarely rescaled. P may reach
// 2^kReferenceSlack; the final division makes the result exact for any reference.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "../ptx/wgmma.cuh"
#include "codes.cuh"
#include "masking.cuh"
#include "query_halves.cuh"
#include "query_rows.cuh"
#include "shared_map.cuh"
#include "stored_steps.cuh"
#include "weight_factors.cuh"
#include "work.cuh"

namespace fm {

// The first of the two rows (the other is 8 on) that a thread of a warpgroup holds of a 64-row accumulator.
__device__ __forceinline__ int accumulator_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

// Whether the P V of the tile before this one is kept back: the tensor cores do it best during the next softmax. It
// is let go before a wait for K, and at the latest before the last block of the next Q K^T.
struct HeldTile {
  uint32_t barrier = 0;  // the tile's weights_full; 0: none is held

  template <class Map>
  __device__ __forceinline__ void hold(DecodeControl& control, TilePlace<Map> place) {
    barrier = shared_address(&control.weights_full[place.rope()]);
  }
  __device__ __forceinline__ void release() {
    if (barrier != 0) mbarrier_arrive(barrier);
    barrier = 0;
  }
};

// Whether the tile's latent blocks Begin .. End are there, and the rest of it, its rope block.
template <int Begin, int End, bool Rest, class Map>
__device__ __forceinline__ bool has_keys(DecodeControl& control, TilePlace<Map> place) {
  const bool rest = !Rest || mbarrier_test(shared_address(&control.tile_full[place.rope()]), place.rope_parity());
  return has_blocks<Begin, End>(control, place, rest);
}
// Waits for them.
template <int Begin, int End, bool Rest, class Map>
__device__ __forceinline__ void wait_for_keys(DecodeControl& control, TilePlace<Map> place, HeldTile& held) {
  if (has_keys<Begin, End, Rest>(control, place)) return;
  held.release();
  if (Rest) mbarrier_wait(shared_address(&control.tile_full[place.rope()]), place.rope_parity());
#pragma unroll
  for (int i = Begin; i < End; ++i) wait_for_block<Map>(control, place, i);
}

// The rope part comes with the first blocks where it has as many places, else with the last.
template <class Map>
constexpr bool kRopeFirst = Map::kRopes == 3;
// Staged rows have none.
template <class Map>
constexpr bool kRopeLast = !kRopeFirst<Map> && Map::kShare == 0;

// One k16 step of S += Q K^T: of Q's chunk `Chunk` (8: the rope part), against keys `from` bytes on.
template <class T, class Map, int Chunk>
__device__ __forceinline__ void multiply_step(float (&s)[32], const QueryFragments<Map::kRegisterChunks>& q,
                                              Operand q_shared, uint32_t step, Operand keys, uint32_t from, bool accumulate) {
  const uint64_t b = keys.at(from + step * 32);
  if constexpr (Chunk < Map::kRegisterChunks)
    wgmma_rs(T(), s, q.at[Chunk][step], b, accumulate);
  else
    wgmma_ss_n64(T(), s,
                 q_shared.at(Chunk % Map::kQuerySlots * kRopeBytes + step * 32), b, accumulate);
}

// The products of one latent block: two chunks of 64 columns.
template <class T, class Map, int Block>
__device__ __forceinline__ void multiply_block(float (&s)[32], const QueryFragments<Map::kRegisterChunks>& q,
                                               Operand q_shared, uint32_t smem, TilePlace<Map> place,
                                               bool accumulate) {
  const Operand keys(smem, block_offset(place.block(Block)), 0, kGroupBytes);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    multiply_step<T, Map, 2 * Block>(s, q, q_shared, k, keys, 0, accumulate || k != 0);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    multiply_step<T, Map, 2 * Block + 1>(s, q, q_shared, k, keys, kAtomBytes, true);
}

// S = Q K^T. `ready`: the keys that it begins with are there. Calls meanwhile() while the tensor cores are at the last products.
template <class T, int QkDim, class Map, class Meanwhile>
__device__ __forceinline__ void multiply_query_key(float (&s)[32], const QueryFragments<Map::kRegisterChunks>& q,
                                                   uint32_t smem, DecodeControl& control, TilePlace<Map> place,
                                                   HeldTile& held, bool ready, Meanwhile meanwhile) {
  constexpr bool kHasRope = QkDim > kLatent;
  const Operand q_shared(smem + Map::kQueryOffset, 0, kAtomBytes);
  static_assert((Map::kEarlyBlocks == 3 || Map::kEarlyBlocks == 2) && kTileBlocks == 4);
  const auto multiply_rope_part = [&](bool accumulate) {
    const Operand rope(smem, Map::rope_offset(place.rope()), 0, kAtomBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_step<T, Map, 8>(s, q, q_shared, k, rope, 0, accumulate || k != 0);
  };
  if (!ready) wait_for_keys<0, Map::kEarlyBlocks, kRopeFirst<Map>>(control, place, held);
  fence_copies<Map>();
  wgmma_fence();
  if (kHasRope && kRopeFirst<Map>) multiply_rope_part(false);
  multiply_block<T, Map, 0>(s, q, q_shared, smem, place, kHasRope && kRopeFirst<Map>);
  multiply_block<T, Map, 1>(s, q, q_shared, smem, place, true);
  if constexpr (Map::kEarlyBlocks == 3) multiply_block<T, Map, 2>(s, q, q_shared, smem, place, true);
  wait_for_keys<Map::kEarlyBlocks, kTileBlocks, kRopeLast<Map>>(control, place, held);
  fence_copies<Map>();
  if constexpr (Map::kEarlyBlocks == 2) {
    wgmma_fence();
    multiply_block<T, Map, 2>(s, q, q_shared, smem, place, true);
  }
  if (kHasRope && !kRopeFirst<Map>) {
    wgmma_fence();
    multiply_rope_part(true);
  }
  held.release();
  wgmma_fence();
  multiply_block<T, Map, 3>(s, q, q_shared, smem, place, true);
  wgmma_commit();
  meanwhile();
  wgmma_wait<0>();
}

// S times a number per token; this thread's tokens are 8 g + 2 (lane % 4) + {0, 1}.
template <class OfTokens>
__device__ __forceinline__ void scale_by_token(float (&s)[32], OfTokens of_tokens) {
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    const float2 factor = of_tokens(4 * g + warpgroup_thread() % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) s[4 * g + 2 * h] *= factor.x, s[4 * g + 2 * h + 1] *= factor.y;
  }
}
__device__ __forceinline__ float2 pair_of(const float* of_tokens, int i) {
  return reinterpret_cast<const float2*>(of_tokens)[i];
}

// S = (S + Q K^T of one block) x the quotient of its mantissas and the next block's; of the last block x its mantissas.
// In the end each product has its own block's, with one set of accumulators.
template <class M, class Map, int Block>
__device__ __forceinline__ void multiply_scaled_block(float (&s)[32], const QueryFragments<Map::kRegisterChunks>& q,
                                                      Operand q_shared, uint32_t smem, const Units& units,
                                                      TilePlace<Map> place) {
  wgmma_fence();
  multiply_block<M, Map, Block>(s, q, q_shared, smem, place, Block > 0);
  wgmma_commit();
  wgmma_wait<0>();
  const auto& mantissa = units.of_tile[place.rope()].mantissa;
  scale_by_token(s, [&](int i) {
    const float2 own = pair_of(mantissa[Block], i);
    if (Block == kTileBlocks - 1) return own;
    const float2 next = pair_of(mantissa[(Block + 1) % kTileBlocks], i);
    return make_float2(__fdividef(own.x, next.x), __fdividef(own.y, next.y));
  });
}

// S = Q K^T of converted codes, without what Q counts in.
template <class T, class M, int QkDim, class Map>
__device__ __forceinline__ void multiply_query_codes(float (&s)[32], const QueryFragments<Map::kRegisterChunks>& q,
                                                     uint8_t* shared, DecodeControl& control, TilePlace<Map> place,
                                                     HeldTile& held) {
  constexpr bool kHasRope = QkDim > kLatent;
  static_assert(kRopeCounts<T>, "queries are bf16: the rope part counts in the row's unit");
  const uint32_t smem = shared_address(shared);
  const Operand q_shared(smem + Map::kQueryOffset, 0, kAtomBytes);
  const Units& units = units_of<Map>(shared);
  wait_for_keys<0, 0, true>(control, place, held);
  if (kHasRope && units.scaled[place.rope()] != 0) {
    multiply_scaled_block<M, Map, 0>(s, q, q_shared, smem, units, place);
    multiply_scaled_block<M, Map, 1>(s, q, q_shared, smem, units, place);
    multiply_scaled_block<M, Map, 2>(s, q, q_shared, smem, units, place);
    held.release();
    multiply_scaled_block<M, Map, 3>(s, q, q_shared, smem, units, place);
  } else {
    wgmma_fence();
    multiply_block<M, Map, 0>(s, q, q_shared, smem, place, false);
    multiply_block<M, Map, 1>(s, q, q_shared, smem, place, true);
    multiply_block<M, Map, 2>(s, q, q_shared, smem, place, true);
    held.release();
    multiply_block<M, Map, 3>(s, q, q_shared, smem, place, true);
    if (!kHasRope) {
      wgmma_commit();
      wgmma_wait<0>();
    }
  }
  if constexpr (kHasRope) {
    const Operand rope(smem, Map::rope_offset(place.rope()), 0, kAtomBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_step<T, Map, 8>(s, q, q_shared, k, rope, 0, true);
    wgmma_commit();
    wgmma_wait<0>();
  }
  scale_by_token(s, [&](int i) { return pair_of(units.of_tile[place.rope()].token, i); });
}

// Softmax state of the two rows a thread shares with three neighbours.
template <bool Peaks>
struct RowState {
  float reference[2] = {kUnset, kUnset};  // base-2 scaled scores
  float limit[2] = {kUnset, kUnset};      // what scores may reach before it moves, or less (reference_limit)
  float sum[2] = {0.f, 0.f};                // this thread's part of the row sum
  float peak[2] = {kNegInf, kNegInf};       // this thread's highest score so far

  // Moves the references that unscaled scores exceed. Returns whether the warp has moved any, and `shrink`, what the rows'
  // accumulators have to be multiplied with then. That none is exceeded each lane finds for itself.
  __device__ __forceinline__ bool move(const float (&s)[32], const float (&scale_log2)[2], float2& shrink) {
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float pairs[8];
#pragma unroll
      for (int g = 0; g < 8; ++g) pairs[g] = fmaxf(s[4 * g + 2 * h], s[4 * g + 2 * h + 1]);
      top[h] = largest(pairs) * scale_log2[h];
      if (Peaks) peak[h] = fmaxf(peak[h], top[h]);
    }
    shrink = make_float2(1.f, 1.f);
    const bool exceeded = fmaxf(top[0] - limit[0], top[1] - limit[1]) > 0.f;
    if (!__any_sync(~0u, exceeded)) return false;
    shrink = make_float2(move_row(0, top[0]), move_row(1, top[1]));
    return __any_sync(~0u, shrink.x != 1.f || shrink.y != 1.f);
  }
  // The same of one row; `top`: this lane's highest score.
  __device__ __forceinline__ float move_row(int h, float top) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    limit[h] = reference_limit(reference[h], row_sum(h));
    const float next = top > limit[h] ? top : reference[h];
    const float shrink = reference[h] == kUnset ? 1.f : exp2_approx(reference[h] - next);
    limit[h] = fmaxf(limit[h], next);
    reference[h] = next;
    sum[h] *= shrink;
    return shrink;
  }
  // Turns scores into unnormalised weights.
  __device__ __forceinline__ void weigh(float (&s)[32], const float (&scale_log2)[2]) {
    float sums[2][2] = {};
#pragma unroll
    for (int g = 0; g < 8; ++g)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * g + 2 * h + e];
          x = exp2_approx(fmaf(x, scale_log2[h], -reference[h]));
          sums[h][e] += x;
        }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += sums[h][0] + sums[h][1];
  }
  __device__ __forceinline__ float row_peak(int h) const {
    const float v = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
  }
  __device__ __forceinline__ float row_sum(int h) const {
    float v = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }
};

// Tells the values role by what to multiply its rows before it adds this tile.
__device__ __forceinline__ void announce_rescale(bool moved, float2 shrink, DecodeControl& control, int tile_at) {
  const int thread = warpgroup_thread(), row0 = accumulator_row(thread);
  if (thread % 32 == 0) control.rescale[tile_at][thread / 32] = moved;
  if (moved && thread % 4 == 0) {
    control.factor[tile_at][row0] = shrink.x;
    control.factor[tile_at][row0 + 8] = shrink.y;
  }
}

// Scores of absent tokens and of keys a row does not see become -inf.
__device__ __forceinline__ void mask_unseen(const FmDecodeParams& p, const RowBlock& r, float (&s)[32], int tile,
                                          uint64_t present) {
  const int thread = warpgroup_thread(), row0 = accumulator_row(thread), lane = thread % 32;
  const int start = tile * kTileTokens;
  present = existing(present, r.seq_len - start);
  const uint64_t sees0 = existing(present, r.visible(p, r.row_begin + row0) - start) >> (2 * (lane % 4));
  const uint64_t sees1 = existing(present, r.visible(p, r.row_begin + row0 + 8) - start) >> (2 * (lane % 4));
#pragma unroll
  for (int g = 0; g < 8; ++g)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (!(sees0 >> (8 * g + e) & 1)) s[4 * g + e] = kNegInf;
      if (!(sees1 >> (8 * g + e) & 1)) s[4 * g + 2 + e] = kNegInf;
    }
}

// The same of absent tokens alone, where no row sees less than others.
__device__ __forceinline__ void mask_absent(float (&s)[32], uint64_t present) {
  present >>= 2 * (warpgroup_thread() % 4);
#pragma unroll
  for (int g = 0; g < 8; ++g)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (!(present >> (8 * g + e) & 1)) s[4 * g + e] = s[4 * g + 2 + e] = kNegInf;
}

// Masks a tile. `shared`: some rows see tokens of it that others do not; where none does, single tokens are absent or not, those past the
// end, too. `present` by reference: read before the choice it changes the code of the loops.
template <class Map>
__device__ __forceinline__ void mask_tile(const FmDecodeParams& p, int item, float (&s)[32], int tile, bool shared, const uint64_t& present) {
  if (Map::kTokens && !shared)
    mask_absent(s, present);
  else
    mask_unseen(p, load_row_block<Map>(p, item), s, tile, present);
}

// Stores P.
template <class T>
__device__ __forceinline__ void store_weights(const float (&s)[32], uint32_t to) {
  const int thread = warpgroup_thread();
  const uint32_t first = to + swizzled(thread / 32 * 16 + thread % 16, thread / 16 % 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = first ^ (i * 32);  // piece 2i + lane / 16, through the swizzle
    const float* v = &s[8 * i];
    store_matrices<false>(at, pack(T(), v[0], v[1]), pack(T(), v[2], v[3]), pack(T(), v[4], v[5]), pack(T(), v[6], v[7]));
  }
}

// Of a thread's two rows one's number.
__device__ __forceinline__ float of_row(const float (&of_rows)[2], int h) { return h == 0 ? of_rows[0] : of_rows[1]; }

// Leaves the factors that finish the accumulated rows. Of the four lanes that share two rows the first two have one each: what
// runs once per item takes as long as its instructions take to fetch. Where codes are converted registers are short, and the
// first lane has both.
template <class Map>
__device__ __forceinline__ void finish_rows(const FmDecodeParams& p, const RowBlock& r, const RowState<Map::kPeaks>& state,
                                            const WeightFactors& weights, DecodeControl& control) {
  static_assert(Map::kPeaks == Map::kCodes, "single tokens of 16-bit numbers: the values role does it");
  const int thread = warpgroup_thread(), row0 = accumulator_row(thread);
  const float sums[2] = {state.row_sum(0), state.row_sum(1)};
  if constexpr (Map::kCodes) {
    const float peaks[2] = {state.row_peak(0), state.row_peak(1)};
    if (thread % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 8 * h;
      control.result[row] = row_factor<Map>(p, r, row, state.reference[h], sums[h]) * weights.unit(h);
      write_peak<Map>(p, r, row, peaks[h]);
    }
  } else {
    const int h = thread % 4;
    if (h > 1) return;
    const int row = row0 + 8 * h;
    control.result[row] = row_factor<Map>(p, r, row, of_row(state.reference, h), of_row(sums, h));
  }
}

// Leaves what the values role finds them from.
template <class Map>
__device__ __forceinline__ void leave_row_sums(const RowState<Map::kPeaks>& state, WideControl& control) {
  const int thread = warpgroup_thread(), h = thread % 4, row = accumulator_row(thread) + 8 * h;
  const float sums[2] = {state.row_sum(0), state.row_sum(1)}, peaks[2] = {state.row_peak(0), state.row_peak(1)};
  if (h > 1) return;
  control.row_sum[row] = make_float2(of_row(state.reference, h), of_row(sums, h));
  if (Map::kPeaks) control.row_peak[row] = of_row(peaks, h);
}

// Of what is kept for all steps of an item where these are stored, and what is there for one.
template <class Map, class Kept>
__device__ __forceinline__ Kept& of_all_steps(Kept& kept, Kept& own) {
  if constexpr (Map::kStoresSteps)
    return kept;
  else
    return own;
}

// T: of Q and the output; M: what is multiplied.
template <class T, class M, int QkDim, class Map>
__device__ __forceinline__ void compute_scores(const FmDecodeParams& p, const FirstItem& first, uint8_t* smem,
                                               WideControl& control) {
  TilePlace<Map> place;
  uint32_t result_parity = 1;
  [[maybe_unused]] QueryFragments<Map::kRegisterChunks> kept;
  for_each_step<Map>(p, first, [&](int item, const RowBlock& range, const RowBlock& whole, bool) {
    [[maybe_unused]] QueryFragments<Map::kRegisterChunks> own;
    auto& q = of_all_steps<Map>(kept, own);
    RowState<Map::kPeaks> state;
    WeightFactors weights;  // of codes only
    const bool begins = range.tile_begin == whole.tile_begin;
    if (begins && warpgroup_thread() == 0) {
      control.first_masked = range.first_masked(p);
      control.first_shared = range.rows_differ(p) ? control.first_masked : kNoTile;
    }
    if (begins && !range.empty()) {
      if constexpr (Map::kCodes)
        load_query_halves<T, QkDim, Map>(p, range, smem);
      else
        load_query<T, QkDim, Map>(p, range, q, shared_address(smem) + Map::kQueryOffset);
    }
    if (begins && holds_tiles<Map>(p, whole) && item == first.number) named_barrier_arrive<kQueryBarrier, 256>();
    HeldTile held;
    bool ready = false;  // the tile's keys, as far as Q K^T begins with them
    for (int tile = range.tile_begin; tile < range.tile_end; ++tile) {
      float s[32];
      bool masked, cleans;
      const auto look = [&] {  // whether scores are masked, and V cleaned; without branches
        const bool absent = control.present[place.rope()] != ~0ull;
        const bool shared = tile >= control.first_shared;
        masked = opaque(absent | (Map::kTokens ? shared : tile >= control.first_masked));
        cleans = opaque(Map::kTokens ? shared : absent | shared);  // single tokens: absent ones are zeros
      };
      if constexpr (Map::kCodes) {
        multiply_query_codes<T, M, QkDim, Map>(s, q, smem, control, place, held);
        look();
      } else {
        multiply_query_key<M, QkDim, Map>(s, q, shared_address(smem), control, place, held, ready, look);
      }
      if (masked) mask_tile<Map>(p, item, s, tile, cleans, control.present[place.rope()]);
      const int row0 = accumulator_row(warpgroup_thread());
      const float scale[2] = {score_scale<Map>(p, smem, row0), score_scale<Map>(p, smem, row0 + 8)};
      float2 shrink;
      bool moved = state.move(s, scale, shrink);
      if constexpr (Map::kTokens) state.weigh(s, scale);
      if constexpr (Map::kCodes) {
        scale_by_token(s, [&](int i) { return pair_of(units_of<Map>(smem).of_tile[place.rope()].token, i); });
        weights.apply(s, shrink);
        moved = __any_sync(~0u, shrink.x != 1.f || shrink.y != 1.f);
      }
      announce_rescale(moved, shrink, control, place.rope());
      named_barrier<kScoresBarrier, 128>();  // every warp has read K: P may overwrite its rope part
      if constexpr (!Map::kTokens) state.weigh(s, scale);  // here warps wait for each other less; with tokens it takes longer
      store_weights<M>(s, shared_address(smem) + Map::rope_offset(place.rope()));
      if constexpr (Map::kCodes && QkDim > kLatent) scale_values<Map>(smem, place);
      if (Map::kTokens ? cleans : masked) {
        const RowBlock r = load_row_block<Map>(p, item);
        if (!Map::kTokens)
          clear_past_end<Map>(r.seq_len - tile * kTileTokens, shared_address(smem), place, {0, 1, 2, 3});
        if (cleans) clean_values<M, Map>(p, r, smem, place, tile, control.present[place.rope()]);
      }
      held.hold(control, place);
      place.advance();
      if constexpr (!Map::kCodes)  // while P is on its way
        ready = has_keys<0, Map::kEarlyBlocks, kRopeFirst<Map>>(control, place) && tile + 1 < range.tile_end;
      fence_async_shared();
    }
    held.release();
    mbarrier_wait(shared_address(&control.result_empty), result_parity);
    if constexpr (Map::kSumsToValues)
      leave_row_sums<Map>(state, control);
    else
      finish_rows<Map>(p, load_step<Map>(p, item, range.tile_begin), state, weights, control);
    mbarrier_arrive(shared_address(&control.result_full));
    result_parity ^= 1;
  });
}

}  // namespace fm
