// The work of one CTA: the items of its team, seen through the CTA's own block of rows.
#pragma once
#include "../params.h"
#include "../ptx/control.cuh"
#include "shared_map.cuh"

namespace fm {

// One item as a CTA executes it. Every role builds the same one, so that their loops agree.
struct RowBlock {
  int request, kv_head;
  int row_begin;  // first row of this CTA's block within (request, KV head)
  int rows;       // all rows of (request, KV head): q_len * group
  int q_begin, q_len;
  int seq_len;
  int tile_begin, tile_end;
  int slot;
  int block;      // which block of the unit

  // Keys that row `row` sees. Rows past the end see all keys: what they compute is never stored, and a tile
  // needs no mask for their sake.
  __device__ __forceinline__ int visible(const FmDecodeParams& p, int row) const {
    if (!p.causal || row >= rows) return seq_len;
    int v = seq_len - q_len + row / p.group + 1;
    return v < 0 ? 0 : v;
  }
  __device__ __forceinline__ bool empty() const { return tile_begin >= tile_end; }
};

// Loads that are volatile so that a second read does not keep the first one's registers alive.
__device__ __forceinline__ int load_once(const int* at) {
  int v;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}
__device__ __forceinline__ int4 load_once(const int4* at) {
  int4 v;
  asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

__device__ __forceinline__ RowBlock load_row_block(const FmDecodeParams& p, int item) {
  asm volatile("" : "+r"(item));  // no pointer into the items is kept across the caller's loop
  const int4* at = reinterpret_cast<const int4*>(p.items) + 3 * item;
  const int4 a = load_once(at), b = load_once(at + 1), c = load_once(at + 2);
  RowBlock r;
  r.block = cta_index() % p.team;
  r.request = a.x, r.kv_head = a.y, r.row_begin = a.z + r.block * kTileRows, r.q_begin = a.w;
  r.q_len = b.x, r.seq_len = min(b.y, p.max_tokens), r.tile_begin = b.z, r.tile_end = b.w, r.slot = c.x;
  r.rows = r.q_len * p.group;
  int last_seen = r.seq_len;
  if (cluster_size() == 1)  // the CTAs of a cluster go through the same tiles
    last_seen = r.visible(p, min(r.row_begin + kTileRows, r.rows) - 1);
  r.tile_end = min(r.tile_end, (last_seen + kTileTokens - 1) / kTileTokens);
  return r;
}

// The first item of this CTA's team, or of the `ahead`th team after it.
__device__ __forceinline__ int first_item(const FmDecodeParams& p, int ahead) {
  return load_once(p.worker_begin + cta_index() / p.team + ahead);
}

// Calls body(item, row block) for each item of this CTA's team; items whose rows do not reach this CTA's block are
// left out unless other CTAs of the cluster count on this one. A role that is
// short of registers keeps the item's number and loads the row block again where it needs it.
template <class Body>
__device__ __forceinline__ void for_each_row_block(const FmDecodeParams& p, Body body) {
  for (int item = first_item(p, 0); item < first_item(p, 1); ++item) {
    const RowBlock r = load_row_block(p, item);
    if (r.row_begin < r.rows || cluster_size() > 1) body(item, r);
  }
}
static_assert(sizeof(FmWorkItem) == 48, "items are read as three int4");

// Element offset of a row of q, out (stride of the element type) or lse.
__device__ __forceinline__ int64_t row_offset(const FmDecodeParams& p, const RowBlock& r, int row,
                                              const int64_t (&stride)[3]) {
  const int token = row / p.group, head = r.kv_head * p.group + row - token * p.group;
  return r.request * stride[0] + (int64_t)(r.q_begin + token) * stride[1] + head * stride[2];
}

}  // namespace fm
