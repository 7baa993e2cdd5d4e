"""Classifiers side by side: the columns of their table, what the intervals say, and the same for a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ntk_iterncgp.experiments.config import RunConfig
from ntk_iterncgp.experiments.evaluation.compare import Comparison, Result
from ntk_iterncgp.experiments.evaluation.tables import Column, Table, number
from ntk_iterncgp.experiments.evaluation.uncertainty import Difference, bootstrap_difference

FEWEST_SCORED = 20  # test inputs from which a bootstrap interval means anything
RESAMPLES = 1000
BASIC = ("map", "temperature", "prior")  # what IterNCGP is compared with in words
SHORT = ("accuracy", "NLL", "± to IterNCGP", "ECE", "NLL probit", "tuned to")  # and the AUROC

PROTOCOLS = {
    "crossfit": "Every method's hyperparameters were chosen on the other half of the test set (two-fold cross-fit)",
    "validation": "Every method's hyperparameters were chosen on inputs put aside",
    "none": "No hyperparameter was tuned",
}


def results_table(comparison: Comparison) -> Table:
    """With the columns that these results fill."""
    columns = [
        Column("accuracy", lambda r: f"{100 * r.metrics.accuracy:.2f} %", "Test inputs classified rightly.", max),
        Column("NLL", lambda r: f"{r.metrics.nll:.4f}", "The mean of −log p(true class); lower is better.", min),
        difference_column(),
        Column("ECE", lambda r: f"{r.metrics.ece:.4f}", "The gap of confidence and accuracy in 15 equal bins.", min),
        Column(
            "adaptive",
            lambda r: f"{r.metrics.adaptive_ece:.4f}",
            "The same in 15 bins of equally many inputs.",
            min,
        ),
        Column("Brier", lambda r: f"{r.metrics.brier:.4f}", "Squared error of the probabilities.", min),
        Column(
            "AURC", lambda r: f"{r.aurc:.4f}", "Mean error over all fractions of inputs, the most confident first.", min
        ),
        Column(
            "NLL probit",
            lambda r: "–" if r.probit is None else f"{r.probit.nll:.4f}",
            "The NLL by the diagonal probit link, which ignores how the outputs go together, tuned for it.",
            min,
        ),
        Column(
            "ECE probit",
            lambda r: "–" if r.probit is None else f"{r.probit.ece:.4f}",
            "The ECE by the diagonal probit link.",
            min,
        ),
        Column(
            "tuned to",
            _tuned_to,
            "The temperature or prior precision of each fold, chosen on the other one; or both.",
        ),
    ]
    return Table(comparison.results, columns, comparison.unavailable)


def _tuned_to(result: Result) -> str:
    temperatures = [f"T {number(T)}, " for T in result.output_temperatures] or [""] * len(result.values)
    return " / ".join(T + number(value) for T, value in zip(temperatures, result.values, strict=True))


def others_table(comparison: Comparison) -> Table | None:
    """How well each method tells out-of-distribution inputs from test inputs; None where there are none."""
    columns = [column for name in comparison["iterncgp"].ood for column in _ood_columns(name)]
    return Table(comparison.results, columns, {}) if columns else None


def on_screen(comparison: Comparison) -> str:
    """The columns that a screen has room for."""
    table, others = results_table(comparison), others_table(comparison)
    chosen = [column for column in table.columns if column.heading in SHORT]
    chosen += [column for column in others.columns if column.heading.endswith("AUROC")] if others else []
    return Table(comparison.results, chosen, comparison.unavailable).text()


def summary(comparison: Comparison, config: RunConfig, about: Mapping[str, Any], fit: Mapping[str, Any]) -> str:
    """What was run, in a paragraph."""
    captured = fit["information_captured"] if comparison.information is None else comparison.information  # as tuned
    return (
        f"{what_was_run(config, about)}, {len(comparison.labels):,} test inputs. IterNCGP: rank {about['rank']}, at "
        f"least {100 * captured:.1f} % of the information captured. {PROTOCOLS[config.tuning.protocol]}; probabilities "
        "by quadrature, diagonal probit beside it."
    )


def what_was_run(config: RunConfig, about: Mapping[str, Any]) -> str:
    """Return data, model and their sizes, as the beginning of a sentence."""
    name = config.model.name
    what = (
        f"a Gaussian process with {about['kernel']}"
        if "kernel" in about
        else f"{name} with {about['weights']:,} weights"
    )
    return f"{config.data.name}, {what}, {about['data']:,} training data"


def difference_column() -> Column:
    """Return the column with the interval of the difference in NLL."""

    def cell(result: Any) -> str:
        found: Difference | None = result.difference
        return "" if found is None else f"{found.lower:+.4f} … {found.upper:+.4f}"

    sentence = (
        "95 % bootstrap interval of its NLL less that of IterNCGP, on the same inputs: above zero, IterNCGP is better."
    )
    return Column("± to IterNCGP", cell, sentence)


def _ood_columns(name: str) -> list[Column]:
    def by_entropy(metric: str) -> Callable[[Result], str]:
        return lambda r: f"{getattr(r.ood[name].by_entropy, metric):.3f}"

    def doubt(r: Result) -> str:
        by_doubt = r.ood[name].by_doubt
        return "–" if by_doubt is None else f"{by_doubt.auroc:.3f}"

    passing = f"The fraction of {name} that passes where 95 % of the test inputs do; lower is better."
    return [
        Column(
            f"{name}: AUROC",
            by_entropy("auroc"),
            f"How well entropy tells {name} from test inputs; one half is guessing.",
            max,
        ),
        Column(f"{name}: epistemic", doubt, "The same by the doubt that more data would remove.", max),
        Column(f"{name}: AUPR", by_entropy("aupr"), "Average precision of entropy.", max),
        Column(f"{name}: FPR95", by_entropy("fpr95"), passing, min),
    ]


def verdict(results: list[Any]) -> list[str]:
    """What the intervals of the NLL say, whichever way it went: what is within chance in one sentence."""
    sentences, within, by_name = [], [], {result.name: result for result in results}
    compared = [("IterNCGP", result, result.difference) for result in results if result.name in BASIC]
    if {"calibrated", "temperature"} <= by_name.keys():
        own, other = by_name["calibrated"], by_name["temperature"]
        compared.append((own.label, other, _difference(own, other)))
    for own_label, result, difference in compared:
        if difference is None:
            continue
        if len(result.losses) < FEWEST_SCORED:
            sentences.append(
                f"{len(result.losses)} test inputs are too few to tell {own_label} from {result.label} by NLL."
            )
            continue
        place = f"[{difference.lower:+.4f}, {difference.upper:+.4f}]"
        if difference.lower <= 0 <= difference.upper:
            within.append(f"{own_label} and {result.label} {place}")
        else:
            how = "lower" if difference.lower > 0 else "higher"
            sentences.append(f"{own_label} has a {how} NLL than {result.label}, beyond chance: difference {place}.")
    if within:
        sentences.append(f"Differences in NLL within chance: {'; '.join(within)}.")
    return sentences


def _difference(own: Any, other: Any) -> Difference | None:
    """The NLL of the other less that of the one, if there are enough test inputs."""
    if len(own.losses) < FEWEST_SCORED:
        return None
    return bootstrap_difference(own.losses, other.losses, num_resamples=RESAMPLES, seed=0)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All numbers of the comparison."""
    return {
        "methods": [
            {
                "name": r.name,
                "label": r.label,
                **asdict(r.metrics),
                "aurc": r.aurc,
                "probit": asdict(r.probit) if r.probit else None,
                "hyperparameters": r.values,
                **({"output_temperatures": r.output_temperatures} if r.output_temperatures else {}),
                "difference_to_iterncgp": asdict(r.difference) if r.difference else None,
                "ood": {
                    name: {"entropy": asdict(o.by_entropy)}
                    | {
                        key: asdict(metrics) if metrics else None
                        for key, metrics in (("epistemic", o.by_doubt), ("margin", o.by_margin))
                    }
                    for name, o in r.ood.items()
                },
                "fit_seconds": r.fit_seconds,
                "predict_seconds": r.predict_seconds,
                "fit_peak_bytes": r.fit_bytes,
            }
            for r in comparison.results
        ],
        "unavailable": comparison.unavailable,
        "num_scored": len(comparison.labels),
        "variance_over_exact": None
        if comparison.exact_ratio is None
        else {"least": float(comparison.exact_ratio.min()), "median": float(comparison.exact_ratio.median())},
        "variance_over_prior": {name: float(ratio.median()) for name, ratio in comparison.contraction.items()},
        "information_captured": comparison.information,
        "evidence_precision": comparison.evidence_precision,
        "verdict": verdict(comparison.results),
    }
