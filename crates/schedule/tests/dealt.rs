//! Which worker has which part, where these are dealt by size: few parts whose number is fixed, if they differ in length, and
//! few whole units that would be cut, if they share out so.

mod support;

use ferromla_schedule::WorkItem;
use ferromla_schedule::plan_layout::{FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT};
use proptest::prelude::*;
use support::line::{
    boundaries, even_share, fair_stretch, longest_whole_stretch, nearest, unit_key, worker_loads,
};
use support::ways::{dealt, hands, is_dealt_longest_first, tiles};
use support::{
    Case, Planned, cases_of, expected_units, has_parts_beside_whole, is_shared_out_equally, plan,
    set_mode,
};

/// Whether there are more parts than workers, of which as many to each, as long as the longest, are an eighth more than an even share at
/// most.
fn share_out_on_a_line(case: &Case, planned: &Planned) -> bool {
    let items = planned.view().items().to_vec();
    let longest = items.iter().map(tiles).max().unwrap_or(0) as i64;
    let most = items.len().div_ceil(planned.shape.workers as usize) as i64;
    most > 1 && most * longest * 8 <= even_share(case, &expected_units(case)).1 * 9
}

/// Parts in the order of their units, each worker beginning at the part nearest to its share.
fn assert_on_a_line(case: &Case, planned: &Planned) {
    let plan = planned.view();
    assert!(
        plan.items()
            .is_sorted_by_key(|item| (unit_key(item), item.tile_begin))
    );
    let boundaries = boundaries(case, plan.items());
    let (total, share) = even_share(case, &expected_units(case));
    let mut begin = 0;
    for worker in 0..plan.workers() {
        let x = (worker as i64 * share).min(total);
        assert_eq!(
            boundaries[begin],
            nearest(&boundaries, x),
            "worker {worker}"
        );
        begin += plan.worker(worker).len();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(700))]

    #[test]
    fn few_parts_of_fixed_number_are_dealt_by_size_if_they_do_not_share_out(
        mut case in prop_oneof![cases_of(FM_SPLIT_FIXED), cases_of(FM_SPLIT_INVARIANT)],
    ) {
        case.shape.fixed_cost = case.shape.fixed_cost.max(1); // so that no two parts begin at one place
        let planned = plan(&case);
        let few = planned.header.units <= 512 && planned.header.items <= 2048 && case.shape.workers <= 256;
        if few && !share_out_on_a_line(&case, &planned) {
            let hands = hands(&planned);
            let alone = planned.header.items <= case.shape.workers;
            prop_assert!(!alone || hands.iter().all(|hand| hand.len() <= 1), "a worker has two, another one none");
            prop_assert_eq!(hands, dealt(&planned));
        } else {
            assert_on_a_line(&case, &planned);
        }
    }

    #[test]
    fn few_units_that_would_be_cut_are_dealt_whole_if_they_share_out(mut case in cases_of(FM_SPLIT_AUTO)) {
        let units = expected_units(&case);
        let workers = case.shape.workers as usize;
        let filled = units.iter().filter(|unit| unit.tiles > 0).count();
        if 8 * filled <= 7 * workers {
            return Ok(()); // units may get equal parts, or parts of a common length
        }
        let on_a_line = longest_whole_stretch(&case, &units) <= fair_stretch(&case, &units);
        let planned = plan(&case);
        if is_shared_out_equally(&planned) || has_parts_beside_whole(&planned) {
            return Ok(());
        }
        let auto = case.clone();
        set_mode(&mut case.shape, FM_SPLIT_FIXED);
        case.shape.num_splits = 1;
        let whole = plan(&case);
        let hands_of_whole = dealt(&whole);
        let load = |items: &Vec<WorkItem>| *boundaries(&case, items).last().expect("the end");
        let most = even_share(&case, &units).1 + i64::from(case.shape.split_cost);
        let share_out = hands_of_whole.iter().map(load).max().expect("a worker") <= most;
        if !on_a_line && (workers + 1..=384).contains(&units.len()) && share_out {
            prop_assert_eq!(hands(&planned), hands_of_whole);
            prop_assert!(worker_loads(&case, &planned).into_iter().max() <= Some(most));
        } else if !is_dealt_longest_first(&auto, &planned) {
            prop_assert_eq!(planned.header.whole != 0, on_a_line);
        }
    }
}

/// `batch` requests of one token, 16 heads, whose lengths `len_of` says.
fn batch_of(batch: i32, split_mode: i32, len_of: impl Fn(i32) -> i32) -> Case {
    let shape = ferromla_schedule::PlanShape {
        batch,
        q_len: 1,
        group: 16,
        kv_heads: 1,
        causal: 1,
        unit_rows: 16,
        workers: 132,
        split_mode,
        num_splits: if split_mode == FM_SPLIT_INVARIANT {
            16
        } else {
            3
        },
        part_tiles: 64,
        max_seq_len: 1 << 20,
        fixed_cost: 3,
        split_cost: 8,
        min_part: 1,
        whole_speed: 384,
        equal_speed: 384,
        equal_split_cost: 8,
        ..Default::default()
    };
    Case {
        shape,
        seq_lens: (0..batch).map(len_of).collect(),
        qo_indptr: Vec::new(),
    }
}

/// Lengths from 1 to 9,000 or so, in no order.
fn scattered(i: i32) -> i32 {
    i * 7919 % 9001 + 1
}

#[test]
fn no_worker_has_much_more_than_others() {
    let planned = plan(&batch_of(128, FM_SPLIT_INVARIANT, scattered));
    let loads: Vec<i32> = hands(&planned)
        .iter()
        .map(|hand| hand.iter().map(tiles).sum())
        .collect();
    let even = loads.iter().sum::<i32>() / 132;
    let most = *loads.iter().max().unwrap();
    assert!(most <= even * 3 / 2, "{most} tiles, {even} on average");
}

#[test]
fn empty_requests_go_to_those_who_have_least() {
    let planned = plan(&batch_of(128 + 8, FM_SPLIT_INVARIANT, |i| {
        if i % 17 == 0 { 0 } else { 4096 }
    }));
    for (worker, hand) in hands(&planned).iter().enumerate() {
        let lengths: Vec<i32> = hand.iter().map(tiles).collect();
        let expected = if worker < 128 { vec![64] } else { vec![0, 0] };
        assert_eq!(lengths, expected, "worker {worker}");
    }
}

#[test]
fn parts_of_many_units_lie_on_a_line() {
    for split_mode in [FM_SPLIT_FIXED, FM_SPLIT_INVARIANT] {
        for batch in [513, 700, 3000] {
            let case = batch_of(batch, split_mode, scattered);
            assert_on_a_line(&case, &plan(&case));
        }
    }
}

#[test]
fn few_parts_for_few_workers_are_dealt() {
    for (num_splits, workers, is_dealt) in [(4, 256, true), (5, 256, false), (4, 257, false)] {
        let mut case = batch_of(512, FM_SPLIT_FIXED, |i| scattered(i) + 1024);
        (case.shape.num_splits, case.shape.workers) = (num_splits, workers);
        let planned = plan(&case);
        assert_eq!(planned.header.items, 512 * num_splits);
        if is_dealt {
            assert_eq!(hands(&planned), dealt(&planned));
        } else {
            assert_on_a_line(&case, &planned);
        }
    }
}

#[test]
fn parts_that_are_about_equally_long_lie_on_a_line() {
    for len_of in [|_| 16384, |i| 16384 - i % 7 * 64] {
        let case = batch_of(66, FM_SPLIT_INVARIANT, len_of);
        assert_on_a_line(&case, &plan(&case));
    }
}

#[test]
fn requests_of_all_lengths_are_dealt_whole() {
    // 128 heads, 66 teams of two: two rounds and four, both not full.
    for batch in [128, 256] {
        let mut case = batch_of(batch, FM_SPLIT_AUTO, |i| i * 7919 % 8192 + 1);
        (case.shape.unit_rows, case.shape.group) = (128, 128);
        (case.shape.workers, case.shape.whole_speed) = (66, 256);
        let planned = plan(&case);
        assert_eq!((planned.header.whole, planned.header.merges), (1, 0));
        assert_eq!(hands(&planned), dealt(&planned));
        let loads = worker_loads(&case, &planned);
        let even = loads.iter().sum::<i64>() / 66;
        let most = *loads.iter().max().unwrap();
        assert!(most <= even * 21 / 20, "{most} tiles, {even} on average");
    }
}
