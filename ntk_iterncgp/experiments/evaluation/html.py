"""`report.html`: one self-contained file to show a colleague. No script, no network, readable on a phone, prints well.

Figures stand in as many columns as there is room for. Tables scroll inside their own frame where they are wider than a
screen; on a phone each of their lines becomes a card, so that nothing is ever cut off.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ntk_iterncgp.experiments.config import RunConfig, as_yaml
from ntk_iterncgp.experiments.evaluation.tables import Column, Table

STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #59636e; --line: #d8dee4; --ours: #0072b2; --tint: #eef6fb; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 78rem; color: var(--ink); background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p, li { max-width: 46rem; overflow-wrap: anywhere; } .soft { color: var(--soft); font-size: .9rem; }
.frame { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .38rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; white-space: normal;
  min-width: 8.5rem; }
tr:last-child td { border-bottom: 0; } tr.ours td { background: var(--tint); font-weight: 600; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
td.best { color: #00684e; font-weight: 700; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; padding: .7rem; border: 1px solid var(--line); border-radius: 6px; break-inside: avoid; }
figure img.panel { display: block; width: 100%; height: auto; } figcaption { font-size: .85rem; color: var(--soft); }
figcaption b { display: block; color: var(--ink); font-size: .95rem; }
.cards { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(10.4rem, 1fr)); }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .6rem; break-inside: avoid; font-size: .82rem; }
.card img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; image-rendering: pixelated; }
.card .bar { display: grid; grid-template-columns: var(--name) 1fr 2.4rem; gap: .3rem; align-items: center; }
.bar span:first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.bar i { display: block; height: .55rem; background: #d55e00; border-radius: 2px; }
.bar.truth i { background: var(--ours); } .bar span:last-child { text-align: right; } .wrong { color: #b3400b; }
details { margin: .6rem 0; } summary { cursor: pointer; }
pre { overflow-x: auto; background: #f6f8fa; padding: .8rem; border-radius: 6px; font-size: .8rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .88rem; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
@media screen and (max-width: 640px) {
  body { padding: .9rem; } dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; }
  .frame { overflow: visible; border: 0; } .frame thead { display: none; }
  .frame table, .frame tbody { display: block; }
  .frame tr { display: grid; grid: auto-flow dense / 1fr 1fr; gap: 0 1.1rem; padding: .55rem .7rem; font-size: .8rem;
    margin-bottom: .7rem; border: 1px solid var(--line); border-radius: 6px; }
  .frame td { display: flex; justify-content: space-between; gap: .4rem; padding: .1rem 0; border: 0; }
  .frame td:first-child { grid-column: 1 / -1; font-weight: 700; position: static; padding-bottom: .2rem;
    font-size: .86rem; }
  .frame td.none { display: none; } .frame td.long { grid-column: 1 / -1; }
  .frame td:not(:first-child)::before { content: attr(data-label); color: var(--soft); font-weight: 400; }
  .frame tr.ours { background: var(--tint); } .frame tr.ours td { background: none; } }
@media print { body { max-width: none; font-size: 11px; } .frame, pre { overflow: visible; }
  table { font-size: 7.5px; } th, td { padding: .15rem .25rem; } details { display: none; } }
"""


@dataclass(frozen=True)
class Page:
    """What a report says, whatever it is about."""

    title: str
    summary: str  # of what was run, as plain text
    verdict: Sequence[str]
    results: Table
    others: Table | None  # about out-of-distribution inputs
    panels: Sequence[tuple[str, str, str]]  # title, one sentence, SVG
    pictures: str  # HTML
    costs: Table
    cost_note: str


def as_html(page: Page, config: RunConfig) -> str:
    """Return the page as HTML text."""
    missing = [f"{escape(label)}: not available here. {escape(why)}" for label, why in page.results.missing.items()]
    columns = [*page.results.columns, *(page.others.columns if page.others else [])]
    meanings = "".join(f"<dt>{escape(c.heading)}</dt><dd>{escape(c.sentence)}</dd>" for c in columns)
    body = [
        f"<h1>{escape(page.title)}</h1>",
        f'<p class="soft">{escape(page.summary)}</p>',
        f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in page.verdict)}</ul>",
        "<h2>Results</h2>",
        page.results.html(),
        f'<p class="soft">{"<br>".join(missing)}</p>' if missing else "",
        f"<h2>Out-of-distribution inputs</h2>{page.others.html()}" if page.others else "",
        f"<details><summary>What the columns mean</summary><dl>{meanings}</dl></details>",
        "<h2>Figures</h2>",
        f'<div class="grid">{"".join(_figure(*panel) for panel in page.panels)}</div>',
        page.pictures,
        "<h2>Cost</h2>",
        page.costs.html(),
        f'<p class="soft">{escape(page.cost_note)}</p>',
        f"<details><summary>All settings of this run</summary><pre>{escape(as_yaml(config))}</pre></details>",
    ]
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(page.title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
    )
    return f"{head}<body>\n" + "\n".join(body) + "\n</body></html>\n"


def _figure(title: str, sentence: str, svg: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img class="panel" alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure><figcaption><b>{escape(title)}</b>{escape(sentence)}</figcaption>{image}</figure>"


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
