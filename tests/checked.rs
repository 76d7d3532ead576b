//! `FERROMLA_CHECK=1`: the first value out of range is an error, by array and place. Without it such values are
//! absent tokens, as every other test takes them. The variable is read once, so this is a process of its own.

mod support;

use ferromla::{
    AppendArgs, DType, DecodeArgs, Error, ExtraKeys, GatherArgs, GatherSource, Plan, PlanArgs,
    PrefillArgs, Queries, SparseDecodeArgs, Stream, append_kv, decode, gather_kv, prefill,
    sparse_decode,
};
use support::{Array, Expected, assert_refused};

fn says(argument: &'static str, says: &'static str) -> Expected {
    Expected {
        argument,
        unsupported: false,
        says,
    }
}

fn of<T: Copy>(dtype: DType, shape: &[i64], values: &[T]) -> Array {
    let array = Array::zeros(dtype, shape);
    assert_eq!(size_of::<T>() as u64, dtype.size());
    // SAFETY: the array has these elements.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), array.ptr as *mut T, values.len()) };
    array
}

/// Two requests over 4 pages of 16 tokens.
fn decode_with(table: [i32; 4], lens: [i32; 2]) -> Result<(), Error> {
    let q = Array::zeros(DType::Bf16, &[2, 1, 1, 576]);
    let cache = Array::zeros(DType::Bf16, &[4, 16, 576]);
    let (table, lens) = (of(DType::I32, &[2, 2], &table), of(DType::I32, &[2], &lens));
    let (out, lse) = (
        Array::zeros(DType::Bf16, &[2, 1, 1, 512]),
        Array::zeros(DType::F32, &[2, 1, 1]),
    );
    let workspace = Array::workspace();
    let mut args = DecodeArgs::new(
        q.view().into(),
        cache.view().into(),
        table.view(),
        lens.view(),
        out.view(),
        lse.view(),
    );
    args.workspace = Some(workspace.view());
    // SAFETY: the arrays are live.
    unsafe { decode(&args) }
}

/// Three requests of no cached token, and 7 query tokens.
fn prefill_with(qo_indptr: [i32; 4]) -> Result<(), Error> {
    let q = Array::zeros(DType::Bf16, &[7, 1, 576]);
    let cache = Array::zeros(DType::Bf16, &[4, 16, 576]);
    let (table, lens) = (
        Array::zeros(DType::I32, &[3, 2]),
        Array::zeros(DType::I32, &[3]),
    );
    let qo_indptr = of(DType::I32, &[4], &qo_indptr);
    let (out, lse) = (
        Array::zeros(DType::Bf16, &[7, 1, 512]),
        Array::zeros(DType::F32, &[7, 1]),
    );
    let workspace = Array::workspace();
    let mut args = PrefillArgs::new(
        q.view().into(),
        cache.view().into(),
        table.view(),
        lens.view(),
        qo_indptr.view(),
        out.view(),
        lse.view(),
    );
    args.workspace = Some(workspace.view());
    // SAFETY: the arrays are live.
    unsafe { prefill(&args) }
}

fn qo_indptr_is_checked() {
    prefill_with([0, 3, 3, 7]).unwrap();
    prefill_with([0, 3, 3, 6]).unwrap(); // and a token of padding
    for (qo_indptr, rule) in [
        ([1, 3, 3, 7], "1 at [0]: it begins at 0"),
        ([0, 3, 2, 7], "2 at [2]: it never falls, and was 3"),
        ([0, 3, 3, 8], "8 at [3]: it ends at 7"),
    ] {
        assert_refused(rule, prefill_with(qo_indptr), &says("qo_indptr", rule));
    }
}

/// Two query tokens with lists of three keys over 64 tokens, and of two over 6.
fn sparse_with(indices: [i32; 6], lens: [i32; 2], extra: [i32; 4]) -> Result<(), Error> {
    let q = Array::zeros(DType::Bf16, &[1, 2, 1, 576]);
    let cache = Array::zeros(DType::Bf16, &[4, 16, 576]);
    let extra_cache = Array::zeros(DType::Bf16, &[6, 1, 576]);
    let (indices, lens) = (
        of(DType::I32, &[1, 2, 3], &indices),
        of(DType::I32, &[1, 2], &lens),
    );
    let extra = of(DType::I32, &[1, 2, 2], &extra);
    let (out, lse) = (
        Array::zeros(DType::Bf16, &[1, 2, 1, 512]),
        Array::zeros(DType::F32, &[1, 2, 1]),
    );
    let workspace = Array::workspace();
    let mut args = SparseDecodeArgs::new(
        q.view().into(),
        cache.view().into(),
        indices.view(),
        out.view(),
        lse.view(),
    );
    args.topk_lengths = Some(lens.view());
    args.extra = Some(ExtraKeys {
        kv_cache: extra_cache.view().into(),
        indices: extra.view(),
        topk_lengths: None,
        kv_format: None,
    });
    args.workspace = Some(workspace.view());
    // SAFETY: the arrays are live.
    unsafe { sparse_decode(&args) }
}

fn lists_are_checked() {
    // What is negative, or behind the length of its list, is no offender.
    sparse_with([0, 63, 64, -1, 5, -7], [2, 3], [5, -1, 0, 0]).unwrap();
    for (result, argument, rule) in [
        (
            sparse_with([0, 0, 0, 0, 64, 0], [3, 2], [0; 4]),
            "indices",
            "64 at [0, 1, 1]: below 64",
        ),
        (
            sparse_with([0; 6], [3, 4], [0; 4]),
            "topk_lengths",
            "4 at [0, 1]: between 0 and 3",
        ),
        (
            sparse_with([0; 6], [-1, 3], [0; 4]),
            "topk_lengths",
            "-1 at [0, 0]: between 0 and 3",
        ),
        (
            sparse_with([0; 6], [3, 3], [0, 0, 6, 0]),
            "extra_indices",
            "6 at [0, 1, 0]: below 6",
        ),
    ] {
        assert_refused(rule, result, &says(argument, rule));
    }
    let args = PlanArgs {
        queries: Queries::Sparse {
            q_len: 1,
            topk: 8,
            extra_topk: 4,
        },
        ..PlanArgs::new(ferromla::Device::Cpu, 2, 1)
    };
    let lens = of(DType::I32, &[2], &[1, 5]);
    let workspace = Array::workspace();
    // SAFETY: the workspace outlives the plan; the lengths are refused after they are read.
    let plan = unsafe {
        Plan::new_sparse(
            &args,
            None,
            Some(&lens.view()),
            workspace.view(),
            Stream::default(),
        )
    };
    let expected = says("extra_topk_lengths", "5 at [1, 0]: between 0 and 4");
    assert_refused("plan", plan.map(drop), &expected);
}

#[test]
fn the_first_offender_is_named() {
    // SAFETY: this binary has one test, and no other thread of it reads the environment.
    unsafe { std::env::set_var("FERROMLA_CHECK", "1") };

    decode_with([3, 2_147_480_000, 0, 1], [16, 32]).unwrap();
    assert_refused(
        "page",
        decode_with([3, 0, 0, 4], [1, 17]),
        &says("block_table", "4 at [1, 1]"),
    );
    assert_refused(
        "page",
        decode_with([-1, 0, 0, 0], [1, 1]),
        &says("block_table", "-1 at [0, 0]"),
    );
    assert_refused(
        "long",
        decode_with([0; 4], [32, 33]),
        &says("seq_lens", "33 at [1]: between 0 and 32"),
    );
    assert_refused(
        "negative",
        decode_with([0; 4], [-1, 0]),
        &says("seq_lens", "-1 at [0]"),
    );

    qo_indptr_is_checked();
    lists_are_checked();

    let args = PlanArgs {
        max_seq_len: Some(32),
        ..PlanArgs::new(ferromla::Device::Cpu, 2, 1)
    };
    let (lens, workspace) = (of(DType::I32, &[2], &[1, 40]), Array::workspace());
    // SAFETY: the arrays outlive the plan.
    let plan = unsafe {
        Plan::new(
            &args,
            &lens.view(),
            None,
            workspace.view(),
            Stream::default(),
        )
    };
    assert_refused("plan", plan.map(drop), &says("seq_lens", "40 at [1]"));

    let cache = Array::zeros(DType::Bf16, &[4, 16, 576]);
    let (kv_c, k_pe) = (
        Array::zeros(DType::Bf16, &[2, 512]),
        Array::zeros(DType::Bf16, &[2, 64]),
    );
    let append = |slots: [i64; 2]| {
        let slots = of(DType::I64, &[2], &slots);
        let (cache, k_pe) = (cache.view().into(), Some(k_pe.view()));
        let args = AppendArgs::new(kv_c.view(), k_pe, cache, slots.view());
        // SAFETY: the arrays are live.
        unsafe { append_kv(&args) }
    };
    append([-1, 63]).unwrap();
    assert_refused(
        "slot",
        append([0, 64]),
        &says("slots", "64 at [1]: below 64"),
    );

    let out = Array::zeros(DType::Bf16, &[2, 576]);
    for ids in [
        of(DType::I32, &[2], &[64i32, 0]),
        of(DType::I64, &[2], &[1i64 << 40, 0]),
    ] {
        let source = GatherSource::Ids(ids.view());
        let args = GatherArgs::new(cache.view().into(), source, out.view());
        // SAFETY: the arrays are live.
        assert_refused(
            "id",
            unsafe { gather_kv(&args) },
            &says("ids", "at [0]: below 64"),
        );
    }
}
