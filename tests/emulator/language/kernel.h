// Makes a kernel of the sources one of the emulated library.
#pragma once
#include <tuple>
#include <utility>

#include "language/language.h"

namespace emulation {

void add_kernel(const Kernel& kernel);

template <auto Function>
struct Launchable;
template <class... Parameters, void (*Function)(Parameters...)>
struct Launchable<Function> {
  static void run(void** arguments, const Grid& grid) { call(arguments, grid, std::index_sequence_for<Parameters...>()); }
  static std::vector<size_t> sizes() { return {sizeof(std::decay_t<Parameters>)...}; }

 private:
  template <size_t... I>
  static void call(void** arguments, const Grid& grid, std::index_sequence<I...>) {
    const auto body = [=] { Function(*static_cast<std::decay_t<Parameters>*>(arguments[I])...); };
    emulation::run(body, grid);
  }
};

}  // namespace emulation

#define EMULATED_KERNEL(NAME)                                                                          \
  static const bool NAME##_added = (emulation::add_kernel({#NAME, emulation::Launchable<NAME>::run,    \
                                                           emulation::Launchable<NAME>::sizes()}),     \
                                    true);
