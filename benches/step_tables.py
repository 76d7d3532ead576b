"""The tables of what a step costs beside attention: planning on the device, and the host's part of a call."""

from __future__ import annotations

import torch

import ferromla
import shapes
from attention_tables import Bench
from ferromla.compat import flash_mla
from ferromla.compat.flashinfer import BatchMLAPagedAttentionWrapper
from measure import Call, Inputs, enqueue_us, times_us
from report import SHAPE, TARGET, US
from shapes import D_QK, D_V

# Plans in one graph, so that its own launch does not count.
PLANS = 100
MAX_SEQ_LEN = 1 << 17
# Plans have room for the parts of requests that are all at their longest: for two of 65,536 requests a GPU has none.
MOST_INVARIANT = 4096
# Of kernels/plan_layout.h, in int32 words.
HEADER_WORDS, ITEM_WORDS, MERGE_WORDS = 16, 12, 28


def plan(bench: Bench) -> None:
    """The planning kernel, replayed from a graph, and whether its plan is the host's, entry by entry."""
    columns = (
        SHAPE,
        ("us", "us", "{:.2f}"),
        *TARGET,
        ("as on the host", "same", "{}"),
    )
    bench.report.table("plan", "Planning on the device, once per step", columns)
    for batch in shapes.PLAN_BATCHES[: 3 if bench.small else None]:
        # 2 and 3 query tokens in turn.
        drafts = torch.arange(batch + 1).mul(5).div(2, rounding_mode="floor").int()
        for heads in shapes.HEADS:
            lengths = {"even": (4096,) * batch, "N(4096, 2048)": shapes.normal_lengths(batch, 4096, 2048)}
            for kind, seq_lens in lengths.items():
                measure_plan(bench, f"b={batch}, {kind}, h={heads}", seq_lens, heads)
            ragged = f"b={batch}, N(4096, 2048), 2-3 query tokens, h={heads}"
            measure_plan(
                bench, ragged, lengths["N(4096, 2048)"], heads, {"qo_indptr": drafts, "num_tokens": int(drafts[-1])}
            )
        # As sparse_prefill plans them.
        one_part = f"b={batch}, N(4096, 2048), num_splits=1, h=16"
        measure_plan(bench, one_part, lengths["N(4096, 2048)"], 16, {"num_splits": 1})
        if batch <= MOST_INVARIANT:
            invariant = f"b={batch}, N(4096, 2048), batch_invariant, h=16"
            measure_plan(bench, invariant, lengths["N(4096, 2048)"], 16, {"batch_invariant": True})


def measure_plan(
    bench: Bench, name: str, seq_lens: tuple[int, ...], heads: int, options: dict[str, object] | None = None
) -> None:
    """One line of the table. ``options``: of the plan, tensors on the host."""
    if not bench.wanted(name):
        return
    host = torch.tensor(seq_lens, dtype=torch.int32)
    lens = host.to(bench.device)
    shape = {"num_heads": heads, "page_size": shapes.PAGE_SIZE, "max_seq_len": MAX_SEQ_LEN, "device": bench.device}
    on_host = options or {}
    on_device = {name: value.to(bench.device) if torch.is_tensor(value) else value for name, value in on_host.items()}
    made = ferromla.Plan(lens, **shape, **on_device)
    same = entries(made, lens) == entries(ferromla.Plan(host, **shape, **on_host), host)
    if not same:
        bench.wrong.append(name)
    count = 2 if bench.small else PLANS
    (us,) = times_us([lambda: made.update(lens)] * count, device=bench.device)
    target = None if {"num_splits", "batch_invariant"} & on_host.keys() else shapes.PLAN_TARGET_US.get(len(seq_lens))
    bench.report.row(name=name, us=us, target=target, verdict=bench.verdict(us, target), same="yes" if same else "no")


def entries(made: ferromla.Plan, lens: torch.Tensor) -> list[list[int]]:
    """The words of a plan that mean something: header, worker starts, used merges, used items. It is made again on
    zeros, since what lies between them is not written."""
    made.workspace.zero_()
    made.update(lens)
    words = made.workspace[: made.plan_bytes].cpu().view(torch.int32)
    workers, merges, items, _ = (offset // 4 for offset in made.plan_offsets)
    used_items, used_merges = words[1:3].tolist()
    spans = (
        (0, HEADER_WORDS),
        (workers, merges - workers),
        (merges, used_merges * MERGE_WORDS),
        (items, used_items * ITEM_WORDS),
    )
    return [words[start : start + count].tolist() for start, count in spans]


def host(bench: Bench) -> None:
    """What an eager call costs the host, on a problem that costs the device next to nothing."""
    bench.report.table("host", "Host time of an eager call from Python, b=1, seq 64, h=16", (SHAPE, US, *TARGET))
    case = shapes.even(1, 64, 16)
    inputs = Inputs(case, bench.dtype, bench.device)
    ragged = Inputs(shapes.Prefill("", case.seq_lens, case.q_lens).case(16), bench.dtype, bench.device)
    made, made_ragged = inputs.plan(), ragged.plan()
    arguments = (inputs.q, inputs.cache, inputs.table, inputs.lens)
    lines = (
        ("decode, plan and outputs given", inputs.call(made), shapes.HOST_TARGET_US),
        ("prefill, plan and outputs given", ragged.call(made_ragged), shapes.HOST_TARGET_US),
        ("decode, outputs given", inputs.call(None), None),
        ("prefill, outputs given", ragged.call(None), None),
        ("decode, plan given", lambda: ferromla.decode(*arguments, plan=made), None),
        ("decode, nothing given", lambda: ferromla.decode(*arguments), None),
        ("flash_mla_with_kvcache of compat, with metadata of a call before", _flash_mla(inputs), None),
        ("BatchMLAPagedAttentionWrapper.run of compat, outputs given", _flashinfer(inputs), None),
        ("Plan.update", lambda: made.update(inputs.lens), None),
        ("an empty torch operation (mul_ on one number)", _torch_operation(bench.device), None),
    )
    for name, call, target in lines:
        if bench.wanted(name):
            us = enqueue_us(call, bench.device, bursts=2 if bench.small else 40)
            bench.report.row(name=name, us=us, target=target, verdict=bench.verdict(us, target))


def _flash_mla(inputs: Inputs) -> Call:
    metadata, num_splits = flash_mla.get_mla_metadata()
    arguments = (inputs.q, inputs.cache.unsqueeze(2), inputs.table, inputs.lens, D_V, metadata, num_splits)
    return lambda: flash_mla.flash_mla_with_kvcache(*arguments, causal=True)


def _flashinfer(inputs: Inputs) -> Call:
    """Of one request in one page."""
    heads, device = inputs.q.shape[-2], inputs.q.device
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0, device=device))
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    sizes = (heads, D_V, D_QK - D_V, inputs.case.page_size, True, D_QK**-0.5, inputs.q.dtype, inputs.cache.dtype)
    wrapper.plan(offsets, offsets, inputs.table[0], inputs.lens, *sizes)
    q, cache = inputs.q[0], inputs.cache
    parts = (q[..., :D_V], q[..., D_V:], cache[..., :D_V], cache[..., D_V:])
    return lambda: wrapper.run(*parts, out=inputs.out[0], lse=inputs.lse[0], return_lse_base_on_e=True)


def _torch_operation(device: torch.device) -> Call:
    one = torch.ones(1, device=device)
    return lambda: one.mul_(1.0)
