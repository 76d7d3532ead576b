//! The words of a plan as its sections.

use crate::plan_layout::{FmMerge, FmPlanHeader, FmPlanLayout, FmPlanShape, FmWorkItem};

/// The sections of a plan, to write to.
pub(super) struct Buffer<'w> {
    pub(super) header: &'w mut FmPlanHeader,
    pub(super) entries: Entries<'w>,
    pub(super) unit_start: &'w mut [[i32; 2]],
    pub(super) unit_item: &'w mut [i32],
}

/// What a plan has many of.
pub(super) struct Entries<'w> {
    pub(super) worker_begin: &'w mut [i32],
    pub(super) merges: &'w mut [FmMerge],
    pub(super) items: &'w mut [FmWorkItem],
}

impl<'w> Buffer<'w> {
    pub(super) fn split(shape: &FmPlanShape, layout: &FmPlanLayout, words: &'w mut [i32]) -> Self {
        let units = layout.units as usize + 1;
        let (words, _) = words.split_at_mut(layout.first_unit as usize / 4);
        let (words, unit_item) = words.split_at_mut(layout.unit_item as usize / 4);
        let (words, unit_start) = words.split_at_mut(layout.unit_start as usize / 4);
        let (words, items) = words.split_at_mut(layout.items as usize / 4);
        let (words, merges) = words.split_at_mut(layout.merges as usize / 4);
        let (header, worker_begin) = words.split_at_mut(layout.worker_begin as usize / 4);
        Self {
            header: &mut bytemuck::cast_slice_mut(header)[0],
            entries: Entries {
                worker_begin: &mut worker_begin[..shape.workers as usize + 1],
                merges: bytemuck::cast_slice_mut(exactly::<FmMerge>(
                    merges,
                    layout.max_merges as usize,
                )),
                items: bytemuck::cast_slice_mut(exactly::<FmWorkItem>(
                    items,
                    layout.max_items as usize,
                )),
            },
            unit_start: bytemuck::cast_slice_mut(exactly::<[i32; 2]>(unit_start, units)),
            unit_item: &mut unit_item[..units],
        }
    }
}

/// The words of `count` entries, without the padding behind them.
fn exactly<T>(words: &mut [i32], count: usize) -> &mut [i32] {
    &mut words[..count * size_of::<T>() / size_of::<i32>()]
}
