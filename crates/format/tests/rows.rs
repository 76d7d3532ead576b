//! Rows to bytes and back, for every layout.

use ferromla_format::{
    Codes, E2M1, E4M3, FP4_V41, FP8_576, FP8_V4, FP8_V32, FP8_V41, LAYOUTS, Layout, Scales,
    Scaling, Token, TokenMut,
};
use proptest::prelude::*;

const UP: Scaling = Scaling {
    tensor: 1.0,
    round: true,
};
const RAW: Scaling = Scaling { round: false, ..UP };

/// A token in memory of its own.
#[derive(Debug, Clone, PartialEq)]
struct Bytes {
    layout: Layout,
    codes: Vec<u8>,
    scales: Vec<u8>,
    rope: Vec<u8>,
}

impl Bytes {
    fn of(layout: Layout, numbers: &[f32], scaling: Scaling) -> Self {
        let mut bytes = Self {
            layout,
            codes: vec![0xaa; layout.code_bytes()],
            scales: vec![0xaa; layout.scale_bytes()],
            rope: vec![0xaa; layout.rope_bytes()],
        };
        let rope: Vec<u16> = (0..layout.width - layout.coded).map(rope_bits).collect();
        let token = TokenMut {
            codes: &mut bytes.codes,
            scales: &mut bytes.scales,
            rope: &mut bytes.rope,
        };
        layout.quantise(numbers, &rope, scaling, token);
        bytes
    }

    fn numbers(&self, tensor: f32) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.layout.width];
        let token = Token {
            codes: &self.codes,
            scales: &self.scales,
            rope: &self.rope,
        };
        self.layout.dequantise(token, tensor, &mut out);
        out
    }

    fn code(&self, column: usize) -> u8 {
        match self.layout.codes {
            Codes::E4m3 => self.codes[column],
            Codes::E2m1 => self.codes[column / 2] >> (4 * (column % 2)) & 15,
        }
    }

    /// The scale of a column.
    fn scale(&self, column: usize, tensor: f32) -> f32 {
        let group = column / self.layout.group();
        match self.layout.scales {
            Scales::Tensor => tensor,
            Scales::F32 { .. } => {
                f32::from_le_bytes(self.scales[4 * group..][..4].try_into().unwrap())
            }
            Scales::Ue8m0 { .. } => 2f32.powi(i32::from(self.scales[group]) - 127),
            Scales::E4m3 { .. } => E4M3[usize::from(self.scales[group])],
        }
    }
}

/// Any bits, signalling NaN included.
fn rope_bits(column: usize) -> u16 {
    (column * 1021 + 0x7f81) as u16
}

fn code_number(layout: &Layout, code: u8) -> f32 {
    match layout.codes {
        Codes::E4m3 => E4M3[usize::from(code)],
        Codes::E2m1 => E2M1[usize::from(code)],
    }
}

#[test]
fn tokens_have_the_sizes_of_the_formats_and_never_overlap() {
    let sizes = LAYOUTS.map(|layout| layout.bytes());
    assert_eq!(sizes, [576, 512, 656, 584, 528, 528, 288]);
    for layout in LAYOUTS {
        for page_size in [1, 2, 61, 64] {
            let mut used = vec![0; page_size * layout.bytes()];
            for offset in 0..page_size {
                let place = layout.place(offset, page_size, layout.bytes());
                for (start, len) in [
                    (place.codes, layout.code_bytes()),
                    (place.scales, layout.scale_bytes()),
                    (place.rope, layout.rope_bytes()),
                ] {
                    used[start..start + len].iter_mut().for_each(|n| *n += 1);
                }
            }
            assert!(
                used.iter().all(|&n| n == 1),
                "{layout:?}, pages of {page_size}"
            );
        }
    }
}

#[test]
fn tokens_lie_where_the_formats_say() {
    let place = |layout: &Layout, stride| {
        let place = layout.place(3, 64, stride);
        (place.codes, place.scales, place.rope)
    };
    assert_eq!(place(&FP8_576, 600).0, 1800);
    assert_eq!(place(&FP8_V32, 656), (1968, 1968 + 512, 1968 + 528));
    assert_eq!(place(&FP8_V32, 672).0, 2016);
    assert_eq!(place(&FP8_V4, 584), (3 * 576, 64 * 576 + 24, 3 * 576 + 448));
    assert_eq!(place(&FP8_V41, 528).1, 3 * 528 + 512);
    assert_eq!(place(&ferromla_format::FP8_V41_SPLIT, 528).1, 64 * 512 + 48);
    assert_eq!(place(&FP4_V41, 288).1, 3 * 288 + 256);
}

/// What is dequantised is quantised to the same bytes again, whatever the codes.
#[test]
fn every_code_survives_a_round_trip() {
    for layout in LAYOUTS {
        let (all, largest) = match layout.codes {
            Codes::E4m3 => (255u8, 0x7e),
            Codes::E2m1 => (15, 7),
        };
        for first in 0..=all {
            // Largest codes in every group, so that the scale comes back as well.
            let numbers: Vec<f32> = (0..layout.coded)
                .map(|column| match column % layout.group() {
                    0 => code_number(&layout, largest),
                    within => code_number(&layout, first.wrapping_add(within as u8) & all),
                })
                .map(|x| if x.is_nan() { 0.0 } else { x * 0.25 })
                .collect();
            let scaling = Scaling { tensor: 0.25, ..UP };
            let bytes = Bytes::of(layout, &numbers, scaling);
            let back = bytes.numbers(0.25);
            assert_eq!(back[..layout.coded], numbers, "{layout:?} from {first:#x}");
            assert_eq!(Bytes::of(layout, &back[..layout.coded], scaling), bytes);
        }
    }
}

#[test]
fn rotary_bits_stay_as_they_are() {
    for layout in LAYOUTS {
        let bytes = Bytes::of(layout, &vec![1.0; layout.coded], UP);
        for (column, pair) in bytes.rope.chunks_exact(2).enumerate() {
            assert_eq!(u16::from_le_bytes([pair[0], pair[1]]), rope_bits(column));
        }
        let numbers = bytes.numbers(1.0);
        for (column, x) in numbers[layout.coded..].iter().enumerate() {
            assert_eq!(x.to_bits(), u32::from(rope_bits(column)) << 16);
        }
    }
}

#[test]
fn zeros_have_the_least_scale_and_keep_their_signs() {
    for layout in LAYOUTS {
        let numbers: Vec<f32> = (0..layout.coded)
            .map(|column| if column % 3 == 0 { -0.0 } else { 0.0 })
            .collect();
        for scaling in [UP, RAW] {
            let bytes = Bytes::of(layout, &numbers, scaling);
            let back = bytes.numbers(1.0);
            let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&back[..layout.coded]), bits(&numbers));
            let least = match layout.scales {
                Scales::Tensor => 1.0,
                Scales::E4m3 { .. } => 2f32.powi(-9),
                _ => f32::MIN_POSITIVE,
            };
            assert_eq!(bytes.scale(0, 1.0), least);
        }
    }
}

#[test]
fn the_eighth_scale_byte_of_v4_is_zero() {
    assert_eq!(Bytes::of(FP8_V4, &[3.0; 448], UP).scales[7], 0);
}

#[test]
fn infinities_saturate_and_nan_is_no_largest_number() {
    for layout in LAYOUTS {
        let mut numbers = vec![1.0; layout.coded];
        (numbers[0], numbers[1], numbers[2]) = (f32::INFINITY, f32::NEG_INFINITY, f32::NAN);
        let group = layout.group();
        if group < layout.coded {
            numbers[group] = f32::NAN;
        }
        let bytes = Bytes::of(layout, &numbers, UP);
        let (largest, nan) = match layout.codes {
            Codes::E4m3 => ([0x7e, 0xfe], 0x7f),
            Codes::E2m1 => ([7, 15], 0),
        };
        assert_eq!([bytes.code(0), bytes.code(1)], largest, "{layout:?}");
        assert_eq!(bytes.code(2), nan);
        assert!(bytes.scale(0, 1.0).is_finite());
        if group < layout.coded {
            let mut without = numbers.clone();
            without[group] = 1.0;
            let without = Bytes::of(layout, &without, UP);
            assert_eq!(bytes.scale(group, 1.0), without.scale(group, 1.0));
        }
    }
}

#[test]
fn scales_are_rounded_up_to_powers_of_two_unless_raw() {
    let cases = [
        (448.0, 1.0),
        (448.1, 2.0),
        (447.9, 1.0),
        (224.0, 0.5),
        (1.0, 2f32.powi(-8)),
    ];
    for (largest, up) in cases {
        for layout in [FP8_V32, FP8_V41, FP8_V4] {
            let bytes = Bytes::of(layout, &with_largest(layout, largest), UP);
            assert_eq!(bytes.scale(5, 1.0), up, "{largest}");
        }
        let raw = Bytes::of(FP8_V32, &with_largest(FP8_V32, largest), RAW);
        assert_eq!(raw.scale(5, 1.0), largest / 448.0);
        assert_eq!(raw.code(5), 0xfe);
        let no_raw = Bytes::of(FP8_V41, &with_largest(FP8_V41, largest), RAW);
        assert_eq!(no_raw.scale(5, 1.0), up);
    }
}

/// Zeros but for the fifth number.
fn with_largest(layout: Layout, largest: f32) -> Vec<f32> {
    let mut numbers = vec![0.0; layout.coded];
    numbers[5] = -largest;
    numbers
}

#[test]
fn e4m3_scales_are_the_nearest_and_at_most_448() {
    let cases = [
        (6.0, 1.0),
        (6.3, 1.0),
        (6.5, 1.125),
        (2688.0, 448.0),
        (1e9, 448.0),
        (1e-9, 2f32.powi(-9)),
    ];
    for (largest, scale) in cases {
        let bytes = Bytes::of(FP4_V41, &with_largest(FP4_V41, largest), UP);
        assert_eq!(bytes.scale(5, 1.0), scale, "{largest}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every code is that of the float32 quotient by the scale that the bytes tell, and every number that comes
    /// out the float32 product with it.
    #[test]
    fn codes_are_quotients_and_numbers_products(
        seed: u64, spread in 0i32..60, round: bool, tensor in prop_oneof![Just(1f32), 0.001f32..1000.0],
    ) {
        let mut state = seed | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let mantissa = f32::from_bits(127 << 23 | (state as u32 & 0x807f_ffff));
            mantissa * 2f32.powi((state >> 40) as i32 % (spread + 1) - spread / 2)
        };
        for layout in LAYOUTS {
            let numbers: Vec<f32> = (0..layout.coded).map(|_| next()).collect();
            let bytes = Bytes::of(layout, &numbers, Scaling { tensor, round });
            let back = bytes.numbers(tensor);
            for (column, &x) in numbers.iter().enumerate() {
                let (scale, code) = (bytes.scale(column, tensor), bytes.code(column));
                let want = match layout.codes {
                    Codes::E4m3 => ferromla_format::e4m3(x / scale),
                    Codes::E2m1 => ferromla_format::e2m1(x / scale),
                };
                prop_assert_eq!(code, want);
                prop_assert_eq!(back[column].to_bits(), (code_number(&layout, code) * scale).to_bits());
            }
            // A scale is no larger than it must be, and all codes fit.
            let group = layout.group();
            for (first, numbers) in numbers.chunks_exact(group).enumerate() {
                let largest = numbers.iter().fold(0f32, |max, x| max.max(x.abs()));
                let (scale, exact) = (bytes.scale(first * group, tensor), largest / 448.0);
                match layout.scales {
                    Scales::F32 { .. } if !round => prop_assert_eq!(scale, exact),
                    Scales::F32 { .. } | Scales::Ue8m0 { .. } => {
                        prop_assert!(scale >= exact && scale < 2.0 * exact);
                        prop_assert_eq!(scale.to_bits() << 9, 0);
                    }
                    Scales::Tensor | Scales::E4m3 { .. } => {}
                }
            }
        }
    }
}
