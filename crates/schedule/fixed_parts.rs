//! The parts of units where the mode fixes their number, and the steps that parts may have: what depends on a unit's own length alone, and
//! on the shape. `kernels/plan_algorithm.h` has the same, name by name.

use crate::algorithm::Parts;
use crate::layout::DivCeil;
use crate::plan_layout::{
    FM_FEW_PARTS, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT, FM_STEP_LOG2, FM_STEP_UNIT, FM_STEPS_STORED,
    FM_STORED_STEP_LOG2, FM_STORED_STEP_UNIT, FmPlanShape,
};

/// Tiles of a step of a unit of so many, as a power of two: with more tiles more, but not as many more. Where steps are stored they are
/// twice as long in long units, and longer yet only if there would be too many of them.
pub(crate) fn step_log2(shape: &FmPlanShape, tiles: i64) -> i32 {
    let (mut log2, mut most, longer) = if stores_steps(shape) {
        let log2 = FM_STORED_STEP_LOG2 + i32::from(tiles > FM_STORED_STEP_UNIT.into());
        (log2, i64::from(shape.num_splits) << log2, 2)
    } else {
        (FM_STEP_LOG2, i64::from(FM_STEP_UNIT), 8)
    };
    while tiles > most {
        (log2, most) = (log2 + 1, most * longer);
    }
    log2
}

pub(crate) fn steps_of(shape: &FmPlanShape, tiles: i64) -> i64 {
    tiles.div_ceil_positive(1 << step_log2(shape, tiles))
}

/// Whether each step has a slot.
pub(crate) fn stores_steps(shape: &FmPlanShape) -> bool {
    shape.steps == FM_STEPS_STORED
}

/// The most steps of a unit of up to so many tiles where each is stored: longer ones may have fewer than shorter ones.
pub(crate) fn most_stored_steps(tiles: i64, num_splits: i32) -> i64 {
    let log2 = FM_STORED_STEP_LOG2;
    let steps = tiles
        .min(FM_STORED_STEP_UNIT.into())
        .div_ceil_positive(1 << log2);
    let longer = tiles.div_ceil_positive(2 << log2);
    steps.max(longer).min(num_splits.into())
}

/// The parts that a unit of so many tiles is to have where the mode fixes their number; with more tiles it has no fewer.
fn wanted_parts(shape: &FmPlanShape, tiles: i64) -> i64 {
    match shape.split_mode {
        FM_SPLIT_FIXED => i64::from(shape.num_splits).min(tiles),
        FM_SPLIT_INVARIANT => tiles
            .div_ceil_positive(shape.part_tiles)
            .min(shape.num_splits.into()),
        _ => 1,
    }
    .max(1)
}

/// Tiles of one, but for the last.
pub(crate) fn tiles_of_part(shape: &FmPlanShape, tiles: i64) -> i64 {
    let few = i64::from(FM_FEW_PARTS);
    let wanted = match wanted_parts(shape, tiles) {
        more if shape.steps != 0
            && more > few
            && tiles <= 2 * few * i64::from(shape.part_tiles) =>
        {
            few
        }
        wanted => wanted,
    };
    let part = tiles.div_ceil_positive(wanted);
    let log2 = if shape.steps == 0 {
        0
    } else {
        step_log2(shape, tiles)
    };
    part.div_ceil_positive(1 << log2) << log2
}

/// Whether it is cut wherever steps end.
pub(crate) fn is_in_steps(shape: &FmPlanShape, tiles: i64) -> bool {
    shape.steps != 0 && steps_of(shape, tiles) <= shape.few_steps.into()
}

/// Into how many parts then.
fn parts_in_steps(shape: &FmPlanShape, tiles: i64) -> i64 {
    let few = i64::from(shape.few_parts);
    let wanted = if stores_steps(shape) {
        few.max(tiles.div_ceil_positive(shape.part_tiles))
    } else {
        few
    };
    let steps = steps_of(shape, tiles);
    match steps {
        3 if stores_steps(shape) && wanted == 2 => 3, // not one of two and one of one
        _ => wanted.min(steps),
    }
}

/// Even parts, as many as the mode asks for; rounding up their length may leave fewer.
pub(crate) fn parts_by_count(shape: &FmPlanShape, tiles: i32) -> Parts {
    if tiles == 0 {
        return Parts::whole(0);
    }
    let tiles64 = i64::from(tiles);
    let step = if is_in_steps(shape, tiles64) {
        let parts = parts_in_steps(shape, tiles64);
        ((steps_of(shape, tiles64) + parts - 1) / parts) << step_log2(shape, tiles64)
    } else {
        tiles_of_part(shape, tiles64)
    };
    Parts::new(step, tiles64.div_ceil_positive(step) as i32, tiles)
}

/// The most parts that a unit of up to so many tiles has.
pub(crate) fn most_parts(shape: &FmPlanShape, tiles: i64) -> i32 {
    let parts = wanted_parts(shape, tiles).max(shape.few_parts.into());
    let in_steps = match stores_steps(shape) {
        true => most_stored_steps(tiles, shape.num_splits).min(3), // parts_in_steps
        false => 0,
    };
    parts.max(in_steps) as i32 // <= FM_MAX_PARTS
}
