//! Codes against what the formats' definitions say, in float64 and by search.

use ferromla_format::{E2M1, E4M3, e2m1, e4m3, ue8m0};
use proptest::prelude::*;

/// The number of a code: sign, exponent, mantissa and bias.
fn defined(code: u8, exponent_bits: u32, mantissa_bits: u32, bias: i32) -> f64 {
    let code = u32::from(code);
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let exponent = (code >> mantissa_bits & ((1 << exponent_bits) - 1)) as i32;
    let magnitude = if exponent == 0 {
        mantissa * 2f64.powi(1 - bias)
    } else {
        (1.0 + mantissa) * 2f64.powi(exponent - bias)
    };
    let negative = code >> (exponent_bits + mantissa_bits) & 1 == 1;
    if negative { -magnitude } else { magnitude }
}

/// The code of the nearest number among those of `codes`, the even one of two that are as near.
fn nearest(x: f64, codes: std::ops::Range<u8>, number: impl Fn(u8) -> f64) -> u8 {
    // What is too large is as near to the largest number as can be.
    let x = x.abs().min(number(codes.end - 1));
    let distance = |code: u8| (number(code) - x).abs();
    let mut best = codes.start;
    for code in codes {
        let (old, new) = (distance(best), distance(code));
        if new < old || (new == old && code % 2 == 0) {
            best = code;
        }
    }
    best
}

fn nearest_e4m3(x: f64) -> u8 {
    nearest(x, 0..0x7f, |code| defined(code, 4, 3, 7)) | if x.is_sign_negative() { 0x80 } else { 0 }
}

fn nearest_e2m1(x: f64) -> u8 {
    nearest(x, 0..8, |code| defined(code, 2, 1, 1)) | if x.is_sign_negative() { 8 } else { 0 }
}

#[test]
fn every_code_decodes_to_what_its_bits_say() {
    for code in 0..=255u8 {
        let number = E4M3[usize::from(code)];
        if code & 0x7f == 0x7f {
            assert!(number.is_nan());
            assert_eq!(number.is_sign_negative(), code == 0xff);
        } else {
            assert_eq!(
                f64::from(number).to_bits(),
                defined(code, 4, 3, 7).to_bits(),
                "{code:#x}"
            );
        }
    }
    for code in 0..16u8 {
        let number = f64::from(E2M1[usize::from(code)]);
        assert_eq!(
            number.to_bits(),
            defined(code, 2, 1, 1).to_bits(),
            "{code:#x}"
        );
    }
    for byte in 0..255u8 {
        assert_eq!(f64::from(ue8m0(byte)), 2f64.powi(i32::from(byte) - 127));
    }
    assert!(ue8m0(255).is_nan());
}

#[test]
fn every_code_comes_back() {
    for code in 0..=255u8 {
        assert_eq!(e4m3(E4M3[usize::from(code)]), code);
    }
    for code in 0..16u8 {
        assert_eq!(e2m1(E2M1[usize::from(code)]), code);
    }
}

/// Each middle between two codes, and its neighbours on both sides.
#[test]
fn middles_go_to_the_even_code_and_their_neighbours_to_the_nearer_one() {
    let mut tried = 0;
    let mut check = |low: f32, high: f32, code: fn(f32) -> u8, want: fn(f64) -> u8| {
        let middle = (low + high) / 2.0;
        for x in [middle.next_down(), middle, middle.next_up()] {
            for x in [x, -x] {
                assert_eq!(code(x), want(x.into()), "{x:e}");
                tried += 1;
            }
        }
    };
    for pair in E4M3[..0x7f].windows(2) {
        check(pair[0], pair[1], e4m3, nearest_e4m3);
    }
    for pair in E2M1[..8].windows(2) {
        check(pair[0], pair[1], e2m1, nearest_e2m1);
    }
    assert_eq!(tried, 6 * (126 + 7));
}

#[test]
fn what_is_too_large_saturates_and_nan_stays_or_becomes_zero() {
    for x in [448.0, 464.0, 465.0, 480.0, 1e30, f32::MAX, f32::INFINITY] {
        assert_eq!((e4m3(x), e4m3(-x)), (0x7e, 0xfe), "{x}");
    }
    for x in [6.0, 7.0, 7.5, 1e30, f32::MAX, f32::INFINITY] {
        assert_eq!((e2m1(x), e2m1(-x)), (7, 15), "{x}");
    }
    for payload in [0x7fc0_0000u32, 0x7f80_0001, 0x7fff_ffff] {
        let (nan, negative) = (f32::from_bits(payload), f32::from_bits(payload | 1 << 31));
        assert_eq!((e4m3(nan), e4m3(negative)), (0x7f, 0xff));
        assert_eq!((e2m1(nan), e2m1(negative)), (0, 8));
    }
    for x in [0.0, f32::MIN_POSITIVE, f32::from_bits(1), 2f32.powi(-10)] {
        assert_eq!((e4m3(x), e4m3(-x)), (0, 0x80), "{x:e}");
        assert_eq!((e2m1(x), e2m1(-x)), (0, 8), "{x:e}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_number_goes_to_the_nearest_code(bits: u32, spread in -12f32..12.0) {
        // Any bits at all, and numbers of the codes' own size.
        for x in [f32::from_bits(bits), f32::from_bits(bits & 0x807f_ffff | 127 << 23) * spread.exp2()] {
            if !x.is_nan() {
                prop_assert_eq!(e4m3(x), nearest_e4m3(x.into()));
                prop_assert_eq!(e2m1(x), nearest_e2m1(x.into()));
            }
        }
    }
}
