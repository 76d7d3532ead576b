//! `quantize_kv` and `dequantize_kv`: whole caches, token by token.

use rayon::prelude::*;

use crate::rows::{RowBuffer, narrow};
use crate::{QuantisedCpu, Rows, Strided};

/// Tokens that one thread takes at least.
const TOKENS_PER_TASK: usize = 64;

/// Arguments of [`quantize_kv`].
#[derive(Debug, Clone, Copy)]
pub struct QuantizeCpu {
    /// Rows of `[pages, page_size]`, as wide as the cache's layout says.
    pub rows: Rows<2>,
    /// Of the same pages.
    pub cache: QuantisedCpu,
    /// Round float32 scales up to powers of two.
    pub round_scale: bool,
}

/// Quantises every row.
///
/// # Safety
/// Rows and cache describe live memory for the whole call; the cache is writable, used by nobody else, overlaps
/// no input, and its tokens do not overlap each other.
///
/// ```
/// use ferromla_cpu::{Parts, QuantisedCpu, QuantizeCpu, Rows, Strided, quantize_kv};
/// let (rows, mut cache) = ([448f32; 512], [0u8; 528]); // one page of one token
/// let args = QuantizeCpu {
///     rows: Rows::F32(Parts { nope: Strided::new(rows.as_ptr(), [1, 1], [512, 512]), rope: None }),
///     cache: QuantisedCpu {
///         layout: &ferromla_format::FP8_V41,
///         bytes: Strided::new(cache.as_mut_ptr(), [1, 1], [528, 528]),
///         scale: 1.0,
///     },
///     round_scale: true,
/// };
/// // SAFETY: the views describe the arrays above.
/// unsafe { quantize_kv(&args) };
/// assert_eq!((cache[0], cache[512]), (0x7e, 127));
/// ```
pub unsafe fn quantize_kv(args: &QuantizeCpu) {
    for_each_token(
        args.rows.shape(),
        || RowBuffer::EMPTY,
        |buffer, index| {
            // SAFETY: the index lies in both shapes and is this closure's alone; the rest is the caller's promise.
            unsafe {
                args.cache
                    .write(index, &args.rows, index, args.round_scale, buffer)
            }
        },
    );
}

/// Rows that numbers are written to.
#[derive(Debug, Clone, Copy)]
pub enum OutRows {
    /// bfloat16.
    Bf16(Strided<u16, 2>),
    /// float32.
    F32(Strided<f32, 2>),
}

/// Arguments of [`dequantize_kv`].
#[derive(Debug, Clone, Copy)]
pub struct DequantizeCpu {
    /// What is dequantised.
    pub cache: QuantisedCpu,
    /// Rows of its pages and tokens, as wide as its layout says.
    pub out: OutRows,
}

/// Dequantises every token.
///
/// # Safety
/// Cache and `out` describe live memory for the whole call; `out` is writable, used by nobody else, overlaps no
/// input, and its rows do not overlap each other.
///
/// ```
/// use ferromla_cpu::{DequantizeCpu, OutRows, QuantisedCpu, Strided, dequantize_kv};
/// let (cache, mut out) = ([0x38u8; 512], [0f32; 512]); // one page of one token of ones
/// let args = DequantizeCpu {
///     cache: QuantisedCpu {
///         layout: &ferromla_format::FP8_512,
///         bytes: Strided::new(cache.as_ptr(), [1, 1], [512, 512]),
///         scale: 0.5,
///     },
///     out: OutRows::F32(Strided::new(out.as_mut_ptr(), [1, 1], [512, 512])),
/// };
/// // SAFETY: the views describe the arrays above.
/// unsafe { dequantize_kv(&args) };
/// assert_eq!(out, [0.5; 512]);
/// ```
pub unsafe fn dequantize_kv(args: &DequantizeCpu) {
    let (cache, width) = (&args.cache, args.cache.layout.width);
    for_each_token(
        cache.bytes.shape(),
        || vec![0.0; width],
        |buffer, index| {
            // SAFETY: the index lies in both shapes and is this closure's alone; the rest is the caller's promise.
            unsafe {
                match &args.out {
                    OutRows::F32(out) => cache.read(index, out.row_mut(index, width)),
                    OutRows::Bf16(out) => {
                        cache.read(index, buffer);
                        narrow(buffer, out.row_mut(index, width));
                    }
                }
            }
        },
    );
}

fn for_each_token<T>(
    [pages, page_size]: [usize; 2],
    init: impl Fn() -> T + Sync + Send,
    each: impl Fn(&mut T, [usize; 2]) + Sync + Send,
) {
    (0..pages * page_size)
        .into_par_iter()
        .with_min_len(TOKENS_PER_TASK)
        .for_each_init(init, |state, token| {
            each(state, [token / page_size, token % page_size]);
        });
}
