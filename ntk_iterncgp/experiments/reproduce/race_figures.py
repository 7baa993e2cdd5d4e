"""Scores over time for every method, a table of where each ended, and the data of the mixture."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ntk_iterncgp.experiments.reproduce.race import Classes
from ntk_iterncgp.experiments.reproduce.style import BLACK, GREEN, METHODS, PURPLE, TEN_CLASSES, new_figure

SCORES = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece": "ECE"}
MAX_POINTS = 4000  # of a scatter plot
MARKERS = ("o", "s", "^", "D", "v", "P")


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The end of each method, averaged over the seeds that it ran on."""
    ends: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        ends.setdefault(row["method"], {})[row["seed"]] = row
    table = []
    for of_seed in ends.values():
        first = next(iter(of_seed.values()))
        line = {key: first[key] for key in ("method", "group")} | {"seeds": len(of_seed)}
        for key, value in first.items():
            if isinstance(value, (int, float)) and key != "seed":
                line[key] = mean(row[key] for row in of_seed.values())
        table.append(line)
    return table


def curves(rows: Sequence[dict[str, Any]]) -> Figure:
    """Three panels over time: test solid, training thin and dashed; thin lines for each seed beyond the first."""
    figure = new_figure(2.7)
    panels = figure.subplots(1, 3)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    seen: dict[str, int] = {}
    for method in methods:
        chosen = [row for row in rows if row["method"] == method]
        group = chosen[0]["group"]
        colour, dashes = METHODS.get(group, (BLACK, "-"))
        colour = {"sod": BLACK, "svgp": GREEN, "paper, j ≤ 1": PURPLE}.get(group, colour)
        marker = MARKERS[seen.get(group, 0) % len(MARKERS)]
        seen[group] = seen.get(group, 0) + 1
        for seed in dict.fromkeys(row["seed"] for row in chosen):
            run = [row for row in chosen if row["seed"] == seed]
            first = seed == chosen[0]["seed"]
            for axes, key in zip(panels, SCORES, strict=True):
                x = [row["seconds"] for row in run]
                test, train = [row[f"test_{key}"] for row in run], [row[f"train_{key}"] for row in run]
                axes.plot(
                    x,
                    test,
                    dashes,
                    color=colour,
                    marker=marker,
                    ms=3,
                    linewidth=1.2 if first else 0.5,
                    label=method if first else None,
                )
                axes.plot(x, train, ":", color=colour, linewidth=0.7)
    fastest, slowest = min(row["seconds"] for row in rows), max(row["seconds"] for row in rows)
    for axes, label in zip(panels, SCORES.values(), strict=True):
        axes.set(xscale="log", xlabel="seconds", ylabel=label)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if slowest < 1000 * fastest else (1,)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    panels[1].set_title("solid: test, dotted: training", fontsize=7)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def data(classes: Classes) -> Figure:
    """Training and test data in space, a colour for each class."""
    figure = new_figure(2.6)
    for place, (title, inputs, labels) in enumerate(
        (
            ("training data", classes.train_inputs, classes.train_labels),
            ("test data", classes.test_inputs, classes.test_labels),
        ),
        start=1,
    ):
        axes = figure.add_subplot(1, 2, place, projection="3d")
        shown = inputs[:MAX_POINTS]
        colours = [TEN_CLASSES[int(label)] for label in labels[:MAX_POINTS]]
        axes.scatter(*shown.T.numpy(), c=colours, s=3, linewidths=0, alpha=0.8, depthshade=False)
        axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), zlim=(-1.5, 1.5))
        axes.set_title(f"{title} ({len(inputs)})", pad=0)
        axes.tick_params(labelsize=5, pad=-3)
    return figure
