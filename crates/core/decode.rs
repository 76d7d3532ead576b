//! `decode`: attention of a few new query tokens per request, the same number for each, over a paged latent cache.

use crate::attention::{AttentionArgs, AttentionOutputs, Tensors};
use crate::error::Result;
use crate::view::{Parts, View};

/// The arguments of [`decode`].
pub type DecodeArgs<'a> = AttentionArgs<'a, ()>;

impl DecodeArgs<'_> {
    /// Arguments with the defaults: causal, automatic splits, no sink, no plan, no workspace, stream 0.
    pub fn new(
        q: Parts,
        kv_cache: Parts,
        block_table: View,
        seq_lens: View,
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
        Self::with_defaults(tensors, ())
    }
}

/// The shapes and type of the outputs of a decode for this `q`: `out [b, s_q, h, 512]`, `lse [b, s_q, h]`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) naming `q` when its shape or type is not allowed.
///
/// ```
/// use ferromla::{DType, View, decode_outputs};
/// let q = View::of(&[0u16; 0], DType::Bf16, &[0, 1, 16, 576])?;
/// assert_eq!(&decode_outputs(&q.into())?.out[..], &[0, 1, 16, 512]);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub fn decode_outputs(q: &Parts) -> Result<AttentionOutputs> {
    AttentionOutputs::of(q, false)
}

/// Attention of `q` over the paged cache into `out` and `lse`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) and [`Error::Unsupported`](crate::Error) before anything is launched or
/// written, [`Error::Cuda`](crate::Error) when the driver fails.
///
/// # Safety
/// Every view describes live memory as [`View::new`] asks, outputs do not overlap inputs, and on CUDA the
/// memory stays live and unchanged by others until `stream`, which is a live handle, has passed this call. A plan
/// serves one call at a time: calls with it, and its updates, run one after another, on CUDA by the order of their
/// streams. The values in the memory may be anything.
///
/// ```
/// use ferromla::{DType, DecodeArgs, View, decode};
/// // One request with one cached token of ones: attention gives it back.
/// let one = 0x3f80u16; // 1.0 in bfloat16
/// let (q, kv, table, lens) = (vec![one; 576], vec![one; 64 * 576], [0i32], [1i32]);
/// let (mut out, mut lse) = (vec![0u16; 512], [0f32]);
/// let mut args = DecodeArgs::new(
///     View::of(&q, DType::Bf16, &[1, 1, 1, 576])?.into(),
///     View::of(&kv, DType::Bf16, &[1, 64, 576])?.into(),
///     View::of(&table, DType::I32, &[1, 1])?,
///     View::of(&lens, DType::I32, &[1])?,
///     View::of_mut(&mut out, DType::Bf16, &[1, 1, 1, 512])?,
///     View::of_mut(&mut lse, DType::F32, &[1, 1, 1])?,
/// );
/// let mut workspace = vec![0u128; args.workspace_bytes()?.div_ceil(16) as usize];
/// args.workspace = Some(View::workspace(&mut workspace));
/// // SAFETY: the views are of the arrays above.
/// unsafe { decode(&args)? };
/// assert_eq!(out, vec![one; 512]);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn decode(args: &DecodeArgs<'_>) -> Result<()> {
    let checked = args.check()?;
    // SAFETY: the caller's promise.
    unsafe { checked.run(args.workspace.as_ref()) }
}
