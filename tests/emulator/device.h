// What the two halves of the emulated device share: the driver (driver*.cpp), which has memory, streams and graphs, and
// the machine that runs kernels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulation {

// Streaming multiprocessors, and the memory's clock and width, of an H200: how work is cut and shared out depends on them.
constexpr int kSms = 132;
constexpr int kMemoryKhz = 3201000, kMemoryBits = 6016;

// How a kernel is launched. `cluster`: CTAs of a cluster, which lie along y.
struct Grid {
  unsigned x = 1, y = 1, threads = 1, shared_bytes = 0, cluster = 1;
};

// A kernel of the library. `sizes`: of its parameters, in order. `run` returns when all of its threads have ended, and
// leaves the arguments as they are: a graph gives the same ones at every replay. Each is aligned to 128 bytes.
struct Kernel {
  const char* name;
  void (*run)(void** arguments, const Grid& grid);
  std::vector<size_t> sizes;
};

// Null: there is none of this name.
const Kernel* find_kernel(const char* name);

// What cuTensorMapEncodeTiled puts into the 128 bytes of a CUtensorMap; the rest of them are zeros. Dimensions are innermost
// first; those past the rank have a size and a box of 1, and a stride of 0. What is outside the dimensions reads as zeros.
struct TensorMap {
  uint64_t address;
  uint64_t dims[5];
  uint64_t byte_strides[4]; /* of dims 1 to 4 */
  uint32_t box[5];
  uint32_t rank; /* 0: a map that nobody has encoded */
  uint32_t element_bytes;
  uint32_t swizzle; /* as CUtensorMapSwizzle counts: 0 none, 1: of 32 bytes, 2: of 64, 3: of 128 */
};
static_assert(sizeof(TensorMap) <= 128, "a CUtensorMap has room for it");

}  // namespace emulation
