//! Which tokens of the cache are the keys of a query token.

use ferromla_schedule::WorkItem;

use crate::tile::{KeyOrder, KeySource};
use crate::{CacheCpu, Strided, TILE_TOKENS};

/// The keys of the query tokens of a [`DecodeCpu`](crate::DecodeCpu).
#[derive(Debug, Clone, Copy)]
pub enum KeysCpu {
    /// Those of the request.
    Pages {
        /// `[b, max_pages]`; an id outside the cache makes its tokens absent.
        block_table: Strided<i32, 2>,
    },
    /// Those of the query token's own lists.
    Lists {
        /// Rows of `[b, s_q]`: `topk` ids `page * page_size + offset` into the cache; one outside is absent.
        indices: Strided<i32, 2>,
        /// Entries of a list.
        topk: usize,
        /// Keys from a second cache.
        extra: Option<ExtraCpu>,
    },
}

/// Lists of keys in a second cache.
#[derive(Debug, Clone, Copy)]
pub struct ExtraCpu {
    /// Pages of rows as wide as those of the main cache.
    pub kv_cache: CacheCpu,
    /// As those of [`KeysCpu::Lists`].
    pub indices: Strided<i32, 2>,
    /// Entries of a list.
    pub topk: usize,
}

impl KeysCpu {
    /// The most keys there can be: a plan may have been made for longer tables.
    pub(crate) fn capacity(&self, cache: &CacheCpu) -> usize {
        match self {
            Self::Pages { block_table } => block_table.shape()[1] * cache.shape()[1],
            Self::Lists { .. } => usize::MAX,
        }
    }

    /// Where the keys of the tile that begins at `start` come from, and where those end.
    ///
    /// # Safety
    /// The item is one of a plan that was made for these keys; the views describe live memory.
    pub(crate) unsafe fn of_tile<'a>(
        &'a self,
        cache: &'a CacheCpu,
        item: &WorkItem,
        start: usize,
    ) -> (KeySource<'a>, usize) {
        let request = item.request as usize;
        let kv_head = item.kv_head as usize;
        let token = item.q_begin as usize;
        let (indices, topk, extra) = match self {
            Self::Pages { block_table } => {
                let order = KeyOrder::Pages {
                    block_table,
                    request,
                };
                let source = KeySource {
                    kv: cache,
                    kv_head,
                    order,
                };
                return (source, usize::MAX);
            }
            Self::Lists {
                indices,
                topk,
                extra,
            } => (indices, *topk, extra),
        };
        let main_len = item.main_len as usize;
        let first = main_len.next_multiple_of(TILE_TOKENS);
        let (kv, indices, topk, first, end) = match extra {
            Some(extra) if start >= first => (
                &extra.kv_cache,
                &extra.indices,
                extra.topk,
                first,
                usize::MAX,
            ),
            _ => (cache, indices, topk, 0, main_len),
        };
        // SAFETY: the caller's promise: every query token has a list of `topk` entries.
        let list = unsafe { indices.row([request, token], topk) };
        let order = KeyOrder::List { list, first };
        (KeySource { kv, kv_head, order }, end)
    }
}
