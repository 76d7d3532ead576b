//! `FERROMLA_CHECK=1`: the values that the operations on indices read.

use crate::error::Result;
use crate::problem::Strided;
use crate::problem_indices::{CombineProblem, Ints, Pages, ToPhysicalProblem, WindowProblem};
use crate::values::{Source, offender};

impl Source {
    /// `count` integers of either width, from `offset` elements on.
    ///
    /// # Safety
    /// They are live memory of the device.
    unsafe fn ints<const N: usize>(
        self,
        from: &Ints<N>,
        offset: i64,
        count: i32,
        stride: i64,
    ) -> Result<Vec<i64>> {
        let (ptr, count) = (from.values.ptr, count as usize);
        if from.wide {
            // SAFETY: the caller's promise.
            return unsafe { self.read(ptr.wrapping_add_signed(8 * offset), count, stride) };
        }
        // SAFETY: as above.
        let narrow: Vec<i32> =
            unsafe { self.read(ptr.wrapping_add_signed(4 * offset), count, stride)? };
        Ok(narrow.into_iter().map(i64::from).collect())
    }

    /// The pages of a request.
    ///
    /// # Safety
    /// As [`Source::ints`].
    unsafe fn pages(self, pages: &Pages, request: usize) -> Result<Vec<i32>> {
        let Strided { ptr, strides } = pages.block_table;
        let row = ptr.wrapping_add_signed(4 * request as i64 * strides[0]);
        // SAFETY: the caller's promise.
        unsafe { self.read(row, pages.max_pages as usize, 1) }
    }
}

/// Tokens that a row of the table has pages for.
fn capacity(pages: &Pages) -> i64 {
    i64::from(pages.max_pages) * i64::from(pages.page_size)
}

/// A position that is not negative lies in the table, in a page that is one.
///
/// # Safety
/// The index arrays are live memory of the problem's device.
pub(crate) unsafe fn to_physical(problem: &ToPhysicalProblem) -> Result<()> {
    let source = Source::new(problem.device, problem.stream);
    let [batch, q_len, topk] = problem.dims;
    let [of_request, of_token, of_entry] = problem.indices.values.strides;
    let capacity = capacity(&problem.pages);
    for request in 0..batch as usize {
        // SAFETY: the caller's promise.
        let pages = unsafe { source.pages(&problem.pages, request)? };
        for token in 0..q_len as usize {
            let offset = request as i64 * of_request + token as i64 * of_token;
            // SAFETY: the caller's promise.
            let all = unsafe { source.ints(&problem.indices, offset, topk, of_entry)? };
            for (at, &position) in all
                .iter()
                .enumerate()
                .filter(|(_, position)| **position >= 0)
            {
                let place = if problem.by_token {
                    &[request, token, at][..]
                } else {
                    &[request, at]
                };
                if position >= capacity {
                    let rule = format!("below {capacity}, the tokens of a row of block_table");
                    return Err(offender("indices", place, position, rule));
                }
                used_page(&pages, request, position, &problem.pages)?;
            }
        }
    }
    Ok(())
}

/// The page of a position that is used is one.
fn used_page(pages: &[i32], request: usize, position: i64, of: &Pages) -> Result<()> {
    let column = (position / i64::from(of.page_size)) as usize;
    if pages[column] >= 0 {
        return Ok(());
    }
    let rule = "at least 0 for a page in use".to_owned();
    Err(offender(
        "block_table",
        &[request, column],
        pages[column].into(),
        rule,
    ))
}

/// Lengths fit the table, those of queries their requests, and the pages that windows reach are there.
///
/// # Safety
/// As [`to_physical`].
pub(crate) unsafe fn window(problem: &WindowProblem) -> Result<()> {
    let source = Source::new(problem.device, problem.stream);
    let (pages, batch) = (&problem.pages, problem.pages.batch);
    let capacity = capacity(pages);
    // SAFETY: the caller's promise.
    let (lens, queries) = unsafe {
        let lens = source.lens(&problem.seq_lens, batch, capacity)?;
        let Strided { ptr, strides } = problem.query_lens;
        (lens, source.read::<i32>(ptr, batch as usize, strides[0])?)
    };
    for (request, (&len, &queries)) in lens.iter().zip(&queries).enumerate() {
        if !(0..=len).contains(&queries) {
            let rule = format!("between 0 and {len}, the length of the request");
            return Err(offender("query_lens", &[request], queries.into(), rule));
        }
        let first = (i64::from(len) - i64::from(queries) - i64::from(problem.window) + 1).max(0);
        // SAFETY: the caller's promise.
        let of_request = unsafe { source.pages(pages, request)? };
        let mut positions = (first..len.into()).step_by(pages.page_size as usize);
        positions.try_for_each(|position| used_page(&of_request, request, position, pages))?;
        if first < len.into() {
            used_page(&of_request, request, i64::from(len) - 1, pages)?;
        }
    }
    Ok(())
}

/// A token is of one of the requests, or of a negative one: of none.
///
/// # Safety
/// As [`to_physical`].
pub(crate) unsafe fn combine(problem: &CombineProblem) -> Result<()> {
    let source = Source::new(problem.device, problem.stream);
    let stride = problem.request_ids.values.strides[0];
    // SAFETY: the caller's promise.
    let requests = unsafe { source.ints(&problem.request_ids, 0, problem.tokens, stride)? };
    let batch = i64::from(problem.batch);
    match requests.iter().position(|&request| request >= batch) {
        None => Ok(()),
        Some(at) => {
            let rule = format!("below {batch}, the requests");
            Err(offender("request_ids", &[at], requests[at], rule))
        }
    }
}
