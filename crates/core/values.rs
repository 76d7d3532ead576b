//! `FERROMLA_CHECK=1`: the values of index arrays, checked before they are used.
//!
//! Values cannot harm memory: kernels treat what is out of range as absent. With the variable set (read once
//! per process) the first such value is an error instead. Arrays on a CUDA device are copied to the host, which
//! waits for the stream; a stream that is being captured is refused.

use std::sync::OnceLock;

use ferromla_schedule::PlanView;

use crate::check::MAX_SEQ_LEN;
use crate::check_parts::ListTokens;
use crate::cuda;
use crate::dtype::Device;
use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::plan::Plan;
use crate::plan_args::Queries;
use crate::problem::{
    AppendProblem, AttentionProblem, GatherProblem, GatherTokens, KeyLists, PageTable, PagedCache,
    QueryTokens, SparseProblem, Strided,
};
use crate::schedule::plan_error;
use crate::view::Stream;

/// Whether `FERROMLA_CHECK` asks for these checks.
pub(crate) fn checked() -> bool {
    static CHECKED: OnceLock<bool> = OnceLock::new();
    *CHECKED.get_or_init(|| {
        std::env::var_os("FERROMLA_CHECK").is_some_and(|value| !value.is_empty() && value != "0")
    })
}

/// Where index arrays are read from.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    device: Device,
    stream: Stream,
}

impl Source {
    pub fn new(device: Device, stream: Stream) -> Self {
        Self { device, stream }
    }

    /// `count` elements, `stride` elements apart.
    ///
    /// # Safety
    /// They are live memory of the device.
    pub unsafe fn read<T: Copy + Default>(
        self,
        ptr: u64,
        count: usize,
        stride: i64,
    ) -> Result<Vec<T>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let Device::Cuda(ordinal) = self.device else {
            let at = |i: usize| (ptr as *const T).wrapping_offset(i as isize * stride as isize);
            // SAFETY: the caller's promise.
            return Ok((0..count).map(|i| unsafe { at(i).read() }).collect());
        };
        let mut values = vec![T::default(); count];
        let (rows, width) = if stride == 1 { (1, count) } else { (count, 1) };
        for row in 0..rows {
            let from = ptr.wrapping_add_signed(row as i64 * stride * size_of::<T>() as i64);
            // SAFETY: the caller's promise; the elements of a row are consecutive.
            unsafe {
                cuda::download(
                    ordinal,
                    from,
                    &mut values[row * width..][..width],
                    self.stream,
                )?
            };
        }
        Ok(values)
    }

    /// # Safety
    /// As [`Source::read`] for `batch` lengths.
    pub unsafe fn lens(self, lens: &Strided<1>, batch: i32, capacity: i64) -> Result<Vec<i32>> {
        // SAFETY: the caller's promise.
        let lens: Vec<i32> = unsafe { self.read(lens.ptr, batch as usize, lens.strides[0])? };
        match lens
            .iter()
            .position(|&len| !(0..=capacity).contains(&len.into()))
        {
            None => Ok(lens),
            Some(r) => Err(offender(
                "seq_lens",
                &[r],
                lens[r].into(),
                format!("between 0 and {capacity}"),
            )),
        }
    }

    /// Lengths of lists of `most` entries, one for each query token, one row of tokens after another.
    ///
    /// # Safety
    /// As [`Source::read`].
    unsafe fn list_lens(
        self,
        argument: &'static str,
        lens: &Option<Strided<2>>,
        tokens: ListTokens,
        most: i64,
    ) -> Result<Vec<usize>> {
        let size = tokens.size();
        let Some(Strided { ptr, strides }) = lens else {
            return Ok(vec![most as usize; size[0] * size[1]]);
        };
        let mut all = Vec::new();
        for request in 0..size[0] {
            let row = ptr.wrapping_add_signed(request as i64 * strides[0] * 4);
            // SAFETY: the caller's promise.
            let lens: Vec<i32> = unsafe { self.read(row, size[1], strides[1])? };
            if let Some(token) = lens
                .iter()
                .position(|&len| !(0..=most).contains(&len.into()))
            {
                let rule = format!("between 0 and {most}");
                let (value, of_requests) = (lens[token].into(), strides[1] == 0);
                let place = tokens.place(request, token);
                // One length for all query tokens of a request.
                let given = place.len() - usize::from(of_requests && place.len() > 1);
                return Err(offender(argument, &place[..given], value, rule));
            }
            all.extend(lens.into_iter().map(|len| len as usize));
        }
        Ok(all)
    }

    /// Lengths of the lists that a plan is for, of its cache and of the extra one.
    ///
    /// # Safety
    /// As [`Source::read`].
    unsafe fn lens_of_lists(
        self,
        lengths: &Lengths,
        tokens: ListTokens,
        plan: &Plan,
    ) -> Result<[Vec<usize>; 2]> {
        let shape = &plan.schedule.shape;
        let (topk, extra_topk) = (shape.topk.into(), shape.extra_topk.into());
        let (main, extra) = (&lengths.seq_lens, &lengths.extra_lens);
        // SAFETY: the caller's promise.
        unsafe {
            Ok([
                self.list_lens("topk_lengths", main, tokens, topk)?,
                self.list_lens("extra_topk_lengths", extra, tokens, extra_topk)?,
            ])
        }
    }

    /// `batch + 1` offsets that begin at 0, never fall and end at `tokens` or before: what is behind is padding.
    ///
    /// # Safety
    /// As [`Source::read`].
    unsafe fn indptr(self, indptr: &Strided<1>, batch: i32, tokens: i64) -> Result<()> {
        let count = batch as usize + 1;
        // SAFETY: the caller's promise.
        let indptr: Vec<i32> = unsafe { self.read(indptr.ptr, count, indptr.strides[0])? };
        let bad = |r: usize, rule| Err(offender("qo_indptr", &[r], indptr[r].into(), rule));
        if indptr[0] != 0 {
            return bad(0, "it begins at 0".to_owned());
        }
        if let Some(r) = (1..count).find(|&r| indptr[r] < indptr[r - 1]) {
            return bad(r, format!("it never falls, and was {}", indptr[r - 1]));
        }
        if i64::from(indptr[count - 1]) > tokens {
            let rule = format!("it ends at {tokens}, the tokens of q, at most");
            return bad(count - 1, rule);
        }
        Ok(())
    }
}

pub(crate) fn offender(argument: &'static str, index: &[usize], value: i64, rule: String) -> Error {
    Error::invalid(argument, format!("{value} at {index:?}"), rule)
}

/// The lengths of a plan are not negative and within its bound, and its query tokens divided in order.
///
/// # Safety
/// The lengths are live memory of `device`.
pub(crate) unsafe fn plan_lengths(
    plan: &Plan,
    lengths: &Lengths,
    device: Device,
    stream: Stream,
) -> Result<()> {
    let source = Source::new(device, stream);
    let args = plan.args();
    let (batch, capacity) = (args.batch as i32, args.max_seq_len.unwrap_or(MAX_SEQ_LEN));
    if let Some(tokens) = ListTokens::of(args) {
        // SAFETY: the caller's promise.
        return unsafe { source.lens_of_lists(lengths, tokens, plan) }.map(drop);
    }
    let seq_lens = lengths.seq_lens.unwrap_or(Strided::NONE).first();
    // SAFETY: the caller's promise.
    unsafe {
        source.lens(&seq_lens, batch, capacity)?;
        if let (Queries::Ragged { num_tokens }, Some(indptr)) = (args.queries, &lengths.qo_indptr) {
            source.indptr(indptr, batch, num_tokens)?;
        }
    }
    Ok(())
}

/// The plan was made, or last updated, for the lengths of this call, and its query tokens.
///
/// # Safety
/// Plan and lengths are live memory of the plan's device.
pub(crate) unsafe fn planned(plan: &Plan, lengths: &Lengths, stream: Stream) -> Result<()> {
    let (args, shape) = (plan.args(), &plan.schedule.shape);
    let (source, lists) = (Source::new(args.device, stream), ListTokens::of(args));
    // SAFETY: the caller's promise.
    let words = unsafe { source.read(plan.workspace.plan, plan.schedule.layout.words(), 1)? };
    let view = PlanView::new(shape, &words).map_err(plan_error)?;
    let stale = |name: &str, place: &[usize], made: i32, now: i32| match made == now {
        true => Ok(()),
        false => {
            let what = format!("made for {name}{place:?} = {made}");
            let rule = format!("{now}, as in this call: the plan is updated before it is used");
            Err(Error::invalid("plan", what, rule))
        }
    };
    if let Some(of) = lists {
        // SAFETY: the caller's promise.
        let [main, extra] = unsafe { source.lens_of_lists(lengths, of, plan)? };
        for item in view.items() {
            let (request, token) = (item.request as usize, item.q_begin as usize);
            let (place, at) = (of.place(request, token), request * of.size()[1] + token);
            stale("topk_lengths", &place, item.main_len, main[at] as i32)?;
            stale(
                "extra_topk_lengths",
                &place,
                item.extra_len(),
                extra[at] as i32,
            )?;
        }
        return Ok(());
    }
    let seq_lens = lengths.seq_lens.unwrap_or(Strided::NONE).first();
    // SAFETY: the caller's promise.
    let lens = unsafe { source.lens(&seq_lens, shape.batch, MAX_SEQ_LEN)? };
    for item in view.items() {
        let request = item.request as usize;
        let now = lens[request].min(shape.max_seq_len);
        stale("seq_lens", &[request], item.seq_len, now)?;
    }
    let Some(indptr) = lengths.qo_indptr else {
        return Ok(());
    };
    // SAFETY: the caller's promise.
    let indptr: Vec<i32> =
        unsafe { source.read(indptr.ptr, shape.batch as usize + 1, indptr.strides[0])? };
    for item in view.items() {
        let request = item.request as usize;
        stale("qo_indptr", &[request], item.q_begin, indptr[request])?;
    }
    Ok(())
}

/// The values of table, lengths and `qo_indptr`.
///
/// # Safety
/// The index arrays are live memory of the problem's device.
pub(crate) unsafe fn attention(problem: &AttentionProblem) -> Result<()> {
    let source = Source::new(problem.device, problem.stream);
    // SAFETY: the caller's promise.
    unsafe {
        table(
            &problem.table,
            &problem.cache,
            problem.device,
            problem.stream,
        )?;
        if let QueryTokens::Ragged { tokens, indptr } = &problem.queries {
            source.indptr(indptr, problem.table.batch, (*tokens).into())?;
        }
    }
    Ok(())
}

/// Lengths fit the table, and every page that a length reaches is one of the cache's.
///
/// # Safety
/// Table and lengths are live memory of `device`.
pub(crate) unsafe fn table(
    table: &PageTable,
    cache: &PagedCache,
    device: Device,
    stream: Stream,
) -> Result<()> {
    let source = Source::new(device, stream);
    let capacity = table.capacity(cache.page_size);
    // SAFETY: the caller's promise.
    let lens = unsafe { source.lens(&table.seq_lens, table.batch, capacity)? };
    for (r, &len) in lens.iter().enumerate() {
        let used = (i64::from(len) + i64::from(cache.page_size) - 1) / i64::from(cache.page_size);
        let row = table
            .block_table
            .ptr
            .wrapping_add_signed(r as i64 * table.block_table.strides[0] * 4);
        // SAFETY: the caller's promise; the length is within the table's row.
        let pages: Vec<i32> = unsafe { source.read(row, used as usize, 1)? };
        if let Some(c) = pages
            .iter()
            .position(|page| !(0..cache.num_pages).contains(page))
        {
            let rule = format!(
                "between 0 and {} for a page in use",
                i64::from(cache.num_pages) - 1
            );
            return Err(offender("block_table", &[r, c], pages[c].into(), rule));
        }
    }
    Ok(())
}

/// Every slot is one of the cache's, or negative.
///
/// # Safety
/// The slots are live memory of the problem's device.
pub(crate) unsafe fn slots(problem: &AppendProblem) -> Result<()> {
    let source = Source::new(problem.device, problem.stream);
    // SAFETY: the caller's promise.
    let slots: Vec<i64> = unsafe {
        source.read(
            problem.slots.ptr,
            problem.tokens as usize,
            problem.slots.strides[0],
        )?
    };
    below_tokens("slots", &slots, &problem.cache)
}

/// The table's values, or every id is one of the cache's or negative.
///
/// # Safety
/// The index arrays are live memory of the problem's device.
pub(crate) unsafe fn gather(problem: &GatherProblem) -> Result<()> {
    let source = Source::new(problem.device, problem.stream);
    let tokens = problem.tokens as usize;
    match &problem.source {
        // SAFETY: the caller's promise.
        GatherTokens::Pages { table, .. } => unsafe {
            self::table(table, &problem.cache, problem.device, problem.stream)
        },
        GatherTokens::Ids { ids, wide: true } => {
            // SAFETY: the caller's promise.
            let ids: Vec<i64> = unsafe { source.read(ids.ptr, tokens, ids.strides[0])? };
            below_tokens("ids", &ids, &problem.cache)
        }
        GatherTokens::Ids { ids, wide: false } => {
            // SAFETY: the caller's promise.
            let ids: Vec<i32> = unsafe { source.read(ids.ptr, tokens, ids.strides[0])? };
            below_tokens("ids", &ids, &problem.cache)
        }
    }
}

/// The lengths of the lists are those of lists, and the entries that count are the cache's tokens or negative.
///
/// # Safety
/// The index arrays are live memory of the problem's device.
pub(crate) unsafe fn sparse(problem: &SparseProblem) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        lists(problem, &problem.main, ["topk_lengths", "indices"])?;
        if let Some(extra) = &problem.extra {
            lists(problem, extra, ["extra_topk_lengths", "extra_indices"])?;
        }
    }
    Ok(())
}

/// # Safety
/// As [`sparse`].
unsafe fn lists(
    problem: &SparseProblem,
    lists: &KeyLists,
    [lens_name, indices_name]: [&'static str; 2],
) -> Result<()> {
    let source = Source::new(problem.device, problem.stream);
    let q_len = problem.q_len.into();
    // Of a prefill, which alone has `max_logits`, the tokens are of no request.
    let query_tokens = match problem.max_logits {
        None => ListTokens::OfRequests {
            batch: problem.batch.into(),
            q_len,
        },
        Some(_) => ListTokens::All { num_tokens: q_len },
    };
    let most = i64::from(lists.topk);
    // SAFETY: the caller's promise.
    let lens = unsafe { source.list_lens(lens_name, &lists.lens, query_tokens, most)? };
    let tokens = i64::from(lists.cache.num_pages) * i64::from(lists.cache.page_size);
    let Strided { ptr, strides } = lists.indices;
    for (row, len) in lens.into_iter().enumerate() {
        let [_, of_request] = query_tokens.size();
        let [request, token] = [row / of_request, row % of_request];
        let offset = request as i64 * strides[0] + token as i64 * strides[1];
        // SAFETY: the caller's promise; the length is within the list.
        let entries: Vec<i32> =
            unsafe { source.read(ptr.wrapping_add_signed(4 * offset), len, 1)? };
        if let Some(at) = entries.iter().position(|&entry| i64::from(entry) >= tokens) {
            let rule = format!("below {tokens}, the cache's tokens");
            let mut place = query_tokens.place(request, token);
            place.push(at);
            return Err(offender(indices_name, &place, entries[at].into(), rule));
        }
    }
    Ok(())
}

fn below_tokens<T: Copy + Into<i64>>(
    argument: &'static str,
    values: &[T],
    cache: &PagedCache,
) -> Result<()> {
    let tokens = i64::from(cache.num_pages) * i64::from(cache.page_size);
    match values.iter().position(|&value| value.into() >= tokens) {
        None => Ok(()),
        Some(i) => Err(offender(
            argument,
            &[i],
            values[i].into(),
            format!("below {tokens}, the cache's tokens"),
        )),
    }
}
