"""``python -m ferromla``: what is supported on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import ferromla


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the support report; returns 0, or 1 where nothing runs on the device asked for."""
    parser = argparse.ArgumentParser(prog="python -m ferromla", description="What ferromla supports here.")
    parser.add_argument("--device", help='"cpu", "cuda:0", ...; the first GPU where there is one, else the CPU')
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--version", action="version", version=f"ferromla {ferromla.__version__}")
    options = parser.parse_args(arguments)
    report = ferromla.support(options.device)
    print(json.dumps(report, indent=2) if options.json else _text(report))
    return 1 if report["backend"] == "none" else 0


def _text(report: dict[str, Any]) -> str:
    kernels = "none in this build"
    if report["kernels"]:
        kernels = f"{len(report['kernels'])}, compiled by {report['compiler']}"
    lines = [
        f"ferromla {ferromla.__version__}",
        f"device   {report['device']} ({report['device_name'] or 'name unknown'})",
        f"backend  {report['backend']}",
        f"kernels  {kernels}",
    ]
    if report["reason"]:
        lines.append(f"no CUDA  {report['reason']}")
    return "\n".join([*lines, "", *_table(report["operations"])])


def _table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["nothing is supported on this device"]
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
