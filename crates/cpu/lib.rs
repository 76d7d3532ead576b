//! The CPU backend of `ferromla`: multi-head latent attention over a paged cache in host memory.
//!
//! The operations are those of the GPU and run the same schedule: a plan's workers become parallel
//! tasks on rayon's global pool, its items are computed tile by tile, split units leave partial results
//! that are combined in part order. Scores, softmax and sums are float32.
//!
//! This is the layer below `ferromla`, which checks arguments: here shapes are taken as right, and every
//! operation is `unsafe` with a contract that says what right means. Values of index arrays (page ids,
//! slots, token ids) need not be trusted: whatever lies outside the cache is treated as absent.

mod append;
mod combine;
mod decode;
mod element;
mod exp2;
mod gather;
mod indices;
mod keys;
mod matrix;
mod merge;
mod output;
mod quantize;
mod rows;
mod softmax;
mod strided;
mod tile;
mod unit;

pub use append::{AppendCpu, append_kv};
pub use decode::{DecodeCpu, QueryScale, decode};
pub use element::Format;
pub use gather::{GatherCpu, GatherSource, gather_kv, gather_offsets};
pub use indices::{
    CombineCpu, Ints, PagesCpu, ToPhysicalCpu, WindowCpu, combine_topk_window, to_physical,
    window_token_ids,
};
pub use keys::{ExtraCpu, KeysCpu};
pub use merge::{MergeCpu, merge_states};
pub use quantize::{DequantizeCpu, OutRows, QuantizeCpu, dequantize_kv, quantize_kv};
pub use rows::{CacheCpu, QuantisedCpu, Rows};
pub use strided::{Parts, Strided};

/// Width of the latent part of a row, and of an output row.
pub const NOPE_DIM: usize = 512;
/// Width of the rotary part of a row.
pub const ROPE_DIM: usize = 64;

/// Tokens of one KV tile.
const TILE_TOKENS: usize = ferromla_schedule::plan_layout::FM_TILE_TOKENS as usize;
