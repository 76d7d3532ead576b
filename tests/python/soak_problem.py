"""A random problem of the soak on a device: tensors, calls and the comparison with float64.

A problem should cost the host well under a millisecond: random numbers come from a pool that is drawn once, all
integers go to the device in one copy, and only the verdict is waited for.
"""

from __future__ import annotations

import math
import random

import torch

import ferromla
import problems
import reference
import tolerance
from soak_spec import Limits, Spec

NAN = float("nan")
D_V = 512
WIDE_ROW, WIDE_HEADS = 64, 4


class Pool:
    """Normally distributed numbers to take any stretch of, as cached rows and as queries."""

    def __init__(self, seed: int, limits: Limits, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator(device).manual_seed(seed)
        # Twice what the largest cache takes, so that stretches differ.
        count = limits.tokens * 576 * 2
        normal = torch.randn(count, generator=generator, device=device)
        dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        self._keys = {name: (normal * problems.KEY_DEVIATION).to(dtype) for name, dtype in dtypes.items()}
        self._queries = {name: (normal * problems.QUERY_DEVIATION).to(dtype) for name, dtype in dtypes.items()}

    def keys(self, dtype: str, rng: random.Random, *shape: int) -> torch.Tensor:
        """Cached rows of one's own."""
        return self._stretch(self._keys[dtype], rng, shape).clone()

    def queries(self, dtype: str, rng: random.Random, *shape: int) -> torch.Tensor:
        """Queries; not to be written to."""
        return self._stretch(self._queries[dtype], rng, shape)

    def _stretch(self, numbers: torch.Tensor, rng: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        if count > len(numbers):
            numbers = numbers.repeat(-(-count // len(numbers)))
        # Rows start at multiples of 16 bytes, as the kernels need.
        start = 64 * rng.randint(0, (len(numbers) - count) // 64)
        return numbers[start : start + count].view(shape)


class Problem:
    """A spec's tensors on the pool's device."""

    def __init__(self, spec: Spec, pool: Pool) -> None:
        self.spec, self.device = spec, pool.device
        rng = random.Random(f"{spec.seed}/{spec.index}/data")
        batch, self.tokens = len(spec.q_lens), sum(spec.q_lens) + spec.unowned
        self.owned = sum(spec.q_lens)
        table, pages = _table(spec, rng)
        slots, present, unused = _slots(spec, table, pages)
        ints = _to_device(
            self.device,
            table=table,
            lens=torch.tensor(spec.seq_lens),
            clamped=torch.tensor(spec.clamped),
            indptr=torch.tensor([0, *spec.q_lens]).cumsum(0),
            slots=slots,
            present=present,
            unused=unused,
            owned=slots[present],
            position=torch.arange(slots.shape[1]).expand_as(slots)[present],
            **_aligned(spec),
        )
        self.table, self.lens, self.indptr = (ints[name].int() for name in ("table", "lens", "indptr"))
        if spec.strided_table:
            self.table = _wider(self.table, 1, 3, problems.UNUSED_PAGE)
        self._padded, self._rows, self._clamped = ints["padded"], ints["rows"], ints["clamped"]
        self._present = ints["present"].bool()
        flat = pool.keys(spec.dtype, rng, pages * spec.page_size, spec.kv_heads, spec.d_qk)
        if spec.slope:
            tilts = problems.slope(ints["position"], spec.slope)
            flat[ints["owned"]] = problems.tilted_keys(flat[ints["owned"]], tilts)
        flat[ints["unused"]] = spec.garbage
        axes = (pages, spec.page_size, *((spec.kv_heads,) if spec.kv_head_axis else ()))
        self._formats = {"kv_format": spec.kv_format, "kv_scale": spec.kv_scale}
        if spec.kv_format:
            stored, held = self._quantised(flat.view(pages, spec.page_size, spec.d_qk))
            self._keys = held.view(flat.shape)[ints["slots"]]
            self.cache = _laid_out(stored.view(*axes, -1), spec.cache_layout, 1, 0xFF)
        else:
            self._keys = flat[ints["slots"]]
            self.cache = _laid_out(flat.view(*axes, spec.d_qk), spec.cache_layout, 1, spec.garbage)
        self._queries = pool.queries(spec.dtype, rng, self.tokens, spec.heads, spec.d_qk)
        if spec.slope:
            self._queries = problems.tilted_queries(self._queries)
        axes = (self.tokens,) if spec.operation == "prefill" else (batch, spec.q_lens[0] if batch else 1)
        self._axes = axes
        self._out_type = self._queries.dtype
        q = self._queries
        if spec.q_scale:
            q, scale = self._narrowed(self._queries)
            self._formats["q_scale"] = scale if isinstance(scale, float) else scale.view(*axes, spec.heads)
            self._out_type = torch.bfloat16
        self.q = _laid_out(q.view(*axes, spec.heads, spec.d_qk), spec.q_layout, -2, NAN)
        self.sink = draw_sink(spec.sink, spec.heads, rng, self.device)

    def _quantised(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A cache of the pages, as bytes, and what it holds."""
        scale = {"kv_scale": self.spec.kv_scale}
        # An infinity would become the largest code: what nobody owns is NaN.
        pages = torch.where(pages.isfinite(), pages, NAN)
        stored = ferromla.quantize_kv(pages, self.spec.kv_format, **scale)
        held = ferromla.dequantize_kv(stored, self.spec.kv_format, dtype=torch.float32, **scale)
        return stored.view(torch.uint8), held

    def _narrowed(self, queries: torch.Tensor) -> tuple[torch.Tensor, float | torch.Tensor]:
        """The queries in e4m3, and their scale; from here on they are what those stand for."""
        largest = queries.abs().float().amax(-1) if self.spec.q_scale == "rows" else None
        scale = 1 / 16 if largest is None else largest / 448
        factor = scale if largest is None else scale[..., None]
        narrow = (queries.float() / factor).to(torch.float8_e4m3fn)
        if largest is not None:
            scale[..., ::7] = 0  # as rows of zeros may have; `factor` is a view of it
        self._queries = narrow.float() * factor
        return narrow, scale

    def run(self) -> tuple[torch.Tensor, ...]:
        """Calls the operation on poisoned outputs: ``(out, lse)`` and the tensors that they are parts of."""
        spec = self.spec
        wide = WIDE_HEADS if spec.wide_out else 0
        heads = slice(wide // 2, wide // 2 + spec.heads)
        shape = (*self._axes, spec.heads + wide)
        whole_out = torch.full((*shape, D_V + 16 * wide), NAN, dtype=self._out_type, device=self.device)
        whole_lse = torch.full(shape, NAN, device=self.device)
        out, lse = whole_out[..., heads, :D_V], whole_lse[..., heads]
        options = {"softmax_scale": spec.softmax_scale, "causal": spec.causal, "attn_sink": self.sink}
        options |= {name: value for name, value in self._formats.items() if value is not None}
        options["empty_lse"] = spec.empty_lse
        if spec.planning == "call":
            options |= {"num_splits": spec.num_splits, "batch_invariant": spec.batch_invariant}
        else:
            options |= {"plan": self._plan()}
        if spec.operation == "prefill":
            ferromla.prefill(self.q, self.cache, self.table, self.lens, self.indptr, out=out, lse=lse, **options)
        else:
            ferromla.decode(self.q, self.cache, self.table, self.lens, out=out, lse=lse, **options)
        return out, lse, whole_out, whole_lse

    def _plan(self) -> ferromla.Plan:
        spec = self.spec
        options = {
            "num_heads": spec.heads,
            "num_kv_heads": spec.kv_heads,
            "page_size": spec.page_size,
            "causal": spec.causal,
            "num_splits": spec.num_splits,
            "batch_invariant": spec.batch_invariant,
            "max_seq_len": spec.capacity,
            "num_sms": spec.num_sms,
            "device": self.device,
        }
        if spec.batch_invariant:  # without its name a plan may be for 16-bit caches alone
            options["kv_format"] = spec.kv_format
        ragged = spec.operation == "prefill"
        if ragged:
            options["num_tokens"] = self.tokens
        else:
            options["q_len"] = self._axes[1]
        lens, indptr = self.lens, {"qo_indptr": self.indptr} if ragged else {}
        if spec.planning == "host":
            lens = torch.tensor(spec.seq_lens, dtype=torch.int32)
            indptr = {"qo_indptr": torch.tensor([0, *spec.q_lens]).cumsum(0).int()} if ragged else {}
        if spec.planning != "updated":
            return ferromla.Plan(lens, **options, **indptr)
        # From other lengths, and all query tokens in the last request.
        other = {name: (value * 0).index_fill_(0, self._last(), self.tokens) for name, value in indptr.items()}
        plan = ferromla.Plan(lens.flip(0), **options, **other)
        plan.update(lens, **indptr)
        return plan

    def _last(self) -> torch.Tensor:
        return torch.full((1,), len(self.spec.q_lens), dtype=torch.int64, device=self.device)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 ``out [t, h, 512]`` and ``lse [t, h]`` of the query tokens that belong to a request. The reference
        takes as many for every request: they stand at the end, where causality puts the last ones."""
        spec = self.spec
        batch, most = self._padded.shape
        if not self.owned:
            shape = (0, spec.heads)
            return torch.zeros(*shape, D_V, device=self.device).double(), torch.zeros(
                shape, device=self.device
            ).double()
        out, lse = reference.attention(
            self._queries[self._padded],
            self._keys,
            self._present,
            self._clamped,
            causal=spec.causal,
            scale=spec.softmax_scale,
            sink=self.sink,
        )
        shape = (batch * most, spec.heads)
        return out.view(*shape, D_V)[self._rows], with_empty_lse(lse.view(shape)[self._rows], spec.empty_lse)

    def faults(self) -> list[str]:
        """What is wrong, in words; empty when all is right. Waits for the device once where nothing is wrong."""
        out, lse, whole_out, whole_lse = self.run()
        got = [x.reshape(self.tokens, *x.shape[len(self._axes) :])[: self.owned] for x in (out, lse)]
        want = self.expected()
        # Only what belongs to a request was written: all else is still NaN, and nothing that was written is.
        rows = self.owned * self.spec.heads
        checks = {
            "out": tolerance.all_near(*got, *want),
            "outside of out": whole_out.isnan().sum() == whole_out.numel() - rows * D_V,
            "outside of lse": whole_lse.isnan().sum() == whole_lse.numel() - rows,
        }
        if self.spec.repeat:
            again = self.run()
            equal = [torch.equal(_bits(x), _bits(y)) for x, y in zip((out, lse), again[:2], strict=True)]
            checks["a second call gives other bits"] = torch.tensor(all(equal), device=self.device)
        if bool(torch.stack(list(checks.values())).all()):
            return []
        found = tolerance.faults(*got, *want) if not checks.pop("out") else []
        return found + [f"{name}: written, or not written" for name, passed in checks.items() if not passed]


def draw_sink(kind: str | None, heads: int, rng: random.Random, device: torch.device) -> torch.Tensor | None:
    """``[heads]`` float32, every third one infinite where the spec says so; None where it has none."""
    if kind is None:
        return None
    sink = [rng.gauss(0, 3) for _ in range(heads)]
    for head in range(0, heads, 3) if kind == "infinite" else ():
        sink[head] = rng.choice((math.inf, -math.inf))
    return torch.tensor(sink, device=device)


def with_empty_lse(lse: torch.Tensor, empty_lse: float | None) -> torch.Tensor:
    """With this for rows that see no key, as the operations have it."""
    return lse if empty_lse is None else lse.masked_fill(lse.isneginf(), empty_lse)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def _table(spec: Spec, rng: random.Random) -> tuple[torch.Tensor, int]:
    """The block table with shuffled pages, and the number of pages."""
    needed = -(-torch.tensor(spec.clamped).long() // spec.page_size)
    used = torch.arange(spec.columns) < needed[:, None]
    count = int(needed.sum())
    pages = count + rng.randint(1, 3)
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    table = torch.full(used.shape, problems.UNUSED_PAGE)
    table[used] = torch.randperm(pages, generator=generator)[:count]
    for request, column, page in spec.absent_pages:
        table[request, column] = page
    return table, pages


def _slots(spec: Spec, table: torch.Tensor, pages: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each token of each request is in the cache, which tokens are there, and slots that hold none."""
    lens = torch.tensor(spec.clamped).long()
    position = torch.arange(max([0, *spec.clamped]))
    page = table[:, position // spec.page_size]
    present = (position < lens[:, None]) & (page >= 0) & (page < pages)
    slots = torch.where(present, page * spec.page_size + position % spec.page_size, 0)
    unused = torch.ones(pages * spec.page_size, dtype=torch.bool)
    unused[slots[present]] = False
    return slots, present, unused.nonzero()[:, 0]


def _aligned(spec: Spec) -> dict[str, torch.Tensor]:
    """``padded [b, most]``: each request's query tokens at the end of its row; ``rows``: where they stand there."""
    q_lens = torch.tensor(spec.q_lens).long()
    most = max([0, *spec.q_lens])
    begin = q_lens.cumsum(0) - q_lens
    place = torch.arange(most) - (most - q_lens)[:, None]
    padded = torch.where(place >= 0, begin[:, None] + place, 0)
    return {"padded": padded, "rows": (place >= 0).flatten().nonzero()[:, 0]}


def _to_device(device: torch.device, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Integer tensors as int64 on the device, in one copy."""
    packed = torch.cat([tensor.long().flatten() for tensor in tensors.values()]).to(device)
    parts = packed.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}


def _wider(tensor: torch.Tensor, dim: int, extra: int, fill: float) -> torch.Tensor:
    """The same values within a larger tensor."""
    shape = list(tensor.shape)
    shape[dim] += extra
    wide = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    view = wide.narrow(dim, extra // 2, tensor.shape[dim])
    view.copy_(tensor)
    return view


def _laid_out(tensor: torch.Tensor, layout: str, second_axis: int, fill: float):
    """The same values whole, in two parts, or within rows or a second axis that are longer."""
    if layout == "parts":
        return tensor[..., :D_V].contiguous(), tensor[..., D_V:].contiguous()
    if layout == "wide rows":
        return _wider(tensor, -1, WIDE_ROW, fill)
    if layout == "wide second axis":
        return _wider(tensor, second_axis, 6, fill)
    return tensor
