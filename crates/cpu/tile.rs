//! One KV tile: 64 cached tokens found through a block table or a list, widened to float32 once.

use crate::{CacheCpu, Strided, TILE_TOKENS};

/// Where the keys of one unit lie.
#[derive(Clone, Copy)]
pub(crate) struct KeySource<'a> {
    pub kv: &'a CacheCpu,
    pub kv_head: usize,
    pub order: KeyOrder<'a>,
}

/// Which token of the cache is at a position.
#[derive(Clone, Copy)]
pub(crate) enum KeyOrder<'a> {
    /// The tokens of a request's pages, one page after another.
    Pages {
        block_table: &'a Strided<i32, 2>,
        request: usize,
    },
    /// Those that a list names, from position `first` on.
    List { list: &'a [i32], first: usize },
}

impl KeySource<'_> {
    /// Page and offset of a token, or None where table or list name no token of the cache.
    ///
    /// # Safety
    /// The views describe live memory and the request lies in the table.
    unsafe fn locate(&self, position: usize) -> Option<[usize; 3]> {
        let [pages, page_size, _] = self.kv.shape();
        let (page, offset) = match self.order {
            KeyOrder::Pages {
                block_table,
                request,
            } => {
                let column = position / page_size;
                if column >= block_table.shape()[1] {
                    return None;
                }
                // SAFETY: the column was just checked, the row is the caller's promise.
                let page = unsafe { block_table.read([request, column]) };
                (usize::try_from(page).ok()?, position % page_size)
            }
            KeyOrder::List { list, first } => {
                let id = usize::try_from(*list.get(position - first)?).ok()?;
                (id / page_size, id % page_size)
            }
        };
        (page < pages).then_some([page, offset, self.kv_head])
    }
}

/// The tokens of a tile as rows of K; the first 512 numbers of a row are its V.
pub(crate) struct Tile {
    /// `[64, width]`; rows of absent tokens are zeros, so that they add nothing to `P V`.
    pub rows: Vec<f32>,
    pub width: usize,
    /// Tokens loaded, absent ones included.
    pub len: usize,
    /// 0 for a token that is there and -inf for an absent one: what to add to its score.
    pub mask: [f32; TILE_TOKENS],
    /// How many tokens are there.
    pub present: usize,
}

impl Tile {
    pub fn new(width: usize) -> Self {
        let rows = vec![0.0; TILE_TOKENS * width];
        Self {
            rows,
            width,
            len: 0,
            mask: [0.0; TILE_TOKENS],
            present: 0,
        }
    }

    /// Loads tokens `start .. start + len`, `len <= 64`.
    ///
    /// # Safety
    /// The source's views describe live memory that nobody writes, and its request and head lie in them; a list
    /// begins at or before `start`.
    pub unsafe fn load(&mut self, source: &KeySource, start: usize, len: usize) {
        self.len = len;
        self.present = 0;
        for (j, row) in self.rows.chunks_exact_mut(self.width).take(len).enumerate() {
            // SAFETY: the caller's promise.
            let token = unsafe { source.locate(start + j) };
            self.mask[j] = if token.is_some() {
                0.0
            } else {
                f32::NEG_INFINITY
            };
            self.present += usize::from(token.is_some());
            match token {
                // SAFETY: `locate` gives indices inside the cache; liveness is the caller's promise.
                Some(index) => unsafe { source.kv.read(index, row) },
                None => row.fill(0.0),
            }
        }
    }
}
