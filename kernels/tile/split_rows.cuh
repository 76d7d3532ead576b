// The end of a part of a split unit in a CTA of 64 rows: partial results to memory, and when all parts of the row block
// are there, their sum to the output. All CTAs with a part add up a piece of the rows each: as many pieces as parts, and a
// CTA has the piece of the number in which it comes. A CTA waits for the others if it has nothing else to do. If it has
// more items, or has waited for long, it gives its piece up to the one that comes last, which never waits: nothing depends
// on all CTAs being on the GPU at the same time.
//
// Of two parts (two_parts.cuh) each CTA adds up one half of the columns instead.
//
// Partial results are normalised, with their base-2 log-sum-exps. With m = max_j l_j,
// out = sum_j 2^(l_j - m) o_j / sum_j 2^(l_j - m) and lse = ln 2 (m + log2 sum_j 2^(l_j - m)). Parts are added in their
// order: the result depends neither on timing nor on who adds them.
//
// A row block of a slot is [32 pairs of rows][256 pairs of columns][2 rows][2 columns], so that what a thread of the
// values role has of a matrix product's 8 columns is one store of 16 bytes. Pair i is rows 16 (i / 8) + i % 8 + {0, 8}.
#pragma once
#include "../ptx/control.cuh"
#include "../ptx/math.cuh"
#include "work.cuh"

namespace fm {

constexpr int kAddBarrier = 2;  // named barrier of both values warpgroups
constexpr int kRowPairs = kTileRows / 2;
constexpr int kPairNumbers = 2 * kLatent;  // of a pair of rows
constexpr int64_t kMostWait = 100000;      // cycles, about 50 us

__device__ __forceinline__ int first_row_of_pair(int pair) { return pair / 8 * 16 + pair % 8; }

// What the CTAs with a part of a row block tell each other, in FmMerge: how many parts are there, in the low
// half of a word, and in the high one which pieces have been given up, a bit each. By one thread.
struct PartCount {
  FmMerge* merge;
  unsigned block;  // not negative: no sign to extend
  int parts;

  __device__ __forceinline__ uint64_t* arrived() const { return reinterpret_cast<uint64_t*>(merge->arrived[block]); }
  __device__ __forceinline__ int pieces() const { return min(parts, kRowPairs); }
  __device__ __forceinline__ uint32_t piece_of(uint32_t order) const { return order < kRowPairs ? 1u << order : 0; }

  // Leaves a part. Returns the pieces that are this CTA's to add up, now that all parts are there: a bit each.
  __device__ __forceinline__ uint32_t arrive(bool wait) const {
    fence_gpu();
    const uint64_t before = count();
    const uint32_t order = (uint32_t)before, own = piece_of(order);
    uint32_t mine = own;
    if (order + 1 == parts)
      mine |= before >> 32;
    else if (!(wait && wait_for_all()) && !give_up(own))
      mine = 0;
    fence_gpu();
    return mine;
  }
  // This part among those that are there; what the word was.
  __device__ __forceinline__ uint64_t count() const {
    uint64_t before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(arrived()), "l"(1ll) : "memory");
    return before;
  }
  __device__ __forceinline__ uint64_t look() const {
    uint64_t now;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(arrived()) : "memory");
    return now;
  }
  // Not for long.
  __device__ __forceinline__ bool wait_for_all() const {
    const int64_t begin = clock64();
    while (clock64() - begin < kMostWait)
      if ((uint32_t)look() == parts) return true;
    return false;
  }
  // Leaves a piece to the last one: that sees it, or this one that the last has been here. Returns whether it has.
  __device__ __forceinline__ bool give_up(uint32_t piece) const {
    uint64_t before;
    asm volatile("atom.relaxed.gpu.global.or.b64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(arrived()), "l"((uint64_t)piece << 32)
                 : "memory");
    return (uint32_t)before == parts;
  }
  // Who is done last prepares the next launch.
  __device__ __forceinline__ void leave() const {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(&merge->done[block]), "r"(parts - 1)
                 : "memory");
    if (before == parts - 1) *arrived() = 0;
  }
};

// Adds up the parts of a pair of rows, by a warp: `Pieces` times 32 pairs of columns, from pair of columns 32 `first` on.
// `r` has the unit's first slot. For weights lanes 0 .. 15 have parts of the first row, the others of the second. What runs
// here runs once or twice, so that it has to be short: fetching instructions takes longer than they do.
template <class T, class Map, int Pieces>
__device__ __forceinline__ void add_parts_of_pair(const FmDecodeParams& p, const RowBlock& r, int parts, int pair,
                                                  int first) {
  constexpr int kBatch = 16 / Pieces;
  const int lane = block_thread() % 32, block_row = first_row_of_pair(pair) + lane / 16 * 8;
  const int stride = p.team * kTileRows;  // rows from one slot to the next
  const float* lse = p.partial_lse + slot_row<Map>(p, r, block_row) + lane % 16 * stride;
  const float* from = p.partial_out + slot_row<Map>(p, r, 0) * kLatent + pair * kPairNumbers + first * 128 + lane * 4;
  float top = -__FLT_MAX__, weight = 0.f, sum = 0.f;
  float4 total[Pieces] = {};
#pragma unroll 1
  for (int base = 0; base < parts; base += kBatch) {
    float4 v[kBatch][Pieces];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {  // past the last part: that one again
      const float* part = from + (uint64_t)(uint32_t)min(base + j, parts - 1) * (uint32_t)(stride * kLatent);
#pragma unroll
      for (int i = 0; i < Pieces; ++i) v[j][i] = __ldcg(reinterpret_cast<const float4*>(part + 128 * i));
    }
    if (base % 16 == 0) {
      const float own = base + lane % 16 < parts ? __ldcg(lse + base * (int64_t)stride) : kNegInf;
      if (base == 0) {
        top = fmaxf(top, own);
#pragma unroll 1
        for (int j = 16; j + lane % 16 < parts; j += 16) top = fmaxf(top, __ldcg(lse + j * (int64_t)stride));
        __syncwarp();
#pragma unroll
        for (int d = 1; d < 16; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      }
      weight = exp2_approx(own - top);
      sum += weight;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const float a = __shfl_sync(~0u, weight, base % 16 + j), b = __shfl_sync(~0u, weight, base % 16 + j + 16);
      if (base + j >= parts) continue;
#pragma unroll
      for (int i = 0; i < Pieces; ++i) {
        total[i].x += a * v[j][i].x, total[i].y += a * v[j][i].y;
        total[i].z += b * v[j][i].z, total[i].w += b * v[j][i].w;
      }
    }
  }
#pragma unroll
  for (int d = 1; d < 16; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  RowBlock whole = r;
  whole.slot = -1;
  const float factor = row_factor<Map>(p, whole, block_row, top, sum, first == 0 && lane % 16 == 0);
  const int64_t own_offset = row_offset(p, r, r.row_begin + block_row, p.out_stride);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float f = __shfl_sync(~0u, factor, 16 * h);
    T* out = reinterpret_cast<T*>(p.out) + __shfl_sync(~0u, own_offset, 16 * h) + first * 64 + lane * 2;
    if (r.row_begin + first_row_of_pair(pair) + h * 8 >= r.rows) return;
#pragma unroll
    for (int i = 0; i < Pieces; ++i)
      *reinterpret_cast<uint32_t*>(out + 64 * i) = h == 0 ? pack_result(T(), total[i].x * f, total[i].y * f)
                                                          : pack_result(T(), total[i].z * f, total[i].w * f);
  }
}

// Pairs begin .. end.
template <class T, class Map, int Pieces>
__device__ __forceinline__ void add_parts_of_pairs(const FmDecodeParams& p, const RowBlock& r, int parts, int begin,
                                                   int end, int warp) {
  constexpr int kTasks = 8 / Pieces;  // of a pair
#pragma unroll 1
  for (int task = begin * kTasks + warp; task < end * kTasks; task += 8)
    add_parts_of_pair<T, Map, Pieces>(p, r, parts, task / kTasks, task % kTasks * Pieces);
}

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
  return {{merge, (unsigned)r.block, v.z}, r.slot - v.y, next_worker_item<Map>(p)};
}

// By both values warpgroups when their partial results have been stored.
template <class T, class Map>
__device__ __forceinline__ void finish_part(const FmDecodeParams& p, const SplitUnit& unit, int item,
                                            DecodeControl& control) {
  const int thread = block_thread() - 128, parts = unit.count.parts;
  named_barrier<kAddBarrier, 256>();
  const int first_slot = __ldcg(&unit.count.merge->first_slot);  // registers are short before
  if (thread == 0) control.pieces = unit.count.arrive(item + 1 >= unit.next_worker);
  RowBlock r = load_row_block<Map>(p, item);
  r.slot = first_slot;
  named_barrier<kAddBarrier, 256>();
  uint32_t pieces = control.pieces;
#pragma unroll 1
  for (; pieces != 0; pieces &= pieces - 1) {
    const int piece = __ffs(pieces) - 1, all = unit.count.pieces();
    const int begin = piece * kRowPairs / all, end = (piece + 1) * kRowPairs / all;
    if (parts <= 4)
      add_parts_of_pairs<T, Map, 8>(p, r, parts, begin, end, thread / 32);
    else if (parts <= 8)
      add_parts_of_pairs<T, Map, 4>(p, r, parts, begin, end, thread / 32);
    else
      add_parts_of_pairs<T, Map, 1>(p, r, parts, begin, end, thread / 32);
  }
  named_barrier<kAddBarrier, 256>();
  if (thread == 0) unit.count.leave();
}

}  // namespace fm
