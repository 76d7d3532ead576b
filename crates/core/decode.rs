//! `decode`: attention of a few new query tokens per request over a paged latent cache.

use crate::check_decode;
use crate::dtype::{DType, Device, KvFormat};
use crate::error::{Error, Result};
use crate::plan::{Plan, PlanArgs};
use crate::problem::{DecodeProblem, NOPE_DIM};
use crate::view::{Dims, Parts, Stream, View};
use crate::{cpu, cuda, values};

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
    /// Factor of the scores, above 0; `d_qk ** -0.5` when `None`.
    pub softmax_scale: Option<f64>,
    /// Query `i` sees keys `0 ..= seq_len - s_q + i` only.
    pub causal: bool,
    /// `None`: the cache's element type says it.
    pub kv_format: Option<KvFormat>,
    /// `[h]` float32: `out *= exp(lse) / (exp(lse) + exp(sink))`; `lse` stays as it is.
    pub attn_sink: Option<View>,
    /// A schedule made before for these shapes; `None`: this call makes its own. The lengths that it was made
    /// or last updated with count, not the values of `seq_lens` at this call.
    pub plan: Option<&'a Plan>,
    /// Fixes the parts every request is cut into; `None`: the scheduler chooses. Not with a `plan`, which
    /// has its own.
    pub num_splits: Option<u32>,
    /// A request's result depends on nothing else in the batch, bit for bit. Not with `num_splits`; with a
    /// `plan` only if that was made so.
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
        Ok(self.plan_args_of(&check_decode::inputs(self)?))
    }

    fn plan_args_of(&self, problem: &DecodeProblem) -> PlanArgs {
        PlanArgs {
            batch: problem.table.batch.into(),
            num_heads: problem.heads.into(),
            num_kv_heads: problem.cache.kv_heads.into(),
            q_len: problem.q_len.into(),
            kv_format: self.kv_format,
            page_size: problem.cache.page_size.into(),
            causal: self.causal,
            num_splits: self.num_splits,
            batch_invariant: self.batch_invariant,
            max_seq_len: Some(problem.table.capacity(problem.cache.page_size)),
            device: problem.device,
        }
    }

    /// The exact size of the workspace this call needs, in bytes; 0 with a plan. Checks like
    /// [`DecodeArgs::plan_args`].
    ///
    /// # Errors
    /// As [`decode`].
    pub fn workspace_bytes(&self) -> Result<u64> {
        let problem = check_decode::inputs(self)?;
        match self.plan {
            Some(plan) => self.plan_fits(plan, &problem).map(|()| 0),
            None => crate::plan::workspace_bytes(&self.plan_args_of(&problem)),
        }
    }

    /// The plan was made for this problem, and nothing asks for another one.
    fn plan_fits(&self, plan: &Plan, problem: &DecodeProblem) -> Result<()> {
        plan.made_for(problem)?;
        if self.num_splits.is_some() && self.num_splits != plan.args().num_splits {
            let number = |parts: Option<u32>| parts.map_or("None".to_owned(), |n| n.to_string());
            let value = format!("{} with a plan", number(self.num_splits));
            let made_with = number(plan.args().num_splits);
            let rule = format!("None, or {made_with} as the plan was made with");
            return Err(Error::invalid("num_splits", value, rule));
        }
        if self.batch_invariant && !plan.args().batch_invariant {
            let rule = "the plan was made without batch_invariant";
            return Err(Error::invalid("batch_invariant", "true with a plan", rule));
        }
        Ok(())
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
///
/// ```
/// use ferromla::{DType, Device, View, decode_outputs};
/// // SAFETY: an empty view describes no memory.
/// let q = unsafe { View::contiguous(std::ptr::null(), DType::Bf16, Device::Cpu, &[0, 1, 16, 576]) };
/// assert_eq!(&decode_outputs(&q.into())?.out[..], &[0, 1, 16, 512]);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub fn decode_outputs(q: &Parts) -> Result<DecodeOutputs> {
    let (_, [batch, q_len, heads], dtype) = check_decode::query(q)?;
    Ok(DecodeOutputs {
        out: Dims::new(&[batch, q_len, heads, NOPE_DIM]),
        dtype,
        lse: Dims::new(&[batch, q_len, heads]),
    })
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
///
/// ```
/// use ferromla::{DType, DecodeArgs, Device, View, decode};
/// // One request with one cached token of ones: attention gives it back.
/// let one = 0x3f80u16; // 1.0 in bfloat16
/// let (q, kv, table, lens) = (vec![one; 576], vec![one; 64 * 576], [0i32], [1i32]);
/// let (mut out, mut lse) = (vec![0u16; 512], [0f32]);
/// // SAFETY: the views describe the arrays above, which outlive the call.
/// unsafe {
///     let view = |ptr, dtype, shape: &[i64]| View::contiguous(ptr, dtype, Device::Cpu, shape);
///     let mut args = DecodeArgs::new(
///         view(q.as_ptr().cast(), DType::Bf16, &[1, 1, 1, 576]).into(),
///         view(kv.as_ptr().cast(), DType::Bf16, &[1, 64, 576]).into(),
///         view(table.as_ptr().cast(), DType::I32, &[1, 1]),
///         view(lens.as_ptr().cast(), DType::I32, &[1]),
///         view(out.as_mut_ptr().cast(), DType::Bf16, &[1, 1, 1, 512]),
///         view(lse.as_mut_ptr().cast(), DType::F32, &[1, 1, 1]),
///     );
///     let mut workspace = vec![0u64; args.workspace_bytes()?.div_ceil(8) as usize];
///     let bytes = 8 * workspace.len() as i64;
///     args.workspace = Some(view(workspace.as_mut_ptr().cast(), DType::U8, &[bytes]));
///     decode(&args)?;
/// }
/// assert_eq!(out, vec![one; 512]);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn decode(args: &DecodeArgs<'_>) -> Result<()> {
    let mut problem = check_decode::inputs(args)?;
    check_decode::outputs(args, &mut problem)?;
    if let Some(plan) = args.plan {
        args.plan_fits(plan, &problem)?;
        // SAFETY: the caller's promise; the plan fits.
        return unsafe { run(&problem, plan, false) };
    }
    let plan_args = args.plan_args_of(&problem);
    let Some(workspace) = &args.workspace else {
        let rule = format!(
            "{} bytes are needed without a plan",
            crate::plan::workspace_bytes(&plan_args)?
        );
        return Err(Error::invalid("workspace", "None", rule));
    };
    let plan = Plan::unfilled(&plan_args, workspace)?;
    // SAFETY: the caller's promise; the plan was made for this problem.
    unsafe { run(&problem, &plan, true) }
}

/// The last step: the plan where it is this call's own, then the attention.
///
/// # Safety
/// As for [`decode`]; the plan was made for this problem.
unsafe fn run(problem: &DecodeProblem, plan: &Plan, fill: bool) -> Result<()> {
    if problem.is_empty() {
        return Ok(());
    }
    if values::checked() {
        // SAFETY: the table and the lengths are live (the caller's promise) and have been checked.
        unsafe {
            values::table(
                &problem.table,
                &problem.cache,
                problem.device,
                problem.stream,
            )?
        };
    }
    if fill {
        // SAFETY: the caller's promise.
        unsafe { plan.fill(&problem.table.seq_lens, problem.device, problem.stream)? };
    }
    match problem.device {
        // SAFETY: the caller's promise, and the problem has been checked.
        Device::Cpu => unsafe { cpu::decode(problem, plan) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::decode(ordinal, problem, plan) },
    }
}
