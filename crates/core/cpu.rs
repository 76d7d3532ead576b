//! The last step on the CPU: problems in the CPU backend's terms.

use std::sync::OnceLock;

use ferromla_cpu::{
    AppendCpu, DecodeCpu, Format, GatherCpu, GatherSource, MergeCpu, Parts as CpuParts,
    Strided as CpuStrided,
};
use ferromla_schedule::PlanView;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::problem::{
    AppendProblem, AttentionProblem, CacheRows, DequantizeProblem, GatherProblem, GatherTokens,
    MergeProblem, NOPE_DIM, PageTable, PagedCache, QuantizeProblem, Strided, TwoParts,
};
use crate::schedule::plan_error;

/// Threads of rayon's global pool: asked once, so that a workspace keeps its size.
pub(crate) fn threads() -> i32 {
    static THREADS: OnceLock<i32> = OnceLock::new();
    *THREADS.get_or_init(|| i32::try_from(rayon::current_num_threads()).unwrap_or(i32::MAX))
}

fn format(dtype: DType) -> Format {
    if dtype == DType::Fp16 {
        Format::Fp16
    } else {
        Format::Bf16
    }
}

fn view<T, const N: usize>(from: &Strided<N>, shape: [i32; N]) -> CpuStrided<T, N> {
    CpuStrided::new(
        from.ptr as *const T,
        shape.map(|dim| dim as usize),
        from.strides,
    )
}

fn parts<const N: usize>(from: &TwoParts<N>, shape: [i32; N]) -> CpuParts<N> {
    CpuParts {
        nope: view(&from.nope, shape),
        rope: from.rope.as_ref().map(|rope| view(rope, shape)),
    }
}

/// The rows of an unquantised cache.
fn half_rows(cache: &PagedCache) -> Result<&TwoParts<3>> {
    match &cache.rows {
        CacheRows::Half(rows) => Ok(rows),
        CacheRows::Bytes { .. } => {
            Err(Error::unsupported("kv_format", cache.format, "unquantised"))
        }
    }
}

/// A cache of one KV head: its pages and tokens.
fn pages(cache: &PagedCache) -> Result<CpuParts<2>> {
    let rows = half_rows(cache)?;
    let two = |from: &Strided<3>| Strided {
        ptr: from.ptr,
        strides: [from.strides[0], from.strides[1]],
    };
    let rows = TwoParts {
        nope: two(&rows.nope),
        rope: rows.rope.as_ref().map(two),
    };
    Ok(parts(&rows, [cache.num_pages, cache.page_size]))
}

fn block_table(table: &PageTable) -> CpuStrided<i32, 2> {
    let strides = [table.block_table.strides[0], 1];
    view(
        &Strided {
            ptr: table.block_table.ptr,
            strides,
        },
        [table.batch, table.max_pages],
    )
}

fn vector<T>(ptr: u64, len: usize, stride: i64) -> CpuStrided<T, 1> {
    CpuStrided::new(ptr as *const T, [len], [stride])
}

/// # Safety
/// As for [`decode`](crate::decode); the plan has been filled for this problem.
pub(crate) unsafe fn decode(problem: &AttentionProblem, plan: &Plan) -> Result<()> {
    let (schedule, workspace) = (&plan.schedule, &plan.workspace);
    let words = schedule.layout.words();
    // SAFETY: the plan's workspace is live host memory that its layout fits; `fill` has written it.
    let words = unsafe { std::slice::from_raw_parts(workspace.plan as *const i32, words) };
    let view_of_plan = PlanView::new(&schedule.shape, words).map_err(plan_error)?;
    let rows = [problem.table.batch, problem.queries.extent(), problem.heads];
    let cache = &problem.cache;
    let partial_rows = schedule.layout.max_slots as usize * schedule.shape.unit_rows as usize;
    let heads = problem.heads as usize;
    let args = DecodeCpu {
        format: format(problem.dtype),
        q: parts(&problem.q, rows),
        kv_cache: parts(
            half_rows(cache)?,
            [cache.num_pages, cache.page_size, cache.kv_heads],
        ),
        block_table: block_table(&problem.table),
        group: problem.group() as usize,
        causal: problem.causal,
        softmax_scale: problem.scale,
        attn_sink: (problem.attn_sink != 0).then(|| vector(problem.attn_sink, heads, 1)),
        plan: view_of_plan,
        unit_rows: schedule.shape.unit_rows as usize,
        out: view(&problem.out, rows),
        lse: view(&problem.lse, rows),
        partial_out: vector(workspace.partial_out, partial_rows, NOPE_DIM),
        partial_lse: vector(workspace.partial_lse, partial_rows, 1),
    };
    // SAFETY: the caller's promise; shapes, strides and the plan have been checked.
    unsafe { ferromla_cpu::decode(&args) };
    Ok(())
}

/// # Safety
/// As for [`merge_states`](crate::merge_states).
pub(crate) unsafe fn merge(problem: &MergeProblem) -> Result<()> {
    let args = MergeCpu {
        format: format(problem.dtype),
        d_v: NOPE_DIM as usize,
        out_a: view(&problem.out_a, problem.dims),
        lse_a: view(&problem.lse_a, problem.dims),
        out_b: view(&problem.out_b, problem.dims),
        lse_b: view(&problem.lse_b, problem.dims),
        out: view(&problem.out, problem.dims),
        lse: view(&problem.lse, problem.dims),
    };
    // SAFETY: the caller's promise; shapes and strides have been checked.
    unsafe { ferromla_cpu::merge_states(&args) };
    Ok(())
}

/// # Safety
/// As for [`append_kv`](crate::append_kv).
pub(crate) unsafe fn append(problem: &AppendProblem) -> Result<()> {
    let args = AppendCpu {
        tokens: parts(&problem.rows, [problem.tokens as i32]),
        cache: pages(&problem.cache)?,
        slots: view(&problem.slots, [problem.tokens as i32]),
    };
    // SAFETY: the caller's promise; shapes and strides have been checked.
    unsafe { ferromla_cpu::append_kv(&args) };
    Ok(())
}

/// # Safety
/// As for [`gather_kv`](crate::gather_kv).
pub(crate) unsafe fn gather(problem: &GatherProblem) -> Result<()> {
    let tokens = problem.tokens as i32;
    let source = match &problem.source {
        GatherTokens::Ids { ids, wide: true } => GatherSource::Ids64(view(ids, [tokens])),
        GatherTokens::Ids { ids, wide: false } => GatherSource::Ids32(view(ids, [tokens])),
        GatherTokens::Pages { table, offsets } => {
            let offsets = vector(*offsets, table.batch as usize + 1, 1);
            let lens = view(&table.seq_lens, [table.batch]);
            let capacity = table.capacity(problem.cache.page_size) as i32;
            // SAFETY: lengths and offsets are live (the caller's promise), of batch and batch + 1 elements.
            unsafe { ferromla_cpu::gather_offsets(&lens, capacity, &offsets) };
            GatherSource::Pages {
                block_table: block_table(table),
                offsets,
            }
        }
    };
    let args = GatherCpu {
        format: format(problem.cache.format.dtype().unwrap_or(DType::Bf16)),
        cache: pages(&problem.cache)?,
        source,
        out: view(&problem.out, [tokens]),
    };
    // SAFETY: the caller's promise; shapes and strides have been checked.
    unsafe { ferromla_cpu::gather_kv(&args) };
    Ok(())
}

/// # Safety
/// As for [`quantize_kv`](crate::quantize_kv).
pub(crate) unsafe fn quantize(problem: &QuantizeProblem) -> Result<()> {
    pages(&problem.cache).map(drop)
}

/// # Safety
/// As for [`dequantize_kv`](crate::dequantize_kv).
pub(crate) unsafe fn dequantize(problem: &DequantizeProblem) -> Result<()> {
    pages(&problem.cache).map(drop)
}
