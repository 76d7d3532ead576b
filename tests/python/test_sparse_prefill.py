"""Sparse prefill against the float64 reference, and what it does with lists of every kind."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import covering
import ferromla
import problems
import problems_sparse
import tolerance

INF = float("inf")
AXES = {
    "t": (1, 62, 213, 70_000),
    "h": (16, 64, 128, 3),
    "lists": ((95, 128), (512, 100), (1024, 576), (4096, 2048), (64, 8192)),
    "lens": (None, "row"),
    "sink": (False, True),
    "dtype": (torch.bfloat16, torch.float16),
    "d_qk": (576, 512),
}
CPU_COST_LIMIT = 5_000_000
# One of each kind of kernel.
KINDS = [("bf16", 576), ("bf16", 512), ("fp8_v32", 576), ("fp8_v4", 512), ("fp8", 576)]


def _cost(case: tuple) -> int:
    t, h, (_, topk), *_ = case
    return t * (h + 20) * topk


def _name(case: tuple) -> str:
    t, h, (s_kv, topk), lens, sink, dtype, d_qk = case
    kind = f"{lens or 'full'}-{'sink' if sink else 'plain'}-{str(dtype)[6:]}-{d_qk}"
    return f"t{t}-h{h}-{s_kv}x{topk}-{kind}"


def _problem(case: tuple, device="cpu") -> problems_sparse.Prefill:
    t, h, (s_kv, topk), lens, sink, dtype, d_qk = case
    problem = problems_sparse.prefill(t, h, s_kv=s_kv, topk=topk, lens=lens, d_qk=d_qk, dtype=dtype, device=device)
    if sink:
        sinks = torch.randn(h, generator=torch.Generator().manual_seed(h))
        sinks[0], sinks[-1] = INF, -INF
        problem.options["attn_sink"] = sinks.to(device)
    return problem


SAMPLE = covering.sample(AXES, lambda case: _cost(case) <= CPU_COST_LIMIT)


def test_the_cpu_sample_holds_every_value_but_the_longest_call():
    for axis, (name, values) in enumerate(AXES.items()):
        assert {case[axis] for case in SAMPLE} == set(values) - ({70_000} if name == "t" else set())


@pytest.mark.parametrize("case", SAMPLE, ids=_name)
def test_cpu_sample_matches_reference(case):
    _problem(case).check()


@pytest.mark.gpu
@pytest.mark.parametrize("lists", AXES["lists"], ids=lambda lists: "x".join(map(str, lists)))
@pytest.mark.parametrize("h", AXES["h"])
@pytest.mark.parametrize("t", AXES["t"][:-1])
def test_gpu_whole_cross_matches_reference(t, h, lists, cuda):
    """The cross of the other axes; of many query tokens some are compared."""

    def cases():
        for lens, dtype, d_qk in itertools.product(AXES["lens"], AXES["dtype"], AXES["d_qk"]):
            case = (t, h, lists, lens, lens == "row", dtype, d_qk)
            problem = _problem(case, cuda)
            which = problems_sparse.some_rows(t, h, cuda)
            got = problem.run()
            compared = *(x[which] for x in got), *problem.expected(which, **problem.options)
            right = tolerance.prefill_near(*compared) & ~got[0].isnan().any()
            yield _name(case), right, functools.partial(_words, got[0], *compared)

    assert tolerance.check_cases(cases) == 8


def _words(out, *compared):
    """What is wrong with the query tokens that were compared, or with any other."""
    return tolerance.prefill_faults(*compared) or ["a row was not written"] * bool(out.isnan().any())


def test_seventy_thousand_tokens_in_one_call(device):
    problems_sparse.prefill(70_000, 1, s_kv=3000, topk=12, lens="row", d_qk=512, device=device).check()


@pytest.mark.parametrize("page", [1, 2, 64, 61])
def test_a_paged_cache_is_read_as_its_tokens(device, page):
    problem = problems_sparse.prefill(s_kv=400, page=page, device=device)
    tokens = problem.check()
    for kv in (problem.keys.cache, problem.keys.cache.unsqueeze(2)):
        assert all(torch.equal(a, b) for a, b in zip(tokens, problem.run(kv=kv), strict=True))


@pytest.mark.parametrize(
    ("kv_format", "d_qk"),
    [("fp8", 576), ("fp8_v32", 576), ("fp8_v4", 512), ("fp8_v41", 512), ("fp8_v41_split", 512)],
)
def test_quantised_caches_are_read_as_what_they_hold(device, kv_format, d_qk):
    problem = problems_sparse.prefill(s_kv=400, page=64, lens="row", d_qk=d_qk, device=device)
    problem.keys = problem.keys.quantised(kv_format)
    problem.check()


def test_shapes_with_a_dimension_of_kv_heads(device):
    problem = problems_sparse.prefill(device=device)
    want = problem.run()
    kv = problem.keys.cache.flatten(0, 1).unsqueeze(1)
    got = problem.run(kv=kv, indices=problem.keys.indices.unsqueeze(1))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_two_part_inputs(device):
    problem = problems_sparse.prefill(device=device)
    want = problem.run()
    kv, q = problem.keys.cache.flatten(0, 1), problem.q
    parts = [(x[..., :512].contiguous(), x[..., 512:].contiguous()) for x in (q, kv)]
    got = ferromla.sparse_prefill(*parts, problem.keys.indices)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_strided_inputs_and_outputs(device):
    problem = problems_sparse.prefill(t=40, s_kv=300, lens="row", device=device)
    wide = torch.full((40, 20, 640), problems.NAN, dtype=problem.q.dtype, device=device)
    wide[:, :16, :576] = problem.q
    problem.q = wide[:, :16, :576]
    tokens = problem.keys.cache.flatten(0, 1)
    kv = torch.stack([tokens, torch.full_like(tokens, problems.NAN)], 1)[:, 0]
    problem.keys.indices = torch.cat([problem.keys.indices, problem.keys.indices], 1)[:, :128]
    problem.keys.lens = torch.stack([problem.keys.lens, problem.keys.lens], 1)[:, 0]
    out = torch.full((40, 16, 1024), 7.0, dtype=problem.q.dtype, device=device)
    rows = torch.full((2, 16, 40), 7.0, device=device).transpose(1, 2)
    assert not kv.is_contiguous()
    assert not problem.keys.lens.is_contiguous()
    problem.check(kv=kv, out=out[..., :512], max_logits=rows[0], lse=rows[1])
    assert bool((out[..., 512:] == 7).all())


def test_rows_without_a_key_are_zeros(device):
    problem = problems_sparse.prefill(t=10, lens="row", device=device, attn_sink=torch.zeros(16, device=device))
    problem.keys.indices[3] = -1
    problem.keys.lens[5] = 0
    out, max_logits, lse = problem.check()
    assert bool((out[[3, 5]] == 0).all())
    assert bool((max_logits[[3, 5]] == -INF).all() & (lse[[3, 5]] == -INF).all())


@pytest.mark.parametrize(("t", "topk", "s_kv"), [(0, 128, 95), (5, 0, 95), (5, 128, 0)])
def test_nothing_to_attend(device, t, topk, s_kv):
    q = torch.zeros(t, 16, 576, dtype=torch.bfloat16, device=device)
    kv = torch.zeros(s_kv, 576, dtype=torch.bfloat16, device=device)
    out, max_logits, lse = ferromla.sparse_prefill(q, kv, torch.zeros(t, topk, dtype=torch.int32, device=device))
    assert out.shape == (t, 16, 512)
    assert bool((out == 0).all() & (max_logits == -INF).all() & (lse == -INF).all())


def test_with_batch_invariant_a_token_does_not_depend_on_the_rest_of_the_call(device):
    problem = problems_sparse.prefill(t=100, s_kv=900, topk=700, lens="row", device=device, batch_invariant=True)
    whole = problem.run()
    keys = problems_sparse.Keys(problem.keys.cache, problem.keys.indices[37:38], problem.keys.lens[37:38])
    alone = problems_sparse.Prefill(problem.q[37:38], keys, problem.options).run()
    assert all(torch.equal(a[37:38], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("t", "topk"), [(1, 2500), (3, 2500), (9, 2048), (9, 2500), (62, 2500), (140, 2500)])
@pytest.mark.parametrize("h", [16, 32, 64, 128])
@pytest.mark.parametrize(("kv_format", "d_qk"), KINDS)
def test_lists_of_few_tokens_are_shared_out(kv_format, d_qk, h, t, topk, cuda):
    """Several CTAs have a part of a token's scores: of the first token's one key, all but one have none."""
    problem = problems_sparse.prefill(t, h, s_kv=3000, topk=topk, page=64, lens="row", d_qk=d_qk, device=cuda)
    keys = problem.keys
    keys.lens[0] = topk
    one = keys.indices[0][(keys.indices[0] >= 0) & (keys.indices[0] < 3000)][0].clone()
    keys.indices[0] = -1
    keys.indices[0, 1700] = one
    if kv_format != "bf16":
        problem.keys = keys.quantised(kv_format)
    first = problem.check()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, problem.run(), strict=True))
    if t == 9:  # of fewer tokens all may have few keys
        assert not torch.equal(first[2], problem.run(batch_invariant=True)[2]), "no list was split"


@pytest.mark.gpu
@pytest.mark.parametrize("h", [16, 32, 64, 128])
@pytest.mark.parametrize(("kv_format", "d_qk"), KINDS)
def test_equal_lists_that_are_left_are_cut(kv_format, d_qk, h, cuda):
    """Every SM, or pair of SMs, has as many whole ones; each of the last 12 is cut.

    Shorter lists of codes have other kernels where results must not depend on how many there are."""
    sms = torch.cuda.get_device_properties(cuda).multi_processor_count
    shared = -(-1025 // sms) * sms
    problem = problems_sparse.prefill(shared + 12, h, s_kv=3000, topk=2048, page=64, d_qk=d_qk, device=cuda)
    if kv_format != "bf16":
        problem.keys = problem.keys.quantised(kv_format)
    first = problem.run()
    which = torch.tensor([0, 1, *range(shared - 10, shared + 12)], device=cuda)
    found = tolerance.prefill_faults(*(x[which] for x in first), *problem.expected(which, **problem.options))
    assert not found, "\n".join(found)
    assert all(torch.equal(a, b) for a, b in zip(first, problem.run(), strict=True))
    whole = problem.run(batch_invariant=True)
    assert all(torch.equal(a[:shared], b[:shared]) for a, b in zip(first, whole, strict=True))
    assert not torch.equal(first[2][shared:], whole[2][shared:])


@pytest.mark.parametrize("t", [9, 62, 1100])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_plan_gives_what_a_call_without_one_does(device, t, batch_invariant):
    problem = problems_sparse.prefill(
        t, 4, s_kv=300, topk=200, lens="row", device=device, batch_invariant=batch_invariant
    )
    want, lens = problem.run(), problem.keys.lens
    shapes = {"num_heads": 4, "topk": 200, "kv_format": "bf16", "batch_invariant": batch_invariant}
    plan = ferromla.Plan.sparse_prefill(lens, **shapes)
    assert (plan.num_tokens, plan.topk, plan.q_len, plan.batch) == (t, 200, None, 1)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(want, problem.run(plan=plan), strict=True))
    # The plan's lengths count, not those of the call.
    plan.update_sparse(torch.zeros_like(lens))
    out, max_logits, lse = problem.run(plan=plan)
    assert bool((out == 0).all() & (max_logits == -INF).all() & (lse == -INF).all())
    plan.update_sparse()
    every = problems_sparse.Keys(problem.keys.cache.nan_to_num(0), problem.keys.indices, torch.full_like(lens, 200))
    everything = problems_sparse.Prefill(problem.q, every, problem.options)
    everything.check(plan=plan)


def test_a_plan_of_another_call_is_refused():
    problem = problems_sparse.prefill()
    shapes = {"num_tokens": 62, "num_heads": 16, "topk": 128}
    for change in ({"num_tokens": 61}, {"num_heads": 8}, {"topk": 127}, {"kv_format": "fp8_v32"}):
        with pytest.raises(ferromla.InvalidArgument):
            problem.run(plan=ferromla.Plan.sparse_prefill(**shapes | change))
    with pytest.raises(ferromla.InvalidArgument, match="batch_invariant"):
        problem.run(plan=ferromla.Plan.sparse_prefill(**shapes), batch_invariant=True)
    with pytest.raises(ferromla.InvalidArgument):
        problem.run(plan=ferromla.Plan.sparse(batch=1, q_len=62, num_heads=16, topk=128))
    with pytest.raises(ferromla.InvalidArgument, match="num_tokens"):
        ferromla.Plan.sparse_prefill(num_heads=16, topk=128)


def test_the_largest_score_is_that_of_the_scaled_scores(device):
    problem = problems_sparse.prefill(device=device, softmax_scale=0.25)
    problem.check()


CASES = {
    "kv": ("kv", lambda p: {"kv": p.keys.cache.flatten(0, 1).half()}),
    "kv rank": ("kv", lambda p: {"kv": p.keys.cache.flatten()}),
    "indices": ("indices", lambda p: {"indices": p.keys.indices[:5]}),
    "indices heads": ("indices", lambda p: {"indices": p.keys.indices.view(62, 2, 64)}),
    "lengths": ("topk_lengths", lambda p: {"topk_lengths": torch.zeros(62, 1, dtype=torch.int32)}),
    "max_logits": ("max_logits", lambda p: {"max_logits": torch.zeros(62, 15)}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_refused_is_named(case):
    argument, change = case
    problem = problems_sparse.prefill()
    with pytest.raises(ferromla.InvalidArgument) as error:
        problem.run(**change(problem))
    assert error.value.argument == argument
