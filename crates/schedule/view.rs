use std::ops::RangeInclusive;

use crate::algorithm::end_of_keys;
use crate::plan_layout::{
    FM_PLAN_VERSION, FM_SLOTS_OF_WORKER, FM_TILE_TOKENS, FmMerge, FmPlanHeader, FmPlanLayout,
    FmPlanShape, FmWorkItem,
};
use crate::{PlanError, layout};

/// A finished plan, read in place from its words.
///
/// ```
/// # use ferromla_schedule::{PlanShape, PlanView, layout, plan_into};
/// # let shape = PlanShape {
/// #     batch: 1, q_len: 1, group: 16, kv_heads: 1, unit_rows: 64, workers: 2,
/// #     max_seq_len: 4096, fixed_cost: 2, split_cost: 6, min_part: 1, whole_speed: 256, equal_speed: 256,
/// #     ..PlanShape::default()
/// # };
/// let mut words = vec![0; layout(&shape)?.words()];
/// plan_into(&shape, [4096].as_slice(), None, &mut words)?;
/// let plan = PlanView::new(&shape, &words)?;
/// assert_eq!((plan.items().len(), plan.merges().len()), (2, 1));
/// assert_eq!((plan.worker(0)[0].tile_end, plan.worker(1)[0].tile_begin), (32, 32));
/// # Ok::<(), ferromla_schedule::PlanError>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct PlanView<'a> {
    header: &'a FmPlanHeader,
    worker_begin: &'a [i32],
    merges: &'a [FmMerge],
    items: &'a [FmWorkItem],
}

impl<'a> PlanView<'a> {
    /// Reads `words` as the plan of `shape`.
    ///
    /// # Errors
    ///
    /// What [`layout`] raises for the shape, [`PlanError::Length`] for too few words, and
    /// [`PlanError::NotThisPlan`] where version, counts, worker ranges, items or merges cannot be this shape's:
    /// who goes by a plan that was read touches nothing but what its shape has.
    pub fn new(shape: &FmPlanShape, words: &'a [i32]) -> Result<Self, PlanError> {
        let layout = layout(shape)?;
        at_least_words(&layout, words.len())?;
        let header: &FmPlanHeader =
            &bytemuck::cast_slice(range(words, 0i64, size_of::<FmPlanHeader>()))[0];
        if header.version != FM_PLAN_VERSION {
            return Err(PlanError::NotThisPlan {
                field: "version",
                value: header.version.into(),
                rule: "this library's plan version",
            });
        }
        within("items", header.items, 0..=layout.max_items)?;
        within("merges", header.merges, 0..=layout.max_merges)?;
        within("slots", header.slots, 0..=layout.max_slots)?;
        within("units", header.units, 0..=layout.units)?;
        let (items, merges) = (header.items as usize, header.merges as usize);
        let worker_begin = range(words, layout.worker_begin, (shape.workers as usize + 1) * 4);
        check_worker_begin(worker_begin, header.items)?;
        let merges: &[FmMerge] =
            bytemuck::cast_slice(range(words, layout.merges, merges * size_of::<FmMerge>()));
        let items: &[FmWorkItem] =
            bytemuck::cast_slice(range(words, layout.items, items * size_of::<FmWorkItem>()));
        let bounds = Bounds {
            shape,
            slots: layout.max_slots,
            merges: header.merges,
        };
        items.iter().try_for_each(|item| bounds.item(item))?;
        merges.iter().try_for_each(|merge| bounds.merge(merge))?;
        Ok(Self {
            header,
            worker_begin,
            merges,
            items,
        })
    }

    /// Counts and the decision of the planner.
    pub fn header(&self) -> &'a FmPlanHeader {
        self.header
    }

    /// Workers the plan was made for; some may have nothing to do.
    pub fn workers(&self) -> usize {
        self.worker_begin.len() - 1
    }

    /// All work items, worker by worker. On a line of work they are in the order of their units, and within a unit of their tiles; where units are
    /// dealt out they are in the order in which a worker was given them.
    pub fn items(&self) -> &'a [FmWorkItem] {
        self.items
    }

    /// The units whose partial results are to be combined.
    pub fn merges(&self) -> &'a [FmMerge] {
        self.merges
    }

    /// The items of one worker, in the order it does them.
    ///
    /// # Panics
    ///
    /// When `worker` is not below [`workers`](Self::workers).
    pub fn worker(&self, worker: usize) -> &'a [FmWorkItem] {
        &self.items[self.worker_begin[worker] as usize..self.worker_begin[worker + 1] as usize]
    }
}

pub(crate) fn at_least_words(layout: &FmPlanLayout, len: usize) -> Result<(), PlanError> {
    let needed = layout.words();
    if len >= needed {
        Ok(())
    } else {
        Err(PlanError::Length {
            argument: "words",
            len,
            needed,
            rule: "at least",
        })
    }
}

impl FmWorkItem {
    /// Of a list: keys of the extra cache, which begin with the tile after the last of `main_len`.
    pub fn extra_len(&self) -> i32 {
        if self.seq_len == self.main_len {
            return 0;
        }
        let before = end_of_keys(self.main_len, 1) as i32 - 1;
        self.seq_len - before
    }
}

/// What the numbers of a shape's items and merges lie between.
struct Bounds<'a> {
    shape: &'a FmPlanShape,
    slots: i32,
    merges: i32,
}

impl Bounds<'_> {
    fn item(&self, item: &FmWorkItem) -> Result<(), PlanError> {
        let unit = [item.request, item.kv_head, item.q_begin, item.q_len];
        self.unit(unit, item.row_begin)?;
        within(
            "seq_len of an item",
            item.seq_len,
            0..=self.shape.max_seq_len,
        )?;
        let tiles = (item.seq_len as u32).div_ceil(FM_TILE_TOKENS as u32) as i32;
        within("main_len of an item", item.main_len, 0..=self.shape.topk)?;
        within("tile_end of an item", item.tile_end, 0..=tiles)?;
        within("tile_begin of an item", item.tile_begin, 0..=item.tile_end)?;
        within(
            "slot of an item",
            item.slot,
            FM_SLOTS_OF_WORKER..=self.slots - 1,
        )?;
        within("merge of an item", item.merge, -1..=self.merges - 1)
    }

    fn merge(&self, merge: &FmMerge) -> Result<(), PlanError> {
        let unit = [merge.request, merge.kv_head, merge.q_begin, merge.q_len];
        self.unit(unit, merge.row_begin)?;
        let slots = merge.parts.max(merge.slots);
        within("parts of a merge", slots, 1..=self.slots)?;
        within(
            "first_slot of a merge",
            merge.first_slot,
            0..=self.slots - slots,
        )
    }

    /// Its request, KV head, query tokens and first row.
    fn unit(&self, unit: [i32; 4], row_begin: i32) -> Result<(), PlanError> {
        let (shape, [request, kv_head, q_begin, q_len]) = (self.shape, unit);
        within("request of a unit", request, 0..=shape.batch - 1)?;
        within("kv_head of a unit", kv_head, 0..=shape.kv_heads - 1)?;
        let (begin, len) = match (shape.ragged != 0, shape.sparse_q_len) {
            (true, _) => (
                shape.q_tokens - 1,
                1..=shape.q_tokens.saturating_sub(q_begin),
            ),
            (false, 0) => (0, shape.q_len..=shape.q_len),
            (false, tokens) => (tokens - 1, 1..=1),
        };
        within("q_begin of a unit", q_begin, 0..=begin)?;
        within("q_len of a unit", q_len, len)?;
        let rows = i64::from(q_len) * i64::from(shape.group);
        within(
            "row_begin of a unit",
            row_begin,
            0..=rows.min(i32::MAX.into()) as i32 - 1,
        )
    }
}

fn within(field: &'static str, value: i32, range: RangeInclusive<i32>) -> Result<(), PlanError> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(PlanError::NotThisPlan {
        field,
        value: value.into(),
        rule: "within what the shape has",
    })
}

fn check_worker_begin(worker_begin: &[i32], items: i32) -> Result<(), PlanError> {
    let broken = |value: i32, rule| {
        Err(PlanError::NotThisPlan {
            field: "worker_begin",
            value: value.into(),
            rule,
        })
    };
    if worker_begin[0] != 0 {
        return broken(worker_begin[0], "0 at the first worker");
    }
    if let Some(pair) = worker_begin.windows(2).find(|pair| pair[0] > pair[1]) {
        return broken(pair[1], "no less than the one before");
    }
    let last = worker_begin[worker_begin.len() - 1];
    if last == items {
        Ok(())
    } else {
        broken(last, "the number of items at the end")
    }
}

fn range(words: &[i32], byte_offset: i64, bytes: usize) -> &[i32] {
    let begin = byte_offset as usize / 4;
    &words[begin..begin + bytes / 4]
}
