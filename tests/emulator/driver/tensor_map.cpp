// The emulated driver's tensor maps: what a device could not load through is refused, as the driver documents it.
#include <cstring>

#include "driver.h"

namespace emulation::driver {
namespace {

constexpr uint64_t kAlignment = 16;
constexpr uintptr_t kMapAlignment = 64;
constexpr uint64_t kMostSize = uint64_t{1} << 32;
constexpr uint64_t kStrideEnd = uint64_t{1} << 40;
constexpr uint32_t kMostBox = 256;

// 0: a type that no kernel loads.
uint32_t bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
    default: return 0;
  }
}

// Bytes of a swizzled row, 0 where rows are not swizzled; -1: a swizzle that no kernel reads.
int swizzled_bytes(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE: return 0;
    case CU_TENSOR_MAP_SWIZZLE_32B: return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B: return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B: return 128;
    default: return -1;
  }
}

// Of the dimensions and of the box.
bool has_valid_sizes(const TensorMap& map, const cuuint32_t* element_strides) {
  for (uint32_t i = 0; i < map.rank; ++i) {
    if (map.dims[i] == 0 || map.dims[i] > kMostSize) return false;
    if (map.box[i] == 0 || map.box[i] > kMostBox || element_strides[i] != 1) return false;
  }
  return true;
}

bool has_valid_strides(const TensorMap& map) {
  for (uint32_t i = 0; i + 1 < map.rank; ++i) {
    if (map.byte_strides[i] % kAlignment != 0 || map.byte_strides[i] >= kStrideEnd) return false;
  }
  return true;
}

// Innermost rows of a box: whole units of the copy, and within a swizzled row.
bool has_valid_rows(const TensorMap& map) {
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  const int swizzled = swizzled_bytes(static_cast<CUtensorMapSwizzle>(map.swizzle));
  if (map.element_bytes == 0 || swizzled < 0 || row_bytes % kAlignment != 0) return false;
  return swizzled == 0 || row_bytes <= static_cast<uint32_t>(swizzled);
}

bool is_valid(const TensorMap& map, const cuuint32_t* element_strides) {
  return map.address != 0 && map.address % kAlignment == 0 && has_valid_sizes(map, element_strides) &&
         has_valid_strides(map) && has_valid_rows(map);
}

TensorMap gather(uint32_t rank, const cuuint64_t* dims, const cuuint64_t* byte_strides, const cuuint32_t* box) {
  TensorMap map{};
  map.rank = rank;
  for (uint32_t i = 0; i < 5; ++i) {
    map.dims[i] = i < rank ? dims[i] : 1;
    map.box[i] = i < rank ? box[i] : 1;
  }
  for (uint32_t i = 0; i + 1 < rank; ++i) map.byte_strides[i] = byte_strides[i];
  return map;
}

}  // namespace
}  // namespace emulation::driver

using namespace emulation::driver;

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                           const cuuint64_t* dims, const cuuint64_t* byte_strides, const cuuint32_t* box,
                                           const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                           CUtensorMapFloatOOBfill fill) {
  const bool is_there = to != nullptr && reinterpret_cast<uintptr_t>(to) % kMapAlignment == 0 && dims != nullptr &&
                        (byte_strides != nullptr || rank == 1) && box != nullptr && element_strides != nullptr;
  const bool is_plain = interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
                        promotion <= CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  if (!is_there || !is_plain || rank < 1 || rank > 5) return CUDA_ERROR_INVALID_VALUE;
  emulation::TensorMap map = gather(rank, dims, byte_strides, box);
  map.address = reinterpret_cast<uintptr_t>(address);
  map.element_bytes = bytes_of(type);
  map.swizzle = swizzle;
  if (!is_valid(map, element_strides)) return CUDA_ERROR_INVALID_VALUE;
  std::memset(to, 0, sizeof *to);
  std::memcpy(to, &map, sizeof map);
  return CUDA_SUCCESS;
}
