// One CUDA thread block on the host, or blocks one after another: enough of the language to run kernels that
// neither use shared memory of the launch nor tensor cores as they stand.
//
// Every thread is a fiber that runs until its next barrier or shuffle. A shuffle holds a warp together, a
// barrier the block; which warp goes on next is drawn at random, so that a missing barrier shows as a wrong
// plan. Threads that meet at different operations stop the program, as they would hang a GPU.
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emulation {

constexpr int kMaxThreads = 1024;
constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;

enum class Stop { kNone, kShuffle, kBarrier, kDone };

struct Thread {
  ucontext_t context;
  Stop stop = Stop::kNone;
  bool has_waited = false; /* for earlier launches */
  int64_t given[2] = {}; /* what it gives to a shuffle or a barrier; two turns */
  int turn = 0;
};

struct Block {
  Thread threads[kMaxThreads];
  int size = kMaxThreads; /* threads in use */
  ucontext_t scheduler;
  int current = 0;
  unsigned number = 0, count = 1; /* of the blocks of the grid */
  int barrier_count = 0;      /* threads for which the predicate of the barrier being gathered is true */
  int last_barrier_count = 0; /* the same of the barrier just passed */
  void (*kernel)(const void*) = nullptr;
  const void* argument = nullptr;
};

inline Block block;

inline void fail(const char* what) {
  std::fprintf(stderr, "emulated block: %s\n", what);
  std::exit(2);
}

inline void stop_at(Stop stop) {
  Thread& self = block.threads[block.current];
  self.stop = stop;
  swapcontext(&self.context, &block.scheduler);
}

/* Gives a value to the warp and takes that of another lane. */
inline int64_t exchange(int64_t value, int source_lane) {
  const int thread = block.current;
  Thread& self = block.threads[thread];
  const int turn = self.turn++ % 2;
  self.given[turn] = value;
  stop_at(Stop::kShuffle);
  return block.threads[thread / kLanes * kLanes + source_lane].given[turn];
}

inline void enter() {
  block.kernel(block.argument);
  if (!block.threads[block.current].has_waited) fail("a thread has not waited for earlier launches");
  stop_at(Stop::kDone);
}

/* Runs the threads of a warp to where they stop next, which must be the same for all. */
inline Stop run_warp(int warp) {
  for (int lane = 0; lane < kLanes; ++lane) {
    block.current = warp * kLanes + lane;
    swapcontext(&block.scheduler, &block.threads[block.current].context);
  }
  const Stop stop = block.threads[warp * kLanes].stop;
  for (int lane = 1; lane < kLanes; ++lane) {
    if (block.threads[warp * kLanes + lane].stop != stop) fail("a warp diverges at a barrier or shuffle");
  }
  return stop;
}

/* Runs all warps to the block's next barrier, or to the end. */
inline Stop run_to_barrier(std::mt19937& random) {
  std::vector<int> running(block.size / kLanes);
  std::iota(running.begin(), running.end(), 0);
  Stop reached = Stop::kNone;
  while (!running.empty()) {
    const size_t chosen = random() % running.size();
    const Stop stop = run_warp(running[chosen]);
    if (stop == Stop::kShuffle) continue;
    if (reached != Stop::kNone && reached != stop) fail("warps diverge at a barrier");
    reached = stop;
    running[chosen] = running.back();
    running.pop_back();
  }
  return reached;
}

/* Runs `kernel` as one block of `threads` threads, whole warps. */
inline void launch(void (*kernel)(const void*), const void* argument, int threads, std::mt19937& random) {
  static const std::unique_ptr<char[]> stacks(new char[kMaxThreads * kStackBytes]);
  block.size = threads;
  block.kernel = kernel;
  block.argument = argument;
  for (int i = 0; i < threads; ++i) {
    Thread& thread = block.threads[i];
    thread.turn = 0;
    thread.has_waited = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks.get() + i * kStackBytes;
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &block.scheduler;
    makecontext(&thread.context, enter, 0);
  }
  block.barrier_count = 0;
  while (run_to_barrier(random) != Stop::kDone) {
    block.last_barrier_count = block.barrier_count;
    block.barrier_count = 0;
  }
}

/* The same for `blocks` blocks, in turn. */
inline void launch_grid(void (*kernel)(const void*), const void* argument, unsigned blocks, int threads,
                        std::mt19937& random) {
  block.count = blocks;
  for (block.number = 0; block.number < blocks; ++block.number) launch(kernel, argument, threads, random);
  block.number = 0;
  block.count = 1;
}

struct Index {
  unsigned (*value)();
  operator unsigned() const { return value(); }
};
struct Index3 {
  Index x;
};

}  // namespace emulation

inline emulation::Index3 threadIdx{{[] { return static_cast<unsigned>(emulation::block.current); }}};
inline emulation::Index3 blockDim{{[] { return static_cast<unsigned>(emulation::block.size); }}};

inline emulation::Index3 blockIdx{{[] { return emulation::block.number; }}};
inline emulation::Index3 gridDim{{[] { return emulation::block.count; }}};

inline int __syncthreads_count(bool predicate) {
  emulation::block.barrier_count += predicate;
  emulation::stop_at(emulation::Stop::kBarrier);
  return emulation::block.last_barrier_count;
}

inline bool __syncthreads_and(bool predicate) { return __syncthreads_count(predicate) == emulation::block.size; }

inline void __syncthreads() { __syncthreads_count(false); }

inline void __threadfence() {}

template <class T>
void __stcs(T* to, const T& value) {
  *to = value;
}

namespace fm {

inline void let_next_launch_begin() {}
inline void wait_for_earlier_launches() { emulation::block.threads[emulation::block.current].has_waited = true; }

}  // namespace fm

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return static_cast<T>(emulation::exchange(value, lane));
}

template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = emulation::block.current % emulation::kLanes;
  return static_cast<T>(emulation::exchange(value, lane >= distance ? lane - distance : lane));
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  int64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = emulation::exchange(bits, (emulation::block.current % emulation::kLanes) ^ mask);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void __syncwarp() { __shfl_sync(~0u, 0, 0); }

inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  unsigned sum = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane) sum += __shfl_sync(~0u, value, lane);
  return sum;
}

inline unsigned atomicOr(unsigned* word, unsigned bits) {
  const unsigned before = *word;
  *word |= bits;
  return before;
}

inline int __clz(unsigned bits) { return bits == 0 ? 32 : __builtin_clz(bits); }

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
