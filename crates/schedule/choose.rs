//! How a problem is laid out on a machine: rows per unit, workers, and the costs the planner weighs.

use crate::algorithm::end_of_keys;
use crate::common_parts::shortest_part;
use crate::equal_parts::equal_parts_of;
use crate::layout::{DivCeil, most_units};
use crate::plan_layout::{
    FM_MAX_PARTS, FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT, FM_SPLIT_REST, FM_TILE_ROWS,
    FM_TILE_TOKENS, FmPlanShape,
};
use crate::problem::{Keys, Problem, Queries, Split, Target};
use crate::{PlanError, layout};

mod clusters;
mod invariant;
mod loose;
mod rows;
mod stages;
mod teams;
#[cfg(test)]
mod tests;
mod times;
mod units;
use clusters::FEW_UNITS;
use times::MOST_TOKENS;

/// What a worker's time goes into, in tiles. Of one CTA: a cluster that shares the tiles of an item goes
/// through as many at once, so that to it everything else costs that many times more tiles.
#[derive(Clone, Copy)]
struct Costs {
    /// What a unit costs before its first tile: loading Q, filling the pipeline, writing out.
    fixed: i32,
    /// What splitting a unit costs: partial results out and in again, ...
    split: i32,
    /// ... and how much less where each part has a CTA, or a team, of its own, with nothing else to do.
    own_parts_gain: i32,
    /// The shortest part of a split unit.
    min_part: i32,
    /// What adding up each of its equal parts costs, in 256ths of a tile. Of one CTA: a team has as many times more to add up.
    part: i32,
    /// How much faster than its share of the GPU a worker can go, in 256ths, with [`SMS_OF_SPEEDS`].
    whole_speed: i32,
    /// The same of units that have as many tiles each, with the memory of the GPU.
    equal_speed: i32,
    /// What cutting these at even shares costs.
    equal_split: i32,
}

/// Of the GPU that speeds were measured on. Of fewer each has a larger share of the memory, and cannot go faster than that by as much.
const SMS_OF_SPEEDS: i32 = 132;
/// What the clock and the width of its memory, an H200's, give, GB/s. Of a slower one a share is less, and a worker can go faster than that by
/// more, ...
const MEMORY_OF_SPEEDS: i32 = 4814;
/// ... but to no more than this, in 256ths: as many fewer workers leave memory idle.
const MOST_EQUAL_SPEED: i64 = 460;
/// The least that memory is taken to give a multiprocessor is a quarter of that.
const MOST_SHARE_OF_MEMORY: i64 = 4 * 256;

/// With 64 rows per CTA the tensor cores are the limit, and every SM has its own.
const COSTS: Costs = Costs {
    fixed: 3,
    split: 10,
    own_parts_gain: 4,
    min_part: 2,
    part: 11,
    whole_speed: 256,
    equal_speed: 256,
    equal_split: 10,
};
/// The same where CTAs share no tile and load [`Keys::Pages`]: memory gives 92 of 132 as much as they can take.
const SPEED_OF_SINGLE_CTAS: i32 = 368;
/// The same of [`Keys::Rows`], where units are equal.
const SPEED_OF_SINGLE_CTAS_OF_ROWS: i32 = 352;
/// The same, where units are equal, of two that share the tiles of 16-bit numbers, and of more or over codes: what they do with a tile takes
/// longer than to read it, unless memory is slower than [`MEMORY_OF_SPEEDS`].
const SPEED_OF_PAIRED_CTAS: i32 = 218;
const SPEED_OF_BUSY_CTAS: i32 = 160;
/// Over pages of codes.
const FIXED_COST_OF_SINGLE_CTAS_OF_CODES: i32 = 4;
/// With fewer rows memory is the limit: an SM whose neighbours are done can load faster than its share.
const COSTS_OF_FEW_ROWS: Costs = Costs {
    fixed: 3,
    split: 8,
    own_parts_gain: 5,
    min_part: 1,
    part: 5,
    whole_speed: 384,
    equal_speed: 384,
    equal_split: 8,
};

/// Most CTAs that share one unit or one item: the portable cluster size.
pub const MAX_CLUSTER: i32 = 8;
/// How much faster than its share of the GPU a CTA can go over [`Keys::Pages`] where most requests may have one token, ...
const SPEED_OF_MIXED_CTAS: i32 = 288;
/// ... and a team of chunks over many 16-bit numbers: those of a request that have whole units are at the same tiles, and cut ones are not.
const SPEED_OF_TEAMS_OF_CHUNKS: i32 = 280;
/// Worker slots per CPU thread: threads take the next slot when done, which evens out their speeds.
const SLOTS_PER_THREAD: i32 = 4;

/// How a problem is laid out on its target, as [`choose`] picks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Query rows of one CTA: 16, 32 or 64.
    pub rows: i32,
    /// Row blocks of a unit: CTAs that read the same tiles for different rows.
    pub team: i32,
    /// CTAs of a cluster that share an item's tiles for the same rows: 1, 2, 4, 8 or, of few units that are not long, 16.
    pub splits: i32,
    /// Query rows of one unit, `rows * team`.
    pub unit_rows: i32,
    /// Workers on the work line, of `team * splits` CTAs each.
    pub workers: i32,
    /// What a unit costs before its first tile, in tiles.
    pub fixed_cost: i32,
    /// What being split costs, in tiles, ...
    pub split_cost: i32,
    /// ... and how much less where each part has a worker of its own. Clusters that share an item's tiles add up parts as they do whole
    /// units: nothing.
    pub own_parts_gain: i32,
    /// The shortest part of a split unit, in tiles.
    pub min_part: i32,
    /// What adding up each of a unit's equal parts costs, in 256ths of a tile.
    pub part_cost: i32,
    /// How much faster than its share of the machine a worker can go, in 256ths, at least 256.
    pub whole_speed: i32,
    /// The same where units have as many tiles each, ...
    pub equal_speed: i32,
    /// ... and what being cut at even shares costs these, in tiles.
    pub equal_split_cost: i32,
}

/// How much faster than its share of the memory a worker can go where `busy` of them have work, if it is `speed` where `all` have.
fn speed_of(speed: i32, busy: i32, all: i32) -> i32 {
    let speed = i64::from(speed) * i64::from(busy) / i64::from(all);
    (speed as i32).max(COSTS.whole_speed)
}

impl Choice {
    fn new(
        (rows, team, splits): (i32, i32, i32),
        workers: i32,
        Costs {
            fixed,
            split,
            own_parts_gain,
            min_part,
            part,
            whole_speed,
            equal_speed,
            equal_split,
        }: Costs,
    ) -> Self {
        Self {
            rows,
            team,
            splits,
            unit_rows: rows * team,
            workers: workers.max(1),
            fixed_cost: fixed * splits,
            split_cost: split * splits,
            own_parts_gain: if splits == 1 { own_parts_gain } else { 0 },
            min_part: min_part * splits,
            part_cost: part * team * splits,
            whole_speed,
            equal_speed,
            equal_split_cost: equal_split * splits,
        }
    }
}

/// Picks rows per CTA, CTAs per unit, workers and costs for a problem: a pure function of what is known
/// before the lengths are.
///
/// Of lists, and of sequences whose bound says something about their lengths, the layout is taken that would take least time, from a
/// model that was fitted to measurements; where the bound is loose, of ragged requests and of few others, the rows of a CTA are that take least, by the same
/// times of short and of long sequences. Of caches of two kinds no times are known. For these, where parts are fixed, and for many requests with a
/// loose bound:
///
/// The rows of a request, or of ragged requests on average, decide what a CTA takes: 16, 32 or 64. With caches of
/// two kinds more than 16 rows take 64: there is no kernel of 32. Where no sequence is long and there are few of them, blocks of 16 rows
/// share out the little there is to do.
///
/// All CTAs of a team read the same KV tiles at the same time, so a unit of 64-row CTAs takes all rows where
/// they fit one team of at most 8: each tile then leaves memory once; of more the team of 3 to 6 is taken that leaves fewest CTAs without rows.
/// Where requests have few blocks teams are smaller if that takes less by those times: more parts may find place.
/// Ragged requests, with more blocks than multiprocessors, of which none has more tokens than all have on average are laid out as those with as
/// many each. Others get teams of 2, or of 1 where most may have one token, of up to 64 rows, or few have an odd number of blocks; of 4 where
/// they have many, over 16-bit numbers.
///
/// With 16 rows, or 32 over other keys than pages, a cluster of 8, 4 or 2 CTAs, of few units that are not long 16, shares the tiles of an item: the most
/// with which every unit has a cluster of its own and half of its CTAs a tile, if that keeps enough CTAs busy or there is little to do. Where
/// the bound on lengths is so loose that they are taken to differ no more than two do, over pages, whatever is known. Otherwise units are cut
/// into parts for single CTAs.
///
/// With [`Split::Invariant`] nothing that results depend on depends on the batch: CTAs that are no team go through parts of 16-bit numbers in
/// steps, and few rows of codes and of caches of two kinds have pairs that share the tiles of a part. Where the number of parts is given single
/// CTAs, or teams, have them, without steps.
///
/// ```
/// use ferromla_schedule::{Keys, Problem, Queries, Split, Target, choose};
/// let choice = choose(&Problem {
///     batch: 128,
///     queries: Queries::Uniform { q_len: 1 },
///     group: 128,
///     kv_heads: 1,
///     keys: Keys::Pages,
///     causal: true,
///     max_seq_len: 1 << 20,
///     split: Split::Auto,
///     target: Target::Gpu { sm_count: 132, clusters: [66, 30, 15, 7], memory: 4814 },
/// });
/// assert_eq!((choice.rows, choice.team, choice.unit_rows, choice.workers), (64, 2, 128, 66));
/// ```
pub fn choose(problem: &Problem) -> Choice {
    let (sm_count, clusters) = match problem.target {
        Target::Gpu {
            sm_count, clusters, ..
        } => (sm_count, clusters),
        Target::Cpu { threads } => {
            let slots = threads.saturating_mul(SLOTS_PER_THREAD);
            return Choice::new((FM_TILE_ROWS, 1, 1), slots, COSTS);
        }
    };
    if let Some(alike) = problem.of_as_many_tokens(sm_count) {
        return choose(&alike);
    }
    if let Some(fastest) = problem.fastest(sm_count, clusters) {
        return fastest;
    }
    let rows = problem.rows(sm_count);
    problem
        .shared(rows, sm_count, clusters)
        .or_else(|| problem.in_team_of_loose_bound(rows, sm_count))
        .unwrap_or_else(|| problem.alone(rows, sm_count))
}

/// What there is to do, at most.
#[derive(Clone, Copy)]
struct Work {
    units: i128,
    /// Of a unit.
    tiles: i64,
}

impl Problem {
    /// The shape to plan with: [`choose`]'s layout and costs.
    ///
    /// # Errors
    ///
    /// As [`layout`]: a field outside its range, or counts beyond 32 bits.
    pub fn shape(&self) -> Result<FmPlanShape, PlanError> {
        let shape = self.shape_of(&choose(self));
        layout(&shape)?;
        Ok(shape)
    }

    /// The shape to plan with for a choice that has been made; [`layout`] says whether it is within limits.
    pub fn shape_of(&self, choice: &Choice) -> FmPlanShape {
        let (split_mode, num_splits) = match self.split {
            Split::Auto => (FM_SPLIT_AUTO, 0),
            Split::Fixed(parts) | Split::Invariant { parts: Some(parts) } => {
                (FM_SPLIT_FIXED, parts.min(FM_MAX_PARTS))
            }
            Split::Invariant { parts: None } => (FM_SPLIT_INVARIANT, 0),
            Split::Never => (FM_SPLIT_FIXED, 1),
            Split::Rest => (FM_SPLIT_REST, 0),
        };
        let any = FmPlanShape {
            batch: self.batch,
            group: self.group,
            kv_heads: self.kv_heads,
            causal: self.causal.into(),
            unit_rows: choice.unit_rows,
            workers: choice.workers,
            split_mode,
            num_splits,
            max_seq_len: self.max_seq_len,
            fixed_cost: choice.fixed_cost,
            split_cost: choice.split_cost,
            own_parts_gain: choice.own_parts_gain,
            min_part: choice.min_part,
            part_cost: choice.part_cost,
            whole_speed: choice.whole_speed,
            equal_speed: choice.equal_speed,
            equal_split_cost: choice.equal_split_cost,
            ..FmPlanShape::default()
        };
        let shape = match self.queries {
            Queries::Uniform { q_len } => FmPlanShape { q_len, ..any },
            Queries::Ragged { tokens, .. } => FmPlanShape {
                ragged: 1,
                q_tokens: tokens,
                ..any
            },
            // Without a token there is no list, and nothing to plan.
            Queries::Sparse { q_len: 0, .. } => any,
            Queries::Sparse {
                q_len,
                topk,
                extra_topk,
            } => FmPlanShape {
                q_len: 1,
                sparse_q_len: q_len,
                topk,
                extra_topk,
                causal: 0,
                max_seq_len: end_of_keys(topk, extra_topk).try_into().unwrap_or(i32::MAX),
                ..any
            },
        };
        match self.split {
            Split::INVARIANT => self.cut_invariantly(choice, shape),
            _ => shape,
        }
    }

    /// How much longer than with [`SMS_OF_SPEEDS`] and [`MEMORY_OF_SPEEDS`] reading takes where all multiprocessors are at work, in 256ths.
    fn share_of_memory(&self, sm_count: i32) -> i64 {
        let memory = match self.target {
            Target::Gpu { memory, .. } if memory > 0 => memory,
            _ => MEMORY_OF_SPEEDS,
        };
        let longer = 256 * i64::from(sm_count) * i64::from(MEMORY_OF_SPEEDS)
            / (i64::from(SMS_OF_SPEEDS) * i64::from(memory));
        longer.min(MOST_SHARE_OF_MEMORY)
    }

    /// How much faster than its share of the memory a worker goes here, if it is `speed` where speeds were measured.
    fn equal_speed(&self, speed: i32, sm_count: i32) -> i32 {
        let speed = i64::from(speed) * self.share_of_memory(sm_count) / 256;
        speed.clamp(COSTS.whole_speed.into(), MOST_EQUAL_SPEED) as i32
    }

    /// Query rows of a request and KV head: of each, or on average, rounded up.
    fn mean_rows(&self) -> i64 {
        match self.queries {
            Queries::Uniform { q_len } => i64::from(q_len) * i64::from(self.group),
            Queries::Sparse { q_len, .. } => i64::from(q_len.min(1)) * i64::from(self.group),
            Queries::Ragged { tokens, .. } => {
                (i64::from(tokens) * i64::from(self.group)).div_ceil_positive(self.batch.max(1))
            }
        }
    }

    /// The same of requests with as many query tokens each, if none of the ragged ones has more than they have on average, and not all of
    /// their blocks have a multiprocessor.
    fn of_as_many_tokens(&self, sm_count: i32) -> Option<Self> {
        match self.queries {
            Queries::Ragged {
                tokens,
                most: Some(q_len),
            } if !self.split.is_invariant()
                && q_len > 0
                && i64::from(q_len) * i64::from(self.batch) == i64::from(tokens)
                && self.blocks() > sm_count.into() =>
            {
                Some(Self {
                    queries: Queries::Uniform { q_len },
                    ..*self
                })
            }
            _ => None,
        }
    }

    /// Blocks of 64 rows of all requests, if ragged ones have as many rows each.
    fn blocks(&self) -> i64 {
        self.mean_rows().div_ceil_positive(FM_TILE_ROWS) * i64::from(self.batch)
    }

    fn is_ragged(&self) -> bool {
        matches!(self.queries, Queries::Ragged { .. })
    }

    /// Whether each query token has a list of its own.
    fn has_lists(&self) -> bool {
        matches!(self.queries, Queries::Sparse { .. })
    }

    fn has_codes(&self) -> bool {
        matches!(self.keys, Keys::Codes | Keys::ScaledCodes)
    }

    fn is_ragged_invariant(&self) -> bool {
        self.is_ragged() && self.split.is_invariant()
    }

    /// What there is to do for CTAs of so many rows, or teams of them.
    fn work(&self, rows: i32) -> Work {
        let team = if rows == FM_TILE_ROWS { self.team() } else { 1 };
        let shape = self.shape_of(&Choice::new((rows, team, 1), 1, COSTS));
        Work {
            units: most_units(&shape),
            tiles: i64::from(shape.max_seq_len).div_ceil_positive(FM_TILE_TOKENS),
        }
    }

    /// Units for CTAs, or teams of CTAs of 64 rows, that share no item.
    fn alone(&self, rows: i32, sm_count: i32) -> Choice {
        if rows == FM_TILE_ROWS {
            return self.in_teams(self.team(), sm_count);
        }
        let work = self.work(rows);
        let costs = self.costs_of_few_rows(rows, work, sm_count);
        self.with_work(Choice::new((rows, 1, 1), sm_count, costs), work, sm_count)
    }

    /// The same for teams of so many CTAs of 64 rows.
    fn in_teams(&self, team: i32, sm_count: i32) -> Choice {
        let whole_speed = match (team, self.keys) {
            (1, Keys::Pages) if self.may_mix_decodes() => SPEED_OF_MIXED_CTAS,
            (1, Keys::Pages) => SPEED_OF_SINGLE_CTAS,
            (2.., Keys::Pages | Keys::Rows)
                if self.has_chunks() && self.max_seq_len > MOST_TOKENS =>
            {
                SPEED_OF_TEAMS_OF_CHUNKS
            }
            _ => COSTS.whole_speed,
        };
        let fixed = match team {
            1 => self.fixed_cost(FIXED_COST_OF_SINGLE_CTAS_OF_CODES, COSTS.fixed),
            _ => COSTS.fixed,
        };
        let equal_speed = match (team, self.keys) {
            (1, Keys::Pages) => whole_speed,
            (1, Keys::Rows) => SPEED_OF_SINGLE_CTAS_OF_ROWS,
            (2, Keys::Pages | Keys::Rows) => SPEED_OF_PAIRED_CTAS,
            _ => SPEED_OF_BUSY_CTAS,
        };
        let costs = Costs {
            fixed,
            whole_speed: speed_of(whole_speed, sm_count, SMS_OF_SPEEDS),
            equal_speed: self.equal_speed(equal_speed, sm_count),
            ..COSTS
        };
        Choice::new((FM_TILE_ROWS, team, 1), sm_count / team, costs)
    }

    /// The choice, of few rows, without workers for whom there can be no part: a launch of fewer CTAs is done sooner. With 64
    /// rows it is not. Fewer of them cannot go faster than their share by as much.
    fn with_work(&self, choice: Choice, work: Work, sm_count: i32) -> Choice {
        let Work { units, tiles } = work;
        if self.split != Split::Auto || units == 0 {
            return choice;
        }
        let unit_cost = tiles + i64::from(choice.fixed_cost);
        let all = i128::from(choice.workers);
        // If units differ, of parts of a common length, which may be no shorter than this.
        let shortest = i128::from(shortest_part(tiles, choice.min_part));
        let useful = (units * i128::from(unit_cost) + shortest - 1) / shortest;
        // As many as there are equal parts of the longest units, if that is hardly fewer than all, or there is one unit.
        let alike = units <= FEW_UNITS.into() || !self.lengths_may_differ();
        let workers = match equal_parts_of(&self.shape_of(&choice), units, tiles) {
            Some(parts) if units == 1 || (alike && 8 * parts >= 7 * all) => parts,
            parts => useful.max(parts.unwrap_or(0)),
        };
        let workers = workers.clamp(1, all) as i32;
        Choice {
            workers,
            whole_speed: speed_of(choice.whole_speed, workers, sm_count),
            equal_speed: speed_of(choice.equal_speed, workers, sm_count),
            ..choice
        }
    }

    /// Whether sequences are taken to be of different lengths: their bound is a loose one. Single CTAs get parts of a common length
    /// then, which takes less time than to give each sequence a cluster, but for pairs of CTAs over pages.
    fn lengths_may_differ(&self) -> bool {
        !self.has_lists() && !self.has_chunks() && self.max_seq_len > MOST_TOKENS
    }
}
