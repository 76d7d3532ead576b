"""The tables of attention calls: decode, prefill, and the ratios of page sizes, uneven batches and invariance."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

import flashinfer_rival
import shapes
from measure import SHORT_SAMPLE_MS, Call, Errors, Inputs, errors, rotated, times_us
from report import ERRORS, SHAPE, TARGET, US, VERDICT, Column, Report
from shapes import Case

# Of a batch whose time is compared: its errors are those of some requests.
SAMPLED_REQUESTS = 16
RATES: tuple[Column, ...] = (("GB/s", "gb_s", "{:.0f}"), ("TFLOP/s", "tflop_s", "{:.0f}"))
FLOOR: Column = ("of floor", "floor", "{:.2f}")
SUSTAINED: Column = ("sustained us", "sustained_us", "{:.1f}")


@dataclass
class Bench:
    """What every table needs, and the names of the lines whose results are wrong."""

    report: Report
    device: torch.device
    dtype: torch.dtype
    small: bool = False
    only: str = ""
    flashinfer: bool = True
    wrong: list[str] = field(default_factory=list)

    def wanted(self, name: str) -> bool:
        """Whether a line was asked for."""
        return self.only in name

    def sized(self, case: Case) -> Case:
        """The call as measured here."""
        return case.small() if self.small else case

    def inputs(self, case, make: Callable | None = None) -> list:
        """Rotated inputs of a call, ``make(case, device=...)`` each; ``Inputs`` when None."""
        case = self.sized(case)
        make = make or functools.partial(Inputs, dtype=self.dtype)
        return rotated(lambda: make(case, device=self.device), case.bytes_moved, self.device)

    def for_each(self, lines: Iterable[tuple], measure: Callable[..., None], make: Callable | None = None) -> None:
        """Calls ``measure(sets, case, ...)`` for every line ``(case, ...)`` whose case is wanted; ``sets`` are its
        rotated inputs, as of ``inputs``, whose memory is given back then."""
        for case, *more in lines:
            if self.wanted(case.name):
                measure(self.inputs(case, make), case, *more)
                self.forget()

    def checked(self, name: str, sets: list[Inputs], requests: int | None = None) -> dict[str, float]:
        """The errors of the first inputs' outputs, as values of a row."""
        return self.judged(name, errors(sets[0], requests))

    def judged(self, name: str, found: Errors) -> dict[str, float]:
        """Errors as values of a row; notes those that are wrong."""
        if found.wrong:
            self.wrong.append(name)
        return {"error": found.out, "angle": found.angle, "lse_error": found.lse}

    def verdict(self, value: float, limit: float | None) -> str | None:
        """Whether a value is within its limit; None where there is none, or where shapes are not the real ones."""
        if limit is None or self.small:
            return None
        return "met" if value <= limit else "missed"

    def forget(self) -> None:
        """Gives the memory of inputs that nobody holds any more back."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def rates(case: Case, us: float) -> dict[str, float]:
    """GB/s and TFLOP/s, masked keys counted."""
    return {"gb_s": case.bytes_moved / us / 1e3, "tflop_s": case.operations / us / 1e6}


def calls(sets: list[Inputs], **options) -> list:
    """The operation on each of the inputs, with one plan for all: their lengths are the same."""
    plan = sets[0].plan(**options)
    return [inputs.call(plan) for inputs in sets]


def short_and_sustained_us(layers: Sequence[Call], device: torch.device) -> tuple[float, float]:
    """Times of a few milliseconds, and of twenty at a time, when a GPU at its power limit has lowered its clock."""
    (us,) = times_us(layers, device=device, sample_ms=SHORT_SAMPLE_MS)
    (sustained_us,) = times_us(layers, device=device)
    return us, sustained_us


def decode(bench: Bench) -> None:
    """The dense table."""
    peers: tuple[Column, ...] = (
        ("x FlashMLA", "flashmla", "{:.2f}"),
        ("FlashMLA / FlashInfer / FA3 us", "peers", "{}"),
        ("FlashInfer us, this run", "flashinfer_us", "{:.1f}"),
    )
    title = f"Dense decode, {str(bench.dtype)[6:]}, page {shapes.PAGE_SIZE}"
    bench.report.table("decode", title, (SHAPE, US, SUSTAINED, FLOOR, *TARGET, *RATES, *ERRORS, *peers))
    rival = flashinfer_rival.load() if bench.flashinfer and bench.device.type == "cuda" else None

    def measure(sets: list[Inputs], case: Case, row: shapes.Row) -> None:
        us, sustained_us = short_and_sustained_us(calls(sets), bench.device)
        bench.report.row(
            name=case.name,
            us=us,
            sustained_us=sustained_us,
            floor=row.floor_us / us,
            target=row.target_us,
            verdict=bench.verdict(us, row.target_us),
            **rates(sets[0].case, us),
            **bench.checked(case.name, sets),
            flashmla=us / row.flashmla_us[0],
            peers=row.peers,
            flashinfer_us=rival(sets) if rival else None,
        )

    bench.for_each(((row.case, row) for row in shapes.DECODE), measure)


def quantised(bench: Bench) -> None:
    """Dense decode over quantised caches."""
    title = "Dense decode over quantised caches, b=128, s_q=1, seq 4096 or so, page 64"
    bench.report.table("quantised", title, (SHAPE, US, SUSTAINED, FLOOR, *TARGET, *RATES, *ERRORS))

    def measure(sets: list[Inputs], case: Case, row: shapes.Quantised) -> None:
        us, sustained_us = short_and_sustained_us(calls(sets), bench.device)
        measured = sets[0].case
        bench.report.row(
            name=case.name,
            us=us,
            sustained_us=sustained_us,
            floor=measured.floor_us / us,
            target=row.target_us,
            verdict=bench.verdict(us, row.target_us),
            **rates(measured, us),
            **bench.checked(case.name, sets, SAMPLED_REQUESTS),
        )

    bench.for_each(((row.case, row) for row in shapes.QUANTISED), measure)


def prefill(bench: Bench) -> None:
    """Ragged query lengths. TFLOP/s counts keys that causality masks, as the target does; "seen" does not."""
    columns = (
        SHAPE,
        US,
        FLOOR,
        ("target us", "target", "{:.0f}"),
        VERDICT,
        *RATES,
        ("seen TFLOP/s", "seen_tflop_s", "{:.0f}"),
        *ERRORS,
    )
    bench.report.table("prefill", f"Prefill, {str(bench.dtype)[6:]}, page {shapes.PAGE_SIZE}", columns)

    def measure(sets: list[Inputs], case: Case, row: shapes.Prefill) -> None:
        (us,) = times_us(calls(sets), device=bench.device)
        target = case.operations / row.target_tflop_s / 1e6 if row.target_tflop_s else None
        measured = sets[0].case
        bench.report.row(
            name=case.name,
            us=us,
            floor=measured.floor_us / us,
            target=target,
            verdict=bench.verdict(us, target),
            **rates(measured, us),
            seen_tflop_s=measured.seen_operations / us / 1e6,
            **bench.checked(case.name, sets, SAMPLED_REQUESTS),
        )

    bench.for_each(((row.case(heads), row) for row in shapes.PREFILL for heads in shapes.HEADS), measure)


COPIES: tuple[Column, ...] = (
    SHAPE,
    ("format", "kv_format", "{}"),
    ("us", "direct_us", "{:.1f}"),
    ("by way of a copy us", "us", "{:.1f}"),
    ("ratio", "ratio", "{:.3f}"),
    ("TFLOP/s", "tflop_s", "{:.0f}"),
    *ERRORS,
)


def copied(kv_format: str, direct_us: float, us: float, operations: int) -> dict[str, object]:
    """The values of a row of ``COPIES``: times over a quantised cache, and over a copy of it that the call makes."""
    times = {"direct_us": direct_us, "us": us, "ratio": us / direct_us}
    return {"kv_format": kv_format, **times, "tflop_s": operations / us / 1e6}


def prefill_copies(bench: Bench) -> None:
    """Prefill over quantised caches, and over copies of their pages in bf16 that the call makes, measured in turn."""
    bench.report.table("prefill_copies", "Prefill over quantised caches, and over copies in bf16, page 64", COPIES)

    def measure(sets: list[Inputs], case: Case) -> None:
        plan = sets[0].plan("bf16")
        # The copies last: the outputs that are checked are theirs.
        over_copies = [inputs.gathered_call(plan) for inputs in sets]
        direct_us, us = times_us(calls(sets), over_copies, device=bench.device)
        bench.report.row(
            name=case.name,
            **copied(case.kv_format, direct_us, us, sets[0].case.operations),
            **bench.checked(case.name, sets, SAMPLED_REQUESTS),
        )

    cases = itertools.product(shapes.PREFILL_FORMATS, shapes.PREFILL_COPIES, shapes.HEADS)
    bench.for_each(((row.case(heads, kv_format),) for kv_format, row, heads in cases), measure)


def ratio_columns(base: str, limited: bool = True) -> Sequence[Column]:
    """Of a table that compares times with those of ``base``, and their ratio with a limit where there is one."""
    limits: tuple[Column, ...] = (("limit", "limit", "{:.2f}"), VERDICT)
    return (
        SHAPE,
        US,
        (f"{base} us", "base_us", "{:.1f}"),
        ("ratio", "ratio", "{:.3f}"),
        *(limits if limited else ()),
        *RATES,
        *ERRORS,
    )


def add_ratio(
    bench: Bench, name: str, sets: list[Inputs], us: float, base_us: float, limit: float | None = None
) -> None:
    """A line of such a table."""
    ratio = us / base_us
    bench.report.row(
        name=name,
        us=us,
        base_us=base_us,
        ratio=ratio,
        limit=limit,
        verdict=bench.verdict(ratio, limit),
        **rates(sets[0].case, us),
        **bench.checked(name, sets, SAMPLED_REQUESTS),
    )


def prefill_hints(bench: Bench) -> None:
    """Prefill of a chunk among many decodes with a plan that is told the most query tokens of a request, and without,
    measured in turn."""
    title = "Prefill of a chunk among many decodes, bf16, page 64, with max_q_len"
    bench.report.table("prefill_hints", title, ratio_columns("not told", limited=False))

    def measure(sets: list[Inputs], case: Case) -> None:
        told = calls(sets, max_q_len=max(sets[0].case.q_lens))
        base_us, us = times_us(calls(sets), told, device=bench.device)
        add_ratio(bench, case.name, sets, us, base_us)

    bench.for_each(((row.case(heads),) for row in shapes.PREFILL_HINTED for heads in shapes.HINTED_HEADS), measure)


def pages(bench: Bench) -> None:
    """Other page sizes against pages of 64 tokens, measured in turn."""
    bench.report.table("pages", "Page sizes, b=128, seq 4096", ratio_columns(f"page {shapes.PAGE_SIZE}"))
    for heads in shapes.PAGE_HEADS:
        if not bench.wanted(f"h={heads}"):
            continue
        sets = {size: bench.inputs(shapes.even(128, 4096, heads, page_size=size)) for size in shapes.PAGE_SIZES}
        us = times_us(*map(calls, sets.values()), device=bench.device)
        us = dict(zip(sets, us, strict=True))
        for size, inputs in sets.items():
            base = us[shapes.PAGE_SIZE]
            add_ratio(bench, f"page {size}, h={heads}", inputs, us[size], base, shapes.page_limit(size))
        del sets, inputs
        bench.forget()


def uneven(bench: Bench) -> None:
    """Uneven batches against even ones of as many requests and tokens, measured in turn."""
    bench.report.table("uneven", "Uneven batches", ratio_columns("even"))

    def measure(sets: list[Inputs], case: Case, base: Case) -> None:
        even = bench.inputs(base)
        us, base_us = times_us(calls(sets), calls(even), device=bench.device)
        add_ratio(bench, case.name, sets, us, base_us, shapes.UNEVEN_LIMIT)

    bench.for_each((pair for heads in shapes.HEADS for pair in shapes.uneven(heads)), measure)


def invariance(bench: Bench) -> None:
    """``batch_invariant=True`` against the default on the same inputs, measured in turn."""
    bench.report.table("invariance", "batch_invariant=True", ratio_columns("default"))

    def measure(sets: list[Inputs], case: Case, limit: float | None) -> None:
        # The default first: the outputs that are checked are those of the last call, an invariant one.
        base_us, us = times_us(calls(sets), calls(sets, batch_invariant=True), device=bench.device)
        add_ratio(bench, case.name, sets, us, base_us, limit)

    bench.for_each(shapes.INVARIANCE, measure)


def invariance_parts(bench: Bench) -> None:
    """``batch_invariant=True`` with as many parts of each request as ``num_splits`` says, measured in turn. The errors
    are of the most parts."""
    parts = shapes.INVARIANT_PARTS
    columns = (
        SHAPE,
        ("default us", "base_us", "{:.1f}"),
        ("num_splits=None us", "us", "{:.1f}"),
        *((f"{n} parts us", f"parts_{n}_us", "{:.1f}") for n in parts),
        *ERRORS,
    )
    bench.report.table("invariance_parts", "batch_invariant=True with num_splits", columns)

    def measure(sets: list[Inputs], case: Case) -> None:
        options = [{"batch_invariant": True, "num_splits": n} for n in (None, *parts)]
        base_us, us, *of_parts = times_us(calls(sets), *(calls(sets, **each) for each in options), device=bench.device)
        bench.report.row(
            name=case.name,
            base_us=base_us,
            us=us,
            **{f"parts_{n}_us": value for n, value in zip(parts, of_parts, strict=True)},
            **bench.checked(case.name, sets, SAMPLED_REQUESTS),
        )

    bench.for_each(((case,) for case in shapes.INVARIANT_PARTS_CASES), measure)
