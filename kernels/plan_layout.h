// The bytes of a plan: what the planner (host or device) writes and the attention kernels read.
// Single source of the layout for C++ and Rust: `crates/schedule/plan_layout.rs` is generated from this
// file by bindgen and a test keeps it current.
//
// A plan is one buffer of int32 words:
//
//   FmPlanHeader                       at 0
//   int32 worker_begin[workers + 1]    items of worker w: worker_begin[w] .. worker_begin[w + 1]
//   FmMerge   merges[max_merges]       the units that were split
//   FmWorkItem items[max_items]        those of a worker by unit and tile, and so those of all units that have tiles;
//                                      where parts are dealt out, as few may be: by size
//   int64 unit_start[units + 1]        planner scratch: position of each unit on the work line
//   int32 unit_item[units + 1]         planner scratch: first item of each unit
//   int32 first_unit[batch]            planner scratch, ragged only: first unit of each request
//
// Offsets are in bytes, 16-byte aligned, and follow from FmPlanShape alone (never from the lengths), so a
// captured graph can plan again in place.
//
// A unit is one request, one KV head and one block of unit_rows query rows; units stand in this order. Ragged
// requests have ceil(query tokens * group / unit_rows) row blocks: query tokens qo_indptr[r] .. qo_indptr[r + 1],
// both clamped to [0, q_tokens], none where the range ends before it begins. Overlapping ranges could ask for
// more units than the layout has: those past the last are left out.
//
// A part may have steps (FM_SPLIT_INVARIANT), of as many tiles as the unit's own length says: what it comes to is made of what
// each step does, whether one CTA goes through the part or several do. Then parts end where steps do, and units of few steps are
// cut wherever these end: their items leave each step in a slot, in the first step_slots ones, where each merge has as many as a
// unit may have steps. Where steps are stored all units are, and those that are whole and have several steps leave them in slots
// of their worker, FM_STEPS_OF_WHOLE each, which come after.
//
// A sparse batch (sparse_q_len > 0) lists the keys of each query token, so a token is its own unit per KV head and
// row block; units stand by request, token, KV head, block. Of a token's topk entries the first main_len count,
// of its extra_topk ones the first extra_len; extra keys begin at the tile after the last of main_len.
#pragma once
#include <stdint.h>

#define FM_PLAN_VERSION 7
#define FM_TILE_TOKENS 64 /* tokens of one KV tile */
#define FM_TILE_ROWS 64   /* most query rows (token, head) of one CTA */
#define FM_PLAN_THREADS 1024 /* the device plans with blocks of this many threads at most, mostly one, ... */
#define FM_PLAN_THREADS_OF_FEW 768 /* ... or this many with fm_plan_few */
#define FM_PLAN_CLUSTER 8 /* CTAs of fm_plan_cluster, which are a cluster, ... */
#define FM_PLAN_CLUSTER_THREADS 256 /* ... threads of one, ... */
#define FM_PLAN_CLUSTER_REQUESTS 2048 /* ... most requests of one, of sparse attention query tokens, ... */
#define FM_PLAN_CLUSTER_SMEM_BYTES 69632 /* ... and its dynamic shared memory */
#define FM_MAX_SPLITS 8 /* most CTAs of a team, or of a cluster that shares the tiles of a part of a unit */
#define FM_STEP_LOG2 1 /* of the tiles of a step in units of up to ... */
#define FM_STEP_UNIT 8 /* ... so many tiles; in units of up to eight times as many twice as many, and so on */
#define FM_STORED_STEP_LOG2 5 /* the same where each is stored, in units of up to ... */
#define FM_STORED_STEP_UNIT 128 /* ... so many tiles; in others twice as many, or so many that there are no more than num_splits steps */
#define FM_STEPS_OF_WHOLE 2 /* of a whole unit, at most, where each is stored */
#define FM_SLOTS_OF_WORKER (-2) /* FmWorkItem::slot of a whole unit of several steps where these are stored */
#define FM_FEW_PARTS 3 /* of a unit, which cost less than more do (tile/last_adds.cuh) */
#define FM_MAX_PARTS 65535 /* of a unit, where num_splits fixes them; else there are no more than workers */

/* How a unit may be cut into parts. */
#define FM_SPLIT_AUTO 0      /* wherever the even shares of the workers fall */
#define FM_SPLIT_FIXED 1     /* into num_splits parts */
#define FM_SPLIT_INVARIANT 2 /* into parts that depend on the unit's own length only */
#define FM_SPLIT_REST 3      /* sparse only: not at all, but for equal lists that are left when all workers have as many */

/* What becomes of the steps of parts. */
#define FM_STEPS_NONE 0   /* there are none */
#define FM_STEPS_ADDED 1  /* one CTA adds up those of a part, several store those of a unit */
#define FM_STEPS_STORED 2 /* each is stored, and added up at the end of its unit */

/* Everything that decides a plan except the lengths. */
typedef struct FmPlanShape {
  int32_t batch;        /* requests */
  int32_t q_len;        /* query tokens of every request; 0 when ragged */
  int32_t group;        /* query heads per KV head */
  int32_t kv_heads;
  int32_t causal;       /* 0 or 1 */
  int32_t unit_rows;    /* rows of one unit: those of a CTA times the row blocks of a team */
  int32_t workers;      /* teams (CUDA) or worker slots (CPU) that share the work line */
  int32_t split_mode;   /* FM_SPLIT_* */
  int32_t num_splits;   /* FM_SPLIT_FIXED: parts of a unit; FM_SPLIT_INVARIANT: most parts of one; else 0 */
  int32_t max_seq_len;  /* longer lengths are clamped to this */
  int32_t fixed_cost;   /* what a unit costs before its first tile, in tiles */
  int32_t split_cost;   /* what being split costs, in tiles: below this gain units stay whole */
  int32_t min_part;     /* no part of a split unit is shorter than this, in tiles */
  int32_t ragged;       /* 1: qo_indptr says which query tokens belong to which request */
  int32_t q_tokens;     /* query tokens of all requests; ragged only, else 0 */
  int32_t whole_speed;  /* FM_SPLIT_AUTO: how much faster than its share of the GPU a worker can go, in 256ths */
  int32_t sparse_q_len; /* query tokens of every request, each with keys of its own (then q_len is 1); 0: not sparse */
  int32_t topk;         /* sparse only, else 0: entries of a token's list */
  int32_t extra_topk;   /* sparse only, else 0: entries of a token's list of the extra cache */
  int32_t own_parts_gain; /* FM_SPLIT_AUTO: how much less than split_cost being cut costs if each part has a worker of its own */
  int32_t part_cost;    /* FM_SPLIT_AUTO: what adding up each of a unit's equal parts costs, in 256ths of a tile */
  int32_t equal_speed;  /* FM_SPLIT_AUTO: whole_speed where units have as many tiles each, ... */
  int32_t equal_split_cost; /* ... and what being cut at even shares costs these, in tiles, if they are more than half the workers */
  int32_t part_tiles;   /* FM_SPLIT_INVARIANT only, else 0: most tiles of a part, unless that makes more than num_splits,
                           or, with steps, more than FM_FEW_PARTS of up to twice as many each */
  int32_t steps;        /* FM_STEPS_*; FM_SPLIT_INVARIANT and not ragged only, else 0 */
  int32_t few_steps;    /* where parts have them, else 0: units of no more are cut wherever their steps end, ... */
  int32_t few_parts;    /* ... into so many parts at most; of stored ones, or into more, of part_tiles each at most */
} FmPlanShape;

typedef struct FmPlanHeader {
  int32_t version;
  int32_t items;
  int32_t merges;
  int32_t slots; /* parts of all units that are cut */
  int32_t whole; /* FM_SPLIT_AUTO decided to cut nothing */
  int32_t share; /* target length of one worker's stretch of the work line */
  int32_t units; /* in use: ragged plans may need fewer than the layout has */
  int32_t unused;
  int32_t loading[2]; /* one word, while a launch keeps CTAs in step (tile/in_step.cuh); 0 between launches */
  int32_t reserved[6];
} FmPlanHeader;

/* One worker's visit to one unit: a request's row block times a range of KV tiles. */
typedef struct FmWorkItem {
  int32_t request;
  int32_t kv_head;
  int32_t row_begin;  /* first row of the unit; row = query token * group + head in group */
  int32_t q_begin;    /* ragged: first query token of the request along q's token axis; sparse: the token; else 0 */
  int32_t q_len;
  int32_t seq_len;    /* clamped to [0, max_seq_len]; sparse: where the keys end, those of the extra cache included */
  int32_t tile_begin;
  int32_t tile_end;   /* tile_begin == tile_end: the unit sees no key */
  int32_t slot;       /* where the partial result goes; -1 and FM_SLOTS_OF_WORKER: the unit is whole, write the output */
  int32_t merge;      /* the unit's FmMerge; -1: the unit is whole */
  int32_t main_len;   /* sparse only, else 0: keys before those of the extra cache, clamped to [0, topk] */
  int32_t parts;      /* of the unit, 1: it is whole; where they have steps, plus log2 of a step's tiles * 65536 */
} FmWorkItem;

/* A unit whose parts are combined: its partial results are slots first_slot .. first_slot + parts, or + slots. */
typedef struct FmMerge {
  int32_t request;
  int32_t kv_head;
  int32_t row_begin;
  int32_t q_begin;
  int32_t q_len;
  int32_t first_slot;
  int32_t parts;
  int32_t steps; /* of a unit that is cut wherever they end: how many of them it would have in one of its parts; else 1 or 0 */
  int32_t come;  /* of few parts, and the next: CTAs that have come, parts that are there (tile/last_adds.cuh); 0 between launches */
  int32_t there;
  int32_t turn;  /* a bit for each CTA's place in its team or cluster: which of its counts is in use, in turn from launch to launch */
  int32_t slots; /* where parts have steps: of the unit */
  int32_t arrived[FM_MAX_SPLITS][2]; /* by that place: two counts of parts that are there, of 16 bits; pieces that are given up, by bits */
} FmMerge;

typedef struct FmPlanLayout {
  int64_t worker_begin;
  int64_t merges;
  int64_t items;
  int64_t unit_start;
  int64_t unit_item;
  int64_t first_unit; /* empty unless ragged */
  int64_t bytes; /* of the whole buffer */
  int32_t units;      /* ragged: the most there can be */
  int32_t blocks;     /* units per (request, KV head); 0 when ragged */
  int32_t max_items;
  int32_t max_merges;
  int32_t max_slots;
  int32_t step_slots; /* the first of these: of units whose steps have slots */
} FmPlanLayout;
