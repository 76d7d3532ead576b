//! Units that have as many tiles each, shared out evenly: cut into equal parts, one to a worker, or, more than workers, as
//! many whole ones to each, in [`Turns`], or, of many rows, as many to each and equal parts of the others ([`Rest`]). Units without tiles
//! do not count. `kernels/plan/equal_parts.h` is the same for the device.
//!
//! Nothing here needs a running sum.

use crate::algorithm::{
    Line, MOST_ROUNDS, Parts, Tally, even_share, fair_beside_own_parts, fair_stretch,
    fair_uneven_stretch,
};
use crate::layout::DivCeil;
use crate::plan_layout::{FM_TILE_ROWS, FmPlanShape};
use crate::rest::Rest;
use crate::turns::Turns;

/// A number of parts that is no power of two costs as much to add up as so many more parts, ...
const COST_OF_UNEVEN: i64 = 16;
/// ... up to as many as this. Of more each CTA adds up so little that its warps go through it once.
const MOST_UNEVEN: i32 = 64;
/// Numbers of parts that are looked at: powers of two from the largest down, besides as many as there are workers for.
const POWERS: i32 = 4;
/// Costs above it count as this much: so no product passes 63 bits.
const MOST_COST: i32 = 1 << 15;

/// How units that have tiles are shared out.
#[derive(Clone, Copy)]
pub(crate) enum Equal {
    /// All into as many parts, or none.
    Parts(EqualParts),
    /// As many whole ones to each worker, and parts of the others.
    BesideWhole(Rest),
}

impl Equal {
    /// Of each unit that has any.
    pub(crate) fn tiles(&self) -> i32 {
        match self {
            Self::Parts(parts) => parts.tiles,
            Self::BesideWhole(rest) => rest.tiles,
        }
    }

    /// Tiles of a part, but for the last of a unit.
    pub(crate) fn step(&self) -> i32 {
        match self {
            Self::Parts(parts) => parts.step,
            Self::BesideWhole(rest) => rest.step,
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct EqualParts {
    /// Tiles of a part, but for the last of a unit.
    pub(crate) step: i32,
    /// Of each unit that has any.
    pub(crate) tiles: i32,
    /// Parts of such a unit.
    count: i32,
    /// Units that have tiles.
    filled: i32,
    /// Who has which part.
    pub(crate) turns: Turns,
}

/// The parts of units of which `filled` have tiles, all as many, where the longest is about as good for a worker as an even share
/// and what cutting at even shares costs: those that the units would have without the empty ones. `line.whole` says whether with
/// these whole units share out evenly; then there is nothing to do for units that would be whole without them, too, and
/// no more than workers.
pub(crate) fn equal_parts(shape: &FmPlanShape, line: &Line, filled: i32) -> Option<Equal> {
    let empty = line.units - filled;
    if filled == 0 || i64::from(filled) > i64::from(shape.workers) * i64::from(MOST_ROUNDS) {
        return None;
    }
    let rounds = (filled - 1) / shape.workers + 1;
    let most_have_all = rounds == 1
        || i64::from(filled) * 8 > (i64::from(rounds) * 8 - 1) * i64::from(shape.workers);
    if line.whole && empty == 0 && most_have_all {
        return None; // as on the line
    }
    let all_tiles = line.total - i64::from(line.units) * i64::from(shape.fixed_cost);
    let tiles = all_tiles / i64::from(filled);
    if tiles * i64::from(filled) != all_tiles {
        return None;
    }
    let cut_into = |step: i64, count: i32, each: i32| {
        Equal::Parts(EqualParts {
            step: step as i32,
            tiles: tiles as i32,
            count,
            filled,
            turns: Turns {
                parts: filled * count,
                empty,
                each,
            },
        })
    };
    let division = division(shape, filled, tiles);
    let beside_whole = match division {
        Division::Whole { .. } => Rest::beside_whole(shape, filled, tiles as i32, empty, true),
        Division::Shares { .. } if !line.whole => {
            Rest::beside_whole(shape, filled, tiles as i32, empty, false)
        }
        _ => None,
    };
    match division {
        _ if beside_whole.is_some() => beside_whole.map(Equal::BesideWhole),
        Division::Whole { .. } if line.whole && rounds == 1 => None, // as on the line
        Division::Whole { .. } => Some(cut_into(tiles, 1, rounds)),
        Division::Parts { step, count } => Some(cut_into(step, count, 1)),
        Division::Shares { .. } => None,
    }
}

/// Tiles of a part and parts of a unit that take least time: the longer of what a part takes a worker and of what all units take
/// the machine, and adding up the parts, which takes longer the more they are, and where they are no power of two.
fn best_parts(shape: &FmPlanShape, tiles: i64, filled: i32) -> (i64, i32) {
    let low = i64::from(shape.min_part);
    let most = (tiles / low).clamp(1, i64::from(shape.workers / filled)) as i32;
    let cost = |of: i32| i64::from(of.min(MOST_COST));
    let even =
        tiles * i64::from(filled) * 16 / i64::from(shape.workers) * cost(shape.equal_speed) / 16;
    let of = |parts: i32| {
        let step = tiles.div_ceil_positive(parts).max(low);
        let count = ((tiles - low) / step) as i32 + 1; // the last part is no shorter than min_part
        let uneven = match count.count_ones() {
            2.. if count <= MOST_UNEVEN => COST_OF_UNEVEN,
            _ => 0,
        };
        let adding = (i64::from(count) + uneven) * cost(shape.part_cost);
        ((step * 256).max(even) + adding, step, count)
    };
    let power = 1 << (31 - most.leading_zeros());
    let mut best = of(most);
    for k in 0..POWERS {
        if power >> k < 2 {
            break;
        }
        let other = of(power >> k);
        if other.0 < best.0 {
            best = other;
        }
    }
    (best.1, best.2)
}

/// How units that have as many tiles each are shared out.
#[derive(Clone, Copy)]
pub(crate) enum Division {
    /// Whole. The most tiles of a worker, what further units cost it included.
    Whole { longest: i64 },
    /// Cut into so many equal parts, of so many tiles.
    Parts { step: i64, count: i32 },
    /// Cut where the even shares fall, unless they stay whole on the line all the same.
    Shares { share: i64 },
}

/// How a plan would share out so many units of so many tiles, as [`equal_parts`] and the line do.
pub(crate) fn division(shape: &FmPlanShape, units: i32, tiles: i64) -> Division {
    let fixed = i64::from(shape.fixed_cost);
    let share = even_share(i64::from(units) * (tiles + fixed), shape.workers);
    let rounds = (units - 1) / shape.workers + 1;
    let longest = i64::from(rounds) * (tiles + fixed);
    // All could be cut in two, with a worker for each part.
    let halves = units <= shape.workers / 2;
    let split = if halves {
        shape.split_cost
    } else {
        shape.equal_split_cost
    };
    let most = fair_stretch(share, shape.equal_speed.into(), split);
    let most_uneven = fair_uneven_stretch(shape, share);
    let most_whole = match rounds {
        1 if halves => fair_beside_own_parts(shape, most),
        1 => most,
        2..=MOST_ROUNDS => most.max(most_uneven),
        _ => most_uneven,
    };
    if longest <= most_whole {
        return Division::Whole {
            longest: longest - fixed,
        };
    }
    if halves {
        let (step, count) = best_parts(shape, tiles, units);
        let most_of_part = match shape.unit_rows {
            FM_TILE_ROWS.. => most - i64::from(shape.split_cost / 4),
            _ => most.max(most_uneven),
        };
        if step < tiles && step + fixed <= most_of_part {
            return Division::Parts { step, count };
        }
    }
    Division::Shares { share }
}

/// Parts of so many units of so many tiles, if each can have more than one.
pub(crate) fn equal_parts_of(shape: &FmPlanShape, units: i128, tiles: i64) -> Option<i128> {
    if units == 0 || units > i128::from(shape.workers / 2) || tiles == 0 {
        return None;
    }
    let (_, count) = best_parts(shape, tiles, units as i32);
    Some(units * i128::from(count))
}

impl EqualParts {
    /// How a unit that has tiles is cut.
    pub(crate) fn parts_of_filled(&self) -> Parts {
        Parts::new(self.step.into(), self.count, self.tiles)
    }

    /// What comes before the unit that has `rank` others with tiles before it. Items are not counted.
    pub(crate) fn before_filled(&self, rank: i32) -> Tally {
        Tally {
            items: 0,
            merges: rank,
            slots: rank * self.count,
        }
    }

    pub(crate) fn tally(&self) -> Tally {
        let cut = i32::from(self.count > 1);
        Tally {
            items: self.turns.items(),
            merges: cut * self.filled,
            slots: cut * self.turns.parts,
        }
    }
}
