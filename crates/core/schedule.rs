//! From the arguments of a plan to its shape, its layout, and the map of the workspace it lives in.
//!
//! A workspace is the plan's bytes, then the float32 partial results of split units, then their log-sum-exps,
//! each part on a 256-byte boundary counted from the workspace's beginning. Kernels may read a little of it where a
//! cache has no pages.

use std::cell::Cell;

use ferromla_schedule::{
    Choice, Keys, MAX_CLUSTER, PlanError, PlanLayout, PlanShape, Problem as ScheduleProblem,
    Queries as ScheduleQueries, Split, Target, choose, layout,
};

use crate::check::{Access, Arg, Last, MAX_SEQ_LEN};
use crate::dtype::{DType, Device, KvFormat, Operands};
use crate::error::{Error, Result};
use crate::plan_args::{PlanArgs, Queries};
use crate::problem::NOPE_DIM;
use crate::view::View;

const SECTION_ALIGNMENT: u64 = 256;
/// Of a workspace: what attention kernels may read where a cache has no pages, as `kernels/params.h` says.
const MIN_BYTES: u64 = 1024;
/// Pages of a multiple of so many tokens are loaded by boxes.
const TOKENS_OF_A_BOX: i64 = 8;
/// Units of a sparse prefill above which whole ones are shared out: CTAs have so many then that cutting them at even shares gains less than
/// it costs.
const MOST_SPLIT_UNITS: i32 = 1024;
/// What the address of a workspace is a multiple of, in bytes.
///
/// ```
/// let memory = vec![0u128; 64]; // memory of `u128`s is
/// assert!((memory.as_ptr() as u64).is_multiple_of(ferromla::WORKSPACE_ALIGNMENT));
/// ```
pub const WORKSPACE_ALIGNMENT: u64 = 16;

/// A plan's shape and where its parts lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Schedule {
    pub shape: PlanShape,
    pub layout: PlanLayout,
    /// How CTAs share the work.
    pub choice: Choice,
    /// Whether lists of codes are staged where they may be.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only CTAs do"))]
    pub stages_codes: bool,
    /// Whether every request is known to have one unit for each cached head.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only CTAs do"))]
    pub is_a_unit_each: bool,
    partial_out: u64,
    partial_lse: u64,
    pub bytes: u64,
}

thread_local! {
    /// What was asked for last: calls without a plan ask for the same layer after layer, and step after step.
    static LAST: Cell<Option<(ScheduleProblem, Schedule)>> = const { Cell::new(None) };
}

/// The addresses of a workspace's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Workspace {
    pub plan: u64,
    pub partial_out: u64,
    pub partial_lse: u64,
}

impl Schedule {
    pub fn new(args: &PlanArgs) -> Result<Self> {
        check(args)?;
        let target = target(args)?;
        let group = (args.num_heads / args.num_kv_heads) as i32;
        let max_seq_len = args.max_seq_len.unwrap_or(MAX_SEQ_LEN).min(MAX_SEQ_LEN) as i32;
        let problem = ScheduleProblem {
            batch: args.batch as i32,
            queries: match args.queries {
                Queries::Uniform { q_len } => ScheduleQueries::Uniform {
                    q_len: q_len as i32,
                },
                Queries::Ragged { num_tokens } => ScheduleQueries::Ragged {
                    tokens: num_tokens as i32,
                    most: args.max_q_len.map(|most| most as i32),
                },
                Queries::Sparse {
                    q_len,
                    topk,
                    extra_topk,
                } => ScheduleQueries::Sparse {
                    q_len: q_len as i32,
                    topk: topk as i32,
                    extra_topk: extra_topk as i32,
                },
                Queries::SparsePrefill { num_tokens, topk } => ScheduleQueries::Sparse {
                    q_len: num_tokens as i32,
                    topk: topk as i32,
                    extra_topk: 0,
                },
            },
            group,
            kv_heads: args.num_kv_heads as i32,
            keys: keys(args),
            causal: args.causal,
            max_seq_len,
            split: split(args),
            target,
        };
        let schedule = match args.queries {
            Queries::SparsePrefill { .. } => Self::of_prefill(problem),
            _ => Self::of(&problem),
        };
        schedule.map_err(|error| shape_error(args, error))
    }

    /// Of a sparse prefill: of many units those are split that are left when all workers have as many, if any.
    fn of_prefill(mut problem: ScheduleProblem) -> Result<Self, PlanError> {
        let schedule = Self::of(&problem)?;
        if problem.split != Split::Auto || schedule.layout.units <= MOST_SPLIT_UNITS {
            return Ok(schedule);
        }
        problem.split = Split::Rest;
        Self::of(&problem)
    }

    fn of(problem: &ScheduleProblem) -> Result<Self, PlanError> {
        if let Some((last, schedule)) = LAST.get()
            && last == *problem
        {
            return Ok(schedule);
        }
        let choice = choose(problem);
        let shape = problem.shape_of(&choice);
        let schedule = Self::place(problem, shape, layout(&shape)?, choice);
        LAST.set(Some((*problem, schedule)));
        Ok(schedule)
    }

    /// Whether several CTAs may have a part of the same query rows.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only CTAs do"))]
    pub fn may_split(&self) -> bool {
        self.choice.splits > 1 || self.layout.max_slots > 0
    }

    /// Whether CTAs go through parts in steps.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only CTAs do"))]
    pub fn has_steps(&self) -> bool {
        self.shape.steps != 0
    }

    fn place(
        problem: &ScheduleProblem,
        shape: PlanShape,
        layout: PlanLayout,
        choice: Choice,
    ) -> Self {
        // Below 2^52: fewer than 2^31 slots, of a few hundred rows.
        let rows = layout.max_slots as u64 * shape.unit_rows as u64;
        let partial_out = (layout.bytes as u64).next_multiple_of(SECTION_ALIGNMENT);
        let partial_lse =
            (partial_out + rows * NOPE_DIM as u64 * 4).next_multiple_of(SECTION_ALIGNMENT);
        let bytes = (partial_lse + rows * 4).next_multiple_of(SECTION_ALIGNMENT);
        Self {
            shape,
            layout,
            choice,
            stages_codes: problem.stages_codes(&choice),
            is_a_unit_each: problem.is_a_unit_each(&choice),
            partial_out,
            partial_lse,
            bytes: bytes.max(MIN_BYTES),
        }
    }

    /// Checks the caller's memory and divides it.
    pub fn divide(&self, view: &View, device: Device) -> Result<Workspace> {
        let arg = Arg::new("workspace", view);
        if view.shape().rank() != 1 || view.strides().rank() != 1 {
            let value = format!("of shape {}", view.shape());
            return Err(Error::invalid("workspace", value, "one dimension of bytes"));
        }
        arg.dtype(&[DType::U8, DType::I8], "")?;
        arg.device(device, "the call")?;
        let bytes = view.shape()[0];
        if bytes < 0 || (bytes as u64) < self.bytes {
            let rule = format!(
                "at least {} bytes are needed, as `workspace_bytes` says",
                self.bytes
            );
            return Err(Error::invalid("workspace", format!("{bytes} bytes"), rule));
        }
        arg.memory(Last::Unit, Access::Write)?;
        if !view.ptr().is_multiple_of(WORKSPACE_ALIGNMENT) {
            let rule = format!("it begins on a {WORKSPACE_ALIGNMENT}-byte boundary");
            return Err(Error::invalid(
                "workspace",
                format!("at address {:#x}", view.ptr()),
                rule,
            ));
        }
        Ok(Workspace {
            plan: view.ptr(),
            partial_out: view.ptr() + self.partial_out,
            partial_lse: view.ptr() + self.partial_lse,
        })
    }
}

/// How units may be cut, as far as the arguments tell.
fn split(args: &PlanArgs) -> Split {
    if let Queries::SparsePrefill { num_tokens, .. } = args.queries {
        return if args.batch_invariant || args.device == Device::Cpu {
            Split::Never
        } else if num_tokens > MOST_SPLIT_UNITS.into() {
            Split::Rest // a token has a unit at least
        } else {
            Split::Auto
        };
    }
    let parts = args
        .num_splits
        .map(|parts| parts.min(i32::MAX as u32) as i32);
    match parts {
        parts if args.batch_invariant => Split::Invariant { parts },
        Some(parts) => Split::Fixed(parts),
        None => Split::Auto,
    }
}

/// What is read, as far as is known. A format that is not given is one of 16 bits, but beside another cache it may be any.
fn keys(args: &PlanArgs) -> Keys {
    let lists = matches!(
        args.queries,
        Queries::Sparse { .. } | Queries::SparsePrefill { .. }
    );
    let extra = matches!(args.queries, Queries::Sparse { extra_topk, .. } if extra_topk > 0);
    let format = args.kv_format;
    let formats = [format, if extra { args.extra_kv_format } else { format }];
    let known: Option<Vec<KvFormat>> = formats.into_iter().collect();
    match known.map(|formats| KvFormat::operands(&formats)) {
        None if extra => Keys::Mixed,
        Some(Operands::Converted) => Keys::Mixed,
        Some(Operands::BareCodes) => Keys::Codes,
        Some(Operands::Codes | Operands::FineCodes) => Keys::ScaledCodes,
        None | Some(Operands::Halves) if !lists && args.page_size % TOKENS_OF_A_BOX == 0 => {
            Keys::Pages
        }
        None | Some(Operands::Halves) => Keys::Rows,
    }
}

fn target(args: &PlanArgs) -> Result<Target> {
    Ok(match args.device {
        Device::Cpu => Target::Cpu {
            threads: crate::cpu::threads(),
        },
        Device::Cuda(ordinal) => crate::cuda::target(ordinal)?.at_most(args.num_sms),
    })
}

fn check(args: &PlanArgs) -> Result<()> {
    let range = |name, value: i64, low: i64| {
        if (low..=i64::from(i32::MAX)).contains(&value) {
            return Ok(());
        }
        Err(Error::invalid(
            name,
            value,
            format!("between {low} and {}", i32::MAX),
        ))
    };
    range("batch", args.batch, 0)?;
    range("num_heads", args.num_heads, 1)?;
    range("num_kv_heads", args.num_kv_heads, 1)?;
    match args.queries {
        Queries::Uniform { q_len } => range("q_len", q_len, 0)?,
        Queries::Ragged { num_tokens } => range("num_tokens", num_tokens, 0)?,
        Queries::Sparse {
            q_len,
            topk,
            extra_topk,
        } => {
            range("q_len", q_len, 0)?;
            range("topk", topk, 0)?;
            range("extra_topk", extra_topk, 0)?;
        }
        Queries::SparsePrefill { num_tokens, topk } => {
            range("num_tokens", num_tokens, 0)?;
            range("topk", topk, 0)?;
            if args.batch != 1 {
                return Err(Error::invalid(
                    "batch",
                    args.batch,
                    "1 for a sparse prefill",
                ));
            }
            if let Some(parts) = args.num_splits {
                let rule = "None for a sparse prefill";
                return Err(Error::invalid("num_splits", parts, rule));
            }
        }
    }
    range("page_size", args.page_size, 1)?;
    if args.num_heads % args.num_kv_heads != 0 {
        let rule = format!("it divides num_heads, {}", args.num_heads);
        return Err(Error::invalid("num_kv_heads", args.num_kv_heads, rule));
    }
    if args.queries.is_sparse() && args.num_kv_heads != 1 {
        let rule = "1 for queries with indices";
        return Err(Error::invalid("num_kv_heads", args.num_kv_heads, rule));
    }
    let quantised = args.kv_format.filter(|format| format.is_quantised());
    if let Some(format) = quantised.filter(|_| args.num_kv_heads != 1) {
        let rule = format!("1 for a cache of the format {format}");
        return Err(Error::invalid("num_kv_heads", args.num_kv_heads, rule));
    }
    if args.num_splits == Some(0) {
        return Err(Error::invalid("num_splits", 0, "at least 1, or None"));
    }
    if let Some(count) = args.num_sms {
        range("num_sms", count, MAX_CLUSTER.into())?; // or a team might have no room
    }
    if let Some(most) = args.max_q_len {
        range("max_q_len", most, 0)?;
        if !matches!(args.queries, Queries::Ragged { .. }) {
            let rule = "None unless requests have different query lengths";
            return Err(Error::invalid("max_q_len", most, rule));
        }
    }
    match args.max_seq_len {
        Some(len) if len < 0 => Err(Error::invalid("max_seq_len", len, "at least 0, or None")),
        _ => Ok(()),
    }
}

/// Why there is no plan of these arguments, in their terms.
fn shape_error(args: &PlanArgs, error: PlanError) -> Error {
    match error {
        PlanError::Field { field, value, rule } => Error::invalid(field, value, rule),
        PlanError::TooLarge { what, count } => {
            let (argument, value) = largest_factor(args, what);
            let value = format!("{value}, so that there are {count} {what}");
            Error::invalid(argument, value, format!("at most {}", i32::MAX))
        }
        other => plan_error(other),
    }
}

/// Of the arguments that a count of the scheduler grows with, the one to make smaller.
fn largest_factor(args: &PlanArgs, what: &str) -> (&'static str, i64) {
    let [tokens, topk, extra_topk] = args.queries.fields();
    let heads = ("num_heads", args.num_heads);
    let factors: &[_] = match (what, args.num_splits) {
        ("keys", _) => &[extra_topk, topk],
        ("rows", _) => &[tokens, heads],
        ("items" | "slots", Some(parts)) => return ("num_splits", parts.into()),
        _ => &[("batch", args.batch), tokens, heads],
    };
    let largest = factors.iter().max_by_key(|(_, value)| value);
    *largest.expect("no list of factors is empty")
}

/// The scheduler's error for a plan that is filled or read.
pub(crate) fn plan_error(error: PlanError) -> Error {
    Error::invalid("plan", "not a plan of this shape", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paged(page_size: i64, kv_format: Option<KvFormat>) -> Keys {
        keys(&PlanArgs {
            page_size,
            kv_format,
            ..PlanArgs::new(Device::Cpu, 1, 32)
        })
    }

    fn listed(
        extra_topk: i64,
        kv_format: Option<KvFormat>,
        extra_kv_format: Option<KvFormat>,
    ) -> Keys {
        keys(&PlanArgs {
            queries: Queries::Sparse {
                q_len: 1,
                topk: 64,
                extra_topk,
            },
            kv_format,
            extra_kv_format,
            ..PlanArgs::new(Device::Cpu, 1, 32)
        })
    }

    #[test]
    fn of_a_sparse_prefill_few_lists_are_split() {
        let splits = |tokens, split, target| {
            let problem = ScheduleProblem {
                batch: 1,
                queries: ScheduleQueries::Sparse {
                    q_len: tokens,
                    topk: 2048,
                    extra_topk: 0,
                },
                group: 128,
                kv_heads: 1,
                keys: Keys::Rows,
                causal: true,
                max_seq_len: 2048,
                split,
                target,
            };
            Schedule::of_prefill(problem).unwrap().may_split()
        };
        let gpu = Target::Gpu {
            sm_count: 132,
            clusters: [66, 30, 15, 7],
            memory: 4814,
        };
        for tokens in [1, 4, 62, 140, 1024] {
            assert!(splits(tokens, Split::Auto, gpu), "{tokens}");
            assert!(!splits(tokens, Split::Never, gpu), "{tokens}");
        }
        // 1,025 lists of 66 teams are 15 to each and 35 more, 1,056 are 16 to each; 4,096 are 62 to each and 4 more.
        assert!(!splits(1025, Split::Auto, gpu) && !splits(1056, Split::Auto, gpu));
        assert!(splits(4096, Split::Auto, gpu) && !splits(4096, Split::Never, gpu));
    }

    #[test]
    fn a_sparse_prefill_splits_nothing_on_a_cpu_or_where_results_are_to_depend_on_nothing_else() {
        let args = PlanArgs {
            queries: Queries::SparsePrefill {
                num_tokens: 5,
                topk: 2048,
            },
            ..PlanArgs::new(Device::Cpu, 1, 16)
        };
        assert!(!Schedule::new(&args).unwrap().may_split());
        let on_gpu = |batch_invariant| {
            split(&PlanArgs {
                device: Device::Cuda(0),
                batch_invariant,
                ..args
            }) == Split::Never
        };
        assert!(!on_gpu(false) && on_gpu(true));
    }

    #[test]
    fn what_was_asked_for_last_is_not_taken_for_another() {
        let of = |batch, page_size| {
            let args = PlanArgs {
                page_size,
                max_seq_len: Some(300),
                ..PlanArgs::new(Device::Cpu, batch, 16)
            };
            Schedule::new(&args).unwrap()
        };
        let shapes = [(1, 64), (3, 64), (3, 1), (1, 64), (1, 64)];
        let here = shapes.map(|(batch, page_size)| of(batch, page_size));
        // A thread that has been asked for nothing.
        let anew = |(batch, page_size)| {
            std::thread::scope(|scope| scope.spawn(|| of(batch, page_size)).join().unwrap())
        };
        assert_eq!(here, shapes.map(anew));
        assert_eq!(here[0], here[4]);
        assert_ne!(here[0].layout, here[1].layout);
    }

    #[test]
    fn pages_are_loaded_whole_unless_they_are_known_not_to_be() {
        assert_eq!(paged(64, None), Keys::Pages);
        assert_eq!(paged(8, Some(KvFormat::Fp16)), Keys::Pages);
        assert_eq!(paged(1, None), Keys::Rows);
        assert_eq!(paged(61, Some(KvFormat::Bf16)), Keys::Rows);
        assert_eq!(paged(64, Some(KvFormat::Fp8)), Keys::Codes);
        assert_eq!(listed(0, None, None), Keys::Rows);
        assert_eq!(listed(0, Some(KvFormat::Fp8V4), None), Keys::ScaledCodes);
    }

    #[test]
    fn caches_are_mixed_unless_both_are_known_to_be_of_one_kind() {
        use KvFormat::{Bf16, Fp4V41, Fp8, Fp8V4, Fp8V32, Fp8V41};
        for (main, extra, keys) in [
            (Bf16, Bf16, Keys::Rows),
            (Fp8, Fp8V32, Keys::ScaledCodes),
            (Fp8V4, Fp8V4, Keys::ScaledCodes),
            (Fp8V41, Fp4V41, Keys::ScaledCodes),
        ] {
            assert_eq!(listed(5, Some(main), Some(extra)), keys);
        }
        for (main, extra) in [(Bf16, Fp8), (Fp8V32, Bf16), (Fp8V4, Fp4V41), (Bf16, Fp4V41)] {
            assert_eq!(listed(5, Some(main), Some(extra)), Keys::Mixed);
            assert_ne!(listed(0, Some(main), None), Keys::Mixed);
        }
        for (main, extra) in [(None, Some(Fp8)), (Some(Bf16), None), (None, None)] {
            assert_eq!(listed(5, main, extra), Keys::Mixed);
        }
    }
}
