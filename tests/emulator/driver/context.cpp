// A CUDA driver library whose kernels run on the host: version, the one device, contexts, errors. Memory, streams and
// graphs, launches and tensor maps are in the other files of this name.
#include "driver.h"

#include <cstdio>

namespace emulation::driver {
namespace {

// CUDA 13.0, as cuDriverGetVersion counts.
constexpr int kVersion = 13000;
constexpr const char* kName = "Emulated Hopper";

struct Device {
  bool is_initialised = false;
  int retained = 0; /* of its only context */
};

Device& device() { return leaked<Device>(); }

CUcontext primary_context() { return reinterpret_cast<CUcontext>(&device()); }

// The contexts of a thread, the current one last.
std::vector<CUcontext>& contexts() {
  static thread_local std::vector<CUcontext> stack;
  return stack;
}

CUcontext current_context() { return contexts().empty() ? nullptr : contexts().back(); }

bool is_context(CUcontext context) { return context == primary_context() && device().retained > 0; }

// What an exported function does under the lock, once the driver is initialised.
template <class Body>
CUresult initialised(Body body) {
  const std::lock_guard<std::mutex> locked(lock());
  return device().is_initialised ? body() : CUDA_ERROR_NOT_INITIALIZED;
}

// -1: nobody has asked for this one yet.
int attribute_value(CUdevice_attribute attribute) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return kSms;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return kUsualSharedBytes;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return kMostSharedBytes;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return 1;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 0;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return kMemoryKhz;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return kMemoryBits;
    default: return -1;
  }
}

// The driver's own words; null: a code that this driver does not give.
const char* words(CUresult code) {
  switch (code) {
    case CUDA_SUCCESS: return "no error";
    case CUDA_ERROR_INVALID_VALUE: return "invalid argument";
    case CUDA_ERROR_OUT_OF_MEMORY: return "out of memory";
    case CUDA_ERROR_NOT_INITIALIZED: return "initialization error";
    case CUDA_ERROR_INVALID_DEVICE: return "invalid device ordinal";
    case CUDA_ERROR_INVALID_CONTEXT: return "invalid device context";
    case CUDA_ERROR_INVALID_HANDLE: return "invalid resource handle";
    case CUDA_ERROR_ILLEGAL_STATE: return "the operation cannot be performed in the present state";
    case CUDA_ERROR_NOT_FOUND: return "named symbol not found";
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture";
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
      return "attempt to terminate a thread-local capture sequence from another thread";
    default: return nullptr;
  }
}

}  // namespace

CUresult context_is_current() {
  if (!device().is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
  return is_context(current_context()) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

}  // namespace emulation::driver

using namespace emulation::driver;

extern "C" {

CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard<std::mutex> locked(lock());
  device().is_initialised = true;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kVersion;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *text = words(code);
  return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  return initialised([&] {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = 1;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return initialised([&] {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    *device = 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return initialised([&] {
    if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, length, "%s", kName);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return initialised([&] {
    const int known = attribute_value(attribute);
    if (value == nullptr || known < 0) return CUDA_ERROR_INVALID_VALUE;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    *value = known;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  return initialised([&] {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    device().retained += 1;
    *context = primary_context();
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
  return initialised([&] {
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    if (device().retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    device().retained -= 1;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return initialised([&] {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = current_context();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return initialised([&] {
    if (context != nullptr && !is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (!contexts().empty()) contexts().pop_back();
    if (context != nullptr) contexts().push_back(context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  return initialised([&] {
    if (!is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
    contexts().push_back(context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  return initialised([&] {
    if (contexts().empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context != nullptr) *context = contexts().back();
    contexts().pop_back();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSynchronize() {
  return in_context([] { return allowed_during_captures(); });
}

}  // extern "C"
