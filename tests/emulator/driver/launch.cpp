// The emulated driver's libraries, kernels and launches. Every library has every kernel there is, whatever its bytes.
#include <cstring>

#include "driver.h"

namespace emulation::driver {
namespace {

// CTAs of a cluster, at most, and with the attribute for more.
constexpr unsigned kMostCluster = 8, kMostAllowedCluster = 16;

struct Library {};

struct Loaded {
  const Kernel* kernel;
  unsigned most_shared_bytes = kUsualSharedBytes;
  unsigned most_cluster = kMostCluster;
};

Handles<Library>& libraries() { return leaked<Handles<Library>>(); }

// Of the kernels that somebody has asked for: the same handle each time. Addresses in a map of nodes stay.
std::unordered_map<const Kernel*, Loaded>& all_loaded() { return leaked<std::unordered_map<const Kernel*, Loaded>>(); }

// Null: it is no kernel's handle, nor that of its function, which is the same.
Loaded* find_loaded(const void* handle) {
  for (auto& [kernel, loaded] : all_loaded()) {
    if (&loaded == handle) return &loaded;
  }
  return nullptr;
}

// Sets the cluster that the attributes ask for; false: they ask for what there is not.
bool read_attributes(const CUlaunchConfig& config, unsigned most_cluster, unsigned* cluster) {
  if (config.numAttrs > 0 && config.attrs == nullptr) return false;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config.attrs[i];
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: /* earlier launches have ended all the same */
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        if (attribute.value.clusterDim.x != 1 || attribute.value.clusterDim.z != 1) return false;
        *cluster = attribute.value.clusterDim.y;
        break;
      default: return false;
    }
  }
  return *cluster >= 1 && *cluster <= most_cluster;
}

// Whether a device could launch the kernel so, and the machine emulates it.
bool is_valid(const CUlaunchConfig& config, const Grid& grid, const Loaded& kernel) {
  const bool is_flat = config.gridDimZ == 1 && config.blockDimY == 1 && config.blockDimZ == 1;
  const bool has_blocks = grid.x >= 1 && grid.x <= 0x7fffffff && grid.y >= 1 && grid.y <= 0xffff;
  const bool has_warps = grid.threads >= 32 && grid.threads <= 1024 && grid.threads % 32 == 0;
  return is_flat && has_blocks && has_warps && grid.y % grid.cluster == 0 &&
         grid.shared_bytes <= kernel.most_shared_bytes;
}

CUresult read_config(const CUlaunchConfig* config, const Loaded& kernel, Grid* grid) {
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *grid = {config->gridDimX, config->gridDimY, config->blockDimX, config->sharedMemBytes, 1};
  const bool is_known = read_attributes(*config, kernel.most_cluster, &grid->cluster);
  return is_known && is_valid(*config, *grid, kernel) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Copies of a launch's arguments: callers may change theirs as soon as the launch returns.
class Arguments {
 public:
  Arguments(const Kernel& kernel, void* const* values) {
    size_t pieces = 0;
    for (size_t size : kernel.sizes) pieces += pieces_of(size);
    storage_.resize(pieces);
    Piece* to = storage_.data();
    for (size_t i = 0; i < kernel.sizes.size(); ++i) {
      std::memcpy(to->bytes, values[i], kernel.sizes[i]);
      pointers_.push_back(to->bytes);
      to += pieces_of(kernel.sizes[i]);
    }
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  void** pointers() { return pointers_.data(); }

 private:
  // As a CUtensorMap of cuda.h is aligned.
  struct alignas(alignof(CUtensorMap)) Piece {
    char bytes[alignof(CUtensorMap)];
  };
  static size_t pieces_of(size_t bytes) { return (bytes + sizeof(Piece) - 1) / sizeof(Piece); }

  std::vector<Piece> storage_;
  std::vector<void*> pointers_;
};

bool are_all_there(const Kernel& kernel, void* const* values) {
  if (values == nullptr) return kernel.sizes.empty();
  for (size_t i = 0; i < kernel.sizes.size(); ++i) {
    if (values[i] == nullptr) return false;
  }
  return true;
}

CUresult launch(const Kernel& kernel, const Grid& grid, CUstream stream, void** values) {
  if (!are_all_there(kernel, values)) return CUDA_ERROR_INVALID_VALUE;
  const auto arguments = std::make_shared<Arguments>(kernel, values);
  return submit(stream, [&kernel, grid, arguments]() -> CUresult {
    kernel.run(arguments->pointers(), grid);
    return CUDA_SUCCESS;
  });
}

}  // namespace
}  // namespace emulation::driver

using namespace emulation::driver;

extern "C" {

CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option*, void**, unsigned jit_options, CUlibraryOption*, void**,
                           unsigned options) {
  return in_context([&]() -> CUresult {
    if (image == nullptr || jit_options != 0 || options != 0) return CUDA_ERROR_INVALID_VALUE;
    const CUresult allowed = allowed_during_captures();
    return allowed == CUDA_SUCCESS ? libraries().give(library) : allowed;
  });
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  return in_context([&] {
    if (kernel == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (libraries().find(library) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const emulation::Kernel* const found = emulation::find_kernel(name);
    if (found == nullptr) return CUDA_ERROR_NOT_FOUND;
    Loaded& loaded = all_loaded().try_emplace(found, Loaded{found}).first->second;
    *kernel = reinterpret_cast<CUkernel>(&loaded);
    return CUDA_SUCCESS;
  });
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle, CUdevice) {
  return in_context([&] {
    Loaded* const loaded = find_loaded(handle);
    if (loaded == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) {
      loaded->most_cluster = value != 0 ? kMostAllowedCluster : kMostCluster;
      return CUDA_SUCCESS;
    }
    const bool is_known = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    if (!is_known || value < 0 || value > static_cast<int>(kMostSharedBytes)) return CUDA_ERROR_INVALID_VALUE;
    loaded->most_shared_bytes = value;
    return CUDA_SUCCESS;
  });
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel handle) {
  return in_context([&] {
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (find_loaded(handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *function = reinterpret_cast<CUfunction>(handle);
    return CUDA_SUCCESS;
  });
}

// One CTA at a time on a multiprocessor.
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction handle, const CUlaunchConfig* config) {
  return in_context([&] {
    const Loaded* const loaded = find_loaded(handle);
    if (loaded == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    emulation::Grid grid;
    const CUresult result = read_config(config, *loaded, &grid);
    if (clusters == nullptr || result != CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
    *clusters = emulation::kSms / static_cast<int>(grid.cluster);
    return CUDA_SUCCESS;
  });
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction handle, void** arguments, void** extra) {
  return in_context([&]() -> CUresult {
    const Loaded* const loaded = find_loaded(handle);
    if (loaded == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    emulation::Grid grid;
    const CUresult result = read_config(config, *loaded, &grid);
    if (result != CUDA_SUCCESS || extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
    return launch(*loaded->kernel, grid, config->hStream, arguments);
  });
}

}  // extern "C"
