//! What the tests share: random inputs in awkward layouts and a float64 textbook reference.
#![allow(dead_code)]

pub mod arrays;
pub mod case;
pub mod reference;

use ferromla_cpu::Format;
use half::{bf16, f16};

/// SplitMix64: small, seedable, good enough for test data.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn pick<T: Copy>(&mut self, options: &[T]) -> T {
        options[self.below(options.len())]
    }

    /// Uniform in [-1, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Roughly normal: the sum of four uniforms, scaled to unit variance.
    pub fn normal(&mut self) -> f32 {
        (0..4).map(|_| self.uniform()).sum::<f32>() * 0.75f32.sqrt()
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

pub fn to_bits(format: Format, x: f32) -> u16 {
    match format {
        Format::Bf16 => bf16::from_f32(x).to_bits(),
        Format::Fp16 => f16::from_f32(x).to_bits(),
    }
}

pub fn from_bits(format: Format, bits: u16) -> f32 {
    match format {
        Format::Bf16 => bf16::from_bits(bits).to_f32(),
        Format::Fp16 => f16::from_bits(bits).to_f32(),
    }
}

/// A NaN in either format.
pub const NAN_BITS: u16 = 0x7fff;
