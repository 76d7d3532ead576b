//! decode where the values are hostile: NaN, infinities, bad indices, extreme scores.

mod common;

use common::arrays::indices;
use common::case::{Case, Inputs};
use common::reference::{assert_close, assert_close_with_lens};
use ferromla_cpu::Format;
use ferromla_schedule::Split;

#[test]
fn a_key_that_is_not_finite_reaches_only_the_rows_that_attend_it() {
    for (bad, at) in [
        (f32::NAN, 3),
        (f32::NAN, 550),
        (f32::INFINITY, 0),
        (f32::NEG_INFINITY, 511),
    ] {
        for position in [96, 97, 99] {
            let case = Case {
                seq_lens: vec![100],
                s_q: 4,
                h: 6,
                h_kv: 2,
                ..Case::default()
            };
            let mut inputs = Inputs::new(&case);
            let clean = inputs.run();
            let mut row = vec![0.5; 576];
            row[at] = bad;
            inputs.set_token(0, position, &row);
            let got = inputs.run();
            for index in indices([1, 4, 6]) {
                let attends = position <= 96 + index[1];
                if attends {
                    let out = got.out_row(case.format, index);
                    assert!(
                        out.iter().any(|x| !x.is_finite()),
                        "{bad} at {position} lost by {index:?}"
                    );
                } else {
                    assert_eq!(
                        got.out.row(index),
                        clean.out.row(index),
                        "{bad} leaked to {index:?}"
                    );
                    assert_eq!(got.lse.row(index), clean.lse.row(index));
                }
            }
        }
    }
}

#[test]
fn a_nan_query_row_stays_alone() {
    let case = Case {
        seq_lens: vec![130, 70],
        s_q: 2,
        h: 4,
        split: Split::Fixed(2),
        ..Case::default()
    };
    let mut inputs = Inputs::new(&case);
    let clean = inputs.run();
    inputs.q.set_row([0, 1, 2], &[common::NAN_BITS; 576]);
    let got = inputs.run();
    for index in indices([2, 2, 4]) {
        if index == [0, 1, 2] {
            assert!(got.out_row(case.format, index).iter().all(|x| x.is_nan()));
            assert!(got.lse.row(index)[0].is_nan());
        } else {
            assert_eq!(got.out.row(index), clean.out.row(index));
        }
    }
}

#[test]
fn infinite_queries_do_not_make_absent_tokens_count() {
    // The first page is absent: 0 * inf in its zeroed rows would be NaN.
    let case = Case {
        seq_lens: vec![17],
        page_size: 16,
        h: 1,
        ..Case::default()
    };
    let mut inputs = Inputs::new(&case);
    inputs.table.set_row([0, 0], &[-1]);
    let mut q = vec![0.0; 576];
    q[570] = f32::INFINITY;
    inputs.set_q(&q);
    let mut key = vec![1.0; 576];
    key[570] = -1.0;
    inputs.set_token(0, 16, &key);
    let got = inputs.run();
    // The one key has score -inf, so it weighs nothing.
    assert_eq!(got.lse.row([0, 0, 0])[0], f32::NEG_INFINITY);
    assert!(
        got.out_row(case.format, [0, 0, 0])
            .iter()
            .all(|x| *x == 0.0)
    );
}

#[test]
fn page_ids_outside_the_cache_make_their_tokens_absent() {
    for page in [-1, i32::MIN, 9, 2_147_480_000, i32::MAX] {
        for page_size in [1, 16, 64, 61] {
            let case = Case {
                seq_lens: vec![150, 30],
                page_size,
                s_q: 2,
                h: 3,
                ..Case::default()
            };
            let mut inputs = Inputs::new(&case);
            let page = if page == 9 {
                inputs.cache_pages()
            } else {
                page
            };
            inputs.table.set_row([0, 0], &[page]);
            inputs.table.set_row([0, 140 / page_size], &[page]);
            // Nothing of the second request is left, where it has one page.
            inputs.table.set_row([1, 0], &[page]);
            let got = inputs.run();
            assert_close(&inputs, &got);
        }
    }
}

#[test]
fn absent_tokens_hold_nothing_of_the_request_before() {
    let case = Case {
        seq_lens: vec![64; 16],
        page_size: 16,
        h: 2,
        threads: 1,
        ..Case::default()
    };
    let mut inputs = Inputs::new(&case);
    for request in (0..16).step_by(2) {
        for position in 0..64 {
            inputs.set_token(request, position, &[f32::NAN; 576]);
        }
        inputs.table.set_row([request + 1, 2], &[-1]);
    }
    let got = inputs.run();
    for index in indices([16, 1, 2]) {
        let nan = index[0] % 2 == 0;
        let out = got.out_row(case.format, index);
        assert!(
            out.iter().all(|x| x.is_nan() == nan),
            "request {}",
            index[0]
        );
    }
}

#[test]
fn lengths_outside_the_table_are_clamped() {
    let case = Case {
        seq_lens: vec![128, 128, 100],
        page_size: 64,
        s_q: 2,
        h: 3,
        ..Case::default()
    };
    let mut inputs = Inputs::new(&case);
    // The table has one column more than the lengths need; it names no page.
    let lens = [i32::MAX, i32::MIN, -1];
    let got = inputs.run_with_lens(&lens);
    assert_close_with_lens(&inputs, &got, &lens);
    assert!(got.lse.row([0, 1, 2])[0].is_finite());
}

#[test]
fn large_scores_stay_right() {
    for (format, q) in [
        (Format::Bf16, 4000.0),
        (Format::Fp16, 4000.0),
        (Format::Bf16, 1e6),
    ] {
        let case = Case {
            format,
            seq_lens: vec![300],
            h: 2,
            ..Case::default()
        };
        let mut inputs = Inputs::new(&case);
        inputs.set_q(&vec![q; 576]);
        let got = inputs.run();
        assert_close(&inputs, &got);
        assert!(got.lse.row([0, 0, 0])[0].abs() > 1e3);
    }
}

#[test]
fn equal_scores_give_the_mean() {
    let case = Case {
        seq_lens: vec![1000],
        h: 3,
        ..Case::default()
    };
    let mut inputs = Inputs::new(&case);
    inputs.set_q(&[0.0; 576]);
    let got = inputs.run();
    assert_close(&inputs, &got);
    assert_eq!(got.lse.row([0, 0, 0])[0], 1000f32.ln());
    for position in 0..1000 {
        inputs.set_token(0, position, &[100.0; 576]);
    }
    inputs.set_q(&[100.0; 576]);
    let got = inputs.run();
    assert!(
        got.out_row(case.format, [0, 0, 2])
            .iter()
            .all(|x| *x == 100.0)
    );
}

#[test]
fn fp16_at_the_edge_of_its_range_stays_finite() {
    for split in [Split::Auto, Split::Fixed(4)] {
        let case = Case {
            format: Format::Fp16,
            seq_lens: vec![777],
            h: 4,
            split,
            ..Case::default()
        };
        let mut inputs = Inputs::new(&case);
        for position in 0..777 {
            let sign = if position % 97 == 5 { -1.0 } else { 1.0 };
            inputs.set_token(0, position, &[sign * 65504.0; 576]);
        }
        inputs.set_q(&[65504.0; 576]);
        let got = inputs.run();
        assert!(got.lse.row([0, 0, 0])[0].is_finite());
        for index in indices([1, 1, 4]) {
            assert!(
                got.out_row(Format::Fp16, index)
                    .iter()
                    .all(|x| *x == 65504.0)
            );
        }
    }
}

#[test]
fn sinks_scale_the_output_only() {
    let sinks = vec![f32::NEG_INFINITY, f32::INFINITY, 1.5, -1e4, 1e4];
    let plain = Case {
        seq_lens: vec![100, 0],
        h: 5,
        ..Case::default()
    };
    for split in [Split::Auto, Split::Fixed(2)] {
        let case = Case {
            sink: Some(sinks.clone()),
            split,
            ..plain.clone()
        };
        let without = Inputs::new(&Case {
            sink: None,
            ..case.clone()
        })
        .run();
        let mut inputs = Inputs::new(&case);
        let got = inputs.run();
        assert_close(&inputs, &got);
        for index in indices([2, 1, 5]) {
            assert_eq!(got.lse.row(index), without.lse.row(index));
        }
        assert_eq!(got.out.row([0, 0, 0]), without.out.row([0, 0, 0]));
        assert!(
            got.out_row(case.format, [0, 0, 1])
                .iter()
                .all(|x| *x == 0.0)
        );
    }
}
