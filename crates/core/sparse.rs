//! `sparse_decode`: attention of a few new query tokens per request, each over keys of its own choice.

use crate::check_sparse;
use crate::dtype::{Device, KvFormat};
use crate::error::Result;
use crate::overlap::Taken;
use crate::plan::Plan;
use crate::plan_args::{PlanArgs, Queries};
use crate::plan_source::PlanSource;
use crate::problem::SparseProblem;
use crate::view::{Parts, Stream, View};
use crate::{cpu, cuda, values};

/// Keys from a second cache, which join the same softmax.
#[derive(Debug, Clone)]
pub struct ExtraKeys {
    /// `[n, P, d_qk]` or `[n, P, 1, d_qk]`, with a page size of its own, or the pair of parts.
    pub kv_cache: Parts,
    /// `[b, s_q, extra_topk]` int32, as `indices`, into this cache.
    pub indices: View,
    /// `[b]` or `[b, s_q]` int32: only the leading entries count; `None`: all.
    pub topk_lengths: Option<View>,
    /// `None`: that of the main cache where it is given, else the cache's element type says it.
    pub kv_format: Option<KvFormat>,
}

/// The arguments of [`sparse_decode`]. Symbols as in [`AttentionArgs`](crate::AttentionArgs).
#[derive(Debug, Clone)]
pub struct SparseDecodeArgs<'a> {
    /// `[b, s_q, h, d_qk]`, bf16 or fp16, or `([b, s_q, h, 512], [b, s_q, h, 64])`.
    pub q: Parts,
    /// `[n, P, d_qk]` or `[n, P, 1, d_qk]` in q's type, or the pair of parts; of a quantised format, for bf16 queries,
    /// `[n, P, bytes]` or `[n, P, 1, bytes]`, uint8, int8 or e4m3.
    pub kv_cache: Parts,
    /// `[b, s_q, topk]` int32: the keys of each query token, each `page * P + offset`. An entry outside the cache
    /// is no key; one that stands twice counts twice.
    pub indices: View,
    /// `[b]` or `[b, s_q]` int32: only the leading entries count; `None`: all.
    pub topk_lengths: Option<View>,
    /// Keys from a second cache.
    pub extra: Option<ExtraKeys>,
    /// Factor of the scores, above 0; `d_qk ** -0.5` when `None`.
    pub softmax_scale: Option<f64>,
    /// `None`: the cache's element type says it.
    pub kv_format: Option<KvFormat>,
    /// What the numbers of an `fp8` cache are multiplied by, those of an extra one too, as float32; 1 when `None`. Only for
    /// that format.
    pub kv_scale: Option<f64>,
    /// `[h]` float32: `out *= exp(lse) / (exp(lse) + exp(sink))`; `lse` stays as it is.
    pub attn_sink: Option<View>,
    /// A schedule made before for these shapes ([`Queries::Sparse`]); `None`: this call makes its own. The
    /// lengths that it was made or last updated with count, not those of this call.
    pub plan: Option<&'a Plan>,
    /// Fixes the parts every token's keys are cut into; `None`: the scheduler chooses.
    pub num_splits: Option<u32>,
    /// A token's result depends on nothing else in the batch, bit for bit.
    pub batch_invariant: bool,
    /// `[b, s_q, h, 512]` in q's type.
    pub out: View,
    /// `[b, s_q, h]` float32: natural logarithm of the sum of exponentials; `empty_lse` where there is no key.
    pub lse: View,
    /// The `lse` of rows without a key; -inf by default, which merges with others as nothing. Not NaN.
    pub empty_lse: f32,
    /// `[bytes]` uint8, at least [`SparseDecodeArgs::workspace_bytes`], on a multiple of
    /// [`WORKSPACE_ALIGNMENT`](crate::WORKSPACE_ALIGNMENT) bytes. Needed without a plan; ignored with one.
    pub workspace: Option<View>,
    /// Where to launch.
    pub stream: Stream,
}

impl<'a> SparseDecodeArgs<'a> {
    /// Arguments with the defaults: all entries of the lists, no extra cache, automatic splits, no sink, no plan,
    /// no workspace, stream 0.
    pub fn new(q: Parts, kv_cache: Parts, indices: View, out: View, lse: View) -> Self {
        Self {
            q,
            kv_cache,
            indices,
            topk_lengths: None,
            extra: None,
            softmax_scale: None,
            kv_format: None,
            kv_scale: None,
            attn_sink: None,
            plan: None,
            num_splits: None,
            batch_invariant: false,
            out,
            lse,
            empty_lse: f32::NEG_INFINITY,
            workspace: None,
            stream: Stream::default(),
        }
    }

    /// What a plan for this call must be made for. Checks every argument but `workspace`.
    ///
    /// # Errors
    /// As [`sparse_decode`].
    ///
    /// ```
    /// use ferromla::{DType, Plan, Queries, SparseDecodeArgs, Stream, View, sparse_decode};
    /// let (q, kv, indices) = (vec![0u16; 576], vec![0u16; 4 * 64 * 576], [200i32, -1, 200]);
    /// let (mut out, mut lse) = (vec![0u16; 512], [0f32]);
    /// let mut args = SparseDecodeArgs::new(
    ///     View::of(&q, DType::Bf16, &[1, 1, 1, 576])?.into(),
    ///     View::of(&kv, DType::Bf16, &[4, 64, 576])?.into(),
    ///     View::of(&indices, DType::I32, &[1, 1, 3])?,
    ///     View::of_mut(&mut out, DType::Bf16, &[1, 1, 1, 512])?,
    ///     View::of_mut(&mut lse, DType::F32, &[1, 1, 1])?,
    /// );
    /// let plan_args = args.plan_args()?;
    /// assert_eq!(plan_args.queries, Queries::Sparse { q_len: 1, topk: 3, extra_topk: 0 });
    /// let mut memory = vec![0u128; Plan::workspace_bytes(&plan_args)?.div_ceil(16) as usize];
    /// let workspace = View::workspace(&mut memory);
    /// // SAFETY: the views are of the arrays above.
    /// unsafe {
    ///     let plan = Plan::new_sparse(&plan_args, None, None, workspace, Stream::default())?;
    ///     args.plan = Some(&plan);
    ///     sparse_decode(&args)?;
    /// }
    /// assert_eq!(lse, [2f32.ln()]);
    /// # Ok::<(), ferromla::Error>(())
    /// ```
    pub fn plan_args(&self) -> Result<PlanArgs> {
        Ok(self.plan_args_of(&check_sparse::decode(self)?.0))
    }

    fn plan_args_of(&self, problem: &SparseProblem) -> PlanArgs {
        PlanArgs {
            queries: Queries::Sparse {
                q_len: problem.q_len.into(),
                topk: problem.main.topk.into(),
                extra_topk: problem.extra.map_or(0, |extra| extra.topk.into()),
            },
            num_splits: self.num_splits,
            batch_invariant: self.batch_invariant,
            ..plan_args(problem)
        }
    }

    /// The exact size of the workspace this call needs, in bytes; 0 with a plan. Checks like
    /// [`SparseDecodeArgs::check`], whose result says it too.
    ///
    /// # Errors
    /// As [`sparse_decode`].
    pub fn workspace_bytes(&self) -> Result<u64> {
        Ok(self.check()?.workspace_bytes())
    }

    /// Checks every argument but `workspace`, once: for callers that allocate the workspace when they know
    /// its size.
    ///
    /// # Errors
    /// As [`sparse_decode`].
    pub fn check(&self) -> Result<CheckedSparse<'a>> {
        let (problem, taken) = check_sparse::decode(self)?;
        let call = self.plan_args_of(&problem);
        CheckedSparse::of(problem, taken, self.plan, call)
    }
}

/// What any plan of this problem is for.
pub(crate) fn plan_args(problem: &SparseProblem) -> PlanArgs {
    PlanArgs {
        kv_format: Some(problem.main.cache.format),
        extra_kv_format: problem.extra.map(|extra| extra.cache.format),
        ..PlanArgs::new(problem.device, problem.batch.into(), problem.heads.into())
    }
}

/// Attention of `q` over the listed keys of a paged cache into `out` and `lse`.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode).
///
/// ```
/// use ferromla::{DType, SparseDecodeArgs, View, sparse_decode};
/// // One query token; of its three keys one is absent and the other stands twice.
/// let one = 0x3f80u16; // 1.0 in bfloat16
/// let (q, kv, indices) = (vec![0u16; 576], vec![one; 4 * 64 * 576], [200i32, -1, 200]);
/// let (mut out, mut lse) = (vec![0u16; 512], [0f32]);
/// let mut args = SparseDecodeArgs::new(
///     View::of(&q, DType::Bf16, &[1, 1, 1, 576])?.into(),
///     View::of(&kv, DType::Bf16, &[4, 64, 576])?.into(),
///     View::of(&indices, DType::I32, &[1, 1, 3])?,
///     View::of_mut(&mut out, DType::Bf16, &[1, 1, 1, 512])?,
///     View::of_mut(&mut lse, DType::F32, &[1, 1, 1])?,
/// );
/// let mut workspace = vec![0u128; args.workspace_bytes()?.div_ceil(16) as usize];
/// args.workspace = Some(View::workspace(&mut workspace));
/// // SAFETY: the views are of the arrays above.
/// unsafe { sparse_decode(&args)? };
/// assert_eq!(out, vec![one; 512]);
/// assert_eq!(lse, [2f32.ln()]);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn sparse_decode(args: &SparseDecodeArgs<'_>) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { args.check()?.run(args.workspace.as_ref()) }
}

/// A sparse call whose arguments have been checked, all but its workspace: made by
/// [`SparseDecodeArgs::check`] and [`SparsePrefillArgs::check`](crate::SparsePrefillArgs::check).
#[derive(Debug)]
pub struct CheckedSparse<'a> {
    problem: SparseProblem,
    plan: PlanSource<'a>,
    taken: Taken,
}

impl<'a> CheckedSparse<'a> {
    /// A problem that has been checked, with its plan, or one that is still to be made for `call`.
    pub(crate) fn of(
        problem: SparseProblem,
        taken: Taken,
        plan: Option<&'a Plan>,
        call: PlanArgs,
    ) -> Result<Self> {
        let plan = PlanSource::of(plan, call)?;
        plan.apart_from(&taken)?;
        Ok(Self {
            problem,
            plan,
            taken,
        })
    }

    /// Bytes of the workspace that [`CheckedSparse::run`] needs, which begins on a multiple of
    /// [`WORKSPACE_ALIGNMENT`](crate::WORKSPACE_ALIGNMENT); 0 with a plan.
    pub fn workspace_bytes(&self) -> u64 {
        self.plan.workspace_bytes()
    }

    /// Plans where the call has no plan, then attends. The workspace is `[bytes]` uint8 on a multiple of
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
unsafe fn attend(problem: &SparseProblem, plan: &Plan, fill: bool) -> Result<()> {
    if problem.is_empty() {
        return Ok(());
    }
    if values::checked() {
        // SAFETY: the index arrays are live (the caller's promise) and have been checked.
        unsafe { values::sparse(problem)? };
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
        Device::Cpu => unsafe { cpu::sparse(problem, plan) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::sparse(ordinal, problem, plan) },
    }
}
