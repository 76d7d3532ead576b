//! The rows of one unit of the plan, and the keys they see.

use std::ops::Range;

/// A block of rows of one request and KV head; `row = query token * group + head in group`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unit {
    pub request: usize,
    pub kv_head: usize,
    pub group: usize,
    /// First query token of the request along q's token axis.
    pub q_begin: usize,
    pub q_len: usize,
    /// First row of the block, and how many there are.
    pub first_row: usize,
    pub rows: usize,
}

impl Unit {
    /// Rows past the last query token do not exist: `rows <= unit_rows`.
    pub fn clip(mut self, unit_rows: usize) -> Self {
        let all = self.q_len * self.group;
        self.rows = unit_rows.min(all.saturating_sub(self.first_row));
        self
    }

    /// Where row `row` of the block lies in q, out and lse: request, token, query head.
    pub fn index(&self, row: usize) -> [usize; 3] {
        let row = self.first_row + row;
        [
            self.request,
            self.q_begin + row / self.group,
            self.kv_head * self.group + row % self.group,
        ]
    }

    /// The rows of the block, one run per query token, with the token's number.
    pub fn tokens(&self) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let Unit {
            group,
            first_row,
            rows,
            ..
        } = *self;
        let mut row = 0;
        std::iter::from_fn(move || {
            if row >= rows {
                return None;
            }
            let token = (first_row + row) / group;
            let end = ((token + 1) * group - first_row).min(rows);
            Some((token, std::mem::replace(&mut row, end)..end))
        })
    }
}

/// How many leading keys query token `token` sees.
pub(crate) fn keys_seen(causal: bool, seq_len: usize, q_len: usize, token: usize) -> usize {
    if causal {
        (seq_len + token + 1).saturating_sub(q_len).min(seq_len)
    } else {
        seq_len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_cover_the_rows_in_order() {
        let unit = Unit {
            request: 0,
            kv_head: 1,
            group: 3,
            q_begin: 0,
            q_len: 4,
            first_row: 4,
            rows: 0,
        };
        let unit = unit.clip(7);
        let runs: Vec<_> = unit.tokens().collect();
        assert_eq!(runs, [(1, 0..2), (2, 2..5), (3, 5..7)]);
        assert_eq!(unit.index(2), [0, 2, 3]);
        assert_eq!(unit.clip(100).rows, 8);
    }

    #[test]
    fn the_last_query_token_sees_every_key() {
        assert_eq!(keys_seen(true, 10, 4, 3), 10);
        assert_eq!(keys_seen(true, 10, 4, 0), 7);
        assert_eq!(keys_seen(true, 2, 4, 1), 0);
        assert_eq!(keys_seen(true, 2, 4, 2), 1);
        assert_eq!(keys_seen(false, 2, 4, 0), 2);
    }
}
