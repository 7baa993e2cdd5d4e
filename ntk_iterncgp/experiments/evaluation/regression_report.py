"""Regressions side by side: the columns of their table, figures, and the same for a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from matplotlib.axes import Axes

from ntk_iterncgp.experiments.config import RunConfig
from ntk_iterncgp.experiments.evaluation.figures import STYLES, against_exact, in_bounds, information, svg
from ntk_iterncgp.experiments.evaluation.regression import RegressionComparison, RegressionResult
from ntk_iterncgp.experiments.evaluation.report import PROTOCOLS, difference_column, verdict, what_was_run
from ntk_iterncgp.experiments.evaluation.tables import Column, Table, number
from ntk_iterncgp.likelihoods.quadrature import standard_normal_quantile

MOST_POINTS = 400  # of a scatter plot


def results_table(comparison: RegressionComparison) -> Table:
    """Return the table with the columns that these results fill."""

    def coverage(level: float) -> Column:
        return Column(
            f"in {100 * level:.0f} %",
            lambda r: f"{100 * r.metrics.coverage[level]:.1f} %",
            f"The fraction of targets inside the central {100 * level:.0f} % interval: that fraction, if calibrated.",
            lambda fractions: min(fractions, key=lambda fraction: abs(fraction - 100 * level)),
        )

    columns = [
        Column("RMSE", lambda r: f"{r.metrics.rmse:.4g}", "Root mean squared error, in the units of the target.", min),
        Column("NLL", lambda r: f"{r.metrics.nll:.4f}", "The mean of −log p(target), in nats; lower is better.", min),
        difference_column(),
        *(coverage(level) for level in comparison["iterncgp"].metrics.coverage),
        Column("width", lambda r: f"{r.width:.4g}", "The mean width of the 95 % interval: narrow, if it still covers."),
        Column(
            "tuned to",
            lambda r: " / ".join(_tuned(r.name, *pair) for pair in r.values),
            "The prior precision δ and the noise σ of each fold, chosen on the other one.",
        ),
    ]
    return Table(comparison.results, columns, comparison.unavailable)


def _tuned(name: str, precision: float, noise: float) -> str:
    return f"σ {number(noise)}" if name == "map" else f"δ {number(precision)}, σ {number(noise)}"


def summary(c: RegressionComparison, config: RunConfig, about: Mapping[str, Any], fit: Mapping[str, Any]) -> str:
    """What was run, in a paragraph."""
    captured = fit["information_captured"] if c.information is None else c.information
    return (
        f"{what_was_run(config, about)}, {len(c.targets):,} test inputs. IterNCGP: rank {about['rank']}, at least "
        f"{100 * captured:.1f} % of the information captured. {PROTOCOLS[config.tuning.protocol]}."
    )


def panels(comparison: RegressionComparison, fit: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Title, one sentence, and SVG of every figure that these results can fill."""
    found = [
        (
            "Coverage",
            "How often central intervals hold the target; below the diagonal they are too narrow.",
            svg(lambda axes: _coverage(axes, comparison)),
        ),
        (
            "Predictions",
            "IterNCGP with its 95 % interval against the target.",
            svg(lambda axes: _predictions(axes, comparison)),
        ),
        (
            "Errors",
            "Errors against the standard deviation that IterNCGP reports; about 95 % should lie below the line.",
            svg(lambda axes: _errors(axes, comparison["iterncgp"], comparison)),
        ),
    ]
    history = [record for record in fit.get("history", []) if record.get("information_captured") is not None]
    if len(history) > 1:
        sentence = "A lower bound on the fraction of what the training data say that has been used, at the fit's prior."
        found.append(("Information captured", sentence, svg(lambda axes: information(axes, history))))
    if comparison.exact_ratio is not None:
        ratio = comparison.exact_ratio
        sentence = f"The variance over that of the exact posterior at the same prior and noise: {in_bounds(ratio)}."
        found.append(("Against the truth", sentence, svg(lambda axes: against_exact(axes, ratio))))
    return found


def _coverage(axes: Axes, comparison: RegressionComparison) -> None:
    levels = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    quantiles = torch.tensor([standard_normal_quantile(float(level)) for level in levels], dtype=torch.float64)
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, zorder=0)
    for result in comparison.results:
        scores = (comparison.targets - result.mean).abs() / result.variance.sqrt()
        observed = (scores[:, None] <= quantiles).double().mean(0)
        colour, dashes = STYLES[result.name]
        axes.plot(levels, observed, dashes, color=colour, linewidth=1.3, label=result.label)
    axes.set(xlabel="level of the interval", ylabel="fraction of targets inside", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(loc="lower right")


def _predictions(axes: Axes, comparison: RegressionComparison) -> None:
    iterncgp, some = comparison["iterncgp"], slice(0, MOST_POINTS)
    y, mean = comparison.targets[some], iterncgp.mean[some]
    spread = standard_normal_quantile(0.95) * iterncgp.variance[some].sqrt()
    axes.errorbar(y, mean, spread, fmt="o", color=STYLES["iterncgp"][0], linewidth=0.6, markersize=2.5, alpha=0.6)
    ends = [float(y.min()), float(y.max())]
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    axes.set(xlabel="target", ylabel="prediction")


def _errors(axes: Axes, iterncgp: RegressionResult, comparison: RegressionComparison) -> None:
    std, errors = iterncgp.variance.sqrt(), (comparison.targets - iterncgp.mean).abs()
    axes.plot(std, errors, "o", color=STYLES["iterncgp"][0], markersize=2.5, alpha=0.5)
    ends = torch.stack([std.min(), std.max()])
    axes.plot(ends, standard_normal_quantile(0.95) * ends, color="0.4", linewidth=0.8)
    axes.set(xlabel="standard deviation of IterNCGP", ylabel="error")
    axes.set_ylim(bottom=0)


def as_json(comparison: RegressionComparison) -> dict[str, Any]:
    """All numbers of the comparison."""
    return {
        "methods": [
            {
                "name": r.name,
                "label": r.label,
                "rmse": r.metrics.rmse,
                "nll": r.metrics.nll,
                "coverage": {f"{level:g}": fraction for level, fraction in r.metrics.coverage.items()},
                "interval_width": r.width,
                "hyperparameters": [{"prior_precision": d, "noise": s} for d, s in r.values],
                "difference_to_iterncgp": asdict(r.difference) if r.difference else None,
                "fit_seconds": r.fit_seconds,
                "predict_seconds": r.predict_seconds,
                "fit_peak_bytes": r.fit_bytes,
            }
            for r in comparison.results
        ],
        "unavailable": comparison.unavailable,
        "num_scored": len(comparison.targets),
        "variance_over_exact": None
        if comparison.exact_ratio is None
        else {"least": float(comparison.exact_ratio.min()), "median": float(comparison.exact_ratio.median())},
        "information_captured": comparison.information,
        "verdict": verdict(comparison.results),
    }
