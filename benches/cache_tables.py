"""The tables of operations on caches and on indices: they move bytes, so their floor is reading and writing them."""

from __future__ import annotations

from collections.abc import Callable

import torch

import ferromla
import sparse_shapes
from attention_tables import FLOOR, Bench
from measure import cache_of, format_options, rotated, times_us
from report import SHAPE, US, Column
from shapes import PAGE_SIZE, TOKEN_BYTES

COLUMNS: tuple[Column, ...] = (SHAPE, US, FLOOR, ("GB/s", "gb_s", "{:.0f}"), ("right", "right", "{}"))
# What is compared with the CPU backend: bytes or numbers, equal bit for bit.
COMPARED = 1 << 22

Made = tuple[Callable[[], object], Callable[[], bool]]


def _measure(bench: Bench, name: str, moved: int, make: Callable[[], Made]) -> None:
    """One line: ``make`` gives a call on inputs of its own, and whether its result is right."""
    if not bench.wanted(name):
        return
    made = rotated(make, moved, bench.device)
    (us,) = times_us([call for call, _ in made], device=bench.device)
    right = made[0][1]()
    if not right:
        bench.wrong.append(name)
    floor = sparse_shapes.floor_us(moved)
    bench.report.row(name=name, us=us, floor=floor / us, gb_s=moved / us / 1e3, right="yes" if right else "no")
    del made
    bench.forget()


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal bytes, on the CPU."""
    flat = [x.cpu().contiguous().view(torch.uint8).flatten()[:COMPARED] for x in (ours, theirs)]
    return torch.equal(*flat)


def _d_qk(kv_format: str) -> int:
    return 576 if kv_format in ("bf16", "fp8", "fp8_v32") else 512


def _append(bench: Bench, kv_format: str, tokens: int) -> Made:
    # Twice as many slots as tokens: there may be hundreds of these caches.
    pages = max(4, 2 * tokens // PAGE_SIZE)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    cache = cache_of(kv_format, pages, PAGE_SIZE, _d_qk(kv_format), **options)
    kv_c = torch.randn(tokens, 512, **options)
    k_pe = torch.randn(tokens, 64, **options) if _d_qk(kv_format) == 576 else None
    slots = torch.randperm(pages * PAGE_SIZE, device=bench.device)[:tokens]
    kept = cache.cpu()

    def right() -> bool:
        on_cpu = None if k_pe is None else k_pe.cpu()
        ferromla.append_kv(kv_c.cpu(), on_cpu, kept, slots.cpu(), **format_options(kv_format))
        return _same(cache, kept)

    return lambda: ferromla.append_kv(kv_c, k_pe, cache, slots, **format_options(kv_format)), right


def _quantize(bench: Bench, kv_format: str, pages: int) -> Made:
    kv = torch.randn(pages, PAGE_SIZE, _d_qk(kv_format), device=bench.device, dtype=torch.bfloat16)
    out = ferromla.quantize_kv(kv, kv_format)
    few = slice(0, min(pages, 64))
    return (
        lambda: ferromla.quantize_kv(kv, kv_format, out=out),
        lambda: _same(out[few], ferromla.quantize_kv(kv[few].cpu(), kv_format)),
    )


def _dequantize(bench: Bench, kv_format: str, pages: int) -> Made:
    cache = cache_of(kv_format, pages, PAGE_SIZE, _d_qk(kv_format), device=bench.device, dtype=torch.bfloat16)
    out = ferromla.dequantize_kv(cache, kv_format)
    few = slice(0, min(pages, 64))
    return (
        lambda: ferromla.dequantize_kv(cache, kv_format, out=out),
        lambda: _same(out[few], ferromla.dequantize_kv(cache[few].cpu(), kv_format)),
    )


def _gather(bench: Bench, kv_format: str, pages: int) -> Made:
    d_qk = _d_qk(kv_format)
    cache = cache_of(kv_format, pages, PAGE_SIZE, d_qk, device=bench.device, dtype=torch.bfloat16)
    ids = torch.randperm(pages * PAGE_SIZE, device=bench.device)
    out = torch.empty(len(ids), d_qk, device=bench.device, dtype=torch.bfloat16)
    few = ids[:4096]
    return (
        lambda: ferromla.gather_kv(cache, ids=ids, out=out, **format_options(kv_format)),
        lambda: _same(out[:4096], ferromla.gather_kv(cache.cpu(), ids=few.cpu(), **format_options(kv_format))),
    )


def cache_ops(bench: Bench) -> None:
    """append_kv, quantize_kv, dequantize_kv and gather_kv: bytes read and written at the rate of reading."""
    bench.report.table(
        "cache_ops", "Operations on caches, bf16 rows, page 64; right: as on the CPU, bit for bit", COLUMNS
    )
    pages = 4 if bench.small else sparse_shapes.WHOLE_PAGES
    for kv_format in sparse_shapes.CACHE_FORMATS:
        row = 2 * _d_qk(kv_format)
        both = row + sparse_shapes.token_bytes(kv_format, _d_qk(kv_format))
        for count in sparse_shapes.APPENDED:
            tokens = min(count, pages * PAGE_SIZE)
            name = f"append_kv {count} tokens, {kv_format}"
            _measure(bench, name, tokens * (both + 8), lambda f=kv_format, t=tokens: _append(bench, f, t))
        whole = pages * PAGE_SIZE
        operations: dict[str, tuple[int, Callable]] = {"gather_kv": (whole * (both + 8), _gather)}
        if kv_format in TOKEN_BYTES:
            operations |= {"quantize_kv": (whole * both, _quantize), "dequantize_kv": (whole * both, _dequantize)}
        for operation, (moved, make) in operations.items():
            name = f"{operation} {sparse_shapes.WHOLE_PAGES * PAGE_SIZE} tokens, {kv_format}"
            _measure(bench, name, moved, lambda f=kv_format, m=make: m(bench, f, pages))


def _to_physical(bench: Bench, rows: int, topk: int) -> Made:
    context = sparse_shapes.INDEX_CONTEXT
    requests = min(rows, 128)
    table = torch.randint(1 << 16, (requests, context // PAGE_SIZE), device=bench.device, dtype=torch.int32)
    indices = torch.randint(-2, context, (requests, rows // requests, topk), device=bench.device, dtype=torch.int32)
    out = torch.empty_like(indices)

    def right() -> bool:
        position = indices.clamp(min=0).long()
        page = table.long().gather(1, (position // PAGE_SIZE).flatten(1)).view_as(position)
        want = torch.where(indices < 0, -1, page * PAGE_SIZE + position % PAGE_SIZE)
        return torch.equal(out.long(), want)

    return lambda: ferromla.to_physical(indices, table, PAGE_SIZE, out=out), right


def _combine(bench: Bench, rows: int, topk: int, window: int, ratio: int) -> Made:
    device = bench.device
    requests = min(rows, 8)
    position = torch.arange(rows, device=device, dtype=torch.int32) + 4096
    request = torch.arange(rows, device=device, dtype=torch.int32) * requests // rows
    base, window_base = (torch.randint(1 << 20, (requests,), device=device, dtype=torch.int32) for _ in range(2))
    first = torch.zeros(requests, device=device, dtype=torch.int32)
    chosen = torch.randint(1024, (rows, topk), device=device, dtype=torch.int32)
    options = {"ratio": ratio, "window": window, "compressed_base": base, "window_base": window_base}
    options |= {"first_pos": first}
    indices, lengths = ferromla.combine_topk_window(chosen, position, request, **options)

    def right() -> bool:
        k = ((position + 1) // ratio).clamp(max=topk)[:, None]
        w = (position + 1).clamp(max=window)[:, None]
        column = torch.arange(indices.shape[1], device=device)
        in_window = (window_base[request] + position - w[:, 0] + 1)[:, None] + column - k
        compressed = torch.nn.functional.pad(chosen, (0, indices.shape[1] - topk)) + base[request][:, None]
        want = torch.where(column < k, compressed, torch.where(column < k + w, in_window, -1))
        return torch.equal(indices.long(), want.long()) and torch.equal(lengths.long(), (k + w)[:, 0].long())

    outputs = {"out": indices, "lengths": lengths}
    return lambda: ferromla.combine_topk_window(chosen, position, request, **options, **outputs), right


def _window(bench: Bench, requests: int, queries: int) -> Made:
    device, window = bench.device, sparse_shapes.WINDOW
    context = max(sparse_shapes.INDEX_CONTEXT // 16, queries)
    lens = torch.randint(max(queries, window), context + 1, (requests,), device=device, dtype=torch.int32)
    asked = torch.full_like(lens, queries)
    table = torch.randint(1 << 16, (requests, -(-context // PAGE_SIZE)), device=device, dtype=torch.int32)
    most = requests * (queries + window - 1)
    options = {"page_size": PAGE_SIZE, "window": window, "num_tokens": most}
    ids, offsets, first = ferromla.window_token_ids(lens, asked, table, **options)

    def right() -> bool:
        begin = (lens - queries - window + 1).clamp(min=0).long()
        spans = [torch.arange(b, e, device=device) for b, e in zip(begin.tolist(), lens.tolist(), strict=True)]
        pages = [table[r].long()[span // PAGE_SIZE] * PAGE_SIZE + span % PAGE_SIZE for r, span in enumerate(spans)]
        want = torch.cat(pages)
        same = torch.equal(ids[: len(want)].long(), want) and torch.equal(first.long(), begin)
        return same and offsets[-1].item() == len(want)

    return lambda: ferromla.window_token_ids(lens, asked, table, **options, out=ids), right


def index_ops(bench: Bench) -> None:
    """to_physical, window_token_ids, combine_topk_window."""
    bench.report.table("index_ops", "Operations on indices; right: as torch computes them", COLUMNS)
    for count, topk in sparse_shapes.TO_PHYSICAL:
        rows = min(count, 64) if bench.small else count
        name = f"to_physical {count} x {topk}"
        _measure(bench, name, 8 * rows * topk, lambda r=rows, k=topk: _to_physical(bench, r, k))
    for requests, queries in sparse_shapes.WINDOWS:
        small = (min(requests, 4), min(queries, 64)) if bench.small else (requests, queries)
        moved = 4 * small[0] * (small[1] + sparse_shapes.WINDOW - 1)
        name = f"window_token_ids {requests} x {queries}"
        _measure(bench, name, moved, lambda s=small: _window(bench, *s))
    for count, topk, window, ratio in sparse_shapes.COMBINED:
        rows = min(count, 64) if bench.small else count
        width = -(-(topk + window) // 128) * 128
        name = f"combine_topk_window {count} x ({topk} + {window})"
        moved = 4 * rows * (topk + width)
        _measure(bench, name, moved, lambda r=rows, k=topk, w=window, x=ratio: _combine(bench, r, k, w, x))
