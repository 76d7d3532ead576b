//! The operations on indices on CUDA.

use crate::error::{Error, Result};
use crate::problem_indices::{CombineProblem, ToPhysicalProblem, WindowProblem};

fn unsupported(ordinal: u32) -> Result<()> {
    Err(Error::unsupported(
        "device",
        format!("cuda:{ordinal}"),
        "operations on indices run on the CPU in this version",
    ))
}

/// # Safety
/// As for [`to_physical`](crate::to_physical).
pub(crate) unsafe fn to_physical(ordinal: u32, _: &ToPhysicalProblem) -> Result<()> {
    unsupported(ordinal)
}

/// # Safety
/// As for [`window_token_ids`](crate::window_token_ids).
pub(crate) unsafe fn window_token_ids(ordinal: u32, _: &WindowProblem) -> Result<()> {
    unsupported(ordinal)
}

/// # Safety
/// As for [`combine_topk_window`](crate::combine_topk_window).
pub(crate) unsafe fn combine_topk_window(ordinal: u32, _: &CombineProblem) -> Result<()> {
    unsupported(ordinal)
}
