//! The parts of a request with `batch_invariant`, which depend on its own length and on the rows of a CTA alone.

use crate::plan_layout::{FM_SPLIT_INVARIANT, FM_TILE_ROWS};

/// Tiles of a part, at most: fewer share out better and leave less for one CTA where requests are few, but each costs what it takes to
/// store 512 numbers for each row and to add them up. Of 16 or 32 rows, and ...
const TILES_OF_FEW_ROWS: i32 = 48;
/// ... of 64: more would be lost on requests of as many tokens each than on others is won.
const TILES_OF_MANY_ROWS: i32 = 64;
/// Rows of all parts of a unit together, at most: what partial results of long requests take, a unit 2 MB.
const ROWS_OF_PARTS: i32 = 1024;

/// `split_mode`, `num_splits` and `part_tiles` of a plan for CTAs of so many rows.
pub(super) fn invariant_parts(rows: i32) -> (i32, i32, i32) {
    let tiles = if rows < FM_TILE_ROWS {
        TILES_OF_FEW_ROWS
    } else {
        TILES_OF_MANY_ROWS
    };
    (FM_SPLIT_INVARIANT, ROWS_OF_PARTS / rows, tiles)
}
