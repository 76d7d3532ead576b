//! `sparse_prefill`: attention of many query tokens, each over keys of its own choice.

use crate::check_attention;
use crate::check_sparse;
use crate::dtype::{DType, KvFormat};
use crate::error::Result;
use crate::plan::Plan;
use crate::plan_args::{PlanArgs, Queries};
use crate::problem::SparseProblem;
use crate::sparse::{CheckedSparse, plan_args};
use crate::view::{Dims, Parts, Stream, View};

/// The arguments of [`sparse_prefill`].
///
/// Symbols: `t` query tokens, `h` query heads, `d_qk` 576 or 512.
#[derive(Debug, Clone)]
pub struct SparsePrefillArgs<'a> {
    /// `[t, h, d_qk]`, bf16 or fp16, or `([t, h, 512], [t, h, 64])`.
    pub q: Parts,
    /// `[n_tokens, d_qk]` in q's type, or a paged cache as [`SparseDecodeArgs`](crate::SparseDecodeArgs) takes it
    /// (`[n_tokens, 1, d_qk]` is one of pages of one token), or the pair of parts of either.
    pub kv: Parts,
    /// `[t, topk]` or `[t, 1, topk]` int32: the keys of each query token: rows of `kv`, or `page * P + offset`. An
    /// entry outside is no key; one that stands twice counts twice.
    pub indices: View,
    /// `[t]` int32: only the leading entries count; `None`: all.
    pub topk_lengths: Option<View>,
    /// Factor of the scores, above 0; `d_qk ** -0.5` when `None`.
    pub softmax_scale: Option<f64>,
    /// `None`: the element type of `kv` says it.
    pub kv_format: Option<KvFormat>,
    /// What the numbers of an `fp8` cache are multiplied by, those of an extra one too, as float32; 1 when `None`. Only for
    /// that format.
    pub kv_scale: Option<f64>,
    /// `[h]` float32: `out *= exp(lse) / (exp(lse) + exp(sink))`; `lse` and `max_logits` stay as they are.
    pub attn_sink: Option<View>,
    /// A schedule made before for these shapes ([`Queries::SparsePrefill`]); `None`: this call makes its own. The lengths that it was made or
    /// last updated with count, not `topk_lengths`.
    pub plan: Option<&'a Plan>,
    /// A token's result depends on nothing else in the call, bit for bit: no list is split. It costs time on CUDA, where the lists of few
    /// tokens are shared out, and of many those that are left when all multiprocessors have as many.
    pub batch_invariant: bool,
    /// `[t, h, 512]` in q's type.
    pub out: View,
    /// `[t, h]` float32: the largest scaled score; -inf where there is no key.
    pub max_logits: View,
    /// `[t, h]` float32: natural logarithm of the sum of exponentials; `empty_lse` where there is no key.
    pub lse: View,
    /// The `lse` of rows without a key; -inf by default, which merges with others as nothing. Not NaN.
    pub empty_lse: f32,
    /// `[bytes]` uint8, at least [`SparsePrefillArgs::workspace_bytes`], on a multiple of
    /// [`WORKSPACE_ALIGNMENT`](crate::WORKSPACE_ALIGNMENT) bytes. Needed without a plan; ignored with one.
    /// Where lists are split it holds partial results, up to 35 MB: few tokens may need more than many.
    pub workspace: Option<View>,
    /// Where to launch.
    pub stream: Stream,
}

impl<'a> SparsePrefillArgs<'a> {
    /// Arguments with the defaults: all entries of the lists, no sink, no workspace, stream 0.
    pub fn new(q: Parts, kv: Parts, indices: View, out: View, max_logits: View, lse: View) -> Self {
        Self {
            q,
            kv,
            indices,
            topk_lengths: None,
            softmax_scale: None,
            kv_format: None,
            kv_scale: None,
            attn_sink: None,
            plan: None,
            batch_invariant: false,
            out,
            max_logits,
            lse,
            empty_lse: f32::NEG_INFINITY,
            workspace: None,
            stream: Stream::default(),
        }
    }

    /// What a plan for this call must be made for. Checks every argument but `workspace`.
    ///
    /// # Errors
    /// As [`sparse_prefill`].
    ///
    /// ```
    /// use ferromla::{DType, Plan, Queries, SparsePrefillArgs, Stream, View, sparse_prefill};
    /// let (q, kv, indices) = (vec![0u16; 512], vec![0u16; 8 * 512], [3i32, 5]);
    /// let (mut out, mut max_logits, mut lse) = (vec![0u16; 512], [0f32], [0f32]);
    /// let mut args = SparsePrefillArgs::new(
    ///     View::of(&q, DType::Bf16, &[1, 1, 512])?.into(),
    ///     View::of(&kv, DType::Bf16, &[8, 512])?.into(),
    ///     View::of(&indices, DType::I32, &[1, 2])?,
    ///     View::of_mut(&mut out, DType::Bf16, &[1, 1, 512])?,
    ///     View::of_mut(&mut max_logits, DType::F32, &[1, 1])?,
    ///     View::of_mut(&mut lse, DType::F32, &[1, 1])?,
    /// );
    /// let plan_args = args.plan_args()?;
    /// assert_eq!(plan_args.queries, Queries::SparsePrefill { num_tokens: 1, topk: 2 });
    /// let mut memory = vec![0u128; Plan::workspace_bytes(&plan_args)?.div_ceil(16) as usize];
    /// let workspace = View::workspace(&mut memory);
    /// // SAFETY: the views are of the arrays above.
    /// unsafe {
    ///     let plan = Plan::new_sparse(&plan_args, None, None, workspace, Stream::default())?;
    ///     args.plan = Some(&plan);
    ///     sparse_prefill(&args)?;
    /// }
    /// assert_eq!(lse, [2f32.ln()]);
    /// # Ok::<(), ferromla::Error>(())
    /// ```
    pub fn plan_args(&self) -> Result<PlanArgs> {
        Ok(self.plan_args_of(&check_sparse::prefill(self)?.0))
    }

    fn plan_args_of(&self, problem: &SparseProblem) -> PlanArgs {
        PlanArgs {
            queries: Queries::SparsePrefill {
                num_tokens: problem.q_len.into(),
                topk: problem.main.topk.into(),
            },
            batch_invariant: self.batch_invariant,
            ..plan_args(problem)
        }
    }

    /// The exact size of the workspace this call needs, in bytes; 0 with a plan. Checks like
    /// [`SparsePrefillArgs::check`], whose result says it too.
    ///
    /// # Errors
    /// As [`sparse_prefill`].
    pub fn workspace_bytes(&self) -> Result<u64> {
        Ok(self.check()?.workspace_bytes())
    }

    /// Checks every argument but `workspace`, once: for callers that allocate the workspace when they know
    /// its size, which does not depend on the number of cached tokens.
    ///
    /// # Errors
    /// As [`sparse_prefill`].
    pub fn check(&self) -> Result<CheckedSparse<'a>> {
        let (problem, taken) = check_sparse::prefill(self)?;
        let call = self.plan_args_of(&problem);
        CheckedSparse::of(problem, taken, self.plan, call)
    }
}

/// The outputs that fit a `q`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparsePrefillOutputs {
    /// `[t, h, 512]`.
    pub out: Dims,
    /// Of `out`: q's.
    pub dtype: DType,
    /// `[t, h]`, of both `max_logits` and `lse`; float32.
    pub rows: Dims,
}

/// The shapes and type of the outputs of a sparse prefill for this `q`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) naming `q` when its shape or type is not allowed.
///
/// ```
/// use ferromla::{DType, View, sparse_prefill_outputs};
/// let q = View::of(&[0u16; 0], DType::Bf16, &[0, 16, 576])?;
/// assert_eq!(&sparse_prefill_outputs(&q.into())?.out[..], &[0, 16, 512]);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub fn sparse_prefill_outputs(q: &Parts) -> Result<SparsePrefillOutputs> {
    let query = check_attention::query(q, true)?;
    Ok(SparsePrefillOutputs {
        out: check_attention::out_shape(&query.leading),
        dtype: query.dtype,
        rows: query.leading,
    })
}

/// Attention of `q` over the listed rows of `kv` into `out`, `max_logits` and `lse`. On CUDA some lists are split, unless
/// [`SparsePrefillArgs::batch_invariant`] asks for none to be.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode).
///
/// ```
/// use ferromla::{DType, SparsePrefillArgs, View, sparse_prefill};
/// let one = 0x3f80u16; // 1.0 in bfloat16
/// let (q, kv, indices) = (vec![one; 512], vec![one; 8 * 512], [3i32, 5]);
/// let (mut out, mut max_logits, mut lse) = (vec![0u16; 512], [0f32], [0f32]);
/// let mut args = SparsePrefillArgs::new(
///     View::of(&q, DType::Bf16, &[1, 1, 512])?.into(),
///     View::of(&kv, DType::Bf16, &[8, 512])?.into(),
///     View::of(&indices, DType::I32, &[1, 2])?,
///     View::of_mut(&mut out, DType::Bf16, &[1, 1, 512])?,
///     View::of_mut(&mut max_logits, DType::F32, &[1, 1])?,
///     View::of_mut(&mut lse, DType::F32, &[1, 1])?,
/// );
/// args.softmax_scale = Some(1.0 / 64.0);
/// let mut workspace = vec![0u128; args.workspace_bytes()?.div_ceil(16) as usize];
/// args.workspace = Some(View::workspace(&mut workspace));
/// // SAFETY: the views are of the arrays above.
/// unsafe { sparse_prefill(&args)? };
/// assert_eq!((out[0], max_logits), (one, [8.0]));
/// assert!((lse[0] - (8.0 + 2f32.ln())).abs() < 1e-6);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn sparse_prefill(args: &SparsePrefillArgs<'_>) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { args.check()?.run(args.workspace.as_ref()) }
}
