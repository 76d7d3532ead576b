//! Codes: `float8_e4m3fn`, `float4_e2m1fn` and UE8M0, from and to float32.
//!
//! Rounding is to nearest, ties to even. (The crate `float8` goes through float64 and drops the sign of a NaN.)

/// The number of every e4m3 code; 0x7f and 0xff are NaN.
///
/// ```
/// use ferromla_format::E4M3;
/// assert_eq!((E4M3[0x01], E4M3[0x38], E4M3[0xfe]), (2f32.powi(-9), 1.0, -448.0));
/// ```
pub static E4M3: [f32; 256] = e4m3_table();

/// The number of every e2m1 code.
///
/// ```
/// assert_eq!(ferromla_format::E2M1[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
/// ```
pub static E2M1: [f32; 16] = e2m1_table();

/// The largest e4m3 number.
pub const E4M3_MAX: f32 = 448.0;
/// The largest e2m1 number.
pub const E2M1_MAX: f32 = 6.0;

const SIGN: u32 = 1 << 31;
const MANTISSA_BITS: u32 = 23;

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (sign, magnitude) = ((code as u32 & 0x80) << 24, code as u32 & 0x7f);
        let number = if magnitude == 0x7f {
            f32::NAN
        } else if magnitude < 8 {
            magnitude as f32 / 512.0
        } else {
            f32::from_bits((magnitude << 20) + (120 << MANTISSA_BITS))
        };
        table[code] = f32::from_bits(number.to_bits() | sign);
        code += 1;
    }
    table
}

const fn e2m1_table() -> [f32; 16] {
    let mut table = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        let (sign, magnitude) = ((code as u32 & 8) << 28, code as u32 & 7);
        let number = if magnitude < 2 {
            magnitude as f32 / 2.0
        } else {
            f32::from_bits((magnitude << 22) + (126 << MANTISSA_BITS))
        };
        table[code] = f32::from_bits(number.to_bits() | sign);
        code += 1;
    }
    table
}

/// The nearest e4m3 code. What is above 448 becomes 448, NaN 0x7f; signs stay.
///
/// ```
/// use ferromla_format::e4m3;
/// assert_eq!((e4m3(1.0), e4m3(-1e9), e4m3(f32::NAN), e4m3(-0.0)), (0x38, 0xfe, 0x7f, 0x80));
/// ```
pub fn e4m3(x: f32) -> u8 {
    let sign = (x.to_bits() & SIGN) >> 24;
    let magnitude = x.abs();
    let code = if magnitude.is_nan() {
        0x7f
    } else {
        narrow::<3, 6>(magnitude.min(E4M3_MAX))
    };
    (code | sign) as u8
}

/// The nearest e2m1 code, in the low half of the byte. What is above 6 becomes 6, NaN 0; signs stay.
///
/// ```
/// use ferromla_format::e2m1;
/// assert_eq!((e2m1(0.25), e2m1(0.75), e2m1(-100.0), e2m1(f32::NAN)), (0, 2, 15, 0));
/// ```
pub fn e2m1(x: f32) -> u8 {
    let sign = (x.to_bits() & SIGN) >> 28;
    let magnitude = x.abs();
    let code = if magnitude.is_nan() {
        0
    } else {
        narrow::<1, 0>(magnitude.min(E2M1_MAX))
    };
    (code | sign) as u8
}

/// The code of `MANTISSA` mantissa bits nearest to a number that is not negative and not past the codes' range;
/// below `2^-LEAST` they are evenly spaced.
fn narrow<const MANTISSA: u32, const LEAST: u32>(x: f32) -> u32 {
    let least_normal = f32::from_bits((127 - LEAST) << MANTISSA_BITS);
    if x < least_normal {
        let step = least_normal / (1 << MANTISSA) as f32;
        return (x / step).round_ties_even() as u32;
    }
    let dropped = MANTISSA_BITS - MANTISSA;
    let bits = x.to_bits();
    let half = (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
    // A carry out of the mantissa is the next exponent, as it should be.
    ((bits + half) >> dropped) - ((126 - LEAST) << MANTISSA)
}

/// `2^(byte - 127)`, NaN for 255.
///
/// ```
/// use ferromla_format::ue8m0;
/// assert_eq!((ue8m0(0), ue8m0(1), ue8m0(127)), (2f32.powi(-127), f32::MIN_POSITIVE, 1.0));
/// ```
pub const fn ue8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << (MANTISSA_BITS - 1)),
        255 => f32::NAN,
        exponent => f32::from_bits((exponent as u32) << MANTISSA_BITS),
    }
}

/// The exponent byte of a power of two that is a normal float32.
pub(crate) const fn ue8m0_byte(power: f32) -> u8 {
    (power.to_bits() >> MANTISSA_BITS) as u8
}

/// The least power of two that is not below a normal number (which is below `2^127`).
pub(crate) const fn next_power_of_two(x: f32) -> f32 {
    let mantissa = (1 << MANTISSA_BITS) - 1;
    f32::from_bits((x.to_bits() + mantissa) & !mantissa)
}
