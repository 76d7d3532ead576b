//! `merge_states`: two partial attentions over disjoint key sets, combined exactly.

use crate::error::{Error, Result};
use crate::view::{Stream, View};

/// The arguments of [`merge_states`]: `out_*` are `[..., h, d]` (rank 2 to 4), `lse_*` are `[..., h]`.
#[derive(Debug, Clone)]
pub struct MergeArgs {
    /// Partial attention a, bf16 or fp16 (float32 too on the CPU).
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
pub unsafe fn merge_states(args: &MergeArgs) -> Result<()> {
    let _ = args;
    Err(Error::unsupported("out_a", "any", "not in this build"))
}
