"""Plans: reuse, update, mismatch, and the same plan from host and device."""

from __future__ import annotations

import pytest
import torch

import ferromla
import problems
import tolerance


def _plan(problem, **options):
    h_kv = problem.cache.shape[2] if problem.cache.ndim == 4 else 1
    shapes = {
        "num_heads": problem.q.shape[2],
        "num_kv_heads": h_kv,
        "q_len": problem.q.shape[1],
        "page_size": problem.cache.shape[1],
    }
    return ferromla.Plan(problem.lens, **shapes | options)


@pytest.mark.parametrize("h_kv", [1, 2])
@pytest.mark.parametrize("options", [{}, {"num_splits": 4}, {"batch_invariant": True}, {"causal": False}])
def test_a_plan_gives_the_result_of_a_call_without_one(device, h_kv, options):
    problem = problems.make(h=32, s_q=2, h_kv=h_kv, lens=[0, 3000, 64, 200, 1], device=device)
    plan = _plan(problem, max_seq_len=64 * problem.table.shape[1], **options)
    without = problem.check(**options)
    causal = options.get("causal", True)
    for _ in range(2):
        out, lse = problem.check(plan=plan, causal=causal)
        assert torch.equal(out, without[0])
        assert torch.equal(lse, without[1])


@pytest.mark.parametrize("num_sms", [8, 78, 114, 10_000])
@pytest.mark.parametrize("h", [16, 128])
def test_a_plan_for_fewer_sms(device, h, num_sms):
    problem = problems.make(h=h, lens=[3000, 1, 64, 2000, 500], device=device)
    plan = _plan(problem, num_sms=num_sms)
    workers_at, merges_at, _, _ = plan.plan_offsets
    if device.type == "cuda" and num_sms == 8:  # a word for each worker and one more, of 133 otherwise
        assert (merges_at - workers_at) // 4 < 20
    problem.check(plan=plan)
    lists = ferromla.Plan.sparse(batch=3, num_heads=h, topk=100, num_sms=num_sms, device=plan.device)
    tokens = ferromla.Plan.sparse_prefill(num_tokens=3, num_heads=h, topk=100, num_sms=num_sms, device=plan.device)
    shapes = {"batch": 5, "num_heads": h, "page_size": 64, "num_sms": num_sms, "device": plan.device}
    assert ferromla.workspace_bytes(**shapes) == plan.workspace.shape[0]
    assert lists.topk == tokens.topk == 100


def test_one_plan_serves_many_layers(device):
    problem = problems.make(h=16, lens=[300, 1000, 5], device=device)
    plan = _plan(problem)
    for seed in range(4):
        layer = problems.make(h=16, lens=[300, 1000, 5], device=device, seed=seed)
        layer.check(plan=plan)


def test_update_plans_for_other_lengths(device):
    problem = problems.make(h=16, lens=[10, 10, 10, 10], device=device)
    plan = _plan(problem)
    for lens in ([4000, 0, 64, 65], [0, 0, 0, 0], [1, 2, 3, 2500]):
        problem = problems.make(h=16, lens=lens, device=device)
        plan.update(problem.lens)
        problem.check(plan=plan)


def test_host_lengths_plan_for_the_device(device):
    problem = problems.make(h=16, s_q=2, lens=[900, 3, 64], device=device)
    plan = ferromla.Plan(problem.lens.cpu(), num_heads=16, q_len=2, page_size=64, device=device)
    assert plan.device.startswith(device.type)
    problem.check(plan=plan)
    plan = ferromla.Plan(problem.lens.cpu().numpy(), num_heads=16, q_len=2, page_size=64, device=device)
    problem.check(plan=plan)


MISMATCHES = {
    "batch": lambda p: {"seq_lens": p.lens[:2].contiguous()},
    "num_heads": lambda p: {"num_heads": 17},
    "num_kv_heads": lambda p: {"num_kv_heads": 2},
    "q_len": lambda p: {"q_len": 3},
    "page_size": lambda p: {"page_size": 32},
    "causal": lambda p: {"causal": False},
    "kv_format": lambda p: {"kv_format": "fp16"},
}


@pytest.mark.parametrize("planned", [[300, 10, 5], [70, 2, 200]])
def test_the_lengths_of_a_plan_count_until_it_is_updated(device, planned):
    problem = problems.make(h=16, lens=[300, 10, 200], device=device)
    other = problem.lens.clone()
    problem.lens = torch.tensor(planned, dtype=torch.int32, device=device)
    plan = ferromla.Plan(problem.lens, num_heads=16, page_size=64)
    out, lse = ferromla.decode(problem.q, problem.cache, problem.table, other, plan=plan)
    tolerance.check(out, lse, *problem.expected())


def test_a_plan_keeps_its_own_splits(device):
    problem = problems.make(h=16, lens=[300, 10, 5], device=device)
    plan = ferromla.Plan(problem.lens, num_heads=16, page_size=64, num_splits=4)
    problem.check(plan=plan, num_splits=4)
    for options, text in (
        ({"num_splits": 3}, "num_splits is 3 with a plan: None, or 4 as the plan was made with"),
        ({"batch_invariant": True}, "batch_invariant is true with a plan"),
    ):
        with pytest.raises(ferromla.InvalidArgument, match=text) as caught:
            problem.run(plan=plan, **options)
        assert caught.value.argument in options


@pytest.mark.parametrize("field", MISMATCHES)
def test_a_plan_for_other_shapes_is_refused_by_name(device, field):
    problem = problems.make(h=16, s_q=2, lens=[300, 10, 5], device=device)
    shapes = {"seq_lens": problem.lens, "num_heads": 16, "q_len": 2, "page_size": 64}
    plan = ferromla.Plan(**shapes | MISMATCHES[field](problem))
    out, lse = problems.poisoned_outputs(problem.q)
    with pytest.raises(ferromla.InvalidArgument, match=field) as caught:
        problem.run(plan=plan, out=out, lse=lse)
    assert caught.value.argument == "plan"
    assert bool(torch.isnan(out).all())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("others", [0, 7 << 32 | 3])
def test_ctas_in_step_wait_for_nobody_for_long(cuda, heads, others):
    """Of items of more than 16 tiles, by more CTAs than half of the GPU has place for. `others`: that do not get on."""
    problem = problems.make(h=heads, lens=[1090] * 70, device=cuda)
    plan = _plan(problem)
    word = plan.workspace[:64].view(torch.int64)[4:5]
    assert word.item() == 0
    word.fill_(others)
    for _ in range(2):
        problem.check(plan=plan)
        assert word.item() == others, "each CTA takes away what it has added"


@pytest.mark.gpu
def test_a_plan_for_another_device_is_refused(cuda):
    problem = problems.make(h=16, lens=[300, 10, 5], device=cuda)
    plan = ferromla.Plan(problem.lens.cpu(), num_heads=16, page_size=64)
    with pytest.raises(ferromla.InvalidArgument, match="device"):
        problem.run(plan=plan)


def test_update_with_another_batch_is_refused(device):
    problem = problems.make(h=16, lens=[300, 10, 5], device=device)
    plan = _plan(problem)
    for lens in (problem.lens[:2].contiguous(), problem.lens.long(), problem.lens[None]):
        with pytest.raises(ferromla.InvalidArgument) as caught:
            plan.update(lens)
        assert caught.value.argument == "seq_lens"
    problem.check(plan=plan)


def test_a_workspace_of_ones_own(device):
    problem = problems.make(h=16, lens=[3000, 10, 5], device=device)
    shapes = {"num_heads": 16, "page_size": 64, "max_seq_len": 4096, "device": str(problem.q.device)}
    need = ferromla.workspace_bytes(batch=3, **shapes)
    workspace = torch.empty(need, dtype=torch.uint8, device=device)
    plan = ferromla.Plan(problem.lens, **shapes, workspace=workspace)
    assert plan.workspace is workspace
    problem.check(plan=plan)
    with pytest.raises(ferromla.InvalidArgument) as caught:
        ferromla.Plan(problem.lens, **shapes, workspace=workspace[:-1])
    assert caught.value.argument == "workspace"


def test_a_plan_tells_what_it_is_for():
    plan = ferromla.Plan(torch.tensor([5, 6]).int(), num_heads=16, num_kv_heads=2, q_len=3, page_size=7)
    assert (plan.batch, plan.num_heads, plan.num_kv_heads, plan.q_len, plan.page_size) == (2, 16, 2, 3, 7)
    assert plan.device == "cpu"
    assert 0 < plan.plan_bytes <= plan.workspace.numel()
    assert "num_heads=16" in repr(plan)


ITEM_WORDS, MERGE_WORDS, HEADER_WORDS = 12, 28, 16


def _entries(plan):
    """The words of a plan that mean something: header, worker starts, used merges, used items."""
    words = plan.workspace[: plan.plan_bytes].cpu().view(torch.int32)
    workers, merges, items, scratch = (offset // 4 for offset in plan.plan_offsets)
    header = words[:HEADER_WORDS].tolist()
    used_items, used_merges = header[1:3]
    assert HEADER_WORDS <= workers < merges <= items <= scratch <= len(words)
    return {
        "header": header,
        "workers": words[workers:merges].tolist(),
        "merges": words[merges : merges + used_merges * MERGE_WORDS].tolist(),
        "items": words[items : items + used_items * ITEM_WORDS].tolist(),
    }


GRID = [
    {"num_heads": h, "q_len": s_q, "num_kv_heads": h_kv, **mode}
    for h, s_q, h_kv in [(1, 1, 1), (16, 1, 1), (128, 1, 1), (128, 2, 1), (9, 4, 3), (128, 4, 2), (16, 33, 1)]
    for mode in ({}, {"causal": False}, {"num_splits": 3}, {"num_splits": 1000}, {"batch_invariant": True})
]


@pytest.mark.gpu
@pytest.mark.parametrize("max_len", [1, 140, 4096, 70_000])
def test_host_and_device_make_the_same_plan(cuda, max_len):
    generator = torch.Generator().manual_seed(max_len)
    for options in GRID:
        splits = options.get("num_splits", 64 if "batch_invariant" in options else 1)
        most = 900 if splits == 1 else 300 if splits < 1000 else 2  # slots take memory
        for batch in (b for b in (0, 1, 2, 6, 64, 300, 900) if b <= most):
            lens = torch.randint(-2, max_len + 10, (batch,), generator=generator, dtype=torch.int32)
            shapes = options | {"page_size": 64, "max_seq_len": max_len, "device": "cuda:0"}
            need = ferromla.workspace_bytes(batch=batch, **shapes)
            # Zeroed, so that padding between the entries is equal too. One after the other: there is much of it.
            space = torch.zeros(need, dtype=torch.uint8, device=cuda)
            host = _entries(ferromla.Plan(lens, **shapes, workspace=space))
            device = _entries(ferromla.Plan(lens.to(cuda), **shapes, workspace=space.zero_()))
            assert host == device, (options, batch, lens)
            del space  # before there is another


RAGGED_GRID = [
    {"num_heads": h, "num_kv_heads": h_kv, **mode}
    for h, h_kv in [(1, 1), (16, 1), (128, 1), (9, 3)]
    for mode in ({}, {"causal": False}, {"num_splits": 3}, {"batch_invariant": True})
]


@pytest.mark.gpu
@pytest.mark.parametrize("t", [600, 1100, 4096, 9000])
def test_host_and_device_make_the_same_plan_of_many_units_of_one_part(cuda, t):
    lens = torch.randint(-2, 2100, (t,), dtype=torch.int32)
    shapes = {"num_heads": 64, "device": cuda}
    options = shapes | {"num_tokens": t, "topk": 2048}
    host, device = (ferromla.Plan.sparse_prefill(lens.to(on), **options) for on in ("cpu", cuda))
    for plan, on in ((host, "cpu"), (device, cuda)):
        plan.workspace.zero_()
        plan.update_sparse(lens.to(on))
    assert _entries(host) == _entries(device)
    device.update_sparse()  # all entries of all lists: where there are more than 1,024, those that are left are cut
    items = torch.tensor(_entries(device)["items"]).view(-1, ITEM_WORDS)
    tokens, begins, ends, parts = items[:, 3], items[:, 6], items[:, 7], items[:, 11]
    assert torch.equal(
        torch.zeros(t, dtype=torch.long).index_add_(0, tokens, (ends - begins).long()), torch.full((t,), 32)
    )
    assert torch.equal(tokens.bincount()[tokens], parts)
    options = shapes | {"page_size": 64, "num_splits": 1}
    spaces = [ferromla.Plan(lens, **options).workspace.zero_() for _ in range(2)]
    plans = [
        ferromla.Plan(given, **options, workspace=space)
        for given, space in zip((lens, lens.to(cuda)), spaces, strict=True)
    ]
    assert _entries(plans[0]) == _entries(plans[1])


@pytest.mark.gpu
@pytest.mark.parametrize("most", [1, 8, 700])
def test_host_and_device_make_the_same_ragged_plan(cuda, most):
    """Requests of up to ``most`` query tokens, then offsets that are no such thing."""
    generator = torch.Generator().manual_seed(most)
    for options in RAGGED_GRID:
        for batch in (0, 1, 2, 6, 64, 1500):
            lens = torch.randint(-2, 5000, (batch,), generator=generator, dtype=torch.int32)
            q_lens = torch.randint(0, most + 1, (batch,), generator=generator)
            indptr = problems.offsets(q_lens.tolist())
            tokens = int(indptr[-1])
            if tokens * options["num_heads"] > (60_000 if "num_splits" in options else 1_000_000):
                continue  # slots take memory, and items time to compare
            garbage = torch.randint(-9, tokens + 9, indptr.shape, generator=generator, dtype=torch.int32)
            shapes = options | {"page_size": 64, "max_seq_len": 4096, "device": "cuda:0", "num_tokens": tokens}
            need = ferromla.workspace_bytes(batch=batch, **shapes)
            for given in (indptr, garbage):
                spaces = [torch.zeros(need, dtype=torch.uint8, device=cuda) for _ in range(2)]
                host = ferromla.Plan(lens, qo_indptr=given, **shapes, workspace=spaces[0])
                device = ferromla.Plan(lens.to(cuda), qo_indptr=given.to(cuda), **shapes, workspace=spaces[1])
                assert _entries(host) == _entries(device), (options, batch, given)


@pytest.mark.gpu
@pytest.mark.parametrize("q_lens", [None, [1, 2, 3] * 230, [1] * 689 + [70]])
def test_many_requests_that_are_planned_on_the_device(cuda, q_lens):
    lens = torch.randint(0, 300, (690,), generator=torch.Generator().manual_seed(690)).tolist()
    lens = [max(length, tokens) for length, tokens in zip(lens, q_lens or [0] * 690, strict=True)]
    problems.make(h=16, lens=lens, q_lens=q_lens, device=cuda).check()


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"batch_invariant": True}])
def test_the_items_of_a_plan_cover_every_tile_once(options):
    lens = torch.tensor([5000, 0, 6, 64, 65]).int()
    plan = ferromla.Plan(lens, num_heads=16, page_size=64, max_seq_len=8192, **options)
    entries = _entries(plan)
    items = torch.tensor(entries["items"]).view(-1, ITEM_WORDS)
    assert entries["header"][0] == 7
    assert entries["header"][6] == len(lens), "units: every request has one row block"
    assert not any(entries["header"][7:])
    for request, length in enumerate(lens.tolist()):
        tiles = []
        for item in items[items[:, 0] == request].tolist():
            tiles += range(item[6], item[7])
        assert tiles == list(range(-(-length // 64)))
