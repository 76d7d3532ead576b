//! The last step on the CPU: problems in the CPU backend's terms.

use std::sync::{MutexGuard, OnceLock};

use ferromla_cpu::{
    AppendCpu, CacheCpu, DecodeCpu, DequantizeCpu, ExtraCpu, Format, GatherCpu, GatherSource,
    KeysCpu, MergeCpu, OutRows, Parts as CpuParts, QuantisedCpu, QuantizeCpu,
    QueryScale as CpuQueryScale, Rows as CpuRows, Strided as CpuStrided,
};
use ferromla_format::Layout;
use ferromla_schedule::PlanView;

pub(crate) use crate::cpu_indices::{combine_topk_window, to_physical, window_token_ids};
use crate::dtype::DType;
use crate::error::Result;
use crate::plan::Plan;
use crate::problem::{
    AppendProblem, AttentionProblem, CacheRows, DequantizeProblem, GatherProblem, GatherTokens,
    KeyLists, MergeProblem, NOPE_DIM, PageTable, PagedCache, QuantizeProblem, QueryScale,
    SparseProblem, Strided, TwoParts,
};
use crate::schedule::plan_error;

/// Threads of rayon's global pool: asked once, so that a workspace keeps its size.
pub(crate) fn threads() -> i32 {
    static THREADS: OnceLock<i32> = OnceLock::new();
    *THREADS.get_or_init(|| i32::try_from(threads_of_global_pool()).unwrap_or(i32::MAX))
}

/// Asked by a thread that is in no pool, for the caller may be in one of its own.
fn threads_of_global_pool() -> usize {
    let asked = std::thread::spawn(rayon::current_num_threads).join();
    asked.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn format(dtype: DType) -> Format {
    if dtype == DType::Fp16 {
        Format::Fp16
    } else {
        Format::Bf16
    }
}

pub(crate) fn view<T, const N: usize>(from: &Strided<N>, shape: [i32; N]) -> CpuStrided<T, N> {
    CpuStrided::new(
        from.ptr as *const T,
        shape.map(|dim| dim as usize),
        from.strides,
    )
}

fn parts<T, const N: usize>(from: &TwoParts<N>, shape: [i32; N]) -> CpuParts<N, T> {
    CpuParts {
        nope: view(&from.nope, shape),
        rope: from.rope.as_ref().map(|rope| view(rope, shape)),
    }
}

/// Rows of one of the types that operations take: bf16, fp16, float32 or e4m3.
fn rows<const N: usize>(from: &TwoParts<N>, dtype: DType, shape: [i32; N]) -> CpuRows<N> {
    match dtype {
        DType::Fp16 => CpuRows::Fp16(parts(from, shape)),
        DType::F32 => CpuRows::F32(parts(from, shape)),
        DType::F8E4M3 => CpuRows::E4m3(parts(from, shape)),
        _ => CpuRows::Bf16(parts(from, shape)),
    }
}

fn cache(from: &PagedCache) -> CacheCpu {
    match &from.rows {
        CacheRows::Half(half) => {
            let shape = [from.num_pages, from.page_size, from.kv_heads];
            let dtype = from.format.dtype().unwrap_or(DType::Bf16);
            CacheCpu::Plain(rows(half, dtype, shape))
        }
        CacheRows::Bytes { layout, pages } => CacheCpu::Quantised(bytes(from, layout, pages)),
    }
}

fn bytes(from: &PagedCache, layout: &'static Layout, pages: &Strided<2>) -> QuantisedCpu {
    QuantisedCpu {
        layout,
        bytes: view(pages, [from.num_pages, from.page_size]),
        scale: from.scale,
    }
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

/// A plan whose bytes have been written, and where its partial results go.
struct Filled<'a> {
    _alone: MutexGuard<'a, Vec<i32>>,
    view: PlanView<'a>,
    unit_rows: usize,
    partial_out: CpuStrided<f32, 1>,
    partial_lse: CpuStrided<f32, 1>,
}

impl<'a> Filled<'a> {
    /// # Safety
    /// The plan has been filled, and its workspace is live.
    unsafe fn of(plan: &'a Plan) -> Result<Self> {
        let alone = plan.alone()?;
        let (schedule, workspace) = (&plan.schedule, &plan.workspace);
        let words = schedule.layout.words();
        // SAFETY: the plan's workspace is live host memory that its layout fits; `fill` has written it, and nobody
        // writes it while the plan is held.
        let words = unsafe { std::slice::from_raw_parts(workspace.plan as *const i32, words) };
        let unit_rows = schedule.shape.unit_rows as usize;
        let partial_rows = schedule.layout.max_slots as usize * unit_rows;
        Ok(Self {
            _alone: alone,
            view: PlanView::new(&schedule.shape, words).map_err(plan_error)?,
            unit_rows,
            partial_out: vector(workspace.partial_out, partial_rows, NOPE_DIM),
            partial_lse: vector(workspace.partial_lse, partial_rows, 1),
        })
    }
}

/// # Safety
/// As for [`decode`](crate::decode); the plan has been filled for this problem.
pub(crate) unsafe fn decode(problem: &AttentionProblem, plan: &Plan) -> Result<()> {
    // SAFETY: the caller's promise.
    let plan = unsafe { Filled::of(plan)? };
    let shape = [problem.table.batch, problem.queries.extent(), problem.heads];
    let args = DecodeCpu {
        format: format(problem.out_dtype()),
        q: rows(&problem.q, problem.dtype, shape),
        q_scale: match &problem.q_scale {
            QueryScale::One(scale) => CpuQueryScale::One(*scale),
            QueryScale::Rows(scales) => CpuQueryScale::Rows(view(scales, shape)),
        },
        kv_cache: cache(&problem.cache),
        keys: KeysCpu::Pages {
            block_table: block_table(&problem.table),
        },
        group: problem.group() as usize,
        causal: problem.causal,
        softmax_scale: problem.scale,
        attn_sink: sink(problem.attn_sink, problem.heads),
        out: view(&problem.out, shape),
        lse: view(&problem.lse, shape),
        empty_lse: problem.empty_lse,
        max_logits: None,
        plan: plan.view,
        unit_rows: plan.unit_rows,
        partial_out: plan.partial_out,
        partial_lse: plan.partial_lse,
    };
    // SAFETY: the caller's promise; shapes, strides and the plan have been checked.
    unsafe { ferromla_cpu::decode(&args) };
    Ok(())
}

/// # Safety
/// As for [`sparse_decode`](crate::sparse_decode); the plan has been filled for this problem.
pub(crate) unsafe fn sparse(problem: &SparseProblem, plan: &Plan) -> Result<()> {
    // SAFETY: the caller's promise.
    let plan = unsafe { Filled::of(plan)? };
    let shape = [problem.batch, problem.q_len, problem.heads];
    let indices = |lists: &KeyLists| view(&lists.indices, [problem.batch, problem.q_len]);
    let args = DecodeCpu {
        format: format(problem.dtype),
        q: rows(&problem.q, problem.dtype, shape),
        q_scale: CpuQueryScale::One(1.0),
        kv_cache: cache(&problem.main.cache),
        keys: KeysCpu::Lists {
            indices: indices(&problem.main),
            topk: problem.main.topk as usize,
            extra: problem.extra.as_ref().map(|extra| ExtraCpu {
                kv_cache: cache(&extra.cache),
                indices: indices(extra),
                topk: extra.topk as usize,
            }),
        },
        group: problem.heads as usize,
        causal: false,
        softmax_scale: problem.scale,
        attn_sink: sink(problem.attn_sink, problem.heads),
        out: view(&problem.out, shape),
        lse: view(&problem.lse, shape),
        empty_lse: problem.empty_lse,
        max_logits: problem.max_logits.as_ref().map(|max| view(max, shape)),
        plan: plan.view,
        unit_rows: plan.unit_rows,
        partial_out: plan.partial_out,
        partial_lse: plan.partial_lse,
    };
    // SAFETY: the caller's promise; shapes, strides and the plan have been checked.
    unsafe { ferromla_cpu::decode(&args) };
    Ok(())
}

fn sink(address: u64, heads: i32) -> Option<CpuStrided<f32, 1>> {
    (address != 0).then(|| vector(address, heads as usize, 1))
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
        tokens: rows(&problem.rows, problem.dtype, [problem.tokens as i32]),
        cache: cache(&problem.cache),
        slots: view(&problem.slots, [problem.tokens as i32]),
        round_scale: problem.round_scale,
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
        cache: cache(&problem.cache),
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
    if let CacheCpu::Quantised(cache) = cache(&problem.cache) {
        let pages = [problem.cache.num_pages, problem.cache.page_size];
        let args = QuantizeCpu {
            rows: rows(&problem.rows, problem.dtype, pages),
            cache,
            round_scale: problem.round_scale,
        };
        // SAFETY: the caller's promise; shapes and strides have been checked.
        unsafe { ferromla_cpu::quantize_kv(&args) };
    }
    Ok(())
}

/// # Safety
/// As for [`dequantize_kv`](crate::dequantize_kv).
pub(crate) unsafe fn dequantize(problem: &DequantizeProblem) -> Result<()> {
    if let CacheCpu::Quantised(cache) = cache(&problem.cache) {
        let pages = [problem.cache.num_pages, problem.cache.page_size];
        let out = match problem.dtype {
            DType::F32 => OutRows::F32(view(&problem.out, pages)),
            _ => OutRows::Bf16(view(&problem.out, pages)),
        };
        // SAFETY: the caller's promise; shapes and strides have been checked.
        unsafe { ferromla_cpu::dequantize_kv(&DequantizeCpu { cache, out }) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_those_of_the_global_pool_from_within_another_too() {
        let global = rayon::current_num_threads();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(global + 5);
        let within = pool.build().unwrap().install(threads_of_global_pool);
        assert_eq!(within, global);
    }
}
