//! What a plan is for: the arguments that decide it, apart from the lengths.

use crate::dtype::{Device, KvFormat};
use crate::error::{Error, Result};

/// The query tokens that a plan is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queries {
    /// The same number for every request: [`decode`](crate::decode).
    Uniform {
        /// Query tokens per request.
        q_len: i64,
    },
    /// Divided among the requests by `qo_indptr`: [`prefill`](crate::prefill).
    Ragged {
        /// Query tokens of all requests, those that `qo_indptr` gives to nobody included.
        num_tokens: i64,
    },
    /// The same number for every request, each with a list of its own keys: `sparse_decode`. Then `page_size`,
    /// `causal` and `max_seq_len` have no meaning.
    Sparse {
        /// Query tokens per request.
        q_len: i64,
        /// Entries of a token's list.
        topk: i64,
        /// Entries of a token's list of the extra cache; 0 without one.
        extra_topk: i64,
    },
    /// Tokens of one batch (1), each with a list of its own keys: `sparse_prefill`. None is split with `batch_invariant` or on the
    /// CPU.
    SparsePrefill {
        /// Query tokens.
        num_tokens: i64,
        /// Entries of a token's list.
        topk: i64,
    },
}

impl Queries {
    /// What kind of call it is, for errors.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Uniform { .. } => "of one q_len (decode)",
            Self::Ragged { .. } => "with a qo_indptr (prefill)",
            Self::Sparse { .. } => "with indices (sparse_decode)",
            Self::SparsePrefill { .. } => "with indices (sparse_prefill)",
        }
    }

    /// Whether every query token has a list of its own keys.
    pub(crate) const fn is_sparse(&self) -> bool {
        matches!(self, Self::Sparse { .. } | Self::SparsePrefill { .. })
    }

    /// Names and values of the numbers; those that a kind does not have are nameless and 0.
    pub(crate) const fn fields(&self) -> [(&'static str, i64); 3] {
        const NONE: (&str, i64) = ("", 0);
        match *self {
            Self::Uniform { q_len } => [("q_len", q_len), NONE, NONE],
            Self::Ragged { num_tokens } => [("num_tokens", num_tokens), NONE, NONE],
            Self::Sparse {
                q_len,
                topk,
                extra_topk,
            } => [("q_len", q_len), ("topk", topk), ("extra_topk", extra_topk)],
            Self::SparsePrefill { num_tokens, topk } => {
                [("num_tokens", num_tokens), ("topk", topk), NONE]
            }
        }
    }
}

/// What decides a plan, apart from the lengths.
///
/// ```
/// use ferromla::{Device, PlanArgs, Queries};
/// let queries = Queries::Uniform { q_len: 2 };
/// let args = PlanArgs { page_size: 16, queries, ..PlanArgs::new(Device::Cpu, 4, 128) };
/// assert_eq!((args.batch, args.num_heads, args.num_kv_heads, args.causal), (4, 128, 1, true));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanArgs {
    /// Requests.
    pub batch: i64,
    /// Query heads.
    pub num_heads: i64,
    /// Cached heads; divides `num_heads`.
    pub num_kv_heads: i64,
    /// How many query tokens, and whether every request has as many.
    pub queries: Queries,
    /// Of the cache; `None`: any, but on CUDA, with `batch_invariant`, no `num_splits`, up to 64 query rows of a request and KV head and no
    /// extra cache, a 16-bit one.
    pub kv_format: Option<KvFormat>,
    /// Of the extra cache, where there is one; `None`: any. With 17 to 32 query heads a plan that names both formats is
    /// faster on CUDA if they are of one kind: 16-bit numbers, or e4m3 codes.
    pub extra_kv_format: Option<KvFormat>,
    /// Tokens of a page.
    pub page_size: i64,
    /// Query `i` sees keys `0 ..= seq_len - q_len + i` only.
    pub causal: bool,
    /// Fixes the parts every request is cut into; `None`: the scheduler chooses.
    pub num_splits: Option<u32>,
    /// A request's result depends on nothing else in the batch, bit for bit; of a sparse prefill, a token's. Without `num_splits` requests
    /// are cut as suits many of them; few take less time in more parts.
    pub batch_invariant: bool,
    /// Longer lengths are clamped to this; `None`: no bound but int32's. On CUDA few requests that cannot be long are
    /// shared out more finely, and with a bound above 8,192 lengths are taken to differ, but those of a prefill with more than six query
    /// tokens a request on average.
    pub max_seq_len: Option<i64>,
    /// The query tokens of the request that has most, with [`Queries::Ragged`] only; `None`: not known. On CUDA it tells chunks of prefill
    /// among decodes from drafts to verify, and from chunks of like length, over 16-bit pages with up to 64 query heads per cached one: they
    /// are shared out in other ways.
    /// Only the time depends on it: less where it is right, more where requests with many drafts are taken for a chunk and decodes.
    pub max_q_len: Option<i64>,
    /// How many streaming multiprocessors attention runs on at most, so that others are left to kernels of other streams; `None`, or more
    /// than the device has: all. At least 8, as CTAs, which have one each, may have to run at the same time. On the CPU it has no meaning.
    pub num_sms: Option<i64>,
    /// Where the attention will run.
    pub device: Device,
}

impl PlanArgs {
    /// Arguments with the defaults: one cached head, one query token, page size 64, causal, automatic splits.
    pub fn new(device: Device, batch: i64, num_heads: i64) -> Self {
        Self {
            batch,
            num_heads,
            num_kv_heads: 1,
            queries: Queries::Uniform { q_len: 1 },
            kv_format: None,
            extra_kv_format: None,
            page_size: 64,
            causal: true,
            num_splits: None,
            batch_invariant: false,
            max_seq_len: None,
            max_q_len: None,
            num_sms: None,
            device,
        }
    }

    /// Refuses a call other than the one that a plan with these arguments was made for, by the field that differs.
    pub(crate) fn check_call(&self, call: &Self) -> Result<()> {
        if self.device != call.device {
            return differs("device", &self.device, &call.device);
        }
        let (ours, theirs) = (&self.queries, &call.queries);
        if ours.kind() != theirs.kind() {
            return differs("queries", &ours.kind(), &theirs.kind());
        }
        let sizes = [("batch", self.batch, call.batch)];
        let queries = std::iter::zip(ours.fields(), theirs.fields())
            .map(|((field, made_for), (_, call))| (field, made_for, call));
        let rest = [
            ("num_heads", self.num_heads, call.num_heads),
            ("num_kv_heads", self.num_kv_heads, call.num_kv_heads),
        ];
        for (field, made_for, call) in sizes.into_iter().chain(queries).chain(rest) {
            if made_for != call {
                return differs(field, &made_for, &call);
            }
        }
        let dense = !ours.is_sparse();
        if dense && self.page_size != call.page_size {
            return differs("page_size", &self.page_size, &call.page_size);
        }
        if dense && self.causal != call.causal {
            return differs("causal", &self.causal, &call.causal);
        }
        for (field, ours, theirs) in [
            ("kv_format", self.kv_format, call.kv_format),
            (
                "extra_kv_format",
                self.extra_kv_format,
                call.extra_kv_format,
            ),
        ] {
            if let (Some(ours), Some(theirs)) = (ours, theirs)
                && ours != theirs
            {
                return differs(field, &ours, &theirs);
            }
        }
        Ok(())
    }
}

fn differs(field: &str, made_for: &dyn ToString, call: &dyn ToString) -> Result<()> {
    let value = format!("made for {field} {}", made_for.to_string());
    let rule = format!("this call has {field} {}", call.to_string());
    Err(Error::invalid("plan", value, rule))
}
