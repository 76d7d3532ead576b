//! merge_states: exact, neutral towards empty sides, and safe in place.

mod common;

use common::arrays::{Rows, indices};
use common::{NAN_BITS, Rng, from_bits, to_bits};
use ferromla_cpu::{Format, MergeCpu, merge_states};

const SHAPE: [usize; 3] = [3, 2, 5];

struct Side {
    out: Rows<u16, 3>,
    lse: Rows<f32, 3>,
}

impl Side {
    fn new(format: Format, d_v: usize, seed: u64, lse: impl Fn(&mut Rng) -> f32) -> Self {
        let mut rng = Rng(seed);
        let mut out = Rows::new(SHAPE, d_v, NAN_BITS, Some(&mut Rng(seed + 1)));
        let mut lses = Rows::new(SHAPE, 1, 777.0, Some(&mut Rng(seed + 2)));
        for index in indices(SHAPE) {
            let row: Vec<u16> = (0..d_v).map(|_| to_bits(format, rng.normal())).collect();
            out.set_row(index, &row);
            lses.set_row(index, &[lse(&mut rng)]);
        }
        Self { out, lse: lses }
    }

    fn empty(d_v: usize, bits: u16) -> Self {
        let mut side = Self::new(Format::Bf16, d_v, 1, |_| f32::NEG_INFINITY);
        indices(SHAPE).for_each(|index| side.out.set_row(index, &vec![bits; d_v]));
        side
    }
}

fn merge(format: Format, d_v: usize, a: &Side, b: &Side) -> Side {
    let mut joint = Side {
        out: Rows::new(SHAPE, d_v, 0xbeef, Some(&mut Rng(77))),
        lse: Rows::new(SHAPE, 1, 777.0, Some(&mut Rng(78))),
    };
    let args = MergeCpu {
        format,
        d_v,
        out_a: a.out.view(0),
        lse_a: a.lse.view(0),
        out_b: b.out.view(0),
        lse_b: b.lse.view(0),
        out: joint.out.view_mut(0),
        lse: joint.lse.view_mut(0),
    };
    // SAFETY: every view describes one of the arrays above, shaped alike.
    unsafe { merge_states(&args) };
    joint.out.assert_gaps_untouched();
    joint.lse.assert_gaps_untouched();
    joint
}

#[test]
fn states_merge_as_one_softmax() {
    for format in [Format::Bf16, Format::Fp16] {
        for (d_v, spread) in [(512, 2.0), (512, 40.0), (512, 1e4), (1, 1.0), (130, 1.0)] {
            let a = Side::new(format, d_v, 10, |rng| rng.normal() * spread);
            let b = Side::new(format, d_v, 20, |rng| rng.normal() * spread);
            let joint = merge(format, d_v, &a, &b);
            for index in indices(SHAPE) {
                let lses = [
                    f64::from(a.lse.row(index)[0]),
                    f64::from(b.lse.row(index)[0]),
                ];
                let max = lses[0].max(lses[1]);
                let weights = lses.map(|lse| (lse - max).exp());
                let total = weights[0] + weights[1];
                let lse = max + total.ln();
                let error = (f64::from(joint.lse.row(index)[0]) - lse).abs();
                assert!(
                    error <= 1e-7 + lse.abs() * 1e-7,
                    "lse off by {error} from {lse}"
                );
                for i in 0..d_v {
                    let part = |side: &Side| f64::from(from_bits(format, side.out.row(index)[i]));
                    let expected = (weights[0] * part(&a) + weights[1] * part(&b)) / total;
                    let got = f64::from(from_bits(format, joint.out.row(index)[i]));
                    let error = (got - expected).abs();
                    assert!(
                        error <= 1e-6 + expected.abs() / 255.0,
                        "{got} not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn an_empty_side_leaves_the_other_bit_for_bit() {
    for format in [Format::Bf16, Format::Fp16] {
        // Even garbage in an empty side does not count.
        for garbage in [0, NAN_BITS] {
            let a = Side::new(format, 512, 30, |rng| rng.normal());
            let none = Side::empty(512, garbage);
            for joint in [merge(format, 512, &a, &none), merge(format, 512, &none, &a)] {
                for index in indices(SHAPE) {
                    assert_eq!(joint.out.row(index), a.out.row(index));
                    assert_eq!(joint.lse.row(index), a.lse.row(index));
                }
            }
        }
    }
}

#[test]
fn two_empty_sides_give_zeros_and_minus_infinity() {
    let (a, b) = (Side::empty(512, NAN_BITS), Side::empty(512, 0));
    let joint = merge(Format::Bf16, 512, &a, &b);
    for index in indices(SHAPE) {
        assert_eq!(joint.out.row(index), [0; 512]);
        assert_eq!(joint.lse.row(index), [f32::NEG_INFINITY]);
    }
}

#[test]
fn a_nan_in_a_side_stays_in_its_row() {
    let mut a = Side::new(Format::Bf16, 512, 40, |rng| rng.normal());
    let b = Side::new(Format::Bf16, 512, 50, |rng| rng.normal());
    a.lse.set_row([1, 0, 2], &[f32::NAN]);
    let joint = merge(Format::Bf16, 512, &a, &b);
    for index in indices(SHAPE) {
        let bad = index == [1, 0, 2];
        assert_eq!(joint.lse.row(index)[0].is_nan(), bad);
        let row = joint.out.row(index);
        assert!(
            row.iter()
                .all(|x| from_bits(Format::Bf16, *x).is_nan() == bad)
        );
    }
}

#[test]
fn merging_in_place_gives_the_same() {
    let mut a = Side::new(Format::Fp16, 512, 60, |rng| rng.normal());
    let b = Side::new(Format::Fp16, 512, 70, |rng| rng.normal());
    let joint = merge(Format::Fp16, 512, &a, &b);
    let (out, lse) = (a.out.view_mut(0), a.lse.view_mut(0));
    let args = MergeCpu {
        format: Format::Fp16,
        d_v: 512,
        out_a: out,
        lse_a: lse,
        out_b: b.out.view(0),
        lse_b: b.lse.view(0),
        out,
        lse,
    };
    // SAFETY: every view describes one of the arrays above; the outputs are exactly the first input.
    unsafe { merge_states(&args) };
    for index in indices(SHAPE) {
        assert_eq!(joint.out.row(index), a.out.row(index));
        assert_eq!(joint.lse.row(index), a.lse.row(index));
    }
}
