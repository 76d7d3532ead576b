//! Writing to and reading from a paged cache: `append_kv`, `gather_kv`, `cache_shape`.

use crate::dtype::{DType, Device, KvFormat};
use crate::error::{Error, Result};
use crate::view::{Dims, Parts, Stream, View};
use crate::{check_cache, cpu, cuda, values};

/// The arguments of [`append_kv`].
#[derive(Debug, Clone)]
pub struct AppendArgs {
    /// `[t, 512]`: the latent parts of the new tokens, in the cache's type; for a quantised cache bf16, fp16 or
    /// float32.
    pub kv_c: View,
    /// `[t, 64]`: their rotary parts, in the type of `kv_c`; `None` for a cache of `d_qk` 512.
    pub k_pe: Option<View>,
    /// `[n, P, d_qk]` or `[n, P, 1, d_qk]`, or the pair of parts; quantised `[n, P, bytes]` or
    /// `[n, P, 1, bytes]`. Written.
    pub kv_cache: Parts,
    /// `[t]` int64: `page * P + offset`; negative slots are skipped.
    pub slots: View,
    /// `None`: the cache's element type says it (bf16, fp16; e4m3: `fp8`).
    pub kv_format: Option<KvFormat>,
    /// What the numbers of an `fp8` cache are multiplied by, as float32; 1 when `None`. Only for that format.
    pub kv_scale: Option<f64>,
    /// Round the float32 scales of `fp8_v32` up to powers of two. Those of the other formats always are, or
    /// never.
    pub round_scale: bool,
    /// Where to launch.
    pub stream: Stream,
}

impl AppendArgs {
    /// Arguments with the defaults: the format that the cache's element type says, scales that are powers of two,
    /// stream 0.
    pub fn new(kv_c: View, k_pe: Option<View>, kv_cache: Parts, slots: View) -> Self {
        Self {
            kv_c,
            k_pe,
            kv_cache,
            slots,
            kv_format: None,
            kv_scale: None,
            round_scale: true,
            stream: Stream::default(),
        }
    }
}

/// Writes new tokens into their slots of a paged cache, quantised where its format is. A slot past the cache is
/// skipped too.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode). Two tokens with one slot leave either of them there.
///
/// ```
/// use ferromla::{AppendArgs, DType, View, append_kv};
/// let (latent, slots) = ([7u16; 512], [64i64 + 5]); // one token, into slot 5 of page 1
/// let mut cache = vec![0u16; 2 * 64 * 512];
/// let args = AppendArgs::new(
///     View::of(&latent, DType::Bf16, &[1, 512])?,
///     None, // rows of 512 have no rotary part
///     View::of_mut(&mut cache, DType::Bf16, &[2, 64, 512])?.into(),
///     View::of(&slots, DType::I64, &[1])?,
/// );
/// // SAFETY: the views are of the arrays above.
/// unsafe { append_kv(&args)? };
/// assert_eq!(cache.iter().position(|&x| x == 7), Some((64 + 5) * 512));
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn append_kv(args: &AppendArgs) -> Result<()> {
    let problem = check_cache::append(args)?;
    if problem.tokens == 0 {
        return Ok(());
    }
    if values::checked() {
        // SAFETY: the slots are live (the caller's promise) and have been checked.
        unsafe { values::slots(&problem)? };
    }
    match problem.device {
        // SAFETY: the caller's promise, and the problem has been checked.
        Device::Cpu => unsafe { cpu::append(&problem) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::append(ordinal, &problem) },
    }
}

/// Which tokens [`gather_kv`] takes.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)] // lives for one call, and views are `Copy`
pub enum GatherSource {
    /// The tokens of each request, one request after another.
    Pages {
        /// `[b, max_pages]` int32.
        block_table: View,
        /// `[b]` int32.
        seq_lens: View,
        /// `[b + 1]` int64, written: request `r` is rows `offsets[r] .. offsets[r + 1]` of `out`.
        offsets_out: View,
    },
    /// `[t]` int32 or int64: physical ids `page * P + offset`; an id outside the cache gives zeros.
    Ids(View),
}

/// The arguments of [`gather_kv`].
#[derive(Debug, Clone)]
pub struct GatherArgs {
    /// `[n, P, d_qk]` or `[n, P, 1, d_qk]`, or the pair of parts; quantised `[n, P, bytes]` or
    /// `[n, P, 1, bytes]`.
    pub cache: Parts,
    /// Which tokens.
    pub source: GatherSource,
    /// `[t, d_qk]` bf16. Rows past the last token are zeroed; tokens past the last row are dropped.
    pub out: View,
    /// `None`: the cache's element type says it (bf16, fp16; e4m3: `fp8`).
    pub kv_format: Option<KvFormat>,
    /// What the numbers of an `fp8` cache are multiplied by, as float32; 1 when `None`. Only for that format.
    pub kv_scale: Option<f64>,
    /// Where to launch.
    pub stream: Stream,
}

impl GatherArgs {
    /// Arguments with the defaults: the format that the cache's element type says, stream 0.
    pub fn new(cache: Parts, source: GatherSource, out: View) -> Self {
        Self {
            cache,
            source,
            out,
            kv_format: None,
            kv_scale: None,
            stream: Stream::default(),
        }
    }
}

/// Copies cached tokens to one contiguous bf16 array, dequantised. Absent tokens (a page id outside the cache) give zeros.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode).
///
/// ```
/// use ferromla::{DType, GatherArgs, GatherSource, View, gather_kv};
/// let (cache, ids) = (vec![7u16; 2 * 64 * 512], [64i64, -1]); // the first of page 1, and an absent one
/// let mut out = [1u16; 2 * 512];
/// let args = GatherArgs::new(
///     View::of(&cache, DType::Bf16, &[2, 64, 512])?.into(),
///     GatherSource::Ids(View::of(&ids, DType::I64, &[2])?),
///     View::of_mut(&mut out, DType::Bf16, &[2, 512])?,
/// );
/// // SAFETY: the views are of the arrays above.
/// unsafe { gather_kv(&args)? };
/// assert_eq!((out[0], out[512]), (7, 0));
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn gather_kv(args: &GatherArgs) -> Result<()> {
    let problem = check_cache::gather(args)?;
    if values::checked() {
        // SAFETY: the index arrays are live (the caller's promise) and have been checked.
        unsafe { values::gather(&problem)? };
    }
    match problem.device {
        // SAFETY: the caller's promise, and the problem has been checked.
        Device::Cpu => unsafe { cpu::gather(&problem) },
        // SAFETY: as above.
        Device::Cuda(ordinal) => unsafe { cuda::gather(ordinal, &problem) },
    }
}

/// Numbers of a cached row: what [`gather_kv`] and [`dequantize_kv`](crate::dequantize_kv) write for each token.
///
/// # Errors
/// As [`gather_kv`], for `cache`.
///
/// ```
/// use ferromla::{DType, KvFormat, View, cache_d_qk};
/// let bytes = vec![0u8; 64 * 656];
/// let cache = View::of(&bytes, DType::U8, &[1, 64, 656])?;
/// assert_eq!(cache_d_qk(&cache.into(), Some(KvFormat::Fp8V32)), Ok(576));
/// # Ok::<(), ferromla::Error>(())
/// ```
pub fn cache_d_qk(cache: &Parts, kv_format: Option<KvFormat>) -> Result<i64> {
    check_cache::width(cache, kv_format)
}

/// How to allocate a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// `[num_pages, page_size, d_qk]`, of a quantised format `[num_pages, page_size, bytes]`.
    pub shape: Dims,
    /// In elements. Pages of `fp8_v4` begin on multiples of 576 bytes, those of `fp8_v41_split` of 512.
    pub strides: Dims,
    /// Element type: that of the numbers where they are all of one type, else uint8.
    pub dtype: DType,
    /// Of the whole allocation.
    pub bytes: u64,
}

/// Shape, strides and bytes of an empty cache.
///
/// # Errors
/// [`Error::InvalidArgument`] for a negative size, a `page_size` of 0, a `d_qk` that is not one of
/// [`KvFormat::d_qk`], or more bytes than an address can name.
///
/// ```
/// use ferromla::{KvFormat, cache_shape};
/// let cache = cache_shape(100, 64, KvFormat::Bf16, 576)?;
/// assert_eq!((&cache.shape[..], cache.bytes), (&[100, 64, 576][..], 100 * 64 * 1152));
/// let cache = cache_shape(100, 64, KvFormat::Fp8V4, 512)?;
/// assert_eq!((&cache.shape[..], cache.strides[0]), (&[100, 64, 584][..], 37_440));
/// # Ok::<(), ferromla::Error>(())
/// ```
pub fn cache_shape(
    num_pages: i64,
    page_size: i64,
    kv_format: KvFormat,
    d_qk: i64,
) -> Result<CacheShape> {
    for (name, value, low) in [("num_pages", num_pages, 0), ("page_size", page_size, 1)] {
        if !(low..=i64::from(i32::MAX)).contains(&value) {
            return Err(Error::invalid(
                name,
                value,
                format!("between {low} and {}", i32::MAX),
            ));
        }
    }
    if !kv_format.d_qk().contains(&d_qk) {
        let widths: Vec<_> = kv_format.d_qk().iter().map(i64::to_string).collect();
        let rule = format!("{} for the format {kv_format}", widths.join(" or "));
        return Err(Error::invalid("d_qk", d_qk, rule));
    }
    let layout = kv_format
        .layouts()
        .iter()
        .find(|layout| layout.width as i64 == d_qk);
    let dtype = kv_format.dtype().unwrap_or(match kv_format {
        KvFormat::Fp8 => DType::F8E4M3,
        _ => DType::U8,
    });
    let width = layout.map_or(d_qk, |layout| layout.bytes() as i64);
    // Pages are whole multiples of this many elements.
    let unit = layout.map_or(1, |layout| layout.page_alignment() as i64);
    let page = (page_size * width + unit - 1) / unit * unit;
    let bytes = i128::from(num_pages) * i128::from(page) * i128::from(dtype.size());
    if bytes > i128::from(i64::MAX) {
        return Err(Error::invalid(
            "num_pages",
            num_pages,
            "a cache of fewer than 2^63 bytes",
        ));
    }
    Ok(CacheShape {
        shape: Dims::new(&[num_pages, page_size, width]),
        strides: Dims::new(&[page, width, 1]),
        dtype,
        bytes: bytes as u64,
    })
}
