"""A table of methods, once for the screen and once for a page: a line per method, a sentence per column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

ROOM = 22  # characters of a heading and its value that fit in half the width of a phone


def number(value: float) -> str:
    """Three digits, and no exponent where none is needed: 0.178, 5,620."""
    return f"{float(f'{value:.3g}'):,.0f}" if 100 <= value < 1e5 else f"{value:.3g}"


@dataclass(frozen=True)
class Column:
    """`cell` turns a result into text; `pick` (max or min) says which of the numbers in it is the best."""

    heading: str
    cell: Callable[[Any], str]
    sentence: str
    pick: Callable[[Sequence[float]], float] | None = None


@dataclass(frozen=True)
class Table:
    """Results have `name` and `label`; `missing` says by label why a method is not among them."""

    results: Sequence[Any]
    columns: Sequence[Column]
    missing: Mapping[str, str]

    def text(self) -> str:
        """Aligned, with a sentence per column below."""
        cells = [[column.cell(result) for column in self.columns] for result in self.results]
        headings = [column.heading for column in self.columns]
        widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
        first = max(len(result.label) for result in self.results)

        def line(label: str, values: Sequence[str]) -> str:
            right = (value.rjust(width) for value, width in zip(values, widths, strict=True))
            return "   ".join([label.ljust(first), *right]).rstrip()

        lines = [line("", headings), "─" * (first + sum(widths) + 3 * len(widths))]
        lines += [line(result.label, values) for result, values in zip(self.results, cells, strict=True)]
        width = max(map(len, headings))
        sentences = [f"{column.heading.ljust(width)}  {column.sentence}" for column in self.columns]
        missing = [f"{label}: not available here. {why}" for label, why in self.missing.items()]
        return "\n".join([*lines, "", *sentences, *([""] if missing else []), *missing])

    def html(self) -> str:
        """The best of each column is marked. On a phone each method is a card, so cells know their heading."""
        best = [self._best(column) for column in self.columns]
        head = "".join(f"<th>{escape(column.heading)}</th>" for column in self.columns)
        rows = []
        for i, result in enumerate(self.results):
            cells = [f"<td>{escape(result.label)}</td>"]
            for column, winners in zip(self.columns, best, strict=True):
                value = column.cell(result)
                is_long = len(column.heading) + len(value) > ROOM
                kinds = " ".join(["best"] * (i in winners) + ["long"] * is_long + ["none"] * (value in ("", "–")))
                marked = f' class="{kinds}"' if kinds else ""
                cells.append(f'<td data-label="{escape(column.heading)}"{marked}>{escape(value)}</td>')
            ours = ' class="ours"' if result.name == "ours" else ""
            rows.append(f"<tr{ours}>{''.join(cells)}</tr>")
        return (
            f'<div class="frame"><table><thead><tr><th>method</th>{head}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )

    def _best(self, column: Column) -> set[int]:
        if column.pick is None:
            return set()
        numbers = [float(column.cell(result).removesuffix(" %")) for result in self.results]  # as they are shown
        return {i for i, number in enumerate(numbers) if number == column.pick(numbers)}
