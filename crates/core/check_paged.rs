//! Checks of paged caches: 16-bit numbers in one or two parts, or the bytes of a quantised format.

use std::fmt;

use ferromla_format::Layout;

use crate::check::{Access, Arg, Last};
use crate::check_parts::{PartNames, lead, rows};
use crate::dtype::{DType, Device, KvFormat};
use crate::error::{Error, Result};
use crate::problem::{CacheRows, PagedCache, Strided};
use crate::view::Parts;

/// What the bytes of a quantised cache may come as.
const BYTE_TYPES: [DType; 3] = [DType::U8, DType::I8, DType::F8E4M3];

/// A cache as a call was given it.
pub(crate) struct CacheArg<'a> {
    pub names: &'static PartNames,
    pub parts: &'a Parts,
    /// The name of the argument that says the format.
    pub format_name: &'static str,
    pub format: Option<KvFormat>,
    /// `kv_scale`.
    pub scale: Option<f64>,
}

impl<'a> CacheArg<'a> {
    pub fn lead(&self) -> Arg<'a> {
        lead(self.parts, self.names)
    }

    /// Ranks, and the dimensions before the last. A cache of a sparse prefill without pages comes as one of pages of one
    /// token, unless it has not two strides: it is refused for that.
    fn layout(&self) -> (&'static [usize], &'static str) {
        match self.names[0] {
            "kv" => (&[2, 3, 4], "tokens or num_pages, page_size, (heads)"),
            _ => (&[3, 4], "num_pages, page_size, (heads)"),
        }
    }

    /// `[n, P, d]` or `[n, P, h_kv, d]` on `device`.
    pub fn check(&self, device: (Device, &str), access: Access) -> Result<PagedCache> {
        let lead = self.lead();
        let format = self.format()?;
        let scale = kv_scale(self.scale, format)?;
        lead.device(device.0, device.1)?;
        let rows = if format.layouts().is_empty() {
            let (ranks, layout) = self.layout();
            let rows = rows::<3>(self.parts, self.names, ranks, layout, access)?;
            CacheRows::Half(rows)
        } else {
            self.bytes(format, access)?
        };
        let shape = lead.shape();
        let kv_heads = if shape.len() == 4 { shape[2] } else { 1 };
        for (axis, dim, what) in [
            (1, shape[1], "page_size"),
            (2, kv_heads, "the number of KV heads"),
        ] {
            if dim < 1 {
                let value = format!("of shape {}", lead.view.shape());
                let rule = format!("dimension {axis}, {what}, is at least 1");
                return Err(Error::invalid(lead.name, value, rule));
            }
        }
        Ok(PagedCache {
            rows,
            format,
            scale,
            num_pages: shape[0] as i32,
            page_size: shape[1] as i32,
            kv_heads: kv_heads as i32,
        })
    }

    /// The format given, or that of the element type; and that the two agree.
    fn format(&self) -> Result<KvFormat> {
        let lead = self.lead();
        let dtype = lead.view.dtype();
        let by_dtype = match dtype {
            DType::Bf16 => Some(KvFormat::Bf16),
            DType::Fp16 => Some(KvFormat::Fp16),
            DType::F8E4M3 => Some(KvFormat::Fp8),
            _ => None,
        };
        let Some(format) = self.format.or(by_dtype) else {
            let value = format!("None with {} of type {dtype}", lead.name);
            let rule = "only a bfloat16, float16 or float8_e4m3fn cache tells its format";
            return Err(Error::invalid(self.format_name, value, rule));
        };
        let fits = match format.dtype() {
            Some(half) => half == dtype,
            None => BYTE_TYPES.contains(&dtype),
        };
        if fits {
            return Ok(format);
        }
        let rule = match format.dtype() {
            Some(_) => format!("{} is {dtype}", lead.name),
            None => format!(
                "{} is {dtype}, and the bytes of a quantised cache are uint8, int8 or float8_e4m3fn",
                lead.name
            ),
        };
        Err(Error::invalid(self.format_name, format, rule))
    }

    /// `[n, P, bytes]` or `[n, P, 1, bytes]`.
    fn bytes(&self, format: KvFormat, access: Access) -> Result<CacheRows> {
        let arg = self.lead();
        if matches!(self.parts, Parts::Two(..)) {
            let rule = format!("a cache of the format {format} is one tensor");
            return Err(Error::invalid(self.names[0], "a pair", rule));
        }
        let sizes = Sizes(format.layouts());
        let layout =
            format_args!("[num_pages, page_size, {sizes}] or [num_pages, page_size, 1, {sizes}]");
        let shape = arg.rank(self.layout().0, layout)?;
        let last = shape.len() - 1;
        let of_size = |layout: &&Layout| layout.bytes() as i64 == shape[last];
        let Some(layout) = format.layouts().iter().find(of_size) else {
            let value = format!("of shape {}", arg.view.shape());
            let rule = format!(
                "the last dimension is {sizes}, the bytes of a token of the format {format}"
            );
            return Err(Error::invalid(arg.name, value, rule));
        };
        if last == 3 {
            arg.dim(2, 1, format_args!("the KV heads of the format {format}"))?;
        }
        // A split page has no rows of this width: its own rules follow.
        let rows = if layout.split { Last::Unit } else { Last::Rows };
        arg.memory(rows, access)?;
        page_strides(&arg, layout)?;
        let [page, token, ..] = arg.strided::<4>().strides;
        Ok(CacheRows::Bytes {
            layout,
            pages: Strided {
                ptr: arg.view.ptr(),
                strides: [page, token],
            },
        })
    }
}

/// Bytes of a token, for an error to name.
struct Sizes(&'static [Layout]);

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, layout) in self.0.iter().enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { " or " }, layout.bytes())?;
        }
        Ok(())
    }
}

/// Tokens come one after another, and densely in a split page, which its scales end.
fn page_strides(arg: &Arg<'_>, layout: &Layout) -> Result<()> {
    let (shape, bytes) = (arg.shape(), layout.bytes() as i64);
    if shape.contains(&0) {
        return Ok(());
    }
    let stride = |axis: usize| arg.view.strides()[axis];
    if shape[1] > 1 && stride(1) < bytes {
        let rule = format!("a token has {bytes} bytes");
        return Err(arg.stride_error(1, rule));
    }
    if !layout.split {
        return Ok(());
    }
    if shape[1] > 1 && stride(1) != bytes {
        let rule =
            format!("tokens are {bytes} bytes apart where their scales come after their rows");
        return Err(arg.stride_error(1, rule));
    }
    if shape[0] > 1 && stride(0) < shape[1] * bytes {
        let rule = format!("a page has {} bytes", shape[1] * bytes);
        return Err(arg.stride_error(0, rule));
    }
    if arg.view.device().is_cuda() {
        arg.aligned(0..1)?;
    }
    Ok(())
}

/// How kernels on CUDA find the rows of a quantised cache, and of one beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// Wherever they are: rows that stay codes in shared memory.
    Anywhere,
    /// In units of 16 bytes from the cache's beginning, in 32 bits: rows that are converted on their way there.
    ByUnits,
}

/// What units reach.
const CUDA_REACH: i64 = 1 << 36;
/// Bytes from the beginning of a page that are reached.
const CUDA_PAGE_REACH: i64 = 1 << 31;

/// Attention reaches every token of a quantised cache.
pub(crate) fn in_reach(arg: &Arg<'_>, cache: &PagedCache, rows: Rows) -> Result<()> {
    match &cache.rows {
        CacheRows::Half(_) => Ok(()),
        CacheRows::Bytes { layout, pages } => {
            let row = layout.bytes() as i64;
            let kind = "a quantised cache";
            reached(arg, cache, pages.strides, row, kind, rows)
        }
    }
}

/// And of a cache of 16-bit numbers that is read as one, beside it: `arg` is the cache, or a part of it.
pub(crate) fn in_reach_beside_codes(arg: &Arg<'_>, cache: &PagedCache) -> Result<()> {
    let size = arg.view.dtype().size() as i64;
    let strides = arg.strided::<2>().strides.map(|stride| stride * size);
    let row = arg.shape().last().map_or(0, |width| width * size);
    let kind = "a cache beside a quantised one";
    reached(arg, cache, strides, row, kind, Rows::ByUnits)
}

/// Strides of page and token, and the length of a row, in bytes.
fn reached(
    arg: &Arg<'_>,
    cache: &PagedCache,
    [page, token]: [i64; 2],
    row: i64,
    kind: &str,
    rows: Rows,
) -> Result<()> {
    if !arg.view.device().is_cuda() || arg.shape().contains(&0) {
        return Ok(());
    }
    let (num_pages, page_size) = (i64::from(cache.num_pages), i64::from(cache.page_size));
    let bytes = page_size * row;
    let refuse = |value: String, rule: String| Err(Error::unsupported(arg.name, value, rule));
    for (axis, stride) in [page, token].into_iter().enumerate() {
        if stride < 0 {
            let value = format!("of stride {stride} bytes along dimension {axis}");
            let rule = format!("on CUDA pages and tokens of {kind} follow one another");
            return refuse(value, rule);
        }
    }
    if bytes >= CUDA_PAGE_REACH {
        let value = format!("of pages of {bytes} bytes");
        return refuse(
            value,
            format!("on CUDA a page of {kind} is smaller than 2 GiB"),
        );
    }
    let end = (num_pages - 1) * page + bytes.max((page_size - 1) * token + row);
    if rows == Rows::ByUnits && end > CUDA_REACH {
        let rule = format!(
            "on CUDA at most 64 GiB of {kind} are reached by lists of rows of 512, \
             and where one cache has codes and the other 16-bit numbers"
        );
        return refuse(format!("of {end} bytes"), rule);
    }
    Ok(())
}

/// The factor of the numbers of a cache of this format.
fn kv_scale(given: Option<f64>, format: KvFormat) -> Result<f32> {
    let Some(scale) = given else {
        return Ok(1.0);
    };
    if format != KvFormat::Fp8 {
        let value = format!("{scale} with the format {format}");
        return Err(Error::invalid(
            "kv_scale",
            value,
            "None: only fp8 caches have one",
        ));
    }
    positive("kv_scale", scale)
}

/// A factor that float32 holds, above 0.
pub(crate) fn positive(name: &'static str, scale: f64) -> Result<f32> {
    let rule = "a positive number that float32 holds";
    positive_f32(scale).ok_or_else(|| Error::invalid(name, scale, rule))
}

/// The factor as float32, if that holds it, above 0.
pub(crate) fn positive_f32(factor: f64) -> Option<f32> {
    Some(factor as f32).filter(|rounded| *rounded > 0.0 && rounded.is_finite())
}
