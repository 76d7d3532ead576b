//! `to_physical`, `window_token_ids` and `combine_topk_window`.

use ferromla::{CombineArgs, DType, ToPhysicalArgs, WindowArgs};
use pyo3::prelude::*;

use crate::arguments;
use crate::errors;
use crate::framework;
use crate::tensor;

type Two<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);
type Three<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Positions of tokens in their request to places in the cache.
///
/// Args:
///     indices: `[b, s_q, topk]` or `[b, topk]` int32 or int64, positions in request `b`.
///     block_table: `[b, max_pages]` int32.
///     page_size: tokens of a page.
///     out: int32 of the shape of `indices` to write to.
///
/// Returns:
///     `page * page_size + offset` of each position, int32; -1 for one that is negative, past the table, or in a
///     page below 0.
///
/// Raises:
///     InvalidArgument: names the argument, its value and what is allowed.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> block_table = np.array([[7, 3]], np.int32)
///     >>> ferromla.to_physical(np.array([[0, 70, -1, 999]]), block_table, 64).tolist()
///     [[448, 198, -1, -1]]
#[pyfunction]
#[pyo3(signature = (indices, block_table, page_size, *, out=None))]
pub fn to_physical<'py>(
    py: Python<'py>,
    indices: &Bound<'py, PyAny>,
    block_table: &Bound<'py, PyAny>,
    page_size: i64,
    out: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let indices = tensor::read(indices, "indices")?;
    let block_table = tensor::read(block_table, "block_table")?;
    let out = arguments::output(out, "out", || {
        framework::empty(&indices, "out", indices.view.shape(), DType::I32)
    })?;
    let args = ToPhysicalArgs {
        indices: indices.view,
        block_table: block_table.view,
        page_size,
        out: out.view,
        stream: framework::current_stream(&indices)?,
    };
    // SAFETY: every view borrows a tensor that lives to the end of this function; on CUDA the framework's allocator
    // orders reuse after the work queued on its stream.
    arguments::run(py, indices.view.device(), || unsafe {
        ferromla::to_physical(&args)
    })?;
    Ok(out.object)
}

/// The tokens that the windows of each request's queries reach, for a sparse prefill with a sliding window.
///
/// Those of a request are at the positions `max(0, seq_len - query_len - window + 1) .. seq_len - 1`; all requests
/// stand one after another.
///
/// Args:
///     seq_lens: `[b]` int32, tokens in the cache per request, those of the queries included; clamped to the table.
///     query_lens: `[b]` int32, query tokens per request; clamped to `seq_lens`.
///     block_table: `[b, max_pages]` int32.
///     page_size: tokens of a page.
///     window: tokens that a query sees, itself included.
///     num_tokens: elements of the result; None for as many as there are tokens, where the host can read the lengths.
///         Elements past the last token are -1; tokens past the last element are dropped.
///     out, offsets, first_pos: `[num_tokens]` int32, `[b + 1]` int64 and `[b]` int32 to write to.
///
/// Returns:
///     `(ids, offsets, first_pos)`: the place of each token in the cache (`gather_kv` takes them as `ids`), -1 for one
///     of no page; where each request begins in `ids`; and the position of its first token.
///
/// Raises:
///     InvalidArgument: names the argument, its value and what is allowed. For lengths on a CUDA device one of
///         `num_tokens` and `out` is needed: reading the lengths would wait for the device.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> lens, queries = np.array([5, 2], np.int32), np.array([2, 1], np.int32)
///     >>> block_table = np.array([[3, 1], [0, 9]], np.int32)
///     >>> ids, offsets, first_pos = ferromla.window_token_ids(lens, queries, block_table, page_size=4, window=2)
///     >>> ids.tolist(), offsets.tolist(), first_pos.tolist()
///     ([14, 15, 4, 0, 1], [0, 3, 5], [2, 0])
#[pyfunction]
#[pyo3(signature = (seq_lens, query_lens, block_table, *, page_size, window, num_tokens=None, out=None, offsets=None,
    first_pos=None))]
// The public signature; the arguments become one struct at once.
#[allow(clippy::too_many_arguments)]
pub fn window_token_ids<'py>(
    py: Python<'py>,
    seq_lens: &Bound<'py, PyAny>,
    query_lens: &Bound<'py, PyAny>,
    block_table: &Bound<'py, PyAny>,
    page_size: i64,
    window: i64,
    num_tokens: Option<i64>,
    out: Option<&Bound<'py, PyAny>>,
    offsets: Option<&Bound<'py, PyAny>>,
    first_pos: Option<&Bound<'py, PyAny>>,
) -> PyResult<Three<'py>> {
    let lens = tensor::read(seq_lens, "seq_lens")?;
    let queries = tensor::read(query_lens, "query_lens")?;
    let block_table = tensor::read(block_table, "block_table")?;
    let batch = lens.view.shape().first().copied().unwrap_or(0);
    let num_tokens = arguments::num_tokens(num_tokens)?;
    let i32s = |argument, count: i64| framework::empty(&lens, argument, &[count], DType::I32);
    let offsets = arguments::output(offsets, "offsets", || {
        framework::empty(&lens, "offsets", &[batch + 1], DType::I64)
    })?;
    let first_pos = arguments::output(first_pos, "first_pos", || i32s("first_pos", batch))?;
    let args = |out| -> PyResult<WindowArgs> {
        Ok(WindowArgs {
            seq_lens: lens.view,
            query_lens: queries.view,
            block_table: block_table.view,
            page_size,
            window,
            out,
            offsets: offsets.view,
            first_pos: first_pos.view,
            stream: framework::current_stream(&lens)?,
        })
    };
    let run = |out| -> PyResult<()> {
        let args = args(out)?;
        // SAFETY: as in `to_physical`.
        arguments::run(py, lens.view.device(), || unsafe {
            ferromla::window_token_ids(&args)
        })
    };
    let out = arguments::output(out, "out", || match num_tokens {
        Some(count) => i32s("out", count),
        None => {
            let none = i32s("out", 0)?.view;
            i32s("out", arguments::counted(&lens, &offsets, || run(none))?)
        }
    })?;
    run(out.view)?;
    Ok((out.object, offsets.object, first_pos.object))
}

/// Lists of keys for a sparse prefill: chosen compressed entries, then the tokens of a window.
///
/// The list of a query token at position `pos` of request `r` has the first `min((pos + 1) // ratio, topk)` entries of
/// its row of `topk_indices`, each `+ compressed_base[r]`, then for the `w = min(pos + 1, window)` tokens of its window
/// `window_base[r] + (pos - w + 1 - first_pos[r]) + j`, then -1.
///
/// Args:
///     topk_indices: `[t, topk]` int32, counted from the request's first entry; a negative one stays -1.
///     positions, request_ids: `[t]` int32 or int64. A token of no request, or at a negative position, has no key.
///     ratio: tokens that one compressed entry stands for.
///     window: tokens that a query sees, itself included.
///     compressed_base, window_base, first_pos: `[b]` int32 or int64: where each request's compressed entries and window
///         tokens begin, and the position of the first of those, as `window_token_ids` gives it.
///     pad_to: the width of the result is a multiple of this.
///     out, lengths: `[t, width]` int32, `width` at least `topk + window`, and `[t]` int32 to write to.
///
/// Returns:
///     `(indices, lengths)`: `[t, width]` int32 and the number of entries in use `[t]` int32, as `sparse_prefill` takes
///     them for `indices` and `topk_lengths`.
///
/// Raises:
///     InvalidArgument: names the argument, its value and what is allowed.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> def of(*numbers): return np.array(numbers, np.int32)
///     >>> indices, lengths = ferromla.combine_topk_window(
///     ...     of([4, 0, 2]), of(9), of(0), ratio=4, window=3, compressed_base=of(100), window_base=of(1000),
///     ...     first_pos=of(7), pad_to=8)
///     >>> indices.tolist(), lengths.tolist()
///     ([[104, 100, 1000, 1001, 1002, -1, -1, -1]], [5])
#[pyfunction]
#[pyo3(signature = (topk_indices, positions, request_ids, *, ratio, window, compressed_base, window_base, first_pos,
    pad_to=128, out=None, lengths=None))]
// The public signature; the arguments become one struct at once.
#[allow(clippy::too_many_arguments)]
pub fn combine_topk_window<'py>(
    py: Python<'py>,
    topk_indices: &Bound<'py, PyAny>,
    positions: &Bound<'py, PyAny>,
    request_ids: &Bound<'py, PyAny>,
    ratio: i64,
    window: i64,
    compressed_base: &Bound<'py, PyAny>,
    window_base: &Bound<'py, PyAny>,
    first_pos: &Bound<'py, PyAny>,
    pad_to: i64,
    out: Option<&Bound<'py, PyAny>>,
    lengths: Option<&Bound<'py, PyAny>>,
) -> PyResult<Two<'py>> {
    let topk = tensor::read(topk_indices, "topk_indices")?;
    let positions = tensor::read(positions, "positions")?;
    let request_ids = tensor::read(request_ids, "request_ids")?;
    let compressed_base = tensor::read(compressed_base, "compressed_base")?;
    let window_base = tensor::read(window_base, "window_base")?;
    let first_pos = tensor::read(first_pos, "first_pos")?;
    let [tokens, entries] = match topk.view.shape()[..] {
        [tokens, entries] => [tokens, entries],
        _ => [0, 0], // refused by its rank
    };
    let out = arguments::output(out, "out", || {
        let shape = [tokens, width(entries, window, pad_to)?];
        framework::empty(&topk, "out", &shape, DType::I32)
    })?;
    let lengths = arguments::output(lengths, "lengths", || {
        framework::empty(&topk, "lengths", &[tokens], DType::I32)
    })?;
    let args = CombineArgs {
        topk_indices: topk.view,
        positions: positions.view,
        request_ids: request_ids.view,
        ratio,
        window,
        compressed_base: compressed_base.view,
        window_base: window_base.view,
        first_pos: first_pos.view,
        out: out.view,
        lengths: lengths.view,
        stream: framework::current_stream(&topk)?,
    };
    // SAFETY: as in `to_physical`.
    arguments::run(py, topk.view.device(), || unsafe {
        ferromla::combine_topk_window(&args)
    })?;
    Ok((out.object, lengths.object))
}

/// `topk + window`, rounded up.
fn width(topk: i64, window: i64, pad_to: i64) -> PyResult<i64> {
    for (name, value) in [("pad_to", pad_to), ("window", window)] {
        if !(1..=i64::from(i32::MAX)).contains(&value) {
            let rule = format!("must be between 1 and {}", i32::MAX);
            return Err(errors::invalid(name, value, rule));
        }
    }
    let rest = (topk + window) % pad_to;
    Ok(topk + window + if rest == 0 { 0 } else { pad_to - rest })
}
