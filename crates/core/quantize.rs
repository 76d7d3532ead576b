//! Whole caches to a quantised format and back: `quantize_kv`, `dequantize_kv`.

use crate::dtype::{Device, KvFormat};
use crate::error::Result;
use crate::view::{Stream, View};
use crate::{check_cache, cpu, cuda};

/// The arguments of [`quantize_kv`].
#[derive(Debug, Clone)]
pub struct QuantizeArgs {
    /// `[n, P, d_qk]` or `[n, P, 1, d_qk]`, bf16, fp16 or float32.
    pub kv: View,
    /// `[n, P, bytes]` or `[n, P, 1, bytes]`, uint8, int8 or e4m3: written.
    pub out: View,
    /// Of `out`: a quantised format.
    pub kv_format: KvFormat,
    /// What the numbers of an `fp8` cache are multiplied by, as float32; 1 when `None`. Only for that format.
    pub kv_scale: Option<f64>,
    /// Round the float32 scales of `fp8_v32` up to powers of two. Those of the other formats always are, or
    /// never.
    pub round_scale: bool,
    /// Where to launch.
    pub stream: Stream,
}

impl QuantizeArgs {
    /// Arguments with the defaults: scales that are powers of two, stream 0.
    pub fn new(kv: View, out: View, kv_format: KvFormat) -> Self {
        Self {
            kv,
            out,
            kv_format,
            kv_scale: None,
            round_scale: true,
            stream: Stream::default(),
        }
    }
}

/// Quantises every token of a cache.
///
/// With `amax` the largest magnitude of a group of numbers that share a scale, the scale is `amax / 448`
/// (`fp4_v41`: `amax / 6` as e4m3), and a code the nearest to `number / scale`, ties to even; what is too large
/// becomes the largest code. Rotary parts that are bf16 stay what they are, bit for bit.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode).
///
/// ```
/// use ferromla::{DType, KvFormat, QuantizeArgs, View, quantize_kv};
/// let (kv, mut out) = (vec![448f32; 64 * 512], vec![0u8; 64 * 528]); // a page of 64 tokens
/// let args = QuantizeArgs::new(
///     View::of(&kv, DType::F32, &[1, 64, 512])?,
///     View::of_mut(&mut out, DType::U8, &[1, 64, 528])?,
///     KvFormat::Fp8V41,
/// );
/// // SAFETY: the views are of the vectors above.
/// unsafe { quantize_kv(&args)? };
/// assert_eq!((out[0], out[512]), (0x7e, 127)); // the largest code, and the scale 2^0
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn quantize_kv(args: &QuantizeArgs) -> Result<()> {
    let problem = check_cache::quantize(args)?;
    if problem.cache.num_pages == 0 {
        return Ok(());
    }
    match problem.device {
        // SAFETY: the caller's promise, and the problem has been checked.
        Device::Cpu => unsafe { cpu::quantize(&problem) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::quantize(ordinal, &problem) },
    }
}

/// The arguments of [`dequantize_kv`].
#[derive(Debug, Clone)]
pub struct DequantizeArgs {
    /// `[n, P, bytes]` or `[n, P, 1, bytes]`, uint8, int8 or e4m3.
    pub cache: View,
    /// `[n, P, d_qk]`, bf16 or float32: written.
    pub out: View,
    /// Of the cache; `None`: `fp8` if it is e4m3.
    pub kv_format: Option<KvFormat>,
    /// What the numbers of an `fp8` cache are multiplied by, as float32; 1 when `None`. Only for that format.
    pub kv_scale: Option<f64>,
    /// Where to launch.
    pub stream: Stream,
}

impl DequantizeArgs {
    /// Arguments with the defaults: the format that the cache's element type says, stream 0.
    pub fn new(cache: View, out: View) -> Self {
        Self {
            cache,
            out,
            kv_format: None,
            kv_scale: None,
            stream: Stream::default(),
        }
    }
}

/// Dequantises every token of a cache: the product of code and scale in float32, then in the type of `out`.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode).
///
/// ```
/// use ferromla::{DType, DequantizeArgs, View, dequantize_kv};
/// let (cache, mut out) = (vec![0x38u8; 16 * 576], vec![0f32; 16 * 576]); // 1 in e4m3
/// let args = DequantizeArgs {
///     kv_scale: Some(0.25),
///     ..DequantizeArgs::new(
///         View::of(&cache, DType::F8E4M3, &[1, 16, 576])?,
///         View::of_mut(&mut out, DType::F32, &[1, 16, 576])?,
///     )
/// };
/// // SAFETY: the views are of the vectors above.
/// unsafe { dequantize_kv(&args)? };
/// assert_eq!(out, [0.25; 16 * 576]);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn dequantize_kv(args: &DequantizeArgs) -> Result<()> {
    let problem = check_cache::dequantize(args)?;
    if problem.cache.num_pages == 0 {
        return Ok(());
    }
    match problem.device {
        // SAFETY: the caller's promise, and the problem has been checked.
        Device::Cpu => unsafe { cpu::dequantize(&problem) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::dequantize(ordinal, &problem) },
    }
}
