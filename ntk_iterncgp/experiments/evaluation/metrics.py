"""Scores of class probabilities p (b, C) against labels y (b,).

accuracy  fraction of inputs whose most probable class is the label
NLL       mean of −log p_y                                              rewards confidence only where it is earned
Brier     mean of Σ_c (p_c − [c = y])²                                  the same, bounded: from 0 to 2
ECE       Σ over bins of (fraction of inputs) · |accuracy − confidence|    15 equal bins of the largest probability
adaptive  the same with 15 bins of equally many inputs                  does not depend on where bins happen to end
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

NUM_BINS = 15
SUM_TOLERANCE = 1e-3  # probabilities from quadrature or float32 do not add up to one exactly


@dataclass(frozen=True)
class ClassificationMetrics:
    """Five scores; higher accuracy is better, lower is better for the others."""

    accuracy: float
    nll: float
    brier: float
    ece: float
    adaptive_ece: float


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """For each bin of confidence that holds any input: mean confidence, accuracy, number of inputs."""

    confidence: Tensor
    accuracy: Tensor
    count: Tensor


def classification_metrics(probabilities: Tensor, labels: Tensor) -> ClassificationMetrics:  # (b, C), (b,)
    """Accuracy, NLL, Brier score, ECE and adaptive ECE.

    For two classes, probabilities of class 1 alone may be passed, as (b,) or (b, 1).

    A label that was given probability zero would make the NLL infinite and hide all other inputs: probabilities are
    held at the smallest normal number of their dtype, so that such an input costs 87 nats in float32, 708 in float64.
    """
    probabilities, labels = _checked(probabilities, labels)
    floor = torch.finfo(probabilities.dtype).tiny
    num_classes = probabilities.shape[1]
    of_label = probabilities.gather(1, labels[:, None])[:, 0]
    truth = one_hot(labels, num_classes).to(probabilities.dtype)
    ece = multiclass_calibration_error(probabilities, labels, num_classes, n_bins=NUM_BINS, norm="l1")
    return ClassificationMetrics(
        accuracy=float(multiclass_accuracy(probabilities, labels, num_classes, average="micro")),
        nll=float(-of_label.clamp_min(floor).double().log().mean()),
        brier=float((probabilities - truth).double().square().sum(1).mean()),
        ece=float(ece),
        adaptive_ece=_adaptive_ece(probabilities, labels),
    )


def reliability_curve(probabilities: Tensor, labels: Tensor, *, num_bins: int = NUM_BINS) -> ReliabilityCurve:
    """How often a confident prediction is right: the points whose distance from the diagonal the ECE sums up."""
    probabilities, labels = _checked(probabilities, labels)
    confidence, predicted = probabilities.double().max(1)
    index = (confidence * num_bins).long().clamp_max(num_bins - 1)
    count = torch.bincount(index, minlength=num_bins)
    right = torch.bincount(index, weights=(predicted == labels).double(), minlength=num_bins)
    total = torch.bincount(index, weights=confidence, minlength=num_bins)
    used = count > 0
    return ReliabilityCurve((total / count)[used], (right / count)[used], count[used])


def _adaptive_ece(probabilities: Tensor, labels: Tensor) -> float:
    confidence, predicted = probabilities.double().max(1)
    order = confidence.argsort(stable=True)
    gap = (confidence - (predicted == labels).double())[order]
    return sum(abs(float(part.sum())) for part in gap.tensor_split(min(NUM_BINS, len(gap)))) / len(gap)


def _checked(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # (b, C), (b,)
    """Two columns or more, each row a distribution, and a label for each row."""
    if not probabilities.is_floating_point():
        raise TypeError(f"`probabilities` must be floating-point numbers; got {probabilities.dtype}. Try .float().")
    if probabilities.ndim == 1:
        probabilities = probabilities[:, None]
    if probabilities.ndim != 2 or probabilities.numel() == 0:
        shape = tuple(probabilities.shape)
        raise ValueError(f"`probabilities` must have the shape (b, C) with b ≥ 1; got {shape}. Try flatten(0, -2).")
    if probabilities.shape[1] == 1:
        probabilities = torch.cat([1 - probabilities, probabilities], 1)
    in_range = (probabilities >= -SUM_TOLERANCE) & (probabilities <= 1 + SUM_TOLERANCE)
    sums_to_one = (probabilities.sum(1) - 1).abs() <= SUM_TOLERANCE
    if not bool(in_range.all() and sums_to_one.all()):
        raise ValueError(
            "`probabilities` must be rows of numbers from 0 to 1 that add up to 1; got others (logits, or NaN). Try "
            "softmax(1)."
        )
    if labels.shape != probabilities.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"`labels` must be {len(probabilities)} whole numbers, one per row of probabilities; got shape "
            f"{tuple(labels.shape)} of {labels.dtype}. Try labels.flatten().long()."
        )
    if not bool(((labels >= 0) & (labels < probabilities.shape[1])).all()):
        ends = f"{int(labels.min())} to {int(labels.max())}"
        raise ValueError(f"`labels` must be from 0 to {probabilities.shape[1] - 1}; got {ends}. Try more columns.")
    # Exactly within [0, 1]: torchmetrics takes anything outside for logits, even by rounding.
    return probabilities.clamp(0, 1), labels.long()
