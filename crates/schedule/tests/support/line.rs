//! The line of work, as the tests lay it out.

use ferromla_schedule::WorkItem;

use super::{Case, ExpectedUnit, Planned, expected_units};

/// The unit of an item.
pub fn unit_key(item: &WorkItem) -> (i32, i32, i32) {
    (item.request, item.kv_head, item.row_begin)
}

/// Where each boundary between parts stands on the work line, the line's end included.
pub fn boundaries(case: &Case, items: &[WorkItem]) -> Vec<i64> {
    let fixed = i64::from(case.shape.fixed_cost);
    let mut position = 0;
    let mut boundaries = Vec::new();
    for item in items {
        boundaries.push(position);
        let own = if item.tile_begin == 0 { fixed } else { 0 };
        position += own + i64::from(item.tile_end - item.tile_begin);
    }
    boundaries.push(position);
    boundaries
}

/// The length of the work line, and what a worker has of it.
pub fn even_share(case: &Case, units: &[ExpectedUnit]) -> (i64, i64) {
    let total: i64 = units
        .iter()
        .map(|unit| unit.tiles + i64::from(case.shape.fixed_cost))
        .sum();
    let workers = i64::from(case.shape.workers);
    (total, ((total + workers - 1) / workers).max(1))
}

/// The boundary nearest to `x`, the lower of two.
pub fn nearest(boundaries: &[i64], x: i64) -> i64 {
    *boundaries
        .iter()
        .min_by_key(|&&boundary| ((boundary - x).abs(), boundary))
        .expect("not empty")
}

/// The longest stretch of a worker when no unit is cut: of units no more than workers the longest unit.
pub fn longest_whole_stretch(case: &Case, units: &[ExpectedUnit]) -> i64 {
    if units.len() as i64 <= i64::from(case.shape.workers) {
        let costs = units
            .iter()
            .map(|unit| unit.tiles + i64::from(case.shape.fixed_cost));
        return costs.max().unwrap_or(0);
    }
    let (total, share) = even_share(case, units);
    let mut boundaries = vec![0];
    for unit in units {
        boundaries
            .push(boundaries[boundaries.len() - 1] + unit.tiles + i64::from(case.shape.fixed_cost));
    }
    let workers = i64::from(case.shape.workers);
    let cuts: Vec<i64> = (0..=workers)
        .map(|cut| {
            if cut == workers {
                total
            } else {
                nearest(&boundaries, (cut * share).min(total))
            }
        })
        .collect();
    cuts.windows(2)
        .map(|pair| pair[1] - pair[0])
        .max()
        .expect("a worker")
}

/// What each worker's items cost.
pub fn worker_loads(case: &Case, planned: &Planned) -> Vec<i64> {
    let plan = planned.view();
    (0..plan.workers())
        .map(|worker| {
            *boundaries(case, plan.worker(worker))
                .last()
                .expect("the end")
        })
        .collect()
}

/// The longest stretch of whole units that is as good as an even share and what cutting costs, on the line.
pub fn fair_stretch(case: &Case, units: &[ExpectedUnit]) -> i64 {
    let speed = (i64::from(case.shape.whole_speed) + 256) / 2;
    let filled = units.iter().filter(|unit| unit.tiles > 0).count();
    let few = units.len() <= 384 && case.shape.batch <= 384;
    let faster = even_share(case, units).1 * speed / 256;
    let (cost, gain) = (
        i64::from(case.shape.split_cost),
        i64::from(case.shape.own_parts_gain),
    );
    if few && filled <= case.shape.workers as usize {
        return (faster + cost - gain).max(cost); // `faster` is 1 or more
    }
    faster + cost
}

/// Whether a plan has whole units that would have been cut on the line.
pub fn is_dealt_whole(case: &Case, planned: &Planned) -> bool {
    let units = expected_units(case);
    planned.header.whole != 0 && longest_whole_stretch(case, &units) > fair_stretch(case, &units)
}
