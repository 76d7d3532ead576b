// Matrix products of warpgroups (wgmma), a warp's quarter at a time: computed from what shared memory holds when the warp asks
// for them or, at the latest, waits for them.
#include <cmath>
#include <cstring>

#include "machine/machine.h"
#include "language/numbers.h"

namespace emulation {

namespace {

constexpr int kDepth = 16;       // numbers of a product's sum
constexpr int kQuarterRows = 16;  // of the 64
constexpr int kMostColumns = 256;

struct Descriptor {
  uint32_t start, leading, stride;
  explicit Descriptor(uint64_t bits)
      : start((bits & 0x3FFF) << 4), leading((bits >> 16 & 0x3FFF) << 4), stride((bits >> 32 & 0x3FFF) << 4) {
    if (bits >> 62 != 1) fail("a descriptor is not of the 128-byte swizzle");
  }
  // Number (i, k) of an operand: i along M or N.
  uint32_t address(int i, int k, bool transposed) const {
    const uint32_t at = transposed ? start + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2
                                   : start + i / 8 * stride + i % 8 * 128 + k * 2;
    return at ^ ((at >> 7 & 7) << 4);
  }
};

float number_at(const Descriptor& of, int i, int k, bool transposed, bool half) {
  uint16_t bits;
  std::memcpy(&bits, shared_at(of.address(i, k, transposed), 2), 2);
  return to_float(bits, half);
}

void load_rows(const Product& p, int warp_of_group, float (&a)[kQuarterRows][kDepth]) {
  if (p.a_in_registers) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e)
          a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + e] = to_float(p.fragment[lane][i] >> 16 * e, p.half);
    return;
  }
  const Descriptor from(p.a);
  for (int r = 0; r < kQuarterRows; ++r)
    for (int k = 0; k < kDepth; ++k)
      a[r][k] = number_at(from, warp_of_group * kQuarterRows + r, k, p.a_transposed, p.half);
}

// Sums are cut off, not rounded, as tensor cores do.
float cut_off(double sum) {
  const float nearest = static_cast<float>(sum);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(sum) && std::isfinite(nearest) ? std::nextafterf(nearest, 0.f) : nearest;
}

void compute(const Product& p, int warp_of_group) {
  float a[kQuarterRows][kDepth];
  static float b[kDepth][kMostColumns];
  static double sums[kMostColumns];
  load_rows(p, warp_of_group, a);
  const Descriptor from(p.b);
  for (int n = 0; n < p.columns; ++n)
    for (int k = 0; k < kDepth; ++k) b[k][n] = number_at(from, n, k, p.b_transposed, p.half);
  for (int r = 0; r < kQuarterRows; ++r) {
    // Column n of row r: lane 4 (r % 8) + n / 2 % 4, its number n / 8 * 4 + r / 8 * 2 + n % 2.
    const auto result = [&](int n) -> float& { return p.result[r % 8 * 4 + n / 2 % 4][n / 8 * 4 + r / 8 * 2 + n % 2]; };
    for (int n = 0; n < p.columns; ++n) sums[n] = p.accumulate ? result(n) : 0.0;
    for (int k = 0; k < kDepth; ++k)
      for (int n = 0; n < p.columns; ++n) sums[n] += static_cast<double>(a[r][k]) * b[k][n];
    for (int n = 0; n < p.columns; ++n) result(n) = cut_off(sums[n]);
  }
}

// The first groups of this warp, so that so many are left.
void compute_groups(size_t left) {
  Warp& warp = *self->warp;
  auto& groups = warp.product_groups;
  if (groups.size() <= left) return;
  const size_t done = groups[groups.size() - 1 - left];
  for (size_t i = 0; i < done; ++i)
    if (!warp.products[i].computed) compute(warp.products[i], warp.number % kWarpgroupWarps);
  warp.products.erase(warp.products.begin(), warp.products.begin() + done);
  groups.erase(groups.begin(), groups.end() - left);
  for (size_t& end : groups) end -= done;
}

}  // namespace

// By each lane.
void product(const Product& of_warp, float* result, const uint32_t* fragment) {
  Warp& warp = *self->warp;
  const size_t index = (warp.product_groups.empty() ? 0 : warp.product_groups.back()) + self->issued++;
  if (index == warp.products.size()) warp.products.push_back(of_warp);
  Product& own = warp.products[index];
  if (own.columns != of_warp.columns || own.b != of_warp.b || own.a != of_warp.a || own.accumulate != of_warp.accumulate)
    fail("lanes of a warp disagree about a matrix product");
  own.result[self->lane] = result;
  if (fragment != nullptr) std::memcpy(own.fragment[self->lane], fragment, sizeof own.fragment[0]);
  if (++own.lanes == kLanes && machine.products_early) {
    compute(own, warp.number % kWarpgroupWarps);
    own.computed = true;
  }
}

void products_commit() {
  int issued = self->issued;
  self->issued = 0;
  together("wgmma.commit_group", issued, [](int** all) {
    for (int lane = 0; lane < kLanes; ++lane)
      if (*all[lane] != *all[0]) fail("lanes of a warp have asked for different numbers of products");
    Warp& warp = *self->warp;
    warp.product_groups.push_back(warp.products.size());
  });
}

void products_wait(size_t pending) {
  together("wgmma.wait_group", pending, [](size_t** all) { compute_groups(**all); });
}

}  // namespace emulation
