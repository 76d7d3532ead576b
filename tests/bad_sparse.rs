//! What sparse decode and prefill take differently from `decode`, bent: refused by name and by the rule. The other
//! arguments are checked by the same code, which `bad_decode.rs` tests.

mod support;

use ferromla::{
    DType, Device, Error, ExtraKeys, KvFormat, Plan, PlanArgs, Queries, SparseDecodeArgs,
    SparsePrefillArgs, Stream, View, sparse_decode, sparse_prefill,
};
use support::{Array, Expected, assert_refused};

/// A decode that is right, to be bent: 2 requests of 3 query tokens, 8 heads, lists of 70 and 5 keys.
struct Decode {
    q: Array,
    cache: Array,
    indices: Array,
    lens: Array,
    extra_cache: Array,
    extra_indices: Array,
    extra_lens: Array,
    kv_format: Option<KvFormat>,
    extra_kv_format: Option<KvFormat>,
    out: Array,
    lse: Array,
    workspace: Array,
}

impl Decode {
    fn right() -> Self {
        Self {
            q: Array::zeros(DType::Bf16, &[2, 3, 8, 576]),
            cache: Array::zeros(DType::Bf16, &[4, 16, 576]),
            indices: Array::zeros(DType::I32, &[2, 3, 70]),
            lens: Array::zeros(DType::I32, &[2]),
            extra_cache: Array::zeros(DType::Bf16, &[9, 1, 1, 576]),
            extra_indices: Array::zeros(DType::I32, &[2, 3, 5]),
            extra_lens: Array::zeros(DType::I32, &[2, 3]),
            kv_format: None,
            extra_kv_format: None,
            out: Array::zeros(DType::Bf16, &[2, 3, 8, 512]),
            lse: Array::zeros(DType::F32, &[2, 3, 8]),
            workspace: Array::workspace(),
        }
    }

    fn run(&self, plan: Option<&Plan>) -> Result<(), Error> {
        let args = SparseDecodeArgs {
            topk_lengths: Some(self.lens.view()),
            extra: Some(ExtraKeys {
                kv_cache: self.extra_cache.view().into(),
                indices: self.extra_indices.view(),
                topk_lengths: Some(self.extra_lens.view()),
                kv_format: self.extra_kv_format,
            }),
            kv_format: self.kv_format,
            plan,
            workspace: Some(self.workspace.view()),
            ..SparseDecodeArgs::new(
                self.q.view().into(),
                self.cache.view().into(),
                self.indices.view(),
                self.out.view(),
                self.lse.view(),
            )
        };
        // SAFETY: the arrays are live; a description that lies must be refused.
        unsafe { sparse_decode(&args) }
    }
}

impl Decode {
    /// On a CUDA device that need not exist.
    fn moved_to_cuda(mut self) -> Self {
        for array in [
            &mut self.q,
            &mut self.cache,
            &mut self.indices,
            &mut self.lens,
            &mut self.extra_cache,
            &mut self.extra_indices,
            &mut self.extra_lens,
            &mut self.out,
            &mut self.lse,
            &mut self.workspace,
        ] {
            array.device = Device::Cuda(0);
        }
        self
    }
}

fn says(argument: &'static str, says: &'static str) -> Expected {
    Expected {
        argument,
        unsupported: false,
        says,
    }
}

#[test]
fn what_a_decode_refuses() {
    type Bend = fn(&mut Decode);
    #[rustfmt::skip]
    let cases: &[(Bend, &'static str, &'static str)] = &[
        (|c| c.q.reshape(&[6, 8, 576]), "q", "[batch, q_len, heads, 576]"),
        (|c| c.cache.shape[2] = 512, "kv_cache", "q has rows of 576"),
        (|c| c.cache.dtype = DType::Fp16, "kv_cache", "bfloat16, as q is"),
        (|c| c.kv_format = Some(KvFormat::Fp16), "kv_format", "kv_cache is bfloat16"),
        (|c| c.indices.reshape(&[6, 70]), "indices", "[batch, q_len, topk]"),
        (|c| c.indices.shape[0] = 1, "indices", "dimension 0 is 2, the batch of q"),
        (|c| c.indices.shape[1] = 2, "indices", "dimension 1 is 3, the query tokens of q"),
        (|c| c.indices.dtype = DType::I64, "indices", "the type is int32"),
        (|c| c.indices.device = Device::Cuda(0), "indices", "it is on cpu, as q is"),
        (|c| c.indices.strides[2] = 2, "indices", "the last stride is 1"),
        (|c| c.indices.ptr = 0, "indices", "null"),
        (|c| c.lens.reshape(&[1]), "topk_lengths", "dimension 0 is 2, the batch"),
        (|c| c.lens.dtype = DType::I64, "topk_lengths", "the type is int32"),
        (|c| c.extra_cache.shape[3] = 512, "extra_kv_cache", "q has rows of 576"),
        (|c| c.extra_cache.dtype = DType::Fp16, "extra_kv_cache", "bfloat16, as q is"),
        (|c| c.extra_indices.reshape(&[3, 2, 5]), "extra_indices", "dimension 0 is 2"),
        (|c| c.extra_indices.dtype = DType::F32, "extra_indices", "the type is int32"),
        (|c| c.extra_lens.reshape(&[3, 2]), "extra_topk_lengths", "dimension 0 is 2"),
        (|c| c.out.shape[3] = 576, "out", "dimension 3 is 512"),
        (|c| c.lse.dtype = DType::Bf16, "lse", "float32"),
        (|c| c.workspace.shape[0] = 10, "workspace", "at least"),
    ];
    for (bend, argument, rule) in cases {
        let mut call = Decode::right();
        bend(&mut call);
        assert_refused(rule, call.run(None), &says(argument, rule));
    }
    Decode::right().run(None).unwrap();
}

#[test]
fn caches_of_several_heads_are_not_supported() {
    let mut call = Decode::right();
    call.cache = Array::zeros(DType::Bf16, &[4, 16, 2, 576]);
    let expected = Expected {
        argument: "kv_cache",
        unsupported: true,
        says: "one KV head",
    };
    assert_refused("heads", call.run(None), &expected);
}

#[test]
fn formats_and_types_that_do_not_go_together() {
    type Bend = fn(&mut Decode);
    let bytes = |bytes| Array::zeros(DType::U8, &[4, 16, bytes]);
    let of_512 = |call: &mut Decode| {
        call.q = Array::zeros(DType::Bf16, &[2, 3, 8, 512]);
        call.cache = Array::zeros(DType::U8, &[4, 16, 584]);
        call.kv_format = Some(KvFormat::Fp8V4);
        call.extra_cache = Array::zeros(DType::U8, &[9, 2, 288]);
        call.extra_kv_format = Some(KvFormat::Fp4V41);
    };
    let mut right = Decode::right();
    of_512(&mut right);
    right.run(None).unwrap();
    let cases: &[(Bend, &'static str, &'static str)] = &[
        (|c| c.q.dtype = DType::F8E4M3, "q", "bfloat16 or float16"),
        (
            |c| c.q.dtype = DType::Fp16,
            "q",
            "queries over listed keys of a quantised cache are bfloat16",
        ),
        (
            |c| c.kv_format = Some(KvFormat::Fp4V41),
            "kv_format",
            "only an extra cache",
        ),
    ];
    for (bend, argument, says) in cases {
        let mut call = Decode::right();
        of_512(&mut call);
        bend(&mut call);
        if call.kv_format == Some(KvFormat::Fp4V41) {
            call.cache = bytes(288);
        }
        let expected = Expected {
            argument,
            unsupported: true,
            says,
        };
        assert_refused(says, call.run(None), &expected);
    }
    let mut unnamed = Decode::right();
    unnamed.extra_cache = bytes(656);
    assert_refused(
        "unnamed",
        unnamed.run(None),
        &says("extra_kv_format", "tells its format"),
    );
    unnamed.extra_kv_format = Some(KvFormat::Fp8V32);
    unnamed.run(None).unwrap();
}

#[test]
fn what_cuda_asks_of_quantised_caches_and_of_lists() {
    type Bend = fn(&mut Decode);
    let of_v4 = || {
        let mut call = Decode::right();
        call.q = Array::zeros(DType::Bf16, &[2, 3, 8, 512]);
        call.cache = Array::zeros(DType::U8, &[4, 16, 584]);
        call.kv_format = Some(KvFormat::Fp8V4);
        call.extra_cache = Array::zeros(DType::U8, &[9, 2, 288]);
        call.extra_kv_format = Some(KvFormat::Fp4V41);
        call.moved_to_cuda()
    };
    let cases: &[(Bend, &'static str, &'static str)] = &[
        (|c| c.cache.ptr += 8, "kv_cache", "16-byte boundaries"),
        (
            |c| c.cache.strides[0] += 8,
            "kv_cache",
            "multiple of 16 elements",
        ),
        (
            |c| c.extra_cache.strides[1] += 8,
            "extra_kv_cache",
            "multiple of 16 elements",
        ),
        (|c| c.indices.ptr += 2, "indices", "4-byte boundary"),
        (
            |c| c.extra_indices.strides[2] = 2,
            "extra_indices",
            "the last stride is 1",
        ),
    ];
    for (bend, argument, rule) in cases {
        let mut call = of_v4();
        bend(&mut call);
        assert_refused(rule, call.run(None), &says(argument, rule));
    }
    let mut far = of_v4();
    far.extra_cache.strides[0] = 1 << 34;
    let expected = Expected {
        argument: "extra_kv_cache",
        unsupported: true,
        says: "at most 64 GiB",
    };
    assert_refused("far", far.run(None), &expected);
}

/// Kernels of two kinds of caches read both by units of 16 bytes, which 32 bits count.
#[test]
fn a_bf16_cache_and_codes_beside_it_are_reached_by_units() {
    type Bend = fn(&mut Array);
    let cases: &[(Bend, &'static str)] = &[
        (|c| c.strides[0] *= -1, "follow one another"),
        (|c| c.strides[0] = 1 << 34, "at most 64 GiB"),
        (|c| c.shape[1] = 1 << 22, "smaller than 2 GiB"),
    ];
    for (extra_codes, bends_codes) in [(false, false), (false, true), (true, false), (true, true)] {
        for (bend, says) in cases {
            let mut call = Decode::right().moved_to_cuda();
            let (codes, format, plain, names) = if extra_codes {
                let call = &mut call;
                let format = &mut call.extra_kv_format;
                (
                    &mut call.extra_cache,
                    format,
                    &mut call.cache,
                    ["extra_kv_cache", "kv_cache"],
                )
            } else {
                let format = &mut call.kv_format;
                (
                    &mut call.cache,
                    format,
                    &mut call.extra_cache,
                    ["kv_cache", "extra_kv_cache"],
                )
            };
            *codes = Array::zeros(DType::U8, &[9, 16, 656]);
            codes.device = Device::Cuda(0);
            *format = Some(KvFormat::Fp8V32);
            plain.reshape(&[9, 16, 576]);
            bend(if bends_codes { codes } else { plain });
            call.extra_kv_format = call.extra_kv_format.or(Some(KvFormat::Bf16));
            let expected = Expected {
                argument: names[usize::from(!bends_codes)],
                unsupported: true,
                says,
            };
            assert_refused(says, call.run(None), &expected);
        }
    }
}

#[test]
fn outputs_in_the_memory_of_others_are_refused() {
    type Bend = fn(&mut Decode);
    let cases: &[(Bend, &'static str, &'static str)] = &[
        (|c| c.out.ptr = c.q.ptr, "out", "in the memory of q"),
        (|c| c.out.ptr = c.cache.ptr + 64, "out", "of kv_cache"),
        (|c| c.lse.ptr = c.out.ptr + 512, "out", "of lse"),
        (|c| c.lse.ptr = c.indices.ptr, "lse", "of indices"),
        (
            |c| c.lse.ptr = c.extra_cache.ptr,
            "lse",
            "of extra_kv_cache",
        ),
        (|c| c.workspace.ptr = c.out.ptr, "workspace", "of out"),
    ];
    for (bend, argument, says) in cases {
        let mut call = Decode::right();
        bend(&mut call);
        assert_refused(says, call.run(None), &self::says(argument, says));
    }
}

fn plan_of(queries: Queries, formats: [Option<KvFormat>; 2], workspace: &Array) -> Plan {
    let args = PlanArgs {
        queries,
        kv_format: formats[0],
        extra_kv_format: formats[1],
        ..PlanArgs::new(Device::Cpu, 2, 8)
    };
    // SAFETY: the workspace outlives the plan.
    unsafe { Plan::new_sparse(&args, None, None, workspace.view(), Stream::default()) }.unwrap()
}

#[test]
fn a_plan_made_for_other_lists_is_refused_by_name() {
    let workspace = Array::workspace();
    let queries = |q_len, topk, extra_topk| Queries::Sparse {
        q_len,
        topk,
        extra_topk,
    };
    for (queries, rule) in [
        (queries(2, 70, 5), "made for q_len 2: this call has q_len 3"),
        (queries(3, 64, 5), "made for topk 64: this call has topk 70"),
        (
            queries(3, 70, 0),
            "made for extra_topk 0: this call has extra_topk 5",
        ),
    ] {
        let plan = plan_of(queries, [None; 2], &workspace);
        assert_refused(rule, Decode::right().run(Some(&plan)), &says("plan", rule));
    }
    let plan = plan_of(queries(3, 70, 5), [None; 2], &workspace);
    Decode::right().run(Some(&plan)).unwrap();
}

#[test]
fn a_plan_is_for_the_formats_of_both_caches() {
    let workspace = Array::workspace();
    let queries = Queries::Sparse {
        q_len: 3,
        topk: 70,
        extra_topk: 5,
    };
    let bytes = |pages: [i64; 2], format| match format {
        KvFormat::Bf16 => Array::zeros(DType::Bf16, &[pages[0], pages[1], 576]),
        KvFormat::Fp8 => Array::zeros(DType::U8, &[pages[0], pages[1], 576]),
        _ => Array::zeros(DType::U8, &[pages[0], pages[1], 656]),
    };
    use KvFormat::{Bf16, Fp8, Fp8V32};
    let formats = [None, Some(Bf16), Some(Fp8), Some(Fp8V32)];
    for (main, extra) in [
        (Bf16, Bf16),
        (Bf16, Fp8),
        (Fp8V32, Bf16),
        (Fp8V32, Fp8),
        (Fp8, Fp8V32),
    ] {
        let mut call = Decode::right();
        (call.cache, call.kv_format) = (bytes([4, 16], main), Some(main));
        (call.extra_cache, call.extra_kv_format) = (bytes([9, 2], extra), Some(extra));
        call.run(None).unwrap();
        for made_for in formats
            .map(|main| formats.map(|extra| [main, extra]))
            .concat()
        {
            let plan = plan_of(queries, made_for, &workspace);
            let result = call.run(Some(&plan));
            let differs = |ours: Option<KvFormat>, theirs| ours.is_some_and(|ours| ours != theirs);
            let rule = match made_for {
                [ours, _] if differs(ours, main) => "this call has kv_format",
                [_, ours] if differs(ours, extra) => "this call has extra_kv_format",
                _ => {
                    result.unwrap();
                    continue;
                }
            };
            assert_refused(&format!("{made_for:?}"), result, &says("plan", rule));
        }
    }
}

/// A prefill that is right, to be bent: 5 query tokens, 8 heads, lists of 70 of 99 tokens.
struct Prefill {
    q: Array,
    kv: Array,
    indices: Array,
    lens: Array,
    out: Array,
    max_logits: Array,
    lse: Array,
}

impl Prefill {
    fn right() -> Self {
        Self {
            q: Array::zeros(DType::Bf16, &[5, 8, 576]),
            kv: Array::zeros(DType::Bf16, &[99, 576]),
            indices: Array::zeros(DType::I32, &[5, 70]),
            lens: Array::zeros(DType::I32, &[5]),
            out: Array::zeros(DType::Bf16, &[5, 8, 512]),
            max_logits: Array::zeros(DType::F32, &[5, 8]),
            lse: Array::zeros(DType::F32, &[5, 8]),
        }
    }

    fn run(&self, workspace: Option<View>) -> Result<(), Error> {
        let args = SparsePrefillArgs {
            topk_lengths: Some(self.lens.view()),
            workspace,
            ..SparsePrefillArgs::new(
                self.q.view().into(),
                self.kv.view().into(),
                self.indices.view(),
                self.out.view(),
                self.max_logits.view(),
                self.lse.view(),
            )
        };
        // SAFETY: the arrays are live; a description that lies must be refused.
        unsafe { sparse_prefill(&args) }
    }
}

#[test]
fn what_a_prefill_refuses() {
    type Bend = fn(&mut Prefill);
    #[rustfmt::skip]
    let cases: &[(Bend, &'static str, &'static str)] = &[
        (|c| c.q.reshape(&[1, 5, 8, 576]), "q", "[tokens, heads, 576]"),
        (|c| c.kv.reshape(&[99]), "kv", "[tokens or num_pages, page_size, (heads), 512], its rank is 1"),
        (|c| c.kv.shape[1] = 512, "kv", "q has rows of 576"),
        (|c| c.kv.shape[1] = 575, "kv", "576 (512 and 64 rotary) or 512"),
        (|c| c.kv.strides[1] = 2, "kv", "the last stride is 1"),
        (|c| c.kv.strides = vec![1], "kv", "of shape [99, 576] with strides [1]: one stride per dimension"),
        (|c| (c.kv.dtype, c.kv.strides) = (DType::F8E4M3, vec![1]), "kv", "one stride per dimension"),
        (|c| c.indices.shape[0] = 4, "indices", "dimension 0 is 5, the tokens of q"),
        (|c| c.indices.reshape(&[5, 2, 35]), "indices", "dimension 1 is 1, the KV heads"),
        (|c| c.lens.reshape(&[4]), "topk_lengths", "dimension 0 is 5, the query tokens"),
        (|c| c.lens.reshape(&[5, 1]), "topk_lengths", "[num_tokens]"),
        (|c| c.max_logits.shape[1] = 7, "max_logits", "dimension 1 is 8"),
        (|c| c.max_logits.dtype = DType::F64, "max_logits", "float32"),
    ];
    let workspace = Array::workspace();
    for (bend, argument, rule) in cases {
        let mut call = Prefill::right();
        bend(&mut call);
        assert_refused(
            rule,
            call.run(Some(workspace.view())),
            &says(argument, rule),
        );
    }
    let without = Prefill::right().run(None);
    assert_refused("workspace", without, &says("workspace", "bytes are needed"));
    let mut three = Prefill::right();
    three.indices.reshape(&[5, 1, 70]);
    three.kv.reshape(&[99, 1, 576]);
    three.run(Some(workspace.view())).unwrap();
    Prefill::right().run(Some(workspace.view())).unwrap();
}
