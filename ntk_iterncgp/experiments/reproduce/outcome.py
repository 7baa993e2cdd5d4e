"""What an experiment hands back, and how it reaches the disk: figures as PNG and PDF, numbers as CSV, claims as text.

Every file is written under another name and renamed, so that a reader never meets half a figure.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ntk_iterncgp.experiments.reproduce.style import style
from ntk_iterncgp.persistence.files import write_atomically

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, whether it came out, and the numbers that say so."""

    sentence: str
    holds: bool
    numbers: str

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.sentence} ({self.numbers})"


@dataclass(frozen=True)
class Outcome:
    """The figures and tables of one experiment by name, and what they say about the paper's claims."""

    figures: Mapping[str, Figure] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    claims: Sequence[Claim] = ()

    def write(self, folder: Path) -> list[Path]:
        """All files, in the order in which they were written."""
        paths = []
        for name, figure in self.figures.items():
            for suffix in ("png", "pdf"):
                paths.append(folder / f"{name}.{suffix}")
                write_atomically(paths[-1], partial(_draw, figure=figure))
        for name, rows in self.tables.items():
            paths.append(folder / f"{name}.csv")
            write_atomically(paths[-1], partial(_write_rows, rows=rows))
        claims: list[Row] = [{"holds": c.holds, "claim": c.sentence, "numbers": c.numbers} for c in self.claims]
        paths.append(folder / "claims.csv")
        write_atomically(paths[-1], lambda path: _write_rows(path, claims))
        return paths


def _draw(path: Path, figure: Figure) -> None:
    # No date inside: the same numbers give the same bytes.
    metadata = {"CreationDate": None} if path.suffix == ".pdf" else None
    with style():  # resolution and fonts are read when a figure is saved
        figure.savefig(path, metadata=metadata)


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({key: _written(value) for key, value in row.items()} for row in rows)


def _written(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
