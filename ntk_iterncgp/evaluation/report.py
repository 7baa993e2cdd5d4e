"""Methods side by side: what each achieved and cost, as a table one can read and a file one can parse."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ntk_iterncgp.evaluation.metrics import ClassificationMetrics


@dataclass(frozen=True, eq=False)
class Row:
    """One method's line: how good, at what cost."""

    label: str
    metrics: ClassificationMetrics
    num_products: int
    rank: int
    num_newton_steps: int
    seconds: float
    information_captured: float
    status: str
    curve: list[tuple[int, float]]  # test NLL after so many products
    probabilities: Tensor = field(repr=False)  # (b, C), at the end

    def as_json(self) -> dict[str, Any]:
        """All but the probabilities."""
        return {
            name: value for name, value in self.__dict__.items() if name not in ("metrics", "probabilities")
        } | asdict(self.metrics)


COLUMNS: list[tuple[str, Callable[[Row], str], str]] = [
    ("accuracy", lambda row: f"{100 * row.metrics.accuracy:.1f} %", "The share of test inputs classified rightly."),
    ("NLL", lambda row: f"{row.metrics.nll:.3f}", "The mean of −log p(true class), in nats; lower is better."),
    ("ECE", lambda row: f"{row.metrics.ece:.3f}", "The mean gap between confidence and accuracy; lower is better."),
    ("products", lambda row: f"{row.num_products}", "How often the kernel matrix was multiplied by a vector."),
    ("seconds", lambda row: f"{row.seconds:.1f}", "What the fit took on this machine, predictions apart."),
    (
        "information",
        lambda row: f"≥ {100 * row.information_captured:.0f} %",
        "How much of what the training data say has been used; the rest is left as variance.",
    ),
]
"""Heading, cell and one sentence of explanation."""


def table(rows: Sequence[Row]) -> str:
    """Aligned text, a line per method, with a sentence per column below."""
    headings = [heading for heading, _, _ in COLUMNS]
    cells = [[cell(row) for _, cell, _ in COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    first = max(len(row.label) for row in rows)

    def line(label: str, values: Sequence[str]) -> str:
        right = (value.rjust(width) for value, width in zip(values, widths, strict=True))
        return "   ".join([label.ljust(first), *right])

    lines = [line("", headings), "─" * len(line("", headings))]
    lines += [line(row.label, values) for row, values in zip(rows, cells, strict=True)]
    width = max(map(len, headings))
    return "\n".join([*lines, "", *(f"{heading.ljust(width)}  {sentence}" for heading, _, sentence in COLUMNS)])


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(path, lambda target: target.write_text(text + "\n", encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name in the same folder, then rename: a reader never sees half a file."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
