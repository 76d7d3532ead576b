// Threads of a grid and the order in which they run: see machine.h.
#include "machine/machine.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

namespace emulation {

Machine machine;
Lane* self = nullptr;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kResident = 16;  // CTAs, if clusters are not larger
constexpr unsigned kLooks = 4096;  // at memory, in a row: nothing else can go on
constexpr unsigned kMostLooks = 20 << 20;  // and nothing will
constexpr unsigned kPause = 64;  // a warp pauses once in so many turns of its threads

jmp_buf scheduler;
uint64_t launches = 0;
std::vector<char*> free_stacks;
std::vector<std::unique_ptr<Cta>> resident;
std::vector<std::unique_ptr<Cluster>> clusters;

void queue(Warp& warp) {
  if (warp.queued) return;
  warp.queued = true;
  machine.ready.push_back(&warp);
}

char* take_stack() {
  if (free_stacks.empty()) {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for a thread");
    return static_cast<char*>(memory);
  }
  char* stack = free_stacks.back();
  free_stacks.pop_back();
  return stack;
}

void leave() {
  Cta& own = cta();
  self->done = true;
  self->warp->runnable &= ~(1u << self->lane);
  --own.live;
  if (!self->has_waited) fail("a thread has not waited for earlier launches");
  if (!self->copies.empty()) fail("a thread ends while its copies are on their way");
  if (!self->warp->products.empty()) fail("a thread ends with products that nobody has waited for");
  _longjmp(scheduler, 1);
}

void begin() {
  (*self->body)();
  leave();
}

void resume(Lane& lane) {
  self = &lane;
  if (_setjmp(scheduler) != 0) return;
  if (lane.stack != nullptr) _longjmp(lane.context, 1);
  lane.stack = take_stack();
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = lane.stack;
  start.uc_stack.ss_size = kStackBytes;
  start.uc_link = nullptr;
  makecontext(&start, begin, 0);
  setcontext(&start);
}

// Runs a warp's threads until none can go on, or for some of them the others pause.
void run_warp(Warp& warp) {
  warp.queued = false;
  while (warp.runnable != 0) {
    const int first = machine.random() % kLanes;
    const uint32_t rotated = warp.runnable >> first | (first ? warp.runnable << (kLanes - first) : 0);
    resume(warp.lanes[(__builtin_ctz(rotated) + first) % kLanes]);
    if (machine.random() % kPause == 0) break;
  }
  warp.runnable |= warp.yielding;
  warp.yielding = 0;
  if (warp.runnable != 0) queue(warp);
}

void start_cta(Cluster& cluster, unsigned x, unsigned y, std::function<void()>& body) {
  auto made = std::make_unique<Cta>();
  Cta& cta = *made;
  cta.x = x, cta.y = y, cta.rank = cluster.ctas.size(), cta.cluster = &cluster;
  const size_t bytes = (machine.grid.shared_bytes + 1023) / 1024 * 1024;
  cta.shared = static_cast<uint8_t*>(std::aligned_alloc(1024, bytes));
  std::memset(cta.shared, 0xFF, bytes);
  cta.warps = std::vector<Warp>(machine.grid.threads / kLanes);
  cta.live = machine.grid.threads;
  for (size_t w = 0; w < cta.warps.size(); ++w) {
    Warp& warp = cta.warps[w];
    warp.cta = &cta, warp.number = w;
    for (int i = 0; i < kLanes; ++i) warp.lanes[i].warp = &warp, warp.lanes[i].lane = i, warp.lanes[i].body = &body;
    queue(warp);
  }
  cluster.ctas.push_back(&cta);
  resident.push_back(std::move(made));
}

void end_cta(Cta& cta) {
  if (cta.copying != 0) fail("a CTA ends while copies to its shared memory are on their way");
  for (Warp& warp : cta.warps)
    for (Lane& lane : warp.lanes) free_stacks.push_back(lane.stack);
  std::free(cta.shared);
}

// Clusters that have ended make room.
void sweep() {
  for (auto cluster = clusters.begin(); cluster != clusters.end();) {
    const auto& ctas = (*cluster)->ctas;
    if (std::any_of(ctas.begin(), ctas.end(), [](const Cta* cta) { return cta->live > 0; })) {
      ++cluster;
      continue;
    }
    for (Cta* cta : ctas) {
      end_cta(*cta);
      resident.erase(std::find_if(resident.begin(), resident.end(), [&](const auto& r) { return r.get() == cta; }));
    }
    cluster = clusters.erase(cluster);
  }
}

// Where threads wait, a line for each place.
void report() {
  std::map<std::string, int> places;
  for (const auto& cta : resident)
    for (const Warp& warp : cta->warps)
      for (const Lane& lane : warp.lanes)
        if (!lane.done) {
          char place[200];
          std::snprintf(place, sizeof place, "CTA (%u, %u) warp %d: %s", cta->x, cta->y, warp.number, lane.doing);
          ++places[place];
        }
  for (const auto& [place, threads] : places) std::fprintf(stderr, "  %s: %d threads\n", place.c_str(), threads);
}

void land_one() {
  auto& copies = machine.on_their_way;
  const size_t chosen = machine.random() % copies.size();
  const auto copy = std::move(copies[chosen]);
  copies[chosen] = std::move(copies.back());
  copies.pop_back();
  machine.looks = 0;
  copy();
}

uint32_t seed() {
  static const char* text = std::getenv("FERROMLA_EMULATOR_SEED");
  return text == nullptr ? 1 : std::strtoul(text, nullptr, 10);
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "emulated GPU: %s\n", what);
  if (self != nullptr) {
    const Cta& own = cta();
    std::fprintf(stderr, "  by CTA (%u, %u) thread %u\n", own.x, own.y, thread_number());
  }
  report();
  std::abort();
}

void sleep(const char* doing) {
  self->doing = doing;
  machine.looks = 0;
  self->warp->runnable &= ~(1u << self->lane);
  if (_setjmp(self->context) == 0) _longjmp(scheduler, 1);
}

void yield(const char* doing) {
  self->doing = doing;
  machine.clock += machine.random() % 20000;
  ++machine.looks;
  self->warp->runnable &= ~(1u << self->lane);
  self->warp->yielding |= 1u << self->lane;
  if (_setjmp(self->context) == 0) _longjmp(scheduler, 1);
}

void wake(Lane* lane) {
  Warp& warp = *lane->warp;
  warp.runnable |= 1u << lane->lane;
  if (self == nullptr || &warp != self->warp) queue(warp);
}

int meet(Barrier& barrier, int expected, bool predicate, bool wait, const char* doing) {
  if (barrier.arrived > 0 && barrier.expected != expected) fail("threads disagree about how many meet at a barrier");
  barrier.expected = expected;
  barrier.holds += predicate;
  if (++barrier.arrived < expected) {
    if (wait) {
      barrier.waiting.push_back(self);
      sleep(doing);
    }
    return barrier.held;
  }
  barrier.held = barrier.holds;
  barrier.holds = 0;
  barrier.arrived = 0;
  std::vector<Lane*> waiting;
  waiting.swap(barrier.waiting);
  for (Lane* lane : waiting) wake(lane);
  return barrier.held;
}

void meet_lanes(const char* instruction, void* record, const std::function<void(void**)>& perform) {
  Warp& warp = *self->warp;
  if (warp.met == 0) warp.meeting = instruction;
  if (std::strcmp(warp.meeting, instruction) != 0) fail("lanes of a warp meet at different instructions");
  warp.records[self->lane] = record;
  warp.met |= 1u << self->lane;
  if (warp.met != ~0u) return sleep(instruction);
  warp.met = 0;
  perform(warp.records);
  warp.runnable = ~0u;
}

void run(const std::function<void()>& body, const Grid& grid) {
  machine.grid = grid;
  machine.random.seed(seed() + 7919 * ++launches);
  constexpr unsigned kLandings[] = {0, 8, 64, 256};
  machine.landing = kLandings[machine.random() % 4];
  machine.products_early = machine.random() % 2;
  std::function<void()> own_body = body;
  // CTAs without memory of the launch may have static memory, which here is one for all.
  const unsigned most = grid.shared_bytes == 0 ? 1 : kResident;
  unsigned next = 0;  // cluster: first along y
  const unsigned along_y = grid.y / grid.cluster, count = grid.x * along_y;
  while (next < count || !clusters.empty()) {
    while (next < count && (clusters.empty() || (clusters.size() + 1) * grid.cluster <= most)) {
      clusters.push_back(std::make_unique<Cluster>());
      for (unsigned i = 0; i < grid.cluster; ++i)
        start_cta(*clusters.back(), next % grid.x, next / grid.x * grid.cluster + i, own_body);
      ++next;
    }
    const bool waits = machine.ready.empty(), none_left = machine.on_their_way.empty();
    if (none_left && (waits || machine.looks > kMostLooks)) {
      self = nullptr;
      fail("nothing can go on");
    }
    if (!none_left && (waits || machine.looks > kLooks ||
                       (machine.random() % 256 < machine.landing && machine.landing < 256))) {
      self = nullptr;
      land_one();
      continue;
    }
    const size_t chosen = machine.random() % machine.ready.size();
    Warp* warp = machine.ready[chosen];
    machine.ready[chosen] = machine.ready.back();
    machine.ready.pop_back();
    const Cta* own = warp->cta;
    run_warp(*warp);
    if (own->live == 0) sweep();
  }
  self = nullptr;
}

}  // namespace emulation

// How many kernels this process has run.
extern "C" uint64_t emulated_launches() { return emulation::launches; }
