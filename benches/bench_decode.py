"""Dense decode on the GPU: time, error, and how near the hardware's limits, one line per shape.

    python benches/bench_decode.py [--rows b128] [--dtype fp16] [--json FILE] [--plot FILE] [--markdown]

Each call is replayed from a CUDA graph over inputs that are rotated so that no replay finds its cache in L2;
times are the median of seven measurements and hold everything a layer launches (the main kernel and the
combination), not the planning, which is once per step. The error is that of the timed inputs against float64.
The GPU's own read and matrix rates are measured in the same run, since they drift by some percent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import ferromla
from shapes import D_QK, D_V, MATRIX_RATE, PAGE_SIZE, READ_RATE, ROWS, Row

L2_BYTES = 60 << 20
REPEATS = 7
NAN = float("nan")


@dataclass
class Result:
    """A measured line."""

    name: str
    us: float
    floor: float  # the floor's share of the time: 1 is the limit
    flashmla: float  # time relative to FlashMLA's
    gb_s: float
    tflop_s: float
    error: float  # largest |x - reference| of out
    angle: float  # 1 - 2<x,y>/(|x|^2 + |y|^2) of out
    lse_error: float
    flashinfer_us: float | None = None


class Inputs:
    """One set of inputs: shuffled pages, NaN in the tail of every last page and in the outputs."""

    def __init__(self, row: Row, lens: torch.Tensor, dtype: torch.dtype) -> None:
        self.lens = lens.int().cuda()
        pages = -(-lens // PAGE_SIZE)
        columns, total = int(pages.max()), int(pages.sum())
        used = torch.arange(columns) < pages[:, None]
        table = torch.full((row.batch, columns), 2147480000, dtype=torch.int32)
        table[used] = torch.randperm(total).int()
        self.table = table.cuda()
        self.cache = torch.randn(total, PAGE_SIZE, D_QK, device="cuda", dtype=dtype) * 0.1
        last = self.table.gather(1, (pages[:, None] - 1).cuda())[:, 0]
        position = torch.arange(PAGE_SIZE, device="cuda")
        beyond = position > ((self.lens - 1) % PAGE_SIZE)[:, None]
        self.cache[last.long()] = self.cache[last.long()].masked_fill(beyond[..., None], NAN)
        self.q = torch.randn(row.batch, row.q_len, row.heads, D_QK, device="cuda", dtype=dtype) * 3
        self.out = torch.full((*self.q.shape[:-1], D_V), NAN, device="cuda", dtype=dtype)
        self.lse = torch.full(self.q.shape[:-1], NAN, device="cuda")


def lengths(row: Row) -> torch.Tensor:
    """The row's lengths, on the host."""
    if not row.spread:
        return torch.full((row.batch,), row.seq)
    normal = torch.randn(row.batch, generator=torch.Generator().manual_seed(0)) * row.spread + row.seq
    return normal.round().long().clamp(row.q_len, 2 * row.seq)


def reference(inputs: Inputs, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention of one request, causal over its last tokens."""
    length, q = int(inputs.lens[request]), inputs.q[request].double()
    keys = inputs.cache[inputs.table[request, : -(-length // PAGE_SIZE)].long()].view(-1, D_QK)[:length].double()
    scores = torch.einsum("qhd,sd->qhs", q, keys) * D_QK**-0.5
    last = length - q.shape[0] + torch.arange(q.shape[0], device="cuda")
    scores.masked_fill_(torch.arange(length, device="cuda") > last[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]) @ keys[:, :D_V], lse


def errors(inputs: Inputs) -> tuple[float, float, float]:
    """Over every request: largest error of out, its angle error, largest error of lse. NaN where one is."""
    worst, worst_lse, product, squares = 0.0, 0.0, 0.0, 0.0
    for request in range(len(inputs.lens)):
        want, want_lse = reference(inputs, request)
        out = inputs.out[request].double()
        worst = _larger(worst, (out - want).abs().max())
        worst_lse = _larger(worst_lse, (inputs.lse[request] - want_lse).abs().max())
        product += float((out * want).sum())
        squares += float((out * out).sum() + (want * want).sum())
    return worst, 1 - 2 * product / squares, worst_lse


def _larger(x: float, y: torch.Tensor) -> float:
    return max(x, float(y)) if not torch.isnan(y) else NAN


def replay_us(calls: list[Callable[[], None]]) -> float:
    """Median microseconds of one call: a CUDA graph of all of them in turn, replayed back to back."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    once = _time_ms(graph, 1) / len(calls)
    replays = max(1, int(20 / max(once * len(calls), 1e-3)))
    return statistics.median(_time_ms(graph, replays) for _ in range(REPEATS)) * 1e3 / len(calls)


def _time_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / replays


def measure(row: Row, dtype: torch.dtype, rival: Callable[..., Any] | None) -> Result:
    """One line of the table."""
    torch.manual_seed(0)
    lens = lengths(row)
    cache_bytes = int(lens.sum()) * D_QK * 2
    copies = 1 + -(-4 * L2_BYTES // cache_bytes)
    # Enough calls in a graph that its own launch does not count.
    sets = [Inputs(row, lens, dtype) for _ in range(min(copies, 400))]
    plan = ferromla.Plan(sets[0].lens, num_heads=row.heads, q_len=row.q_len, page_size=PAGE_SIZE)

    def call(inputs: Inputs) -> Callable[[], None]:
        return lambda: ferromla.decode(
            inputs.q, inputs.cache, inputs.table, inputs.lens, plan=plan, out=inputs.out, lse=inputs.lse
        )

    us = replay_us([call(inputs) for inputs in sets])
    error, angle, lse_error = errors(sets[0])
    size = cache_bytes + sets[0].q.numel() * 2 + sets[0].out.numel() * 2
    operations = 2 * (D_QK + D_V) * row.heads * row.q_len * int(lens.sum())
    return Result(
        name=row.name,
        us=us,
        floor=row.floor_us / us,
        flashmla=us / row.flashmla_us,
        gb_s=size / us / 1e3,
        tflop_s=operations / us / 1e6,
        error=error,
        angle=angle,
        lse_error=lse_error,
        flashinfer_us=rival(row, sets) if rival else None,
    )


def read_rate() -> float:
    """GB/s of a reduction over 4 GiB."""
    x = torch.ones(1 << 30, device="cuda")
    total = torch.empty((), device="cuda")
    return x.numel() * 4 / replay_us([lambda: torch.sum(x, 0, out=total)]) / 1e3


def matrix_rate() -> float:
    """TFLOP/s of a bf16 matrix product of 8192 cubed, on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / replay_us([lambda: torch.mm(a, b, out=out)]) / 1e6


def flashinfer_rival() -> Callable[..., float] | None:
    """FlashInfer's MLA decode on the same inputs, where it is installed."""
    try:
        import flashinfer
    except ImportError:
        return None

    def measure_rival(row: Row, sets: list[Inputs]) -> float:
        scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(scratch, backend="fa3")
        first = sets[0]
        pages = -(-first.lens.long() // PAGE_SIZE)
        zero = torch.zeros(1, dtype=torch.int32, device="cuda")
        kv_indptr = torch.cat([zero, pages.cumsum(0).int()])
        qo_indptr = torch.arange(row.batch + 1, dtype=torch.int32, device="cuda") * row.q_len
        used = torch.arange(first.table.shape[1], device="cuda") < pages[:, None]
        wrapper.plan(
            qo_indptr,
            kv_indptr,
            first.table[used],
            first.lens,
            row.heads,
            D_V,
            D_QK - D_V,
            PAGE_SIZE,
            True,
            D_QK**-0.5,
            first.q.dtype,
            first.cache.dtype,
        )

        def call(inputs: Inputs) -> Callable[[], None]:
            q = inputs.q.view(-1, row.heads, D_QK)
            out = torch.empty(len(q), row.heads, D_V, device="cuda", dtype=q.dtype)
            cache = inputs.cache
            return lambda: wrapper.run(
                q[..., :D_V], q[..., D_V:], cache[..., :D_V], cache[..., D_V:], out=out, return_lse=False
            )

        return replay_us([call(inputs) for inputs in sets])

    return measure_rival


COLUMNS = (
    ("shape", "name", "{}"),
    ("us", "us", "{:.1f}"),
    ("of floor", "floor", "{:.2f}"),
    ("x FlashMLA", "flashmla", "{:.2f}"),
    ("GB/s", "gb_s", "{:.0f}"),
    ("TFLOP/s", "tflop_s", "{:.0f}"),
    ("max error", "error", "{:.1e}"),
    ("angle", "angle", "{:.1e}"),
    ("lse error", "lse_error", "{:.1e}"),
    ("FlashInfer us", "flashinfer_us", "{:.1f}"),
)


def cells(result: Result) -> list[str]:
    """The line's texts."""
    values = asdict(result)
    return ["-" if values[key] is None else form.format(values[key]) for _, key, form in COLUMNS]


def line(texts: list[str], markdown: bool) -> str:
    """One line, in columns or as markdown."""
    if markdown:
        return "| " + " | ".join(texts) + " |"
    return f"{texts[0]:<20}" + "".join(f"{text:>14}" for text in texts[1:])


def plot(results: list[Result], path: str) -> None:
    """A bar for each shape: the floor's share of the time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 0.3 * len(results)), layout="tight")
    axes = figure.subplots()
    axes.barh([result.name for result in results], [result.floor for result in results])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("floor / time")
    figure.savefig(path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only shapes whose name holds this text")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--plot", help="also draw the fractions of the floor into this file (needs matplotlib)")
    parser.add_argument("--markdown", action="store_true", help="print a markdown table")
    parser.add_argument("--no-flashinfer", action="store_true", help="leave FlashInfer out where it is installed")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; 1 where a result is wrong."""
    options = parse(arguments)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    rates = {"read GB/s": read_rate(), "matrix TFLOP/s": matrix_rate()}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ferromla {ferromla.__version__}")
    print(f"read {rates['read GB/s']:.0f} GB/s (floor assumes {READ_RATE:.0f}), ", end="")
    print(f"bf16 8192^3 {rates['matrix TFLOP/s']:.0f} TFLOP/s (floor assumes {MATRIX_RATE:.0f} of wgmma)\n")
    rival = None if options.no_flashinfer else flashinfer_rival()
    print(line([title for title, _, _ in COLUMNS], options.markdown))
    if options.markdown:
        print("|" + "---|" * len(COLUMNS))
    results = []
    for row in ROWS:
        if options.rows in row.name:
            results.append(measure(row, dtype, rival))
            print(line(cells(results[-1]), options.markdown), flush=True)
            torch.cuda.empty_cache()
    if options.json:
        report = {"gpu": torch.cuda.get_device_name(), "rates": rates, "rows": [asdict(r) for r in results]}
        with open(options.json, "w") as file:
            json.dump(report, file, indent=2)
    if options.plot:
        plot(results, options.plot)
    wrong = [result.name for result in results if not result.angle <= 5e-6]
    if wrong:
        print(f"\nwrong results: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
