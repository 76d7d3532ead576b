// Attention of query rows over a paged 16-bit latent cache: out = softmax(Q K^T) V, V being the first 512 columns
// of K. One CTA per SM works through the items of its team (see plan_layout.h); an item is 64 query rows (token,
// head) times a range of 64-token tiles of one request.
//
//   warpgroup 0   scores: S = Q K^T (64 x 64), online softmax, P to shared memory      tile/scores.cuh
//   warpgroup 1   values: O[:, 0:256] += P V                                           tile/values.cuh
//   warpgroup 2   values: O[:, 256:512] += P V
//   warpgroup 3   loader: K into rings of shared memory blocks                         tile/load_*.cuh
//
// While the scores warpgroup is at tile t + 1, the values warpgroups multiply tile t and tile t + 2 is on its way:
// the tensor cores always have one of the two products to work on while the other side does its softmax or waits.
// Where a team has an even number of CTAs they form clusters of two, which share every load (load_tma.cuh).
// Blocks of 64 tokens x 128 columns are the unit of loading and release, so that a product starts with the first
// block and a load with the first block used up. Shared memory and barriers: tile/shared_map.cuh.
// Registers per thread: 160, 160, 160, 32; they add up to 65,536 / 128 = 512.
#pragma once
#include "tile/load_gather.cuh"
#include "tile/load_tma.cuh"
#include "tile/scores.cuh"
#include "tile/values.cuh"

namespace fm {

enum class Loader { Tma, Gather };

__device__ __forceinline__ void init_barriers(DecodeControl& control, int loader_arrivals) {
  for (int i = 0; i < kBlocks; ++i) {
    mbarrier_init(shared_address(&control.block_full[i]), loader_arrivals);
    mbarrier_init(shared_address(&control.block_empty[i]), 4 * cluster_size());
  }
  for (int i = 0; i < kTiles; ++i) {
    mbarrier_init(shared_address(&control.tile_full[i]), loader_arrivals);
    mbarrier_init(shared_address(&control.tile_empty[i]), 8 * cluster_size());
    mbarrier_init(shared_address(&control.weights_full[i]), 128);
  }
  mbarrier_init(shared_address(&control.result_full), 128);
  mbarrier_init(shared_address(&control.result_empty), 8);
  mbarrier_init_fence();
}

template <class T, int QkDim, Loader L>
__device__ __forceinline__ void decode(const CUtensorMap& latent_map, const CUtensorMap& rope_map,
                                       const FmDecodeParams& p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  DecodeControl& control = *reinterpret_cast<DecodeControl*>(smem + kControlOffset);
  if (threadIdx.x == 0) init_barriers(control, L == Loader::Tma ? 1 : kTileWarps);
  cluster_barrier();
  launch_dependents();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    registers_grow<160>();
    compute_scores<T, QkDim>(p, smem, control);
  } else if (warpgroup == 3) {
    registers_shrink<32>();
    if constexpr (L == Loader::Tma)
      load_tiles_tma<QkDim>(p, &latent_map, &rope_map, shared_address(smem), control);
    else
      load_tiles_gather<T, QkDim>(p, shared_address(smem), control);
  } else {
    registers_grow<160>();
    accumulate_values<T>(p, warpgroup - 1, shared_address(smem), control);
  }
  __syncwarp();
  cluster_barrier();  // no CTA leaves while another may still write to its shared memory
}

#define FM_DECODE_KERNEL(NAME, TYPE, QK_DIM, LOADER)                                                            \
  extern "C" __global__ void __launch_bounds__(FM_DECODE_THREADS, 1)                                            \
      NAME(const __grid_constant__ CUtensorMap latent_map, const __grid_constant__ CUtensorMap rope_map,        \
           const __grid_constant__ FmDecodeParams params) {                                                     \
    fm::decode<TYPE, QK_DIM, fm::Loader::LOADER>(latent_map, rope_map, params);                                 \
  }

}  // namespace fm
