//! `workspace_bytes`.

use ferromla::{Device, PlanArgs, Queries};
use pyo3::prelude::*;

use crate::arguments;
use crate::errors;
use crate::plan::queries;

/// The exact size in bytes of the workspace of a plan, or of a call without one.
///
/// For a `decode` or `prefill` without a plan, `max_seq_len` is `block_table.shape[1] * page_size`, and `kv_format` the
/// cache's. With `topk` it is that of attention over lists: of `Plan.sparse` and `sparse_decode`, or, with `num_tokens`
/// and a `batch` of 1, of `Plan.sparse_prefill` and `sparse_prefill`; for a call without a plan `kv_format` and
/// `extra_kv_format` are those of its caches.
///
/// Args: as for `Plan`, with `batch` for the number of requests, `num_tokens` for a prefill (without a
/// `qo_indptr`, which does not matter here) and `device` for where the attention will run, the CPU when None.
///     page_size: needed without `topk`, None with it.
///     topk, extra_topk, extra_kv_format: as for `Plan.sparse`.
///
/// Raises:
///     InvalidArgument, Unsupported: names the argument, its value and what is allowed.
///     CudaError: the CUDA device cannot be asked for its number of SMs.
///
/// Example:
///     >>> import ferromla
///     >>> ferromla.workspace_bytes(batch=2, num_heads=16, page_size=64, max_seq_len=4096) > 0
///     True
///     >>> ferromla.workspace_bytes(batch=2, num_heads=128, topk=2048, kv_format="fp8_v32") > 0
///     True
#[pyfunction]
#[pyo3(signature = (*, batch, num_heads, num_kv_heads=1, q_len=1, num_tokens=None, kv_format=None, page_size=None,
    causal=true, num_splits=None, batch_invariant=false, max_seq_len=None, max_q_len=None, topk=None, extra_topk=0,
    extra_kv_format=None, num_sms=None, device=None))]
#[allow(clippy::too_many_arguments)] // the public signature
pub fn workspace_bytes(
    batch: i64,
    num_heads: i64,
    num_kv_heads: i64,
    q_len: i64,
    num_tokens: Option<i64>,
    kv_format: Option<&str>,
    page_size: Option<i64>,
    causal: bool,
    num_splits: Option<i64>,
    batch_invariant: bool,
    max_seq_len: Option<i64>,
    max_q_len: Option<i64>,
    topk: Option<i64>,
    extra_topk: i64,
    extra_kv_format: Option<&str>,
    num_sms: Option<i64>,
    device: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    let device = device.map_or(Ok(Device::Cpu), arguments::device)?;
    let default = PlanArgs::new(device, batch, num_heads);
    let args = PlanArgs {
        num_kv_heads,
        queries: of_lists(queries(q_len, num_tokens)?, topk, extra_topk)?,
        kv_format: arguments::kv_format("kv_format", kv_format)?,
        extra_kv_format: arguments::kv_format("extra_kv_format", extra_kv_format)?,
        page_size: pages(page_size, topk)?.unwrap_or(default.page_size),
        causal,
        num_splits: arguments::num_splits(num_splits)?,
        batch_invariant,
        max_seq_len,
        max_q_len,
        num_sms,
        ..default
    };
    ferromla::workspace_bytes(&args).map_err(errors::to_python)
}

/// The page size, which is given where there are no lists: these are of any pages.
fn pages(page_size: Option<i64>, topk: Option<i64>) -> PyResult<Option<i64>> {
    match (page_size, topk) {
        (None, None) => {
            let rule = "must be given without topk";
            Err(errors::invalid("page_size", "None", rule))
        }
        (Some(given), Some(_)) => {
            let rule = "must be None with topk: lists are of any pages";
            Err(errors::invalid("page_size", given, rule))
        }
        _ => Ok(page_size),
    }
}

/// Query tokens that list their keys, if there is a `topk`.
fn of_lists(queries: Queries, topk: Option<i64>, extra_topk: i64) -> PyResult<Queries> {
    let without_extra = |rule| match extra_topk {
        0 => Ok(()),
        _ => Err(errors::invalid("extra_topk", extra_topk, rule)),
    };
    match (queries, topk) {
        (Queries::Uniform { q_len }, Some(topk)) => Ok(Queries::Sparse {
            q_len,
            topk,
            extra_topk,
        }),
        (Queries::Ragged { num_tokens }, Some(topk)) => {
            without_extra("must be 0 with num_tokens: sparse_prefill has one cache")?;
            Ok(Queries::SparsePrefill { num_tokens, topk })
        }
        _ => {
            without_extra("must be 0 without topk")?;
            Ok(queries)
        }
    }
}
