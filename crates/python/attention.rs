//! `decode`, `prefill` and `merge_states`.

use ferromla::{
    AttentionArgs, AttentionOutputs, DType, DecodeArgs, MergeArgs, Parts, PrefillArgs, QScale,
    QoIndptr, View, decode_outputs, prefill_outputs,
};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt};

use crate::arguments::{self, Number, Pair};
use crate::errors;
use crate::framework;
use crate::plan::Plan;
use crate::tensor::{self, Tensor};

/// What they return: `(out, lse)`.
type Outputs<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Attention of a few new query tokens per request over a paged latent KV cache.
///
/// Symbols: `b` requests, `s_q` query tokens per request, `h` query heads, `h_kv` cached heads, `n` pages of
/// `P` tokens, `d_qk` 576 (512 latent, then 64 rotary) or 512. K is the whole cached row, V its first 512
/// numbers; `h_kv` divides `h`, and query head `i` reads cached head `i // (h // h_kv)`.
///
/// Args:
///     q: `[b, s_q, h, d_qk]` bfloat16 or float16, or the pair `([b, s_q, h, 512], [b, s_q, h, 64])`; over an
///         `"fp8"` cache float8_e4m3fn too.
///     kv_cache: `[n, P, d_qk]` or `[n, P, h_kv, d_qk]` in q's dtype, or the pair of its parts. Quantised
///         (`h_kv` 1): `[n, P, bytes]` or `[n, P, 1, bytes]`, uint8, int8 or float8_e4m3fn.
///     block_table: `[b, max_pages]` int32: token `i` of a request is in page `block_table[r, i // P]`.
///         A page outside `[0, n)` is absent: its tokens are masked.
///     seq_lens: `[b]` int32, tokens in the cache per request, the `s_q` new ones included; clamped to
///         `[0, max_pages * P]`.
///     softmax_scale: factor of the scores, above 0, also as float32, by itself and times `kv_scale` and a
///         `q_scale` that is a number; `d_qk ** -0.5` when None.
///     causal: query `i` sees keys `0 .. seq_len - s_q + i`, both included.
///     kv_format: `"bf16"`, `"fp16"`, `"fp8"` or `"fp8_v32"`; None for what the cache's dtype says (`"fp8"` for
///         float8_e4m3fn).
///     kv_scale: what the numbers of an `"fp8"` cache are multiplied by; 1 when None. Only for that format.
///     q_scale: what float8_e4m3fn queries are multiplied by: a float, or `[b, s_q, h]` float32; 1 when None.
///         Only for them.
///     attn_sink: `[h]` float32: `out` is multiplied by `exp(lse) / (exp(lse) + exp(sink))`.
///     plan: a `Plan` for these shapes; without one the call plans for itself. The lengths that it was made
///         or last updated with count, not the values of `seq_lens` at this call.
///     num_splits: parts that each request's keys are cut into; None lets the scheduler choose. With a plan
///         None, or what the plan was made with.
///     batch_invariant: a request's result is bit for bit the same whatever else is in the batch, and
///         wherever it stands in it, for the same `num_splits`: without that requests are cut as suits many of
///         them, and few take less time in more parts. With a plan only if the plan was made so.
///     out, lse: `[b, s_q, h, 512]` in q's dtype (bfloat16 for float8_e4m3fn queries) and `[b, s_q, h]` float32
///         to write to, any strides but a unit last one of `out`.
///     workspace: uint8, at least `workspace_bytes(...)` bytes; without plan and workspace the call
///         allocates one through the caller's framework. Not used with a plan, which has its own.
///     empty_lse: what `lse` is for queries that see no key; -inf when None, which `merge_states` takes as nothing.
///
/// Returns:
///     `(out, lse)`: `out [b, s_q, h, 512]` in q's dtype and the natural logarithm `lse [b, s_q, h]` float32
///     of the softmax denominators, tensors of q's framework. A query that sees no key has `out = 0` and
///     `lse = -inf`, or `empty_lse`.
///
/// CUDA tensors are processed on the framework's current stream, without a synchronisation: as with any
/// operation of the framework, memory may be reused only by work queued after it. Rows of q, the cache and
/// `out` must be 16-byte aligned there.
///
/// Raises:
///     InvalidArgument, Unsupported: before anything is written; the message names argument, value, rule.
///     CudaError: a call of the CUDA driver failed.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> q = np.zeros((2, 1, 16, 576), np.float16)
///     >>> kv_cache = ferromla.empty_kv_cache(4, 64, "fp16", "cpu", framework="numpy")
///     >>> kv_cache[:] = 1
///     >>> block_table = np.array([[3, 1], [2, 0]], np.int32)
///     >>> out, lse = ferromla.decode(q, kv_cache, block_table, np.array([70, 5], np.int32))
///     >>> out.shape, lse.shape
///     ((2, 1, 16, 512), (2, 1, 16))
///     >>> np.exp(lse[:, 0, 0]).round(2).tolist()
///     [70.0, 5.0]
#[pyfunction]
#[pyo3(signature = (q, kv_cache, block_table, seq_lens, *, softmax_scale=None, causal=true, kv_format=None,
    kv_scale=None, q_scale=None, attn_sink=None, plan=None, num_splits=None, batch_invariant=false, out=None,
    lse=None, workspace=None, empty_lse=None))]
// The public signature; the arguments become one struct at once.
#[allow(clippy::too_many_arguments)]
pub fn decode<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    kv_cache: &Bound<'py, PyAny>,
    block_table: &Bound<'py, PyAny>,
    seq_lens: &Bound<'py, PyAny>,
    softmax_scale: Option<Number>,
    causal: bool,
    kv_format: Option<&str>,
    kv_scale: Option<Number>,
    q_scale: Option<&Bound<'py, PyAny>>,
    attn_sink: Option<&Bound<'py, PyAny>>,
    plan: Option<&Bound<'py, Plan>>,
    num_splits: Option<i64>,
    batch_invariant: bool,
    out: Option<&Bound<'py, PyAny>>,
    lse: Option<&Bound<'py, PyAny>>,
    workspace: Option<&Bound<'py, PyAny>>,
    empty_lse: Option<Number>,
) -> PyResult<Outputs<'py>> {
    let given = Given {
        q,
        kv_cache,
        block_table,
        seq_lens,
        softmax_scale,
        causal,
        kv_format,
        kv_scale,
        q_scale,
        attn_sink,
        plan,
        num_splits,
        batch_invariant,
        max_q_len: None,
        out,
        lse,
        workspace,
        empty_lse,
    };
    attend(py, &given, decode_outputs, DecodeArgs::new)
}

/// Attention of different numbers of query tokens per request over a paged latent KV cache: chunked and
/// incremental prefill, speculative verification with mixed lengths, and decode in one call.
///
/// As `decode`, with the `t` query tokens of all `b` requests along one axis. Those of request `r` are
/// `qo_indptr[r] .. qo_indptr[r + 1]`; they are the last ones of its `seq_lens[r]` tokens in the cache.
///
/// Args:
///     q: `[t, h, d_qk]`, or the pair `([t, h, 512], [t, h, 64])`, in the dtypes of `decode`.
///     kv_cache, block_table: as in `decode`.
///     q_scale: as in `decode`; as a tensor `[t, h]`.
///     seq_lens: `[b]` int32, tokens in the cache per request, those of its queries included.
///     qo_indptr: `[b + 1]` int32, on q's device. A request may have no query token, and more of them than
///         cached tokens: a query that sees no key has `out = 0` and `lse = -inf`. Values are clamped to
///         `[0, t]`; rows of `out` and `lse` that belong to no request are not written.
///     causal: query `i` of the `n` of its request sees keys `0 .. seq_len - n + i`, both included.
///     plan: a `Plan` made with `qo_indptr` and `num_tokens=t`; what it was made or last updated with
///         counts, not the values of `seq_lens` and `qo_indptr` at this call.
///     out, lse: `[t, h, 512]` in q's dtype and `[t, h]` float32 to write to.
///     max_q_len: as in `Plan`; not with a plan, which has its own.
///     softmax_scale, kv_format, kv_scale, attn_sink, num_splits, batch_invariant, workspace, empty_lse: as in `decode`.
///
/// Returns:
///     `(out, lse)`: `out [t, h, 512]` in q's dtype and the natural logarithm `lse [t, h]` float32 of the
///     softmax denominators, tensors of q's framework.
///
/// Raises:
///     As `decode`.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> kv_cache = ferromla.empty_kv_cache(4, 64, "fp16", "cpu", framework="numpy")
///     >>> kv_cache[:] = 1
///     >>> block_table = np.array([[3, 1], [2, 0]], np.int32)
///     >>> q = np.zeros((4, 16, 576), np.float16)  # three tokens of the first request, one of the second
///     >>> out, lse = ferromla.prefill(q, kv_cache, block_table, np.array([70, 5], np.int32),
///     ...                             np.array([0, 3, 4], np.int32))
///     >>> np.exp(lse[:, 0]).round(2).tolist()
///     [68.0, 69.0, 70.0, 5.0]
#[pyfunction]
#[pyo3(signature = (q, kv_cache, block_table, seq_lens,
    qo_indptr, *, softmax_scale=None, causal=true, kv_format=None,
    kv_scale=None, q_scale=None, attn_sink=None, plan=None, num_splits=None, batch_invariant=false,
    max_q_len=None, out=None, lse=None, workspace=None, empty_lse=None))]
// The public signature; the arguments become one struct at once.
#[allow(clippy::too_many_arguments)]
pub fn prefill<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    kv_cache: &Bound<'py, PyAny>,
    block_table: &Bound<'py, PyAny>,
    seq_lens: &Bound<'py, PyAny>,
    qo_indptr: &Bound<'py, PyAny>,
    softmax_scale: Option<Number>,
    causal: bool,
    kv_format: Option<&str>,
    kv_scale: Option<Number>,
    q_scale: Option<&Bound<'py, PyAny>>,
    attn_sink: Option<&Bound<'py, PyAny>>,
    plan: Option<&Bound<'py, Plan>>,
    num_splits: Option<i64>,
    batch_invariant: bool,
    max_q_len: Option<i64>,
    out: Option<&Bound<'py, PyAny>>,
    lse: Option<&Bound<'py, PyAny>>,
    workspace: Option<&Bound<'py, PyAny>>,
    empty_lse: Option<Number>,
) -> PyResult<Outputs<'py>> {
    let given = Given {
        q,
        kv_cache,
        block_table,
        seq_lens,
        softmax_scale,
        causal,
        kv_format,
        kv_scale,
        q_scale,
        attn_sink,
        plan,
        num_splits,
        batch_invariant,
        max_q_len,
        out,
        lse,
        workspace,
        empty_lse,
    };
    let qo_indptr = tensor::read(qo_indptr, "qo_indptr")?;
    attend(
        py,
        &given,
        prefill_outputs,
        |q, cache, table, lens, out, lse| {
            PrefillArgs::new(q, cache, table, lens, qo_indptr.view, out, lse)
        },
    )
}

/// The arguments that `decode` and `prefill` share, as they were given.
struct Given<'a, 'py> {
    q: &'a Bound<'py, PyAny>,
    kv_cache: &'a Bound<'py, PyAny>,
    block_table: &'a Bound<'py, PyAny>,
    seq_lens: &'a Bound<'py, PyAny>,
    softmax_scale: Option<Number>,
    causal: bool,
    kv_format: Option<&'a str>,
    kv_scale: Option<Number>,
    q_scale: Option<&'a Bound<'py, PyAny>>,
    attn_sink: Option<&'a Bound<'py, PyAny>>,
    plan: Option<&'a Bound<'py, Plan>>,
    num_splits: Option<i64>,
    batch_invariant: bool,
    max_q_len: Option<i64>,
    out: Option<&'a Bound<'py, PyAny>>,
    lse: Option<&'a Bound<'py, PyAny>>,
    workspace: Option<&'a Bound<'py, PyAny>>,
    empty_lse: Option<Number>,
}

/// Runs the attention whose outputs have these shapes and whose tensors make these arguments.
fn attend<'a, 'py, I: QoIndptr>(
    py: Python<'py>,
    given: &Given<'a, 'py>,
    outputs: fn(&Parts) -> ferromla::Result<AttentionOutputs>,
    args: impl FnOnce(Parts, Parts, View, View, View, View) -> AttentionArgs<'a, I>,
) -> PyResult<Outputs<'py>> {
    let q = Pair::read(given.q, "q", false)?;
    let kv_cache = Pair::read(given.kv_cache, "kv_cache", false)?;
    let block_table = tensor::read(given.block_table, "block_table")?;
    let seq_lens = tensor::read(given.seq_lens, "seq_lens")?;
    let attn_sink = tensor::read_optional(given.attn_sink, "attn_sink")?;
    let q_scale = given.q_scale.map(Scale::read).transpose()?;
    let shapes = || outputs(&q.parts()).map_err(errors::to_python);
    let out = arguments::output(given.out, "out", || {
        let shapes = shapes()?;
        framework::empty(&q.first, "out", &shapes.out, shapes.dtype)
    })?;
    let lse = arguments::output(given.lse, "lse", || {
        framework::empty(&q.first, "lse", &shapes()?.lse, DType::F32)
    })?;
    let mut args = args(
        q.parts(),
        kv_cache.parts(),
        block_table.view,
        seq_lens.view,
        out.view,
        lse.view,
    );
    args.softmax_scale = given.softmax_scale.map(Number::get);
    args.causal = given.causal;
    args.kv_format = arguments::kv_format("kv_format", given.kv_format)?;
    args.kv_scale = given.kv_scale.map(Number::get);
    args.q_scale = q_scale.as_ref().map(Scale::args);
    args.attn_sink = attn_sink.as_ref().map(|sink| sink.view);
    args.plan = given.plan.map(|plan| plan.get().inner());
    args.num_splits = arguments::num_splits(given.num_splits)?;
    args.batch_invariant = given.batch_invariant;
    args.max_q_len = given.max_q_len;
    args.empty_lse = arguments::empty_lse(given.empty_lse);
    args.stream = framework::current_stream(&q.first)?;
    let checked = args.check().map_err(errors::to_python)?;
    let workspace = arguments::workspace(checked.workspace_bytes(), &q.first, given.workspace)?;
    let workspace = workspace.as_ref().map(|workspace| &workspace.view);
    // SAFETY: every view borrows a tensor that lives to the end of this function (`qo_indptr` to the end of the
    // caller's); on CUDA the framework's allocator orders reuse after the work queued on its stream.
    arguments::run(py, q.device(), || unsafe { checked.run(workspace) })?;
    if block_table.view.shape()[0] == 0 {
        // Query tokens of no request see no key. Those of the caller's outputs are left alone.
        let made = |given: Option<_>, output, value| match given {
            None => framework::fill(output, value),
            Some(_) => Ok(()),
        };
        made(given.out, &out, 0.0)?;
        made(given.lse, &lse, arguments::empty_lse(given.empty_lse))?;
    }
    Ok((out.object, lse.object))
}

/// A `q_scale`.
enum Scale<'py> {
    One(f64),
    Rows(Tensor<'py>),
}

impl<'py> Scale<'py> {
    fn read(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyFloat>() || object.is_instance_of::<PyInt>() {
            return object.extract().map(Self::One);
        }
        tensor::read(object, "q_scale").map(Self::Rows)
    }

    fn args(&self) -> QScale {
        match self {
            Self::One(scale) => QScale::One(*scale),
            Self::Rows(tensor) => QScale::Rows(tensor.view),
        }
    }
}

/// The exact combination of two partial attentions over disjoint sets of keys.
///
/// `lse = log(exp(lse_a) + exp(lse_b))` and `out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)`. A side
/// whose `lse` is -inf does not count; where both are, the result is zeros and -inf.
///
/// Args:
///     out_a, out_b: `[..., h, d]` of rank 2 to 4, bfloat16 or float16, equal in shape and dtype.
///     lse_a, lse_b: `[..., h]` float32, natural logarithms.
///     out, lse: where to write; may be one of the inputs.
///
/// Returns:
///     `(out, lse)` in the shapes and dtypes of `out_a` and `lse_a`.
///
/// Raises:
///     InvalidArgument: shapes, dtypes or devices that do not agree; names the argument.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> ones, lse = np.ones((1, 2, 512), np.float16), np.zeros((1, 2), np.float32)
///     >>> out, merged = ferromla.merge_states(ones, lse, 3 * ones, lse)
///     >>> float(out[0, 0, 0]), float(merged[0, 0])
///     (2.0, 0.6931471824645996)
#[pyfunction]
#[pyo3(signature = (out_a, lse_a, out_b, lse_b, *, out=None, lse=None))]
pub fn merge_states<'py>(
    py: Python<'py>,
    out_a: &Bound<'py, PyAny>,
    lse_a: &Bound<'py, PyAny>,
    out_b: &Bound<'py, PyAny>,
    lse_b: &Bound<'py, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
    lse: Option<&Bound<'py, PyAny>>,
) -> PyResult<Outputs<'py>> {
    let out_a = tensor::read(out_a, "out_a")?;
    let lse_a = tensor::read(lse_a, "lse_a")?;
    let out_b = tensor::read(out_b, "out_b")?;
    let lse_b = tensor::read(lse_b, "lse_b")?;
    let (out_view, lse_view) = (out_a.view, lse_a.view);
    let out = arguments::output(out, "out", || {
        framework::empty(&out_a, "out", out_view.shape(), out_view.dtype())
    })?;
    let lse = arguments::output(lse, "lse", || {
        framework::empty(&lse_a, "lse", lse_view.shape(), DType::F32)
    })?;
    let args = MergeArgs {
        out_a: out_a.view,
        lse_a: lse_a.view,
        out_b: out_b.view,
        lse_b: lse_b.view,
        out: out.view,
        lse: lse.view,
        stream: framework::current_stream(&out_a)?,
    };
    // SAFETY: as in `decode`.
    arguments::run(py, out_a.view.device(), || unsafe {
        ferromla::merge_states(&args)
    })?;
    Ok((out.object, lse.object))
}
