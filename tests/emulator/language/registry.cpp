// The kernels of the library by name.
#include <cstring>
#include <deque>

#include "language/kernel.h"

namespace emulation {

namespace {
std::deque<Kernel>& kernels() {
  static std::deque<Kernel> all;
  return all;
}
}  // namespace

void add_kernel(const Kernel& kernel) { kernels().push_back(kernel); }

const Kernel* find_kernel(const char* name) {
  for (const Kernel& kernel : kernels())
    if (std::strcmp(kernel.name, name) == 0) return &kernel;
  return nullptr;
}

}  // namespace emulation
