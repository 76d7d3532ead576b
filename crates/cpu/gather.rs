//! `gather_kv`: cached rows, by request or by token id, to one dense bfloat16 array.

use rayon::prelude::*;

use crate::{CacheCpu, Strided};

/// Which cached token each row of the output takes.
#[derive(Debug, Clone, Copy)]
pub enum GatherSource {
    /// Row `t` is token `t - offsets[r]` of the request `r` with `offsets[r] <= t < offsets[r + 1]`.
    Pages {
        /// `[b, max_pages]`; an id outside the cache makes its tokens absent.
        block_table: Strided<i32, 2>,
        /// `[b + 1]`, ascending from 0: as [`gather_offsets`] writes them.
        offsets: Strided<i64, 1>,
    },
    /// Row `t` is the token at `ids[t]`, counted as `page * page_size + offset`.
    Ids32(Strided<i32, 1>),
    /// As `Ids32`.
    Ids64(Strided<i64, 1>),
}

/// Arguments of [`gather_kv`].
#[derive(Debug, Clone, Copy)]
pub struct GatherCpu {
    /// Of one KV head.
    pub cache: CacheCpu,
    /// What to take.
    pub source: GatherSource,
    /// Rows of `[t]`, 576 wide (512 without rope part), bfloat16.
    pub out: Strided<u16, 1>,
}

/// Gathers; what is not bfloat16 is rounded to the nearest, ties to even. Rows of absent tokens, and
/// those past the last request, become zeros.
///
/// # Safety
/// Every view describes live, aligned memory of its shape for the whole call (rows of 512 and 64
/// elements in the cache); `out` is writable, used by nobody else, overlaps no input, and its rows do not
/// overlap each other. The parts of the cache have one shape; ids have one entry per row of `out`, and
/// offsets one more than the table has rows.
///
/// ```
/// use ferromla_cpu::{CacheCpu, GatherCpu, GatherSource, Parts, Rows, Strided, gather_kv};
/// let (cache, ids) = (vec![7u16; 512], [0i32, -1]);
/// let mut out = vec![1u16; 2 * 512];
/// let pages = Strided::new(cache.as_ptr(), [1, 1, 1], [512, 512, 0]);
/// let args = GatherCpu {
///     cache: CacheCpu::Plain(Rows::Bf16(Parts { nope: pages, rope: None })),
///     source: GatherSource::Ids32(Strided::new(ids.as_ptr(), [2], [1])),
///     out: Strided::new(out.as_mut_ptr(), [2], [512]),
/// };
/// // SAFETY: all views describe the vectors above.
/// unsafe { gather_kv(&args) };
/// assert_eq!((out[0], out[512]), (7, 0));
/// ```
pub unsafe fn gather_kv(args: &GatherCpu) {
    (0..args.out.shape()[0])
        .into_par_iter()
        .with_min_len(64)
        .for_each_init(
            || vec![0.0; args.cache.width()],
            |buffer, row| {
                let [pages, page_size, _] = args.cache.shape();
                // SAFETY: the row lies in the output and is this closure's alone.
                unsafe {
                    let token = locate(&args.source, [pages, page_size], row);
                    gather_row(args, token, row, buffer);
                }
            },
        );
}

/// Writes `offsets[r]`, the sum of the lengths before request `r`, each clamped to
/// `0 ..= max_seq_len`; gives the total.
///
/// # Safety
/// `seq_lens [b]` and `offsets [b + 1]` describe live, aligned memory; `offsets` is writable, used by
/// nobody else and overlaps `seq_lens` nowhere.
///
/// ```
/// use ferromla_cpu::{Strided, gather_offsets};
/// let (lens, mut offsets) = ([3i32, -5, 100], [0i64; 4]);
/// let offsets_view = Strided::new(offsets.as_mut_ptr(), [4], [1]);
/// // SAFETY: both views describe the arrays above.
/// let total = unsafe { gather_offsets(&Strided::new(lens.as_ptr(), [3], [1]), 8, &offsets_view) };
/// assert_eq!((offsets, total), ([0, 3, 3, 11], 11));
/// ```
pub unsafe fn gather_offsets(
    seq_lens: &Strided<i32, 1>,
    max_seq_len: i32,
    offsets: &Strided<i64, 1>,
) -> i64 {
    let mut total = 0;
    // SAFETY: all indices lie in the two shapes (caller's promise).
    unsafe {
        offsets.write([0], 0);
        for request in 0..seq_lens.shape()[0] {
            total += i64::from(seq_lens.read([request]).min(max_seq_len).max(0));
            offsets.write([request + 1], total);
        }
    }
    total
}

/// Page and offset of the token that row `row` takes, None where it is absent.
///
/// # Safety
/// As [`gather_kv`].
unsafe fn locate(source: &GatherSource, shape: [usize; 2], row: usize) -> Option<[usize; 2]> {
    let [pages, page_size] = shape;
    // SAFETY: the row lies in the ids (caller's promise); `locate_in_pages` as this function.
    let (page, offset) = unsafe {
        match source {
            GatherSource::Pages {
                block_table,
                offsets,
            } => locate_in_pages(block_table, offsets, page_size, row)?,
            GatherSource::Ids32(ids) => split_id(i64::from(ids.read([row])), page_size)?,
            GatherSource::Ids64(ids) => split_id(ids.read([row]), page_size)?,
        }
    };
    (page < pages).then_some([page, offset])
}

fn split_id(id: i64, page_size: usize) -> Option<(usize, usize)> {
    let id = usize::try_from(id).ok()?;
    Some((id.checked_div(page_size)?, id % page_size))
}

/// # Safety
/// As [`gather_kv`].
unsafe fn locate_in_pages(
    block_table: &Strided<i32, 2>,
    offsets: &Strided<i64, 1>,
    page_size: usize,
    row: usize,
) -> Option<(usize, usize)> {
    let [batch, max_pages] = block_table.shape();
    // SAFETY: there are `batch + 1` offsets (caller's promise).
    let end_of = |request: usize| unsafe { offsets.read([request + 1]) };
    // The first request that ends behind the row, by bisection.
    let (mut request, mut past) = (0, batch);
    while request < past {
        let middle = request.midpoint(past);
        if end_of(middle) <= row as i64 {
            request = middle + 1
        } else {
            past = middle
        }
    }
    if request == batch {
        return None;
    }
    // SAFETY: as above.
    let position = row as i64 - unsafe { offsets.read([request]) };
    let (column, offset) = split_id(position, page_size)?;
    if column >= max_pages {
        return None;
    }
    // SAFETY: request and column were just checked.
    let page = unsafe { block_table.read([request, column]) };
    Some((usize::try_from(page).ok()?, offset))
}

/// # Safety
/// As [`gather_kv`], for a row and a token inside; nobody else uses the row.
unsafe fn gather_row(args: &GatherCpu, token: Option<[usize; 2]>, row: usize, buffer: &mut [f32]) {
    // SAFETY: the caller's promise.
    let out = unsafe { args.out.row_mut([row], buffer.len()) };
    match token {
        None => out.fill(0),
        // SAFETY: the caller's promise.
        Some([page, offset]) => unsafe { args.cache.read_bf16([page, offset, 0], buffer, out) },
    }
}
