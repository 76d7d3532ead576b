//! `prefill`: attention of different numbers of query tokens per request over a paged latent cache.

use crate::attention::{AttentionArgs, AttentionOutputs, Tensors};
use crate::error::Result;
use crate::view::{Parts, View};

/// The arguments of [`prefill`].
pub type PrefillArgs<'a> = AttentionArgs<'a, View>;

impl PrefillArgs<'_> {
    /// Arguments with the defaults: causal, automatic splits, no sink, no plan, no workspace, stream 0.
    pub fn new(
        q: Parts,
        kv_cache: Parts,
        block_table: View,
        seq_lens: View,
        qo_indptr: View,
        out: View,
        lse: View,
    ) -> Self {
        let tensors = Tensors {
            q,
            kv_cache,
            block_table,
            seq_lens,
            out,
            lse,
        };
        Self::with_defaults(tensors, qo_indptr)
    }
}

/// The shapes and type of the outputs of a prefill for this `q`: `out [t, h, 512]`, `lse [t, h]`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) naming `q` when its shape or type is not allowed.
///
/// ```
/// use ferromla::{DType, View, prefill_outputs};
/// let q = View::of(&[0u16; 0], DType::Bf16, &[0, 16, 576])?;
/// assert_eq!(&prefill_outputs(&q.into())?.out[..], &[0, 16, 512]);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub fn prefill_outputs(q: &Parts) -> Result<AttentionOutputs> {
    AttentionOutputs::of(q, true)
}

/// Attention of `q [t, h, d_qk]` over the paged cache into `out [t, h, 512]` and `lse [t, h]`, where
/// `qo_indptr` says which query tokens belong to which request: chunked and incremental prefill, speculative
/// verification with different draft lengths, and decode in one call.
///
/// A request may have no query token, and more of them than cached tokens: queries that see no key get
/// `out` 0 and `lse` -inf. Any values of `qo_indptr` are valid: they are clamped to `0 ..= t`, and a request
/// that ends before it begins has no token. What `qo_indptr` gives to no request is left as it is in `out` and
/// `lse`; a token given to two requests gets the result of either.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode).
///
/// ```
/// use ferromla::{DType, PrefillArgs, View, prefill};
/// // Two query tokens of a request with two cached tokens, none of a second request.
/// let one = 0x3f80u16; // 1.0 in bfloat16
/// let (q, kv, table, lens) = (vec![one; 2 * 576], vec![one; 64 * 576], [0i32, 0], [2i32, 9]);
/// let qo_indptr = [0i32, 2, 2];
/// let (mut out, mut lse) = (vec![0u16; 2 * 512], [0f32; 2]);
/// let mut args = PrefillArgs::new(
///     View::of(&q, DType::Bf16, &[2, 1, 576])?.into(),
///     View::of(&kv, DType::Bf16, &[1, 64, 576])?.into(),
///     View::of(&table, DType::I32, &[2, 1])?,
///     View::of(&lens, DType::I32, &[2])?,
///     View::of(&qo_indptr, DType::I32, &[3])?,
///     View::of_mut(&mut out, DType::Bf16, &[2, 1, 512])?,
///     View::of_mut(&mut lse, DType::F32, &[2, 1])?,
/// );
/// let mut workspace = vec![0u128; args.workspace_bytes()?.div_ceil(16) as usize];
/// args.workspace = Some(View::workspace(&mut workspace));
/// // SAFETY: the views are of the arrays above.
/// unsafe { prefill(&args)? };
/// assert_eq!(out, vec![one; 2 * 512]);
/// assert!((lse[1] - lse[0] - 2f32.ln()).abs() < 1e-5); // the second token sees twice the keys
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn prefill(args: &PrefillArgs<'_>) -> Result<()> {
    let checked = args.check()?;
    // SAFETY: the caller's promise.
    unsafe { checked.run(args.workspace.as_ref()) }
}
