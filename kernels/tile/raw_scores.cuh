// Scores of raw rows: S^T = K Q^T with K from registers (raw_fragments.cuh), the 64 tokens on the M side and the query rows
// on the N side; a thread holds two tokens of a quarter of the rows, as with few rows of other caches (few_scores.cuh).
//
// The softmax keeps a reference per row, the same in all threads: it moves when a weight, counted in its token's unit, would
// leave the range of halves. Weights are 2^(s - reference); sums add these, P has them times the token's unit. A unit is
// 2^-74 or more (RowUnit), so that weights stay below 2^90 and sums are in range. The reference may be far from the scores,
// where float32 is coarse: weights are 2^(s - n), n an integer near the highest score, times 2^(n - reference), the lift.
#pragma once
#include "few_scores.cuh"
#include "raw_fragments.cuh"
#include "raw_query.cuh"

namespace fm {

constexpr float kTopWeight = 12.f;  // base 2: the largest of a tile when the reference moves
constexpr float kMostTopWeight = 15.f;  // more than that makes it move
// Bounds of the lift, base 2: with them 2^(s - n) is in range whatever the units of other tokens are.
constexpr int kMostLowered = 30, kMostLifted = 40;

// One k16 step of S^T += K Q^T.
template <class M, class Map>
__device__ __forceinline__ void multiply_keys(float (&s)[Map::kRows / 2], const uint32_t (&keys)[4], uint64_t query,
                                              bool accumulate) {
  wgmma_rs(M(), s, keys, query, accumulate);
}

// This warp's place in a tile.
template <class Map>
struct KeyPlace {
  uint32_t matrices;   // this lane's row and half of 32 bytes, for ldmatrix
  uint32_t own;        // the row of token lane / 4
  uint32_t scales;     // of it; token 8 on: 8 of them on
  uint32_t all[2][2];  // where there are four

  __device__ __forceinline__ KeyPlace(uint32_t smem, int place) {
    const int lane = warpgroup_thread() % 32, first = warpgroup_thread() / 32 * 16;
    matrices = Map::row(smem, place, first + lane % 16) + lane / 16 * 16;
    own = Map::row(smem, place, first + lane / 4);
    scales = Map::scales(smem, place) + (first + lane / 4) * Map::kGroups * 2;
    if constexpr (Map::kHasRope && !Map::kBare) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 v = load_shared_2(scales + h * 64);
        all[h][0] = __float_as_uint(v.x), all[h][1] = __float_as_uint(v.y);
      }
    }
  }
  // The scales of 32 columns, as pairs.
  template <int Group>
  __device__ __forceinline__ void load_scales(uint32_t (&scale)[2]) const {
    constexpr int kGroup = Group * Map::kGroups / 16;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t at = scales + (h * 8 * Map::kGroups + kGroup / 2 * 2) * 2;
      const uint32_t v = Map::kHasRope ? all[h][kGroup / 2 % 2] : load_shared_word(at);
      scale[h] = __byte_perm(v, 0, kGroup % 2 ? 0x3232 : 0x1010);
    }
  }
  // What sums are multiplied with after block `Block` of 128 columns: its mantissa over the next one's, so that in the end
  // each product has its own block's.
  template <int Block>
  __device__ __forceinline__ float factor(int h) const {
    const uint32_t from = own + h * 8 * Map::kRowBytes + Map::kFloatScales + Block * 4;
    const float mantissa = mantissa_of(load_shared_word(from));
    return Block == 3 ? mantissa : __fdividef(mantissa, mantissa_of(load_shared_word(from + 4)));
  }
};

// Calls body with the constants 0 .. Count.
template <int Count, class Body>
__device__ __forceinline__ void for_each_constant(Body body) {
  if constexpr (Count > 0) {
    for_each_constant<Count - 1>(body);
    body(std::integral_constant<int, Count - 1>());
  }
}

// The products of the rope part. `rest`: waits for it.
template <class T, class Map, class Rest>
__device__ __forceinline__ void multiply_rope(float (&s)[Map::kRows / 2], uint64_t q, const KeyPlace<Map>& at, Rest rest) {
  rest();
  KeyFragments keys[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    keys[i].load_plain(at.matrices + Map::kRope + i * 64);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 2; ++k)
      multiply_keys<T, Map>(s, keys[i].a[k], q + (8 * Map::kQueryChunkBytes + i * 64 + k * 32) / 16, true);
    wgmma_commit();
  }
}

// Sums that products are added to in turn: with few rows one has to wait for the last.
template <class Map>
constexpr int kSums = kTileRows / Map::kRows;
template <class Map>
using KeySums = float[kSums<Map>][Map::kRows / 2];

// Codes of 32 columns on their way from shared memory, and their scales.
template <class Map>
struct KeyCodes {
  uint32_t codes[4], scale[2];

  template <int Group>
  __device__ __forceinline__ void load(const KeyPlace<Map>& at) {
    load_matrices<false>(codes, at.matrices + Group * 32);
    if constexpr (!Map::kBare) at.template load_scales<Group>(scale);
  }
};

// S^T of the 32 columns `Group`, added up to what the others made.
template <class M, class Map, int Group, int Ahead>
__device__ __forceinline__ void multiply_group(KeySums<Map>& s, KeyFragments (&keys)[Ahead],
                                               KeyCodes<Map> (&codes)[Map::kKeyCodesAhead + 1], uint64_t q, const KeyPlace<Map>& at,
                                               bool plain) {
  constexpr bool kMixed = Map::kMayBePlain && Group >= 14;
  KeyFragments& own = keys[Group % Ahead];
  constexpr int kNext = Group + Map::kKeyCodesAhead, kCodes = Map::kKeyCodesAhead + 1;
  if constexpr (kNext < 16) codes[kNext % kCodes].template load<kNext>(at);
  if (Group >= Ahead) wgmma_wait<Ahead - 1>();
  own.template convert<kMixed, !Map::kBare>(codes[Group % kCodes].codes, codes[Group % kCodes].scale);
  if (kMixed && plain) own.load_plain(at.matrices + Map::kPlain + (Group - 14) * 64);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 2; ++k)
    multiply_keys<M, Map>(s[(2 * Group + k) % kSums<Map>], own.a[k],
                          q + (Group / 2 * Map::kQueryChunkBytes + Group % 2 * 64 + k * 32) / 16,
                          2 * Group + k >= kSums<Map>);
  wgmma_commit();
}

// Scaled: float32 scales have mantissas, with which sums are multiplied between blocks. `rest` waits for what of the rows is
// not codes, and says whether the last columns of rows of 512 are such.
template <class T, class M, class Map, bool Scaled, class Rest>
__device__ __forceinline__ void multiply_raw(KeySums<Map>& s, uint32_t smem, const KeyPlace<Map>& at, Rest rest) {
  const uint64_t q = smem_descriptor(smem + Map::kQueryOffset, 0, kAtomBytes);
  constexpr int kAhead = Scaled && Map::kRows == kTileRows ? 1 : Map::kKeysAhead;
  KeyFragments keys[kAhead];
  KeyCodes<Map> codes[Map::kKeyCodesAhead + 1];
  for_each_constant<Map::kKeyCodesAhead>([&](auto number) {
    constexpr int kGroup = decltype(number)::value;
    codes[kGroup].template load<kGroup>(at);
  });
  bool plain = false;
  const auto group = [&](auto number) {
    constexpr int kGroup = decltype(number)::value;
    if constexpr (Map::kMayBePlain && kGroup == 14) plain = rest();
    multiply_group<M, Map, kGroup, kAhead>(s, keys, codes, q, at, plain);
    if constexpr (Scaled && kGroup % 4 == 3) {
      wgmma_wait<0>();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float f = at.template factor<kGroup / 4>(h);
#pragma unroll
        for (int c = 0; c < FewLayout<Map::kRows>::kColumns; ++c)
#pragma unroll
          for (int i = 0; i < kSums<Map>; ++i) s[i][FewLayout<Map::kRows>::value(c, h)] *= f;
      }
    }
  };
  for_each_constant<16>(group);
  if constexpr (Map::kHasRope && kRopeCounts<T>) multiply_rope<T, Map>(s[0], q, at, rest);
  wgmma_wait<0>();
}

// S^T of a tile, without what Q counts in.
template <class T, class M, class Map, class Control>
__device__ __forceinline__ void multiply_raw_query(float (&s)[Map::kRows / 2], uint32_t smem, Control& control,
                                                   RawPlace<Map> place, float2 unit) {
  using Layout = FewLayout<Map::kRows>;
  const int place_at = place.at();
  const KeyPlace<Map> at(smem, place_at);
  const auto rest = [&] {
    const int at = place.at();  // found anew: registers are short
    mbarrier_wait(shared_address(&control.rest_full(at)), place.parity());
    return !Map::kHasRope && control.format[at] == FM_KV_FP8_V4;
  };
  KeySums<Map> sums;
  constexpr bool kFloats = Map::kHasRope && !Map::kBare;
  if (kFloats && (control.scaled[place_at][0] | control.scaled[place_at][1]) != 0)
    multiply_raw<T, M, Map, kFloats>(sums, smem, at, rest);
  else
    multiply_raw<T, M, Map, false>(sums, smem, at, rest);
#pragma unroll
  for (int c = 0; c < Layout::kColumns; ++c)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = Layout::value(c, h);
      float sum = sums[0][i];
      if constexpr (kSums<Map> > 1) sum += sums[1][i];
      if constexpr (kSums<Map> == 4) sum += sums[2][i] + sums[3][i];
      s[i] = sum * (h == 0 ? unit.x : unit.y);
    }
  if constexpr (Map::kHasRope && !kRopeCounts<T>) {
    multiply_rope<T, Map>(s, smem_descriptor(smem + Map::kQueryOffset, 0, kAtomBytes), at, rest);
    wgmma_wait<0>();
  }
}

// Codes and scales of V that some rows of the block do not see lose their NaNs. By the whole warpgroup when K has been read.
template <class Map>
__device__ __forceinline__ void clean_raw_values(const FmDecodeParams& p, const RowBlock& r, uint32_t smem, int place,
                                                 bool plain, int tile, uint64_t present) {
  const int start = tile * kTileTokens;
  present = existing(present, r.seq_len - start);
  const uint64_t seen_by_all = existing(present, r.visible(p, r.row_begin) - start);
  const int codes = plain ? Map::kPlain : kLatent;
#pragma unroll 1
  for (int token = warpgroup_thread() / 32; token < kTileTokens; token += 4) {
    if (seen_by_all >> token & 1) continue;
    const int lane = warpgroup_thread() % 32;
    const uint32_t at = Map::row(smem, place, token) + lane * 16;
    const auto without_nan = [](uint32_t v) {
      const uint32_t nan = ((v & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u) >> 7;
      return v & ~(nan * 0xFF);
    };
    if (lane * 16 < codes) {
      const uint4 v = load_shared_4(at);
      store_shared(at, make_uint4(without_nan(v.x), without_nan(v.y), without_nan(v.z), without_nan(v.w)));
    } else if (plain && lane * 16 < Map::kPlain + 128) {
      const uint4 v = load_shared_4(at);
      store_shared(at, make_uint4(finite_or_zero(__half(), v.x), finite_or_zero(__half(), v.y),
                                  finite_or_zero(__half(), v.z), finite_or_zero(__half(), v.w)));
    }
    if (!Map::kBare && lane < Map::kGroups) {
      const uint32_t to = Map::scales(smem, place) + offsetof(typename Map::Scales, of_column) +
                          (lane * kTileTokens + lane_token(token)) * 2;
      store_shared_bytes<2>(to, finite_or_zero(__half(), load_shared_half(to)));
    }
  }
}

// The softmax of a thread's rows; what rows have in common is in the control block.
template <class Map>
struct RawState {
  static constexpr int kColumns = FewLayout<Map::kRows>::kColumns;
  using Layout = FewLayout<Map::kRows>;
  // Sums of this warp's tokens, of rows 2 lane and 2 lane + 1; with few rows of this thread's tokens and rows.
  static constexpr bool kSpread = kColumns == 16;
  static constexpr int kKept = kSpread ? 2 : kColumns;
  float sum[kKept] = {};

  static __device__ __forceinline__ int row(int i) {
    const int lane = warpgroup_thread() % 32;
    return kSpread ? 2 * lane + i : Layout::row(i, lane);
  }

  // Turns scores into P, which has its tokens' units: `weights` are pairs of halves; `added` is for add(). Moves references
  // where some would not fit, and tries again; `first`: they have to. By the whole warpgroup; after it every warp has read K.
  template <class Control>
  __device__ __forceinline__ void weigh(uint32_t (&weights)[Map::kRows / 4], float (&added)[kColumns],
                                        const float (&s)[Map::kRows / 2], float2 unit, Control& control, int place,
                                        int barrier, bool first) {
    if (warpgroup_thread() == 0) control.rescale[place][0] = first;
    bool move = first;
#pragma unroll 1
    for (bool moved = first;; moved = true) {
      if (move) move_references(s, unit, control, place, barrier);
      const bool over = try_weigh(weights, added, s, unit, control);
      if (moved) break;
      move = named_barrier_any_of_warpgroup(barrier, over);
      if (!move) break;
    }
  }
  // Combines what lanes have found for the same rows, a number of each of a thread's columns: the first kKept become those of
  // row(0) and so on.
  template <class Combine>
  static __device__ __forceinline__ void combine_lanes(float (&v)[kColumns], Combine combine) {
    if constexpr (kSpread) {
      spread<16, 8>(v, combine), spread<8, 4>(v, combine), spread<4, 2>(v, combine);
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int d = 4; d < 32; d *= 2) v[c] = combine(v[c], __shfl_xor_sync(~0u, v[c], d));
    }
  }
  // Whether this lane is to leave what it has of row(0) and so on then.
  static __device__ __forceinline__ bool leaves() { return kSpread || warpgroup_thread() % 32 < 4; }

  // Adds this thread's weights of a tile.
  __device__ __forceinline__ void add(float (&added)[kColumns]) {
    if constexpr (kSpread) combine_lanes(added, [](float a, float b) { return a + b; });
#pragma unroll
    for (int i = 0; i < kKept; ++i) sum[i] += added[i];
  }

  // When references have moved for the other warpgroup's tile.
  template <class Control>
  __device__ __forceinline__ void rescale(const Control& control, int place) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) sum[i] *= control.factor[place][row(i)];
  }

  // What each warp finds for its rows: to warp_top.
  template <class Control>
  __device__ __forceinline__ void leave_sums(Control& control, int barrier) const {
    const int warp = warpgroup_thread() / 32;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      float v = sum[i];
      if constexpr (!kSpread) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) v += __shfl_xor_sync(~0u, v, d);
      }
      if (leaves()) control.warp_top[warp][row(i)] = v;
    }
    named_barrier_of_warpgroup(barrier);
  }
  // Minus the reference of a row.
  template <class Control>
  static __device__ __forceinline__ float minus_reference(const Control& control, int row) {
    return control.row[row].y + log2_of_unit(control.lift()[row]);
  }
  template <class Control, class Combine>
  static __device__ __forceinline__ float found(const Control& control, int row, Combine combine) {
    return combine(combine(control.warp_top[0][row], control.warp_top[1][row]),
                   combine(control.warp_top[2][row], control.warp_top[3][row]));
  }

 private:
  // Returns whether some weight is larger than P may have it. `added`: the weights of this thread's tokens.
  template <class Control>
  __device__ __forceinline__ bool try_weigh(uint32_t (&weights)[Map::kRows / 4], float (&added)[kColumns],
                                            const float (&s)[Map::kRows / 2], float2 unit, const Control& control) const {
    __half2 top = __float2half2_rn(0.f);
    const uint32_t at = shared_address(&control.row[2 * (warpgroup_thread() % 4)]);
    const uint32_t lift_at = shared_address(&control.lift()[2 * (warpgroup_thread() % 4)]);
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      const uint4 v = load_shared_4(at + c / 2 * 64);
      const float2 lift = load_shared_2(lift_at + c / 2 * 32);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = lift.x * exp2_approx(fmaf(s[Layout::value(c, h)], __uint_as_float(v.x), __uint_as_float(v.y)));
        const float b = lift.y * exp2_approx(fmaf(s[Layout::value(c + 1, h)], __uint_as_float(v.z), __uint_as_float(v.w)));
        added[c] = h == 0 ? a : added[c] + a, added[c + 1] = h == 0 ? b : added[c + 1] + b;
        const float own = h == 0 ? unit.x : unit.y;
        uint32_t& pair = weights[Layout::value(c, h) / 2];
        pair = pack(__half(), a * own, b * own);
        top = __hmax2(top, *reinterpret_cast<__half2*>(&pair));
      }
    }
    return __half2float(__hmax(__low2half(top), __high2half(top))) > kMostWeight;
  }

  // Of 2 Half columns each lane keeps those that its bit says, combined with what the lane beyond that bit has of them.
  template <int Bit, int Half, class Combine>
  static __device__ __forceinline__ void spread(float (&v)[kColumns], Combine combine) {
    const bool upper = warpgroup_thread() & Bit;
#pragma unroll
    for (int i = 0; i < Half; ++i) {
      const float sent = upper ? v[i] : v[i + Half], kept = upper ? v[i + Half] : v[i];
      v[i] = combine(kept, __shfl_xor_sync(~0u, sent, Bit));
    }
  }

  // A score in a token's unit, whose exponent is in the lowest bits.
  static __device__ __forceinline__ float counted(float score, float unit) {
    const float v = score + log2_of_unit(unit);
    return fabsf(v) < 3e38f ? __uint_as_float((__float_as_uint(v) & ~0xFFu) | __float_as_uint(unit) >> 23) : v;
  }

  template <class Control>
  __device__ __forceinline__ void move_references(const float (&s)[Map::kRows / 2], float2 unit, Control& control, int place,
                                                  int barrier) {
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const int thread = warpgroup_thread(), lane = thread % 32;
    float tops[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float scale = control.row[Layout::row(c, lane)].x;
      tops[c] = fmaxf(counted(s[Layout::value(c, 0)] * scale, unit.x), counted(s[Layout::value(c, 1)] * scale, unit.y));
    }
    combine_lanes(tops, larger);
#pragma unroll
    for (int i = 0; i < kKept; ++i)
      if (leaves()) control.warp_top[thread / 32][row(i)] = tops[i];
    named_barrier_of_warpgroup(barrier);
    if (thread == 0) control.rescale[place][0] = true;
    if (thread < Map::kRows) {
      const float top = found(control, thread, larger), old = minus_reference(control, thread);
      float shrink = 1.f;
      if (top + old > kMostTopWeight - 1.f) {  // `counted` has lost a little
        const float next = floorf(kTopWeight - top);  // an integer: see log2_sum
        const int unit_exponent = (int)(__float_as_uint(top) & 0xFF) - 127;
        const float lift = min(max((int)kTopWeight - unit_exponent, -kMostLowered), kMostLifted);
        shrink = exp2_approx(next - old);
        control.row[thread].y = next - lift, control.lift()[thread] = exp2_approx(lift);
      }
      control.factor[place][thread] = shrink;
    }
    named_barrier_of_warpgroup(barrier);
    rescale(control, place);
  }
};

// The highest scaled scores so far, by warp, where they are wanted; base 2.
template <class Map, class Control>
__device__ __forceinline__ void keep_peaks(const float (&s)[Map::kRows / 2], Control& control, bool first) {
  using State = RawState<Map>;
  using Layout = typename State::Layout;
  const int thread = warpgroup_thread(), lane = thread % 32;
  float peaks[State::kColumns];
#pragma unroll
  for (int c = 0; c < State::kColumns; ++c) {
    const float scale = control.row[Layout::row(c, lane)].x;
    peaks[c] = fmaxf(s[Layout::value(c, 0)] * scale, s[Layout::value(c, 1)] * scale);
  }
  State::combine_lanes(peaks, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
  for (int i = 0; i < State::kKept; ++i) {
    float& peak = control.warp_peak[thread / 32][State::row(i)];
    if (State::leaves()) peak = first ? peaks[i] : fmaxf(peak, peaks[i]);
  }
}

// Leaves reference and sum of each row, and where it goes; where no other CTA has a part, also the rows' lse and their last
// factor. By both warpgroups, which have had different tiles; after it all may read.
template <class Map, class Control>
__device__ __forceinline__ void finish_raw_rows(const FmDecodeParams& p, const RowBlock& r, const RawState<Map>& state,
                                                Control& control, int own) {
  const int thread = warpgroup_thread();
  const auto add = [](float a, float b) { return a + b; };
  float other = 0.f;
  if (own == 1) state.leave_sums(control, kOwnBarrier + own);
  named_barrier<kRawBarrier, 256>();
  if (own == 0) {
    if (thread < Map::kRows) other = state.found(control, thread, add);
    named_barrier_of_warpgroup(kOwnBarrier + own);
    state.leave_sums(control, kOwnBarrier + own);
    if (thread < Map::kRows) {
      const float sum = state.found(control, thread, add) + other, reference = -state.minus_reference(control, thread);
      if (p.max_logits != nullptr)
        write_peak(p, r, thread, r.empty() ? kNegInf
                                           : fmaxf(fmaxf(control.warp_peak[0][thread], control.warp_peak[1][thread]),
                                                   fmaxf(control.warp_peak[2][thread], control.warp_peak[3][thread])));
      bool split = false;
      if constexpr (Map::kSplits) {
        split = p.splits > 1;
        if (split) control.row_state[thread] = make_float2(r.empty() ? kNegInf : reference, sum);
      }
      if (!split) control.result[thread] = row_factor<Map>(p, r, thread, reference, sum);
      const int row = r.row_begin + thread;
      control.out_offset()[thread] = row < r.rows ? row_offset(p, r, row, p.out_stride) : -1;
    }
  }
  named_barrier<kRawBarrier, 256>();
}

}  // namespace fm
