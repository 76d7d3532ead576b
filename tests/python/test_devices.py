"""Several GPUs in one process: calls go to the device of their tensors, whichever is current, from any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import ferromla
import problems
from ferromla.compat import flash_mla, flashinfer

pytestmark = [pytest.mark.gpu, pytest.mark.gpus]

HEADS, PAGE_SIZE, ROUNDS = 16, 64, 20
FORMATS = ("bf16", "fp8_v32")


def _problem(device: torch.device, kv_format: str) -> problems.Problem:
    """The same numbers on every device; the first token of each request is appended anew."""
    problem = problems.make(h=HEADS, page_size=PAGE_SIZE, lens=[320, 70, 131], device=device)
    if kv_format != "bf16":
        problem = problem.quantised(kv_format)
    rows, slots = problem.keys[:, 0, 0].bfloat16(), problem.table[:, 0].long() * PAGE_SIZE
    ferromla.append_kv(rows[:, :512], rows[:, 512:], problem.cache, slots, kv_format=kv_format)
    return problem


def _plan(problem: problems.Problem, kv_format: str) -> ferromla.Plan:
    return ferromla.Plan(problem.lens, num_heads=HEADS, page_size=PAGE_SIZE, kv_format=kv_format)


def _results(problem: problems.Problem, kv_format: str, plan: ferromla.Plan | None = None) -> list[torch.Tensor]:
    """What each kind of operation gives."""
    q, cache, table = problem.q, problem.cache, problem.table
    decoded = problem.run(plan=plan)
    indptr = torch.arange(len(q) + 1, device=q.device, dtype=torch.int32)
    prefilled = ferromla.prefill(q[:, 0], cache, table, problem.lens, indptr, kv_format=kv_format)
    positions = torch.arange(70, device=q.device, dtype=torch.int32).flip(0).expand(len(q), 1, 70)
    ids = ferromla.to_physical(positions, table, PAGE_SIZE)
    listed = ferromla.sparse_decode(q, cache, ids, kv_format=kv_format)
    merged = ferromla.merge_states(*decoded, *listed)
    gathered = ferromla.gather_kv(cache, ids=ids.flatten(), kv_format=kv_format)
    return [*decoded, *prefilled, ids, *listed, *merged, gathered]


def _on_device(number: int, kv_format: str, rounds: int = 1) -> list[torch.Tensor]:
    """Results of the last of some rounds, on the CPU."""
    device = torch.device("cuda", number)
    problem = _problem(device, kv_format)
    for _ in range(rounds):
        plan = _plan(problem, kv_format)
        plan.update(problem.lens)
        found = _results(problem, kv_format) + _results(problem, kv_format, plan)
    assert all(x.device == device for x in found)
    return [x.cpu() for x in found]


def _assert_same(found: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Bit for bit: the devices are alike."""
    assert len(found) == len(want)
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_device_that_is_not_current(kv_format):
    """Results are those of the device that is, which stays so."""
    with torch.cuda.device(0):
        want, found = (_on_device(number, kv_format) for number in (0, 1))
        assert torch.cuda.current_device() == 0
    assert not any(x.isnan().any() for x in want if x.is_floating_point())
    _assert_same(found, want)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_side_stream_of_a_device_that_is_not_current(kv_format):
    """Calls go to the stream that is current on the device of their tensors."""
    want = _on_device(0, kv_format)
    problem = _problem(torch.device("cuda", 1), kv_format)
    _results(replace(problem, q=problem.q * 1), kv_format)  # loads what is loaded once, which waits for the device
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late = replace(problem, q=problem.q * 1)  # there when the stream has come to it
        with torch.cuda.device(0):
            found = _results(late, kv_format)
    assert not stream.query()
    stream.synchronize()
    _assert_same([x.cpu() for x in found], want[: len(found)])


def test_threads_on_two_devices_at_once():
    """Each its own device, over and over."""
    want = _on_device(0, "bf16")
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(_on_device, number, "bf16", ROUNDS) for number in (0, 1)]
        for future in futures:
            _assert_same(future.result(), want)


def test_a_plan_of_another_device_is_refused():
    """Before anything is written."""
    problem, other = (_problem(torch.device("cuda", number), "bf16") for number in (0, 1))
    out, lse = problems.poisoned_outputs(problem.q)
    with pytest.raises(ferromla.InvalidArgument) as caught:
        problem.call(plan=_plan(other, "bf16"), out=out, lse=lse)
    assert caught.value.argument == "plan"
    for number in (0, 1):
        torch.cuda.synchronize(number)
    assert bool(out.isnan().all())


def test_a_graph_of_a_device_that_is_not_current():
    """Captured there, replayed while the other one is current."""
    problem = _problem(torch.device("cuda", 1), "bf16")
    plan = _plan(problem, "bf16")
    out, lse = problem.run(plan=plan)
    want = out.clone(), lse.clone()
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.update(problem.lens)
            problem.call(plan=plan, out=out, lse=lse)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    torch.cuda.synchronize(1)
    with torch.cuda.device(0):
        graph.replay()
    torch.cuda.synchronize(1)
    _assert_same([out, lse], list(want))


def _by_interfaces_of_others(number: int) -> list[torch.Tensor]:
    """Of requests of one query token each, by FlashMLA's and FlashInfer's interfaces."""
    device = torch.device("cuda", number)
    problem = _problem(device, "bf16")
    q, cache, table, lens = problem.q, problem.cache, problem.table, problem.lens
    metadata, num_splits = flash_mla.get_mla_metadata()
    found = flash_mla.flash_mla_with_kvcache(q, cache.unsqueeze(2), table, lens, 512, metadata, num_splits)
    pages = -(-lens // PAGE_SIZE)
    ends = torch.cat([pages.new_zeros(1), pages.cumsum(0)]).int()
    used = torch.arange(table.shape[1], device=device) < pages[:, None]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(0, device=device))
    sizes = (HEADS, 512, 64, PAGE_SIZE, True, 576**-0.5, q.dtype, cache.dtype)
    wrapper.plan(torch.arange(len(lens) + 1).int(), ends, table[used], lens, *sizes)
    parts = q[:, 0, :, :512], q[:, 0, :, 512:], cache[..., :512], cache[..., 512:]
    found = *found, *wrapper.run(*parts, return_lse=True)
    assert all(x.device == device for x in found)
    return [x.cpu() for x in found]


def test_interfaces_of_other_libraries_on_a_device_that_is_not_current():
    with torch.cuda.device(0):
        want, found = (_by_interfaces_of_others(number) for number in (0, 1))
    _assert_same(found, want)
    assert torch.equal(want[0][:, 0], want[2])
