//! `merge_states`: two partial attentions over disjoint key sets, combined exactly.

use crate::dtype::Device;
use crate::error::Result;
use crate::view::{Stream, View};
use crate::{check_merge, cpu, cuda};

/// The arguments of [`merge_states`]: `out_*` are `[..., h, 512]` (rank 2 to 4), `lse_*` are `[..., h]`.
#[derive(Debug, Clone)]
pub struct MergeArgs {
    /// Partial attention a, bf16 or fp16.
    pub out_a: View,
    /// Its natural log-sum-exp, float32.
    pub lse_a: View,
    /// Partial attention b, in a's type and shape.
    pub out_b: View,
    /// Its natural log-sum-exp, float32.
    pub lse_b: View,
    /// The combination; may be `out_a` or `out_b` itself.
    pub out: View,
    /// Its log-sum-exp; may be `lse_a` or `lse_b` itself.
    pub lse: View,
    /// Where to launch.
    pub stream: Stream,
}

/// `lse = log(exp(lse_a) + exp(lse_b))`, `out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)`; a side whose
/// `lse` is -inf does not count, and two of them give zeros and -inf.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode); an output may be one of the inputs, exactly.
///
/// ```
/// use ferromla::{DType, Device, MergeArgs, Stream, View, merge_states};
/// let (a, b, lse_a, lse_b) = ([0x3f80u16; 512], [0x4000u16; 512], [0f32], [f32::NEG_INFINITY]);
/// let (mut out, mut lse) = ([0u16; 512], [1f32]);
/// // SAFETY: the views describe the arrays above, which outlive the call.
/// unsafe {
///     let rows = |ptr: *const u16| View::contiguous(ptr.cast(), DType::Bf16, Device::Cpu, &[1, 512]);
///     let scalars = |ptr: *const f32| View::contiguous(ptr.cast(), DType::F32, Device::Cpu, &[1]);
///     merge_states(&MergeArgs {
///         out_a: rows(a.as_ptr()),
///         lse_a: scalars(lse_a.as_ptr()),
///         out_b: rows(b.as_ptr()),
///         lse_b: scalars(lse_b.as_ptr()),
///         out: rows(out.as_mut_ptr()),
///         lse: scalars(lse.as_mut_ptr()),
///         stream: Stream::default(),
///     })?;
/// }
/// assert_eq!((out, lse), (a, lse_a));
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn merge_states(args: &MergeArgs) -> Result<()> {
    let problem = check_merge::merge(args)?;
    if problem.rows() == 0 {
        return Ok(());
    }
    match problem.device {
        // SAFETY: the caller's promise, and the problem has been checked.
        Device::Cpu => unsafe { cpu::merge(&problem) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::merge(ordinal, &problem) },
    }
}
