// The shared memory of an attention CTA, in order, and its barriers:
//
//   latent blocks, 64 tokens x 128 columns each (16,384 bytes)
//   ring of 3 (or 2) rope blocks, 64 tokens x 64 columns (8,192); the tile's P replaces it
//   Q, what is not in registers, in chunks of 64 columns
//   few rows only: this CTA's part of rows that the cluster merges (kPartBytes); of 32 rows it takes the place of Q between items
//   where codes are converted: Units; by way of a stage, without a rope part: StageOf, of each loading warp
//   control block (DecodeControl, FewControl)
//
// A tile of 64 tokens takes one latent block of each of the four column quarters, and one rope block (TilePlace).
// Latent blocks are stored as
// [8 groups of 8 tokens][2 chunks of 64 columns][8 tokens][128 bytes], all others as [rows][128 bytes]; every 1,024
// bytes have the 128-byte swizzle: the 16-byte piece index within a row is XORed with the row index modulo 8.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/control.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/wgmma.cuh"

namespace fm {

constexpr int kTileTokens = FM_TILE_TOKENS;
constexpr int kTileRows = FM_TILE_ROWS;
constexpr int kLatent = FM_LATENT;
constexpr int kBlockWidth = 128;
constexpr int kTileBlocks = kLatent / kBlockWidth;
constexpr int kMostBlocks = 11;
constexpr int kTiles = 4;  // most places of tiles

constexpr uint32_t kChunkRowBytes = 128;  // 64 columns of one row
constexpr uint32_t kAtomBytes = 1024;  // 8 rows x 128 bytes, one swizzle atom
constexpr uint32_t kGroupBytes = 2 * kAtomBytes;
constexpr uint32_t kBlockBytes = 8 * kGroupBytes;
constexpr uint32_t kRopeBytes = 8 * kAtomBytes;
// How many CTAs of a cluster share the tiles of an item is what a kernel of few rows is made for, 1, 2, 4, 8 or 16 (Map::kCluster): what others
// need would lie between what runs, and takes time though it does not run (docs/tried-ends.md, "A kernel for each cluster"). Units of
// clusters of 16 are never cut.
constexpr int kMostCluster = 16;
constexpr int kPartRows = 16;  // rows that a cluster merges at a time
constexpr uint32_t kPartBytes = kPartRows * (kLatent + 8) * 4;  // as floats; or as halves, and as many that others send (merge_parts.cuh)

// A loading warp's stage: four pieces of eight rows and a column quarter as they lie in the cache, which are on their way or being
// converted; the last 64 bytes of rows of fp8_v4, whose last quarter is longer; and the scales of two tiles.
constexpr int kLoadingWarps = 4, kStagePieces = 4, kPieceRows = 8;
template <int Rows>
struct alignas(16) StageOf {
  uint8_t piece[kStagePieces][kPieceRows][kBlockWidth];
  uint8_t tail[Rows][64];
  uint8_t scales[2][Rows][16];
};

// What decides where things lie: query rows; how many leading column quarters have three blocks, the others having two;
// places of rope blocks; leading chunks of Q that live in registers; whether single tokens are loaded, by ordinary stores and
// copies; whether they may be codes, which are converted to half, as Q is then. Whole tiles come and go where they may be codes.
// kShare: CTAs, one or two, among which a tile's rows are shared out to be converted to bfloat16, by way of a stage; 0: they are not.

// 64 rows. What a loader of whole pages leaves of the registers holds most of Q.
struct WidePages {
  static constexpr int kRows = 64, kTriple = 3, kRopes = 3, kRegisterChunks = 6;
  static constexpr bool kTokens = false, kCodes = false, kRaw = false;
  static constexpr int kShare = 0;
};
// 64 rows of a cache of codes, by way of a stage. Some may be e2m1.
template <int Share, bool E2m1>
struct WideStaged {
  static constexpr bool kE2m1 = E2m1;
  static constexpr int kShare = Share, kStageRows = kTileTokens / Share / kLoadingWarps;
  static constexpr int kRows = 64, kTriple = 2, kRopes = 2, kRegisterChunks = 5;
  static constexpr bool kTokens = true, kCodes = false, kRaw = false;
  using Stage = StageOf<kStageRows>;
};
// 64 rows, single tokens: their loader needs registers itself, all that are left where it converts codes.
template <bool Codes>
struct WideTokens {
  static constexpr int kRows = 64, kTriple = Codes ? 0 : 3, kRopes = 2, kRegisterChunks = Codes ? 0 : 5;
  static constexpr bool kTokens = true, kCodes = Codes, kRaw = false;
  static constexpr int kShare = 0;
};
template <int Rows>
struct FewPages {
  static constexpr int kRows = Rows, kTriple = Rows / 16, kRopes = 3, kRegisterChunks = 0;
  static constexpr bool kTokens = false, kCodes = false, kRaw = false;
  static constexpr int kShare = 0;
};
template <int Rows, bool Codes>
struct FewTokens {
  static constexpr int kRows = Rows, kTriple = Codes ? 0 : Rows / 16, kRopes = Codes ? 2 : 3, kRegisterChunks = 0;
  static constexpr bool kTokens = true, kCodes = Codes, kRaw = false;
  static constexpr int kShare = 0;
};

// Where codes are converted to half: the powers of two that keep numbers in its range, and what float32 scales have
// beside them.
struct Units {
  static constexpr int kTiles = 2;
  struct OfTile {
    float token[kTileTokens];                  // loader -> scores: what a token's row counts in; 0: absent
    float mantissa[kTileBlocks][kTileTokens];  // and what each of its blocks is still to be multiplied with
  } of_tile[kTiles];
  uint64_t scaled[kTiles];    // an equal share for each loading warp: some mantissa of its rows is not one
  float of_query[kTileRows];  // scores only: what a row of Q counts in, times its scale
};

template <class Sizes>
constexpr uint32_t stage_bytes() {
  if constexpr (Sizes::kShare > 0)
    return kLoadingWarps * sizeof(typename Sizes::Stage);
  else
    return 0;
}

// Steps: whether parts have steps (steps.cuh). Of single CTAs only.
template <class Sizes, int Cluster, bool Steps = false>
struct SharedMap : Sizes {
  using Sizes::kRopes;
  using Sizes::kRows;
  using Sizes::kTriple;
  static constexpr bool kPeaks = Sizes::kTokens && !Steps;  // row maxima may be wanted: of sparse prefill, whose parts have no steps
  // Of single tokens: whether their loader takes registers that other roles could use.
  static constexpr bool kShortOfRegisters = (Sizes::kTokens && (Sizes::kCodes || kRows == kTileRows)) || (Steps && kRows == 32);
  static constexpr bool kManyPieces = !Sizes::kCodes;  // whether 64 rows have up to 64 pieces (split_rows.cuh)
  static constexpr bool kFewRows = kRows < kTileRows;  // there are kernels of which CTAs of a cluster share the tiles of an item
  static constexpr int kCluster = Cluster;
  static constexpr bool kSteps = Steps;
  static constexpr bool kStoresSteps = Steps && kRows == kTileRows;  // each in a slot
  static_assert(!Steps || (Cluster == 1 && !Sizes::kCodes));
  // Whether the values role finds what finished rows are multiplied with, and the scores role goes on to the next item at once.
  // With pages, where items are longer and fewer, what is saved between them is less than what the last one then takes longer.
  static constexpr bool kSumsToValues = Sizes::kTokens && !Sizes::kCodes && kRows == kTileRows;
  static constexpr bool kEarlyEnds = false;           // as RawMap has it: 16-bit rows take 0.1 to 0.8 us longer with it
  // Whether somebody waits for a column quarter of a tile (block_full) rather than for all of it (tile_full). Of single tokens the first
  // ones are waited for together: a barrier takes an arrival of each thread that copies. Of staged rows two come together, and there is no
  // tile_full: `present` is there with the last ones.
  static constexpr int kEarlyBlocks = Sizes::kShare > 0 ? 2 : 3;  // latent blocks that Q K^T of 64 rows waits for before it starts
  static __device__ __forceinline__ constexpr bool tells(int quarter) {
    if (Sizes::kShare > 0) return quarter % 2 == 1;
    return !Sizes::kCodes && (!Sizes::kTokens || (kRows == kTileRows && quarter == kEarlyBlocks - 1));
  }
  // Whether a loader waits until a column quarter of a tile is used up (block_empty), or only until all of it is (tile_empty). Nobody
  // arrives where nobody waits.
  static __device__ __forceinline__ constexpr bool frees(int quarter) { return !Sizes::kCodes && (Sizes::kShare == 0 || quarter == 1); }
  static constexpr int kBlocks = kTileBlocks * 2 + kTriple;
  static constexpr int kSharedChunks = 8 - Sizes::kRegisterChunks;  // of Q's latent part
  static constexpr uint32_t kQueryChunkBytes = kRows * kChunkRowBytes;
  static constexpr uint32_t kRopeOffset = kBlocks * kBlockBytes;
  static constexpr uint32_t kQueryOffset = kRopeOffset + kRopes * kRopeBytes;
  static constexpr int kQuerySlots = kSharedChunks + (Sizes::kShare > 0 ? 0 : 1);  // and one of the rope part
  static constexpr uint32_t kQueryBytes = kQuerySlots * kQueryChunkBytes;
  // Whether the part takes the place of Q, which the values role then hands on: with 32 rows that makes room for two more blocks.
  static constexpr bool kHandsQueryOn = kFewRows && kPartBytes <= kQueryBytes;
  static constexpr uint32_t kPartOffset = kQueryOffset + (kHandsQueryOn ? 0 : kQueryBytes);
  static constexpr uint32_t kUnitsOffset = kQueryOffset + kQueryBytes + (kFewRows && !kHandsQueryOn ? kPartBytes : 0);
  static constexpr uint32_t kStageOffset = kUnitsOffset + (Sizes::kCodes ? sizeof(Units) : 0);
  static constexpr uint32_t kControlOffset = kStageOffset + stage_bytes<Sizes>();
  static_assert(kBlocks <= kMostBlocks && (!Sizes::kCodes || kRopes == Units::kTiles));

  // Also of the tile's weights.
  static __device__ __forceinline__ uint32_t rope_offset(int tile) { return kRopeOffset + tile * kRopeBytes; }
};

// What the warpgroups tell each other besides the tiles.
struct DecodeControl {
  uint64_t block_full[kMostBlocks];   // loader -> scores, values: a latent block has arrived, and those before it that tell nothing
  uint64_t block_empty[kMostBlocks];  // values of the whole cluster -> loader: K and V of the block are used up
  uint64_t tile_full[kTiles];     // loader -> scores: the rope block, `present` and latent blocks that tell nothing have arrived
  uint64_t tile_empty[kTiles];    // values of the whole cluster -> loader: P is used up
  uint64_t weights_full[kTiles];  // scores -> values: P, rescale factors, cleaned V rows
  uint64_t result_full;           // scores -> values: the factors of the finished item's rows, or their sums
  uint64_t result_empty;          // values -> scores
  uint64_t present[kTiles];       // bit t: token t of the tile has a valid page
  uint32_t rescale[kTiles][4];    // per warp of 16 rows: did any row's reference maximum move?
  float factor[kTiles][kTileRows];
  int first_masked;               // scores only: from this tile on, some row of the block does not see every token
  int first_shared;               // and this one on, some tokens are seen by some rows and not by others
  alignas(8) float result[kTileRows];  // what the accumulated rows are multiplied with at the end
  // values: of a split unit's rows, that this CTA adds up, or of many parts that have been given up; last_adds.cuh: how many CTAs
  // have come before
  uint32_t pieces;
  int own_piece;                  // values: of many parts, this CTA's own piece; -1: it has given that up, or has none
};

// What CTAs of 64 rows have besides.
struct WideControl : DecodeControl {
  alignas(8) float2 part_weight[kTileRows];  // values: of two parts of a row, this CTA's and the other's
  alignas(16) int4 item[3];  // values: of a part of a split unit, its FmWorkItem ...
  int part, next_worker;     // ... and its SplitUnit
  unsigned turn;
  float2 row_sum[kTileRows];  // scores -> values, kSumsToValues: reference and sum of a row's softmax, base 2, ...
  float row_peak[kTileRows];  // ... and its highest score
};

// What CTAs of few rows have besides.
struct FewControl : DecodeControl {
  uint64_t parts_full;            // values of the whole cluster -> values: every CTA's part can be read
  uint64_t parts_empty;           // values of the whole cluster -> values: this CTA's part has been read
  float2 row_state[32];           // reference and sum of each row
  float2 part_state[kPartRows];   // those of the rows being merged
  float warp_row[4][32];          // what each warp found for a row
  float warp_sum[4][32];          // and its part of the row's sum, when references may move
  float3 part_weight[32];         // values: of few parts of a row (last_adds.cuh)
  float unit[16];                 // scores -> values: what the finished rows count in, of codes only
};

// What those have besides whose parts have steps.
struct StepControl : FewControl {
  // scores -> values: what a row's step is normalised with, what is multiplied with those before it and with it when it is added
  // (steps.cuh), and with the row at the end of a whole unit.
  alignas(16) float4 step[32];
  alignas(16) float4 part_factors[32];  // values: of a row's second and third part (last_adds.cuh)
};

template <class Map>
__device__ __forceinline__ Units& units_of(uint8_t* smem) {
  return *reinterpret_cast<Units*>(smem + Map::kUnitsOffset);
}
// By address: those of a tile's tokens.
template <class Map>
__device__ __forceinline__ uint32_t tile_units_at(uint32_t smem, int tile) {
  return smem + Map::kUnitsOffset + tile * sizeof(Units::OfTile);
}

__device__ __forceinline__ uint32_t block_offset(int block) { return block * kBlockBytes; }

// Byte offset of 16-byte piece `piece` (of 8) in row `row` of a [rows][128 bytes] swizzled block.
__device__ __forceinline__ uint32_t swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// Byte offset of 16-byte piece `piece` (of 16) of token `row` in a latent block.
__device__ __forceinline__ uint32_t latent_swizzled(int row, int piece) {
  return (row >> 3) * kGroupBytes + (piece >> 3) * kAtomBytes + swizzled(row & 7, piece & 7);
}

// An operand in shared memory that is multiplied in steps. The descriptor of what lies `bytes` on is one addition; made of the address
// each time it would be a chain of four operations, longer than a product.
struct Operand {
  uint64_t descriptor;

  __device__ __forceinline__ Operand(uint32_t address, uint32_t leading, uint32_t stride)
      : descriptor(smem_descriptor(uniform(address), leading, stride)) {}
  // What lies `offset` bytes on from `base`: one addition where there are several of one base (docs/tried.md, "Descriptors of operands").
  __device__ __forceinline__ Operand(uint32_t base, uint32_t offset, uint32_t leading, uint32_t stride)
      : descriptor(Operand(base, leading, stride).at(offset)) {}
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const { return descriptor + bytes / 16; }
};

// Where a tile is. Tiles take turns in the places of each column quarter, so that whoever loads or uses up the blocks
// of one goes through their phases one by one: a wait for a parity never sees a phase two passes old.
template <class Map>
struct TilePlace {
  static constexpr int kCycle = 12;
  int count = 0;  // of tiles, modulo two passes over one, two and three places: one register

  __device__ __forceinline__ int thirds() const { return count * 11 >> 5; }  // count / 3
  __device__ __forceinline__ int third() const { return count - thirds() * 3; }
  __device__ __forceinline__ int rope() const { return Map::kRopes == 3 ? third() : count & 1; }
  __device__ __forceinline__ uint32_t rope_parity() const { return (Map::kRopes == 3 ? thirds() : count >> 1) & 1; }
  __device__ __forceinline__ int block(int quarter) const {
    return quarter < Map::kTriple ? quarter * 3 + third() : Map::kTriple + quarter * 2 + (count & 1);
  }
  __device__ __forceinline__ uint32_t block_parity(int quarter) const {
    return (quarter < Map::kTriple ? thirds() : count >> 1) & 1;
  }
  __device__ __forceinline__ void advance() { count = count == kCycle - 1 ? 0 : count + 1; }
  __device__ __forceinline__ TilePlace before() const { return {count == 0 ? kCycle - 1 : count - 1}; }
};

// By a loading warp when it has loaded all tiles, `next` being the place after the last: waits until what is in all places of a column
// quarter, and with `weights` of rope blocks, has been used up by the whole cluster. Once that holds for all for which a loader waits no
// other CTA arrives here any more, and all that this one has sent is there: it may leave.
template <class Map>
__device__ __forceinline__ void wait_until_used_up(DecodeControl& control, TilePlace<Map> next, int quarter, bool weights) {
  TilePlace<Map> place = next;
#pragma unroll 1
  for (int i = quarter < Map::kTriple ? 3 : 2; i > 0; --i, place.advance())
    mbarrier_wait(shared_address(&control.block_empty[place.block(quarter)]), place.block_parity(quarter) ^ 1);
  place = next;
#pragma unroll 1
  for (int i = weights ? Map::kRopes : 0; i > 0; --i, place.advance())
    mbarrier_wait(shared_address(&control.tile_empty[place.rope()]), place.rope_parity() ^ 1);
}

// Whether the tile's blocks Begin .. End are there, as far as they tell; `ready`: what else is wanted is.
template <int Begin, int End, class Map>
__device__ __forceinline__ bool has_blocks(DecodeControl& control, TilePlace<Map> place, bool ready = true) {
#pragma unroll
  for (int i = Begin; i < End; ++i)
    ready &= !Map::tells(i) || mbarrier_test(shared_address(&control.block_full[place.block(i)]), place.block_parity(i));
  return ready;
}
// Waits for one of them.
template <class Map>
__device__ __forceinline__ void wait_for_block(DecodeControl& control, TilePlace<Map> place, int quarter) {
  if (Map::tells(quarter))
    mbarrier_wait(shared_address(&control.block_full[place.block(quarter)]), place.block_parity(quarter));
}

}  // namespace fm
