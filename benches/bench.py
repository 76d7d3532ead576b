"""Attention on the GPU: times, errors, how near the hardware's limits, and what was asked for.

    python benches/bench.py [--tables decode,prefill] [--rows b128] [--markdown] [--json FILE] [--plot FILE]

Calls are replayed from a CUDA graph over inputs that are rotated so that no call finds its cache in L2; times
are the median of seven measurements and hold everything a layer launches, not the planning, which is once per
step. Where times are compared, they are measured in turn. Errors are those of the timed inputs against float64.
The GPU's own read and matrix rates are measured in the same run, since they drift by some percent.

``--small`` shrinks every shape and takes a few of each: to try the benches themselves, on a CPU too.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import attention_tables
import cache_tables
import ferromla
import measure
import sparse_tables
import step_tables
from attention_tables import Bench
from report import Report
from shapes import MATRIX_RATE, READ_RATE

TABLES = {
    "decode": attention_tables.decode,
    "prefill": attention_tables.prefill,
    "pages": attention_tables.pages,
    "uneven": attention_tables.uneven,
    "invariance": attention_tables.invariance,
    "invariance_parts": attention_tables.invariance_parts,
    "quantised": attention_tables.quantised,
    "prefill_hints": attention_tables.prefill_hints,
    "prefill_copies": attention_tables.prefill_copies,
    "sparse": sparse_tables.sparse,
    "sparse_v4": sparse_tables.sparse_v4,
    "sparse_v41": sparse_tables.sparse_v41,
    "sparse_absent": sparse_tables.sparse_absent,
    "sparse_prefill": sparse_tables.sparse_prefill,
    "sparse_prefill_heads": sparse_tables.sparse_prefill_heads,
    "sparse_prefill_few": sparse_tables.sparse_prefill_few,
    "sparse_prefill_copies": sparse_tables.sparse_prefill_copies,
    "cache_ops": cache_tables.cache_ops,
    "index_ops": cache_tables.index_ops,
    "plan": step_tables.plan,
    "host": step_tables.host,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(TABLES), help="which ones, of %(default)s")
    parser.add_argument("--rows", default="", help="only lines whose name holds this text")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--markdown", action="store_true", help="print markdown tables")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--plot", help="also draw the fractions of the floor into this file (needs matplotlib)")
    parser.add_argument("--no-flashinfer", action="store_true", help="leave FlashInfer out where it is installed")
    parser.add_argument("--small", action="store_true", help="shrunk shapes, to try the benches themselves")
    parser.add_argument("--device", default="cuda", help="where to run (%(default)s); cpu only with --small")
    options = parser.parse_args(arguments)
    options.tables = options.tables.split(",")
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"--tables {','.join(sorted(unknown))}: there are {', '.join(TABLES)}")
    options.device = torch.device(options.device)
    if options.device.type != "cuda" and not options.small:
        parser.error(f"--device {options.device}: only cuda without --small")
    return options


def head(device: torch.device) -> dict[str, object]:
    """What the run was made on, printed and kept."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    read, matrix = measure.read_rate(device), measure.matrix_rate(device)
    print(f"{name}, torch {torch.__version__}, ferromla {ferromla.__version__}")
    print(f"read {read:.0f} GB/s (floor assumes {READ_RATE:.0f}), ", end="")
    print(f"bf16 8192^3 {matrix:.0f} TFLOP/s (floor assumes {MATRIX_RATE:.0f} of wgmma)")
    return {"device": name, "torch": torch.__version__, "read_gb_s": read, "matrix_tflop_s": matrix}


def main(arguments: list[str] | None = None) -> int:
    """Run the benches; 1 where a result is wrong."""
    options = parse(arguments)
    started = time.monotonic()
    report = Report(options.markdown, head(options.device))
    bench = Bench(
        report,
        options.device,
        DTYPES[options.dtype],
        small=options.small,
        only=options.rows,
        flashinfer=not options.no_flashinfer,
    )
    for name in options.tables:
        begun = time.monotonic()
        TABLES[name](bench)
        print(f"\n{time.monotonic() - begun:.0f} s for this table")
    print(f"\n{report.summary()}; {time.monotonic() - started:.0f} s")
    if options.json:
        report.write_json(options.json)
    if options.plot:
        report.plot(options.plot)
    if bench.wrong:
        print(f"\nwrong results: {', '.join(bench.wrong)}")
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
