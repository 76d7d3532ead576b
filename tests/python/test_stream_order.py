"""Calls one after another on a stream: each may begin before the one before it ends, and must see what that wrote."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ferromla

pytestmark = pytest.mark.gpu

BATCH, PAGE_SIZE, PAGES, STEPS = 64, 64, 16, 30
CYCLES = 1_000_000  # that the GPU is kept busy for, so that a step's calls wait in the stream


def _steps(cuda: torch.device, kv_format: str, heads: int, wait: Callable[[], None]) -> list[torch.Tensor]:
    """What steps give whose calls read what the call before has written and overwrite what it has read: a cache that is
    appended to and attended over, rows made of that, a plan for other lengths, ids by which rows are gathered.
    ``wait()`` comes after each call."""
    options = {"generator": torch.Generator(cuda).manual_seed(0), "device": cuda}
    caches = [ferromla.empty_kv_cache(BATCH * PAGES, PAGE_SIZE, kv_format, device=cuda).zero_() for _ in range(2)]
    table = torch.randperm(BATCH * PAGES, **options).int().view(BATCH, PAGES)
    plan = ferromla.Plan(table[:, 0], num_heads=heads, page_size=PAGE_SIZE, kv_format=kv_format)
    found = []
    for _ in range(STEPS):
        lens = [torch.randint(1, PAGES * PAGE_SIZE, (BATCH,), dtype=torch.int32, **options) for _ in range(2)]
        last = [n.long()[:, None] - 1 for n in lens]
        slots = [(table.long().gather(1, p // PAGE_SIZE) * PAGE_SIZE + p % PAGE_SIZE)[:, 0] for p in last]
        rows = torch.randn(BATCH, 576, **options).bfloat16()
        q = torch.randn(BATCH, 1, heads, 576, **options).bfloat16()
        positions = torch.randint(0, PAGES * PAGE_SIZE, (BATCH, 1, 200), dtype=torch.int32, **options)
        out, lse, ids = torch.zeros_like(q[..., :512]), torch.zeros_like(q[..., 0]).float(), torch.zeros_like(positions)
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
        ferromla.to_physical(positions, table, PAGE_SIZE, out=ids)
        wait()
        gathered = ferromla.gather_kv(caches[1], ids=ids.flatten(), kv_format=kv_format)
        wait()
        found += [out, lse, ids, gathered]
    return found


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "fp8_v32"])
def test_steps_give_the_same_with_and_without_waits_between_their_calls(cuda, kv_format, heads):
    waited = _steps(cuda, kv_format, heads, torch.cuda.synchronize)
    at_once = _steps(cuda, kv_format, heads, lambda: None)
    torch.cuda.synchronize()
    for i, (want, got) in enumerate(zip(waited, at_once, strict=True)):
        assert torch.equal(want, got), f"{('out', 'lse', 'ids', 'rows')[i % 4]} of step {i // 4}"
        assert not want.isnan().any()
