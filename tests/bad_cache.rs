//! Every argument of `merge_states`, `append_kv`, `gather_kv`, `quantize_kv`,
//! `dequantize_kv` and `cache_shape` that must be refused is.

mod support;

use ferromla::{
    AppendArgs, DType, DequantizeArgs, Device, Error, GatherArgs, GatherSource, KvFormat,
    MergeArgs, QuantizeArgs, Stream, append_kv, cache_shape, dequantize_kv, gather_kv,
    merge_states, quantize_kv,
};
use support::{Array, Expected, assert_refused};

fn invalid(argument: &'static str, says: &'static str) -> Expected {
    Expected {
        argument,
        unsupported: false,
        says,
    }
}

struct Merge([Array; 6]);

impl Merge {
    fn right() -> Self {
        let rows = || Array::zeros(DType::Bf16, &[2, 3, 8, 512]);
        let scalars = || Array::zeros(DType::F32, &[2, 3, 8]);
        Self([rows(), scalars(), rows(), scalars(), rows(), scalars()])
    }

    fn run(&self) -> Result<(), Error> {
        let [out_a, lse_a, out_b, lse_b, out, lse] = self.0.each_ref().map(Array::view);
        // SAFETY: the arrays are live; a description that lies must be refused.
        unsafe {
            merge_states(&MergeArgs {
                out_a,
                lse_a,
                out_b,
                lse_b,
                out,
                lse,
                stream: Stream(0),
            })
        }
    }
}

#[test]
fn merge_arguments() {
    Merge::right().run().unwrap();
    type Bend = fn(&mut [Array; 6]);
    #[rustfmt::skip]
    let cases: &[(Bend, &str, &str)] = &[
        (|a| a[0].reshape(&[512]), "out_a", "rank is 1"),
        (|a| a[0].shape[3] = 64, "out_a", "the last dimension is 512"),
        (|a| a[0].dtype = DType::F32, "out_a", "bfloat16 or float16"),
        (|a| a[1].shape[2] = 7, "lse_a", "dimension 2 is 8"),
        (|a| a[2].dtype = DType::Fp16, "out_b", "as out_a is"),
        (|a| a[2].shape[0] = 1, "out_b", "dimension 0 is 2"),
        (|a| a[3].dtype = DType::F64, "lse_b", "float32"),
        (|a| a[3].device = Device::Cuda(0), "lse_b", "on cpu"),
        (|a| a[4].strides[0] = 0, "out", "memory for every element"),
        (|a| a[4].strides[3] = 2, "out", "the last stride is 1"),
        (|a| a[5].strides[1] = 0, "lse", "memory for every element"),
        (|a| a[5].reshape(&[2, 3, 8, 1]), "lse", "rank is 4"),
    ];
    for (bend, argument, says) in cases {
        let mut merge = Merge::right();
        bend(&mut merge.0);
        assert_refused(
            argument,
            merge.run(),
            &Expected {
                argument,
                unsupported: false,
                says,
            },
        );
    }
}

#[test]
fn merge_takes_two_to_four_dimensions_and_none_of_rows() {
    for shape in [&[8i64, 512][..], &[2, 8, 512], &[0, 8, 512]] {
        let mut merge = Merge::right();
        for (i, array) in merge.0.iter_mut().enumerate() {
            array.reshape(if i % 2 == 0 {
                shape
            } else {
                &shape[..shape.len() - 1]
            });
        }
        merge.run().unwrap();
    }
}

struct Append {
    kv_c: Array,
    k_pe: Option<Array>,
    cache: Array,
    slots: Array,
    kv_format: Option<KvFormat>,
    kv_scale: Option<f64>,
}

impl Append {
    fn right() -> Self {
        Self {
            kv_c: Array::zeros(DType::Bf16, &[5, 512]),
            k_pe: Some(Array::zeros(DType::Bf16, &[5, 64])),
            cache: Array::zeros(DType::Bf16, &[4, 16, 576]),
            slots: Array::zeros(DType::I64, &[5]),
            kv_format: None,
            kv_scale: None,
        }
    }

    fn run(&self) -> Result<(), Error> {
        let args = AppendArgs {
            kv_c: self.kv_c.view(),
            k_pe: self.k_pe.as_ref().map(Array::view),
            kv_cache: self.cache.view().into(),
            slots: self.slots.view(),
            kv_format: self.kv_format,
            kv_scale: self.kv_scale,
            round_scale: true,
            stream: Stream::default(),
        };
        // SAFETY: the arrays are live; a description that lies must be refused.
        unsafe { append_kv(&args) }
    }
}

#[test]
fn append_arguments() {
    Append::right().run().unwrap();
    type Bend = fn(&mut Append);
    #[rustfmt::skip]
    let cases: &[(Bend, &str, &str)] = &[
        (|a| a.kv_c.reshape(&[5, 1, 512]), "kv_c", "rank is 3"),
        (|a| a.kv_c.shape[1] = 576, "kv_c", "dimension 1 is 512"),
        (|a| a.kv_c.dtype = DType::Fp16, "kv_c", "as kv_cache is"),
        (|a| a.kv_c.device = Device::Cuda(0), "kv_cache", "on cuda:0, as kv_c is"),
        (|a| a.k_pe = None, "k_pe", "takes the rotary parts"),
        (|a| a.k_pe.as_mut().unwrap().shape[0] = 4, "k_pe", "dimension 0 is 5"),
        (|a| a.k_pe.as_mut().unwrap().dtype = DType::F32, "k_pe", "as kv_cache is"),
        (|a| a.cache.reshape(&[4, 16, 512]), "k_pe", "None, for a cache with rows of 512"),
        (|a| a.cache.strides[0] = 0, "kv_cache", "memory for every element"),
        (|a| a.cache.dtype = DType::U8, "kv_format", "uint8"),
        (|a| a.slots.dtype = DType::I32, "slots", "int32: the type is int64"),
        (|a| a.slots.reshape(&[4]), "slots", "dimension 0 is 5"),
        (|a| a.kv_format = Some(KvFormat::Fp16), "kv_format", "kv_cache is bfloat16"),
    ];
    for (bend, argument, says) in cases {
        let mut append = Append::right();
        bend(&mut append);
        assert_refused(
            argument,
            append.run(),
            &Expected {
                argument,
                unsupported: false,
                says,
            },
        );
    }
    let mut append = Append::right();
    append.cache.reshape(&[2, 16, 2, 576]);
    let expected = Expected {
        argument: "kv_cache",
        unsupported: true,
        says: "one KV head",
    };
    assert_refused("heads", append.run(), &expected);
}

#[test]
fn append_arguments_of_quantised_caches() {
    let right = |format: KvFormat, bytes| {
        let mut append = Append::right();
        append.cache = Array::zeros(DType::U8, &[4, 16, bytes]);
        append.kv_format = Some(format);
        append.k_pe = append.k_pe.filter(|_| format.d_qk() != [512]);
        append
    };
    right(KvFormat::Fp8V32, 656).run().unwrap();
    right(KvFormat::Fp8V4, 584).run().unwrap();
    right(KvFormat::Fp8, 576).run().unwrap();
    type Bend = fn(&mut Append);
    #[rustfmt::skip]
    let cases: &[(KvFormat, i64, Bend, &str, &str)] = &[
        (KvFormat::Fp8V32, 656, |a| a.k_pe = None, "k_pe", "takes the rotary parts"),
        (KvFormat::Fp8V32, 656, |a| a.kv_c.dtype = DType::F64, "kv_c", "bfloat16 or float16 or float32"),
        (KvFormat::Fp8V32, 656, |a| a.kv_c.dtype = DType::Fp16, "k_pe", "as kv_c is"),
        (KvFormat::Fp8V32, 656, |a| a.kv_scale = Some(2.0), "kv_scale", "only fp8 caches"),
        (KvFormat::Fp8V32, 656, |a| a.cache.strides[0] = 656, "kv_cache", "memory for every element"),
        (KvFormat::Fp8V32, 656, |a| a.cache.strides[1] = -656, "kv_cache", "a token has 656 bytes"),
        (KvFormat::Fp8V4, 584, |a| a.k_pe = Some(Array::zeros(DType::Bf16, &[5, 64])), "k_pe", "None, for a cache with rows of 512"),
        (KvFormat::Fp8V4, 584, |a| a.cache.strides = vec![16 * 592, 592, 1], "kv_cache", "584 bytes apart"),
        (KvFormat::Fp8V4, 584, |a| a.cache.strides[0] = 16 * 584 - 8, "kv_cache", "memory for every element"),
        (KvFormat::Fp8, 576, |a| a.kv_scale = Some(-1.0), "kv_scale", "positive"),
    ];
    for &(format, bytes, bend, argument, says) in cases {
        let mut append = right(format, bytes);
        bend(&mut append);
        assert_refused(says, append.run(), &invalid(argument, says));
    }
}

struct Gather {
    cache: Array,
    out: Array,
    /// Ids, or the block table, the lengths and the offsets.
    ids: Option<Array>,
    pages: [Array; 3],
}

impl Gather {
    fn right() -> Self {
        Self {
            cache: Array::zeros(DType::Fp16, &[4, 16, 576]),
            out: Array::zeros(DType::Bf16, &[7, 576]),
            ids: None,
            pages: [
                Array::zeros(DType::I32, &[2, 5]),
                Array::zeros(DType::I32, &[2]),
                Array::zeros(DType::I64, &[3]),
            ],
        }
    }

    fn run(&self) -> Result<(), Error> {
        let [block_table, seq_lens, offsets_out] = self.pages.each_ref().map(Array::view);
        let source = match &self.ids {
            Some(ids) => GatherSource::Ids(ids.view()),
            None => GatherSource::Pages {
                block_table,
                seq_lens,
                offsets_out,
            },
        };
        let args = GatherArgs {
            cache: self.cache.view().into(),
            source,
            out: self.out.view(),
            kv_format: None,
            kv_scale: None,
            stream: Stream::default(),
        };
        // SAFETY: the arrays are live; a description that lies must be refused.
        unsafe { gather_kv(&args) }
    }
}

#[test]
fn gather_arguments() {
    Gather::right().run().unwrap();
    type Bend = fn(&mut Gather);
    #[rustfmt::skip]
    let cases: &[(Bend, &str, &str)] = &[
        (|g| g.cache.shape[2] = 500, "cache", "576 (512 and 64 rotary) or 512"),
        (|g| g.cache.dtype = DType::F32, "kv_format", "None with cache"),
        (|g| g.out.dtype = DType::Fp16, "out", "the type is bfloat16"),
        (|g| g.out.reshape(&[7, 512]), "out", "dimension 1 is 576"),
        (|g| g.out.strides[0] = 0, "out", "memory for every element"),
        (|g| g.pages[0].dtype = DType::I64, "block_table", "int32"),
        (|g| g.pages[1].reshape(&[3]), "seq_lens", "dimension 0 is 2"),
        (|g| g.pages[2].reshape(&[2]), "offsets_out", "dimension 0 is 3"),
        (|g| g.pages[2].dtype = DType::I32, "offsets_out", "int64"),
        (|g| g.ids = Some(Array::zeros(DType::F32, &[7])), "ids", "int32 or int64"),
        (|g| g.ids = Some(Array::zeros(DType::I32, &[6])), "ids", "dimension 0 is 7"),
        (|g| g.ids = Some(Array::zeros(DType::I32, &[7, 1])), "ids", "[tokens]"),
    ];
    for (bend, argument, says) in cases {
        let mut gather = Gather::right();
        bend(&mut gather);
        assert_refused(
            argument,
            gather.run(),
            &Expected {
                argument,
                unsupported: false,
                says,
            },
        );
    }
}

#[test]
fn cache_shapes() {
    let shape = cache_shape(3, 61, KvFormat::Fp16, 512).unwrap();
    assert_eq!(
        (&shape.shape[..], shape.bytes),
        (&[3, 61, 512][..], 3 * 61 * 1024)
    );
    assert_eq!(&shape.strides[..], &[61 * 512, 512, 1]);
    let cases = [
        (-1, 64, 576, invalid("num_pages", "between 0")),
        (1, 0, 576, invalid("page_size", "between 1")),
        (1, 64, 575, invalid("d_qk", "576 or 512")),
        (
            i64::from(i32::MAX),
            i64::from(i32::MAX),
            576,
            invalid("num_pages", "2^63"),
        ),
    ];
    for (num_pages, page_size, d_qk, expected) in cases {
        let result = cache_shape(num_pages, page_size, KvFormat::Bf16, d_qk);
        assert_refused(expected.argument, result.map(drop), &expected);
    }
    for (format, width, d_qk) in [
        (KvFormat::Fp8, 576, 576),
        (KvFormat::Fp8, 512, 512),
        (KvFormat::Fp8V32, 656, 576),
        (KvFormat::Fp8V41, 528, 512),
        (KvFormat::Fp4V41, 288, 512),
    ] {
        let shape = cache_shape(3, 61, format, d_qk).unwrap();
        assert_eq!(&shape.shape[..], &[3, 61, width]);
        assert_eq!(&shape.strides[..], &[61 * width, width, 1]);
    }
    // Whole rows: 61 * 584 is 61.8 of them, 61 * 528 62.9.
    let v4 = cache_shape(3, 61, KvFormat::Fp8V4, 512).unwrap();
    assert_eq!((v4.strides[0], v4.bytes), (62 * 576, 3 * 62 * 576));
    let v41 = cache_shape(3, 61, KvFormat::Fp8V41Split, 512).unwrap();
    assert_eq!((v41.strides[0], v41.bytes), (63 * 512, 3 * 63 * 512));
    for (format, d_qk, says) in [
        (KvFormat::Fp8V32, 512, "576 for the format fp8_v32"),
        (KvFormat::Fp4V41, 576, "512 for the format fp4_v41"),
    ] {
        let result = cache_shape(1, 64, format, d_qk);
        assert_refused("width", result.map(drop), &invalid("d_qk", says));
    }
}

/// Arguments of both directions: 3 pages of 5 tokens of fp8_v41.
struct Whole {
    kv: Array,
    cache: Array,
    format: KvFormat,
    kv_scale: Option<f64>,
}

impl Whole {
    fn right() -> Self {
        Self {
            kv: Array::zeros(DType::F32, &[3, 5, 512]),
            cache: Array::zeros(DType::U8, &[3, 5, 528]),
            format: KvFormat::Fp8V41,
            kv_scale: None,
        }
    }

    fn quantize(&self) -> Result<(), Error> {
        let args = QuantizeArgs {
            kv: self.kv.view(),
            out: self.cache.view(),
            kv_format: self.format,
            kv_scale: self.kv_scale,
            round_scale: true,
            stream: Stream::default(),
        };
        // SAFETY: the arrays are live; a description that lies must be refused.
        unsafe { quantize_kv(&args) }
    }

    fn dequantize(&self) -> Result<(), Error> {
        let args = DequantizeArgs {
            cache: self.cache.view(),
            out: self.kv.view(),
            kv_format: Some(self.format),
            kv_scale: self.kv_scale,
            stream: Stream::default(),
        };
        // SAFETY: as above.
        unsafe { dequantize_kv(&args) }
    }
}

#[test]
fn quantize_and_dequantize_arguments() {
    Whole::right().quantize().unwrap();
    Whole::right().dequantize().unwrap();
    type Bend = fn(&mut Whole);
    // What bends a call, and the argument that quantize_kv and dequantize_kv name.
    #[rustfmt::skip]
    let cases: &[(Bend, [&str; 2], [&str; 2])] = &[
        (|w| w.kv.reshape(&[3, 5, 500]), ["kv", "out"], ["576 (512 and 64 rotary) or 512", "dimension 2 is 512"]),
        (|w| w.kv.reshape(&[3, 5, 576]), ["kv", "out"], ["dimension 2 is 512", "dimension 2 is 512"]),
        (|w| w.kv.reshape(&[3, 4, 512]), ["out", "out"], ["the page size of kv", "dimension 1 is 5"]),
        (|w| w.kv.dtype = DType::F64, ["kv", "out"], ["bfloat16 or float16 or float32", "bfloat16 or float32"]),
        (|w| w.kv.device = Device::Cuda(0), ["out", "out"], ["on cuda:0, as kv is", "on cpu, as cache is"]),
        (|w| w.cache.reshape(&[3, 5, 512]), ["out", "cache"], ["is 528", "is 528"]),
        (|w| w.cache.dtype = DType::F32, ["kv_format", "kv_format"], ["out is float32", "cache is float32"]),
        (|w| w.kv_scale = Some(1.0), ["kv_scale", "kv_scale"], ["only fp8", "only fp8"]),
        (|w| w.format = KvFormat::Fp8V32, ["out", "cache"], ["is 656", "is 656"]),
        (|w| { w.format = KvFormat::Bf16; w.cache.dtype = DType::Bf16; w.cache.reshape(&[3, 5, 512]) },
            ["kv_format", "kv_format"], ["a quantised format", "a quantised format"]),
    ];
    for (bend, arguments, says) in cases {
        let mut whole = Whole::right();
        bend(&mut whole);
        assert_refused(says[0], whole.quantize(), &invalid(arguments[0], says[0]));
        assert_refused(says[1], whole.dequantize(), &invalid(arguments[1], says[1]));
    }
}
