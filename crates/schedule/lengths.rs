//! How many keys and query tokens a batch has, as the caller holds them.

use crate::PlanError;
use crate::plan_layout::FmPlanShape;

/// Integers of a batch, `stride` elements apart: `seq_lens` or `qo_indptr`.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// Element `i * stride` is entry `i`.
    pub data: &'a [i32],
    /// Elements from one entry to the next; 0 gives every request the same.
    pub stride: usize,
}

impl<'a> From<&'a [i32]> for Strided<'a> {
    fn from(data: &'a [i32]) -> Self {
        Self { data, stride: 1 }
    }
}

/// How many entries of its list count for each query token of a sparse batch: `[batch, token]`.
#[derive(Debug, Clone, Copy)]
pub struct ListLens<'a> {
    /// Element `request * stride[0] + token * stride[1]` is the token's.
    pub data: &'a [i32],
    /// Elements from one request to the next, and from one of its tokens to the next: 0 gives all the same.
    pub stride: [usize; 2],
}

impl ListLens<'_> {
    pub(crate) fn at(&self, request: i32, token: i32) -> i32 {
        self.data[request as usize * self.stride[0] + token as usize * self.stride[1]]
    }

    pub(crate) fn check(
        &self,
        argument: &'static str,
        shape: &FmPlanShape,
    ) -> Result<(), PlanError> {
        let counts = [shape.batch as usize, shape.sparse_q_len as usize];
        let last = |axis: usize| (counts[axis].max(1) - 1).saturating_mul(self.stride[axis]);
        let needed = match counts {
            [0, _] | [_, 0] => 0,
            _ => last(0).saturating_add(last(1)).saturating_add(1),
        };
        let len = self.data.len();
        if len >= needed {
            return Ok(());
        }
        Err(PlanError::Length {
            argument,
            len,
            needed,
            rule: "at least",
        })
    }
}

impl Strided<'_> {
    pub(crate) fn at(&self, index: i32) -> i32 {
        self.data[index as usize * self.stride]
    }

    pub(crate) fn check(&self, argument: &'static str, entries: usize) -> Result<(), PlanError> {
        let len = self.data.len();
        let needed = match entries {
            0 => 0,
            _ => (entries - 1).saturating_mul(self.stride).saturating_add(1),
        };
        // A plain slice must fit exactly: a longer one belongs to another batch.
        let (ok, rule) = if self.stride == 1 {
            (len == needed, "exactly")
        } else {
            (len >= needed, "at least")
        };
        if ok {
            Ok(())
        } else {
            Err(PlanError::Length {
                argument,
                len,
                needed,
                rule,
            })
        }
    }
}
