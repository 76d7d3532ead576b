"""FlashInfer's wrapper for MLA over paged caches: programs written for it run on ferromla's kernels and CPU backend.

``from ferromla.compat.flashinfer import BatchMLAPagedAttentionWrapper`` in the place of ``flashinfer.mla``'s. ``plan``
takes pages of all requests one after another; a table with a row for each request is made of them once per step.

Needs torch.

Example:
    >>> import torch
    >>> from ferromla.compat.flashinfer import BatchMLAPagedAttentionWrapper
    >>> wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0, dtype=torch.uint8))
    >>> q_nope, q_pe = torch.zeros(3, 16, 512).half(), torch.zeros(3, 16, 64).half()
    >>> ckv, kpe = torch.ones(8, 64, 512).half(), torch.ones(8, 64, 64).half()
    >>> qo_indptr, kv_indptr = torch.tensor([0, 1, 3]).int(), torch.tensor([0, 2, 3]).int()
    >>> kv_indices, kv_lens = torch.tensor([5, 0, 7]).int(), torch.tensor([128, 2]).int()
    >>> wrapper.plan(
    ...     qo_indptr, kv_indptr, kv_indices, kv_lens, 16, 512, 64, 64, True, 0.1, torch.float16, torch.float16
    ... )
    >>> out, lse = wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True)
    >>> out.shape, lse[:, 0].tolist()  # of a base-2 logarithm
    (torch.Size([3, 16, 512]), [7.0, 0.0, 1.0])
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

import ferromla
from ferromla._errors import error

__all__ = ["BatchMLAPagedAttentionWrapper"]

_LOG2_E = math.log2(math.e)
_D_V, _D_ROPE = 512, 64


class BatchMLAPagedAttentionWrapper:
    """Attention of any number of query tokens of each request over its pages, with a plan for all layers of a step.

    Args:
        float_workspace_buffer: a tensor on the device; nothing is written to it, as plans have memory of their own.
        use_cuda_graph: ``run`` is captured: ``plan`` then goes on in the same memory, for as many requests with at most
            as many query tokens, of all and of one, as at first, and at most as many pages as is said below.
        qo_indptr, kv_indptr, kv_len_arr: with ``use_cuda_graph``, ``[b + 1]``, ``[b + 1]`` and ``[b]`` int32 on the
            device, which are written by ``plan``.
        kv_indices: with ``use_cuda_graph``, int32 on the device. Nothing is written to it: its length divided by ``b``
            is the number of pages that a request may have.
        backend: ``"auto"``, ``"fa2"`` or ``"fa3"``, which are the same here.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in ("auto", "fa2", "fa3"):
            raise error(ferromla.Unsupported, "backend", repr(backend), 'must be "auto", "fa2" or "fa3"')
        self.device = float_workspace_buffer.device
        self._planned: _Planned | None = None
        self._fixed: _Tensors | None = None
        if not use_cuda_graph:
            return
        buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        for name, buffer in buffers.items():
            if buffer is None:
                raise error(ferromla.InvalidArgument, name, "None", "must be given with use_cuda_graph")
        columns = -(-len(kv_indices) // max(1, len(kv_len_arr)))
        table = torch.zeros(len(kv_len_arr), columns, dtype=torch.int32, device=self.device)
        self._fixed = _Tensors(qo_indptr, kv_indptr, kv_len_arr, table)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Plans a step. Waits for tensors that are on the device, as FlashInfer does.

        Args:
            qo_indptr: ``[b + 1]`` int32: query tokens of request ``r`` are ``qo_indptr[r] .. qo_indptr[r + 1]``.
            kv_indptr: ``[b + 1]`` int32: its pages are those at ``kv_indptr[r] .. kv_indptr[r + 1]`` of ``kv_indices``.
            kv_indices: int32, page numbers; as many as ``kv_indptr`` ends with, or more.
            kv_len_arr: ``[b]`` int32, tokens of each request with the new ones.
            num_heads: query heads.
            head_dim_ckv: 512.
            head_dim_kpe: 64.
            page_size: tokens of a page.
            causal: whether a query token sees no later ones.
            sm_scale: what scores are multiplied with.
            q_data_type, kv_data_type: both ``torch.bfloat16`` or both ``torch.float16``.
            use_profiler: False.

        Raises:
            InvalidArgument, Unsupported: names the argument, its value and what is allowed. The plan before stays.

        Example:
            >>> import torch
            >>> from ferromla.compat.flashinfer import BatchMLAPagedAttentionWrapper
            >>> wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0, dtype=torch.uint8))
            >>> qo_indptr, kv_indptr = torch.tensor([0, 1, 3]).int(), torch.tensor([0, 2, 3]).int()
            >>> kv_indices, kv_lens = torch.tensor([5, 0, 7]).int(), torch.tensor([65, 2]).int()
            >>> shapes = {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 64}
            >>> types = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
            >>> wrapper.plan(qo_indptr, kv_indptr, kv_indices, kv_lens, **shapes, causal=True, sm_scale=0.1, **types)
        """
        for name, value, only in (("head_dim_ckv", head_dim_ckv, _D_V), ("head_dim_kpe", head_dim_kpe, _D_ROPE)):
            if value != only:
                raise error(ferromla.Unsupported, name, str(value), f"must be {only}")
        if q_data_type not in (torch.bfloat16, torch.float16) or kv_data_type != q_data_type:
            rule = f"must be bfloat16 or float16, and of q_data_type, which is {q_data_type}"
            raise error(ferromla.Unsupported, "kv_data_type", str(kv_data_type), rule)
        if use_profiler:
            raise error(ferromla.Unsupported, "use_profiler", "True", "must be False: kernels have no profiler")
        if page_size < 1:
            raise error(ferromla.InvalidArgument, "page_size", str(page_size), "must be 1 at least")
        step = _Step(qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size)
        shapes = {"num_heads": num_heads, "page_size": page_size, "causal": causal}
        if self._fixed is not None:
            _check_room(step, shapes, self._fixed.table, self._planned)
            tensors = self._fixed
            tensors.take(qo_indptr, kv_indptr, kv_len_arr)
        else:
            here = (x.to(self.device, torch.int32) for x in (qo_indptr, kv_indptr, kv_len_arr))
            table = torch.empty(step.requests, step.most_pages, dtype=torch.int32, device=self.device)
            tensors = _Tensors(*here, table)
        tensors.fill_table(kv_indices.to(self.device, torch.int32), step.most_pages)
        if self._fixed is not None and self._planned is not None:
            self._planned.plan.update(tensors.kv_lens, tensors.qo_indptr)
            self._planned = replace(self._planned, sm_scale=sm_scale)
        else:
            plan = ferromla.Plan(
                tensors.kv_lens,
                qo_indptr=tensors.qo_indptr,
                num_tokens=step.tokens,
                max_q_len=max(1, step.most_queries),
                max_seq_len=tensors.table.shape[1] * page_size,
                **shapes,
            )
            self._planned = _Planned(plan, step, shapes, tensors, sm_scale)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer, with the step's plan.

        Args:
            q_nope, q_pe: ``[tokens, heads, 512]`` and ``[tokens, heads, 64]``.
            ckv_cache, kpe_cache: ``[pages, page_size, 512]`` and ``[pages, page_size, 64]``.
            out: ``[tokens, heads, 512]`` in the dtype of ``q_nope``, or None.
            lse: ``[tokens, heads]`` float32, or None. One that is given is written whether or not it is returned.
            return_lse: whether ``lse`` is returned.
            profiler_buffer, kv_len, page_table: None, of a profiler and of FlashInfer's kernels for sm_100.
            return_lse_base_on_e: natural logarithms; base-2 ones otherwise, as FlashInfer has them.

        Returns:
            ``out``, or ``(out, lse)``; 0 and ``-inf`` for rows that see no key.

        Raises:
            InvalidArgument, Unsupported: before anything is launched.

        Example:
            >>> import torch
            >>> from ferromla.compat.flashinfer import BatchMLAPagedAttentionWrapper
            >>> wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0, dtype=torch.uint8))
            >>> indptr, page, length = torch.tensor([0, 1]).int(), torch.tensor([3]).int(), torch.tensor([8]).int()
            >>> wrapper.plan(indptr, indptr, page, length, 16, 512, 64, 64, True, 0.1, torch.float16, torch.float16)
            >>> q_nope, q_pe = torch.zeros(1, 16, 512).half(), torch.zeros(1, 16, 64).half()
            >>> ckv, kpe = torch.ones(4, 64, 512).half(), torch.ones(4, 64, 64).half()
            >>> out = wrapper.run(q_nope, q_pe, ckv, kpe)
            >>> out, lse = wrapper.run(q_nope, q_pe, ckv, kpe, out=out, return_lse=True)
            >>> out.shape, lse[0, 0].item()
            (torch.Size([1, 16, 512]), 3.0)
        """
        planned = self._planned
        if planned is None:
            raise error(ferromla.InvalidArgument, "run", "called before plan", "plan the step first")
        for name, given in (("profiler_buffer", profiler_buffer), ("kv_len", kv_len), ("page_table", page_table)):
            if given is not None:
                raise error(ferromla.Unsupported, name, f"of type {type(given).__name__}", "must be None")
        base_2 = (return_lse or lse is not None) and not return_lse_base_on_e
        out, lse = ferromla.prefill(
            (q_nope, q_pe),
            (ckv_cache, kpe_cache),
            planned.tensors.table,
            planned.tensors.kv_lens,
            planned.tensors.qo_indptr,
            softmax_scale=planned.sm_scale,
            causal=planned.shapes["causal"],
            plan=planned.plan,
            out=out,
            lse=lse,
        )
        if base_2:
            lse.mul_(_LOG2_E)
        return (out, lse) if return_lse else out


class _Step:
    """What the host has to know of a step's lengths, which are checked."""

    def __init__(self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_lens: Any, page_size: int) -> None:
        given = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len_arr": kv_lens, "kv_indices": kv_indices}
        for name, tensor in given.items():
            if tensor.ndim != 1:
                raise error(ferromla.InvalidArgument, name, f"of shape {list(tensor.shape)}", "must have one axis")
        queries, pages, lens = (x.cpu().long() for x in (qo_indptr, kv_indptr, kv_lens))
        self.requests = len(lens)
        for name, offsets in (("qo_indptr", queries), ("kv_indptr", pages)):
            if len(offsets) != self.requests + 1:
                rule = f"must have {self.requests + 1} entries, one more than kv_len_arr"
                raise error(ferromla.InvalidArgument, name, f"of {len(offsets)} entries", rule)
            if offsets[0] != 0 or bool((offsets.diff() < 0).any()):
                raise error(ferromla.InvalidArgument, name, str(offsets.tolist()), "must begin with 0 and never fall")
        if pages[-1] > len(kv_indices):
            rule = f"must end with {len(kv_indices)} at most, the length of kv_indices"
            raise error(ferromla.InvalidArgument, "kv_indptr", f"ending with {pages[-1]}", rule)
        short = (lens > pages.diff() * page_size).nonzero().flatten()
        if len(short):
            r = short[0]
            rule = f"must be {pages.diff()[r] * page_size} at most for request {r}, the tokens of its pages"
            raise error(ferromla.InvalidArgument, "kv_len_arr", str(lens[r].item()), rule)
        self.tokens = int(queries[-1])
        self.most_queries = int(queries.diff().max()) if self.requests else 0
        self.most_pages = int(pages.diff().max()) if self.requests else 0


@dataclass(frozen=True)
class _Tensors:
    """A step's on the device: ``[b + 1]``, ``[b + 1]``, ``[b]`` and ``[b, columns]``."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor
    table: torch.Tensor

    def take(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """Those of another step, into the same memory."""
        for to, of in ((self.qo_indptr, qo_indptr), (self.kv_indptr, kv_indptr), (self.kv_lens, kv_lens)):
            to.copy_(of, non_blocking=True)

    def fill_table(self, kv_indices: torch.Tensor, columns: int) -> None:
        """Past a request's last page is whatever follows in ``kv_indices``: no length reaches it."""
        if columns > 0:
            at = self.kv_indptr[:-1, None].long() + torch.arange(columns, device=self.table.device)
            self.table[:, :columns] = kv_indices[at.clamp_(max=len(kv_indices) - 1)]


@dataclass(frozen=True)
class _Planned:
    """What ``run`` needs; of the first step of a graph where one is captured, but for ``sm_scale``."""

    plan: ferromla.Plan
    step: _Step
    shapes: dict[str, Any]
    tensors: _Tensors
    sm_scale: float


def _check_room(step: _Step, shapes: dict[str, Any], table: torch.Tensor, first: _Planned | None) -> None:
    """Whether a step fits what a graph has captured."""
    requests, columns = table.shape
    if step.requests != requests:
        rule = f"must be of {requests}, as the buffers are with use_cuda_graph"
        raise error(ferromla.InvalidArgument, "kv_len_arr", f"of {step.requests} requests", rule)
    if step.most_pages > columns:
        rule = f"must be {columns} at most with use_cuda_graph, the length of its kv_indices divided by the requests"
        raise error(ferromla.InvalidArgument, "kv_indptr", f"of a request of {step.most_pages} pages", rule)
    if first is None:
        return
    if shapes != first.shapes:
        rule = f"must be those of the first plan with use_cuda_graph, {first.shapes}"
        raise error(ferromla.InvalidArgument, "num_heads, page_size or causal", str(shapes), rule)
    tokens, most = first.step.tokens, first.step.most_queries
    if step.tokens > tokens or step.most_queries > most:
        rule = f"must be of {tokens} at most, and {most}, as those of the first plan with use_cuda_graph"
        value = f"of {step.tokens} query tokens, {step.most_queries} of one request"
        raise error(ferromla.InvalidArgument, "qo_indptr", value, rule)
