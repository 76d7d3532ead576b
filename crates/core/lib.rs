//! Multi-head latent attention (MLA) over a paged KV cache, on NVIDIA Hopper GPUs and on CPUs.
//!
//! Every operation takes [`View`]s (pointer, type, device, shape, strides) of memory its caller owns, checks
//! them once, and runs on the device they are on. The way of a call is: arguments, checked views, problem,
//! [`Plan`], workspace, launch; the backends differ in the last step only.
//!
//! With `FERROMLA_CHECK=1` in the environment the values of index arrays are checked too.

mod attention;
mod cache;
mod check;
mod check_attention;
mod check_cache;
mod check_indices;
mod check_merge;
mod check_paged;
mod check_parts;
mod check_sparse;
mod cpu;
mod cpu_indices;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "cuda_absent.rs"]
mod cuda;
#[cfg(feature = "cudarc-safe")]
pub mod cudarc_safe;
mod decode;
mod dtype;
mod error;
mod indices;
mod lengths;
mod merge;
mod overlap;
#[cfg(feature = "cuda")]
#[allow(missing_docs, dead_code, clippy::undocumented_unsafe_blocks)] // generated
#[rustfmt::skip]
mod params;
mod plan;
mod plan_args;
mod plan_source;
mod prefill;
mod problem;
mod problem_indices;
mod quantize;
mod schedule;
mod sparse;
mod sparse_prefill;
mod support;
mod values;
mod values_indices;
mod view;

pub use attention::{AttentionArgs, AttentionOutputs, Checked, QScale, QoIndptr};
pub use cache::{
    AppendArgs, CacheShape, GatherArgs, GatherSource, append_kv, cache_d_qk, cache_shape, gather_kv,
};
pub use decode::{DecodeArgs, decode, decode_outputs};
pub use dtype::{DType, Device, KvFormat};
pub use error::{Error, Result};
pub use indices::{
    CombineArgs, ToPhysicalArgs, WindowArgs, combine_topk_window, to_physical, window_token_ids,
};
pub use lengths::num_tokens;
pub use merge::{MergeArgs, merge_states};
pub use plan::{Plan, workspace_bytes};
pub use plan_args::{PlanArgs, Queries};
pub use prefill::{PrefillArgs, prefill, prefill_outputs};
pub use quantize::{DequantizeArgs, QuantizeArgs, dequantize_kv, quantize_kv};
pub use schedule::WORKSPACE_ALIGNMENT;
pub use sparse::{CheckedSparse, ExtraKeys, SparseDecodeArgs, sparse_decode};
pub use sparse_prefill::{
    SparsePrefillArgs, SparsePrefillOutputs, sparse_prefill, sparse_prefill_outputs,
};
pub use support::{Support, SupportRow, support};
pub use view::{Dims, MAX_RANK, Parts, Stream, View};

/// The examples of the README run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
