//! `decode`: attention of as many new query tokens of every request over a paged latent cache.

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
/// use ferromla::{DType, Device, View, decode_outputs};
/// // SAFETY: an empty view describes no memory.
/// let q = unsafe { View::contiguous(std::ptr::null(), DType::Bf16, Device::Cpu, &[0, 1, 16, 576]) };
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
    let checked = args.check()?;
    // SAFETY: the caller's promise.
    unsafe { checked.run(args.workspace.as_ref()) }
}
