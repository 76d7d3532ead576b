"""Puts the tables of one run into the documentation.

    python benches/bench.py --json results.json          # on the GPU machine
    python benches/fill_docs.py results.json COMMIT      # here: the run's commit

A table stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; ``head`` is the sentence about the run. The
pages are from one run: one that lacks a table is refused.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGES = (DOCS / "performance.md", DOCS / "performance-operations.md")
BLOCK = re.compile(r"<!-- bench:(\w+) -->\n.*?<!-- /bench -->", re.DOTALL)


def head(results: dict[str, Any], commit: str) -> str:
    """What was run on what."""
    read, matrix = f"{results['read_gb_s']:,.0f} GB/s", f"{results['matrix_tflop_s']:.0f} TFLOP/s"
    return (
        f"One {results['device']} (torch {results['torch']}), one run of commit `{commit}`. In the same run the\n"
        f"GPU read {read} and multiplied bf16 8192^3 at {matrix} through torch."
    )


def fill(page: str, results: dict[str, Any], commit: str) -> str:
    """A page with the run's tables in their places."""
    texts = {name: "\n".join(lines) for name, lines in results["markdown"].items()}
    texts["head"] = head(results, commit)

    def replace(block: re.Match[str]) -> str:
        name = block[1]
        return f"<!-- bench:{name} -->\n{texts[name]}\n<!-- /bench -->" if name in texts else block[0]

    return BLOCK.sub(replace, page)


def main(results: str, commit: str) -> None:
    """Rewrites the pages."""
    pages, found = {page: page.read_text() for page in PAGES}, json.loads(pathlib.Path(results).read_text())
    named = {name for text in pages.values() for name in BLOCK.findall(text)}
    if missing := named - {"head", *found["markdown"]}:
        raise SystemExit(f"{results} lacks the tables {', '.join(sorted(missing))}")
    for page, text in pages.items():
        page.write_text(fill(text, found, commit))


if __name__ == "__main__":
    main(*sys.argv[1:])
