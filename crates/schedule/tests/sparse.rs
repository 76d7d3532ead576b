//! A sparse batch is planned as the dense batch in which every query token is a request.

mod support;

use ferromla_schedule::{
    Choice, Keys, ListLens, Merge, PlanShape, PlanView, Problem, Queries, Split, Target, WorkItem,
    choose, layout, plan_into, plan_sparse_into,
};
use proptest::prelude::*;
use support::few_units::evenly_distributed;
use support::sparse::{Lens, SparseCase, plan_sparse, sparse_cases, sparse_shape};
use support::ways::is_dealt_longest_first;

const SHAPE: PlanShape = PlanShape {
    batch: 2,
    group: 16,
    causal: 0,
    unit_rows: 16,
    max_seq_len: 192 + 64,
    sparse_q_len: 3,
    topk: 130,
    extra_topk: 64,
    ..support::shapes::SHAPE
};

/// A sparse plan is that of requests with the keys of its tokens.
fn assert_as_requests(case: &SparseCase) {
    let sparse = plan_sparse(case);
    let dense = support::plan(&case.as_dense());
    assert_eq!(sparse.header, dense.header);
    assert_eq!(sparse.layout, dense.layout);
    let (keys, q_len) = (case.keys(), case.shape.sparse_q_len);
    let place = |token: i32| (token / q_len, token % q_len);
    let items: Vec<WorkItem> = dense
        .view()
        .items()
        .iter()
        .map(|item| {
            let (request, q_begin) = place(item.request);
            WorkItem {
                request,
                q_begin,
                main_len: keys[item.request as usize].0,
                ..*item
            }
        })
        .collect();
    let merges: Vec<Merge> = dense
        .view()
        .merges()
        .iter()
        .map(|merge| {
            let (request, q_begin) = place(merge.request);
            Merge {
                request,
                q_begin,
                ..*merge
            }
        })
        .collect();
    assert_eq!(sparse.view().items(), items);
    assert_eq!(sparse.view().merges(), merges);
    for worker in 0..dense.view().workers() {
        assert_eq!(
            sparse.view().worker(worker).len(),
            dense.view().worker(worker).len()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_token_is_planned_as_a_request_of_its_keys(case in sparse_cases()) {
        assert_as_requests(&case);
    }
}

#[test]
fn many_tokens_are_dealt_out_longest_first_as_requests_are() {
    for (requests, q_len) in [(1, 450), (225, 2), (195, 2), (84, 5)] {
        let dense = evenly_distributed(64, (requests * q_len) as usize);
        let given = Lens {
            data: dense.seq_lens.clone(),
            stride: [q_len as usize, 1],
        };
        let of = PlanShape {
            batch: requests,
            ..dense.shape
        };
        let case = SparseCase {
            shape: sparse_shape(of, q_len, dense.shape.max_seq_len, 0),
            topk_lengths: Some(given),
            extra_lengths: None,
        };
        assert!(is_dealt_longest_first(&dense, &support::plan(&dense)));
        assert_as_requests(&case);
    }
}

#[test]
fn shapes_of_lists_are_refused_where_they_contradict_themselves() {
    let refused = |shape: PlanShape| layout(&shape).unwrap_err().to_string();
    for (shape, message) in [
        (
            PlanShape { q_len: 2, ..SHAPE },
            "q_len is 2, must be 1 where sparse_q_len is not 0",
        ),
        (
            PlanShape { causal: 1, ..SHAPE },
            "causal is 1, must be 0 where sparse_q_len is not",
        ),
        (
            PlanShape {
                ragged: 1,
                q_len: 0,
                ..SHAPE
            },
            "ragged is 1, must be 0 where sparse_q_len is not",
        ),
        (
            PlanShape { topk: -1, ..SHAPE },
            "topk is -1, must be 0 or more",
        ),
        (
            PlanShape {
                extra_topk: -1,
                ..SHAPE
            },
            "extra_topk is -1, must be 0 or more",
        ),
        (
            PlanShape {
                sparse_q_len: -1,
                ..SHAPE
            },
            "sparse_q_len is -1, must be 0 or more",
        ),
        (
            PlanShape {
                sparse_q_len: 0,
                ..SHAPE
            },
            "topk is 130, must be 0 where sparse_q_len is 0",
        ),
        (
            PlanShape {
                max_seq_len: 255,
                ..SHAPE
            },
            "max_seq_len is 255, must be where the keys of topk and extra_topk end",
        ),
        (
            PlanShape {
                topk: i32::MAX,
                extra_topk: 1,
                ..SHAPE
            },
            "the shape needs 2147483649 keys, at most 2147483647 fit a plan",
        ),
    ] {
        assert_eq!(refused(shape), message);
    }
    assert_eq!(layout(&SHAPE).unwrap().units, 6);
}

#[test]
fn lengths_of_requests_and_of_lists_are_not_mistaken_for_each_other() {
    let mut words = vec![0; layout(&SHAPE).unwrap().words()];
    let error = plan_into(&SHAPE, [1, 2].as_slice(), None, &mut words).unwrap_err();
    assert_eq!(
        error.to_string(),
        "sparse_q_len is 3, must be 0 for the lengths of requests"
    );
    let short = ListLens {
        data: &[1; 5],
        stride: [3, 1],
    };
    let error = plan_sparse_into(&SHAPE, Some(short), None, &mut words).unwrap_err();
    assert_eq!(
        error.to_string(),
        "topk_lengths has 5 elements, at least 6 needed"
    );
    let error = plan_sparse_into(&SHAPE, None, Some(short), &mut words).unwrap_err();
    assert_eq!(
        error.to_string(),
        "extra_lengths has 5 elements, at least 6 needed"
    );
    let dense = PlanShape {
        sparse_q_len: 0,
        topk: 0,
        extra_topk: 0,
        ..SHAPE
    };
    let error = plan_sparse_into(&dense, None, None, &mut words).unwrap_err();
    assert_eq!(
        error.to_string(),
        "sparse_q_len is 0, must be 1 or more for lists of keys"
    );
}

#[test]
fn seventy_thousand_tokens_are_planned_in_one_call() {
    let shape = PlanShape {
        batch: 1,
        workers: 66,
        ..sparse_shape(SHAPE, 70_000, 2048, 0)
    };
    let mut words = vec![0; layout(&shape).unwrap().words()];
    let header = plan_sparse_into(&shape, None, None, &mut words).unwrap();
    assert_eq!(header.units, 70_000);
}

fn problem(group: i32, queries: Queries, split: Split) -> Problem {
    Problem {
        batch: 4,
        queries,
        group,
        kv_heads: 1,
        keys: Keys::Rows,
        causal: true,
        max_seq_len: 1 << 20,
        split,
        target: Target::Gpu {
            sm_count: 132,
            clusters: [66, 30, 15, 7],
            memory: 4814,
        },
    }
}

#[test]
fn rows_and_clusters_are_those_of_one_query_token_per_request() {
    let sparse = |q_len| Queries::Sparse {
        q_len,
        topk: 2048,
        extra_topk: 0,
    };
    for group in [1, 16, 32, 64, 128, 512, 1000] {
        let five = Split::Invariant { parts: Some(5) };
        for split in [Split::Auto, Split::Fixed(2), Split::INVARIANT, five] {
            for q_len in [1, 8, 32] {
                let dense = Problem {
                    batch: 4 * q_len,
                    max_seq_len: 2048,
                    ..problem(group, Queries::Uniform { q_len: 1 }, split)
                };
                let layout = |problem: &Problem| Choice {
                    split_cost: 0, // less for lists
                    ..choose(problem)
                };
                assert_eq!(
                    layout(&problem(group, sparse(q_len), split)),
                    layout(&dense),
                    "{group} {q_len}"
                );
            }
        }
    }
    let shape = problem(16, sparse(2), Split::Auto).shape().unwrap();
    assert_eq!(
        (
            shape.causal,
            shape.max_seq_len,
            shape.q_len,
            shape.sparse_q_len
        ),
        (0, 2048, 1, 2)
    );
}

#[test]
fn no_token_is_a_batch_of_nothing() {
    let queries = Queries::Sparse {
        q_len: 0,
        topk: 64,
        extra_topk: 64,
    };
    let shape = problem(16, queries, Split::Auto).shape().unwrap();
    let mut words = vec![0; layout(&shape).unwrap().words()];
    let header = plan_sparse_into(&shape, None, None, &mut words).unwrap();
    assert_eq!((header.units, header.items), (0, 0));
}

#[test]
fn units_that_are_never_split_have_no_cluster_either() {
    let queries = Queries::Sparse {
        q_len: 3,
        topk: 2048,
        extra_topk: 0,
    };
    assert_eq!(choose(&problem(16, queries, Split::Auto)).splits, 8);
    assert_eq!(choose(&problem(16, queries, Split::Never)).splits, 1);
    let shape = problem(16, queries, Split::Never).shape().unwrap();
    assert_eq!((shape.split_mode, shape.num_splits), (1, 1));
    assert_eq!(layout(&shape).unwrap().max_slots, 0);
}

#[test]
fn lists_that_are_left_are_cut_where_all_are_as_long() {
    let plan = |tokens, topk, group, lengths: Option<Vec<i32>>| {
        let queries = Queries::Sparse {
            q_len: tokens,
            topk,
            extra_topk: 0,
        };
        let problem = Problem {
            batch: 1,
            ..problem(group, queries, Split::Rest)
        };
        let shape = problem.shape().unwrap();
        let mut words = vec![0; layout(&shape).unwrap().words()];
        let lens = lengths.as_ref().map(|data| ListLens {
            data,
            stride: [0, 1],
        });
        plan_sparse_into(&shape, lens, None, &mut words).unwrap();
        let plan = PlanView::new(&shape, &words).unwrap();
        let mut tiles = vec![Vec::new(); tokens as usize];
        for item in plan.items() {
            assert_eq!(item.slot >= 0, item.parts > 1);
            tiles[item.q_begin as usize].extend(item.tile_begin..item.tile_end);
        }
        let all: Vec<i32> = (0..(topk + 63) / 64).collect();
        for (token, mut of_token) in tiles.into_iter().enumerate() {
            of_token.sort_unstable();
            let own = lengths.as_ref().map_or(topk, |lens| lens[token]);
            assert_eq!(
                of_token,
                all[..(own as usize).div_ceil(64)],
                "each tile once"
            );
        }
        let workers = (0..plan.workers()).map(|worker| {
            let items = plan.worker(worker);
            let parts = items.iter().filter(|item| item.parts > 1).count();
            assert!(
                items.iter().rev().skip(1).all(|item| item.parts == 1),
                "a part is the last item"
            );
            (items.len() - parts, parts)
        });
        let most = workers.fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)));
        (most, plan.merges().len(), plan.header().slots)
    };
    // 132 workers, then 66: so many whole units to a worker and parts, units that are cut, parts.
    assert_eq!(plan(4096, 2048, 64, None), ((31, 1), 4, 4 * 16));
    assert_eq!(plan(2048, 2048, 64, None), ((16, 0), 0, 0), "68 are left");
    assert_eq!(plan(4096, 2048, 128, None), ((62, 1), 4, 4 * 16));
    assert_eq!(plan(4096, 512, 64, None).1, 0, "short ones are not");
    assert_eq!(
        plan(4096, 2048, 64, Some(vec![2048; 4096])).1,
        0,
        "whose lengths may be others"
    );
    assert_eq!(plan(132 * 3, 2048, 64, None).1, 0);
}
