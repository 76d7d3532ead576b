"""Sparse decode and prefill problems: lists of keys in a cache that is poisoned wherever no list reaches."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

import ferromla
import problems
import reference_sparse
import tolerance

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def no_keys(tokens: int) -> list[int]:
    """Entries that are no key of a cache of so many tokens."""
    return [INT_MIN, -123456, -1, tokens, 2147480000, INT_MAX]


@functools.cache
def _no_keys_on(device: torch.device, tokens: int) -> torch.Tensor:
    """The same on a device: a copy waits for all that is queued there."""
    return torch.tensor(no_keys(tokens), dtype=torch.int32, device=device)


@dataclass
class Keys:
    """Lists of keys in one cache: ``cache [n, P, d]``, ``indices [rows..., topk]``, and how many entries count
    (``lens [rows...]``, ``[b]``, or None)."""

    cache: torch.Tensor
    indices: torch.Tensor
    lens: torch.Tensor | None = None
    # Of a quantised cache: its format and the numbers in it.
    kv_format: str | None = None
    numbers: torch.Tensor | None = None

    def lists(self) -> reference_sparse.Lists:
        """One list per query token, as the reference takes them."""
        rows = self.indices.shape[:-1]
        lens = self.lens
        if lens is not None:
            lens = lens.clamp(0, self.indices.shape[-1])
            lens = (lens[:, None] if lens.dim() < len(rows) else lens).expand(rows).reshape(-1)
        indices = self.indices.flatten(0, -2)
        tokens = self.cache if self.numbers is None else self.numbers
        return reference_sparse.Lists(tokens.flatten(0, 1), indices, lens)

    def used(self) -> torch.Tensor:
        """``[n, P]`` bool: the tokens of the cache that are somebody's key."""
        return self.lists().used().view(self.cache.shape[:2])

    def poison(self) -> None:
        """NaN in every token of the cache that is nobody's key."""
        self.cache.masked_fill_(~self.used()[..., None], problems.NAN)

    def quantised(self, kv_format: str, **scale) -> Keys:
        """The same lists over a cache of this format: NaN in all that is nobody's key. ``scale``: ``kv_scale``."""
        if kv_format == "bf16":
            return Keys(self.cache, self.indices, self.lens, kv_format)
        cache = ferromla.quantize_kv(torch.where(self.used()[..., None], self.cache, 0), kv_format, **scale)
        numbers = ferromla.dequantize_kv(cache, kv_format, dtype=torch.float32, **scale)
        keys = Keys(cache, self.indices, self.lens, kv_format, numbers)
        keys.spoil()
        return keys

    def spoil(self) -> None:
        """NaN in every byte of a quantised cache that is nobody's key."""
        used = self.used()
        # Of split pages the scales of a token are elsewhere: only whole pages can be spoiled byte by byte.
        if self.kv_format in ("fp8_v4", "fp8_v41_split"):
            used = used.any(1, keepdim=True)
        self.cache.view(torch.uint8).masked_fill_(~used[..., None], 0xFF)


def some_rows(rows: int, seed: int, device) -> torch.Tensor:
    """Up to 16 query tokens of so many, the first and the last among them: float64 takes its time."""
    if rows <= 16:
        return torch.arange(rows, device=device)
    which = torch.randint(rows, (16,), **problems.drawing(seed, device))
    which[0], which[-1] = 0, rows - 1
    return which


def random_indices(shape, tokens: int, drawn: dict, invalid=0.1) -> torch.Tensor:
    """Random lists of a cache of so many tokens, with entries twice and entries that are no key among them."""
    indices = torch.randint(0, tokens, shape, dtype=torch.int32, **drawn)
    wrong = _no_keys_on(indices.device, tokens)[torch.randint(0, 6, shape, dtype=torch.int32, **drawn)]
    return torch.where(torch.rand(shape, **drawn) < invalid, wrong, indices)


def random_keys(rows, s_k, topk, page, *, d_qk, dtype, lens, drawn) -> Keys:
    """Random tokens and lists. ``lens``: None, ``"b"`` for lengths per request, or ``"row"`` for one per query token.
    ``drawn``: what ``problems.drawing`` gives."""
    pages = -(-s_k // page) + 2
    cache = problems.random_keys(pages, page, d_qk, **drawn)
    indices = random_indices((*rows, topk), pages * page, drawn)
    if lens is not None:
        shape = rows[:1] if lens == "b" else rows
        # Some are out of range, and count as the nearest that is not.
        lens = torch.randint(-5, topk + 5, shape, dtype=torch.int32, **drawn)
    keys = Keys(cache.to(dtype), indices, lens)
    keys.poison()
    return keys


@dataclass
class Decode:
    """A sparse decode and what it should give."""

    q: torch.Tensor
    main: Keys
    extra: Keys | None = None
    options: dict = field(default_factory=dict)

    def call(self, **options):
        """The operation, into outputs of its own where none are given."""
        return ferromla.sparse_decode(self.q, self.main.cache, self.main.indices, **self.lists(), **options)

    def run(self, **options):
        """The operation, into NaN-poisoned outputs."""
        out, lse = problems.poisoned_outputs(self.q)
        return self.call(**self.options | {"out": out, "lse": lse} | options)

    def lists(self) -> dict:
        """The keyword arguments that say what the lists are."""
        given = {"topk_lengths": self.main.lens, "kv_format": self.main.kv_format}
        if self.extra is not None:
            given["extra_kv_format"] = self.extra.kv_format
            given["extra_kv_cache"], given["extra_indices"] = self.extra.cache, self.extra.indices
            given["extra_topk_lengths"] = self.extra.lens
        return given

    def expected(self, *, softmax_scale=None, attn_sink=None, **_):
        """``(out, lse)`` by the reference."""
        out, lse = self.expected_rows(slice(None), softmax_scale=softmax_scale, attn_sink=attn_sink)
        return out.view(*self.q.shape[:-1], 512), lse.view(self.q.shape[:-1])

    def expected_rows(self, which, *, softmax_scale=None, attn_sink=None, **_):
        """``(out, lse)`` of some query tokens, counted over all requests."""
        lists = [keys.lists().of_rows(which) for keys in (self.main, self.extra) if keys is not None]
        q = self.q.flatten(0, 1)[which]
        out, _, lse = reference_sparse.attention(q, lists, scale=softmax_scale, sink=attn_sink)
        return out, lse

    def check(self, **options):
        """Run and compare."""
        return problems.check_all_kernels(self, options)

    def plan(self, **options):
        """A plan for the call."""
        extra = self.extra
        lens = [self.main.lens, None if extra is None else extra.lens]
        sizes = {"topk": self.main.indices.shape[-1], "extra_topk": 0 if extra is None else extra.indices.shape[-1]}
        b, s_q, h = self.q.shape[:-1]
        options = {"device": self.q.device, **sizes, **options}
        return ferromla.Plan.sparse(*lens, batch=b, num_heads=h, q_len=s_q, **options)


def decode(
    b=3,
    s_q=2,
    h=16,
    *,
    s_k=512,
    topk=150,
    page=64,
    extra=None,
    lens=None,
    d_qk=576,
    dtype=torch.bfloat16,
    device="cpu",
    seed=0,
    **options,
) -> Decode:
    """A random sparse decode. ``extra``: None or ``(s_k, topk, page)`` of the extra cache. ``options`` go to the
    operation."""
    drawn = problems.drawing(seed, device)
    q = problems.random_queries(b, s_q, h, d_qk, **drawn).to(dtype)
    common = {"d_qk": d_qk, "dtype": dtype, "lens": lens, "drawn": drawn}
    main = random_keys((b, s_q), s_k, topk, page, **common)
    extra = None if extra is None else random_keys((b, s_q), *extra, **common)
    return Decode(q, main, extra, options)


@dataclass
class Prefill:
    """A sparse prefill and what it should give."""

    q: torch.Tensor
    keys: Keys
    options: dict = field(default_factory=dict)

    def run(self, **options):
        """The operation, into NaN-poisoned outputs."""
        out, lse = problems.poisoned_outputs(self.q)
        given = {"out": out, "lse": lse, "max_logits": torch.full_like(lse, problems.NAN)}
        cache = self.keys.cache
        kv = options.pop("kv", cache.flatten(0, 1) if self.keys.kv_format is None else cache)
        indices = options.pop("indices", self.keys.indices)
        own = {"topk_lengths": self.keys.lens, "kv_format": self.keys.kv_format}
        options = own | self.options | given | options
        return ferromla.sparse_prefill(self.q, kv, indices, **options)

    def expected(self, which=slice(None), *, softmax_scale=None, attn_sink=None, **_):
        """``(out, max_logits, lse)`` of the query tokens, or of some, by the reference."""
        lists = [self.keys.lists().of_rows(which)]
        return reference_sparse.attention(self.q[which], lists, scale=softmax_scale, sink=attn_sink)

    def check(self, **options):
        """Run and compare."""
        got = self.run(**options)
        found = tolerance.prefill_faults(*got, *self.expected(**self.options | options))
        assert not found, "\n".join(found)
        return got


def prefill(
    t=62,
    h=16,
    *,
    s_kv=95,
    topk=128,
    page=1,
    lens=None,
    d_qk=576,
    dtype=torch.bfloat16,
    device="cpu",
    seed=0,
    **options,
) -> Prefill:
    """A random sparse prefill. ``options`` go to the operation."""
    drawn = problems.drawing(seed, device)
    q = problems.random_queries(t, h, d_qk, **drawn).to(dtype)
    common = {"d_qk": d_qk, "dtype": dtype, "lens": lens, "drawn": drawn}
    return Prefill(q, random_keys((t,), s_kv, topk, page, **common), options)
