//! Equal requests that are cut get equal parts, one to a worker: no worker has two short ones to load queries for.

mod support;

use ferromla_schedule::plan_layout::FM_SPLIT_AUTO;
use proptest::prelude::*;
use support::{Case, Planned, plan};

const TILE: i32 = 64;

/// Requests of so many tokens each.
fn on_h200(batch: i32, heads: i32, seq_len: i32) -> Case {
    support::on_h200(heads, vec![seq_len; batch as usize])
}

/// Tiles of every worker's items, in order.
fn tiles_of_workers(planned: &Planned) -> Vec<Vec<i32>> {
    let view = planned.view();
    (0..planned.shape.workers as usize)
        .map(|worker| {
            let items = view.worker(worker).iter();
            items.map(|item| item.tile_end - item.tile_begin).collect()
        })
        .collect()
}

/// (batch, heads, seq_len).
type Batch = (i32, i32, i32);
/// (parts of a request, tiles of a part).
type Parts = (usize, i32);

const WORKLOADS: [(Batch, Parts); 9] = [
    ((32, 64, 8192), (4, 32)),
    ((32, 128, 8192), (2, 64)),
    ((16, 128, 8192), (4, 32)),
    ((8, 128, 4096), (8, 8)),
    ((4, 128, 8192), (16, 8)),
    ((1, 128, 1024), (8, 2)),
    ((1, 128, 8192), (32, 4)),
    ((1, 128, 65536), (64, 16)),
    ((32, 16, 8192), (2, 64)), // a worker is a cluster of two
];

#[test]
fn a_worker_has_one_part_of_a_named_workload() {
    for ((batch, heads, seq_len), (parts, tiles)) in WORKLOADS {
        let planned = plan(&on_h200(batch, heads, seq_len));
        let context = format!("batch {batch}, {heads} heads, {seq_len} tokens");
        let mut workers = tiles_of_workers(&planned);
        workers.retain(|parts| !parts.is_empty());
        assert_eq!(
            workers,
            vec![vec![tiles]; parts * batch as usize],
            "{context}"
        );
        assert_eq!(planned.header.merges, batch, "{context}");
    }
}

/// Of workers those without a part, by number.
fn idle_workers(planned: &Planned) -> Vec<usize> {
    let workers = tiles_of_workers(planned);
    (0..workers.len())
        .filter(|&worker| workers[worker].is_empty())
        .collect()
}

#[test]
fn workers_without_a_part_are_spread_among_the_others_unless_most_have_none() {
    assert_eq!(
        idle_workers(&plan(&on_h200(32, 64, 8192))),
        [32, 65, 98, 131]
    );
    let idle = idle_workers(&plan(&on_h200(24, 64, 8192)));
    assert_eq!((idle.len(), &idle[..4]), (36, &[3, 7, 10, 14][..]));
    assert_eq!(
        idle_workers(&plan(&on_h200(1, 128, 8192))),
        (32..66).collect::<Vec<_>>()
    );
}

/// (batch, heads, seq_len), items of a worker and workers with as many.
#[test]
fn whole_requests_share_out_in_rounds() {
    for ((batch, heads, seq_len), (each, busy)) in [
        ((176, 16, 2048), (2, 88)),
        ((192, 16, 4096), (2, 96)),
        ((192, 64, 2048), (2, 96)),
        ((330, 16, 2048), (3, 110)),
        ((160, 32, 1024), (2, 80)), // whole on the line, too, with one or two
    ] {
        let planned = plan(&on_h200(batch, heads, seq_len));
        let workers = tiles_of_workers(&planned);
        let (with, without): (Vec<_>, Vec<_>) =
            workers.into_iter().partition(|items| !items.is_empty());
        assert_eq!(
            with,
            vec![vec![seq_len / TILE; each]; busy],
            "batch {batch}, {heads} heads"
        );
        assert_eq!(without.len(), 132 - busy);
    }
    // Nearly all have two on the line: there is nothing to gain.
    assert_eq!(plan(&on_h200(256, 16, 4096)).header.whole, 1);
}

#[test]
fn a_power_of_two_is_taken_where_it_is_hardly_fewer_parts() {
    for ((batch, heads, seq_len), parts) in [
        ((12, 64, 4096), 8),  // not 11
        ((6, 128, 2048), 8),  // not 11
        ((12, 128, 8192), 5), // of 26 tiles: four would be of 32
        ((20, 64, 8192), 6),  // four would leave memory idle
        ((3, 16, 8192), 32),  // not 43
        ((2, 16, 8192), 64),
        ((2, 64, 8192), 32), // 64 cost more to add up
        ((2, 16, 16384), 64),
    ] {
        let header = plan(&on_h200(batch, heads, seq_len)).header;
        assert_eq!(
            header.slots,
            parts * batch,
            "batch {batch}, {heads} heads, {seq_len} tokens"
        );
    }
}

#[test]
fn requests_that_share_out_evenly_stay_whole() {
    assert_eq!(plan(&on_h200(64, 128, 1024)).header.whole, 1);
}

#[test]
fn requests_that_can_all_be_cut_in_two_stay_whole_only_if_they_are_short() {
    // 66 workers. 34 requests could not all be cut, and cutting at even shares costs more.
    for (batch, tiles, slots) in [(32, 7, 0), (32, 10, 0), (32, 12, 64), (34, 12, 0)] {
        let header = plan(&on_h200(batch, 128, tiles * TILE)).header;
        assert_eq!(header.slots, slots, "{batch} requests of {tiles} tiles");
    }
    // Few requests: what costs no more than a split is not cut into many short parts.
    for (tiles, whole) in [(7, 1), (8, 0)] {
        assert_eq!(plan(&on_h200(8, 64, tiles * TILE)).header.whole, whole);
    }
}

#[test]
fn equal_parts_that_leave_too_many_workers_idle_are_not_taken() {
    // 66 workers for 20 units: three parts of 22 tiles are longer than even shares, but by less than what cutting there costs.
    assert_eq!(plan(&on_h200(20, 128, 4096)).header.slots, 60);
    // Of 32,768 tokens by more.
    let planned = plan(&on_h200(20, 128, 32768));
    let share = (512 + 3) * 20 / 66;
    assert!(
        (share..share + 2).contains(&planned.header.share),
        "{}",
        planned.header.share
    );
    assert!(idle_workers(&planned).len() < 66 - 20 * 3);
}

#[test]
fn the_last_part_takes_what_would_be_too_short_alone() {
    // 9 tiles for 4 workers: parts of 3; with min_part 2 and 7 tiles: 2, 2 and 3.
    for (tiles, expected) in [(9, vec![3, 3, 3]), (7, vec![2, 2, 3])] {
        let mut case = on_h200(1, 128, tiles * TILE);
        case.shape.workers = 4;
        case.shape.split_mode = FM_SPLIT_AUTO;
        case.shape.fixed_cost = 0;
        (case.shape.split_cost, case.shape.own_parts_gain) = (0, 0);
        let planned = plan(&case);
        let lengths: Vec<i32> = tiles_of_workers(&planned).concat();
        assert_eq!(lengths, expected, "{tiles} tiles");
    }
}

/// Parts of a common length would be two of 32 tiles for 48 of 66 workers, where an even share is 24.
#[test]
fn equal_requests_get_no_parts_of_a_common_length() {
    let header = plan(&on_h200(24, 128, 4096)).header;
    assert_eq!((header.merges, header.whole), (24, 0));
    assert!(header.slots > 2 * 24, "{header:?}");
}

/// The same shape for the requests with tokens alone.
fn without_empty(case: &Case) -> Case {
    let mut case = case.clone();
    case.seq_lens.retain(|&len| len > 0);
    case.shape.batch = case.seq_lens.len() as i32;
    case
}

/// Empties the requests that `is_filled` does not say are filled, and those past its end.
fn keep_filled(case: &mut Case, is_filled: &[bool]) {
    for (i, len) in case.seq_lens.iter_mut().enumerate() {
        *len *= i32::from(is_filled.get(i).is_some_and(|&filled| filled));
    }
}

/// Tiles of the parts of every worker, and its number of empty units.
fn parts_and_empty(planned: &Planned) -> Vec<(Vec<i32>, usize)> {
    let split = |items: Vec<i32>| {
        let (parts, empty): (Vec<i32>, Vec<i32>) = items.iter().partition(|&&tiles| tiles > 0);
        (parts, empty.len())
    };
    tiles_of_workers(planned).into_iter().map(split).collect()
}

/// Workers have the parts that they have without the empty requests, and as many of these each, or one more.
fn assert_empty_make_no_difference(case: &Case) {
    let (planned, alone) = (plan(case), plan(&without_empty(case)));
    let (workers, empty) = (planned.shape.workers, case.shape.batch - alone.shape.batch);
    let context = format!("{case:?}");
    let expected = (0..).zip(tiles_of_workers(&alone)).map(|(worker, parts)| {
        let one_more = worker >= workers - empty % workers;
        (parts, (empty / workers + i32::from(one_more)) as usize)
    });
    assert_eq!(
        parts_and_empty(&planned),
        expected.collect::<Vec<_>>(),
        "{context}"
    );
    let (ours, theirs) = (planned.header, alone.header);
    assert_eq!(
        (ours.share, ours.merges, ours.slots, ours.whole),
        (theirs.share, theirs.merges, theirs.slots, 0),
        "{context}"
    );
    assert_eq!(
        (ours.items, ours.units),
        (theirs.items + empty, case.shape.batch),
        "{context}"
    );
}

/// (heads, requests, seq_len, empty requests).
const WITH_EMPTY: [(i32, i32, i32, i32); 9] = [
    (16, 64, 4096, 64),
    (128, 32, 8192, 32),
    (128, 8, 4096, 1),
    (128, 1, 65536, 127),
    (64, 44, 8192, 20),
    (64, 66, 8192, 62),
    (16, 66, 8192, 1),
    (128, 33, 8192, 300),
    (16, 6, 65536, 1000),
];

/// Units that are equal and cut otherwise are told from those with equal parts, so that the test below draws some, and only these.
#[test]
fn equal_parts_are_told_from_others() {
    for (workers, min_part, requests, tiles) in [(67, 6, 3, 17), (20, 7, 1, 17)] {
        let mut case = on_h200(188, 64, tiles * TILE);
        (case.shape.workers, case.shape.min_part) = (workers, min_part);
        keep_filled(&mut case, &vec![true; requests]);
        assert!(!has_equal_parts(&without_empty(&case)));
    }
    assert!(has_equal_parts(&on_h200(32, 64, 8192)));
}

#[test]
fn empty_requests_make_no_difference_to_the_parts_of_others() {
    for (heads, requests, seq_len, empty) in WITH_EMPTY {
        let batch = requests + empty;
        let places: [&dyn Fn(i32) -> bool; 5] = [
            &|i| i < requests,
            &|i| i >= empty,
            &|i| i >= empty / 2 && i < empty / 2 + requests,
            &|i| i < requests / 2 || i >= empty + requests / 2,
            &|i| i * requests / batch < (i + 1) * requests / batch,
        ];
        for is_filled in places {
            let mut case = on_h200(batch, heads, seq_len);
            let empty = (0..batch).filter(|&i| !is_filled(i));
            empty.for_each(|i| case.seq_lens[i as usize] = 0);
            assert_empty_make_no_difference(&case);
        }
    }
}

/// Whether all units, none of which is empty, are cut, and into equal parts. The header says how long such parts are. Cuts at shares
/// may give each worker one part, too, but the first of them is shorter than the share in the header, by the fixed cost; of parts
/// dealt out longest first some worker has two.
fn has_equal_parts(case: &Case) -> bool {
    let planned = plan(case);
    let all_cut = planned.header.merges > 0 && planned.header.merges == case.shape.batch;
    let parts = parts_and_empty(&planned);
    let one_each = parts.iter().all(|(parts, _)| parts.len() <= 1);
    all_cut && one_each && parts[0].0 == [planned.header.share]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(700))]

    #[test]
    fn equal_parts_stay_the_same_wherever_empty_requests_are(
        heads in prop::sample::select(vec![16, 32, 64, 128]),
        is_filled in prop::collection::vec(any::<bool>(), 1..90),
        padding in 0..200usize,
        tiles in 1..200,
        workers in prop_oneof![1 => Just(None), 2 => (2..300).prop_map(Some)],
        min_part in 1..8,
    ) {
        let mut case = on_h200((is_filled.len() + padding) as i32, heads, tiles * TILE);
        case.shape.min_part = min_part;
        case.shape.workers = workers.unwrap_or(case.shape.workers);
        keep_filled(&mut case, &is_filled);
        prop_assume!(has_equal_parts(&without_empty(&case)));
        assert_empty_make_no_difference(&case);
    }
}

proptest! {
    #[test]
    fn empty_requests_do_not_get_short_ones_cut(
        heads in prop::sample::select(vec![16, 32, 64, 128]),
        is_filled in prop::collection::vec(any::<bool>(), 1..40),
        padding in 0..400usize,
        tiles in 1..20,
    ) {
        let mut case = on_h200((is_filled.len() + padding) as i32, heads, tiles * TILE);
        keep_filled(&mut case, &is_filled);
        let alone = plan(&without_empty(&case));
        prop_assume!(alone.header.whole != 0 && 2 * alone.shape.batch <= alone.shape.workers);
        let planned = plan(&case);
        prop_assert_eq!(planned.header.merges, 0);
    }
}

#[test]
fn empty_requests_go_to_all_workers_in_turn_from_the_last() {
    let mut case = on_h200(64 + 8, 16, 4096);
    case.seq_lens[30..38].fill(0);
    let workers = parts_and_empty(&plan(&case));
    assert_eq!(workers.len(), 132);
    for (worker, (parts, empty)) in workers.into_iter().enumerate() {
        let idle = [32, 65, 98, 131].contains(&worker);
        assert_eq!(
            (parts, empty),
            (vec![32; usize::from(!idle)], usize::from(worker >= 124))
        );
    }
}

#[test]
fn one_tile_is_not_empty() {
    let mut case = on_h200(128, 16, 4096);
    case.seq_lens[64..].fill(0);
    case.seq_lens[64] = 1;
    let workers = parts_and_empty(&plan(&case));
    let with_parts = workers.iter().filter(|(parts, _)| !parts.is_empty());
    assert_eq!(with_parts.count(), 64 * 2 + 1);
    assert!(workers.iter().any(|(parts, _)| *parts == [1]));
}

#[test]
fn empty_requests_alone_are_shared_out_evenly() {
    for batch in [1, 66, 67, 1000] {
        let planned = plan(&on_h200(batch, 128, 0));
        assert_eq!((planned.header.items, planned.header.merges), (batch, 0));
        let workers = tiles_of_workers(&planned);
        let most = workers.iter().map(Vec::len).max().unwrap();
        assert!(most <= batch as usize / 66 + 1, "{most} of {batch}");
    }
}
