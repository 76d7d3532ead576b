//! Operations on indices: lists of positions to places in a cache.

use rayon::prelude::*;

use crate::Strided;

/// Integers of either width.
#[derive(Debug, Clone, Copy)]
pub enum Ints<const D: usize> {
    /// `int32`.
    I32(Strided<i32, D>),
    /// `int64`.
    I64(Strided<i64, D>),
}

impl<const D: usize> Ints<D> {
    /// The indexed extents.
    pub const fn shape(&self) -> [usize; D] {
        match self {
            Self::I32(values) => values.shape(),
            Self::I64(values) => values.shape(),
        }
    }

    /// # Safety
    /// `index` lies in the shape and the memory is live.
    unsafe fn read(&self, index: [usize; D]) -> i64 {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::I32(values) => values.read(index).into(),
                Self::I64(values) => values.read(index),
            }
        }
    }
}

/// What stands for no token.
const ABSENT: i32 = -1;

/// An index as it is written: [`ABSENT`] for what is none, or for more than an int32.
fn narrow(index: i64) -> i32 {
    i32::try_from(index).map_or(ABSENT, |index| index.max(ABSENT))
}

/// A token of a request by its position, in a cache of pages of this size.
#[derive(Debug, Clone, Copy)]
pub struct PagesCpu {
    /// `[b, max_pages]`.
    pub block_table: Strided<i32, 2>,
    /// Tokens of a page.
    pub page_size: usize,
}

impl PagesCpu {
    fn capacity(&self) -> i64 {
        (self.block_table.shape()[1] as i64).saturating_mul(self.page_size as i64)
    }

    /// `page * page_size + offset`, or [`ABSENT`].
    ///
    /// # Safety
    /// The request lies in the table, which is live memory.
    unsafe fn place(&self, request: usize, position: i64) -> i32 {
        if !(0..self.capacity()).contains(&position) {
            return ABSENT;
        }
        let (column, offset) = (
            position as usize / self.page_size,
            position as usize % self.page_size,
        );
        // SAFETY: the column is within the capacity, the request is the caller's promise.
        let page = unsafe { self.block_table.read([request, column]) };
        if page < 0 {
            return ABSENT;
        }
        narrow(i64::from(page) * self.page_size as i64 + offset as i64)
    }
}

/// Arguments of [`to_physical`].
#[derive(Debug, Clone, Copy)]
pub struct ToPhysicalCpu {
    /// `[b, s_q, topk]` positions of tokens in their request.
    pub indices: Ints<3>,
    /// Where those are.
    pub pages: PagesCpu,
    /// Rows of `[b, s_q]`, `topk` wide.
    pub out: Strided<i32, 2>,
}

/// Positions of tokens in their requests to places in the cache; -1 where there is none.
///
/// # Safety
/// Every view describes live memory of its shape for the whole call; `out` is writable, used by nobody else and does
/// not overlap itself.
pub unsafe fn to_physical(args: &ToPhysicalCpu) {
    let [batch, q_len, topk] = args.indices.shape();
    if topk == 0 {
        return;
    }
    (0..batch * q_len).into_par_iter().for_each(|row| {
        let [request, token] = [row / q_len, row % q_len];
        // SAFETY: the caller's promise; each row of `out` is written once.
        unsafe {
            let out = args.out.row_mut([request, token], topk);
            for (entry, place) in out.iter_mut().enumerate() {
                let position = args.indices.read([request, token, entry]);
                *place = args.pages.place(request, position);
            }
        }
    });
}

/// Arguments of [`window_token_ids`].
#[derive(Debug, Clone, Copy)]
pub struct WindowCpu {
    /// `[b]`: tokens in the cache, clamped to the table.
    pub seq_lens: Strided<i32, 1>,
    /// `[b]`: how many of them are queries, clamped to them.
    pub query_lens: Strided<i32, 1>,
    /// Where the tokens are.
    pub pages: PagesCpu,
    /// Tokens that a query sees, itself included; at least 1.
    pub window: i64,
    /// Elements past the last token become -1; tokens past the last element are dropped.
    pub out: Strided<i32, 1>,
    /// `[b + 1]`: where the tokens of each request begin in `out`.
    pub offsets: Strided<i64, 1>,
    /// `[b]`: the position of each request's first one.
    pub first_pos: Strided<i32, 1>,
}

/// The tokens that the windows of each request's queries reach, one request after another.
///
/// # Safety
/// As [`to_physical`].
pub unsafe fn window_token_ids(args: &WindowCpu) {
    let batch = args.seq_lens.shape()[0];
    let mut end = 0;
    for request in 0..batch {
        // SAFETY: the caller's promise.
        unsafe {
            let len = i64::from(args.seq_lens.read([request])).clamp(0, args.pages.capacity());
            let queries = i64::from(args.query_lens.read([request])).clamp(0, len);
            let first = (len - queries - args.window + 1).clamp(0, len);
            args.offsets.write([request], end);
            args.first_pos.write([request], first as i32);
            end += len - first;
        }
    }
    // SAFETY: as above.
    unsafe { args.offsets.write([batch], end) };
    (0..batch).into_par_iter().for_each(|request| {
        // SAFETY: the caller's promise; the stretches of the requests do not overlap.
        unsafe {
            let [begin, end] = [request, request + 1].map(|at| args.offsets.read([at]) as usize);
            let first = i64::from(args.first_pos.read([request]));
            for at in begin..end.min(args.out.shape()[0]) {
                let position = first + (at - begin) as i64;
                args.out.write([at], args.pages.place(request, position));
            }
        }
    });
    for at in end as usize..args.out.shape()[0] {
        // SAFETY: the caller's promise.
        unsafe { args.out.write([at], ABSENT) };
    }
}

/// Arguments of [`combine_topk_window`].
#[derive(Debug, Clone, Copy)]
pub struct CombineCpu {
    /// Rows of `[t]`, `topk` wide: chosen compressed entries, counted from the request's first.
    pub topk_indices: Strided<i32, 1>,
    /// Entries of a row.
    pub topk: usize,
    /// `[t]`: each query token's position in its request.
    pub positions: Ints<1>,
    /// `[t]`: each query token's request.
    pub request_ids: Ints<1>,
    /// Tokens that one compressed entry stands for; at least 1.
    pub ratio: i64,
    /// Tokens that a query sees, itself included; at least 1.
    pub window: i64,
    /// `[b]`: where each request's compressed entries begin.
    pub compressed_base: Ints<1>,
    /// `[b]`: where the tokens of each request's windows begin.
    pub window_base: Ints<1>,
    /// `[b]`: the position of the first of those tokens.
    pub first_pos: Ints<1>,
    /// Rows of `[t]`, `width` wide.
    pub out: Strided<i32, 1>,
    /// Entries of a row of `out`: at least `topk + window`.
    pub width: usize,
    /// `[t]`: entries in use.
    pub lengths: Strided<i32, 1>,
}

/// One list per query token: its chosen compressed entries, then the tokens of its window, then -1.
///
/// # Safety
/// As [`to_physical`]; a row of `out` has room for `topk + window` entries.
pub unsafe fn combine_topk_window(args: &CombineCpu) {
    (0..args.lengths.shape()[0])
        .into_par_iter()
        .for_each(|token| {
            // SAFETY: the caller's promise; each row is written once.
            unsafe {
                let row = args.out.row_mut([token], args.width);
                let used = combine_row(args, token, row);
                row[used..].fill(ABSENT);
                args.lengths.write([token], used as i32);
            }
        });
}

/// Writes the entries of one token; returns how many there are.
///
/// # Safety
/// As [`combine_topk_window`].
unsafe fn combine_row(args: &CombineCpu, token: usize, row: &mut [i32]) -> usize {
    // SAFETY: the caller's promise.
    let (position, request) =
        unsafe { (args.positions.read([token]), args.request_ids.read([token])) };
    let requests = args.first_pos.shape()[0];
    let known = usize::try_from(request).ok().filter(|r| *r < requests);
    let (Some(request), true) = (known, position >= 0) else {
        return 0; // nobody's token
    };
    // SAFETY: the request was just checked.
    let [compressed, window_base, first] = unsafe {
        [
            args.compressed_base.read([request]),
            args.window_base.read([request]),
            args.first_pos.read([request]),
        ]
    };
    let seen = position.saturating_add(1);
    let chosen = (seen / args.ratio).min(args.topk as i64) as usize;
    let window = seen.min(args.window) as usize;
    let list = match chosen {
        0 => &[], // an empty array may have no address
        // SAFETY: the caller's promise.
        _ => unsafe { args.topk_indices.row([token], chosen) },
    };
    for (entry, &index) in row.iter_mut().zip(list) {
        *entry = match index {
            ..0 => ABSENT,
            _ => narrow(compressed.saturating_add(index.into())),
        };
    }
    let from = window_base
        .saturating_add(seen - window as i64)
        .saturating_sub(first);
    for (j, entry) in (0..).zip(&mut row[chosen..chosen + window]) {
        *entry = narrow(from.saturating_add(j));
    }
    chosen + window
}
