// What the ways of planning need: units, lengths, scans, searches, stores.
#pragma once
#include <stdint.h>
#include <string.h>

#include "../params.h"
#include "../plan_algorithm.h"

namespace ferromla {
namespace plan {

constexpr int kMaxThreads = FM_PLAN_THREADS;
constexpr int kMaxWarps = kMaxThreads / 32;

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

template <class T>
__device__ __forceinline__ T* section(const FmPlanParams& params, int64_t offset) {
  return reinterpret_cast<T*>(params.plan + offset);
}

/* Where workers begin, and the last one ends: at `first_item(worker)`, 0 <= worker <= workers. By all threads of the block. */
template <class FirstItem>
__device__ __forceinline__ void write_workers(const FmPlanParams& params, const FirstItem& first_item) {
  int32_t* worker_begin = section<int32_t>(params, params.layout.worker_begin);
#pragma unroll 1
  for (uint32_t worker = threadIdx.x; worker <= uint32_t(params.shape.workers); worker += blockDim.x)
    worker_begin[worker] = first_item(static_cast<int32_t>(worker));
}

__device__ __forceinline__ int32_t load_seq_len(const FmPlanParams& params, int32_t request) {
  return clamp_seq_len(params.shape, params.seq_lens[request * params.seq_lens_stride[0]]);
}

/* Entries that count of a sparse token's list of `most`, as they are given. */
__device__ __forceinline__ int32_t read_list_len(const int32_t* lens, const int64_t (&stride)[2], const Unit& unit, int32_t most) {
  return lens == nullptr ? most : lens[unit.request * stride[0] + unit.q_begin * stride[1]];
}

/* The lengths of a sparse unit, of which these are given. */
__device__ __forceinline__ void set_list_lens(const FmPlanShape& shape, Unit& unit, int32_t main_len, int32_t extra_len) {
  unit.main_len = static_cast<int32_t>(clamp(main_len, 0, shape.topk));
  unit.seq_len = end_of_keys(unit.main_len, static_cast<int32_t>(clamp(extra_len, 0, shape.extra_topk)));
}

/* The lengths of a sparse unit whose place in the batch is known. */
__device__ __forceinline__ void load_list_lens(const FmPlanParams& params, Unit& unit) {
  set_list_lens(params.shape, unit, read_list_len(params.seq_lens, params.seq_lens_stride, unit, params.shape.topk),
                read_list_len(params.extra_lens, params.extra_lens_stride, unit, params.shape.extra_topk));
}

/* Of a request of a ragged batch. */
__device__ __forceinline__ QueryRange load_query_range(const FmPlanParams& params, int32_t request) {
  const int32_t* begin = params.qo_indptr + request * params.qo_indptr_stride;
  return query_range(params.shape, *begin, begin[params.qo_indptr_stride]);
}

/* Keeps the compiler from computing a value as late as possible, or what depends on it before. */
template <class T>
__device__ __forceinline__ void compute_now(T& value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(value));
#else
  (void)value;
#endif
}

/* Sum of the values of the lanes up to this one. */
__device__ __forceinline__ uint32_t scan_warp(uint32_t value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
#ifdef __CUDA_ARCH__
    /* The shuffle itself says whether there is a lane that far below. */
    asm volatile(
        "{ .reg .u32 below; .reg .pred there;\n"
        "shfl.sync.up.b32 below|there, %0, %1, 0, 0xffffffff;\n"
        "@there add.u32 %0, %0, below; }"
        : "+r"(value)
        : "r"(distance));
#else
    const uint32_t below = __shfl_up_sync(~0u, value, distance);
    if (int(threadIdx.x % 32) >= distance) value += below;
#endif
  }
  return value;
}

/* The last of `count` >= 1 ascending positions that is at or before x, or 0. `position(i)` reads the i-th. */
template <class P, class Position>
__device__ __forceinline__ int32_t last_at_or_before(int32_t count, P x, Position position) {
  int32_t low = 0;
  int32_t high = count - 1;
  while (low < high) {
    const int32_t middle = high - (high - low) / 2;
    if (position(middle) <= x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/* A unit of a request of a ragged batch. Row blocks run fastest. Whatever the index, the KV head is one. */
__device__ __forceinline__ Unit ragged_unit(const FmPlanShape& shape, int32_t request, QueryRange queries,
                                            int32_t seq_len, int32_t index_in_request) {
  uint32_t kv_head = 0;
  uint32_t block = index_in_request;
  if (shape.kv_heads > 1) {
    const uint32_t blocks = max(blocks_of(shape, queries.len), 1);
    kv_head = min(index_in_request / blocks, uint32_t(shape.kv_heads) - 1);
    block = index_in_request % blocks;
  }
  return {request, static_cast<int32_t>(kv_head), static_cast<int32_t>(block * shape.unit_rows),
          queries.begin, queries.len, seq_len, 0};
}

/* The unit `index` of a uniform or sparse batch, without its lengths. */
__device__ __forceinline__ Unit uniform_unit(const FmPlanShape& shape, uint32_t blocks, uint32_t index) {
  Unit unit{static_cast<int32_t>(index), 0, 0, 0, shape.q_len, 0, 0};
  if (blocks > 1) {
    unit.request = index / blocks;
    unit.row_begin = index % blocks * shape.unit_rows;
  }
  if (shape.kv_heads > 1) {
    const uint32_t head = unit.request; /* of all requests */
    unit.request = head / shape.kv_heads;
    unit.kv_head = head % shape.kv_heads;
  }
  if (shape.sparse_q_len > 1) {
    const uint32_t token = unit.request; /* of all requests */
    const bool several = shape.batch > 1; /* else no division, which takes most of a unit's time */
    unit.request = several ? token / shape.sparse_q_len : 0;
    unit.q_begin = several ? token % shape.sparse_q_len : token;
  }
  return unit;
}

/* The same with its lengths. */
__device__ __forceinline__ Unit load_uniform_unit(const FmPlanParams& params, uint32_t index) {
  Unit unit = uniform_unit(params.shape, params.layout.blocks, index);
  if (params.shape.sparse_q_len > 0)
    load_list_lens(params, unit);
  else
    unit.seq_len = load_seq_len(params, unit.request);
  return unit;
}

}  // namespace plan
}  // namespace ferromla
