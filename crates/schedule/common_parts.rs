//! Few units of different lengths, up to seven to eight workers, cut into parts of which each has a worker of its own: no part is
//! longer than one common length, the least with which there are no more parts than workers. So nobody has the end of one unit
//! and the beginning of the next, as with cuts where the even shares end. `kernels/plan/common_parts.h` is the same for the
//! device, and `common_parts.cuh` finds the length.

use crate::algorithm::{Line, Parts, Tally, are_few, fair_uneven_stretch, share_of_filled};
use crate::layout::DivCeil;
use crate::plan_layout::FmPlanShape;
use crate::turns::Turns;

/// Parts of a unit above which each costs more than it saves, unless it is long.
const MOST_SHORT_PARTS: i32 = 32;
/// More than any GPU has. The device counts so many parts in a few bits.
const MOST_WORKERS: i32 = 1024;

/// What is known before the length is.
struct Search {
    /// The least length that can do.
    least: i64,
    /// The greatest that is about as good for a worker as an even share and what cutting at even shares costs.
    most: i64,
}

impl Search {
    /// None where units of which `filled` have tiles are not cut this way: most of them have to be able to have more than a part.
    fn new(shape: &FmPlanShape, line: &Line, filled: i32) -> Option<Self> {
        let few = are_few(shape, line.units) && shape.workers <= MOST_WORKERS;
        if line.whole || !few || filled == 0 || 8 * filled > 7 * shape.workers {
            return None;
        }
        let fixed = i64::from(shape.fixed_cost);
        let tiles = line.total - i64::from(line.units) * fixed;
        Some(Self {
            least: tiles
                .div_ceil_positive(shape.workers)
                .max(shape.min_part.into()),
            most: fair_uneven_stretch(shape, share_of_filled(shape, line, filled)) - fixed,
        })
    }
}

/// The parts of a unit none of which is longer than `longest`, but for the last one, which takes what would be shorter than
/// `min_part`.
pub(crate) fn parts_up_to(shape: &FmPlanShape, longest: i64, tiles: i32) -> Parts {
    let (all, low) = (i64::from(tiles), i64::from(shape.min_part));
    if all <= longest {
        return Parts::whole(tiles);
    }
    let count = (all - 1) / longest + 1;
    let step = ((all - 1) / count + 1).max(low);
    Parts::new(step, ((all - low) / step) as i32 + 1, tiles)
}

/// The shortest of a unit's parts of a common length, in tiles, however many workers there are.
pub(crate) fn shortest_part(tiles: i64, min_part: i32) -> i64 {
    let low = i64::from(min_part);
    let few = tiles.div_ceil_positive(MOST_SHORT_PARTS).min(2 * low);
    few.max(low)
}

/// Parts of a unit none of which is longer than `longest`; more than any workers where it has so many parts that each costs more
/// than it saves.
fn parts_counted(shape: &FmPlanShape, longest: i64, tiles: i64) -> i64 {
    let parts = tiles.div_ceil_positive(longest);
    let short = longest < shortest_part(tiles, shape.min_part);
    parts + i64::from(short) * i64::from(MOST_WORKERS)
}

/// The common length of the parts of units of which `filled` have tiles; `None` where they are equal, so that it might be that of
/// whole ones, or cut otherwise, or not at all.
pub(crate) fn common_length(shape: &FmPlanShape, line: &Line, filled: i32) -> Option<i64> {
    let search = Search::new(shape, line, filled)?;
    let tiles = || (0..line.units).map(|unit| i64::from(line.tiles(shape, unit)));
    let most = tiles().max();
    if tiles().all(|tiles| tiles == 0 || Some(tiles) == most) {
        return None;
    }
    let few_enough = |longest: i64| {
        let parts = |tiles| parts_counted(shape, longest, tiles);
        tiles().map(parts).sum::<i64>() <= shape.workers.into()
    };
    let (mut low, mut high) = (search.least, search.most + 1);
    while low < high {
        let middle = low + (high - low) / 2;
        if few_enough(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    (low <= search.most).then_some(low)
}

/// The turns of so many parts, of units of which `filled` have tiles.
pub(crate) fn turns_of(line: &Line, filled: i32, all: &Tally) -> Turns {
    let empty = line.units - filled;
    Turns {
        parts: all.items - empty,
        empty,
        each: 1,
    }
}
