//! `Plan`: the schedule of a decode or prefill, computed once per step and used by every layer.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use ferromla_schedule::{PlanHeader, WorkItem};

use crate::check::Arg;
use crate::check_parts::{
    ListTokens, list_lens, qo_indptr as check_qo_indptr, seq_lens as check_seq_lens,
};
use crate::dtype::Device;
use crate::error::{Error, Result};
use crate::lengths::{HostLists, Lengths, host_values, never_falling};
use crate::plan_args::{PlanArgs, Queries};
use crate::problem::Strided;
use crate::schedule::{Schedule, Workspace, plan_error};
use crate::view::{Stream, View};
use crate::{cuda, values};

/// A schedule and the caller's memory it lives in: plan and partial results.
///
/// ```
/// use ferromla::{DType, Device, Plan, PlanArgs, Stream, View};
/// let args = PlanArgs { max_seq_len: Some(4096), ..PlanArgs::new(Device::Cpu, 2, 128) };
/// let mut memory = vec![0u128; Plan::workspace_bytes(&args)?.div_ceil(16) as usize];
/// let workspace = View::workspace(&mut memory);
/// let (lens, next) = ([3i32, 4000], [4i32, 4001]);
/// let (lens, next) = (View::of(&lens, DType::I32, &[2])?, View::of(&next, DType::I32, &[2])?);
/// // SAFETY: the views are of the memory above, which outlives the plan.
/// let plan = unsafe {
///     let plan = Plan::new(&args, &lens, None, workspace, Stream::default())?;
///     plan.update(&next, None, Stream::default())?; // the next step's
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
    /// The plan of host lengths on its way to a CUDA device. On the CPU whoever uses the workspace holds it.
    staging: Mutex<Vec<i32>>,
}

impl Plan {
    /// Plans for these lengths (`[batch]` int32) into `workspace` (`[bytes]` uint8 on `args.device`, at least
    /// [`workspace_bytes`], on a multiple of [`WORKSPACE_ALIGNMENT`](crate::WORKSPACE_ALIGNMENT) bytes). For
    /// [`Queries::Ragged`], `qo_indptr` (`[batch + 1]` int32, on the device of the lengths) says which query tokens
    /// belong to which request; else it is `None`. Lengths on the CUDA device are planned there, without a
    /// synchronisation; host lengths are planned on the host and, for a CUDA device, copied over.
    ///
    /// # Errors
    /// As [`decode`](crate::decode). Host lengths for a CUDA device are refused while `stream` is captured.
    ///
    /// # Safety
    /// The workspace is live, and written by nobody else, as long as the plan is used; on CUDA until `stream`, a
    /// live handle, and every stream a call used it on have passed. The lengths are live until `stream` has passed.
    pub unsafe fn new(
        args: &PlanArgs,
        seq_lens: &View,
        qo_indptr: Option<&View>,
        workspace: View,
        stream: Stream,
    ) -> Result<Self> {
        let plan = Self::unfilled(args, &Schedule::new(args)?, &workspace)?;
        // SAFETY: the caller's promise.
        unsafe { plan.update(seq_lens, qo_indptr, stream)? };
        Ok(plan)
    }

    /// Plans a call with lists of keys ([`Queries::Sparse`], [`Queries::SparsePrefill`]) as [`Plan::new`] plans
    /// others. `topk_lengths` says how many leading entries of a token's list count, int32 `[batch]` or
    /// `[batch, q_len]` (`[num_tokens]` for a sparse prefill), `extra_topk_lengths` the same of its list of the
    /// extra cache; `None`: all of them.
    ///
    /// # Errors
    /// As [`Plan::new`].
    ///
    /// # Safety
    /// As for [`Plan::new`].
    ///
    /// ```
    /// use ferromla::{DType, Device, Plan, PlanArgs, Queries, Stream, View};
    /// let queries = Queries::Sparse { q_len: 1, topk: 2048, extra_topk: 0 };
    /// let args = PlanArgs { queries, ..PlanArgs::new(Device::Cpu, 2, 128) };
    /// let mut memory = vec![0u128; Plan::workspace_bytes(&args)?.div_ceil(16) as usize];
    /// let workspace = View::workspace(&mut memory);
    /// let lens = [2048i32, 100];
    /// let lens = View::of(&lens, DType::I32, &[2])?;
    /// // SAFETY: the views are of the memory above, which outlives the plan.
    /// unsafe {
    ///     let plan = Plan::new_sparse(&args, Some(&lens), None, workspace, Stream::default())?;
    ///     plan.update_sparse(None, None, Stream::default())?; // every entry of every list
    /// }
    /// # Ok::<(), ferromla::Error>(())
    /// ```
    pub unsafe fn new_sparse(
        args: &PlanArgs,
        topk_lengths: Option<&View>,
        extra_topk_lengths: Option<&View>,
        workspace: View,
        stream: Stream,
    ) -> Result<Self> {
        let plan = Self::unfilled(args, &Schedule::new(args)?, &workspace)?;
        // SAFETY: the caller's promise.
        unsafe { plan.update_sparse(topk_lengths, extra_topk_lengths, stream)? };
        Ok(plan)
    }

    /// A plan whose bytes are still to be written. `schedule` is that of `args`.
    pub(crate) fn unfilled(args: &PlanArgs, schedule: &Schedule, workspace: &View) -> Result<Self> {
        Ok(Self {
            args: *args,
            schedule: *schedule,
            workspace: schedule.divide(workspace, args.device)?,
            staging: Mutex::default(),
        })
    }

    /// Plans again in place, for other lengths (and another `qo_indptr`) of the same shapes.
    ///
    /// # Errors
    /// As [`Plan::new`].
    ///
    /// # Safety
    /// As for [`Plan::new`]; no call with the plan runs at the same time, and on CUDA work that still reads it runs
    /// before `stream` reaches this call.
    pub unsafe fn update(
        &self,
        seq_lens: &View,
        qo_indptr: Option<&View>,
        stream: Stream,
    ) -> Result<()> {
        let (lengths, device) = self.check_lengths(seq_lens, qo_indptr)?;
        // SAFETY: the caller's promise; the views have been checked.
        unsafe { self.check_values_and_fill(&lengths, device, stream) }
    }

    /// Plans again in place, for lists of other lengths.
    ///
    /// # Errors
    /// As [`Plan::new_sparse`].
    ///
    /// # Safety
    /// As for [`Plan::update`].
    pub unsafe fn update_sparse(
        &self,
        topk_lengths: Option<&View>,
        extra_topk_lengths: Option<&View>,
        stream: Stream,
    ) -> Result<()> {
        let (lengths, device) = self.check_list_lens(topk_lengths, extra_topk_lengths)?;
        // SAFETY: the caller's promise; the views have been checked.
        unsafe { self.check_values_and_fill(&lengths, device, stream) }
    }

    /// # Safety
    /// As for [`Plan::update`], for lengths whose views have been checked.
    unsafe fn check_values_and_fill(
        &self,
        lengths: &Lengths,
        device: Device,
        stream: Stream,
    ) -> Result<()> {
        if values::checked() {
            // SAFETY: the lengths are live (the caller's promise) and their views have been checked.
            unsafe { values::plan_lengths(self, lengths, device, stream)? };
        }
        // SAFETY: as above; the workspace is the plan's.
        unsafe { self.fill(lengths, device, stream) }
    }

    /// Where lengths may be that are given there: on the plan's own device, or on the host.
    fn device_for(&self, lengths: &View) -> Device {
        match lengths.device() {
            Device::Cpu => Device::Cpu,
            Device::Cuda(_) => self.args.device,
        }
    }

    /// The lengths of lists and the device they are on.
    fn check_list_lens(
        &self,
        topk_lengths: Option<&View>,
        extra_topk_lengths: Option<&View>,
    ) -> Result<(Lengths, Device)> {
        let Some(tokens) = ListTokens::of(&self.args) else {
            let value = format!("for queries {}", self.args.queries.kind());
            let rule = "a plan for queries with indices takes topk_lengths";
            return Err(Error::invalid("plan", value, rule));
        };
        let given = topk_lengths.or(extra_topk_lengths);
        let device = given.map_or(self.args.device, |view| self.device_for(view));
        let check = |name, view: Option<&View>| {
            let check = |view| list_lens(&Arg::new(name, view), (device, "the plan"), tokens);
            view.map(check).transpose()
        };
        let lengths = Lengths {
            seq_lens: check("topk_lengths", topk_lengths)?,
            extra_lens: check("extra_topk_lengths", extra_topk_lengths)?,
            qo_indptr: None,
        };
        Ok((lengths, device))
    }

    /// The lengths and the device they are on: the plan's own, or the host.
    fn check_lengths(
        &self,
        seq_lens: &View,
        qo_indptr: Option<&View>,
    ) -> Result<(Lengths, Device)> {
        let lens = Arg::new("seq_lens", seq_lens);
        let device = self.device_for(seq_lens);
        let batch = self.args.batch;
        check_seq_lens(
            &lens,
            (device, "the plan"),
            (batch, "the batch of the plan"),
        )?;
        let qo_indptr = match (self.args.queries, qo_indptr) {
            (Queries::Uniform { .. }, None) => None,
            (Queries::Ragged { .. }, Some(view)) => {
                let indptr = Arg::new("qo_indptr", view);
                let batch = (batch, "the batch of the plan + 1");
                check_qo_indptr(&indptr, (device, "seq_lens"), batch)?;
                Some(indptr.strided())
            }
            (Queries::Uniform { .. }, Some(view)) => {
                let value = format!("of shape {}", view.shape());
                let rule = "None, for a plan of one q_len for all requests";
                return Err(Error::invalid("qo_indptr", value, rule));
            }
            (Queries::Ragged { .. }, None) => {
                let rule = "[batch + 1], for a plan of ragged queries";
                return Err(Error::invalid("qo_indptr", "None", rule));
            }
            (Queries::Sparse { .. } | Queries::SparsePrefill { .. }, _) => {
                let value = format!("of shape {}", seq_lens.shape());
                let rule = "a plan for queries with indices takes topk_lengths";
                return Err(Error::invalid("seq_lens", value, rule));
            }
        };
        Ok((Lengths::of_requests(lens.strided(), qo_indptr), device))
    }

    /// Writes the plan for lengths that have been checked.
    ///
    /// # Safety
    /// As for [`Plan::update`].
    pub(crate) unsafe fn fill(
        &self,
        lengths: &Lengths,
        device: Device,
        stream: Stream,
    ) -> Result<()> {
        let words = self.schedule.layout.words();
        match (self.args.device, device) {
            (Device::Cpu, _) => {
                let _alone = self.alone()?;
                // SAFETY: `divide` has checked the workspace's size and alignment, and nobody else uses it.
                let words = unsafe {
                    std::slice::from_raw_parts_mut(self.workspace.plan as *mut i32, words)
                };
                // SAFETY: the lengths are live host memory.
                unsafe { self.fill_host(lengths, words).map(drop) }
            }
            (Device::Cuda(ordinal), Device::Cpu) => {
                let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
                staging.resize(words, 0);
                // SAFETY: the lengths are live host memory.
                let header = unsafe { self.fill_host(lengths, &mut staging)? };
                // Items are last of what attention reads; behind them is the room of more of them.
                let items = header.items as usize * size_of::<WorkItem>();
                let used = (self.schedule.layout.items as usize + items) / size_of::<i32>();
                let plan = &staging[..used];
                // SAFETY: the workspace has the plan's size; the copy has left `staging` when this returns.
                unsafe { cuda::upload_plan(ordinal, plan, self.workspace.plan, stream) }
            }
            // SAFETY: lengths and workspace are live memory of the device.
            (Device::Cuda(ordinal), _) => unsafe { cuda::plan(ordinal, self, lengths, stream) },
        }
    }

    /// For a call on the CPU: nobody else uses the workspace until this is dropped. Waiting for others could wait for
    /// oneself, on a thread of the pool that computes.
    pub(crate) fn alone(&self) -> Result<MutexGuard<'_, Vec<i32>>> {
        match self.staging.try_lock() {
            Ok(alone) => Ok(alone),
            Err(TryLockError::Poisoned(alone)) => Ok(alone.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let rule = "on the CPU a plan serves one call at a time";
                Err(Error::invalid("plan", "in use by another call", rule))
            }
        }
    }

    /// # Safety
    /// The lengths are live host memory.
    unsafe fn fill_host(&self, lengths: &Lengths, words: &mut [i32]) -> Result<PlanHeader> {
        let shape = &self.schedule.shape;
        let batch = shape.batch as usize;
        if self.args.queries.is_sparse() {
            let size = [batch, shape.sparse_q_len as usize];
            // SAFETY: the caller's promise.
            let main = lengths
                .seq_lens
                .map(|lens| unsafe { HostLists::read(&lens, size) });
            // SAFETY: as above.
            let extra = lengths
                .extra_lens
                .map(|lens| unsafe { HostLists::read(&lens, size) });
            let (main, extra) = (main.as_ref(), extra.as_ref());
            return ferromla_schedule::plan_sparse_into(
                shape,
                main.map(HostLists::view),
                extra.map(HostLists::view),
                words,
            )
            .map_err(plan_error);
        }
        let seq_lens = lengths.seq_lens.unwrap_or(Strided::NONE).first();
        // SAFETY: the caller's promise.
        let seq_lens = unsafe { host_values(&seq_lens, batch) };
        // SAFETY: as above.
        let indptr = lengths
            .qo_indptr
            .map(|indptr| unsafe { host_values(&indptr, batch + 1) });
        let indptr = match self.args.device {
            Device::Cpu => indptr.map(never_falling),
            Device::Cuda(_) => indptr,
        };
        let indptr = indptr.as_deref().map(Into::into);
        ferromla_schedule::plan_into(shape, &*seq_lens, indptr, words).map_err(plan_error)
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
}

/// The exact size in bytes of the workspace of a [`Plan`], or of a [`decode`](crate::decode) or
/// [`prefill`](crate::prefill) without one. It begins on a multiple of
/// [`WORKSPACE_ALIGNMENT`](crate::WORKSPACE_ALIGNMENT) bytes.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, DecodeArgs, decode};

    #[test]
    fn on_the_cpu_a_plan_that_is_in_use_is_refused() {
        let cpu = Device::Cpu;
        let args = PlanArgs::new(cpu, 1, 1);
        let mut memory = vec![0u128; workspace_bytes(&args).unwrap().div_ceil(16) as usize];
        let (q, cache, ints) = (vec![0u16; 576], vec![0u16; 64 * 576], [0i32, 1]);
        let (mut out, mut lse) = (vec![0u16; 512], [0f32]);
        // SAFETY: the views describe the vectors above, which outlive the calls.
        unsafe {
            let view = |ptr, dtype, shape: &[i64]| View::contiguous(ptr, dtype, cpu, shape);
            let bytes = 16 * memory.len() as i64;
            let workspace = view(memory.as_mut_ptr().cast(), DType::U8, &[bytes]);
            let lens = view(ints[1..].as_ptr().cast(), DType::I32, &[1]);
            let plan = Plan::new(&args, &lens, None, workspace, Stream::default()).unwrap();
            let mut call = DecodeArgs::new(
                view(q.as_ptr().cast(), DType::Bf16, &[1, 1, 1, 576]).into(),
                view(cache.as_ptr().cast(), DType::Bf16, &[1, 64, 576]).into(),
                view(ints.as_ptr().cast(), DType::I32, &[1, 1]),
                lens,
                view(out.as_mut_ptr().cast(), DType::Bf16, &[1, 1, 1, 512]),
                view(lse.as_mut_ptr().cast(), DType::F32, &[1, 1, 1]),
            );
            call.plan = Some(&plan);
            let held = plan.alone().unwrap();
            for result in [decode(&call), plan.update(&lens, None, Stream::default())] {
                let error = result.unwrap_err().to_string();
                assert!(error.contains("plan is in use by another call"), "{error}");
            }
            drop(held);
            decode(&call).unwrap();
        }
    }
}
