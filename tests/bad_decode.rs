//! Every argument of `decode` that must be refused is, by its name and by the rule.

mod support;

use ferromla::{DType, DecodeArgs, Device, Error, KvFormat, Parts, QScale, decode};
use support::{Array, Expected, assert_refused};

/// A call that is right, to be bent: 2 requests of 3 query tokens, 8 heads, 4 pages of 16 tokens.
struct Call {
    q: Array,
    q_pe: Option<Array>,
    kv_cache: Array,
    kpe: Option<Array>,
    block_table: Array,
    seq_lens: Array,
    out: Array,
    lse: Array,
    attn_sink: Option<Array>,
    workspace: Option<Array>,
    softmax_scale: Option<f64>,
    kv_format: Option<KvFormat>,
    kv_scale: Option<f64>,
    q_scale: Option<QScale>,
    num_splits: Option<u32>,
    max_q_len: Option<i64>,
    empty_lse: f32,
    batch_invariant: bool,
}

impl Call {
    fn right() -> Self {
        Self {
            q: Array::zeros(DType::Bf16, &[2, 3, 8, 576]),
            q_pe: None,
            kv_cache: Array::zeros(DType::Bf16, &[4, 16, 576]),
            kpe: None,
            block_table: Array::zeros(DType::I32, &[2, 5]),
            seq_lens: Array::zeros(DType::I32, &[2]),
            out: Array::zeros(DType::Bf16, &[2, 3, 8, 512]),
            lse: Array::zeros(DType::F32, &[2, 3, 8]),
            attn_sink: None,
            workspace: Some(Array::workspace()),
            softmax_scale: None,
            kv_format: None,
            kv_scale: None,
            q_scale: None,
            num_splits: None,
            max_q_len: None,
            empty_lse: f32::NEG_INFINITY,
            batch_invariant: false,
        }
    }

    /// Right in two parts.
    fn in_parts() -> Self {
        Self {
            q: Array::zeros(DType::Bf16, &[2, 3, 8, 512]),
            q_pe: Some(Array::zeros(DType::Bf16, &[2, 3, 8, 64])),
            kv_cache: Array::zeros(DType::Bf16, &[4, 16, 512]),
            kpe: Some(Array::zeros(DType::Bf16, &[4, 16, 64])),
            ..Self::right()
        }
    }

    /// Right over a cache of the format fp8.
    fn of_fp8() -> Self {
        Self {
            q: Array::zeros(DType::F8E4M3, &[2, 3, 8, 576]),
            kv_cache: Array::zeros(DType::F8E4M3, &[4, 16, 576]),
            ..Self::right()
        }
    }

    /// Right over a cache of the format fp8_v32.
    fn of_v32() -> Self {
        Self {
            kv_cache: Array::zeros(DType::U8, &[4, 16, 656]),
            kv_format: Some(KvFormat::Fp8V32),
            ..Self::right()
        }
    }

    /// Right in shape and on a CUDA device that need not exist.
    fn on_cuda() -> Self {
        Self::right().moved_to_cuda()
    }

    fn of_v32_on_cuda() -> Self {
        Self::of_v32().moved_to_cuda()
    }

    fn moved_to_cuda(self) -> Self {
        let mut call = self;
        let workspace = call.workspace.as_mut().unwrap();
        for array in [
            &mut call.q,
            &mut call.kv_cache,
            &mut call.block_table,
            &mut call.seq_lens,
            &mut call.out,
            &mut call.lse,
            workspace,
        ] {
            array.device = Device::Cuda(0);
        }
        call
    }

    fn args(&self) -> DecodeArgs<'static> {
        let parts = |one: &Array, two: &Option<Array>| match two {
            None => Parts::One(one.view()),
            Some(two) => Parts::Two(one.view(), two.view()),
        };
        DecodeArgs {
            softmax_scale: self.softmax_scale,
            kv_format: self.kv_format,
            kv_scale: self.kv_scale,
            q_scale: self.q_scale,
            num_splits: self.num_splits,
            max_q_len: self.max_q_len,
            empty_lse: self.empty_lse,
            batch_invariant: self.batch_invariant,
            attn_sink: self.attn_sink.as_ref().map(Array::view),
            workspace: self.workspace.as_ref().map(Array::view),
            ..DecodeArgs::new(
                parts(&self.q, &self.q_pe),
                parts(&self.kv_cache, &self.kpe),
                self.block_table.view(),
                self.seq_lens.view(),
                self.out.view(),
                self.lse.view(),
            )
        }
    }

    fn run(&self) -> Result<(), Error> {
        // SAFETY: the arrays are live; a description that lies must be refused.
        unsafe { decode(&self.args()) }
    }
}

type Bend = fn(&mut Call);
/// From what, how, the argument, what the error says.
type Case = (fn() -> Call, Bend, &'static str, &'static str);

fn refuse(cases: &[Case], unsupported: bool) {
    for (number, (right, bend, argument, says)) in cases.iter().enumerate() {
        let mut call = right();
        bend(&mut call);
        let expected = Expected {
            argument,
            unsupported,
            says,
        };
        assert_refused(
            &format!("case {number}, {argument} {says}"),
            call.run(),
            &expected,
        );
    }
}

#[test]
fn right_calls_are_accepted() {
    Call::right().run().unwrap();
    Call::in_parts().run().unwrap();
}

#[test]
fn nothing_to_do_is_no_error() {
    #[rustfmt::skip]
    let bends = [
        // No request.
        (|call: &mut Call| {
            call.q.reshape(&[0, 3, 8, 576]);
            call.block_table.reshape(&[0, 5]);
            call.seq_lens.reshape(&[0]);
            call.out.reshape(&[0, 3, 8, 512]);
            call.lse.reshape(&[0, 3, 8]);
        }) as Bend,
        // No query token.
        |call| {
            call.q.reshape(&[2, 0, 8, 576]);
            call.out.reshape(&[2, 0, 8, 512]);
            call.lse.reshape(&[2, 0, 8]);
        },
        // An empty array has no memory.
        |call| {
            call.q.reshape(&[2, 0, 8, 576]);
            call.out.reshape(&[2, 0, 8, 512]);
            call.lse.reshape(&[2, 0, 8]);
            (call.q.ptr, call.out.ptr, call.lse.ptr) = (0, 0, 0);
        },
        // No page in any table.
        |call| {
            call.block_table.reshape(&[2, 0]);
            call.block_table.ptr = 0;
        },
        // No page at all.
        |call| {
            call.kv_cache.reshape(&[0, 16, 576]);
            call.kv_cache.ptr = 0;
        },
    ];
    for bend in bends {
        let mut call = Call::right();
        bend(&mut call);
        call.run().unwrap();
    }
}

#[test]
fn shapes() {
    #[rustfmt::skip]
    let cases: &[Case] = &[
        (Call::right, |c| c.q.reshape(&[2, 24, 576]), "q", "rank is 3"),
        (Call::right, |c| c.q.reshape(&[1, 1, 1, 1, 1, 1, 1]), "q", "rank is 7"),
        (Call::right, |c| c.q.shape[3] = 575, "q", "576 (512 and 64 rotary) or 512"),
        (Call::right, |c| c.q.shape[2] = 0, "q", "at least 1"),
        (Call::right, |c| c.q.shape[0] = -2, "q", "between 0 and 2147483647"),
        (Call::right, |c| c.q.shape[1] = 1 << 40, "q", "between 0 and 2147483647"),
        (Call::right, |c| c.q.strides = vec![1], "q", "one stride per dimension"),
        (Call::right, |c| c.kv_cache.reshape(&[4, 576]), "kv_cache", "rank is 2"),
        (Call::right, |c| c.kv_cache.reshape(&[4, 16, 512]), "kv_cache", "rows of 576"),
        (Call::right, |c| c.kv_cache.reshape(&[4, 0, 576]), "kv_cache", "page_size, is at least 1"),
        (Call::right, |c| c.kv_cache.reshape(&[4, 16, 0, 576]), "kv_cache", "KV heads, is at least 1"),
        (Call::right, |c| c.kv_cache.reshape(&[1, 16, 3, 576]), "kv_cache", "divide the 8 heads"),
        (Call::right, |c| c.block_table.reshape(&[3, 1]), "block_table", "dimension 0 is 2"),
        (Call::right, |c| c.block_table.reshape(&[10]), "block_table", "[batch, max_pages]"),
        (Call::right, |c| c.seq_lens.reshape(&[1]), "seq_lens", "dimension 0 is 2"),
        (Call::right, |c| c.seq_lens.reshape(&[2, 1]), "seq_lens", "[batch]"),
        (Call::right, |c| c.out.reshape(&[2, 3, 8, 576]), "out", "dimension 3 is 512"),
        (Call::right, |c| c.out.reshape(&[2, 2, 8, 512]), "out", "dimension 1 is 3"),
        (Call::right, |c| c.lse.reshape(&[2, 8, 3]), "lse", "dimension 1 is 3"),
        (Call::right, |c| c.lse.reshape(&[48]), "lse", "rank is 1"),
        (Call::right, |c| c.attn_sink = Some(Array::zeros(DType::F32, &[7])), "attn_sink", "is 8"),
        (Call::right, |c| c.attn_sink = Some(Array::zeros(DType::F32, &[8, 1])), "attn_sink", "[heads]"),
        (Call::right, |c| c.workspace.as_mut().unwrap().reshape(&[2, 64]), "workspace", "one dimension"),
        (Call::in_parts, |c| c.q.shape[3] = 576, "q[0]", "dimension is 512"),
        (Call::in_parts, |c| c.q_pe.as_mut().unwrap().shape[3] = 32, "q[1]", "dimension 3 is 64"),
        (Call::in_parts, |c| c.q_pe.as_mut().unwrap().shape[1] = 2, "q[1]", "dimension 1 is 3"),
        (Call::in_parts, |c| c.kpe.as_mut().unwrap().shape[0] = 3, "kv_cache[1]", "dimension 0 is 4"),
        (Call::in_parts, |c| c.kpe = None, "kv_cache", "rows of 576"),
    ];
    refuse(cases, false);
}

#[test]
fn types() {
    #[rustfmt::skip]
    let cases: &[Case] = &[
        (Call::right, |c| c.q.dtype = DType::F32, "q", "bfloat16 or float16"),
        (Call::right, |c| c.q.dtype = DType::Other, "q", "bfloat16 or float16"),
        (Call::right, |c| c.kv_cache.dtype = DType::Fp16, "kv_cache", "the type is bfloat16, as q is"),
        (Call::right, |c| c.kv_cache.dtype = DType::F32, "kv_format", "None with kv_cache of type float32"),
        (Call::right, |c| c.kv_cache.dtype = DType::U8, "kv_format", "None with kv_cache of type uint8"),
        (Call::right, |c| c.kv_format = Some(KvFormat::Fp16), "kv_format", "kv_cache is bfloat16"),
        (Call::right, |c| c.block_table.dtype = DType::I64, "block_table", "int64: the type is int32"),
        (Call::right, |c| c.seq_lens.dtype = DType::U32, "seq_lens", "uint32: the type is int32"),
        (Call::right, |c| c.out.dtype = DType::Fp16, "out", "bfloat16, as q is"),
        (Call::right, |c| c.lse.dtype = DType::Bf16, "lse", "the type is float32"),
        (Call::right, |c| c.attn_sink = Some(Array::zeros(DType::F64, &[8])), "attn_sink", "float32"),
        (Call::right, |c| c.workspace.as_mut().unwrap().dtype = DType::F32, "workspace", "uint8"),
        (Call::in_parts, |c| c.q_pe.as_mut().unwrap().dtype = DType::F32, "q[1]", "as q[0] is"),
        (Call::in_parts, |c| c.kpe.as_mut().unwrap().dtype = DType::Fp16, "kv_cache[1]", "as kv_cache[0] is"),
    ];
    refuse(cases, false);
}

#[test]
fn quantised_caches() {
    Call::of_fp8().run().unwrap();
    Call::of_v32().run().unwrap();
    #[rustfmt::skip]
    let cases: &[Case] = &[
        (Call::of_v32, |c| c.kv_cache.reshape(&[4, 16, 576]), "kv_cache", "the last dimension is 656"),
        (Call::of_v32, |c| c.kv_cache.reshape(&[2, 16, 2, 656]), "kv_cache", "dimension 2 is 1"),
        (Call::of_v32, |c| c.kv_cache.dtype = DType::U16, "kv_format", "uint8, int8 or float8_e4m3fn"),
        (Call::of_v32, |c| c.kv_cache.strides[1] = 640, "kv_cache", "a token has 656 bytes"),
        (Call::of_v32, |c| c.kv_cache.strides[2] = 2, "kv_cache", "the last stride is 1"),
        (Call::of_v32, |c| c.kpe = Some(Array::zeros(DType::U8, &[4, 16, 64])), "kv_cache", "is one tensor"),
        (Call::of_v32, |c| c.kv_scale = Some(1.0), "kv_scale", "only fp8 caches"),
        (Call::of_v32, |c| c.q_scale = Some(QScale::One(1.0)), "q_scale", "only float8_e4m3fn queries"),
        (Call::of_v32, |c| c.out.dtype = DType::Fp16, "out", "as q is"),
        (Call::of_v32, |c| c.q.reshape(&[2, 3, 8, 512]), "kv_cache", "q has rows of 512"),
        (Call::of_fp8, |c| c.kv_scale = Some(0.0), "kv_scale", "positive"),
        (Call::of_fp8, |c| c.kv_scale = Some(f64::NAN), "kv_scale", "positive"),
        (Call::of_fp8, |c| c.kv_scale = Some(1e39), "kv_scale", "float32 holds"),
        (Call::of_fp8, |c| c.kv_scale = Some(1e-60), "kv_scale", "float32 holds"),
        (Call::of_fp8, |c| c.q_scale = Some(QScale::One(f64::INFINITY)), "q_scale", "float32 holds"),
        (Call::of_fp8, |c| (c.kv_scale, c.q_scale) = (Some(1e30), Some(QScale::One(1e30))), "softmax_scale", "times kv_scale and q_scale"),
        (Call::of_fp8, |c| (c.kv_scale, c.q_scale) = (Some(1e-30), Some(QScale::One(1e-30))), "softmax_scale", "times kv_scale and q_scale"),
        (Call::of_fp8, |c| c.q_scale = Some(QScale::Rows(c.seq_lens.view())), "q_scale", "rank is 1"),
        (Call::of_fp8, |c| c.q_scale = Some(QScale::Rows(Array::zeros(DType::Bf16, &[2, 3, 8]).view())), "q_scale", "float32"),
        (Call::of_fp8, |c| c.out.dtype = DType::F8E4M3, "out", "bfloat16, for float8_e4m3fn queries"),
        (Call::of_fp8, |c| c.kv_cache.dtype = DType::U8, "kv_format", "None with kv_cache of type uint8"),
        (Call::of_fp8, |c| c.kv_cache.reshape(&[4, 16, 512]), "kv_cache", "q has rows of 576"),
        (Call::right, |c| c.kv_scale = Some(1.0), "kv_scale", "only fp8 caches"),
        (Call::right, |c| c.kv_format = Some(KvFormat::Fp8V32), "kv_format", "kv_cache is bfloat16"),
    ];
    refuse(cases, false);
}

#[test]
fn what_another_version_may_have_is_unsupported() {
    #[rustfmt::skip]
    let cases: &[Case] = &[
        (Call::right, |c| c.q.dtype = DType::F8E4M3, "q", "with a cache of the format fp8"),
        (Call::of_v32, |c| c.q.dtype = DType::F8E4M3, "q", "with a cache of the format fp8"),
        (Call::of_v32, |c| { c.kv_format = Some(KvFormat::Fp8V4); c.kv_cache.reshape(&[4, 16, 584]); }, "kv_format", "take bf16, fp16, fp8, fp8_v32"),
    ];
    refuse(cases, true);
}

#[test]
fn attention_on_cuda_reaches_so_much_of_a_quantised_cache() {
    #[rustfmt::skip]
    let cases: &[Case] = &[
        (Call::of_v32_on_cuda, |c| c.kv_cache.strides[0] *= -1, "kv_cache", "follow one another"),
        (Call::of_v32_on_cuda, |c| c.kv_cache.reshape(&[2, 1 << 22, 656]), "kv_cache", "smaller than 2 GiB"),
    ];
    refuse(cases, true);
}

#[test]
fn devices() {
    let cuda = Device::Cuda(0);
    assert_eq!(Call::on_cuda().q.device, cuda);
    #[rustfmt::skip]
    let cases: &[Case] = &[
        (Call::right, |c| c.kv_cache.device = Device::Cuda(0), "kv_cache", "it is on cpu, as q is"),
        (Call::right, |c| c.block_table.device = Device::Cuda(1), "block_table", "on cuda:1"),
        (Call::right, |c| c.seq_lens.device = Device::Cuda(0), "seq_lens", "it is on cpu"),
        (Call::right, |c| c.out.device = Device::Cuda(0), "out", "it is on cpu"),
        (Call::right, |c| c.lse.device = Device::Cuda(0), "lse", "it is on cpu"),
        (Call::right, |c| c.workspace.as_mut().unwrap().device = Device::Cuda(0), "workspace", "on cpu"),
        (Call::on_cuda, |c| c.seq_lens.device = Device::Cpu, "seq_lens", "it is on cuda:0"),
        (Call::on_cuda, |c| c.kv_cache.device = Device::Cuda(1), "kv_cache", "it is on cuda:0"),
        (Call::on_cuda, |c| c.attn_sink = Some(Array::zeros(DType::F32, &[8])), "attn_sink", "cuda:0"),
        (Call::in_parts, |c| c.q_pe.as_mut().unwrap().device = Device::Cuda(0), "q[1]", "as q[0] is"),
    ];
    refuse(cases, false);
}

#[test]
fn strides_and_addresses() {
    #[rustfmt::skip]
    let cases: &[Case] = &[
        (Call::right, |c| c.q.strides[3] = 2, "q", "the last stride is 1 element"),
        (Call::right, |c| c.kv_cache.strides[2] = 0, "kv_cache", "the last stride is 1 element"),
        (Call::right, |c| c.block_table.strides[1] = 2, "block_table", "the last stride is 1 element"),
        (Call::right, |c| c.out.strides[3] = 2, "out", "the last stride is 1 element"),
        (Call::right, |c| c.out.strides[0] = 0, "out", "memory for every element"),
        (Call::right, |c| c.out.strides[2] = 511, "out", "memory for every element"),
        (Call::right, |c| c.lse.strides[2] = 0, "lse", "memory for every element"),
        (Call::right, |c| c.lse.strides[1] = 7, "lse", "memory for every element"),
        (Call::right, |c| c.q.ptr = 0, "q", "null"),
        (Call::right, |c| c.lse.ptr = 0, "lse", "null"),
        (Call::right, |c| c.q.ptr += 1, "q", "2-byte boundary"),
        (Call::right, |c| c.seq_lens.ptr += 2, "seq_lens", "4-byte boundary"),
        (Call::right, |c| c.workspace.as_mut().unwrap().ptr += 8, "workspace", "16-byte boundary"),
        (Call::right, |c| c.kv_cache.strides[0] = i64::MAX, "kv_cache", "below 2^63"),
        (Call::right, |c| c.kv_cache.strides[0] = i64::MIN, "kv_cache", "below 2^63"),
        (Call::right, |c| c.seq_lens.strides[0] = -(1 << 62), "seq_lens", "below 2^63"),
        (Call::on_cuda, |c| c.q.ptr += 8, "q", "on CUDA rows begin on 16-byte boundaries"),
        (Call::on_cuda, |c| c.q.strides[2] = 580, "q", "multiple of 8 elements"),
        (Call::on_cuda, |c| c.kv_cache.strides[1] = 577, "kv_cache", "stride 577 along dimension 1"),
        (Call::on_cuda, |c| c.out.strides[1] = 8 * 512 + 4, "out", "multiple of 8 elements"),
        (Call::of_v32_on_cuda, |c| c.kv_cache.ptr += 8, "kv_cache", "on CUDA rows begin on 16-byte boundaries"),
        (Call::of_v32_on_cuda, |c| c.kv_cache.strides[1] = 664, "kv_cache", "multiple of 16 elements"),
        (Call::of_v32_on_cuda, |c| c.kv_cache.strides[0] += 8, "kv_cache", "multiple of 16 elements"),
    ];
    refuse(cases, false);
}

#[test]
fn numbers() {
    #[rustfmt::skip]
    let cases: &[Case] = &[
        (Call::right, |c| c.num_splits = Some(0), "num_splits", "at least 1"),
        (Call::right, |c| c.max_q_len = Some(1), "max_q_len", "different query lengths"),
        (Call::right, |c| c.softmax_scale = Some(f64::NAN), "softmax_scale", "positive"),
        (Call::right, |c| c.softmax_scale = Some(f64::INFINITY), "softmax_scale", "float32"),
        (Call::right, |c| c.softmax_scale = Some(1e300), "softmax_scale", "float32"),
        (Call::right, |c| c.softmax_scale = Some(-1.0), "softmax_scale", "positive"),
        (Call::right, |c| c.softmax_scale = Some(1e-50), "softmax_scale", "float32"),
        (Call::right, |c| c.empty_lse = f32::NAN, "empty_lse", "a number, or an infinity"),
        (Call::right, |c| c.workspace = None, "workspace", "bytes are needed without a plan"),
        (Call::right, |c| c.workspace.as_mut().unwrap().reshape(&[64]), "workspace", "64 bytes: at least "),
    ];
    refuse(cases, false);
}

#[test]
fn the_workspace_is_needed_to_the_byte() {
    for num_splits in [None, Some(1), Some(3)] {
        let mut call = Call::right();
        call.num_splits = num_splits;
        let bytes = call.args().workspace_bytes().unwrap() as i64;
        call.workspace.as_mut().unwrap().reshape(&[bytes]);
        call.run().unwrap();
        call.workspace.as_mut().unwrap().reshape(&[bytes - 1]);
        let says = "bytes are needed";
        let expected = Expected {
            argument: "workspace",
            unsupported: false,
            says,
        };
        assert_refused("one byte short", call.run(), &expected);
    }
}

#[test]
fn strided_inputs_are_taken_as_they_are() {
    let mut call = Call::right();
    call.kv_cache.strides[0] = -(16 * 576);
    call.kv_cache.ptr += 3 * 16 * 576 * 2;
    call.block_table.strides[0] = 0;
    call.seq_lens.strides[0] = 0;
    call.lse.strides = vec![1, 16, 2];
    call.run().unwrap();
}

#[test]
fn nothing_is_written_by_a_refused_call() {
    let mut call = Call::right();
    let mut sentinel = vec![0x5a5a_u16; 2 * 3 * 8 * 512];
    call.out.ptr = sentinel.as_mut_ptr() as u64;
    call.workspace = None;
    call.run().unwrap_err();
    assert!(sentinel.iter().all(|&x| x == 0x5a5a));
}
