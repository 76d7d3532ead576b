"""Several GPUs in one process: calls go to the device of their tensors, whichever is current, from any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ferromla

pytestmark = [pytest.mark.gpu, pytest.mark.gpus]

BATCH, PAGES, PAGE_SIZE, HEADS, ROUNDS = 3, 5, 64, 16, 20
FORMATS = ("bf16", "fp8_v32")


def _inputs(device: torch.device, kv_format: str) -> dict[str, torch.Tensor]:
    """A cache and calls over it, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    tokens = BATCH * PAGES * PAGE_SIZE
    rows = torch.randn(tokens, 576, generator=generator).bfloat16().to(device)
    cache = ferromla.empty_kv_cache(BATCH * PAGES, PAGE_SIZE, kv_format, device=device)
    ferromla.append_kv(rows[:, :512], rows[:, 512:], cache, torch.arange(tokens, device=device), kv_format=kv_format)
    q = torch.randn(BATCH, 1, HEADS, 576, generator=generator).bfloat16()
    table = torch.randperm(BATCH * PAGES, generator=generator).int().view(BATCH, PAGES)
    positions = torch.randint(0, PAGES * PAGE_SIZE, (BATCH, 1, 70), generator=generator, dtype=torch.int32)
    lens = torch.tensor([PAGES * PAGE_SIZE, 1, 131], dtype=torch.int32)
    return {"cache": cache} | {
        name: x.to(device) for name, x in {"q": q, "table": table, "positions": positions, "lens": lens}.items()
    }


def _plan(given: dict[str, torch.Tensor], kv_format: str) -> ferromla.Plan:
    return ferromla.Plan(given["lens"], num_heads=HEADS, page_size=PAGE_SIZE, kv_format=kv_format)


def _results(given: dict[str, torch.Tensor], kv_format: str, plan: ferromla.Plan | None = None) -> list[torch.Tensor]:
    """What each kind of operation gives."""
    q, cache, table, lens = (given[name] for name in ("q", "cache", "table", "lens"))
    decoded = ferromla.decode(q, cache, table, lens, plan=plan, kv_format=kv_format)
    indptr = torch.arange(BATCH + 1, device=q.device, dtype=torch.int32)
    prefilled = ferromla.prefill(q[:, 0], cache, table, lens, indptr, kv_format=kv_format)
    ids = ferromla.to_physical(given["positions"], table, PAGE_SIZE)
    listed = ferromla.sparse_decode(q, cache, ids, kv_format=kv_format)
    merged = ferromla.merge_states(*decoded, *listed)
    gathered = ferromla.gather_kv(cache, ids=ids.flatten(), kv_format=kv_format)
    return [*decoded, *prefilled, ids, *listed, *merged, gathered]


def _on_device(number: int, kv_format: str, rounds: int = 1) -> list[torch.Tensor]:
    """Results of the last of some rounds, on the CPU."""
    device = torch.device("cuda", number)
    given = _inputs(device, kv_format)
    for _ in range(rounds):
        plan = _plan(given, kv_format)
        plan.update(given["lens"])
        found = _results(given, kv_format) + _results(given, kv_format, plan)
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
    given = _inputs(torch.device("cuda", 1), kv_format)
    _results(given | {"q": given["q"] * 1}, kv_format)  # loads what is loaded once, which waits for the device
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late = given | {"q": given["q"] * 1}  # there when the stream has come to it
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


@pytest.mark.parametrize("name", ["cache", "table", "lens", "out", "plan"])
def test_tensors_on_two_devices_are_refused(name):
    """By name, before anything is written."""
    given, other = (_inputs(torch.device("cuda", number), "bf16") for number in (0, 1))
    out = torch.full((BATCH, 1, HEADS, 512), 7.0, device="cuda:0", dtype=torch.bfloat16)
    plan = _plan(given, "bf16")
    if name == "out":
        out = out.to("cuda:1")
    elif name == "plan":
        plan = _plan(other, "bf16")
    else:
        given |= {name: other[name]}
    called = {"cache": "kv_cache", "table": "block_table", "lens": "seq_lens"}.get(name, name)
    with pytest.raises(ValueError, match=called):
        ferromla.decode(given["q"], given["cache"], given["table"], given["lens"], plan=plan, out=out)
    for number in (0, 1):
        torch.cuda.synchronize(number)
    assert bool((out == 7).all())


def test_a_graph_of_a_device_that_is_not_current():
    """Captured there, replayed while the other one is current."""
    given = _inputs(torch.device("cuda", 1), "bf16")
    plan = _plan(given, "bf16")
    out, lse = ferromla.decode(given["q"], given["cache"], given["table"], given["lens"], plan=plan)
    want = out.clone(), lse.clone()
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.update(given["lens"])
            ferromla.decode(given["q"], given["cache"], given["table"], given["lens"], plan=plan, out=out, lse=lse)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    torch.cuda.synchronize(1)
    with torch.cuda.device(0):
        graph.replay()
    torch.cuda.synchronize(1)
    _assert_same([out, lse], list(want))
