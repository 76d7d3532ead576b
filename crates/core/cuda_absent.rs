//! The last step on CUDA, in a build without the feature `cuda`: every call is refused.

use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::plan::Plan;
use crate::problem::{
    AppendProblem, AttentionProblem, DequantizeProblem, GatherProblem, MergeProblem,
    QuantizeProblem, SparseProblem,
};
use crate::problem_indices::{CombineProblem, ToPhysicalProblem, WindowProblem};
use crate::support::CudaSupport;
use crate::view::Stream;
use ferromla_schedule::Target;

const RULE: &str = "this build of ferromla has no CUDA backend: build it with its feature `cuda`";

fn absent<T>(ordinal: u32) -> Result<T> {
    Err(Error::unsupported(
        "device",
        format!("cuda:{ordinal}"),
        RULE,
    ))
}

pub(crate) fn support(ordinal: u32) -> Result<CudaSupport> {
    absent(ordinal)
}

pub(crate) const fn compiled_kernels() -> Vec<&'static str> {
    Vec::new()
}

pub(crate) const fn compiler() -> Option<String> {
    None
}

pub(crate) fn target(ordinal: u32) -> Result<Target> {
    absent(ordinal)
}

pub(crate) unsafe fn plan(ordinal: u32, _: &Plan, _: &Lengths, _: Stream) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn upload_plan(ordinal: u32, _: &[i32], _: u64, _: Stream) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn download<T>(ordinal: u32, _: u64, _: &mut [T], _: Stream) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn decode(ordinal: u32, _: &AttentionProblem, _: &Plan) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn sparse(ordinal: u32, _: &SparseProblem, _: &Plan) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn merge(ordinal: u32, _: &MergeProblem) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn append(ordinal: u32, _: &AppendProblem) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn gather(ordinal: u32, _: &GatherProblem) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn quantize(ordinal: u32, _: &QuantizeProblem) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn dequantize(ordinal: u32, _: &DequantizeProblem) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn to_physical(ordinal: u32, _: &ToPhysicalProblem) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn window_token_ids(ordinal: u32, _: &WindowProblem) -> Result<()> {
    absent(ordinal)
}

pub(crate) unsafe fn combine_topk_window(ordinal: u32, _: &CombineProblem) -> Result<()> {
    absent(ordinal)
}
