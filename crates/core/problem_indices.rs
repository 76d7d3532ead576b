//! The problems of the operations on indices.

use crate::dtype::Device;
use crate::problem::Strided;
use crate::view::Stream;

/// Integers of either width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ints<const N: usize> {
    pub values: Strided<N>,
    /// int64, else int32.
    pub wide: bool,
}

/// Where the tokens of each request are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pages {
    pub block_table: Strided<1>,
    pub batch: i32,
    pub max_pages: i32,
    pub page_size: i32,
}

/// `to_physical`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ToPhysicalProblem {
    pub device: Device,
    /// `[b, s_q, topk]` positions.
    pub dims: [i32; 3],
    /// Whether `indices` has the dimension of query tokens.
    pub by_token: bool,
    pub indices: Ints<3>,
    pub pages: Pages,
    /// Strides of request and token.
    pub out: Strided<2>,
    #[allow(dead_code, reason = "the CPU has no streams")]
    pub stream: Stream,
}

/// `window_token_ids`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowProblem {
    pub device: Device,
    pub seq_lens: Strided<1>,
    pub query_lens: Strided<1>,
    pub pages: Pages,
    pub window: i32,
    /// Elements of `out`.
    pub tokens: i32,
    pub out: Strided<1>,
    pub offsets: Strided<1>,
    pub first_pos: Strided<1>,
    #[allow(dead_code, reason = "the CPU has no streams")]
    pub stream: Stream,
}

/// `combine_topk_window`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CombineProblem {
    pub device: Device,
    pub tokens: i32,
    pub batch: i32,
    /// The stride of tokens.
    pub topk_indices: Strided<1>,
    pub topk: i32,
    pub positions: Ints<1>,
    pub request_ids: Ints<1>,
    pub ratio: i32,
    pub window: i32,
    pub compressed_base: Ints<1>,
    pub window_base: Ints<1>,
    pub first_pos: Ints<1>,
    /// The stride of tokens.
    pub out: Strided<1>,
    /// Entries of a row of `out`.
    pub width: i32,
    pub lengths: Strided<1>,
    #[allow(dead_code, reason = "the CPU has no streams")]
    pub stream: Stream,
}
