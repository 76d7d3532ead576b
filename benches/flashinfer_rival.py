"""FlashInfer's MLA decode on the bench's own inputs, where it is installed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from measure import Call, Inputs, times_us
from shapes import D_QK, D_V


def load() -> Callable[[list[Inputs]], float] | None:
    """What measures FlashInfer, in microseconds; None without it."""
    try:
        import flashinfer
    except ImportError:
        return None
    return lambda sets: _measure(flashinfer, sets)


def _measure(flashinfer, sets: list[Inputs]) -> float:
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(scratch, backend="fa3")
    first = sets[0]
    heads, page_size = first.case.heads, first.case.page_size
    pages = -(-first.lens.long() // page_size)
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    used = torch.arange(first.table.shape[1], device="cuda") < pages[:, None]
    wrapper.plan(
        first.indptr,
        torch.cat([zero, pages.cumsum(0).int()]),
        first.table[used],
        first.lens,
        heads,
        D_V,
        D_QK - D_V,
        page_size,
        True,
        D_QK**-0.5,
        first.q.dtype,
        first.cache.dtype,
    )

    def call(inputs: Inputs) -> Call:
        q, cache = inputs.q.view(-1, heads, D_QK), inputs.cache
        out = torch.empty(len(q), heads, D_V, device="cuda", dtype=q.dtype)
        parts = (q[..., :D_V], q[..., D_V:], cache[..., :D_V], cache[..., D_V:])
        return lambda: wrapper.run(*parts, out=out, return_lse=False)

    return times_us([call(inputs) for inputs in sets], device=first.q.device)[0]
