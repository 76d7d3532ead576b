"""Measuring a call: inputs as a server has them, errors against float64, times from CUDA graphs.

Everything runs on a CPU too, timed by the clock: to try the benches where there is no GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

import ferromla
from shapes import D_QK, D_V, TOKEN_BYTES, Case

L2_BYTES = 60 << 20
REPEATS = 7
# A measurement: so long that a GPU at its power limit has lowered its clock, or so short that it has not.
SAMPLE_MS, SHORT_SAMPLE_MS = 20.0, 2.0
# Before short samples: whatever ran before them may have lowered the clock.
REST_S = 0.3
MOST_SETS = 400
NAN = float("nan")
# A page id that a kernel must never follow.
UNUSED_PAGE = 2147480000
# Float64 scores held at once in the reference.
REFERENCE_SCORES = 1 << 26
# Tokens quantised at once while inputs are made.
QUANTISED_TOKENS = 1 << 18
E4M3_MAX = 448.0

Call = Callable[[], object]
T = TypeVar("T")


def cache_of(kv_format: str, pages: int, page_size: int, d_qk: int, *, device, dtype) -> torch.Tensor:
    """Normally distributed rows in a cache, quantised a part at a time where the format asks for it."""
    if kv_format not in TOKEN_BYTES:
        return torch.randn(pages, page_size, d_qk, device=device, dtype=dtype).mul_(0.1)
    cache = ferromla.empty_kv_cache(pages, page_size, kv_format, device, d_qk=d_qk).view(torch.uint8)
    step = max(1, QUANTISED_TOKENS // page_size)
    for part in cache.split(step):
        rows = torch.randn(len(part), page_size, d_qk, device=device, dtype=dtype).mul_(0.1)
        ferromla.quantize_kv(rows, kv_format, out=part)
    return cache


def format_name(kv_format: str, dtype: torch.dtype) -> str:
    """The format's name as plans want it; of a 16-bit cache the one of its type."""
    return kv_format if kv_format in TOKEN_BYTES else {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def format_options(kv_format: str) -> dict[str, object]:
    """What a call over a cache of this format is told of it: nothing of 16-bit numbers."""
    return {"kv_format": kv_format} if kv_format in TOKEN_BYTES else {}


def numbers(cache: torch.Tensor, kv_format: str) -> torch.Tensor:
    """What a cache holds, without a rounding: dequantised to float32 where it is quantised."""
    if kv_format not in TOKEN_BYTES:
        return cache
    return ferromla.dequantize_kv(cache, kv_format, dtype=torch.float32)


class Inputs:
    """One set of inputs: shuffled pages, NaN in the tail of every last page and in the outputs."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        self.case = case
        options = {"device": device, "dtype": dtype}
        lens = torch.tensor(case.seq_lens)
        self.lens = lens.int().to(device)
        ends = torch.tensor((0, *case.q_lens)).cumsum(0)
        self.q_begin = ends.tolist()
        self.indptr = ends.int().to(device)
        pages = -(-lens // case.page_size)
        total = max(int(pages.sum()), 1)
        columns = torch.arange(max(int(pages.max()), 1), device=device)
        used = columns < pages.to(device)[:, None]
        self.table = torch.full(used.shape, UNUSED_PAGE, dtype=torch.int32, device=device)
        self.table[used] = torch.randperm(total, device=device)[: int(pages.sum())].int()
        self.cache = cache_of(case.kv_format, total, case.page_size, D_QK, **options)
        self._poison_tails(pages.to(device))
        tokens = (case.q_tokens,) if case.ragged else (len(lens), case.q_lens[0])
        self.q = torch.randn(*tokens, case.heads, D_QK, **options).mul_(3)
        self.formats = format_options(case.kv_format)
        if case.q_e4m3:
            scales = self.q.abs().amax(-1).float() / E4M3_MAX
            self.q = (self.q.float() / scales[..., None]).to(torch.float8_e4m3fn)
            self.formats["q_scale"] = scales
        self.out = torch.full((*tokens, case.heads, D_V), NAN, **options)
        self.lse = torch.full((*tokens, case.heads), NAN, device=device)

    def _poison_tails(self, pages: torch.Tensor) -> None:
        held = pages.nonzero()[:, 0]
        last = self.table[held, pages[held] - 1].long()
        position = torch.arange(self.case.page_size, device=pages.device)
        beyond = position > ((self.lens[held] - 1) % self.case.page_size)[:, None]
        # Each byte of a code, of a float32 scale and of a bfloat16 number is that of a NaN.
        poison = 0xFF if self.cache.dtype == torch.uint8 else NAN
        self.cache[last] = self.cache[last].masked_fill(beyond[..., None], poison)

    def keys(self, pages: torch.Tensor) -> torch.Tensor:
        """The rows of some pages, ``[tokens, 576]``, float64."""
        return numbers(self.cache[pages], self.case.kv_format).double().flatten(0, 1)

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """The queries of some tokens, ``[tokens, heads, 576]``, float64."""
        q = self.q.flatten(0, -3)[rows].double()
        scales = self.formats.get("q_scale")
        return q if scales is None else q * scales.flatten(0, -2)[rows].double()[..., None]

    def plan(self, kv_format: str | None = None, **options) -> ferromla.Plan:
        """A plan for these lengths; of another format than the cache's where one is given."""
        case = self.case
        shapes = {"num_heads": case.heads, "page_size": case.page_size}
        if case.ragged:
            shapes |= {"qo_indptr": self.indptr, "num_tokens": case.q_tokens}
        else:  # the bound on lengths that a call without a plan takes
            shapes |= {"q_len": case.q_lens[0], "max_seq_len": self.table.shape[1] * case.page_size}
        own_format = format_name(case.kv_format, self.cache.dtype)
        return ferromla.Plan(self.lens, kv_format=kv_format or own_format, **shapes, **options)

    def call(self, plan: ferromla.Plan | None) -> Call:
        """The operation into the outputs."""
        options = {"plan": plan, "out": self.out, "lse": self.lse, **self.formats}
        if self.case.ragged:
            return lambda: ferromla.prefill(self.q, self.cache, self.table, self.lens, self.indptr, **options)
        return lambda: ferromla.decode(self.q, self.cache, self.table, self.lens, **options)

    def gathered_call(self, plan: ferromla.Plan) -> Call:
        """A prefill over a copy of the requests' pages in bfloat16, made by the call. ``plan`` is one for bf16."""
        requests, columns = self.table.shape
        slots = torch.arange(self.case.page_size, device=self.table.device)
        ids = (self.table.long()[..., None] * self.case.page_size + slots).flatten()
        rows = torch.empty(len(ids), D_QK, device=ids.device, dtype=torch.bfloat16)
        pages = rows.view(-1, self.case.page_size, D_QK)
        table = torch.arange(requests * columns, device=ids.device, dtype=torch.int32).view(requests, columns)

        def call() -> None:
            ferromla.gather_kv(self.cache, ids=ids, kv_format=self.case.kv_format, out=rows)
            ferromla.prefill(self.q, pages, table, self.lens, self.indptr, plan=plan, out=self.out, lse=self.lse)

        return call


def rotated(make: Callable[[], T], bytes_moved: int, device: torch.device) -> list[T]:
    """So many inputs, of calls that move so many bytes each, that going through them leaves nothing of the first in L2;
    one where there is no such cache."""
    torch.manual_seed(0)
    return [make() for _ in range(set_count(bytes_moved, device))]


def set_count(bytes_moved: int, device: torch.device) -> int:
    """How many inputs to rotate."""
    return min(1 + -(-4 * L2_BYTES // max(bytes_moved, 1)), MOST_SETS) if device.type == "cuda" else 1


@dataclass(frozen=True)
class Errors:
    """Of a result against float64: NaN where the result has one."""

    out: float  # largest |x - reference|
    angle: float  # 1 - 2<x,y>/(|x|^2 + |y|^2) of all that was compared
    lse: float  # largest |x - reference|

    @property
    def wrong(self) -> bool:
        """Further off than rounding explains."""
        return not self.angle <= 5e-6


class Compared:
    """Results and their references, a part at a time."""

    def __init__(self, device: torch.device) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._out = self._lse = self._product = self._squares = zero

    def add(self, out: torch.Tensor, want: torch.Tensor, lse: torch.Tensor, want_lse: torch.Tensor) -> None:
        """Some rows. A NaN stays."""
        out, lse = out.double(), lse.double()
        self._out = self._out.maximum((out - want).abs().max())
        off = torch.where(lse == want_lse, 0.0, (lse - want_lse).abs())
        self._lse = self._lse.maximum(off.max())
        self._product = self._product + (out * want).sum()
        self._squares = self._squares + (out * out).sum() + (want * want).sum()

    def errors(self) -> Errors:
        """Of all that was added."""
        angle = torch.where(self._squares == 0, 0.0, 1 - 2 * self._product / self._squares)
        return Errors(float(self._out), float(angle), float(self._lse))


def errors(inputs: Inputs, requests: int | None = None, tokens: int = 64) -> Errors:
    """Of the outputs as they stand: over ``requests`` evenly chosen requests and the longest one (all when None), and
    of each over at most ``tokens`` query tokens, the first and the last among them."""
    compared = Compared(inputs.q.device)
    with_queries = [r for r, q_len in enumerate(inputs.case.q_lens) if q_len]
    longest = sorted(with_queries, key=inputs.case.seq_lens.__getitem__)[-1:]
    for request in {*evenly(with_queries, requests), *longest}:
        chosen = evenly(list(range(inputs.case.q_lens[request])), tokens)
        rows = torch.tensor(chosen, device=inputs.q.device)
        for part in rows.split(_reference_tokens(inputs.case, request)):
            want, want_lse = reference(inputs, request, part)
            at = part + inputs.q_begin[request]
            compared.add(inputs.out.flatten(0, -3)[at], want, inputs.lse.flatten(0, -2)[at], want_lse)
    return compared.errors()


def evenly(items: list[int], most: int | None) -> list[int]:
    """At most so many of the items, the first and the last among them."""
    if most is None or len(items) <= most:
        return items
    return [items[i * (len(items) - 1) // max(most - 1, 1)] for i in range(most)]


def _reference_tokens(case: Case, request: int) -> int:
    return max(1, REFERENCE_SCORES // max(1, case.heads * case.seq_lens[request]))


def reference(inputs: Inputs, request: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention of some query tokens of one request, causal over its last tokens."""
    case = inputs.case
    length, q_len = case.seq_lens[request], case.q_lens[request]
    pages = inputs.table[request, : -(-length // case.page_size)].long()
    keys = inputs.keys(pages)[:length]
    q = inputs.queries(tokens + inputs.q_begin[request])
    scores = (q @ keys.T) * D_QK**-0.5
    last = length - q_len + tokens
    scores.masked_fill_(torch.arange(length, device=q.device) > last[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp_(scores.sub_(lse.nan_to_num(neginf=0.0)[..., None])) @ keys[:, :D_V], lse


class _Graph:
    """Calls in turn as one CUDA graph, so often that it takes as long as a short sample: its launch takes time, too."""

    def __init__(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call()
        torch.cuda.synchronize()
        self._rounds_of_graph = 1
        self._capture(calls)
        self._rounds_of_graph = max(1, round(SHORT_SAMPLE_MS / max(self.milliseconds(1), 1e-3)))
        if self._rounds_of_graph > 1:
            self._capture(calls)

    def _capture(self, calls: Sequence[Call]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(self._rounds_of_graph):
                for call in calls:
                    call()
        self._graph.replay()

    def milliseconds(self, rounds: int) -> float:
        """Of going through the calls once, back to back as often as asked for, or nearly."""
        replays = max(1, round(rounds / self._rounds_of_graph))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / (replays * self._rounds_of_graph)


class _Loop:
    """Calls in turn on the CPU."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def milliseconds(self, rounds: int) -> float:
        """Of going through the calls once."""
        start = time.perf_counter()
        for _ in range(rounds):
            for call in self._calls:
                call()
        return (time.perf_counter() - start) * 1e3 / rounds


def times_us(*rivals: Sequence[Call], device: torch.device, sample_ms: float = SAMPLE_MS) -> list[float]:
    """Microseconds of one call of each rival, the median of measurements that take turns: what makes a GPU slower
    for a while meets all of them."""
    if device.type == "cuda":
        runs, repeats = [_Graph(calls) for calls in rivals], REPEATS
    else:
        runs, sample_ms, repeats = [_Loop(calls) for calls in rivals], 0.0, 1
    rounds = [max(1, int(sample_ms / max(run.milliseconds(1), 1e-3))) for run in runs]
    if 0 < sample_ms < SAMPLE_MS:
        time.sleep(REST_S)
    samples = [[run.milliseconds(n) for run, n in zip(runs, rounds, strict=True)] for _ in range(repeats)]
    return [
        statistics.median(column) * 1e3 / len(calls)
        for column, calls in zip(zip(*samples, strict=True), rivals, strict=True)
    ]


def read_rate(device: torch.device) -> float:
    """GB/s of a reduction over 4 GiB."""
    x = torch.ones(1 << (30 if device.type == "cuda" else 20), device=device)
    total = torch.empty((), device=device)
    return x.numel() * 4 / times_us([lambda: torch.sum(x, 0, out=total)], device=device)[0] / 1e3


def matrix_rate(device: torch.device) -> float:
    """TFLOP/s of a bf16 matrix product of 8192 cubed, on random data."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / times_us([lambda: torch.mm(a, b, out=out)], device=device)[0] / 1e6


def enqueue_us(call: Call, device: torch.device, bursts: int) -> float:
    """Microseconds of the host's time for one call, the median of bursts: the device is waited for
    outside the clock, and no burst reaches the depth at which the driver makes the host wait."""
    in_flight = 64 if device.type == "cuda" else 1
    return statistics.median(_burst_us(call, in_flight, device) for _ in range(bursts)) / in_flight


def _burst_us(call: Call, in_flight: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(in_flight):
        call()
    return (time.perf_counter() - start) * 1e6
