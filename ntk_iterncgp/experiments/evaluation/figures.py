"""The panels of the report, each a small figure of its own, so that they can stand in one column on a phone.

Colours are Okabe and Ito's, told apart by every kind of colour vision; lines differ in dashes as well. A figure is SVG
text with letters as outlines: it looks the same everywhere and needs no font.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ntk_iterncgp.experiments.evaluation.compare import Comparison, Result
from ntk_iterncgp.experiments.evaluation.metrics import reliability_curve
from ntk_iterncgp.experiments.evaluation.ood import roc_curve
from ntk_iterncgp.experiments.evaluation.uncertainty import risk_curve
from ntk_iterncgp.posterior.convergence import Convergence

STYLES: dict[str, tuple[str, str]] = {  # colour, dashes
    "map": ("#000000", ":"),
    "temperature": ("#E69F00", "--"),
    "prior": ("#999999", "-."),
    "last_layer": ("#56B4E9", "--"),
    "kfac": ("#CC79A7", "-."),
    "sod": ("#D55E00", ":"),
    "ella": ("#F0E442", "--"),
    "exact": ("#009E73", "-"),
    "iterncgp": ("#0072B2", "-"),
}
FEWEST_PER_BIN = 5  # below this, the accuracy of a bin is mostly chance
SHOWN = ("map", "temperature", "prior", "exact", "iterncgp")  # more lines than these cannot be told apart
SIZE = (4.3, 3.3)  # inches
MARGINS = {"left": 0.15, "right": 0.97, "bottom": 0.15, "top": 0.96}  # a layout that looks for them draws twice

Draw = Callable[[Axes], None]


def panels(
    comparison: Comparison, fit: Mapping[str, Any], convergence: Convergence | None = None
) -> list[tuple[str, str, str]]:
    """Title, one sentence, and SVG of every figure that these results can fill.

    Args:
        comparison: All methods.
        fit: The report of the fit of IterNCGP.
        convergence: What twice the actions would bring, where that is known.
    """
    results = [result for result in comparison.results if result.name in SHOWN]
    found: list[tuple[str, str, Draw]] = [
        (
            "Reliability",
            "How often predictions of a given confidence are right; below the diagonal they are too sure.",
            lambda axes: _reliability(axes, results, comparison.labels),
        ),
        (
            "Confidence",
            "The probability of the predicted class on test inputs, IterNCGP and the network as it is.",
            lambda axes: _confidence(axes, results),
        ),
        (
            "Selective risk",
            "The error among the inputs a method is surest about: it should fall to the left.",
            lambda axes: _risk(axes, results, comparison.labels),
        ),
    ]
    for name in comparison["iterncgp"].ood:
        found += _other_panels(name, results)
    history = [record for record in fit.get("history", []) if record.get("information_captured") is not None]
    if len(history) > 1:
        found.append(
            (
                "Information captured",
                "A lower bound on the fraction of what the training data say that has been used, at the fit's prior.",
                lambda axes: information(axes, history),
            )
        )
    if convergence is not None and convergence.fall is not None:
        found.append(("Convergence", str(convergence), lambda axes: _convergence(axes, convergence)))
    if comparison.contraction:
        found.append(
            (
                "Variance contraction",
                "Posterior over prior variance at each input: one where the training data say nothing.",
                lambda axes: _contraction(axes, comparison.contraction),
            )
        )
    if comparison.exact_ratio is not None:
        ratio = comparison.exact_ratio
        found.append(
            (
                "Against the truth",
                f"The variance of IterNCGP over that of the exact posterior at the same prior: {in_bounds(ratio)}.",
                lambda axes: against_exact(axes, ratio),
            )
        )
    return [(title, sentence, svg(draw)) for title, sentence, draw in found]


def in_bounds(ratio: Tensor) -> str:
    """Say between which values a ratio to the exact variance lies, and whether it is below one, to these digits."""
    least, most = float(ratio.min()), float(ratio.max())
    below = int((ratio < 1 - 5e-4).sum())
    count = "never below one" if below == 0 else f"below one at {below:,} of {len(ratio):,} inputs"
    return f"{least:.3f} to {most:.3f}, {count}"


def svg(draw: Draw) -> str:
    """Draw a figure and return it as SVG text."""
    style: Any = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "path",
        "svg.hashsalt": "ntk-iterncgp",  # the same figure is the same text
        "legend.frameon": False,
        "legend.fontsize": 7.5,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=SIZE)
        draw(figure.subplots(gridspec_kw=MARGINS))
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _reliability(axes: Axes, results: Sequence[Result], labels: Tensor) -> None:
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, zorder=0)
    for result in results:
        colour, dashes = STYLES[result.name]
        curve = reliability_curve(result.probabilities, labels)
        enough = curve.count >= FEWEST_PER_BIN
        x, y = curve.confidence[enough].tolist(), curve.accuracy[enough].tolist()
        axes.plot(x, y, dashes, color=colour, marker="o", markersize=3, linewidth=1.2, label=result.label)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.04), xlabel="confidence", ylabel="accuracy")
    axes.legend(loc="lower right")


def _confidence(axes: Axes, results: Sequence[Result]) -> None:
    bins = np.linspace(0, 1, 21)
    for result in results:
        if result.name in ("map", "iterncgp"):
            colour = STYLES[result.name][0]
            values = result.probabilities.max(1).values.numpy()
            axes.hist(values, bins.tolist(), histtype="step", color=colour, linewidth=1.4, label=result.label)
    axes.set(xlabel="confidence", ylabel="test inputs", yscale="log", xlim=(0, 1))
    axes.legend(loc="upper left")


def _risk(axes: Axes, results: Sequence[Result], labels: Tensor) -> None:
    for result in results:
        confidence, predicted = result.probabilities.max(1)
        fraction, risk = risk_curve(confidence, predicted != labels)
        first = max(1, len(fraction) // 50)  # the error of a handful says nothing
        colour, dashes = STYLES[result.name]
        axes.plot(fraction[first:], 100 * risk[first:], dashes, color=colour, linewidth=1.3, label=result.label)
    axes.set(xlabel="fraction of inputs answered, the surest first", ylabel="error (%)", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def _other_panels(name: str, results: Sequence[Result]) -> list[tuple[str, str, Draw]]:
    def histogram(axes: Axes) -> None:
        iterncgp = next(result for result in results if result.name == "iterncgp").ood[name]
        top = float(max(iterncgp.test_scores.max(), iterncgp.other_scores.max()))
        bins = np.linspace(0, top, 31).tolist()
        for scores, colour, label in (
            (iterncgp.test_scores, "#0072B2", "test inputs"),
            (iterncgp.other_scores, "#D55E00", name),
        ):
            axes.hist(scores.numpy(), bins, density=True, alpha=0.55, color=colour, label=label)
        axes.set(xlabel="entropy of IterNCGP (nats)", ylabel="density")
        axes.legend()

    def roc(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, zorder=0)
        for result in results:
            colour, dashes = STYLES[result.name]
            other = result.ood[name]
            x, y = roc_curve(other.test_scores, other.other_scores)
            label = f"{result.label}: {other.by_entropy.auroc:.3f}"
            axes.plot(x, y, dashes, color=colour, linewidth=1.3, label=label)
        axes.set(xlabel="test inputs rejected", ylabel=f"{name} rejected", xlim=(0, 1), ylim=(0, 1.02))
        axes.legend(loc="lower right")

    return [
        (f"Entropy: test and {name}", f"How far {name} inputs are told from test inputs by IterNCGP.", histogram),
        (f"ROC: {name}", "Rejecting by entropy; the number is the area under the curve.", roc),
    ]


def information(axes: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    """Draw the information captured against the cost."""
    in_epochs = all(record.get("epochs") is not None for record in history)
    cost = [record["epochs"] if in_epochs else record["num_products"] for record in history]
    captured = [100 * record["information_captured"] for record in history]
    axes.plot(cost, captured, color=STYLES["iterncgp"][0], marker="o", markersize=3, linewidth=1.3)
    axes.set(xlabel="epochs" if in_epochs else "products with the prior", ylabel="information captured (%, at least)")
    axes.set_ylim(bottom=0)


def _convergence(axes: Axes, convergence: Convergence) -> None:
    shown = {
        "prior": convergence.prior_variance,
        f"{convergence.num_actions} actions": convergence.variance,
        f"{2 * convergence.num_actions} actions\n(estimated)": convergence.doubled_variance or 0.0,
    }
    colours = ("#999999", STYLES["iterncgp"][0], "#56B4E9")
    for place, (value, colour) in enumerate(zip(shown.values(), colours, strict=True)):
        fraction = 100 * value / convergence.prior_variance
        axes.bar(place, fraction, width=0.6, color=colour)
        axes.annotate(f"{fraction:.3g}", (place, fraction), ha="center", va="bottom", fontsize=8)
    axes.set(xticks=range(len(shown)), xticklabels=shown, ylabel="variance, % of that of the prior")


def _contraction(axes: Axes, contraction: Mapping[str, Tensor]) -> None:
    low = min(0.9, *(float(ratio.quantile(0.005)) for ratio in contraction.values()), 0.9)
    bins = np.linspace(low, 1, 41).tolist()
    for colour, (name, ratio) in zip(("#0072B2", "#D55E00", "#009E73", "#CC79A7"), contraction.items(), strict=False):
        label = "test inputs" if name == "test" else name
        axes.hist(ratio.clamp(low, 1).numpy(), bins, density=True, alpha=0.5, color=colour, label=label)
    axes.set(xlabel="posterior over prior variance", ylabel="density", xlim=(low, 1))
    axes.legend()


def against_exact(axes: Axes, ratio: Tensor) -> None:
    """Draw a histogram of our variance over the exact one."""
    axes.axvline(1, color="0.4", linewidth=0.8)
    low, high = min(0.95, float(ratio.min())), float(ratio.max())
    bins = np.geomspace(low, max(high, 1.05), 31).tolist()
    axes.hist(ratio.numpy(), bins, color=STYLES["iterncgp"][0], alpha=0.7)
    axes.set(xscale="log", xlabel="variance over the exact one", ylabel="test inputs")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="minor", labelsize=7, rotation=45)
