//! `sparse_decode` and `sparse_prefill`.

use ferromla::{
    CheckedSparse, DType, ExtraKeys, SparseDecodeArgs, SparsePrefillArgs, decode_outputs,
    sparse_prefill_outputs,
};
use pyo3::prelude::*;

use crate::arguments::{self, Number, Pair};
use crate::errors;
use crate::framework;
use crate::plan::Plan;
use crate::tensor::{self, Tensor};

/// Attention of a few new query tokens per request over keys of their own choice in a paged latent KV cache.
///
/// Symbols as in `decode`. Each query token lists its keys by their place in the cache; there is no block table.
///
/// Args:
///     q: `[b, s_q, h, d_qk]` bfloat16 or float16, or the pair `([b, s_q, h, 512], [b, s_q, h, 64])`.
///     kv_cache: `[n, P, d_qk]` or `[n, P, 1, d_qk]` in q's dtype, or the pair of its parts; quantised
///         `[n, P, bytes]` or `[n, P, 1, bytes]` uint8, int8 or float8_e4m3fn, for bfloat16 queries.
///     indices: `[b, s_q, topk]` int32, `page * P + offset` each. An entry outside the cache (-1, say) is no
///         key, wherever it stands; one that stands twice counts twice.
///     topk_lengths: `[b]` or `[b, s_q]` int32: only so many leading entries of a list count, clamped to
///         `[0, topk]`; None for all. What is behind them takes no time; entries of -1 take as much as others.
///     attn_sink: `[h]` float32: `out` is multiplied by `exp(lse) / (exp(lse) + exp(sink))`.
///     extra_kv_cache, extra_indices, extra_topk_lengths: keys from a second cache, with a page size of its
///         own, that join the same softmax: `[b, s_q, extra_topk]` indices, and lengths as `topk_lengths`.
///     kv_format: `"bf16"`, `"fp16"`, `"fp8"`, `"fp8_v32"`, `"fp8_v4"`, `"fp8_v41"`, `"fp8_v41_split"`; None for
///         what the cache's dtype says.
///     extra_kv_format: of the extra cache, one of these or `"fp4_v41"`; None for `kv_format`.
///     kv_scale: what the numbers of an `"fp8"` cache are multiplied by, those of an extra one too, which is `"fp8"` then;
///         1 when None.
///     softmax_scale: factor of the scores, above 0; `d_qk ** -0.5` when None.
///     plan: a plan made by `Plan.sparse` for these shapes; without one the call plans for itself. The lengths
///         that it was made or last updated with count, not those of this call.
///     num_splits, batch_invariant: as in `decode`, for each query token.
///     out, lse: `[b, s_q, h, 512]` in q's dtype and `[b, s_q, h]` float32 to write to.
///     workspace, empty_lse: as in `decode`.
///
/// Returns:
///     `(out, lse)` as `decode`. A query without a key has `out = 0` and `lse = -inf`.
///
/// Raises:
///     As `decode`.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> q = np.zeros((1, 1, 16, 576), np.float16)
///     >>> kv_cache = np.ones((4, 64, 576), np.float16)
///     >>> indices = np.array([[[3, 200, -1, 200]]], np.int32)
///     >>> out, lse = ferromla.sparse_decode(q, kv_cache, indices)
///     >>> out.shape, round(float(np.exp(lse[0, 0, 0])))
///     ((1, 1, 16, 512), 3)
#[pyfunction]
#[pyo3(signature = (q, kv_cache, indices, *, topk_lengths=None, attn_sink=None, extra_kv_cache=None,
    extra_indices=None, extra_topk_lengths=None, kv_format=None, extra_kv_format=None, kv_scale=None, softmax_scale=None,
    plan=None, num_splits=None, batch_invariant=false, out=None, lse=None, workspace=None, empty_lse=None))]
// The public signature; the arguments become one struct at once.
#[allow(clippy::too_many_arguments)]
pub fn sparse_decode<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    kv_cache: &Bound<'py, PyAny>,
    indices: &Bound<'py, PyAny>,
    topk_lengths: Option<&Bound<'py, PyAny>>,
    attn_sink: Option<&Bound<'py, PyAny>>,
    extra_kv_cache: Option<&Bound<'py, PyAny>>,
    extra_indices: Option<&Bound<'py, PyAny>>,
    extra_topk_lengths: Option<&Bound<'py, PyAny>>,
    kv_format: Option<&str>,
    extra_kv_format: Option<&str>,
    kv_scale: Option<Number>,
    softmax_scale: Option<Number>,
    plan: Option<&Bound<'py, Plan>>,
    num_splits: Option<i64>,
    batch_invariant: bool,
    out: Option<&Bound<'py, PyAny>>,
    lse: Option<&Bound<'py, PyAny>>,
    workspace: Option<&Bound<'py, PyAny>>,
    empty_lse: Option<Number>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let q = Pair::read(q, "q", false)?;
    let kv_cache = Pair::read(kv_cache, "kv_cache", false)?;
    let indices = tensor::read(indices, "indices")?;
    let topk_lengths = tensor::read_optional(topk_lengths, "topk_lengths")?;
    let attn_sink = tensor::read_optional(attn_sink, "attn_sink")?;
    let extra = Extra::read(extra_kv_cache, extra_indices, extra_topk_lengths)?;
    let extra_format = arguments::kv_format("extra_kv_format", extra_kv_format)?;
    if let (Some(format), None) = (extra_format, &extra) {
        let rule = "must be None without extra_kv_cache";
        return Err(errors::invalid("extra_kv_format", format, rule));
    }
    let shapes = || decode_outputs(&q.parts()).map_err(errors::to_python);
    let out = arguments::output(out, "out", || {
        let shapes = shapes()?;
        framework::empty(&q.first, "out", &shapes.out, shapes.dtype)
    })?;
    let lse = arguments::output(lse, "lse", || {
        framework::empty(&q.first, "lse", &shapes()?.lse, DType::F32)
    })?;
    let args = SparseDecodeArgs {
        topk_lengths: topk_lengths.as_ref().map(|lens| lens.view),
        extra: extra.as_ref().map(|extra| ExtraKeys {
            kv_cache: extra.kv_cache.parts(),
            indices: extra.indices.view,
            topk_lengths: extra.topk_lengths.as_ref().map(|lens| lens.view),
            kv_format: extra_format,
        }),
        softmax_scale: softmax_scale.map(Number::get),
        kv_format: arguments::kv_format("kv_format", kv_format)?,
        kv_scale: kv_scale.map(Number::get),
        attn_sink: attn_sink.as_ref().map(|sink| sink.view),
        plan: plan.map(|plan| plan.get().inner()),
        num_splits: arguments::num_splits(num_splits)?,
        batch_invariant,
        empty_lse: arguments::empty_lse(empty_lse),
        stream: framework::current_stream(&q.first)?,
        ..SparseDecodeArgs::new(
            q.parts(),
            kv_cache.parts(),
            indices.view,
            out.view,
            lse.view,
        )
    };
    let checked = args.check().map_err(errors::to_python)?;
    // SAFETY: every view borrows a tensor that lives to the end of this function.
    unsafe { run(py, &checked, &q.first, workspace)? };
    Ok((out.object, lse.object))
}

/// Attention of many query tokens, each over keys of its own choice.
///
/// Symbols: `t` query tokens, `h` query heads, `d_qk` 576 (512 latent, then 64 rotary) or 512.
///
/// Args:
///     q: `[t, h, d_qk]` bfloat16 or float16, or the pair `([t, h, 512], [t, h, 64])`.
///     kv: `[n_tokens, d_qk]` or `[n_tokens, 1, d_qk]` in q's dtype, a paged cache `[n, P, d_qk]` or
///         `[n, P, 1, d_qk]`, or the pair of the parts of either; a quantised cache `[n, P, bytes]` or
///         `[n, P, 1, bytes]` uint8, int8 or float8_e4m3fn, for bfloat16 queries.
///     indices: `[t, topk]` or `[t, 1, topk]` int32: rows of `kv`, or `page * P + offset`. An entry outside (-1,
///         say) is no key, wherever it stands; one that stands twice counts twice.
///     topk_lengths: `[t]` int32: only so many leading entries of a list count, clamped to `[0, topk]`; None for
///         all. What is behind them takes no time; entries of -1 take as much as others.
///     attn_sink: `[h]` float32: `out` is multiplied by `exp(lse) / (exp(lse) + exp(sink))`.
///     softmax_scale: factor of the scores, above 0; `d_qk ** -0.5` when None.
///     kv_format, kv_scale: as in `sparse_decode`; None for what the dtype of `kv` says, and for 1.
///     batch_invariant: a token's result depends on nothing else in the call, bit for bit: no list is split. Else, on CUDA, the lists of
///         few tokens are, of many those that are left when all SMs have as many.
///     plan: a `Plan.sparse_prefill` for these shapes; the lengths it was made or updated with count then.
///     out, max_logits, lse: `[t, h, 512]` in q's dtype, `[t, h]` and `[t, h]` float32 to write to.
///     workspace: uint8; without one, or a plan, the call allocates it through the caller's framework. What it needs does
///         not depend on the number of cached tokens; where lists are split it is up to 35 MB, and few tokens may need more than many.
///     empty_lse: as in `decode`.
///
/// Returns:
///     `(out, max_logits, lse)`: `out [t, h, 512]` in q's dtype, the largest scaled score of each row
///     `max_logits [t, h]` float32, and the natural logarithm `lse [t, h]` float32 of the softmax denominators.
///     A query without a key has `out = 0` and -inf twice.
///
/// Raises:
///     As `decode`.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> q, kv = np.ones((2, 16, 512), np.float16), np.ones((100, 512), np.float16)
///     >>> indices = np.array([[3, 99, 100], [-1, -1, -1]], np.int32)
///     >>> out, max_logits, lse = ferromla.sparse_prefill(q, kv, indices, softmax_scale=1 / 64)
///     >>> max_logits[:, 0].tolist(), lse[:, 0].round(4).tolist()
///     ([8.0, -inf], [8.693099975585938, -inf])
#[pyfunction]
#[pyo3(signature = (q, kv, indices, *, topk_lengths=None, attn_sink=None, softmax_scale=None, kv_format=None, kv_scale=None,
    plan=None, batch_invariant=false, out=None, max_logits=None, lse=None, workspace=None, empty_lse=None))]
// The public signature; the arguments become one struct at once.
#[allow(clippy::too_many_arguments)]
pub fn sparse_prefill<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    kv: &Bound<'py, PyAny>,
    indices: &Bound<'py, PyAny>,
    topk_lengths: Option<&Bound<'py, PyAny>>,
    attn_sink: Option<&Bound<'py, PyAny>>,
    softmax_scale: Option<Number>,
    kv_format: Option<&str>,
    kv_scale: Option<Number>,
    plan: Option<&Bound<'py, Plan>>,
    batch_invariant: bool,
    out: Option<&Bound<'py, PyAny>>,
    max_logits: Option<&Bound<'py, PyAny>>,
    lse: Option<&Bound<'py, PyAny>>,
    workspace: Option<&Bound<'py, PyAny>>,
    empty_lse: Option<Number>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let q = Pair::read(q, "q", false)?;
    let kv = Pair::read(kv, "kv", false)?;
    let indices = tensor::read(indices, "indices")?;
    let topk_lengths = tensor::read_optional(topk_lengths, "topk_lengths")?;
    let attn_sink = tensor::read_optional(attn_sink, "attn_sink")?;
    let shapes = || sparse_prefill_outputs(&q.parts()).map_err(errors::to_python);
    let out = arguments::output(out, "out", || {
        let shapes = shapes()?;
        framework::empty(&q.first, "out", &shapes.out, shapes.dtype)
    })?;
    let rows = |given, argument| {
        arguments::output(given, argument, || {
            framework::empty(&q.first, argument, &shapes()?.rows, DType::F32)
        })
    };
    let (max_logits, lse) = (rows(max_logits, "max_logits")?, rows(lse, "lse")?);
    let args = SparsePrefillArgs {
        topk_lengths: topk_lengths.as_ref().map(|lens| lens.view),
        softmax_scale: softmax_scale.map(Number::get),
        kv_format: arguments::kv_format("kv_format", kv_format)?,
        kv_scale: kv_scale.map(Number::get),
        attn_sink: attn_sink.as_ref().map(|sink| sink.view),
        plan: plan.map(|plan| plan.get().inner()),
        batch_invariant,
        empty_lse: arguments::empty_lse(empty_lse),
        stream: framework::current_stream(&q.first)?,
        ..SparsePrefillArgs::new(
            q.parts(),
            kv.parts(),
            indices.view,
            out.view,
            max_logits.view,
            lse.view,
        )
    };
    let checked = args.check().map_err(errors::to_python)?;
    // SAFETY: every view borrows a tensor that lives to the end of this function.
    unsafe { run(py, &checked, &q.first, workspace)? };
    Ok((out.object, max_logits.object, lse.object))
}

/// The tensors of the extra cache.
struct Extra<'py> {
    kv_cache: Pair<'py>,
    indices: Tensor<'py>,
    topk_lengths: Option<Tensor<'py>>,
}

impl<'py> Extra<'py> {
    /// Cache and indices come together, or neither.
    fn read(
        kv_cache: Option<&Bound<'py, PyAny>>,
        indices: Option<&Bound<'py, PyAny>>,
        topk_lengths: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Self>> {
        let missing = |argument, beside| {
            Err(errors::invalid(
                argument,
                "None",
                format!("must be given with {beside}"),
            ))
        };
        let (kv_cache, indices) = match (kv_cache, indices, topk_lengths) {
            (Some(kv_cache), Some(indices), _) => (kv_cache, indices),
            (None, None, None) => return Ok(None),
            (Some(_), None, _) => return missing("extra_indices", "extra_kv_cache"),
            (None, Some(_), _) => return missing("extra_kv_cache", "extra_indices"),
            (None, None, Some(_)) => return missing("extra_kv_cache", "extra_topk_lengths"),
        };
        Ok(Some(Self {
            kv_cache: Pair::read(kv_cache, "extra_kv_cache", false)?,
            indices: tensor::read(indices, "extra_indices")?,
            topk_lengths: tensor::read_optional(topk_lengths, "extra_topk_lengths")?,
        }))
    }
}

/// Runs the call in the caller's workspace, or a new one where it needs one.
///
/// # Safety
/// The tensors that the call was checked with are alive; on CUDA the framework's allocator orders reuse after the
/// work queued on its stream.
unsafe fn run(
    py: Python<'_>,
    checked: &CheckedSparse<'_>,
    q: &Tensor<'_>,
    workspace: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let device = q.view.device();
    let workspace = arguments::workspace(checked.workspace_bytes(), q, workspace)?;
    let view = workspace.as_ref().map(|workspace| &workspace.view);
    // SAFETY: the caller's promise; the workspace lives to the end of this function.
    arguments::run(py, device, || unsafe { checked.run(view) })
}
