//! The line of work, as the tests lay it out.

use ferromla_schedule::WorkItem;

use super::{Case, ExpectedUnit};

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
