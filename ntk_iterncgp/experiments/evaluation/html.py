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
from ntk_iterncgp.experiments.evaluation.tables import Column, Table


@dataclass(frozen=True)
class Opening:
    """What a report begins with: lines to remember, and pictures of them."""

    lines: Sequence[str]
    panels: Sequence[tuple[str, str, str]]  # title, one sentence, SVG


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

    def fit_mebibytes(result: Any) -> str:
        return "–" if result.fit_bytes is None else f"{result.fit_bytes / 2**20:,.0f}"

    columns = [
        Column("fit (s)", lambda r: f"{r.fit_seconds:.1f}", "Seconds of the fit."),
        Column("fit (MiB)", fit_mebibytes, "The peak of memory in the fit, above what was held before it."),
        Column("moments of all inputs (s)", lambda r: f"{r.predict_seconds:.1f}", "Seconds of the predictions."),
    ]
    return Table(results, columns, {})


def cost_note(cost: Mapping[str, Any], rows_seconds: float) -> str:
    """Say what the numbers of the cost table count, and what the whole run took."""
    rows = f"The rows of J took {rows_seconds:.0f} s, once for all methods, and are counted in each. "
    whole = (
        f"The whole run took {cost['seconds']:.0f} s and {cost['peak_memory_bytes'] / 2**20:,.0f} MiB at its peak, on "
        f"{cost['threads']} thread{'s' if cost['threads'] != 1 else ''}."
    )
    memory = "MiB of a fit are its peak of memory above what was held before it. "
    return f"{rows if rows_seconds else ''}{memory}{whole}"
