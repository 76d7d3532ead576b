// Attention of query rows over a paged 16-bit latent cache: out = softmax(Q K^T) V, V being the first 512 columns
// of K. One CTA per SM works through the items of its worker (see plan_layout.h); an item is a block of query rows
// (token, head) times a range of 64-token tiles of one request. A CTA has 64, 32 or 16 of the rows.
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
// (load_tma.cuh).
// Blocks of 64 tokens x 128 columns are the unit of loading and release, so that a product starts with the first
// blocks and a load with the first block used up. Shared memory and barriers: tile/shared_map.cuh.
// Registers per thread: 160, 160, 160, 32; they add up to 65,536 / 128 = 512.
//
// With 32 or 16 rows the roles are the same with swapped operands (tile/few_*.cuh), and the CTAs of a cluster may share
// the tiles of an item and merge what they have (tile/merge_parts.cuh). docs/kernels.md has figures of both.
#pragma once
#include "tile/few_scores.cuh"
#include "tile/few_values.cuh"
#include "tile/load_gather.cuh"
#include "tile/load_tma.cuh"
#include "tile/scores.cuh"
#include "tile/values.cuh"

namespace fm {

enum class Loader { Tma, Gather };

// By one thread: barriers are set up one at a time whoever does it.
__device__ __forceinline__ void init_barriers(DecodeControl& control, int loader_arrivals, int multicast) {
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) {
    mbarrier_init(shared_address(&control.block_full[i]), loader_arrivals);
    mbarrier_init(shared_address(&control.block_empty[i]), 4 * multicast);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    mbarrier_init(shared_address(&control.tile_full[i]), loader_arrivals);
    mbarrier_init(shared_address(&control.tile_empty[i]), 8 * multicast);
    mbarrier_init(shared_address(&control.weights_full[i]), 128);
  }
  mbarrier_init(shared_address(&control.result_full), 128);
  mbarrier_init(shared_address(&control.result_empty), 8);
}

// After it every CTA of the cluster may use the barriers of every other.
__device__ __forceinline__ void publish_barriers() {
  if (cluster_size() > 1)
    cluster_barrier_relaxed();
  else
    __syncthreads();
  launch_dependents();
}

template <class T, int QkDim, Loader L, class Map>
__device__ __forceinline__ void load_tiles(const CUtensorMap& latent_map, const CUtensorMap& rope_map,
                                           const FmDecodeParams& p, uint32_t smem, DecodeControl& control) {
  if constexpr (L == Loader::Tma)
    load_tiles_tma<T, QkDim, Map>(p, &latent_map, &rope_map, smem, control);
  else
    load_tiles_gather<T, QkDim, Map>(p, smem, control);
}

// A CTA of 64 rows.
template <class T, int QkDim, Loader L>
__device__ __forceinline__ void decode_wide(const CUtensorMap& latent_map, const CUtensorMap& rope_map,
                                            const FmDecodeParams& p, uint8_t* smem) {
  DecodeControl& control = *reinterpret_cast<DecodeControl*>(smem + WideMap::kControlOffset);
  if (threadIdx.x == 0) {
    init_barriers(control, L == Loader::Tma ? 1 : GatherWarps<WideMap>::kOfTile, p.multicast);
    mbarrier_init_fence();
  }
  publish_barriers();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    registers_grow<160>();
    compute_scores<T, QkDim>(p, smem, control);
  } else if (warpgroup == 3) {
    registers_shrink<32>();
    load_tiles<T, QkDim, L, WideMap>(latent_map, rope_map, p, shared_address(smem), control);
  } else {
    registers_grow<160>();
    accumulate_values<T>(p, warpgroup - 1, shared_address(smem), control);
  }
  __syncwarp();
  if (p.multicast > 1) cluster_barrier();  // no CTA leaves while another may still write to its shared memory
}

// A CTA of 16 or 32 rows.
template <class T, int QkDim, Loader L, class Map>
__device__ __forceinline__ void decode_few(const CUtensorMap& latent_map, const CUtensorMap& rope_map,
                                           const FmDecodeParams& p, uint8_t* smem) {
  FewControl& control = *reinterpret_cast<FewControl*>(smem + Map::kControlOffset);
  if (threadIdx.x == 0) {
    init_barriers(control, L == Loader::Tma ? 1 : GatherWarps<Map>::kOfTile, 1);
    mbarrier_init(shared_address(&control.parts_full), 8 * p.splits);
    mbarrier_init(shared_address(&control.parts_empty), 8 * p.splits);
    mbarrier_init_fence();
  }
  publish_barriers();
  const int warpgroup = threadIdx.x / 128;
  // The gather loader's CTAs of 640 or 896 threads start with 96 or 72 registers each:
  // 128 + 2 x 112 + 2 x 56 <= 5 x 96, 120 + 2 x 104 + 4 x 40 <= 7 x 72.
  constexpr bool kManyThreads = L == Loader::Gather;
  constexpr bool k16 = Map::kRows == 16;
  if (warpgroup == 0) {
    if (kManyThreads) registers_grow<k16 ? 120 : 128>();
    compute_few_scores<T, QkDim, Map>(p, smem, control);
  } else if (warpgroup >= 3) {
    if (kManyThreads) registers_shrink<k16 ? 40 : 56>();
    load_tiles<T, QkDim, L, Map>(latent_map, rope_map, p, shared_address(smem), control);
  } else {
    if (kManyThreads) registers_grow<k16 ? 104 : 112>();
    accumulate_few_values<T, Map>(p, warpgroup - 1, shared_address(smem), control);
  }
}

constexpr int decode_threads(Loader loader, int rows) {
  if (loader == Loader::Tma || rows == kTileRows) return FM_DECODE_THREADS;
  return rows == 16 ? FM_DECODE_GATHER_THREADS_16 : FM_DECODE_GATHER_THREADS_32;
}

template <class T, int QkDim, Loader L, int Rows>
__device__ __forceinline__ void decode(const CUtensorMap& latent_map, const CUtensorMap& rope_map,
                                       const FmDecodeParams& p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  if constexpr (Rows == kTileRows)
    decode_wide<T, QkDim, L>(latent_map, rope_map, p, smem);
  else
    decode_few<T, QkDim, L, FewMap<Rows>>(latent_map, rope_map, p, smem);
}

#define FM_DECODE_KERNEL(NAME, TYPE, QK_DIM, LOADER, ROWS)                                                      \
  extern "C" __global__ void __launch_bounds__(fm::decode_threads(fm::Loader::LOADER, ROWS), 1)                  \
      NAME(const __grid_constant__ CUtensorMap latent_map, const __grid_constant__ CUtensorMap rope_map,        \
           const __grid_constant__ FmDecodeParams params) {                                                     \
    fm::decode<TYPE, QK_DIM, fm::Loader::LOADER, ROWS>(latent_map, rope_map, params);                           \
  }

}  // namespace fm
