//! The launches of the operations on indices.

use std::ffi::c_void;

use crate::error::Result;
use crate::params::{
    FM_INDEX_STEP, FM_OFFSETS_THREADS, FM_ROW_THREADS, FmCombineIndicesParams, FmDivisor,
    FmIntegers, FmToPhysicalParams, FmWindowParams,
};
use crate::problem_indices::{CombineProblem, Ints, ToPhysicalProblem, WindowProblem};

use super::engine::{Engine, Launch};
use super::kernel::Kernel;
use super::ops::{pointer, rows_launch};

/// Bytes of the widest access of a lane: four int32.
const FOUR: i64 = 16;

/// Whether rows at these addresses and strides (int32) all begin where a lane may take four entries at once.
fn in_fours(rows: &[(u64, &[i64])]) -> bool {
    rows.iter().all(|(ptr, strides)| {
        ptr.is_multiple_of(FOUR as u64) && strides.iter().all(|stride| stride % (FOUR / 4) == 0)
    })
}

/// Entries of a row that a warp takes: where rows are few, so many that `warps` have some.
fn span(rows: i64, columns: i32, warps: i64) -> i32 {
    let steps = columns.max(1).unsigned_abs().div_ceil(FM_INDEX_STEP as u32);
    let stretches = (warps / rows.max(1)).clamp(1, steps.into()) as u32;
    (steps.div_ceil(stretches) as i32).saturating_mul(FM_INDEX_STEP)
}

/// The warps that rows in stretches of `span` columns take.
fn stretches(rows: i64, columns: i32, span: i32) -> i64 {
    rows * i64::from(columns.max(1).unsigned_abs().div_ceil(span as u32))
}

/// Warps that keep the device busy where each waits for what it reads.
fn most_warps(engine: &Engine) -> i64 {
    16 * i64::from(engine.sm_count)
}

fn integers(values: &Ints<1>) -> FmIntegers {
    FmIntegers {
        values: values.values.ptr as *const c_void,
        stride: values.values.strides[0],
        are_64bit: values.wide.into(),
        reserved: 0,
    }
}

pub(super) fn to_physical_params(problem: &ToPhysicalProblem, warps: i64) -> FmToPhysicalParams {
    let (indices, out, pages) = (&problem.indices, &problem.out, &problem.pages);
    let without_gaps = indices.values.strides[2] == 1 && !indices.wide;
    let begins = [
        (indices.values.ptr, &indices.values.strides[..2]),
        (out.ptr, out.strides.as_slice()),
    ];
    let [batch, q_len, topk] = problem.dims;
    let rows = i64::from(batch) * i64::from(q_len);
    FmToPhysicalParams {
        indices: indices.values.ptr as *const c_void,
        indices_stride: indices.values.strides,
        block_table: pages.block_table.ptr as *const i32,
        block_table_stride: pages.block_table.strides[0],
        out: out.ptr as *mut i32,
        out_stride: out.strides,
        rows,
        rows_per_request: q_len,
        columns: topk,
        max_pages: pages.max_pages,
        page_size: pages.page_size,
        page: FmDivisor::of(pages.page_size),
        are_64bit: indices.wide.into(),
        in_fours: (without_gaps && in_fours(&begins)).into(),
        span: span(rows, topk, warps),
        reserved: 0,
    }
}

/// # Safety
/// As for [`to_physical`](crate::to_physical).
pub(crate) unsafe fn to_physical(ordinal: u32, problem: &ToPhysicalProblem) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(problem.stream)?;
    let mut params = to_physical_params(problem, most_warps(engine));
    let warps = stretches(params.rows, params.columns, params.span);
    let launch = rows_launch(engine, warps, problem.stream);
    // SAFETY: `fm_to_physical` takes one FmToPhysicalParams; the memory is live (the caller's promise).
    unsafe { engine.launch(Kernel::ToPhysical, &launch, &mut [pointer(&mut params)]) }
}

pub(super) fn window_params(problem: &WindowProblem) -> FmWindowParams {
    let narrow = |values| {
        integers(&Ints {
            values,
            wide: false,
        })
    };
    let pages = &problem.pages;
    FmWindowParams {
        seq_lens: narrow(problem.seq_lens),
        query_lens: narrow(problem.query_lens),
        block_table: pages.block_table.ptr as *const i32,
        block_table_stride: pages.block_table.strides[0],
        offsets: problem.offsets.ptr as *mut i64,
        offsets_stride: problem.offsets.strides[0],
        first_pos: problem.first_pos.ptr as *mut i32,
        first_pos_stride: problem.first_pos.strides[0],
        ids: problem.out.ptr as *mut i32,
        ids_stride: problem.out.strides[0],
        tokens: problem.tokens.into(),
        batch: pages.batch,
        max_pages: pages.max_pages,
        page_size: pages.page_size,
        page: FmDivisor::of(pages.page_size),
        window: problem.window,
    }
}

/// # Safety
/// As for [`window_token_ids`](crate::window_token_ids).
pub(crate) unsafe fn window_token_ids(ordinal: u32, problem: &WindowProblem) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(problem.stream)?;
    let mut params = window_params(problem);
    let one_block = Launch {
        blocks: 1,
        threads: FM_OFFSETS_THREADS as u32,
        stream: problem.stream,
        ..Launch::default()
    };
    // SAFETY: both kernels take one FmWindowParams; the memory is live (the caller's promise).
    unsafe {
        engine.launch(
            Kernel::WindowOffsets,
            &one_block,
            &mut [pointer(&mut params)],
        )?;
        if problem.tokens == 0 {
            return Ok(());
        }
        // A block's threads take a token each.
        let warps = (i64::from(problem.tokens) + 31) / 32;
        let launch = rows_launch(engine, warps, problem.stream);
        debug_assert_eq!(launch.threads, FM_ROW_THREADS as u32);
        engine.launch(Kernel::WindowIds, &launch, &mut [pointer(&mut params)])
    }
}

pub(super) fn combine_params(problem: &CombineProblem, warps: i64) -> FmCombineIndicesParams {
    let (chosen, out) = (&problem.topk_indices, &problem.out);
    let begins = [
        (chosen.ptr, chosen.strides.as_slice()),
        (out.ptr, out.strides.as_slice()),
    ];
    FmCombineIndicesParams {
        topk_indices: chosen.ptr as *const i32,
        topk_indices_stride: chosen.strides[0],
        positions: integers(&problem.positions),
        request_ids: integers(&problem.request_ids),
        compressed_base: integers(&problem.compressed_base),
        window_base: integers(&problem.window_base),
        first_pos: integers(&problem.first_pos),
        indices: out.ptr as *mut i32,
        indices_stride: out.strides[0],
        lengths: problem.lengths.ptr as *mut i32,
        lengths_stride: problem.lengths.strides[0],
        tokens: problem.tokens.into(),
        batch: problem.batch,
        topk: problem.topk,
        ratio: problem.ratio,
        window: problem.window,
        width: problem.width,
        in_fours: in_fours(&begins).into(),
        span: span(problem.tokens.into(), problem.width, warps),
        reserved: 0,
    }
}

/// # Safety
/// As for [`combine_topk_window`](crate::combine_topk_window).
pub(crate) unsafe fn combine_topk_window(ordinal: u32, problem: &CombineProblem) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(problem.stream)?;
    let mut params = combine_params(problem, most_warps(engine));
    let warps = stretches(params.tokens, params.width, params.span);
    let launch = rows_launch(engine, warps, problem.stream);
    // SAFETY: `fm_combine_topk_window` takes one FmCombineIndicesParams; the memory is live (the caller's promise).
    unsafe {
        engine.launch(
            Kernel::CombineTopkWindow,
            &launch,
            &mut [pointer(&mut params)],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_are_cut_so_that_all_warps_have_some() {
        for (rows, columns, warps, expected) in [
            (128, 2048, 2112, (128, 2048)),
            (300, 2048, 2112, (384, 1800)),
            (32_768, 2048, 2112, (2048, 32_768)),
            (1, 100, 2112, (128, 1)),
            (4, 0, 2112, (128, 4)),
            (0, 2048, 2112, (128, 0)),
            (1, i32::MAX, 1, (i32::MAX, 1)),
        ] {
            let span = span(rows, columns, warps);
            let found = (span, stretches(rows, columns, span));
            assert_eq!(found, expected, "{rows} x {columns}");
        }
    }
}
