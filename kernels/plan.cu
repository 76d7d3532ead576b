// The planner on the device: writes the plan of plan_layout.h for the lengths of a batch, byte for byte what
// `ferromla_schedule::plan_into` writes. The arithmetic is plan_algorithm.h; the files of plan/ distribute it.
//
// One block, as every step needs the sum of the one before. Its size is the caller's choice, a multiple of 32 up to 1024: best a thread
// for each unit, request and cut, where they are that few. Then plan/small.cuh does the work, else plan/large.cuh.
// Many units, which only have to be cut at even shares or not at all, are planned by a cluster of blocks (plan/by_cluster.cuh).
// Where the mode fixes the parts of each unit: plan/by_count.cuh.
// Where many units have one part each, whatever their lengths, hardly anything needs a sum: several blocks (plan/one_part.cuh).
#include "params.h"
#include "plan/by_cluster.cuh"
#include "plan/by_count.cuh"
#include "plan/large.cuh"
#include "plan/one_part.cuh"
#include "plan/small.cuh"
#include "ptx/launch.cuh"
#include "ptx/shared.cuh"

namespace ferromla {
namespace plan {

/* What was tried before has left the memory. Not a part of what is always fetched. */
__device__ inline __attribute__((noinline)) void plan_otherwise(const FmPlanParams& params, large::Shared& shared) {
  __syncthreads();
  large::plan(params, shared);
}

/* kFew: the requests may be few. */
template <bool kFew>
__device__ __forceinline__ void plan(const FmPlanParams& params) {
  __shared__ union {
    small::Shared small;
    large::Shared large;
  } shared;
  fm::wait_for_earlier_launches(); /* and lets none begin before it ends: below */
  if (!small::fits<kFew>(params) || !small::plan<kFew>(params, shared.small)) plan_otherwise(params, shared.large);
  /* Attention kernels read their first items, and how many slots there are, before they wait for launches before them to
     be complete (FirstItem in tile/work.cuh). They begin when this block has ended at the earliest: what it wrote can be
     read then. */
  __threadfence();
}

}  // namespace plan
}  // namespace ferromla

/* What few requests may need takes code and registers, which others do without. */
extern "C" __global__ void __launch_bounds__(FM_PLAN_THREADS, 1)
    fm_plan(const __grid_constant__ FmPlanParams params) {
  ferromla::plan::plan<false>(params);
}

extern "C" __global__ void __launch_bounds__(FM_PLAN_THREADS_OF_FEW, 1)
    fm_plan_few(const __grid_constant__ FmPlanParams params) {
  ferromla::plan::plan<true>(params);
}

extern "C" __global__ void __launch_bounds__(FM_PLAN_CLUSTER_THREADS, 1)
    fm_plan_cluster(const __grid_constant__ FmPlanParams params) {
  union Shared {
    ferromla::plan::by_cluster::Shared by_cluster;
    ferromla::plan::large::Shared large;
  };
  static_assert(sizeof(Shared) <= FM_PLAN_CLUSTER_SMEM_BYTES, "FM_PLAN_CLUSTER_SMEM_BYTES");
  Shared& shared = *reinterpret_cast<Shared*>(fm::launch_shared());
  fm::wait_for_earlier_launches();
  if (!ferromla::plan::by_cluster::plan(params, shared.by_cluster) && fm::cluster_rank() == 0)
    ferromla::plan::plan_otherwise(params, shared.large);
  __threadfence(); /* as above */
}

/* FM_SPLIT_FIXED and FM_SPLIT_INVARIANT; the kernels above are for FM_SPLIT_AUTO. Two threads at least for each unit, if units are no
   more than kMostDealtUnits. */
extern "C" __global__ void __launch_bounds__(FM_PLAN_THREADS, 1)
    fm_plan_by_count(const __grid_constant__ FmPlanParams params) {
  __shared__ ferromla::plan::by_count::Shared shared;
  fm::wait_for_earlier_launches();
  ferromla::plan::by_count::plan(params, shared);
  __threadfence(); /* as above */
}

/* Of units that are not ragged: FM_SPLIT_REST, or num_splits = 1 for more than kMostDealtUnits of them. Any number of blocks. */
extern "C" __global__ void __launch_bounds__(FM_PLAN_THREADS, 1)
    fm_plan_one_part(const __grid_constant__ FmPlanParams params) {
  __shared__ ferromla::plan::one_part::Shared shared;
  fm::wait_for_earlier_launches();
  ferromla::plan::one_part::plan(params, shared);
  __threadfence(); /* as above */
}
