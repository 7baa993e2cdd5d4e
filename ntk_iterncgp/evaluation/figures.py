"""The demo's figure: test NLL against cost, reliability, and the digits a method is most and least sure of.

Colours are Okabe and Ito's, told apart by every kind of colour vision; lines differ in marker and dashes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from ntk_iterncgp.evaluation.metrics import reliability_curve
from ntk_iterncgp.evaluation.report import Row

STYLES = [  # colour, marker, dashes
    ("#000000", "s", ":"),
    ("#D55E00", "v", "--"),
    ("#56B4E9", "D", "-."),
    ("#0072B2", "o", "-"),
    ("#009E73", "*", "-"),
]
FEWEST_PER_BIN = 5  # below this, the accuracy of a bin is mostly chance
NUM_DIGITS = 6  # most certain, and as many least certain


def demo_figure(rows: Sequence[Row], labels: Tensor, images: Tensor, path: Path) -> None:  # (b,), (b, side, side)
    """Three panels, 7 inches wide, as PNG."""
    with mpl.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.0, 5.0), dpi=200, layout="constrained")
        panels = figure.add_gridspec(2, 1, height_ratios=[1.55, 1])
        top, bottom = figure.add_subfigure(panels[0]), figure.add_subfigure(panels[1])
        left, right = top.subplots(1, 2, width_ratios=[1.25, 1])
        _draw_curves(left, rows)
        _draw_reliability(right, rows, labels)
        _draw_digits(bottom, rows[-1], labels, images)
        figure.savefig(path)


def _draw_curves(axes: Axes, rows: Sequence[Row]) -> None:
    for row, (colour, marker, dashes) in zip(rows, STYLES, strict=False):
        products, nll = zip(*row.curve, strict=True)
        size = 7 if marker == "*" else 3.5
        axes.plot(products, nll, dashes, color=colour, marker=marker, markersize=size, linewidth=1.2, label=row.label)
    axes.set(xscale="log", yscale="log", xlabel="products with the kernel matrix", ylabel="test NLL (nats)")
    axes.set_title("what products buy", loc="left", fontsize=9)
    for axis, steps in ((axes.xaxis, (1, 3)), (axes.yaxis, (1, 1.5, 2, 3, 4, 6))):
        axis.set_major_locator(LogLocator(subs=steps))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.grid(linewidth=0.3, alpha=0.5)
    axes.legend(frameon=False, fontsize=7)


def _draw_reliability(axes: Axes, rows: Sequence[Row], labels: Tensor) -> None:
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, zorder=0)
    axes.text(0.97, 0.05, "overconfident", color="0.4", fontsize=7, ha="right")
    axes.text(0.04, 0.95, "cautious", color="0.4", fontsize=7)
    for row, (colour, marker, dashes) in zip(rows, STYLES, strict=False):
        curve = reliability_curve(row.probabilities, labels)
        enough = curve.count >= FEWEST_PER_BIN
        confidence, accuracy = curve.confidence[enough].tolist(), curve.accuracy[enough].tolist()
        size = 7 if marker == "*" else 3.5
        axes.plot(confidence, accuracy, dashes, color=colour, marker=marker, markersize=size, linewidth=1.0)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.04), xlabel="confidence", ylabel="accuracy", aspect="equal")
    axes.set_title("reliability on the test digits", loc="left", fontsize=9)


def _draw_digits(panel: SubFigure, row: Row, labels: Tensor, images: Tensor) -> None:
    """Images, the most and the least certain, each over its class probabilities."""
    confidence, predicted = row.probabilities.max(1)
    order = confidence.argsort(descending=True, stable=True).tolist()
    count = min(NUM_DIGITS, len(order) // 2)
    chosen = order[:count] + order[-count:]
    title = f"most and least certain test digits ({row.label}), with the probability of each class (true one in blue)"
    panel.suptitle(title, fontsize=9)
    grid = panel.subplots(2, 2 * count, height_ratios=[1, 0.8], squeeze=False)
    for column, index in enumerate(chosen):
        image, bars = grid[0, column], grid[1, column]
        note = "" if predicted[index] == labels[index] else "\nwrong"
        image.imshow(images[index].numpy(), cmap="gray_r", interpolation="nearest")
        image.set(xticks=[], yticks=[])
        for spine in image.spines.values():
            spine.set(visible=True, color="0.6", linewidth=0.5)
        image.set_title(f"{int(labels[index])}", fontsize=8, pad=2)
        probabilities = row.probabilities[index].tolist()
        colours = ["#0072B2" if c == int(labels[index]) else "#D55E00" for c in range(len(probabilities))]
        bars.bar(range(len(probabilities)), probabilities, color=colours, width=0.9)
        bars.set(ylim=(0, 1), xticks=[0, len(probabilities) - 1], yticks=[])
        bars.tick_params(length=1.5, labelsize=6, pad=1)
        bars.set_xlabel(f"{100 * float(confidence[index]):.0f} %{note}", fontsize=7, labelpad=1)
