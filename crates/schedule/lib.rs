//! The tile scheduler of `ferromla`: which worker does which part of which request.
//!
//! The requests of a batch, cut into *units* (one request, one KV head, one block of query rows), are laid
//! one after another on a *work line* whose length is their cost in KV tiles. Even shares of that line go to
//! the workers; a share that ends inside a unit splits it, and the partial results are merged afterwards.
//! Requests have as many query tokens each, or, in a *ragged* batch, as many as `qo_indptr` says. In a *sparse*
//! batch every query token has a list of keys of its own, and is a unit by itself.
//! The result is a *plan*: one buffer of `i32` words that the CPU backend and the CUDA kernels both read.
//! `kernels/plan_algorithm.h` is the same arithmetic for the device; both write the same bytes.
//!
//! Pure functions over integers: no CUDA, no threads, no allocation, no `unsafe`.
//!
//! ```
//! use ferromla_schedule::{Keys, PlanView, Problem, Queries, Split, Target, layout, plan_into};
//!
//! let shape = Problem {
//!     batch: 2,
//!     queries: Queries::Uniform { q_len: 1 },
//!     group: 128,
//!     kv_heads: 1,
//!     keys: Keys::Pages,
//!     causal: true,
//!     max_seq_len: 1 << 20,
//!     split: Split::Auto,
//!     target: Target::Gpu { sm_count: 132, clusters: [66, 30, 15, 7], memory: 4814 },
//! }
//! .shape()?;
//! let mut words = vec![0; layout(&shape)?.words()];
//! plan_into(&shape, [4096, 100].as_slice(), None, &mut words)?;
//!
//! let plan = PlanView::new(&shape, &words)?;
//! for worker in 0..plan.workers() {
//!     for item in plan.worker(worker) {
//!         assert!(item.tile_begin <= item.tile_end);
//!     }
//! }
//! # Ok::<(), ferromla_schedule::PlanError>(())
//! ```
#![forbid(unsafe_code)]

mod algorithm;
mod choose;
mod common_parts;
mod dealt;
mod equal_parts;
mod error;
mod fixed_parts;
mod launch;
mod layout;
mod lengths;
mod longest_first;
mod plan;
#[allow(missing_docs)]
#[rustfmt::skip]
pub mod plan_layout;
mod problem;
mod rest;
mod turns;
mod view;

pub use choose::{Choice, MAX_CLUSTER, choose};
pub use error::PlanError;
pub use launch::{PlannerKernel, PlannerLaunch};
pub use layout::layout;
pub use lengths::{ListLens, Strided};
pub use plan::{plan_into, plan_sparse_into};
pub use plan_layout::{
    FmMerge as Merge, FmPlanHeader as PlanHeader, FmPlanLayout as PlanLayout,
    FmPlanShape as PlanShape, FmWorkItem as WorkItem,
};
pub use problem::{Keys, Problem, Queries, Split, Target};
pub use view::PlanView;
