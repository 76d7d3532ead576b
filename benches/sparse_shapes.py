"""What the benches of sparse attention and of operations on caches and indices measure, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from shapes import D_V, MATRIX_RATE, READ_RATE, TOKEN_BYTES

# Tokens of each request that indices are drawn from.
POOL = 32 << 10

Call = TypeVar("Call", "Sparse", "SparsePrefill")


def token_bytes(kv_format: str, d_qk: int) -> int:
    """Of one token."""
    return TOKEN_BYTES.get(kv_format, 2 * d_qk)


def floor_us(moved: int) -> float:
    """Of an operation that only moves bytes."""
    return moved / READ_RATE / 1e3


@dataclass(frozen=True)
class Sparse:
    """One sparse decode. ``extra`` entries are of a second cache; with them there is a sink. Each entry is -1 with the
    probability ``absent``."""

    batch: int
    s_q: int
    heads: int
    topk: int
    floor_us: float | None
    target_us: float | None
    flashmla_us: float | None
    extra: int = 0
    kv_format: str = "fp8_v32"
    extra_format: str | None = None  # another than kv_format
    absent: float = 0.0
    d_qk: int = 576
    page_size: int = 64
    extra_page_size: int = 64
    pool: int = POOL

    @property
    def name(self) -> str:
        """Such as ``b128-q2-h128-k2048``."""
        keys = f"{self.topk}+{self.extra}" if self.extra else f"{self.topk}"
        absent = f"-absent{self.absent:g}" if self.absent else ""
        return f"b{self.batch}-q{self.s_q}-h{self.heads}-k{keys}{absent}"

    @property
    def formats(self) -> tuple[str, ...]:
        """Of its caches."""
        return (self.kv_format, self.extra_format or self.kv_format) if self.extra else (self.kv_format,)

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.batch * self.s_q

    @property
    def keys(self) -> int:
        """Of a query token."""
        return self.topk + self.extra

    @property
    def bytes_moved(self) -> int:
        """Each listed token once per query token that lists it, indices, queries and results once."""
        keys = zip((self.topk, self.extra)[: len(self.formats)], self.formats, strict=True)
        row = sum(count * (token_bytes(kv_format, self.d_qk) + 4) for count, kv_format in keys)
        return self.rows * (row + self.heads * (self.d_qk + D_V) * 2)

    @property
    def operations(self) -> int:
        """Of every query row with each of its keys."""
        return 2 * (self.d_qk + D_V) * self.heads * self.rows * self.keys

    def small(self) -> Sparse:
        """The same kind of call, small enough for a CPU."""
        return replace(
            self,
            batch=min(self.batch, 2),
            heads=-(-self.heads // 8),
            topk=-(-self.topk // 32),
            extra=-(-self.extra // 32),
            pool=512,
        )


SPARSE = (
    Sparse(128, 2, 128, 2048, 168, 250, 370),
    Sparse(64, 2, 128, 2048, 84, 128, 185),
    Sparse(128, 1, 128, 2048, 84, 128, 184),
    Sparse(128, 1, 64, 2048, 54, 76, 113),
    Sparse(128, 1, 16, 2048, 54, 64, None),
    Sparse(32, 1, 64, 2048, 14, 25, 46.6),
    Sparse(8, 1, 64, 2048, 5.6, 12, 19.1),
    Sparse(1, 1, 64, 2048, 2.3, 9, 16.8),
    Sparse(148, 2, 128, 16384, 1555, 2150, 3208),
    Sparse(148, 2, 64, 16384, 960, 1200, 1963),
)


def _v4(batch: int, heads: int, extra: int, floor_us: float, target_us: float, flashmla_us: float) -> Sparse:
    call = Sparse(batch, 2, heads, 128, floor_us, target_us, flashmla_us, extra)
    return replace(call, kv_format="fp8_v4", d_qk=512, page_size=256)


SPARSE_V4 = (
    _v4(2, 64, 512, 2.4, 8, 13.0),
    _v4(64, 64, 512, 17, 26, 45.4),
    _v4(128, 64, 512, 32, 47, 88.6),
    _v4(64, 128, 1024, 44.5, 68, 103.6),
    _v4(128, 128, 1024, 89, 132, 204.9),
    _v4(256, 128, 1024, 178, 260, 402.5),
)


def _unasked(call: Call) -> Call:
    """With the larger of reading at the rate of streams and of multiplying as its floor."""
    return replace(call, floor_us=max(floor_us(call.bytes_moved), call.operations / MATRIX_RATE / 1e6))


def _v41(batch: int, heads: int, extra: int) -> Sparse:
    call = Sparse(batch, 2, heads, 128, None, None, None, extra, "fp8_v41", "fp4_v41")
    return _unasked(replace(call, d_qk=512, page_size=256))


SPARSE_V41 = tuple(_v41(batch, heads, 512) for heads in (16, 64, 128) for batch in (2, 64, 128)) + tuple(
    _v41(128, heads, 1024) for heads in (16, 64, 128)
)

SPARSE_ABSENT = tuple(
    _unasked(Sparse(128, 1, heads, 2048, None, None, None, kv_format=kv_format, absent=absent))
    for kv_format in ("fp8_v32", "bf16")
    for heads in (16, 64, 128)
    for absent in (0.0, 0.05)
)


@dataclass(frozen=True)
class SparsePrefill:
    """One sparse prefill, queries in bf16."""

    tokens: int
    cached: int
    heads: int
    d_qk: int
    topk: int
    flashmla_us: float | None
    floor_us: float | None
    target_us: float | None
    kv_format: str = "bf16"

    @property
    def name(self) -> str:
        """Such as ``4096 over 8192, h=128, d=576, k=2048``."""
        return f"{self.tokens} over {self.cached}, h={self.heads}, d={self.d_qk}, k={self.topk}"

    @property
    def bytes_moved(self) -> int:
        """The rows once, indices, queries and results once."""
        each = self.heads * (self.d_qk + D_V) * 2 + 4 * self.topk
        return self.cached * token_bytes(self.kv_format, self.d_qk) + self.tokens * each

    @property
    def operations(self) -> int:
        """Of every query row with each of its keys."""
        return 2 * (self.d_qk + D_V) * self.heads * self.tokens * self.topk

    def small(self) -> SparsePrefill:
        """The same kind of call, small enough for a CPU."""
        return replace(self, tokens=12, cached=300, heads=-(-self.heads // 16), topk=-(-self.topk // 32))


SPARSE_PREFILL = (
    SparsePrefill(4096, 8192, 128, 576, 2048, 4007, 2690, 3500),
    SparsePrefill(4096, 65536, 128, 576, 2048, 4529, 2690, 3750),
    SparsePrefill(4096, 32768, 64, 512, 512, 629, 316, 480),
    SparsePrefill(4096, 32768, 128, 512, 1024, 2178, 1266, 1700),
    SparsePrefill(4096, 32768, 64, 576, 2048, 2275, 1345, 1850),
)

# Of those, over quantised caches, and over copies of them in bf16.
SPARSE_PREFILL_COPIES = tuple(replace(row, kv_format="fp8_v32") for row in SPARSE_PREFILL if row.d_qk == 576) + tuple(
    replace(row, kv_format="fp8_v41") for row in SPARSE_PREFILL if row.d_qk == 512
)

# Few tokens of the first of those, whose lists are split.
SPARSE_PREFILL_FEW = tuple(
    replace(SPARSE_PREFILL[0], tokens=tokens, heads=heads, kv_format=kv_format)
    for kv_format in ("bf16", "fp8_v32")
    for heads in (16, 128)
    for tokens in (1, 16, 62, 140, 400)
)


def _of_heads(heads: int, kv_format: str, cached: int, d_qk: int, topk: int) -> SparsePrefill:
    return _unasked(SparsePrefill(4096, cached, heads, d_qk, topk, None, None, None, kv_format))


# Fewer heads, as tensor parallelism leaves them.
SPARSE_PREFILL_HEADS = tuple(
    _of_heads(heads, kv_format, *rows)
    for rows, formats in (((8192, 576, 2048), ("bf16", "fp8_v32")), ((32768, 512, 512), ("bf16", "fp8_v41")))
    for kv_format in formats
    for heads in (8, 16, 32, 64)
)

CACHE_FORMATS = ("bf16", *TOKEN_BYTES)
APPENDED = (128, 8192)  # new tokens: a decode step's and a chunk's
WHOLE_PAGES = 4096  # of 64 tokens: what whole caches and gathers are measured over

# Rows and topk of to_physical; rows, topk, window and ratio of combine_topk_window.
TO_PHYSICAL = ((128, 2048), (32768, 2048))
COMBINED = ((128, 2048, 128, 4), (8192, 512, 128, 4), (32768, 2048, 128, 4))
WINDOWS = ((128, 1), (8, 4096))  # requests and their new tokens
WINDOW, INDEX_CONTEXT = 128, 65536
