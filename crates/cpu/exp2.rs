//! A branch-free `2^x` that compilers vectorise.

/// `2^x` to 2 ulp for `x <= 0`; below the normal range it is 0, NaN stays NaN, and positive infinity
/// gives NaN (which is what `exp(inf - inf)` asks for).
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, left in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    let tiny = x < -126.0;
    let x = if tiny { -126.0 } else { x };
    let shifted = x + ROUND;
    let r = (x - (shifted - ROUND)) * std::f32::consts::LN_2;
    // Taylor terms of e^r on |r| <= ln(2) / 2: the first left out is below 2^-26 of the sum.
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = (p * r) * r + r;
    let p = p + 1.0;
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127);
    let y = p * f32::from_bits(exponent << 23);
    if tiny { 0.0 } else { y }
}

#[cfg(test)]
mod tests {
    use super::exp2;

    #[test]
    fn is_accurate_over_its_range() {
        let mut x = -125.99f32;
        while x <= 0.0 {
            let exact = f64::from(x).exp2();
            let error = (f64::from(exp2(x)) - exact).abs() / exact;
            assert!(error < 2.4e-7, "exp2({x}) is off by {error}");
            x += 0.000_37;
        }
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(-1.0), 0.5);
    }

    #[test]
    fn keeps_the_special_values() {
        assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2(-1e30), 0.0);
        assert!(exp2(f32::NAN).is_nan());
        assert!(exp2(f32::INFINITY).is_nan());
    }
}
