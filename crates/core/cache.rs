//! Writing to and reading from a paged cache: `append_kv`, `gather_kv`, `cache_shape`.

use crate::dtype::{DType, KvFormat};
use crate::error::{Error, Result};
use crate::view::{Dims, Parts, Stream, View};

/// The arguments of [`append_kv`].
#[derive(Debug, Clone)]
pub struct AppendArgs {
    /// `[t, 512]`: the latent parts of the new tokens, in the cache's type.
    pub kv_c: View,
    /// `[t, 64]`: their rotary parts; `None` for a cache of `d_qk` 512.
    pub k_pe: Option<View>,
    /// `[n, P, d_qk]` or `[n, P, 1, d_qk]`, or the pair of parts; written.
    pub kv_cache: Parts,
    /// `[t]` int64: `page * P + offset`; negative slots are skipped.
    pub slots: View,
    /// `None`: the cache's element type says it.
    pub kv_format: Option<KvFormat>,
    /// Where to launch.
    pub stream: Stream,
}

/// Writes new tokens into their slots of a paged cache. A slot past the cache is skipped too.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode). Two tokens with one slot leave either of them there.
pub unsafe fn append_kv(args: &AppendArgs) -> Result<()> {
    let _ = args;
    Err(Error::unsupported("kv_cache", "any", "not in this build"))
}

/// Which tokens [`gather_kv`] takes.
#[derive(Debug, Clone)]
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
    /// `[n, P, d_qk]` or `[n, P, 1, d_qk]`, or the pair of parts.
    pub cache: Parts,
    /// Which tokens.
    pub source: GatherSource,
    /// `[t, d_qk]` bf16. Rows past the last token are zeroed; tokens past the last row are dropped.
    pub out: View,
    /// `None`: the cache's element type says it.
    pub kv_format: Option<KvFormat>,
    /// Where to launch.
    pub stream: Stream,
}

/// Copies cached tokens to one contiguous bf16 array. Absent tokens (a page id outside the cache) give zeros.
///
/// # Errors
/// As [`decode`](crate::decode).
///
/// # Safety
/// As for [`decode`](crate::decode).
pub unsafe fn gather_kv(args: &GatherArgs) -> Result<()> {
    let _ = args;
    Err(Error::unsupported("cache", "any", "not in this build"))
}

/// How to allocate a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// `[num_pages, page_size, d_qk]`.
    pub shape: Dims,
    /// In elements.
    pub strides: Dims,
    /// Element type.
    pub dtype: DType,
    /// Of the whole allocation.
    pub bytes: u64,
}

/// Shape, strides and bytes of an empty cache.
///
/// # Errors
/// [`Error::InvalidArgument`] for a negative size, a `page_size` of 0, a `d_qk` other than 576 and 512, or
/// more bytes than an address can name; [`Error::Unsupported`] for a quantised format.
pub fn cache_shape(
    num_pages: i64,
    page_size: i64,
    kv_format: KvFormat,
    d_qk: i64,
) -> Result<CacheShape> {
    let _ = (num_pages, page_size, kv_format, d_qk);
    Err(Error::unsupported("kv_format", "any", "not in this build"))
}
