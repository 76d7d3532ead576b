"""The tables of sparse attention."""

from __future__ import annotations

from collections.abc import Sequence

import sparse_shapes
from attention_tables import COPIES, FLOOR, RATES, SUSTAINED, Bench, copied, short_and_sustained_us
from measure import Call, times_us
from report import ERRORS, SHAPE, TARGET, US, Column
from sparse_inputs import SparseInputs, SparsePrefillInputs
from sparse_shapes import Sparse, SparsePrefill

FORMAT: Column = ("format", "kv_format", "{}")
PEER: tuple[Column, ...] = (("x FlashMLA", "ratio", "{:.2f}"), ("FlashMLA us", "flashmla_us", "{:g}"))
MEASURED = (SHAPE, US, SUSTAINED, FLOOR)
COLUMNS = (*MEASURED, *TARGET, *RATES, *ERRORS, *PEER)
UNASKED = (*MEASURED, *RATES, *ERRORS)


def _row(bench: Bench, row, sets: Sequence, layers: Sequence[Call]) -> None:
    us, sustained_us = short_and_sustained_us(layers, bench.device)
    measured = sets[0].case
    peer = row.flashmla_us
    bench.report.row(
        name=row.name,
        kv_format=row.kv_format,
        us=us,
        sustained_us=sustained_us,
        floor=row.floor_us / us,
        target=row.target_us,
        verdict=bench.verdict(us, row.target_us),
        gb_s=measured.bytes_moved / us / 1e3,
        tflop_s=measured.operations / us / 1e6,
        **bench.judged(row.name, sets[0].errors()),
        ratio=us / peer if peer else None,
        flashmla_us=peer,
    )


def _lines(rows: Sequence) -> list[tuple]:
    """As ``Bench.for_each`` takes them."""
    return [(row,) for row in rows]


def _decode(bench: Bench, rows: Sequence[Sparse]) -> None:
    def measure(sets: list[SparseInputs], row: Sparse) -> None:
        # One plan for all: it depends on shapes only.
        plan = sets[0].plan()
        _row(bench, row, sets, [one.call(plan) for one in sets])

    bench.for_each(_lines(rows), measure, SparseInputs)


def _prefill(bench: Bench, rows: Sequence[SparsePrefill]) -> None:
    def measure(sets: list[SparsePrefillInputs], row: SparsePrefill) -> None:
        plan = sets[0].plan()  # depends on shapes only
        _row(bench, row, sets, [one.call(plan=plan) for one in sets])

    bench.for_each(_lines(rows), measure, SparsePrefillInputs)


def sparse(bench: Bench) -> None:
    """Sparse decode over fp8_v32, random indices."""
    bench.report.table("sparse", "Sparse decode, fp8_v32, page 64, 32,768 tokens per request", COLUMNS)
    _decode(bench, sparse_shapes.SPARSE)


def sparse_v4(bench: Bench) -> None:
    """Sparse decode over fp8_v4 with an extra cache and a sink."""
    title = "Sparse decode, fp8_v4, page 256, with an extra cache of page 64 and a sink"
    bench.report.table("sparse_v4", title, COLUMNS)
    _decode(bench, sparse_shapes.SPARSE_V4)


def sparse_v41(bench: Bench) -> None:
    """Sparse decode over fp8_v41 with an extra cache of fp4_v41 and a sink."""
    title = "Sparse decode, fp8_v41, page 256, with an extra cache of fp4_v41, page 64, and a sink"
    bench.report.table("sparse_v41", title, UNASKED)
    _decode(bench, sparse_shapes.SPARSE_V41)


def sparse_absent(bench: Bench) -> None:
    """Sparse decode over lists in which some entries are -1."""
    bench.report.table("sparse_absent", "Sparse decode, lists with entries of -1", (SHAPE, FORMAT, *UNASKED[1:]))
    _decode(bench, sparse_shapes.SPARSE_ABSENT)


def sparse_prefill(bench: Bench) -> None:
    """Sparse prefill in bf16."""
    bench.report.table("sparse_prefill", "Sparse prefill, bf16", COLUMNS)
    _prefill(bench, sparse_shapes.SPARSE_PREFILL)


def sparse_prefill_heads(bench: Bench) -> None:
    """Sparse prefill with fewer heads."""
    bench.report.table("sparse_prefill_heads", "Sparse prefill with fewer heads", (SHAPE, FORMAT, *UNASKED[1:]))
    _prefill(bench, sparse_shapes.SPARSE_PREFILL_HEADS)


def sparse_prefill_few(bench: Bench) -> None:
    """Sparse prefill of few tokens, whose lists are split, and with ``batch_invariant=True``, measured in turn."""
    times: tuple[Column, ...] = (
        ("with a plan us", "planned_us", "{:.1f}"),
        ("batch_invariant us", "invariant_us", "{:.1f}"),
        ("ratio", "ratio", "{:.3f}"),
    )
    columns = (SHAPE, FORMAT, US, *times, *RATES[1:], *ERRORS)
    bench.report.table("sparse_prefill_few", "Sparse prefill of few tokens, whose lists are split", columns)

    def measure(sets: list[SparsePrefillInputs], row: SparsePrefill) -> None:
        # The split ones last: the outputs that are checked are theirs.
        plan = sets[0].plan()
        rivals = [[one.call(**options) for one in sets] for options in ({"batch_invariant": True}, {"plan": plan}, {})]
        invariant_us, planned_us, us = times_us(*rivals, device=bench.device)
        bench.report.row(
            name=row.name,
            kv_format=row.kv_format,
            us=us,
            planned_us=planned_us,
            invariant_us=invariant_us,
            ratio=us / invariant_us,
            tflop_s=sets[0].case.operations / us / 1e6,
            **bench.judged(row.name, sets[0].errors()),
        )

    bench.for_each(_lines(sparse_shapes.SPARSE_PREFILL_FEW), measure, SparsePrefillInputs)


def sparse_prefill_copies(bench: Bench) -> None:
    """Sparse prefill over quantised caches, and over copies of them in bf16 that the call makes, measured in turn."""
    title = "Sparse prefill over quantised caches, and over copies in bf16"
    bench.report.table("sparse_prefill_copies", title, COPIES)

    def measure(sets: list[SparsePrefillInputs], row: SparsePrefill) -> None:
        # The copies last: the outputs that are checked are theirs.
        rivals = [one.call() for one in sets], [one.copied_call() for one in sets]
        direct_us, us = times_us(*rivals, device=bench.device)
        values = copied(row.kv_format, direct_us, us, sets[0].case.operations)
        bench.report.row(name=row.name, **values, **bench.judged(row.name, sets[0].errors()))

    bench.for_each(_lines(sparse_shapes.SPARSE_PREFILL_COPIES), measure, SparsePrefillInputs)
