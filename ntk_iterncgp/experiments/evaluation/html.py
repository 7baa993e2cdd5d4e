"""`report.html`: one self-contained file, from the template beside this one."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ntk_iterncgp.experiments.config import RunConfig, as_yaml
from ntk_iterncgp.experiments.evaluation.pictures import Card
from ntk_iterncgp.experiments.evaluation.tables import Column, Table, number


@dataclass(frozen=True)
class Opening:
    """What a report begins with: lines to remember, and pictures of them."""

    lines: Sequence[str]
    panels: Sequence[tuple[str, str, str]]  # title, one sentence, SVG


@dataclass(frozen=True)
class DetectorSection:
    """What `la.detector` makes of the test inputs and of the other sets."""

    sentence: str
    table: Table
    panels: Sequence[tuple[str, str, str]]  # title, one sentence, SVG
    pictures: Sequence[tuple[str, Sequence[Card]]]  # heading, images


@dataclass(frozen=True)
class Page:
    """What a report says, whatever it is about."""

    title: str
    summary: str  # of what was run
    verdict: Sequence[str]
    results: Table
    others: Table | None  # about out-of-distribution inputs
    panels: Sequence[tuple[str, str, str]]  # title, one sentence, SVG
    pictures: Sequence[tuple[str, Sequence[Card]]]  # heading, test images
    costs: Table
    cost_note: str
    opening: Opening | None = None
    detector: DetectorSection | None = None


def as_html(page: Page, config: RunConfig) -> str:
    """Return the page as HTML text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["data_url"] = _data_url
    return environment.get_template("report.html.jinja").render(page=page, settings=as_yaml(config))


def _data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def cost_table(results: Sequence[Any]) -> Table:
    """What each method took."""
    own = next((result.fit_seconds for result in results if result.name == "iterncgp"), 0.0)

    def fit_mebibytes(result: Any) -> str:
        return "–" if result.fit_bytes is None else f"{result.fit_bytes / 2**20:,.0f}"

    def beside_own(result: Any) -> str:
        return "–" if not own or not result.fit_seconds else f"{number(result.fit_seconds / own)} ×"

    columns = [
        Column("fit (s)", lambda r: f"{r.fit_seconds:.1f}", "Seconds of the fit."),
        Column("fit, to IterNCGP", beside_own, "The same over those of IterNCGP."),
        Column("fit (MiB)", fit_mebibytes, "The peak of memory in the fit, above what was held before it."),
        Column("moments of all inputs (s)", lambda r: f"{r.predict_seconds:.1f}", "Seconds of the predictions."),
    ]
    return Table(results, columns, {})


@dataclass(frozen=True)
class Price:
    """What one prediction of IterNCGP costs."""

    milliseconds: float  # for each input
    passes: float  # in forward passes of the network over the same inputs
    num_inputs: int  # at once

    def __str__(self) -> str:
        return f"{self.milliseconds:.2g} ms for each of {self.num_inputs} inputs, {number(self.passes)} forward passes"


def cost_note(
    cost: Mapping[str, Any], rows_seconds: float, epochs: float | None = None, price: Price | None = None
) -> str:
    """Say what the numbers of the cost table count, and what the whole run took.

    Args:
        cost: Of the whole run.
        rows_seconds: What the rows of J took, which all methods share.
        epochs: That the fit of IterNCGP counted.
        price: Of a prediction by IterNCGP.
    """
    parts = []
    if epochs is not None:
        parts.append(f"The fit of IterNCGP counts {epochs:.2g} epochs of forward and backward passes.")
    if price is not None:
        parts.append(f"A prediction by IterNCGP takes {price}.")
    if rows_seconds:
        parts.append(f"The rows of J took {rows_seconds:.0f} s, once for all methods, and are counted in each.")
    parts.append("MiB of a fit are its peak of memory above what was held before it.")
    parts.append(
        f"The whole run took {cost['seconds']:.0f} s and {cost['peak_memory_bytes'] / 2**20:,.0f} MiB at its peak, on "
        f"{cost['threads']} thread{'s' if cost['threads'] != 1 else ''}."
    )
    return " ".join(parts)
