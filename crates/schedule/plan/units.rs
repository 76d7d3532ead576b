//! The units of a batch: which there are, with how many keys, and where they lie on the line.

use super::Planner;
use crate::algorithm::{
    Starts, Unit, blocks_of, clamp_seq_len, end_of_keys, query_range, unit_tiles,
};
use crate::lengths::{ListLens, Strided};

/// How many keys the units have.
#[derive(Clone, Copy)]
pub(super) enum Keys<'a> {
    OfRequests {
        seq_lens: Strided<'a>,
        /// Empty unless the shape is ragged.
        qo_indptr: Strided<'a>,
    },
    OfTokens {
        main: Option<ListLens<'a>>,
        extra: Option<ListLens<'a>>,
    },
}

impl Planner<'_> {
    /// Calls `visit` with all units and their indices, in the order of the plan: by request and token with a
    /// list, then KV head, then row block. Returns how many there are.
    pub(super) fn for_each_unit(&self, mut visit: impl FnMut(i32, Unit)) -> i32 {
        let mut index = 0;
        let lists = self.shape.sparse_q_len.max(1);
        let rows =
            (0..self.shape.batch).flat_map(|request| (0..lists).map(move |list| (request, list)));
        for (request, list) in rows {
            let (q_begin, q_len) = self.queries(request, list);
            let blocks = self.blocks(q_len);
            if blocks == 0 {
                continue; // there may be very many KV heads
            }
            let (seq_len, main_len) = self.key_counts(request, list);
            for kv_head in 0..self.shape.kv_heads {
                for block in 0..blocks {
                    if index == self.layout.units {
                        return index;
                    }
                    let row_begin = block * self.shape.unit_rows;
                    let unit = Unit {
                        request,
                        kv_head,
                        row_begin,
                        q_begin,
                        q_len,
                        seq_len,
                        main_len,
                    };
                    visit(index, unit);
                    index += 1;
                }
            }
        }
        index
    }

    /// `seq_len` and `main_len` of a request, or of its token `list`.
    pub(super) fn key_counts(&self, request: i32, list: i32) -> (i32, i32) {
        let (main, extra) = match self.keys {
            Keys::OfRequests { seq_lens, .. } => {
                return (clamp_seq_len(self.shape, seq_lens.at(request)), 0);
            }
            Keys::OfTokens { main, extra } => (main, extra),
        };
        let len = |lens: Option<ListLens>, most: i32| {
            lens.map_or(most, |lens| lens.at(request, list).clamp(0, most))
        };
        let main_len = len(main, self.shape.topk);
        let keys = end_of_keys(main_len, len(extra, self.shape.extra_topk));
        (keys as i32, main_len) // at most max_seq_len
    }

    fn blocks(&self, q_len: i32) -> i32 {
        if self.shape.ragged == 0 {
            self.layout.blocks
        } else {
            blocks_of(self.shape, q_len)
        }
    }

    /// First query token and number of query tokens of a request, or of its token `list`.
    fn queries(&self, request: i32, list: i32) -> (i32, i32) {
        match self.keys {
            Keys::OfRequests { qo_indptr, .. } if self.shape.ragged != 0 => {
                query_range(self.shape, qo_indptr.at(request), qo_indptr.at(request + 1))
            }
            _ => (list, self.shape.q_len), // without lists the one that is 0
        }
    }

    /// Lays the units on the line; returns how many there are, how many of them have tiles, and its length.
    pub(super) fn lay_out(&self, unit_start: &mut [[i32; 2]]) -> (i32, i32, i64) {
        let (mut position, mut filled) = (0, 0);
        let count = self.for_each_unit(|index, unit| {
            let tiles = unit_tiles(self.shape, unit);
            unit_start[index as usize] = Starts::words(position);
            position += i64::from(tiles) + i64::from(self.shape.fixed_cost);
            filled += i32::from(tiles > 0);
        });
        unit_start[count as usize] = Starts::words(position);
        (count, filled, position)
    }
}
