// How the parts of a split unit are added up in a CTA of 16 or 32 rows (split_unit.cuh has the rest). A slot has the rows one
// after another (of few parts of single CTAs: last_adds.cuh). Where a cluster shares an item's tiles, each of its CTAs has a share
// of every 16 rows (merge_parts.cuh), of which it adds up the parts with the CTAs in the same place of the other clusters.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/control.cuh"
#include "numbers.cuh"
#include "shared_map.cuh"
#include "split_unit.cuh"
#include "work.cuh"

namespace fm {

constexpr int kQuarterRow = kLatent / 4;  // what a warp reads at once, sixteen bytes a lane

// How a warp adds up parts. It depends on their number alone, besides the kernel, as does the order in which numbers are added. Of few
// parts it reads some quarters of a row at once, of others as many parts as it can. Most: parts, kFewParts at most, or any number, of which
// as many as that at a time.
constexpr int kFewParts = 4, kSomeParts = 32, kManyParts = 128;
template <class Map, int Most>
struct PartReads {
  static constexpr bool kFew = Most <= kFewParts;
  static constexpr int kAll = Map::kShortOfRegisters ? 4 : 8;  // under way, by a lane
  static constexpr int kQuarters = kFew ? kAll / 2 : 1, kParts = kAll / kQuarters;
  static constexpr int kOfRowLog2 = kQuarters == 1 ? 2 : kQuarters == 2 ? 1 : 0;
  static constexpr int kWeights = Most <= kSomeParts ? 32 : kManyParts;  // of parts, known at a time
  // Eight groups, too, where they read no more parts at once than weights are known, and a CTA of 16 rows has little to add otherwise.
  static constexpr bool kEight = Map::kRows == kPartRows && Map::kShortOfRegisters;
  static_assert(kFew || kParts << (Most > kSomeParts || kEight ? 3 : 2) <= kWeights);
  // Groups of lanes that have parts of their own, of the same columns: with 16 rows and as many pieces as parts a warp has one task.
  int groups_log2;

  __device__ __forceinline__ explicit PartReads(int parts)
      : groups_log2(kFew                 ? 0
                    : Most <= kSomeParts ? (parts >= 16) + (parts >= 32) + (kEight && parts >= 64)
                                         : 3) {}
  __device__ __forceinline__ int lanes() const { return 32 >> groups_log2; }
  __device__ __forceinline__ int columns() const { return kQuarters * kQuarterRow >> groups_log2; }
  __device__ __forceinline__ int of_row_log2() const { return kOfRowLog2 + groups_log2; }  // what warps read at once, of a row
  __device__ __forceinline__ int parts_at_once() const { return kParts << groups_log2; }
  // The part of read `i`.
  __device__ __forceinline__ int part(int i, int group) const { return (i / kQuarters << groups_log2) + group; }
};

template <class T>
__device__ __forceinline__ void store_four(T* to, float4 v, float factor) {
  *reinterpret_cast<uint2*>(to) =
      make_uint2(pack_result(T(), v.x * factor, v.y * factor), pack_result(T(), v.z * factor, v.w * factor));
}

// Adds up the parts of some columns of a row, from column `first` on, by a warp.
template <class T, class Map, int Most>
__device__ __forceinline__ void add_parts_of_row(const FmDecodeParams& p, const RowBlock& r, int parts, int block_row, int first) {
  if (r.row_begin + block_row >= r.rows) return;
  using Reads = PartReads<Map, Most>;
  constexpr int kStride = Map::kRows;  // rows from one slot to the next
  const Reads reads(parts);
  const int lane = block_thread() % 32, group = lane / reads.lanes(), column = first + lane % reads.lanes() * 4;
  const float* lse = p.partial_lse + slot_lse<Map>(p, r, block_row) + lane;
  const float* from = p.partial_out + slot_row<Map>(p, r, block_row) * kLatent + column;
  PartWeights<32, Reads::kWeights / 32> weights;
  float4 total[Reads::kQuarters] = {};
#pragma unroll 1
  for (int base = 0; base < parts; base += reads.parts_at_once()) {
    const bool first_of_weights = base % Reads::kWeights == 0;
    if (first_of_weights) weights.ask(lse, base, parts, lane);  // before the parts: they are waited for first
    float4 v[Reads::kAll];
#pragma unroll
    for (int i = 0; i < Reads::kAll; ++i) {  // past the last part zeros, of no weight
      const int part = base + reads.part(i, group);
      const float* at = from + (uint64_t)(uint32_t)part * (uint32_t)(kStride * kLatent) + i % Reads::kQuarters * kQuarterRow;
      v[i] = part < parts ? __ldcg(reinterpret_cast<const float4*>(at)) : float4{};
    }
    if (first_of_weights) weights.find(base);
#pragma unroll
    for (int i = 0; i < Reads::kAll; ++i) {
      add_scaled(total[i % Reads::kQuarters], weights.of(base + reads.part(i, group), base + reads.part(i, 0)), v[i]);
    }
  }
  const float sum = weights.total();
  if (!Reads::kFew)
#pragma unroll 1
    for (int d = reads.lanes(); d < 32; d *= 2)
      add_scaled(total[0], 1.f, make_float4(__shfl_xor_sync(~0u, total[0].x, d), __shfl_xor_sync(~0u, total[0].y, d),
                                            __shfl_xor_sync(~0u, total[0].z, d), __shfl_xor_sync(~0u, total[0].w, d)));
  RowBlock whole = r;
  whole.slot = -1;
  const float factor = row_factor<Map>(p, whole, block_row, weights.top, sum, first == 0 && lane == 0);
  if (group > 0) return;
  T* to = reinterpret_cast<T*>(p.out) + row_offset(p, r, r.row_begin + block_row, p.out_stride) + column;
#pragma unroll
  for (int i = 0; i < Reads::kQuarters; ++i) store_four(to + kQuarterRow * i, total[i], factor);
}

// By both values warpgroups when their partial results have been stored. A task is what a warp adds up at once.
template <class T, class Map>
__device__ __forceinline__ void finish_part_of_rows(const FmDecodeParams& p, const SplitUnit& unit, int item,
                                                    DecodeControl& control) {
  constexpr bool kMany = !kSharesTiles<Map> && !Map::kShortOfRegisters;  // whether a unit may well have many parts
  constexpr int kShare = kPartRows / Map::kCluster;  // of this CTA, of every 16 rows
  const auto block_row = [&](unsigned i) { return (int)(i / kShare * kPartRows + cluster_rank() * kShare + i % kShare); };
  const auto finish = [&](auto most) {
    constexpr int kMost = decltype(most)::value;
    using Reads = PartReads<Map, kMost>;
    const auto tasks = [&](int parts) { return Map::kRows / kPartRows * kShare << Reads(parts).of_row_log2(); };
    const auto add = [&](const RowBlock& r, int parts, int begin, int end, int warp) {
      const Reads reads(parts);
#pragma unroll 1
      for (int task = begin + warp; task < end; task += 8)
        add_parts_of_row<T, Map, kMost>(p, r, parts, block_row(task >> reads.of_row_log2()),
                                        (task & (1 << reads.of_row_log2()) - 1) * reads.columns());
    };
    finish_part<Map, kMost == kFewParts ? kMost : kManyParts>(p, [&] { return unit; }, item, tasks, control, add);
  };
  if (unit.count.parts <= kFewParts)
    finish(std::integral_constant<int, kFewParts>());
  else if (!kMany || unit.count.parts <= kSomeParts)
    finish(std::integral_constant<int, kSomeParts>());
  else
    finish(std::integral_constant<int, kManyParts>());
}

}  // namespace fm
