"""Puts the tables of one run into the documentation.

    python benches/bench.py --json results.json          # on the GPU machine
    python benches/fill_docs.py results.json COMMIT      # here: the run's commit

A table stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; ``head`` is the sentence about the run. The page
is from one run: one that lacks a table is refused.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
BLOCK = re.compile(r"<!-- bench:(\w+) -->\n.*?<!-- /bench -->", re.DOTALL)


def head(results: dict[str, Any], commit: str) -> str:
    """What was run on what."""
    read, matrix = f"{results['read_gb_s']:,.0f} GB/s", f"{results['matrix_tflop_s']:.0f} TFLOP/s"
    return (
        f"One {results['device']} (torch {results['torch']}), one run of commit `{commit}`. In the same run the\n"
        f"GPU read {read} and multiplied bf16 8192^3 at {matrix} through torch."
    )


def fill(page: str, results: dict[str, Any], commit: str) -> str:
    """The page with the run's tables in their places."""
    texts = {name: "\n".join(lines) for name, lines in results["markdown"].items()}
    texts["head"] = head(results, commit)

    def replace(block: re.Match[str]) -> str:
        name = block[1]
        return f"<!-- bench:{name} -->\n{texts[name]}\n<!-- /bench -->" if name in texts else block[0]

    return BLOCK.sub(replace, page)


def main(results: str, commit: str) -> None:
    """Rewrites the page."""
    page, found = PAGE.read_text(), json.loads(pathlib.Path(results).read_text())
    if missing := set(BLOCK.findall(page)) - {"head", *found["markdown"]}:
        raise SystemExit(f"{results} lacks the tables {', '.join(sorted(missing))}")
    PAGE.write_text(fill(page, found, commit))


if __name__ == "__main__":
    main(*sys.argv[1:])
