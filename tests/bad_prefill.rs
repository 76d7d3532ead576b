//! What `prefill` takes differently from `decode`, bent: refused by name and by the rule. The other arguments are
//! checked by the same code, which `bad_decode.rs` tests.

mod support;

use ferromla::{
    DType, Device, Error, Parts, Plan, PlanArgs, PrefillArgs, Queries, Stream, prefill,
    prefill_outputs,
};
use support::{Array, Expected, assert_refused};

/// A call that is right, to be bent: 2 requests of 7 query tokens together, 8 heads, 4 pages of 16 tokens.
struct Call {
    q: Array,
    q_pe: Option<Array>,
    block_table: Array,
    seq_lens: Array,
    qo_indptr: Array,
    out: Array,
    lse: Array,
    workspace: Array,
}

impl Call {
    fn right() -> Self {
        Self {
            q: Array::zeros(DType::Bf16, &[7, 8, 576]),
            q_pe: None,
            block_table: Array::zeros(DType::I32, &[2, 5]),
            seq_lens: Array::zeros(DType::I32, &[2]),
            qo_indptr: Array::zeros(DType::I32, &[3]),
            out: Array::zeros(DType::Bf16, &[7, 8, 512]),
            lse: Array::zeros(DType::F32, &[7, 8]),
            workspace: Array::workspace(),
        }
    }

    fn with(bend: fn(&mut Self)) -> Self {
        let mut call = Self::right();
        bend(&mut call);
        call
    }

    fn run(&self, plan: Option<&Plan>) -> Result<(), Error> {
        let cache = Array::zeros(DType::Bf16, &[4, 16, 576]);
        let q = match &self.q_pe {
            None => Parts::One(self.q.view()),
            Some(q_pe) => Parts::Two(self.q.view(), q_pe.view()),
        };
        let args = PrefillArgs {
            plan,
            workspace: Some(self.workspace.view()),
            ..PrefillArgs::new(
                q,
                cache.view().into(),
                self.block_table.view(),
                self.seq_lens.view(),
                self.qo_indptr.view(),
                self.out.view(),
                self.lse.view(),
            )
        };
        // SAFETY: the arrays are live; a description that lies must be refused.
        unsafe { prefill(&args) }
    }
}

type Case = (fn(&mut Call), &'static str, &'static str);

#[test]
fn what_is_refused() {
    #[rustfmt::skip]
    let cases: &[Case] = &[
        (|c| c.q.reshape(&[1, 7, 8, 576]), "q", "[tokens, heads, 576] or [tokens, heads, 512], its rank is 4"),
        (|c| c.q.shape[1] = 0, "q", "dimension 1, the query heads, is at least 1"),
        (|c| c.q.shape[2] = 575, "q", "576 (512 and 64 rotary) or 512"),
        (|c| c.q.shape[0] = 1 << 31, "q", "between 0 and 2147483647"),
        (|c| c.q.strides[2] = 2, "q", "the last stride is 1 element"),
        (|c| (c.q, c.q_pe) = (Array::zeros(DType::Bf16, &[7, 8, 512]), Some(Array::zeros(DType::Bf16, &[6, 8, 64]))),
            "q[1]", "dimension 0 is 7, as in q[0]"),
        (|c| c.qo_indptr.reshape(&[2]), "qo_indptr", "dimension 0 is 3, the batch of block_table + 1"),
        (|c| c.qo_indptr.reshape(&[1, 3]), "qo_indptr", "the shape is [batch + 1], its rank is 2"),
        (|c| c.qo_indptr.dtype = DType::I64, "qo_indptr", "int64: the type is int32"),
        (|c| c.qo_indptr.device = Device::Cuda(0), "qo_indptr", "it is on cpu, as q is"),
        (|c| c.qo_indptr.ptr = 0, "qo_indptr", "null"),
        (|c| c.qo_indptr.ptr += 2, "qo_indptr", "4-byte boundary"),
        (|c| c.qo_indptr.strides[0] = 1 << 62, "qo_indptr", "below 2^63"),
        (|c| c.seq_lens.reshape(&[1]), "seq_lens", "dimension 0 is 2, the batch of block_table"),
        (|c| c.out.reshape(&[6, 8, 512]), "out", "dimension 0 is 7"),
        (|c| c.out.reshape(&[7, 8, 576]), "out", "dimension 2 is 512"),
        (|c| c.out.reshape(&[1, 7, 8, 512]), "out", "rank is 4"),
        (|c| c.out.strides[0] = 0, "out", "memory for every element"),
        (|c| c.lse.reshape(&[8, 7]), "lse", "dimension 0 is 7"),
        (|c| c.lse.strides[0] = 7, "lse", "memory for every element"),
        (|c| c.workspace.reshape(&[64]), "workspace", "64 bytes: at least "),
    ];
    for (bend, argument, says) in cases {
        let expected = Expected {
            argument,
            unsupported: false,
            says,
        };
        assert_refused(says, Call::with(*bend).run(None), &expected);
    }
}

#[test]
fn what_is_allowed() {
    #[rustfmt::skip]
    let bends: &[fn(&mut Call)] = &[
        |_| (),
        // No query token, and no memory for any.
        |c| {
            c.q.reshape(&[0, 8, 576]);
            c.out.reshape(&[0, 8, 512]);
            c.lse.reshape(&[0, 8]);
            (c.q.ptr, c.out.ptr, c.lse.ptr) = (0, 0, 0);
        },
        // No request: the query tokens are nobody's.
        |c| {
            c.block_table.reshape(&[0, 5]);
            c.seq_lens.reshape(&[0]);
            c.qo_indptr.reshape(&[1]);
        },
        // Offsets at any distance.
        |c| c.qo_indptr.strides[0] = 0,
        // Heads before tokens.
        |c| (c.q.strides, c.lse.strides) = (vec![576, 7 * 576, 1], vec![1, 7]),
    ];
    for bend in bends {
        Call::with(*bend).run(None).unwrap();
    }
}

#[test]
fn plans() {
    let call = Call::right();
    let plan_of = |queries| {
        let args = PlanArgs {
            queries,
            page_size: 16,
            max_seq_len: Some(80),
            ..PlanArgs::new(Device::Cpu, 2, 8)
        };
        let indptr = call.qo_indptr.view();
        let indptr = matches!(queries, Queries::Ragged { .. }).then_some(&indptr);
        let (lens, workspace) = (call.seq_lens.view(), call.workspace.view());
        // SAFETY: the arrays outlive the plan.
        unsafe { Plan::new(&args, &lens, indptr, workspace, Stream::default()).unwrap() }
    };
    call.run(Some(&plan_of(Queries::Ragged { num_tokens: 7 })))
        .unwrap();
    for (queries, says) in [
        (
            Queries::Ragged { num_tokens: 8 },
            "made for num_tokens 8: this call has num_tokens 7",
        ),
        (
            Queries::Uniform { q_len: 7 },
            "made for queries of one q_len (decode): this call has queries with a qo_indptr",
        ),
    ] {
        let expected = Expected {
            argument: "plan",
            unsupported: false,
            says,
        };
        assert_refused(says, call.run(Some(&plan_of(queries))), &expected);
    }
}

#[test]
fn outputs_follow_q() {
    let call = Call::right();
    let outputs = prefill_outputs(&call.q.view().into()).unwrap();
    assert_eq!(
        (&outputs.out[..], &outputs.lse[..]),
        (&[7, 8, 512][..], &[7, 8][..])
    );
    let uniform = Array::zeros(DType::Bf16, &[1, 7, 8, 576]);
    let error = prefill_outputs(&uniform.view().into()).unwrap_err();
    assert_eq!(error.argument(), Some("q"));
}
