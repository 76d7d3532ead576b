//! `Plan`.

use std::sync::{Mutex, PoisonError};

use ferromla::{PlanArgs, Queries};
use pyo3::prelude::*;

use crate::arguments;
use crate::errors;
use crate::framework;
use crate::list_lens::ListLens;
use crate::tensor::{self, Tensor};

/// The schedule of a decode or prefill, computed once per step and used by every layer.
///
/// For CUDA lengths the plan is computed on the device, without a synchronisation; for host lengths the same
/// algorithm runs in Rust and, where `device` is a CUDA device, the plan is copied over. Its buffers' sizes
/// depend on the arguments only, never on the lengths, so a captured CUDA graph stays right when `update`
/// runs between replays, or when it was captured and the lengths tensor is overwritten in place.
///
/// Args:
///     seq_lens: `[b]` int32, tokens in the cache per request, new ones included.
///     num_heads: query heads.
///     num_kv_heads: cached heads; divides `num_heads`.
///     q_len: query tokens per request, for `decode`.
///     qo_indptr: `[b + 1]` int32 on the device of `seq_lens`, for `prefill`: the query tokens of request `r` are
///         `qo_indptr[r] .. qo_indptr[r + 1]`.
///     num_tokens: query tokens of all requests, `q.shape[0]` of the prefill; with `qo_indptr` only. None for
///         the last value of a `qo_indptr` in host memory; needed for one on a CUDA device, which is not read.
///     kv_format: of the caches; None for any, but on CUDA, for `decode` with `batch_invariant`, no `num_splits` and up to 64
///         query rows for each KV head, for 16-bit ones.
///     page_size: tokens of a page.
///     causal: as in `decode`.
///     num_splits: parts that each request's keys are cut into; None lets the scheduler choose.
///     batch_invariant: as in `decode`. The workspace has room for the parts of requests that are all as long as `max_seq_len`: on
///         CUDA, of many requests, up to 2 MB for 64 query rows of each (4,096 of up to 131,072 tokens with 16 heads: 5.8 GB).
///     max_seq_len: longer lengths are clamped to this; None for no bound. On CUDA few requests that cannot be long
///         are shared out more finely, and with a bound above 8,192 lengths are taken to differ, but those of a prefill
///         with more than six query tokens a request on average: give the longest there is.
///     max_q_len: the query tokens of the request that has most, with `qo_indptr` only; None where it is not known. On
///         CUDA it tells a chunk of prefill among decodes from drafts to verify, and from chunks of like length, over
///         16-bit pages with up to 64 query heads per cached one. Only the time depends on it: less where it is right,
///         more where drafts are taken for a chunk and decodes.
///     num_sms: streaming multiprocessors of a CUDA device that attention runs on at most, at least 8, so that others are left to
///         kernels of other streams; None, or more than it has, for all.
///     device: where the attention will run; None for the device of `seq_lens`.
///     workspace: uint8 on that device, at least `workspace_bytes(...)` bytes; None allocates one through
///         the framework of `seq_lens`.
///
/// The plan holds its workspace: keep the plan as long as a captured graph that uses it. A workspace is one plan's alone.
/// Calls that share a plan share its scratch memory, so they must be on one stream (or ordered by events); on the CPU a
/// plan that another thread's call is using is refused.
///
/// Raises:
///     InvalidArgument, Unsupported: names the argument, its value and what is allowed.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> plan = ferromla.Plan(np.array([70, 5], np.int32), num_heads=16, page_size=64)
///     >>> plan.update(np.array([71, 6], np.int32))
///     >>> plan.batch, plan.num_heads, plan.page_size
///     (2, 16, 64)
///     >>> ragged = ferromla.Plan(np.array([70, 5], np.int32), num_heads=16, page_size=64,
///     ...                        qo_indptr=np.array([0, 3, 4], np.int32))
///     >>> ragged.num_tokens
///     4
#[pyclass(frozen, module = "ferromla")]
pub struct Plan {
    inner: ferromla::Plan,
    workspace: Py<PyAny>,
    /// The last one given.
    qo_indptr: Mutex<Option<Py<PyAny>>>,
}

impl Plan {
    pub fn inner(&self) -> &ferromla::Plan {
        &self.inner
    }

    fn of_lists((inner, workspace): (ferromla::Plan, Tensor<'_>)) -> Self {
        Self {
            inner,
            workspace: workspace.object.unbind(),
            qo_indptr: Mutex::default(),
        }
    }

    /// Looks at or changes the last `qo_indptr`; runs no Python code, which could ask for it again.
    fn last_indptr<T>(&self, look: impl FnOnce(&mut Option<Py<PyAny>>) -> T) -> T {
        look(
            &mut self
                .qo_indptr
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }
}

/// The query tokens of all requests: as given, or as the `qo_indptr` ends where the host can read it.
fn tokens_of(indptr: &Tensor<'_>, given: Option<i64>) -> PyResult<i64> {
    if let Some(given) = given {
        return Ok(given);
    }
    let device = indptr.view.device();
    if device.is_cuda() {
        let rule =
            format!("must be given with a qo_indptr on {device}, which only the device reads");
        return Err(errors::invalid("num_tokens", "None", rule));
    }
    // SAFETY: the tensor is alive.
    unsafe { ferromla::num_tokens(&indptr.view) }.map_err(errors::to_python)
}

/// One of the two ways to say how many query tokens there are.
pub fn queries(q_len: i64, num_tokens: Option<i64>) -> PyResult<Queries> {
    match num_tokens {
        None => Ok(Queries::Uniform { q_len }),
        Some(_) if q_len != 1 => {
            let rule = "must be left out where requests have different query lengths";
            Err(errors::invalid("q_len", q_len, rule))
        }
        Some(num_tokens) => Ok(Queries::Ragged { num_tokens }),
    }
}

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (seq_lens, *, num_heads, num_kv_heads=1, q_len=1, qo_indptr=None, num_tokens=None,
        kv_format=None, page_size, causal=true, num_splits=None, batch_invariant=false, max_seq_len=None,
        max_q_len=None, num_sms=None, device=None, workspace=None))]
    #[allow(clippy::too_many_arguments)] // the public signature
    fn new<'py>(
        seq_lens: &Bound<'py, PyAny>,
        num_heads: i64,
        num_kv_heads: i64,
        q_len: i64,
        qo_indptr: Option<&Bound<'py, PyAny>>,
        num_tokens: Option<i64>,
        kv_format: Option<&str>,
        page_size: i64,
        causal: bool,
        num_splits: Option<i64>,
        batch_invariant: bool,
        max_seq_len: Option<i64>,
        max_q_len: Option<i64>,
        num_sms: Option<i64>,
        device: Option<&Bound<'py, PyAny>>,
        workspace: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Plan> {
        let lens = tensor::read(seq_lens, "seq_lens")?;
        let Some(&batch) = lens.view.shape().first() else {
            return Err(errors::invalid(
                "seq_lens",
                "a scalar",
                "must have shape [b]",
            ));
        };
        let indptr = tensor::read_optional(qo_indptr, "qo_indptr")?;
        let num_tokens = match &indptr {
            Some(indptr) => Some(tokens_of(indptr, num_tokens)?),
            None => num_tokens,
        };
        let args = PlanArgs {
            batch,
            num_heads,
            num_kv_heads,
            queries: queries(q_len, num_tokens)?,
            kv_format: arguments::kv_format("kv_format", kv_format)?,
            extra_kv_format: None,
            page_size,
            causal,
            num_splits: arguments::num_splits(num_splits)?,
            batch_invariant,
            max_seq_len,
            max_q_len,
            num_sms,
            device: device.map_or(Ok(lens.view.device()), arguments::device)?,
        };
        let workspace = match workspace {
            Some(given) => tensor::read_output(given, "workspace")?,
            None => {
                let count = ferromla::workspace_bytes(&args).map_err(errors::to_python)?;
                framework::bytes(&lens, args.device, count)?
            }
        };
        let stream = framework::stream_on(&lens, &workspace, args.device)?;
        let indptr_view = indptr.as_ref().map(|indptr| &indptr.view);
        // SAFETY: the plan keeps the workspace object; the lengths outlive the call, and on CUDA the
        // framework orders reuse of their memory after it.
        let inner =
            unsafe { ferromla::Plan::new(&args, &lens.view, indptr_view, workspace.view, stream) };
        let inner = inner.map_err(errors::to_python)?;
        Ok(Plan {
            inner,
            workspace: workspace.object.unbind(),
            qo_indptr: Mutex::new(indptr.map(|indptr| indptr.object.unbind())),
        })
    }

    /// Plans again in place for other lengths of the same shapes, on the current stream.
    ///
    /// Args:
    ///     seq_lens: `[b]` int32, on the device the plan was made from.
    ///     qo_indptr: `[b + 1]` int32 beside them, for a plan that was made with one; None reads the tensor that
    ///         was given last again, with the values it holds now.
    ///
    /// Raises:
    ///     InvalidArgument: another batch size, dtype or device; a `qo_indptr` for a plan made without one.
    ///
    /// Example:
    ///     >>> import numpy as np, ferromla
    ///     >>> plan = ferromla.Plan(np.array([70, 5], np.int32), num_heads=16, page_size=64)
    ///     >>> q, cache = np.zeros((2, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    ///     >>> table, lens = np.array([[3, 1], [2, 0]], np.int32), np.array([71, 6], np.int32)
    ///     >>> plan.update(lens)
    ///     >>> out, lse = ferromla.decode(q, cache, table, lens, plan=plan)
    ///     >>> np.exp(lse[:, 0, 0]).round().tolist()
    ///     [71.0, 6.0]
    #[pyo3(signature = (seq_lens, qo_indptr=None))]
    fn update(
        &self,
        py: Python<'_>,
        seq_lens: &Bound<'_, PyAny>,
        qo_indptr: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let lens = tensor::read(seq_lens, "seq_lens")?;
        let workspace: Tensor<'_> = tensor::read(self.workspace.bind(py), "workspace")?;
        let stream = framework::stream_on(&lens, &workspace, self.inner.args().device)?;
        let last = self.last_indptr(|last| last.as_ref().map(|last| last.clone_ref(py)));
        let indptr = qo_indptr.or(last.as_ref().map(|last| last.bind(py)));
        let indptr = tensor::read_optional(indptr, "qo_indptr")?;
        let indptr_view = indptr.as_ref().map(|indptr| &indptr.view);
        // SAFETY: as in `new`.
        unsafe { self.inner.update(&lens.view, indptr_view, stream) }.map_err(errors::to_python)?;
        if let Some(given) = qo_indptr {
            let given = Some(given.clone().unbind());
            drop(self.last_indptr(|last| std::mem::replace(last, given)));
        }
        Ok(())
    }

    /// A plan for `sparse_decode`, whose query tokens list their keys.
    ///
    /// Args:
    ///     topk_lengths: `[b]` or `[b, q_len]` int32, how many leading entries of each list count; None for all.
    ///     extra_topk_lengths: the same of the lists of the extra cache, on the same device.
    ///     batch: requests; needed where no lengths say it.
    ///     num_heads: query heads.
    ///     q_len: query tokens per request.
    ///     topk, extra_topk: entries of a list of the cache, and of the extra cache, 0 without one.
    ///     kv_format: of the cache; None for any, but on CUDA, with `batch_invariant`, no `num_splits`, up to 64 heads and no extra
    ///         cache, for a 16-bit one.
    ///     extra_kv_format: of the extra cache; None for any. On CUDA, with 17 to 32 heads, a plan that names both is faster
    ///         if they are of one kind: 16-bit numbers, or e4m3 codes.
    ///     num_splits: parts that each token's keys are cut into; None lets the scheduler choose.
    ///     batch_invariant: as in `decode`, for each query token.
    ///     num_sms: as in `Plan`.
    ///     device: where the attention will run; None for the device of the lengths.
    ///     workspace: uint8 on that device, at least `workspace_bytes(...)` bytes; None allocates one.
    ///
    /// Raises:
    ///     InvalidArgument, Unsupported: names the argument, its value and what is allowed.
    ///
    /// Example:
    ///     >>> import numpy as np, ferromla
    ///     >>> plan = ferromla.Plan.sparse(np.array([2048, 100], np.int32), num_heads=128, topk=2048)
    ///     >>> plan.update_sparse(np.array([2048, 101], np.int32))
    ///     >>> plan.batch, plan.topk, plan.extra_topk
    ///     (2, 2048, 0)
    #[staticmethod]
    #[pyo3(signature = (topk_lengths=None, extra_topk_lengths=None, *, batch=None, num_heads, q_len=1, topk,
        extra_topk=0, kv_format=None, extra_kv_format=None, num_splits=None, batch_invariant=false, num_sms=None,
        device=None, workspace=None))]
    #[allow(clippy::too_many_arguments)] // the public signature
    fn sparse<'py>(
        py: Python<'py>,
        topk_lengths: Option<&Bound<'py, PyAny>>,
        extra_topk_lengths: Option<&Bound<'py, PyAny>>,
        batch: Option<i64>,
        num_heads: i64,
        q_len: i64,
        topk: i64,
        extra_topk: i64,
        kv_format: Option<&str>,
        extra_kv_format: Option<&str>,
        num_splits: Option<i64>,
        batch_invariant: bool,
        num_sms: Option<i64>,
        device: Option<&Bound<'py, PyAny>>,
        workspace: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Plan> {
        let lens = ListLens::read(topk_lengths, extra_topk_lengths)?;
        let Some(batch) = batch.or(lens.count()) else {
            let rule = "must be given where no topk_lengths say it";
            return Err(errors::invalid("batch", "None", rule));
        };
        let args = PlanArgs {
            queries: Queries::Sparse {
                q_len,
                topk,
                extra_topk,
            },
            kv_format: arguments::kv_format("kv_format", kv_format)?,
            extra_kv_format: arguments::kv_format("extra_kv_format", extra_kv_format)?,
            num_splits: arguments::num_splits(num_splits)?,
            batch_invariant,
            num_sms,
            ..PlanArgs::new(lens.device(device)?, batch, num_heads)
        };
        Ok(Plan::of_lists(lens.plan(py, &args, workspace)?))
    }

    /// A plan for `sparse_prefill`: of one step, for all of its layers.
    ///
    /// Args:
    ///     topk_lengths: `[t]` int32, how many leading entries of each list count; None for all.
    ///     num_tokens: query tokens; needed where no lengths say it.
    ///     num_heads: query heads.
    ///     topk: entries of a list.
    ///     kv_format: of the cache; None for any.
    ///     batch_invariant: a token's result depends on nothing else in the call, bit for bit.
    ///     num_sms: as in `Plan`.
    ///     device: where the attention will run; None for the device of the lengths.
    ///     workspace: uint8 on that device, at least `workspace_bytes(...)` bytes; None allocates one.
    ///
    /// Raises:
    ///     InvalidArgument, Unsupported: names the argument, its value and what is allowed.
    ///
    /// Example:
    ///     >>> import numpy as np, ferromla
    ///     >>> plan = ferromla.Plan.sparse_prefill(num_tokens=2, num_heads=16, topk=3)
    ///     >>> q, kv = np.ones((2, 16, 512), np.float16), np.ones((100, 512), np.float16)
    ///     >>> indices = np.array([[3, 99, 100], [-1, -1, -1]], np.int32)
    ///     >>> out, max_logits, lse = ferromla.sparse_prefill(q, kv, indices, softmax_scale=1 / 64, plan=plan)
    ///     >>> max_logits[:, 0].tolist(), plan.num_tokens, plan.topk
    ///     ([8.0, -inf], 2, 3)
    #[staticmethod]
    #[pyo3(signature = (topk_lengths=None, *, num_tokens=None, num_heads, topk, kv_format=None, batch_invariant=false,
        num_sms=None, device=None, workspace=None))]
    #[allow(clippy::too_many_arguments)] // the public signature
    fn sparse_prefill<'py>(
        py: Python<'py>,
        topk_lengths: Option<&Bound<'py, PyAny>>,
        num_tokens: Option<i64>,
        num_heads: i64,
        topk: i64,
        kv_format: Option<&str>,
        batch_invariant: bool,
        num_sms: Option<i64>,
        device: Option<&Bound<'py, PyAny>>,
        workspace: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Plan> {
        let lens = ListLens::read(topk_lengths, None)?;
        let Some(num_tokens) = num_tokens.or(lens.count()) else {
            let rule = "must be given where no topk_lengths say it";
            return Err(errors::invalid("num_tokens", "None", rule));
        };
        let args = PlanArgs {
            queries: Queries::SparsePrefill { num_tokens, topk },
            kv_format: arguments::kv_format("kv_format", kv_format)?,
            batch_invariant,
            num_sms,
            ..PlanArgs::new(lens.device(device)?, 1, num_heads)
        };
        Ok(Plan::of_lists(lens.plan(py, &args, workspace)?))
    }

    /// Plans again in place, for lists of other lengths, on the current stream.
    ///
    /// Args:
    ///     topk_lengths, extra_topk_lengths: as in `Plan.sparse` or `Plan.sparse_prefill`; None for all entries of every list.
    ///
    /// Raises:
    ///     InvalidArgument: another shape, dtype or device; a plan that was made by neither.
    ///
    /// Example:
    ///     >>> import numpy as np, ferromla
    ///     >>> plan = ferromla.Plan.sparse(np.array([3, 1], np.int32), num_heads=16, topk=4)
    ///     >>> q, cache = np.zeros((2, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    ///     >>> indices, lengths = np.array([[[3, 200, 7, 8]], [[5, 6, 7, 8]]], np.int32), np.array([2, 4], np.int32)
    ///     >>> plan.update_sparse(lengths)
    ///     >>> out, lse = ferromla.sparse_decode(q, cache, indices, topk_lengths=lengths, plan=plan)
    ///     >>> np.exp(lse[:, 0, 0]).round().tolist()
    ///     [2.0, 4.0]
    #[pyo3(signature = (topk_lengths=None, extra_topk_lengths=None))]
    fn update_sparse(
        &self,
        py: Python<'_>,
        topk_lengths: Option<&Bound<'_, PyAny>>,
        extra_topk_lengths: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let lens = ListLens::read(topk_lengths, extra_topk_lengths)?;
        let workspace: Tensor<'_> = tensor::read(self.workspace.bind(py), "workspace")?;
        let near = lens.first().unwrap_or(&workspace);
        let stream = framework::stream_on(near, &workspace, self.inner.args().device)?;
        let [main, extra] = lens.views();
        // SAFETY: as in `new`.
        unsafe { self.inner.update_sparse(main, extra, stream) }.map_err(errors::to_python)
    }

    /// Entries of a token's list of keys; None for a plan without lists.
    #[getter]
    fn topk(&self) -> Option<i64> {
        match self.inner.args().queries {
            Queries::Sparse { topk, .. } | Queries::SparsePrefill { topk, .. } => Some(topk),
            _ => None,
        }
    }

    /// Entries of a token's list of keys of the extra cache; None for a plan not made by `Plan.sparse`.
    #[getter]
    fn extra_topk(&self) -> Option<i64> {
        match self.inner.args().queries {
            Queries::Sparse { extra_topk, .. } => Some(extra_topk),
            _ => None,
        }
    }

    /// Requests.
    #[getter]
    fn batch(&self) -> i64 {
        self.inner.args().batch
    }

    /// Query heads.
    #[getter]
    fn num_heads(&self) -> i64 {
        self.inner.args().num_heads
    }

    /// Cached heads.
    #[getter]
    fn num_kv_heads(&self) -> i64 {
        self.inner.args().num_kv_heads
    }

    /// Query tokens per request; None for a plan made with a `qo_indptr`, and for one of `sparse_prefill`.
    #[getter]
    fn q_len(&self) -> Option<i64> {
        match self.inner.args().queries {
            Queries::Uniform { q_len } | Queries::Sparse { q_len, .. } => Some(q_len),
            Queries::Ragged { .. } | Queries::SparsePrefill { .. } => None,
        }
    }

    /// Query tokens of all requests, of a plan made with a `qo_indptr` or for `sparse_prefill`; else None.
    #[getter]
    fn num_tokens(&self) -> Option<i64> {
        match self.inner.args().queries {
            Queries::Uniform { .. } | Queries::Sparse { .. } => None,
            Queries::Ragged { num_tokens } | Queries::SparsePrefill { num_tokens, .. } => {
                Some(num_tokens)
            }
        }
    }

    /// Tokens of a page; None for a plan of lists, which are of any pages.
    #[getter]
    fn page_size(&self) -> Option<i64> {
        let args = self.inner.args();
        match args.queries {
            Queries::Uniform { .. } | Queries::Ragged { .. } => Some(args.page_size),
            _ => None,
        }
    }

    /// Where the attention runs, as `"cpu"` or `"cuda:0"`.
    #[getter]
    fn device(&self) -> String {
        self.inner.args().device.to_string()
    }

    /// The uint8 tensor the plan lives in: the plan proper first, then scratch for partial results.
    #[getter]
    fn workspace(&self, py: Python<'_>) -> Py<PyAny> {
        self.workspace.clone_ref(py)
    }

    /// Bytes of the plan proper at the start of `workspace`.
    #[getter]
    fn plan_bytes(&self) -> u64 {
        self.inner.plan_bytes()
    }

    /// Byte offsets into `workspace` of the plan's worker starts, merges, items and planner scratch; its
    /// header is at 0.
    #[getter]
    fn plan_offsets(&self) -> (u64, u64, u64, u64) {
        self.inner.plan_offsets().into()
    }

    fn __repr__(&self) -> String {
        let args = self.inner.args();
        let queries = match args.queries {
            Queries::Uniform { q_len } => format!("q_len={q_len}, page_size={}", args.page_size),
            Queries::Ragged { num_tokens } => {
                format!("num_tokens={num_tokens}, page_size={}", args.page_size)
            }
            Queries::Sparse {
                q_len,
                topk,
                extra_topk,
            } => format!("q_len={q_len}, topk={topk}, extra_topk={extra_topk}"),
            Queries::SparsePrefill { num_tokens, topk } => {
                format!("num_tokens={num_tokens}, topk={topk}")
            }
        };
        format!(
            "Plan(batch={}, num_heads={}, num_kv_heads={}, {queries}, device={:?})",
            args.batch,
            args.num_heads,
            args.num_kv_heads,
            args.device.to_string()
        )
    }
}
