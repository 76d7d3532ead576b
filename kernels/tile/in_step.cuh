// CTAs that load long items keep in step: one that is ahead of the average of those that are loading waits. Which CTAs come behind is
// chance, and one that has can catch up only as fast as it is done with its tiles, so that the slowest ends the launch
// (docs/tried-ends.md, "Tiles that are held"). What is loaded does not depend on it, nor does anybody wait for long: a few looks.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/global.cuh"

namespace fm {

class InStep {
 public:
  __device__ __forceinline__ explicit InStep(bool keeps) : asked(keeps ? 0 : -1) {}

  // By one thread, before it asks for a tile; not for the first that a launch begins with, which nobody waits for.
  __device__ __forceinline__ void ask(const FmDecodeParams& p) {
    if (asked < 0) return;
#pragma unroll 1
    for (int looks = kMostLooks; looks > 0 && is_ahead(); --looks) seen = load_relaxed(word(p));
    seen = atomic_add(word(p), asked == 0 ? kCta + 1 : 1);
    ++asked;
  }
  // By the same thread, when it has asked for all.
  __device__ __forceinline__ void leave(const FmDecodeParams& p) const {
    if (asked > 0) subtract(word(p), kCta + asked);
  }

 private:
  static constexpr uint64_t kCta = uint64_t{1} << 32;
  static constexpr int kMostLooks = 4;
  int asked;          // tiles; negative: it does not count
  uint64_t seen = 0;  // in the word, before it counted the last one: nobody waits for that

  // The tiles that those CTAs have asked for that are not done with asking, and from bit 32 on how many CTAs these are. (A word of 32
  // bits has the compiler add up a warp's numbers first.)
  static __device__ __forceinline__ uint64_t* word(const FmDecodeParams& p) { return reinterpret_cast<uint64_t*>(p.plan->loading); }
  // By more than half a tile.
  __device__ __forceinline__ bool is_ahead() const { return (2 * asked - 1) * (int)(seen >> 32) > 2 * (int)seen; }
};

}  // namespace fm
