//! Tensor maps of a paged cache, for the loaders of whole pages.
//!
//! Of 16-bit numbers a map sees one part of the cache (latent or rotary) as five dimensions, innermost first: 64 elements of a
//! row (128 bytes, the width of the swizzle), 8 rows of a swizzle atom, the 64-wide column blocks ("chunks"),
//! the atoms of a page, the pages. A box is `box_rows` rows of one page with two chunks of the latent part or
//! the one of the rotary part; KV heads lie `head_chunks` chunks apart.
//!
//! Of rows of codes a map sees three dimensions: the words of a row, the rows of a page, the pages. A box is wider than
//! a row, by the gap that the kernels have between rows in shared memory; what is past the row's end arrives as zeros.
//! Kernels of `FM_SWIZZLED_ROWS` query rows take `fp8` rows in two parts, both swizzled: of the first 512 columns a map sees four dimensions, the
//! words of 128 columns, the rows of a page, the blocks of 128 columns, the pages; of the columns after them it sees what it would
//! of rows that short.
//!
//! A map says nothing but where a cache lies, so each thread keeps those of the caches that it has had last: a server's layers have one each,
//! and the driver takes about 0.1 us to encode one.
//!
//! L2 promotion, measured: 256 bytes cost 3 to 8 %; 128 bytes save 2 % with rows of 576 bytes, and change nothing elsewhere.

use std::cell::RefCell;
use std::ffi::c_void;

use cudarc::driver::sys::{self, CUtensorMapSwizzle as Swizzle};

use crate::dtype::{DType, KvFormat};
use crate::error::Result;
use crate::params::{
    FM_BARE_ROW_GAP, FM_LATENT_BOX_CHUNKS, FM_RAW_BOX_ROWS, FM_RAW_ROW_BYTES_576, FM_SWIZZLED_ROWS,
};
use crate::problem::{CacheRows, NOPE_DIM, PagedCache, ROPE_DIM, Strided};

use super::driver::call;
use super::kernel::is_fp16;

const RANK: usize = 5;
const LATENT_BOX_CHUNKS: u32 = FM_LATENT_BOX_CHUNKS as u32;
/// Elements of one chunk.
const CHUNK: i64 = 64;
/// Rows of one swizzle atom.
const ATOM_ROWS: i64 = 8;
/// Rows of one tile, the most a box has.
const TILE_ROWS: i64 = 64;
const ELEMENT_BYTES: i64 = 2;
/// Bytes of an element of a row of codes.
const WORD: i64 = 4;
/// Columns of a swizzled block of codes.
const CODES_BLOCK: i64 = 128;
const ALIGNMENT: i64 = 16;
/// The driver's bound for strides, in bytes.
const MAX_STRIDE: i64 = 1 << 40;
/// The driver's bound for sizes.
const MAX_SIZE: i64 = 1 << 32;

/// The geometry of one map, in the driver's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    ptr: u64,
    rank: u32,
    element: Element,
    swizzle: Swizzle,
    sizes: [u64; RANK],
    /// Bytes, of dimensions 1 to 4.
    strides: [u64; RANK - 1],
    box_sizes: [u32; RANK],
    /// Chunks from one KV head to the next.
    pub head_chunks: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    /// A number of the cache.
    Sixteen,
    /// Four codes.
    Word,
}

/// Rows of a box: the most that divide both a page and a tile.
pub(super) fn box_rows(page_size: i32) -> i32 {
    1 << page_size.trailing_zeros().min(TILE_ROWS.trailing_zeros())
}

/// The maps of the latent and the rotary part; `None` where TMA cannot read the cache as it lies.
pub(super) fn geometries(cache: &PagedCache) -> Option<(Geometry, Option<Geometry>)> {
    let CacheRows::Half(rows) = &cache.rows else {
        return None;
    };
    let nope = geometry(cache, &rows.nope, NOPE_DIM / CHUNK, LATENT_BOX_CHUNKS)?;
    let rope = match &rows.rope {
        None => None,
        Some(rope) => Some(geometry(cache, rope, ROPE_DIM / CHUNK, 1)?),
    };
    Some((nope, rope))
}

fn geometry(
    cache: &PagedCache,
    part: &Strided<3>,
    chunks: i64,
    box_chunks: u32,
) -> Option<Geometry> {
    let [page_stride, token_stride, head_stride] = part.strides;
    let (pages, page_size) = (i64::from(cache.num_pages), i64::from(cache.page_size));
    let other_heads = i64::from(cache.kv_heads) - 1;
    if pages == 0 || page_size % ATOM_ROWS != 0 || !part.ptr.is_multiple_of(ALIGNMENT as u64) {
        return None;
    }
    if other_heads > 0 && (head_stride % CHUNK != 0 || head_stride <= 0) {
        return None;
    }
    let head_chunks = head_stride / CHUNK;
    let atom_stride = token_stride.checked_mul(ATOM_ROWS)?;
    // A dimension of one index has no stride of its own: any valid number will do.
    let page_stride = if pages == 1 { atom_stride } else { page_stride };
    let strides = [token_stride, CHUNK, atom_stride, page_stride];
    let strides = strides.map(|stride| stride.checked_mul(ELEMENT_BYTES).unwrap_or(-1));
    if !strides
        .iter()
        .all(|stride| (1..MAX_STRIDE).contains(stride) && stride % ALIGNMENT == 0)
    {
        return None;
    }
    let all_chunks = other_heads.checked_mul(head_chunks)?.checked_add(chunks)?;
    let sizes = [CHUNK, ATOM_ROWS, all_chunks, page_size / ATOM_ROWS, pages];
    if !sizes.iter().all(|size| (1..=MAX_SIZE).contains(size)) {
        return None;
    }
    let atoms = box_rows(cache.page_size) as u32 / ATOM_ROWS as u32;
    Some(Geometry {
        ptr: part.ptr,
        rank: RANK as u32,
        element: Element::Sixteen,
        swizzle: Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        sizes: sizes.map(|size| size as u64),
        strides: strides.map(|stride| stride as u64),
        box_sizes: [CHUNK as u32, ATOM_ROWS as u32, box_chunks, atoms, 1],
        head_chunks: i32::try_from(head_chunks).ok()?,
    })
}

/// The maps of rows of codes.
pub(super) struct RawGeometry {
    pub rows: Geometry,
    /// Of the columns after the first 512, where `rows` does not have them.
    pub tails: Option<Geometry>,
    pub box_rows: i32,
}

/// For kernels of `query_rows`; `None` where TMA cannot read the cache as it lies, or rows have scales elsewhere.
pub(super) fn raw_geometry(cache: &PagedCache, query_rows: i32) -> Option<RawGeometry> {
    let CacheRows::Bytes { layout, pages } = &cache.rows else {
        return None;
    };
    if !matches!(cache.format, KvFormat::Fp8 | KvFormat::Fp8V32) {
        return None;
    }
    let rows = box_rows(cache.page_size).min(FM_RAW_BOX_ROWS);
    let [page_stride, token_stride] = pages.strides;
    let (count, page_size) = (i64::from(cache.num_pages), i64::from(cache.page_size));
    let page_stride = if count == 1 {
        token_stride.checked_mul(page_size)?
    } else {
        page_stride
    };
    let is_stride = |stride: i64| (1..MAX_STRIDE).contains(&stride) && stride % ALIGNMENT == 0;
    if i64::from(rows) < ATOM_ROWS
        || count == 0
        || !pages.ptr.is_multiple_of(ALIGNMENT as u64)
        || !is_stride(token_stride)
        || !is_stride(page_stride)
    {
        return None;
    }
    let row_bytes = layout.row_bytes() as i64;
    // Some columns of all rows; a box is wider by the gap.
    let part = |offset: i64, bytes: i64, gap: i32, swizzle| Geometry {
        ptr: pages.ptr + offset as u64,
        rank: 3,
        element: Element::Word,
        swizzle,
        sizes: [bytes / WORD, page_size, count, 1, 1].map(|size| size as u64),
        strides: [token_stride, page_stride, 0, 0].map(|stride| stride as u64),
        box_sizes: [
            ((bytes + i64::from(gap)) / WORD) as u32,
            rows as u32,
            1,
            1,
            1,
        ],
        head_chunks: 0,
    };
    let whole_rows = |gap| part(0, row_bytes, gap, Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE);
    let (rows_map, tails) = match cache.format {
        KvFormat::Fp8 if query_rows == FM_SWIZZLED_ROWS => {
            let (blocks, tail) = (NOPE_DIM / CODES_BLOCK, row_bytes - NOPE_DIM);
            let first = Geometry {
                rank: 4,
                sizes: [CODES_BLOCK / WORD, page_size, blocks, count, 1].map(|size| size as u64),
                strides: [token_stride, CODES_BLOCK, page_stride, 0].map(|stride| stride as u64),
                box_sizes: [
                    (CODES_BLOCK / WORD) as u32,
                    rows as u32,
                    blocks as u32,
                    1,
                    1,
                ],
                ..part(0, CODES_BLOCK, 0, Swizzle::CU_TENSOR_MAP_SWIZZLE_128B)
            };
            let rest = || part(NOPE_DIM, tail, 0, Swizzle::CU_TENSOR_MAP_SWIZZLE_64B);
            (first, (tail > 0).then(rest))
        }
        KvFormat::Fp8 => (whole_rows(FM_BARE_ROW_GAP), None),
        _ => (whole_rows(FM_RAW_ROW_BYTES_576 - row_bytes as i32), None),
    };
    Some(RawGeometry {
        rows: rows_map,
        tails,
        box_rows: rows,
    })
}

/// A map that nothing reads, for kernels that have the parameter and not the use.
pub(super) fn empty() -> sys::CUtensorMap {
    // SAFETY: the type is an array of integers.
    unsafe { std::mem::zeroed() }
}

/// The map of a geometry whose numbers are of that type.
pub(super) fn encoded(geometry: &Geometry, dtype: DType) -> Result<sys::CUtensorMap> {
    thread_local! {
        static KEPT: RefCell<Vec<Option<Kept>>> = const { RefCell::new(Vec::new()) };
    }
    KEPT.with_borrow_mut(|kept| {
        if kept.is_empty() {
            kept.resize(SETS * MAPS_OF_A_SET, None);
        }
        let first = set_of(geometry.ptr) * MAPS_OF_A_SET;
        let set = &mut kept[first..first + MAPS_OF_A_SET];
        let of = (*geometry, is_fp16(dtype));
        if let Some(known) = set.iter().flatten().find(|known| known.of == of) {
            return Ok(known.map);
        }
        let map = encode(geometry, dtype)?;
        set.rotate_right(1);
        set[0] = Some(Kept { of, map });
        Ok(map)
    })
}

/// Maps that a thread keeps, of each set those that were encoded last: more than the layers of a model have, two each.
const SETS: usize = 64;
const MAPS_OF_A_SET: usize = 4;

/// A map, and what it is of.
#[derive(Clone, Copy)]
struct Kept {
    of: (Geometry, bool),
    map: sys::CUtensorMap,
}

/// Which set the maps of what lies there are in. Caches may lie at multiples of a large power of two.
fn set_of(ptr: u64) -> usize {
    const ODD: u64 = 0xBF58_476D_1CE4_E5B9;
    (ptr.wrapping_mul(ODD) >> (u64::BITS - SETS.ilog2())) as usize
}

/// Has the driver encode a map.
fn encode(geometry: &Geometry, dtype: DType) -> Result<sys::CUtensorMap> {
    let mut map = empty();
    let (element, promotion) = match geometry.element {
        Element::Word => (
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        ),
        Element::Sixteen => (
            if is_fp16(dtype) {
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16
            } else {
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            },
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
        ),
    };
    // SAFETY: the arrays have at least the rank's length; the driver checks the rest and does not read the memory.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            element,
            geometry.rank,
            geometry.ptr as *mut c_void,
            geometry.sizes.as_ptr(),
            geometry.strides.as_ptr(),
            geometry.box_sizes.as_ptr(),
            [1u32; RANK].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            geometry.swizzle,
            promotion,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    call("cuTensorMapEncodeTiled", result)?;
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::super::kv_cache;
    use super::*;
    use crate::problem::TwoParts;

    fn cache(num_pages: i32, page_size: i32, kv_heads: i32, strides: [i64; 3]) -> PagedCache {
        let nope = Strided {
            ptr: 1 << 20,
            strides,
        };
        let rope = Some(Strided {
            ptr: (1 << 20) + 1024,
            strides,
        });
        PagedCache {
            rows: CacheRows::Half(TwoParts { nope, rope }),
            format: KvFormat::Bf16,
            scale: 1.0,
            num_pages,
            page_size,
            kv_heads,
        }
    }

    #[test]
    fn the_maps_of_a_model_are_kept() {
        let layers = 61;
        for apart in [1 << 21, 1 << 26, 3 << 25, 123_456 << 9, 1 << 30] {
            let mut in_set = [0; SETS];
            for layer in 0..layers {
                for part in [0, 1024] {
                    in_set[set_of(0x7F12_0000_0000 + layer * apart + part)] += 1;
                }
            }
            let kept: usize = in_set.iter().map(|&maps| maps.min(MAPS_OF_A_SET)).sum();
            assert_eq!(kept as u64, 2 * layers, "{apart} bytes apart");
        }
    }

    #[test]
    fn one_tensor_of_576_is_two_maps() {
        let (nope, rope) = geometries(&cache(10, 64, 1, [64 * 576, 576, 0])).unwrap();
        assert_eq!(nope.sizes, [64, 8, 8, 8, 10]);
        assert_eq!(nope.strides, [1152, 128, 9216, 73_728]);
        assert_eq!(nope.box_sizes, [64, 8, 2, 8, 1]);
        let rope = rope.unwrap();
        assert_eq!(
            (rope.sizes, rope.box_sizes),
            ([64, 8, 1, 8, 10], [64, 8, 1, 8, 1])
        );
        assert_eq!(rope.ptr - nope.ptr, 1024);
    }

    #[test]
    fn heads_are_chunks_apart() {
        let (nope, _) = geometries(&cache(10, 24, 3, [24 * 3 * 576, 3 * 576, 576])).unwrap();
        assert_eq!(nope.head_chunks, 9);
        assert_eq!(nope.sizes, [64, 8, 26, 3, 10]);
        assert_eq!(nope.box_sizes[3], 1);
    }

    #[test]
    fn what_tma_cannot_read_is_left_to_the_gather_loader() {
        let contiguous = [64 * 576, 576, 0];
        assert!(
            geometries(&cache(0, 64, 1, contiguous)).is_none(),
            "no page"
        );
        assert!(
            geometries(&cache(10, 61, 1, [61 * 576, 576, 0])).is_none(),
            "page size"
        );
        assert!(
            geometries(&cache(10, 64, 2, [64 * 1160, 1160, 580])).is_none(),
            "head stride"
        );
        assert!(
            geometries(&cache(10, 64, 1, [64 * 580, 580, 0])).is_none(),
            "row alignment"
        );
        assert!(
            geometries(&cache(10, 64, 1, [0, 576, 0])).is_none(),
            "one page for all"
        );
        assert!(
            geometries(&cache(10, 64, 1, [-64 * 576, 576, 0])).is_none(),
            "backwards"
        );
        assert!(
            geometries(&cache(10, 64, 1, [1 << 40, 576, 0])).is_none(),
            "stride too long"
        );
        assert!(
            geometries(&cache(1, 64, 1, [0, 576, 0])).is_some(),
            "one page needs no stride"
        );
    }

    fn bytes(format: KvFormat, page_size: i32, num_pages: i32, strides: [i64; 2]) -> PagedCache {
        PagedCache {
            num_pages,
            ..kv_cache::tests::bytes(format, page_size, strides)
        }
    }

    #[test]
    fn boxes_of_codes_are_as_wide_as_rows_in_shared_memory() {
        let cache = bytes(KvFormat::Fp8V32, 128, 9, [128 * 656, 656]);
        let map = raw_geometry(&cache, 16).unwrap();
        assert_eq!((map.rows.rank, map.box_rows), (3, 32));
        assert_eq!(map.rows.sizes, [164, 128, 9, 1, 1]);
        assert_eq!(map.rows.strides, [656, 128 * 656, 0, 0]);
        assert_eq!(map.rows.box_sizes, [164, 32, 1, 1, 1]);
        assert_eq!(map.tails, None);
        let map = raw_geometry(&bytes(KvFormat::Fp8, 16, 1, [0, 1152]), 32).unwrap();
        assert_eq!(
            (map.box_rows, map.rows.strides),
            (16, [1152, 16 * 1152, 0, 0])
        );
        assert_eq!((map.rows.sizes[0], map.rows.box_sizes[0]), (144, 148));
        assert_eq!(map.tails, None);
    }

    #[test]
    fn swizzled_boxes_of_codes_are_blocks_and_tails() {
        let map = raw_geometry(&bytes(KvFormat::Fp8, 16, 1, [0, 1152]), 16).unwrap();
        let (rows, tails) = (map.rows, map.tails.unwrap());
        assert_eq!((rows.rank, map.box_rows), (4, 16));
        assert_eq!(rows.sizes, [32, 16, 4, 1, 1]);
        assert_eq!(rows.strides, [1152, 128, 16 * 1152, 0]);
        assert_eq!(rows.box_sizes, [32, 16, 4, 1, 1]);
        assert_eq!((tails.ptr - rows.ptr, tails.rank), (512, 3));
        assert_eq!(tails.sizes, [16, 16, 1, 1, 1]);
        assert_eq!(tails.box_sizes, [16, 16, 1, 1, 1]);
    }

    #[test]
    fn rows_of_codes_come_one_by_one_where_boxes_do_not_fit() {
        let none = |format, page_size, pages, strides| {
            raw_geometry(&bytes(format, page_size, pages, strides), 16).is_none()
        };
        assert!(none(KvFormat::Fp8V32, 61, 9, [61 * 656, 656]), "page size");
        assert!(none(KvFormat::Fp8V32, 4, 9, [4 * 656, 656]), "page of few");
        assert!(none(KvFormat::Fp8V32, 64, 0, [64 * 656, 656]), "no page");
        assert!(none(KvFormat::Fp8V32, 64, 9, [0, 656]), "one page for all");
        assert!(
            none(KvFormat::Fp8V4, 64, 9, [64 * 584, 584]),
            "scales elsewhere"
        );
    }

    #[test]
    fn a_box_fits_pages_and_tiles() {
        let rows: Vec<_> = [8, 16, 24, 61, 64, 128, 192, 256].map(box_rows).to_vec();
        assert_eq!(rows, [8, 16, 8, 1, 64, 64, 64, 64]);
    }
}
