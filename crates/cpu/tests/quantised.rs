//! Quantised caches: attention and gathering give what rows of the dequantised numbers give, and tokens land
//! in their slots whoever writes them.

mod common;

use common::Rng;
use common::arrays::{Rows as Array, indices};
use ferromla_cpu::{
    AppendCpu, CacheCpu, DecodeCpu, DequantizeCpu, Format, GatherCpu, GatherSource, KeysCpu,
    OutRows, Parts, QuantisedCpu, QuantizeCpu, QueryScale, Rows, Strided, append_kv, decode,
    dequantize_kv, gather_kv, quantize_kv,
};
use ferromla_format::{LAYOUTS, Layout};
use ferromla_schedule::{Keys, PlanView, Problem, Queries, Split, Target, layout, plan_into};

/// A cache of random rows, quantised, and what its bytes stand for.
struct Cache {
    layout: &'static Layout,
    bytes: Array<u8, 2>,
    numbers: Array<f32, 3>,
}

impl Cache {
    fn random(layout: &'static Layout, pages: usize, page_size: usize, rng: &mut Rng) -> Self {
        let mut rows = Array::new([pages, page_size], layout.width, 0f32, None);
        for index in indices([pages, page_size]) {
            let row: Vec<f32> = (0..layout.width).map(|_| rng.normal()).collect();
            rows.set_row(index, &row);
        }
        let mut cache = Self {
            layout,
            bytes: Array::new([pages, page_size], layout.bytes(), 0xaau8, None),
            numbers: Array::new([pages, page_size, 1], layout.width, f32::NAN, None),
        };
        let args = QuantizeCpu {
            rows: Rows::F32(two_parts(&mut rows, layout.width)),
            cache: cache.view(),
            round_scale: false,
        };
        let [page, token, _] = cache.numbers.strides;
        let out = cache.numbers.data.as_mut_ptr();
        let back = DequantizeCpu {
            cache: args.cache,
            out: OutRows::F32(Strided::new(out, [pages, page_size], [page, token])),
        };
        // SAFETY: every view describes one of the arrays above.
        unsafe {
            quantize_kv(&args);
            dequantize_kv(&back);
        }
        assert!(cache.numbers.data.iter().all(|x| x.is_finite()));
        cache
    }

    fn view(&mut self) -> QuantisedCpu {
        QuantisedCpu {
            layout: self.layout,
            bytes: self.bytes.view_mut(0),
            scale: 0.03,
        }
    }

    /// The same rows twice: as bytes, and as the numbers that the bytes stand for.
    fn both(&mut self) -> [CacheCpu; 2] {
        let width = self.layout.width;
        [
            CacheCpu::Quantised(self.view()),
            CacheCpu::Plain(Rows::F32(two_parts(&mut self.numbers, width))),
        ]
    }
}

fn two_parts<T: Copy + PartialEq, const D: usize>(
    rows: &mut Array<T, D>,
    width: usize,
) -> Parts<D, T> {
    Parts {
        nope: rows.view_mut(0),
        rope: (width == 576).then(|| rows.view_mut(512)),
    }
}

/// `[2, 3, 8]` rows over requests of 150 and 70 tokens in pages of 16: their bits.
fn attend(cache: CacheCpu, q_scale: QueryScale, q: Rows<3>) -> (Vec<u16>, Vec<f32>) {
    let problem = Problem {
        batch: 2,
        queries: Queries::Uniform { q_len: 3 },
        group: 8,
        kv_heads: 1,
        keys: Keys::Pages,
        causal: true,
        max_seq_len: 160,
        split: Split::Fixed(2),
        target: Target::Cpu { threads: 2 },
    };
    let shape = problem.shape().unwrap();
    let plan_layout = layout(&shape).unwrap();
    let mut words = vec![0; plan_layout.words()];
    plan_into(&shape, [150, 70].as_slice(), None, &mut words).unwrap();
    let table: [i32; 20] = std::array::from_fn(|i| (i * 7 % 20) as i32);
    let (mut out, mut lse) = (vec![0u16; 48 * 512], vec![0f32; 48]);
    let slots = plan_layout.max_slots as usize * shape.unit_rows as usize;
    let (mut partial_out, mut partial_lse) = (vec![0f32; slots * 512], vec![0f32; slots]);
    let args = DecodeCpu {
        format: Format::Bf16,
        q,
        q_scale,
        kv_cache: cache,
        keys: KeysCpu::Pages {
            block_table: Strided::new(table.as_ptr(), [2, 10], [10, 1]),
        },
        group: 8,
        causal: true,
        softmax_scale: 0.05,
        attn_sink: None,
        plan: PlanView::new(&shape, &words).unwrap(),
        unit_rows: shape.unit_rows as usize,
        out: Strided::new(out.as_mut_ptr(), [2, 3, 8], [24 * 512, 8 * 512, 512]),
        lse: Strided::new(lse.as_mut_ptr(), [2, 3, 8], [24, 8, 1]),
        empty_lse: f32::NEG_INFINITY,
        max_logits: None,
        partial_out: Strided::new(partial_out.as_mut_ptr(), [slots], [512]),
        partial_lse: Strided::new(partial_lse.as_mut_ptr(), [slots], [1]),
    };
    // SAFETY: every view describes one of the arrays above; the plan is this problem's.
    unsafe { decode(&args) };
    (out, lse)
}

#[test]
fn attention_over_bytes_is_attention_over_what_they_stand_for() {
    for layout in &LAYOUTS {
        let mut rng = Rng(7);
        let mut cache = Cache::random(layout, 20, 16, &mut rng);
        let mut q = Array::new([2, 3, 8], layout.width, 0f32, None);
        for index in indices([2, 3, 8]) {
            let row: Vec<f32> = (0..layout.width).map(|_| rng.normal()).collect();
            q.set_row(index, &row);
        }
        let q = Rows::F32(two_parts(&mut q, layout.width));
        let [bytes, numbers] = cache.both();
        let (got, want) = (
            attend(bytes, QueryScale::One(1.0), q),
            attend(numbers, QueryScale::One(1.0), q),
        );
        assert!(want.0.iter().any(|x| *x != 0));
        assert_eq!(got, want, "{layout:?}");
    }
}

#[test]
fn e4m3_queries_are_multiplied_by_their_scales() {
    let layout = &ferromla_format::FP8_576;
    let mut rng = Rng(3);
    let mut cache = Cache::random(layout, 20, 16, &mut rng);
    let [bytes, _] = cache.both();
    let mut codes = Array::new([2, 3, 8], 576, 0u8, None);
    let mut numbers = [0, 1].map(|_| Array::new([2, 3, 8], 576, 0f32, None));
    let mut scales = Array::new([2, 3, 8], 1, 0f32, None);
    for index in indices([2, 3, 8]) {
        let row: Vec<u8> = (0..576)
            .map(|_| ferromla_format::e4m3(rng.normal()))
            .collect();
        let scale = 0.25 + index[2] as f32;
        scales.set_row(index, &[scale]);
        codes.set_row(index, &row);
        for (numbers, scale) in numbers.iter_mut().zip([0.5, scale]) {
            let row: Vec<f32> = row
                .iter()
                .map(|code| ferromla_format::E4M3[usize::from(*code)] * scale)
                .collect();
            numbers.set_row(index, &row);
        }
    }
    let q = Rows::E4m3(two_parts(&mut codes, 576));
    let [by_one, by_rows] = &mut numbers;
    let one = QueryScale::One(1.0);
    let want = attend(bytes, one, Rows::F32(two_parts(by_one, 576)));
    assert_eq!(attend(bytes, QueryScale::One(0.5), q), want);
    let want = attend(bytes, one, Rows::F32(two_parts(by_rows, 576)));
    assert_eq!(attend(bytes, QueryScale::Rows(scales.view(0)), q), want);
}

#[test]
fn gathering_bytes_gives_what_they_stand_for() {
    for layout in &LAYOUTS {
        let mut cache = Cache::random(layout, 3, 7, &mut Rng(1));
        let ids = [20i64, 0, -1, 13, 21, 6];
        let [got, want] = cache.both().map(|cache| {
            let mut out = vec![1u16; ids.len() * layout.width];
            let args = GatherCpu {
                cache,
                source: GatherSource::Ids64(Strided::new(ids.as_ptr(), [ids.len()], [1])),
                out: Strided::new(out.as_mut_ptr(), [ids.len()], [layout.width as i64]),
            };
            // SAFETY: every view describes one of the arrays above.
            unsafe { gather_kv(&args) };
            out
        });
        assert_eq!(got, want, "{layout:?}");
        assert!(
            got[2 * layout.width..3 * layout.width]
                .iter()
                .all(|x| *x == 0)
        );
    }
}

#[test]
fn the_last_token_of_a_slot_wins_on_any_number_of_threads() {
    for layout in &LAYOUTS {
        let mut rows = Array::new([3000], layout.width, 0f32, None);
        let mut slots = Array::new([3000], 1, 0i64, None);
        for token in 0..3000 {
            rows.set_row([token], &vec![token as f32; layout.width]);
            slots.set_row([token], &[(token % 5) as i64]);
        }
        let write = |threads: usize| {
            let mut bytes = Array::new([2, 3], layout.bytes(), 0xaau8, None);
            let args = AppendCpu {
                tokens: Rows::F32(two_parts(&mut rows, layout.width)),
                cache: CacheCpu::Quantised(QuantisedCpu {
                    layout,
                    bytes: bytes.view_mut(0),
                    scale: 16.0,
                }),
                slots: slots.view(0),
                round_scale: true,
            };
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            // SAFETY: every view describes one of the arrays above.
            pool.build()
                .unwrap()
                .install(|| unsafe { append_kv(&args) });
            bytes.data
        };
        let [one, two, seven] = [1, 2, 7].map(write);
        assert_eq!(one, two);
        assert_eq!(one, seven);
        // The sixth slot was named by nobody.
        let place = layout.place(2, 3, layout.bytes());
        let page = &one[3 * layout.bytes()..];
        assert!(
            page[place.codes..][..layout.code_bytes()]
                .iter()
                .all(|x| *x == 0xaa)
        );
    }
}
