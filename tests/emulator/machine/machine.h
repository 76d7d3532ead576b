// A grid of CTAs on the host: threads, barriers, shared memory, and what runs beside the threads.
//
// Every thread is a fiber that runs until it has to wait. Which warp goes on next is drawn at random, and so is when an
// asynchronous copy lands or a matrix product is computed, between the earliest and the latest that the PTX ISA allows: a wait
// that is missing shows as a wrong result. What a GPU would hang at, or may not do, stops the program and says where.
#pragma once
#include <setjmp.h>

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "device.h"

namespace emulation {

constexpr int kLanes = 32;
constexpr uint32_t kSharedBegin = 1024;  // the first shared address; those before are the system's
constexpr int kRankShift = 24;           // of a CTA's rank + 1 in an address of another CTA's shared memory
constexpr int kWarpgroupWarps = 4;

struct Cta;
struct Warp;

// A copy by cp.async: so many bytes, of `size` that are written, the others as zeros.
struct ThreadCopy {
  uint8_t* to;
  const uint8_t* from;
  int bytes, size;
};

struct Lane {
  jmp_buf context;
  std::function<void()>* body = nullptr;  // until it has begun
  char* stack = nullptr;
  Warp* warp = nullptr;
  int lane = 0;
  bool done = false;
  bool has_waited = false;  // for earlier launches
  const char* doing = "";   // where it waits
  std::vector<ThreadCopy> copies;
  std::vector<size_t> groups;  // ends, in `copies`, of committed groups
  int issued = 0;              // products since the last commit
};

// One wgmma of a warp: a quarter of its warpgroup's.
struct Product {
  int columns;
  bool half, a_in_registers, a_transposed, b_transposed, accumulate;
  uint64_t a, b;  // descriptors
  uint32_t fragment[kLanes][4];
  float* result[kLanes];
  int lanes = 0;          // that have asked for it
  bool computed = false;
};

struct Warp {
  Cta* cta = nullptr;
  int number = 0;  // in the CTA
  Lane lanes[kLanes];
  uint32_t runnable = ~0u, yielding = 0;  // threads that can go on; that can when others have
  bool queued = false;
  // An instruction of all lanes: which of them are there, with what.
  const char* meeting = nullptr;
  uint32_t met = 0;
  void* records[kLanes];
  std::vector<Product> products;
  std::vector<size_t> product_groups;
};

// A barrier of numbers of threads.
struct Barrier {
  int arrived = 0, expected = 0;
  int holds = 0, held = 0;  // threads for which a predicate does; when all were there the last time
  std::vector<Lane*> waiting;
};

struct Cluster {
  std::vector<Cta*> ctas;
  Barrier barrier;
};

struct PhaseWait {
  Lane* lane;
  uint32_t barrier;
  uint32_t parity;
};

struct Cta {
  unsigned x = 0, y = 0, rank = 0;
  Cluster* cluster = nullptr;
  uint8_t* shared = nullptr;
  std::vector<Warp> warps;
  int live = 0;     // threads that have not ended
  int copying = 0;  // asynchronous copies to its shared memory that have not landed
  Barrier barriers[16];
  std::vector<PhaseWait> waiting;
};

// What a launch is made of.
struct Machine {
  Grid grid;
  std::vector<Warp*> ready;
  std::vector<std::function<void()>> on_their_way;  // asynchronous copies
  std::mt19937 random;
  unsigned landing = 0;         // copies land at the soonest (0), in so many of 256 steps, or at the latest (256)
  bool products_early = false;  // products are computed when they are asked for, else when they are waited for
  int64_t clock = 0;
  unsigned looks = 0;  // at memory, by threads that let others run, since a thread went to sleep or a copy landed
};

extern Machine machine;
extern Lane* self;  // the thread that runs

[[noreturn]] void fail(const char* what);
inline Cta& cta() { return *self->warp->cta; }
inline unsigned thread_number() { return self->warp->number * kLanes + self->lane; }

// ---- waiting ----

// Lets others run until somebody wakes this thread.
void sleep(const char* doing);
void wake(Lane* lane);
// Lets others run.
void yield(const char* doing);
// Counts this thread in at a barrier of so many; returns, when all are there, for how many the predicate held.
int meet(Barrier& barrier, int expected, bool predicate, bool wait, const char* doing);

// An instruction of all lanes of a warp: the last one that gets there performs it, on what all have.
void meet_lanes(const char* instruction, void* record, const std::function<void(void**)>& perform);
template <class Record, class Perform>
void together(const char* instruction, Record& record, Perform perform) {
  meet_lanes(instruction, &record, [&](void** records) { perform(reinterpret_cast<Record**>(records)); });
}

// ---- shared memory ----

uint32_t shared_address_of(const void* pointer);
uint8_t* shared_at(uint32_t address, uint32_t bytes);
uint32_t address_in(uint32_t address, uint32_t rank);
Cta& cta_of(uint32_t address);

template <class T>
T load(uint32_t address) {
  if (address % sizeof(T) != 0) fail("a shared address is not aligned");
  T value;
  __builtin_memcpy(&value, shared_at(address, sizeof(T)), sizeof(T));
  return value;
}
template <class T>
void store(uint32_t address, const T& value) {
  if (address % sizeof(T) != 0) fail("a shared address is not aligned");
  __builtin_memcpy(shared_at(address, sizeof(T)), &value, sizeof(T));
}

// ---- mbarriers ----

void phase_init(uint32_t barrier, uint32_t arrivals);
void phase_arrive(uint32_t barrier, uint32_t arrivals);
void phase_expect(uint32_t barrier, uint32_t bytes);
bool phase_passed(uint32_t barrier, uint32_t parity);
void phase_wait(uint32_t barrier, uint32_t parity);

// ---- asynchronous copies ----

// Fails unless this thread has waited for earlier launches: before what they may have written is read.
void require_earlier_launches();
// To the same place in every CTA of the cluster whose bit is set, or in this one only (0).
void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint32_t ctas);
void copy_box(uint32_t to, const TensorMap& map, const int (&at)[5], uint32_t barrier, uint32_t ctas);
// To a CTA that may be another one.
void store_bytes(uint32_t to, const void* value, uint32_t bytes, uint32_t barrier);
void thread_copy(uint32_t to, const void* from, int bytes, int size);
void thread_copies_commit();
void thread_copies_wait(size_t pending);
void thread_copies_arrive(uint32_t barrier);

// ---- matrix products ----

void product(const Product& of_warp, float* result, const uint32_t* fragment);
void products_commit();
void products_wait(size_t pending);

// Runs a grid of this body to its end.
void run(const std::function<void()>& body, const Grid& grid);

}  // namespace emulation
