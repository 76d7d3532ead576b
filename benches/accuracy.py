"""What quantising the cache costs: decode over each format against float64 over the numbers before quantisation.

    python benches/accuracy.py [--rows 8192] [--svg docs/accuracy.svg]    # on a CPU, in a minute

Prints a markdown table for docs/formats.md and draws it. The rows imitate a latent cache: numbers with heavy tails
(Student's t), divided by the root mean square of their row, then every column times a weight of its own (log-normal; a
few are outliers of ten times that); the rotary part is pairs that turn with the position, larger than the rest. A query
weighs every column alike, and its scores have a standard deviation of 2: softmax neither picks one key nor averages
over all.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

import ferromla

D_V, ROPE = 512, 64
HEADS, REQUESTS, PAGE_SIZE = 16, 4, 64
OUTLIER_COLUMNS, OUTLIER = 8, 10.0
FREEDOM = 8  # degrees of freedom of the tails
SCORE_DEVIATION = 2.0
COLUMN_DEVIATION = 0.6  # of the logarithm of a column's scale
ROPE_LENGTH = 3.0
LARGEST = "the largest magnitude / 448"
# Formats with what they are called with, by the width of a row.
CALLS = {
    576: (
        ("bf16", {}),
        ("fp8", {}),
        ("fp8", {"kv_scale": LARGEST}),
        ("fp8_v32", {}),
        ("fp8_v32", {"round_scale": False}),
    ),
    512: (("bf16", {}), ("fp8", {}), ("fp8_v4", {}), ("fp8_v41", {}), ("fp8_v41_split", {}), ("fp4_v41", {})),
}


@dataclass(frozen=True)
class Line:
    """One format's errors."""

    name: str
    d_qk: int
    token_bytes: int
    row: float  # |dequantised - x| / |x| of cached rows
    out: float  # |out - exact| / |exact|
    worst: float  # largest |out - exact| over the root mean square of exact
    lse: float  # largest |lse - exact|


def weights(d_qk: int, generator: torch.Generator) -> torch.Tensor:
    """Of the columns."""
    columns = torch.randn(d_qk, generator=generator, dtype=torch.float64).mul(COLUMN_DEVIATION).exp()
    columns[torch.randperm(D_V - ROPE, generator=generator)[:OUTLIER_COLUMNS]] *= OUTLIER
    columns[-ROPE:] = ROPE_LENGTH
    return columns


def cached_rows(count: int, columns: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """``[count, d_qk]`` in float64, as a latent cache has them."""
    options = {"generator": generator, "dtype": torch.float64}
    normal = torch.randn(count, len(columns), **options)
    tails = torch.randn(FREEDOM, count, len(columns), **options).square().mean(0).sqrt()
    rows = normal / tails
    rows /= rows.square().mean(-1, keepdim=True).sqrt()
    frequency = 10000.0 ** (-torch.arange(ROPE // 2, dtype=torch.float64) / (ROPE // 2))
    angle = torch.arange(count)[:, None] * frequency + 6.28 * torch.rand(ROPE // 2, **options)
    pairs = torch.stack((torch.cos(angle), torch.sin(angle)), -1)
    rows[:, -ROPE:] = pairs.flatten(1) + 0.1 * normal[:, -ROPE:]
    return rows * columns


def exact(q: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q [h, d]`` over ``keys [s, d]`` in float64."""
    scores = q @ keys.T * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[:, None]) @ keys[:, :D_V], lse


def stored(rows: torch.Tensor, kv_format: str, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache ``[pages, PAGE_SIZE, ...]`` of the rows, and what it holds in float64."""
    pages = rows.view(-1, PAGE_SIZE, rows.shape[-1]).float()
    if kv_format == "bf16":
        return pages.bfloat16(), pages.bfloat16().double().flatten(0, 1)
    cache = ferromla.quantize_kv(pages, kv_format, **options)
    scale = {name: value for name, value in options.items() if name == "kv_scale"}
    held = ferromla.dequantize_kv(cache, kv_format, dtype=torch.float32, **scale)
    return cache, held.double().flatten(0, 1)


def line(kv_format: str, options: dict, rows: torch.Tensor, q: torch.Tensor) -> Line:
    """The errors of a format. Attention over the stored numbers is in float64 too: what is left is the format's."""
    note = ", ".join("kv_scale: amax / 448" if name == "kv_scale" else "raw scales" for name in options)
    if options.get("kv_scale") == LARGEST:
        options = {"kv_scale": float(rows.abs().max()) / 448}
    cache, held = stored(rows, kv_format, options)
    length = len(rows) // REQUESTS
    pairs = []
    for request in range(REQUESTS):
        span = slice(request * length, (request + 1) * length)
        pairs.append((*exact(q[request], held[span]), *exact(q[request], rows[span])))
    out, lse, want, want_lse = (torch.stack(column) for column in zip(*pairs, strict=True))
    return Line(
        name=f"{kv_format}, {note}" if note else kv_format,
        d_qk=rows.shape[-1],
        token_bytes=cache.shape[-1] * cache.element_size(),
        row=float((held - rows).norm() / rows.norm()),
        out=float((out - want).norm() / want.norm()),
        worst=float((out - want).abs().max() / want.square().mean().sqrt()),
        lse=float((lse - want_lse).abs().max()),
    )


def measure(count: int) -> list[Line]:
    """All formats, over the same rows where they have the same width."""
    lines = []
    for d_qk, formats in CALLS.items():
        generator = torch.Generator().manual_seed(d_qk)
        columns = weights(d_qk, generator)
        rows = cached_rows(count, columns, generator)
        q = torch.randn(REQUESTS, HEADS, d_qk, generator=generator, dtype=torch.float64) / columns
        scores = q @ rows.T * d_qk**-0.5
        q *= SCORE_DEVIATION / scores.std(-1, keepdim=True)
        lines += [line(kv_format, options, rows, q) for kv_format, options in formats]
    return lines


def table(lines: list[Line]) -> str:
    """As markdown."""
    head = "| format | d_qk | bytes/token | rows | out | worst number of out | lse |\n|---|---|---|---|---|---|---|\n"
    form = "| {0.name} | {0.d_qk} | {0.token_bytes} | {0.row:.1e} | {0.out:.1e} | {0.worst:.1e} | {0.lse:.1e} |"
    return head + "\n".join(form.format(line) for line in lines)


def plot(lines: list[Line], path: str) -> None:
    """The error of out over the bytes of a token."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "accuracy"  # the same file for the same numbers
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="tight")
    axes = figure.subplots()
    labels = [f"{line.name} ({line.d_qk})" for line in lines]
    place = range(len(lines))
    axes.barh([p - 0.2 for p in place], [line.out for line in lines], 0.4, label="out, relative norm")
    axes.barh([p + 0.2 for p in place], [line.worst for line in lines], 0.4, label="worst number of out")
    axes.set_yticks(place, labels)
    axes.set_xscale("log")
    axes.set_xlabel("error against float64 over the numbers before quantisation")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="cached tokens of all requests, a multiple of 256")
    parser.add_argument("--svg", help="also draw into this file (needs matplotlib)")
    options = parser.parse_args()
    lines = measure(options.rows)
    print(table(lines))
    if options.svg:
        plot(lines, options.svg)


if __name__ == "__main__":
    main()
