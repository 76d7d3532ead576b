// Operations on indices: to_physical, window_token_ids, combine_topk_window. They move a few bytes per entry, so a
// lane takes four entries at a time, of one stretch with its warp's. A result that does not fit int32 is -1.
#include "cache/tokens.cuh"
#include "divisor.h"

namespace fm {

constexpr int kAbsent = -1;
// Loads of a lane under way at once.
constexpr int kDepth = 4;
constexpr int kStep = FM_INDEX_STEP;  // entries of a warp
static_assert(kStep == 32 * 4);
static_assert(kDepth * kStep == 512, "columns are counted up to 511 beyond a row's end (crates/core/check_indices.rs)");

__device__ __forceinline__ int64_t read(const FmIntegers& p, int64_t i) {
  if (p.values == nullptr) return 0;
  return p.are_64bit ? reinterpret_cast<const int64_t*>(p.values)[i * p.stride]
                     : reinterpret_cast<const int32_t*>(p.values)[i * p.stride];
}

__device__ __forceinline__ int narrowed(int64_t id) { return id < 0 || id > INT32_MAX ? kAbsent : (int)id; }

// Sums and differences that stop at the ends of int64.
__device__ __forceinline__ int64_t saturated_sum(int64_t a, int64_t b) {
  const int64_t sum = (int64_t)((uint64_t)a + (uint64_t)b);
  if (((a ^ sum) & (b ^ sum)) >= 0) return sum;
  return a < 0 ? INT64_MIN : INT64_MAX;
}
__device__ __forceinline__ int64_t saturated_difference(int64_t a, int64_t b) {
  const int64_t difference = (int64_t)((uint64_t)a - (uint64_t)b);
  if (((a ^ b) & (a ^ difference)) >= 0) return difference;
  return a < 0 ? INT64_MIN : INT64_MAX;
}

// So that adding to it cannot overflow: what is past int32 stays so.
__device__ __forceinline__ int64_t bounded(int64_t base) {
  return base <= INT32_MAX ? base : (int64_t)INT32_MAX + 1;
}

// A row of int32 or int64 with gaps or without, and how many of its columns there are to read.
struct Row {
  const void* values;
  int64_t stride;
  int columns;
  bool are_64bit, in_fours;

  // What does not fit int32 is absent: no sequence is that long.
  __device__ __forceinline__ int entry(int column) const {
    if (column >= columns) return kAbsent;
    if (are_64bit) return narrowed(reinterpret_cast<const int64_t*>(values)[column * stride]);
    return reinterpret_cast<const int32_t*>(values)[column * stride];
  }
  // Entries `column` .. `column + 4`.
  __device__ __forceinline__ int4 four(int column) const {
    if (in_fours && column + 4 <= columns)
      return *reinterpret_cast<const int4*>(reinterpret_cast<const int32_t*>(values) + column);
    return {entry(column), entry(column + 1), entry(column + 2), entry(column + 3)};
  }
};

__device__ __forceinline__ void store_four(int32_t* row, int column, int columns, bool in_fours, const int4& v) {
  if (in_fours && column + 4 <= columns) {
    *reinterpret_cast<int4*>(row + column) = v;
    return;
  }
  if (column < columns) row[column] = v.x;
  if (column + 1 < columns) row[column + 1] = v.y;
  if (column + 2 < columns) row[column + 2] = v.z;
  if (column + 3 < columns) row[column + 3] = v.w;
}

// Calls f(row, begin, end) for each stretch of `span` columns of each row, one warp each, grid-stride; an empty row is one stretch.
template <class F>
__device__ __forceinline__ void for_each_stretch(int64_t rows, int columns, int span, F f) {
  const int stretches = columns > span ? (columns - 1) / span + 1 : 1;
  for (int64_t i = warp_index(); i < rows * stretches; i += warp_count()) {
    const auto [row, stretch] = divided(i, stretches);
    const int begin = (int)stretch * span;
    f(row, begin, columns - begin > span ? begin + span : columns);
  }
}

// Columns `begin` .. `end` of a row with `map(entry, column)` for each of the source's entries. One warp; loads are in flight before
// the stores, which the compiler could not prove to be elsewhere.
template <class Map>
__device__ __forceinline__ void map_row(int32_t* out, int begin, int end, Row source, bool in_fours, Map map) {
  if (source.columns > end) source.columns = end;
  for (int first = begin + 4 * (int)(threadIdx.x % 32); first < end; first += kDepth * kStep) {
    int4 entries[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) entries[i] = source.four(first + i * kStep);
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int column = first + i * kStep;
      const int4 v = entries[i];
      const int4 mapped = {map(v.x, column), map(v.y, column + 1), map(v.z, column + 2), map(v.w, column + 3)};
      store_four(out, column, end, in_fours, mapped);
    }
  }
}

// The physical id of a position, by the request's row of the block table.
template <class Params>
__device__ __forceinline__ int physical_id(const Params& p, const int32_t* pages, int position) {
  if (position < 0) return kAbsent;
  const int column = quotient(position, p.page);
  if (column >= p.max_pages) return kAbsent;
  const int64_t page = pages[column];
  return page < 0 ? kAbsent : narrowed(page * p.page_size + (position - column * p.page_size));
}

// The window of request `r`: its first position and how many there are.
__device__ __forceinline__ int64_t window_length(const FmWindowParams& p, int r, int64_t* first) {
  const int64_t capacity = (int64_t)p.max_pages * p.page_size;
  const int64_t largest = capacity < INT32_MAX ? capacity : INT32_MAX;
  const int64_t given = read(p.seq_lens, r);
  const int64_t length = given < 0 ? 0 : given < largest ? given : largest;
  const int64_t asked = read(p.query_lens, r);
  const int64_t queries = asked < 0 ? 0 : asked < length ? asked : length;
  const int64_t begin = length - queries - p.window + 1;
  *first = begin < 0 ? 0 : begin < length ? begin : length;
  return length - *first;
}

// What a row of combine_topk_window is made of.
struct Combined {
  int64_t compressed_base, window_begin;
  int chosen, in_window;
};

__device__ __forceinline__ Combined combined_row(const FmCombineIndicesParams& p, int64_t t) {
  const int64_t request = read(p.request_ids, t), position = read(p.positions, t);
  if (request < 0 || request >= p.batch || position < 0) return {0, 0, 0, 0};
  const int64_t seen = position < INT64_MAX ? position + 1 : position, complete = seen / p.ratio;
  const int chosen = complete < p.topk ? (int)complete : p.topk;
  const int in_window = seen < p.window ? (int)seen : p.window;
  const int64_t begin = saturated_difference(saturated_sum(read(p.window_base, request), seen - in_window),
                                             read(p.first_pos, request));
  return {bounded(read(p.compressed_base, request)), bounded(begin), chosen, in_window};
}

}  // namespace fm

extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS, 4) fm_to_physical(const __grid_constant__ FmToPhysicalParams p) {
  fm::follow_earlier_launches();
  fm::for_each_stretch(p.rows, p.columns, p.span, [&p](int64_t row, int begin, int end) {
    const auto [request, token] = fm::divided(row, p.rows_per_request);
    const int32_t* pages = p.block_table + request * p.block_table_stride;
    const int64_t first = request * p.indices_stride[0] + token * p.indices_stride[1];
    const void* indices = p.are_64bit ? (const void*)(reinterpret_cast<const int64_t*>(p.indices) + first)
                                      : (const void*)(reinterpret_cast<const int32_t*>(p.indices) + first);
    const fm::Row positions = {indices, p.indices_stride[2], p.columns, p.are_64bit != 0, p.in_fours != 0};
    fm::map_row(p.out + request * p.out_stride[0] + token * p.out_stride[1], begin, end, positions, p.in_fours,
                [&p, pages](int position, int) { return fm::physical_id(p, pages, position); });
  });
}

extern "C" __global__ void __launch_bounds__(FM_OFFSETS_THREADS) fm_window_offsets(const __grid_constant__ FmWindowParams p) {
  fm::follow_earlier_launches();
  fm::running_sums(p.offsets, p.offsets_stride, p.batch, [&p](int r) {
    int64_t first;
    const int64_t length = fm::window_length(p, r, &first);
    p.first_pos[r * p.first_pos_stride] = (int32_t)first;
    return length;
  });
}

// One thread per id: they are few.
extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS) fm_window_ids(const __grid_constant__ FmWindowParams p) {
  fm::follow_earlier_launches();
  const int64_t threads = (int64_t)gridDim.x * blockDim.x;
  for (int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; t < p.tokens; t += threads) {
    const int request = fm::request_of(p.offsets, p.offsets_stride, p.batch, t);
    int id = fm::kAbsent;
    if (request >= 0) {
      const int64_t position = p.first_pos[request * p.first_pos_stride] + t - p.offsets[request * p.offsets_stride];
      const int32_t* pages = p.block_table + request * p.block_table_stride;
      id = fm::physical_id(p, pages, (int)position);
    }
    p.ids[t * p.ids_stride] = id;
  }
}

extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS, 4)
    fm_combine_topk_window(const __grid_constant__ FmCombineIndicesParams p) {
  fm::follow_earlier_launches();
  fm::for_each_stretch(p.tokens, p.width, p.span, [&p](int64_t t, int begin, int end) {
    const fm::Combined row = fm::combined_row(p, t);
    const int length = row.chosen + row.in_window;
    const fm::Row chosen = {p.topk_indices + t * p.topk_indices_stride, 1, row.chosen, false, p.in_fours != 0};
    fm::map_row(p.indices + t * p.indices_stride, begin, end, chosen, p.in_fours,
                [&row, length](int entry, int column) {
                  if (column >= length) return fm::kAbsent;
                  if (column >= row.chosen) return fm::narrowed(row.window_begin + (column - row.chosen));
                  return entry < 0 ? fm::kAbsent : fm::narrowed(entry + row.compressed_base);
                });
    if (begin == 0 && threadIdx.x % 32 == 0) p.lengths[t * p.lengths_stride] = length;
  });
}
