//! The conversions of `kernels/format/` against those of `ferromla_format` and of `half`, over every code and
//! every 16-bit number.

use ferromla_format::{Codes, E2M1, E4M3, LAYOUTS, e2m1, e4m3, ue8m0};

use super::{call, fill};

/// Every bfloat16 number times some that are no powers of two, and random float32.
fn numbers() -> Vec<f32> {
    let halves = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
    let scaled = halves.flat_map(|x| [x, x * 0.3, x / 7.0, x * 1.000_001]);
    let random = (0..1u32 << 18).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b1)));
    scaled.chain(random).collect()
}

/// Around every number that lies between two codes.
fn midpoints(codes: &[f32]) -> Vec<f32> {
    let mut sorted: Vec<f32> = codes.iter().copied().filter(|x| x.is_finite()).collect();
    sorted.sort_by(f32::total_cmp);
    let middles = sorted.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    middles
        .flat_map(|x| [x, x.next_up(), x.next_down()])
        .collect()
}

fn same_bits(name: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len());
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!(
            a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
            "{name} {i}: {a} and {b}"
        );
    }
}

#[test]
fn codes_are_encoded_alike() {
    let mut all = numbers();
    all.extend(midpoints(&E4M3));
    all.extend(midpoints(&E2M1));
    let ones: Vec<[f32; 2]> = all.iter().map(|&x| [x, 1.0]).collect();
    // SAFETY: the signatures are those in kernels.cpp.
    let (wide, narrow): (Vec<u8>, Vec<u32>) = unsafe {
        (
            call("encode_e4m3", all.iter().copied()),
            call("encode_e2m1", ones.iter().map(|pair| pair.as_ptr())),
        )
    };
    for (x, (wide, narrow)) in all.iter().zip(wide.iter().zip(&narrow)) {
        assert_eq!((*wide, *narrow as u8), (e4m3(*x), e2m1(*x)), "{x}");
    }
}

#[test]
fn e2m1_codes_are_those_of_quotients_by_their_scales() {
    let scales = E4M3.iter().filter(|scale| **scale > 0.0);
    let pairs: Vec<[f32; 2]> = scales
        .flat_map(|&scale| {
            let near = midpoints(&E2M1)
                .into_iter()
                .flat_map(move |x| [x * scale, (x * scale).next_up(), (x * scale).next_down()]);
            let any = (0..1u32 << 12).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b1)));
            let in_range = (0..1 << 12).map(move |i| (i - 2048) as f32 * 0.003 * scale);
            near.chain(any).chain(in_range).map(move |x| [x, scale])
        })
        .collect();
    // SAFETY: the signature is that in kernels.cpp.
    let codes: Vec<u32> = unsafe { call("encode_e2m1", pairs.iter().map(|pair| pair.as_ptr())) };
    for ([x, scale], code) in pairs.iter().zip(codes) {
        let quotient = if x.is_nan() { *x } else { x / scale };
        assert_eq!(code as u8, e2m1(quotient), "{x} / {scale}");
    }
}

#[test]
fn codes_are_decoded_alike() {
    // SAFETY: the signatures are those in kernels.cpp.
    unsafe {
        same_bits("e4m3", &call("decode_e4m3", 0..=255u8), &E4M3);
        same_bits("e2m1", &call("decode_e2m1", 0..16u32), &E2M1);
        let powers: Vec<f32> = (0..=255).map(ue8m0).collect();
        same_bits("ue8m0", &call("decode_ue8m0", 0..=255u8), &powers);
    }
}

#[test]
fn sixteen_bit_numbers_are_converted_alike() {
    // SAFETY: the signatures are those in kernels.cpp.
    let (widened, rounded): (Vec<f32>, Vec<u16>) = unsafe {
        (
            call("half_to_float", 0..=u16::MAX),
            call("float_to_bf16", numbers()),
        )
    };
    for (bits, x) in (0..=u16::MAX).zip(widened) {
        let want = half::f16::from_bits(bits).to_f32();
        assert_eq!(x.to_bits(), want.to_bits(), "fp16 {bits:#06x}");
    }
    for (x, bits) in numbers().into_iter().zip(rounded) {
        assert_eq!(bits, half::bf16::from_f32(x).to_bits(), "{x}");
    }
}

#[test]
fn division_is_that_of_ieee() {
    let powers = (1..255u32).map(|exponent| f32::from_bits(exponent << 23));
    for scale in powers.chain([1e-40, 0.1, 3.0, 7.77e-5, f32::MAX]) {
        for base in (0..1u32 << 12).map(|i| i.wrapping_mul(0x9e37_79b1)) {
            let x = [0, 1, 2, 3].map(|i| f32::from_bits(base ^ (i * 0x1357_9bdf)));
            let mut quotients = x;
            // SAFETY: the function takes four numbers.
            unsafe { fill("divide", scale, &mut quotients) };
            same_bits("quotient", &quotients, &x.map(|x| x / scale));
        }
    }
}

#[test]
fn layouts_have_the_same_numbers_and_places() {
    for (index, layout) in LAYOUTS.iter().enumerate() {
        let mut facts = [0i64; 14];
        // SAFETY: the function writes 14 numbers.
        unsafe { fill("layout", index as i32, &mut facts) };
        let places = (0..3).flat_map(|offset| {
            let place = layout.place(offset, 7, 1000);
            [place.codes, place.scales, place.rope]
        });
        let bits = match layout.codes {
            Codes::E4m3 => 8,
            Codes::E2m1 => 4,
        };
        assert_eq!(layout.code_bytes(), layout.coded * bits / 8);
        let own = [
            layout.width,
            layout.coded,
            layout.group(),
            layout.bytes(),
            layout.row_bytes(),
        ];
        let want: Vec<i64> = own.into_iter().chain(places).map(|x| x as i64).collect();
        assert_eq!(facts.as_slice(), want, "layout {index}");
    }
}
