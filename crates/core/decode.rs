//! `decode`: attention of a few new query tokens per request over a paged latent cache.

use crate::dtype::{DType, KvFormat};
use crate::error::{Error, Result};
use crate::plan::{Plan, PlanArgs};
use crate::view::{Dims, Parts, Stream, View};

/// The arguments of [`decode`]. Symbols: `b` requests, `s_q` query tokens per request, `h` query heads,
/// `h_kv` cached heads, `n` pages of `P` tokens, `d_qk` 576 or 512.
#[derive(Debug, Clone)]
pub struct DecodeArgs<'a> {
    /// `[b, s_q, h, d_qk]`, bf16 or fp16, or `([b, s_q, h, 512], [b, s_q, h, 64])`.
    pub q: Parts,
    /// `[n, P, d_qk]` or `[n, P, h_kv, d_qk]` in q's type, or the pair `([..., 512], [..., 64])`.
    pub kv_cache: Parts,
    /// `[b, max_pages]` int32: the page of each request's tokens `P * column ..`.
    pub block_table: View,
    /// `[b]` int32: tokens in the cache per request, the `s_q` new ones included.
    pub seq_lens: View,
    /// Factor of the scores; `d_qk ** -0.5` when `None`.
    pub softmax_scale: Option<f64>,
    /// Query `i` sees keys `0 ..= seq_len - s_q + i` only.
    pub causal: bool,
    /// `None`: the cache's element type says it.
    pub kv_format: Option<KvFormat>,
    /// `[h]` float32: `out *= exp(lse) / (exp(lse) + exp(sink))`; `lse` stays as it is.
    pub attn_sink: Option<View>,
    /// A schedule made before for these shapes; `None`: this call makes its own.
    pub plan: Option<&'a Plan>,
    /// Fixes the parts every request is cut into; `None`: the scheduler chooses. Not with a `plan`, which
    /// has its own.
    pub num_splits: Option<u32>,
    /// A request's result depends on nothing else in the batch, bit for bit.
    pub batch_invariant: bool,
    /// `[b, s_q, h, 512]` in q's type.
    pub out: View,
    /// `[b, s_q, h]` float32: natural logarithm of the sum of exponentials; -inf where no key is seen.
    pub lse: View,
    /// `[bytes]` uint8, at least [`DecodeArgs::workspace_bytes`]. Needed without a plan; ignored with one.
    pub workspace: Option<View>,
    /// Where to launch.
    pub stream: Stream,
}

impl<'a> DecodeArgs<'a> {
    /// Arguments with the defaults: causal, automatic splits, no sink, no plan, no workspace, stream 0.
    pub fn new(
        q: Parts,
        kv_cache: Parts,
        block_table: View,
        seq_lens: View,
        out: View,
        lse: View,
    ) -> Self {
        Self {
            q,
            kv_cache,
            block_table,
            seq_lens,
            softmax_scale: None,
            causal: true,
            kv_format: None,
            attn_sink: None,
            plan: None,
            num_splits: None,
            batch_invariant: false,
            out,
            lse,
            workspace: None,
            stream: Stream::default(),
        }
    }

    /// What a plan for this call must be made for: `max_seq_len` is the capacity of the block table.
    /// Checks every argument but `out`, `lse` and `workspace`.
    ///
    /// # Errors
    /// As [`decode`].
    pub fn plan_args(&self) -> Result<PlanArgs> {
        Err(Error::unsupported("plan", "any", "not in this build"))
    }

    /// The exact size of the workspace this call needs, in bytes; 0 with a plan. Checks like
    /// [`DecodeArgs::plan_args`].
    ///
    /// # Errors
    /// As [`decode`].
    pub fn workspace_bytes(&self) -> Result<u64> {
        Err(Error::unsupported("workspace", "any", "not in this build"))
    }
}

/// The outputs that fit a `q`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeOutputs {
    /// `[b, s_q, h, 512]`.
    pub out: Dims,
    /// Of `out`.
    pub dtype: DType,
    /// `[b, s_q, h]`, float32.
    pub lse: Dims,
}

/// The shapes and type of the outputs for this `q`.
///
/// # Errors
/// [`Error::InvalidArgument`] naming `q` when its shape or type is not allowed.
pub fn decode_outputs(q: &Parts) -> Result<DecodeOutputs> {
    let _ = q;
    Err(Error::unsupported("q", "any", "not in this build"))
}

/// Attention of `q` over the paged cache into `out` and `lse`.
///
/// # Errors
/// [`Error::InvalidArgument`] and [`Error::Unsupported`] before anything is launched or written,
/// [`Error::Cuda`] when the driver fails.
///
/// # Safety
/// Every view describes live memory as [`View::new`] asks, outputs do not overlap inputs, and on CUDA the
/// memory stays live and unchanged by others until `stream` has passed this call. The values in it may be
/// anything.
pub unsafe fn decode(args: &DecodeArgs<'_>) -> Result<()> {
    let _ = args;
    Err(Error::unsupported("q", "any", "not in this build"))
}
