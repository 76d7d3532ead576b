//! `Plan`: the schedule of a decode, computed once per step and used by every layer.

use crate::dtype::{Device, KvFormat};
use crate::error::{Error, Result};
use crate::view::{Stream, View};

/// What decides a plan, apart from the lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanArgs {
    /// Requests.
    pub batch: i64,
    /// Query heads.
    pub num_heads: i64,
    /// Cached heads; divides `num_heads`.
    pub num_kv_heads: i64,
    /// Query tokens per request.
    pub q_len: i64,
    /// Of the cache; `None`: any unquantised one.
    pub kv_format: Option<KvFormat>,
    /// Tokens of a page.
    pub page_size: i64,
    /// Query `i` sees keys `0 ..= seq_len - q_len + i` only.
    pub causal: bool,
    /// Fixes the parts every request is cut into; `None`: the scheduler chooses.
    pub num_splits: Option<u32>,
    /// A request's result depends on nothing else in the batch, bit for bit.
    pub batch_invariant: bool,
    /// Longer lengths are clamped to this; `None`: no bound but int32's.
    pub max_seq_len: Option<i64>,
    /// Where decode will run.
    pub device: Device,
}

impl PlanArgs {
    /// Arguments with the defaults: one cached head, one query token, page size 64, causal, automatic splits.
    pub fn new(device: Device, batch: i64, num_heads: i64) -> Self {
        Self {
            batch,
            num_heads,
            num_kv_heads: 1,
            q_len: 1,
            kv_format: None,
            page_size: 64,
            causal: true,
            num_splits: None,
            batch_invariant: false,
            max_seq_len: None,
            device,
        }
    }
}

/// A schedule and the caller's memory it lives in: plan and partial results.
#[derive(Debug)]
pub struct Plan {
    args: PlanArgs,
}

impl Plan {
    /// Plans for these lengths (`[batch]` int32) into `workspace` (`[bytes]` uint8 on `args.device`, at least
    /// [`workspace_bytes`]). Lengths on the CUDA device are planned there, without a synchronisation; host
    /// lengths are planned on the host and, for a CUDA device, copied over.
    ///
    /// # Errors
    /// As [`decode`](crate::decode).
    ///
    /// # Safety
    /// The workspace is live, and written by nobody else, as long as the plan is used; on CUDA until `stream`
    /// and every stream a decode used it on have passed. The lengths are live until `stream` has passed.
    pub unsafe fn new(
        args: &PlanArgs,
        seq_lens: &View,
        workspace: View,
        stream: Stream,
    ) -> Result<Self> {
        let _ = (seq_lens, workspace, stream, args);
        Err(Error::unsupported("plan", "any", "not in this build"))
    }

    /// Plans again in place, for other lengths of the same shapes.
    ///
    /// # Errors
    /// As [`Plan::new`].
    ///
    /// # Safety
    /// As for [`Plan::new`]; work that still reads the plan runs before `stream` reaches this call.
    pub unsafe fn update(&self, seq_lens: &View, stream: Stream) -> Result<()> {
        let _ = (seq_lens, stream);
        Err(Error::unsupported("plan", "any", "not in this build"))
    }

    /// What the plan was made for.
    pub const fn args(&self) -> &PlanArgs {
        &self.args
    }

    /// Bytes of the plan proper at the start of the workspace; what follows is scratch for partial results.
    pub fn plan_bytes(&self) -> u64 {
        0
    }

    /// The need of [`Plan::new`]; the same as the free function [`workspace_bytes`].
    ///
    /// # Errors
    /// As [`workspace_bytes`].
    pub fn workspace_bytes(args: &PlanArgs) -> Result<u64> {
        workspace_bytes(args)
    }
}

/// The exact size in bytes of the workspace of a [`Plan`], or of a [`decode`](crate::decode) without one.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the field of `args`; [`Error::Cuda`] when `args.device` is a CUDA device
/// that cannot be asked for its number of SMs.
pub fn workspace_bytes(args: &PlanArgs) -> Result<u64> {
    let _ = args;
    Err(Error::unsupported("workspace", "any", "not in this build"))
}
