//! The 16-bit element types, as bits outside and float32 inside.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

/// The element type of queries, caches and outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    Fp16,
}

/// Conversion between the bits of one 16-bit type and float32.
pub(crate) trait Element: Send + Sync + 'static {
    /// Exact.
    fn widen(bits: &[u16], out: &mut [f32]);
    /// Round to nearest, ties to even.
    fn narrow(x: f32) -> u16;
}

pub(crate) struct Bf16;
pub(crate) struct Fp16;

impl Element for Bf16 {
    fn widen(bits: &[u16], out: &mut [f32]) {
        // Unlike `bf16::to_f32` this leaves signalling NaNs alone, and so vectorises.
        for (y, x) in out.iter_mut().zip(bits) {
            *y = f32::from_bits(u32::from(*x) << 16);
        }
    }

    fn narrow(x: f32) -> u16 {
        bf16::from_f32(x).to_bits()
    }
}

impl Element for Fp16 {
    fn widen(bits: &[u16], out: &mut [f32]) {
        bits.reinterpret_cast::<f16>().convert_to_f32_slice(out);
    }

    /// Finite values saturate: every output is a convex combination of finite values, so one that
    /// leaves the range does so by rounding alone.
    fn narrow(x: f32) -> u16 {
        let max = f16::MAX.to_f32();
        let x = if x.is_finite() { x.clamp(-max, max) } else { x };
        f16::from_f32(x).to_bits()
    }
}

/// Runs `$body` with `$E` bound to the element type of `$format`.
macro_rules! with_element {
    ($format:expr, $E:ident => $body:expr) => {
        match $format {
            crate::Format::Bf16 => {
                type $E = crate::element::Bf16;
                $body
            }
            crate::Format::Fp16 => {
                type $E = crate::element::Fp16;
                $body
            }
        }
    };
}
pub(crate) use with_element;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_pattern_survives_a_round_trip() {
        fn check<E: Element>(is_nan: fn(u16) -> bool) {
            for bits in 0..=u16::MAX {
                let mut wide = [0.0];
                E::widen(&[bits], &mut wide);
                if is_nan(bits) {
                    assert!(wide[0].is_nan() && is_nan(E::narrow(wide[0])));
                } else {
                    assert_eq!(E::narrow(wide[0]), bits);
                }
            }
        }
        check::<Bf16>(|b| bf16::from_bits(b).is_nan());
        check::<Fp16>(|b| f16::from_bits(b).is_nan());
    }

    #[test]
    fn fp16_saturates_finite_values_only() {
        assert_eq!(Fp16::narrow(70000.0), f16::MAX.to_bits());
        assert_eq!(Fp16::narrow(-70000.0), f16::MIN.to_bits());
        assert_eq!(Fp16::narrow(f32::INFINITY), f16::INFINITY.to_bits());
        assert!(f16::from_bits(Fp16::narrow(f32::NAN)).is_nan());
    }
}
