//! Problems: what is left of a call once its arguments are checked. From here on nobody asks where an array
//! came from, and nothing can be refused any more except by the driver.

use ferromla_format::Layout;

use crate::dtype::{DType, Device, KvFormat};
use crate::lengths::Lengths;
use crate::view::Stream;

/// Width of the latent part of a cached row, and of an output row.
pub(crate) const NOPE_DIM: i64 = 512;
/// Width of the rotary part.
pub(crate) const ROPE_DIM: i64 = 64;

/// An address and the strides, in elements, of the dimensions before the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Strided<const N: usize> {
    pub ptr: u64,
    pub strides: [i64; N],
}

impl<const N: usize> Strided<N> {
    /// No array at all.
    pub const NONE: Self = Self {
        ptr: 0,
        strides: [0; N],
    };
}

impl Strided<1> {
    /// As an array with a second dimension, along which nothing changes.
    pub const fn constant(&self) -> Strided<2> {
        Strided {
            ptr: self.ptr,
            strides: [self.strides[0], 0],
        }
    }
}

impl Strided<2> {
    /// The first of every row.
    pub const fn first(&self) -> Strided<1> {
        Strided {
            ptr: self.ptr,
            strides: [self.strides[0]],
        }
    }

    /// Strides of token and head, as those of an array whose requests share one token axis.
    pub fn without_requests(&self) -> Strided<3> {
        Strided {
            ptr: self.ptr,
            strides: [0, self.strides[0], self.strides[1]],
        }
    }
}

/// Rows in two parts. One tensor of 576 is two parts with the same strides; 512 has no rotary part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TwoParts<const N: usize> {
    pub nope: Strided<N>,
    pub rope: Option<Strided<N>>,
}

impl<const N: usize> TwoParts<N> {
    /// Row width.
    pub fn dim(&self) -> i64 {
        NOPE_DIM + if self.rope.is_some() { ROPE_DIM } else { 0 }
    }
}

impl TwoParts<2> {
    pub fn without_requests(&self) -> TwoParts<3> {
        TwoParts {
            nope: self.nope.without_requests(),
            rope: self.rope.as_ref().map(Strided::without_requests),
        }
    }
}

/// The rows of a paged cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheRows {
    /// 16-bit numbers; strides of page, token, KV head.
    Half(TwoParts<3>),
    /// Quantised, of one KV head.
    Bytes {
        layout: &'static Layout,
        /// Strides of page and token, in bytes. Pages that are split know no token stride.
        pages: Strided<2>,
    },
}

/// A paged cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PagedCache {
    pub rows: CacheRows,
    pub format: KvFormat,
    /// `kv_scale`: what the numbers of an `"fp8"` cache are multiplied by, 1 for every other format.
    pub scale: f32,
    pub num_pages: i32,
    pub page_size: i32,
    pub kv_heads: i32,
}

impl PagedCache {
    /// Row width.
    pub fn dim(&self) -> i64 {
        match &self.rows {
            CacheRows::Half(rows) => rows.dim(),
            CacheRows::Bytes { layout, .. } => layout.width as i64,
        }
    }
}

/// A block table and the lengths of its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageTable {
    pub block_table: Strided<1>,
    pub seq_lens: Strided<1>,
    pub batch: i32,
    pub max_pages: i32,
}

impl PageTable {
    /// The most tokens a request can have.
    pub fn capacity(&self, page_size: i32) -> i64 {
        (i64::from(self.max_pages) * i64::from(page_size)).min(crate::check::MAX_SEQ_LEN)
    }
}

/// Which query tokens belong to which request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueryTokens {
    /// The same number for every request, along an axis of their own.
    Uniform { q_len: i32 },
    /// One axis for the tokens of all requests: those of request `r` are `indptr[r] .. indptr[r + 1]`.
    Ragged { tokens: i32, indptr: Strided<1> },
}

impl QueryTokens {
    /// Extent of the token axis.
    pub fn extent(&self) -> i32 {
        match *self {
            Self::Uniform { q_len } => q_len,
            Self::Ragged { tokens, .. } => tokens,
        }
    }

    pub fn indptr(&self) -> Option<&Strided<1>> {
        match self {
            Self::Uniform { .. } => None,
            Self::Ragged { indptr, .. } => Some(indptr),
        }
    }
}

/// What queries are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum QueryScale {
    /// One number: 1 for 16-bit queries.
    One(f32),
    /// Strides of request, token, head of float32 numbers.
    Rows(Strided<3>),
}

impl QueryScale {
    /// What all of them are multiplied by.
    pub fn of_all(&self) -> f32 {
        match self {
            Self::One(scale) => *scale,
            Self::Rows(_) => 1.0,
        }
    }
}

/// `decode` and `prefill`: they differ in [`QueryTokens`] only. Without an axis of requests (ragged) their
/// stride is 0, and tokens count from the beginning of the axis of all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionProblem {
    pub device: Device,
    /// Of the queries: bf16, fp16 or e4m3.
    pub dtype: DType,
    pub queries: QueryTokens,
    pub heads: i32,
    /// Strides of request, token, head.
    pub q: TwoParts<3>,
    pub q_scale: QueryScale,
    pub cache: PagedCache,
    pub table: PageTable,
    pub scale: f64,
    pub causal: bool,
    /// Address of `[heads]` float32, or 0.
    pub attn_sink: u64,
    pub out: Strided<3>,
    pub lse: Strided<3>,
    /// Of rows that see no key.
    pub empty_lse: f32,
    pub stream: Stream,
}

impl AttentionProblem {
    /// The type of `out`.
    pub fn out_dtype(&self) -> DType {
        out_dtype(self.dtype)
    }

    /// Query heads per KV head.
    pub fn group(&self) -> i32 {
        self.heads / self.cache.kv_heads
    }

    /// What a plan of this problem is made from.
    pub fn lengths(&self) -> Lengths {
        Lengths::of_requests(self.table.seq_lens, self.queries.indptr().copied())
    }

    /// No query row at all: nothing to launch.
    pub fn is_empty(&self) -> bool {
        self.table.batch == 0 || self.queries.extent() == 0
    }
}

/// The type of `out` for queries of this type.
pub(crate) fn out_dtype(queries: DType) -> DType {
    match queries {
        DType::F8E4M3 => DType::Bf16,
        half => half,
    }
}

/// One list of keys per query token, in one cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyLists {
    pub cache: PagedCache,
    /// Strides of request and token; the entries of a list are int32, one after another, each
    /// `page * page_size + offset`. What lies outside the cache is no key.
    pub indices: Strided<2>,
    /// Entries of a list.
    pub topk: i32,
    /// How many of them count: strides of request and token of int32 numbers; `None`: all.
    pub lens: Option<Strided<2>>,
}

/// `sparse_decode` and `sparse_prefill`. A prefill is one request (stride 0) of all tokens, and writes `max_logits`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SparseProblem {
    pub device: Device,
    pub dtype: DType,
    pub batch: i32,
    pub q_len: i32,
    pub heads: i32,
    /// Strides of request, token, head.
    pub q: TwoParts<3>,
    pub main: KeyLists,
    /// Keys of another cache, that join the same softmax.
    pub extra: Option<KeyLists>,
    pub scale: f64,
    /// Address of `[heads]` float32, or 0.
    pub attn_sink: u64,
    pub out: Strided<3>,
    pub lse: Strided<3>,
    /// Of rows that see no key.
    pub empty_lse: f32,
    /// Of `sparse_prefill`.
    pub max_logits: Option<Strided<3>>,
    pub stream: Stream,
}

impl SparseProblem {
    /// What a plan of this problem is made from.
    pub fn lengths(&self) -> Lengths {
        Lengths {
            seq_lens: self.main.lens,
            extra_lens: self.extra.as_ref().and_then(|extra| extra.lens),
            qo_indptr: None,
        }
    }

    /// No query row at all: nothing to launch.
    pub fn is_empty(&self) -> bool {
        self.batch == 0 || self.q_len == 0
    }
}

/// `merge_states` over `dims` rows of 512.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MergeProblem {
    pub device: Device,
    pub dtype: DType,
    pub dims: [i32; 3],
    pub out_a: Strided<3>,
    pub out_b: Strided<3>,
    pub out: Strided<3>,
    pub lse_a: Strided<3>,
    pub lse_b: Strided<3>,
    pub lse: Strided<3>,
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "the CPU has no streams")
    )]
    pub stream: Stream,
}

impl MergeProblem {
    pub fn rows(&self) -> i64 {
        self.dims.iter().map(|&dim| i64::from(dim)).product()
    }
}

/// `append_kv`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AppendProblem {
    pub device: Device,
    pub tokens: i64,
    pub rows: TwoParts<1>,
    /// Of the rows: the cache's where that is not quantised, else bf16, fp16 or float32.
    pub dtype: DType,
    pub slots: Strided<1>,
    pub cache: PagedCache,
    /// Round float32 scales up to powers of two.
    pub round_scale: bool,
    pub stream: Stream,
}

/// `quantize_kv`: every token of a cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QuantizeProblem {
    pub device: Device,
    /// Strides of page and token.
    pub rows: TwoParts<2>,
    /// Of the rows: bf16, fp16 or float32.
    pub dtype: DType,
    pub cache: PagedCache,
    /// Round float32 scales up to powers of two.
    pub round_scale: bool,
    #[allow(dead_code, reason = "the CPU has no streams")]
    pub stream: Stream,
}

/// `dequantize_kv`: every token of a cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DequantizeProblem {
    pub device: Device,
    pub cache: PagedCache,
    /// Strides of page and token.
    pub out: Strided<2>,
    /// Of `out`: bf16 or float32.
    pub dtype: DType,
    #[allow(dead_code, reason = "the CPU has no streams")]
    pub stream: Stream,
}

/// Which tokens `gather_kv` takes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GatherTokens {
    /// And where the offsets of the requests go.
    Pages { table: PageTable, offsets: u64 },
    /// Whether they are 64-bit.
    Ids { ids: Strided<1>, wide: bool },
}

/// `gather_kv`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GatherProblem {
    pub device: Device,
    /// Rows of `out`.
    pub tokens: i64,
    pub cache: PagedCache,
    pub source: GatherTokens,
    pub out: Strided<1>,
    pub stream: Stream,
}
