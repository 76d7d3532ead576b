//! Few units that would be cut at even shares are cut into parts no longer than a share, which are dealt out, the longest first. So are
//! those that could all have parts of a common length, if nobody has more than seven eighths of such a part then.

mod support;

use std::cell::Cell;

use ferromla_schedule::PlanShape;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use support::few_units::{
    as_much_as_the_first_will_have, beside_parts_of_a_common_length, empty_ones_cost_nothing,
    long_among_short, long_and_short, named_cases, normally_distributed, of_tiles,
    ones_that_share_out_whole, random_cases, random_cases_of_more, with_last_part_of,
    with_split_cost,
};
use support::line::{even_share, unit_key, worker_loads};
use support::ways::{
    LongestFirst, Part, Way, cost_of_parts, hands, is_dealt_longest_first, places, tiles, way_of,
};
use support::{
    Case, Planned, expected_units, has_a_part_each, has_parts_beside_whole, indptr_of,
    is_shared_out_equally, on_h200, plan,
};

const TILE: i32 = 64;

/// Whether units that have tiles have as many, and get equal parts, all of them or those that are left of whole ones.
fn has_equal_parts(case: &Case, planned: &Planned) -> bool {
    let units = expected_units(case);
    let mut filled = units
        .iter()
        .map(|unit| unit.tiles)
        .filter(|&tiles| tiles > 0);
    let first = filled.next();
    filled.all(|tiles| Some(tiles) == first)
        && (is_shared_out_equally(planned) || has_parts_beside_whole(planned))
}

fn assert_at_shares(case: &Case, planned: &Planned) {
    let [fixed, low] = [case.shape.fixed_cost, case.shape.min_part].map(i64::from);
    let share = even_share(case, &expected_units(case)).1.max(low);
    let header = planned.header;
    assert_eq!((header.whole, i64::from(header.share)), (0, share));
    let place = |item| (unit_key(item), item.tile_begin);
    assert!(planned.view().items().is_sorted_by_key(place));
    let most = share + fixed + 2 * (low - 1);
    assert!(
        worker_loads(case, planned)
            .into_iter()
            .all(|load| load <= most)
    );
}

fn assert_longest_first(case: &Case, planned: &Planned, way: &LongestFirst) {
    let header = planned.header;
    assert_eq!(
        (header.whole == 0, i64::from(header.share)),
        (way.is_cut, way.step)
    );
    let places = places(planned);
    assert_eq!(places, way.hands);
    let cost = |hand: &Vec<Part>| cost_of_parts(case.shape.fixed_cost.into(), hand);
    assert!(places.iter().map(cost).max() <= Some(way.most));
}

fn assert_a_part_each(planned: &Planned, length: i64) {
    let header = planned.header;
    assert_eq!((header.whole, i64::from(header.share)), (0, length));
    assert!(has_a_part_each(planned));
}

/// Asserts that a plan shares out units in their way, and says in which.
fn assert_way(case: &Case, planned: &Planned) -> Way {
    let way = way_of(case);
    match &way {
        Way::LongestFirst(way) => assert_longest_first(case, planned, way),
        Way::AtShares => assert_at_shares(case, planned),
        Way::CommonLength(length) => assert_a_part_each(planned, *length),
        Way::DealtWhole(expected) => assert_eq!(&hands(planned), expected),
        Way::Whole => assert_eq!((planned.header.whole, planned.header.merges), (1, 0)),
    }
    way
}

/// How often units are shared out in each way.
#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    longest_first: u32,
    longest_first_beside_common_length: u32,
    common_length: u32,
    at_shares: u32,
    dealt_whole: u32,
}

impl Counts {
    fn add(&mut self, way: &Way) {
        match way {
            Way::LongestFirst(LongestFirst { common: None, .. }) => self.longest_first += 1,
            Way::LongestFirst(_) => self.longest_first_beside_common_length += 1,
            Way::CommonLength(_) => self.common_length += 1,
            Way::AtShares => self.at_shares += 1,
            Way::DealtWhole(_) => self.dealt_whole += 1,
            Way::Whole => {}
        }
    }

    fn all(&self) -> [u32; 5] {
        [
            self.longest_first,
            self.longest_first_beside_common_length,
            self.common_length,
            self.at_shares,
            self.dealt_whole,
        ]
    }
}

/// Asserts that random batches are shared out in their way, and says how often in which.
fn assert_ways(number: u32, batches: impl Strategy<Value = Case>) -> Counts {
    let config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(number)
    };
    let counts = Cell::new(Counts::default());
    let result = TestRunner::new(config).run(&batches, |case| {
        let planned = plan(&case);
        if has_equal_parts(&case, &planned) {
            return Ok(());
        }
        let mut so_far = counts.get();
        so_far.add(&assert_way(&case, &planned));
        counts.set(so_far);
        Ok(())
    });
    result.unwrap();
    counts.get()
}

#[test]
fn few_units_go_the_longest_part_first_to_whoever_has_least() {
    let counts = assert_ways(2000, random_cases());
    let least = [200, 50, 100, 200, 25];
    let mut all = counts.all().into_iter().zip(least);
    assert!(all.all(|(of, least)| of > least), "{counts:?}");
}

#[test]
fn more_units_do_too_where_being_cut_costs_much() {
    let counts = assert_ways(400, random_cases_of_more());
    assert!(
        counts.longest_first > 40 && counts.at_shares > 80,
        "{counts:?}"
    );
}

#[test]
fn named_batches_are_shared_out_in_each_way() {
    let mut counts = Counts::default();
    for case in named_cases() {
        counts.add(&assert_way(&case, &plan(&case)));
    }
    assert!(counts.all().iter().all(|&of| of > 0), "{counts:?}");
}

/// The case without its empty requests, and which request is which.
fn without_empty(case: &Case) -> (Case, Vec<i32>) {
    let filled: Vec<i32> = (0..case.shape.batch)
        .filter(|&request| case.seq_lens[request as usize] > 0)
        .collect();
    let mut alone = case.clone();
    alone.seq_lens.retain(|&len| len > 0);
    alone.shape.batch = filled.len() as i32;
    (alone, filled)
}

/// The parts with tiles, by the numbers that their requests have without the empty ones.
fn filled_places(planned: &Planned, filled: &[i32]) -> Vec<Vec<Part>> {
    let renamed = |((request, kv_head, row), begin, end): Part| {
        let request = filled.binary_search(&request).expect("not empty") as i32;
        ((request, kv_head, row), begin, end)
    };
    let of_hand = |hand: Vec<Part>| {
        let with_tiles = hand.into_iter().filter(|(_, begin, end)| begin < end);
        with_tiles.map(renamed).collect()
    };
    places(planned).into_iter().map(of_hand).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn empty_units_change_no_part_of_others(case in random_cases()) {
        let (alone, filled) = without_empty(&case);
        let [with_empty, without] = [&case, &alone].map(plan);
        if is_dealt_longest_first(&case, &with_empty) && is_dealt_longest_first(&alone, &without) {
            prop_assert_eq!(with_empty.header.share, without.header.share);
            prop_assert_eq!(filled_places(&with_empty, &filled), places(&without));
        }
    }
}

/// Tiles of each worker's parts.
fn tiles_of_workers(planned: &Planned) -> Vec<Vec<i32>> {
    let hands = hands(planned);
    hands
        .iter()
        .map(|hand| hand.iter().map(tiles).collect())
        .collect()
}

#[test]
fn a_long_request_is_cut_and_short_ones_share_workers() {
    let case = long_among_short(128);
    let planned = plan(&case);
    let long = [vec![vec![49]; 41], vec![vec![39]]];
    let short = [vec![vec![16, 16, 16]; 15], vec![vec![16, 16]; 9]];
    assert_eq!(tiles_of_workers(&planned), [long, short].concat().concat());
    let header = planned.header;
    // An even share is 50.
    assert_eq!((header.share, header.merges, header.slots), (49, 1, 42));
    let cost = |hand: &Vec<_>| {
        hand.iter()
            .map(|part| tiles(part) + case.shape.fixed_cost)
            .sum()
    };
    let most: Option<i32> = hands(&planned).iter().map(cost).max();
    // Half of the fixed cost of 3 makes up for a part of what parts of one's own gain.
    let limit = 50 + case.shape.split_cost - case.shape.own_parts_gain + 1;
    assert!(most <= Some(limit), "{most:?}");
}

#[test]
fn a_long_request_has_parts_of_a_common_length_if_workers_are_enough() {
    // Of 132 workers, 69 for the long request: two short ones for another worker, of 19 each, would be more than seven eighths of 33.
    let planned = plan(&long_among_short(64));
    assert_a_part_each(&planned, 30);
    assert_eq!((planned.header.merges, planned.header.slots), (1, 69));
}

#[test]
fn empty_requests_come_last() {
    let case = long_among_short(128);
    let mut padded = case.clone();
    padded.seq_lens = case.seq_lens.iter().flat_map(|&len| [0, len]).collect();
    padded.shape.batch = 128;
    let planned = plan(&padded);
    assert_eq!(planned.header.share, 49);
    let mut workers = tiles_of_workers(&planned);
    // In the round of the last 15 short requests everybody else gets an empty one: nobody has more than three short ones make. The other
    // 13 go to those who have least, two short ones.
    let [long, last] = [[49, 0], [39, 0]].map(|hand| hand.to_vec());
    let [three, two] = [vec![16; 3], vec![16, 16]];
    let more = |empty: usize| [two.clone(), vec![0; empty]].concat();
    let expected = [
        vec![long; 41],
        vec![last],
        vec![three; 15],
        vec![more(3); 4],
        vec![more(2); 5],
    ];
    assert_eq!(workers, expected.concat());
    for hand in &mut workers {
        hand.retain(|&tiles| tiles > 0);
    }
    assert_eq!(workers, tiles_of_workers(&plan(&case)));
}

#[test]
fn most_requests_of_normally_distributed_lengths_are_whole() {
    let case = normally_distributed(64, 128);
    let planned = plan(&case);
    assert!(is_dealt_longest_first(&case, &planned));
    let merges = planned.header.merges;
    assert!((1..128 / 2).contains(&merges), "{merges} merges");
}

#[test]
fn units_that_do_not_share_out_so_are_cut_at_shares() {
    // 140 requests of 64 to 66 tiles for 132 workers: some would have two.
    let case = on_h200(64, (0..140).map(|i| (64 + i % 3) * TILE).collect());
    assert_at_shares(&case, &plan(&case));
}

fn assert_is_longest_first(case: &Case, expected: bool) {
    let planned = plan(case);
    if expected {
        assert!(is_dealt_longest_first(case, &planned), "{:?}", case.shape);
    } else {
        assert_at_shares(case, &planned);
    }
}

#[test]
fn more_requests_units_or_workers_are_cut_at_shares() {
    let long_and_short = |requests: usize| long_and_short(1600, 16, requests - 1);
    for (requests, workers, expected) in [
        (256, 256, true),
        (256, 257, false),
        (640, 256, true),
        (641, 256, false),
        (500, 100, true),
        (501, 100, false),
    ] {
        let case = of_tiles(&long_and_short(requests), workers);
        assert_is_longest_first(&case, expected);
    }
    for (requests, expected) in [(384, true), (385, false)] {
        let mut case = of_tiles(&long_and_short(requests), 256);
        (case.shape.group, case.shape.unit_rows) = (16, 16);
        assert_is_longest_first(&case, expected);
    }
    for (kv_heads, expected) in [(2, true), (3, false)] {
        let mut case = of_tiles(&long_and_short(192), 230);
        case.shape.kv_heads = kv_heads;
        assert_is_longest_first(&case, expected);
    }
    // As many units of more requests, of which one has no query token.
    for (requests, expected) in [(384, true), (385, false)] {
        let mut case = of_tiles(&long_and_short(requests), 256);
        let q_lens = [vec![1; 255], vec![0; requests - 255]].concat();
        case.qo_indptr = indptr_of(&q_lens);
        (case.shape.ragged, case.shape.q_len, case.shape.q_tokens) = (1, 0, 255);
        assert_is_longest_first(&case, expected);
    }
}

#[test]
fn no_more_parts_are_added_than_by_cuts_at_shares() {
    for (tiles, expected) in [(2, true), (3, false)] {
        assert_is_longest_first(&with_last_part_of(tiles), expected);
    }
}

#[test]
fn no_worker_has_more_than_cuts_at_shares_cost() {
    for (split_cost, expected) in [(18, true), (17, false)] {
        assert_is_longest_first(&with_split_cost(split_cost), expected);
    }
}

#[test]
fn no_worker_has_more_than_seven_eighths_of_a_part_of_a_common_length() {
    let case = beside_parts_of_a_common_length(411);
    assert_is_longest_first(&case, true);
    let workers = tiles_of_workers(&plan(&case));
    let most = workers
        .iter()
        .map(|hand| hand.iter().map(|tiles| tiles + 4).sum());
    assert_eq!(most.max(), Some(40));
    assert_a_part_each(&plan(&beside_parts_of_a_common_length(410)), 41);
}

#[test]
fn units_that_share_out_whole_are_cut_if_parts_can_have_a_common_length() {
    let [common_length, longest_first, whole] = ones_that_share_out_whole();
    assert_eq!(plan(&whole).header.whole, 1);
    assert_a_part_each(&plan(&common_length), 43);
    let planned = plan(&longest_first);
    assert_eq!((planned.header.whole, planned.header.share), (0, 23));
    let expected = [
        vec![23, 0],
        vec![23],
        vec![23],
        vec![23],
        vec![23],
        vec![19, 0, 0],
        vec![14, 7],
        vec![11, 7, 0, 0],
    ];
    assert_eq!(tiles_of_workers(&planned), expected);
}

#[test]
fn a_round_is_for_all_who_have_no_more_than_the_first_will_have() {
    let planned = plan(&as_much_as_the_first_will_have());
    let expected = [[19, 1], [13, 1], [10, 7], [10, 2]];
    assert_eq!(tiles_of_workers(&planned), expected);
}

#[test]
fn whoever_has_least_gets_all_empty_requests_if_they_cost_nothing() {
    // In the second round everybody has no more than the last worker will have, with another 3.
    let planned = plan(&empty_ones_cost_nothing());
    let expected = [vec![5, 0], vec![5, 0], vec![4, 0, 0, 0], vec![3, 3]];
    assert_eq!(tiles_of_workers(&planned), expected);
}

/// A request that is no longer than `min_part`, yet longer than what is fair for one that could be cut.
fn uncut(fixed_cost: i32, min_part: i32, split_cost: i32, own_parts_gain: i32) -> Case {
    let mut case = of_tiles(&[100], 2);
    case.shape = PlanShape {
        fixed_cost,
        min_part,
        split_cost,
        own_parts_gain,
        ..case.shape
    };
    case
}

#[test]
fn longer_shares_and_higher_costs_than_16384_are_left_to_the_line() {
    for (more, expected) in [(0, true), (2, false)] {
        assert_is_longest_first(&of_tiles(&[20_000, 12_760 + more], 2), expected);
    }
    for (more, expected) in [(0, true), (1, false)] {
        assert_is_longest_first(&uncut(200, (1 << 14) + more, 120, 20), expected);
        assert_is_longest_first(&uncut((1 << 14) + more, 200, 8300, 200), expected);
    }
}
