"""Random problems of sparse attention for the soak: what they are, their tensors, and the comparison with float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

import ferromla
import problems
import reference_sparse
import tolerance
from soak_problem import draw_sink, with_empty_lse
from soak_spec import INT_MAX, INT_MIN, FieldPerLine, Limits, draw_empty_lse, draw_num_sms, draw_slope

NAN, D_V = float("nan"), 512
WIDE_HEADS = 4
FORMATS = ("bf16", "fp16", "fp8", "fp8_v32", "fp8_v4", "fp8_v41", "fp8_v41_split")
WIDTHS = {"fp8_v32": 576, "fp8_v4": 512, "fp8_v41": 512, "fp8_v41_split": 512, "fp4_v41": 512}
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cache:
    """A cache and the lists into it."""

    kv_format: str
    page_size: int
    pages: int
    topk: int
    lens: tuple[int, ...] | None  # of each request or of each query token; some are more than topk, or negative

    @property
    def tokens(self) -> int:
        """Slots."""
        return self.pages * self.page_size


@dataclass(frozen=True)
class SparseSpec(FieldPerLine):
    """One problem. ``extra`` is the second cache."""

    seed: int
    index: int
    operation: str  # sparse_decode or sparse_prefill
    d_qk: int
    batch: int  # sparse_prefill: 1
    s_q: int
    heads: int
    main: Cache
    extra: Cache | None
    absent: float  # how many entries name no token
    softmax_scale: float | None
    sink: str | None
    num_splits: int | None
    batch_invariant: bool
    planning: str  # by the call, by a plan, or by one updated to these lengths
    gaps: bool  # between rows of indices and heads of q
    repeat: bool
    slope: float  # as in soak_spec.py, along lists
    num_sms: int | None  # as in soak_spec.py
    empty_lse: float | None  # as in soak_spec.py

    @property
    def dtype(self) -> str:
        """Of the queries."""
        return "float16" if self.main.kv_format == "fp16" else "bfloat16"

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.batch * self.s_q


def draw(seed: int, index: int, limits: Limits) -> SparseSpec:
    """Problem ``index`` of the soak ``seed``: the same one every time."""
    rng = random.Random(f"{seed}/{index}/sparse")
    operation = rng.choice(("sparse_decode", "sparse_decode", "sparse_prefill"))
    prefill = operation == "sparse_prefill"
    batch = 1 if prefill else rng.choice((0, 1, 1, 1, 2, 3, 5, 17))
    s_q = rng.choice((1, 2, 5, 40, 140, 600)) if prefill else rng.choice((1, 1, 1, 2, 3))
    heads = rng.choice((1, 3, 8, 16, 16, 32, 33, 64, 64, 100, 128))
    topk = rng.choice((0, 1, 63, 64, 65, 128, 200, 512, 700, 2048))
    while batch * s_q * heads * (topk + 100) > limits.work // 4 and heads * topk > 1:
        heads, topk = max(1, heads // 2), topk // 2
    kv_format = rng.choice(FORMATS)
    d_qk = WIDTHS.get(kv_format) or rng.choice((576, 512))
    per_token = prefill or rng.random() < 0.5
    main = _cache(rng, kv_format, topk, (batch, s_q, per_token), limits)
    extra = None
    if not prefill and rng.random() < 0.4:
        # Of the same width: any quantised ones, or unquantised ones of the queries' type, which is bf16 with others.
        plain = "fp16" if kv_format == "fp16" else "bf16"
        others = (*FORMATS, "fp4_v41") if plain == "bf16" else ()
        same = [f for f in others if f not in PLAIN and WIDTHS.get(f, d_qk) == d_qk]
        extra_format = rng.choice((plain, plain, *same))
        extra = _cache(rng, extra_format, topk // rng.choice((1, 2, 3)), (batch, s_q, per_token), limits)
    num_splits = None if prefill else rng.choice((None,) * 8 + (1, 2, 3, 8))
    return SparseSpec(
        seed=seed,
        index=index,
        operation=operation,
        d_qk=d_qk,
        batch=batch,
        s_q=s_q,
        heads=heads,
        main=main,
        extra=extra,
        absent=rng.choice((0.0, 0.1, 0.9, 1.0)),
        softmax_scale=None if rng.random() < 0.7 else rng.uniform(0.005, 0.04),
        sink=rng.choice((None, None, "finite", "infinite")),
        num_splits=num_splits,
        batch_invariant=rng.random() < 0.2,
        planning=rng.choice(("call", "call", "plan", "updated")),
        gaps=rng.random() < 0.3,
        repeat=rng.random() < 0.1,
        slope=draw_slope(seed, index, d_qk),
        num_sms=draw_num_sms(seed, index),
        empty_lse=draw_empty_lse(seed, index),
    )


def _cache(rng: random.Random, kv_format: str, topk: int, rows: tuple[int, int, bool], limits: Limits) -> Cache:
    page_size = rng.choice((1, 2, 16, 61, 64, 64, 64, 128, 256))
    pages = rng.randint(1, max(1, min(40, limits.tokens // 4 // page_size)))
    batch, s_q, per_token = rows
    lens = None
    if rng.random() < 0.7:
        lens = tuple(rng.randint(0, topk) for _ in range(batch * s_q if per_token else batch))
        if lens and rng.random() < 0.2:
            odd = rng.choice((-1, INT_MIN, topk + 1, INT_MAX, 0))
            lens = (odd, *lens[1:])
    return Cache(kv_format, page_size, pages, topk, lens)


class _Part:
    """A cache on the device, what it holds, and the lists into it."""

    def __init__(self, spec: SparseSpec, cache: Cache, rng: random.Random, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(rng.getrandbits(60))
        options = {"generator": generator, "device": device}
        shape = (spec.batch, spec.s_q, cache.topk)
        indices = torch.randint(cache.tokens, shape, dtype=torch.int32, **options)
        if spec.slope:
            indices = indices.sort(-1).values
        bad = torch.tensor([-1, INT_MIN, INT_MAX, cache.tokens], dtype=torch.int32, device=device)
        drawn = torch.randint(len(bad), shape, **options)
        indices = torch.where(torch.rand(shape, **options) < spec.absent, bad[drawn], indices)
        self.lens, of_rows = None, None
        if cache.lens is not None:
            prefill = spec.operation == "sparse_prefill"
            per_token = len(cache.lens) == spec.rows and (spec.s_q > 1 or prefill)
            axes = (spec.batch, spec.s_q) if per_token and not prefill else (len(cache.lens),)
            self.lens = torch.tensor(cache.lens, dtype=torch.int32, device=device).view(axes)
            of_rows = (self.lens if per_token else self.lens[:, None].expand(-1, spec.s_q)).reshape(-1)
        rows = torch.randn(cache.tokens, spec.d_qk, **options) * problems.KEY_DEVIATION
        if spec.slope:
            tilts = problems.slope(torch.arange(cache.tokens, device=device), spec.slope)
            rows = problems.tilted_keys(rows[:, None], tilts)[:, 0]
        lists = reference_sparse.Lists(rows, indices.view(spec.rows, cache.topk), of_rows)
        # What nobody lists must not be read.
        unlisted = torch.ones(cache.tokens, dtype=torch.bool, device=device)
        unlisted[lists.indices[lists.chosen()].long()] = False
        rows[unlisted] = NAN
        self.cache, lists.tokens = _stored(cache, rows)
        self.lists = lists
        self.indices = indices
        if spec.gaps:
            wide = torch.full((*shape[:2], cache.topk + 3), -7, dtype=torch.int32, device=device)
            self.indices = wide[..., : cache.topk].copy_(indices)


def _stored(cache: Cache, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows as a cache, and what it holds."""
    pages = rows.view(cache.pages, cache.page_size, -1)
    if cache.kv_format in PLAIN:
        stored = pages.to(PLAIN[cache.kv_format])
        return stored, stored.flatten(0, 1)
    stored = ferromla.quantize_kv(pages, cache.kv_format)
    return stored, ferromla.dequantize_kv(stored, cache.kv_format, dtype=torch.float32).flatten(0, 1)


class SparseProblem:
    """A spec's tensors on a device."""

    def __init__(self, spec: SparseSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        rng = random.Random(f"{spec.seed}/{spec.index}/data")
        self.parts = [_Part(spec, cache, rng, device) for cache in (spec.main, spec.extra) if cache]
        generator = torch.Generator(device).manual_seed(rng.getrandbits(60))
        shape = (spec.batch, spec.s_q, spec.heads + (WIDE_HEADS if spec.gaps else 0), spec.d_qk)
        q = torch.randn(shape, generator=generator, device=device) * problems.QUERY_DEVIATION
        if spec.slope:
            q = problems.tilted_queries(q)
        self.q = q.to(getattr(torch, spec.dtype))[:, :, : spec.heads]
        self.sink = draw_sink(spec.sink, spec.heads, rng, device)

    def run(self) -> tuple[torch.Tensor, ...]:
        """Calls the operation on poisoned outputs: out, lse and, of sparse_prefill, max_logits."""
        spec, main = self.spec, self.parts[0]
        shape = (spec.batch, spec.s_q, spec.heads)
        out = torch.full((*shape, D_V), NAN, dtype=self.q.dtype, device=self.device)
        lse, max_logits = (torch.full(shape, NAN, device=self.device) for _ in range(2))
        options = {"softmax_scale": spec.softmax_scale, "attn_sink": self.sink, "topk_lengths": main.lens}
        options["empty_lse"] = spec.empty_lse
        if spec.planning != "call":
            options["plan"] = self._plan()
        else:
            options["batch_invariant"] = spec.batch_invariant
        plain = spec.main.kv_format in PLAIN
        if not plain:
            options["kv_format"] = spec.main.kv_format
        if spec.operation == "sparse_prefill":
            outputs = {"out": out[0], "max_logits": max_logits[0], "lse": lse[0]}
            kv = main.cache.flatten(0, 1) if plain else main.cache
            ferromla.sparse_prefill(self.q[0], kv, main.indices[0], **options, **outputs)
            return out, lse, max_logits
        if spec.planning == "call":
            options["num_splits"] = spec.num_splits
        if spec.extra:
            options |= self._extra()
        ferromla.sparse_decode(self.q, main.cache, main.indices, out=out, lse=lse, **options)
        return out, lse

    def _extra(self) -> dict[str, object]:
        """What a call is given of the extra cache."""
        spec, extra = self.spec, self.parts[1]
        options = {"extra_kv_cache": extra.cache, "extra_indices": extra.indices, "extra_topk_lengths": extra.lens}
        if not {spec.main.kv_format, spec.extra.kv_format} <= PLAIN.keys():
            options["extra_kv_format"] = spec.extra.kv_format
        return options

    def _plan(self) -> ferromla.Plan:
        spec = self.spec
        lens = [part.lens for part in self.parts]
        made_from = lens
        if spec.planning == "updated":
            made_from = [None if one is None else one.flip(0) for one in lens]
        shapes = {
            "num_heads": spec.heads,
            "topk": spec.main.topk,
            "batch_invariant": spec.batch_invariant,
            "num_sms": spec.num_sms,
            "device": self.device,
            # Without its name a plan may be for 16-bit caches alone.
            "kv_format": spec.main.kv_format if spec.batch_invariant else None,
        }
        if spec.operation == "sparse_prefill":
            plan = ferromla.Plan.sparse_prefill(*made_from, num_tokens=spec.s_q, **shapes)
        else:
            shapes |= {"batch": spec.batch, "q_len": spec.s_q, "num_splits": spec.num_splits}
            shapes["extra_topk"] = spec.extra.topk if spec.extra else 0
            plan = ferromla.Plan.sparse(*made_from, **shapes)
        if spec.planning == "updated":
            plan.update_sparse(*lens)
        return plan

    def faults(self) -> list[str]:
        """What is wrong, in words; empty when all is right."""
        spec = self.spec
        got = self.run()
        q = self.q.reshape(spec.rows, spec.heads, spec.d_qk)
        lists = [part.lists for part in self.parts]
        out, most, lse = reference_sparse.attention(q, lists, scale=spec.softmax_scale, sink=self.sink)
        lse = with_empty_lse(lse, spec.empty_lse)
        flat = [x.flatten(0, 1) for x in got]
        prefill = spec.operation == "sparse_prefill"
        limits = tolerance.SPARSE_PREFILL if prefill else tolerance.ATTENTION
        found = tolerance.faults(flat[0], flat[1], out, lse, limits)
        if prefill:
            found += tolerance.row_faults("max_logits", flat[2], most, limits)
        if spec.repeat:
            again = self.run()
            if any(not torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(got, again, strict=True)):
                found.append("a second call gives other bits")
        return found
