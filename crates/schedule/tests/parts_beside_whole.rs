//! Equal units of many rows that are more than workers and would be cut at even shares: as many whole ones to each worker, and those that
//! are left in equal parts, one to a worker.

mod support;

use proptest::prelude::*;
use support::beside_whole::{named_cases, named_cases_instead_of_whole, random_cases};
use support::ways::{Part, places};
use support::{Case, Planned, has_parts_beside_whole, on_h200, plan};

const TILE: i32 = 64;

/// Equal requests of so many tokens.
fn equal(heads: i32, requests: usize, tokens: i32) -> Case {
    on_h200(heads, vec![tokens; requests])
}

/// Tiles of a worker's items, in order.
fn tiles_of(planned: &Planned, worker: usize) -> Vec<i32> {
    let plan = planned.view();
    let items = plan.worker(worker).iter();
    items.map(|item| item.tile_end - item.tile_begin).collect()
}

#[test]
fn named_batches_have_a_part_to_a_worker_beside_whole_ones() {
    // Workers; whole requests of each; requests that are left, parts of each and tiles of these but the last, and of that.
    for (heads, requests, tokens, [workers, each, left, parts, step, last]) in [
        (64, 136, 4096, [132, 1, 4, 32, 2, 2]),
        (64, 144, 4096, [132, 1, 12, 11, 6, 4]),
        (64, 165, 4096, [132, 1, 33, 4, 16, 16]),
        (128, 72, 4096, [66, 1, 6, 11, 6, 4]),
        (128, 80, 2048, [66, 1, 14, 4, 8, 8]),
        (128, 99, 4096, [66, 1, 33, 2, 32, 32]),
        (128, 144, 4096, [66, 2, 12, 5, 13, 12]),
        // These could be whole.
        (64, 136, 1024, [132, 1, 4, 8, 2, 2]),
        (64, 160, 2048, [132, 1, 28, 4, 8, 8]),
        (128, 96, 1024, [66, 1, 30, 2, 8, 8]),
        (128, 160, 1024, [66, 2, 28, 2, 8, 8]),
    ] {
        let case = equal(heads, requests, tokens);
        let planned = plan(&case);
        let context = format!("{requests} requests of {tokens} tokens, {heads} heads");
        assert!(has_parts_beside_whole(&planned), "{context}");
        let header = planned.header;
        assert_eq!(header.whole, 0, "{context}");
        assert_eq!(
            [header.share, header.merges, header.slots],
            [step, left, left * parts],
            "{context}"
        );
        assert_eq!(header.items, workers * each + left * parts, "{context}");
        for worker in 0..workers {
            let mut expected = vec![tokens / TILE; each as usize];
            if worker < left * parts {
                expected.push(if worker % parts == parts - 1 {
                    last
                } else {
                    step
                });
            }
            assert_eq!(tiles_of(&planned, worker as usize), expected, "{context}");
        }
    }
}

#[test]
fn others_are_not() {
    for (heads, requests, tokens) in [
        (16, 144, 4096),
        (32, 144, 4096),
        (64, 132, 4096),  // nothing is left
        (64, 192, 4096),  // two to each take no longer, as memory gives them more
        (128, 100, 4096), // more than half of the workers' number is left
        (128, 80, 128),   // too short for parts
    ] {
        let planned = plan(&equal(heads, requests, tokens));
        let context = format!("{requests} requests of {tokens} tokens, {heads} heads");
        assert!(!has_parts_beside_whole(&planned), "{context}");
    }
    let mut one_differs = equal(64, 144, 4096);
    one_differs.seq_lens[77] += TILE;
    assert!(!has_parts_beside_whole(&plan(&one_differs)));
}

#[test]
fn no_worker_has_more_than_cuts_at_shares_cost_and_few_rows_have_none() {
    let taken = named_cases().map(|case| has_parts_beside_whole(&plan(&case)));
    assert_eq!(taken, [false, true, false]);
    let instead = named_cases_instead_of_whole().map(|case| has_parts_beside_whole(&plan(&case)));
    assert_eq!(instead, [true, false, true, false]);
}

/// What each worker has: whole ones in turn, then its part, then its turns of the empty ones.
fn expected_places(case: &Case) -> Option<Vec<Vec<Part>>> {
    let shape = &case.shape;
    let key = |request: usize| (request as i32, 0, 0);
    let (filled, empty): (Vec<usize>, Vec<usize>) =
        (0..case.seq_lens.len()).partition(|&i| case.seq_lens[i] > 0);
    let workers = shape.workers as usize;
    let tiles = i64::from(case.seq_lens[*filled.first()?] / TILE);
    let (each, left) = (filled.len() / workers, filled.len() % workers);
    if each == 0 || left == 0 {
        return None;
    }
    let low = i64::from(shape.min_part);
    let step = (1..=tiles).find(|step| {
        // The least with which parts are no more than there are workers for, none of them shorter than `low`.
        let parts = (tiles + step - 1) / step;
        parts >= 2 && parts <= (workers / left) as i64 && parts <= tiles / low
    })?;
    let mut hands: Vec<Vec<Part>> = filled[..each * workers]
        .chunks(each)
        .map(|whole| {
            whole
                .iter()
                .map(|&request| (key(request), 0, tiles))
                .collect()
        })
        .collect();
    let mut next = 0;
    for &request in &filled[each * workers..] {
        let mut begin = 0;
        while begin < tiles {
            let end = if tiles - begin < step + low {
                tiles
            } else {
                begin + step
            };
            hands[next].push((key(request), begin, end));
            (begin, next) = (end, next + 1);
        }
    }
    for (turn, &request) in empty.iter().enumerate() {
        hands[workers - 1 - turn % workers].push((key(request), 0, 0));
    }
    Some(hands)
}

proptest! {
    #![proptest_config(ProptestConfig { max_global_rejects: 20_000, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn workers_have_whole_ones_then_a_part_then_empty_ones(case in random_cases()) {
        let planned = plan(&case);
        prop_assume!(has_parts_beside_whole(&planned));
        prop_assert_eq!(Some(places(&planned)), expected_places(&case));
        let cost = |hand: &Vec<Part>| -> i64 {
            hand.iter().filter(|part| part.2 > 0).map(|(_, begin, end)| end - begin + i64::from(case.shape.fixed_cost)).sum()
        };
        let hands = places(&planned);
        let share = (hands.iter().map(cost).sum::<i64>()) / i64::from(case.shape.workers) + 1;
        // As whole ones are taken to be as good, or cuts.
        let faster = share * i64::from(case.shape.equal_speed) / 256 + i64::from(case.shape.equal_split_cost);
        let most = faster.max(share + i64::from(case.shape.split_cost)) + i64::from(case.shape.min_part);
        prop_assert!(hands.iter().all(|hand| cost(hand) <= most));
    }
}
