//! Plans: what they are made from is checked, and a call they were not made for is refused by name.

mod support;

use ferromla::{
    DType, DecodeArgs, Device, Error, KvFormat, Plan, PlanArgs, Queries, Stream, decode,
    num_tokens, workspace_bytes,
};
use support::{Array, Expected, assert_refused};

fn right() -> PlanArgs {
    PlanArgs {
        queries: Queries::Uniform { q_len: 3 },
        page_size: 16,
        max_seq_len: Some(80),
        ..PlanArgs::new(Device::Cpu, 2, 8)
    }
}

fn plan_of(args: &PlanArgs, seq_lens: &Array, workspace: &Array) -> Result<Plan, Error> {
    // SAFETY: the arrays outlive the plan in every test.
    unsafe {
        Plan::new(
            args,
            &seq_lens.view(),
            None,
            workspace.view(),
            Stream::default(),
        )
    }
}

fn ragged_plan_of(
    args: &PlanArgs,
    seq_lens: &Array,
    qo_indptr: Option<&Array>,
    workspace: &Array,
) -> Result<Plan, Error> {
    let qo_indptr = qo_indptr.map(Array::view);
    let (lens, stream) = (seq_lens.view(), Stream::default());
    // SAFETY: the arrays outlive the plan in every test; what lies about its memory is refused.
    unsafe { Plan::new(args, &lens, qo_indptr.as_ref(), workspace.view(), stream) }
}

#[test]
fn the_qo_indptr_of_a_plan() {
    type Bend = fn(&mut Array);
    #[rustfmt::skip]
    let cases: &[(Bend, &str)] = &[
        (|a| a.reshape(&[2]), "dimension 0 is 3, the batch of the plan + 1"),
        (|a| a.reshape(&[3, 1]), "[batch + 1]"),
        (|a| a.dtype = DType::F32, "the type is int32"),
        (|a| a.device = Device::Cuda(0), "it is on cpu, as seq_lens is"),
        (|a| a.ptr = 0, "null"),
    ];
    let (lens, workspace) = memory();
    let args = PlanArgs {
        queries: Queries::Ragged { num_tokens: 5 },
        ..right()
    };
    let says = |says| Expected {
        argument: "qo_indptr",
        unsupported: false,
        says,
    };
    for (bend, rule) in cases {
        let mut indptr = Array::zeros(DType::I32, &[3]);
        bend(&mut indptr);
        let plan = ragged_plan_of(&args, &lens, Some(&indptr), &workspace);
        assert_refused(rule, plan.map(drop), &says(rule));
    }
    let indptr = Array::zeros(DType::I32, &[3]);
    let plan = ragged_plan_of(&args, &lens, Some(&indptr), &workspace).unwrap();
    assert_eq!(plan.args().queries, Queries::Ragged { num_tokens: 5 });
    let without = ragged_plan_of(&args, &lens, None, &workspace);
    assert_refused(
        "without",
        without.map(drop),
        &says("for a plan of ragged queries"),
    );
    let beside = ragged_plan_of(&right(), &lens, Some(&indptr), &workspace);
    assert_refused(
        "beside q_len",
        beside.map(drop),
        &says("None, for a plan of one q_len"),
    );
}

#[test]
fn the_tokens_of_a_qo_indptr() {
    type Bend = fn(&mut Array);
    #[rustfmt::skip]
    let cases: &[(Bend, &str)] = &[
        (|a| a.reshape(&[0]), "[batch + 1]"),
        (|a| a.reshape(&[3, 1]), "[batch + 1]"),
        (|a| a.dtype = DType::I64, "the type is int32"),
        (|a| a.device = Device::Cuda(0), "it is on cpu, as a plan without num_tokens is"),
        // SAFETY: the array has three elements.
        (|a| unsafe { (a.ptr as *mut i32).add(2).write(-4) }, "-4 at the end: at least 0"),
    ];
    for (bend, says) in cases {
        let mut indptr = Array::zeros(DType::I32, &[3]);
        bend(&mut indptr);
        let expected = Expected {
            argument: "qo_indptr",
            unsupported: false,
            says,
        };
        // SAFETY: the array is live; a description that lies must be refused.
        let tokens = unsafe { num_tokens(&indptr.view()) };
        assert_refused(says, tokens.map(drop), &expected);
    }
}

fn memory() -> (Array, Array) {
    (Array::zeros(DType::I32, &[2]), Array::workspace())
}

#[test]
fn plan_arguments() {
    type Bend = fn(&mut PlanArgs);
    #[rustfmt::skip]
    let cases: &[(Bend, &str, &str)] = &[
        (|a| a.batch = -1, "batch", "between 0"),
        (|a| a.batch = 1 << 31, "batch", "2147483647"),
        (|a| a.num_heads = 0, "num_heads", "between 1"),
        (|a| a.num_kv_heads = 3, "num_kv_heads", "divides num_heads, 8"),
        (|a| a.num_kv_heads = 0, "num_kv_heads", "between 1"),
        (|a| a.queries = Queries::Uniform { q_len: -1 }, "q_len", "between 0"),
        (|a| a.queries = Queries::Ragged { num_tokens: -1 }, "num_tokens", "between 0"),
        (|a| a.queries = Queries::Ragged { num_tokens: 1 << 31 }, "num_tokens", "2147483647"),
        (|a| a.queries = sparse(-1, 0), "q_len", "between 0"),
        (|a| a.queries = sparse(1, -1), "extra_topk", "between 0"),
        (|a| a.queries = Queries::Sparse { q_len: 1, topk: -1, extra_topk: 0 }, "topk", "between 0"),
        (|a| a.queries = Queries::Sparse { q_len: 1, topk: i64::from(i32::MAX), extra_topk: 1 }, "topk", "keys"),
        (|a| a.queries = Queries::SparsePrefill { num_tokens: 5, topk: 64 }, "batch", "1 for a sparse prefill"),
        (|a| (a.queries, a.num_kv_heads) = (sparse(1, 0), 2), "num_kv_heads", "1 for queries with indices"),
        (|a| a.page_size = 0, "page_size", "between 1"),
        (|a| a.num_splits = Some(0), "num_splits", "at least 1"),
        (|a| a.max_seq_len = Some(-1), "max_seq_len", "at least 0"),
        (|a| a.num_sms = Some(7), "num_sms", "between 8"),
        (|a| a.num_sms = Some(1 << 31), "num_sms", "2147483647"),
        (|a| a.max_q_len = Some(1), "max_q_len", "None unless"),
        (|a| (a.max_q_len, a.queries) = (Some(-1), Queries::Ragged { num_tokens: 5 }), "max_q_len", "between 0"),
        (|a| (a.queries, a.num_heads) = (Queries::Uniform { q_len: 1 << 30 }, 1 << 30), "num_heads", "rows"),
        (|a| a.batch = i64::from(i32::MAX), "batch", "so that there are"),
        (|a| (a.num_splits, a.max_seq_len, a.batch) = (Some(u32::MAX), None, 999_999), "num_splits", "items"),
    ];
    for (bend, argument, says) in cases {
        let mut args = right();
        bend(&mut args);
        // A whole int32 of requests is allowed where each is one unit.
        if args.batch == i64::from(i32::MAX) {
            args.queries = Queries::Uniform { q_len: 100 };
        }
        let expected = Expected {
            argument,
            unsupported: false,
            says,
        };
        assert_refused(argument, workspace_bytes(&args).map(drop), &expected);
    }
    let args = PlanArgs {
        kv_format: Some(KvFormat::Fp8),
        num_kv_heads: 2,
        ..right()
    };
    let expected = Expected {
        argument: "num_kv_heads",
        unsupported: false,
        says: "1 for a cache of the format fp8",
    };
    assert_refused("kv_format", workspace_bytes(&args).map(drop), &expected);
}

#[test]
fn what_makes_a_plan_too_large_is_the_largest_of_its_factors() {
    type Bend = fn(&mut PlanArgs);
    const MOST: i64 = i32::MAX as i64;
    #[rustfmt::skip]
    let cases: &[(Bend, &str, &str)] = &[
        (|a| (a.batch, a.queries) = (MOST, Queries::Uniform { q_len: 1 }), "batch", "items"),
        (|a| a.queries = Queries::Uniform { q_len: MOST }, "q_len", "rows"),
        (|a| a.queries = Queries::Ragged { num_tokens: MOST }, "num_tokens", "rows"),
        (|a| (a.num_heads, a.num_kv_heads) = (MOST, 1), "num_heads", "rows"),
        (|a| (a.num_heads, a.num_kv_heads) = (1 << 30, 1 << 30), "num_heads", "units"),
        (|a| (a.batch, a.queries) = (2, Queries::Sparse { q_len: MOST, topk: 64, extra_topk: 0 }), "q_len", "units"),
        (|a| (a.batch, a.num_heads, a.queries) = (1, 128, Queries::SparsePrefill { num_tokens: MOST, topk: 64 }), "num_tokens", "units"),
        (|a| a.queries = Queries::Sparse { q_len: 1, topk: 64, extra_topk: MOST }, "extra_topk", "keys"),
        (|a| (a.batch_invariant, a.max_seq_len, a.batch) = (true, None, MOST), "batch", "items"),
    ];
    for (bend, argument, says) in cases {
        let mut args = right();
        bend(&mut args);
        let expected = Expected {
            argument,
            unsupported: false,
            says,
        };
        assert_refused(says, workspace_bytes(&args).map(drop), &expected);
    }
}

#[test]
fn plan_memory() {
    let (lens, mut workspace) = memory();
    let bytes = workspace_bytes(&right()).unwrap() as i64;
    workspace.reshape(&[bytes - 1]);
    let expected = Expected {
        argument: "workspace",
        unsupported: false,
        says: "at least",
    };
    assert_refused(
        "short",
        plan_of(&right(), &lens, &workspace).map(drop),
        &expected,
    );
    workspace.reshape(&[bytes]);
    let plan = plan_of(&right(), &lens, &workspace).unwrap();
    let least = PlanArgs {
        batch: 0,
        ..PlanArgs::new(Device::Cpu, 0, 1)
    };
    assert!(
        workspace_bytes(&least).unwrap() >= 1024,
        "loads of absent rows end in it"
    );

    let other = Array::zeros(DType::I32, &[3]);
    let expected = Expected {
        argument: "seq_lens",
        unsupported: false,
        says: "the batch of the plan",
    };
    // SAFETY: the arrays are live.
    assert_refused(
        "update",
        unsafe { plan.update(&other.view(), None, Stream::default()) },
        &expected,
    );
    let mut on_cuda = Array::zeros(DType::I32, &[2]);
    on_cuda.device = Device::Cuda(0);
    let expected = Expected {
        argument: "seq_lens",
        unsupported: false,
        says: "it is on cpu",
    };
    // SAFETY: the description lies about its device and must be refused.
    assert_refused(
        "device",
        unsafe { plan.update(&on_cuda.view(), None, Stream::default()) },
        &expected,
    );
}

const fn sparse(q_len: i64, extra_topk: i64) -> Queries {
    Queries::Sparse {
        q_len,
        topk: 70,
        extra_topk,
    }
}

fn sparse_plan_of(
    args: &PlanArgs,
    topk_lengths: Option<&Array>,
    extra: Option<&Array>,
    workspace: &Array,
) -> Result<Plan, Error> {
    let (main, extra) = (topk_lengths.map(Array::view), extra.map(Array::view));
    let (stream, workspace) = (Stream::default(), workspace.view());
    // SAFETY: the arrays are live, or refused before they are used.
    unsafe { Plan::new_sparse(args, main.as_ref(), extra.as_ref(), workspace, stream) }
}

#[test]
fn lengths_of_lists_are_held_to_the_shapes_of_the_lists() {
    let args = PlanArgs {
        queries: sparse(3, 128),
        ..right()
    };
    let workspace = Array::zeros(DType::U8, &[workspace_bytes(&args).unwrap() as i64]);
    let i32s = |shape: &[i64]| Array::zeros(DType::I32, shape);
    for right in [i32s(&[2]), i32s(&[2, 3])] {
        sparse_plan_of(&args, Some(&right), Some(&right), &workspace).unwrap();
        sparse_plan_of(&args, None, Some(&right), &workspace).unwrap();
    }
    sparse_plan_of(&args, None, None, &workspace).unwrap();
    let mut on_cuda = i32s(&[2]);
    on_cuda.device = Device::Cuda(0);
    for (wrong, says) in [
        (i32s(&[3]), "dimension 0 is 2, the batch"),
        (
            i32s(&[2, 2]),
            "dimension 1 is 3, the query tokens of a request",
        ),
        (i32s(&[2, 3, 1]), "[batch] or [batch, q_len]"),
        (Array::zeros(DType::I64, &[2]), "int32"),
        (on_cuda, "it is on cpu"),
    ] {
        for argument in ["topk_lengths", "extra_topk_lengths"] {
            let expected = Expected {
                argument,
                unsupported: false,
                says,
            };
            let (main, extra) = match argument {
                "topk_lengths" => (Some(&wrong), None),
                _ => (None, Some(&wrong)),
            };
            let result = sparse_plan_of(&args, main, extra, &workspace).map(drop);
            assert_refused(says, result, &expected);
        }
    }
}

#[test]
fn lengths_of_requests_and_of_lists_are_not_taken_for_each_other() {
    let (lens, workspace) = memory();
    let refused = |argument, result: Result<Plan, Error>| {
        let expected = Expected {
            argument,
            unsupported: false,
            says: "a plan for queries with indices takes topk_lengths",
        };
        assert_refused(argument, result.map(drop), &expected);
    };
    refused(
        "plan",
        sparse_plan_of(&right(), Some(&lens), None, &workspace),
    );
    let args = PlanArgs {
        queries: sparse(1, 0),
        ..right()
    };
    refused("seq_lens", plan_of(&args, &lens, &workspace));
}

#[test]
fn a_plan_made_for_another_call_is_refused_by_name() {
    type Bend = fn(&mut PlanArgs);
    #[rustfmt::skip]
    let cases: &[(Bend, &str)] = &[
        (|a| a.queries = Queries::Uniform { q_len: 2 }, "made for q_len 2: this call has q_len 3"),
        (|a| a.queries = Queries::Ragged { num_tokens: 6 }, "made for queries with a qo_indptr (prefill)"),
        (|a| a.queries = sparse(3, 0), "made for queries with indices (sparse_decode): this call has queries of one q_len"),
        (|a| a.num_heads = 16, "made for num_heads 16: this call has num_heads 8"),
        (|a| a.num_kv_heads = 2, "made for num_kv_heads 2: this call has num_kv_heads 1"),
        (|a| a.page_size = 64, "made for page_size 64: this call has page_size 16"),
        (|a| a.causal = false, "made for causal false: this call has causal true"),
        (|a| a.kv_format = Some(KvFormat::Fp16), "made for kv_format fp16: this call has kv_format bf16"),
        (|a| a.kv_format = Some(KvFormat::Fp8V32), "made for kv_format fp8_v32"),
    ];
    let (lens, workspace) = memory();
    let indptr = Array::zeros(DType::I32, &[3]);
    for (bend, says) in cases {
        let mut plan_args = right();
        bend(&mut plan_args);
        let plan = match plan_args.queries {
            Queries::Uniform { .. } => plan_of(&plan_args, &lens, &workspace).unwrap(),
            Queries::Ragged { .. } => {
                ragged_plan_of(&plan_args, &lens, Some(&indptr), &workspace).unwrap()
            }
            Queries::Sparse { .. } | Queries::SparsePrefill { .. } => {
                sparse_plan_of(&plan_args, Some(&lens), None, &workspace).unwrap()
            }
        };
        let expected = Expected {
            argument: "plan",
            unsupported: false,
            says,
        };
        assert_refused(says, with_plan(&plan, 2, |_| ()), &expected);
    }
    let plan = plan_of(&right(), &lens, &workspace).unwrap();
    with_plan(&plan, 2, |_| ()).unwrap();
    let says = "made for batch 2: this call has batch 1";
    let expected = Expected {
        argument: "plan",
        unsupported: false,
        says,
    };
    assert_refused(says, with_plan(&plan, 1, |_| ()), &expected);

    let expected = Expected {
        argument: "num_splits",
        unsupported: false,
        says: "the plan was made with",
    };
    assert_refused(
        "num_splits",
        with_plan(&plan, 2, |args| args.num_splits = Some(2)),
        &expected,
    );
    let expected = Expected {
        argument: "batch_invariant",
        unsupported: false,
        says: "made without",
    };
    assert_refused(
        "invariant",
        with_plan(&plan, 2, |args| args.batch_invariant = true),
        &expected,
    );
}

/// Decodes zeros with this plan.
fn with_plan(plan: &Plan, batch: i64, bend: fn(&mut DecodeArgs<'_>)) -> Result<(), Error> {
    let q = Array::zeros(DType::Bf16, &[batch, 3, 8, 576]);
    let cache = Array::zeros(DType::Bf16, &[4, 16, 576]);
    let (table, lens) = (
        Array::zeros(DType::I32, &[batch, 5]),
        Array::zeros(DType::I32, &[batch]),
    );
    let (out, lse) = (
        Array::zeros(DType::Bf16, &[batch, 3, 8, 512]),
        Array::zeros(DType::F32, &[batch, 3, 8]),
    );
    let mut args = DecodeArgs {
        plan: Some(plan),
        ..DecodeArgs::new(
            q.view().into(),
            cache.view().into(),
            table.view(),
            lens.view(),
            out.view(),
            lse.view(),
        )
    };
    bend(&mut args);
    // SAFETY: the arrays are live.
    unsafe { decode(&args) }
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let args = PlanArgs {
        device: Device::Cuda(63),
        ..right()
    };
    let error = workspace_bytes(&args).unwrap_err();
    assert!(
        matches!(error, Error::Cuda { .. } | Error::Unsupported { .. }),
        "{error:?}"
    );
    let args = PlanArgs {
        device: Device::Cuda(64),
        ..right()
    };
    assert!(workspace_bytes(&args).is_err());
}

/// What another plan has left in a workspace is not gone by: its items may name rows and requests that this one does
/// not have.
#[test]
fn a_workspace_is_of_one_plan() {
    let (q, cache) = (
        Array::zeros(DType::Bf16, &[2, 3, 8, 576]),
        Array::zeros(DType::Bf16, &[4, 16, 576]),
    );
    let (table, (lens, workspace)) = (Array::zeros(DType::I32, &[2, 5]), memory());
    let (out, lse) = (
        Array::zeros(DType::Bf16, &[2, 3, 8, 512]),
        Array::zeros(DType::F32, &[2, 3, 8]),
    );
    let plan = plan_of(&right(), &lens, &workspace).unwrap();
    let call = || {
        let mut args = DecodeArgs::new(
            q.view().into(),
            cache.view().into(),
            table.view(),
            lens.view(),
            out.view(),
            lse.view(),
        );
        args.plan = Some(&plan);
        // SAFETY: the arrays are live.
        unsafe { decode(&args) }
    };
    call().unwrap();
    let others = [
        PlanArgs {
            queries: Queries::Uniform { q_len: 16 },
            ..right()
        },
        PlanArgs {
            batch: 1,
            queries: Queries::Ragged { num_tokens: 16 },
            ..right()
        },
        PlanArgs {
            batch: 1,
            num_heads: 64,
            ..right()
        },
    ];
    for args in others {
        let lens = Array::zeros(DType::I32, &[args.batch]);
        let indptr = Array::zeros(DType::I32, &[args.batch + 1]);
        // SAFETY: the arrays have these elements.
        unsafe {
            (lens.ptr as *mut i32).write(80);
            (indptr.ptr as *mut i32).add(args.batch as usize).write(16);
        }
        let ragged = matches!(args.queries, Queries::Ragged { .. });
        let indptr = ragged.then_some(&indptr);
        ragged_plan_of(&args, &lens, indptr, &workspace).unwrap();
        let result = call();
        assert!(
            matches!(
                &result,
                Err(Error::InvalidArgument {
                    argument: "plan",
                    ..
                })
            ),
            "{args:?}: {result:?}"
        );
    }
    // SAFETY: the lengths outlive the call.
    unsafe { plan.update(&lens.view(), None, Stream::default()) }.unwrap();
    call().unwrap();
}
