//! append_kv and gather_kv: what is written where, and what is left alone.

mod common;

use common::arrays::{Held, Rows, indices};
use common::{NAN_BITS, Rng, to_bits};
use ferromla_cpu::{
    AppendCpu, CacheCpu, Format, GatherCpu, GatherSource, append_kv, gather_kv, gather_offsets,
};
use half::{bf16, f16};

/// Any bits at all: a copy must not care.
fn random_bits(rng: &mut Rng, width: usize) -> Vec<u16> {
    (0..width).map(|_| rng.next() as u16).collect()
}

struct Layout {
    width: usize,
    two_tokens: bool,
    two_cache: bool,
    strided: bool,
}

const LAYOUTS: [Layout; 5] = [
    Layout {
        width: 576,
        two_tokens: true,
        two_cache: false,
        strided: false,
    },
    Layout {
        width: 576,
        two_tokens: true,
        two_cache: true,
        strided: true,
    },
    Layout {
        width: 576,
        two_tokens: false,
        two_cache: true,
        strided: false,
    },
    Layout {
        width: 512,
        two_tokens: false,
        two_cache: false,
        strided: true,
    },
    Layout {
        width: 576,
        two_tokens: true,
        two_cache: false,
        strided: true,
    },
];

#[test]
fn append_writes_each_slot_and_nothing_else() {
    for (seed, layout) in LAYOUTS.iter().enumerate() {
        for (tokens, page_size, pages) in [(0, 16, 3), (5, 1, 7), (40, 61, 2), (2000, 16, 70)] {
            let mut rng = Rng(seed as u64);
            let mut layout_rng = layout.strided.then_some(Rng(99));
            let mut held = Held::new(
                [tokens],
                layout.width,
                layout.two_tokens,
                NAN_BITS,
                layout_rng.as_mut(),
            );
            let mut cache = Held::new(
                [pages, page_size, 1],
                layout.width,
                layout.two_cache,
                NAN_BITS,
                layout_rng.as_mut(),
            );
            let mut slots = Rows::new([tokens], 1, -1i64, layout_rng.as_mut());
            // What the cache must hold afterwards, by replaying the tokens in order.
            let capacity = (pages * page_size) as i64;
            let mut model = vec![vec![NAN_BITS; layout.width]; capacity as usize];
            for token in 0..tokens {
                let row = random_bits(&mut rng, layout.width);
                let slot = match rng.below(10) {
                    0 => -1 - rng.below(3) as i64,
                    1 => capacity + rng.below(3) as i64,
                    2 => rng.pick(&[i64::MAX, i64::MIN, 1 << 40]),
                    // Few enough slots that tokens meet in one.
                    _ => rng.below(capacity as usize) as i64,
                };
                held.set_row([token], &row);
                slots.set_row([token], &[slot]);
                if (0..capacity).contains(&slot) {
                    model[slot as usize] = row;
                }
            }
            let args = AppendCpu {
                tokens: held.rows(Format::Bf16),
                cache: CacheCpu::Plain(cache.rows(Format::Bf16)),
                slots: slots.view(0),
                round_scale: true,
            };
            // SAFETY: every view describes one of the arrays above.
            unsafe { append_kv(&args) };
            cache.assert_gaps_untouched();
            for [page, offset] in indices([pages, page_size]) {
                assert_eq!(
                    cache.get_row([page, offset, 0]),
                    model[page * page_size + offset]
                );
            }
        }
    }
}

#[test]
fn the_last_token_of_a_slot_wins_on_any_number_of_threads() {
    let mut tokens = Held::new([3000], 512, false, 0, None);
    let mut slots = Rows::new([3000], 1, 0i64, None);
    for token in 0..3000 {
        tokens.set_row([token], &[token as u16; 512]);
        slots.set_row([token], &[(token % 5) as i64]);
    }
    for threads in [1, 2, 7] {
        let mut cache = Held::new([5, 1, 1], 512, false, 0, None);
        let args = AppendCpu {
            tokens: tokens.rows(Format::Bf16),
            cache: CacheCpu::Plain(cache.rows(Format::Bf16)),
            slots: slots.view(0),
            round_scale: true,
        };
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        // SAFETY: every view describes one of the arrays above.
        pool.install(|| unsafe { append_kv(&args) });
        for slot in 0..5 {
            assert_eq!(cache.get_row([slot, 0, 0]), [(2995 + slot) as u16; 512]);
        }
    }
}

fn expected_bits(format: Format, row: &[u16]) -> Vec<u16> {
    match format {
        Format::Bf16 => row.to_vec(),
        Format::Fp16 => row
            .iter()
            .map(|x| bf16::from_f64(f16::from_bits(*x).to_f64()).to_bits())
            .collect(),
    }
}

fn random_cache(layout: &Layout, format: Format, shape: [usize; 3]) -> Held<3> {
    let mut rng = Rng(5);
    let mut layout_rng = layout.strided.then_some(Rng(98));
    let mut cache = Held::new(
        shape,
        layout.width,
        layout.two_cache,
        NAN_BITS,
        layout_rng.as_mut(),
    );
    for index in indices(shape) {
        let row: Vec<u16> = (0..layout.width)
            .map(|_| to_bits(format, rng.normal() * 100.0))
            .collect();
        cache.set_row(index, &row);
    }
    cache
}

#[test]
fn gather_by_pages_gives_every_request_in_order() {
    for layout in &LAYOUTS {
        for (format, page_size) in [(Format::Bf16, 61), (Format::Fp16, 16), (Format::Fp16, 1)] {
            let pages = 200 / page_size + 3;
            let mut cache = random_cache(layout, format, [pages, page_size, 1]);
            let max_pages = 70usize.div_ceil(page_size);
            let mut table = Rows::new([5, max_pages], 1, 0i32, None);
            let mut rng = Rng(8);
            for index in indices([5, max_pages]) {
                let inside = rng.below(pages) as i32;
                let page = rng.pick(&[inside, -1, pages as i32, i32::MAX]);
                table.set_row(index, &[page]);
            }
            let lens = [70, 0, -3, 33, i32::MAX];
            let capacity = (max_pages * page_size) as i32;
            let mut offsets = Rows::new([6], 1, -7i64, None);
            let seq_lens = ferromla_cpu::Strided::new(lens.as_ptr(), [5], [1]);
            // SAFETY: both views describe arrays above.
            let total = unsafe { gather_offsets(&seq_lens, capacity, &offsets.view_mut(0)) };
            let clamped = lens.map(|len| len.clamp(0, capacity) as usize);
            assert_eq!(total as usize, clamped.iter().sum::<usize>());

            // Two rows more than there are tokens.
            let mut out = Rows::new(
                [total as usize + 2],
                layout.width,
                0xbeef,
                Some(&mut Rng(3)),
            );
            let args = GatherCpu {
                cache: CacheCpu::Plain(cache.rows(format)),
                source: GatherSource::Pages {
                    block_table: table.view(0),
                    offsets: offsets.view(0),
                },
                out: out.view_mut(0),
            };
            // SAFETY: every view describes one of the arrays above.
            unsafe { gather_kv(&args) };
            out.assert_gaps_untouched();
            let mut row = 0;
            for (request, len) in clamped.iter().enumerate() {
                assert_eq!(offsets.row([request])[0], row as i64);
                for position in 0..*len {
                    let page = table.row([request, position / page_size])[0];
                    let expected = if (0..pages as i32).contains(&page) {
                        let token = cache.get_row([page as usize, position % page_size, 0]);
                        expected_bits(format, &token)
                    } else {
                        vec![0; layout.width]
                    };
                    assert_eq!(out.row([row]), expected);
                    row += 1;
                }
            }
            assert!(
                out.row([row])
                    .iter()
                    .chain(out.row([row + 1]))
                    .all(|x| *x == 0)
            );
        }
    }
}

#[test]
fn gather_by_ids_gives_zeros_for_ids_outside() {
    for layout in &LAYOUTS {
        let mut cache = random_cache(layout, Format::Fp16, [4, 16, 1]);
        let ids = [0i64, 63, 64, -1, 17, i64::MAX, i64::MIN, 17, 1 << 33];
        let narrow = ids.map(|id| id.clamp(i32::MIN.into(), i32::MAX.into()) as i32);
        let sources = [
            GatherSource::Ids64(ferromla_cpu::Strided::new(ids.as_ptr(), [9], [1])),
            GatherSource::Ids32(ferromla_cpu::Strided::new(narrow.as_ptr(), [9], [1])),
        ];
        for source in sources {
            let mut out = Rows::new([ids.len()], layout.width, 0xbeef, None);
            let args = GatherCpu {
                cache: CacheCpu::Plain(cache.rows(Format::Fp16)),
                source,
                out: out.view_mut(0),
            };
            // SAFETY: every view describes one of the arrays above.
            unsafe { gather_kv(&args) };
            for (row, id) in ids.iter().enumerate() {
                let expected = if (0..64).contains(id) {
                    let token = cache.get_row([*id as usize / 16, *id as usize % 16, 0]);
                    expected_bits(Format::Fp16, &token)
                } else {
                    vec![0; layout.width]
                };
                assert_eq!(out.row([row]), expected);
            }
        }
    }
}
