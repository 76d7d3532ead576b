// Attention of query rows over a paged latent cache, or over listed tokens of it: out = softmax(Q K^T) V, V being the
// first 512 columns of K. One CTA per SM works through the items of its worker (see plan_layout.h); an item is a block of
// query rows (token, head) times a range of 64-token tiles of one request. A CTA has 64, 32 or 16 of the rows.
//
// With 64 rows:
//
//   warpgroup 0   scores: S = Q K^T (64 x 64), online softmax, P to shared memory      tile/scores.cuh
//   warpgroup 1   values: O[:, 0:256] += P V                                           tile/values.cuh
//   warpgroup 2   values: O[:, 256:512] += P V
//   warpgroup 3   loader: K into blocks of shared memory                               tile/load_*.cuh
//
// While the scores warpgroup is at tile t + 1, the values warpgroups multiply tile t and tile t + 2 is on its way:
// the tensor cores always have one of the two products to work on while the other side does its softmax or waits.
// CTAs of a team, which read the same tiles for different rows, may form clusters of two that share every load
// (load_tma.cuh, raw_rows.cuh, load_staged.cuh).
// Blocks of 64 tokens x 128 columns are the unit of loading and release, so that a product starts with the first
// blocks and a load with the first block used up. Shared memory and barriers: tile/shared_map.cuh.
// Registers per thread, of 65,536 / 128 = 512 for the four together: struct Registers.
//
// With 32 or 16 rows the roles are the same with swapped operands (tile/few_*.cuh), and the CTAs of a cluster may share
// the tiles of an item and merge what they have (tile/merge_parts.cuh). Parts of units that are cut: tile/split_*.cuh,
// two_parts.cuh, last_adds.cuh; parts with steps: tile/steps.cuh, stored_steps.cuh.
//
// Caches of e4m3 codes have CTAs of another kind (decode_raw):
//
//   warpgroup 0      loader: rows as they lie in the cache                             tile/raw_rows.cuh
//                    few rows of 512 columns: and warpgroup 3
//   warpgroups 1, 2  scores of every other tile, values of all, half of the columns    tile/raw_together.cuh
//                    with 16 rows, and 32 of fp8: both of every other tile             tile/raw_independent.cuh
//
// docs/kernels.md and docs/sparse.md have figures of all.
#pragma once
#include <cuda.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "params.h"
#include "ptx/control.cuh"
#include "ptx/launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "tile/few_scores.cuh"
#include "tile/few_values.cuh"
#include "tile/load_staged.cuh"
#include "tile/load_tma.cuh"
#include "tile/load_tokens.cuh"
#include "tile/raw_independent.cuh"
#include "tile/raw_map.cuh"
#include "tile/raw_rows.cuh"
#include "tile/raw_together.cuh"
#include "tile/scores.cuh"
#include "tile/shared_map.cuh"
#include "tile/token_cursor.cuh"
#include "tile/values.cuh"
#include "tile/work.cuh"

namespace fm {

// How K gets to shared memory: whole pages of 16-bit numbers (load_tma.cuh); or single tokens of them (load_tokens.cuh); or
// rows of codes as they lie in the cache (raw_rows.cuh), Raw of e4m3 ones, Bare where they have no scales, Fine where some are e2m1; or
// tokens of any cache, as halves (load_tokens.cuh); or rows of codes as bfloat16 (load_staged.cuh), Staged of e4m3 ones, FineStaged where
// some are e2m1, half of them by each of two CTAs with Pairs and FinePairs. With all but these and the first two what is multiplied
// is in half precision.
enum class Loader { Tma, Gather, Codes, Raw, Bare, Fine, Staged, FineStaged, Pairs, FinePairs };
template <Loader L>
constexpr bool kKeepsRows = L == Loader::Raw || L == Loader::Bare || L == Loader::Fine;
template <Loader L>
constexpr int kShare = L == Loader::Pairs || L == Loader::FinePairs ? 2 : L == Loader::Staged || L == Loader::FineStaged ? 1 : 0;

// Steps: whether parts have steps (tile/steps.cuh).
template <class T, Loader L, int Rows, int Cluster, bool Steps = false>
struct Kernel {
  static constexpr bool kCodes = L == Loader::Codes;
  template <bool If, class A, class B>
  using Either = typename std::conditional<If, A, B>::type;
  using Multiplied = Either<kCodes, __half, T>;  // T: of Q and the output
  using Staged = WideStaged<kShare<L> == 2 ? 2 : 1, L == Loader::FineStaged || L == Loader::FinePairs>;
  using WideSizes = Either<L == Loader::Tma, WidePages, Either<(kShare<L> > 0), Staged, WideTokens<kCodes>>>;
  using FewSizes = Either<L == Loader::Tma, FewPages<Rows>, FewTokens<Rows, kCodes>>;
  using Map = SharedMap<Either<Rows == kTileRows, WideSizes, FewSizes>, Cluster, Steps>;
  using Control = Either<Rows == kTileRows, WideControl, Either<Steps, StepControl, FewControl>>;
  static constexpr int kLoaderArrivals =  // at a barrier
      L == Loader::Tma ? 1 : kShare<L> > 0 ? TokenWarps<Map>::kWarps : TokenWarps<Map>::kArrivals;
  static_assert(Map::kControlOffset + sizeof(Control) <= FM_DECODE_SMEM_BYTES);
};

// By one thread: barriers are set up one at a time whoever does it.
__device__ __forceinline__ void init_barriers(DecodeControl& control, int loader_arrivals, int multicast,
                                              int scores_arrivals = 128, int values_warps = 8) {
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) {
    mbarrier_init(shared_address(&control.block_full[i]), loader_arrivals);
    mbarrier_init(shared_address(&control.block_empty[i]), 4 * multicast);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    mbarrier_init(shared_address(&control.tile_full[i]), loader_arrivals);
    mbarrier_init(shared_address(&control.tile_empty[i]), values_warps * multicast);
    mbarrier_init(shared_address(&control.weights_full[i]), scores_arrivals);
  }
  mbarrier_init(shared_address(&control.result_full), 128);
  mbarrier_init(shared_address(&control.result_empty), 8);
}

template <class Map>
__device__ __forceinline__ void init_part_barriers(FewControl& control) {
  mbarrier_init(shared_address(&control.parts_full), kSends<Map> ? 1 : 8 * Map::kCluster);
  mbarrier_init(shared_address(&control.parts_empty), 8 * Map::kCluster);
}

// After it every CTA of the cluster may use the barriers of every other.
template <class Map>
__device__ __forceinline__ void publish_barriers() {
  if (Map::kFewRows ? kSharesTiles<Map> : cluster_size() > 1)
    cluster_barrier_relaxed();
  else
    __syncthreads();
}

// Waits for earlier launches.
template <class T, int QkDim, Loader L, class Map>
__device__ __forceinline__ void load_tiles(const CUtensorMap& latent_map, const CUtensorMap& rope_map,
                                           const FmDecodeParams& p, const FirstItem& first, uint32_t smem,
                                           DecodeControl& control) {
  if constexpr (L == Loader::Tma) {
    load_tiles_tma<T, QkDim, Map>(p, &latent_map, &rope_map, first, smem, control);
  } else if constexpr (kShare<L> > 0) {
    load_staged<QkDim, Map>(p, first, smem, control);
  } else {
    load_tiles_tokens<T, QkDim, Map>(p, first, smem, control);
  }
}

// By the warpgroups of the values role, which have nothing else to do: what the L2 can fetch while earlier launches end. Where
// that is soon, Q and the first pages' numbers only: tiles take as long whoever asks for them.
template <class T, int QkDim, Loader L, class Map>
__device__ __forceinline__ void prefetch(const CUtensorMap& latent_map, const CUtensorMap& rope_map, const FmDecodeParams& p,
                                         const FirstItem& first, int half) {
  if (L != Loader::Tma || !first.exists() || first.block.empty()) return;
  if (half == 1)
    prefetch_query<T, QkDim, Map>(p, first.block);
  else if (p.waits_aside)
    prefetch_tile<QkDim>(p, &latent_map, &rope_map, first.block);
  else if (warpgroup_thread() == 0)
    prefetch_pages(p, first.block);
}

// Registers per thread of a role. The launch gives each thread 128 with 4 warpgroups and 96 with 5: what the roles take adds up to
// 512 and 480. Few rows of 16-bit numbers stay as launched.
template <Loader L, int Rows, int QkDim, bool Steps = false>
struct Registers {
  static constexpr bool kPages = L == Loader::Tma, kCodes = L == Loader::Codes, kWide = Rows == kTileRows;
  static constexpr int kMoreToLoad = kCodes && QkDim == kLatent ? 8 : 0;  // formats whose scales take more
  static constexpr int kLaunched = kCodes && !kWide ? 96 : 128;
  static constexpr int kScores = kWide ? (kPages ? 160 : kCodes ? 96 - kMoreToLoad : 144) : kCodes ? 112 : Steps && Rows == 32 ? 104 : 128;
  static constexpr int kValues = kWide ? 160 : Steps ? (Rows == 32 ? 184 : 160) : kCodes ? 80 : 128;
  static constexpr int kLoader = kWide ? (kPages ? 32 : kCodes ? 96 + kMoreToLoad : 48) : kCodes ? 104 : Steps ? (Rows == 32 ? 40 : 64) : 128;

  template <int Registers>
  static __device__ __forceinline__ void take() {
    if constexpr (Registers > kLaunched)
      registers_grow<Registers>();
    else if constexpr (Registers < kLaunched)
      registers_shrink<Registers>();
  }
};

// A CTA whose loader leaves what is multiplied, of 16-bit numbers.
template <class T, int QkDim, Loader L, int Rows, int Cluster, bool Steps>
__device__ __forceinline__ void decode_numbers(const CUtensorMap& latent_map, const CUtensorMap& rope_map,
                                               const FmDecodeParams& p, uint8_t* smem) {
  using K = Kernel<T, L, Rows, Cluster, Steps>;
  using Map = typename K::Map;
  using M = typename K::Multiplied;
  using R = Registers<L, Rows, QkDim, Steps>;
  using Control = std::conditional_t<Map::kFewRows, FewControl, WideControl>;
  Control& control = *reinterpret_cast<Control*>(smem + Map::kControlOffset);
  const FirstItem first = load_first_item<Map>(p);
  if (threadIdx.x == 0) {
    init_barriers(control, K::kLoaderArrivals, Map::kFewRows ? 1 : p.multicast);
    if constexpr (kSharesTiles<Map>) init_part_barriers<Map>(control);
    mbarrier_init_fence();
  }
  publish_barriers<Map>();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    wait_for_earlier_launches();
    R::template take<R::kScores>();
    if constexpr (Map::kFewRows)
      compute_few_scores<T, M, QkDim, Map>(p, first, smem, control);
    else
      compute_scores<T, M, QkDim, Map>(p, first, smem, control);
  } else if (Map::kFewRows ? warpgroup >= 3 : warpgroup == 3) {  // few rows of codes have two that load
    R::template take<R::kLoader>();
    load_tiles<T, QkDim, L, Map>(latent_map, rope_map, p, first, shared_address(smem), control);
  } else {
    prefetch<T, QkDim, L, Map>(latent_map, rope_map, p, first, warpgroup - 1);
    wait_for_earlier_launches();
    R::template take<R::kValues>();
    if constexpr (Map::kFewRows)
      accumulate_few_values<T, M, Map>(p, first, warpgroup - 1, shared_address(smem), control);
    else
      accumulate_values<T, M, Map>(p, first, warpgroup - 1, shared_address(smem), control);
  }
}

// A CTA that keeps rows of codes as they lie in the cache.
template <class T, int QkDim, Loader L, int Rows, int Cluster>
__device__ __forceinline__ void decode_raw(const CUtensorMap& rows_map, const CUtensorMap& tails_map, const FmDecodeParams& p,
                                           uint8_t* shared) {
  constexpr bool kBare = L == Loader::Bare;
  using Map = RawMap<Rows, QkDim, kBare, L == Loader::Fine, Cluster>;
  constexpr int kPreparing = Map::kPreparingWarps;
  using Control = std::conditional_t<Map::kIndependent, IndependentControl<Rows, kPreparing>, RawControl<Rows, kPreparing>>;
  static_assert(Map::kControlOffset + sizeof(Control) <= FM_DECODE_SMEM_BYTES);
  // Registers: with one loading warpgroup they add up to 504, 168 of which the launch gives each, with two to 512.
  constexpr int kLoader = Map::kFine && Rows == 32 ? 48 : 40, kCompute = Map::kLoaders == 2 ? 256 - kLoader : 232;
  // In a register: the compiler finds the address anew otherwise, wherever it is used, and waits for it each time. That made `fp8` with
  // 16 rows, which loads limit, 1 to 2 % slower.
  const uint32_t smem = Rows == 16 && kBare ? shared_address(shared) : opaque(shared_address(shared));
  Control& control = *reinterpret_cast<Control*>(__cvta_shared_to_generic(smem + Map::kControlOffset));
  const FirstItem first = load_first_item<Map>(p);
  if (threadIdx.x == 0) {
    init_barriers(control, kBare ? Map::kAskingWarps : kPreparing, Map::kFewRows ? 1 : p.multicast, 4, Map::kIndependent ? 4 : 8);
    if constexpr (!kBare) init_raw_barriers<Map>(control);
    if constexpr (kSharesTiles<Map>) init_part_barriers<Map>(control);
    mbarrier_init_fence();
  }
  publish_barriers<Map>();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0 || warpgroup == 3) {
    registers_shrink<kLoader>();
    load_raw_tiles<T, QkDim, Map>(p, {&rows_map, &tails_map}, first, smem, control);
  } else {
    wait_for_earlier_launches();
    registers_grow<kCompute>();
    if constexpr (Map::kIndependent)
      compute_independent<T, __half, QkDim, Map>(p, first, smem, control);
    else if constexpr (Map::kFewRows)
      compute_few_raw<T, __half, QkDim, Map>(p, first, smem, control);
    else
      compute_raw<T, __half, QkDim, Map>(p, first, smem, control);
  }
}

template <int QkDim, Loader L, int Rows>
constexpr int decode_threads() {
  if (kKeepsRows<L>) return RawMap<Rows, QkDim, L == Loader::Bare, L == Loader::Fine, 1>::kLoaders == 2 ? FM_DECODE_THREADS : FM_DECODE_THREADS_RAW;
  return L == Loader::Codes && Rows != kTileRows ? FM_DECODE_THREADS_2_LOADERS : FM_DECODE_THREADS;
}

template <class T, int QkDim, Loader L, int Rows, int Cluster, bool Steps>
__device__ __forceinline__ void decode(const CUtensorMap& latent_map, const CUtensorMap& rope_map,
                                       const FmDecodeParams& p) {
  uint8_t* smem = launch_shared();
  let_next_launch_begin();
  if constexpr (kKeepsRows<L>)
    decode_raw<T, QkDim, L, Rows, Cluster>(latent_map, rope_map, p, smem);
  else
    decode_numbers<T, QkDim, L, Rows, Cluster, Steps>(latent_map, rope_map, p, smem);
}

// CLUSTER: CTAs that share the tiles of an item. STEPS: whether parts have steps.
#define FM_DECODE_KERNEL_OF(CLUSTER, STEPS, NAME, TYPE, QK_DIM, LOADER, ROWS)                            \
  extern "C" __global__ void __launch_bounds__((fm::decode_threads<QK_DIM, fm::Loader::LOADER, ROWS>()), 1)      \
      NAME(const __grid_constant__ CUtensorMap latent_map, const __grid_constant__ CUtensorMap rope_map, \
           const __grid_constant__ FmDecodeParams params) {                                              \
    fm::decode<TYPE, QK_DIM, fm::Loader::LOADER, ROWS, CLUSTER, STEPS>(latent_map, rope_map, params);    \
  }

// Of 64 rows, and of 32 over whole pages of 16-bit numbers: CTAs that share no item's tiles.
#define FM_DECODE_KERNEL(NAME, ...) FM_DECODE_KERNEL_OF(1, false, NAME, __VA_ARGS__)

// Of 16-bit numbers, for parts with steps.
#define FM_DECODE_KERNEL_STEPS(NAME, ...) FM_DECODE_KERNEL_OF(1, true, NAME, __VA_ARGS__)

// Of other few rows: one for each cluster. The host and the emulator have the names, too.
#define FM_DECODE_KERNELS(NAME, ...)                      \
  FM_DECODE_KERNEL_OF(1, false, NAME, __VA_ARGS__)        \
  FM_DECODE_KERNEL_OF(2, false, NAME##_by_2, __VA_ARGS__) \
  FM_DECODE_KERNEL_OF(4, false, NAME##_by_4, __VA_ARGS__) \
  FM_DECODE_KERNEL_OF(8, false, NAME##_by_8, __VA_ARGS__) \
  FM_DECODE_KERNEL_OF(16, false, NAME##_by_16, __VA_ARGS__)

}  // namespace fm
