//! The planner: two passes over the units and one over the workers.

use crate::algorithm::{
    Line, Starts, Tally, Unit, blocks_of, clamp_seq_len, cut_of, cutting_share, even_share,
    make_header, make_item, make_merge, parts_of, query_range, unit_tiles, whole_stretch_is_fair,
};
use crate::plan_layout::{
    FM_SPLIT_AUTO, FmMerge, FmPlanHeader, FmPlanLayout, FmPlanShape, FmWorkItem,
};
use crate::view::at_least_words;
use crate::{PlanError, layout};

/// Integers of a batch, `stride` elements apart: `seq_lens` or `qo_indptr`.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// Element `i * stride` is entry `i`.
    pub data: &'a [i32],
    /// Elements from one entry to the next; 0 gives every request the same.
    pub stride: usize,
}

impl<'a> From<&'a [i32]> for Strided<'a> {
    fn from(data: &'a [i32]) -> Self {
        Self { data, stride: 1 }
    }
}

impl Strided<'_> {
    fn at(&self, index: i32) -> i32 {
        self.data[index as usize * self.stride]
    }

    fn check(&self, argument: &'static str, entries: usize) -> Result<(), PlanError> {
        let len = self.data.len();
        let needed = match entries {
            0 => 0,
            _ => (entries - 1).saturating_mul(self.stride).saturating_add(1),
        };
        // A plain slice must fit exactly: a longer one belongs to another batch.
        let (ok, rule) = if self.stride == 1 {
            (len == needed, "exactly")
        } else {
            (len >= needed, "at least")
        };
        if ok {
            Ok(())
        } else {
            Err(PlanError::Length {
                argument,
                len,
                needed,
                rule,
            })
        }
    }
}

/// Plans a batch: writes the plan of `shape` for `seq_lens` `[batch]` (tokens) into `words`, which has at
/// least [`layout(shape)?.words()`](crate::PlanLayout::words) elements, and returns its header.
///
/// A ragged shape takes `qo_indptr` `[batch + 1]` as well: request `r` has the query tokens
/// `qo_indptr[r] .. qo_indptr[r + 1]` of all `shape.q_tokens`.
///
/// Any lengths are valid: they are clamped to `0 ..= max_seq_len`. So is any `qo_indptr`: entries are clamped
/// to `0 ..= q_tokens`, a range that ends before it begins is empty, and where overlapping ranges ask for more
/// units than [`layout`] has, the last are left out. Equal inputs give equal plans, and the words of the plan
/// equal those that the device planner writes. Words of unused entries are unspecified.
///
/// # Errors
///
/// What [`layout`] raises for the shape, and [`PlanError::Length`] for `seq_lens`, `qo_indptr` or `words` of
/// the wrong number of elements; a uniform shape needs 0 elements of `qo_indptr`.
///
/// ```
/// # use ferromla_schedule::{PlanShape, layout, plan_into};
/// let shape = PlanShape {
///     batch: 2, q_len: 1, group: 16, kv_heads: 1, unit_rows: 64, workers: 4,
///     max_seq_len: 65536, fixed_cost: 2, split_cost: 6, min_part: 1, whole_speed: 256,
///     ..PlanShape::default()
/// };
/// let mut words = vec![0; layout(&shape)?.words()];
/// let header = plan_into(&shape, [65536, 640].as_slice(), None, &mut words)?;
/// // 1024 + 2 and 10 + 2 tiles for four workers: the long request is cut three times.
/// assert_eq!((header.share, header.items, header.merges, header.slots), (260, 5, 1, 4));
///
/// // The second request has eight query tokens of 16 heads: two units of 64 rows.
/// let ragged = PlanShape { ragged: 1, q_len: 0, q_tokens: 9, ..shape };
/// let mut words = vec![0; layout(&ragged)?.words()];
/// let qo_indptr = Some([0, 1, 9].as_slice().into());
/// let header = plan_into(&ragged, [65536, 640].as_slice(), qo_indptr, &mut words)?;
/// assert_eq!(header.units, 3);
/// # Ok::<(), ferromla_schedule::PlanError>(())
/// ```
pub fn plan_into<'a>(
    shape: &FmPlanShape,
    seq_lens: impl Into<Strided<'a>>,
    qo_indptr: Option<Strided<'a>>,
    words: &mut [i32],
) -> Result<FmPlanHeader, PlanError> {
    let layout = layout(shape)?;
    let batch = shape.batch as usize;
    let seq_lens = seq_lens.into();
    seq_lens.check("seq_lens", batch)?;
    let qo_indptr = qo_indptr.unwrap_or([].as_slice().into());
    qo_indptr.check("qo_indptr", if shape.ragged != 0 { batch + 1 } else { 0 })?;
    at_least_words(&layout, words.len())?;

    let buffer = Buffer::split(shape, &layout, words);
    let planner = Planner {
        shape,
        layout: &layout,
        seq_lens,
        qo_indptr,
    };
    let (units, total) = planner.lay_out(buffer.unit_start);
    let line = planner.decide(Line {
        start: Starts(buffer.unit_start),
        total,
        share: even_share(total, shape.workers),
        units,
        whole: shape.split_mode == FM_SPLIT_AUTO,
    });
    let all = planner.write_units(&line, buffer.items, buffer.merges, buffer.unit_item);
    planner.write_workers(&line, buffer.unit_item, buffer.worker_begin);
    *buffer.header = make_header(&line, all);
    Ok(*buffer.header)
}

struct Planner<'a> {
    shape: &'a FmPlanShape,
    layout: &'a FmPlanLayout,
    seq_lens: Strided<'a>,
    qo_indptr: Strided<'a>,
}

impl Planner<'_> {
    /// All units in the order of the plan: by request, then KV head, then row block.
    fn units(&self) -> impl Iterator<Item = Unit> {
        let units_of = move |request| {
            let (q_begin, q_len) = self.queries(request);
            let seq_len = clamp_seq_len(self.shape, self.seq_lens.at(request));
            let blocks = blocks_of(self.shape, q_len);
            (0..self.shape.kv_heads).flat_map(move |kv_head| {
                (0..blocks).map(move |block| Unit {
                    request,
                    kv_head,
                    row_begin: block * self.shape.unit_rows,
                    q_begin,
                    q_len,
                    seq_len,
                })
            })
        };
        let all = (0..self.shape.batch).flat_map(units_of);
        all.take(self.layout.units as usize)
    }

    /// First query token and number of query tokens of a request.
    fn queries(&self, request: i32) -> (i32, i32) {
        if self.shape.ragged == 0 {
            return (0, self.shape.q_len);
        }
        let at = |index| self.qo_indptr.at(index);
        query_range(self.shape, at(request), at(request + 1))
    }

    /// Lays the units on the line; returns how many there are, and its length.
    fn lay_out(&self, unit_start: &mut [[i32; 2]]) -> (i32, i64) {
        let (mut count, mut position) = (0, 0);
        for (unit, start) in self.units().zip(unit_start.iter_mut()) {
            *start = Starts::words(position);
            position += i64::from(unit_tiles(self.shape, unit)) + i64::from(self.shape.fixed_cost);
            count += 1;
        }
        unit_start[count] = Starts::words(position);
        (count as i32, position)
    }

    /// `FM_SPLIT_AUTO`: keeps units whole where that is about as fair as cutting them.
    fn decide<'l>(&self, line: Line<'l>) -> Line<'l> {
        let fair = |worker| whole_stretch_is_fair(self.shape, &line, worker);
        if !line.whole || (0..self.shape.workers).all(fair) {
            return line;
        }
        Line {
            whole: false,
            share: cutting_share(self.shape, line.share),
            ..line
        }
    }

    /// Writes the items and merges of every unit, and where its items begin.
    fn write_units(
        &self,
        line: &Line,
        items: &mut [FmWorkItem],
        merges: &mut [FmMerge],
        unit_item: &mut [i32],
    ) -> Tally {
        let mut tally = Tally::default();
        for (index, unit) in (0..).zip(self.units()) {
            let parts = parts_of(self.shape, line, index);
            unit_item[index as usize] = tally.items;
            for j in 0..parts.count {
                items[(tally.items + j) as usize] = make_item(unit, &parts, j, tally);
            }
            if parts.count > 1 {
                merges[tally.merges as usize] = make_merge(unit, &parts, tally);
            }
            tally.add(&parts);
        }
        unit_item[line.units as usize] = tally.items;
        tally
    }

    fn write_workers(&self, line: &Line, unit_item: &[i32], worker_begin: &mut [i32]) {
        for (index, begin) in (0..).zip(worker_begin.iter_mut()) {
            let cut = cut_of(self.shape, line, index);
            *begin = unit_item[cut.unit as usize] + cut.part;
        }
    }
}

/// The sections of a plan, to write to.
struct Buffer<'w> {
    header: &'w mut FmPlanHeader,
    worker_begin: &'w mut [i32],
    merges: &'w mut [FmMerge],
    items: &'w mut [FmWorkItem],
    unit_start: &'w mut [[i32; 2]],
    unit_item: &'w mut [i32],
}

impl<'w> Buffer<'w> {
    fn split(shape: &FmPlanShape, layout: &FmPlanLayout, words: &'w mut [i32]) -> Self {
        let units = layout.units as usize + 1;
        let (words, _) = words.split_at_mut(layout.first_unit as usize / 4);
        let (words, unit_item) = words.split_at_mut(layout.unit_item as usize / 4);
        let (words, unit_start) = words.split_at_mut(layout.unit_start as usize / 4);
        let (words, items) = words.split_at_mut(layout.items as usize / 4);
        let (words, merges) = words.split_at_mut(layout.merges as usize / 4);
        let (header, worker_begin) = words.split_at_mut(layout.worker_begin as usize / 4);
        Self {
            header: &mut bytemuck::cast_slice_mut(header)[0],
            worker_begin: &mut worker_begin[..shape.workers as usize + 1],
            merges: bytemuck::cast_slice_mut(exactly::<FmMerge>(
                merges,
                layout.max_merges as usize,
            )),
            items: bytemuck::cast_slice_mut(exactly::<FmWorkItem>(
                items,
                layout.max_items as usize,
            )),
            unit_start: bytemuck::cast_slice_mut(exactly::<[i32; 2]>(unit_start, units)),
            unit_item: &mut unit_item[..units],
        }
    }
}

/// The words of `count` entries, without the padding behind them.
fn exactly<T>(words: &mut [i32], count: usize) -> &mut [i32] {
    &mut words[..count * size_of::<T>() / size_of::<i32>()]
}
