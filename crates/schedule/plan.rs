//! The planner: two passes over the units and one over the workers.

use crate::algorithm::{
    Line, Starts, Tally, clamp_seq_len, cut_of, cutting_share, even_share, make_header, make_item,
    make_merge, parts_of, unit_at, unit_tiles, whole_stretch_is_fair,
};
use crate::plan_layout::{
    FM_SPLIT_AUTO, FmMerge, FmPlanHeader, FmPlanLayout, FmPlanShape, FmWorkItem,
};
use crate::view::at_least_words;
use crate::{PlanError, layout};

/// The lengths of a batch, `stride` elements apart.
#[derive(Debug, Clone, Copy)]
pub struct SeqLens<'a> {
    /// Element `i * stride` is the length of request `i`, in tokens.
    pub data: &'a [i32],
    /// Elements from one length to the next; 0 gives every request the same length.
    pub stride: usize,
}

impl<'a> From<&'a [i32]> for SeqLens<'a> {
    fn from(data: &'a [i32]) -> Self {
        Self { data, stride: 1 }
    }
}

impl SeqLens<'_> {
    fn at(&self, request: i32) -> i32 {
        self.data[request as usize * self.stride]
    }

    fn check(&self, batch: i32) -> Result<(), PlanError> {
        let len = self.data.len();
        let needed = match batch {
            0 => 0,
            _ => (batch as usize - 1)
                .saturating_mul(self.stride)
                .saturating_add(1),
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
                argument: "seq_lens",
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
/// Any lengths are valid: they are clamped to `0 ..= max_seq_len`. Equal inputs give equal plans, and the
/// words of the plan equal those that the device planner writes. Words of unused entries are unspecified.
///
/// # Errors
///
/// What [`layout`] raises for the shape, and [`PlanError::Length`] for `seq_lens` or `words` of the wrong
/// number of elements.
///
/// ```
/// # use ferromla_schedule::{PlanShape, layout, plan_into};
/// let shape = PlanShape {
///     batch: 2, q_len: 1, group: 16, kv_heads: 1, unit_rows: 64, workers: 4,
///     max_seq_len: 65536, fixed_cost: 2, split_cost: 6, min_part: 1, ..PlanShape::default()
/// };
/// let mut words = vec![0; layout(&shape)?.words()];
/// let header = plan_into(&shape, [65536, 640].as_slice(), &mut words)?;
/// // 1024 + 2 and 10 + 2 tiles for four workers: the long request is cut three times.
/// assert_eq!((header.share, header.items, header.merges, header.slots), (260, 5, 1, 4));
/// # Ok::<(), ferromla_schedule::PlanError>(())
/// ```
pub fn plan_into<'a>(
    shape: &FmPlanShape,
    seq_lens: impl Into<SeqLens<'a>>,
    words: &mut [i32],
) -> Result<FmPlanHeader, PlanError> {
    let layout = layout(shape)?;
    let seq_lens = seq_lens.into();
    seq_lens.check(shape.batch)?;
    at_least_words(&layout, words.len())?;

    let buffer = Buffer::split(shape, &layout, words);
    let planner = Planner {
        shape,
        layout: &layout,
        seq_lens,
    };
    let total = planner.lay_out(buffer.unit_start);
    let line = planner.decide(Line {
        start: Starts(buffer.unit_start),
        total,
        share: even_share(total, shape.workers),
        units: layout.units,
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
    seq_lens: SeqLens<'a>,
}

impl Planner<'_> {
    fn seq_len(&self, request: i32) -> i32 {
        clamp_seq_len(self.shape, self.seq_lens.at(request))
    }

    /// Lays the units on the line; returns its length.
    fn lay_out(&self, unit_start: &mut [[i32; 2]]) -> i64 {
        let mut position = 0;
        for (index, start) in (0..).zip(unit_start.iter_mut()) {
            *start = Starts::words(position);
            if index < self.layout.units {
                let unit = unit_at(self.shape, self.layout.blocks, index);
                let tiles = unit_tiles(self.shape, unit.row_begin, self.seq_len(unit.request));
                position += i64::from(tiles) + i64::from(self.shape.fixed_cost);
            }
        }
        position
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
        for index in 0..line.units {
            let unit = unit_at(self.shape, self.layout.blocks, index);
            let seq_len = self.seq_len(unit.request);
            let parts = parts_of(self.shape, line, index);
            unit_item[index as usize] = tally.items;
            for j in 0..parts.count {
                items[(tally.items + j) as usize] =
                    make_item(self.shape, unit, seq_len, &parts, j, tally.slots);
            }
            if parts.count > 1 {
                merges[tally.merges as usize] = make_merge(self.shape, unit, &parts, tally.slots);
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
