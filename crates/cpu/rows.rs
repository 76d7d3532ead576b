//! Rows of numbers as float32, whatever they are in memory.

use ferromla_format::{E4M3, Layout, MAX_WIDTH, Scaling, Token, TokenMut};
use half::bf16;

use crate::element::{Bf16, Element, Fp16};
use crate::{NOPE_DIM, Parts, ROPE_DIM, Strided};

/// Rows of numbers of one type, in two parts.
#[derive(Debug, Clone, Copy)]
pub enum Rows<const D: usize> {
    /// bfloat16.
    Bf16(Parts<D>),
    /// IEEE binary16.
    Fp16(Parts<D>),
    /// float32.
    F32(Parts<D, f32>),
    /// `float8_e4m3fn`.
    E4m3(Parts<D, u8>),
}

impl<const D: usize> Rows<D> {
    /// The indexed extents.
    pub const fn shape(&self) -> [usize; D] {
        match self {
            Self::Bf16(parts) | Self::Fp16(parts) => parts.nope.shape(),
            Self::F32(parts) => parts.nope.shape(),
            Self::E4m3(parts) => parts.nope.shape(),
        }
    }

    /// Numbers of a row.
    pub const fn width(&self) -> usize {
        let rope = match self {
            Self::Bf16(parts) | Self::Fp16(parts) => parts.rope.is_some(),
            Self::F32(parts) => parts.rope.is_some(),
            Self::E4m3(parts) => parts.rope.is_some(),
        };
        if rope { NOPE_DIM + ROPE_DIM } else { NOPE_DIM }
    }

    /// The 16-bit parts, where they are such.
    pub(crate) const fn half(&self) -> Option<&Parts<D>> {
        match self {
            Self::Bf16(parts) | Self::Fp16(parts) => Some(parts),
            Self::F32(_) | Self::E4m3(_) => None,
        }
    }

    /// A row of [`Rows::width`] numbers.
    ///
    /// # Safety
    /// `index` lies in the shape and the rows are live memory that nobody writes.
    pub(crate) unsafe fn read(&self, index: [usize; D], out: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Bf16(parts) => parts.read(index, out, Bf16::widen),
                Self::Fp16(parts) => parts.read(index, out, Fp16::widen),
                Self::F32(parts) => parts.read(index, out, |row, out| out.copy_from_slice(row)),
                Self::E4m3(parts) => parts.read(index, out, |row, out| {
                    for (y, code) in out.iter_mut().zip(row) {
                        *y = E4M3[usize::from(*code)];
                    }
                }),
            }
        }
    }

    /// A row as bfloat16, rounded to nearest by way of `buffer`; one of bfloat16 bit for bit.
    ///
    /// # Safety
    /// As [`Rows::read`].
    pub(crate) unsafe fn read_bf16(&self, index: [usize; D], buffer: &mut [f32], out: &mut [u16]) {
        // SAFETY: the caller's promise.
        unsafe {
            if let Self::Bf16(parts) = self {
                return parts.read(index, out, |row, out| out.copy_from_slice(row));
            }
            self.read(index, buffer);
        }
        narrow(buffer, out);
    }
}

/// float32 to bfloat16.
pub(crate) fn narrow(numbers: &[f32], out: &mut [u16]) {
    for (y, x) in out.iter_mut().zip(numbers) {
        *y = bf16::from_f32(*x).to_bits();
    }
}

impl<const D: usize, T> Parts<D, T> {
    /// Both parts of a row, one behind the other.
    ///
    /// # Safety
    /// `index` lies in both parts, which describe live memory that nobody writes.
    unsafe fn read<Y>(&self, index: [usize; D], out: &mut [Y], widen: impl Fn(&[T], &mut [Y])) {
        let (nope, rope) = out.split_at_mut(NOPE_DIM);
        // SAFETY: the caller's promise.
        widen(unsafe { self.nope.row(index, NOPE_DIM) }, nope);
        if let Some(part) = &self.rope {
            // SAFETY: the caller's promise.
            widen(unsafe { part.row(index, ROPE_DIM) }, rope);
        }
    }
}

/// A paged cache of a quantised format, of one KV head.
#[derive(Debug, Clone, Copy)]
pub struct QuantisedCpu {
    /// What a token's bytes are.
    pub layout: &'static Layout,
    /// `[pages, page_size]`: the first byte of each token's row. Strides are in bytes and that of the tokens is
    /// positive; a split page has a token's row every [`Layout::row_bytes`] whatever it is.
    pub bytes: Strided<u8, 2>,
    /// What the numbers are multiplied by, where the layout has no scales of its own.
    pub scale: f32,
}

impl QuantisedCpu {
    /// Where the parts of a token begin: codes, scales, rope.
    ///
    /// # Safety
    /// `index` lies in the shape and the cache is live memory.
    unsafe fn place(&self, [page, offset]: [usize; 2]) -> [*const u8; 3] {
        let token_stride = self.bytes.strides()[1] as usize;
        let place = self
            .layout
            .place(offset, self.bytes.shape()[1], token_stride);
        // SAFETY: the parts of a token lie in its page (caller's promise).
        unsafe {
            let page = self.bytes.at([page, 0]);
            [place.codes, place.scales, place.rope].map(|start| page.add(start))
        }
    }

    /// # Safety
    /// `index` lies in the shape and the cache is live memory that nobody writes during `'a`.
    unsafe fn token<'a>(&self, index: [usize; 2]) -> Token<'a> {
        // SAFETY: the caller's promise; the parts have these lengths.
        unsafe {
            let [codes, scales, rope] = self.place(index);
            Token {
                codes: std::slice::from_raw_parts(codes, self.layout.code_bytes()),
                scales: std::slice::from_raw_parts(scales, self.layout.scale_bytes()),
                rope: std::slice::from_raw_parts(rope, self.layout.rope_bytes()),
            }
        }
    }

    /// # Safety
    /// As [`QuantisedCpu::token`]; the memory is writable and nobody else uses this token's during `'a`.
    unsafe fn token_mut<'a>(&self, index: [usize; 2]) -> TokenMut<'a> {
        // SAFETY: the caller's promise; the parts have these lengths and do not overlap.
        unsafe {
            let [codes, scales, rope] = self.place(index).map(<*const u8>::cast_mut);
            TokenMut {
                codes: std::slice::from_raw_parts_mut(codes, self.layout.code_bytes()),
                scales: std::slice::from_raw_parts_mut(scales, self.layout.scale_bytes()),
                rope: std::slice::from_raw_parts_mut(rope, self.layout.rope_bytes()),
            }
        }
    }

    /// A row of the layout's width.
    ///
    /// # Safety
    /// `index` lies in the shape and the cache is live memory that nobody writes.
    pub(crate) unsafe fn read(&self, index: [usize; 2], out: &mut [f32]) {
        // SAFETY: the caller's promise.
        let token = unsafe { self.token(index) };
        self.layout.dequantise(token, self.scale, out);
    }

    /// Quantises row `row` of `rows`, of the layout's width.
    ///
    /// # Safety
    /// Both indices lie in their shapes; all is live memory, the cache writable, and nobody else uses the token.
    pub(crate) unsafe fn write<const D: usize>(
        &self,
        index: [usize; 2],
        rows: &Rows<D>,
        row: [usize; D],
        round_scale: bool,
        buffer: &mut RowBuffer,
    ) {
        let (width, coded) = (self.layout.width, self.layout.coded);
        let (numbers, bits) = (&mut buffer.numbers[..width], &mut buffer.bits[..width]);
        // SAFETY: the caller's promise.
        let token = unsafe {
            if coded < width {
                rows.read_bf16(row, numbers, bits);
            }
            rows.read(row, numbers);
            self.token_mut(index)
        };
        let scaling = Scaling {
            tensor: self.scale,
            round: round_scale,
        };
        self.layout
            .quantise(&numbers[..coded], &bits[coded..], scaling, token);
    }
}

/// One row on its way to a quantised cache.
pub(crate) struct RowBuffer {
    numbers: [f32; MAX_WIDTH],
    bits: [u16; MAX_WIDTH],
}

impl RowBuffer {
    pub const EMPTY: Self = Self {
        numbers: [0.0; MAX_WIDTH],
        bits: [0; MAX_WIDTH],
    };
}

/// A paged cache.
#[derive(Debug, Clone, Copy)]
pub enum CacheCpu {
    /// Rows of `[pages, page_size, h_kv]`.
    Plain(Rows<3>),
    /// Quantised rows, of one KV head.
    Quantised(QuantisedCpu),
}

impl CacheCpu {
    /// `[pages, page_size, h_kv]`.
    pub const fn shape(&self) -> [usize; 3] {
        match self {
            Self::Plain(rows) => rows.shape(),
            Self::Quantised(cache) => {
                let [pages, page_size] = cache.bytes.shape();
                [pages, page_size, 1]
            }
        }
    }

    /// Numbers of a row.
    pub const fn width(&self) -> usize {
        match self {
            Self::Plain(rows) => rows.width(),
            Self::Quantised(cache) => cache.layout.width,
        }
    }

    /// A row of [`CacheCpu::width`] numbers: page, offset, KV head.
    ///
    /// # Safety
    /// `index` lies in the shape and the cache is live memory that nobody writes.
    pub(crate) unsafe fn read(&self, index: [usize; 3], out: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Plain(rows) => rows.read(index, out),
                Self::Quantised(cache) => cache.read([index[0], index[1]], out),
            }
        }
    }

    /// A row as bfloat16.
    ///
    /// # Safety
    /// As [`CacheCpu::read`].
    pub(crate) unsafe fn read_bf16(&self, index: [usize; 3], buffer: &mut [f32], out: &mut [u16]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Plain(rows) => rows.read_bf16(index, buffer, out),
                Self::Quantised(cache) => {
                    cache.read([index[0], index[1]], buffer);
                    narrow(buffer, out);
                }
            }
        }
    }
}
