// The end of a part of a split unit: partial results to memory, and when all parts of a CTA's rows are there, their sum to the
// output. All CTAs with a part add up a piece of the rows each: as many pieces as parts, up to a most, and a CTA has the piece with the
// number of its part. A CTA waits for the others if it has nothing else to do. If it has more items, or has waited for long, it gives
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
constexpr int kPieceBits = 32;  // pieces with as many others between them have a bit in common
constexpr int64_t kMostWait = 100000;  // cycles, about 50 us

// What the CTAs with a part of a row block tell each other, in a word of FmMerge: how many parts are there, by one of two counts in its
// low half, and in the high one which pieces have been given up, by bits. By one thread. Counts are used in turn: whoever comes last
// clears the other one, which is next, so that nobody has to know when all pieces are added up.
struct PartCount {
  FmMerge* merge;
  unsigned block;  // not negative: no sign to extend
  int parts;
  unsigned turn;  // 0 or 1

  __device__ __forceinline__ uint64_t* word() const { return reinterpret_cast<uint64_t*>(merge->arrived[block]); }
  __device__ __forceinline__ int shift() const { return 16 * turn; }
  // How many parts are there, by a word.
  __device__ __forceinline__ int there(uint64_t word) const { return (uint32_t)word >> shift() & 0xFFFF; }
  // Of the piece with the number of a part. What is given up is added up even where a bit is of other pieces as well, which are then
  // added up twice, in the same way.
  static __device__ __forceinline__ uint32_t piece_of(int part, int pieces) { return part < pieces ? 1u << part % kPieceBits : 0; }

  // Leaves a part, whose piece is `own`. Returns the pieces that are this CTA's to add up, now that all parts are there: its own, and
  // those that have been `given_up` if it is the last one.
  __device__ __forceinline__ uint32_t arrive(uint32_t own, bool wait, uint32_t& given_up) const {
    fence_gpu();
    const uint64_t before = count(wait ? 0 : own);
    uint32_t mine = own;
    given_up = 0;
    if (was_last(before))
      given_up = before >> 32, close(before);
    else if (!wait || own == 0 || (!wait_for_all() && give_up(own)))
      mine = 0;
    return mine;
  }
  // This part among those that are there, and before it a piece that is given up at once, or none; what the word was. What the parts that
  // were there are can be read after it.
  __device__ __forceinline__ uint64_t count(uint32_t given_up) const {
    if (given_up != 0) set_bits(word(), (uint64_t)given_up << 32);
    return atomic_add_acquire(word(), uint64_t{1} << shift());
  }
  __device__ __forceinline__ bool was_last(uint64_t before) const { return there(before) + 1 == parts; }
  // By the last one, of what the word was: the next launch begins with the other count, and no bits.
  __device__ __forceinline__ void close(uint64_t was) const {
    subtract(word(), was & ~(uint64_t{0xFFFF} << shift()));
    turn_bits(&merge->turn, 1u << block);
  }
  __device__ __forceinline__ uint64_t look() const { return load_acquire(word()); }
  // Not for long. If it returns true what the parts are can be read.
  __device__ __forceinline__ bool wait_for_all() const {
    const int64_t begin = clock64();
    while (clock64() - begin < kMostWait)
      if (there(look()) == parts) return true;
    return false;
  }
  // Leaves a piece to the last one, unless that has been here: returns whether it is given up. If not what the parts are can be read.
  __device__ __forceinline__ bool give_up(uint32_t piece) const {
    for (uint64_t seen = look(); there(seen) != parts;) {
      const uint64_t expected = seen;
      seen = compare_and_swap(word(), expected, expected | (uint64_t)piece << 32);
      if (seen == expected) return true;
    }
    return false;
  }
};
__device__ __forceinline__ unsigned turn_of(const FmMerge& merge, unsigned block) { return load_relaxed(&merge.turn) >> block & 1; }

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
  const unsigned block = Map::kFewRows ? cluster_rank() : (unsigned)r.block;
  return {{merge, block, v.z, turn_of(*merge, block)}, r.slot - v.y, next_worker_item(p)};
}

// What a CTA of 64 rows has to know of its part until the end, in shared memory: registers are short then, and a fence empties the L1.
// By one thread.
template <class Map>
__device__ __forceinline__ void leave_split_item(const FmDecodeParams& p, int item, WideControl& control) {
  const int4* at = reinterpret_cast<const int4*>(p.items) + 3 * item;
  const int4 a = load_once(at), b = load_once(at + 1), c = load_once(at + 2);
  control.item[0] = a, control.item[1] = b, control.item[2] = c;
  const SplitUnit unit = load_split_unit<Map>(p, row_block_of<Map>(p, a, b, c));
  control.part = unit.part, control.next_worker = unit.next_worker, control.turn = unit.count.turn;
}
template <class Map>
__device__ __forceinline__ RowBlock left_row_block(const FmDecodeParams& p, const WideControl& control) {
  const auto load = [&](int i) {
    const uint4 v = load_shared_4(shared_address(&control.item[i]));
    return int4{(int)v.x, (int)v.y, (int)v.z, (int)v.w};
  };
  return row_block_of<Map>(p, load(0), load(1), load(2));
}
__device__ __forceinline__ SplitUnit left_split_unit(const FmDecodeParams& p, const WideControl& control) {
  const uint4 v = load_shared_4(shared_address(&control.item[2]));  // slot, merge, main_len, parts
  const int part = load_shared_word(shared_address(&control.part));
  const int next_worker = load_shared_word(shared_address(&control.next_worker));
  const unsigned turn = load_shared_word(shared_address(&control.turn));
  return {{p.merges + (int)v.y, (unsigned)cta_of_team(), (int)v.w, turn}, part, next_worker};
}

// What the parts of a row are multiplied with, by a warp: each `Lanes` lanes have a row, and each of these has parts `Lanes` apart, `OfLane` of
// them at a time.
template <int Lanes, int OfLane = 1>
struct PartWeights {
  static constexpr int kAtOnce = Lanes * OfLane;
  float top = -__FLT_MAX__, sum = 0.f;  // of all parts; of this lane's so far
  float weight[OfLane];                 // of the present ones

  // Asks for what those of parts from `base` on are found from. `lse`: this lane's first one of all.
  __device__ __forceinline__ void ask(const float* lse, int base, int parts, int lane) {
    if (base == 0)
#pragma unroll 1
      for (int part = kAtOnce; part + lane < parts; part += Lanes) top = fmaxf(top, __ldcg(lse + part));
#pragma unroll
    for (int k = 0; k < OfLane; ++k) {
      const int part = base + Lanes * k;
      weight[k] = part + lane < parts ? __ldcg(lse + part) : kNegInf;
    }
  }
  __device__ __forceinline__ void find(int base) {
    if (base == 0) {
#pragma unroll
      for (int k = 0; k < OfLane; ++k) top = fmaxf(top, weight[k]);
      __syncwarp();
#pragma unroll
      for (int d = 1; d < Lanes; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    }
#pragma unroll
    for (int k = 0; k < OfLane; ++k) weight[k] = exp2_approx(weight[k] - top), sum += weight[k];
  }
  // Of a part. `first_of_lanes`: one of the same `Lanes` parts, the same for all lanes. `lane`: the row's first.
  __device__ __forceinline__ float of(int part, int first_of_lanes, int lane = 0) const {
    const int k = (unsigned)first_of_lanes / Lanes % OfLane;
    float own = weight[0];
#pragma unroll
    for (int i = 1; i < OfLane; ++i) own = k == i ? weight[i] : own;
    return __shfl_sync(~0u, own, lane + (unsigned)part % Lanes);
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
// begin .. end of all `tasks(parts)`, `r` having the unit's first slot, by this one of eight warps. `load_unit()` gives the part's
// SplitUnit. Most: pieces, at most.
template <class Map, int Most, class Load, class Tasks, class Add>
__device__ __forceinline__ void finish_part(const FmDecodeParams& p, Load load_unit, int item, Tasks tasks, DecodeControl& control,
                                            Add add) {
  const int thread = block_thread() - 128;
  named_barrier<kAddBarrier, 256>();
  const SplitUnit unit = load_unit();
  // Of many parts that are no power of two the last one has no piece: they mostly come from even shares, and its CTA has more items.
  const int parts = unit.count.parts;
  const bool many = Most > kPieceBits && parts > kPieceBits;
  const int pieces = min(many && (parts & parts - 1) != 0 ? parts - 1 : parts, Most);
  if (thread == 0) {
    uint32_t given_up;
    const uint32_t own = unit.count.arrive(PartCount::piece_of(unit.part, pieces), item + 1 >= unit.next_worker, given_up);
    control.pieces = many ? given_up : own | given_up;
    if (Most > kPieceBits) control.own_piece = !many || own == 0 || (own & given_up) != 0 ? -1 : unit.part;
  }
  RowBlock r = load_row_block<Map>(p, item);
  r.slot -= unit.part;  // the unit's first
  named_barrier<kAddBarrier, 256>();
  // Of pieces with bits of their own those beside each other at once; else this CTA's, and then all that may have been given up.
  int piece = Most > kPieceBits ? control.own_piece : -1, last = piece + 1;
  uint32_t left = control.pieces;
#pragma unroll 1
  while (piece >= 0 || left != 0) {
    int next = piece + 1;
    if (piece < 0) {
      const uint32_t lowest = left & -left, above = many ? left - lowest : left & left + lowest;
      piece = __popc(lowest - 1), next = piece + __popc(left ^ above), last = pieces, left = above;
    }
    // A rounded quotient is exact below 2^20: fewer instructions than a division of integers.
    const float inverse = inverse_approx((float)pieces);
    const auto first_task = [&](int of) { return (int)(((float)(of * tasks(parts)) + 0.5f) * inverse); };
    add(r, parts, first_task(piece), first_task(next), thread / 32);
    piece = many && piece + kPieceBits < last ? piece + kPieceBits : -1;
  }
  named_barrier<kAddBarrier, 256>();
}

}  // namespace fm
