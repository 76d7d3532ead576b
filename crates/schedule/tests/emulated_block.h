// One CUDA thread block on the host: enough of the language to run kernels/plan.cu as it stands.
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

namespace emulation {

constexpr int kThreads = 1024;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr size_t kStackBytes = 64 << 10;

enum class Stop { kNone, kShuffle, kBarrier, kDone };

struct Thread {
  ucontext_t context;
  Stop stop = Stop::kNone;
  int64_t given[2] = {}; /* what it gives to a shuffle or a barrier; two turns */
  int turn = 0;
};

struct Block {
  Thread threads[kThreads];
  ucontext_t scheduler;
  int current = 0;
  bool barrier_and = true;      /* of the barrier being gathered */
  bool last_barrier_and = true; /* of the barrier just passed */
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
  std::vector<int> running(kWarps);
  for (int warp = 0; warp < kWarps; ++warp) running[warp] = warp;
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

/* Runs `kernel` as one block of 1024 threads. */
inline void launch(void (*kernel)(const void*), const void* argument, std::mt19937& random) {
  static const std::unique_ptr<char[]> stacks(new char[kThreads * kStackBytes]);
  block.kernel = kernel;
  block.argument = argument;
  for (int i = 0; i < kThreads; ++i) {
    Thread& thread = block.threads[i];
    thread.turn = 0;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks.get() + i * kStackBytes;
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &block.scheduler;
    makecontext(&thread.context, enter, 0);
  }
  block.barrier_and = true;
  while (run_to_barrier(random) != Stop::kDone) {
    block.last_barrier_and = block.barrier_and;
    block.barrier_and = true;
  }
}

struct ThreadIdx {
  struct X {
    operator unsigned() const { return static_cast<unsigned>(block.current); }
  } x;
};

}  // namespace emulation

inline emulation::ThreadIdx threadIdx;

inline bool __syncthreads_and(bool predicate) {
  emulation::block.barrier_and = emulation::block.barrier_and && predicate;
  emulation::stop_at(emulation::Stop::kBarrier);
  return emulation::block.last_barrier_and;
}

inline void __syncthreads() { __syncthreads_and(true); }

inline int64_t __shfl_sync(unsigned, int64_t value, int lane) { return emulation::exchange(value, lane); }

inline int64_t __shfl_up_sync(unsigned, int64_t value, int distance) {
  const int lane = emulation::block.current % emulation::kLanes;
  return emulation::exchange(value, lane >= distance ? lane - distance : lane);
}
