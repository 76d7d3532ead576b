//! The launches of planning, attention and merging.

use std::ffi::c_void;

use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::params::{
    FM_COMBINE_THREADS, FM_ROW_THREADS, FmCombineParams, FmDecodeParams, FmMergeParams,
    FmPlanParams,
};
use crate::plan::Plan;
use crate::problem::{
    AttentionProblem, CacheRows, MergeProblem, PagedCache, SparseProblem, Strided, TwoParts,
};
use crate::view::Stream;

use super::engine::{Engine, Launch};
use super::kernel::{Kernel, Loader, Rows, is_fp16};
use super::tensor_map;

/// Blocks of a kernel whose blocks stride over their work, per SM.
const STRIDING_BLOCKS: i64 = 8;
const COMBINE_BLOCKS: i64 = 2;

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
    let _context = engine.enter()?;
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
    let launch = Launch {
        blocks: 1,
        threads: plan.schedule.layout.planner_threads(&plan.schedule.shape),
        stream,
        ..Launch::default()
    };
    // SAFETY: `fm_plan` takes one FmPlanParams; the memory is live (the caller's promise).
    unsafe { engine.launch(Kernel::Plan, &launch, &mut [pointer(&mut params)]) }
}

/// The rows of an unquantised cache.
fn half_rows(cache: &PagedCache) -> Result<&TwoParts<3>> {
    match &cache.rows {
        CacheRows::Half(rows) => Ok(rows),
        CacheRows::Bytes { .. } => Err(no_kernel(cache)),
    }
}

fn no_kernel(cache: &PagedCache) -> Error {
    Error::unsupported("kv_format", cache.format, crate::check::CUDA_FORMATS)
}

/// # Safety
/// As for [`decode`](crate::decode); the plan has been filled for this problem.
pub(crate) unsafe fn decode(ordinal: u32, problem: &AttentionProblem, plan: &Plan) -> Result<()> {
    half_rows(&problem.cache)?;
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter()?;
    // SAFETY: the caller's promise, for both.
    unsafe {
        attend(engine, problem, plan)?;
        // The kernels for few rows add up partial results themselves.
        let combined = Rows::of(plan.schedule.choice.rows) == Rows::Of64;
        if plan.schedule.layout.max_slots > 0 && combined {
            combine(engine, problem, plan)
        } else {
            Ok(())
        }
    }
}

/// # Safety
/// As for [`sparse_decode`](crate::sparse_decode); the plan has been filled for this problem.
pub(crate) unsafe fn sparse(ordinal: u32, _: &SparseProblem, _: &Plan) -> Result<()> {
    Err(Error::unsupported(
        "device",
        format!("cuda:{ordinal}"),
        "sparse attention runs on the CPU in this version",
    ))
}

/// # Safety
/// As for [`decode`].
unsafe fn attend(engine: &Engine, problem: &AttentionProblem, plan: &Plan) -> Result<()> {
    let rows = half_rows(&problem.cache)?;
    let maps = tensor_map::geometries(&problem.cache);
    let choice = &plan.schedule.choice;
    // The CTAs of a team read the same tiles: the TMA loader loads once for two of them.
    let multicast = if maps.is_some() && choice.team % 2 == 0 {
        2
    } else {
        1
    };
    let mut params = decode_params(problem, rows, plan, multicast);
    let (mut nope, mut rope) = (tensor_map::empty(), tensor_map::empty());
    if let Some((nope_geometry, rope_geometry)) = &maps {
        nope = tensor_map::encode(nope_geometry, problem.dtype)?;
        params.head_chunks_nope = nope_geometry.head_chunks;
        if let Some(geometry) = rope_geometry {
            rope = tensor_map::encode(geometry, problem.dtype)?;
            params.head_chunks_rope = geometry.head_chunks;
        }
    }
    let kernel = Kernel::Decode {
        fp16: is_fp16(problem.dtype),
        rope: problem.q.rope.is_some(),
        loader: if maps.is_some() {
            Loader::Tma
        } else {
            Loader::Gather
        },
        rows: Rows::of(choice.rows),
    };
    let launch = Launch {
        blocks: (choice.workers * choice.team * choice.splits) as u32,
        threads: kernel.decode_threads(),
        cluster: (multicast * choice.splits) as u32,
        stream: problem.stream,
        ..Launch::default()
    };
    // SAFETY: decode kernels take two tensor maps and an FmDecodeParams; the memory is live.
    unsafe {
        engine.launch(
            kernel,
            &launch,
            &mut [pointer(&mut nope), pointer(&mut rope), pointer(&mut params)],
        )
    }
}

fn decode_params(
    problem: &AttentionProblem,
    rows: &TwoParts<3>,
    plan: &Plan,
    multicast: i32,
) -> FmDecodeParams {
    let (q, cache, table) = (&problem.q, &problem.cache, &problem.table);
    let q_rope = q.rope.unwrap_or(Strided::NONE);
    let kv_rope = rows.rope.unwrap_or(Strided::NONE);
    FmDecodeParams {
        q_nope: q.nope.ptr as *const c_void,
        q_rope: q_rope.ptr as *const c_void,
        q_nope_stride: q.nope.strides,
        q_rope_stride: q_rope.strides,
        kv_nope: rows.nope.ptr as *const c_void,
        kv_rope: kv_rope.ptr as *const c_void,
        kv_nope_stride: rows.nope.strides,
        kv_rope_stride: kv_rope.strides,
        block_table: table.block_table.ptr as *const i32,
        block_table_stride: table.block_table.strides[0],
        max_pages: table.max_pages,
        num_pages: cache.num_pages,
        page_size: cache.page_size,
        max_tokens: table.capacity(cache.page_size) as i32,
        group: problem.group(),
        team: plan.schedule.choice.team,
        splits: plan.schedule.choice.splits,
        multicast,
        causal: problem.causal.into(),
        box_shift: tensor_map::box_rows(cache.page_size).trailing_zeros() as i32,
        head_chunks_nope: 0,
        head_chunks_rope: 0,
        scale_log2: (problem.scale * std::f64::consts::LOG2_E) as f32,
        attn_sink: problem.attn_sink as *const f32,
        worker_begin: plan.section(plan.schedule.layout.worker_begin),
        items: plan.section(plan.schedule.layout.items),
        merges: plan
            .section::<ferromla_schedule::Merge>(plan.schedule.layout.merges)
            .cast_mut(),
        out: problem.out.ptr as *mut c_void,
        out_stride: problem.out.strides,
        lse: problem.lse.ptr as *mut f32,
        lse_stride: problem.lse.strides,
        partial_out: plan.workspace.partial_out as *mut f32,
        partial_lse: plan.workspace.partial_lse as *mut f32,
    }
}

/// # Safety
/// As for [`decode`].
unsafe fn combine(engine: &Engine, problem: &AttentionProblem, plan: &Plan) -> Result<()> {
    let schedule = &plan.schedule;
    let mut params = FmCombineParams {
        plan: plan.section(0),
        merges: plan.section(schedule.layout.merges),
        partial_out: plan.workspace.partial_out as *const f32,
        partial_lse: plan.workspace.partial_lse as *const f32,
        unit_rows: schedule.shape.unit_rows,
        group: problem.group(),
        attn_sink: problem.attn_sink as *const f32,
        out: problem.out.ptr as *mut c_void,
        out_stride: problem.out.strides,
        lse: problem.lse.ptr as *mut f32,
        lse_stride: problem.lse.strides,
    };
    let rows = i64::from(schedule.layout.max_merges) * i64::from(schedule.shape.unit_rows);
    let launch = Launch {
        blocks: rows.min(COMBINE_BLOCKS * i64::from(engine.sm_count)) as u32,
        threads: FM_COMBINE_THREADS as u32,
        stream: problem.stream,
        overlap: true,
        ..Launch::default()
    };
    let kernel = Kernel::Combine {
        fp16: is_fp16(problem.dtype),
    };
    // SAFETY: combine kernels take one FmCombineParams; the memory is live (the caller's promise).
    unsafe { engine.launch(kernel, &launch, &mut [pointer(&mut params)]) }
}

/// One warp per row, as many blocks as that asks for and the device keeps busy.
pub(super) fn rows_launch(engine: &Engine, rows: i64, stream: Stream) -> Launch {
    let needed = (rows + i64::from(FM_ROW_THREADS) / 32 - 1) / (i64::from(FM_ROW_THREADS) / 32);
    let blocks = needed.clamp(1, STRIDING_BLOCKS * i64::from(engine.sm_count)) as u32;
    Launch {
        blocks,
        threads: FM_ROW_THREADS as u32,
        stream,
        ..Launch::default()
    }
}

/// # Safety
/// As for [`merge_states`](crate::merge_states).
pub(crate) unsafe fn merge(ordinal: u32, problem: &MergeProblem) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter()?;
    let mut params = FmMergeParams {
        out_a: problem.out_a.ptr as *const c_void,
        out_b: problem.out_b.ptr as *const c_void,
        lse_a: problem.lse_a.ptr as *const f32,
        lse_b: problem.lse_b.ptr as *const f32,
        out: problem.out.ptr as *mut c_void,
        lse: problem.lse.ptr as *mut f32,
        dim: problem.dims,
        d_v: crate::problem::NOPE_DIM as i32,
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
