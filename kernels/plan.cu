// The planner on the device: writes the plan of plan_layout.h for the lengths of a batch, byte for byte what
// `ferromla_schedule::plan_into` writes. The arithmetic is plan_algorithm.h; this file only distributes it.
//
// One block of 1024 threads, because every step needs the sum of the one before and a grid-wide barrier
// costs more than the work: at 1024 units each thread has one unit and one cut.
//
//   lay_out_units    a thread per unit: cost -> scan -> start of the unit on the work line
//   decide_cutting   a thread per worker: do whole units share out evenly enough?
//   write_units      a thread per unit: parts -> scan -> items, merge, first item of the unit
//   write_workers    a thread per cut: which item it falls on; in a cut unit, that item
//
// A unit's thread writes the unit's first item and a cut's thread the item that begins there, so nobody
// loops over the parts of a long request. In the modes that fix the parts of a unit its thread writes all.
//
// Shared memory: 8-byte unit starts and 4-byte unit items for up to 3072 units (36,876 bytes), and 2 x 32
// warp sums (512 bytes). Above that many units both arrays live in the scratch sections of the plan.
//
// Tiles are read off the line in all steps after the first, so lengths that change under a running planner
// give a plan for a mixture of both, never a write outside the layout.
#include "params.h"
#include "plan_algorithm.h"

namespace ferromla {
namespace plan {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kSharedUnits = 3072;

struct Shared {
  int64_t unit_start[kSharedUnits + 1];
  int64_t warp_sum[2][kWarps];
  int32_t unit_item[kSharedUnits + 1];
};

/* A 16-byte aligned entry of the plan, stored in 16-byte pieces. */
template <class T>
__device__ __forceinline__ void store(T* to, const T& entry) {
  static_assert(sizeof(T) % sizeof(int4) == 0, "entries are whole 16-byte pieces");
  constexpr int kPieces = sizeof(T) / sizeof(int4);
  int4 pieces[kPieces];
  memcpy(pieces, &entry, sizeof(T));
#pragma unroll
  for (int i = 0; i < kPieces; ++i) reinterpret_cast<int4*>(to)[i] = pieces[i];
}

struct Scanned {
  int64_t before; /* sum over the threads before this one */
  int64_t all;
};

__device__ __forceinline__ int64_t scan_warp(int64_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t below = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

/* Every warp scans the warp sums again for itself: one barrier instead of two. Calls alternate between two
   rows of `warp_sum`, so the barrier of one call also ends the reads of the call before it. */
__device__ __forceinline__ Scanned scan_block(int64_t value, int64_t (*warp_sum)[kWarps], int turn) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int64_t* sums = warp_sum[turn % 2];
  const int64_t upto = scan_warp(value, lane);
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  const int64_t warps_upto = scan_warp(sums[lane], lane);
  const int64_t warps_before = __shfl_sync(~0u, warps_upto, warp == 0 ? 0 : warp - 1);
  return {(warp == 0 ? 0 : warps_before) + upto - value, __shfl_sync(~0u, warps_upto, 31)};
}

struct Planner {
  const FmPlanParams& params;
  int64_t* unit_start;
  int32_t* unit_item;
  int64_t (*warp_sum)[kWarps];
  int turn = 0;

  __device__ Planner(const FmPlanParams& p, Shared& shared)
      : params(p), warp_sum(shared.warp_sum) {
    const bool small = p.layout.units <= kSharedUnits;
    unit_start = small ? shared.unit_start : section<int64_t>(p.layout.unit_start);
    unit_item = small ? shared.unit_item : section<int32_t>(p.layout.unit_item);
  }

  template <class T>
  __device__ T* section(int64_t offset) const {
    return reinterpret_cast<T*>(params.plan + offset);
  }

  __device__ int32_t seq_len(int32_t request) const {
    return clamp_seq_len(params.shape, params.seq_lens[request * params.seq_lens_stride]);
  }

  /* Lays the units on the line; returns its length. */
  __device__ int64_t lay_out_units() {
    const FmPlanShape& shape = params.shape;
    const uint32_t units = params.layout.units;
    int64_t carry = 0;
    for (uint32_t base = 0; base < units; base += kThreads) {
      const uint32_t index = base + threadIdx.x;
      int64_t cost = 0;
      if (index < units) {
        const Unit unit = unit_at(shape, params.layout.blocks, index);
        cost = int64_t{unit_tiles(shape, unit.row_begin, seq_len(unit.request))} + shape.fixed_cost;
      }
      const Scanned scanned = scan_block(cost, warp_sum, turn++);
      if (index < units) unit_start[index] = carry + scanned.before;
      carry += scanned.all;
    }
    if (threadIdx.x == 0) unit_start[units] = carry;
    __syncthreads();
    return carry;
  }

  __device__ Line decide_cutting(int64_t total) const {
    const FmPlanShape& shape = params.shape;
    Line line{unit_start, total, even_share(total, shape.workers), params.layout.units,
              shape.split_mode == FM_SPLIT_AUTO};
    if (!line.whole) return line;
    bool fair = true;
    for (uint32_t worker = threadIdx.x; worker < uint32_t(shape.workers); worker += kThreads) {
      fair = fair && whole_stretch_is_fair(shape, line, worker);
    }
    if (!__syncthreads_and(fair)) {
      line.whole = 0;
      line.share = cutting_share(shape, line.share);
    }
    return line;
  }

  __device__ Tally write_units(const Line& line) {
    const uint32_t units = params.layout.units;
    Tally carry{0};
    for (uint32_t base = 0; base < units; base += kThreads) {
      const uint32_t index = base + threadIdx.x;
      Parts parts{0, 0, 0, 0};
      if (index < units) parts = parts_of(params.shape, line, index);
      const Tally own = index < units ? tally_of(parts) : Tally{0};
      const Scanned scanned = scan_block(own.packed, warp_sum, turn++);
      if (index < units) write_unit(index, parts, Tally{carry.packed + scanned.before});
      carry.packed += scanned.all;
    }
    if (threadIdx.x == 0) unit_item[units] = items_of(carry);
    __syncthreads();
    return carry;
  }

  /* The unit's merge and the items that no cut's thread writes. */
  __device__ void write_unit(int32_t index, const Parts& parts, Tally before) {
    const FmPlanShape& shape = params.shape;
    const Unit unit = unit_at(shape, params.layout.blocks, index);
    const int32_t length = seq_len(unit.request);
    const int32_t first_slot = slots_of(before, index);
    const int32_t first_item = items_of(before);
    FmWorkItem* items = section<FmWorkItem>(params.layout.items) + first_item;
    unit_item[index] = first_item;
    const int32_t own_items = shape.split_mode == FM_SPLIT_AUTO ? 1 : parts.count;
    for (int32_t j = 0; j < own_items; ++j) {
      store(items + j, make_item(shape, unit, length, parts, j, first_slot));
    }
    if (parts.count > 1) {
      store(section<FmMerge>(params.layout.merges) + merges_of(before),
            make_merge(shape, unit, parts, first_slot));
    }
  }

  __device__ void write_workers(const Line& line) const {
    const FmPlanShape& shape = params.shape;
    int32_t* worker_begin = section<int32_t>(params.layout.worker_begin);
    for (uint32_t index = threadIdx.x; index <= uint32_t(shape.workers); index += kThreads) {
      const Cut cut = cut_of(shape, line, index);
      worker_begin[index] = unit_item[cut.unit] + cut.part;
      if (cut.part > 0 && shape.split_mode == FM_SPLIT_AUTO) write_cut_item(line, cut);
    }
  }

  /* The item that begins at a cut inside a unit. The unit's slots begin where its first item says. */
  __device__ void write_cut_item(const Line& line, Cut cut) const {
    const FmPlanShape& shape = params.shape;
    const Unit unit = unit_at(shape, params.layout.blocks, cut.unit);
    const Parts parts = parts_of(shape, line, cut.unit);
    FmWorkItem* items = section<FmWorkItem>(params.layout.items) + unit_item[cut.unit];
    store(items + cut.part,
          make_item(shape, unit, seq_len(unit.request), parts, cut.part, items->slot));
  }
};

}  // namespace
}  // namespace plan
}  // namespace ferromla

extern "C" __global__ void __launch_bounds__(1024, 1)
    fm_plan(const __grid_constant__ FmPlanParams params) {
  using namespace ferromla::plan;
  __shared__ Shared shared;
  Planner planner(params, shared);
  const int64_t total = planner.lay_out_units();
  const Line line = planner.decide_cutting(total);
  const Tally all = planner.write_units(line);
  planner.write_workers(line);
  if (threadIdx.x == 0) {
    store(reinterpret_cast<FmPlanHeader*>(params.plan), make_header(line, all));
  }
}
