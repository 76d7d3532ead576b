use crate::plan_layout::{
    FM_PLAN_VERSION, FmMerge, FmPlanHeader, FmPlanLayout, FmPlanShape, FmWorkItem,
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
    /// [`PlanError::NotThisPlan`] where version, counts or worker ranges cannot be this shape's.
    pub fn new(shape: &FmPlanShape, words: &'a [i32]) -> Result<Self, PlanError> {
        let layout = layout(shape)?;
        at_least_words(&layout, words.len())?;
        let header: &FmPlanHeader =
            &bytemuck::cast_slice(range(words, 0i64, size_of::<FmPlanHeader>()))[0];
        let expect = |field, value: i32, most: i32, rule| {
            if (0..=most).contains(&value) {
                Ok(value as usize)
            } else {
                Err(PlanError::NotThisPlan {
                    field,
                    value: value.into(),
                    rule,
                })
            }
        };
        if header.version != FM_PLAN_VERSION {
            return Err(PlanError::NotThisPlan {
                field: "version",
                value: header.version.into(),
                rule: "this library's plan version",
            });
        }
        let items = expect(
            "items",
            header.items,
            layout.max_items,
            "within the shape's capacity",
        )?;
        let merges = expect(
            "merges",
            header.merges,
            layout.max_merges,
            "within the shape's capacity",
        )?;
        expect(
            "slots",
            header.slots,
            layout.max_slots,
            "within the shape's capacity",
        )?;
        expect(
            "units",
            header.units,
            layout.units,
            "within the shape's capacity",
        )?;

        let worker_begin = range(words, layout.worker_begin, (shape.workers as usize + 1) * 4);
        check_worker_begin(worker_begin, header.items)?;
        Ok(Self {
            header,
            worker_begin,
            merges: bytemuck::cast_slice(range(
                words,
                layout.merges,
                merges * size_of::<FmMerge>(),
            )),
            items: bytemuck::cast_slice(range(
                words,
                layout.items,
                items * size_of::<FmWorkItem>(),
            )),
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
