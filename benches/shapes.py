"""What the benches measure, as data: the calls, the limits of one NVIDIA H200 as measured, peers and targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

PAGE_SIZE = 64
D_QK, D_V = 576, 512
# What one H200 reaches: reading device memory (GB/s), and bf16 wgmma on random data (TFLOP/s).
READ_RATE, MATRIX_RATE = 4490.0, 868.0
# Of a token of the quantised formats.
TOKEN_BYTES = {"fp8": 576, "fp8_v32": 656, "fp8_v4": 584, "fp8_v41": 528, "fp8_v41_split": 528, "fp4_v41": 288}


@dataclass(frozen=True)
class Case:
    """One call: each request's cached tokens, the new ones included, and its query tokens.

    ``ragged`` sends it through ``prefill``; otherwise it is a ``decode`` and all of ``q_lens`` are equal."""

    name: str
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    heads: int
    page_size: int = PAGE_SIZE
    ragged: bool = False
    kv_format: str = "bf16"  # or any other of 16 bits
    q_e4m3: bool = False  # queries in e4m3, with a scale for each row

    @property
    def q_tokens(self) -> int:
        """Query tokens of all requests."""
        return sum(self.q_lens)

    @property
    def cache_bytes(self) -> int:
        """Of the attended tokens."""
        return sum(self.seq_lens) * TOKEN_BYTES.get(self.kv_format, D_QK * 2)

    @property
    def bytes_moved(self) -> int:
        """Each attended byte of the cache once, queries and results once."""
        row = D_QK * (1 if self.q_e4m3 else 2) + D_V * 2
        return self.cache_bytes + self.q_tokens * self.heads * row

    @property
    def operations(self) -> int:
        """Of every query row with every key of its request: keys that causality masks are not subtracted."""
        return self._operations(q * s for q, s in zip(self.q_lens, self.seq_lens, strict=True))

    @property
    def seen_operations(self) -> int:
        """Of every query row with the keys that it sees."""
        pairs = zip(self.q_lens, self.seq_lens, strict=True)
        return self._operations(sum(max(0, s - q + i + 1) for i in range(q)) for q, s in pairs)

    def _operations(self, keys: Iterable[int]) -> int:
        return 2 * (D_QK + D_V) * self.heads * sum(keys)

    @property
    def floor_us(self) -> float:
        """The larger of reading and of multiplying what is seen, at the measured rates; products of e4m3 go twice as
        fast as those of bf16."""
        rate = MATRIX_RATE * (2 if self.q_e4m3 else 1)
        return max(self.bytes_moved / READ_RATE / 1e3, self.seen_operations / rate / 1e6)

    def small(self) -> Case:
        """The same kind of call, small enough for a CPU: to try the benches where there is no GPU. Keeps the first
        and the last request, the longest, and the one of the most query tokens."""
        ends = {0, len(self.q_lens) - 1}
        kept = sorted(ends | {lens.index(max(lens)) for lens in (self.seq_lens, self.q_lens)})
        seq_lens = tuple(-(-self.seq_lens[r] // 128) for r in kept)
        q_lens = tuple(q if q <= 4 else -(-q // 128) for q in (self.q_lens[r] for r in kept))
        return replace(self, seq_lens=seq_lens, q_lens=q_lens, heads=-(-self.heads // 8))


def even(batch: int, seq: int, heads: int, *, q_len: int = 1, name: str = "", page_size: int = PAGE_SIZE) -> Case:
    """A decode of ``batch`` requests of one length, called as ``b128-q1-s4096-h16`` unless named."""
    name = name or f"b{batch}-q{q_len}-s{seq}-h{heads}"
    return Case(name, (seq,) * batch, (q_len,) * batch, heads, page_size)


def normal_lengths(batch: int, mean: int, deviation: int, least: int = 1) -> tuple[int, ...]:
    """Normally distributed lengths, the same ones every time."""
    normal = torch.randn(batch, generator=torch.Generator().manual_seed(0)) * deviation + mean
    return tuple(normal.round().long().clamp(least, 2 * mean).tolist())


def same_total(case: Case) -> Case:
    """An even batch of as many requests and tokens."""
    total, batch = sum(case.seq_lens), len(case.seq_lens)
    seq_lens = tuple(total // batch + (r < total % batch) for r in range(batch))
    return replace(case, name=f"even {case.name}", seq_lens=seq_lens)


@dataclass(frozen=True)
class Row:
    """One line of the dense decode table. ``spread`` is the standard deviation of normally distributed lengths;
    ``floor_us`` the time of streaming the pages with nothing else, or of the operations at the matrix rate,
    whichever is larger; ``target_us`` what is asked for. The peers' times (FlashMLA's, a range over machines;
    FlashInfer's fa3 backend; FlashAttention-3, on contiguous caches) were measured on an H200 beforehand."""

    batch: int
    q_len: int
    seq: int
    heads: int
    floor_us: float
    target_us: float
    flashmla_us: tuple[float, float]
    flashinfer_us: float
    flashattention_us: float
    spread: int = 0

    @property
    def case(self) -> Case:
        """The call, its name with ``~`` before a mean length."""
        if not self.spread:
            return even(self.batch, self.seq, self.heads, q_len=self.q_len)
        name = f"b{self.batch}-q{self.q_len}-s~{self.seq}-h{self.heads}"
        seq_lens = normal_lengths(self.batch, self.seq, self.spread, self.q_len)
        return Case(name, seq_lens, (self.q_len,) * self.batch, self.heads)

    @property
    def peers(self) -> str:
        """The peers' times as one text, in the order above."""
        low, high = self.flashmla_us
        flashmla = f"{low:g}-{high:g}" if low != high else f"{low:g}"
        return f"{flashmla} / {self.flashinfer_us:g} / {self.flashattention_us:g}"


DECODE = (
    Row(128, 1, 4096, 16, 136, 140, (142, 145), 149.0, 146.7),
    Row(128, 1, 4096, 32, 136, 141, (145, 149), 155.7, 149.1),
    Row(128, 1, 4096, 64, 138, 144, (147, 152), 160.4, 155.3),
    Row(128, 1, 4096, 128, 168, 225, (247, 262), 282.9, 272.1),
    Row(128, 2, 4096, 16, 136, 141, (144, 147), 152.5, 149.8),
    Row(128, 2, 4096, 64, 168, 225, (245, 266), 300.4, 270.3),
    Row(128, 2, 4096, 128, 336, 430, (477, 495), 534.8, 512.9),
    Row(128, 1, 4096, 16, 136, 145, (157, 157), 216.1, 178.2, spread=2048),
    Row(128, 1, 4096, 128, 168, 230, (250, 279), 405.8, 274.8, spread=2048),
    Row(64, 1, 1024, 16, 19, 22, (30.7, 33.4), 29.9, 33.6),
    Row(64, 1, 1024, 128, 21, 29, (35, 36.4), 42.1, 42.5),
    Row(32, 1, 8192, 16, 69, 72, (79, 83), 80.8, 82.5),
    Row(32, 1, 8192, 64, 70, 75, (89, 90), 90.1, 92.5),
    Row(32, 1, 8192, 128, 84, 112, (120, 130), 145.6, 136.0),
    Row(8, 1, 4096, 16, 10.8, 13.5, (21.9, 21.9), 23.0, 23.2),
    Row(8, 1, 4096, 128, 10.8, 19, (32.1, 32.1), 29.7, 31.8),
    Row(1, 1, 1024, 16, 2.4, 6, (11.3, 11.3), 16.6, 12.6),
    Row(1, 1, 1024, 128, 2.4, 7, (13.7, 13.7), 14.7, 15.1),
    Row(1, 1, 8192, 16, 4.5, 9, (25.0, 25.0), 24.1, 18.7),
    Row(1, 1, 8192, 128, 4.5, 10, (25.0, 25.0), 24.0, 22.9),
    Row(1, 1, 65536, 16, 19, 25, (51.6, 51.6), 56.8, 38.3),
    Row(1, 1, 65536, 128, 21, 28, (51.5, 51.5), 54.2, 55.0),
    Row(128, 1, 16384, 128, 673, 880, (978, 1030), 1086, 1016.6),
    Row(128, 2, 16384, 128, 1345, 1700, (1803, 1884), 2056, 1921.5),
)


@dataclass(frozen=True)
class Quantised:
    """One line of the dense table over quantised caches: b=128, s_q=1, seq 4096, or lengths of a normal distribution of
    that mean and the standard deviation ``spread``."""

    kv_format: str
    q_e4m3: bool
    heads: int
    target_us: float | None
    spread: int = 0

    @property
    def case(self) -> Case:
        """The call, such as ``fp8, q e4m3, h=16``."""
        lengths = f" N(4096, {self.spread})," if self.spread else ""
        name = f"{self.kv_format}, q {'e4m3' if self.q_e4m3 else 'bf16'},{lengths} h={self.heads}"
        call = replace(even(128, 4096, self.heads, name=name), kv_format=self.kv_format, q_e4m3=self.q_e4m3)
        return replace(call, seq_lens=normal_lengths(128, 4096, self.spread)) if self.spread else call


QUANTISED = tuple(
    Quantised(kv_format, q_e4m3, heads, target)
    for kv_format, q_e4m3, targets in (
        ("fp8", False, (78, 80, 108, 228)),
        ("fp8", True, (76, 78, 88, 170)),
        ("fp8_v32", False, (86, 88, 112, 232)),
    )
    for heads, target in zip((16, 32, 64, 128), targets, strict=True)
) + tuple(
    Quantised(kv_format, False, heads, None, 2048) for kv_format in ("fp8", "fp8_v32") for heads in (16, 32, 64, 128)
)

PREFILL_TARGET = 650.0  # TFLOP/s, where a shape has a target


@dataclass(frozen=True)
class Prefill:
    """One line of the prefill table, for each of ``HEADS``."""

    name: str
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    target_tflop_s: float | None = None

    def case(self, heads: int, kv_format: str = "bf16") -> Case:
        """The call."""
        return Case(f"{self.name}, h={heads}", self.seq_lens, self.q_lens, heads, ragged=True, kv_format=kv_format)


PREFILL = (
    Prefill("4096 over a prefix of 16384", (20480,), (4096,), PREFILL_TARGET),
    Prefill("32768, no prefix", (32768,), (32768,)),
    Prefill("8 x 512 over 8192", (8704,) * 8, (512,) * 8),
    Prefill("2048 of 4096 + 63 decodes at 4096", (4096,) * 64, (2048,) + (1,) * 63),
    Prefill("64 x 1 to 4 at 4096", (4096,) * 64, (1, 2, 3, 4) * 16),
)
HEADS = (16, 128)

# Of those, over caches of these formats, and over copies of them in bf16.
PREFILL_COPIES = PREFILL[:1] + PREFILL[2:3]
PREFILL_FORMATS = ("fp8", "fp8_v32")

# A chunk among so many decodes that requests have few query tokens on average.
PREFILL_HINTED = (
    Prefill("512 of 4096 + 200 decodes at 4096", (4096,) * 201, (512,) + (1,) * 200),
    Prefill("256 of 2048 + 100 decodes at 2048", (2048,) * 101, (256,) + (1,) * 100),
)
HINTED_HEADS = (16, 32, 64)

PAGE_SIZES = (1, 16, 32, 64, 128, 256)
PAGE_HEADS = (16, 64)


def page_limit(page_size: int) -> float:
    """How much slower than pages of 64 tokens these may be."""
    return 1.15 if page_size == 1 else 1.10


UNEVEN_LIMIT = 1.05


def uneven(heads: int) -> list[tuple[Case, Case]]:
    """Uneven batches, each with the even one that it is compared with: as many requests and tokens. A request of
    one token, or of none, cannot cost less than one tile of 64 tokens: whole batches of such are compared with
    one tile for each request."""

    def decode(name: str, seq_lens: Iterable[int]) -> Case:
        lens = tuple(seq_lens)
        return Case(f"{name}, h={heads}", lens, (1,) * len(lens), heads)

    mixed = (
        decode("128 of N(4096, 2048)", normal_lengths(128, 4096, 2048)),
        decode("131072 among 63 of 1024", [1024] * 31 + [131072] + [1024] * 32),
        decode("64 of 0 among 64 of 4096", [0, 4096] * 64),
        decode("64 of 1 among 64 of 4096", [1, 4096] * 64),
    )
    tiles = even(128, 64, heads, name="a tile each")
    alone = (decode("128 of 0", [0] * 128), decode("128 of 1", [1] * 128))
    return [(case, same_total(case)) for case in mixed] + [(case, tiles) for case in alone]


INVARIANCE_LIMIT = 1.15  # of 128 requests; fewer share the GPU out worse if parts may not depend on how many there are
INVARIANCE = tuple((row.case, INVARIANCE_LIMIT if row.batch == 128 else None) for row in DECODE)
INVARIANT_PARTS = (2, 4, 8, 16, 32)  # num_splits
INVARIANT_PARTS_CASES = tuple(
    even(batch, seq, heads)
    for heads in (16, 128)
    for batch, seq in ((1, 1024), (1, 8192), (1, 65536), (8, 4096), (32, 8192), (128, 4096))
)

PLAN_BATCHES = (1, 128, 512, 4096, 65536)
PLAN_TARGET_US = {512: 4.0}
HOST_TARGET_US = 10.0
