"""Methods side by side: a table one can read, and the same for a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ntk_iterncgp.evaluation.compare import Comparison, Result

Column = tuple[str, Callable[[Result], str], str]  # heading, cell, one sentence of explanation


SHORT = ("accuracy", "NLL", "± to ours", "ECE", "NLL probit", "tuned to")  # and the AUROC: what a screen has room for


def columns(comparison: Comparison) -> list[Column]:
    """Those that these results fill."""
    found: list[Column] = [
        ("accuracy", lambda r: f"{100 * r.metrics.accuracy:.2f} %", "The share of test inputs classified rightly."),
        ("NLL", lambda r: f"{r.metrics.nll:.4f}", "The mean of −log p(true class), in nats; lower is better."),
        (
            "± to ours",
            lambda r: "" if r.difference is None else f"{r.difference.lower:+.4f} … {r.difference.upper:+.4f}",
            "95 % bootstrap interval of its NLL less ours, on the same inputs: above zero, ours is better.",
        ),
        ("ECE", lambda r: f"{r.metrics.ece:.4f}", "The gap between confidence and accuracy in 15 equal bins."),
        ("adaptive", lambda r: f"{r.metrics.adaptive_ece:.4f}", "The same in 15 bins of equally many inputs."),
        ("Brier", lambda r: f"{r.metrics.brier:.4f}", "Squared error of the probabilities; lower is better."),
        ("AURC", lambda r: f"{r.aurc:.4f}", "Mean error over all shares of inputs, the surest first."),
        (
            "NLL probit",
            lambda r: "–" if r.probit is None else f"{r.probit.nll:.4f}",
            "The NLL by the diagonal probit link, which ignores how the outputs go together, tuned for it.",
        ),
        (
            "ECE probit",
            lambda r: "–" if r.probit is None else f"{r.probit.ece:.4f}",
            "The ECE by the diagonal probit link.",
        ),
    ]
    for name in next(iter(comparison.results)).ood:
        found += _ood_columns(name)
    found.append(
        (
            "tuned to",
            lambda r: " / ".join(f"{value:.3g}" for value in r.values) if len(set(r.values)) > 0 else "",
            "The temperature or prior precision of each fold, chosen on the other one.",
        )
    )
    return found


def _ood_columns(name: str) -> list[Column]:
    def doubt(r: Result) -> str:
        by_doubt = r.ood[name].by_doubt
        return "–" if by_doubt is None else f"{by_doubt.auroc:.3f}"

    return [
        (
            f"{name}: AUROC",
            lambda r: f"{r.ood[name].by_entropy.auroc:.3f}",
            f"How well entropy tells {name} from test inputs; one half is guessing.",
        ),
        (f"{name}: epistemic", doubt, "The same by the doubt that more data would remove."),
        (f"{name}: AUPR", lambda r: f"{r.ood[name].by_entropy.aupr:.3f}", "Average precision of entropy."),
        (
            f"{name}: FPR95",
            lambda r: f"{r.ood[name].by_entropy.fpr95:.3f}",
            f"The share of {name} that passes where 95 % of the test inputs do; lower is better.",
        ),
    ]


def table(comparison: Comparison, *, short: bool = False) -> str:
    """Aligned text, a line per method, with a sentence per column below."""
    chosen = [c for c in columns(comparison) if not short or c[0] in SHORT or c[0].endswith("AUROC")]
    results = comparison.results
    cells = [[cell(result) for _, cell, _ in chosen] for result in results]
    headings = [heading for heading, _, _ in chosen]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    first = max(len(result.label) for result in results)

    def line(label: str, values: Sequence[str]) -> str:
        right = (value.rjust(width) for value, width in zip(values, widths, strict=True))
        return "   ".join([label.ljust(first), *right])

    lines = [line("", headings), "─" * len(line("", headings))]
    lines += [line(result.label, values) for result, values in zip(results, cells, strict=True)]
    width = max(map(len, headings))
    sentences = [f"{heading.ljust(width)}  {sentence}" for heading, _, sentence in chosen]
    missing = [f"{label}: not available here. {why}" for label, why in comparison.unavailable.items()]
    return "\n".join([*lines, "", *sentences, *([""] if missing else []), *missing])


def verdict(comparison: Comparison) -> list[str]:
    """Plain sentences about what the intervals say, whichever way it went."""
    sentences = []
    for result in comparison.results:
        if result.name not in ("map", "temperature", "prior") or result.difference is None:
            continue
        difference, place = result.difference, f"[{result.difference.lower:+.4f}, {result.difference.upper:+.4f}]"
        if difference.lower > 0:
            sentences.append(f"Ours has a lower NLL than {result.label}, beyond chance: difference {place}.")
        elif difference.upper < 0:
            sentences.append(f"Ours has a higher NLL than {result.label}, beyond chance: difference {place}.")
        else:
            sentences.append(f"Ours and {result.label} cannot be told apart by NLL: difference {place}.")
    return sentences


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
                "difference_to_ours": asdict(r.difference) if r.difference else None,
                "ood": {
                    name: {"entropy": asdict(o.by_entropy), "epistemic": asdict(o.by_doubt) if o.by_doubt else None}
                    for name, o in r.ood.items()
                },
                "fit_seconds": r.fit_seconds,
                "predict_seconds": r.predict_seconds,
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
        "verdict": verdict(comparison),
    }
