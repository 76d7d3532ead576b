// Launch parameters of every kernel: the single source both sides share. The Rust side,
// `crates/core/params.rs`, is generated from this file by bindgen and a test keeps it current.
// Strides are in elements unless a name says bytes. Pointers are device addresses.
#pragma once
#include "plan_layout.h"

#define FM_LATENT 512 /* columns of the latent part of a row, which is also V */

#define FM_DECODE_THREADS 512
#define FM_DECODE_THREADS_2_LOADERS 640 /* with another warpgroup that loads: 16 rows of Codes */
#define FM_DECODE_THREADS_RAW 384 /* rows of codes as they are: a loading and two computing warpgroups; some have two that load (RawMap) */
/* Quantised rows in shared memory, as they lie in the cache: bytes from one to the next, odd multiples of 16 for ldmatrix;
   and the most of them in a TMA box. */
#define FM_RAW_ROW_BYTES_576 656
#define FM_RAW_ROW_BYTES_512 592
#define FM_BARE_ROW_GAP 16 /* rows of fp8 in kernels for it alone: so many bytes more than columns */
#define FM_RAW_BOX_ROWS 32
#define FM_SWIZZLED_ROWS 16 /* query rows of the kernels for fp8 alone whose boxes of rows are swizzled */
#define FM_DECODE_SMEM_BYTES 232448

/* plan.cu: plans a batch. */
typedef struct FmPlanParams {
  FmPlanShape shape;
  FmPlanLayout layout;
  const int32_t* seq_lens;    /* [batch]; sparse: [batch, token] of a list's entries, null: all of them */
  int64_t seq_lens_stride[2]; /* request, token: 0 where lengths are per request */
  const int32_t* extra_lens;  /* as seq_lens of a sparse batch, for the lists of the extra cache */
  int64_t extra_lens_stride[2];
  const int32_t* qo_indptr; /* [batch + 1], ragged only, else null */
  int64_t qo_indptr_stride;
  uint8_t* plan;
} FmPlanParams;

/* Formats of a cache; crates/core/dtype.rs has the same order. */
#define FM_KV_BF16 0
#define FM_KV_FP16 1
#define FM_KV_FP8 2
#define FM_KV_FP8_V32 3
#define FM_KV_FP8_V4 4
#define FM_KV_FP8_V41 5
#define FM_KV_FP8_V41_SPLIT 6
#define FM_KV_FP4_V41 7

/* What numbers are divided by (divisor.h), as the host finds it (crates/core/cuda/divisor.rs). */
typedef struct FmDivisor {
  uint32_t multiplier;
  int32_t shift;
} FmDivisor;

/* One paged cache. Strides are in bytes: page, token, KV head. A row of 16-bit numbers has two parts, a quantised one is
   as docs/formats.md says (of a split page `rows` is the page's beginning). */
typedef struct FmKvCache {
  const void* rows; /* of a cache without pages: any 1024 bytes that can be read */
  const void* rope; /* 16-bit formats with rows of 576 only */
  int64_t row_stride[3]; /* of a split page without the scales at its end */
  int64_t rope_stride[3];
  const int32_t* indices; /* sparse: [request, query token, entry], page * page_size + offset; else null */
  int64_t indices_stride[2];
  int32_t format; /* FM_KV_* */
  int32_t num_pages;
  int32_t page_size;
  FmDivisor page; /* page_size */
  int32_t reserved;
} FmKvCache;

/* decode.cu: attention over a paged latent cache. Q and the cache come in two parts, the latent
   ("nope", 512 wide) and the rotary ("rope", 64 wide, absent for d_qk 512); one tensor is the case where
   both point into the same rows. */
typedef struct FmDecodeParams {
  const void* q_nope;
  const void* q_rope;
  int64_t q_nope_stride[3]; /* batch, token, head */
  int64_t q_rope_stride[3];
  FmKvCache kv[2];          /* the cache, and sparse attention's extra one; the TMA loader has tensor maps */
  const int32_t* block_table; /* null when sparse */
  int64_t block_table_stride;
  int32_t max_pages;
  int32_t max_tokens;  /* the most tokens a request can have: longer lengths are clamped */
  int32_t group;       /* query heads per KV head */
  FmDivisor of_group;
  int32_t team;        /* row blocks of a unit: CTAs that read the same tiles for different rows */
  int32_t multicast;   /* CTAs of a cluster with the same tiles, which take turns in loading: 1 or 2 */
  int32_t causal;
  int32_t box_shift;   /* log2 of the tokens of one TMA box; -1: none, rows come one by one */
  int32_t head_chunks_nope; /* 64-wide column blocks from one KV head to the next in the tensor maps */
  int32_t head_chunks_rope;
  int32_t q_codes;     /* 1: Q is e4m3; codes kernels only */
  int32_t waits_aside; /* 1: CTAs fit on the GPU beside those of such a launch before, so that they wait for long */
  int32_t reads_once;  /* 1: each tile of pages is for one CTA, or for one cluster that loads it together; 0: not known */
  const float* q_scale; /* of e4m3 rows, or null: then it is in scale_log2 */
  int64_t q_scale_stride[3];
  float scale_log2;    /* softmax_scale * log2(e), times the scale of the cache's codes */
  float value_scale;   /* what the output is multiplied with: the scale of the cache's codes */
  const float* attn_sink; /* [heads] or null */
  FmPlanHeader* plan;
  const int32_t* worker_begin; /* in the plan */
  const FmWorkItem* items;
  FmMerge* merges;
  void* out;
  int64_t out_stride[3];
  float* lse;
  int64_t lse_stride[3];
  float* max_logits; /* or null; -inf beforehand where units may be split. Not by the TMA loader's kernels */
  int64_t max_logits_stride[3];
  float* partial_out; /* [slots, unit_rows, 512], each normalised, without value_scale; 64 rows: see split_rows.cuh */
  float* partial_lse; /* [unit_rows, slots], base 2: those of a row beside each other */
  int32_t slots; /* the most there can be */
  float empty_lse; /* lse of rows that see no key */
  int32_t step_slots; /* FmPlanLayout's */
} FmDecodeParams;

/* Numbers that become `value`. */
typedef struct FmFillParams {
  float* to; /* [rows, columns] */
  int64_t stride[2]; /* in elements */
  int32_t rows;
  int32_t columns;
  float value;
  int32_t reserved;
} FmFillParams;

#define FM_LATENT_BOX_CHUNKS 2 /* 64-wide column blocks in one TMA box of the latent part */
#define FM_OFFSETS_THREADS 1024 /* one block: fm_offsets, fm_window_offsets */
#define FM_INDEX_STEP 128 /* entries that a warp of the operations on indices takes at once */
#define FM_ROW_THREADS 256 /* merge and the operations on caches: warps stride over the rows, whatever the grid */

/* merge.cu: merge_states over [rows = dim0 * dim1 * dim2, FM_LATENT]. */
typedef struct FmMergeParams {
  const void* out_a;
  const void* out_b;
  const float* lse_a;
  const float* lse_b;
  void* out;
  float* lse;
  int32_t dim[3];
  int32_t reserved;
  int64_t out_a_stride[3];
  int64_t out_b_stride[3];
  int64_t out_stride[3];
  int64_t lse_a_stride[3];
  int64_t lse_b_stride[3];
  int64_t lse_stride[3];
} FmMergeParams;

/* cache.cu: append_kv. Rows of 16-bit elements, copied bit for bit. */
typedef struct FmAppendParams {
  const void* kv_c;
  const void* k_pe; /* null when rope_dim is 0 */
  int64_t kv_c_stride;
  int64_t k_pe_stride;
  const int64_t* slots;
  int64_t slots_stride;
  void* cache_nope;
  void* cache_rope;
  int64_t cache_nope_stride[2]; /* page, token */
  int64_t cache_rope_stride[2];
  int64_t tokens;
  int64_t num_pages;
  int32_t page_size;
  int32_t rope_dim;
} FmAppendParams;

/* cache.cu: offsets[r] = sum of the clamped lengths before r; one block. */
typedef struct FmOffsetsParams {
  const int32_t* seq_lens;
  int64_t seq_lens_stride;
  int64_t* offsets;
  int32_t batch;
  int32_t max_seq_len;
} FmOffsetsParams;

/* Which cached token a row comes from: by block_table (token t of request r where offsets[r] <= t <
   offsets[r + 1]), by explicit physical ids, or, where both are null, the token of the row's own number. */
typedef struct FmTokenSource {
  const int32_t* block_table; /* null: by ids */
  int64_t block_table_stride;
  const int64_t* offsets; /* [batch + 1], by block_table only: running sum of the lengths */
  const void* ids;
  int64_t ids_stride;
  int32_t ids_are_64bit;
  int32_t batch;
  int32_t max_pages;
  int32_t page_size;
} FmTokenSource;

/* cache.cu: gather_kv. out[t] = the cached row of token t, absent rows are zeros. */
typedef struct FmGatherParams {
  const void* cache_nope;
  const void* cache_rope;
  int64_t cache_nope_stride[2];
  int64_t cache_rope_stride[2];
  FmTokenSource source;
  void* out;
  int64_t out_stride;
  int64_t tokens;   /* rows of out */
  int64_t num_pages;
  int32_t rope_dim;
  int32_t source_fp16; /* the cache holds fp16: converted to bf16 on the way */
} FmGatherParams;

/* Formats of caches of bytes: format/layout.h says what they are. */
#define FM_LAYOUT_FP8_576 0
#define FM_LAYOUT_FP8_512 1
#define FM_LAYOUT_FP8_V32 2
#define FM_LAYOUT_FP8_V4 3
#define FM_LAYOUT_FP8_V41 4
#define FM_LAYOUT_FP8_V41_SPLIT 5
#define FM_LAYOUT_FP4_V41 6

/* A paged cache of bytes. */
typedef struct FmByteCache {
  void* bytes;
  int64_t page_stride;  /* bytes */
  int64_t token_stride; /* bytes; not used where pages are split */
  int32_t num_pages;
  int32_t page_size;
  int32_t layout;     /* FM_LAYOUT_* */
  float tensor_scale; /* of "fp8" */
} FmByteCache;

/* quantise.cu: append_kv and quantize_kv into a cache of bytes. Row t has 512 numbers at kv_c and, where the
   layout has 576, 64 at k_pe: at t / source_page, t % source_page of the strides. */
typedef struct FmQuantiseParams {
  FmByteCache cache;
  const void* kv_c;
  const void* k_pe;
  int64_t kv_c_stride[2];
  int64_t k_pe_stride[2];
  const int64_t* slots; /* null: row t is slot t */
  int64_t slots_stride;
  int64_t tokens;
  int64_t source_page;
  int32_t round_scale;
  int32_t reserved;
} FmQuantiseParams;

/* dequantise.cu: dequantize_kv, and gather_kv from a cache of bytes. Row t goes to t / out_page, t % out_page
   of the strides. */
typedef struct FmDequantiseParams {
  FmByteCache cache;
  FmTokenSource source;
  void* out;
  int64_t out_stride[2];
  int64_t tokens;
  int64_t out_page;
} FmDequantiseParams;

/* An array of int32 or int64. */
typedef struct FmIntegers {
  const void* values; /* null: zeros */
  int64_t stride;
  int32_t are_64bit;
  int32_t reserved;
} FmIntegers;

/* indices.cu: to_physical. Rows of `columns` logical positions, those of row i of request i / rows_per_request. */
typedef struct FmToPhysicalParams {
  const void* indices;
  int64_t indices_stride[3]; /* request, row, column */
  const int32_t* block_table;
  int64_t block_table_stride;
  int32_t* out;
  int64_t out_stride[2];
  int64_t rows;
  int32_t rows_per_request;
  int32_t columns;
  int32_t max_pages;
  int32_t page_size;
  FmDivisor page; /* page_size */
  int32_t are_64bit;  /* indices */
  int32_t in_fours;   /* rows of int32 without gaps that begin at multiples of 16 bytes, indices and out */
  int32_t span;       /* entries of a row that a warp takes, a multiple of FM_INDEX_STEP */
  int32_t reserved;
} FmToPhysicalParams;

/* indices.cu: window_token_ids. First one block: offsets and first_pos; then the ids. */
typedef struct FmWindowParams {
  FmIntegers seq_lens;
  FmIntegers query_lens;
  const int32_t* block_table;
  int64_t block_table_stride;
  int64_t* offsets;   /* [batch + 1] */
  int64_t offsets_stride;
  int32_t* first_pos; /* [batch] */
  int64_t first_pos_stride;
  int32_t* ids;       /* [tokens]; those past the last token are -1 */
  int64_t ids_stride;
  int64_t tokens;
  int32_t batch;
  int32_t max_pages;
  int32_t page_size;
  FmDivisor page; /* page_size */
  int32_t window;
} FmWindowParams;

/* indices.cu: combine_topk_window. */
typedef struct FmCombineIndicesParams {
  const int32_t* topk_indices;
  int64_t topk_indices_stride;
  FmIntegers positions;
  FmIntegers request_ids;
  FmIntegers compressed_base;
  FmIntegers window_base;
  FmIntegers first_pos;
  int32_t* indices;
  int64_t indices_stride;
  int32_t* lengths;
  int64_t lengths_stride;
  int64_t tokens;
  int32_t batch;
  int32_t topk;
  int32_t ratio;
  int32_t window;
  int32_t width;    /* of a row of indices */
  int32_t in_fours; /* rows begin at multiples of 16 bytes, topk_indices and indices */
  int32_t span;     /* entries of a row that a warp takes, a multiple of FM_INDEX_STEP */
  int32_t reserved;
} FmCombineIndicesParams;

#ifdef __cplusplus
/* The Rust side asserts the same sizes, and every offset. */
static_assert(sizeof(FmPlanShape) == 108, "FmPlanShape");
static_assert(sizeof(FmPlanHeader) == 64, "FmPlanHeader");
static_assert(sizeof(FmWorkItem) == 48, "FmWorkItem");
static_assert(sizeof(FmMerge) == 112, "FmMerge");
static_assert(sizeof(FmPlanLayout) == 80, "FmPlanLayout");
static_assert(sizeof(FmPlanParams) == 264, "FmPlanParams");
static_assert(sizeof(FmDecodeParams) == 568, "FmDecodeParams");
static_assert(sizeof(FmFillParams) == 40, "FmFillParams");
static_assert(sizeof(FmKvCache) == 112, "FmKvCache");
static_assert(sizeof(FmMergeParams) == 208, "FmMergeParams");
static_assert(sizeof(FmAppendParams) == 120, "FmAppendParams");
static_assert(sizeof(FmOffsetsParams) == 32, "FmOffsetsParams");
static_assert(sizeof(FmTokenSource) == 56, "FmTokenSource");
static_assert(sizeof(FmGatherParams) == 144, "FmGatherParams");
static_assert(sizeof(FmByteCache) == 40, "FmByteCache");
static_assert(sizeof(FmQuantiseParams) == 128, "FmQuantiseParams");
static_assert(sizeof(FmDequantiseParams) == 136, "FmDequantiseParams");
static_assert(sizeof(FmToPhysicalParams) == 120, "FmToPhysicalParams");
static_assert(sizeof(FmWindowParams) == 144, "FmWindowParams");
static_assert(sizeof(FmCombineIndicesParams) == 208, "FmCombineIndicesParams");
#endif
