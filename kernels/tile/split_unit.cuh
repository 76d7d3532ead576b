// The end of a part of a split unit: partial results to memory, and when all parts of a CTA's rows are there, their sum to the
// output. All CTAs with a part add up a piece of the rows each: as many pieces as parts, and a CTA has the piece with the number
// of its part. A CTA waits for the others if it has nothing else to do. If it has more items, or has waited for long, it gives
// its piece up to the one that comes last, which never waits: nothing depends on all CTAs being on the GPU at the same time.
//
// Partial results are normalised, with their base-2 log-sum-exps. With m = max_j l_j,
// out = sum_j 2^(l_j - m) o_j / sum_j 2^(l_j - m) and lse = ln 2 (m + log2 sum_j 2^(l_j - m)). Parts are added in their
// order: the result depends neither on timing nor on who adds them. How: split_rows.cuh (64 rows), split_few.cuh (16 and 32),
// and, for two parts of 64 rows of 16-bit caches, two_parts.cuh. Two and three parts of 16 and 32 rows are added up as last_adds.cuh
// has it, unless clusters share them or registers are short (LastAdds::kExists).
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/global.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"
#include "shared_map.cuh"
#include "work.cuh"

namespace fm {

constexpr int kAddBarrier = 2;  // named barrier of both values warpgroups
constexpr int kMostPieces = 32;  // a bit each
constexpr int64_t kMostWait = 100000;  // cycles, about 50 us

// What the CTAs with a part of a row block tell each other, in FmMerge: how many parts are there, in the low
// half of a word, and in the high one which pieces have been given up, a bit each. By one thread.
struct PartCount {
  FmMerge* merge;
  unsigned block;  // not negative: no sign to extend
  int parts;

  __device__ __forceinline__ uint64_t* word() const { return reinterpret_cast<uint64_t*>(merge->arrived[block]); }
  __device__ __forceinline__ int pieces() const { return min(parts, kMostPieces); }
  __device__ __forceinline__ uint32_t piece_of(int part) const { return part < kMostPieces ? 1u << part : 0; }

  // Leaves a part, whose piece is `own`. Returns the pieces that are this CTA's to add up, now that all parts are there: a bit
  // each.
  __device__ __forceinline__ uint32_t arrive(uint32_t own, bool wait) const {
    fence_gpu();
    const uint64_t before = count(wait ? 0 : own);
    uint32_t mine = own;
    if (was_last(before))
      mine |= before >> 32;
    else if (!wait || own == 0 || (!wait_for_all() && give_up(own)))
      mine = 0;
    fence_gpu();
    return mine;
  }
  // This part among those that are there, and a piece that is given up at once or none; what the word was.
  __device__ __forceinline__ uint64_t count(uint32_t given_up) const {
    return atomic_add(word(), (uint64_t)given_up << 32 | 1);
  }
  __device__ __forceinline__ bool was_last(uint64_t before) const { return (uint32_t)before + 1 == parts; }
  __device__ __forceinline__ uint64_t look() const { return load_relaxed(word()); }
  // Not for long.
  __device__ __forceinline__ bool wait_for_all() const {
    const int64_t begin = clock64();
    while (clock64() - begin < kMostWait)
      if ((uint32_t)look() == parts) return true;
    return false;
  }
  // Leaves a piece to the last one, unless that has been here: returns whether it is given up.
  __device__ __forceinline__ bool give_up(uint32_t piece) const {
    for (uint64_t seen = look(); (uint32_t)seen != parts;) {
      const uint64_t expected = seen;
      seen = compare_and_swap(word(), expected, expected | (uint64_t)piece << 32);
      if (seen == expected) return true;
    }
    return false;
  }
  // Of pieces that are added up. With the last of them the next launch is prepared.
  __device__ __forceinline__ void leave(uint32_t mine) const {
    const int own = __popc(mine), all = pieces();
    int before = 0;
    if (own == 0) return;
    if (own < all) before = atomic_add(&merge->done[block], own);
    if (before + own < all) return;
    merge->done[block] = 0;
    *word() = 0;
  }
};

static_assert(offsetof(FmMerge, q_len) == 16 && offsetof(FmMerge, first_slot) == 20 && offsetof(FmMerge, parts) == 24);

// A split unit as a CTA sees it when it has computed a part of it.
struct SplitUnit {
  PartCount count;
  int part;         // which one this is
  int next_worker;  // where the next worker's items begin
};

template <class Map>
__device__ __forceinline__ SplitUnit load_split_unit(const FmDecodeParams& p, const RowBlock& r) {
  FmMerge* merge = p.merges + r.merge;
  const int4 v = load_once(reinterpret_cast<const int4*>(&merge->q_len));  // first_slot and parts are in it
  return {{merge, Map::kSplits ? cluster_rank() : (unsigned)r.block, v.z}, r.slot - v.y, next_worker_item(p)};
}

// What a CTA of 64 rows has to know of its part until the end, in shared memory: registers are short then, and a fence empties the L1.
// By one thread.
template <class Map>
__device__ __forceinline__ void leave_split_item(const FmDecodeParams& p, int item, WideControl& control) {
  const int4* at = reinterpret_cast<const int4*>(p.items) + 3 * item;
  const int4 a = load_once(at), b = load_once(at + 1), c = load_once(at + 2);
  control.item[0] = a, control.item[1] = b, control.item[2] = c;
  const SplitUnit unit = load_split_unit<Map>(p, row_block_of<Map>(p, a, b, c));
  control.part = unit.part, control.next_worker = unit.next_worker;
}
template <class Map>
__device__ __forceinline__ RowBlock left_row_block(const FmDecodeParams& p, const WideControl& control) {
  const auto load = [&](int i) {
    const uint4 v = load_shared_4(shared_address(&control.item[i]));
    return int4{(int)v.x, (int)v.y, (int)v.z, (int)v.w};
  };
  return row_block_of<Map>(p, load(0), load(1), load(2));
}
template <class Map>
__device__ __forceinline__ SplitUnit left_split_unit(const FmDecodeParams& p, const WideControl& control) {
  const uint4 v = load_shared_4(shared_address(&control.item[2]));  // slot, merge, main_len, parts
  const int part = load_shared_word(shared_address(&control.part));
  const int next_worker = load_shared_word(shared_address(&control.next_worker));
  return {{p.merges + (int)v.y, (unsigned)cta_of_team(), (int)v.w}, part, next_worker};
}

// What the parts of a row are multiplied with, by a warp: each `Lanes` lanes have a row, and a lane parts lane, lane + Lanes
// and so on of its own.
template <int Lanes>
struct PartWeights {
  float top = -__FLT_MAX__;
  float weight = 0.f, sum = 0.f;  // of this lane's parts: the present one's; all up to that

  // That of lane `lane` of them becomes part base + lane of `parts`. `lse`: of its first one; `stride`: from one to the next.
  template <class Stride>
  __device__ __forceinline__ void load(const float* lse, Stride stride, int base, int parts, int lane) {
    const float own = base + lane < parts ? __ldcg(lse + base * stride) : kNegInf;
    if (base == 0) {
      top = fmaxf(top, own);
#pragma unroll 1
      for (int j = Lanes; j + lane < parts; j += Lanes) top = fmaxf(top, __ldcg(lse + j * stride));
      __syncwarp();
#pragma unroll
      for (int d = 1; d < Lanes; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    }
    weight = exp2_approx(own - top);
    sum += weight;
  }
  // Of all lanes.
  __device__ __forceinline__ float total() const {
    float all = sum;
#pragma unroll
    for (int d = 1; d < Lanes; d *= 2) all += __shfl_xor_sync(~0u, all, d);
    return all;
  }
};

// By both values warpgroups when their partial results have been stored. `add(r, parts, begin, end, warp)` adds up tasks
// begin .. end of all `tasks`, `r` having the unit's first slot, by this one of eight warps. `load_unit()` gives the part's
// SplitUnit, in the end once more: registers are short between.
template <class Map, class Load, class Add>
__device__ __forceinline__ void finish_part(const FmDecodeParams& p, Load load_unit, int item, int tasks,
                                            DecodeControl& control, Add add) {
  const int thread = block_thread() - 128;
  named_barrier<kAddBarrier, 256>();
  const SplitUnit unit = load_unit();
  const int parts = unit.count.parts;
  const int first_slot = __ldcg(&unit.count.merge->first_slot);  // registers are short before
  if (thread == 0) control.pieces = unit.count.arrive(unit.count.piece_of(unit.part), item + 1 >= unit.next_worker);
  RowBlock r = load_row_block<Map>(p, item);
  r.slot = first_slot;
  named_barrier<kAddBarrier, 256>();
#pragma unroll 1
  for (uint32_t left = control.pieces; left != 0;) {  // pieces beside each other at once
    const uint32_t lowest = left & -left, above = left & left + lowest;
    const int piece = __popc(lowest - 1), next = piece + __popc(left ^ above), all = unit.count.pieces();
    add(r, parts, piece * tasks / all, next * tasks / all, thread / 32);
    left = above;
  }
  named_barrier<kAddBarrier, 256>();
  if (thread == 0) load_unit().count.leave(control.pieces);
}

}  // namespace fm
