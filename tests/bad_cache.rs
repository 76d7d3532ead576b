//! Every argument of `merge_states`, `append_kv`, `gather_kv` and `cache_shape` that must be refused is.

mod support;

use ferromla::{
    AppendArgs, DType, Device, Error, GatherArgs, GatherSource, KvFormat, MergeArgs, Stream,
    append_kv, cache_shape, gather_kv, merge_states,
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
}

impl Append {
    fn right() -> Self {
        Self {
            kv_c: Array::zeros(DType::Bf16, &[5, 512]),
            k_pe: Some(Array::zeros(DType::Bf16, &[5, 64])),
            cache: Array::zeros(DType::Bf16, &[4, 16, 576]),
            slots: Array::zeros(DType::I64, &[5]),
            kv_format: None,
        }
    }

    fn run(&self) -> Result<(), Error> {
        let args = AppendArgs {
            kv_c: self.kv_c.view(),
            k_pe: self.k_pe.as_ref().map(Array::view),
            kv_cache: self.cache.view().into(),
            slots: self.slots.view(),
            kv_format: self.kv_format,
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
    append = Append::right();
    append.kv_format = Some(KvFormat::Fp8V32);
    let expected = Expected {
        argument: "kv_format",
        unsupported: true,
        says: "fp8_v32",
    };
    assert_refused("format", append.run(), &expected);
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
    let result = cache_shape(1, 64, KvFormat::Fp4V41, 512);
    let expected = Expected {
        argument: "kv_format",
        unsupported: true,
        says: "fp4_v41",
    };
    assert_refused("format", result.map(drop), &expected);
}
