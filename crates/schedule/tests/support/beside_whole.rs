//! Equal units of many rows, more than workers: some of which as many stay whole for each worker and the others are cut.

use proptest::prelude::*;

use ferromla_schedule::PlanShape;

use super::Case;
use super::few_units::of_tiles;

/// Twelve of 40 tiles for ten workers, with a fixed cost of 3: 43 and a part of 8 make 54 of a share of 52. That may be if a split costs
/// 6, 4 of which parts of one's own gain, not if it costs 5, and not for 32 rows.
pub fn named_cases() -> [Case; 3] {
    [(5, 64), (6, 64), (6, 32)].map(|(split_cost, rows)| {
        let mut case = of_tiles(&[40; 12], 10);
        (case.shape.fixed_cost, case.shape.own_parts_gain) = (3, 4);
        case.shape.split_cost = split_cost;
        (case.shape.unit_rows, case.shape.group) = (rows, rows);
        case
    })
}

/// The same twelve, which may be whole, two to some of the workers: with a part of eleven tiles the last one and half of what cutting at shares
/// costs are to be less than 43, or less than that by how much faster they would go alone.
pub fn named_cases_instead_of_whole() -> [Case; 4] {
    [(62, 256), (64, 256), (40, 305), (40, 306)].map(|(equal_split_cost, whole_speed)| {
        let [case, ..] = named_cases();
        Case {
            shape: PlanShape {
                equal_split_cost,
                whole_speed,
                ..case.shape
            },
            ..case
        }
    })
}

/// Equal requests and empty ones.
pub fn random_cases() -> impl Strategy<Value = Case> {
    let shape = (
        2..60i32,
        0..9i32,
        0..60i32,
        1..5i32,
        prop::sample::select(vec![64, 128]),
    );
    let equal = (256..400i32, 256..400i32, 0..60i32);
    let shape = (shape, equal);
    (shape, 1..150i32, 1..4usize, 1..59usize, 0..90usize)
        .prop_flat_map(|(shape, tiles, each, left, empty)| {
            let workers = shape.0.0 as usize;
            let filled = each * workers + left.min(workers - 1);
            let lens = [vec![tiles; filled], vec![0; empty]].concat();
            (Just(shape), Just(lens).prop_shuffle())
        })
        .prop_map(
            |(((workers, fixed_cost, split_cost, min_part, unit_rows), equal), lens)| {
                let mut case = of_tiles(&lens, workers);
                (case.shape.fixed_cost, case.shape.split_cost) = (fixed_cost, split_cost);
                (case.shape.min_part, case.shape.unit_rows) = (min_part, unit_rows);
                (
                    case.shape.whole_speed,
                    case.shape.equal_speed,
                    case.shape.equal_split_cost,
                ) = equal;
                case
            },
        )
}
