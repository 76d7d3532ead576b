"""Streams, captured graphs and replays."""

from __future__ import annotations

import pytest
import torch

import ferromla
import graphs
import problems
import reference
import tolerance

pytestmark = pytest.mark.gpu


def _problem(cuda, **options):
    problem = problems.make(h=16, s_q=2, lens=[3000, 200, 64, 1000], device=cuda, **options)
    problem.cache.nan_to_num_(0.5)
    return problem


def _check_now(problem, out, lse):
    """Against whatever lengths and table the problem holds now."""
    torch.cuda.synchronize()
    keys, present = reference.gather(problem.cache, problem.table, problem.lens)
    tolerance.check(out, lse, *reference.attention(problem.q, keys, present, problem.lens))
    out.fill_(problems.NAN)
    lse.fill_(problems.NAN)


def _change(problem, lens):
    """Other lengths and another table, in place, as a server's step does."""
    problem.lens.copy_(torch.tensor(lens, dtype=torch.int32))
    problem.table.copy_(torch.randint_like(problem.table, problem.cache.shape[0]))


STEPS = ([1, 3000, 0, 64], [3100, 3100, 3100, 3100], [0, 0, 0, 0], [2, 65, 129, 2000])


@pytest.mark.parametrize("options", [{}, {"num_splits": 5}, {"batch_invariant": True}])
def test_a_graph_without_a_plan_replays_for_other_lengths_and_tables(cuda, options):
    problem = _problem(cuda)
    out, lse = problems.poisoned_outputs(problem.q)
    graph = graphs.captured(lambda: problem.run(out=out, lse=lse, **options))
    for lens in STEPS:
        _change(problem, lens)
        graph.replay()
        _check_now(problem, out, lse)


def test_a_graph_with_outputs_of_its_own(cuda):
    problem = _problem(cuda)
    kept = []

    def run():
        kept[:] = ferromla.decode(problem.q, problem.cache, problem.table, problem.lens)

    graph = graphs.captured(run)
    for lens in STEPS:
        _change(problem, lens)
        graph.replay()
        _check_now(problem, *kept)


def test_a_graph_with_a_plan_replays_after_update(cuda):
    problem = _problem(cuda)
    out, lse = problems.poisoned_outputs(problem.q)
    plan = ferromla.Plan(problem.lens, num_heads=16, q_len=2, page_size=64)
    graph = graphs.captured(lambda: problem.run(plan=plan, out=out, lse=lse))
    for lens in STEPS:
        _change(problem, lens)
        plan.update(problem.lens)
        graph.replay()
        _check_now(problem, out, lse)
        # From host lengths too, between replays.
        _change(problem, lens[::-1])
        plan.update(problem.lens.cpu())
        graph.replay()
        _check_now(problem, out, lse)


def test_a_captured_planning_kernel_replays(cuda):
    problem = _problem(cuda)
    out, lse = problems.poisoned_outputs(problem.q)
    plan = ferromla.Plan(problem.lens, num_heads=16, q_len=2, page_size=64)

    def run():
        plan.update(problem.lens)
        for _ in range(3):
            problem.run(plan=plan, out=out, lse=lse)

    graph = graphs.captured(run)
    for lens in STEPS:
        _change(problem, lens)
        graph.replay()
        _check_now(problem, out, lse)


RAGGED_STEPS = (
    ([1, 3000, 0, 64], [1, 40, 0, 7]),
    ([3100, 3100, 3100, 3100], [0, 0, 47, 1]),
    ([0, 0, 0, 0], [12, 12, 12, 12]),
    ([2, 65, 129, 2000], [3, 1, 1, 1]),  # fewer tokens than q has rows
)


def _ragged_problem(cuda):
    problem = problems.make(h=16, lens=[3000, 200, 64, 1000], q_lens=[40, 1, 0, 7], device=cuda)
    problem.cache.nan_to_num_(0.5)
    return problem


def _check_ragged_now(problem, out, lse):
    """Against whatever lengths, table and offsets the problem holds now; rows of nobody are NaN still."""
    torch.cuda.synchronize()
    keys, present = reference.gather(problem.cache, problem.table, problem.lens)
    want = reference.ragged_attention(problem.q, problem.indptr, keys, present, problem.lens)
    used = int(problem.indptr[-1])
    tolerance.check(out[:used], lse[:used], want[0][:used], want[1][:used])
    assert bool(torch.isnan(out[used:]).all())
    assert bool(torch.isnan(lse[used:]).all())
    out.fill_(problems.NAN)
    lse.fill_(problems.NAN)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_splits": 5}, {"batch_invariant": True}])
def test_a_captured_prefill_replays_for_other_lengths_and_offsets(cuda, planned, options):
    """Plan and layers in one graph; lengths, table and qo_indptr are overwritten in place."""
    problem = _ragged_problem(cuda)
    out, lse = problems.poisoned_outputs(problem.q)
    shapes = {"num_heads": 16, "page_size": 64, "qo_indptr": problem.indptr, "num_tokens": problem.q.shape[0]}
    plan = ferromla.Plan(problem.lens, **shapes, **options) if planned else None

    def run():
        if planned:
            plan.update(problem.lens)
        for _ in range(2):
            problem.run(out=out, lse=lse, **({"plan": plan} if planned else options))

    graph = graphs.captured(run)
    out.fill_(problems.NAN)
    lse.fill_(problems.NAN)
    for lens, q_lens in RAGGED_STEPS:
        _change(problem, lens)
        problem.indptr.copy_(problems.offsets(q_lens))
        graph.replay()
        _check_ragged_now(problem, out, lse)


def test_a_ragged_plan_is_updated_between_replays(cuda):
    problem = _ragged_problem(cuda)
    out, lse = problems.poisoned_outputs(problem.q)
    shapes = {"num_heads": 16, "page_size": 64, "num_tokens": problem.q.shape[0]}
    plan = ferromla.Plan(problem.lens, qo_indptr=problem.indptr, **shapes)
    graph = graphs.captured(lambda: problem.run(plan=plan, out=out, lse=lse))
    out.fill_(problems.NAN)
    lse.fill_(problems.NAN)
    for lens, q_lens in RAGGED_STEPS:
        _change(problem, lens)
        problem.indptr.copy_(problems.offsets(q_lens))
        for on_host in (False, True):
            given = (problem.lens.cpu(), problem.indptr.cpu()) if on_host else (problem.lens, problem.indptr)
            plan.update(*given)
            graph.replay()
            _check_ragged_now(problem, out, lse)


def test_cache_operations_replay(cuda):
    cache = torch.zeros(8, 64, 576, dtype=torch.bfloat16, device=cuda)
    rows = torch.randn(3, 576, device=cuda).bfloat16()
    slots = torch.tensor([1, 2, 3], device=cuda)
    table = torch.tensor([[1, 0]], dtype=torch.int32, device=cuda)
    lens = torch.tensor([100], dtype=torch.int32, device=cuda)
    gathered = torch.zeros(120, 576, dtype=torch.bfloat16, device=cuda)

    def run():
        ferromla.append_kv(rows[:, :512], rows[:, 512:], cache, slots)
        ferromla.gather_kv(cache, table, lens, out=gathered)

    graph = graphs.captured(run)
    slots.copy_(torch.tensor([64, 65, 20]))
    lens.fill_(90)
    cache.zero_()
    graph.replay()
    torch.cuda.synchronize()
    want = torch.cat([cache[1], cache[0]])
    want[90:] = 0
    assert torch.equal(gathered, want[:120])
    assert torch.equal(cache.view(-1, 576)[slots], rows)


@pytest.mark.parametrize("with_plan", [False, True])
def test_work_is_queued_on_the_current_stream(cuda, with_plan):
    """Behind a long wait on a side stream, with inputs that are written on that stream just before."""
    problem = _problem(cuda)
    want = [x.clone() for x in problem.run()]
    queries = problem.q.clone()
    problem.q.zero_()
    out, lse = problems.poisoned_outputs(queries)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        problem.q.copy_(queries)
        shapes = {"num_heads": 16, "q_len": 2, "page_size": 64, "kv_format": "bf16"}
        bound = {"max_seq_len": problem.table.shape[1] * 64}  # as a call without a plan has it
        plan = ferromla.Plan(problem.lens, **shapes, **bound) if with_plan else None
        problem.run(out=out, lse=lse, plan=plan)
        got = out.clone(), lse.clone()
    # Had it run on another stream it would be done, or have read zeros.
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_a_call_does_not_wait_for_the_device(cuda):
    problem = _problem(cuda)
    problem.run()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    plan = ferromla.Plan(problem.lens, num_heads=16, q_len=2, page_size=64)
    problem.run(plan=plan)
    problem.run()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_the_current_device_of_the_thread_is_kept(cuda):
    problem = _problem(cuda)
    before = torch.cuda.current_device()
    problem.check()
    assert torch.cuda.current_device() == before
    torch.zeros(1, device=cuda).add_(1).item()
