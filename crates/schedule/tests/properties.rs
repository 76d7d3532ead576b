//! What holds for every plan.

mod support;

use std::collections::HashSet;

use ferromla_schedule::plan_layout::{FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT};
use ferromla_schedule::{Merge, PlanShape, PlanView, Strided, WorkItem, layout, plan_into};
use proptest::prelude::*;
use support::line::{
    even_share, fair_stretch, is_dealt_whole, longest_whole_stretch, unit_key, worker_loads,
};
use support::ways::{is_dealt_longest_first, tiles};
use support::{
    Case, Planned, cases, cases_of, deals_out_empty_units, expected_units, has_a_part_each,
    has_parts_beside_whole, indptr_of, is_shared_out_equally, plan, plan_over, ragged_cases,
    uniform_cases, without_steps,
};

/// All items in the order of their units and tiles.
fn in_order_of_units(plan: &PlanView) -> Vec<WorkItem> {
    let mut items = plan.items().to_vec();
    items.sort_by_key(|item| (unit_key(item), item.tile_begin));
    items
}

/// The items of each unit.
/// The tiles of a step of a unit of so many.
fn step_of(shape: &PlanShape, tiles: i64) -> i64 {
    if shape.steps == 2 {
        let most = i64::from(shape.num_splits);
        let first = if tiles <= 128 { 5 } else { 6 };
        return 1 << (first..).find(|&log2| tiles <= most << log2).unwrap();
    }
    match tiles {
        _ if shape.steps == 0 => 1,
        ..=8 => 2,
        9..=64 => 4,
        65..=512 => 8,
        513..=4096 => 16,
        4097..=32_768 => 32,
        32_769..=262_144 => 64,
        262_145..=2_097_152 => 128,
        2_097_153..=16_777_216 => 256,
        _ => 512,
    }
}

/// The tiles of a part of a unit of so many, where these depend on that alone, and whether it is cut into their steps.
fn invariant_part(case: &Case, tiles: i64) -> (i64, bool) {
    let shape = &case.shape;
    let most = i64::from(shape.part_tiles.max(1));
    let parts = ((tiles + most - 1) / most).clamp(1, i64::from(shape.num_splits).max(1));
    let few = shape.steps != 0 && parts > 3 && tiles <= 6 * most;
    let parts = if few { 3 } else { parts };
    let part = (tiles + parts - 1) / parts;
    let step = step_of(shape, tiles);
    let in_steps = shape.steps != 0 && (tiles + step - 1) / step <= i64::from(shape.few_steps);
    ((part + step - 1) / step * step, in_steps)
}

fn items_by_unit(items: &[WorkItem]) -> Vec<&[WorkItem]> {
    items.chunk_by(|a, b| unit_key(a) == unit_key(b)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(700))]

    #[test]
    fn every_tile_of_every_unit_is_covered_once_and_in_order(case in cases()) {
        let planned = plan(&case);
        let units = expected_units(&case);
        let plan = planned.view();
        let items = in_order_of_units(&plan);
        let by_unit = items_by_unit(&items);
        prop_assert_eq!(by_unit.len(), units.len());
        for (items, unit) in by_unit.iter().zip(&units) {
            let first = &items[0];
            prop_assert_eq!(unit_key(first), (unit.request, unit.kv_head, unit.row_begin));
            prop_assert_eq!(first.tile_begin, 0);
            prop_assert_eq!(i64::from(items[items.len() - 1].tile_end), unit.tiles);
            for pair in items.windows(2) {
                prop_assert_eq!(pair[0].tile_end, pair[1].tile_begin);
            }
            let request = unit.request as usize;
            let (len, (q_begin, q_len)) = (case.seq_len(request), case.queries(request));
            for item in *items {
                prop_assert!(item.tile_begin < item.tile_end || unit.tiles == 0 && items.len() == 1);
                prop_assert_eq!((item.seq_len, item.q_len, item.q_begin), (len, q_len, q_begin));
                prop_assert_eq!((item.main_len, (item.parts & 0xFFFF) as usize), (0, items.len()));
            }
        }
    }

    #[test]
    fn slots_and_merges_name_every_part_of_a_cut_unit_once(case in cases()) {
        let planned = plan(&case);
        let plan = planned.view();
        let (mut cut_parts, mut taken) = (0, Vec::new());
        let mut merges = Vec::new();
        let items = in_order_of_units(&plan);
        for items in items_by_unit(&items) {
            if items.len() == 1 {
                let tiles = i64::from(items[0].tile_end);
                let stored = case.shape.steps == 2 && tiles > step_of(&case.shape, tiles);
                prop_assert_eq!((items[0].slot, items[0].merge), (if stored { -2 } else { -1 }, -1));
                continue;
            }
            let (item, tiles) = (&items[0], i64::from(items[items.len() - 1].tile_end));
            let (part, in_steps) = invariant_part(&case, tiles);
            let step = step_of(&case.shape, tiles);
            let (merge, parts) = (merges.len() as i32, items.len() as i32);
            // Slots of a part, of a part of the unit that is not cut wherever steps end, and of the unit.
            let (each, steps, all) = if in_steps {
                let all = (tiles + step - 1) / step;
                (i64::from(item.tile_end) / step, part / step, all)
            } else {
                (1, i64::from(case.shape.steps), i64::from(parts))
            };
            merges.push(Merge {
                request: item.request,
                kv_head: item.kv_head,
                row_begin: item.row_begin,
                q_begin: item.q_begin,
                q_len: item.q_len,
                first_slot: item.slot,
                parts,
                steps: steps as i32,
                slots: if case.shape.steps == 0 { 0 } else { all as i32 },
                ..Merge::default()
            });
            prop_assert_eq!(item.slot < planned.layout.step_slots, in_steps);
            taken.extend(item.slot..item.slot + all as i32);
            for (j, item) in (0..).zip(items) {
                prop_assert_eq!(item.slot, merges[merge as usize].first_slot + j * each as i32);
                prop_assert_eq!(item.merge, merge);
                prop_assert_eq!(item.parts, parts | (step.ilog2() << 16) as i32);
                if in_steps {
                    prop_assert_eq!(i64::from(item.tile_begin), i64::from(j) * each * step);
                } else {
                    prop_assert_eq!(item.slot, planned.layout.step_slots + cut_parts + j);
                }
            }
            cut_parts += parts;
        }
        let count = taken.len();
        prop_assert_eq!(taken.iter().collect::<HashSet<_>>().len(), count);
        prop_assert!(taken.iter().all(|&slot| slot < planned.layout.max_slots));
        prop_assert_eq!(plan.merges(), merges.as_slice());
        prop_assert_eq!(planned.header.slots, cut_parts);
        prop_assert_eq!(planned.header.units as usize, items_by_unit(&items).len());
        prop_assert!(planned.header.items <= planned.layout.max_items);
        prop_assert!(planned.header.merges <= planned.layout.max_merges);
        prop_assert_eq!(planned.header.reserved, [0; 6]);
        prop_assert_eq!(*plan.header(), planned.header);
    }

    #[test]
    fn workers_take_all_items_one_stretch_each(case in cases()) {
        let planned = plan(&case);
        let plan = planned.view();
        prop_assert_eq!(plan.workers(), case.shape.workers as usize);
        let stretches: Vec<WorkItem> =
            (0..plan.workers()).flat_map(|worker| plan.worker(worker)).copied().collect();
        prop_assert_eq!(stretches.as_slice(), plan.items());
    }

    #[test]
    fn only_dealt_parts_and_empty_units_beside_equal_parts_leave_the_order_of_units(case in cases_of(FM_SPLIT_AUTO)) {
        let planned = plan(&case);
        let plan = planned.view();
        if is_dealt_longest_first(&case, &planned) {
            for worker in 0..plan.workers() {
                prop_assert!(plan.worker(worker).is_sorted_by_key(|item| -tiles(item)));
            }
            return Ok(());
        }
        prop_assume!(!is_dealt_whole(&case, &planned));
        let place = |item: &WorkItem| (unit_key(item), item.tile_begin);
        let in_order = |items: &[WorkItem]| items.is_sorted_by_key(place);
        if has_parts_beside_whole(&planned) {
            for worker in 0..plan.workers() {
                let mut kinds = plan.worker(worker).chunk_by(|a, b| (a.tile_end > 0) == (b.tile_end > 0));
                prop_assert!(kinds.all(in_order));
            }
            return Ok(());
        }
        for worker in 0..plan.workers() {
            prop_assert!(in_order(plan.worker(worker)));
        }
        if !deals_out_empty_units(&planned) {
            prop_assert!(in_order(plan.items()));
        }
        let with_tiles = |item: &&WorkItem| item.tile_begin < item.tile_end;
        let filled: Vec<WorkItem> = plan.items().iter().filter(with_tiles).copied().collect();
        prop_assert!(in_order(&filled));
    }

    #[test]
    fn whole_exactly_when_whole_units_share_out_evenly(case in cases_of(FM_SPLIT_AUTO)) {
        let planned = plan(&case);
        let units = expected_units(&case);
        let (_, share) = even_share(&case, &units);
        let longest = longest_whole_stretch(&case, &units);
        let fair = longest <= fair_stretch(&case, &units);
        if fair && is_shared_out_equally(&planned) {
            // Whole units that share out more evenly than on the line, or, without the empty ones, would be cut.
            let filled: Vec<_> = units.iter().filter(|unit| unit.tiles > 0).copied().collect();
            prop_assert!(filled.len() < units.len() || filled.len() > case.shape.workers as usize);
            return Ok(());
        }
        if fair && has_parts_beside_whole(&planned) {
            // Of those that are left to fewer than all workers each would be alone for as long as all of it takes.
            let filled = units.iter().filter(|unit| unit.tiles > 0).count();
            prop_assert!(filled % case.shape.workers as usize <= case.shape.workers as usize / 2);
            return Ok(());
        }
        prop_assert_eq!(planned.header.whole != 0, fair || is_dealt_whole(&case, &planned));
        if planned.header.whole != 0 {
            prop_assert_eq!((planned.header.merges, planned.header.slots), (0, 0));
            if !is_dealt_longest_first(&case, &planned) {
                prop_assert_eq!(i64::from(planned.header.share), share.min(i32::MAX.into()));
            }
        }
        if fair {
            prop_assert_eq!(worker_loads(&case, &planned).into_iter().max(), Some(longest));
            let plan = planned.view();
            let each = |worker| plan.worker(worker).len() <= 1;
            prop_assert!(units.len() > plan.workers() || (0..plan.workers()).all(each));
        }
    }

    #[test]
    fn a_cut_plan_gives_each_worker_its_share(mut case in cases_of(FM_SPLIT_AUTO)) {
        (case.shape.whole_speed, case.shape.equal_speed) = (256, 256);
        let planned = plan(&case);
        prop_assume!(planned.header.whole == 0);
        let min_part = i64::from(case.shape.min_part);
        let units = expected_units(&case);
        let (_, share) = even_share(&case, &units);
        // A cut moves back over less than min_part tiles and the fixed cost, or on over less than min_part.
        let fixed_cost = i64::from(case.shape.fixed_cost);
        let mut slack = fixed_cost + 2 * (min_part - 1);
        if is_dealt_longest_first(&case, &planned) {
            slack = i64::from(case.shape.split_cost) + fixed_cost / 2;
        } else if is_shared_out_equally(&planned) || has_a_part_each(&planned) || has_parts_beside_whole(&planned) {
            // Up to what cutting at shares would cost; the last part of a unit may be longer by less than min_part.
            let split_cost = case.shape.split_cost.max(case.shape.equal_split_cost);
            slack = slack.max(i64::from(split_cost) + min_part - 1);
            let empty = units.iter().filter(|unit| unit.tiles == 0).count();
            slack += empty.div_ceil(case.shape.workers as usize) as i64 * fixed_cost;
        }
        let share = share.max(min_part);
        for load in worker_loads(&case, &planned) {
            prop_assert!(load <= share + slack, "load {} of share {}", load, share);
        }
        for items in items_by_unit(&in_order_of_units(&planned.view())).iter().filter(|items| items.len() > 1) {
            for item in *items {
                prop_assert!(i64::from(item.tile_end - item.tile_begin) >= min_part);
            }
        }
    }

    #[test]
    fn fixed_and_invariant_parts_are_even(
        case in prop_oneof![cases_of(FM_SPLIT_FIXED), cases_of(FM_SPLIT_INVARIANT)],
    ) {
        let planned = plan(&case);
        let items = in_order_of_units(&planned.view());
        for (items, unit) in items_by_unit(&items).iter().zip(expected_units(&case)) {
            let (part, in_steps) = invariant_part(&case, unit.tiles);
            let expected = match case.shape.split_mode {
                FM_SPLIT_FIXED => {
                    let wanted = i64::from(case.shape.num_splits).min(unit.tiles).max(1);
                    (unit.tiles + wanted - 1) / wanted
                }
                _ if in_steps => {
                    let step = step_of(&case.shape, unit.tiles);
                    let steps = (unit.tiles + step - 1) / step;
                    let most = i64::from(case.shape.part_tiles);
                    let more = if case.shape.steps == 2 { (unit.tiles + most - 1) / most } else { 0 };
                    let wanted = more.max(case.shape.few_parts.into());
                    let parts = match (case.shape.steps, steps, wanted) {
                        (2, 3, 2) => 3,
                        _ => wanted.min(steps).max(1),
                    };
                    (steps + parts - 1) / parts * step
                }
                _ => part,
            };
            let chunk = items[0].tile_end;
            prop_assert_eq!(i64::from(chunk), expected.min(unit.tiles));
            prop_assert_eq!(items.len() as i64, if unit.tiles == 0 { 1 } else { (unit.tiles + expected - 1) / expected });
            for item in &items[..items.len() - 1] {
                prop_assert_eq!(item.tile_end - item.tile_begin, chunk);
            }
            prop_assert!(items[items.len() - 1].tile_end - items[items.len() - 1].tile_begin <= chunk);
        }
        prop_assert_eq!(planned.header.whole, 0);
    }

    #[test]
    fn invariant_parts_depend_on_the_request_alone(case in cases_of(FM_SPLIT_INVARIANT), workers in 1..200i32) {
        let planned = plan(&case);
        prop_assume!(planned.header.units < planned.layout.units || case.shape.ragged == 0);
        for (request, &len) in case.seq_lens.iter().enumerate() {
            let mut alone = Case { shape: case.shape, seq_lens: vec![len], qo_indptr: Vec::new() };
            if case.shape.ragged != 0 {
                alone.shape.q_tokens = case.queries(request).1;
                alone.qo_indptr = vec![0, alone.shape.q_tokens];
            }
            alone.shape.batch = 1;
            alone.shape.workers = workers;
            let alone = plan(&alone);
            let tiles = |items: &[WorkItem]| -> Vec<_> {
                items.iter().map(|i| (i.kv_head, i.row_begin, i.tile_begin, i.tile_end)).collect()
            };
            let in_batch: Vec<WorkItem> = in_order_of_units(&planned.view())
                .into_iter()
                .filter(|item| item.request == request as i32)
                .collect();
            prop_assert_eq!(tiles(&in_batch), tiles(&in_order_of_units(&alone.view())));
        }
    }

    #[test]
    fn equal_inputs_give_equal_plans_whatever_the_buffer_held(case in cases()) {
        let (a, b) = (plan_over(&case, -1), plan_over(&case, 0x7f7f_7f7f));
        prop_assert_eq!(a.header, b.header);
        prop_assert_eq!(a.view().items(), b.view().items());
        prop_assert_eq!(a.view().merges(), b.view().merges());
        for worker in 0..a.view().workers() {
            prop_assert_eq!(a.view().worker(worker), b.view().worker(worker));
        }
    }

    #[test]
    fn reordering_a_batch_reorders_its_fixed_and_invariant_parts(
        case in prop_oneof![cases_of(FM_SPLIT_FIXED), cases_of(FM_SPLIT_INVARIANT)],
        by in 0..50usize,
    ) {
        let batch = case.seq_lens.len();
        prop_assume!(batch > 0);
        prop_assume!(plan(&case).header.units < plan(&case).layout.units || case.shape.ragged == 0);
        let mut rotated = case.clone();
        rotated.seq_lens.rotate_left(by % batch);
        if case.shape.ragged != 0 {
            let mut q_lens: Vec<i32> = (0..batch).map(|request| case.queries(request).1).collect();
            q_lens.rotate_left(by % batch);
            rotated.qo_indptr = indptr_of(&q_lens);
            rotated.shape.q_tokens = rotated.qo_indptr[batch];
        }
        let (a, b) = (plan(&case), plan(&rotated));
        let counts = |planned: &Planned| {
            let header = planned.header;
            (header.share, header.items, header.merges, header.slots)
        };
        prop_assert_eq!(counts(&a), counts(&b));
        let mut renamed: Vec<_> = b.view().items().iter().map(|item| {
            let request = (item.request as usize + by) % batch;
            (request as i32, item.kv_head, item.row_begin, item.tile_begin, item.tile_end, item.slot >= 0)
        }).collect();
        renamed.sort_unstable();
        let mut original: Vec<_> = a.view().items().iter().map(|item| {
            (item.request, item.kv_head, item.row_begin, item.tile_begin, item.tile_end, item.slot >= 0)
        }).collect();
        original.sort_unstable();
        prop_assert_eq!(renamed, original);
    }

    #[test]
    fn every_query_range_has_its_units(case in ragged_cases()) {
        let planned = plan(&case);
        prop_assert_eq!(planned.header.units as usize, expected_units(&case).len());
        let blocks = |q_len| (q_len * case.shape.group + case.shape.unit_rows - 1) / case.shape.unit_rows;
        let units: i32 = (0..case.seq_lens.len()).map(|request| blocks(case.queries(request).1)).sum();
        prop_assert_eq!(planned.header.units, units * case.shape.kv_heads);
    }

    #[test]
    fn equal_query_ranges_plan_as_a_uniform_batch(case in uniform_cases()) {
        let case = Case { shape: without_steps(case.shape), ..case };
        let q_lens = vec![case.shape.q_len; case.seq_lens.len()];
        let mut ragged = Case { qo_indptr: indptr_of(&q_lens), ..case.clone() };
        (ragged.shape.ragged, ragged.shape.q_len) = (1, 0);
        ragged.shape.q_tokens = q_lens.iter().sum();
        let (uniform, ragged) = (plan(&case), plan(&ragged));
        prop_assert_eq!(uniform.header, ragged.header);
        let q_begin = |request| request * case.shape.q_len;
        let items: Vec<WorkItem> = uniform.view().items().iter()
            .map(|item| WorkItem { q_begin: q_begin(item.request), ..*item }).collect();
        let merges: Vec<Merge> = uniform.view().merges().iter()
            .map(|merge| Merge { q_begin: q_begin(merge.request), ..*merge }).collect();
        prop_assert_eq!(ragged.view().items(), items);
        prop_assert_eq!(ragged.view().merges(), merges);
        for worker in 0..uniform.view().workers() {
            prop_assert_eq!(uniform.view().worker(worker).len(), ragged.view().worker(worker).len());
        }
    }

    #[test]
    fn strided_lengths_are_the_same_lengths(case in cases(), stride in 2..5usize) {
        let layout = layout(&case.shape).unwrap();
        let spread = |entries: &[i32]| {
            let mut data = vec![-7; entries.len() * stride];
            for (i, &entry) in entries.iter().enumerate() {
                data[i * stride] = entry;
            }
            data
        };
        let (lens, indptr) = (spread(&case.seq_lens), spread(&case.qo_indptr));
        let indptr = (case.shape.ragged != 0).then_some(Strided { data: &indptr, stride });
        let mut words = vec![0x5a5a_5a5a; layout.words()];
        plan_into(&case.shape, Strided { data: &lens, stride }, indptr, &mut words).unwrap();
        prop_assert_eq!(words, plan(&case).words);
    }

    #[test]
    fn words_that_are_no_plan_are_refused_or_read_safely(
        case in cases(),
        spoiled in prop::collection::vec((0..200usize, -3..300i32), 1..4),
    ) {
        let mut planned = plan(&case);
        for (index, value) in spoiled {
            let index = index % planned.words.len();
            planned.words[index] = value;
        }
        if let Ok(plan) = PlanView::new(&planned.shape, &planned.words) {
            let items: usize = (0..plan.workers()).map(|worker| plan.worker(worker).len()).sum();
            prop_assert_eq!(items, plan.items().len());
        }
    }
}

#[test]
fn the_longest_lengths_do_not_overflow() {
    for split_mode in [FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT] {
        for workers in [1, 132] {
            for causal in [0, 1] {
                let shape = ferromla_schedule::PlanShape {
                    batch: 3000,
                    q_len: 1,
                    group: 128,
                    kv_heads: 2,
                    causal,
                    unit_rows: 64,
                    workers,
                    split_mode,
                    num_splits: 7,
                    part_tiles: 64,
                    max_seq_len: i32::MAX,
                    fixed_cost: i32::MAX,
                    split_cost: i32::MAX,
                    min_part: i32::MAX,
                    ragged: 0,
                    q_tokens: 0,
                    whole_speed: 256,
                    equal_speed: 256,
                    ..Default::default()
                };
                let case = Case {
                    shape,
                    seq_lens: vec![i32::MAX; 3000],
                    qo_indptr: Vec::new(),
                };
                let planned = plan(&case);
                assert_eq!(
                    planned.header.share,
                    i32::MAX,
                    "the share is clamped to its word"
                );
                let tiles: i64 = planned
                    .view()
                    .items()
                    .iter()
                    .map(|i| i64::from(i.tile_end - i.tile_begin))
                    .sum();
                assert_eq!(tiles, 12_000 * (1 << 25));
            }
        }
    }
}
