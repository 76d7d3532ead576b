//! Pins how named workloads are laid out on a GPU of 132 streaming multiprocessors: a change of these
//! numbers is a change of speed, and must be meant.

use ferromla_schedule::{Choice, PlanError, Problem, Split, Target, choose, layout};

const GPU: Target = Target::Gpu { sm_count: 132 };

/// Name, (batch, query heads per KV head, q_len), (team, workers, units).
type Workload = (&'static str, (i32, i32, i32), (i32, i32, i32));

const WORKLOADS: &[Workload] = &[
    ("DeepSeek V3, one GPU of 8", (128, 16, 1), (1, 132, 128)),
    (
        "DeepSeek V3, one GPU of 8, one draft token",
        (128, 16, 2),
        (1, 132, 128),
    ),
    ("DeepSeek V3, one GPU of 4", (128, 32, 1), (1, 132, 128)),
    (
        "DeepSeek V3, one GPU of 4, one draft token",
        (128, 32, 2),
        (1, 132, 128),
    ),
    ("half the heads", (128, 64, 1), (1, 132, 128)),
    (
        "half the heads, one draft token",
        (128, 64, 2),
        (2, 66, 128),
    ),
    ("all heads, data parallel", (128, 128, 1), (2, 66, 128)),
    ("all heads, one draft token", (128, 128, 2), (4, 33, 128)),
    ("all heads, three draft tokens", (128, 128, 4), (8, 16, 128)),
    (
        "all heads, more rows than a team of 8 holds",
        (128, 128, 5),
        (4, 33, 384),
    ),
    ("one request, all heads", (1, 128, 1), (2, 66, 1)),
    ("one request, few heads", (1, 16, 1), (1, 132, 1)),
    (
        "heads that are no multiple of a tile",
        (64, 126, 1),
        (2, 66, 64),
    ),
    (
        "heads that are no multiple of a tile, two tokens",
        (64, 126, 2),
        (4, 33, 64),
    ),
    ("one head", (64, 1, 1), (1, 132, 64)),
    ("no query token", (64, 128, 0), (1, 132, 0)),
];

#[test]
fn named_workloads_keep_their_team_and_workers() {
    for &(name, (batch, group, q_len), (team, workers, units)) in WORKLOADS {
        let problem = Problem {
            batch,
            q_len,
            group,
            kv_heads: 1,
            causal: true,
            max_seq_len: 1 << 20,
            split: Split::Auto,
            target: GPU,
        };
        let shape = problem.shape().expect(name);
        assert_eq!(
            (shape.unit_rows, shape.workers),
            (64 * team, workers),
            "{name}"
        );
        assert_eq!(layout(&shape).expect(name).units, units, "{name}");
        assert_eq!(
            (shape.fixed_cost, shape.split_cost, shape.min_part),
            (5, 10, 2),
            "{name}"
        );
    }
}

#[test]
fn small_gpus_and_any_cpu_have_a_worker() {
    let small = Target::Gpu { sm_count: 3 };
    assert_eq!(
        choose(512, small),
        Choice {
            team: 8,
            unit_rows: 512,
            workers: 1
        }
    );
    let cpu = |threads| choose(100_000, Target::Cpu { threads });
    assert_eq!(
        cpu(2),
        Choice {
            team: 1,
            unit_rows: 64,
            workers: 8
        }
    );
    assert_eq!(cpu(0).workers, 1);
    assert_eq!(cpu(i32::MAX).workers, i32::MAX);
}

#[test]
fn a_problem_beyond_the_words_of_a_plan_is_refused_by_name() {
    let problem = Problem {
        batch: 1 << 20,
        q_len: 1 << 12,
        group: 128,
        kv_heads: 4,
        causal: true,
        max_seq_len: 4096,
        split: Split::Fixed(4),
        target: GPU,
    };
    assert!(matches!(
        problem.shape(),
        Err(PlanError::TooLarge { what: "units", .. })
    ));
    let rows = Problem {
        q_len: i32::MAX,
        ..problem
    };
    let error = rows.shape().unwrap_err();
    assert_eq!(
        error.to_string(),
        "the shape needs 274877906816 rows, at most 2147483647 fit a plan"
    );
}
