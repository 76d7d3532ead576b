//! `Plan` and `workspace_bytes`.

use ferromla::{Device, PlanArgs};
use pyo3::prelude::*;

use crate::arguments;
use crate::errors;
use crate::framework;
use crate::tensor::{self, Tensor};

/// The schedule of a decode, computed once per step and used by every layer.
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
///     q_len: query tokens per request.
///     qo_indptr: for queries of different lengths, which this version does not have.
///     kv_format: `"bf16"`, `"fp16"`, or None for either.
///     page_size: tokens of a page.
///     causal: as in `decode`.
///     num_splits: parts that each request's keys are cut into; None lets the scheduler choose.
///     batch_invariant: a request's result is bit for bit the same whatever else is in the batch.
///     max_seq_len: longer lengths are clamped to this; None for no bound.
///     device: where decode will run; None for the device of `seq_lens`.
///     workspace: uint8 on that device, at least `workspace_bytes(...)` bytes; None allocates one through
///         the framework of `seq_lens`.
///
/// The plan holds its workspace: keep the plan as long as a captured graph that uses it. Calls that share
/// a plan share its scratch memory, so they must be on one stream (or ordered by events).
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
#[pyclass(frozen, module = "ferromla")]
pub struct Plan {
    inner: ferromla::Plan,
    workspace: Py<PyAny>,
}

impl Plan {
    pub fn inner(&self) -> &ferromla::Plan {
        &self.inner
    }
}

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (seq_lens, *, num_heads, num_kv_heads=1, q_len=1, qo_indptr=None, kv_format=None,
        page_size, causal=true, num_splits=None, batch_invariant=false, max_seq_len=None, device=None,
        workspace=None))]
    #[allow(clippy::too_many_arguments)] // the public signature
    fn new<'py>(
        seq_lens: &Bound<'py, PyAny>,
        num_heads: i64,
        num_kv_heads: i64,
        q_len: i64,
        qo_indptr: Option<&Bound<'py, PyAny>>,
        kv_format: Option<&str>,
        page_size: i64,
        causal: bool,
        num_splits: Option<i64>,
        batch_invariant: bool,
        max_seq_len: Option<i64>,
        device: Option<&Bound<'py, PyAny>>,
        workspace: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Plan> {
        arguments::absent(
            qo_indptr,
            "qo_indptr",
            "must be None: give one q_len for all requests",
        )?;
        let lens = tensor::read(seq_lens, "seq_lens")?;
        let Some(&batch) = lens.view.shape().first() else {
            return Err(errors::invalid(
                "seq_lens",
                "a scalar",
                "must have shape [b]",
            ));
        };
        let args = PlanArgs {
            batch,
            num_heads,
            num_kv_heads,
            q_len,
            kv_format: arguments::kv_format(kv_format)?,
            page_size,
            causal,
            num_splits: arguments::num_splits(num_splits)?,
            batch_invariant,
            max_seq_len,
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
        // SAFETY: the plan keeps the workspace object; the lengths outlive the call, and on CUDA the
        // framework orders reuse of their memory after it.
        let inner = unsafe { ferromla::Plan::new(&args, &lens.view, workspace.view, stream) };
        let inner = inner.map_err(errors::to_python)?;
        Ok(Plan {
            inner,
            workspace: workspace.object.unbind(),
        })
    }

    /// Plans again in place for other lengths of the same shapes, on the current stream.
    ///
    /// Args:
    ///     seq_lens: `[b]` int32, on the device the plan was made from.
    ///
    /// Raises:
    ///     InvalidArgument: another batch size, dtype or device.
    fn update(&self, py: Python<'_>, seq_lens: &Bound<'_, PyAny>) -> PyResult<()> {
        let lens = tensor::read(seq_lens, "seq_lens")?;
        let workspace: Tensor<'_> = tensor::read(self.workspace.bind(py), "workspace")?;
        let stream = framework::stream_on(&lens, &workspace, self.inner.args().device)?;
        // SAFETY: as in `new`.
        unsafe { self.inner.update(&lens.view, stream) }.map_err(errors::to_python)
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

    /// Query tokens per request.
    #[getter]
    fn q_len(&self) -> i64 {
        self.inner.args().q_len
    }

    /// Tokens of a page.
    #[getter]
    fn page_size(&self) -> i64 {
        self.inner.args().page_size
    }

    /// Where decode runs, as `"cpu"` or `"cuda:0"`.
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
        format!(
            "Plan(batch={}, num_heads={}, num_kv_heads={}, q_len={}, page_size={}, device={:?})",
            args.batch,
            args.num_heads,
            args.num_kv_heads,
            args.q_len,
            args.page_size,
            args.device.to_string()
        )
    }
}

/// The exact size in bytes of the workspace of a `Plan`, or of a `decode` without one.
///
/// For a `decode` without a plan, `max_seq_len` is `block_table.shape[1] * page_size`.
///
/// Args: as for `Plan`, with `batch` for the number of requests and `device` for where decode will run, the
/// CPU when None.
///
/// Raises:
///     InvalidArgument, Unsupported: names the argument, its value and what is allowed.
///     CudaError: the CUDA device cannot be asked for its number of SMs.
///
/// Example:
///     >>> import ferromla
///     >>> ferromla.workspace_bytes(batch=2, num_heads=16, page_size=64, max_seq_len=4096) > 0
///     True
#[pyfunction]
#[pyo3(signature = (*, batch, num_heads, num_kv_heads=1, q_len=1, kv_format=None, page_size, causal=true,
    num_splits=None, batch_invariant=false, max_seq_len=None, device=None))]
#[allow(clippy::too_many_arguments)] // the public signature
pub fn workspace_bytes(
    batch: i64,
    num_heads: i64,
    num_kv_heads: i64,
    q_len: i64,
    kv_format: Option<&str>,
    page_size: i64,
    causal: bool,
    num_splits: Option<i64>,
    batch_invariant: bool,
    max_seq_len: Option<i64>,
    device: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    let args = PlanArgs {
        batch,
        num_heads,
        num_kv_heads,
        q_len,
        kv_format: arguments::kv_format(kv_format)?,
        page_size,
        causal,
        num_splits: arguments::num_splits(num_splits)?,
        batch_invariant,
        max_seq_len,
        device: device.map_or(Ok(Device::Cpu), arguments::device)?,
    };
    ferromla::workspace_bytes(&args).map_err(errors::to_python)
}
