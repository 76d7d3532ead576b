//! The arguments of `decode` and `prefill`, and the way that both go: check, plan, launch.

use crate::check_attention;
use crate::dtype::{DType, Device, KvFormat};
use crate::error::Result;
use crate::overlap::Taken;
use crate::plan::Plan;
use crate::plan_args::{PlanArgs, Queries};
use crate::plan_source::PlanSource;
use crate::problem::{AttentionProblem, QueryTokens, out_dtype};
use crate::view::{Dims, Parts, Stream, View};
use crate::{cpu, cuda, values};

/// The arguments of [`decode`](crate::decode) ([`DecodeArgs`](crate::DecodeArgs), where `qo_indptr` is `()`)
/// and of [`prefill`](crate::prefill) ([`PrefillArgs`](crate::PrefillArgs), where it is a [`View`]).
///
/// Symbols: `b` requests, `s_q` query tokens per request, `t` query tokens of all requests, `h` query heads,
/// `h_kv` cached heads, `n` pages of `P` tokens, `d_qk` 576 or 512. Where a shape begins with `[b, s_q, ...]`,
/// that of a prefill begins with `[t, ...]`.
#[derive(Debug, Clone)]
pub struct AttentionArgs<'a, Indptr> {
    /// `[b, s_q, h, d_qk]`, bf16 or fp16, or `([b, s_q, h, 512], [b, s_q, h, 64])`; e4m3 too over a cache of
    /// the format `fp8`.
    pub q: Parts,
    /// `[n, P, d_qk]` or `[n, P, h_kv, d_qk]` in q's type, or the pair `([..., 512], [..., 64])`. Of the
    /// formats `fp8` and `fp8_v32`: `[n, P, bytes]` or `[n, P, 1, bytes]`, uint8, int8 or e4m3.
    pub kv_cache: Parts,
    /// `[b, max_pages]` int32: the page of each request's tokens `P * column ..`.
    pub block_table: View,
    /// `[b]` int32: tokens in the cache per request, those of its queries included.
    pub seq_lens: View,
    /// Prefill: `[b + 1]` int32. The query tokens of request `r` are `qo_indptr[r] .. qo_indptr[r + 1]` of `q`.
    pub qo_indptr: Indptr,
    /// Factor of the scores, above 0, also as float32, by itself and times `kv_scale` and one `q_scale`; `d_qk ** -0.5` when `None`.
    pub softmax_scale: Option<f64>,
    /// Query `i` of the `s_q` of its request sees keys `0 ..= seq_len - s_q + i` only.
    pub causal: bool,
    /// `None`: the cache's element type says it (bf16, fp16; e4m3: `fp8`).
    pub kv_format: Option<KvFormat>,
    /// What the numbers of an `fp8` cache are multiplied by, as float32; 1 when `None`. Only for that format.
    pub kv_scale: Option<f64>,
    /// What e4m3 queries are multiplied by; 1 when `None`. Only for them.
    pub q_scale: Option<QScale>,
    /// `[h]` float32: `out *= exp(lse) / (exp(lse) + exp(sink))`; `lse` stays as it is.
    pub attn_sink: Option<View>,
    /// A schedule made before for these shapes; `None`: this call makes its own. What it was made or last
    /// updated with counts, not the values of `seq_lens` and `qo_indptr` at this call.
    pub plan: Option<&'a Plan>,
    /// Fixes the parts every request is cut into; `None`: the scheduler chooses. Not with a `plan`, which
    /// has its own.
    pub num_splits: Option<u32>,
    /// A request's result depends on nothing else in the batch, bit for bit, as in [`PlanArgs`]; with a `plan` only if that was made so.
    pub batch_invariant: bool,
    /// The query tokens of the request that has most, as in [`PlanArgs`]: of `prefill` only, and not with a `plan`, which has its own.
    pub max_q_len: Option<i64>,
    /// `[b, s_q, h, 512]` in q's type; bf16 for e4m3 queries.
    pub out: View,
    /// `[b, s_q, h]` float32: natural logarithm of the sum of exponentials; `empty_lse` where no key is seen.
    pub lse: View,
    /// The `lse` of rows that see no key; -inf by default, which merges with others as nothing. Not NaN.
    pub empty_lse: f32,
    /// `[bytes]` uint8, at least [`AttentionArgs::workspace_bytes`], on a multiple of
    /// [`WORKSPACE_ALIGNMENT`](crate::WORKSPACE_ALIGNMENT) bytes. Needed without a plan; ignored with one.
    pub workspace: Option<View>,
    /// Where to launch.
    pub stream: Stream,
}

/// What e4m3 queries are multiplied by.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::large_enum_variant)] // lives for one call, and views are `Copy`
pub enum QScale {
    /// One number, as float32.
    One(f64),
    /// `[b, s_q, h]` float32, for a prefill `[t, h]`.
    Rows(View),
}

/// What tells which query tokens are whose: `()` where every request has the same number, else a [`View`].
pub trait QoIndptr: sealed::Sealed {
    /// The `qo_indptr` of a prefill.
    fn view(&self) -> Option<&View>;
}

impl QoIndptr for () {
    fn view(&self) -> Option<&View> {
        None
    }
}

impl QoIndptr for View {
    fn view(&self) -> Option<&View> {
        Some(self)
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for () {}
    impl Sealed for crate::View {}
}

/// The tensors that a call cannot do without.
pub(crate) struct Tensors {
    pub q: Parts,
    pub kv_cache: Parts,
    pub block_table: View,
    pub seq_lens: View,
    pub out: View,
    pub lse: View,
}

impl<'a, Indptr: QoIndptr> AttentionArgs<'a, Indptr> {
    /// The defaults: causal, automatic splits, no sink, no plan, no workspace, stream 0.
    pub(crate) fn with_defaults(tensors: Tensors, qo_indptr: Indptr) -> Self {
        Self {
            q: tensors.q,
            kv_cache: tensors.kv_cache,
            block_table: tensors.block_table,
            seq_lens: tensors.seq_lens,
            qo_indptr,
            softmax_scale: None,
            causal: true,
            kv_format: None,
            kv_scale: None,
            q_scale: None,
            attn_sink: None,
            plan: None,
            num_splits: None,
            batch_invariant: false,
            max_q_len: None,
            out: tensors.out,
            lse: tensors.lse,
            empty_lse: f32::NEG_INFINITY,
            workspace: None,
            stream: Stream::default(),
        }
    }

    /// What a plan for this call must be made for: `max_seq_len` is the capacity of the block table.
    /// Checks every argument but `out`, `lse` and `workspace`.
    ///
    /// # Errors
    /// As [`decode`](crate::decode).
    pub fn plan_args(&self) -> Result<PlanArgs> {
        Ok(self.plan_args_of(&check_attention::inputs(self)?))
    }

    fn plan_args_of(&self, problem: &AttentionProblem) -> PlanArgs {
        PlanArgs {
            batch: problem.table.batch.into(),
            num_heads: problem.heads.into(),
            num_kv_heads: problem.cache.kv_heads.into(),
            queries: Queries::of(&problem.queries),
            kv_format: Some(problem.cache.format),
            extra_kv_format: None,
            page_size: problem.cache.page_size.into(),
            causal: self.causal,
            num_splits: self.num_splits,
            batch_invariant: self.batch_invariant,
            max_seq_len: Some(problem.table.capacity(problem.cache.page_size)),
            max_q_len: self.max_q_len,
            num_sms: None,
            device: problem.device,
        }
    }

    /// The exact size of the workspace this call needs, in bytes; 0 with a plan. Checks like
    /// [`AttentionArgs::plan_args`].
    ///
    /// # Errors
    /// As [`decode`](crate::decode).
    pub fn workspace_bytes(&self) -> Result<u64> {
        let problem = check_attention::inputs(self)?;
        Ok(self.plan_for(&problem)?.workspace_bytes())
    }

    /// Checks every argument but `workspace`, once: for callers that allocate the workspace when they know
    /// its size.
    ///
    /// # Errors
    /// As [`decode`](crate::decode).
    pub fn check(&self) -> Result<Checked<'a>> {
        let mut problem = check_attention::inputs(self)?;
        let taken = check_attention::outputs(self, &mut problem)?;
        let plan = self.plan_for(&problem)?;
        plan.apart_from(&taken)?;
        Ok(Checked {
            problem,
            plan,
            taken,
        })
    }

    fn plan_for(&self, problem: &AttentionProblem) -> Result<PlanSource<'a>> {
        PlanSource::of(self.plan, self.plan_args_of(problem))
    }
}

/// A call whose arguments have been checked, all but its workspace: made by [`AttentionArgs::check`].
///
/// ```
/// use ferromla::{DType, DecodeArgs, Device, View};
/// let (q, kv, table, lens) = ([0x3f80u16; 576], vec![0x3f80u16; 64 * 576], [0i32], [1i32]);
/// let (mut out, mut lse) = ([0u16; 512], [0f32]);
/// // SAFETY: the views describe the arrays above, which outlive the call.
/// unsafe {
///     let view = |ptr, dtype, shape: &[i64]| View::contiguous(ptr, dtype, Device::Cpu, shape);
///     let checked = DecodeArgs::new(
///         view(q.as_ptr().cast(), DType::Bf16, &[1, 1, 1, 576]).into(),
///         view(kv.as_ptr().cast(), DType::Bf16, &[1, 64, 576]).into(),
///         view(table.as_ptr().cast(), DType::I32, &[1, 1]),
///         view(lens.as_ptr().cast(), DType::I32, &[1]),
///         view(out.as_mut_ptr().cast(), DType::Bf16, &[1, 1, 1, 512]),
///         view(lse.as_mut_ptr().cast(), DType::F32, &[1, 1, 1]),
///     )
///     .check()?;
///     let mut memory = vec![0u128; checked.workspace_bytes().div_ceil(16) as usize];
///     let bytes = 16 * memory.len() as i64;
///     let workspace = view(memory.as_mut_ptr().cast(), DType::U8, &[bytes]);
///     checked.run(Some(&workspace))?;
/// }
/// assert_eq!(out, [0x3f80; 512]);
/// # Ok::<(), ferromla::Error>(())
/// ```
#[derive(Debug)]
pub struct Checked<'a> {
    problem: AttentionProblem,
    plan: PlanSource<'a>,
    taken: Taken,
}

impl Checked<'_> {
    /// Bytes of the workspace that [`Checked::run`] needs; 0 with a plan.
    pub fn workspace_bytes(&self) -> u64 {
        self.plan.workspace_bytes()
    }

    /// Plans where the call has no plan, then attends. The workspace is `[bytes]` uint8, on a multiple of
    /// [`WORKSPACE_ALIGNMENT`](crate::WORKSPACE_ALIGNMENT) bytes; with a plan it is not looked at.
    ///
    /// # Errors
    /// As [`decode`](crate::decode), for the workspace.
    ///
    /// # Safety
    /// As for [`decode`](crate::decode).
    pub unsafe fn run(&self, workspace: Option<&View>) -> Result<()> {
        // SAFETY: the caller's promise; the plan fits, or was made for this problem.
        let run = |plan: &Plan, fill| unsafe { attend(&self.problem, plan, fill) };
        self.plan.provide(workspace, &self.taken, run)
    }
}

/// The last step: the plan where it is this call's own, then the attention.
///
/// # Safety
/// As for [`decode`](crate::decode); the plan was made for this problem.
unsafe fn attend(problem: &AttentionProblem, plan: &Plan, fill: bool) -> Result<()> {
    if problem.is_empty() {
        return Ok(());
    }
    if values::checked() {
        // SAFETY: the index arrays are live (the caller's promise) and have been checked.
        unsafe { values::attention(problem)? };
        if !fill {
            // SAFETY: as above; the plan's workspace is live, too.
            unsafe { values::planned(plan, &problem.lengths(), problem.stream)? };
        }
    }
    if fill {
        // SAFETY: the caller's promise.
        unsafe { plan.fill(&problem.lengths(), problem.device, problem.stream)? };
    }
    match problem.device {
        // SAFETY: the caller's promise, and the problem has been checked.
        Device::Cpu => unsafe { cpu::decode(problem, plan) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::decode(ordinal, problem, plan) },
    }
}

/// The outputs that fit a `q`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionOutputs {
    /// q's shape but 512 wide.
    pub out: Dims,
    /// Of `out`: q's, or bf16 for e4m3 queries.
    pub dtype: DType,
    /// q's shape without its last dimension; float32.
    pub lse: Dims,
}

impl AttentionOutputs {
    pub(crate) fn of(q: &Parts, ragged: bool) -> Result<Self> {
        let query = check_attention::query(q, ragged)?;
        Ok(Self {
            out: check_attention::out_shape(&query.leading),
            dtype: out_dtype(query.dtype),
            lse: query.leading,
        })
    }
}

impl Queries {
    fn of(tokens: &QueryTokens) -> Self {
        match *tokens {
            QueryTokens::Uniform { q_len } => Self::Uniform {
                q_len: q_len.into(),
            },
            QueryTokens::Ragged { tokens, .. } => Self::Ragged {
                num_tokens: tokens.into(),
            },
        }
    }
}
