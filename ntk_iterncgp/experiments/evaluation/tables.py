"""A table of methods, once for the screen and once for a page: a line per method, a sentence per column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ABSENT = ("", "–")  # where a method has no such number
ROOM = 22  # characters of a heading and its value that fit in half the width of a phone


def number(value: float) -> str:
    """Three digits, and no exponent where none is needed: 0.178, 5,620."""
    return f"{float(f'{value:.3g}'):,.0f}" if 100 <= value < 1e5 else f"{value:.3g}"


@dataclass(frozen=True)
class Column:
    """`cell` turns a result into text; `pick` (max or min, say) takes the best of the numbers in it."""

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

    def rows(self) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
        """Per method its label and, per column, heading, value, and CSS classes: on a phone each method is a card."""
        best = [self._best(column) for column in self.columns]
        for result in self.results:
            cells = []
            for column, winner in zip(self.columns, best, strict=True):
                value = column.cell(result)
                is_long = len(column.heading) + len(value) > ROOM
                kinds = ["best"] * (value == winner) + ["long"] * is_long + ["none"] * (value in ABSENT)
                cells.append((column.heading, value, " ".join(kinds)))
            yield result.label, cells

    def _best(self, column: Column) -> str | None:
        """As it is shown, so that methods that cannot be told apart there are all the best."""
        shown = [value for result in self.results if (value := column.cell(result)) not in ABSENT]
        if column.pick is None or not shown:
            return None
        numbers = [float(value.removesuffix(" %")) for value in shown]
        return shown[numbers.index(column.pick(numbers))]
