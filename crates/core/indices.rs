//! Operations on indices: positions in a request to places in a cache, and the lists of keys of a sparse prefill
//! whose tokens see chosen compressed entries and a window.

use crate::check_indices;
use crate::dtype::Device;
use crate::error::Result;
use crate::view::{Stream, View};
use crate::{cpu, cuda, values, values_indices};

/// The arguments of [`to_physical`].
#[derive(Debug, Clone)]
pub struct ToPhysicalArgs {
    /// `[b, s_q, topk]` or `[b, topk]` int32 or int64: positions of tokens in their request.
    pub indices: View,
    /// `[b, max_pages]` int32.
    pub block_table: View,
    /// Tokens of a page.
    pub page_size: i64,
    /// Of the shape of `indices`, int32.
    pub out: View,
    /// Where to launch.
    pub stream: Stream,
}

/// Positions of tokens in their request to places in the cache, `page * page_size + offset`. What is negative, past
/// the table or in a page below 0 becomes -1.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode).
///
/// ```
/// use ferromla::{DType, Device, Stream, ToPhysicalArgs, View, to_physical};
/// let (positions, table, mut places) = ([0i32, 70, -1, 999], [7i32, 3], [0i32; 4]);
/// // SAFETY: the views describe the arrays above, which outlive the call.
/// unsafe {
///     let view = |ptr, shape: &[i64]| View::contiguous(ptr, DType::I32, Device::Cpu, shape);
///     to_physical(&ToPhysicalArgs {
///         indices: view(positions.as_ptr().cast(), &[1, 4]),
///         block_table: view(table.as_ptr().cast(), &[1, 2]),
///         page_size: 64,
///         out: view(places.as_mut_ptr().cast(), &[1, 4]),
///         stream: Stream::default(),
///     })?;
/// }
/// assert_eq!(places, [7 * 64, 3 * 64 + 6, -1, -1]);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn to_physical(args: &ToPhysicalArgs) -> Result<()> {
    let problem = check_indices::to_physical(args)?;
    if values::checked() {
        // SAFETY: the index arrays are live (the caller's promise) and have been checked.
        unsafe { values_indices::to_physical(&problem)? };
    }
    if problem.dims.contains(&0) {
        return Ok(());
    }
    match problem.device {
        // SAFETY: the caller's promise, and the problem has been checked.
        Device::Cpu => unsafe { cpu::to_physical(&problem) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::to_physical(ordinal, &problem) },
    }
}

/// The arguments of [`window_token_ids`].
#[derive(Debug, Clone)]
pub struct WindowArgs {
    /// `[b]` int32: tokens in the cache, those of the queries included; clamped to the table.
    pub seq_lens: View,
    /// `[b]` int32: query tokens; clamped to `seq_lens`.
    pub query_lens: View,
    /// `[b, max_pages]` int32.
    pub block_table: View,
    /// Tokens of a page.
    pub page_size: i64,
    /// Tokens that a query sees, itself included.
    pub window: i64,
    /// `[n]` int32: places in the cache, -1 for a token of no page. Elements past the last token become -1; tokens
    /// past the last element are dropped.
    pub out: View,
    /// `[b + 1]` int64, written: those of request `r` are `offsets[r] .. offsets[r + 1]` of `out`.
    pub offsets: View,
    /// `[b]` int32, written: the position in its request of each request's first one.
    pub first_pos: View,
    /// Where to launch.
    pub stream: Stream,
}

/// The tokens that the windows of each request's queries reach, one request after another: those at the positions
/// `max(0, seq_len - query_len - window + 1) .. seq_len`.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode).
///
/// ```
/// use ferromla::{DType, Device, Stream, View, WindowArgs, window_token_ids};
/// let (lens, queries, table) = ([5i32, 2], [2i32, 1], [3i32, 1, 0, 9]);
/// let (mut ids, mut offsets, mut first) = ([0i32; 6], [0i64; 3], [0i32; 2]);
/// // SAFETY: the views describe the arrays above, which outlive the call.
/// unsafe {
///     let view = |ptr, dtype, shape: &[i64]| View::contiguous(ptr, dtype, Device::Cpu, shape);
///     window_token_ids(&WindowArgs {
///         seq_lens: view(lens.as_ptr().cast(), DType::I32, &[2]),
///         query_lens: view(queries.as_ptr().cast(), DType::I32, &[2]),
///         block_table: view(table.as_ptr().cast(), DType::I32, &[2, 2]),
///         page_size: 4,
///         window: 2,
///         out: view(ids.as_mut_ptr().cast(), DType::I32, &[6]),
///         offsets: view(offsets.as_mut_ptr().cast(), DType::I64, &[3]),
///         first_pos: view(first.as_mut_ptr().cast(), DType::I32, &[2]),
///         stream: Stream::default(),
///     })?;
/// }
/// assert_eq!((offsets, first), ([0, 3, 5], [2, 0]));
/// assert_eq!(ids, [3 * 4 + 2, 3 * 4 + 3, 4, 0, 1, -1]);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn window_token_ids(args: &WindowArgs) -> Result<()> {
    let problem = check_indices::window(args)?;
    if values::checked() {
        // SAFETY: the index arrays are live (the caller's promise) and have been checked.
        unsafe { values_indices::window(&problem)? };
    }
    match problem.device {
        // SAFETY: the caller's promise, and the problem has been checked.
        Device::Cpu => unsafe { cpu::window_token_ids(&problem) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::window_token_ids(ordinal, &problem) },
    }
}

/// The arguments of [`combine_topk_window`]. Arrays of int32 or int64 may be of either.
#[derive(Debug, Clone)]
pub struct CombineArgs {
    /// `[t, topk]` int32: chosen compressed entries, counted from the request's first; negative ones stay absent.
    pub topk_indices: View,
    /// `[t]` int32 or int64: each query token's position in its request.
    pub positions: View,
    /// `[t]` int32 or int64: each query token's request; one that is none leaves the list empty.
    pub request_ids: View,
    /// Tokens that one compressed entry stands for.
    pub ratio: i64,
    /// Tokens that a query sees, itself included.
    pub window: i64,
    /// `[b]` int32 or int64: where each request's compressed entries begin.
    pub compressed_base: View,
    /// `[b]` int32 or int64: where the tokens of each request's windows begin.
    pub window_base: View,
    /// `[b]` int32 or int64: the position of the first of those, as [`window_token_ids`] gives it.
    pub first_pos: View,
    /// `[t, width]` int32, `width` at least `topk + window`.
    pub out: View,
    /// `[t]` int32, written: the entries in use of each list.
    pub lengths: View,
    /// Where to launch.
    pub stream: Stream,
}

/// One list of keys per query token, for [`sparse_prefill`](crate::sparse_prefill): of a token at `pos`, the first
/// `min((pos + 1) / ratio, topk)` chosen entries, then the `w = min(pos + 1, window)` tokens of its window,
/// `window_base + pos - w + 1 - first_pos ..`, then -1.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode).
///
/// ```
/// use ferromla::{CombineArgs, DType, Device, Stream, View, combine_topk_window};
/// let (topk, position, request) = ([4i32, 0, 2], [9i32], [0i64]);
/// let (compressed, window, first) = ([100i32], [1000i32], [7i32]);
/// let (mut lists, mut lengths) = ([0i32; 8], [0i32]);
/// // SAFETY: the views describe the arrays above, which outlive the call.
/// unsafe {
///     let view = |ptr, dtype, shape: &[i64]| View::contiguous(ptr, dtype, Device::Cpu, shape);
///     combine_topk_window(&CombineArgs {
///         topk_indices: view(topk.as_ptr().cast(), DType::I32, &[1, 3]),
///         positions: view(position.as_ptr().cast(), DType::I32, &[1]),
///         request_ids: view(request.as_ptr().cast(), DType::I64, &[1]),
///         ratio: 4,
///         window: 3,
///         compressed_base: view(compressed.as_ptr().cast(), DType::I32, &[1]),
///         window_base: view(window.as_ptr().cast(), DType::I32, &[1]),
///         first_pos: view(first.as_ptr().cast(), DType::I32, &[1]),
///         out: view(lists.as_mut_ptr().cast(), DType::I32, &[1, 8]),
///         lengths: view(lengths.as_mut_ptr().cast(), DType::I32, &[1]),
///         stream: Stream::default(),
///     })?;
/// }
/// assert_eq!((lists, lengths), ([104, 100, 1000, 1001, 1002, -1, -1, -1], [5]));
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn combine_topk_window(args: &CombineArgs) -> Result<()> {
    let problem = check_indices::combine(args)?;
    if values::checked() {
        // SAFETY: the index arrays are live (the caller's promise) and have been checked.
        unsafe { values_indices::combine(&problem)? };
    }
    if problem.tokens == 0 {
        return Ok(());
    }
    match problem.device {
        // SAFETY: the caller's promise, and the problem has been checked.
        Device::Cpu => unsafe { cpu::combine_topk_window(&problem) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::combine_topk_window(ordinal, &problem) },
    }
}
