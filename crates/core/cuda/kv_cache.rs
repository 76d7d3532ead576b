//! Caches as attention kernels read them.

use std::ffi::c_void;

use crate::params::{FmDivisor, FmKvCache};
use crate::problem::{CacheRows, KeyLists, PagedCache, Strided, TwoParts};

/// Bytes of a 16-bit number.
const HALF: i64 = 2;

/// Strides in bytes of an array of 16-bit numbers.
fn in_bytes(part: &Strided<3>) -> [i64; 3] {
    part.strides.map(|stride| stride * HALF)
}

/// A cache whose pages a block table names.
pub(super) fn of_pages(cache: &PagedCache) -> FmKvCache {
    let common = FmKvCache {
        format: cache.format as i32,
        num_pages: cache.num_pages,
        page_size: cache.page_size,
        page: FmDivisor::of(cache.page_size),
        ..FmKvCache::default()
    };
    match &cache.rows {
        CacheRows::Half(TwoParts { nope, rope }) => {
            let rope = rope.unwrap_or(Strided::NONE);
            FmKvCache {
                rows: nope.ptr as *const c_void,
                rope: rope.ptr as *const c_void,
                row_stride: in_bytes(nope),
                rope_stride: in_bytes(&rope),
                ..common
            }
        }
        CacheRows::Bytes { layout, pages } => {
            let [page, token] = pages.strides;
            let token = if layout.split {
                layout.row_bytes() as i64
            } else {
                token
            };
            FmKvCache {
                rows: pages.ptr as *const c_void,
                row_stride: [page, token, 0],
                ..common
            }
        }
    }
}

/// A cache whose tokens are listed. Null would mean that they are not; lists without an entry may be null, and are
/// never read: `any` stands for them.
pub(super) fn of_lists(lists: &KeyLists, any: u64) -> FmKvCache {
    let Strided { ptr, strides } = lists.indices;
    FmKvCache {
        indices: (if ptr == 0 { any } else { ptr }) as *const i32,
        indices_stride: strides,
        ..of_pages(&lists.cache)
    }
}

/// Loads of absent rows read the cache's first, and throw it away: without pages the beginning of the plan's workspace
/// stands for it, which is long enough.
pub(super) fn read_without_pages(kv: &mut FmKvCache, plan: *const c_void) {
    if kv.num_pages == 0 {
        kv.rows = plan;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::dtype::KvFormat;
    use crate::params::{
        FM_KV_BF16, FM_KV_FP4_V41, FM_KV_FP8, FM_KV_FP8_V4, FM_KV_FP8_V32, FM_KV_FP8_V41,
        FM_KV_FP8_V41_SPLIT, FM_KV_FP16,
    };

    fn half(rope: bool) -> PagedCache {
        let part = |ptr| Strided {
            ptr,
            strides: [64 * 576, 576, 0],
        };
        PagedCache {
            rows: CacheRows::Half(TwoParts {
                nope: part(4096),
                rope: rope.then(|| part(4096 + 1024)),
            }),
            format: KvFormat::Bf16,
            scale: 1.0,
            num_pages: 7,
            page_size: 64,
            kv_heads: 1,
        }
    }

    pub fn bytes(format: KvFormat, page_size: i32, strides: [i64; 2]) -> PagedCache {
        PagedCache {
            rows: CacheRows::Bytes {
                layout: &format.layouts()[0],
                pages: Strided { ptr: 4096, strides },
            },
            format,
            page_size,
            ..half(false)
        }
    }

    #[test]
    fn kernels_count_the_formats_in_their_order() {
        let numbers = [
            FM_KV_BF16,
            FM_KV_FP16,
            FM_KV_FP8,
            FM_KV_FP8_V32,
            FM_KV_FP8_V4,
            FM_KV_FP8_V41,
            FM_KV_FP8_V41_SPLIT,
            FM_KV_FP4_V41,
        ];
        assert_eq!(KvFormat::ALL.map(|format| format as i32), numbers);
    }

    #[test]
    fn rows_of_numbers_have_two_parts_and_strides_in_bytes() {
        let kv = of_pages(&half(true));
        assert_eq!((kv.rows as u64, kv.rope as u64), (4096, 5120));
        assert_eq!(
            (kv.row_stride, kv.rope_stride),
            ([64 * 1152, 1152, 0], [64 * 1152, 1152, 0])
        );
        assert_eq!(
            (kv.page_size, kv.page.multiplier, kv.num_pages),
            (64, 1 << 31, 7)
        );
        assert!(of_pages(&half(false)).rope.is_null());
        assert!(kv.indices.is_null());
    }

    #[test]
    fn tokens_of_a_split_page_are_as_far_apart_as_their_rows() {
        for (format, strides, token) in [
            (KvFormat::Fp8, [1 << 20, 1152], 1152),
            (KvFormat::Fp8V32, [1 << 20, 656], 656),
            (KvFormat::Fp8V4, [1 << 20, 584], 576),
            (KvFormat::Fp8V41, [1 << 20, 544], 544),
            (KvFormat::Fp8V41Split, [1 << 20, 528], 512),
            (KvFormat::Fp4V41, [1 << 20, 288], 288),
        ] {
            let kv = of_pages(&bytes(format, 61, strides));
            assert_eq!(kv.row_stride, [1 << 20, token, 0], "{format}");
            let page = (kv.page.multiplier, kv.page.shift);
            assert_eq!(page, ((1_u64 << 37).div_ceil(61) as u32, 37), "{format}");
            assert_eq!((kv.rows as u64, kv.rope as u64), (4096, 0), "{format}");
        }
    }

    #[test]
    fn rows_of_a_cache_without_pages_can_be_read() {
        let absent = FmKvCache::default();
        for kv in [
            of_pages(&half(true)),
            of_pages(&bytes(KvFormat::Fp8V32, 64, [1 << 20, 656])),
            absent,
        ] {
            for num_pages in [0, 7] {
                let mut kv = FmKvCache { num_pages, ..kv };
                let rows = kv.rows as u64;
                read_without_pages(&mut kv, 512 as *const c_void);
                assert_eq!(kv.rows as u64, if num_pages == 0 { 512 } else { rows });
            }
        }
    }

    #[test]
    fn lists_without_an_entry_are_lists() {
        let lists = |ptr| KeyLists {
            cache: half(true),
            indices: Strided {
                ptr,
                strides: [12, 4],
            },
            topk: 0,
            lens: None,
        };
        let kv = of_lists(&lists(64), 128);
        assert_eq!((kv.indices as u64, kv.indices_stride), (64, [12, 4]));
        assert_eq!(of_lists(&lists(0), 128).indices as u64, 128);
    }
}
