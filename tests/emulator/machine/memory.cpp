// Shared memory: addresses, mbarriers, and copies that land some time after they were asked for.
#include <algorithm>
#include <cstring>

#include "machine/machine.h"

namespace emulation {

namespace {

// An mbarrier as it lies in shared memory.
struct alignas(8) Phase {
  int64_t bytes : 32;  // announced and not yet there
  uint64_t pending : 14, expected : 14, parity : 1, made : 3;
};
static_assert(sizeof(Phase) == 8);
constexpr uint64_t kMade = 5;  // not what memory is filled with

Phase* phase_at(uint32_t barrier) {
  if (barrier % 8 != 0) fail("an mbarrier is not aligned");
  auto* phase = reinterpret_cast<Phase*>(shared_at(barrier, 8));
  if (phase->made != kMade) fail("an mbarrier has not been initialised");
  return phase;
}

// What `cta` has at an address that another CTA may have given.
uint32_t own_address(uint32_t address) { return address & ((1u << kRankShift) - 1); }

void complete(Cta& cta, uint32_t barrier, Phase& phase) {
  if (phase.pending != 0 || phase.bytes != 0) return;
  phase.parity ^= 1;
  phase.pending = phase.expected;
  auto& waiting = cta.waiting;
  for (size_t i = 0; i < waiting.size();) {
    if (waiting[i].barrier != own_address(barrier) || waiting[i].parity == phase.parity) {
      ++i;
      continue;
    }
    wake(waiting[i].lane);
    waiting[i] = waiting.back();
    waiting.pop_back();
  }
}

void arrive(Cta& cta, uint32_t barrier, Phase& phase, uint32_t arrivals) {
  if (phase.pending < arrivals) fail("an mbarrier gets more arrivals than it expects");
  phase.pending -= arrivals;
  complete(cta, barrier, phase);
}

// Bytes that are there count at a barrier of the CTA that they came to.
void land(Cta& to, uint32_t barrier, uint32_t bytes) {
  auto* phase = reinterpret_cast<Phase*>(to.shared + own_address(barrier) - kSharedBegin);
  if (phase->made != kMade) fail("bytes count at an mbarrier that has not been initialised");
  phase->bytes -= bytes;
  --to.copying;
  complete(to, barrier, *phase);
}

uint8_t* place_in(Cta& cta, uint32_t address, uint32_t bytes) {
  const uint32_t offset = own_address(address) - kSharedBegin;
  if (offset + bytes > machine.grid.shared_bytes) fail("a copy leaves shared memory");
  return cta.shared + offset;
}

// At once, or some time later, as is drawn for each launch.
template <class Deliver>
void land_some_time(Deliver deliver) {
  if (machine.landing == 0)
    deliver();
  else
    machine.on_their_way.push_back(deliver);
}

// Starts a copy to the CTAs named; `copy(cta)` does it for one of them.
template <class Copy>
void start(uint32_t barrier, uint32_t bytes, uint32_t ctas, Copy copy) {
  std::vector<Cta*> to;
  Cta& own = cta();
  if (ctas == 0) to.push_back(&own);
  for (uint32_t rank = 0; rank < own.cluster->ctas.size(); ++rank)
    if (ctas >> rank & 1) to.push_back(own.cluster->ctas[rank]);
  if (ctas >> own.cluster->ctas.size() != 0) fail("a copy is for a CTA that the cluster does not have");
  for (Cta* each : to) {
    ++each->copying;
    const auto deliver = [=, by = &own] {
      if (each->live == 0 || by->live == 0) fail("a CTA ends before a copy that it has asked for, or that is for it, is there");
      copy(*each);
      land(*each, barrier, bytes);
    };
    land_some_time(deliver);
  }
}

// The bits of a shared address that a tensor map's swizzle XORs into the address of 16 bytes.
uint32_t swizzled(uint32_t address, int swizzle) {
  const uint32_t mask = (1u << swizzle) - 1;  // 0, 1, 3, 7: none, 32, 64, 128 bytes
  return address ^ ((address >> 7 & mask) << 4);
}

void place_box(Cta& cta, uint32_t to, const TensorMap& map, const int (&at)[5]) {
  const uint32_t element = map.element_bytes, row = map.box[0] * element;
  uint32_t offset = 0;
  uint32_t index[5] = {};
  for (;;) {  // rows of the box, first the second dimension's
    const uint8_t* from = reinterpret_cast<const uint8_t*>(map.address);
    bool inside = true;
    for (int d = 1; d < int(map.rank); ++d) {
      const int64_t coordinate = int64_t(at[d]) + index[d];
      inside = inside && coordinate >= 0 && coordinate < int64_t(map.dims[d]);
      from += coordinate * int64_t(map.byte_strides[d - 1]);
    }
    for (uint32_t i = 0; i < map.box[0]; ++i) {
      const int64_t coordinate = int64_t(at[0]) + i;
      uint8_t* place = place_in(cta, swizzled(to + offset + i * element, map.swizzle), element);
      if (inside && coordinate >= 0 && coordinate < int64_t(map.dims[0]))
        std::memcpy(place, from + coordinate * element, element);
      else
        std::memset(place, 0, element);
    }
    offset += row;
    int d = 1;
    while (d < int(map.rank) && ++index[d] == map.box[d]) index[d++] = 0;
    if (d >= int(map.rank)) return;
  }
}

void perform(const ThreadCopy& copy) {
  std::memset(copy.to, 0, copy.size);
  std::memcpy(copy.to, copy.from, copy.bytes);
}

// Copies of a thread up to the `count`-th, in their order.
void perform_copies(size_t count) {
  auto& copies = self->copies;
  std::for_each(copies.begin(), copies.begin() + count, perform);
  copies.erase(copies.begin(), copies.begin() + count);
  std::vector<size_t> left;
  for (const size_t end : self->groups)
    if (end > count) left.push_back(end - count);
  self->groups.swap(left);
}

}  // namespace

uint32_t shared_address_of(const void* pointer) {
  const int64_t offset = static_cast<const uint8_t*>(pointer) - cta().shared;
  if (offset < 0 || offset >= int64_t(machine.grid.shared_bytes)) fail("a pointer is not into shared memory");
  return kSharedBegin + offset;
}

Cta& cta_of(uint32_t address) {
  const uint32_t rank = address >> kRankShift;
  if (rank == 0) return cta();
  if (rank > cta().cluster->ctas.size()) fail("an address is of a CTA that the cluster does not have");
  Cta& other = *cta().cluster->ctas[rank - 1];
  if (other.live == 0) fail("an address is of a CTA that has ended");
  return other;
}

uint8_t* shared_at(uint32_t address, uint32_t bytes) {
  const uint32_t offset = own_address(address) - kSharedBegin;
  if (own_address(address) < kSharedBegin || offset + bytes > machine.grid.shared_bytes) fail("a shared address is out of bounds");
  return cta_of(address).shared + offset;
}

uint32_t address_in(uint32_t address, uint32_t rank) { return own_address(address) | (rank + 1) << kRankShift; }

void phase_init(uint32_t barrier, uint32_t arrivals) {
  if (arrivals == 0 || arrivals >= 1u << 14) fail("an mbarrier expects no or too many arrivals");
  const Phase phase{0, arrivals, arrivals, 0, kMade};
  store(barrier, phase);
}

void phase_arrive(uint32_t barrier, uint32_t arrivals) {
  arrive(cta_of(barrier), barrier, *phase_at(barrier), arrivals);
}

void phase_expect(uint32_t barrier, uint32_t bytes) {
  Phase& phase = *phase_at(barrier);
  phase.bytes += bytes;
  arrive(cta_of(barrier), barrier, phase, 1);
}

bool phase_passed(uint32_t barrier, uint32_t parity) { return phase_at(barrier)->parity != parity; }

void phase_wait(uint32_t barrier, uint32_t parity) {
  while (!phase_passed(barrier, parity)) {
    cta().waiting.push_back({self, barrier, parity});
    sleep("wait for an mbarrier");
  }
}

void require_earlier_launches() {
  if (!self->has_waited) fail("memory is read before earlier launches have been waited for");
}

void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint32_t ctas) {
  require_earlier_launches();
  if (bytes % 16 != 0 || to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("a bulk copy is not of 16-byte pieces");
  start(barrier, bytes, ctas, [=](Cta& cta) { std::memcpy(place_in(cta, to, bytes), from, bytes); });
}

void copy_box(uint32_t to, const TensorMap& map, const int (&at)[5], uint32_t barrier, uint32_t ctas) {
  require_earlier_launches();
  if (to % 128 != 0) fail("a box's place is not aligned");
  uint32_t bytes = map.element_bytes;
  for (int d = 0; d < int(map.rank); ++d) bytes *= map.box[d];
  const std::vector<int> corner(at, at + 5);
  const TensorMap own = map;
  start(barrier, bytes, ctas, [=](Cta& cta) {
    const int from[5] = {corner[0], corner[1], corner[2], corner[3], corner[4]};
    place_box(cta, to, own, from);
  });
}

void store_bytes(uint32_t to, const void* value, uint32_t bytes, uint32_t barrier) {
  if (to % bytes != 0) fail("an asynchronous store is not aligned");
  if (to >> kRankShift != barrier >> kRankShift) fail("an asynchronous store counts at a barrier of another CTA");
  Cta* there = &cta_of(to);
  const auto* bytes_of = static_cast<const uint8_t*>(value);
  const std::vector<uint8_t> stored(bytes_of, bytes_of + bytes);
  ++there->copying;
  const auto deliver = [=] {
    if (there->live == 0) fail("a CTA ends before a store that is for it is there");
    std::memcpy(place_in(*there, to, bytes), stored.data(), bytes);
    land(*there, barrier, bytes);
  };
  land_some_time(deliver);
}

void thread_copy(uint32_t to, const void* from, int bytes, int size) {
  require_earlier_launches();
  if (to % size != 0 || (bytes != 0 && reinterpret_cast<uintptr_t>(from) % size != 0)) fail("a copy of a thread is not aligned");
  self->copies.push_back({shared_at(to, size), static_cast<const uint8_t*>(from), bytes, size});
}

void thread_copies_commit() { self->groups.push_back(self->copies.size()); }

void thread_copies_wait(size_t pending) {
  if (self->groups.size() > pending) perform_copies(self->groups[self->groups.size() - 1 - pending]);
}

// The arrival follows the copies so far; neither is waited for by this thread any more.
void thread_copies_arrive(uint32_t barrier) {
  Cta* own = &cta();
  std::vector<ThreadCopy> copies;
  copies.swap(self->copies);
  self->groups.clear();
  ++own->copying;
  const auto deliver = [=] {
    std::for_each(copies.begin(), copies.end(), perform);
    --own->copying;
    arrive(*own, barrier, *reinterpret_cast<Phase*>(own->shared + barrier - kSharedBegin), 1);
  };
  land_some_time(deliver);
}

}  // namespace emulation
