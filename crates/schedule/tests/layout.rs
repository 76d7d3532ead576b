//! The layout follows from the shape alone, and says no in words.

mod support;

use ferromla_schedule::plan_layout::{FM_SPLIT_FIXED, FM_SPLIT_INVARIANT, FM_SPLIT_REST};
use ferromla_schedule::{PlanError, PlanLayout, PlanShape, PlanView, Strided, layout, plan_into};
use proptest::prelude::*;
use support::cases;
use support::shapes::{RAGGED, SHAPE};

fn capacities(shape: PlanShape) -> (i32, i32, i32) {
    let PlanLayout {
        max_items,
        max_merges,
        max_slots,
        ..
    } = layout(&shape).unwrap();
    (max_items, max_merges, max_slots)
}

#[test]
fn capacities_of_each_mode() {
    assert_eq!(capacities(SHAPE), (23, 3, 6));
    assert_eq!(
        capacities(PlanShape {
            workers: 1,
            ..SHAPE
        }),
        (20, 0, 0)
    );
    let fixed = PlanShape {
        split_mode: FM_SPLIT_FIXED,
        num_splits: 5,
        ..SHAPE
    };
    assert_eq!(capacities(fixed), (100, 20, 100));
    assert_eq!(
        capacities(PlanShape {
            num_splits: 1,
            ..fixed
        }),
        (20, 0, 0)
    );
    assert_eq!(
        capacities(PlanShape {
            max_seq_len: 65,
            ..fixed
        }),
        (40, 20, 40)
    );
    assert_eq!(
        capacities(PlanShape {
            max_seq_len: 0,
            ..fixed
        }),
        (20, 0, 0)
    );
    let invariant = PlanShape {
        split_mode: FM_SPLIT_INVARIANT,
        num_splits: 16,
        part_tiles: 64,
        ..SHAPE
    };
    assert_eq!(capacities(invariant), (60, 20, 60));
    assert_eq!(
        capacities(PlanShape {
            max_seq_len: i32::MAX,
            ..invariant
        }),
        (320, 20, 320)
    );
    assert_eq!(
        capacities(PlanShape {
            max_seq_len: 4096,
            ..invariant
        }),
        (20, 0, 0)
    );
    assert_eq!(capacities(PlanShape { batch: 0, ..SHAPE }), (0, 0, 0));
    assert_eq!(capacities(PlanShape { q_len: 0, ..fixed }), (0, 0, 0));
}

#[test]
fn a_ragged_batch_has_units_for_any_ranges() {
    let units = |batch, q_tokens, group, unit_rows| {
        let shape = PlanShape {
            batch,
            q_tokens,
            group,
            unit_rows,
            ..RAGGED
        };
        let at = layout(&shape).unwrap();
        assert_eq!(at.blocks, 0);
        at.units
    };
    assert_eq!(units(10, 30, 128, 64), 60, "tokens fill their units");
    assert_eq!(units(128, 128, 16, 64), 128, "a token has one unit at most");
    assert_eq!(units(1, 4096, 16, 128), 1024 / 2);
    assert_eq!(
        units(3, 64, 16, 64),
        18,
        "16 units of four tokens, two more to round up three ranges"
    );
    assert_eq!(units(2, 10, 3, 16), 3, "24 and 6 rows; 27 and 3; 15 and 15");
    assert_eq!((units(0, 30, 16, 64), units(10, 0, 16, 64)), (7, 0));
    assert_eq!(capacities(RAGGED), (63, 3, 6));
}

proptest! {
    #[test]
    fn sections_are_aligned_and_do_not_overlap(case in cases()) {
        let PlanLayout { worker_begin, merges, items, unit_start, unit_item, first_unit, bytes, .. } =
            layout(&case.shape).unwrap();
        let at = layout(&case.shape).unwrap();
        let units = i64::from(at.units);
        for (begin, size, next) in [
            (0, 64, worker_begin),
            (worker_begin, (i64::from(case.shape.workers) + 1) * 4, merges),
            (merges, i64::from(at.max_merges) * 112, items),
            (items, i64::from(at.max_items) * 48, unit_start),
            (unit_start, (units + 1) * 8, unit_item),
            (unit_item, (units + 1) * 4, first_unit),
            (first_unit, i64::from(case.shape.ragged) * i64::from(case.shape.batch) * 4, bytes),
        ] {
            prop_assert_eq!(begin % 16, 0);
            prop_assert!((begin + size..begin + size + 16).contains(&next));
        }
    }
}

#[test]
fn fields_out_of_range_are_named() {
    for (shape, message) in [
        (
            PlanShape { batch: -1, ..SHAPE },
            "batch is -1, must be 0 or more",
        ),
        (
            PlanShape { q_len: -2, ..SHAPE },
            "q_len is -2, must be 0 or more",
        ),
        (
            PlanShape { group: 0, ..SHAPE },
            "group is 0, must be 1 or more",
        ),
        (
            PlanShape {
                kv_heads: 0,
                ..SHAPE
            },
            "kv_heads is 0, must be 1 or more",
        ),
        (
            PlanShape { causal: 2, ..SHAPE },
            "causal is 2, must be 0 or 1",
        ),
        (
            PlanShape {
                unit_rows: 0,
                ..SHAPE
            },
            "unit_rows is 0, must be 1 or more",
        ),
        (
            PlanShape {
                workers: 0,
                ..SHAPE
            },
            "workers is 0, must be 1 or more",
        ),
        (
            PlanShape {
                split_mode: 4,
                ..SHAPE
            },
            "split_mode is 4, must be 0 (auto), 1 (fixed), 2 (invariant) or 3 (rest)",
        ),
        (
            PlanShape {
                split_mode: FM_SPLIT_FIXED,
                ..SHAPE
            },
            "num_splits is 0, must be 1 or more",
        ),
        (
            PlanShape {
                max_seq_len: -1,
                ..SHAPE
            },
            "max_seq_len is -1, must be 0 or more",
        ),
        (
            PlanShape {
                fixed_cost: -1,
                ..SHAPE
            },
            "fixed_cost is -1, must be 0 or more",
        ),
        (
            PlanShape {
                split_cost: -1,
                ..SHAPE
            },
            "split_cost is -1, must be 0 or more",
        ),
        (
            PlanShape {
                own_parts_gain: -1,
                ..SHAPE
            },
            "own_parts_gain is -1, must be from 0 to split_cost",
        ),
        (
            PlanShape {
                own_parts_gain: 7,
                ..SHAPE
            },
            "own_parts_gain is 7, must be from 0 to split_cost",
        ),
        (
            PlanShape {
                min_part: 0,
                ..SHAPE
            },
            "min_part is 0, must be 1 or more",
        ),
        (
            PlanShape {
                part_cost: -1,
                ..SHAPE
            },
            "part_cost is -1, must be 0 or more",
        ),
        (
            PlanShape { ragged: 2, ..SHAPE },
            "ragged is 2, must be 0 or 1",
        ),
        (
            PlanShape { ragged: 1, ..SHAPE },
            "q_len is 1, must be 0 where ragged is 1",
        ),
        (
            PlanShape {
                q_tokens: 3,
                ..SHAPE
            },
            "q_tokens is 3, must be 0 where ragged is 0",
        ),
        (
            PlanShape {
                split_mode: FM_SPLIT_REST,
                ..RAGGED
            },
            "split_mode is 3, must be 0, 1 or 2 where ragged is 1",
        ),
        (
            PlanShape {
                q_tokens: -1,
                ..RAGGED
            },
            "q_tokens is -1, must be 0 or more",
        ),
        (
            PlanShape {
                whole_speed: 255,
                ..SHAPE
            },
            "whole_speed is 255, must be from 256 to 65536",
        ),
        (
            PlanShape {
                whole_speed: 65537,
                ..SHAPE
            },
            "whole_speed is 65537, must be from 256 to 65536",
        ),
        (
            PlanShape {
                equal_speed: 255,
                ..SHAPE
            },
            "equal_speed is 255, must be from 256 to 65536",
        ),
        (
            PlanShape {
                equal_split_cost: -1,
                ..SHAPE
            },
            "equal_split_cost is -1, must be 0 or more",
        ),
        (
            PlanShape {
                split_mode: FM_SPLIT_INVARIANT,
                num_splits: 1,
                ..SHAPE
            },
            "part_tiles is 0, must be from 1 to 33554432",
        ),
        (
            PlanShape {
                split_mode: FM_SPLIT_INVARIANT,
                num_splits: 1,
                part_tiles: (1 << 25) + 1,
                ..SHAPE
            },
            "part_tiles is 33554433, must be from 1 to 33554432",
        ),
        (
            PlanShape {
                split_mode: FM_SPLIT_INVARIANT,
                part_tiles: 1,
                ..SHAPE
            },
            "num_splits is 0, must be 1 or more",
        ),
    ] {
        assert_eq!(layout(&shape).unwrap_err().to_string(), message);
    }
}

#[test]
fn shapes_with_stored_steps_are_refused_where_there_is_no_room_for_these() {
    let stored = PlanShape {
        split_mode: FM_SPLIT_INVARIANT,
        num_splits: 16,
        part_tiles: 64,
        steps: 2,
        few_steps: 16,
        few_parts: 1,
        ..SHAPE
    };
    assert!(layout(&stored).is_ok());
    for (shape, message) in [
        (
            PlanShape { steps: 3, ..stored },
            "steps is 3, must be 0, or 1 or 2 where split_mode is 2 and ragged 0",
        ),
        (
            PlanShape {
                part_tiles: 65,
                ..stored
            },
            "part_tiles is 65, must be at most 64 where steps is 2",
        ),
        (
            PlanShape {
                few_steps: 1,
                ..stored
            },
            "few_steps is 1, must be no less than a unit may have steps where steps is 2",
        ),
        (
            PlanShape {
                few_parts: 0,
                ..stored
            },
            "few_parts is 0, must be 0 where few_steps is, else from 2 to 65535, or from 1 where steps is 2",
        ),
        (
            PlanShape { steps: 0, ..stored },
            "few_steps is 16, must be 0, or more where steps is not 0",
        ),
    ] {
        assert_eq!(layout(&shape).unwrap_err().to_string(), message);
    }
}

#[test]
fn counts_beyond_32_bits_are_refused_and_the_largest_are_not() {
    let many = PlanShape {
        batch: i32::MAX,
        group: 1,
        workers: 1,
        ..SHAPE
    };
    assert_eq!(layout(&many).unwrap().units, i32::MAX);
    for (shape, what) in [
        (
            PlanShape {
                kv_heads: 2,
                ..many
            },
            "units",
        ),
        (
            PlanShape {
                kv_heads: i32::MAX,
                q_len: i32::MAX,
                unit_rows: 1,
                ..many
            },
            "units",
        ),
        (PlanShape { workers: 2, ..many }, "items"),
        (
            PlanShape {
                split_mode: FM_SPLIT_FIXED,
                num_splits: 2,
                ..many
            },
            "items",
        ),
        (
            PlanShape {
                workers: i32::MAX,
                batch: 1,
                group: 1,
                ..SHAPE
            },
            "",
        ),
        (
            PlanShape {
                q_len: i32::MAX,
                group: 2,
                ..SHAPE
            },
            "rows",
        ),
    ] {
        match layout(&shape) {
            Err(PlanError::TooLarge { what: found, .. }) => assert_eq!(found, what),
            other => assert!(what.is_empty() && other.is_ok(), "{shape:?}: {other:?}"),
        }
    }
}

#[test]
fn slices_of_the_wrong_length_are_refused() {
    let needed = layout(&SHAPE).unwrap().words();
    let mut words = vec![0; needed];
    let error = plan_into(&SHAPE, [0; 9].as_slice(), None, &mut words).unwrap_err();
    assert_eq!(
        error.to_string(),
        "seq_lens has 9 elements, exactly 10 needed"
    );
    let strided = Strided {
        data: &[0; 18],
        stride: 2,
    };
    let error = plan_into(&SHAPE, strided, None, &mut words).unwrap_err();
    assert_eq!(
        error.to_string(),
        "seq_lens has 18 elements, at least 19 needed"
    );
    let error = plan_into(&SHAPE, [0; 10].as_slice(), None, &mut words[1..]).unwrap_err();
    assert_eq!(
        error,
        PlanError::Length {
            argument: "words",
            len: needed - 1,
            needed,
            rule: "at least"
        }
    );
}

#[test]
fn query_ranges_go_with_ragged_shapes_only() {
    let mut words = vec![
        0;
        layout(&RAGGED)
            .unwrap()
            .words()
            .max(layout(&SHAPE).unwrap().words())
    ];
    let mut plan = |shape, indptr: Option<&[i32]>| {
        plan_into(
            shape,
            [0; 10].as_slice(),
            indptr.map(Into::into),
            &mut words,
        )
        .map_err(|error| error.to_string())
    };
    assert_eq!(
        plan(&RAGGED, None).unwrap_err(),
        "qo_indptr has 0 elements, exactly 11 needed"
    );
    assert_eq!(
        plan(&RAGGED, Some(&[0; 10])).unwrap_err(),
        "qo_indptr has 10 elements, exactly 11 needed"
    );
    assert_eq!(
        plan(&SHAPE, Some(&[0; 11])).unwrap_err(),
        "qo_indptr has 11 elements, exactly 0 needed"
    );
    assert!(plan(&RAGGED, Some(&[0; 11])).is_ok());
}

#[test]
fn a_plan_of_another_shape_is_refused() {
    let mut words = vec![0; layout(&SHAPE).unwrap().words()];
    let unwritten = PlanView::new(&SHAPE, &words).unwrap_err();
    assert!(matches!(
        unwritten,
        PlanError::NotThisPlan {
            field: "version",
            value: 0,
            ..
        }
    ));
    plan_into(&SHAPE, [9000; 10].as_slice(), None, &mut words).unwrap();
    assert!(PlanView::new(&SHAPE, &words).is_ok());
    let other = PlanShape {
        workers: 3,
        ..SHAPE
    };
    assert!(matches!(
        PlanView::new(&other, &words),
        Err(PlanError::NotThisPlan {
            field: "worker_begin",
            ..
        })
    ));
    let smaller = PlanShape { batch: 2, ..SHAPE };
    assert!(matches!(
        PlanView::new(&smaller, &words),
        Err(PlanError::NotThisPlan { field: "items", .. })
    ));
}
