//! The planner: two passes over the units, or more where they may be equal, have parts of a common length or are dealt, and one
//! over the workers.

use std::cell::Cell;

use crate::algorithm::{
    Line, Parts, Starts, Tally, UnitSlots, cut_of, cutting_share, even_share, fair_whole_stretch,
    make_header, make_item, make_merge, parts_of, unit_tiles, whole_stretch,
};
use crate::common_parts::{common_length, parts_up_to, turns_of};
use crate::dealt::{Deal, deal_parts, deal_whole};
use crate::equal_parts::{Equal, EqualParts, equal_parts};
use crate::lengths::{ListLens, Strided};
use crate::longest_first::LongestFirst;
use crate::plan_layout::{FM_SPLIT_AUTO, FM_SPLIT_REST, FmPlanHeader, FmPlanLayout, FmPlanShape};
use crate::rest::Rest;
use crate::view::at_least_words;
use crate::{PlanError, layout};

mod buffer;
mod units;
use buffer::{Buffer, Entries};
use units::Keys;

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
///     max_seq_len: 65536, fixed_cost: 2, split_cost: 6, min_part: 1, whole_speed: 256, equal_speed: 256,
///     ..PlanShape::default()
/// };
/// let mut words = vec![0; layout(&shape)?.words()];
/// let header = plan_into(&shape, [65536, 640].as_slice(), None, &mut words)?;
/// // 1024 + 2 and 10 + 2 tiles for four workers: the long request is cut three times, and who has its short last part has the
/// // short request as well.
/// assert_eq!((header.share, header.items, header.merges, header.slots), (259, 5, 1, 4));
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
    if shape.sparse_q_len != 0 {
        return Err(PlanError::Field {
            field: "sparse_q_len",
            value: shape.sparse_q_len.into(),
            rule: "0 for the lengths of requests",
        });
    }
    let seq_lens = seq_lens.into();
    seq_lens.check("seq_lens", batch)?;
    let qo_indptr = qo_indptr.unwrap_or([].as_slice().into());
    qo_indptr.check("qo_indptr", if shape.ragged != 0 { batch + 1 } else { 0 })?;
    let keys = Keys::OfRequests {
        seq_lens,
        qo_indptr,
    };
    write(shape, &layout, keys, words)
}

/// Plans a sparse batch (`shape.sparse_q_len` is not 0, or there is no unit), as [`plan_into`] a dense one.
///
/// `topk_lengths` says how many entries of each token's list of `shape.topk` count, `extra_lengths` the same
/// of its list of `shape.extra_topk`; `None`: all of them. Any lengths are valid: they are clamped to the list.
///
/// # Errors
///
/// As [`plan_into`], with `topk_lengths` and `extra_lengths` for `seq_lens`.
///
/// ```
/// # use ferromla_schedule::{ListLens, PlanShape, PlanView, layout, plan_sparse_into};
/// let shape = PlanShape {
///     batch: 2, q_len: 1, sparse_q_len: 3, topk: 2048, extra_topk: 128, group: 16, kv_heads: 1,
///     unit_rows: 64, workers: 4, max_seq_len: 2048 + 128, fixed_cost: 2, split_cost: 6, min_part: 1,
///     whole_speed: 256, equal_speed: 256, ..PlanShape::default()
/// };
/// let mut words = vec![0; layout(&shape)?.words()];
/// let per_request = ListLens { data: &[2048, 65], stride: [1, 0] };
/// let header = plan_sparse_into(&shape, Some(per_request), None, &mut words)?;
/// assert_eq!(header.units, 6);
/// let last = PlanView::new(&shape, &words)?.items()[header.items as usize - 1];
/// assert_eq!((last.request, last.q_begin), (1, 2));
/// // Two tiles of the main list, the second with one key, and two of the extra list.
/// assert_eq!((last.main_len, last.extra_len()), (65, 128));
/// assert_eq!((last.seq_len, last.tile_end), (128 + 128, 4));
/// # Ok::<(), ferromla_schedule::PlanError>(())
/// ```
pub fn plan_sparse_into(
    shape: &FmPlanShape,
    topk_lengths: Option<ListLens>,
    extra_lengths: Option<ListLens>,
    words: &mut [i32],
) -> Result<FmPlanHeader, PlanError> {
    let layout = layout(shape)?;
    if shape.sparse_q_len == 0 && layout.units > 0 {
        return Err(PlanError::Field {
            field: "sparse_q_len",
            value: 0,
            rule: "1 or more for lists of keys",
        });
    }
    for (argument, lens) in [
        ("topk_lengths", &topk_lengths),
        ("extra_lengths", &extra_lengths),
    ] {
        if let Some(lens) = lens {
            lens.check(argument, shape)?;
        }
    }
    let keys = Keys::OfTokens {
        main: topk_lengths,
        extra: extra_lengths,
    };
    write(shape, &layout, keys, words)
}

fn write(
    shape: &FmPlanShape,
    layout: &FmPlanLayout,
    keys: Keys,
    words: &mut [i32],
) -> Result<FmPlanHeader, PlanError> {
    at_least_words(layout, words.len())?;
    let mut buffer = Buffer::split(shape, layout, words);
    let planner = Planner {
        shape,
        layout,
        keys,
    };
    let (units, filled, total) = planner.lay_out(buffer.unit_start);
    let all_whole = Line {
        start: Starts(buffer.unit_start),
        total,
        share: even_share(total, shape.workers),
        units,
        whole: shape.split_mode == FM_SPLIT_AUTO,
    };
    let mut line = planner.decide(all_whole, filled);
    let entries = &mut buffer.entries;
    let equal = planner.cut_equally(&line, filled);
    let common = match equal {
        Some(_) => None,
        None => planner.common_length(&line, filled),
    };
    let deal = match (&equal, common) {
        (None, None) => deal_whole(shape, &mut line).or_else(|| deal_parts(shape, &line)),
        _ => None,
    };
    let all = if let Some(equal) = equal {
        (line.whole, line.share) = (false, equal.step().into());
        match equal {
            Equal::Parts(equal) => planner.write_equal(&equal, entries),
            Equal::BesideWhole(rest) => planner.write_rest(&line, &rest, entries),
        }
    } else if let Some(rest) = planner.rest(line.units) {
        planner.write_rest(&line, &rest, entries)
    } else if let Some(deal) = deal {
        planner.write_dealt(&line, &deal, entries)
    } else if let Some(way) = LongestFirst::new(shape, &line, filled, common) {
        (line.whole, line.share) = (way.whole, way.step);
        planner.write_longest_first(&line, &way, entries)
    } else if let Some(longest) = common {
        line.share = longest;
        planner.write_common(&line, filled, longest, entries)
    } else {
        let all = planner.write_units(&line, entries, buffer.unit_item);
        planner.write_workers(&line, buffer.unit_item, entries.worker_begin);
        all
    };
    *buffer.header = make_header(&line, all);
    Ok(*buffer.header)
}

struct Planner<'a> {
    shape: &'a FmPlanShape,
    layout: &'a FmPlanLayout,
    keys: Keys<'a>,
}

impl Planner<'_> {
    /// `FM_SPLIT_AUTO`: keeps units whole where that is about as fair as cutting them.
    fn decide<'l>(&self, line: Line<'l>, filled: i32) -> Line<'l> {
        if !line.whole {
            return line;
        }
        let most = fair_whole_stretch(self.shape, &line, filled);
        let fair = |worker| whole_stretch(self.shape, &line, worker) <= most;
        if (0..self.shape.workers).all(fair) {
            return line;
        }
        Line {
            whole: false,
            share: cutting_share(self.shape, line.share),
            ..line
        }
    }

    /// `FM_SPLIT_AUTO`: units that are to be cut get equal parts where all that have tiles have as many. Whole
    /// units are, too, if they would be cut without the empty ones.
    fn cut_equally(&self, line: &Line, filled: i32) -> Option<Equal> {
        if self.shape.split_mode != FM_SPLIT_AUTO {
            return None;
        }
        let equal = equal_parts(self.shape, line, filled)?;
        let tiles = |unit| line.tiles(self.shape, unit);
        (0..line.units)
            .all(|unit| [0, equal.tiles()].contains(&tiles(unit)))
            .then_some(equal)
    }

    fn write_equal(&self, equal: &EqualParts, entries: &mut Entries) -> Tally {
        let parts = equal.parts_of_filled();
        let mut rank = 0; // of the unit among those with tiles
        self.for_each_unit(|index, unit| {
            if unit_tiles(self.shape, unit) == 0 {
                let before = rank * parts.count;
                let item = equal.turns.item_of_empty(self.shape, index - rank, before);
                entries.items[item as usize] =
                    make_item(unit, &Parts::whole(0), 0, Tally::default(), UnitSlots::NONE);
                return;
            }
            let before = equal.before_filled(rank);
            let slots = UnitSlots::new(self.shape, self.layout, &parts, before);
            for j in 0..parts.count {
                let part = rank * parts.count + j;
                let item = equal.turns.item_of_part(self.shape, part, index - rank);
                entries.items[item as usize] = make_item(unit, &parts, j, before, slots);
            }
            if parts.count > 1 {
                entries.merges[rank as usize] = make_merge(unit, &parts, slots);
            }
            rank += 1;
        });
        for (worker, begin) in (0..).zip(entries.worker_begin.iter_mut()) {
            *begin = equal.turns.first_item(self.shape, worker);
        }
        equal.tally()
    }

    /// `FM_SPLIT_REST`: what is left of lists that are all as long.
    fn rest(&self, units: i32) -> Option<Rest> {
        let all = matches!(
            self.keys,
            Keys::OfTokens {
                main: None,
                extra: None
            }
        );
        if self.shape.split_mode != FM_SPLIT_REST || !all || units == 0 {
            return None;
        }
        let (keys, _) = self.key_counts(0, 0);
        Rest::of_lists(self.shape, units, keys.into())
    }

    fn write_rest(&self, line: &Line, rest: &Rest, entries: &mut Entries) -> Tally {
        let empty = Cell::new(0); // units so far
        let parts = |unit| match line.tiles(self.shape, unit) {
            0 => Parts::whole(0),
            _ => rest.parts(self.shape, unit - empty.get()),
        };
        let item = |unit, parts: &Parts, j, before: Tally| {
            if parts.tile(parts.count) == 0 {
                return rest.item_of_empty(self.shape, empty.replace(empty.get() + 1));
            }
            match parts.count {
                1 => rest.item_of_whole(self.shape, unit - empty.get()),
                _ => rest.item_of_part(self.shape, before.slots + j),
            }
        };
        let first_item = |worker| rest.first_item(self.shape, worker);
        self.write_placed(parts, item, first_item, entries)
    }

    /// `FM_SPLIT_AUTO`: the common length of parts, for few units that are to be cut.
    fn common_length(&self, line: &Line, filled: i32) -> Option<i64> {
        match self.shape.split_mode {
            FM_SPLIT_AUTO => common_length(self.shape, line, filled),
            _ => None,
        }
    }

    /// Parts of units that do not lie on the line: `parts` of each unit; `item`, of a unit's part, with what comes before the unit;
    /// `first_item` of each worker.
    fn write_placed(
        &self,
        parts: impl Fn(i32) -> Parts,
        mut item: impl FnMut(i32, &Parts, i32, Tally) -> i32,
        first_item: impl Fn(i32) -> i32,
        entries: &mut Entries,
    ) -> Tally {
        let mut tally = Tally::default();
        self.for_each_unit(|index, unit| {
            let parts = parts(index);
            let slots = UnitSlots::new(self.shape, self.layout, &parts, tally);
            for j in 0..parts.count {
                let at = item(index, &parts, j, tally);
                entries.items[at as usize] = make_item(unit, &parts, j, tally, slots);
            }
            if parts.count > 1 {
                entries.merges[tally.merges as usize] = make_merge(unit, &parts, slots);
            }
            tally.add(&parts);
        });
        for (worker, begin) in (0..).zip(entries.worker_begin.iter_mut()) {
            *begin = first_item(worker);
        }
        tally
    }

    /// Parts no longer than `longest`.
    fn write_common(&self, line: &Line, filled: i32, longest: i64, entries: &mut Entries) -> Tally {
        let parts = |unit| parts_up_to(self.shape, longest, line.tiles(self.shape, unit));
        let mut all = Tally::default();
        (0..line.units).for_each(|unit| all.add(&parts(unit)));
        let turns = turns_of(line, filled, &all);
        let mut empty = 0; // units so far
        let item = |_, parts: &Parts, j, before: Tally| {
            let first = before.items - empty;
            if parts.tile(parts.count) > 0 {
                return turns.item_of_part(self.shape, first + j, empty);
            }
            empty += 1;
            turns.item_of_empty(self.shape, empty - 1, first)
        };
        let first_item = |worker| turns.first_item(self.shape, worker);
        self.write_placed(parts, item, first_item, entries)
    }

    fn write_dealt(&self, line: &Line, deal: &Deal, entries: &mut Entries) -> Tally {
        let parts = |unit| parts_of(self.shape, line, unit);
        let item = |unit, parts: &Parts, j, _| deal.item(unit, parts, j);
        let first_item = |worker| deal.first_item(worker);
        self.write_placed(parts, item, first_item, entries)
    }

    fn write_longest_first(&self, line: &Line, way: &LongestFirst, entries: &mut Entries) -> Tally {
        let parts = |unit| way.parts(line.tiles(self.shape, unit));
        let item = |unit, _: &Parts, j, _| way.item(unit, j);
        let first_item = |worker| way.first_item(worker);
        self.write_placed(parts, item, first_item, entries)
    }

    /// Writes the items and merges of every unit, and where its items begin.
    fn write_units(&self, line: &Line, entries: &mut Entries, unit_item: &mut [i32]) -> Tally {
        let mut tally = Tally::default();
        self.for_each_unit(|index, unit| {
            let parts = parts_of(self.shape, line, index);
            unit_item[index as usize] = tally.items;
            let slots = UnitSlots::new(self.shape, self.layout, &parts, tally);
            for j in 0..parts.count {
                entries.items[(tally.items + j) as usize] =
                    make_item(unit, &parts, j, tally, slots);
            }
            if parts.count > 1 {
                entries.merges[tally.merges as usize] = make_merge(unit, &parts, slots);
            }
            tally.add(&parts);
        });
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
