"""How well a score tells out-of-distribution inputs from test inputs. Higher scores mean "out of distribution".

AUROC   the chance that an out-of-distribution input scores higher than a test input; one half is guessing
AUPR    average precision, out-of-distribution inputs being the positives; guessing gives their fraction
FPR95   the fraction of out-of-distribution inputs that pass where the threshold lets 95 % of the test inputs pass
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

PASSING = 0.95


@dataclass(frozen=True)
class OODMetrics:
    """Higher AUROC and AUPR are better, lower FPR95 is."""

    auroc: float
    aupr: float
    fpr95: float


def ood_metrics(test_scores: Tensor, other_scores: Tensor) -> OODMetrics:  # (b,), (b′,)
    """AUROC, AUPR and FPR95 of a score."""
    scores, is_other = _pooled(test_scores, other_scores)
    ranks = scores.unique(return_inverse=True)[1].double()  # torchmetrics takes what leaves [0, 1] for logits
    ranks = ranks / ranks.max().clamp_min(1)
    passing = math.ceil(PASSING * len(test_scores) - 1e-9)  # at least so many, and no more than ties demand
    threshold = test_scores.double().sort().values[passing - 1]
    return OODMetrics(
        auroc=float(binary_auroc(ranks, is_other)),
        aupr=float(binary_average_precision(ranks, is_other)),
        fpr95=float((other_scores.double() <= threshold).double().mean()),
    )


def roc_curve(test_scores: Tensor, other_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Fractions of test inputs and of others above each threshold, from the highest threshold down."""
    scores, is_other = _pooled(test_scores, other_scores)
    order = scores.argsort(descending=True)
    scores, is_other = scores[order], is_other[order]
    last_of_ties = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool, device=scores.device)])
    other, test = is_other.cumsum(0)[last_of_ties], (1 - is_other).cumsum(0)[last_of_ties]
    start = torch.zeros(1, dtype=torch.float64, device=scores.device)
    return torch.cat([start, test / len(test_scores)]), torch.cat([start, other / len(other_scores)])


def _pooled(test_scores: Tensor, other_scores: Tensor) -> tuple[Tensor, Tensor]:
    for name, scores in (("test_scores", test_scores), ("other_scores", other_scores)):
        if scores.ndim != 1 or len(scores) == 0 or not bool(torch.isfinite(scores).all()):
            raise ValueError(
                f"{name} must be at least one finite number, one per input; got shape {tuple(scores.shape)}"
                f"{' with NaN or infinity' if not bool(torch.isfinite(scores).all()) else ''}. Try a vector of scores."
            )
    is_other = torch.cat([torch.zeros_like(test_scores), torch.ones_like(other_scores)]).long()
    return torch.cat([test_scores, other_scores]).double(), is_other
