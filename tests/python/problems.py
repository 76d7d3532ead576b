"""Decode and prefill problems: plain keys, and the same keys in a poisoned paged cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import torch

import ferromla
import reference
import tolerance

UNUSED_PAGE = 2147480000
NAN = float("nan")
# With weights and results rounded to 16 bits, an element of out may be off by 2^-8 of the largest value it averages:
# the absolute tolerance of 8e-4 is meant for cached rows of about this size.
KEY_DEVIATION = 0.1
# Scores then have a deviation of 0.3, and sums of 576 terms a float32 error below the 1e-6 that lse may be off.
QUERY_DEVIATION = 3.0


@dataclass
class Problem:
    """A call and what it should see. ``keys [b, s, h_kv, d]`` holds the tokens before paging; ``indptr`` is there
    where the queries are ragged, and the call is a prefill."""

    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    keys: torch.Tensor
    present: torch.Tensor
    options: dict = field(default_factory=dict)
    indptr: torch.Tensor | None = None

    def call(self, **options):
        """The operation, into outputs of its own where none are given."""
        inputs = self.q, self.cache, self.table, self.lens
        if self.indptr is None:
            return ferromla.decode(*inputs, **options)
        return ferromla.prefill(*inputs, self.indptr, **options)

    def run(self, **options):
        """The operation, into NaN-poisoned outputs."""
        q = self.q if isinstance(self.q, torch.Tensor) else self.q[0]
        out, lse = poisoned_outputs(q)
        options = self.options | {"out": out, "lse": lse} | options
        got = self.call(**options)
        assert got[0] is options["out"]
        assert got[1] is options["lse"]
        return got

    def expected(self, *, causal=True, softmax_scale=None, attn_sink=None, **_):
        """What the operation should give with these options."""
        inputs = self.keys, self.present, self.lens
        options = {"causal": causal, "scale": softmax_scale, "sink": attn_sink}
        if self.indptr is None:
            return reference.attention(self.q, *inputs, **options)
        return reference.ragged_attention(self.q, self.indptr, *inputs, **options)

    def of(self, requests: list[int]) -> Problem:
        """The same for these of the requests, in this order, over the same cache."""
        names = ("q", "table", "lens", "keys", "present")
        return replace(self, **{name: getattr(self, name)[requests].contiguous() for name in names})

    def quantised(self, kv_format: str, **scale) -> Problem:
        """The same problem over a cache of this format, with NaN in all that no request owns. ``scale``: as
        ``quantize_kv`` takes it."""
        unowned = self.cache.isnan().any(-1)
        cache = ferromla.quantize_kv(self.cache.nan_to_num(), kv_format, **scale)
        numbers = ferromla.dequantize_kv(cache, kv_format, dtype=torch.float32, **scale)
        cache.view(torch.uint8)[unowned] = 0xFF
        at = torch.arange(self.keys.shape[1], device=cache.device)
        page_size = cache.shape[1]
        pages = self.table[:, at // page_size].long().where(self.present, 0)
        keys = numbers[pages, at % page_size].unsqueeze(2)
        options = self.options | {"kv_format": kv_format, **scale}
        return replace(self, cache=cache, keys=keys, options=options)

    def check(self, **options):
        """Run and compare."""
        return check_all_kernels(self, options)

    def check_repeats(self, times: int, **options):
        """Run and compare, and run again: every result is the first one, bit for bit."""
        out, lse = self.check(**options)
        for _ in range(times):
            again, lse_again = self.run(**options)
            assert torch.equal(again, out)
            assert torch.equal(lse_again, lse)


def check_all_kernels(problem, options):
    """Runs and compares. On CUDA few short requests go to CTAs of 16 query rows, however many they have, unless parts
    are fixed: once more then, for the kernels of their rows."""
    got = problem.run(**options)
    all_options = problem.options | options
    expected = problem.expected(**all_options)
    tolerance.check(*got, *expected)
    if got[0].is_cuda and not {"plan", "num_splits", "batch_invariant", "out", "lse"} & set(all_options):
        tolerance.check(*problem.run(**options, num_splits=2), *expected)
    return got


def poisoned_outputs(q):
    """Outputs for q full of NaN."""
    shape = q.shape[:-1]
    out = torch.full((*shape, 512), NAN, dtype=q.dtype, device=q.device)
    return out, torch.full(shape, NAN, dtype=torch.float32, device=q.device)


def lengths(b: int, seq: int, varlen: bool, generator: torch.Generator) -> torch.Tensor:
    """All ``seq``, or mixed with a zero among them."""
    lens = torch.full((b,), seq, dtype=torch.int32)
    if varlen:
        lens = torch.randint(0, seq + 1, (b,), generator=generator, dtype=torch.int32)
        lens[-1] = seq
        lens[0] = 0
    return lens


def page(keys, lens, page_size, generator, *, spare_pages=3, spare_columns=2):
    """A paged copy of ``keys [b, s, h_kv, d]``: shuffled pages, NaN in every slot that no request owns, and
    UNUSED_PAGE in every table entry that no token needs. Gives ``(cache, table)``."""
    b, s, h_kv, d = keys.shape
    device = keys.device
    needed = (lens.cpu().long() + page_size - 1) // page_size
    columns = max(-(-s // page_size), int(needed.max() if b else 0)) + spare_columns
    total = int(needed.sum()) + spare_pages
    used = torch.arange(columns)[None, :] < needed[:, None]
    table = torch.full((b, columns), UNUSED_PAGE, dtype=torch.int32)
    table[used] = torch.randperm(total, generator=generator)[: int(needed.sum())].int()
    table = table.to(device)
    cache = torch.full((total * page_size, h_kv, d), NAN, dtype=keys.dtype, device=device)
    position = torch.arange(s, device=device)
    mask = position < lens.to(device)[:, None]
    slot = table.long()[:, position // page_size] * page_size + position % page_size if s else mask.long()
    cache[slot[mask]] = keys[mask]
    shape = (total, page_size, d) if h_kv == 1 else (total, page_size, h_kv, d)
    return cache.view(shape), table


def drawing(seed: int, device) -> dict:
    """Options of torch's random functions: a generator on the device, since large problems take long to draw on the
    host."""
    return {"generator": torch.Generator(device).manual_seed(seed), "device": device}


def random_keys(*shape, **options):
    """Cached rows, for ``torch.randn``'s options."""
    return torch.randn(*shape, **options).mul_(KEY_DEVIATION)


def random_queries(*shape, **options):
    """Queries to go with random_keys, for ``torch.randn``'s options."""
    return torch.randn(*shape, **options).mul_(QUERY_DEVIATION)


def tilted_queries(q: torch.Tensor) -> torch.Tensor:
    """Queries whose scores with a tilted key are higher by what that is tilted by (in nats, with the default scale).
    Of 576 columns: the rope part does it, so that values stay of the size that tolerances are meant for."""
    q = q.clone()
    q[..., 512:] += 24 / 64**0.5
    return q


def tilted_keys(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Cached rows ``[n, 1 or more, 576]``, each tilted by its own number of nats."""
    rows = rows.clone()
    rows[..., 512:] += (by / 64**0.5).to(rows)[:, None, None]
    return rows


def slope(positions: torch.Tensor, step: float) -> torch.Tensor:
    """Tilts of 10 to 50 that rise or fall by ``step`` from key to key. No sum of their weights is near one, where
    ``lse`` would have to be more exact than scores of this size are; with steps of a tenth several keys count for a
    row."""
    rise = (positions * abs(step)).clamp(max=40)
    return 10 + rise if step > 0 else 50 - rise


def make(
    b=3,
    s_q=1,
    h=16,
    *,
    h_kv=1,
    seq=200,
    page_size=64,
    dtype=torch.bfloat16,
    device="cpu",
    d_qk=576,
    lens=None,
    varlen=True,
    q_lens=None,
    seed=0,
    **options,
) -> Problem:
    """A random problem, ragged where ``q_lens`` are given: query tokens of each request. ``options`` go to the
    operation."""
    generator = torch.Generator().manual_seed(seed)
    lens = lengths(b, seq, varlen, generator) if lens is None else torch.tensor(lens, dtype=torch.int32)
    b, s = len(lens), max([0, *lens.tolist()])
    drawn = {"generator": generator} if torch.device(device).type == "cpu" else drawing(seed, device)
    keys = random_keys(b, s, h_kv, d_qk, **drawn).to(dtype)
    rows = (b, s_q) if q_lens is None else (sum(q_lens),)
    q = random_queries(*rows, h, d_qk, **drawn).to(dtype)
    cache, table = page(keys, lens, page_size, generator)
    lens = lens.to(device)
    present = torch.arange(keys.shape[1], device=lens.device) < lens[:, None]
    indptr = None if q_lens is None else offsets(q_lens).to(device)
    return Problem(q, cache, table, lens, keys, present, options, indptr)


def offsets(q_lens) -> torch.Tensor:
    """The qo_indptr of these query lengths, on the host."""
    return torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
