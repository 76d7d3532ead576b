//! How a problem is laid out on a machine: rows per unit, workers, and the costs the planner weighs.

use crate::plan_layout::{
    FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT, FM_TILE_ROWS, FmPlanShape,
};
use crate::{PlanError, layout};

/// What a unit costs before its first tile (loading Q, filling the pipeline, writing out), in tiles.
pub const FIXED_COST: i32 = 5;
/// What splitting a unit costs (partial results out and in again), in tiles.
pub const SPLIT_COST: i32 = 10;
/// The shortest part of a split unit, in tiles.
pub const MIN_PART: i32 = 2;

/// Most CTAs that share one unit: the portable cluster size.
const MAX_TEAM: i32 = 8;
/// CTAs of a team where a unit of all rows would need more than [`MAX_TEAM`].
const TEAM_OF_MANY_ROWS: i32 = 4;
/// Worker slots per CPU thread: threads take the next slot when done, which evens out their speeds.
const SLOTS_PER_THREAD: i32 = 4;

/// Where a plan will run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// A GPU with this many streaming multiprocessors.
    Gpu {
        /// Streaming multiprocessors.
        sm_count: i32,
    },
    /// The CPU backend with this many threads.
    Cpu {
        /// Threads.
        threads: i32,
    },
}

/// How units may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Wherever the even shares of the workers fall.
    Auto,
    /// Every unit into this many parts, at least 1 (fewer where it has fewer tiles).
    Fixed(i32),
    /// By the unit's own length only, so that results do not depend on the rest of the batch.
    Invariant,
}

/// Rows per unit and workers, as [`choose`] picks them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// CTAs that share one unit, one block of 64 rows each.
    pub team: i32,
    /// Query rows of one unit.
    pub unit_rows: i32,
    /// Teams on the work line.
    pub workers: i32,
}

/// Picks team, rows per unit and workers for `rows = q_len * group` query rows per request and KV head.
///
/// All CTAs of a team read the same KV tiles at the same time, so a unit takes all rows where they fit one
/// team of at most 8: each tile then leaves memory once.
///
/// ```
/// use ferromla_schedule::{Choice, Target, choose};
/// let choice = choose(128, Target::Gpu { sm_count: 132 });
/// assert_eq!(choice, Choice { team: 2, unit_rows: 128, workers: 66 });
/// ```
pub fn choose(rows: i64, target: Target) -> Choice {
    match target {
        Target::Cpu { threads } => Choice {
            team: 1,
            unit_rows: FM_TILE_ROWS,
            workers: threads.saturating_mul(SLOTS_PER_THREAD).max(1),
        },
        Target::Gpu { sm_count } => {
            let blocks = rows.max(1).div_euclid(FM_TILE_ROWS.into())
                + i64::from(rows.max(1) % i64::from(FM_TILE_ROWS) != 0);
            let team = if blocks <= MAX_TEAM.into() {
                blocks as i32
            } else {
                TEAM_OF_MANY_ROWS
            };
            Choice {
                team,
                unit_rows: FM_TILE_ROWS * team,
                workers: (sm_count / team).max(1),
            }
        }
    }
}

/// A batch to plan for, in the caller's terms. Everything but the lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Requests.
    pub batch: i32,
    /// Query tokens per request.
    pub q_len: i32,
    /// Query heads per KV head.
    pub group: i32,
    /// KV heads.
    pub kv_heads: i32,
    /// Query token `i` sees keys `0 ..= seq_len - q_len + i` only.
    pub causal: bool,
    /// Longer lengths are clamped to this.
    pub max_seq_len: i32,
    /// How units may be cut.
    pub split: Split,
    /// Where the plan will run.
    pub target: Target,
}

impl Problem {
    /// The shape to plan with: [`choose`]'s layout and the costs of this module.
    ///
    /// # Errors
    ///
    /// As [`layout`]: a field outside its range, or counts beyond 32 bits.
    pub fn shape(&self) -> Result<FmPlanShape, PlanError> {
        let choice = choose(i64::from(self.q_len) * i64::from(self.group), self.target);
        let (split_mode, num_splits) = match self.split {
            Split::Auto => (FM_SPLIT_AUTO, 0),
            Split::Fixed(parts) => (FM_SPLIT_FIXED, parts),
            Split::Invariant => (FM_SPLIT_INVARIANT, 0),
        };
        let shape = FmPlanShape {
            batch: self.batch,
            q_len: self.q_len,
            group: self.group,
            kv_heads: self.kv_heads,
            causal: self.causal.into(),
            unit_rows: choice.unit_rows,
            workers: choice.workers,
            split_mode,
            num_splits,
            max_seq_len: self.max_seq_len,
            fixed_cost: FIXED_COST,
            split_cost: SPLIT_COST,
            min_part: MIN_PART,
            reserved: [0; 3],
        };
        layout(&shape)?;
        Ok(shape)
    }
}
