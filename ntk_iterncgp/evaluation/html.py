"""`report.html`: one self-contained file to show a colleague. No script, no network, readable on a phone, prints well.

Figures stand in as many columns as there is room for; tables scroll inside their own frame, so that the page itself
never does. Images are PNG of a few pixels, scaled up by the browser without smoothing.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from ntk_iterncgp.config import RunConfig, as_yaml
from ntk_iterncgp.evaluation.compare import Comparison, Result
from ntk_iterncgp.evaluation.figures import panels
from ntk_iterncgp.evaluation.report import columns, verdict
from ntk_iterncgp.files import write_text

BEST, OURS = ' class="best"', ' class="ours"'
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
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
td.best { color: #00684e; font-weight: 700; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; padding: .7rem; border: 1px solid var(--line); border-radius: 6px; break-inside: avoid; }
figure img.panel { display: block; width: 100%; height: auto; } figcaption { font-size: .85rem; color: var(--soft); }
figcaption b { display: block; color: var(--ink); font-size: .95rem; }
.cards { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(9.6rem, 1fr)); }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .6rem; break-inside: avoid; font-size: .82rem; }
.card img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; image-rendering: pixelated; }
.card .bar { display: grid; grid-template-columns: 4.6rem 1fr 2.6rem; gap: .3rem; align-items: center; }
.bar span:first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.bar i { display: block; height: .55rem; background: #d55e00; border-radius: 2px; }
.bar.truth i { background: var(--ours); } .bar span:last-child { text-align: right; } .wrong { color: #b3400b; }
details { margin: .6rem 0; } summary { cursor: pointer; }
pre { overflow-x: auto; background: #f6f8fa; padding: .8rem; border-radius: 6px; font-size: .8rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .88rem; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
@media (max-width: 500px) { body { padding: .9rem; } dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
@media print { body { max-width: none; font-size: 11px; } .frame, pre { overflow: visible; }
  table { font-size: 7.5px; } th, td { padding: .15rem .25rem; } details { display: none; } }
"""


def write_report(
    path: Path,
    comparison: Comparison,
    *,
    title: str,
    config: RunConfig,
    about: Mapping[str, Any],
    fit: Mapping[str, Any],
    cost: Mapping[str, Any],
    pictures: Mapping[int, Tensor],
    class_names: Sequence[str],
) -> None:
    """`pictures` are images (channels, side, side) in [0, 1], by their place among the scored inputs."""
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{_what_was_run(comparison, config, about, fit)}</p>',
        "<ul>",
        *(f"<li>{escape(sentence)}</li>" for sentence in verdict(comparison)),
        "</ul>",
        "<h2>Results</h2>",
        _table(comparison),
        _missing(comparison),
        "<details><summary>What the columns mean</summary><dl>",
        *(f"<dt>{escape(h)}</dt><dd>{escape(sentence)}</dd>" for h, _, sentence in columns(comparison)),
        "</dl></details>",
        "<h2>Figures</h2>",
        '<div class="grid">',
        *(_figure(*panel) for panel in panels(comparison, fit)),
        "</div>",
        *_cards(comparison, pictures, class_names),
        "<h2>Cost</h2>",
        _costs(comparison, fit, cost),
        "<details><summary>All settings of this run</summary>",
        f"<pre>{escape(as_yaml(config))}</pre></details>",
    ]
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
    )
    write_text(path, f"{head}<body>\n" + "\n".join(body) + "\n</body></html>\n")


def _what_was_run(c: Comparison, config: RunConfig, about: Mapping[str, Any], fit: Mapping[str, Any]) -> str:
    what = (
        f"a Gaussian process with {about['kernel']}"
        if config.kernel.name is not None
        else f"{config.model.name} with {about['weights']:,} weights"
    )
    protocol = {
        "crossfit": "Every method's hyperparameter was chosen on the other half of the test set (two-fold cross-fit)",
        "validation": "Every method's hyperparameter was chosen on inputs put aside",
        "none": "No hyperparameter was tuned",
    }[config.tuning.protocol]
    captured = fit["information_captured"] if c.information is None else c.information  # at the tuned prior
    text = (
        f"{escape(config.data.name)}, {escape(what)}, {about['data']:,} training data, {len(c.labels):,} test inputs. "
        f"Ours: rank {about['rank']}, at least {100 * captured:.1f} % of the information captured. "
        f"{protocol}; probabilities by the accurate link, diagonal probit beside it."
    )
    return text


def _table(comparison: Comparison) -> str:
    chosen = columns(comparison)
    best = {"accuracy": max, "NLL": min, "ECE": min, "adaptive": min, "Brier": min, "AURC": min}
    cells = [[cell(result) for _, cell, _ in chosen] for result in comparison.results]
    lines = ["<tr><th>method</th>" + "".join(f"<th>{escape(heading)}</th>" for heading, _, _ in chosen) + "</tr>"]
    rows = []
    for result, values in zip(comparison.results, cells, strict=True):
        parts = [f"<td>{escape(result.label)}</td>"]
        for j, value in enumerate(values):
            pick = best.get(chosen[j][0]) or (max if "AUROC" in chosen[j][0] else None)
            numbers = [_number(row[j]) for row in cells] if pick else []
            marked = pick is not None and _number(value) == pick(numbers)
            parts.append(f"<td{BEST if marked else ''}>{escape(value)}</td>")
        rows.append(f"<tr{OURS if result.name == 'ours' else ''}>{''.join(parts)}</tr>")
    return f'<div class="frame"><table><thead>{lines[0]}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _number(cell: str) -> float:
    return float(cell.removesuffix(" %"))


def _missing(comparison: Comparison) -> str:
    items = [f"{escape(label)}: not available here. {escape(why)}" for label, why in comparison.unavailable.items()]
    return f'<p class="soft">{"<br>".join(items)}</p>' if items else ""


def _figure(title: str, sentence: str, svg: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img class="panel" alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure><figcaption><b>{escape(title)}</b>{escape(sentence)}</figcaption>{image}</figure>"


def _cards(comparison: Comparison, pictures: Mapping[int, Tensor], class_names: Sequence[str]) -> list[str]:
    if not pictures:
        return []
    ours = comparison["ours"]
    places = sorted(pictures, key=lambda place: -float(ours.probabilities[place].max()))
    half = (len(places) + 1) // 2
    parts = []
    for heading, chosen in (("Most certain test images", places[:half]), ("Least certain test images", places[half:])):
        cards = "".join(_card(ours, place, pictures[place], comparison.labels, class_names) for place in chosen)
        parts.append(f'<h2>{heading}</h2><div class="cards">{cards}</div>')
    return [*parts, '<p class="soft">Probabilities of ours; the true class in blue.</p>']


def _card(ours: Result, place: int, image: Tensor, labels: Tensor, class_names: Sequence[str]) -> str:
    p, truth = ours.probabilities[place], int(labels[place])
    top = p.argsort(descending=True)[:3].tolist()
    shown = top if truth in top else [*top[:2], truth]
    bars = "".join(
        f'<div class="bar{" truth" if c == truth else ""}"><span>{escape(str(class_names[c]))}</span>'
        f'<i style="width:{max(1.0, 100 * float(p[c])):.1f}%"></i><span>{100 * float(p[c]):.0f}&nbsp;%</span></div>'
        for c in shown
    )
    wrong = "" if top[0] == truth else ' <span class="wrong">wrong</span>'
    name = escape(str(class_names[truth]))
    return f'<div class="card"><img alt="{name}" src="{_png(image)}"><b>{name}</b>{wrong}{bars}</div>'


def _png(image: Tensor) -> str:  # (channels, side, side), in [0, 1]
    pixels = (255 * image).round().byte().permute(1, 2, 0).numpy()
    if pixels.shape[2] == 1:
        pixels = 255 - pixels[..., 0]  # ink on paper
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _costs(comparison: Comparison, fit: Mapping[str, Any], cost: Mapping[str, Any]) -> str:
    rows = []
    for result in comparison.results:
        fit_seconds = float(fit["seconds"]) if result.name == "ours" else result.fit_seconds
        cells = f"<td>{escape(result.label)}</td><td>{fit_seconds:.1f}</td><td>{result.predict_seconds:.1f}</td>"
        rows.append(f"<tr{OURS if result.name == 'ours' else ''}>{cells}</tr>")
    head = "<tr><th>method</th><th>fit (s)</th><th>latent moments of all inputs (s)</th></tr>"
    rows_time = f"The rows of J took {comparison.rows_seconds:.0f} s, once for all methods, and are counted in each. "
    whole = (
        f"The whole run took {cost['seconds']:.0f} s and {cost['peak_memory_bytes'] / 2**20:,.0f} MiB at its peak, on "
        f"{cost['threads']} thread{'s' if cost['threads'] != 1 else ''}."
    )
    table = f'<div class="frame"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
    return f'{table}<p class="soft">{rows_time if comparison.rows_seconds else ""}{whole}</p>'
