//! The launches of attention, over the tokens of a block table or over listed ones.

use std::ffi::c_void;

use cudarc::driver::sys;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::params::{FmDecodeParams, FmDivisor, FmKvCache};
use crate::plan::Plan;
use crate::problem::{AttentionProblem, QueryScale, SparseProblem, Strided, TwoParts};
use crate::view::Stream;

use super::engine::{Engine, Launch};
use super::kernel::{Kernel, is_fp16};
use super::ops::{lower, pointer};
use super::variant::{Ctas, Loader, Variant, Walk};
use super::{kv_cache, tensor_map};

/// A kernel's launch, ready but for the device.
struct Attention<'a> {
    kernel: Kernel,
    maps: [sys::CUtensorMap; 2],
    params: FmDecodeParams,
    plan: &'a Plan,
    stream: Stream,
}

/// # Safety
/// As for [`decode`](crate::decode); the plan has been filled for this problem.
pub(crate) unsafe fn decode(ordinal: u32, problem: &AttentionProblem, plan: &Plan) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(problem.stream)?;
    // SAFETY: the caller's promise.
    unsafe { of_pages(problem, plan)?.launch(engine) }
}

/// # Safety
/// As for [`sparse_decode`](crate::sparse_decode); the plan has been filled for this problem.
pub(crate) unsafe fn sparse(ordinal: u32, problem: &SparseProblem, plan: &Plan) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(problem.stream)?;
    let attention = of_lists(problem, plan)?;
    if let Some(max_logits) = problem.max_logits.filter(|_| plan.schedule.may_split()) {
        let dims = [problem.q_len, problem.heads];
        // SAFETY: as below.
        unsafe { lower(engine, max_logits, dims, problem.stream)? };
    }
    // SAFETY: the caller's promise.
    unsafe { attention.launch(engine) }
}

/// Over the tokens that a block table names.
fn of_pages<'a>(problem: &AttentionProblem, plan: &'a Plan) -> Result<Attention<'a>> {
    let geometries = tensor_map::geometries(&problem.cache);
    let mut params = page_params(problem, plan);
    let mut maps = [tensor_map::empty(); 2];
    let mut loader = Loader::of_tokens(&[problem.cache.format]);
    if let Some(raw) = tensor_map::raw_geometry(&problem.cache, plan.schedule.choice.rows) {
        maps[0] = tensor_map::encoded(&raw.rows, problem.dtype)?;
        if let Some(tails) = &raw.tails {
            maps[1] = tensor_map::encoded(tails, problem.dtype)?;
        }
        params.box_shift = raw.box_rows.trailing_zeros() as i32;
    }
    if let Some((nope, rope)) = &geometries {
        loader = Loader::Tma;
        params.box_shift = tensor_map::box_rows(problem.cache.page_size).trailing_zeros() as i32;
        maps[0] = tensor_map::encoded(nope, problem.dtype)?;
        params.head_chunks_nope = nope.head_chunks;
        if let Some(rope) = rope {
            maps[1] = tensor_map::encoded(rope, problem.dtype)?;
            params.head_chunks_rope = rope.head_chunks;
        }
    }
    params.multicast = ctas_that_share(loader, plan);
    params.reads_once = reads_once(params.multicast, plan).into();
    let kernel = kernel(problem.dtype, &problem.q, loader, plan)?;
    Ok(Attention {
        kernel,
        maps,
        params,
        plan,
        stream: problem.stream,
    })
}

/// Over listed tokens.
fn of_lists<'a>(problem: &SparseProblem, plan: &'a Plan) -> Result<Attention<'a>> {
    let extra = problem.extra.as_ref().filter(|extra| extra.topk > 0);
    let extra = extra.unwrap_or(&problem.main);
    let formats = [problem.main.cache.format, extra.cache.format];
    let choice = &plan.schedule.choice;
    let ctas = Ctas {
        rows: choice.rows,
        team: choice.team,
        stages_codes: plan.schedule.stages_codes,
    };
    let narrow = problem.q.rope.is_none();
    let loader = Loader::of_lists(&formats, ctas, problem.dtype, narrow);
    Ok(Attention {
        kernel: kernel(problem.dtype, &problem.q, loader, plan)?,
        maps: [tensor_map::empty(); 2],
        params: FmDecodeParams {
            multicast: ctas_that_share(loader, plan),
            ..list_params(problem, plan)
        },
        plan,
        stream: problem.stream,
    })
}

/// The CTAs of a team read the same tiles: two of them, a cluster, load these once where the loader can.
fn ctas_that_share(loader: Loader, plan: &Plan) -> i32 {
    let alone = matches!(
        loader,
        Loader::Gather | Loader::Codes | Loader::Staged | Loader::FineStaged
    );
    match plan.schedule.choice.team % 2 {
        0 if !alone => 2,
        _ => 1,
    }
}

/// Whether no tile of a request is for more than one CTA, or the cluster that loads it together, as far as is known. (Requests may share
/// pages: that takes as long.)
fn reads_once(multicast: i32, plan: &Plan) -> bool {
    plan.schedule.choice.team == multicast && plan.schedule.is_a_unit_each
}

/// e4m3 queries become bf16 numbers.
fn kernel(dtype: DType, q: &TwoParts<3>, loader: Loader, plan: &Plan) -> Result<Kernel> {
    let choice = &plan.schedule.choice;
    let rows = choice.rows;
    let walk = Walk::of(choice.splits, plan.schedule.has_steps());
    let Some(variant) = Variant::of(loader, rows).filter(|variant| variant.has(walk)) else {
        let steps = if walk == Walk::Steps {
            ", in steps"
        } else {
            ""
        };
        let value = format!("laid out for {rows} query rows per CTA{steps}");
        let rule = "one made with the kv_format of the caches";
        return Err(Error::invalid("plan", value, rule));
    };
    if is_fp16(dtype) && matches!(loader, Loader::Codes | Loader::Fine) {
        let rule = "bf16 beside a quantised cache";
        return Err(Error::unsupported("q", dtype, rule));
    }
    Ok(Kernel::Decode {
        fp16: is_fp16(dtype),
        rope: q.rope.is_some(),
        variant,
        walk,
    })
}

fn page_params(problem: &AttentionProblem, plan: &Plan) -> FmDecodeParams {
    let (cache, table) = (&problem.cache, &problem.table);
    let q_scale_rows = match problem.q_scale {
        QueryScale::One(_) => Strided::NONE,
        QueryScale::Rows(rows) => rows,
    };
    let scale = problem.scale * f64::from(cache.scale) * f64::from(problem.q_scale.of_all());
    FmDecodeParams {
        kv: [kv_cache::of_pages(cache), FmKvCache::default()],
        block_table: table.block_table.ptr as *const i32,
        block_table_stride: table.block_table.strides[0],
        max_pages: table.max_pages,
        max_tokens: table.capacity(cache.page_size) as i32,
        causal: problem.causal.into(),
        q_codes: (problem.dtype == DType::F8E4M3).into(),
        q_scale: q_scale_rows.ptr as *const f32,
        q_scale_stride: q_scale_rows.strides,
        value_scale: cache.scale,
        attn_sink: problem.attn_sink as *const f32,
        empty_lse: problem.empty_lse,
        ..common_params(
            &problem.q,
            problem.group(),
            scale,
            [problem.out, problem.lse],
            plan,
        )
    }
}

fn list_params(problem: &SparseProblem, plan: &Plan) -> FmDecodeParams {
    let any = problem.q.nope.ptr;
    let max_logits = problem.max_logits.unwrap_or(Strided::NONE);
    let extra = problem.extra.as_ref();
    let kv_scale = problem.main.cache.scale;
    FmDecodeParams {
        kv: [
            kv_cache::of_lists(&problem.main, any),
            extra.map_or_else(FmKvCache::default, |extra| kv_cache::of_lists(extra, any)),
        ],
        max_tokens: i32::MAX,
        value_scale: kv_scale,
        attn_sink: problem.attn_sink as *const f32,
        empty_lse: problem.empty_lse,
        max_logits: max_logits.ptr as *mut f32,
        max_logits_stride: max_logits.strides,
        ..common_params(
            &problem.q,
            problem.heads,
            problem.scale * f64::from(kv_scale),
            [problem.out, problem.lse],
            plan,
        )
    }
}

/// What every call has. `group`: query heads per KV head. `scale`: of the scores, to base e.
fn common_params(
    q: &TwoParts<3>,
    group: i32,
    scale: f64,
    [out, lse]: [Strided<3>; 2],
    plan: &Plan,
) -> FmDecodeParams {
    let q_rope = q.rope.unwrap_or(Strided::NONE);
    let (choice, layout) = (&plan.schedule.choice, &plan.schedule.layout);
    FmDecodeParams {
        q_nope: q.nope.ptr as *const c_void,
        q_rope: q_rope.ptr as *const c_void,
        q_nope_stride: q.nope.strides,
        q_rope_stride: q_rope.strides,
        group,
        of_group: FmDivisor::of(group),
        team: choice.team,
        multicast: 1,
        box_shift: -1,
        scale_log2: (scale * std::f64::consts::LOG2_E) as f32,
        plan: plan.section::<ferromla_schedule::PlanHeader>(0).cast_mut(),
        worker_begin: plan.section(layout.worker_begin),
        items: plan.section(layout.items),
        merges: plan
            .section::<ferromla_schedule::Merge>(layout.merges)
            .cast_mut(),
        out: out.ptr as *mut c_void,
        out_stride: out.strides,
        lse: lse.ptr as *mut f32,
        lse_stride: lse.strides,
        partial_out: plan.workspace.partial_out as *mut f32,
        partial_lse: plan.workspace.partial_lse as *mut f32,
        slots: layout.max_slots,
        step_slots: layout.step_slots,
        ..FmDecodeParams::default()
    }
}

impl Attention<'_> {
    /// Launches the kernel.
    ///
    /// # Safety
    /// What the parameters describe is live, and the plan has been filled for them.
    unsafe fn launch(mut self, engine: &Engine) -> Result<()> {
        let choice = &self.plan.schedule.choice;
        for kv in &mut self.params.kv {
            kv_cache::read_without_pages(kv, self.plan.section(0));
        }
        let launch = Launch {
            blocks: choice.workers as u32,
            team: (choice.team * choice.splits) as u32,
            threads: self.kernel.decode_threads(),
            cluster: (self.params.multicast * choice.splits) as u32,
            stream: self.stream,
        };
        self.params.scale_log2 *= 1.0 + self.kernel.lost_of_scores();
        self.params.waits_aside =
            (2 * launch.blocks * launch.team <= engine.sm_count as u32).into();
        let [nope, rope] = &mut self.maps;
        let arguments = &mut [pointer(nope), pointer(rope), pointer(&mut self.params)];
        // SAFETY: decode kernels take two tensor maps and an FmDecodeParams; the memory is live.
        unsafe { engine.launch(self.kernel, &launch, arguments) }
    }
}
