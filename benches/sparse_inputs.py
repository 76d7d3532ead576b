"""Inputs of sparse attention, and their float64 reference."""

from __future__ import annotations

import torch

import ferromla
from measure import NAN, TOKEN_BYTES, Call, Compared, Errors, cache_of, evenly, format_name, format_options, numbers
from shapes import D_V
from sparse_shapes import Sparse, SparsePrefill

# Query tokens that are compared with float64.
COMPARED_TOKENS = 48


def token_rows(cache: torch.Tensor, kv_format: str, ids: torch.Tensor) -> torch.Tensor:
    """The numbers of tokens by their physical ids, float64: each as a page of one token."""
    pages, page_size, width = cache.shape
    page, offset = ids // page_size, ids % page_size
    if kv_format in ("fp8_v4", "fp8_v41_split"):
        # Rows of the page, then their scales.
        row, scales = (576, 8) if kv_format == "fp8_v4" else (512, 16)
        flat = cache.as_strided((pages, page_size * width), (cache.stride(0), 1))
        at = torch.arange(row, device=ids.device) + offset[:, None] * row
        scales_at = torch.arange(scales, device=ids.device) + (page_size * row + offset * scales)[:, None]
        tokens = flat[page[:, None], torch.cat((at, scales_at), 1)]
        # Pages begin at multiples of 16 bytes.
        apart = torch.nn.functional.pad(tokens, (0, -width % 16))
        return numbers(apart.as_strided((len(apart), 1, width), (apart.stride(0), width, 1)), kv_format)[:, 0].double()
    return numbers(cache[page, offset][:, None], kv_format)[:, 0].double()


def attention(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """``out [h, 512]``, ``lse [h]``, ``max_logits [h]`` of the queries of one token, ``q [h, d]``, float64."""
    scores = (q.double() @ keys.T) * q.shape[-1] ** -0.5
    lse, most = scores.logsumexp(-1), scores.amax(-1)
    out = torch.exp(scores - lse[:, None]) @ keys[:, :D_V]
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.double())[:, None]
    return out, lse, most


def drawn(rows: tuple[int, ...], topk: int, pool: int, device: torch.device) -> torch.Tensor:
    """Random tokens of a pool for each row."""
    return torch.randint(pool, (*rows, topk), device=device, dtype=torch.int32)


class SparseInputs:
    """One set of inputs of a sparse decode: each request's entries are of its own part of the cache."""

    def __init__(self, case: Sparse, device: torch.device) -> None:
        self.case = case
        options = {"device": device, "dtype": torch.bfloat16}
        rows = (case.batch, case.s_q)
        self.parts = [self._part(case.kv_format, case.page_size, case.topk, rows, options)]
        self.options = format_options(case.kv_format)
        self.sink = None
        if case.extra:
            self.parts.append(self._part(case.formats[1], case.extra_page_size, case.extra, rows, options))
            self.sink = torch.randn(case.heads, device=device)
            extra, indices = self.parts[1]
            self.options |= {"extra_kv_cache": extra, "extra_indices": indices, "attn_sink": self.sink}
            if case.formats[1] in TOKEN_BYTES:
                self.options["extra_kv_format"] = case.formats[1]
        self.q = torch.randn(*rows, case.heads, case.d_qk, **options).mul_(3)
        self.out = torch.full((*rows, case.heads, D_V), NAN, **options)
        self.lse = torch.full((*rows, case.heads), NAN, device=device)

    def _part(
        self, kv_format: str, page_size: int, topk: int, rows: tuple[int, int], options: dict
    ) -> tuple[torch.Tensor, ...]:
        case = self.case
        pages = -(-case.pool // page_size)
        cache = cache_of(kv_format, case.batch * pages, page_size, case.d_qk, **options)
        indices = drawn(rows, topk, pages * page_size, options["device"])
        first = torch.arange(case.batch, device=options["device"], dtype=torch.int32) * (pages * page_size)
        indices += first[:, None, None]
        if case.absent:
            indices[torch.rand(indices.shape, device=indices.device) < case.absent] = -1
        return cache, indices

    def plan(self) -> ferromla.Plan:
        """A plan for these shapes."""
        case = self.case
        shapes = {"batch": case.batch, "q_len": case.s_q, "topk": case.topk, "extra_topk": case.extra}
        names = [format_name(kv_format, self.q.dtype) for kv_format in case.formats]
        formats = {"kv_format": names[0], "extra_kv_format": names[-1]}
        return ferromla.Plan.sparse(num_heads=case.heads, device=self.q.device, **formats, **shapes)

    def call(self, plan: ferromla.Plan) -> Call:
        """The operation into the outputs."""
        cache, indices = self.parts[0]
        options = {"plan": plan, "out": self.out, "lse": self.lse, **self.options}
        return lambda: ferromla.sparse_decode(self.q, cache, indices, **options)

    def errors(self) -> Errors:
        """Of the outputs as they stand, over evenly chosen query tokens with all heads."""
        compared = Compared(self.q.device)
        for row in evenly(list(range(self.case.rows)), COMPARED_TOKENS):
            request, token = divmod(row, self.case.s_q)
            chosen = []
            for (cache, indices), kv_format in zip(self.parts, self.case.formats, strict=True):
                ids = indices[request, token].long()
                chosen.append(token_rows(cache, kv_format, ids[ids >= 0]))
            want, want_lse, _ = attention(self.q[request, token], torch.cat(chosen), self.sink)
            compared.add(self.out[request, token], want, self.lse[request, token], want_lse)
        return compared.errors()


class SparsePrefillInputs:
    """One set of inputs of a sparse prefill."""

    def __init__(self, case: SparsePrefill, device: torch.device) -> None:
        self.case = case
        options = {"device": device, "dtype": torch.bfloat16}
        self.kv = cache_of(case.kv_format, case.cached, 1, case.d_qk, **options)[:, 0]
        self.indices = drawn((case.tokens,), case.topk, case.cached, device)
        self.q = torch.randn(case.tokens, case.heads, case.d_qk, **options).mul_(3)
        self.out = torch.full((case.tokens, case.heads, D_V), NAN, **options)
        self.max_logits, self.lse = (torch.full((case.tokens, case.heads), NAN, device=device) for _ in range(2))

    def plan(self) -> ferromla.Plan:
        """A plan for these shapes."""
        case = self.case
        shapes = {"num_tokens": case.tokens, "num_heads": case.heads, "topk": case.topk}
        kv_format = format_name(case.kv_format, self.q.dtype)
        return ferromla.Plan.sparse_prefill(kv_format=kv_format, device=self.q.device, **shapes)

    def call(self, **options) -> Call:
        """The operation into the outputs."""
        options |= {**self._outputs, **format_options(self.case.kv_format)}
        return lambda: ferromla.sparse_prefill(self.q, self.kv, self.indices, **options)

    def copied_call(self) -> Call:
        """The same over a copy of the cached tokens in bfloat16, made by the call."""
        pages, kv_format = self.kv[:, None], self.case.kv_format
        copy = torch.empty(*pages.shape[:2], self.case.d_qk, device=pages.device, dtype=torch.bfloat16)

        def call() -> None:
            ferromla.dequantize_kv(pages, kv_format, out=copy)
            ferromla.sparse_prefill(self.q, copy[:, 0], self.indices, **self._outputs)

        return call

    @property
    def _outputs(self) -> dict[str, torch.Tensor]:
        return {"out": self.out, "max_logits": self.max_logits, "lse": self.lse}

    def errors(self) -> Errors:
        """Of the outputs as they stand, over evenly chosen query tokens; the error of max_logits counts as one of
        lse."""
        compared = Compared(self.q.device)
        for token in evenly(list(range(self.case.tokens)), COMPARED_TOKENS):
            keys = token_rows(self.kv[:, None], self.case.kv_format, self.indices[token].long())
            want, *want_rows = attention(self.q[token], keys, None)
            rows = torch.stack((self.lse[token], self.max_logits[token]))
            compared.add(self.out[token], want, rows, torch.stack(want_rows))
        return compared.errors()
