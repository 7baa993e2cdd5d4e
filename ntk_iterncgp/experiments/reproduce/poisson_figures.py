"""The figures of the Poisson experiment: test NLL per schedule, and the belief about log-rate and rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from ntk_iterncgp.experiments.reproduce.style import BLACK, BLUE, GREEN, GREY, METHODS, PURPLE, VERMILION, new_figure

SCHEDULES = (BLUE, VERMILION, GREEN, PURPLE)
LINKS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (np.asarray, np.exp)  # log-rate, rate
CEILING = 12.0  # times the smallest NLL: an undamped step may raise the NLL by orders of magnitude


@dataclass(frozen=True, eq=False)
class RateBelief:
    """The belief about the log-rate after so many iterations: mean and half the width of its 95 % interval."""

    iterations: int
    grid: Tensor
    mean: Tensor
    spread: Tensor


def schedules(rows: Sequence[dict[str, Any]], iterations_per_step: Sequence[int], budget: int) -> Figure:
    """Median (line), smallest and largest (shade) over the redraws; crosses where runs end."""
    figure = new_figure(2.3)
    panels = figure.subplots(1, 2, sharey=True)
    best = min(row["test_nll"] for row in rows)
    shown = min(budget, 1.05 * max(row["iterations"] for row in rows))
    titles = {"paper": "the paper's algorithm", "ours": "ours"}
    for axes, (method, title) in zip(panels, titles.items(), strict=True):
        for j, colour in zip(iterations_per_step, SCHEDULES, strict=False):
            chosen = [r for r in rows if r["method"] == method and r["iterations_per_step"] == j]
            curves = _carried_forward(chosen, budget, CEILING * best)
            x = np.arange(budget + 1)
            longest = max(row["iterations"] for row in chosen)
            middle = np.median(curves, 0)
            axes.plot(x[: longest + 1], middle[: longest + 1], color=colour, label=f"j ≤ {j}")
            axes.fill_between(
                x[: longest + 1],
                curves.min(0)[: longest + 1],
                curves.max(0)[: longest + 1],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
            ends = [max(r["iterations"] for r in chosen if r["redraw"] == d) for d in {r["redraw"] for r in chosen}]
            axes.plot(ends, [curves[k, end] for k, end in enumerate(ends)], "x", ms=3.5, mew=0.8, color=colour)
        axes.set(
            xlabel="solver iterations (products with K)",
            yscale="log",
            xlim=(0, shown),
            ylim=(0.95 * best, CEILING * best),
        )
        axes.set_title(title)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("test NLL (nats)")
    panels[1].legend(title="iterations per Newton step", title_fontsize=7)
    return figure


def _carried_forward(rows: Sequence[dict[str, Any]], budget: int, ceiling: float) -> np.ndarray:
    """A line per redraw: the NLL after each number of iterations, after its end the last; cut off above the panel."""
    curves = []
    for redraw in sorted({row["redraw"] for row in rows}):
        values = {row["iterations"]: row["test_nll"] for row in rows if row["redraw"] == redraw}
        curve, last = [], float("nan")
        for k in range(budget + 1):
            last = values.get(k, last)
            curve.append(min(last, 2 * ceiling) if np.isfinite(last) else 2 * ceiling)
        curves.append(curve)
    return np.array(curves)


def beliefs(times: Sequence[RateBelief], method: str, inputs: Tensor, log_rate: Tensor, targets: Tensor) -> Figure:
    """Log-rate above, rate below, at each time; the counts in the lower panels."""
    figure = new_figure(2.7)
    grid = figure.subplots(2, len(times), sharex=True, sharey="row", squeeze=False)
    colour = METHODS[method][0]
    top = 1.6 * float(targets.max())
    for column, belief in enumerate(times):
        x, mean, spread = belief.grid.numpy(), belief.mean.numpy(), belief.spread.numpy()
        for row, link in enumerate(LINKS):
            axes = grid[row, column]
            axes.fill_between(x, link(mean - spread), link(mean + spread), color=colour, alpha=0.2, linewidth=0)
            axes.plot(x, link(mean), color=colour, linewidth=1.1, label="median and 95 % interval")
            axes.plot(inputs.numpy(), link(log_rate.numpy()), ":", color=BLACK, linewidth=1.0, label="truth")
        grid[1, column].plot(inputs.numpy(), targets.numpy(), "o", ms=1.6, color=GREY, label="counts", zorder=1)
        grid[0, column].set_title(f"{belief.iterations} iterations")
        grid[1, column].set(ylim=(-0.03 * top, top), xlabel="x")
    grid[0, 0].set(ylabel="log-rate f", ylim=(-8, 8))
    grid[1, 0].set_ylabel("rate λ")
    figure.legend(*grid[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
