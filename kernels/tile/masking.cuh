// What the scores roles share: constants of the softmax, and what keeps absent and unseen tokens out of the results.
#pragma once
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "work.cuh"

namespace fm {

constexpr int kScoresBarrier = 1;  // named barrier of the scores warpgroup
constexpr float kReferenceSlack = 8.f;

// After a wait for blocks: makes what cp.async has written visible to wgmma. TMA's writes are.
template <class Map>
__device__ __forceinline__ void fence_copies() {
  if (Map::kTokens) fence_async_shared();
}

// A wait of a whole warpgroup for a barrier. Beside a loader that computes, one warp polls for all: polls take issue slots.
template <class Map>
__device__ __forceinline__ void wait_together(uint32_t barrier, uint32_t parity, int named) {
  if (Map::kTokens) {
    if (warpgroup_thread() < 32) mbarrier_wait(barrier, parity);
    named_barrier_of_warpgroup(named);
  } else {
    mbarrier_wait(barrier, parity);
  }
}

// The tokens of the tile that exist: valid page, inside the sequence.
__device__ __forceinline__ uint64_t existing(uint64_t present, int in_sequence) {
  return in_sequence < kTileTokens ? present & ((1ull << max(in_sequence, 0)) - 1) : present;
}

// Makes V safe to multiply with zero weights: rows of absent tokens become zeros; rows that some query rows of the
// block see and others do not lose their infinities and NaNs (a query row that sees such a token has a NaN weight
// already).
template <class T, class Map>
__device__ __forceinline__ void clean_values(const FmDecodeParams& p, const RowBlock& r, uint8_t* smem,
                                             TilePlace<Map> place, int tile, uint64_t present) {
  const int start = tile * kTileTokens;
  present = existing(present, r.seq_len - start);
  const uint64_t seen_by_all = existing(present, r.visible(p, r.row_begin) - start);
  // A thread has one of the 64 pieces of every other row.
  const int piece = warpgroup_thread() % 64;
  uint8_t* column = smem + block_offset(place.block(piece / 16));
#pragma unroll 1
  for (int row = warpgroup_thread() / 64; row < kTileTokens; row += 2) {
    if (seen_by_all >> row & 1) continue;
    uint4* at = reinterpret_cast<uint4*>(column + latent_swizzled(row, piece % 16));
    uint4 v = make_uint4(0, 0, 0, 0);
    if (present >> row & 1) {
      v = *at;
      v.x = finite_or_zero(T(), v.x), v.y = finite_or_zero(T(), v.y);
      v.z = finite_or_zero(T(), v.z), v.w = finite_or_zero(T(), v.w);
    }
    *at = v;
  }
}

// Makes scales safe to multiply with zero weights: a row that sees a token with an infinite or NaN scale has a NaN weight
// already. By the scores warpgroup when all of it has used the scales for its scores.
template <class Map>
__device__ __forceinline__ void clean_scales(uint8_t* smem, TilePlace<Map> place) {
  if constexpr (Map::kScaleGroups > 1) {
    float* scales = reinterpret_cast<float*>(smem + Map::scale_offset(place.rope()));
#pragma unroll 1
    for (int i = warpgroup_thread(); i < Map::kScaleGroups * kTileTokens; i += 128)
      if (!(fabsf(scales[i]) <= 3.4e38f)) scales[i] = 0.f;
    named_barrier<kScoresBarrier, 128>();
  }
}

// Waits until the values role is done with the weights of the tile before, of which there is one place only.
template <class Map>
__device__ __forceinline__ void wait_for_weights_place(DecodeControl& control, TilePlace<Map> place, bool first_tile) {
  if (Map::kScaleGroups == Map::kGroupsInRope || first_tile) return;
  const TilePlace<Map> last = place.before();
  mbarrier_wait(shared_address(&control.tile_empty[last.rope()]), last.rope_parity());
}

}  // namespace fm
