"""What prefill does that decode does not, and that both agree, on both backends."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import ferromla
import problems
import reference
import tolerance

LENS = [300, 5, 64, 0, 130, 520, 7]
Q_LENS = [4, 9, 1, 2, 0, 40, 7]  # more than cached (the second and fourth), none (the fifth), all (the last)


def _mixed(device, **options):
    return problems.make(lens=LENS, q_lens=Q_LENS, **{"h": 16} | options, device=device)


def _plan(problem, **options):
    cache = problem.cache if isinstance(problem.cache, torch.Tensor) else problem.cache[0]
    shapes = {
        "num_heads": problem.q.shape[1],
        "num_kv_heads": cache.shape[2] if cache.ndim == 4 else 1,
        "page_size": cache.shape[1],
        "qo_indptr": problem.indptr,
        "num_tokens": problem.q.shape[0],
    }
    return ferromla.Plan(problem.lens, **shapes | options)


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"batch_invariant": True}, {"causal": False}])
@pytest.mark.parametrize(("h", "h_kv"), [(16, 1), (128, 1), (9, 3)])
def test_mixed_lengths(device, h, h_kv, options):
    out, lse = _mixed(device, h=h, h_kv=h_kv, **options).check()
    if "causal" not in options:
        assert bool(torch.isneginf(lse[4:8]).all()), "the first queries of the second request see no key"
        assert bool((out[4:8] == 0).all())
    assert bool(torch.isneginf(lse[14:16]).all()), "the fourth request has no key at all"


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("h", [3, 16, 128])
@pytest.mark.parametrize("options", [{}, {"num_splits": 4}, {"batch_invariant": True}])
def test_equal_lengths_give_the_bits_of_decode(s_q, h, options):
    """On the CPU both have the same plan. (On a GPU the choice of rows per CTA may differ.)"""
    uniform = problems.make(h=h, s_q=s_q, lens=LENS, **options)
    indptr = problems.offsets([s_q] * len(LENS))
    ragged = dataclasses.replace(uniform, q=uniform.q.flatten(0, 1), indptr=indptr)
    out, lse = uniform.check()
    got_out, got_lse = ragged.check()
    assert torch.equal(got_out, out.flatten(0, 1))
    assert torch.equal(got_lse, lse.flatten(0, 1))


def test_equal_lengths_are_decode(device):
    problem = problems.make(b=5, s_q=2, h=16, seq=500, device=device)
    indptr = problems.offsets([2] * 5).to(device)
    dataclasses.replace(problem, q=problem.q.flatten(0, 1), indptr=indptr).check()


@pytest.mark.parametrize(("h", "chunk", "context"), [(1, 1000, 700), (16, 130, 300), (2, 513, 0)])
def test_a_long_chunk_over_a_prefix(device, h, chunk, context):
    problems.make(h=h, lens=[context + chunk, 50], q_lens=[chunk, 1], device=device).check()


def test_many_requests_of_one_token_and_of_none(device):
    q_lens = [1, 0, 1, 1, 0, 0, 2, 1] * 100
    lens = [(37 * r) % 190 for r in range(len(q_lens))]
    problems.make(h=4, lens=lens, q_lens=q_lens, page_size=16, device=device).check()


@pytest.mark.gpu
@pytest.mark.parametrize(("h", "lens", "q_lens"), [(16, [20_480], [4096]), (128, [6000, 3000], [2048, 700])])
def test_chunked_prefill(cuda, h, lens, q_lens):
    """Thousands of query tokens, a sample of whose rows is checked."""
    problem = problems.make(h=h, lens=lens, q_lens=q_lens, device=cuda)
    out, lse = problem.run()
    assert not bool(torch.isnan(out).any())
    ends = problem.indptr.tolist()
    for request, (begin, length) in enumerate(zip(ends, lens, strict=False)):
        count = q_lens[request]
        for token in sorted({0, 1, 63, count // 2, count - 1}):
            seen = torch.tensor([length - count + token + 1], device=cuda)
            keys = problem.keys[request : request + 1]
            present = torch.arange(keys.shape[1], device=cuda)[None] < seen
            q = problem.q[begin + token][None, None]
            want = reference.attention(q, keys, present, seen)
            tolerance.check(out[begin + token][None, None], lse[begin + token][None, None], *want)


# With 16-bit caches and many blocks of 64 rows to each request, teams of four CTAs: one chunk; chunks whose last
# teams have one to three blocks; a short one and a decode beside a long one; chunks of uneven lengths, which are cut.
CHUNKS = [
    [(400, 70)],
    [(300, 45), (45, 45), (257, 46)],
    [(500, 196), (200, 1), (3, 2), (0, 0)],
    [(1500, 40), (90, 44), (64, 64)],
]


@pytest.mark.gpu
@pytest.mark.parametrize("requests", CHUNKS, ids=[f"{len(requests)}x{requests[0][1]}" for requests in CHUNKS])
@pytest.mark.parametrize(("heads", "d_qk"), [(128, 576), (126, 512)])
@pytest.mark.parametrize("page_size", [64, 16, 1])
def test_chunks_of_many_blocks(cuda, requests, heads, d_qk, page_size):
    lens, q_lens = zip(*requests, strict=True)
    problem = problems.make(h=heads, d_qk=d_qk, lens=lens, q_lens=q_lens, page_size=page_size, device=cuda)
    problem.check_repeats(2)


def test_no_tokens_and_no_requests(device):
    out, lse = problems.make(h=16, lens=[], q_lens=[], device=device).check()
    assert (out.shape, lse.shape) == ((0, 16, 512), (0, 16))
    out, lse = problems.make(h=16, lens=[5, 9], q_lens=[0, 0], device=device).check()
    assert out.shape == (0, 16, 512)
    problem = problems.make(h=16, lens=[0, 0], q_lens=[3, 1], device=device)
    problem.cache, problem.table = problem.cache[:0], problem.table[:, :0]
    out, lse = problem.run()
    assert bool((out == 0).all())
    assert bool(torch.isneginf(lse).all())


def test_tokens_of_no_request_see_no_key(device):
    """In outputs that the call makes; of those that it is given they are left alone."""
    problem = problems.make(h=16, lens=[], q_lens=[], device=device)
    q = problems.random_queries(3, 16, 576, device=device).to(problem.q)
    for empty_lse, want in ((None, float("-inf")), (5.0, 5.0)):
        out, lse = ferromla.prefill(q, problem.cache, problem.table, problem.lens, problem.indptr, empty_lse=empty_lse)
        assert bool((out == 0).all())
        assert bool((lse == want).all())


@pytest.mark.parametrize("batch", [3, 0])
def test_rows_of_nobody_are_left_alone(device, batch):
    """Query tokens before the first request's, and after the last one's: a padded batch."""
    lens, q_lens = [300, 64, 9][:batch], [5, 0, 2][:batch]
    problem = problems.make(h=16, lens=lens, q_lens=q_lens, device=device)
    used = slice(3, 3 + sum(q_lens))
    q = problems.random_queries(used.stop + 11, 16, 576, generator=torch.Generator().manual_seed(1))
    q = q.to(problem.q)
    q[used] = problem.q
    problem = dataclasses.replace(problem, q=q, indptr=problem.indptr + 3)
    out, lse = problems.poisoned_outputs(q)
    problem.run(out=out, lse=lse)
    want_out, want_lse = problem.expected()
    tolerance.check(out[used], lse[used], want_out[used], want_lse[used])
    out[used], lse[used] = problems.NAN, problems.NAN
    assert bool(torch.isnan(out).all())
    assert bool(torch.isnan(lse).all())
    problem.run(out=out, lse=lse, plan=_plan(problem))
    tolerance.check(out[used], lse[used], want_out[used], want_lse[used])


INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@pytest.mark.parametrize(
    "indptr",
    [
        [0, 5, 3, 20],
        [20, 10, 5, 0],
        [INT_MIN, INT_MAX, INT_MIN, INT_MAX],
        [INT_MAX, INT_MIN, INT_MAX, INT_MIN],
        [-3, 7, 400, 9],
    ],
)
@pytest.mark.parametrize("options", [{}, {"num_splits": 2}, {"batch_invariant": True}])
def test_any_qo_indptr_stays_inside_the_tensors(device, indptr, options):
    """And every row that is written holds the attention of its query over some request's keys, none at all, or a
    causal part of them: finite numbers in any case."""
    problem = problems.make(h=16, lens=[300, 64, 129], q_lens=[7, 7, 6], device=device)
    problem.cache.nan_to_num_(0.5)
    problem.indptr.copy_(torch.tensor(indptr, dtype=torch.int32))
    out = torch.full((60, 16, 512), 7.0, dtype=problem.q.dtype, device=device)
    lse = torch.full((60, 16), 7.0, device=device)
    problem.run(out=out[20:40], lse=lse[20:40], **options)
    for whole in (out, lse):
        assert bool((whole[:20] == 7).all())
        assert bool((whole[40:] == 7).all())
    assert bool(torch.isfinite(out).all())
    assert not bool(torch.isnan(lse).any())


def test_a_prefix_and_a_suffix_make_the_whole(device):
    """Attention over pages 0-3 without a mask and over the rest with the causal one, merged."""
    q_lens, prefix = [70, 3, 1], 256
    problem = problems.make(h=16, lens=[448, 300, 257], q_lens=q_lens, device=device)
    parts = []
    for table, lens, causal in (
        (problem.table[:, :4], torch.full_like(problem.lens, prefix), False),
        (problem.table[:, 4:], problem.lens - prefix, True),
    ):
        part = dataclasses.replace(problem, table=table.contiguous(), lens=lens)
        parts += part.run(causal=causal)
    tolerance.check(*ferromla.merge_states(*parts), *problem.expected())


@pytest.mark.parametrize("num_splits", [None, 3])
def test_attention_sink(device, num_splits):
    sink = torch.randn(16, generator=torch.Generator().manual_seed(1)) * 5
    sink[:2] = torch.tensor([torch.inf, -torch.inf])
    _mixed(device, attn_sink=sink.to(device), num_splits=num_splits, softmax_scale=0.03).check()


@pytest.mark.parametrize("num_splits", [1, 2, 1000, 2**40])
def test_any_number_of_splits(device, num_splits):
    _mixed(device).check(num_splits=num_splits)


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("page_size", [64, 61, 1])
def test_two_part_inputs(device, d_qk, page_size):
    problem = _mixed(device, page_size=page_size, d_qk=d_qk)
    want = problem.check()
    if d_qk == 512:
        return
    q, cache = problem.q, problem.cache
    problem.q = (q[..., :512].contiguous(), q[..., 512:].contiguous())
    problem.cache = (cache[..., :512].contiguous(), cache[..., 512:].contiguous())
    for got, same in zip(problem.run(), want, strict=True):
        assert torch.equal(got, same)


def _strided(shape, dtype, device, *, value):
    """A view with gaps along every dimension but the last, and the tensor it is in."""
    whole = torch.full((shape[0] * 2, shape[1] + 3, *(n + 64 for n in shape[2:])), value, dtype=dtype, device=device)
    return whole[(slice(None, None, 2), slice(1, shape[1] + 1), *map(slice, shape[2:]))], whole


def test_strided_inputs_and_outputs(device):
    problem = _mixed(device)
    want = problem.check()
    q, _ = _strided(problem.q.shape, problem.q.dtype, device, value=problems.NAN)
    q.copy_(problem.q)
    problem.q = q
    problem.indptr = torch.stack([problem.indptr, torch.full_like(problem.indptr, -7)], 1)[:, 0]
    t = problem.q.shape[0]
    out, whole_out = _strided((t, 16, 512), q.dtype, device, value=7.0)
    lse, whole_lse = _strided((t, 16), torch.float32, device, value=7.0)
    problem.run(out=out, lse=lse)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    out.fill_(7.0)
    lse.fill_(7.0)
    assert bool((whole_out == 7).all())
    assert bool((whole_lse == 7).all())
    heads_first = torch.full((16, t, 512), problems.NAN, dtype=q.dtype, device=device).transpose(0, 1)
    assert torch.equal(problem.run(out=heads_first)[0], want[0])


@pytest.mark.parametrize("h", [16, 128])
@pytest.mark.parametrize("num_splits", [None, 5])
def test_batch_invariance(device, h, num_splits):
    """Bit for bit the same under permutation, removal and addition of other requests."""
    problem = _mixed(device, h=h, batch_invariant=True, num_splits=num_splits)
    out, lse = problem.check()
    ends = problem.indptr.tolist()
    for order in ([6, 5, 4, 3, 2, 1, 0], [5], [1, 5], [5, 0, 5, 1, 2, 5, 3, 4, 6, 6] * 5):
        tokens = torch.cat([torch.arange(ends[r], ends[r + 1]) for r in order]).to(device)
        part = dataclasses.replace(
            problem,
            q=problem.q[tokens],
            table=problem.table[order].contiguous(),
            lens=problem.lens[order].contiguous(),
            indptr=problems.offsets([Q_LENS[r] for r in order]).to(device),
        )
        got_out, got_lse = part.run()
        assert torch.equal(got_out, out[tokens])
        assert torch.equal(got_lse, lse[tokens])


def test_the_same_call_gives_the_same_bits(device):
    problem = _mixed(device, h=64)
    first = [x.clone() for x in problem.run()]
    for _ in range(3):
        for got, want in zip(problem.run(), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("options", [{}, {"num_splits": 4}, {"batch_invariant": True}, {"causal": False}])
def test_a_plan_gives_the_result_of_a_call_without_one(device, options):
    problem = _mixed(device)
    plan = _plan(problem, max_seq_len=64 * problem.table.shape[1], **options)
    want = problem.check(**options)
    for _ in range(2):
        got = problem.check(plan=plan, causal=options.get("causal", True))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_update_plans_for_other_lengths_and_tokens(device):
    problem = _mixed(device)
    plan = _plan(problem)
    problem.check(plan=plan)
    tokens = sum(Q_LENS)
    for lens, q_lens in (([1, 2, 3, 4, 5, 6, 1000], [0, 0, 0, 0, 0, 0, tokens]), (LENS[::-1], Q_LENS[::-1])):
        problem = problems.make(h=16, lens=lens, q_lens=q_lens, device=device)
        plan.update(problem.lens, problem.indptr)
        problem.check(plan=plan)
    # The tensor given last is read again, with what it holds now.
    kept = problem.indptr
    problem = problems.make(h=16, lens=LENS, q_lens=Q_LENS[1:] + Q_LENS[:1], device=device)
    kept.copy_(problem.indptr)
    plan.update(problem.lens)
    problem.check(plan=plan)


def test_host_lengths_plan_for_the_device(device):
    problem = _mixed(device)
    lens, indptr = problem.lens.cpu(), problem.indptr.cpu()
    shapes = {"num_heads": 16, "page_size": 64, "device": device}
    plan = ferromla.Plan(lens, qo_indptr=indptr, **shapes)
    assert plan.num_tokens == sum(Q_LENS)
    problem.check(plan=plan)
    plan = ferromla.Plan(lens.numpy(), qo_indptr=indptr.numpy(), num_tokens=sum(Q_LENS), **shapes)
    problem.check(plan=plan)


@pytest.mark.parametrize("max_q_len", [1, 90, 2000])
@pytest.mark.parametrize("h", [32, 64])
def test_how_many_tokens_a_request_has_at_most_is_a_hint(device, h, max_q_len):
    """A chunk of 90 tokens beside 40 decodes: right where it is known, and where too few or too many are said."""
    q_lens = [1] * 20 + [90] + [1] * 20
    problem = problems.make(h=h, lens=[100 + 7 * n for n in range(len(q_lens))], q_lens=q_lens, device=device)
    plan = _plan(problem, kv_format="bf16", max_q_len=max_q_len)
    problem.check(plan=plan)
    shapes = {"batch": len(q_lens), "num_heads": h, "page_size": 64, "num_tokens": sum(q_lens), "device": device}
    assert plan.workspace.shape[0] == ferromla.workspace_bytes(**shapes, kv_format="bf16", max_q_len=max_q_len)
    bounded = _plan(problem, kv_format="bf16", max_q_len=max_q_len, max_seq_len=problem.table.shape[1] * 64)
    planned, unplanned = problem.run(plan=bounded, max_q_len=max_q_len), problem.check(max_q_len=max_q_len)
    assert all(torch.equal(a, b) for a, b in zip(planned, unplanned, strict=True))
    with pytest.raises(ferromla.InvalidArgument, match="max_q_len is 3 with a plan: None, or"):
        problem.run(plan=plan, max_q_len=3)


@pytest.mark.gpu
@pytest.mark.parametrize("h", [32, 64])
def test_a_chunk_among_decodes_that_is_known_has_another_layout(cuda, h):
    def plan_bytes(max_q_len):
        q_lens = torch.tensor([0] + [1] * 35 + [150] + [1] * 35)
        lens = torch.full((71,), 4096, dtype=torch.int32, device=cuda)
        indptr = q_lens.cumsum(0).int().to(cuda)
        shapes = {"num_heads": h, "page_size": 64, "qo_indptr": indptr, "num_tokens": 220, "kv_format": "bf16"}
        return ferromla.Plan(lens, **shapes, max_q_len=max_q_len).plan_bytes

    pairs, single = plan_bytes(None), plan_bytes(150)
    assert pairs < single, "single CTAs have twice as many units"
    assert (plan_bytes(1), plan_bytes(2000)) == (pairs, single)


def test_a_plan_tells_what_it_is_for():
    plan = _plan(_mixed("cpu"))
    assert (plan.batch, plan.q_len, plan.num_tokens) == (len(LENS), None, sum(Q_LENS))
    assert f"num_tokens={sum(Q_LENS)}" in repr(plan)
    assert ferromla.Plan(torch.tensor([5]).int(), num_heads=16, page_size=64).num_tokens is None


MISMATCHES = {
    "num_tokens": {"num_tokens": sum(Q_LENS) + 1},
    "queries": {"qo_indptr": None, "num_tokens": None},
    "num_heads": {"num_heads": 17},
    "page_size": {"page_size": 32},
    "causal": {"causal": False},
}


@pytest.mark.parametrize("field", MISMATCHES)
def test_a_plan_for_other_shapes_is_refused_by_name(device, field):
    problem = _mixed(device)
    plan = _plan(problem, **MISMATCHES[field])
    out, lse = problems.poisoned_outputs(problem.q)
    with pytest.raises(ferromla.InvalidArgument, match=f"made for {field}") as caught:
        problem.run(plan=plan, out=out, lse=lse)
    assert caught.value.argument == "plan"
    assert bool(torch.isnan(out).all())


def test_a_plan_of_ragged_queries_is_none_for_decode(device):
    plan = _plan(_mixed(device))
    uniform = problems.make(h=16, lens=LENS, device=device)
    with pytest.raises(ferromla.InvalidArgument, match="made for queries with a qo_indptr") as caught:
        uniform.run(plan=plan)
    assert caught.value.argument == "plan"


def test_the_workspace_is_needed_to_the_byte(device):
    problem = _mixed(device)
    need = ferromla.workspace_bytes(
        batch=len(LENS),
        num_heads=16,
        num_tokens=sum(Q_LENS),
        kv_format="bf16",
        page_size=64,
        max_seq_len=problem.table.shape[1] * 64,
        device=str(problem.q.device),
    )
    guard = 4096
    whole = torch.full((need + 2 * guard,), 0x5A, dtype=torch.uint8, device=device)
    tolerance.check(*problem.run(workspace=whole[guard : guard + need]), *problem.expected())
    assert bool((torch.cat([whole[:guard], whole[-guard:]]) == 0x5A).all())
    with pytest.raises(ferromla.InvalidArgument, match=f"workspace.*{need}"):
        problem.run(workspace=whole[: need - 1])


def test_outputs_are_made_when_not_given(device):
    problem = _mixed(device)
    out, lse = problem.call()
    assert (out.dtype, out.device, lse.dtype) == (problem.q.dtype, problem.q.device, torch.float32)
    assert lse.shape == problem.q.shape[:-1]
    tolerance.check(out, lse, *problem.expected())
    _, lse = problem.call(out=out)
    tolerance.check(out, lse, *problem.expected())


def test_numpy():
    problem = _mixed("cpu", dtype=torch.float16)
    arrays = (problem.q, problem.cache, problem.table, problem.lens, problem.indptr)
    out, lse = ferromla.prefill(*(tensor.numpy() for tensor in arrays))
    tolerance.check(torch.from_numpy(out), torch.from_numpy(lse), *problem.expected())
