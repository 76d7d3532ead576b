"""Calls one after another on a stream: each may begin before the one before it ends, and must see what that wrote."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ferromla

pytestmark = pytest.mark.gpu

BATCH, TOKENS, STEPS = 64, 1024, 30
CYCLES = 1_000_000  # that the GPU is kept busy for, so that a step's calls wait in the stream


def _steps(
    cuda: torch.device, kv_format: str, page_size: int, heads: int, wait: Callable[[], None]
) -> list[torch.Tensor]:
    """What steps give whose calls read what the call before has written and overwrite what it has read: a cache that is
    appended to and attended over, rows made of that, a plan for other lengths, ids by which rows are attended over and
    gathered.
    ``wait()`` comes after each call."""
    options = {"generator": torch.Generator(cuda).manual_seed(0), "device": cuda}
    pages = TOKENS // page_size
    caches = [ferromla.empty_kv_cache(BATCH * pages, page_size, kv_format, device=cuda).zero_() for _ in range(2)]
    table = torch.randperm(BATCH * pages, **options).int().view(BATCH, pages)
    plan = ferromla.Plan(table[:, 0], num_heads=heads, page_size=page_size, kv_format=kv_format)
    found = []
    for _ in range(STEPS):
        lens = [torch.randint(1, TOKENS, (BATCH,), dtype=torch.int32, **options) for _ in range(2)]
        last = [n.long()[:, None] - 1 for n in lens]
        slots = [(table.long().gather(1, p // page_size) * page_size + p % page_size)[:, 0] for p in last]
        rows = torch.randn(BATCH, 576, **options).bfloat16()
        q = torch.randn(BATCH, 1, heads, 576, **options).bfloat16()
        positions = torch.randint(0, TOKENS, (BATCH, 1, 200), dtype=torch.int32, **options)
        out, lse, ids = torch.zeros_like(q[..., :512]), torch.zeros_like(q[..., 0]).float(), torch.zeros_like(positions)
        listed = [torch.zeros_like(out), torch.zeros_like(lse)]
        torch.cuda._sleep(CYCLES)
        ferromla.append_kv(rows[:, :512], rows[:, 512:], caches[0], slots[0], kv_format=kv_format)
        wait()
        plan.update(lens[0])
        wait()
        ferromla.decode(q, caches[0], table, lens[0], plan=plan, out=out, lse=lse, kv_format=kv_format)
        wait()
        ferromla.append_kv(out[:, 0, -1], rows[:, 512:], caches[1], slots[1], kv_format=kv_format)
        wait()
        plan.update(lens[1])
        wait()
        ferromla.decode(q, caches[1], table, lens[1], plan=plan, out=out, lse=lse, kv_format=kv_format)
        wait()
        ferromla.to_physical(positions, table, page_size, out=ids)
        wait()
        ferromla.sparse_decode(q, caches[1], ids, out=listed[0], lse=listed[1], kv_format=kv_format)
        wait()
        gathered = ferromla.gather_kv(caches[1], ids=ids.flatten(), kv_format=kv_format)
        wait()
        found += [out, lse, ids, *listed, gathered]
    return found


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize(
    ("kv_format", "page_size"), [("bf16", 64), ("bf16", 1), ("fp8", 64), ("fp8_v32", 64), ("fp8_v32", 1)]
)
def test_steps_give_the_same_with_and_without_waits_between_their_calls(cuda, kv_format, page_size, heads):
    waited = _steps(cuda, kv_format, page_size, heads, torch.cuda.synchronize)
    at_once = _steps(cuda, kv_format, page_size, heads, lambda: None)
    torch.cuda.synchronize()
    names = ("out", "lse", "ids", "listed out", "listed lse", "rows")
    for i, (want, got) in enumerate(zip(waited, at_once, strict=True)):
        assert torch.equal(want, got), f"{names[i % len(names)]} of step {i // len(names)}"
        assert not want.isnan().any()


@pytest.mark.parametrize("is_current", [True, False], ids=["its default stream", "a stream of it"])
def test_calls_in_a_green_context_come_after_what_came_before(cuda, is_current):
    """Its default stream has the handle of the device's, and another order."""
    from torch.cuda.green_contexts import GreenContext

    given = {"generator": torch.Generator(cuda).manual_seed(0), "device": cuda, "dtype": torch.bfloat16}
    cache, wrong, right = (torch.randn(*shape, **given) for shape in ((16, 64, 576), (1, 1, 16, 576), (1, 1, 16, 576)))
    table, lens = torch.arange(16, device=cuda).int()[None], torch.tensor([1000], device=cuda).int()
    want = ferromla.decode(right, cache, table, lens)
    torch.cuda.synchronize()
    context = GreenContext.create(num_sms=64, device_id=0)
    stream = context.Stream()
    if is_current:
        context.set_context()
    try:
        with torch.cuda.stream(None if is_current else stream):
            plan = ferromla.Plan(lens, num_heads=16, page_size=64, num_sms=64)
            torch.cuda._sleep(20 * CYCLES)
            q = wrong.clone()
            q.copy_(right)
            got = ferromla.decode(q, cache, table, lens, plan=plan)
            got = [x.clone() for x in got]
            torch.cuda.current_stream().synchronize()
    finally:
        if is_current:
            context.pop_context()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
