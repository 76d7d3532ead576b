//! `FERROMLA_CHECK=1`: the first value out of range is an error, by array and place. Without it such values are
//! absent tokens, as every other test takes them. The variable is read once, so this is a process of its own.

mod support;

use ferromla::{
    AppendArgs, CombineArgs, DType, DecodeArgs, Error, ExtraKeys, GatherArgs, GatherSource, Plan,
    PlanArgs, PrefillArgs, Queries, SparseDecodeArgs, SparsePrefillArgs, Stream, ToPhysicalArgs,
    WindowArgs, append_kv, combine_topk_window, decode, gather_kv, prefill, sparse_decode,
    sparse_prefill, to_physical, window_token_ids,
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
    let expected = says("extra_topk_lengths", "5 at [1]: between 0 and 4");
    assert_refused("plan", plan.map(drop), &expected);
}

/// Lists of tokens without requests, by places in the arrays that were given.
fn lists_of_a_prefill_are_checked() {
    let prefill = |indices: [i32; 4], lens: [i32; 2]| {
        let (q, kv) = (
            Array::zeros(DType::Bf16, &[2, 1, 576]),
            Array::zeros(DType::Bf16, &[9, 576]),
        );
        let (indices, lens) = (
            of(DType::I32, &[2, 2], &indices),
            of(DType::I32, &[2], &lens),
        );
        let (out, rows) = (
            Array::zeros(DType::Bf16, &[2, 1, 512]),
            [DType::F32; 2].map(|dtype| Array::zeros(dtype, &[2, 1])),
        );
        let workspace = Array::workspace();
        let mut args = SparsePrefillArgs::new(
            q.view().into(),
            kv.view().into(),
            indices.view(),
            out.view(),
            rows[0].view(),
            rows[1].view(),
        );
        args.topk_lengths = Some(lens.view());
        args.workspace = Some(workspace.view());
        // SAFETY: the arrays are live.
        unsafe { sparse_prefill(&args) }
    };
    prefill([0, 8, -1, 9], [2, 1]).unwrap();
    let rule = "9 at [1, 0]: below 9";
    assert_refused(rule, prefill([0, 8, 9, 0], [2, 1]), &says("indices", rule));
    let rule = "3 at [1]: between 0 and 2";
    assert_refused(rule, prefill([0; 4], [2, 3]), &says("topk_lengths", rule));
}

fn positions_and_windows_are_checked() {
    let table = of(DType::I32, &[2, 2], &[3, -1, 1, 0]);
    let physical = |indices: [i64; 4]| {
        let (indices, out) = (
            of(DType::I64, &[2, 2], &indices),
            Array::zeros(DType::I32, &[2, 2]),
        );
        let args = ToPhysicalArgs {
            indices: indices.view(),
            block_table: table.view(),
            page_size: 16,
            out: out.view(),
            stream: Stream::default(),
        };
        // SAFETY: the arrays are live.
        unsafe { to_physical(&args) }
    };
    physical([15, -1, -100, 31]).unwrap();
    for (indices, argument, rule) in [
        ([0, 0, 32, 0], "indices", "32 at [1, 0]: below 32"),
        ([16, 0, 0, 0], "block_table", "-1 at [0, 1]: at least 0"),
    ] {
        assert_refused(rule, physical(indices), &says(argument, rule));
    }

    let window = |lens: [i32; 2], queries: [i32; 2]| {
        let (lens, queries) = (of(DType::I32, &[2], &lens), of(DType::I32, &[2], &queries));
        let (out, offsets) = (
            Array::zeros(DType::I32, &[8]),
            Array::zeros(DType::I64, &[3]),
        );
        let first = Array::zeros(DType::I32, &[2]);
        let args = WindowArgs {
            seq_lens: lens.view(),
            query_lens: queries.view(),
            block_table: table.view(),
            page_size: 16,
            window: 2,
            out: out.view(),
            offsets: offsets.view(),
            first_pos: first.view(),
            stream: Stream::default(),
        };
        // SAFETY: the arrays are live.
        unsafe { window_token_ids(&args) }
    };
    window([16, 32], [1, 0]).unwrap();
    for (lens, queries, argument, rule) in [
        ([0, 33], [0, 0], "seq_lens", "33 at [1]: between 0 and 32"),
        ([4, 4], [4, 5], "query_lens", "5 at [1]: between 0 and 4"),
        ([17, 4], [1, 1], "block_table", "-1 at [0, 1]: at least 0"),
    ] {
        assert_refused(rule, window(lens, queries), &says(argument, rule));
    }

    let combine = |requests: [i32; 2]| {
        let (topk, requests) = (
            Array::zeros(DType::I32, &[2, 1]),
            of(DType::I32, &[2], &requests),
        );
        let of_tokens = [DType::I32; 2].map(|dtype| Array::zeros(dtype, &[2]));
        let of_requests = [DType::I32; 3].map(|dtype| Array::zeros(dtype, &[3]));
        let out = Array::zeros(DType::I32, &[2, 4]);
        let args = CombineArgs {
            topk_indices: topk.view(),
            positions: of_tokens[0].view(),
            request_ids: requests.view(),
            ratio: 4,
            window: 3,
            compressed_base: of_requests[0].view(),
            window_base: of_requests[1].view(),
            first_pos: of_requests[2].view(),
            out: out.view(),
            lengths: of_tokens[1].view(),
            stream: Stream::default(),
        };
        // SAFETY: the arrays are live.
        unsafe { combine_topk_window(&args) }
    };
    combine([-1, 2]).unwrap();
    assert_refused(
        "request",
        combine([0, 3]),
        &says("request_ids", "3 at [1]: below 3"),
    );
}

/// A plan that was made for other lengths, or other query tokens, than those of the call.
fn stale_plans_are_refused() {
    let (plan_memory, workspace) = (Array::workspace(), Array::workspace());
    let args = PlanArgs {
        queries: Queries::Ragged { num_tokens: 3 },
        page_size: 16,
        ..PlanArgs::new(ferromla::Device::Cpu, 2, 1)
    };
    let made = (
        of(DType::I32, &[2], &[5, 17]),
        of(DType::I32, &[3], &[0, 2, 3]),
    );
    // SAFETY: the arrays outlive the plan.
    let plan = unsafe {
        let (lens, indptr) = (made.0.view(), made.1.view());
        Plan::new(
            &args,
            &lens,
            Some(&indptr),
            plan_memory.view(),
            Stream::default(),
        )
        .unwrap()
    };
    let prefill = |lens: [i32; 2], qo_indptr: [i32; 3]| {
        let q = Array::zeros(DType::Bf16, &[3, 1, 576]);
        let cache = Array::zeros(DType::Bf16, &[4, 16, 576]);
        let table = Array::zeros(DType::I32, &[2, 2]);
        let (lens, indptr) = (
            of(DType::I32, &[2], &lens),
            of(DType::I32, &[3], &qo_indptr),
        );
        let (out, lse) = (
            Array::zeros(DType::Bf16, &[3, 1, 512]),
            Array::zeros(DType::F32, &[3, 1]),
        );
        let mut args = PrefillArgs::new(
            q.view().into(),
            cache.view().into(),
            table.view(),
            lens.view(),
            indptr.view(),
            out.view(),
            lse.view(),
        );
        args.plan = Some(&plan);
        args.workspace = Some(workspace.view());
        // SAFETY: the arrays are live.
        unsafe { prefill(&args) }
    };
    prefill([5, 17], [0, 2, 3]).unwrap();
    for (lens, indptr, rule) in [
        (
            [5, 18],
            [0, 2, 3],
            "made for seq_lens[1] = 17: 18, as in this call",
        ),
        (
            [5, 17],
            [0, 1, 3],
            "made for qo_indptr[1] = 2: 1, as in this call",
        ),
    ] {
        assert_refused(rule, prefill(lens, indptr), &says("plan", rule));
    }
}

/// A plan for lists that had other lengths, of either cache.
fn stale_plans_for_lists_are_refused() {
    let (plan_memory, workspace) = (Array::workspace(), Array::workspace());
    let args = PlanArgs {
        queries: Queries::Sparse {
            q_len: 2,
            topk: 80,
            extra_topk: 3,
        },
        ..PlanArgs::new(ferromla::Device::Cpu, 2, 1)
    };
    let arrays = |lens: [[i32; 4]; 2]| lens.map(|lens| of(DType::I32, &[2, 2], &lens));
    let made = arrays([[80, 64, 0, 5], [0, 3, 2, 1]]);
    // SAFETY: the arrays outlive the plan.
    let plan = unsafe {
        Plan::new_sparse(
            &args,
            Some(&made[0].view()),
            Some(&made[1].view()),
            plan_memory.view(),
            Stream::default(),
        )
        .unwrap()
    };
    let sparse = |lens: [[i32; 4]; 2]| {
        let q = Array::zeros(DType::Bf16, &[2, 2, 1, 576]);
        let cache = Array::zeros(DType::Bf16, &[4, 16, 576]);
        let indices = [80, 3].map(|topk| Array::zeros(DType::I32, &[2, 2, topk]));
        let (out, lse) = (
            Array::zeros(DType::Bf16, &[2, 2, 1, 512]),
            Array::zeros(DType::F32, &[2, 2, 1]),
        );
        let lens = arrays(lens);
        let mut args = SparseDecodeArgs::new(
            q.view().into(),
            cache.view().into(),
            indices[0].view(),
            out.view(),
            lse.view(),
        );
        args.topk_lengths = Some(lens[0].view());
        args.extra = Some(ExtraKeys {
            kv_cache: cache.view().into(),
            indices: indices[1].view(),
            topk_lengths: Some(lens[1].view()),
            kv_format: None,
        });
        args.plan = Some(&plan);
        args.workspace = Some(workspace.view());
        // SAFETY: the arrays are live.
        unsafe { sparse_decode(&args) }
    };
    sparse([[80, 64, 0, 5], [0, 3, 2, 1]]).unwrap();
    for (lens, rule) in [
        (
            [[80, 65, 0, 5], [0, 3, 2, 1]],
            "made for topk_lengths[0, 1] = 64: 65, as in this call",
        ),
        (
            [[80, 64, 0, 5], [1, 3, 2, 1]],
            "made for extra_topk_lengths[0, 0] = 0: 1, as in this call",
        ),
        (
            [[80, 64, 0, 5], [0, 3, 0, 1]],
            "made for extra_topk_lengths[1, 0] = 2: 0, as in this call",
        ),
    ] {
        assert_refused(rule, sparse(lens), &says("plan", rule));
    }
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
    lists_of_a_prefill_are_checked();
    positions_and_windows_are_checked();
    stale_plans_are_refused();
    stale_plans_for_lists_are_refused();

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
