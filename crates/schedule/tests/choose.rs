//! What a choice is like at the edges; `choose/tests.rs` pins it for named workloads.

use ferromla_schedule::{
    Keys, PlanError, PlanHeader, PlanShape, PlanView, Problem, Queries, Split, Target, choose,
    layout, plan_into,
};
use proptest::prelude::*;

const PROBLEM: Problem = Problem {
    batch: 1 << 20,
    queries: Queries::Uniform { q_len: 1 << 12 },
    group: 128,
    kv_heads: 4,
    keys: Keys::Pages,
    causal: true,
    max_seq_len: 4096,
    split: Split::Fixed(4),
    target: Target::Gpu {
        sm_count: 132,
        clusters: [66, 30, 15, 7],
        memory: 4814,
    },
};

#[test]
fn small_gpus_and_any_cpu_have_a_worker() {
    let small = choose(&Problem {
        target: Target::Gpu {
            sm_count: 3,
            clusters: [1, 0, 0, 0],
            memory: 0,
        },
        queries: Queries::Uniform { q_len: 4 },
        ..PROBLEM
    });
    assert_eq!((small.team, small.unit_rows, small.workers), (8, 512, 1));
    let cpu = |threads| {
        let target = Target::Cpu { threads };
        choose(&Problem { target, ..PROBLEM })
    };
    assert_eq!((cpu(2).team, cpu(2).unit_rows, cpu(2).workers), (1, 64, 8));
    assert_eq!(cpu(0).workers, 1);
    assert_eq!(cpu(i32::MAX).workers, i32::MAX);
}

const H200: Target = PROBLEM.target;

/// As many multiprocessors as an H200 has, with another memory.
fn with_memory(memory: i32) -> Target {
    Target::Gpu {
        sm_count: 132,
        clusters: [66, 30, 15, 7],
        memory,
    }
}

/// Requests of one query token, of any number of keys.
fn decodes(batch: i32, group: i32) -> Problem {
    Problem {
        batch,
        group,
        kv_heads: 1,
        queries: Queries::Uniform { q_len: 1 },
        split: Split::Auto,
        ..PROBLEM
    }
}

/// Of requests of so many tokens.
fn header_of(shape: &PlanShape, tokens: i32) -> PlanHeader {
    let mut words = vec![0; layout(shape).unwrap().words()];
    let lens = vec![tokens; shape.batch as usize];
    plan_into(shape, lens.as_slice(), None, &mut words).unwrap()
}

#[test]
fn fewer_sms_have_fewer_clusters_and_cpus_no_limit() {
    let gpu = |sm_count, clusters| Target::Gpu {
        sm_count,
        clusters,
        memory: 4814,
    };
    assert_eq!(H200.at_most(None), H200);
    assert_eq!(H200.at_most(Some(1 << 40)), H200);
    assert_eq!(H200.at_most(Some(78)), gpu(78, [39, 19, 9, 4]));
    assert_eq!(H200.at_most(Some(128)), gpu(128, [64, 30, 15, 7]));
    let cpu = Target::Cpu { threads: 5 };
    assert_eq!(cpu.at_most(Some(2)), cpu);
}

/// What memory limits keeps as busy with fewer SMs, of which nobody can go faster than that.
#[test]
fn whole_units_go_faster_than_their_share_only_with_many_sms() {
    let speeds = |group, keys| {
        [132, 120, 96, 78].map(|most| {
            choose(&Problem {
                keys,
                target: H200.at_most(Some(most)),
                ..decodes(128, group)
            })
            .whole_speed
        })
    };
    assert_eq!(speeds(16, Keys::Pages), [384, 349, 279, 256]);
    assert_eq!(speeds(64, Keys::Pages), [368, 334, 267, 256]);
    assert_eq!(speeds(128, Keys::Pages), [256; 4]);
}

/// A share of an H100's memory is less of what a CTA can take. Of units that differ nothing changes.
#[test]
fn equal_units_go_faster_than_their_share_by_more_where_memory_is_slower() {
    let of = |group, keys, memory| {
        let choice = choose(&Problem {
            keys,
            target: with_memory(memory),
            max_seq_len: 1 << 20, // so that rows are those of a request
            ..decodes(72, group)
        });
        (choice.equal_speed, choice.whole_speed)
    };
    for (group, keys, h200, h100, whole_speed) in [
        (16, Keys::Pages, 384, 460, 384),
        (32, Keys::Pages, 358, 460, 384),
        (64, Keys::Pages, 368, 460, 368),
        (128, Keys::Pages, 256, 312, 256),
        (256, Keys::Pages, 256, 256, 256),
        (128, Keys::Rows, 256, 312, 256),
        (16, Keys::Codes, 256, 351, 308),
        (64, Keys::Codes, 256, 256, 256),
    ] {
        for (memory, equal_speed) in [(4814, h200), (0, h200), (3352, h100)] {
            let expected = (equal_speed, whole_speed);
            assert_eq!(of(group, keys, memory), expected, "{group} {keys:?}");
        }
    }
}

/// Blocks of fewer rows, more than multiprocessors, would each read their list anew.
#[test]
fn rows_of_a_list_that_one_unit_holds_are_not_taken_by_turns() {
    for memory in [4814, 3352] {
        for (group, rows) in [(32, 32), (64, 64), (128, 64)] {
            for (batch, topk) in (136..400).flat_map(|batch| [(batch, 512), (batch, 2048)]) {
                let queries = Queries::Sparse {
                    q_len: 1,
                    topk,
                    extra_topk: 0,
                };
                let lists = Problem {
                    keys: Keys::Rows,
                    target: with_memory(memory),
                    queries,
                    ..decodes(batch, group)
                };
                assert!(choose(&lists).rows >= rows, "{lists:?}");
            }
        }
    }
}

/// 72 of 4,096 tokens with 64 heads: an H100 gives 72 CTAs all that it reads.
#[test]
fn whole_ones_are_as_good_as_cuts_where_memory_is_slower() {
    let merges = |memory| {
        let problem = Problem {
            max_seq_len: 4096,
            target: with_memory(memory),
            ..decodes(72, 64)
        };
        header_of(&problem.shape().unwrap(), 4096).merges
    };
    assert_eq!([4814, 3352].map(merges), [72, 0]);
}

#[test]
fn a_problem_beyond_the_words_of_a_plan_is_refused_by_name() {
    assert!(matches!(
        PROBLEM.shape(),
        Err(PlanError::TooLarge { what: "units", .. })
    ));
    for queries in [
        Queries::Uniform { q_len: i32::MAX },
        Queries::Ragged {
            tokens: i32::MAX,
            most: Some(i32::MAX),
        },
    ] {
        let error = Problem { queries, ..PROBLEM }.shape().unwrap_err();
        assert_eq!(
            error.to_string(),
            "the shape needs 274877906816 rows, at most 2147483647 fit a plan"
        );
    }
}

#[test]
fn a_problem_with_fields_out_of_range_is_refused_not_a_panic() {
    for problem in [
        Problem {
            group: 0,
            ..PROBLEM
        },
        Problem {
            group: i32::MIN,
            ..PROBLEM
        },
        Problem {
            batch: i32::MIN,
            ..PROBLEM
        },
        Problem {
            queries: Queries::Uniform { q_len: i32::MIN },
            ..PROBLEM
        },
        Problem {
            queries: Queries::Ragged {
                tokens: i32::MIN,
                most: Some(i32::MIN),
            },
            ..PROBLEM
        },
    ] {
        assert!(
            matches!(problem.shape(), Err(PlanError::Field { .. })),
            "{problem:?}"
        );
    }
}

/// How much faster than its share of the GPU a CTA of 16 or 32 rows can go over pages, in 256ths: where units differ, and where they are equal.
const SPEED_OF_FEW_ROWS: i32 = 384;
const EQUAL_SPEEDS_OF_FEW_ROWS: [i32; 2] = [384, 358];

/// Requests of the greatest length have no more parts with all workers.
#[test]
fn workers_that_are_left_out_would_have_had_nothing() {
    for group in [16, 32, 64, 128] {
        for batch in 1..40 {
            for max_seq_len in (1..300).map(|tiles| tiles * 64) {
                let problem = Problem {
                    max_seq_len,
                    ..decodes(batch, group)
                };
                let choice = choose(&problem);
                let all = [132, 66, 30, 15, 7][choice.team.max(choice.splits).ilog2() as usize];
                let shape = problem.shape().unwrap();
                let header = |workers| {
                    // All of them go faster than their share by more than those that are not left out.
                    let few_rows = choice.rows < 64 && workers == all;
                    let whole_speed = if few_rows {
                        SPEED_OF_FEW_ROWS
                    } else {
                        shape.whole_speed
                    };
                    let equal_speed = if few_rows {
                        EQUAL_SPEEDS_OF_FEW_ROWS[choice.rows as usize / 32]
                    } else {
                        shape.equal_speed
                    };
                    let shape = PlanShape {
                        workers,
                        whole_speed,
                        equal_speed,
                        ..shape
                    };
                    header_of(&shape, max_seq_len)
                };
                // Whole is what all of them would not take for fair by shares that are shorter than a part can be.
                let whole = header(choice.workers).merges == 0;
                let enough = choice.workers == all || header(all).items <= choice.workers;
                assert!(whole || enough, "{problem:?} {choice:?}");
                let alone = choice.workers == 1 && choice.splits == 1;
                assert!(!alone || max_seq_len == 64, "{problem:?} {choice:?}");
            }
        }
    }
}

/// No unit is cut, and no worker has two.
fn assert_one_whole_unit_each(problem: &Problem, lens: &[i32], qo_indptr: Option<&Vec<i32>>) {
    let shape = problem.shape().unwrap();
    let mut words = vec![0; layout(&shape).unwrap().words()];
    let qo_indptr = qo_indptr.map(|indptr| indptr.as_slice().into());
    let header = plan_into(&shape, lens, qo_indptr, &mut words).unwrap();
    assert_eq!((header.merges, header.slots), (0, 0));
    let plan = PlanView::new(&shape, &words).unwrap();
    assert!((0..plan.workers()).all(|worker| plan.worker(worker).len() <= 1));
}

proptest! {
    // A merge has words for the CTAs of clusters of up to 8.
    #[test]
    fn clusters_of_short_units_have_one_each_and_cut_none(
        seq_lens in prop::collection::vec(0..1200i32, 1..8),
        max_seq_len in 1..1025i32,
        group in 1..17i32,
        ragged in any::<bool>(),
    ) {
        let batch = seq_lens.len() as i32;
        let queries = match ragged {
            true => Queries::Ragged { tokens: batch, most: None },
            false => Queries::Uniform { q_len: 1 },
        };
        let split = Split::Auto;
        let problem = Problem { batch, queries, group, kv_heads: 1, max_seq_len, split, ..PROBLEM };
        let choice = choose(&problem);
        prop_assert!(ragged || (choice.splits >= 8) == (max_seq_len > 256));
        let qo_indptr: Vec<i32> = (0..=batch).collect();
        if choice.splits > 1 {
            assert_one_whole_unit_each(&problem, &seq_lens, ragged.then_some(&qo_indptr));
        }
    }

    #[test]
    fn no_more_ctas_than_sms_and_clusters_for_which_there_are_kernels(
        (batch, group, kv_heads) in (0..300i32, 1..200i32, 1..3i32),
        (tokens, kind) in (1..20i32, 0..3),
        max_seq_len in prop_oneof![0..2000i32, 0..200_000i32],
        keys in prop::sample::select(vec![Keys::Pages, Keys::Rows, Keys::Codes, Keys::ScaledCodes, Keys::Mixed]),
        split in prop::sample::select(vec![Split::Auto, Split::Fixed(3), Split::INVARIANT, Split::Invariant { parts: Some(5) }, Split::Never, Split::Rest]),
        most in 8..140i64,
    ) {
        let queries = match kind {
            0 => Queries::Uniform { q_len: tokens },
            1 => Queries::Ragged { tokens: batch * tokens, most: None },
            _ => Queries::Sparse { q_len: tokens, topk: max_seq_len, extra_topk: tokens % 2 * 100 },
        };
        let target = H200.at_most(Some(most));
        let problem = Problem { batch, queries, group, kv_heads, keys, max_seq_len, split, target, ..PROBLEM };
        let choice = choose(&problem);
        let ctas = choice.workers * choice.team * choice.splits;
        prop_assert!(i64::from(ctas) <= most.min(132), "{problem:?} {choice:?}");
        if choice.splits > 1 {
            prop_assert!(choice.rows == 16 || choice.rows == 32 && keys != Keys::Pages, "{problem:?} {choice:?}");
        }
    }

    #[test]
    fn clusters_of_16_cut_none_whatever_is_read(
        lens in prop::collection::vec(0..9000i32, 1..8),
        max_seq_len in 1..9000i32,
        group in 1..33i32,
        keys in prop::sample::select(vec![Keys::Pages, Keys::Rows, Keys::Codes, Keys::ScaledCodes]),
    ) {
        let batch = lens.len() as i32;
        let queries = Queries::Uniform { q_len: 1 };
        let split = Split::Auto;
        let problem = Problem { batch, queries, group, kv_heads: 1, max_seq_len, split, keys, ..PROBLEM };
        let choice = choose(&problem);
        if choice.splits == 16 { // a fifth of all draws
            assert_one_whole_unit_each(&problem, &lens, None);
        }
    }
}

/// Requests of one length whose plans were measured on an H200 (`docs/tried-equal-units.md`): how many of them are cut.
#[test]
fn equal_requests_are_cut_where_that_takes_less_time() {
    for (keys, batch, group, tokens, cut) in [
        (Keys::Pages, 72, 16, 2048, 72),
        (Keys::Pages, 80, 16, 4096, 80),
        (Keys::Pages, 88, 16, 4096, 0),
        (Keys::Pages, 136, 16, 1024, 102),
        (Keys::Pages, 160, 16, 1024, 0),
        (Keys::Pages, 160, 16, 2048, 116),
        (Keys::Pages, 176, 16, 2048, 0),
        (Keys::Pages, 88, 32, 4096, 88),
        (Keys::Pages, 96, 32, 4096, 0),
        (Keys::Pages, 56, 64, 1024, 56),
        (Keys::Pages, 72, 64, 2048, 0),
        (Keys::Pages, 136, 64, 1024, 4),
        (Keys::Pages, 176, 64, 2048, 0),
        (Keys::Pages, 40, 128, 1024, 0),
        (Keys::Pages, 104, 128, 1024, 0),
        (Keys::Codes, 72, 16, 1024, 0),
        (Keys::Codes, 80, 16, 2048, 80),
        (Keys::Codes, 88, 16, 2048, 88),
        (Keys::Codes, 100, 16, 4096, 100),
        (Keys::Codes, 96, 32, 4096, 96),
        (Keys::Codes, 192, 16, 1024, 84),
        (Keys::Codes, 72, 64, 1024, 0),
    ] {
        let problem = Problem {
            keys,
            max_seq_len: tokens,
            ..decodes(batch, group)
        };
        let header = header_of(&problem.shape().unwrap(), tokens);
        assert_eq!(header.merges, cut, "{problem:?}");
    }
}
