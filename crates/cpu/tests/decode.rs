//! decode against the reference over a seeded grid of shapes, layouts and splits.

mod common;

use std::collections::HashSet;

use common::Rng;
use common::case::{Case, Inputs};
use common::reference::assert_close;
use ferromla_cpu::Format;
use ferromla_schedule::Split;

const S_Q: [usize; 3] = [1, 2, 4];
const SEQ: [i32; 9] = [0, 1, 20, 63, 64, 65, 140, 500, 1000];
const H: [usize; 8] = [1, 3, 9, 16, 63, 64, 126, 128];
const H_KV: [usize; 3] = [1, 2, 3];
const PAGE: [usize; 7] = [1, 2, 16, 61, 64, 128, 256];

/// Multiplications the reference may spend on one case.
const BUDGET: usize = 60_000_000;

fn random_case(rng: &mut Rng) -> Case {
    loop {
        let b = rng.pick(&[1, 2, 6]);
        let h = rng.pick(&H);
        let width = rng.pick(&[576, 576, 512]);
        let sinks = [f32::INFINITY, f32::NEG_INFINITY, 0.0, -3.0, 2.5, 4.0];
        let case = Case {
            seq_lens: (0..b).map(|_| rng.pick(&SEQ)).collect(),
            s_q: rng.pick(&S_Q),
            h,
            h_kv: rng.pick(&H_KV),
            page_size: rng.pick(&PAGE),
            width,
            format: rng.pick(&[Format::Bf16, Format::Fp16]),
            causal: rng.chance(50),
            sink: rng
                .chance(40)
                .then(|| (0..h).map(|_| rng.pick(&sinks)).collect()),
            split: rng.pick(&[
                Split::Auto,
                Split::Auto,
                Split::Fixed(3),
                Split::INVARIANT,
                Split::Invariant { parts: Some(2) },
            ]),
            threads: rng.pick(&[1, 2, 33]),
            strided: rng.chance(50),
            two_part: rng.chance(50),
            scale: rng.pick(&[(width as f64).powf(-0.5), 0.02, 0.11]),
            seed: rng.next(),
        };
        let tokens: usize = case.seq_lens.iter().map(|len| *len as usize).sum();
        if h.is_multiple_of(case.h_kv) && tokens * case.s_q * h * 1100 <= BUDGET {
            return case;
        }
    }
}

#[test]
fn random_cases_match_the_reference() {
    let mut rng = Rng(20_240_607);
    let mut seen = HashSet::new();
    for _ in 0..300 {
        let case = random_case(&mut rng);
        seen.extend(case.seq_lens.iter().map(|len| format!("seq {len}")));
        seen.insert(format!("s_q {}", case.s_q));
        seen.insert(format!("h {}", case.h));
        seen.insert(format!("h_kv {}", case.h_kv));
        seen.insert(format!("page {}", case.page_size));
        let mut inputs = Inputs::new(&case);
        let got = inputs.run();
        assert_close(&inputs, &got);
    }
    let values = S_Q.len() + SEQ.len() + H.len() + H_KV.len() + PAGE.len();
    assert_eq!(
        seen.len(),
        values,
        "the sample must cover every value: {seen:?}"
    );
}

#[test]
fn long_and_wide_batches_match_the_reference() {
    let long = Case {
        seq_lens: vec![4096],
        h: 128,
        ..Case::default()
    };
    let many = Case {
        seq_lens: (0..64).map(|i| [20, 0, 1, 140][i % 4]).collect(),
        h: 9,
        h_kv: 3,
        page_size: 61,
        ..Case::default()
    };
    // More query tokens than a unit has rows, and than there are keys.
    let tokens = Case {
        seq_lens: vec![70, 200],
        s_q: 150,
        h: 2,
        format: Format::Fp16,
        ..Case::default()
    };
    // One key: lse is its score, often near 0, where only the absolute error counts.
    let single = Case {
        seq_lens: vec![1; 64],
        h: 128,
        ..Case::default()
    };
    for case in [long, many, tokens, single] {
        let mut inputs = Inputs::new(&case);
        let got = inputs.run();
        assert_close(&inputs, &got);
    }
}

#[test]
fn any_number_of_splits_gives_right_results() {
    for parts in [1, 2, 5, 16, 64, 1000] {
        let case = Case {
            seq_lens: vec![1000, 0, 64, 321],
            split: Split::Fixed(parts),
            h: 5,
            s_q: 2,
            ..Case::default()
        };
        let mut inputs = Inputs::new(&case);
        let got = inputs.run();
        assert_close(&inputs, &got);
    }
}

#[test]
fn empty_batches_and_queries_are_valid() {
    let cases = [
        Case {
            seq_lens: vec![],
            ..Case::default()
        },
        Case {
            s_q: 0,
            ..Case::default()
        },
        Case {
            seq_lens: vec![0, 0],
            sink: Some(vec![0.0; 16]),
            ..Case::default()
        },
        Case {
            seq_lens: vec![0],
            split: Split::Fixed(4),
            ..Case::default()
        },
    ];
    for case in cases {
        let mut inputs = Inputs::new(&case);
        let got = inputs.run();
        assert_close(&inputs, &got);
    }
}

#[test]
fn batch_invariant_results_do_not_depend_on_the_batch() {
    // Three parts of 64 tiles at most, so splitting is part of what must not change.
    let lens = [9000, 3, 4500, 0, 140];
    let all = Case {
        seq_lens: lens.to_vec(),
        h: 3,
        s_q: 2,
        split: Split::INVARIANT,
        page_size: 61,
        ..Case::default()
    };
    let mut inputs = Inputs::new(&all);
    let together = inputs.run();
    for (order, threads) in [(vec![4, 2, 0, 1, 3], 1), (vec![2], 33), (vec![0, 0], 5)] {
        let case = Case {
            seq_lens: order.iter().map(|i| lens[*i]).collect(),
            threads,
            ..all.clone()
        };
        let mut other = Inputs::new(&case);
        for (to, from) in order.iter().enumerate() {
            for token in 0..2 {
                for head in 0..3 {
                    let row = inputs.q.get_row([*from, token, head]);
                    other.q.set_row([to, token, head], &row);
                }
            }
            for position in 0..lens[*from] as usize {
                let row = inputs.cache.get_row(inputs.slot(*from, position));
                let slot = other.slot(to, position);
                other.cache.set_row(slot, &row);
            }
        }
        let apart = other.run();
        for (to, from) in order.iter().enumerate() {
            assert!(
                apart.request(to) == together.request(*from),
                "request {from} in {order:?}"
            );
        }
    }
}

#[test]
fn results_are_the_same_in_every_run_and_on_any_number_of_threads() {
    let case = Case {
        seq_lens: vec![1000, 77, 640],
        h: 128,
        threads: 8,
        ..Case::default()
    };
    let mut inputs = Inputs::new(&case);
    let first = inputs.run();
    for threads in [1, 2, 7] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let again = pool.install(|| inputs.run());
        assert!((0..3).all(|request| first.request(request) == again.request(request)));
    }
}
