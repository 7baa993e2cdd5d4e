"""How good predictions are: scores of probabilities against labels."""

from ntk_iterncgp.evaluation.metrics import (
    ClassificationMetrics,
    ReliabilityCurve,
    classification_metrics,
    reliability_curve,
)

__all__ = ["ClassificationMetrics", "ReliabilityCurve", "classification_metrics", "reliability_curve"]
