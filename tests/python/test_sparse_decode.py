"""Sparse decode against the float64 reference, and what it does with lists of every kind."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import covering
import ferromla
import ferromla.torch_ops  # registers torch.ops.ferromla
import problems
import problems_sparse
import tolerance

INF = float("inf")
AXES = {
    "b": (1, 4, 74, 321),
    "s_q": (1, 3),
    "h": (8, 16, 32, 64, 128),
    "lists": ((512, 64, 2), (512, 64, 69), (1024, 576, 61), (650, 576, 53), (2046, 2048, 64)),
    "extra": (None, (512, 64, 2), (300, 130, 64)),
    "lens": (None, "b", "row"),
    "sink": (False, True),
    "dtype": (torch.bfloat16, torch.float16),
    "d_qk": (576, 512),
}
# Query rows times keys that the CPU sample spends on one case: about half a second on two cores.
CPU_COST_LIMIT = 2_500_000


def _cost(case: tuple) -> int:
    b, s_q, h, (_, topk, _), extra, *_ = case
    # A query token reads its keys, whatever the heads: as much work as some 20 of them.
    return b * s_q * (h + 20) * (topk + (extra or (0, 0))[1])


def _name(case: tuple) -> str:
    b, s_q, h, lists, extra, lens, sink, dtype, d_qk = case
    sizes = ["x".join(map(str, x)) for x in (lists, extra) if x]
    kind = f"{lens or 'full'}-{'sink' if sink else 'plain'}-{str(dtype)[6:]}-{d_qk}"
    return f"b{b}-sq{s_q}-h{h}-{'+'.join(sizes)}-{kind}"


def _problem(case: tuple, device="cpu") -> problems_sparse.Decode:
    b, s_q, h, (s_k, topk, page), extra, lens, sink, dtype, d_qk = case
    problem = problems_sparse.decode(
        b, s_q, h, s_k=s_k, topk=topk, page=page, extra=extra, lens=lens, d_qk=d_qk, dtype=dtype, device=device
    )
    if sink:
        problem.options["attn_sink"] = _sink(h, device)
    return problem


@functools.cache
def _sink(h, device):
    """A sink per head, both infinities among them."""
    sink = torch.randn(h, generator=torch.Generator().manual_seed(h))
    sink[0], sink[-1] = INF, -INF
    return sink.to(device)


SAMPLE = covering.sample(AXES, lambda case: _cost(case) <= CPU_COST_LIMIT)


def test_the_cpu_sample_holds_every_value_of_every_axis():
    for axis, values in enumerate(AXES.values()):
        assert {case[axis] for case in SAMPLE} == set(values)


@pytest.mark.parametrize("case", SAMPLE, ids=_name)
def test_cpu_sample_matches_reference(case):
    _problem(case).check()


@pytest.mark.gpu
@pytest.mark.parametrize("lists", AXES["lists"], ids=lambda lists: "x".join(map(str, lists)))
@pytest.mark.parametrize("h", AXES["h"])
@pytest.mark.parametrize("s_q", AXES["s_q"])
@pytest.mark.parametrize("b", AXES["b"])
def test_gpu_whole_cross_matches_reference(b, s_q, h, lists, cuda):
    """The cross of the other axes; of many query tokens some are compared."""

    def cases():
        for extra, lens, dtype, d_qk in itertools.product(*(AXES[x] for x in ("extra", "lens", "dtype", "d_qk"))):
            case = (b, s_q, h, lists, extra, lens, lens == "b", dtype, d_qk)
            problem = _problem(case, cuda)
            which = problems_sparse.some_rows(b * s_q, h, cuda)
            out, lse = (x.flatten(0, 1) for x in problem.run())
            compared = out[which], lse[which], *problem.expected_rows(which, **problem.options)
            right = tolerance.all_near(*compared) & ~out.isnan().any()
            yield _name(case), right, functools.partial(_words, out, *compared)

    assert tolerance.check_cases(cases) == 36


def _words(out, *compared):
    """What is wrong with the query tokens that were compared, or with any other."""
    return tolerance.faults(*compared) or ["a row was not written"] * bool(out.isnan().any())


@pytest.mark.parametrize("h", [1, 3, 9, 17, 33, 65, 126, 200])
def test_any_number_of_heads(device, h):
    problems_sparse.decode(h=h, extra=(100, 70, 3), device=device).check()
    problems_sparse.decode(h=h, device=device).check()


@pytest.mark.parametrize("page", [1, 2, 3, 64, 256, 1000])
@pytest.mark.parametrize("topk", [1, 63, 64, 65, 200])
def test_any_page_size_and_number_of_entries(device, page, topk):
    problems_sparse.decode(topk=topk, page=page, extra=(90, topk + 1, 7), lens="row", device=device).check()


WIDTHS = {
    "bf16": (576, 512),
    "fp8": (576, 512),
    "fp8_v32": (576,),
    "fp8_v4": (512,),
    "fp8_v41": (512,),
    "fp8_v41_split": (512,),
    "fp4_v41": (512,),
}
PAIRS = [
    (main, extra, d_qk)
    for main, widths in WIDTHS.items()
    for extra, others in {None: (576, 512), **WIDTHS}.items()
    for d_qk in sorted(set(widths) & set(others))
    if main != "fp4_v41" and {main, extra} - {"bf16", None}
]


@pytest.mark.parametrize(("main", "extra", "d_qk"), PAIRS)
def test_quantised_caches_are_read_as_what_they_hold(device, main, extra, d_qk):
    problem = problems_sparse.decode(h=24, topk=130, extra=(90, 70, 5), lens="row", d_qk=d_qk, device=device)
    problem.main = problem.main.quantised(main)
    problem.extra = None if extra is None else problem.extra.quantised(extra)
    problem.check()


@pytest.mark.parametrize("h", [8, 24, 64, 128])
@pytest.mark.parametrize("extra", [False, True], ids=["alone", "extra"])
def test_the_scale_of_fp8_caches(device, h, extra):
    scale = {"kv_scale": 0.0372}
    lists = {"extra": (90, 70, 5)} if extra else {}
    problem = problems_sparse.decode(h=h, topk=130, lens="row", **lists, device=device)
    problem.main = problem.main.quantised("fp8", **scale)
    problem.extra = problem.extra.quantised("fp8", **scale) if extra else None
    problem.options |= scale
    out, _ = problem.check()
    options = problem.lists() | scale
    by_torch, _ = torch.ops.ferromla.sparse_decode(problem.q, problem.main.cache, problem.main.indices, **options)
    assert torch.equal(by_torch, out)
    prefill = problems_sparse.prefill(t=5, h=h, page=4, device=device)
    prefill.keys = prefill.keys.quantised("fp8", **scale)
    prefill.options |= scale
    prefill.check()


def test_a_scale_that_is_not_of_both_caches_is_refused(device):
    problem = problems_sparse.decode(extra=(90, 70, 5), device=device)
    other = problem.extra.quantised("fp8_v32")
    for main, extra, error in (
        ("fp8", other, ferromla.Unsupported),
        ("fp8_v32", other, ferromla.InvalidArgument),
        ("fp8_v32", None, ferromla.InvalidArgument),
    ):
        call = problems_sparse.Decode(problem.q, problem.main.quantised(main), extra)
        with pytest.raises(error, match="kv_scale"):
            call.run(kv_scale=2.0)
    with pytest.raises(ferromla.InvalidArgument, match="extra_kv_format"):
        problems_sparse.Decode(problem.q, problem.main).run(extra_kv_format="bf16")
    problem.extra.kv_format = "int4"
    with pytest.raises(ferromla.InvalidArgument, match='extra_kv_format is "int4"'):
        problem.run()


@pytest.mark.parametrize("h", [33, 64, 100, 192])
@pytest.mark.parametrize(
    ("main", "extra"), [("fp8_v4", "fp8_v4"), ("fp8_v41_split", "fp8_v4"), ("fp8_v4", "fp4_v41"), ("fp8_v41", "fp8")]
)
def test_many_short_lists_of_codes(device, main, extra, h):
    """So many that CTAs have several, each of a few tiles: that may have other kernels than few, or invariant ones."""
    problem = problems_sparse.decode(
        b=100, s_q=3, h=h, topk=130, extra=(90, 70, 5), lens="row", d_qk=512, device=device
    )
    problem.main, problem.extra = problem.main.quantised(main), problem.extra.quantised(extra)
    out, _ = problem.check()
    invariant = problem.run(batch_invariant=True)
    if torch.device(device).type == "cuda" and h != 100 and extra != "fp4_v41":
        assert not torch.equal(out, invariant[0]), "the same kernel"
    few = [
        problems_sparse.Keys(keys.cache, keys.indices[:1], keys.lens[:1], keys.kv_format)
        for keys in (problem.main, problem.extra)
    ]
    alone = problems_sparse.Decode(problem.q[:1], *few).run(batch_invariant=True)
    assert all(torch.equal(all_rows[:1], rows) for all_rows, rows in zip(invariant, alone, strict=True))


@pytest.mark.parametrize("page", [1, 2, 64, 61])
@pytest.mark.parametrize("main", ["fp8_v32", "fp8_v4", "fp8_v41_split"])
def test_pages_of_any_size_of_quantised_caches(device, main, page):
    problem = problems_sparse.decode(topk=100, page=page, d_qk=WIDTHS[main][0], device=device)
    problem.main = problem.main.quantised(main)
    problem.check()


def test_the_extra_cache_has_the_format_of_the_main_one_unless_said_otherwise(device):
    problem = problems_sparse.decode(extra=(90, 70, 5), d_qk=512, device=device)
    problem.main, problem.extra = problem.main.quantised("fp8_v4"), problem.extra.quantised("fp8_v4")
    want = problem.run()
    problem.extra.kv_format = None
    assert all(torch.equal(a, b) for a, b in zip(want, problem.run(), strict=True))


def test_a_key_that_stands_twice_counts_twice(device):
    problem = problems_sparse.decode(b=1, s_q=1, topk=64, device=device)
    key = problem.main.indices[(problem.main.indices >= 0) & (problem.main.indices < 512)][0]
    problem.main.indices[:] = -1
    problem.main.indices[..., 5] = key
    once = problem.check()
    problem.main.indices[..., [0, 40, 63]] = key
    out, lse = problem.check()
    assert torch.equal(out, once[0])
    assert torch.allclose(lse, once[1] + torch.log(torch.tensor(4.0)))


def test_rows_without_a_key_are_zeros(device):
    problem = problems_sparse.decode(b=7, s_q=2, lens="row", extra=(200, 64, 5), device=device, num_splits=2)
    bad = torch.tensor(problems_sparse.no_keys(len(problem.main.cache.flatten(0, 1))), dtype=torch.int32)
    for keys in (problem.main, problem.extra):
        keys.lens[1:3] = 1000
        keys.indices[1:3] = bad.repeat(100)[: keys.indices.shape[-1]].to(device)
        keys.lens[4] = 0
    out, lse = problem.check()
    for rows in ([1, 2], [4]):
        assert bool((out[rows] == 0).all())
        assert bool((lse[rows] == -INF).all())


@pytest.mark.parametrize("which", ["main", "extra", "both"])
def test_lists_without_an_entry(device, which):
    sizes = {"main": (0, 64), "extra": (64, 0), "both": (0, 0)}[which]
    problem = problems_sparse.decode(topk=sizes[0], extra=(64, sizes[1], 4), device=device)
    problem.check()
    problem.main.lens = torch.zeros(3, dtype=torch.int32, device=device)
    problem.check()


@pytest.mark.parametrize("shape", [(0, 1), (3, 0)])
def test_nothing_to_do(device, shape):
    problem = problems_sparse.decode(*shape, extra=(64, 30, 4), lens="b", device=device)
    out, lse = problem.run()
    assert out.shape == (*shape, 16, 512)
    assert lse.shape == (*shape, 16)


def test_a_cache_without_a_page_has_no_key(device):
    problem = problems_sparse.decode(device=device)
    problem.main.cache = problem.main.cache[:0]
    out, lse = problem.run()
    assert bool((out == 0).all())
    assert bool((lse == -INF).all())


@pytest.mark.parametrize("num_splits", [1, 2, 5, 1000, None])
@pytest.mark.parametrize("extra", [None, (400, 333, 9)])
def test_any_number_of_splits(device, num_splits, extra):
    problems_sparse.decode(b=2, topk=700, extra=extra, lens="row", device=device, num_splits=num_splits).check(
        attn_sink=_sink(16, device)
    )


@pytest.mark.parametrize(
    ("kv_format", "num_splits", "h"), [("bf16", None, 16), ("fp8_v32", 9, 16), ("fp8_v32", None, 128), ("bf16", 9, 128)]
)
def test_a_token_does_not_depend_on_the_rest_of_an_invariant_batch(device, kv_format, num_splits, h):
    problem = problems_sparse.decode(b=6, s_q=3, h=h, topk=9000, extra=(90, 70, 3), lens="row", device=device)
    problem.main, problem.extra = problem.main.quantised(kv_format), problem.extra.quantised(kv_format)
    options = {"batch_invariant": True, "num_splits": num_splits}
    whole = problem.check(**options)
    for r in (0, 5):
        main, extra = (
            problems_sparse.Keys(keys.cache, keys.indices[r : r + 1], keys.lens[r : r + 1], keys.kv_format)
            for keys in (problem.main, problem.extra)
        )
        alone = problems_sparse.Decode(problem.q[r : r + 1], main, extra).run(**options)
        for all_rows, rows in zip(whole, alone, strict=True):
            assert torch.equal(all_rows[r], rows[0])


def test_the_same_call_gives_the_same_bits(device):
    problem = problems_sparse.decode(b=5, topk=1500, extra=(200, 130, 64), lens="b", device=device)
    first = problem.run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, problem.run(), strict=True))


@pytest.mark.parametrize("lens", [None, "b", "row"])
@pytest.mark.parametrize("extra", [None, (200, 130, 64)])
def test_a_plan_gives_what_the_call_gives_alone(device, lens, extra):
    problem = problems_sparse.decode(b=5, topk=1500, extra=extra, lens=lens, device=device)
    alone = problem.run()
    plan = problem.plan()
    assert all(torch.equal(a, b) for a, b in zip(alone, problem.run(plan=plan), strict=True))
    if lens is None:
        return
    for keys in (problem.main, problem.extra):
        if keys is not None:
            keys.lens.copy_(keys.lens // 2)
    plan.update_sparse(problem.main.lens, None if extra is None else problem.extra.lens)
    problem.check(plan=plan)


OF_576 = [("bf16", "bf16"), ("bf16", "fp8"), ("fp8_v32", "bf16"), ("fp8", "fp8_v32")]


@pytest.mark.parametrize("h", [8, 24, 40])
@pytest.mark.parametrize(("main", "extra"), OF_576)
def test_plans_for_the_format_and_for_any(device, main, extra, h):
    """Rows of a CTA depend on the formats; a plan for any does for every one."""
    problem = problems_sparse.decode(h=h, extra=(90, 70, 5), lens="row", device=device)
    problem.main, problem.extra = problem.main.quantised(main), problem.extra.quantised(extra)
    problem.check(plan=problem.plan())
    want = problem.run()
    got = problem.run(plan=problem.plan(kv_format=main, extra_kv_format=extra))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    problem.check(plan=problem.plan(kv_format=main))
    for name in ("kv_format", "extra_kv_format"):
        with pytest.raises(ferromla.InvalidArgument, match=f"made for {name} fp16"):
            problem.run(plan=problem.plan(**{name: "fp16"}))


@pytest.mark.parametrize("h", [8, 24, 40])
@pytest.mark.parametrize(("main", "extra"), OF_576)
def test_an_extra_cache_of_no_entries(device, main, extra, h):
    problem = problems_sparse.decode(h=h, extra=(90, 0, 5), device=device)
    problem.main, problem.extra = problem.main.quantised(main), problem.extra.quantised(extra)
    problem.check()


def test_host_and_device_plan_the_same(device):
    problem = problems_sparse.decode(b=40, s_q=3, topk=800, extra=(90, 200, 64), lens="row", device=device)
    plan = problem.plan()
    host = ferromla.Plan.sparse(
        problem.main.lens.cpu(),
        problem.extra.lens.cpu(),
        num_heads=16,
        q_len=3,
        topk=800,
        extra_topk=200,
        device=device,
    )
    size = plan.plan_offsets[3]
    assert torch.equal(plan.workspace[:64].cpu(), host.workspace[:64].cpu())
    problem.check(plan=plan)
    problem.check(plan=host)
    assert size == host.plan_offsets[3]


def _two_parts(rows):
    return rows[..., :512].contiguous(), rows[..., 512:].contiguous()


def test_two_part_inputs(device):
    problem = problems_sparse.decode(extra=(100, 70, 3), device=device)
    want = problem.run()
    q = problem.q
    problem.main.cache, problem.extra.cache = map(_two_parts, (problem.main.cache, problem.extra.cache))
    problem.q = _two_parts(q)
    out, lse = problems.poisoned_outputs(q)
    problem.call(out=out, lse=lse)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


def _padded(tensor, pad):
    """The same values within an allocation that is larger in every dimension."""
    wide = torch.full([n + pad for n in tensor.shape], 0, dtype=tensor.dtype, device=tensor.device)
    wide.fill_(problems.NAN if tensor.is_floating_point() else 0)
    view = wide[tuple(slice(0, n) for n in tensor.shape)]
    view.copy_(tensor)
    return view


def test_no_tensor_needs_to_be_contiguous(device):
    problem = problems_sparse.decode(s_q=3, extra=(100, 70, 3), lens="row", device=device)
    problem.q = _padded(problem.q, 8)
    for keys in (problem.main, problem.extra):
        keys.cache, keys.indices = _padded(keys.cache, 8), _padded(keys.indices, 8)
        keys.lens = _padded(keys.lens, 3).T.contiguous().T
    out, lse = problems.poisoned_outputs(problem.q)
    problem.check(out=_padded(out, 8), lse=_padded(lse, 8))


def test_large_scores_stay_finite(device):
    problem = problems_sparse.decode(b=2, topk=300, device=device)
    problem.q = problem.q * 1000
    out, lse = problem.run()
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(lse).all())


def test_a_nan_that_is_a_key_shows(device):
    problem = problems_sparse.decode(b=2, s_q=1, device=device)
    lists = problem.main.lists()
    key = int(lists.indices[1][lists.chosen()[1]][0])
    problem.main.cache.flatten(0, 1)[key] = problems.NAN
    mine = bool((lists.indices[0] == key).any())
    out, lse = problem.run()
    assert bool(torch.isnan(out[1]).all() & torch.isnan(lse[1]).all())
    assert mine or not bool(torch.isnan(out[0]).any())


CASES = {
    "indices": ("indices", lambda c: {"indices": c["indices"].long()}),
    "indices rank": ("indices", lambda c: {"indices": c["indices"][0]}),
    "indices None": ("indices", lambda c: {"indices": None}),
    "lengths": ("topk_lengths", lambda c: {"topk_lengths": torch.zeros(2, dtype=torch.int32)}),
    "extra alone": ("extra_indices", lambda c: {"extra_kv_cache": c["kv_cache"]}),
    "extra indices alone": ("extra_kv_cache", lambda c: {"extra_indices": c["indices"]}),
    "extra lengths alone": ("extra_kv_cache", lambda c: {"extra_topk_lengths": torch.zeros(3, dtype=torch.int32)}),
    "cache": ("kv_cache", lambda c: {"kv_cache": c["kv_cache"].half()}),
    "splits": ("num_splits", lambda c: {"num_splits": 0}),
    "plan": ("plan", lambda c: {"plan": ferromla.Plan.sparse(batch=3, num_heads=16, q_len=2, topk=64)}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_refused_is_named_and_nothing_is_written(case):
    argument, change = case
    problem = problems_sparse.decode()
    out, lse = problems.poisoned_outputs(problem.q)
    given = {"q": problem.q, "kv_cache": problem.main.cache, "indices": problem.main.indices, "out": out, "lse": lse}
    with pytest.raises(ferromla.InvalidArgument) as error:
        ferromla.sparse_decode(**given | change(given))
    assert error.value.argument == argument
    assert bool(torch.isnan(out).all() & torch.isnan(lse).all())
