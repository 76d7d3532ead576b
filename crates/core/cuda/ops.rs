//! The launches of planning and merging, and of what sparse prefill needs before its own.

use std::ffi::c_void;

use crate::error::Result;
use crate::lengths::Lengths;
use crate::params::{FM_ROW_THREADS, FmFillParams, FmMergeParams, FmPlanParams};
use crate::plan::Plan;
use crate::problem::{MergeProblem, Strided};
use crate::view::Stream;

use super::engine::{Engine, Launch};
use super::kernel::{Kernel, is_fp16};

/// Blocks of a kernel whose blocks stride over their work, per SM.
const STRIDING_BLOCKS: i64 = 8;

pub(super) fn pointer<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

/// # Safety
/// As for [`Plan::update`]: the lengths are live device memory.
pub(crate) unsafe fn plan(
    ordinal: u32,
    plan: &Plan,
    lengths: &Lengths,
    stream: Stream,
) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(stream)?;
    let qo_indptr = lengths.qo_indptr.unwrap_or(Strided::NONE);
    let seq_lens = lengths.seq_lens.unwrap_or(Strided::NONE);
    let extra_lens = lengths.extra_lens.unwrap_or(Strided::NONE);
    let mut params = FmPlanParams {
        shape: plan.schedule.shape,
        layout: plan.schedule.layout,
        seq_lens: seq_lens.ptr as *const i32,
        seq_lens_stride: seq_lens.strides,
        extra_lens: extra_lens.ptr as *const i32,
        extra_lens_stride: extra_lens.strides,
        qo_indptr: qo_indptr.ptr as *const i32,
        qo_indptr_stride: qo_indptr.strides[0],
        plan: plan.workspace.plan as *mut u8,
    };
    let planner = plan.schedule.layout.planner(&plan.schedule.shape);
    let launch = Launch {
        blocks: planner.blocks,
        team: planner.cluster,
        cluster: planner.cluster,
        threads: planner.threads,
        stream,
    };
    let kernel = Kernel::Plan(planner.kernel);
    // SAFETY: the kernel takes one FmPlanParams; the memory is live (the caller's promise).
    unsafe { engine.launch(kernel, &launch, &mut [pointer(&mut params)]) }
}

/// One warp per row, as many blocks as that asks for and the device keeps busy.
pub(super) fn rows_launch(engine: &Engine, rows: i64, stream: Stream) -> Launch {
    striding_launch(engine, rows * 32, stream)
}

/// So many threads, or as many as the device keeps busy, which stride then.
fn striding_launch(engine: &Engine, threads: i64, stream: Stream) -> Launch {
    let needed = (threads + i64::from(FM_ROW_THREADS) - 1) / i64::from(FM_ROW_THREADS);
    let blocks = needed.clamp(1, STRIDING_BLOCKS * i64::from(engine.sm_count)) as u32;
    Launch {
        blocks,
        threads: FM_ROW_THREADS as u32,
        stream,
        ..Launch::default()
    }
}

/// Makes numbers of one request, `[tokens, heads]`, -inf: what CTAs that have parts of the same rows raise afterwards.
///
/// # Safety
/// The numbers are live device memory.
pub(super) unsafe fn lower(
    engine: &Engine,
    numbers: Strided<3>,
    [tokens, heads]: [i32; 2],
    stream: Stream,
) -> Result<()> {
    let [_, token, head] = numbers.strides;
    let mut params = FmFillParams {
        to: numbers.ptr as *mut f32,
        stride: [token, head],
        rows: tokens,
        columns: heads,
        value: f32::NEG_INFINITY,
        reserved: 0,
    };
    let launch = striding_launch(engine, i64::from(tokens) * i64::from(heads), stream);
    // SAFETY: the kernel takes one FmFillParams; the memory is live (the caller's promise).
    unsafe { engine.launch(Kernel::Fill, &launch, &mut [pointer(&mut params)]) }
}

/// # Safety
/// As for [`merge_states`](crate::merge_states).
pub(crate) unsafe fn merge(ordinal: u32, problem: &MergeProblem) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(problem.stream)?;
    let mut params = FmMergeParams {
        out_a: problem.out_a.ptr as *const c_void,
        out_b: problem.out_b.ptr as *const c_void,
        lse_a: problem.lse_a.ptr as *const f32,
        lse_b: problem.lse_b.ptr as *const f32,
        out: problem.out.ptr as *mut c_void,
        lse: problem.lse.ptr as *mut f32,
        dim: problem.dims,
        reserved: 0,
        out_a_stride: problem.out_a.strides,
        out_b_stride: problem.out_b.strides,
        out_stride: problem.out.strides,
        lse_a_stride: problem.lse_a.strides,
        lse_b_stride: problem.lse_b.strides,
        lse_stride: problem.lse.strides,
    };
    let launch = rows_launch(engine, problem.rows(), problem.stream);
    let kernel = Kernel::Merge {
        fp16: is_fp16(problem.dtype),
    };
    // SAFETY: merge kernels take one FmMergeParams; the memory is live (the caller's promise).
    unsafe { engine.launch(kernel, &launch, &mut [pointer(&mut params)]) }
}
