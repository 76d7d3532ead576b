"""Parts with steps (``batch_invariant``, 16-bit caches): the same bits however many CTAs have a request."""

from __future__ import annotations

import math

import pytest
import torch

import ferromla
import problems
import problems_sparse
import reference
import tolerance

pytestmark = pytest.mark.gpu

# On few multiprocessors whole parts are one CTA's, on many each step may have one.
SM_COUNTS = (132, 66, 20, 8)
# Around ends of steps, of two, four and eight tiles, of 64 rows 32, of parts, and of what one CTA takes whole.
LENS = (1, 64, 65, 128, 129, 256, 1000, 1024, 1025, 3072, 3073, 4096, 6200, 0, 8192, 8193, 20_000)


def _same_bits(got, want):
    for ours, theirs in zip(got, want, strict=True):
        kind = torch.int16 if ours.element_size() == 2 else torch.int32
        assert torch.equal(ours.view(kind), theirs.view(kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("d_qk", "page_size"), [(576, 64), (512, 64), (576, 1), (512, 20)])
@pytest.mark.parametrize(
    ("h", "s_q"), [(1, 1), (16, 1), (8, 2), (20, 1), (16, 2), (4, 8), (33, 1), (64, 1), (128, 1), (50, 3), (16, 31)]
)
def test_pages(cuda, dtype, d_qk, page_size, h, s_q):
    problem = problems.make(h=h, s_q=s_q, lens=LENS, d_qk=d_qk, page_size=page_size, dtype=dtype, device=cuda)
    sink = torch.linspace(-2, 3, h, device=cuda)
    want = problem.run(batch_invariant=True, attn_sink=sink)
    tolerance.check(*want, *problem.expected(attn_sink=sink))
    shape = {"num_heads": h, "q_len": s_q, "page_size": page_size, "batch_invariant": True}
    for num_sms in SM_COUNTS:
        plan = ferromla.Plan(problem.lens, num_sms=num_sms, **shape)
        out, lse = problems.poisoned_outputs(problem.q)
        _same_bits(problem.run(plan=plan, attn_sink=sink, out=out, lse=lse), want)


@pytest.mark.parametrize(("h", "s_q"), [(50, 1), (16, 4), (128, 1)])
def test_stored_steps(cuda, h, s_q):
    """Of 64 rows: units of two steps that are whole, one after another in the slots of a CTA, or cut, and of three and
    more; of 128, which have parts."""
    lens = [2049, 2100, 4096, 64, 2048, 2050, 0, 4097, 3000, 2200, 6200, 2500]
    problem = problems.make(h=h, s_q=s_q, lens=lens, d_qk=512, device=cuda)
    want = problem.run(batch_invariant=True)
    tolerance.check(*want, *problem.expected())
    for num_sms in (132, 48, 8):
        plan = ferromla.Plan(problem.lens, num_heads=h, q_len=s_q, page_size=64, batch_invariant=True, num_sms=num_sms)
        out, lse = problems.poisoned_outputs(problem.q)
        _same_bits(problem.run(plan=plan, out=out, lse=lse), want)


@pytest.mark.parametrize("h", [16, 128])
@pytest.mark.parametrize("request_number", range(0, len(LENS), 3))
def test_a_request_alone(cuda, h, request_number):
    """Without other requests a long one is shared out to all multiprocessors."""
    problem = problems.make(h=h, lens=LENS, device=cuda)
    want = problem.run(batch_invariant=True)
    one = [request_number]
    _same_bits(problem.of(one).run(batch_invariant=True), [x[one] for x in want])


@pytest.mark.parametrize("h", [9, 32, 64, 128])
@pytest.mark.parametrize("extra", [None, (400, 333, 9)])
def test_lists(cuda, h, extra):
    problem = problems_sparse.decode(b=7, s_q=2, h=h, topk=5000, extra=extra, lens="row", device=cuda)
    want = problem.check(batch_invariant=True)
    for num_sms in SM_COUNTS:
        formats = {"kv_format": "bf16", "extra_kv_format": "bf16"} if extra else {}
        plan = problem.plan(batch_invariant=True, num_sms=num_sms, **formats)
        _same_bits(problem.run(plan=plan), want)


@pytest.mark.parametrize(("h", "s_q"), [(16, 1), (8, 3), (64, 1), (50, 3), (128, 1)])
@pytest.mark.parametrize("columns", [1, 5, 17, 40])
def test_lengths_past_the_table(cuda, h, s_q, columns):
    """Steps that a plan has, but no page, leave nothing: what was in their slots is not read."""
    problem = problems.make(h=h, s_q=s_q, lens=[64 * columns] * 5, device=cuda)
    problem.table = problem.table[:, :columns].contiguous()
    tolerance.check(*problem.run(batch_invariant=True), *problem.expected())
    problem.lens = torch.tensor([4096, 64 * columns + 1, 64 * columns, 9000, 300], dtype=torch.int32, device=cuda)
    shape = {"num_heads": h, "q_len": s_q, "page_size": 64, "batch_invariant": True}
    plans = [ferromla.Plan(problem.lens, num_sms=num_sms, **shape) for num_sms in SM_COUNTS]
    for plan in plans:  # leaves NaN in slots
        full = problems.make(h=h, s_q=s_q, lens=[9000] * 5, device=cuda)
        full.q.fill_(math.nan)
        full.run(plan=plan)
    want = problem.run(plan=plans[0])
    keys, present = reference.gather(problem.cache, problem.table, problem.lens)
    seen = problem.lens.clamp(max=64 * columns)
    tolerance.check(*want, *reference.attention(problem.q, keys, present, seen))
    for plan in plans[1:]:
        _same_bits(problem.run(plan=plan), want)


@pytest.mark.parametrize("h", [16, 64])
def test_scores_that_rise_and_fall(cuda, h):
    """Steps of very different weight: the first, the last or one between has nearly all of it."""
    problem = problems.make(h=h, lens=[4096] * 6, device=cuda)
    cache = problem.cache.view(-1, problem.cache.shape[-1])
    slots = problem.table[:, torch.arange(4096, device=cuda) // problem.cache.shape[1]].long() * problem.cache.shape[1]
    slots += torch.arange(4096, device=cuda) % problem.cache.shape[1]
    for r, token in enumerate((0, 255, 256, 2000, 3071, 4095)):
        cache[slots[r, token]] = problem.q[r, 0, 3] * 2
    want = problem.run(batch_invariant=True)
    assert bool((want[1][:, 0, 3] > 100).all())
    for num_sms in SM_COUNTS:
        plan = ferromla.Plan(problem.lens, num_heads=h, page_size=64, batch_invariant=True, num_sms=num_sms)
        _same_bits(problem.run(plan=plan), want)


@pytest.mark.parametrize("h", [16, 64])
def test_a_row_of_nan_is_no_other_row_s(cuda, h):
    problem = problems.make(h=h, lens=[4096, 700], device=cuda)
    want = problem.run(batch_invariant=True)
    problem.q[0, 0, 5] = math.nan
    out, lse = problem.run(batch_invariant=True)
    assert bool(out[0, 0, 5].isnan().all())
    assert bool(lse[0, 0, 5].isnan())
    rest = torch.arange(h, device=cuda) != 5
    _same_bits((out[:, :, rest], lse[:, :, rest]), [x[:, :, rest] for x in want])


@pytest.mark.parametrize("h", [16, 64])
def test_a_plan_in_steps_is_for_numbers_of_16_bits(cuda, h):
    problem = problems.make(h=h, lens=[500, 4096], device=cuda)
    plan = ferromla.Plan(problem.lens, num_heads=h, page_size=64, batch_invariant=True)
    quantised = problem.quantised("fp8")
    out, lse = problems.poisoned_outputs(problem.q)
    with pytest.raises(ferromla.InvalidArgument, match=f"plan is laid out for {h} query rows per CTA, in steps"):
        quantised.run(plan=plan, out=out, lse=lse)
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())
