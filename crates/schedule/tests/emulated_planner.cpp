// Runs kernels/plan.cu on the host: `emulated_planner CASES PLANS SEED`.
//
// CASES holds, one after another, FmPlanShape, FmPlanLayout, five int64 (threads of the block, elements of
// seq_lens and their stride, elements of qo_indptr and their stride) and the int32 elements of both. PLANS gets
// the bytes of each plan. Words around the buffer are checked: the planner must not touch them.
#include "emulated_block.h"

#include "plan.cu"

namespace {

constexpr size_t kGuardBytes = 4096;
constexpr uint8_t kGuard = 0xa5;

struct alignas(16) Piece {
  uint8_t bytes[16];
};

void kernel(const void* params) { fm_plan(*static_cast<const FmPlanParams*>(params)); }

template <class T>
bool read(std::FILE* file, T* to, size_t count) {
  return std::fread(to, sizeof(T), count, file) == count;
}

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
  std::mt19937 random(std::strtoul(argv[3], nullptr, 10));

  FmPlanParams params{};
  while (read(cases, &params.shape, 1)) {
    int64_t threads, lens[2], indptr[2];
    if (!read(cases, &params.layout, 1) || !read(cases, &threads, 1) || !read(cases, lens, 2) ||
        !read(cases, indptr, 2)) {
      emulation::fail("a case is cut short");
    }
    std::vector<int32_t> seq_lens(lens[0]), qo_indptr(indptr[0]);
    if (!read(cases, seq_lens.data(), seq_lens.size()) || !read(cases, qo_indptr.data(), qo_indptr.size())) {
      emulation::fail("a case is cut short");
    }

    const size_t bytes = params.layout.bytes;
    std::vector<Piece> buffer((bytes + 2 * kGuardBytes) / sizeof(Piece));
    uint8_t* guarded = buffer.data()->bytes;
    std::memset(guarded, kGuard, buffer.size() * sizeof(Piece));
    params.seq_lens = seq_lens.data();
    params.seq_lens_stride = lens[1];
    params.qo_indptr = params.shape.ragged ? qo_indptr.data() : nullptr;
    params.qo_indptr_stride = indptr[1];
    params.plan = guarded + kGuardBytes;
    emulation::launch(kernel, &params, static_cast<int>(threads), random);

    if (!guards_hold(guarded, bytes)) emulation::fail("the planner wrote outside its buffer");
    if (std::fwrite(params.plan, 1, bytes, plans) != bytes) emulation::fail("cannot write the plan");
  }
  return std::fclose(plans) == 0 ? 0 : 1;
}
