//! Which kernel plans a shape on the device, by how many threads.

mod support;

use ferromla_schedule::plan_layout::{FM_SPLIT_FIXED, FM_SPLIT_INVARIANT};
use ferromla_schedule::{PlanShape, PlannerKernel, layout};
use support::shapes::{RAGGED, SHAPE};

#[test]
fn the_device_planner_has_a_thread_for_each_unit_request_and_cut() {
    let launch = |shape: PlanShape| layout(&shape).unwrap().planner(&shape);
    let threads = |shape: PlanShape| {
        assert_ne!(launch(shape).kernel, PlannerKernel::Cluster);
        launch(shape).threads
    };
    assert_eq!(threads(SHAPE), 32);
    assert_eq!(
        threads(PlanShape {
            workers: 132,
            ..SHAPE
        }),
        160
    );
    assert_eq!(
        threads(PlanShape {
            batch: 250,
            workers: 200,
            ..SHAPE
        }),
        512
    );
    assert_eq!(
        threads(PlanShape {
            batch: 20_000,
            ..SHAPE
        }),
        1024
    );
    assert_eq!(
        threads(PlanShape {
            batch: 500,
            workers: 200,
            ..RAGGED
        }),
        512
    );
    assert_eq!(
        threads(PlanShape {
            workers: i32::MAX - 99,
            ..RAGGED
        }),
        1024
    );
}

#[test]
fn a_cluster_plans_many_units() {
    use PlannerKernel::{ByCount, Cluster, Few, Many};
    let launch = |shape: PlanShape| {
        let launch = layout(&shape).unwrap().planner(&shape);
        (launch.cluster, launch.threads, launch.kernel)
    };
    let uniform = |batch| PlanShape {
        batch,
        group: 16,
        workers: 132,
        ..SHAPE
    };
    assert_eq!(launch(uniform(384)), (1, 384, Few));
    // Three to a worker and fewer may be equal.
    assert_eq!(launch(uniform(385)), (1, 416, Many));
    assert_eq!(launch(uniform(396)), (1, 416, Many));
    assert_eq!(launch(uniform(397)), (8, 256, Cluster));
    assert_eq!(launch(uniform(16_384)), (8, 256, Cluster));
    assert_eq!(launch(uniform(16_385)), (1, 1024, Many));
    let ragged = |batch, q_tokens| PlanShape {
        batch,
        q_tokens,
        group: 16,
        workers: 132,
        ..RAGGED
    };
    assert_eq!(launch(ragged(396, 396)), (1, 416, Many));
    assert_eq!(launch(ragged(397, 397)), (8, 256, Cluster));
    assert_eq!(launch(ragged(397, 300)), (1, 416, Many));
    assert_eq!(launch(ragged(8, 4096)), (8, 256, Cluster));
    // A chunk may be among them: a thread for each unit.
    let wide = |batch, q_tokens| PlanShape {
        group: 128,
        workers: 66,
        unit_rows: 128,
        ..ragged(batch, q_tokens)
    };
    assert_eq!(launch(wide(200, 600)), (8, 256, Cluster));
    assert_eq!(launch(wide(200, 700)), (1, 704, Few));
    assert_eq!(launch(wide(200, 800)), (8, 256, Cluster));
    let other = |shape: PlanShape| {
        launch(PlanShape {
            batch: 5000,
            ..shape
        })
        .2
    };
    assert_eq!(
        other(PlanShape {
            workers: 256,
            ..uniform(1)
        }),
        Many
    );
    assert_eq!(
        other(PlanShape {
            kv_heads: 2,
            ..uniform(1)
        }),
        Many
    );
    assert_eq!(
        other(PlanShape {
            split_mode: FM_SPLIT_INVARIANT,
            num_splits: 16,
            part_tiles: 64,
            ..uniform(1)
        }),
        ByCount
    );
}

#[test]
fn units_whose_parts_the_mode_fixes_have_two_threads_each_or_several_blocks() {
    use PlannerKernel::{ByCount, OnePart};
    let launch = |batch, num_splits| {
        let shape = PlanShape {
            batch,
            group: 16,
            split_mode: FM_SPLIT_FIXED,
            num_splits,
            ..SHAPE
        };
        let launch = layout(&shape).unwrap().planner(&shape);
        (launch.blocks, launch.threads, launch.kernel)
    };
    assert_eq!(launch(1, 1), (1, 32, ByCount));
    assert_eq!(launch(256, 1), (1, 512, ByCount));
    assert_eq!(launch(512, 1), (1, 1024, ByCount));
    assert_eq!(launch(513, 1), (1 + 3, 256, OnePart));
    assert_eq!(launch(4096, 1), (1 + 8, 512, OnePart));
    assert_eq!(launch(1 << 20, 1), (1 + 256, 1024, OnePart));
    assert_eq!(launch(4096, 2), (1, 1024, ByCount));
    assert_eq!(launch(1 << 20, 2), (1, 1024, ByCount));
}
