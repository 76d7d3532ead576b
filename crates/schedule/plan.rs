use crate::plan_layout::{FmPlanHeader, FmPlanShape};
use crate::{PlanError, layout};

/// The lengths of a batch, `stride` elements apart.
#[derive(Debug, Clone, Copy)]
pub struct SeqLens<'a> {
    /// Element `i * stride` is the length of request `i`, in tokens.
    pub data: &'a [i32],
    /// Elements from one length to the next.
    pub stride: usize,
}

impl<'a> From<&'a [i32]> for SeqLens<'a> {
    fn from(data: &'a [i32]) -> Self {
        Self { data, stride: 1 }
    }
}

/// Plans a batch: writes the plan of `shape` for `seq_lens` `[batch]` into `words`.
pub fn plan_into<'a>(
    shape: &FmPlanShape,
    seq_lens: impl Into<SeqLens<'a>>,
    words: &mut [i32],
) -> Result<FmPlanHeader, PlanError> {
    let _ = (layout(shape)?, seq_lens.into(), words);
    unimplemented!()
}
