//! Shapes and lengths to plan for, and a finished plan to look at.
#![allow(dead_code)] // each test file uses its own part of this

use ferromla_schedule::plan_layout::{FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT};
use ferromla_schedule::{
    Keys, PlanHeader, PlanLayout, PlanShape, PlanView, Problem, Queries, Split, Target, WorkItem,
    layout, plan_into,
};
use proptest::prelude::*;

pub mod batches;
pub mod beside_whole;
pub mod few_units;
pub mod line;
pub mod shapes;
pub mod sparse;
pub mod ways;

/// A batch to plan for.
#[derive(Debug, Clone)]
pub struct Case {
    pub shape: PlanShape,
    pub seq_lens: Vec<i32>,
    /// Empty unless the shape is ragged.
    pub qo_indptr: Vec<i32>,
}

impl Case {
    /// First query token and number of query tokens of a request.
    pub fn queries(&self, request: usize) -> (i32, i32) {
        if self.shape.ragged == 0 {
            return (0, self.shape.q_len);
        }
        let begin = self.qo_indptr[request].clamp(0, self.shape.q_tokens);
        let end = self.qo_indptr[request + 1].clamp(begin, self.shape.q_tokens);
        (begin, end - begin)
    }

    pub fn seq_len(&self, request: usize) -> i32 {
        self.seq_lens[request].clamp(0, self.shape.max_seq_len)
    }

    /// The case without its requests past the first `batch`.
    pub fn truncated(mut self, batch: usize) -> Self {
        self.shape.batch = batch as i32;
        self.seq_lens.truncate(batch);
        if self.shape.ragged != 0 {
            self.qo_indptr.truncate(batch + 1);
        }
        self
    }
}

/// `qo_indptr` of requests with these numbers of query tokens.
pub fn indptr_of(q_lens: &[i32]) -> Vec<i32> {
    let mut indptr = vec![0];
    indptr.extend(q_lens.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    }));
    indptr
}

/// A plan in its words, made into a buffer full of garbage.
pub struct Planned {
    pub shape: PlanShape,
    pub layout: PlanLayout,
    pub header: PlanHeader,
    pub words: Vec<i32>,
}

impl Planned {
    pub fn view(&self) -> PlanView<'_> {
        PlanView::new(&self.shape, &self.words).expect("a plan just made is readable")
    }
}

/// Whether units that have tiles all have as many, and are whole or cut into parts as long as the header says, where units are
/// not whole on a line of work. (What is cut at even shares may look like it.)
pub fn is_shared_out_equally(planned: &Planned) -> bool {
    if planned.shape.split_mode != FM_SPLIT_AUTO || planned.header.whole != 0 {
        return false;
    }
    let plan = planned.view();
    let mut items: Vec<_> = plan.items().to_vec();
    items.retain(|item| item.tile_begin < item.tile_end);
    items.sort_by_key(|item| (line::unit_key(item), item.tile_begin));
    let units: Vec<_> = items
        .chunk_by(|a, b| line::unit_key(a) == line::unit_key(b))
        .collect();
    let tiles = |unit: &[WorkItem]| unit[unit.len() - 1].tile_end;
    let long = |item: &WorkItem| item.tile_end - item.tile_begin == planned.header.share;
    !units.is_empty()
        && units.iter().all(|unit| tiles(unit) == tiles(units[0]))
        && units.iter().all(|unit| {
            unit[..unit.len() - 1].iter().all(long) && (unit.len() > 1 || long(&unit[0]))
        })
}

/// Whether each worker has as many whole units and a part of another at most, where all units that have tiles have as many: parts are as
/// long as the header says.
pub fn has_parts_beside_whole(planned: &Planned) -> bool {
    if planned.shape.split_mode != FM_SPLIT_AUTO || planned.header.merges == 0 {
        return false;
    }
    let plan = planned.view();
    let whole = |item: &&WorkItem| item.parts == 1 && item.tile_end > 0;
    let of_worker = |worker| {
        let items = plan.worker(worker);
        let parts = items.iter().filter(|item| item.parts > 1).count();
        (items.iter().filter(whole).count(), parts)
    };
    let (each, _) = of_worker(0);
    let whole: Vec<_> = plan.items().iter().filter(whole).collect();
    let as_said = |item: &WorkItem| {
        item.tile_begin > 0 || item.parts == 1 || item.tile_end == planned.header.share
    };
    each > 0
        && (0..plan.workers())
            .all(|worker| matches!(of_worker(worker), (whole, 0 | 1) if whole == each))
        && whole.iter().all(|item| item.tile_end == whole[0].tile_end)
        && plan.items().iter().all(as_said)
}

/// Whether no worker has two parts, and no more units have tiles than there are workers.
pub fn has_a_part_each(planned: &Planned) -> bool {
    let plan = planned.view();
    let parts = |worker| {
        let items = plan.worker(worker).iter();
        items.filter(|item| item.tile_begin < item.tile_end).count()
    };
    planned.shape.split_mode == FM_SPLIT_AUTO
        && planned.header.whole == 0
        && (0..plan.workers()).all(|worker| parts(worker) <= 1)
}

/// Whether a plan deals out empty units.
pub fn deals_out_empty_units(planned: &Planned) -> bool {
    let is_empty = |item: &WorkItem| item.tile_begin >= item.tile_end;
    (is_shared_out_equally(planned) || has_a_part_each(planned))
        && planned.view().items().iter().any(is_empty)
}

/// Pages of 16-bit numbers on an H200, a query token and so many keys for each request, their bound a loose one.
pub fn on_h200(heads: i32, seq_lens: Vec<i32>) -> Case {
    let problem = Problem {
        keys: Keys::Pages,
        batch: seq_lens.len() as i32,
        queries: Queries::Uniform { q_len: 1 },
        group: heads,
        kv_heads: 1,
        causal: true,
        max_seq_len: 1 << 20,
        split: Split::Auto,
        target: Target::Gpu {
            sm_count: 132,
            clusters: [66, 30, 15, 7],
            memory: 4814,
        },
    };
    Case {
        shape: problem.shape().unwrap(),
        seq_lens,
        qo_indptr: Vec::new(),
    }
}

pub fn plan(case: &Case) -> Planned {
    plan_over(case, 0x5a5a_5a5a)
}

/// Plans into words that all hold `garbage`.
pub fn plan_over(case: &Case, garbage: i32) -> Planned {
    let layout = layout(&case.shape).expect("cases are valid");
    let mut words = vec![garbage; layout.words()];
    let qo_indptr = (case.shape.ragged != 0).then_some(case.qo_indptr.as_slice().into());
    let header = plan_into(&case.shape, case.seq_lens.as_slice(), qo_indptr, &mut words)
        .expect("cases are valid");
    Planned {
        shape: case.shape,
        layout,
        header,
        words,
    }
}

/// Any small batch, with lengths of every kind up to the limits of `i32`.
pub fn cases() -> impl Strategy<Value = Case> {
    prop_oneof![
        uniform_cases().boxed(),
        ragged_cases().boxed(),
        garbled_cases().boxed()
    ]
}

/// Every request has as many query tokens.
pub fn uniform_cases() -> impl Strategy<Value = Case> {
    shapes().prop_flat_map(|shape| {
        seq_lens(shape.batch as usize).prop_map(move |seq_lens| Case {
            shape,
            seq_lens,
            qo_indptr: Vec::new(),
        })
    })
}

/// Requests of different numbers of query tokens, of which some may be left over.
pub fn ragged_cases() -> impl Strategy<Value = Case> {
    let q_len = prop_oneof![2 => Just(0), 6 => 1..5i32, 1 => 5..40i32];
    shapes().prop_flat_map(move |shape| {
        let batch = shape.batch as usize;
        let q_lens = prop_oneof![
            3 => prop::collection::vec(q_len.clone(), batch),
            1 => (0..4i32).prop_map(move |len| vec![len; batch]),
        ];
        let left_over = prop_oneof![3 => Just(0), 1 => 0..9i32];
        (seq_lens(batch), q_lens, left_over).prop_map(move |(seq_lens, q_lens, left_over)| {
            let mut shape = without_steps(shape);
            shape.q_tokens = q_lens.iter().sum::<i32>() + left_over;
            (shape.ragged, shape.q_len) = (1, 0);
            let qo_indptr = indptr_of(&q_lens);
            Case {
                shape,
                seq_lens,
                qo_indptr,
            }
        })
    })
}

/// Ragged with any numbers whatever for `qo_indptr`.
pub fn garbled_cases() -> impl Strategy<Value = Case> {
    let entry = prop_oneof![4 => -20..300i32, 1 => any::<i32>()];
    (ragged_cases(), 0..60i32).prop_flat_map(move |(case, q_tokens)| {
        prop::collection::vec(entry.clone(), case.qo_indptr.len()).prop_map(move |qo_indptr| {
            let mut case = case.clone();
            case.shape.q_tokens = q_tokens;
            Case { qo_indptr, ..case }
        })
    })
}

/// Changes the split mode of a shape that has been drawn.
pub fn set_mode(shape: &mut PlanShape, split_mode: i32) {
    shape.split_mode = split_mode;
    if split_mode != FM_SPLIT_INVARIANT {
        *shape = without_steps(*shape);
    }
}

/// The same shape with parts that have no steps.
pub fn without_steps(shape: PlanShape) -> PlanShape {
    PlanShape {
        steps: 0,
        few_steps: 0,
        few_parts: 0,
        ..shape
    }
}

/// [`cases`] of one split mode.
pub fn cases_of(split_mode: i32) -> impl Strategy<Value = Case> {
    cases().prop_map(move |mut case| {
        set_mode(&mut case.shape, split_mode);
        case
    })
}

prop_compose! {
    fn shapes()(
        batch in prop_oneof![1 => Just(0), 8 => 1..12i32, 2 => 12..90i32],
        q_len in prop_oneof![1 => Just(0), 6 => 1..4i32, 1 => 4..70i32],
        group in prop::sample::select(vec![1, 3, 9, 16, 63, 64, 126, 128]),
        kv_heads in 1..4i32,
        causal in 0..2i32,
        unit_rows in prop::sample::select(vec![16, 32, 64, 128, 256, 512]),
        workers in prop_oneof![6 => 1..20i32, 3 => prop::sample::select(vec![33, 66, 132]), 1 => 1000..1300i32],
        split_mode in prop::sample::select(vec![FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT]),
        num_splits in prop_oneof![4 => 1..10i32, 1 => 10..40i32],
        max_seq_len in prop_oneof![
            1 => 0..200i32,
            3 => Just(4096),
            3 => Just(1 << 20),
            1 => Just(i32::MAX),
        ],
        fixed_cost in 0..5i32,
        split_cost in 0..20i32,
        own_parts_gain in prop_oneof![1 => Just(0), 1 => 0..20i32],
        min_part in 1..8i32,
        part_cost in prop_oneof![3 => 0..40i32, 1 => any::<i32>().prop_map(|cost| cost & i32::MAX)],
        whole_speed in prop_oneof![1 => Just(256), 1 => 256..1000i32],
        equal_speed in prop_oneof![1 => Just(256), 1 => 256..1000i32],
        equal_split_cost in 0..20i32,
        part_tiles in prop_oneof![1 => 1..9i32, 4 => 9..100i32],
        steps in 0..3i32,
        few_steps in prop_oneof![1 => Just(0), 3 => 0..400i32],
        few_parts in prop_oneof![1 => Just(2), 3 => 2..140i32],
    ) -> PlanShape {
        let steps = if split_mode == FM_SPLIT_INVARIANT { steps } else { 0 };
        let stored = steps == 2; // there is room for those of any unit
        let few_steps = match steps {
            0 => 0,
            1 => few_steps,
            _ => num_splits + few_steps / 100,
        };
        PlanShape {
            steps,
            few_steps,
            few_parts: if few_steps > 0 { few_parts - i32::from(stored) } else { 0 },
            part_tiles: if stored { part_tiles.min(64) } else { part_tiles },
            batch, q_len, group, kv_heads, causal, unit_rows, workers, split_mode, num_splits,
            max_seq_len, fixed_cost, split_cost, min_part, part_cost, whole_speed,
            equal_speed, equal_split_cost,
            own_parts_gain: own_parts_gain.min(split_cost), ..PlanShape::default()
        }
    }
}

fn seq_lens(batch: usize) -> impl Strategy<Value = Vec<i32>> {
    let mixed = prop_oneof![
        2 => Just(0),
        4 => 0..300i32,
        4 => 0..20_000i32,
        1 => 0..2_000_000i32,
        1 => any::<i32>(),
    ];
    prop_oneof![
        4 => prop::collection::vec(mixed, batch),
        2 => prop::collection::vec(0..5000i32, batch),
        2 => (0..40_000i32).prop_map(move |len| vec![len; batch]),
        2 => equal_or_empty(batch),
        1 => Just(vec![0; batch]),
        1 => Just(vec![i32::MAX; batch]),
    ]
}

/// Requests of one length, and empty ones among them or at either end.
pub fn equal_or_empty(batch: usize) -> impl Strategy<Value = Vec<i32>> {
    let anywhere = prop::collection::vec(any::<bool>(), batch);
    let at_the_ends = (0..=batch, 0..=batch)
        .prop_map(move |(begin, end)| (0..batch).map(|i| begin <= i && i < end).collect());
    let is_filled = prop_oneof![1 => anywhere, 1 => at_the_ends];
    (1..20_000i32, is_filled).prop_map(|(len, is_filled): (_, Vec<bool>)| {
        is_filled
            .iter()
            .map(|&filled| len * i32::from(filled))
            .collect()
    })
}

/// A unit as the tests see it: its place in the batch and the tiles that its rows need, counted row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpectedUnit {
    pub request: i32,
    pub kv_head: i32,
    pub row_begin: i32,
    pub tiles: i64,
}

pub fn expected_units(case: &Case) -> Vec<ExpectedUnit> {
    let shape = &case.shape;
    let mut units = Vec::new();
    for request in 0..shape.batch {
        let (q_len, len) = (
            case.queries(request as usize).1,
            case.seq_len(request as usize),
        );
        let rows = q_len * shape.group;
        for kv_head in 0..shape.kv_heads {
            for row_begin in (0..rows).step_by(shape.unit_rows as usize) {
                let row_end = rows.min(row_begin + shape.unit_rows);
                let seen = (row_begin..row_end)
                    .map(|row| match shape.causal {
                        0 => i64::from(len),
                        _ => i64::from(len) - i64::from(q_len) + i64::from(row / shape.group) + 1,
                    })
                    .max()
                    .expect("a unit has rows");
                let tiles = (seen.max(0) + 63) / 64;
                units.push(ExpectedUnit {
                    request,
                    kv_head,
                    row_begin,
                    tiles,
                });
            }
        }
    }
    units.truncate(layout(shape).expect("cases are valid").units as usize);
    units
}
