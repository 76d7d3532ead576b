// The emulated driver's memory: host memory between pages that nobody may touch, and copies that stay within a block.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "driver.h"

namespace emulation::driver {
namespace {

// What cuMemAlloc promises.
constexpr size_t kAlignment = 256;
// All that there is: more is refused, as a device does, before it drives the host out of its own.
constexpr size_t kDeviceBytes = size_t{4} << 30;
// 0xffff is a NaN in bf16 and fp16, and so is the word in float32: what nobody has written shows in results.
constexpr int kUnwritten = 0xff;

struct Block {
  size_t bytes;
  char* mapping; /* with its two guard pages */
  size_t mapped;
};

struct Memory {
  std::map<CUdeviceptr, Block> blocks;
  size_t mapped = 0;
};

Memory& memory() { return leaked<Memory>(); }

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Maps a block whose last byte, but for the alignment, is the last before a guard page.
CUresult allocate(CUdeviceptr* address, size_t bytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  if (bytes > kDeviceBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const size_t within = round_up(bytes, kAlignment), writable = round_up(within, page);
  const size_t mapped = writable + 2 * page;
  if (memory().mapped + mapped > kDeviceBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  void* const found = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  char* const mapping = static_cast<char*>(found);
  if (mprotect(mapping + page, writable, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, mapped);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  std::memset(mapping + page, kUnwritten, writable);
  *address = reinterpret_cast<CUdeviceptr>(mapping + page + writable - within);
  memory().blocks[*address] = {bytes, mapping, mapped};
  memory().mapped += mapped;
  return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr address) {
  const auto found = memory().blocks.find(address);
  if (found == memory().blocks.end()) return CUDA_ERROR_INVALID_VALUE;
  munmap(found->second.mapping, found->second.mapped);
  memory().mapped -= found->second.mapped;
  memory().blocks.erase(found);
  return CUDA_SUCCESS;
}

struct Range {
  CUdeviceptr begin;
  size_t bytes;

  // Within one block, to the byte.
  bool is_allocated() const {
    if (bytes == 0) return true;
    auto after = memory().blocks.upper_bound(begin);
    if (after == memory().blocks.begin()) return false;
    const auto& [address, block] = *--after;
    const size_t offset = begin - address;
    return offset < block.bytes && bytes <= block.bytes - offset;
  }

  void* data() const { return reinterpret_cast<void*>(begin); }
};

bool are_allocated(const std::vector<Range>& ranges) {
  for (const Range& range : ranges) {
    if (!range.is_allocated()) return false;
  }
  return true;
}

// Submits work on these ranges. They are looked up now and when a graph does the work: blocks may be gone by then.
CUresult submit_on(std::vector<Range> ranges, CUstream stream, std::function<void()> work) {
  return in_context([&]() -> CUresult {
    if (!are_allocated(ranges)) return CUDA_ERROR_INVALID_VALUE;
    return submit(stream, [ranges = std::move(ranges), work = std::move(work)]() -> CUresult {
      if (!are_allocated(ranges)) return CUDA_ERROR_INVALID_VALUE;
      work();
      return CUDA_SUCCESS;
    });
  });
}

// A call without a stream: the legacy stream's work, which captures of others forbid.
CUresult before_synchronous_work() { return in_context(allowed_during_captures); }

}  // namespace
}  // namespace emulation::driver

using namespace emulation::driver;

extern "C" {

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  return in_context([&]() -> CUresult {
    if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const CUresult allowed = allowed_during_captures();
    return allowed == CUDA_SUCCESS ? allocate(address, bytes) : allowed;
  });
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  return in_context([&]() -> CUresult {
    if (address == 0) return CUDA_SUCCESS;
    const CUresult allowed = allowed_during_captures();
    return allowed == CUDA_SUCCESS ? release(address) : allowed;
  });
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  const Range range{to, bytes};
  return submit_on({range}, stream, [=] { std::memcpy(range.data(), from, bytes); });
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  const Range range{from, bytes};
  return submit_on({range}, stream, [=] { std::memcpy(to, range.data(), bytes); });
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  const Range target{to, bytes}, source{from, bytes};
  return submit_on({target, source}, stream, [=] { std::memmove(target.data(), source.data(), bytes); });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t bytes, CUstream stream) {
  const Range range{to, bytes};
  return submit_on({range}, stream, [=] { std::memset(range.data(), byte, bytes); });
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  const CUresult allowed = before_synchronous_work();
  return allowed == CUDA_SUCCESS ? cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr) : allowed;
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  const CUresult allowed = before_synchronous_work();
  return allowed == CUDA_SUCCESS ? cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr) : allowed;
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char byte, size_t bytes) {
  const CUresult allowed = before_synchronous_work();
  return allowed == CUDA_SUCCESS ? cuMemsetD8Async(to, byte, bytes, nullptr) : allowed;
}

}  // extern "C"
