//! The launches of the operations on caches.

use std::ffi::c_void;

use ferromla_format::LAYOUTS;

use crate::dtype::{DType, KvFormat};
use crate::error::Result;
use crate::params::{
    FM_LATENT, FM_OFFSETS_THREADS, FmAppendParams, FmByteCache, FmDequantiseParams, FmGatherParams,
    FmOffsetsParams, FmQuantiseParams, FmTokenSource,
};
use crate::problem::{
    AppendProblem, CacheRows, DequantizeProblem, GatherProblem, GatherTokens, NOPE_DIM, PagedCache,
    QuantizeProblem, Strided, TwoParts,
};
use crate::view::Stream;

use super::engine::{Engine, Launch};
use super::kernel::{Kernel, Numbers};
use super::ops::{pointer, rows_launch};

// Kernels are compiled for it.
const _: () = assert!(NOPE_DIM == FM_LATENT as i64);

fn two(part: &Strided<3>) -> [i64; 2] {
    [part.strides[0], part.strides[1]]
}

fn rope_dim(cache: &PagedCache) -> i32 {
    (cache.dim() - NOPE_DIM) as i32
}

/// A quantised cache as kernels take it; `None` for 16-bit rows.
fn byte_cache(cache: &PagedCache) -> Option<FmByteCache> {
    let CacheRows::Bytes { layout, pages } = &cache.rows else {
        return None;
    };
    // The kernels count the layouts in the order of this list: a test says so.
    let number = LAYOUTS.iter().position(|known| known == *layout)?;
    Some(FmByteCache {
        bytes: pages.ptr as *mut c_void,
        page_stride: pages.strides[0],
        token_stride: pages.strides[1],
        num_pages: cache.num_pages,
        page_size: cache.page_size,
        layout: number as i32,
        tensor_scale: cache.scale,
    })
}

/// # Safety
/// As for [`append_kv`](crate::append_kv).
pub(crate) unsafe fn append(ordinal: u32, problem: &AppendProblem) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(problem.stream)?;
    let launch = rows_launch(engine, problem.tokens, problem.stream);
    if let Some(mut params) = quantising_append_params(problem) {
        let from = Numbers::of(problem.dtype);
        // SAFETY: quantise kernels take one FmQuantiseParams; the memory is live (the caller's promise).
        return unsafe {
            engine.launch(
                Kernel::Quantise { from },
                &launch,
                &mut [pointer(&mut params)],
            )
        };
    }
    let CacheRows::Half(cache_rows) = &problem.cache.rows else {
        return Ok(());
    };
    let mut params = append_params(problem, cache_rows);
    // SAFETY: `fm_append` takes one FmAppendParams; the memory is live (the caller's promise).
    unsafe { engine.launch(Kernel::Append, &launch, &mut [pointer(&mut params)]) }
}

fn append_params(problem: &AppendProblem, cache_rows: &TwoParts<3>) -> FmAppendParams {
    let (rows, cache) = (&problem.rows, &problem.cache);
    let k_pe = rows.rope.unwrap_or(Strided::NONE);
    let cache_rope = cache_rows.rope.unwrap_or(Strided::NONE);
    FmAppendParams {
        kv_c: rows.nope.ptr as *const c_void,
        k_pe: k_pe.ptr as *const c_void,
        kv_c_stride: rows.nope.strides[0],
        k_pe_stride: k_pe.strides[0],
        slots: problem.slots.ptr as *const i64,
        slots_stride: problem.slots.strides[0],
        cache_nope: cache_rows.nope.ptr as *mut c_void,
        cache_rope: cache_rope.ptr as *mut c_void,
        cache_nope_stride: two(&cache_rows.nope),
        cache_rope_stride: two(&cache_rope),
        tokens: problem.tokens,
        num_pages: cache.num_pages.into(),
        page_size: cache.page_size,
        rope_dim: rope_dim(cache),
    }
}

/// New tokens into a quantised cache; `None` for 16-bit rows.
pub(super) fn quantising_append_params(problem: &AppendProblem) -> Option<FmQuantiseParams> {
    let k_pe = problem.rows.rope.unwrap_or(Strided::NONE);
    Some(FmQuantiseParams {
        cache: byte_cache(&problem.cache)?,
        kv_c: problem.rows.nope.ptr as *const c_void,
        k_pe: k_pe.ptr as *const c_void,
        kv_c_stride: [0, problem.rows.nope.strides[0]],
        k_pe_stride: [0, k_pe.strides[0]],
        slots: problem.slots.ptr as *const i64,
        slots_stride: problem.slots.strides[0],
        tokens: problem.tokens,
        source_page: problem.tokens.max(1),
        round_scale: problem.round_scale.into(),
        reserved: 0,
    })
}

/// Tokens of all pages.
fn all_tokens(cache: &PagedCache) -> i64 {
    i64::from(cache.num_pages) * i64::from(cache.page_size)
}

/// A whole cache, quantised; `None` for 16-bit rows.
pub(super) fn quantise_params(problem: &QuantizeProblem) -> Option<FmQuantiseParams> {
    let rope = problem.rows.rope.unwrap_or(Strided::NONE);
    Some(FmQuantiseParams {
        cache: byte_cache(&problem.cache)?,
        kv_c: problem.rows.nope.ptr as *const c_void,
        k_pe: rope.ptr as *const c_void,
        kv_c_stride: problem.rows.nope.strides,
        k_pe_stride: rope.strides,
        tokens: all_tokens(&problem.cache),
        source_page: problem.cache.page_size.into(),
        round_scale: problem.round_scale.into(),
        ..FmQuantiseParams::default()
    })
}

/// A whole cache, dequantised; `None` for 16-bit rows.
pub(super) fn dequantise_params(problem: &DequantizeProblem) -> Option<FmDequantiseParams> {
    Some(FmDequantiseParams {
        cache: byte_cache(&problem.cache)?,
        source: FmTokenSource::default(),
        out: problem.out.ptr as *mut c_void,
        out_stride: problem.out.strides,
        tokens: all_tokens(&problem.cache),
        out_page: problem.cache.page_size.into(),
    })
}

/// # Safety
/// As for [`quantize_kv`](crate::quantize_kv).
pub(crate) unsafe fn quantize(ordinal: u32, problem: &QuantizeProblem) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(problem.stream)?;
    let Some(mut params) = quantise_params(problem) else {
        return Ok(());
    };
    let kernel = Kernel::Quantise {
        from: Numbers::of(problem.dtype),
    };
    let launch = rows_launch(engine, params.tokens, problem.stream);
    // SAFETY: quantise kernels take one FmQuantiseParams; the memory is live (the caller's promise).
    unsafe { engine.launch(kernel, &launch, &mut [pointer(&mut params)]) }
}

/// # Safety
/// As for [`dequantize_kv`](crate::dequantize_kv).
pub(crate) unsafe fn dequantize(ordinal: u32, problem: &DequantizeProblem) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(problem.stream)?;
    let Some(mut params) = dequantise_params(problem) else {
        return Ok(());
    };
    let f32 = problem.dtype == DType::F32;
    let launch = rows_launch(engine, params.tokens, problem.stream);
    // SAFETY: dequantise kernels take one FmDequantiseParams; the memory is live (the caller's promise).
    unsafe {
        engine.launch(
            Kernel::Dequantise { f32 },
            &launch,
            &mut [pointer(&mut params)],
        )
    }
}

/// # Safety
/// As for [`gather_kv`](crate::gather_kv).
pub(crate) unsafe fn gather(ordinal: u32, problem: &GatherProblem) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(problem.stream)?;
    if let Some(mut params) = offsets_params(problem) {
        let launch = one_block(problem.stream);
        // SAFETY: `fm_offsets` takes one FmOffsetsParams; the memory is live (the caller's promise).
        unsafe { engine.launch(Kernel::Offsets, &launch, &mut [pointer(&mut params)])? };
    }
    if problem.tokens == 0 {
        return Ok(());
    }
    let launch = rows_launch(engine, problem.tokens, problem.stream);
    if let Some(mut params) = dequantising_gather_params(problem) {
        let kernel = Kernel::Dequantise { f32: false };
        // SAFETY: dequantise kernels take one FmDequantiseParams; the memory is live (the caller's promise).
        return unsafe { engine.launch(kernel, &launch, &mut [pointer(&mut params)]) };
    }
    let CacheRows::Half(cache_rows) = &problem.cache.rows else {
        return Ok(());
    };
    let mut params = gather_params(problem, cache_rows);
    // SAFETY: `fm_gather` takes one FmGatherParams; the memory is live (the caller's promise).
    unsafe { engine.launch(Kernel::Gather, &launch, &mut [pointer(&mut params)]) }
}

/// The sums of threads that are one block.
fn one_block(stream: Stream) -> Launch {
    Launch {
        blocks: 1,
        threads: FM_OFFSETS_THREADS as u32,
        stream,
        ..Launch::default()
    }
}

/// Where the requests begin; `None` where tokens come by their ids.
pub(super) fn offsets_params(problem: &GatherProblem) -> Option<FmOffsetsParams> {
    let GatherTokens::Pages { table, offsets } = &problem.source else {
        return None;
    };
    Some(FmOffsetsParams {
        seq_lens: table.seq_lens.ptr as *const i32,
        seq_lens_stride: table.seq_lens.strides[0],
        offsets: *offsets as *mut i64,
        batch: table.batch,
        max_seq_len: table.capacity(problem.cache.page_size) as i32,
    })
}

fn gather_params(problem: &GatherProblem, cache_rows: &TwoParts<3>) -> FmGatherParams {
    let cache = &problem.cache;
    let cache_rope = cache_rows.rope.unwrap_or(Strided::NONE);
    FmGatherParams {
        cache_nope: cache_rows.nope.ptr as *const c_void,
        cache_rope: cache_rope.ptr as *const c_void,
        cache_nope_stride: two(&cache_rows.nope),
        cache_rope_stride: two(&cache_rope),
        source: token_source(problem),
        out: problem.out.ptr as *mut c_void,
        out_stride: problem.out.strides[0],
        tokens: problem.tokens,
        num_pages: cache.num_pages.into(),
        rope_dim: rope_dim(cache),
        source_fp16: (cache.format == KvFormat::Fp16).into(),
    }
}

/// Tokens of a quantised cache; `None` for 16-bit rows.
pub(super) fn dequantising_gather_params(problem: &GatherProblem) -> Option<FmDequantiseParams> {
    Some(FmDequantiseParams {
        cache: byte_cache(&problem.cache)?,
        source: token_source(problem),
        out: problem.out.ptr as *mut c_void,
        out_stride: [0, problem.out.strides[0]],
        tokens: problem.tokens,
        out_page: problem.tokens.max(1),
    })
}

/// Which tokens.
fn token_source(problem: &GatherProblem) -> FmTokenSource {
    let page_size = problem.cache.page_size;
    match &problem.source {
        GatherTokens::Ids { ids, wide } => FmTokenSource {
            ids: ids.ptr as *const c_void,
            ids_stride: ids.strides[0],
            ids_are_64bit: (*wide).into(),
            page_size,
            ..FmTokenSource::default()
        },
        GatherTokens::Pages { table, offsets } => {
            // Null would mean "by ids"; an empty table may be null, and is never read.
            let block_table = if table.block_table.ptr == 0 {
                *offsets
            } else {
                table.block_table.ptr
            };
            FmTokenSource {
                block_table: block_table as *const i32,
                block_table_stride: table.block_table.strides[0],
                offsets: *offsets as *const i64,
                batch: table.batch,
                max_pages: table.max_pages,
                page_size,
                ..FmTokenSource::default()
            }
        }
    }
}
