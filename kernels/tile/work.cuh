// The work of one CTA: the items of its team, seen through the CTA's own block of rows.
#pragma once
#include <stdint.h>

#include "../divisor.h"
#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/global.cuh"
#include "../ptx/math.cuh"
#include "shared_map.cuh"

namespace fm {

constexpr float kNegInf = -__builtin_huge_valf();
constexpr int kNoTile = 0x7FFFFFFF;  // after all tiles of a sequence
constexpr float kLn2 = 0.6931471805599453f;

// The query token of a row within (request, KV head).
__device__ __forceinline__ int token_of(const FmDecodeParams& p, int row) { return quotient(row, p.of_group); }

// Whether CTAs share the tiles of an item.
template <class Map>
constexpr bool kSharesTiles = Map::kCluster > 1;

// One item as a CTA executes it. Every role builds the same one, so that their loops agree.
struct RowBlock {
  int request, kv_head;
  int row_begin;  // first row of this CTA's block within (request, KV head)
  int rows;       // all rows of (request, KV head): q_len * group
  int q_begin, q_len;
  int seq_len;
  int tile_begin, tile_end;
  int slot;
  int merge;      // the unit's FmMerge; -1: it is whole
  int main_len;   // sparse: entries of the main cache
  int parts;      // of the unit
  int block;      // which block of the unit

  // Keys that row `row` sees. Rows past the end see all keys: what they compute is never stored, and a tile
  // needs no mask for their sake.
  __device__ __forceinline__ int visible(const FmDecodeParams& p, int row) const {
    if (!p.causal || row >= rows) return seq_len;
    int v = seq_len - q_len + token_of(p, row) + 1;
    return v < 0 ? 0 : v;
  }
  __device__ __forceinline__ bool empty() const { return tile_begin >= tile_end; }
  __device__ __forceinline__ int tiles() const { return max(tile_end - tile_begin, 0); }
  // The first tile of the sequence that not all rows see whole.
  __device__ __forceinline__ int first_masked(const FmDecodeParams& p) const {
    return min(visible(p, row_begin), seq_len) / kTileTokens;
  }
  // Whether rows see different tokens: from that tile on, if they do.
  __device__ __forceinline__ bool rows_differ(const FmDecodeParams& p) const { return p.causal && q_len > 1; }
  // The first of its tiles, counted from tile_begin, of which some rows see what others do not.
  __device__ __forceinline__ int first_shared(const FmDecodeParams& p) const {
    return rows_differ(p) ? first_masked(p) - tile_begin : kNoTile;
  }
  // Of the last tile's tokens those before the end of the sequence: kTileTokens and more if it ends later.
  __device__ __forceinline__ int in_last_tile() const { return seq_len - (tile_end - 1) * kTileTokens; }
};

template <int Blocks, int Numbers>
__device__ __forceinline__ void clear_accumulators(float (&o)[Blocks][Numbers]) {
#pragma unroll
  for (int m = 0; m < Blocks; ++m)
#pragma unroll
    for (int i = 0; i < Numbers; ++i) o[m][i] = 0.f;
}

// Which page of its request a token is in, and which token of that it is.
__device__ __forceinline__ int page_column(const FmKvCache& kv, int token) { return quotient(token, kv.page); }
__device__ __forceinline__ int page_offset(const FmKvCache& kv, int token) { return token - page_column(kv, token) * kv.page_size; }

// From an FmWorkItem's three int4.
template <class Map>
__device__ __forceinline__ RowBlock row_block_of(const FmDecodeParams& p, int4 a, int4 b, int4 c) {
  RowBlock r;
  r.block = Map::kFewRows ? 0 : cta_of_team();
  r.request = a.x, r.kv_head = a.y, r.row_begin = a.z + r.block * Map::kRows, r.q_begin = a.w;
  r.q_len = b.x, r.seq_len = min(b.y, p.max_tokens), r.tile_begin = b.z, r.tile_end = b.w,
  r.slot = Map::kCluster == kMostCluster ? -1 : c.x, r.merge = c.y, r.main_len = c.z;
  r.parts = c.w;
  r.rows = r.q_len * p.group;
  int last_seen = r.seq_len;
  if (p.multicast == 1)  // the CTAs of a cluster go through the same tiles
    last_seen = r.visible(p, min(r.row_begin + Map::kRows, r.rows) - 1);
  r.tile_end = min(r.tile_end, (last_seen + kTileTokens - 1) / kTileTokens);
  if (kSharesTiles<Map>) {  // this CTA's share of the item's tiles
    const int tiles = r.tiles(), share = cluster_rank(), begin = r.tile_begin;
    r.tile_begin = begin + (unsigned)(tiles * share) / Map::kCluster;
    r.tile_end = begin + (unsigned)(tiles * (share + 1)) / Map::kCluster;
  }
  return r;
}

template <class Map, bool Early = false>
__device__ __forceinline__ RowBlock load_row_block(const FmDecodeParams& p, int item) {
  asm volatile("" : "+r"(item));  // no pointer into the items is kept across the caller's loop
  const int4* at = reinterpret_cast<const int4*>(p.items) + 3 * item;
  return row_block_of<Map>(p, load_once<Early>(at), load_once<Early>(at + 1), load_once<Early>(at + 2));
}

// Where in the plan this CTA's worker has its first item, and the next worker. A worker is a team, or a cluster that splits.
__device__ __forceinline__ const int* worker_items(const FmDecodeParams& p) { return p.worker_begin + team_index(); }
__device__ __forceinline__ int next_worker_item(const FmDecodeParams& p) { return load_once(worker_items(p) + 1); }

// The first item of this CTA's worker. It is read while earlier launches may be running: the kernel that plans has made
// sure that who is launched after it sees the plan (docs/kernels.md, "Launches").
struct FirstItem {
  int number, end;  // of its items
  RowBlock block;

  __device__ __forceinline__ bool exists() const { return number < end; }
};

template <class Map>
__device__ __forceinline__ FirstItem load_first_item(const FmDecodeParams& p) {
  FirstItem first;
  first.number = load_once<true>(worker_items(p));
  first.end = load_once<true>(worker_items(p) + 1);
  if (first.exists()) first.block = load_row_block<Map, true>(p, first.number);
  return first;
}

// Whether the first item's second tile is loaded when its Q is there: where all CTAs begin with both, Q is needed first.
constexpr int kQueryBarrier = 4;  // named barrier of scores and loader
template <class Map>
__device__ __forceinline__ bool holds_tiles(const FmDecodeParams& p, const RowBlock& first) {
  return !Map::kFewRows && !Map::kTokens && !p.waits_aside && first.tile_end - first.tile_begin > 1;
}

// Calls body(item, row block) for each item of this CTA's worker; items whose rows do not reach this CTA's block are
// left out unless other CTAs of the cluster count on this one. A role that is short of registers keeps the item's
// number and loads the row block again where it needs it.
template <class Map, class Body>
__device__ __forceinline__ void for_each_row_block(const FmDecodeParams& p, const FirstItem& first, Body body) {
  if constexpr (Map::kShortOfRegisters) {  // read anew
    for (int item = load_once(worker_items(p)); item < next_worker_item(p); ++item) {
      const RowBlock r = load_row_block<Map>(p, item);
      if (Map::kFewRows || r.row_begin < r.rows || p.multicast > 1) body(item, r);
    }
    return;
  }
  if (!first.exists()) return;
  RowBlock r = first.block;
  for (int item = first.number;;) {
    if (Map::kFewRows || r.row_begin < r.rows || p.multicast > 1) body(item, r);
    if (++item >= next_worker_item(p)) break;
    r = load_row_block<Map>(p, item);
  }
}

// The same for CTAs that share tiles, or none: body(item, row block, ahead). Where `Ahead`, ahead(use) finds the next one's block before the
// body's end, and calls use(it) if there is one.
template <class Map, bool Ahead, class Body>
__device__ __forceinline__ void for_each_row_block_ahead(const FmDecodeParams& p, const FirstItem& first, Body body) {
  static_assert(Map::kFewRows, "no item is left out");
  if constexpr (!Ahead) {
    for_each_row_block<Map>(p, first, [&](int item, const RowBlock& r) { body(item, r, [](auto) {}); });
    return;
  }
  if (!first.exists()) return;
  RowBlock r = first.block;
  for (int item = first.number;; ++item) {
    bool more;
    RowBlock next;
    body(item, r, [&](auto use) {
      more = item + 1 < next_worker_item(p);
      if (more) use(next = load_row_block<Map>(p, item + 1));
    });
    if (!more) break;
    r = next;
  }
}
static_assert(sizeof(FmWorkItem) == 48, "items are read as three int4");

// Element offset of a row of q, out (stride of the element type) or lse.
__device__ __forceinline__ int64_t row_offset(const FmDecodeParams& p, const RowBlock& r, int row,
                                              const int64_t (&stride)[3]) {
  const int token = token_of(p, row);
  const int head = r.kv_head * p.group + row - token * p.group;
  const auto times = [](int i, int64_t by) { return (uint64_t)(uint32_t)i * (uint64_t)by; };  // a third of the operations of signed products
  return (int64_t)(times(r.request, stride[0]) + times(r.q_begin + token, stride[1]) + times(head, stride[2]));
}

// The row of the partial results of a split unit, counted in rows.
template <class Map>
__device__ __forceinline__ int64_t slot_row(const FmDecodeParams& p, const RowBlock& r, int block_row) {
  return ((int64_t)r.slot * p.team + r.block) * Map::kRows + block_row;
}

// Where its lse is. Those of all parts of a row are beside each other: all that add up its parts read them at the same time. There are
// fewer than 2^31: each is of a row of 2 KB.
template <class Map>
__device__ __forceinline__ uint32_t slot_lse(const FmDecodeParams& p, const RowBlock& r, int block_row) {
  return (r.block * Map::kRows + block_row) * p.slots + r.slot;
}

// reference + log2(sum), sum > 0, and a normal number but of raw rows. References of these may be far from the result: they are integers,
// so that the sum's exponent is added to them without an error.
template <class Map>
__device__ __forceinline__ float log2_sum(float reference, float sum) {
  const int exponent = (int)(__float_as_uint(sum) >> 23 & 0xFF) - 127;  // of a NaN as well, whatever its sign
  if (!Map::kRaw) return reference + log2_approx(sum);
  if (exponent == -127 || exponent == 128) return reference + log2_approx(sum * 0x1p64f) - 64.f;
  return reference + (float)exponent + log2_approx(__uint_as_float((__float_as_uint(sum) & 0x7FFFFFu) | 0x3F800000u));
}

template <class Map>
__device__ __forceinline__ float inverse_of_sum(float sum) {
  if constexpr (!Map::kRaw)
    return inverse_approx(sum);
  else if constexpr (Map::kBare || Map::kRows == kTileRows)
    return 1.f / sum;  // else the first spill registers, and the loops of the others are ordered anew, up to 3 % slower
  else
    return inverse_of_any(sum);
}

// Where a finished row goes, and its sink: found when they are needed.
template <class Map>
struct RowEnd {
  const FmDecodeParams& p;
  const RowBlock& r;
  int block_row, row;

  __device__ __forceinline__ RowEnd(const FmDecodeParams& params, const RowBlock& block, int of)
      : p(params), r(block), block_row(of), row(block.row_begin + of) {}
  __device__ __forceinline__ bool exists() const { return row < r.rows; }
  // In elements: of a whole unit's results, or of the partial results of a part.
  __device__ __forceinline__ int64_t out() const { return row_offset(p, r, row, p.out_stride); }
  __device__ __forceinline__ int64_t partial_out() const { return slot_row<Map>(p, r, block_row) * kLatent; }
  __device__ __forceinline__ float* lse() const { return p.lse + row_offset(p, r, row, p.lse_stride); }
  __device__ __forceinline__ float* partial_lse() const { return p.partial_lse + slot_lse<Map>(p, r, block_row); }
  __device__ __forceinline__ bool has_sink() const { return p.attn_sink != nullptr; }
  __device__ __forceinline__ float sink() const {
    return load_once(p.attn_sink + r.kv_head * p.group + row - token_of(p, row) * p.group);
  }
};

// The same, found while other numbers of the row are waited for.
template <class Map>
struct EarlyRowEnd {
  bool row_exists;
  int64_t at;
  float* lse_at;
  float sink_of_row = kNegInf;

  __device__ __forceinline__ EarlyRowEnd(const FmDecodeParams& p, const RowBlock& r, int block_row) {
    const RowEnd<Map> end(p, r, block_row);
    row_exists = end.exists();
    if (!row_exists) return;
    at = r.slot < 0 ? end.out() : end.partial_out();
    lse_at = r.slot < 0 ? end.lse() : end.partial_lse();
    if (end.has_sink()) sink_of_row = end.sink();
  }
  __device__ __forceinline__ bool exists() const { return row_exists; }
  __device__ __forceinline__ int64_t out() const { return at; }
  __device__ __forceinline__ int64_t partial_out() const { return at; }
  __device__ __forceinline__ float* lse() const { return lse_at; }
  __device__ __forceinline__ float* partial_lse() const { return lse_at; }
  __device__ __forceinline__ bool has_sink() const { return true; }  // minus infinity: of no weight
  __device__ __forceinline__ float sink() const { return sink_of_row; }
};

// Writes a finished row's lse (where `write`), and returns what its accumulator is to be multiplied with: 1 / sum, with
// the sink where the unit is whole. `reference` and `sum`: of the row's softmax, base 2. `end`: of the row.
template <class Map, class End>
__device__ __forceinline__ float row_factor(const FmDecodeParams& p, const RowBlock& r, const End& end, float reference,
                                            float sum, bool write = true) {
  const float lse2 = sum == 0.f ? kNegInf : log2_sum<Map>(reference, sum);
  const float factor = sum == 0.f ? 0.f : inverse_of_sum<Map>(sum);
  if (!end.exists()) return factor;
  if (r.slot >= 0) {
    if (write) *end.partial_lse() = lse2;
    return factor;
  }
  const float lse = __fmul_rn(lse2, kLn2);  // rounded wherever this is, not a part of what follows
  if (write) *end.lse() = sum == 0.f ? p.empty_lse : lse;
  if (!end.has_sink() || sum == 0.f) return factor * p.value_scale;
  return factor * p.value_scale * inverse_approx(1.f + __expf(end.sink() - lse));
}
template <class Map>
__device__ __forceinline__ float row_factor(const FmDecodeParams& p, const RowBlock& r, int block_row, float reference,
                                            float sum, bool write = true) {
  return row_factor<Map>(p, r, RowEnd<Map>(p, r, block_row), reference, sum, write);
}

// Writes a row's highest scaled score where it is wanted; `peak` is in base 2. CTAs that have a part of the unit each, of their own or of
// a cluster, raise what is there, -inf at first, whichever comes first.
template <class Map>
__device__ __forceinline__ void write_peak(const FmDecodeParams& p, const RowBlock& r, int block_row, float peak) {
  const int row = r.row_begin + block_row;
  if (p.max_logits == nullptr || row >= r.rows) return;
  float* to = p.max_logits + row_offset(p, r, row, p.max_logits_stride);
  if (r.slot >= 0 || kSharesTiles<Map>)
    raise(to, peak * kLn2);
  else
    *to = peak * kLn2;
}

// What a row's scores are multiplied with besides scale_log2: the scale of its e4m3 query.
__device__ __forceinline__ float query_scale(const FmDecodeParams& p, const RowBlock& r, int block_row) {
  const int row = r.row_begin + block_row;
  return p.q_scale == nullptr || row >= r.rows ? 1.f : load_once(p.q_scale + row_offset(p, r, row, p.q_scale_stride));
}

// A row of Q, for copies to shared memory: latent part, rope part, and whether it exists. What does not is some row.
template <class T>
struct QueryRow {
  const T *nope, *rope;
  bool present;

  __device__ __forceinline__ QueryRow(const FmDecodeParams& p, const RowBlock& r, int block_row)
      : present(r.row_begin + block_row < r.rows) {
    const int row = present ? r.row_begin + block_row : 0;
    nope = reinterpret_cast<const T*>(p.q_nope) + row_offset(p, r, row, p.q_nope_stride);
    rope = reinterpret_cast<const T*>(p.q_rope) + row_offset(p, r, row, p.q_rope_stride);
  }
};

// Whether partial results are made of whole lines of the L2, which can be discarded once they have been added up.
__device__ __forceinline__ bool parts_are_lines(const FmDecodeParams& p) { return reinterpret_cast<uintptr_t>(p.partial_out) % 128 == 0; }

// Asks the L2 for the query rows that this CTA needs for an item, by the threads of one warpgroup. A loader is a few
// tiles ahead of the scores role: they are there when it gets to the item.
template <class T, int QkDim, class Map>
__device__ __forceinline__ void prefetch_query(const FmDecodeParams& p, const RowBlock& r) {
  constexpr int kThreads = 128 / Map::kRows;  // to a row
  const int row = r.row_begin + warpgroup_thread() / kThreads, part = warpgroup_thread() % kThreads;
  if (row >= r.rows) return;
  const T* nope = reinterpret_cast<const T*>(p.q_nope) + row_offset(p, r, row, p.q_nope_stride);
#pragma unroll
  for (int i = part; i < 8; i += kThreads) prefetch_l2(nope + i * 64);
  if (QkDim > kLatent && part == 0)
    prefetch_l2(reinterpret_cast<const T*>(p.q_rope) + row_offset(p, r, row, p.q_rope_stride));
}

}  // namespace fm
