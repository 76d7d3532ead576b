// What the parts of the emulated driver share: its lock, contexts, device memory and streams.
//
// A stream's work is done at once, by the thread that asks for it and under the lock: nothing is ever waited for. What a
// stream that is being captured gets is kept instead, and done when the graph is launched.
#pragma once
#include <cuda.h>

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"

namespace emulation::driver {

// Dynamic shared memory of a CTA: the most there is, and the most without cuKernelSetAttribute.
constexpr unsigned kMostSharedBytes = 232448;
constexpr unsigned kUsualSharedBytes = 48 << 10;

// State is never destroyed: threads may still call the driver while the process ends.
template <class T>
T& leaked() {
  static T& value = *new T;
  return value;
}

inline std::mutex& lock() { return leaked<std::mutex>(); }

// Whether the driver is initialised and the calling thread has a current context; under the lock.
CUresult context_is_current();

// What an exported function does under the lock and with a current context.
template <class Body>
CUresult in_context(Body body) {
  const std::lock_guard<std::mutex> locked(lock());
  const CUresult ready = context_is_current();
  return ready == CUDA_SUCCESS ? body() : ready;
}

// Objects that callers have handles of.
template <class T>
class Handles {
 public:
  template <class Handle>
  CUresult give(Handle* handle, T object = {}) {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto owned = std::make_unique<T>(std::move(object));
    T* const address = owned.get();
    objects_[address] = std::move(owned);
    *handle = reinterpret_cast<Handle>(address);
    return CUDA_SUCCESS;
  }

  // Null: it is not one of them, or no longer.
  T* find(const void* handle) const {
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second.get();
  }

  CUresult take_back(const void* handle) {
    return objects_.erase(handle) == 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
  }

 private:
  std::unordered_map<const void*, std::unique_ptr<T>> objects_;
};

using Work = std::function<CUresult()>;

// Does the work, or keeps it for the graph if the stream is being captured; under the lock.
CUresult submit(CUstream stream, Work work);

// Calls that are not work of a stream, such as allocations, are an error during most captures and spoil them: gives the
// error, or success if the thread may make the call; under the lock.
CUresult allowed_during_captures();

}  // namespace emulation::driver
