//! The quantised KV cache formats: where a token's bytes lie, and rows of numbers to bytes and back.
//!
//! All arithmetic is float32 with the roundings of IEEE 754, so that other implementations can give the same
//! bits: a scale is one division (and a rounding up to a power of two), a code one division and one rounding,
//! a dequantised number one multiplication.

mod codes;
mod layout;
mod token;

pub use codes::{E2M1, E2M1_MAX, E4M3, E4M3_MAX, e2m1, e4m3, ue8m0};
pub use layout::{
    Codes, FP4_V41, FP8_512, FP8_576, FP8_V4, FP8_V32, FP8_V41, FP8_V41_SPLIT, LAYOUTS, Layout,
    MAX_WIDTH, Place, Scales,
};
pub use token::{Scaling, Token, TokenMut};
