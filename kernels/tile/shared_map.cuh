// The shared memory of an attention CTA, in order, and its barriers:
//
//   latent blocks, 64 tokens x 128 columns each (16,384 bytes)
//   ring of 3 rope blocks, 64 tokens x 64 columns (8,192); the tile's P replaces it
//   Q, what is not in registers, in chunks of 64 columns
//   few rows only: this CTA's part of rows that the cluster merges (kPartBytes)
//   control block (DecodeControl, FewControl)
//
// A tile of 64 tokens takes one latent block of each of the four column quarters, and one rope block (TilePlace).
// Latent blocks are stored as
// [8 groups of 8 tokens][2 chunks of 64 columns][8 tokens][128 bytes], all others as [rows][128 bytes]; every 1,024
// bytes have the 128-byte swizzle: the 16-byte piece index within a row is XORed with the row index modulo 8.
#pragma once
#include <stdint.h>

#include "../params.h"
#include "../ptx/mbarrier.cuh"

namespace fm {

constexpr int kTileTokens = FM_TILE_TOKENS;
constexpr int kTileRows = FM_TILE_ROWS;
constexpr int kLatent = 512;  // width of the latent part, which is also V
constexpr int kBlockWidth = 128;
constexpr int kTileBlocks = kLatent / kBlockWidth;
constexpr int kMostBlocks = 11;
constexpr int kTiles = 3;  // rope blocks
constexpr int kRegisterChunks = 6;  // chunks of 64 columns of Q that live in registers
constexpr int kSharedChunks = 8 - kRegisterChunks;

constexpr uint32_t kChunkRowBytes = 128;  // 64 columns of one row
constexpr uint32_t kAtomBytes = 1024;  // 8 rows x 128 bytes, one swizzle atom
constexpr uint32_t kGroupBytes = 2 * kAtomBytes;
constexpr uint32_t kBlockBytes = 8 * kGroupBytes;
constexpr uint32_t kRopeBytes = 8 * kAtomBytes;
constexpr int kPartRows = 16;  // rows that a cluster merges at a time
constexpr int kPartStride = kLatent + 8;  // numbers from one row to the next: no bank conflicts
constexpr uint32_t kPartBytes = kPartRows * kPartStride * 4;

// Where things lie for CTAs of `Rows` query rows: the first `Triple` column quarters have three blocks, the others two;
// `QueryChunks` chunks of Q.
template <int Rows, int Triple, int QueryChunks>
struct SharedMap {
  static constexpr int kRows = Rows;
  static constexpr bool kSplits = Rows < kTileRows;  // CTAs of a cluster may share the tiles of an item
  static constexpr int kTriple = Triple;
  static constexpr int kBlocks = kTileBlocks * 2 + Triple;
  static constexpr uint32_t kQueryChunkBytes = Rows * kChunkRowBytes;
  static constexpr uint32_t kRopeOffset = kBlocks * kBlockBytes;
  static constexpr uint32_t kQueryOffset = kRopeOffset + kTiles * kRopeBytes;
  static constexpr uint32_t kPartOffset = kQueryOffset + QueryChunks * kQueryChunkBytes;
  static constexpr uint32_t kControlOffset = kPartOffset + (kSplits ? kPartBytes : 0);
  static_assert(kBlocks <= kMostBlocks);

  static __device__ __forceinline__ uint32_t rope_offset(int tile) { return kRopeOffset + tile * kRopeBytes; }
};
using WideMap = SharedMap<kTileRows, 3, kSharedChunks + 1>;
template <int Rows>
using FewMap = SharedMap<Rows, Rows == 16 ? 1 : 0, 9>;

// What the warpgroups tell each other besides the tiles.
struct DecodeControl {
  uint64_t block_full[kMostBlocks];   // loader -> scores, values: a latent block has arrived
  uint64_t block_empty[kMostBlocks];  // values of the whole cluster -> loader: K and V of the block are used up
  uint64_t tile_full[kTiles];     // loader -> scores: the rope block and `present` have arrived
  uint64_t tile_empty[kTiles];    // values of the whole cluster -> loader: P is used up
  uint64_t weights_full[kTiles];  // scores -> values: P, rescale factors, cleaned V rows
  uint64_t result_full;           // scores -> values: the factors of the finished item
  uint64_t result_empty;          // values -> scores
  uint64_t present[kTiles];       // bit t: token t of the tile has a valid page
  uint32_t rescale[kTiles][4];    // per warp of 16 rows: did any row's reference maximum move?
  float factor[kTiles][kTileRows];
  int first_masked;               // scores only: from this tile on, some row of the block does not see every token
  float result[kTileRows];        // what the accumulated rows are multiplied with at the end
};

// What CTAs of few rows have besides.
struct FewControl : DecodeControl {
  uint64_t parts_full;            // values of the whole cluster -> values: every CTA's part can be read
  uint64_t parts_empty;           // values of the whole cluster -> values: this CTA's part has been read
  float2 row_state[32];           // reference and sum of each row
  float2 part_state[kPartRows];   // those of the rows being merged
  float warp_row[4][32];          // what each warp found for a row
  int last_part;                  // values: this CTA was the last to finish a part of its unit
};
static_assert(WideMap::kControlOffset + sizeof(DecodeControl) <= FM_DECODE_SMEM_BYTES);
static_assert(FewMap<16>::kControlOffset + sizeof(FewControl) <= FM_DECODE_SMEM_BYTES);
static_assert(FewMap<32>::kControlOffset + sizeof(FewControl) <= FM_DECODE_SMEM_BYTES);

__device__ __forceinline__ uint32_t block_offset(int block) { return block * kBlockBytes; }

// Byte offset of 16-byte piece `piece` (of 8) in row `row` of a [rows][128 bytes] swizzled block.
__device__ __forceinline__ uint32_t swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// Byte offset of 16-byte piece `piece` (of 16) of token `row` in a latent block.
__device__ __forceinline__ uint32_t latent_swizzled(int row, int piece) {
  return (row >> 3) * kGroupBytes + (piece >> 3) * kAtomBytes + swizzled(row & 7, piece & 7);
}

// Where a tile is. Tiles take turns in the places of each column quarter, so that whoever loads or uses up the blocks
// of one goes through their phases one by one: a wait for a parity never sees a phase two passes old.
template <class Map>
struct TilePlace {
  int count = 0;  // of tiles, modulo two passes over both two and three places: one register

  __device__ __forceinline__ int thirds() const { return count * 11 >> 5; }  // count / 3
  __device__ __forceinline__ int rope() const { return count - thirds() * 3; }
  __device__ __forceinline__ uint32_t rope_parity() const { return thirds() & 1; }
  __device__ __forceinline__ int block(int quarter) const {
    return quarter < Map::kTriple ? quarter * 3 + rope() : Map::kTriple + quarter * 2 + (count & 1);
  }
  __device__ __forceinline__ uint32_t block_parity(int quarter) const {
    return quarter < Map::kTriple ? rope_parity() : count >> 1 & 1;
  }
  __device__ __forceinline__ void advance() { count = count == 11 ? 0 : count + 1; }
};

}  // namespace fm
