"""Does a classifier know when it is wrong, and is one better than another beyond chance?

risk curve      the error among the fraction of inputs that a classifier is surest about; its mean is the AURC
difference      mean loss of one method over another on the same inputs, with a bootstrap interval
regression      RMSE, NLL, and how often the truth lies inside the interval that should hold it
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.quadrature import standard_normal_quantile

LEVELS = (0.5, 0.9, 0.95)
BOOTSTRAP_CHUNK = 2**22  # resampled entries at once


@dataclass(frozen=True)
class Difference:
    """A mean difference of losses and its interval: above zero throughout, the other method is worse."""

    mean: float
    lower: float
    upper: float

    @property
    def is_clear(self) -> bool:
        """Zero lies outside of the interval."""
        return self.lower > 0 or self.upper < 0


def risk_curve(confidence: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:  # (b,), (b,)
    """(fraction of inputs answered, error among them), the surest first."""
    order = confidence.argsort(descending=True, stable=True)
    count = torch.arange(1, len(order) + 1, dtype=torch.float64, device=order.device)
    return count / len(order), wrong[order].double().cumsum(0) / count


def area_under_risk_curve(confidence: Tensor, wrong: Tensor) -> float:
    """Return the mean error over all coverages, most confident inputs first."""
    return float(risk_curve(confidence, wrong)[1].mean())


def bootstrap_difference(
    losses: Tensor, others: Tensor, *, num_resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> Difference:  # (b,), (b,)
    """others − losses, paired by input, with a percentile interval."""
    if losses.shape != others.shape or losses.ndim != 1 or len(losses) < 2:
        raise ValueError(
            f"`losses` and `others` must be vectors of one length, at least two inputs; got shapes "
            f"{tuple(losses.shape)} and {tuple(others.shape)}. Try the losses of the same inputs."
        )
    difference = (others - losses).double().cpu()
    generator = torch.Generator().manual_seed(seed)
    size, means = len(difference), []
    step = max(1, BOOTSTRAP_CHUNK // size)
    for start in range(0, num_resamples, step):
        drawn = torch.randint(size, (min(step, num_resamples - start), size), generator=generator)
        means.append(difference[drawn].mean(1))
    tail = (1 - level) / 2
    lower, upper = torch.quantile(torch.cat(means), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Difference(float(difference.mean()), lower, upper)


@dataclass(frozen=True)
class RegressionMetrics:
    """Scores of Gaussian predictions; `coverage` maps a level to the fraction inside its central interval."""

    rmse: float
    nll: float
    coverage: dict[float, float]


def regression_metrics(mean: Tensor, variance: Tensor, targets: Tensor) -> RegressionMetrics:
    """`variance` is that of a new observation, noise included; all of one shape."""
    if not mean.shape == variance.shape == targets.shape or mean.numel() == 0:
        raise ValueError(
            f"`mean`, `variance` and `targets` must have one shape; got {tuple(mean.shape)}, {tuple(variance.shape)} "
            f"and {tuple(targets.shape)}. Try flatten()."
        )
    if not bool((variance > 0).all()):
        raise ValueError("`variance` must be positive; got other numbers (or NaN). Try adding the noise variance.")
    mean, variance, targets = mean.double(), variance.double(), targets.double()
    squares = (targets - mean).square()
    inside = {
        level: float(((targets - mean).abs() <= standard_normal_quantile(level) * variance.sqrt()).double().mean())
        for level in LEVELS
    }
    nll = gaussian_losses(mean, variance, targets)
    return RegressionMetrics(float(squares.mean().sqrt()), float(nll.mean()), inside)


def gaussian_losses(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """−log N(y; mean, variance) at each input."""
    return 0.5 * ((targets - mean).square() / variance + variance.log() + math.log(2 * math.pi))
