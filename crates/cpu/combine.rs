//! The split units of a plan: their partial results, in part order, to one output row each.

use ferromla_schedule::Merge;
use rayon::prelude::*;

use crate::element::Element;
use crate::exp2::exp2;
use crate::output::Output;
use crate::unit::Unit;
use crate::{DecodeCpu, NOPE_DIM};

/// # Safety
/// As [`decode`](crate::decode), with every partial result of the plan written.
pub(crate) unsafe fn combine<E: Element>(args: &DecodeCpu, output: &Output) {
    args.plan.merges().par_iter().for_each(|merge| {
        let unit = unit_of(args, merge);
        let mut sum = vec![0.0; NOPE_DIM];
        for row in 0..unit.rows {
            // SAFETY: the caller's promise; a row belongs to one merge.
            unsafe {
                let lse2 = combine_row(args, merge, row, &mut sum);
                output.write_row::<E>(unit.index(row), &sum, lse2);
            }
        }
    });
}

fn unit_of(args: &DecodeCpu, merge: &Merge) -> Unit {
    Unit {
        request: merge.request as usize,
        kv_head: merge.kv_head as usize,
        group: args.group,
        q_begin: merge.q_begin as usize,
        q_len: merge.q_len as usize,
        first_row: merge.row_begin as usize,
        rows: 0,
    }
    .clip(args.unit_rows)
}

/// Puts the weighted mean of a row's parts into `sum`; gives their joint log-sum-exp in base 2.
///
/// # Safety
/// The merge's slots are written and nobody else writes them.
unsafe fn combine_row(args: &DecodeCpu, merge: &Merge, row: usize, sum: &mut [f32]) -> f64 {
    let parts = merge.first_slot as usize..(merge.first_slot + merge.parts) as usize;
    let index = |slot: usize| [slot * args.unit_rows + row];
    // SAFETY: the slots were written through the same views, which checked them.
    let lse = |slot| unsafe { args.partial_lse.read(index(slot)) };
    let max = parts.clone().map(lse).fold(f32::NEG_INFINITY, f32::max);
    let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let mut total = 0.0;
    sum.fill(0.0);
    for slot in parts {
        let weight = exp2(lse(slot) - base);
        total += weight;
        // SAFETY: as for the log-sum-exps.
        let part = unsafe { args.partial_out.row(index(slot), NOPE_DIM) };
        sum.iter_mut()
            .zip(part)
            .for_each(|(sum, x)| *sum += weight * x);
    }
    let normaliser = if total == 0.0 { 0.0 } else { 1.0 / total };
    sum.iter_mut().for_each(|x| *x *= normaliser);
    f64::from(max) + f64::from(total).log2()
}
