// Gives the numbers of a strided matrix one value: what several CTAs are to raise afterwards. Threads stride over them.
#include "params.h"
#include "ptx/launch.cuh"

extern "C" __global__ void __launch_bounds__(FM_ROW_THREADS) fm_fill(const __grid_constant__ FmFillParams params) {
  fm::follow_earlier_launches();
  const int64_t count = (int64_t)params.rows * params.columns, threads = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads)
    params.to[i / params.columns * params.stride[0] + i % params.columns * params.stride[1]] = params.value;
}
