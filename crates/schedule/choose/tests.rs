//! Pins how named workloads are laid out on an H200 (132 streaming multiprocessors, 66, 30, 15 or 7 clusters): a change of these numbers
//! is a change of speed, and must be meant.

use super::*;

mod workloads;
use workloads::*;

const GPU: Target = Target::Gpu {
    sm_count: 132,
    clusters: [66, 30, 15, 7],
    memory: 4814,
};

fn problem((batch, group, queries): Batch, split: Split) -> Problem {
    Problem {
        batch,
        queries,
        group,
        kv_heads: 1,
        keys: Keys::Pages,
        causal: true,
        max_seq_len: 1 << 20,
        split,
        target: GPU,
    }
}

fn bounded(keys: Keys, batch: Batch, max_seq_len: i32) -> Problem {
    Problem {
        keys,
        max_seq_len,
        ..problem(batch, Split::Auto)
    }
}

fn layout_of(problem: &Problem) -> Layout {
    let choice = choose(problem);
    assert_eq!(choice.unit_rows, choice.rows * choice.team);
    let units = layout(&problem.shape_of(&choice)).unwrap().units;
    (
        choice.rows,
        choice.team,
        choice.splits,
        choice.workers,
        units,
    )
}

/// Layouts that differ from those expected.
fn assert_layouts<'a>(of: impl IntoIterator<Item = (&'a str, Problem, Layout)>) {
    let wrong: Vec<_> = of
        .into_iter()
        .map(|(name, problem, expected)| {
            (
                name,
                problem.split,
                problem.keys,
                layout_of(&problem),
                expected,
            )
        })
        .filter(|(.., layout, expected)| layout != expected)
        .collect();
    assert!(
        wrong.is_empty(),
        "name, split, keys, layout, expected: {wrong:#?}"
    );
}

#[test]
fn named_workloads_keep_their_layout() {
    for (keys, workloads) in [(Keys::Pages, WORKLOADS), (Keys::Mixed, MIXED_WORKLOADS)] {
        let of = |batch, split| Problem {
            keys,
            ..problem(batch, split)
        };
        assert_layouts(
            workloads
                .iter()
                .map(|&(name, batch, layout)| (name, of(batch, Split::Auto), layout)),
        );
        // As many CTAs as there are, where parts are fixed.
        assert_layouts(workloads.iter().map(
            |&(name, batch, (rows, team, splits, workers, units))| {
                let workers = if workers == 128 { 132 } else { workers };
                (
                    name,
                    of(batch, Split::Fixed(3)),
                    (rows, team, splits, workers, units),
                )
            },
        ));
    }
}

#[test]
fn little_work_goes_to_ctas_of_16_rows_unless_parts_are_fixed() {
    for &(name, batch, max_seq_len, _) in LITTLE_WORK.iter().chain(LITTLE_WORK_OF_PAGES) {
        for keys in [
            Keys::Pages,
            Keys::Rows,
            Keys::Codes,
            Keys::ScaledCodes,
            Keys::Mixed,
        ] {
            for split in [Split::Fixed(2), Split::INVARIANT, Split::Never] {
                let problem = Problem {
                    keys,
                    max_seq_len,
                    ..problem(batch, split)
                };
                assert_eq!(choose(&problem).rows == 16, batch.1 <= 16, "{name}");
            }
        }
    }
    assert_layouts(
        LITTLE_WORK
            .iter()
            .map(|&(name, batch, max_seq_len, layout)| {
                (name, bounded(Keys::Mixed, batch, max_seq_len), layout)
            }),
    );
    assert_layouts(
        LITTLE_WORK_OF_PAGES
            .iter()
            .map(|&(name, batch, max_seq_len, layout)| {
                (name, bounded(Keys::Pages, batch, max_seq_len), layout)
            }),
    );
}

#[test]
fn keys_whose_times_are_known_get_the_layout_that_takes_least() {
    assert_layouts(
        KNOWN_TIMES
            .iter()
            .map(|&(name, keys, batch, max_seq_len, layout)| {
                (name, bounded(keys, batch, max_seq_len), layout)
            }),
    );
}

#[test]
fn requests_of_a_token_have_one_layout_whether_ragged_or_not() {
    for keys in [Keys::Pages, Keys::Codes, Keys::ScaledCodes, Keys::Rows] {
        for batch in [1, 3, 8, 24, 64, 200] {
            for max_seq_len in [64, 512, 2048, 8192, 1 << 20] {
                let of = |queries| layout_of(&bounded(keys, (batch, 16, queries), max_seq_len));
                assert_eq!(
                    of(all(batch)),
                    of(each(1)),
                    "{keys:?} {batch} {max_seq_len}"
                );
            }
        }
    }
}

#[test]
fn requests_that_are_few_keep_ctas_of_32_rows_where_parts_are_fixed() {
    let fixed = problem((32, 32, each(1)), Split::Fixed(3));
    assert_eq!(layout_of(&fixed), (32, 1, 1, 132, 32));
}

#[test]
fn mixed_caches_have_no_cta_of_32_rows_and_64_wherever_16_are_too_few() {
    for split in [Split::Auto, Split::Fixed(2), Split::INVARIANT, Split::Never] {
        for batch in [0, 1, 7, 64, 500] {
            for group in 1..=130 {
                for queries in [each(1), each(2), lists(3), all(batch), all(3 * batch)] {
                    let one = problem((batch, group, queries), split);
                    let mixed = choose(&Problem {
                        keys: Keys::Mixed,
                        ..one
                    });
                    let one = choose(&one);
                    assert_ne!(mixed.rows, 32);
                    // Of one kind fewer rows may be known to take less, but for parts that are fixed.
                    if split == Split::Auto && one.rows < mixed.rows {
                        assert_eq!(mixed.splits, 1);
                    } else if split == Split::INVARIANT && one.rows == 16 {
                        assert_eq!((mixed.rows, mixed.team, mixed.splits), (16, 1, 2));
                    } else if one.rows == 32 {
                        assert_eq!((mixed.rows, mixed.team, mixed.splits), (64, 1, 1));
                        assert_eq!((mixed.workers, mixed.whole_speed), (132, 256));
                    } else if !matches!(queries, Queries::Sparse { .. }) {
                        // Pages go faster by CTAs of 64 rows that share no tile, and what equal units cost is of pages.
                        let whole_speed = if one.rows == 64 {
                            mixed.whole_speed
                        } else {
                            one.whole_speed
                        };
                        assert_eq!(
                            mixed,
                            Choice {
                                whole_speed,
                                equal_speed: mixed.equal_speed,
                                equal_split_cost: mixed.equal_split_cost,
                                ..one
                            }
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn plans_without_units_have_a_worker() {
    for keys in [
        Keys::Pages,
        Keys::Codes,
        Keys::ScaledCodes,
        Keys::Rows,
        Keys::Mixed,
    ] {
        for queries in [each(1), each(2), listed(128, 0), all(0)] {
            for max_seq_len in [0, 64, 1024, 1 << 20] {
                let none = bounded(keys, (0, 16, queries), max_seq_len);
                assert!(choose(&none).workers >= 1, "{none:?}");
            }
        }
    }
}

#[test]
fn an_invariant_layout_of_mixed_caches_depends_on_no_other_request() {
    for (group, layout) in [(16, (16, 2)), (17, (64, 1)), (32, (64, 1)), (128, (64, 1))] {
        for batch in [1, 500] {
            let mixed = Problem {
                keys: Keys::Mixed,
                ..problem((batch, group, each(1)), Split::INVARIANT)
            };
            assert_eq!((choose(&mixed).rows, choose(&mixed).splits), layout);
        }
    }
}

#[test]
fn costs_grow_with_the_ctas_that_share_an_item() {
    let costs = |batch, max_seq_len| {
        let choice = choose(&bounded(Keys::Pages, batch, max_seq_len));
        (
            choice.fixed_cost,
            choice.split_cost,
            choice.min_part,
            choice.whole_speed,
        )
    };
    assert_eq!(costs((128, 128, each(1)), 8192), (3, 10, 2, 256));
    assert_eq!(costs((128, 16, each(1)), 8192), (3, 8, 1, 384));
    assert_eq!(costs((128, 32, each(1)), 8192), (3, 8, 1, 384));
    assert_eq!(costs((24, 16, each(1)), 1024), (12, 32, 4, 384));
    assert_eq!(costs((12, 16, each(1)), 1024), (24, 64, 8, 384));
    assert_eq!(costs((64, 16, all(2111)), 8192), (3, 10, 2, 288));
    assert_eq!(costs((64, 8, all(512)), 8192), (3, 10, 2, 368));
}

#[test]
fn tiles_of_codes_take_less_time_and_units_more_of_them() {
    let fixed = |group, queries| {
        choose(&Problem {
            keys: Keys::Codes,
            ..problem((200, group, queries), Split::Auto)
        })
        .fixed_cost
    };
    assert_eq!(
        [16, 32, 64, 128].map(|group| fixed(group, each(1))),
        [6, 6, 4, 3]
    );
    assert_eq!(
        [16, 32, 64, 128].map(|group| fixed(group, lists(1))),
        [3; 4]
    );
}

#[test]
fn lists_of_few_rows_are_cut_for_less() {
    let split = |batch, group, queries| {
        let choice = choose(&Problem {
            keys: Keys::Codes,
            ..problem((batch, group, queries), Split::Auto)
        });
        (choice.rows, choice.splits, choice.split_cost)
    };
    assert_eq!(split(72, 16, lists(1)), (16, 1, 8));
    assert_eq!(split(48, 16, lists(1)), (16, 2, 16));
    assert_eq!(split(128, 64, lists(1)), (64, 1, 10));
}

#[test]
fn many_ragged_requests_of_which_none_has_more_tokens_than_others_are_laid_out_as_uniform_ones() {
    for (batch, q_len, group) in [(67, 1, 128), (100, 3, 64), (40, 4, 128), (3, 700, 16)] {
        for keys in [Keys::Pages, Keys::Codes, Keys::ScaledCodes] {
            let of = |queries| choose(&bounded(keys, (batch, group, queries), 4096));
            let tokens = batch * q_len;
            let up_to = |most| {
                let most = Some(most);
                of(Queries::Ragged { tokens, most })
            };
            assert_eq!(up_to(q_len), of(Queries::Uniform { q_len }));
            assert!(q_len == 1 || up_to(2 * q_len) != up_to(q_len));
        }
    }
}

#[test]
fn teams_of_few_requests_are_smaller_where_more_parts_find_place() {
    let team = |batch, q_len, max_seq_len| {
        let choice = choose(&bounded(Keys::Pages, (batch, 64, each(q_len)), max_seq_len));
        assert_eq!(choice.rows, FM_TILE_ROWS);
        choice.team
    };
    // 3 units of 63 tiles on 16 teams of 8: four parts each; 6 on 33 of 4: five.
    assert_eq!(team(3, 8, 4000), 4);
    assert_eq!(team(12, 3, 1000), 1);
    // As many parts with either.
    assert_eq!(team(8, 8, 1000), 8);
    // Most multiprocessors have a block: reading tiles once counts for more.
    assert_eq!(team(100, 3, 4000), 3);
    assert_eq!(team(13, 8, 3500), 8);
}

#[test]
fn an_invariant_layout_depends_on_no_other_request() {
    for group in [16, 32, 128] {
        let choice = |batch, queries| {
            let problem = problem((batch, group, queries), Split::INVARIANT);
            let (choice, shape) = (choose(&problem), problem.shape().unwrap());
            let parts = (shape.part_tiles, shape.num_splits, shape.steps);
            (choice.rows, choice.team, choice.splits, parts)
        };
        assert_eq!(choice(1, each(1)), choice(500, each(1)));
        assert_eq!(choice(1, lists(1)), choice(500, lists(1)));
        for tokens in [0, 1, 7, 128, 32768] {
            assert_eq!(choice(7, all(tokens)), (64, 1, 1, (64, 16, 0)));
        }
    }
}

#[test]
fn invariant_layouts_of_given_parts_are_single_ctas_or_teams() {
    let parts = |parts| Split::Invariant { parts: Some(parts) };
    for keys in [Keys::Pages, Keys::Rows, Keys::ScaledCodes, Keys::Mixed] {
        for (group, rows, team) in [(16, 16, 1), (32, 32, 1), (64, 64, 1), (128, 64, 2)] {
            for queries in [each(1), lists(1)] {
                for batch in [1, 9, 500] {
                    let problem = Problem {
                        keys,
                        ..problem((batch, group, queries), parts(7))
                    };
                    let (choice, shape) = (choose(&problem), problem.shape().unwrap());
                    let rows = if keys == Keys::Mixed && rows == 32 {
                        64
                    } else {
                        rows
                    };
                    assert_eq!((choice.rows, choice.team, choice.splits), (rows, team, 1));
                    let cut = (shape.split_mode, shape.num_splits, shape.steps);
                    assert_eq!(cut, (FM_SPLIT_FIXED, 7, 0));
                }
            }
        }
    }
    let most = problem((3, 16, each(1)), parts(i32::MAX)).shape();
    assert_eq!(most.unwrap().num_splits, FM_MAX_PARTS);
}

#[test]
fn invariant_parts_are_as_long_as_pays_for_those_who_share_them() {
    let parts = |keys, group| {
        let problem = Problem {
            keys,
            ..problem((3, group, each(1)), Split::INVARIANT)
        };
        let shape = problem.shape().unwrap();
        (choose(&problem).splits, shape.part_tiles, shape.num_splits)
    };
    assert_eq!(parts(Keys::Pages, 16), (1, 48, 64));
    assert_eq!(parts(Keys::Pages, 32), (1, 48, 32));
    assert_eq!(parts(Keys::Rows, 32), (1, 48, 32));
    assert_eq!(parts(Keys::Mixed, 16), (2, 64, 64));
    assert_eq!(parts(Keys::Codes, 16), (2, 96, 64));
    assert_eq!(parts(Keys::ScaledCodes, 32), (2, 96, 32));
    assert_eq!(parts(Keys::Pages, 33), (1, 64, 16));
}

#[test]
fn units_are_cut_into_steps_where_few_steps_are_left_to_each_multiprocessor() {
    let steps = |keys, batch, group| {
        let problem = Problem {
            keys,
            ..problem((batch, group, each(1)), Split::INVARIANT)
        };
        let shape = problem.shape().unwrap();
        (shape.steps, shape.few_steps, shape.few_parts)
    };
    assert_eq!(steps(Keys::Pages, 1, 16), (1, 528, 132));
    assert_eq!(steps(Keys::Pages, 1, 32), (1, 396, 132));
    assert_eq!(steps(Keys::Rows, 8, 16), (1, 64, 16));
    assert_eq!(steps(Keys::Pages, 66, 16), (1, 8, 2));
    assert_eq!(steps(Keys::Pages, 67, 16), (1, 0, 0));
    // Of 64 rows each is stored, and there are up to 16.
    assert_eq!(steps(Keys::Pages, 1, 64), (2, 16, 132));
    assert_eq!(steps(Keys::Rows, 8, 48), (2, 16, 16));
    assert_eq!(steps(Keys::Pages, 8, 128), (0, 0, 0));
    assert_eq!(steps(Keys::Pages, 67, 64), (2, 16, 1));
    let cpu = Problem {
        target: Target::Cpu { threads: 16 },
        ..problem((1, 64, each(1)), Split::INVARIANT)
    };
    assert_eq!(cpu.shape().unwrap().steps, 0);
    assert_eq!(steps(Keys::Codes, 1, 16), (0, 0, 0));
    assert_eq!(steps(Keys::Mixed, 1, 16), (0, 0, 0));
}

#[test]
fn kv_heads_are_units_too() {
    let of = |kv_heads| {
        let heads = Problem {
            kv_heads,
            ..bounded(Keys::Pages, (8, 16, each(1)), 1024)
        };
        choose(&heads).splits
    };
    assert_eq!([1, 2, 3, 5, 6, 9].map(of), [8, 1, 4, 1, 2, 1]);
}

#[test]
fn the_cpu_takes_tiles_of_64_rows_one_by_one() {
    let cpu = Problem {
        target: Target::Cpu { threads: 16 },
        ..problem((4, 16, each(1)), Split::Auto)
    };
    assert_eq!(layout_of(&cpu), (64, 1, 1, 64, 4));
    assert_eq!(choose(&cpu).whole_speed, 256);
}
