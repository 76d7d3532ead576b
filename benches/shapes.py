"""The dense decode table, as data: the shapes, and the limits of one NVIDIA H200 as measured."""

from __future__ import annotations

from dataclasses import dataclass

PAGE_SIZE = 64
D_QK, D_V = 576, 512
# What one H200 reaches: reading device memory (GB/s), and bf16 wgmma on random data (TFLOP/s).
READ_RATE, MATRIX_RATE = 4490.0, 868.0


@dataclass(frozen=True)
class Row:
    """One line of the table. ``spread`` is the standard deviation of normally distributed lengths; ``floor_us``
    the time of streaming the pages with nothing else, or of the operations at the matrix rate, whichever is
    larger; ``flashmla_us`` what FlashMLA takes on the same GPU."""

    batch: int
    q_len: int
    seq: int
    heads: int
    floor_us: float
    flashmla_us: float
    spread: int = 0

    @property
    def name(self) -> str:
        """As ``b128-q1-s4096-h16``, with ``~`` before a mean length."""
        return f"b{self.batch}-q{self.q_len}-s{'~' if self.spread else ''}{self.seq}-h{self.heads}"


ROWS = (
    Row(128, 1, 4096, 16, 136, 143.5),
    Row(128, 1, 4096, 32, 136, 147),
    Row(128, 1, 4096, 64, 138, 149.5),
    Row(128, 1, 4096, 128, 168, 254.5),
    Row(128, 2, 4096, 16, 136, 145.5),
    Row(128, 2, 4096, 64, 168, 255.5),
    Row(128, 2, 4096, 128, 336, 486),
    Row(128, 1, 4096, 16, 136, 157, spread=2048),
    Row(128, 1, 4096, 128, 168, 264.5, spread=2048),
    Row(64, 1, 1024, 16, 19, 32),
    Row(64, 1, 1024, 128, 21, 35.7),
    Row(32, 1, 8192, 16, 69, 81),
    Row(32, 1, 8192, 64, 70, 89.5),
    Row(32, 1, 8192, 128, 84, 125),
    Row(8, 1, 4096, 16, 10.8, 21.9),
    Row(8, 1, 4096, 128, 10.8, 32.1),
    Row(1, 1, 1024, 16, 2.4, 11.3),
    Row(1, 1, 1024, 128, 2.4, 13.7),
    Row(1, 1, 8192, 16, 4.5, 25),
    Row(1, 1, 8192, 128, 4.5, 25),
    Row(1, 1, 65536, 16, 19, 51.6),
    Row(1, 1, 65536, 128, 21, 51.5),
    Row(128, 1, 16384, 128, 673, 1004),
    Row(128, 2, 16384, 128, 1345, 1843.5),
)
