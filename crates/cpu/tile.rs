//! One KV tile: 64 cached tokens found through the block table, widened to float32 once.

use crate::{CacheCpu, Strided, TILE_TOKENS};

/// Where the keys of one request and KV head lie.
#[derive(Clone, Copy)]
pub(crate) struct KeySource<'a> {
    pub kv: &'a CacheCpu,
    pub block_table: &'a Strided<i32, 2>,
    pub request: usize,
    pub kv_head: usize,
}

impl KeySource<'_> {
    /// Page and offset of a token, or None where the table names no page of the cache.
    ///
    /// # Safety
    /// The views describe live memory and `request` lies in the table.
    unsafe fn locate(&self, position: usize) -> Option<[usize; 3]> {
        let [pages, page_size, _] = self.kv.shape();
        let column = position / page_size;
        if column >= self.block_table.shape()[1] {
            return None;
        }
        // SAFETY: the column was just checked, the row is the caller's promise.
        let page = unsafe { self.block_table.read([self.request, column]) };
        let page = usize::try_from(page).ok().filter(|page| *page < pages)?;
        Some([page, position % page_size, self.kv_head])
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
    /// The source's views describe live memory that nobody writes, and its request and head lie in them.
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
