"""How good predictions are: scores of probabilities against labels, and methods side by side."""

from ntk_iterncgp.experiments.evaluation.metrics import (
    ClassificationMetrics,
    ReliabilityCurve,
    classification_metrics,
    reliability_curve,
)
from ntk_iterncgp.experiments.evaluation.ood import OODMetrics, ood_metrics, roc_curve
from ntk_iterncgp.experiments.evaluation.uncertainty import (
    Difference,
    RegressionMetrics,
    bootstrap_difference,
    regression_metrics,
    risk_curve,
)

__all__ = [
    "ClassificationMetrics",
    "Difference",
    "OODMetrics",
    "RegressionMetrics",
    "ReliabilityCurve",
    "bootstrap_difference",
    "classification_metrics",
    "ood_metrics",
    "regression_metrics",
    "reliability_curve",
    "risk_curve",
    "roc_curve",
]
