// Runs kernels/plan.cu on the host: `emulated_planner CASES PLANS SEED`.
//
// CASES holds, one after another, FmPlanShape, FmPlanLayout, four int64 (the launch) and three arrays:
// seq_lens, extra_lens and qo_indptr. An array is its number of elements (-1: a null pointer), two strides, all
// int64, and its int32 elements. PLANS gets the bytes of each plan. Words around the buffer are checked: the
// planner must not touch them.
#include <cstdio>
#include <cstdlib>

#include "language/language.h"
#include "machine/whole.h"
#include "plan.cu"

namespace {

constexpr size_t kGuardBytes = 4096;
constexpr uint8_t kGuard = 0xa5;

struct alignas(16) Piece {
  uint8_t bytes[16];
};

template <class T>
bool read(std::FILE* file, T* to, size_t count) {
  return std::fread(to, sizeof(T), count, file) == count;
}

struct Array {
  int64_t stride[2];
  std::vector<int32_t> elements;
  bool null;

  explicit Array(std::FILE* file) {
    int64_t count;
    if (!read(file, &count, 1) || !read(file, stride, 2)) emulation::fail("a case is cut short");
    null = count < 0;
    elements.resize(null ? 0 : count);
    if (!read(file, elements.data(), elements.size())) emulation::fail("a case is cut short");
  }

  const int32_t* data() const { return null ? nullptr : elements.data(); }
};

bool guards_hold(const uint8_t* guarded, size_t bytes) {
  for (size_t i = 0; i < kGuardBytes; ++i) {
    if (guarded[i] != kGuard || guarded[kGuardBytes + bytes + i] != kGuard) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) emulation::fail("usage: emulated_planner CASES PLANS SEED");
  std::FILE* cases = std::fopen(argv[1], "rb");
  std::FILE* plans = std::fopen(argv[2], "wb");
  if (cases == nullptr || plans == nullptr) emulation::fail("cannot open the files");
  setenv("FERROMLA_EMULATOR_SEED", argv[3], 1);

  FmPlanParams params{};
  while (read(cases, &params.shape, 1)) {
    int64_t launch[4]; /* threads; PlannerKernel; blocks; CTAs of a cluster */
    if (!read(cases, &params.layout, 1) || !read(cases, launch, 4)) emulation::fail("a case is cut short");
    const Array seq_lens(cases), extra_lens(cases), qo_indptr(cases);

    const size_t bytes = params.layout.bytes;
    std::vector<Piece> buffer((bytes + 2 * kGuardBytes) / sizeof(Piece));
    uint8_t* guarded = buffer.data()->bytes;
    std::memset(guarded, kGuard, buffer.size() * sizeof(Piece));
    params.seq_lens = seq_lens.data();
    std::memcpy(params.seq_lens_stride, seq_lens.stride, sizeof(seq_lens.stride));
    params.extra_lens = extra_lens.data();
    std::memcpy(params.extra_lens_stride, extra_lens.stride, sizeof(extra_lens.stride));
    params.qo_indptr = qo_indptr.data();
    params.qo_indptr_stride = qo_indptr.stride[0];
    params.plan = guarded + kGuardBytes;
    emulation::Grid grid;
    grid.x = static_cast<unsigned>(launch[2]), grid.threads = static_cast<unsigned>(launch[0]);
    grid.y = grid.cluster = static_cast<unsigned>(launch[3]), grid.shared_bytes = FM_PLAN_CLUSTER_SMEM_BYTES;
    constexpr void (*kKernels[])(FmPlanParams) = {fm_plan, fm_plan_cluster, fm_plan_few, fm_plan_one_part, fm_plan_by_count};
    emulation::run([&] { kKernels[launch[1]](params); }, grid);

    if (!guards_hold(guarded, bytes)) emulation::fail("the planner wrote outside its buffer");
    if (std::fwrite(params.plan, 1, bytes, plans) != bytes) emulation::fail("cannot write the plan");
  }
  return std::fclose(plans) == 0 ? 0 : 1;
}
