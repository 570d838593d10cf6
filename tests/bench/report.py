"""The rows as a table on the screen, as JSON, as a plot, and as part of a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from math import log2
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.rows import Row

_BEGIN, _END = "<!-- made by `make bench` -->", "<!-- until here -->"
_COLOURS = {"ok": "#2b7a4b", "short": "#b5452c"}


def show(rows: Sequence[Row], title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    for column in ("figure", "target", ""):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.name, figure(row), row.target, row.verdict)
    Console(width=110).print(table)


def figure(row: Row) -> str:
    return f"{row.value:.{3 if row.value < 1 else 2}f} {row.unit}"


def save(rows: Sequence[Row], facts: Mapping[str, object], folder: Path) -> None:
    """`bench.json` and `bench.svg` in `folder`, and the table in its `performance.md` if it has one."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"facts": facts, "rows": [asdict(row) | {"verdict": row.verdict} for row in rows]}
    (folder / "bench.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    (folder / "bench.svg").write_text(plot(rows))
    page = folder / "performance.md"
    if page.exists():
        before, _, rest = page.read_text().partition(_BEGIN)
        _, _, after = rest.partition(_END)
        page.write_text(f"{before}{_BEGIN}\n{_markdown(rows, facts)}\n{_END}{after}")


def _markdown(rows: Sequence[Row], facts: Mapping[str, object]) -> str:
    lines = ["; ".join(f"{name}: {value}" for name, value in facts.items()) + ".", ""]
    lines += ["| what | figure | target | |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {figure(row)} | {row.target} | {row.verdict} |" for row in rows]
    behind = {name: value for row in rows for name, value in row.details.items()}
    lines += ["", "| behind them | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value:.2f} |" for name, value in behind.items())])


def plot(rows: Sequence[Row]) -> str:
    """How far each row is from its target, on a logarithmic scale from a quarter to four times; SVG."""
    judged = [(row, row.reached) for row in rows if row.reached is not None]
    left, width, step = 430, 400, 26
    height = step * len(judged) + 50

    def at(reached: float) -> float:
        return left + width * (min(max(log2(reached), -2), 2) + 2) / 4

    size = f'width="{left + width + 90}" height="{height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">']
    lines.append(f'<rect {size} fill="white"/>')
    for mark in (0.25, 0.5, 1, 2, 4):
        stroke = "#333" if mark == 1 else "#ccc"
        lines.append(f'<line x1="{at(mark):.0f}" x2="{at(mark):.0f}" y1="10" y2="{height - 30}" stroke="{stroke}"/>')
        lines.append(f'<text x="{at(mark):.0f}" y="{height - 12}" text-anchor="middle">{mark:g} x target</text>')
    for number, (row, reached) in enumerate(judged):
        y = 14 + step * number
        x, end = sorted((at(1), at(reached)))
        lines.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(row.name)}</text>')
        lines.append(f'<rect x="{x:.0f}" y="{y}" width="{max(end - x, 2):.0f}" height="16" fill="{_COLOURS[row.verdict]}"/>')
        lines.append(f'<text x="{left + width + 6}" y="{y + 13}">{escape(figure(row))}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
