//! Where the parts of a plan lie in its buffer: a function of the shape alone, so that a captured graph
//! can plan again in place whatever the lengths become.

use crate::algorithm::end_of_keys;
use crate::fixed_parts::{most_parts, most_stored_steps, stores_steps};
use crate::plan_layout::{
    FM_MAX_PARTS, FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT, FM_SPLIT_REST, FM_STEPS_ADDED,
    FM_STEPS_NONE, FM_STEPS_OF_WHOLE, FM_STEPS_STORED, FM_STORED_STEP_LOG2, FM_TILE_TOKENS,
    FmMerge, FmPlanHeader, FmPlanLayout, FmPlanShape, FmWorkItem,
};
use crate::rest::Rest;
use crate::{PlanError, WorkItem};

const ALIGN: i64 = 16;
/// A worker that is 256 times as fast as its share; more could overflow.
const MAX_WHOLE_SPEED: i32 = 1 << 16;
/// Of the longest unit; parts of more could overflow.
const MOST_TILES: i32 = 1 << 25;
/// Of a whole unit whose steps are stored: [`FM_STEPS_OF_WHOLE`] of them.
const MOST_TILES_OF_WHOLE: i32 = FM_STEPS_OF_WHOLE << FM_STORED_STEP_LOG2;

/// Offsets (bytes, 16-byte aligned) and capacities of the plan of `shape`.
///
/// # Errors
///
/// [`PlanError::Field`] for a field outside its range, [`PlanError::TooLarge`] where a count does not fit
/// 32 bits.
///
/// ```
/// # use ferromla_schedule::{PlanShape, layout};
/// let shape = PlanShape {
///     batch: 3, q_len: 1, group: 16, kv_heads: 1, unit_rows: 64, workers: 8,
///     max_seq_len: 4096, fixed_cost: 2, split_cost: 6, min_part: 1, whole_speed: 256, equal_speed: 256,
///     ..PlanShape::default()
/// };
/// let layout = layout(&shape)?;
/// assert_eq!((layout.units, layout.max_items, layout.max_merges, layout.max_slots), (3, 10, 3, 10));
/// # Ok::<(), ferromla_schedule::PlanError>(())
/// ```
pub fn layout(shape: &FmPlanShape) -> Result<FmPlanLayout, PlanError> {
    check(shape)?;
    let tokens = shape.q_len.max(shape.q_tokens); // one of them is 0
    let rows = fits("rows", i128::from(tokens) * i128::from(shape.group))?;
    let units = fits("units", most_units(shape))?;
    let capacity = Capacity::of(shape, units)?;

    let mut end = size_of::<FmPlanHeader>() as i64;
    let mut section = |count: i64, size: usize| {
        let begin = end;
        end = (begin + count * size as i64 + ALIGN - 1) / ALIGN * ALIGN;
        begin
    };
    let worker_begin = section(i64::from(shape.workers) + 1, size_of::<i32>());
    let merges = section(capacity.merges.into(), size_of::<FmMerge>());
    let items = section(capacity.items.into(), size_of::<FmWorkItem>());
    let unit_start = section(i64::from(units) + 1, size_of::<i64>());
    let unit_item = section(i64::from(units) + 1, size_of::<i32>());
    let requests = if shape.ragged != 0 { shape.batch } else { 0 };
    let first_unit = section(requests.into(), size_of::<i32>());
    Ok(FmPlanLayout {
        worker_begin,
        merges,
        items,
        unit_start,
        unit_item,
        first_unit,
        bytes: end,
        units,
        blocks: if shape.ragged != 0 {
            0
        } else {
            i64::from(rows).div_ceil_positive(shape.unit_rows) as i32 // <= rows, which fits
        },
        max_items: capacity.items,
        max_merges: capacity.merges,
        max_slots: capacity.slots,
        step_slots: capacity.step_slots,
    })
}

impl FmPlanLayout {
    /// Words (`i32`) of the whole buffer.
    pub fn words(&self) -> usize {
        self.bytes as usize / size_of::<i32>()
    }
}

/// The units of a uniform or sparse batch; the most that any `qo_indptr` can give a ragged one.
///
/// A request of `n` query tokens has `ceil(n * group / unit_rows)` units per KV head. As `n * group` is a
/// multiple of `group`, rounding up adds at most `unit_rows - gcd(group, unit_rows)` rows, and no more requests
/// than there are tokens have any.
pub(crate) fn most_units(shape: &FmPlanShape) -> i128 {
    units(shape, 1)
}

/// As many as there are if ragged requests' last units are half empty, on average, or if requests have as many tokens each: the fewer.
pub(crate) fn usual_units(shape: &FmPlanShape) -> i128 {
    if shape.ragged == 0 || shape.q_tokens <= 0 || shape.batch <= 0 {
        return most_units(shape);
    }
    let batch = shape.batch.min(shape.q_tokens);
    let uniform = FmPlanShape {
        ragged: 0,
        batch,
        q_len: (shape.q_tokens - 1) / batch + 1,
        ..*shape
    };
    units(shape, 2).min(most_units(&uniform))
}

/// With `1 / of` of the rows that may be empty.
fn units(shape: &FmPlanShape, of: i128) -> i128 {
    let (group, unit_rows) = (i128::from(shape.group), i128::from(shape.unit_rows));
    let ceil = |rows: i128| (rows + unit_rows - 1) / unit_rows;
    let blocks = if shape.ragged == 0 {
        let lists = i128::from(shape.sparse_q_len.max(1)); // of a request
        i128::from(shape.batch) * lists * ceil(i128::from(shape.q_len) * group)
    } else {
        let requests = i128::from(shape.batch.min(shape.q_tokens));
        let padding = unit_rows - gcd(shape.group, shape.unit_rows);
        let units = (i128::from(shape.q_tokens) * group + requests * padding / of) / unit_rows;
        units.max(requests)
    };
    i128::from(shape.kv_heads) * blocks
}

/// The slots that the steps of each unit take where they are stored.
pub(crate) fn slots_of_steps(max_seq_len: i32, num_splits: i32) -> i32 {
    let tiles = i64::from(max_seq_len).div_ceil_positive(FM_TILE_TOKENS);
    most_stored_steps(tiles, num_splits).max(1) as i32 // <= num_splits
}

fn gcd(mut a: i32, mut b: i32) -> i128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.into()
}

/// The most entries any lengths can need.
struct Capacity {
    items: i32,
    merges: i32,
    slots: i32,
    /// Of these.
    step_slots: i32,
}

impl Capacity {
    fn of(shape: &FmPlanShape, units: i32) -> Result<Self, PlanError> {
        if units == 0 {
            return Ok(Self {
                items: 0,
                merges: 0,
                slots: 0,
                step_slots: 0,
            });
        }
        if shape.split_mode == FM_SPLIT_AUTO {
            // Each of the workers - 1 inner cuts adds one item, and one slot beyond its unit's first.
            let cuts = shape.workers - 1;
            let merges = units.min(cuts);
            return Ok(Self {
                items: fits("items", i128::from(units) + i128::from(cuts))?,
                merges,
                slots: fits("slots", i128::from(merges) + i128::from(cuts))?,
                step_slots: 0,
            });
        }
        if shape.split_mode == FM_SPLIT_REST {
            let rest = Rest::of_lists(shape, units, end_of_keys(shape.topk, shape.extra_topk));
            return Ok(Self {
                items: rest.map_or(units, |rest| rest.first_item(shape, shape.workers)),
                merges: rest.map_or(0, |rest| rest.units),
                slots: rest.map_or(0, |rest| rest.cut()),
                step_slots: 0,
            });
        }
        let tiles = i64::from(shape.max_seq_len).div_ceil_positive(FM_TILE_TOKENS);
        let parts = most_parts(shape, tiles);
        let items = fits("items", i128::from(units) * i128::from(parts))?;
        let split = parts > 1;
        let of_steps = match split {
            true => i128::from(units) * i128::from(shape.few_steps),
            false => 0,
        };
        let others = match (stores_steps(shape), split) {
            // Whole units of several steps have those of their worker.
            (true, _) if shape.few_parts == 1 && shape.few_steps > 1 => {
                i128::from(shape.workers) * i128::from(FM_STEPS_OF_WHOLE)
            }
            (false, true) => items.into(),
            _ => 0,
        };
        Ok(Self {
            items,
            merges: if split { units } else { 0 },
            slots: fits("slots", of_steps + others)?,
            step_slots: fits("slots", of_steps)?,
        })
    }
}

fn check(shape: &FmPlanShape) -> Result<(), PlanError> {
    let one_of = |field, value: i32, ok: bool, rule| {
        if ok {
            Ok(())
        } else {
            Err(PlanError::Field {
                field,
                value: value.into(),
                rule,
            })
        }
    };
    let at_least = |field, value: i32, least: i32, rule| one_of(field, value, value >= least, rule);
    at_least("batch", shape.batch, 0, "0 or more")?;
    one_of(
        "ragged",
        shape.ragged,
        matches!(shape.ragged, 0 | 1),
        "0 or 1",
    )?;
    let only = |field, value: i32, applies, rule| {
        if applies {
            at_least(field, value, 0, "0 or more")
        } else {
            one_of(field, value, value == 0, rule)
        }
    };
    only(
        "q_len",
        shape.q_len,
        shape.ragged == 0,
        "0 where ragged is 1",
    )?;
    only(
        "q_tokens",
        shape.q_tokens,
        shape.ragged == 1,
        "0 where ragged is 0",
    )?;
    at_least("group", shape.group, 1, "1 or more")?;
    at_least("kv_heads", shape.kv_heads, 1, "1 or more")?;
    at_least("unit_rows", shape.unit_rows, 1, "1 or more")?;
    at_least("workers", shape.workers, 1, "1 or more")?;
    at_least("max_seq_len", shape.max_seq_len, 0, "0 or more")?;
    at_least("fixed_cost", shape.fixed_cost, 0, "0 or more")?;
    at_least("split_cost", shape.split_cost, 0, "0 or more")?;
    one_of(
        "own_parts_gain",
        shape.own_parts_gain,
        (0..=shape.split_cost).contains(&shape.own_parts_gain),
        "from 0 to split_cost",
    )?;
    at_least("min_part", shape.min_part, 1, "1 or more")?;
    at_least("part_cost", shape.part_cost, 0, "0 or more")?;
    at_least("equal_split_cost", shape.equal_split_cost, 0, "0 or more")?;
    for (field, speed) in [
        ("whole_speed", shape.whole_speed),
        ("equal_speed", shape.equal_speed),
    ] {
        one_of(
            field,
            speed,
            (256..=MAX_WHOLE_SPEED).contains(&speed),
            "from 256 to 65536",
        )?;
    }
    one_of(
        "causal",
        shape.causal,
        matches!(shape.causal, 0 | 1),
        "0 or 1",
    )?;
    one_of(
        "split_mode",
        shape.split_mode,
        matches!(
            shape.split_mode,
            FM_SPLIT_AUTO | FM_SPLIT_FIXED | FM_SPLIT_INVARIANT | FM_SPLIT_REST
        ),
        "0 (auto), 1 (fixed), 2 (invariant) or 3 (rest)",
    )?;
    one_of(
        "split_mode",
        shape.split_mode,
        shape.split_mode != FM_SPLIT_REST || shape.ragged == 0,
        "0, 1 or 2 where ragged is 1",
    )?;
    let invariant = shape.split_mode == FM_SPLIT_INVARIANT;
    if invariant {
        one_of(
            "part_tiles",
            shape.part_tiles,
            (1..=MOST_TILES).contains(&shape.part_tiles),
            "from 1 to 33554432",
        )?;
    }
    one_of(
        "steps",
        shape.steps,
        match shape.steps {
            FM_STEPS_NONE => true,
            FM_STEPS_ADDED | FM_STEPS_STORED => invariant && shape.ragged == 0,
            _ => false,
        },
        "0, or 1 or 2 where split_mode is 2 and ragged 0",
    )?;
    let stored = stores_steps(shape);
    one_of(
        "part_tiles",
        shape.part_tiles,
        !stored || shape.part_tiles <= MOST_TILES_OF_WHOLE,
        "at most 64 where steps is 2",
    )?;
    one_of(
        "few_steps",
        shape.few_steps,
        shape.few_steps == 0 || shape.steps != FM_STEPS_NONE && shape.few_steps > 0,
        "0, or more where steps is not 0",
    )?;
    one_of(
        "few_parts",
        shape.few_parts,
        match shape.few_steps {
            0 => shape.few_parts == 0,
            _ if stored => (1..=FM_MAX_PARTS).contains(&shape.few_parts),
            _ => (2..=FM_MAX_PARTS).contains(&shape.few_parts),
        },
        "0 where few_steps is, else from 2 to 65535, or from 1 where steps is 2",
    )?;
    if invariant || shape.split_mode == FM_SPLIT_FIXED {
        at_least("num_splits", shape.num_splits, 1, "1 or more")?;
        one_of(
            "num_splits",
            shape.num_splits,
            shape.num_splits <= FM_MAX_PARTS,
            "at most 65535",
        )?;
    }
    one_of(
        "few_steps",
        shape.few_steps,
        !stored || shape.few_steps >= slots_of_steps(shape.max_seq_len, shape.num_splits),
        "no less than a unit may have steps where steps is 2",
    )?;
    check_sparse(shape)
}

fn check_sparse(shape: &FmPlanShape) -> Result<(), PlanError> {
    let is = |field, value: i32, wanted: i64, rule| {
        if i64::from(value) == wanted {
            return Ok(());
        }
        let value = value.into();
        Err(PlanError::Field { field, value, rule })
    };
    let lists = [
        ("sparse_q_len", shape.sparse_q_len),
        ("topk", shape.topk),
        ("extra_topk", shape.extra_topk),
    ];
    for (field, value) in lists {
        is(field, value, value.max(0).into(), "0 or more")?;
        if shape.sparse_q_len == 0 {
            is(field, value, 0, "0 where sparse_q_len is 0")?;
        }
    }
    if shape.sparse_q_len == 0 {
        return Ok(());
    }
    is("ragged", shape.ragged, 0, "0 where sparse_q_len is not")?;
    is("q_len", shape.q_len, 1, "1 where sparse_q_len is not 0")?;
    is("causal", shape.causal, 0, "0 where sparse_q_len is not")?;
    let keys = end_of_keys(shape.topk, shape.extra_topk);
    fits("keys", keys.into())?;
    let rule = "where the keys of topk and extra_topk end";
    is("max_seq_len", shape.max_seq_len, keys, rule)
}

fn fits(what: &'static str, count: i128) -> Result<i32, PlanError> {
    i32::try_from(count).map_err(|_| PlanError::TooLarge { what, count })
}

/// `ceil(self / by)` for `self >= 0`, `by > 0`: the signed `div_ceil` is not stable.
pub(crate) trait DivCeil {
    fn div_ceil_positive(self, by: impl Into<i64>) -> i64;
}

impl DivCeil for i64 {
    fn div_ceil_positive(self, by: impl Into<i64>) -> i64 {
        let by = by.into();
        self / by + i64::from(self % by != 0)
    }
}

const _: () =
    assert!(size_of::<WorkItem>() as i64 % ALIGN == 0 && size_of::<FmMerge>() as i64 % ALIGN == 0);
