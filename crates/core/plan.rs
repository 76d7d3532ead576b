//! `Plan`: the schedule of a decode, computed once per step and used by every layer.

use std::sync::{Mutex, PoisonError};

use crate::check::Arg;
use crate::check_parts::seq_lens as check_seq_lens;
use crate::dtype::{Device, KvFormat};
use crate::error::{Error, Result};
use crate::problem::{DecodeProblem, Strided};
use crate::schedule::{Schedule, Workspace, plan_error};
use crate::view::{Stream, View};
use crate::{cuda, values};

/// What decides a plan, apart from the lengths.
///
/// ```
/// use ferromla::{Device, PlanArgs};
/// let args = PlanArgs { page_size: 16, q_len: 2, ..PlanArgs::new(Device::Cpu, 4, 128) };
/// assert_eq!((args.batch, args.num_heads, args.num_kv_heads, args.causal), (4, 128, 1, true));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanArgs {
    /// Requests.
    pub batch: i64,
    /// Query heads.
    pub num_heads: i64,
    /// Cached heads; divides `num_heads`.
    pub num_kv_heads: i64,
    /// Query tokens per request.
    pub q_len: i64,
    /// Of the cache; `None`: any unquantised one.
    pub kv_format: Option<KvFormat>,
    /// Tokens of a page.
    pub page_size: i64,
    /// Query `i` sees keys `0 ..= seq_len - q_len + i` only.
    pub causal: bool,
    /// Fixes the parts every request is cut into; `None`: the scheduler chooses.
    pub num_splits: Option<u32>,
    /// A request's result depends on nothing else in the batch, bit for bit.
    pub batch_invariant: bool,
    /// Longer lengths are clamped to this; `None`: no bound but int32's.
    pub max_seq_len: Option<i64>,
    /// Where decode will run.
    pub device: Device,
}

impl PlanArgs {
    /// Arguments with the defaults: one cached head, one query token, page size 64, causal, automatic splits.
    pub fn new(device: Device, batch: i64, num_heads: i64) -> Self {
        Self {
            batch,
            num_heads,
            num_kv_heads: 1,
            q_len: 1,
            kv_format: None,
            page_size: 64,
            causal: true,
            num_splits: None,
            batch_invariant: false,
            max_seq_len: None,
            device,
        }
    }
}

/// A schedule and the caller's memory it lives in: plan and partial results.
///
/// ```
/// use ferromla::{DType, Device, Plan, PlanArgs, Stream, View};
/// let args = PlanArgs { max_seq_len: Some(4096), ..PlanArgs::new(Device::Cpu, 2, 128) };
/// let mut memory = vec![0u64; Plan::workspace_bytes(&args)?.div_ceil(8) as usize];
/// let (lens, next) = ([3i32, 4000], [4i32, 4001]);
/// // SAFETY: the views describe the vectors above, which outlive the plan.
/// let plan = unsafe {
///     let bytes = (memory.len() * 8) as i64;
///     let workspace = View::contiguous(memory.as_mut_ptr().cast(), DType::U8, Device::Cpu, &[bytes]);
///     let view = |lens: &[i32]| View::contiguous(lens.as_ptr().cast(), DType::I32, Device::Cpu, &[2]);
///     let plan = Plan::new(&args, &view(&lens), workspace, Stream::default())?;
///     plan.update(&view(&next), Stream::default())?; // the next step's
///     plan
/// };
/// assert_eq!(plan.args().batch, 2);
/// # Ok::<(), ferromla::Error>(())
/// ```
#[derive(Debug)]
pub struct Plan {
    args: PlanArgs,
    pub(crate) schedule: Schedule,
    pub(crate) workspace: Workspace,
    /// The plan of host lengths on its way to a CUDA device.
    staging: Mutex<Vec<i32>>,
}

impl Plan {
    /// Plans for these lengths (`[batch]` int32) into `workspace` (`[bytes]` uint8 on `args.device`, at least
    /// [`workspace_bytes`]). Lengths on the CUDA device are planned there, without a synchronisation; host
    /// lengths are planned on the host and, for a CUDA device, copied over.
    ///
    /// # Errors
    /// As [`decode`](crate::decode). Host lengths for a CUDA device are refused while `stream` is captured.
    ///
    /// # Safety
    /// The workspace is live, and written by nobody else, as long as the plan is used; on CUDA until `stream`
    /// and every stream a decode used it on have passed. The lengths are live until `stream` has passed.
    pub unsafe fn new(
        args: &PlanArgs,
        seq_lens: &View,
        workspace: View,
        stream: Stream,
    ) -> Result<Self> {
        let plan = Self::unfilled(args, &workspace)?;
        // SAFETY: the caller's promise.
        unsafe { plan.update(seq_lens, stream)? };
        Ok(plan)
    }

    /// A plan whose bytes are still to be written.
    pub(crate) fn unfilled(args: &PlanArgs, workspace: &View) -> Result<Self> {
        let schedule = Schedule::new(args)?;
        let workspace = schedule.divide(workspace, args.device)?;
        Ok(Self {
            args: *args,
            schedule,
            workspace,
            staging: Mutex::default(),
        })
    }

    /// Plans again in place, for other lengths of the same shapes.
    ///
    /// # Errors
    /// As [`Plan::new`].
    ///
    /// # Safety
    /// As for [`Plan::new`]; work that still reads the plan runs before `stream` reaches this call.
    pub unsafe fn update(&self, seq_lens: &View, stream: Stream) -> Result<()> {
        let lens = Arg::new("seq_lens", seq_lens);
        let on_host_for_cuda = self.args.device.is_cuda() && seq_lens.device() == Device::Cpu;
        let device = if on_host_for_cuda {
            Device::Cpu
        } else {
            self.args.device
        };
        check_seq_lens(
            &lens,
            (device, "the plan"),
            (self.args.batch, "the batch of the plan"),
        )?;
        if values::checked() {
            // SAFETY: the lengths are live (the caller's promise) and their view has been checked.
            unsafe { values::plan_lens(self, &lens.strided(), device, stream)? };
        }
        // SAFETY: as above; the workspace is the plan's.
        unsafe { self.fill(&lens.strided(), device, stream) }
    }

    /// Writes the plan for lengths that have been checked.
    ///
    /// # Safety
    /// As for [`Plan::update`].
    pub(crate) unsafe fn fill(
        &self,
        lens: &Strided<1>,
        device: Device,
        stream: Stream,
    ) -> Result<()> {
        let words = self.schedule.layout.words();
        match (self.args.device, device) {
            (Device::Cpu, _) => {
                // SAFETY: `divide` has checked the workspace's size and alignment, and nobody else uses it.
                let words = unsafe {
                    std::slice::from_raw_parts_mut(self.workspace.plan as *mut i32, words)
                };
                // SAFETY: the lengths are live host memory.
                unsafe { self.fill_host(lens, words) }
            }
            (Device::Cuda(ordinal), Device::Cpu) => {
                let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
                staging.resize(words, 0);
                // SAFETY: the lengths are live host memory.
                unsafe { self.fill_host(lens, &mut staging)? };
                // SAFETY: the workspace has the plan's size; the copy has left `staging` when this returns.
                unsafe { cuda::upload_plan(ordinal, &staging, self.workspace.plan, stream) }
            }
            // SAFETY: lengths and workspace are live memory of the device.
            (Device::Cuda(ordinal), _) => unsafe { cuda::plan(ordinal, self, lens, stream) },
        }
    }

    /// # Safety
    /// The lengths are live host memory.
    unsafe fn fill_host(&self, lens: &Strided<1>, words: &mut [i32]) -> Result<()> {
        let batch = self.schedule.shape.batch as usize;
        let copied: Vec<i32>;
        let lens = if batch == 0 {
            &[]
        } else if lens.strides[0] == 1 || batch == 1 {
            // SAFETY: `batch` consecutive elements, live by the caller's promise.
            unsafe { std::slice::from_raw_parts(lens.ptr as *const i32, batch) }
        } else {
            let at = |r: usize| {
                (lens.ptr as *const i32).wrapping_offset(r as isize * lens.strides[0] as isize)
            };
            // SAFETY: the view's elements, live by the caller's promise.
            copied = (0..batch).map(|r| unsafe { at(r).read() }).collect();
            &copied[..]
        };
        ferromla_schedule::plan_into(&self.schedule.shape, lens, None, words)
            .map_err(plan_error)?;
        Ok(())
    }

    /// The address of a section of the plan's bytes, by its offset in the layout.
    #[cfg(feature = "cuda")]
    pub(crate) const fn section<T>(&self, offset: i64) -> *const T {
        (self.workspace.plan + offset as u64) as *const T
    }

    /// What the plan was made for.
    pub const fn args(&self) -> &PlanArgs {
        &self.args
    }

    /// Bytes of the plan proper at the start of the workspace; what follows is scratch for partial results.
    pub const fn plan_bytes(&self) -> u64 {
        self.schedule.layout.bytes as u64
    }

    /// Where the plan's worker starts, merges, items and planner scratch begin, in bytes; the header is at 0.
    pub const fn plan_offsets(&self) -> [u64; 4] {
        let layout = &self.schedule.layout;
        [
            layout.worker_begin as u64,
            layout.merges as u64,
            layout.items as u64,
            layout.unit_start as u64,
        ]
    }

    /// The need of [`Plan::new`]; the same as the free function [`workspace_bytes`].
    ///
    /// # Errors
    /// As [`workspace_bytes`].
    pub fn workspace_bytes(args: &PlanArgs) -> Result<u64> {
        workspace_bytes(args)
    }

    /// Refuses a problem other than the one the plan was made for, by the field that differs.
    pub(crate) fn made_for(&self, problem: &DecodeProblem) -> Result<()> {
        let differs = |field: &str, made_for: &dyn ToString, call: &dyn ToString| {
            let value = format!("made for {field} {}", made_for.to_string());
            Err(Error::invalid(
                "plan",
                value,
                format!("this call has {field} {}", call.to_string()),
            ))
        };
        if self.args.device != problem.device {
            return differs("device", &self.args.device, &problem.device);
        }
        let fields = [
            ("batch", self.args.batch, i64::from(problem.table.batch)),
            ("q_len", self.args.q_len, problem.q_len.into()),
            ("num_heads", self.args.num_heads, problem.heads.into()),
            (
                "num_kv_heads",
                self.args.num_kv_heads,
                problem.cache.kv_heads.into(),
            ),
            (
                "page_size",
                self.args.page_size,
                problem.cache.page_size.into(),
            ),
        ];
        for (field, made_for, call) in fields {
            if made_for != call {
                return differs(field, &made_for, &call);
            }
        }
        if self.args.causal != problem.causal {
            return differs("causal", &self.args.causal, &problem.causal);
        }
        match self.args.kv_format {
            Some(format) if format.dtype() != Some(problem.dtype) => {
                differs("kv_format", &format, &problem.dtype)
            }
            _ => Ok(()),
        }
    }
}

/// The exact size in bytes of the workspace of a [`Plan`], or of a [`decode`](crate::decode) without one.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the field of `args`; [`Error::Cuda`] when `args.device` is a CUDA device
/// that cannot be asked for its number of SMs.
///
/// ```
/// use ferromla::{Device, PlanArgs, workspace_bytes};
/// assert!(workspace_bytes(&PlanArgs::new(Device::Cpu, 4, 128))? > 0);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub fn workspace_bytes(args: &PlanArgs) -> Result<u64> {
    Ok(Schedule::new(args)?.bytes)
}
