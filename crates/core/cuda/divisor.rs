//! Division by a number that is known before a launch, without dividing: `x * multiplier >> shift`.
//!
//! With `shift` = 31 + ceil(log2(by)) and `multiplier` = 2^`shift` / `by`, rounded up, the product is too large by less than
//! `x` / 2^31 of a quotient's step: exact for x below 2^31 (Granlund and Montgomery, "Division by invariant integers using
//! multiplication", PLDI 1994, theorem 4.2).

use crate::params::FmDivisor;

impl FmDivisor {
    /// Of a number from 1 on.
    pub(super) fn of(by: i32) -> Self {
        let by = u64::from(by.max(1).unsigned_abs());
        let shift = 31 + by.next_power_of_two().ilog2();
        Self {
            multiplier: (1_u64 << shift).div_ceil(by) as u32,
            shift: shift as i32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn quotient(x: i32, by: FmDivisor) -> i32 {
        ((x as u64 * u64::from(by.multiplier)) >> by.shift) as i32
    }

    #[test]
    fn numbers_beside_multiples_are_divided_exactly() {
        for by in (1..=300).chain([1 << 16, (1 << 16) + 1, 1 << 30, (1 << 30) + 1, i32::MAX]) {
            let divisor = FmDivisor::of(by);
            let most = i32::MAX / by;
            for times in [0, 1, 2, most / 2, most - 1, most] {
                for off in [-1, 0, 1] {
                    let x = i64::from(times) * i64::from(by) + off;
                    if let Ok(x @ 0..) = i32::try_from(x) {
                        assert_eq!(quotient(x, divisor), x / by, "{x} / {by}");
                    }
                }
            }
            assert_eq!(quotient(i32::MAX, divisor), i32::MAX / by);
        }
    }

    proptest! {
        #[test]
        fn any_number_is_divided_exactly(x in 0..=i32::MAX, by in 1..=i32::MAX, bits in 0..31) {
            let by = i32::max(by >> bits, 1);
            prop_assert_eq!(quotient(x, FmDivisor::of(by)), x / by);
        }
    }
}
