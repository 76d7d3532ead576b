//! Few requests of different lengths that are cut get parts of a common length, one to a worker.

mod support;

use ferromla_schedule::plan_layout::FM_SPLIT_AUTO;
use proptest::prelude::*;
use support::line::{even_share, fair_stretch, longest_whole_stretch, unit_key, worker_loads};
use support::ways::{Way, cost_of_parts, is_dealt_longest_first, places, tiles, way_of};
use support::{
    Case, Planned, cases_of, expected_units, has_a_part_each, is_shared_out_equally, on_h200, plan,
};

const TILE: i32 = 64;

/// Requests of so many tiles each.
fn of_tiles(heads: i32, tiles: &[i32]) -> Case {
    on_h200(heads, tiles.iter().map(|tiles| tiles * TILE).collect())
}

/// Tiles of the parts of each request, in its order.
fn parts_of_requests(planned: &Planned) -> Vec<Vec<i32>> {
    let mut items = planned.view().items().to_vec();
    items.sort_by_key(|item| (unit_key(item), item.tile_begin));
    items
        .chunk_by(|a, b| unit_key(a) == unit_key(b))
        .map(|unit| unit.iter().map(tiles).collect())
        .collect()
}

/// The least length with which requests have no more parts than there are workers, one by one.
fn least_common_length(planned: &Planned, tiles: &[i32]) -> i32 {
    let (workers, min_part) = (planned.shape.workers, planned.shape.min_part);
    let parts = |length: i32| -> i32 {
        tiles
            .iter()
            .map(|&tiles| (tiles + length - 1) / length)
            .sum()
    };
    // More than 32 parts of a request pay only if each is long.
    let few =
        |length: i32| length >= 2 * min_part || tiles.iter().all(|&tiles| tiles <= 32 * length);
    let all: i32 = tiles.iter().sum();
    let least = ((all + workers - 1) / workers).max(min_part);
    (least..)
        .find(|&length| few(length) && parts(length) <= workers)
        .unwrap()
}

#[test]
fn one_longer_request_among_equal_ones_costs_no_second_part() {
    let mut tiles = vec![128; 31];
    tiles.push(129);
    let planned = plan(&of_tiles(128, &tiles));
    let mut expected = vec![vec![64, 64]; 31];
    expected.push(vec![43, 43, 43]);
    assert_eq!(parts_of_requests(&planned), expected);
    assert!(has_a_part_each(&planned));
    assert_eq!(planned.header.share, 64);
}

#[test]
fn the_length_is_the_least_that_will_do() {
    for heads in [16, 64, 128] {
        for tiles in [
            vec![400, 30, 3, 90, 200, 64, 65, 1],
            vec![1000, 10],
            vec![77, 300, 20],
        ] {
            let planned = plan(&of_tiles(heads, &tiles));
            assert!(has_a_part_each(&planned), "{heads} heads, {tiles:?}");
            let length = least_common_length(&planned, &tiles);
            assert_eq!(planned.header.share, length, "{heads} heads, {tiles:?}");
            for (parts, tiles) in parts_of_requests(&planned).iter().zip(&tiles) {
                assert_eq!(parts.iter().sum::<i32>(), *tiles);
                let longest = *parts.iter().max().unwrap();
                assert!(
                    longest < length + planned.shape.min_part,
                    "{parts:?} of {length}"
                );
            }
        }
    }
}

#[test]
fn requests_that_may_have_parts_of_their_own_workers_are_cut_sooner() {
    // 66 workers: whole ones would be fair if cutting them cost what cuts at even shares do.
    let alternating = |batch: i32| -> Vec<i32> { (0..batch).map(|i| 11 + i % 2).collect() };
    let planned = plan(&of_tiles(128, &alternating(32)));
    assert!(has_a_part_each(&planned));
    assert_eq!((planned.header.share, planned.header.slots), (6, 64));
    // 34 could not all be cut in two: the longer ones are.
    let planned = plan(&of_tiles(128, &alternating(34)));
    assert!(has_a_part_each(&planned));
    assert_eq!((planned.header.share, planned.header.slots), (11, 34));
    // As many as workers share out evenly.
    assert_eq!(plan(&of_tiles(128, &alternating(66))).header.whole, 1);
}

#[test]
fn too_many_long_requests_are_cut_at_shares() {
    // 100 of 132 to 40 tiles: with 66 workers there is no part for each, with 132 parts would be as long as requests.
    let tiles: Vec<i32> = (0..100).map(|i| 40 + 92 * (i % 2)).collect();
    let planned = plan(&of_tiles(64, &tiles));
    assert!(!has_a_part_each(&planned));
    assert_eq!(planned.header.whole, 0);
}

#[test]
fn empty_requests_go_to_all_workers_in_turn() {
    let filled = [400, 30, 3, 90, 200, 64, 65, 1];
    let alone = plan(&of_tiles(64, &filled));
    let tiles: Vec<i32> = filled
        .iter()
        .flat_map(|&tiles| [0, tiles, 0])
        .chain([0; 200])
        .collect();
    let planned = plan(&of_tiles(64, &tiles));
    let mut parts = parts_of_requests(&planned);
    parts.retain(|parts| *parts != [0]);
    assert_eq!(parts, parts_of_requests(&alone));
    let view = planned.view();
    let empty = |worker| {
        view.worker(worker)
            .iter()
            .filter(|item| item.tile_begin == item.tile_end)
            .count()
    };
    let counts: Vec<usize> = (0..view.workers()).map(empty).collect();
    assert_eq!(counts.iter().sum::<usize>(), 216);
    assert!(
        counts.iter().all(|count| (1..=2).contains(count)),
        "{counts:?}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))] // few of them are cut this way

    #[test]
    fn no_worker_has_more_than_the_common_length_where_that_is_fair(
        case in cases_of(FM_SPLIT_AUTO),
    ) {
        let planned = plan(&case);
        let units = expected_units(&case);
        let tiles = units.iter().map(|unit| unit.tiles as i32);
        let filled: Vec<i32> = tiles.filter(|&tiles| tiles > 0).collect();
        let workers = case.shape.workers;
        let would_be_cut = longest_whole_stretch(&case, &units) > fair_stretch(&case, &units);
        let is_for_this = would_be_cut
            && !is_shared_out_equally(&planned)
            && filled.iter().any(|&tiles| tiles != filled[0])
            && 8 * filled.len() <= 7 * workers as usize
            && units.len() <= 384
            && case.shape.batch <= 384
            && workers <= 1024
            && filled.iter().map(|&tiles| i64::from(tiles)).sum::<i64>() < 1 << 20;
        if !is_for_this {
            return Ok(());
        }
        let length = i64::from(least_common_length(&planned, &filled));
        let shape = &case.shape;
        let fixed = i64::from(shape.fixed_cost);
        let cost: i64 = filled.iter().map(|&tiles| i64::from(tiles) + fixed).sum();
        let share = (cost + i64::from(shape.workers) - 1) / i64::from(shape.workers);
        let speed = (i64::from(shape.whole_speed) + 256) / 2;
        let most = share / 256 * speed + share % 256 * speed / 256 + i64::from(shape.split_cost);
        let header_share = i64::from(planned.header.share);
        let longest_first = is_dealt_longest_first(&case, &planned);
        if length + fixed <= most && longest_first {
            // Nobody has more than seven eighths of what such a part costs.
            let load = |hand: &Vec<_>| cost_of_parts(fixed, hand);
            prop_assert!(places(&planned).iter().map(load).all(|load| 8 * load <= 7 * (length + fixed)));
        } else if length + fixed <= most {
            prop_assert!(matches!(way_of(&case), Way::CommonLength(_)));
            prop_assert!(has_a_part_each(&planned));
            prop_assert_eq!(header_share, length);
            let empty = (units.len() - filled.len()).div_ceil(shape.workers as usize) as i64 * fixed;
            for load in worker_loads(&case, &planned) {
                prop_assert!(load < length + i64::from(shape.min_part) + fixed + empty);
            }
        } else {
            prop_assert!(matches!(way_of(&case), Way::DealtWhole(_) | Way::LongestFirst(_) | Way::AtShares));
            if !longest_first {
                let (_, share) = even_share(&case, &units);
                let low = if planned.header.whole == 0 { shape.min_part.into() } else { 0 };
                prop_assert_eq!(header_share, share.max(low));
            }
        }
    }
}
