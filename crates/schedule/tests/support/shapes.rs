//! A shape of requests of one query token, and a ragged one.

use ferromla_schedule::PlanShape;
use ferromla_schedule::plan_layout::FM_SPLIT_AUTO;

pub const SHAPE: PlanShape = PlanShape {
    batch: 10,
    q_len: 1,
    group: 128,
    kv_heads: 1,
    causal: 1,
    unit_rows: 64,
    workers: 4,
    split_mode: FM_SPLIT_AUTO,
    num_splits: 0,
    max_seq_len: 64 * 64 * 3,
    fixed_cost: 2,
    split_cost: 6,
    min_part: 1,
    ragged: 0,
    q_tokens: 0,
    whole_speed: 256,
    sparse_q_len: 0,
    topk: 0,
    extra_topk: 0,
    own_parts_gain: 0,
    part_cost: 0,
    equal_speed: 256,
    equal_split_cost: 6,
    part_tiles: 0,
    steps: 0,
    few_steps: 0,
    few_parts: 0,
};

pub const RAGGED: PlanShape = PlanShape {
    q_len: 0,
    ragged: 1,
    q_tokens: 30,
    ..SHAPE
};
