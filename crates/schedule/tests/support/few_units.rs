//! Batches of few units: some for each of the limits between the ways of `FM_SPLIT_AUTO`, and any.

use std::ops::RangeInclusive;

use ferromla_schedule::PlanShape;
use proptest::prelude::*;

use super::shapes::SHAPE;
use super::{Case, on_h200};

const TILE: i32 = 64;

/// All of these batches.
pub fn named_cases() -> Vec<Case> {
    let mut cases = [16, 64, 128].map(long_among_short).to_vec();
    for requests in [128, 80, 64] {
        cases.extend([16, 64, 128].map(|heads| normally_distributed(heads, requests)));
    }
    cases.extend([2, 3].map(with_last_part_of));
    cases.extend([17, 18].map(with_split_cost));
    cases.extend([410, 411].map(beside_parts_of_a_common_length));
    cases.extend(ones_that_share_out_whole());
    cases.extend([as_much_as_the_first_will_have(), empty_ones_cost_nothing()]);
    cases.extend(
        [(16, 450), (64, 396), (64, 450), (64, 641), (128, 400)]
            .map(|(h, n)| evenly_distributed(h, n)),
    );
    cases
}

/// A long request among 63 short ones.
pub fn long_among_short(heads: i32) -> Case {
    let mut seq_lens = vec![1024; 64];
    seq_lens[20] = 131_072;
    on_h200(heads, seq_lens)
}

/// N(4096, 2048), each length the sum of twelve evenly distributed numbers, but no less than 1.
pub fn normally_distributed(heads: i32, requests: usize) -> Case {
    let mut state = 1u32;
    let mut evenly = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state) / f64::from(u32::MAX)
    };
    let mut deviation = || (0..12).map(|_| evenly()).sum::<f64>() - 6.;
    let mut length = || (4096. + 2048. * deviation()).max(1.) as i32;
    on_h200(heads, (0..requests).map(|_| length()).collect())
}

/// Requests of 1 to 32 tiles, each number of them about as often.
pub fn evenly_distributed(heads: i32, requests: usize) -> Case {
    let mut state = 1u32;
    let mut tiles = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 27) as i32 + 1
    };
    on_h200(heads, (0..requests).map(|_| tiles() * TILE).collect())
}

/// Requests of so many tiles for so many workers.
pub fn of_tiles(tiles: &[i32], workers: i32) -> Case {
    Case {
        shape: PlanShape {
            batch: tiles.len() as i32,
            group: 64,
            workers,
            max_seq_len: 1 << 22,
            fixed_cost: 4,
            split_cost: 20,
            ..SHAPE
        },
        seq_lens: tiles.iter().map(|tiles| tiles * TILE).collect(),
        qo_indptr: Vec::new(),
    }
}

/// One request of so many tiles and others of as many each.
pub fn long_and_short(long: i32, short: i32, others: usize) -> Vec<i32> {
    [vec![long], vec![short; others]].concat()
}

/// Shares of 40 for 100 workers: 30 short requests, and a long one in a hundred parts of 38. A rest of 3 tiles is a part, too, and one
/// more than cuts at shares add.
pub fn with_last_part_of(tiles: i32) -> Case {
    let mut case = of_tiles(&long_and_short(100 * 38 + tiles, 1, 30), 100);
    case.shape.split_cost = 17;
    case
}

/// Shares of 29, of which a worker has at most 42 if the longest part comes first: a split has to cost 18, 7 of it gained by parts of
/// one's own, as half of the fixed cost is 2.
pub fn with_split_cost(split_cost: i32) -> Case {
    let mut case = of_tiles(&long_and_short(300, 16, 39), 40);
    (case.shape.fixed_cost, case.shape.own_parts_gain) = (5, 7);
    case.shape.split_cost = split_cost;
    case
}

/// A worker has at most 40 if the longest part comes first. Of 410 tiles parts of a common length have 41, of one more 42: with the fixed
/// cost of 4, seven eighths are 39 and 40.
pub fn beside_parts_of_a_common_length(long: i32) -> Case {
    of_tiles(&long_and_short(long, 16, 30), 40)
}

/// Dealt whole, all of these would share out, but parts of the first two can have a common length: the first batch gets such parts, in the
/// second one the longest part comes first. The third one has a request for each worker.
pub fn ones_that_share_out_whole() -> [Case; 3] {
    let batches: [&[i32]; 3] = [
        &[0, 44, 32, 31, 25, 0, 43, 29, 0, 0, 43],
        &[30, 23, 34, 14, 23, 30, 0, 0, 19, 0, 0, 0],
        &[0, 44, 32, 31, 25, 0, 43, 29, 0, 9, 43],
    ];
    batches.map(|tiles| {
        let mut case = of_tiles(tiles, 8);
        (case.shape.fixed_cost, case.shape.split_cost) = (2, 12);
        case
    })
}

/// Who has 19 of 32 tiles has no more than whoever has 10 will have with another 7, the fixed costs of 2 included.
pub fn as_much_as_the_first_will_have() -> Case {
    let mut case = of_tiles(&[32, 7, 2, 1, 10, 10, 1], 4);
    (case.shape.fixed_cost, case.shape.split_cost) = (2, 4);
    case
}

/// With no fixed cost, so that a worker with an empty request has no more than before.
pub fn empty_ones_cost_nothing() -> Case {
    let mut case = of_tiles(&[10, 4, 3, 3, 0, 0, 0, 0, 0], 4);
    (case.shape.fixed_cost, case.shape.split_cost) = (0, 2);
    case
}

/// Batches of more requests, up to five to a worker and more, of 16 rows or of more.
pub fn random_cases_of_more() -> impl Strategy<Value = Case> {
    let lengths = prop_oneof![
        Just([0, 0]),
        (20..100i32).prop_map(|most| [1, most]),
        (20..100i32).prop_map(|least| [least, 3 * least]),
    ];
    let shape = (
        110..160i32,
        prop::sample::select(vec![16, 32, 64, 64]),
        0..8i32,
        0..40i32,
        1..6i32,
    )
        .prop_map(
            |(workers, rows, fixed_cost, split_cost, min_part)| PlanShape {
                workers,
                fixed_cost,
                split_cost,
                min_part,
                group: rows,
                unit_rows: rows,
                max_seq_len: 1 << 20,
                ..SHAPE
            },
        );
    (shape, lengths, 385..680usize).prop_flat_map(|(shape, [least, most], requests)| {
        let one_in_20 = prop_oneof![19 => least..=most, 1 => 0..=20 * most];
        prop::collection::vec(one_in_20, requests).prop_map(move |tiles| Case {
            shape: PlanShape {
                batch: requests as i32,
                ..shape
            },
            seq_lens: tiles.iter().map(|tiles| tiles * TILE).collect(),
            qo_indptr: Vec::new(),
        })
    })
}

/// Batches of a long request or a few among short ones, or of any lengths, up to about three units to a worker.
pub fn random_cases() -> impl Strategy<Value = Case> {
    let lengths = prop_oneof![
        1 => Just([1, 1]),
        3 => (20..400i32).prop_map(|most| [1, most]),
        3 => (20..200i32).prop_map(|least| [least, 3 * least]),
    ];
    let long = prop_oneof![2 => Just(0), 3 => 1..4usize, 1 => 4..20usize];
    let empty = prop_oneof![2 => Just(0), 1 => 1..30usize];
    let units = prop::sample::select(vec![3, 12, 12]); // of four workers, at most
    let costs = (0..9i32, 0..80i32, 1..12i32, 0..40i32);
    let shape = (2..130i32, 1..4i32, costs, 256..400i32).prop_map(
        |(workers, kv_heads, (fixed_cost, split_cost, min_part, gain), whole_speed)| PlanShape {
            kv_heads,
            workers,
            fixed_cost,
            split_cost,
            min_part,
            whole_speed,
            own_parts_gain: gain.min(split_cost),
            group: 64,
            max_seq_len: 1 << 20,
            ..SHAPE
        },
    );
    (shape, lengths, long, empty, units).prop_flat_map(
        |(shape, [least, most], long, empty, units)| {
            let of = |tiles: RangeInclusive<i32>, count: RangeInclusive<usize>| {
                let len = (tiles, 0..TILE).prop_map(|(tiles, less)| tiles * TILE - less);
                prop::collection::vec(len, count)
            };
            let filled = (shape.workers / shape.kv_heads * units / 4).clamp(1, 120) as usize;
            let long = of(2 * most..=30 * most, long..=long);
            (of(least..=most, 1..=filled), long)
                .prop_map(move |(short, long)| [short, long, vec![0; empty]].concat())
                .prop_shuffle()
                .prop_map(move |seq_lens| Case {
                    shape: PlanShape {
                        batch: seq_lens.len() as i32,
                        ..shape
                    },
                    seq_lens,
                    qo_indptr: Vec::new(),
                })
        },
    )
}
