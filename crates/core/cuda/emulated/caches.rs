//! The kernels of caches of bytes against the CPU backend, bit for bit.

use ferromla_format::Layout;

use crate::cache::{AppendArgs, GatherArgs, GatherSource};
use crate::dtype::{DType, Device, KvFormat};
use crate::quantize::{DequantizeArgs, QuantizeArgs};
use crate::view::{Stream, View};
use crate::{check_cache, cpu};

use super::super::cache_ops::{
    dequantise_params, dequantising_gather_params, offsets_params, quantise_params,
    quantising_append_params,
};
use super::run;

const PAGES: i64 = 5;
const PAGE_SIZE: i64 = 7;
const GUARD: u8 = 0xa5;
const SOURCES: [(DType, &str); 3] = [
    (DType::Bf16, "fm_quantise_bf16"),
    (DType::Fp16, "fm_quantise_fp16"),
    (DType::F32, "fm_quantise_f32"),
];

/// Bytes that begin where 16-byte accesses may.
#[derive(Clone, PartialEq)]
struct Bytes(Vec<u128>);

impl Bytes {
    fn filled(bytes: i64, with: u8) -> Self {
        Self(vec![
            u128::from_ne_bytes([with; 16]);
            (bytes as usize).div_ceil(16) + 1
        ])
    }

    /// Numbers of all kinds, in order or not: neighbours of like size, or anything.
    fn numbers(count: i64, dtype: DType, seed: u64) -> Self {
        let mut all = Self::filled(count * dtype.size() as i64, 0);
        let mut state = seed;
        let bytes: Vec<u8> = (0..count)
            .flat_map(|i| {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let random = (state >> 32) as u32;
                let bits = match seed % 3 {
                    0 => (i as u32) << 16 | random & 0x8000_ffff,
                    1 => random,
                    _ => random & 0x8fff_ffff | 0x3000_0000,
                };
                let size = dtype.size() as usize;
                bits.to_le_bytes()[4 - size..].to_vec()
            })
            .collect();
        all.as_mut()[..bytes.len()].copy_from_slice(&bytes);
        all
    }

    fn as_mut(&mut self) -> &mut [u8] {
        bytes_of(&mut self.0)
    }

    fn ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }
}

fn bytes_of(words: &mut [u128]) -> &mut [u8] {
    // SAFETY: any bits are bytes.
    unsafe { words.align_to_mut::<u8>().1 }
}

fn view(bytes: &Bytes, dtype: DType, shape: &[i64]) -> View {
    // SAFETY: every caller's array has that many bytes, and lives through the test.
    unsafe { View::contiguous(bytes.ptr().cast(), dtype, Device::Cpu, shape) }
}

fn strided(bytes: &Bytes, dtype: DType, shape: &[i64], strides: &[i64]) -> View {
    // SAFETY: as above.
    unsafe { View::new(bytes.ptr().cast(), dtype, Device::Cpu, shape, strides) }
}

/// Each format with its layout, and what `kv_scale` to try.
fn formats() -> impl Iterator<Item = (KvFormat, &'static Layout, Option<f64>)> {
    KvFormat::ALL.into_iter().flat_map(|format| {
        let scale = (format == KvFormat::Fp8).then_some(0.37);
        format
            .layouts()
            .iter()
            .map(move |layout| (format, layout, scale))
    })
}

/// A cache with pages further apart than they need be.
struct Cache {
    bytes: Bytes,
    page_stride: i64,
    layout: &'static Layout,
}

impl Cache {
    fn new(layout: &'static Layout, pages: i64) -> Self {
        let page_stride = (PAGE_SIZE * layout.bytes() as i64 + 15) / 16 * 16 + 64;
        Self {
            bytes: Bytes::filled(pages * page_stride, GUARD),
            page_stride,
            layout,
        }
    }

    fn view(&self, pages: i64) -> View {
        let bytes = self.layout.bytes() as i64;
        strided(
            &self.bytes,
            DType::U8,
            &[pages, PAGE_SIZE, bytes],
            &[self.page_stride, bytes, 1],
        )
    }
}

/// Quantised by the CPU backend.
fn quantised(format: KvFormat, layout: &'static Layout, scale: Option<f64>, seed: u64) -> Cache {
    let cache = Cache::new(layout, PAGES);
    let width = layout.width as i64;
    let kv = Bytes::numbers(PAGES * PAGE_SIZE * width, DType::Bf16, seed);
    let args = QuantizeArgs {
        kv: view(&kv, DType::Bf16, &[PAGES, PAGE_SIZE, width]),
        out: cache.view(PAGES),
        kv_format: format,
        kv_scale: scale,
        round_scale: false,
        stream: Stream::default(),
    };
    // SAFETY: the arrays live.
    unsafe { cpu::quantize(&check_cache::quantize(&args).unwrap()) }.unwrap();
    cache
}

#[test]
fn whole_caches_are_quantised_to_the_bytes_of_the_cpu() {
    for (format, layout, scale) in formats() {
        for (dtype, kernel) in SOURCES {
            for (seed, round_scale) in [(3, true), (3, false), (4, true), (5, false)] {
                // Enough tokens for every 16-bit number, where they come in order.
                let pages = if seed == 3 && !round_scale { 20 } else { 3 };
                let width = layout.width as i64;
                let kv = Bytes::numbers(pages * PAGE_SIZE * width, dtype, seed);
                let [ours, theirs] = [(); 2].map(|()| Cache::new(layout, pages));
                let [ours_problem, theirs_problem] = [&ours, &theirs].map(|cache| {
                    check_cache::quantize(&QuantizeArgs {
                        kv: view(&kv, dtype, &[pages, PAGE_SIZE, width]),
                        out: cache.view(pages),
                        kv_format: format,
                        kv_scale: scale,
                        round_scale,
                        stream: Stream::default(),
                    })
                    .unwrap()
                });
                // SAFETY: the arrays live.
                unsafe {
                    cpu::quantize(&theirs_problem).unwrap();
                    run(kernel, &quantise_params(&ours_problem).unwrap(), 2, 64);
                }
                assert!(
                    ours.bytes == theirs.bytes,
                    "{format} {dtype}, seed {seed}, round_scale {round_scale}: {}",
                    first_difference(ours.bytes, theirs.bytes)
                );
            }
        }
    }
}

fn first_difference(mut ours: Bytes, mut theirs: Bytes) -> String {
    let (ours, theirs) = (ours.as_mut(), theirs.as_mut());
    let at = ours.iter().zip(&*theirs).position(|(a, b)| a != b).unwrap();
    format!("byte {at} is {:#x}, not {:#x}", ours[at], theirs[at])
}

#[test]
fn new_tokens_go_to_their_slots_and_nowhere_else() {
    let slots = [3i64, 34, -1, 0, 35, i64::MAX, i64::MIN, 17, 8];
    let tokens = slots.len() as i64;
    for (format, layout, kv_scale) in formats() {
        for (dtype, kernel) in SOURCES {
            // Rows of two tensors, each further apart than it need be.
            let kv_c = Bytes::numbers(tokens * 576, dtype, 5);
            let k_pe = Bytes::numbers(tokens * 96, dtype, 8);
            let [ours, theirs] = [(); 2].map(|()| Cache::new(layout, PAGES));
            let [ours_problem, theirs_problem] = [&ours, &theirs].map(|cache| {
                check_cache::append(&AppendArgs {
                    kv_c: strided(&kv_c, dtype, &[tokens, 512], &[576, 1]),
                    k_pe: (layout.width > 512)
                        .then(|| strided(&k_pe, dtype, &[tokens, 64], &[96, 1])),
                    kv_cache: cache.view(PAGES).into(),
                    // SAFETY: the array lives.
                    slots: unsafe {
                        View::contiguous(slots.as_ptr().cast(), DType::I64, Device::Cpu, &[tokens])
                    },
                    kv_format: Some(format),
                    kv_scale,
                    round_scale: true,
                    stream: Stream::default(),
                })
                .unwrap()
            });
            // SAFETY: the arrays live.
            unsafe {
                cpu::append(&theirs_problem).unwrap();
                run(
                    kernel,
                    &quantising_append_params(&ours_problem).unwrap(),
                    3,
                    32,
                );
            }
            assert!(theirs.bytes != Cache::new(layout, PAGES).bytes);
            assert!(ours.bytes == theirs.bytes, "{format} {dtype}");
        }
    }
}

/// Equal bits, or both NaN.
fn same_numbers(ours: &mut Bytes, theirs: &mut Bytes, dtype: DType, what: &str) {
    let number = |bytes: &[u8]| match dtype {
        DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
        _ => half::bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
    };
    let size = dtype.size() as usize;
    let pairs = ours.as_mut().chunks(size).zip(theirs.as_mut().chunks(size));
    for (i, (a, b)) in pairs.enumerate() {
        let (x, y) = (number(a), number(b));
        assert!(
            a == b || x.is_nan() && y.is_nan(),
            "{what}, number {i}: {x} and {y}"
        );
    }
}

#[test]
fn whole_caches_are_dequantised_to_the_numbers_of_the_cpu() {
    for (format, layout, kv_scale) in formats() {
        for (dtype, kernel) in [
            (DType::Bf16, "fm_dequantise_bf16"),
            (DType::F32, "fm_dequantise_f32"),
        ] {
            for seed in [3, 4, 5] {
                let mut cache = quantised(format, layout, kv_scale, seed);
                if seed == 4 {
                    // Any bytes at all: other codes and scales than this crate writes.
                    let bytes = cache.bytes.0.len() as i64 * 4;
                    cache.bytes = Bytes::numbers(bytes, DType::F32, seed);
                }
                let (width, tokens) = (layout.width as i64, PAGES * PAGE_SIZE);
                let [mut ours, mut theirs] = [(); 2]
                    .map(|()| Bytes::filled(tokens * (width + 16) * dtype.size() as i64, GUARD));
                let [ours_problem, theirs_problem] = [&ours, &theirs].map(|out| {
                    let strides = [PAGE_SIZE * (width + 16), width + 16, 1];
                    check_cache::dequantize(&DequantizeArgs {
                        cache: cache.view(PAGES),
                        out: strided(out, dtype, &[PAGES, PAGE_SIZE, width], &strides),
                        kv_format: Some(format),
                        kv_scale,
                        stream: Stream::default(),
                    })
                    .unwrap()
                });
                // SAFETY: the arrays live.
                unsafe {
                    cpu::dequantize(&theirs_problem).unwrap();
                    run(kernel, &dequantise_params(&ours_problem).unwrap(), 2, 96);
                }
                let what = format!("{format} to {dtype}, seed {seed}");
                same_numbers(&mut ours, &mut theirs, dtype, &what);
            }
        }
    }
}

/// Gathers by the kernels and by the CPU.
fn check_gather(
    cache: &Cache,
    (format, kv_scale): (KvFormat, Option<f64>),
    tokens: i64,
    source: impl Fn(&Bytes) -> GatherSource,
) {
    let width = cache.layout.width as i64;
    let [mut ours, mut theirs] = [(); 2].map(|()| Bytes::filled(tokens * width * 2, GUARD));
    let [our_offsets, their_offsets] = [(); 2].map(|()| Bytes::filled(4 * 8, GUARD));
    let problem = |out: &Bytes, offsets: &Bytes| {
        check_cache::gather(&GatherArgs {
            cache: cache.view(PAGES).into(),
            source: source(offsets),
            out: view(out, DType::Bf16, &[tokens, width]),
            kv_format: Some(format),
            kv_scale,
            stream: Stream::default(),
        })
        .unwrap()
    };
    let our_problem = problem(&ours, &our_offsets);
    // SAFETY: the arrays live.
    unsafe {
        cpu::gather(&problem(&theirs, &their_offsets)).unwrap();
        if let Some(params) = offsets_params(&our_problem) {
            run("fm_offsets", &params, 1, 64);
        }
        let params = dequantising_gather_params(&our_problem).unwrap();
        run("fm_dequantise_bf16", &params, 2, 64);
    }
    assert!(our_offsets == their_offsets);
    let what = format!("{format}, {tokens} tokens");
    same_numbers(&mut ours, &mut theirs, DType::Bf16, &what);
}

fn array<T>(values: &[T], dtype: DType, shape: &[i64]) -> View {
    // SAFETY: every caller's array has that many elements, and lives through the test.
    unsafe { View::contiguous(values.as_ptr().cast(), dtype, Device::Cpu, shape) }
}

#[test]
fn gathered_tokens_are_those_of_the_cpu() {
    let ids = [3i64, -1, 34, 35, 0, i64::MAX, 7, 3];
    let narrow_ids = [8i32, -5, i32::MAX, 20];
    let table = [4i32, 2, 9, -1, 0, 1, 3, 3, 3];
    let lens = [10i32, 21, -4];
    for (format, layout, kv_scale) in formats() {
        let cache = quantised(format, layout, kv_scale, 5);
        let format = (format, kv_scale);
        check_gather(&cache, format, 8, |_| {
            GatherSource::Ids(array(&ids, DType::I64, &[8]))
        });
        check_gather(&cache, format, 4, |_| {
            GatherSource::Ids(array(&narrow_ids, DType::I32, &[4]))
        });
        for tokens in [31, 20, 40] {
            check_gather(&cache, format, tokens, |offsets| GatherSource::Pages {
                block_table: array(&table, DType::I32, &[3, 3]),
                seq_lens: array(&lens, DType::I32, &[3]),
                offsets_out: view(offsets, DType::I64, &[4]),
            });
        }
    }
}
