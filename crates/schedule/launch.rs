//! How the device planner is best launched: a function of the shape alone, as the layout is.

use crate::algorithm::{MOST_ROUNDS, are_few, requests};
use crate::dealt::MOST_DEALT_UNITS;
use crate::plan_layout::{
    FM_PLAN_CLUSTER, FM_PLAN_CLUSTER_REQUESTS, FM_PLAN_CLUSTER_THREADS, FM_PLAN_THREADS,
    FM_PLAN_THREADS_OF_FEW, FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_REST, FmPlanLayout,
    FmPlanShape,
};

/// Units for each ragged request above which a cluster is slower than a thread for each unit: some request may have many.
const LONG_UNITS: i64 = 3;
/// What `fm_plan_cluster` has threads for, one to a worker.
const CLUSTER_WORKERS: i32 = 255;

/// Units for each thread of the planner's first block where every unit has one part, and most blocks besides.
const ONE_PART_UNITS: u32 = 8;
const ONE_PART_BLOCKS: u32 = 256;

/// The launch of the device planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannerLaunch {
    /// One, but for [`PlannerKernel::OnePart`].
    pub blocks: u32,
    /// CTAs of a cluster for each of these: one, but for [`PlannerKernel::Cluster`].
    pub cluster: u32,
    /// Of a block.
    pub threads: u32,
    /// Its entry point.
    pub kernel: PlannerKernel,
}

/// An entry point of the device planner. Each of the first three plans every batch of `FM_SPLIT_AUTO`; which is the fastest depends on its
/// size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannerKernel {
    /// `fm_plan`: a thread has one unit, and one request of a ragged batch.
    Many,
    /// `fm_plan_cluster`: for many units, a cluster of [`FM_PLAN_CLUSTER`] CTAs, each with a stretch of the requests, of
    /// [`FM_PLAN_CLUSTER_THREADS`] threads.
    Cluster,
    /// `fm_plan_few`: a thread has one, and the requests are so few that they may be shared out in more ways. Up to
    /// [`FM_PLAN_THREADS_OF_FEW`] threads.
    Few,
    /// `fm_plan_one_part`: more than 512 units that are not ragged and have one part each (`num_splits` 1), or `FM_SPLIT_REST`; no other
    /// batch. With any number of blocks, of which the first has stretches of units to a thread.
    OnePart,
    /// `fm_plan_by_count`: where the mode fixes the parts of each unit. At least two threads for each of up to 512 units.
    ByCount,
}

impl FmPlanLayout {
    /// How the device planner is best launched: with a thread for each unit, request and cut of `shape`, in whole warps, or two for each
    /// unit whose parts the mode fixes; as a cluster where units are many; with several blocks where nothing but what is left of equal
    /// units is cut.
    pub fn planner(&self, shape: &FmPlanShape) -> PlannerLaunch {
        let ranges = if shape.ragged != 0 { shape.batch } else { 0 };
        let units = self.units.max(ranges);
        if self.has_one_part_each(shape) {
            let least = (units as u32).div_ceil(ONE_PART_UNITS);
            let threads = least
                .next_multiple_of(32)
                .clamp(256, FM_PLAN_THREADS as u32);
            return PlannerLaunch {
                blocks: 1 + (units as u32).div_ceil(threads).min(ONE_PART_BLOCKS),
                cluster: 1,
                threads,
                kernel: PlannerKernel::OnePart,
            };
        }
        if self.is_for_cluster(shape) {
            return PlannerLaunch {
                blocks: 1,
                cluster: FM_PLAN_CLUSTER as u32,
                threads: FM_PLAN_CLUSTER_THREADS as u32,
                kernel: PlannerKernel::Cluster,
            };
        }
        let by_count = shape.split_mode != FM_SPLIT_AUTO;
        let of_units = (units as u32).saturating_mul(1 + u32::from(by_count));
        let least = of_units.max(shape.workers.saturating_add(1) as u32);
        let threads = least.next_multiple_of(32).min(FM_PLAN_THREADS as u32);
        let few = are_few(shape, 0) && threads <= FM_PLAN_THREADS_OF_FEW as u32;
        PlannerLaunch {
            blocks: 1,
            cluster: 1,
            threads,
            kernel: match (by_count, few) {
                (true, _) => PlannerKernel::ByCount,
                (false, true) => PlannerKernel::Few,
                (false, false) => PlannerKernel::Many,
            },
        }
    }

    /// Whether a cluster plans it, and the fastest, unless most requests turn out to be empty.
    fn is_for_cluster(&self, shape: &FmPlanShape) -> bool {
        let most_requests = i64::from(FM_PLAN_CLUSTER) * i64::from(FM_PLAN_CLUSTER_REQUESTS);
        let can = shape.split_mode == FM_SPLIT_AUTO
            && shape.kv_heads == 1
            && shape.workers <= CLUSTER_WORKERS
            && requests(shape) <= most_requests;
        let ragged = shape.ragged != 0;
        let rows = i64::from(shape.q_tokens) * i64::from(shape.group);
        let full = rows / i64::from(shape.unit_rows); // units, if none has fewer rows
        let (units, with_tokens) = (
            i64::from(self.units),
            shape.batch.min(shape.q_tokens).into(),
        );
        let least = if ragged { full.max(with_tokens) } else { units }; // if no request is empty
        // Some request may be long, and there is a thread for each unit.
        let long =
            ragged && full > LONG_UNITS * with_tokens && units <= FM_PLAN_THREADS_OF_FEW.into();
        // Fewer may be equal, and shared out otherwise than on the line.
        let equal = i64::from(MOST_ROUNDS) * i64::from(shape.workers);
        can && least > equal && !are_few(shape, least as i32) && !long
    }

    /// Whether there are many units, more than may be dealt out, and none is ever cut, or only what is left of equal ones.
    fn has_one_part_each(&self, shape: &FmPlanShape) -> bool {
        let many = self.units as usize > MOST_DEALT_UNITS && shape.ragged == 0;
        let one = shape.split_mode == FM_SPLIT_FIXED && shape.num_splits == 1;
        shape.split_mode == FM_SPLIT_REST || (one && many)
    }
}
