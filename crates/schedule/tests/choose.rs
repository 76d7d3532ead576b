//! What a choice is like at the edges; `choose/tests.rs` pins it for named workloads.

use ferromla_schedule::{PlanError, Problem, Queries, Split, Target, choose};

const PROBLEM: Problem = Problem {
    batch: 1 << 20,
    queries: Queries::Uniform { q_len: 1 << 12 },
    group: 128,
    kv_heads: 4,
    mixed: false,
    causal: true,
    max_seq_len: 4096,
    split: Split::Fixed(4),
    target: Target::Gpu {
        sm_count: 132,
        clusters: [66, 30, 15],
    },
};

#[test]
fn small_gpus_and_any_cpu_have_a_worker() {
    let small = choose(&Problem {
        target: Target::Gpu {
            sm_count: 3,
            clusters: [1, 0, 0],
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

#[test]
fn a_problem_beyond_the_words_of_a_plan_is_refused_by_name() {
    assert!(matches!(
        PROBLEM.shape(),
        Err(PlanError::TooLarge { what: "units", .. })
    ));
    for queries in [
        Queries::Uniform { q_len: i32::MAX },
        Queries::Ragged { tokens: i32::MAX },
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
            queries: Queries::Ragged { tokens: i32::MIN },
            ..PROBLEM
        },
    ] {
        assert!(
            matches!(problem.shape(), Err(PlanError::Field { .. })),
            "{problem:?}"
        );
    }
}
