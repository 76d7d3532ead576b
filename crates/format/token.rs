//! One token: its numbers to bytes, and its bytes to numbers.

use crate::codes::{
    E2M1, E2M1_MAX, E4M3, E4M3_MAX, e2m1, e4m3, next_power_of_two, ue8m0, ue8m0_byte,
};
use crate::layout::{Codes, Layout, Scales};

/// The bytes of a token, of the lengths that its [`Layout`] says.
#[derive(Debug, Clone, Copy)]
pub struct Token<'a> {
    /// Of [`Layout::code_bytes`].
    pub codes: &'a [u8],
    /// Of [`Layout::scale_bytes`].
    pub scales: &'a [u8],
    /// Of [`Layout::rope_bytes`].
    pub rope: &'a [u8],
}

/// The bytes of a token, to write.
#[derive(Debug)]
pub struct TokenMut<'a> {
    /// Of [`Layout::code_bytes`].
    pub codes: &'a mut [u8],
    /// Of [`Layout::scale_bytes`].
    pub scales: &'a mut [u8],
    /// Of [`Layout::rope_bytes`].
    pub rope: &'a mut [u8],
}

/// What to do about scales.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scaling {
    /// The one of the tensor, for layouts without scales of their own.
    pub tensor: f32,
    /// Round float32 scales up to powers of two.
    pub round: bool,
}

impl Layout {
    /// Quantises a row. `numbers` are its coded numbers, `rope` the bits of the others in bfloat16.
    ///
    /// The scale of a group is its largest magnitude (NaN aside, at most the largest float32) divided by the
    /// largest number that a code can be, and at least the smallest normal float32 (for e4m3 scales `2^-9`). UE8M0
    /// scales are rounded up to a power of two, e4m3 scales to nearest.
    ///
    /// # Panics
    /// When a length is not the layout's.
    ///
    /// ```
    /// use ferromla_format::{FP8_V41, Scaling, Token, TokenMut};
    /// let (mut codes, mut scales) = ([0; 512], [0; 16]);
    /// let scaling = Scaling { tensor: 1.0, round: true };
    /// let token = TokenMut { codes: &mut codes, scales: &mut scales, rope: &mut [] };
    /// FP8_V41.quantise(&[3.0; 512], &[], scaling, token);
    /// let mut numbers = [0.0; 512];
    /// FP8_V41.dequantise(Token { codes: &codes, scales: &scales, rope: &[] }, 1.0, &mut numbers);
    /// assert_eq!(numbers, [3.0; 512]);
    /// ```
    pub fn quantise(&self, numbers: &[f32], rope: &[u16], scaling: Scaling, token: TokenMut) {
        assert_eq!(numbers.len(), self.coded, "coded numbers of a row");
        self.assert_lengths(token.codes, token.scales, token.rope);
        assert_eq!(2 * rope.len(), token.rope.len(), "other numbers of a row");
        token.scales.fill(0);
        let code_bytes = self.code_bytes() / (self.coded / self.group());
        let groups = numbers.chunks_exact(self.group());
        for (group, (numbers, codes)) in groups
            .zip(token.codes.chunks_exact_mut(code_bytes))
            .enumerate()
        {
            let scale = self.write_scale(group, numbers, scaling, token.scales);
            match self.codes {
                Codes::E4m3 => {
                    for (code, x) in codes.iter_mut().zip(numbers) {
                        *code = e4m3(x / scale);
                    }
                }
                Codes::E2m1 => {
                    for (code, pair) in codes.iter_mut().zip(numbers.chunks_exact(2)) {
                        *code = e2m1(pair[0] / scale) | e2m1(pair[1] / scale) << 4;
                    }
                }
            }
        }
        for (bytes, bits) in token.rope.chunks_exact_mut(2).zip(rope) {
            bytes.copy_from_slice(&bits.to_le_bytes());
        }
    }

    /// Dequantises a row of [`Layout::width`] numbers: the float32 product of code and scale. `tensor` is the
    /// scale where the layout has none of its own.
    ///
    /// # Panics
    /// When a length is not the layout's.
    ///
    /// ```
    /// use ferromla_format::{FP8_512, Token};
    /// let mut numbers = [0.0; 512];
    /// let token = Token { codes: &[0x38; 512], scales: &[], rope: &[] };
    /// FP8_512.dequantise(token, 0.25, &mut numbers);
    /// assert_eq!(numbers, [0.25; 512]);
    /// ```
    pub fn dequantise(&self, token: Token, tensor: f32, out: &mut [f32]) {
        assert_eq!(out.len(), self.width, "numbers of a row");
        self.assert_lengths(token.codes, token.scales, token.rope);
        let (coded, rest) = out.split_at_mut(self.coded);
        let code_bytes = self.code_bytes() / (self.coded / self.group());
        let groups = coded.chunks_exact_mut(self.group());
        for (group, (out, codes)) in groups.zip(token.codes.chunks_exact(code_bytes)).enumerate() {
            let scale = self.read_scale(group, token.scales, tensor);
            match self.codes {
                Codes::E4m3 => {
                    for (y, code) in out.iter_mut().zip(codes) {
                        *y = E4M3[usize::from(*code)] * scale;
                    }
                }
                Codes::E2m1 => {
                    for (pair, code) in out.chunks_exact_mut(2).zip(codes) {
                        pair[0] = E2M1[usize::from(code & 15)] * scale;
                        pair[1] = E2M1[usize::from(code >> 4)] * scale;
                    }
                }
            }
        }
        for (y, bytes) in rest.iter_mut().zip(token.rope.chunks_exact(2)) {
            *y = f32::from_bits(u32::from(bytes[1]) << 24 | u32::from(bytes[0]) << 16);
        }
    }

    fn assert_lengths(&self, codes: &[u8], scales: &[u8], rope: &[u8]) {
        let given = (codes.len(), scales.len(), rope.len());
        let own = (self.code_bytes(), self.scale_bytes(), self.rope_bytes());
        assert_eq!(given, own, "bytes of codes, scales and other numbers");
    }

    /// Chooses the scale of a group, writes it, and gives what it reads as.
    fn write_scale(&self, group: usize, numbers: &[f32], scaling: Scaling, out: &mut [u8]) -> f32 {
        // `f32::max` passes over NaN.
        let largest = numbers.iter().fold(0f32, |max, x| max.max(x.abs()));
        let largest = largest.min(f32::MAX);
        let of_code = match self.codes {
            Codes::E4m3 => E4M3_MAX,
            Codes::E2m1 => E2M1_MAX,
        };
        let scale = largest / of_code;
        match self.scales {
            Scales::Tensor => scaling.tensor,
            Scales::F32 { .. } => {
                let scale = scale.max(f32::MIN_POSITIVE);
                let scale = if scaling.round {
                    next_power_of_two(scale)
                } else {
                    scale
                };
                out[4 * group..][..4].copy_from_slice(&scale.to_le_bytes());
                scale
            }
            Scales::Ue8m0 { .. } => {
                let scale = next_power_of_two(scale.max(f32::MIN_POSITIVE));
                out[group] = ue8m0_byte(scale);
                scale
            }
            Scales::E4m3 { .. } => {
                out[group] = e4m3(scale).max(1);
                E4M3[usize::from(out[group])]
            }
        }
    }

    fn read_scale(&self, group: usize, scales: &[u8], tensor: f32) -> f32 {
        match self.scales {
            Scales::Tensor => tensor,
            Scales::F32 { .. } => {
                let mut bytes = [0; 4];
                bytes.copy_from_slice(&scales[4 * group..][..4]);
                f32::from_le_bytes(bytes)
            }
            Scales::Ue8m0 { .. } => ue8m0(scales[group]),
            Scales::E4m3 { .. } => E4M3[usize::from(scales[group])],
        }
    }
}
