// Planning by a cluster of CTAs, for many units: a CTA has a stretch of the requests, which it reads once, and a thread units that follow
// each other, of which it knows where they stand: one where there are threads enough, else those of one request or of a few. CTAs tell
// each other what they need to know by stores to each other's shared memory.
//
//   measure   a thread: what its units cost -> scan -> the CTA's sums to all CTAs. Where some request has many units all units of the
//             CTA are shared out anew to its threads first
//   tell      a thread: where cuts that fall on its units would snap to, whether they are inner ones -> to all CTAs
//   decide    all vote, each CTA for itself on the same numbers, on whether whole units share out evenly enough
//   write     a thread: items and merges of its units, and the workers that begin there. How many inner cuts come before is counted in
//             bits, one for each cut
//
// "Request" means what has lengths of its own: of sparse attention a query token of a request.
//
// What would take more steps is left to plan/large.cuh: few requests or equal units, several KV heads,
// units that may be dealt out longest first where they are to be cut. All CTAs find that out
// from the same numbers. Instructions run once or a few times, one after another, six to eight cycles each: it is their number that
// counts, and that two warps of a scheduler do not wait for others.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../plan_algorithm.h"
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/mbarrier.cuh"
#include "block.cuh"
#include "equal_parts.h"
#include "small_shared.cuh"

namespace ferromla {
namespace plan {
namespace by_cluster {

using small::kCutWords;
using small::kMaxCost;
using small::kMaxLine;
using small::kMaxWorkers;
using small::Position;

constexpr int kCtas = FM_PLAN_CLUSTER;
constexpr int kThreads = FM_PLAN_CLUSTER_THREADS;
constexpr int kMostRequests = FM_PLAN_CLUSTER_REQUESTS; /* of a CTA */
constexpr int kManyUnits = 16;                          /* of a request: more are shared out to all threads of the CTA */
static_assert(kThreads >= 32 * kCutWords, "a thread for each cut");

/* What threads, or CTAs, have of the line. */
struct Stretch {
  uint32_t cost; /* from kMaxLine on: too long for this way */
  uint32_t units;
  uint32_t filled; /* units that have tiles; from kMany on: there is a request of many units, whose tiles nobody has looked at */
  uint32_t longest; /* what the longest unit costs */
};
constexpr uint32_t kMany = 1 << 20;

struct alignas(16) Request {
  int32_t request, q_begin, q_len, seq_len, main_len; /* of its units */
  int32_t units;      /* one for each block of rows */
  int32_t first_unit; /* in the CTA; where long ones are shared out only */
  int32_t unused;

  __device__ __forceinline__ Unit make_unit() const { return {request, 0, 0, q_begin, q_len, seq_len, main_len}; }
};

/* A cut, as all CTAs know it. */
struct SharedCut {
  Position snapped; /* where it is if no unit is cut */
  uint32_t bits;    /* kInner, kFirst */
};
constexpr uint32_t kInner = 1; /* it cuts a unit */
constexpr uint32_t kFirst = 2; /* it is the first that does */

struct alignas(16) Shared {
  uint64_t told[2]; /* mbarriers: what CTAs, and cuts, are like has been told */
  uint4 of_cta[kCtas]; /* the stretch of each */
  uint4 of_warp[kThreads / 32];
  SharedCut cut[kMaxWorkers + 1];
  uint2 bits[kCutWords]; /* a bit for each cut: whether it is an inner one, and the first */
  Request request[kMostRequests];
};

/* Apart from what is always fetched. */
__device__ inline __attribute__((noinline)) bool are_equal(const FmPlanShape& shape, const Line<Position>& line, int32_t filled) {
  return may_be_equal(shape, line, filled);
}

struct Planner {
  const FmPlanParams& params;
  const FmPlanShape& shape;
  Shared& shared;
  const int32_t thread, rank;
  int32_t begin, count; /* requests of this CTA */
  Divisor<Position> group, unit_rows, workers;
  Stretch all; /* of all CTAs */
  /* Whether units may be dealt out if they are to be cut. Known before the lengths are: where there may be fewer units than those that are
     asked of, ragged ones, they may be dealt out only if they are so few that this is no way for them. */
  int32_t dealt_out;
  /* This thread's requests, and its place among those that share one, of which there are 1 << log. */
  int32_t from, to, place, log;
  int32_t skipped; /* units of the first request that are not its own */
  int32_t units;   /* its own, and where the first of them stands */
  Position own_begin;
  int32_t units_before;
  /* The unit that it is at: its request, how many follow in it, and where it stands. */
  int32_t at, left;
  Unit unit;
  int32_t index; /* among all units */
  Span<Position> span;
  bool helps;          /* it is another thread's */
  int32_t turn, turns; /* this thread has one of so many of its cuts in turn, ... */
  int32_t first_cut, first_inner; /* ... which are those from here on, inner ones from there on */
  Parts<Position> parts; /* if units are cut */

  __device__ __forceinline__ Planner(const FmPlanParams& p, Shared& s)
      : params(p), shape(p.shape), shared(s), thread(threadIdx.x), rank(fm::cluster_rank()), group(1), unit_rows(1), workers(1) {
    const int32_t requests = all_requests(shape), each = (uint32_t(requests) + kCtas - 1) / kCtas;
    begin = min(rank * each, requests);
    count = min(each, requests - begin);
    log = count <= kThreads / 8 ? 3 : count <= kThreads / 4 ? 2 : count <= kThreads / 2 ? 1 : 0;
    const int32_t of_thread = (uint32_t(count) + kThreads - 1) / kThreads;
    from = min(log > 0 ? thread >> log : thread * of_thread, count);
    to = min(from + (log > 0 ? 1 : of_thread), count);
    place = thread & ((1 << log) - 1);
    skipped = index = 0;
  }


  /* Whether the shape is one for this way. */
  __device__ __forceinline__ bool fits() const {
    return (shape.kv_heads == 1) & (all_requests(shape) <= kCtas * kMostRequests) &
           (fm::cluster_size() == kCtas) & (blockDim.x == kThreads) & (shape.workers <= kMaxWorkers) &
           (uint32_t(shape.fixed_cost) - 1 < kMaxCost) & (uint32_t(shape.min_part) <= kMaxCost) &
           (uint32_t(shape.split_cost) <= kMaxCost);
  }

  /* Before the barrier of the cluster after which others may store to this CTA. */
  __device__ __forceinline__ void init() const {
    if (thread == 0) {
      for (uint64_t& told : shared.told) fm::mbarrier_init(fm::shared_address(&told), 1);
      fm::mbarrier_init_fence();
      fm::mbarrier_arrive_expect(fm::shared_address(&shared.told[0]), kCtas * sizeof(uint4));
    }
  }

  /* What memory says of a request, and what that means, when it is there. */
  struct Entries {
    int32_t q_begin, q_end, len, extra_len;
  };
  __device__ __forceinline__ Entries read(int32_t request) const {
    if (shape.ragged) {
      const int32_t* q_begin = params.qo_indptr + request * params.qo_indptr_stride;
      return {*q_begin, q_begin[params.qo_indptr_stride], params.seq_lens[request * params.seq_lens_stride[0]], 0};
    }
    if (shape.sparse_q_len == 0) return {0, 0, params.seq_lens[request * params.seq_lens_stride[0]], 0};
    const Unit of = uniform_unit(shape, 1, request);
    return {0, 0, read_list_len(params.seq_lens, params.seq_lens_stride, of, shape.topk),
            read_list_len(params.extra_lens, params.extra_lens_stride, of, shape.extra_topk)};
  }
  __device__ __forceinline__ Request make_request(int32_t request, const Entries& entries) const {
    if (shape.ragged) {
      const QueryRange queries = query_range(shape, entries.q_begin, entries.q_end);
      const int32_t seq_len = clamp_seq_len(shape, entries.len), blocks = ceil_div(queries.len * shape.group, unit_rows);
      return {request, queries.begin, queries.len, seq_len, 0, blocks, 0, 0};
    }
    Unit of = uniform_unit(shape, 1, request);
    if (shape.sparse_q_len > 0)
      set_list_lens(shape, of, entries.len, entries.extra_len);
    else
      of.seq_len = clamp_seq_len(shape, entries.len);
    return {of.request, of.q_begin, of.q_len, of.seq_len, of.main_len, params.layout.blocks, 0, 0};
  }

  /* The first of this thread's units of a request, so far as it has any: where threads share one they have as many each. If these are
     more than units the last unit is that of all threads which would have none: those share its cuts. */
  __device__ __forceinline__ void enter(const Request& request) {
    const int32_t of_request = request.units, sharing = 1 << log, of_each = (of_request + sharing - 1) >> log, last = of_request - 1;
    const bool shares_last = of_request < sharing && place >= last && last >= 0;
    turns = shares_last ? sharing - last : 1;
    turn = shares_last && place > last ? place - last - 1 : turns - 1;
    helps = shares_last && place > last;
    const int32_t first = helps ? last : min(place * of_each, of_request);
    left = min(of_each, of_request - first);
    unit = request.make_unit();
    unit.row_begin = (first - 1) * shape.unit_rows;
  }

  /* The next unit of the request that this thread is at. */
  __device__ __forceinline__ int32_t step() {
    --left, ++index;
    unit.row_begin += shape.unit_rows;
    const int32_t tiles = unit_tiles(shape, unit, [this](uint32_t row) { return group.floor(row); });
    span = {span.end, span.end + tiles + shape.fixed_cost};
    return tiles;
  }

  __device__ __forceinline__ void count_in(int32_t tiles, Stretch& of_thread) const {
    of_thread.filled += tiles > 0;
    of_thread.longest = max(of_thread.longest, uint32_t(tiles + shape.fixed_cost));
  }

  /* Whether the unit that this thread is at, measured last, is its only one. */
  __device__ __forceinline__ bool is_there() const { return units == 1 && to - from == 1; }

  /* Calls f at each of this thread's units, which are gone through again if there are several, or `anew`. */
  template <class F>
  __device__ __forceinline__ void for_each_unit(F f, bool anew = false) {
    anew |= !is_there();
    if (anew) at = from - 1, left = 0, index = units_before - 1, span.end = own_begin;
#pragma unroll 1
    for (int32_t n = 0; n < units; ++n) {
      if (anew) {
        while (left == 0) {
          enter(shared.request[++at]);
          if (at == from) left -= skipped, unit.row_begin += skipped * shape.unit_rows;
        }
        step();
      }
      f();
    }
  }

  /* Measures the requests of this CTA, tells all, and hears of all. */
  __device__ __forceinline__ void measure() {
    Entries entries{};
    if (from < to) entries = read(begin + from);
    /* While the lengths are on their way. */
    init();
    fm::cluster_barrier_arrive();
    group = Divisor<Position>(shape.group), unit_rows = Divisor<Position>(shape.unit_rows), workers = Divisor<Position>(shape.workers);
    compute_now(group.inverse), compute_now(unit_rows.inverse), compute_now(workers.inverse);
    dealt_out = may_be_dealt_out(shape, params.layout.units);
    compute_now(dealt_out);
    fm::cluster_barrier_wait(); /* all have begun */
    compute_now(entries.q_begin), compute_now(entries.q_end), compute_now(entries.len), compute_now(entries.extra_len);
    Stretch of_thread{};
    span = {0, 0}, units = 0, helps = false;
#pragma unroll 1
    for (int32_t i = from; i < to;) {
      Request request = make_request(begin + i, entries);
      shared.request[i] = request;
      enter(request);
      units += left;
      if (request.units > kManyUnits) { /* each costs one at least: overlapping ranges may ask for more than 32 bits count */
        of_thread.cost = min(of_thread.cost + left, kMaxLine);
        of_thread.filled += kMany, left = 0;
      }
#pragma unroll 1
      while (left > 0) count_in(step(), of_thread);
      if (uint32_t(span.end) >= kMaxLine) span = {0, 0}, of_thread.cost = kMaxLine;
      if (++i < to) entries = read(begin + i);
    }
    of_thread.cost = min(of_thread.cost + span.end, kMaxLine), of_thread.units = units;
    if (helps) of_thread = {};
    Stretch before;
    Stretch of_cta = scan(of_thread, before);
    if (of_cta.filled >= kMany && of_cta.cost < kMaxLine) {
      share_out(before.units, of_cta.units, of_thread);
      of_cta = scan(of_thread, before);
    }
    if (thread < kCtas) {
      const auto there = [&](const void* own) { return fm::cluster_address(fm::shared_address(own), thread); };
      fm::store_cluster(there(&shared.of_cta[rank]), uint4{of_cta.cost, of_cta.units, of_cta.filled, of_cta.longest}, there(&shared.told[0]));
    }
    fm::mbarrier_wait_acquire_cluster(fm::shared_address(&shared.told[0]), 0);
    Stretch ctas_before;
    all = sum_before(shared.of_cta, kCtas, rank, ctas_before);
    own_begin = ctas_before.cost + before.cost, units_before = ctas_before.units + before.units;
    if (helps) own_begin -= span.end, --units_before;
  }

  /* Gives each thread as many of the `all_units` of this CTA, and measures them. `first`: of this thread's requests. A barrier. */
  __device__ __forceinline__ void share_out(int32_t first, int32_t all_units, Stretch& of_thread) {
#pragma unroll 1
    for (int32_t i = from; place == 0 && i < to; ++i) {
      shared.request[i].first_unit = first;
      first += shared.request[i].units;
    }
    __syncthreads();
    const int32_t each = (uint32_t(all_units) + kThreads - 1) / kThreads, own = min(thread * each, all_units);
    from = last_at_or_before(count, own, [this](int32_t i) { return shared.request[i].first_unit; });
    to = from + 1;
    skipped = own - shared.request[from].first_unit;
    units = min(each, all_units - own);
    log = place = own_begin = units_before = 0, helps = false;
    of_thread = {0, uint32_t(units), 0, 0};
    span = {0, 0};
    const auto measure_unit = [&] {
      count_in(tiles_of(shape, span), of_thread);
      if (uint32_t(span.end) >= kMaxLine) span = {0, 0}, of_thread.cost = kMaxLine;
    };
    for_each_unit(measure_unit, true);
    of_thread.cost = min(of_thread.cost + span.end, kMaxLine);
  }

  /* The sum of up to 32 stretches, and of those before one. */
  __device__ __forceinline__ Stretch sum_before(const uint4* of, int32_t number, int32_t which, Stretch& before) const {
    const int32_t lane = thread % 32;
    const uint4 one = lane < number ? of[lane] : uint4{0, 0, 0, 0};
    before = {__reduce_add_sync(~0u, lane < which ? one.x : 0), __reduce_add_sync(~0u, lane < which ? one.y : 0), 0, 0};
    return {min(__reduce_add_sync(~0u, one.x), kMaxLine), __reduce_add_sync(~0u, one.y), __reduce_add_sync(~0u, one.z),
            __reduce_max_sync(~0u, one.w)};
  }

  /* What all threads have, and what those before this one do. A barrier, and one more before it may be called again. */
  __device__ __forceinline__ Stretch scan(const Stretch& of_thread, Stretch& before) const {
    const uint32_t cost = scan_warp(of_thread.cost), units = scan_warp(of_thread.units);
    const uint32_t filled = __reduce_add_sync(~0u, of_thread.filled), longest = __reduce_max_sync(~0u, of_thread.longest);
    if (thread % 32 == 31) shared.of_warp[thread / 32] = {min(cost, kMaxLine), units, filled, longest};
    __syncthreads();
    const Stretch of_cta = sum_before(shared.of_warp, kThreads / 32, thread / 32, before);
    before.cost += cost - of_thread.cost, before.units += units - of_thread.units;
    return of_cta;
  }

  /* Whether what was measured can be planned this way; and, where it is known whether units stay whole, whether it can be written so. */
  __device__ __forceinline__ bool can_be_planned() const {
    return all.cost < kMaxLine && int32_t(all.units) <= params.layout.units && !are_few(shape, int32_t(all.units));
  }
  __device__ __forceinline__ bool can_be_written(const Line<Position>& line, bool may_be_equal) const {
    if (may_be_equal && are_equal(shape, line, int32_t(all.filled))) return false;
    return line.whole || (line.share.by >= shape.min_part && !dealt_out);
  }

  /* What becomes of a cut that falls on the unit that this thread is at: whether it cuts the unit if units are cut, whether it goes to its
     end if not, and if units stay whole. As cut_at_share, but without divisions. */
  struct OwnCut {
    bool inner, to_end, snaps_to_end;
  };
  __device__ __forceinline__ OwnCut find_cut(Position share, int32_t cut) const {
    const Position x = cut * share, tile = x - span.begin - shape.fixed_cost, tiles = tiles_of(shape, span);
    const bool near_start = tile < shape.min_part, near_end = tiles - tile < shape.min_part;
    return {!near_start && !near_end, near_start && near_end ? 2 * tile >= tiles : near_end, nearer_to_end(span, x)};
  }

  /* Tells all CTAs of this thread's cuts of the unit. */
  __device__ __forceinline__ void tell(const Line<Position>& line) {
    const Position share = line.share.by;
    first_cut = ceil_div(span.begin, line.share);
#pragma unroll 1
    for (int32_t cut = first_cut + turn; cut * share < span.end; cut += turns) {
      const OwnCut own = find_cut(share, cut);
      const bool first = cut == 1 || (cut - 1) * share < span.begin + shape.fixed_cost + shape.min_part;
      const uint32_t bits = !own.inner ? 0 : first ? kInner | kFirst : kInner;
      const uint2 told_cut{uint32_t(own.snaps_to_end ? span.end : span.begin), bits};
      const uint32_t at = fm::shared_address(&shared.cut[cut]), told = fm::shared_address(&shared.told[1]);
#pragma unroll
      for (int32_t cta = 0; cta < kCtas; ++cta) fm::store_cluster(fm::cluster_address(at, cta), told_cut, fm::cluster_address(told, cta));
    }
  }

  /* How cuts would cut the unit. */
  __device__ __forceinline__ void find_parts(const Line<Position>& line) {
    first_inner = first_inner_cut(shape, line, span);
    parts = parts_at_shares(shape, line, span);
  }

  /* Whether whole units share out evenly. A barrier of the CTA, after which the bits of all cuts are there. */
  __device__ __forceinline__ bool decide(const Line<Position>& line) const {
    bool fair = true;
    if (thread < 32 * kCutWords) {
      const int32_t cuts = ceil_div(line.total, line.share); /* on the line */
      const uint32_t told = fm::shared_address(&shared.told[1]);
      if (thread == 0) fm::mbarrier_arrive_expect(told, cuts * sizeof(SharedCut));
      const int64_t most = fair_uneven_stretch(shape, line.share.by);
      fm::mbarrier_wait_acquire_cluster(told, 0);
      uint32_t bits = 0;
      if (thread < cuts) {
        const SharedCut of = shared.cut[thread];
        bits = of.bits;
        fair = (thread + 1 < cuts ? shared.cut[thread + 1].snapped : line.total) - of.snapped <= most;
      }
      const uint2 of_warp{__ballot_sync(~0u, bits & kInner), __ballot_sync(~0u, bits & kFirst)};
      if (thread % 32 == 0) shared.bits[thread / 32] = of_warp;
      if (has_worker_each(shape, line)) fair = all.longest <= most;
    }
    return __syncthreads_and(fair);
  }

  /* What comes before a unit, the first one from cut `cut` on. */
  __device__ __forceinline__ Tally before_unit(const Line<Position>& line, int32_t index, int32_t cut) const {
    int32_t inner = 0, merges = 0;
#pragma unroll 1
    for (int32_t word = 0; !line.whole && word * 32 < cut; ++word) {
      const uint32_t mask = cut - word * 32 < 32 ? (1u << cut % 32) - 1 : ~0u;
      inner += __popc(shared.bits[word].x & mask), merges += __popc(shared.bits[word].y & mask);
    }
    return {index + inner, merges, inner + merges};
  }

  /* The items of the unit, its merge, and the workers that begin at cuts that fall on it. */
  __device__ __forceinline__ void write(const Line<Position>& line) {
    if (line.whole) parts = {0, 0, 1, parts.tiles};
    const Tally before = before_unit(line, index, first_cut);
    int32_t cut = first_cut + turn;
#pragma unroll 1
    for (bool at_cut = helps;; at_cut = true) {
      int32_t part = 0;
      if (at_cut) {
        if (cut * line.share.by >= span.end) return;
        const OwnCut of = find_cut(line.share.by, cut);
        const bool inner = of.inner && !line.whole, to_end = line.whole ? of.snaps_to_end : of.to_end;
        part = inner ? cut - first_inner + 1 : 0;
        if (!has_worker_each(shape, line))
          section<int32_t>(params, params.layout.worker_begin)[cut] = before.items + (inner ? part : to_end ? parts.count : 0);
        cut += turns;
        if (!inner) continue;
      }
      store(section<FmWorkItem>(params, params.layout.items) + before.items + part, make_item(unit, parts, part, before));
      if (part == 0 && parts.count > 1)
        store(section<FmMerge>(params, params.layout.merges) + before.merges, make_merge(unit, parts, before));
    }
  }

  /* The workers of whole units that have one each, else those that are left with nothing and begin at the end; and the header. By a
     thread for each cut. */
  __device__ __forceinline__ void write_rest(const Line<Position>& line, int32_t cut) const {
    const bool each = has_worker_each(shape, line);
    const bool idle = cut <= shape.workers && (each || cut * line.share.by >= line.total);
    if (!idle && cut != kMaxWorkers) return;
    const Tally tally = before_unit(line, line.units, ceil_div(line.total, line.share));
    if (idle) section<int32_t>(params, params.layout.worker_begin)[cut] = each ? unit_of_worker(shape, line, cut) : tally.items;
    if (cut == kMaxWorkers) store(section<FmPlanHeader>(params, 0), make_header(line, tally));
  }

  /* Tells, decides and writes. False: nothing is written. */
  __device__ __forceinline__ bool write_all() {
    const Position total = all.cost;
    index = units_before + units - 1;
    span = {span.begin + own_begin, span.end + own_begin};
    Line<Position> line{total, Divisor<Position>(even_share(total, workers)), int32_t(all.units), 1};
    const bool may_be_equal = int32_t(all.filled) <= shape.workers * kMostRounds;
    for_each_unit([&] { tell(line); });
    if (is_there()) find_parts(line);
    line.whole = decide(line);
    if (!can_be_written(line, may_be_equal)) return false;
    for_each_unit([&] {
      if (!is_there()) first_cut = ceil_div(span.begin, line.share), find_parts(line);
      write(line);
    });
    if (rank == 0 && thread >= kThreads - kMaxWorkers - 1) write_rest(line, kThreads - 1 - thread);
    return true;
  }
};

/* Plans, unless it takes another way: then nothing has been written, and the answer, the same in all CTAs, is false. */
__device__ __forceinline__ bool plan(const FmPlanParams& params, Shared& shared) {
  Planner planner(params, shared);
  if (!planner.fits()) return false;
  planner.measure();
  return planner.can_be_planned() && planner.write_all();
}

}  // namespace by_cluster
}  // namespace plan
}  // namespace ferromla
