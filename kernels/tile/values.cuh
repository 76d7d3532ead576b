// The values role: two warpgroups accumulate O = P V, 64 rows x 256 columns each, in registers (as two blocks of 128
// columns), and write the finished rows to the output or, for a part of a split unit, to its slot of partial results, which
// split_rows.cuh adds up.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/wgmma.cuh"
#include "numbers.cuh"
#include "shared_map.cuh"
#include "split_rows.cuh"
#include "split_stored.cuh"
#include "split_unit.cuh"
#include "stored_steps.cuh"
#include "two_parts.cuh"
#include "work.cuh"

namespace fm {

// o[b][4g + 2h + e]: row row0 + 8h, column 8g + 2 (lane % 4) + e of quarter(half, b).
using Accumulators = float[2][64];

__device__ __forceinline__ void scale_rows(Accumulators& o, float factor0, float factor1) {
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int g = 0; g < 16; ++g) {
      o[b][4 * g] *= factor0, o[b][4 * g + 1] *= factor0;
      o[b][4 * g + 2] *= factor1, o[b][4 * g + 3] *= factor1;
    }
}

// One block of 128 columns: O += P V, over the tokens of k16 steps Begin .. End.
template <int Begin, int End, class T>
__device__ __forceinline__ void multiply_weights_values(T, float (&o)[64], Operand weights, Operand values) {
  wgmma_fence();
#pragma unroll
  for (int k = Begin; k < End; ++k)
    wgmma_ss_n128_bn(T(), o, weights.at(k * 32), values.at(k * 2 * kGroupBytes));
  wgmma_commit();
}

// Both blocks of a warpgroup, over fewer tokens than a tile has.
template <class T>
__device__ __forceinline__ void multiply_first_steps(T, Accumulators& o, Operand weights, Operand first, Operand second, int steps) {
#pragma unroll 1
  for (int k = 0; k < steps; ++k) {
    wgmma_fence();
    wgmma_ss_n128_bn(T(), o[0], weights.at(k * 32), first.at(k * 2 * kGroupBytes));
    wgmma_ss_n128_bn(T(), o[1], weights.at(k * 32), second.at(k * 2 * kGroupBytes));
    wgmma_commit();
    wgmma_wait<0>();
  }
}

// 128 columns of a row as 16-bit numbers. Of each four groups of eight columns a lane gets one, by a transposition among
// the four lanes of a row, and stores sixteen bytes.
template <class T>
__device__ __forceinline__ void store_row(const float (&o)[64], int h, T* row, bool present, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  row += lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = pack_result(T(), o[(4 * i + j) * 4 + 2 * h], o[(4 * i + j) * 4 + 2 * h + 1]);
    const uint32_t r0 = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), r1 = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    const uint32_t a0 = odd ? r0 : w[0], a1 = odd ? w[1] : r0, b0 = odd ? r1 : w[2], b1 = odd ? w[3] : r1;
    const uint32_t r2 = __shfl_xor_sync(~0u, upper ? a0 : b0, 2), r3 = __shfl_xor_sync(~0u, upper ? a1 : b1, 2);
    if (present)
      *reinterpret_cast<uint4*>(row + 32 * i) = upper ? make_uint4(r2, r3, b0, b1) : make_uint4(a0, a1, r2, r3);
  }
}

// A quarter of the columns of this thread's rows.
template <class T>
__device__ __forceinline__ void store_quarter(const FmDecodeParams& p, const RowBlock& r, const float (&o)[64], int quarter) {
  const int lane = warpgroup_thread() % 32, row0 = warpgroup_thread() / 32 * 16 + lane / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = r.row_begin + row0 + 8 * h;
    const bool present = row < r.rows;
    T* out = reinterpret_cast<T*>(p.out) + (present ? row_offset(p, r, row, p.out_stride) : 0);
    store_row<T>(o, h, out + quarter * kBlockWidth, present, lane);
  }
}

// This thread's numbers of a quarter of a row block in its slot, of which split_rows.cuh says how it lies: of each eight columns
// two of two rows, and four steps on those of the next eight.
template <class Map>
__device__ __forceinline__ float4* partial_result(const FmDecodeParams& p, const RowBlock& r, int quarter) {
  const int thread = warpgroup_thread();
  return reinterpret_cast<float4*>(p.partial_out + slot_row<Map>(p, r, 0) * kLatent + thread / 4 * kPairNumbers +
                                   quarter * 2 * kBlockWidth + thread % 4 * 4);
}

// The column quarters of a warpgroup whose bits are set.
template <class Map>
__device__ __forceinline__ void store_partial_result(const FmDecodeParams& p, const RowBlock& r, const Accumulators& o,
                                                     uint32_t quarters, int half) {
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    if (!(quarters >> b & 1)) continue;
    float4* partial = partial_result<Map>(p, r, quarter(half, b));
#pragma unroll
    for (int g = 0; g < 16; ++g)
      partial[4 * g] = make_float4(o[b][4 * g], o[b][4 * g + 1], o[b][4 * g + 2], o[b][4 * g + 3]);
  }
}

// All of this thread's numbers as HalfPart, `last` being what its two rows are multiplied with: calls put(b, g, chunk) and, in the end,
// put_exponents(all).
template <class Put, class PutExponents>
__device__ __forceinline__ void halve(const Accumulators& o, const float (&last)[2], Put put, PutExponents put_exponents) {
  constexpr int kNext = 4 * HalfPart::kOwnChunks;  // from a chunk's first pair of columns to its second
  uint32_t exponents[HalfPart::kOwnChunks / 2] = {};
#pragma unroll
  for (int g = 0; g < HalfPart::kOwnChunks; ++g) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = 0.f;
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int e = 4 * g + 2 * h; e < 4 * g + 2 * h + 2; ++e) top = fmaxf(top, fmaxf(fabsf(o[b][e]), fabsf(o[b][e + kNext])));
      const uint32_t exponent = HalfPart::exponent(top * last[h]);
      factor[h] = last[h] * HalfPart::inverse(exponent);
      exponents[g / 2] |= exponent << (16 * (g % 2) + 8 * h);
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const auto numbers = [&](int e, int h) { return pack(__half(), o[b][e] * factor[h], o[b][e + 1] * factor[h]); };
      put(b, g, make_uint4(numbers(4 * g, 0), numbers(4 * g + 2, 1), numbers(4 * g + kNext, 0), numbers(4 * g + kNext + 2, 1)));
    }
  }
  put_exponents(make_uint4(exponents[0], exponents[1], exponents[2], exponents[3]));
}

// To its slot: of more than two parts.
template <class Map>
__device__ __forceinline__ void store_partial_halves(const FmDecodeParams& p, const RowBlock& r, const Accumulators& o, int half,
                                                     const float (&last)[2]) {
  const int thread = warpgroup_thread(), pair = thread / 4;
  uint8_t* part = part_bytes<Map>(p, r);
  const auto put = [&](int b, int g, uint4 chunk) {  // at own_numbers, as which it takes 30 instructions more
    *reinterpret_cast<uint4*>(part + (pair * HalfPart::kPieces + quarter(half, b)) * kPieceBytes + (4 * g + thread % 4) * 16) = chunk;
  };
  halve(o, last, put, [&](uint4 all) { *reinterpret_cast<uint4*>(part + HalfPart::scales_offset(pair, half, thread % 4)) = all; });
}

// The end of a whole unit of two steps, of which this thread has stored its numbers of the first, and has those of the second in registers,
// rounded as they would be stored. `r`: the second.
template <class T, class Map>
__device__ __forceinline__ void finish_two_steps(const FmDecodeParams& p, const RowBlock& r, const Accumulators& o, int half,
                                                 const float (&last)[2]) {
  constexpr int kNext = 4 * HalfPart::kOwnChunks;
  uint4 second[2][HalfPart::kOwnChunks];
  uint32_t exponents_of_second[4];
  // What is found from these later stays there: registers are short.
  const auto found = [](uint4 v) { return make_uint4(opaque((int)v.x), opaque((int)v.y), opaque((int)v.z), opaque((int)v.w)); };
  const auto words = [](uint4 v, uint32_t(&to)[4]) { to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w; };
  halve(o, last, [&](int b, int g, uint4 chunk) { second[b][g] = found(chunk); }, [&](uint4 all) { words(found(all), exponents_of_second); });
  const TwoSteps weights = weigh_two_steps<Map>(p, r, half);
  RowBlock before = r;
  --before.slot;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    uint8_t* from = own_numbers<Map>(p, before, quarter(half, b));
    float sums[64];
    uint4 first[HalfPart::kOwnChunks];
    uint32_t exponents[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) exponents[i] = __ldcg(reinterpret_cast<const uint32_t*>(own_exponents<Map>(p, before, half)) + i);
#pragma unroll
    for (int g = 0; g < HalfPart::kOwnChunks; ++g) first[g] = __ldcg(reinterpret_cast<const uint4*>(from + 64 * g));
#pragma unroll
    for (int g = 0; g < HalfPart::kOwnChunks; ++g) {
      float4 sum[2] = {};
      const auto add = [&](const float (&weight)[2], const uint32_t (&exponents)[4], uint4 numbers) {
        const uint32_t of_rows = exponents[g / 2] >> (16 * (g % 2));
        HalfPart::add(sum, weight[0] * HalfPart::scale(of_rows & 0xFF), weight[1] * HalfPart::scale(of_rows >> 8 & 0xFF), numbers);
      };
      add(weights.first, exponents, first[g]), add(weights.second, exponents_of_second, second[b][g]);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float* to = &sums[4 * g + kNext * k];
        to[0] = sum[k].x * weights.sum[0], to[1] = sum[k].y * weights.sum[0];
        to[2] = sum[k].z * weights.sum[1], to[3] = sum[k].w * weights.sum[1];
      }
    }
    store_quarter<T>(p, r, sums, quarter(half, b));
    __syncwarp();  // all lanes have read the lines, which nobody does again
    if (warpgroup_thread() % 4 == 0 && parts_are_lines(p)) {
#pragma unroll
      for (int g = 0; g < HalfPart::kOwnChunks; g += 2) discard_line(from + 64 * g);
    }
  }
}

// The end of a step that is not all of its unit; `ends`: of the item, too.
template <class T, class Map>
__device__ __forceinline__ void finish_step(const FmDecodeParams& p, int item, const RowBlock& r, const Accumulators& o, int half,
                                            const float (&last)[2], bool ends, DecodeControl& control) {
  if (is_second_of_whole(p, r)) return finish_two_steps<T, Map>(p, r, o, half, last);
  const uint64_t policy = r.merge < 0 ? kEvictLast : kEvictNormal;  // this CTA soon reads, and discards, what is of a whole unit
  const auto store = [&](uint8_t* to, uint4 v) { store_by(policy, reinterpret_cast<uint4*>(to), v); };
  halve(o, last, [&](int b, int g, uint4 chunk) { store(own_numbers<Map>(p, r, quarter(half, b)) + 64 * g, chunk); },
        [&](uint4 all) { store(own_exponents<Map>(p, r, half), all); });
  if (ends) add_stored_steps<T, Map>(p, item, control);
}

template <class Map>
__device__ __forceinline__ void load_partial_result(const FmDecodeParams& p, const RowBlock& r, float (&o)[64], int quarter) {
  const float4* partial = partial_result<Map>(p, r, quarter);
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    const float4 v = __ldcg(partial + 4 * g);
    o[4 * g] = v.x, o[4 * g + 1] = v.y, o[4 * g + 2] = v.z, o[4 * g + 3] = v.w;
  }
}

// Adds up a quarter of the columns of two parts, `o` being what this CTA has of it, and stores the result. Calls weigh() when it has
// asked for the other part's numbers, which nobody reads again: where they are whole lines they are discarded.
template <class T, class Map, class Weigh>
__device__ __forceinline__ void add_other_part(const FmDecodeParams& p, const RowBlock& other_part, float (&o)[64], int own_quarter,
                                               const WideControl& control, Weigh weigh) {
  const float4* partial = partial_result<Map>(p, other_part, own_quarter);
  const int row0 = warpgroup_thread() / 32 * 16 + warpgroup_thread() % 32 / 4;
  float4 other[16];
#pragma unroll
  for (int g = 0; g < 16; ++g) other[g] = __ldcg(partial + 4 * g);
  weigh();
  const float2 first = control.part_weight[row0], second = control.part_weight[row0 + 8];
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    float* own = &o[4 * g];
    own[0] = add_two(first, own[0], other[g].x), own[1] = add_two(first, own[1], other[g].y);
    own[2] = add_two(second, own[2], other[g].z), own[3] = add_two(second, own[3], other[g].w);
  }
  store_quarter<T>(p, left_row_block<Map>(p, control), o, own_quarter);
  if constexpr (!Map::kTokens) {  // the others are short of registers
    __syncwarp();  // all lanes have read the lines
    if (warpgroup_thread() % 4 == 0 && parts_are_lines(p)) {
      float4* used = partial_result<Map>(p, other_part, own_quarter);
#pragma unroll
      for (int g = 0; g < 16; g += 2) discard_line(used + 4 * g);
    }
  }
}

// Finds what the accumulated rows are multiplied with, a row to a thread. By both warpgroups. `tile`: the first of the item, or its step.
template <class Map>
__device__ __forceinline__ void find_row_factors(const FmDecodeParams& p, int item, int tile, WideControl& control) {
  const int row = block_thread() - 128;
  if (row < kTileRows) {
    const RowBlock r = load_step<Map>(p, item, tile);
    control.result[row] = row_factor<Map>(p, r, row, control.row_sum[row].x, control.row_sum[row].y);
    if (Map::kPeaks) write_peak<Map>(p, r, row, control.row_peak[row]);
  }
  named_barrier<kAddBarrier, 256>();
}

// T: of the output; M: what is multiplied.
template <class T, class M, class Map>
__device__ __forceinline__ void accumulate_values(const FmDecodeParams& p, const FirstItem& first_item, int half, uint32_t smem,
                                                  WideControl& control) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, row0 = warp * 16 + lane / 4;
  TilePlace<Map> place;
  uint32_t result_parity = 0;
  for_each_step<Map>(p, first_item, [&](int item, const RowBlock& range, const RowBlock&, bool ends) {
    Accumulators o;
    clear_accumulators(o);
    const int last_steps = uniform(value_steps(range.in_last_tile()));
    for (int tiles = range.tile_end - range.tile_begin; tiles > 0; --tiles) {
      // Found while P is waited for: what lies between that and the first product is a part of every tile's time.
      const Operand weights(smem + Map::rope_offset(place.rope()), 0, kAtomBytes);
      const int first = place.block(quarter(half, 0)), second = place.block(quarter(half, 1));
      const Operand first_values(smem + block_offset(first), kAtomBytes, kGroupBytes);
      const Operand second_values(smem + block_offset(second), kAtomBytes, kGroupBytes);
      mbarrier_wait(shared_address(&control.weights_full[place.rope()]), place.rope_parity());
      if (control.rescale[place.rope()][warp])
        scale_rows(o, control.factor[place.rope()][row0], control.factor[place.rope()][row0 + 8]);
      const auto release_first = [&] {
        if (Map::frees(quarter(half, 0)) && lane < p.multicast)
          mbarrier_arrive_at(shared_address(&control.block_empty[first]), lane);
      };
      if (!Map::kTokens && tiles == 1 && last_steps < kTileTokens / kStepTokens) {
        multiply_first_steps(M(), o, weights, first_values, second_values, last_steps);
        release_first();
      } else {
        multiply_weights_values<0, 4>(M(), o[0], weights, first_values);
        // The first block is released as soon as it is used up, with enough handed over to keep the tensor cores busy.
        multiply_weights_values<0, 2>(M(), o[1], weights, second_values);
        wgmma_wait<1>();
        release_first();
        multiply_weights_values<2, 4>(M(), o[1], weights, second_values);
        wgmma_wait<0>();
      }
      if (lane < p.multicast) {
        if (Map::frees(quarter(half, 1))) mbarrier_arrive_at(shared_address(&control.block_empty[second]), lane);
        mbarrier_arrive_at(shared_address(&control.tile_empty[place.rope()]), lane);
      }
      place.advance();
    }
    mbarrier_wait(shared_address(&control.result_full), result_parity);
    if (Map::kSumsToValues) find_row_factors<Map>(p, item, range.tile_begin, control);
    const float last[2] = {control.result[row0], control.result[row0 + 8]};
    arrive_once_per_warp(shared_address(&control.result_empty));
    result_parity ^= 1;
    const RowBlock r = load_step<Map>(p, item, range.tile_begin);
    if (Map::kStoresSteps ? r.slot < 0 : r.parts <= 2) scale_rows(o, last[0], last[1]);
    if (r.slot < 0) {
#pragma unroll
      for (int b = 0; b < 2; ++b) store_quarter<T>(p, r, o[b], quarter(half, b));
      return;
    }
    if constexpr (Map::kStoresSteps) {
      return finish_step<T, Map>(p, item, r, o, half, last, ends, control);
    }
    if (block_thread() == 128) leave_split_item<Map>(p, item, control);  // before the stores, which fill the queue
    const auto store = [&](const RowBlock& r, uint32_t quarters) { store_partial_result<Map>(p, r, o, quarters, half); };
    if (r.parts == 2) {
      finish_part_in_two<Map>(
          p, item, control, store,
          [&](auto number, auto other_part, auto weigh) {
            constexpr int kQuarter = decltype(number)::value;
            add_other_part<T, Map>(p, other_part(), o[kQuarter], quarter(half, kQuarter), control, weigh);
          },
          [&](const RowBlock& r) { load_partial_result<Map>(p, r, o[1], quarter(half, 1)); });
    } else {
      store_partial_halves<Map>(p, r, o, half, last);
      finish_part_of_pairs<T, Map>(p, item, control, [&] { return left_split_unit(p, control); });
    }
  });
}

}  // namespace fm
