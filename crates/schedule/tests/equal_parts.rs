//! Equal requests that are cut get equal parts, one to a worker: no worker has two short ones to load queries for.

mod support;

use ferromla_schedule::plan_layout::FM_SPLIT_AUTO;
use ferromla_schedule::{Problem, Queries, Split, Target};
use support::{Case, Planned, plan};

const TILE: i32 = 64;

fn on_h200(batch: i32, heads: i32, seq_len: i32) -> Case {
    let problem = Problem {
        mixed: false,
        batch,
        queries: Queries::Uniform { q_len: 1 },
        group: heads,
        kv_heads: 1,
        causal: true,
        max_seq_len: 1 << 20,
        split: Split::Auto,
        target: Target::Gpu {
            sm_count: 132,
            clusters: [66, 30, 15],
        },
    };
    Case {
        shape: problem.shape().unwrap(),
        seq_lens: vec![seq_len; batch as usize],
        qo_indptr: Vec::new(),
    }
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
    ((32, 16, 8192), (4, 32)),
];

#[test]
fn a_worker_has_one_part_of_a_named_workload() {
    for ((batch, heads, seq_len), (parts, tiles)) in WORKLOADS {
        let planned = plan(&on_h200(batch, heads, seq_len));
        let mut expected = vec![vec![tiles]; parts * batch as usize];
        expected.resize(planned.shape.workers as usize, vec![]);
        assert_eq!(
            tiles_of_workers(&planned),
            expected,
            "batch {batch}, {heads} heads, {seq_len} tokens"
        );
        assert_eq!(planned.header.merges, batch);
    }
}

#[test]
fn requests_that_share_out_evenly_stay_whole() {
    assert_eq!(plan(&on_h200(64, 128, 1024)).header.whole, 1);
}

#[test]
fn equal_parts_that_leave_too_many_workers_idle_are_not_taken() {
    // 66 workers for 20 units: three parts of 22 tiles are longer than what cuts at even shares leave.
    let planned = plan(&on_h200(20, 128, 4096));
    assert!(planned.header.share < 22);
    assert!(
        tiles_of_workers(&planned)
            .iter()
            .all(|items| !items.is_empty())
    );
}

#[test]
fn one_longer_request_is_enough_to_cut_at_shares() {
    let mut case = on_h200(32, 128, 8192);
    case.seq_lens[31] += TILE;
    let tiles = tiles_of_workers(&plan(&case));
    assert!(tiles.iter().any(|items| items.len() > 1));
}

#[test]
fn the_last_part_takes_what_would_be_too_short_alone() {
    // 9 tiles for 4 workers: parts of 3; with min_part 2 and 7 tiles: 2, 2 and 3.
    for (tiles, expected) in [(9, vec![3, 3, 3]), (7, vec![2, 2, 3])] {
        let mut case = on_h200(1, 128, tiles * TILE);
        case.shape.workers = 4;
        case.shape.split_mode = FM_SPLIT_AUTO;
        case.shape.split_cost = 0;
        let planned = plan(&case);
        let lengths: Vec<i32> = tiles_of_workers(&planned).concat();
        assert_eq!(lengths, expected, "{tiles} tiles");
    }
}
