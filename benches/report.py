"""Tables as they grow: in columns or as markdown, kept for JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Of a table's columns: its title, the key of its value in a row, and how the value is written.
Column = tuple[str, str, str]

SHAPE: Column = ("shape", "name", "{}")
US: Column = ("us", "us", "{:.1f}")
VERDICT: Column = ("target", "verdict", "{}")
TARGET: tuple[Column, ...] = (("target us", "target", "{:g}"), VERDICT)
ERRORS: tuple[Column, ...] = (
    ("max error", "error", "{:.1e}"),
    ("angle", "angle", "{:.1e}"),
    ("lse error", "lse_error", "{:.1e}"),
)


@dataclass
class Report:
    """What was measured, by table, printed line by line."""

    markdown: bool = False
    head: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)  # each table as lines of markdown
    _columns: Sequence[Column] = ()

    def table(self, name: str, title: str, columns: Sequence[Column]) -> None:
        """Begins a table; the rows that follow belong to it."""
        self.tables[name], self.texts[name] = [], []
        self._columns = columns
        print(f"\n{'### ' if self.markdown else ''}{title}\n")
        self._line([column[0] for column in columns])
        self._line(["---"] * len(columns))

    def row(self, **values: Any) -> None:
        """A line; what is None or missing is shown as a dash."""
        self.tables[next(reversed(self.tables))].append(values)
        self._line(["-" if values.get(key) is None else form.format(values[key]) for _, key, form in self._columns])

    def _line(self, cells: list[str]) -> None:
        text = f"| {' | '.join(cells)} |"
        self.texts[next(reversed(self.texts))].append(text)
        if not self.markdown:
            widths = [max(12, len(title) + 2) for title, _, _ in self._columns[1:]]
            text = f"{cells[0]:<46}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells[1:], widths, strict=True))
        print(text, flush=True)

    def summary(self) -> str:
        """How many lines of each table met what was asked for."""
        counts = []
        for name, rows in self.tables.items():
            verdicts = [row["verdict"] for row in rows if row.get("verdict")]
            if verdicts:
                counts.append(f"{name} {verdicts.count('met')} of {len(verdicts)}")
        return f"met: {', '.join(counts) or 'nothing was asked for'}"

    def write_json(self, path: str) -> None:
        """Everything, in full precision."""
        with open(path, "w") as file:
            json.dump(self.head | {"tables": self.tables, "markdown": self.texts}, file, indent=2)

    def plot(self, path: str) -> None:
        """A bar for each line that has a floor: the floor's share of the time."""
        from matplotlib.figure import Figure

        rows = [row for rows in self.tables.values() for row in rows if row.get("floor")]
        figure = Figure(figsize=(8, 1 + 0.3 * len(rows)), layout="tight")
        axes = figure.subplots()
        axes.barh([row["name"] for row in rows], [row["floor"] for row in rows])
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("floor / time")
        figure.savefig(path)
