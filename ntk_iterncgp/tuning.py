"""Choosing the prior precision after the fit, from small matrices alone.

By the evidence: its lower bound is a differentiable function of one precision, or one for each parameter tensor.
By a validation set: the rows of J at its inputs are needed once. With unit precision they give J Jᵀ and J A, and then

    cov(δ) = J Jᵀ/δ − (J A/δ) M(δ)⁻¹ (J A/δ)ᵀ

for every precision δ of the grid, so fifty candidates cost little more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torch.nn.functional import nll_loss
from tqdm.auto import tqdm

from ntk_iterncgp.priors.jacobian import Rows
from ntk_iterncgp.weight_posterior import WeightPosterior

STRUCTURES = ("scalar", "layerwise")

Moments = tuple[Tensor, Tensor, Tensor]
"""Mean (b, C), covariance (b, C, C) and targets of some validation data."""


def tune_by_evidence(
    evidence: Callable[[Tensor], Tensor],
    num_layers: int,
    like: Tensor,
    *,
    start: float | Tensor,
    structure: str,
    num_steps: int,
    learning_rate: float,
    progress_bar: bool,
) -> Tensor:
    """The precision that maximises `evidence`, by Adam on its logarithm."""
    if structure not in STRUCTURES:
        raise ValueError(
            f"prior_structure expects 'scalar' or 'layerwise', but got {structure!r}. One precision per weight has far "
            "more freedom than the evidence can settle."
        )
    initial = torch.as_tensor(start, dtype=like.dtype, device=like.device).reshape(-1)
    if len(initial) == 1 and structure == "layerwise":
        initial = initial.expand(num_layers)
    log_precision = initial.log().clone().requires_grad_()
    optimizer = torch.optim.Adam([log_precision], lr=learning_rate)
    best, best_value = initial.clone(), -float("inf")
    for _ in tqdm(range(num_steps), desc="Evidence", disable=not progress_bar):
        optimizer.zero_grad()
        value = evidence(log_precision.exp())
        if value.item() > best_value:
            best, best_value = log_precision.detach().exp(), value.item()
        (-value).backward()
        optimizer.step()
    last = log_precision.detach().exp()
    return last if evidence(last).item() >= best_value else best


@dataclass(frozen=True, eq=False)
class ValidationPart:
    """Some validation inputs seen through the network with unit prior precision."""

    outputs: Tensor  # f(x; θ*) (b, C)
    shifted: Tensor  # J(x)(θ* − μ₀) (b, C)
    covariance: Tensor  # J Jᵀ (b, C, C)
    cross: Tensor  # J A (b, C, B)
    targets: Tensor

    @classmethod
    def of(cls, rows: Rows, posterior: WeightPosterior, shift: Tensor, targets: Tensor) -> ValidationPart:
        ones = torch.ones(len(posterior.images), dtype=torch.float64, device=posterior.images.device)
        return cls(
            rows.outputs.double(),
            rows.times(shift[:, None])[..., 0],
            rows.covariance(ones),
            rows.times(posterior.images).to(posterior.images.dtype),
            targets,
        )

    def moments(
        self, posterior: WeightPosterior, precision: Tensor, noise_scale: Tensor, *, refined: bool
    ) -> tuple[Tensor, Tensor]:
        """Mean and covariance for one scalar precision."""
        factor = posterior.factor(precision, noise_scale)
        cross = self.cross.double() / precision
        half = factor.half_solve(cross.flatten(0, 1).T).T.unflatten(0, cross.shape[:2])
        mean = self.outputs
        if refined:
            weights = factor.solve(posterior.right_hand_side[:, None])
            mean = mean - self.shifted + (cross @ weights)[..., 0]
        return mean, self.covariance / precision - half @ half.mT


def tune_by_validation(
    posterior: WeightPosterior,
    parts: Sequence[ValidationPart],
    grid: Tensor,
    noise_scale: Tensor,
    score: Callable[[list[Moments]], float],
    *,
    refined: bool,
    progress_bar: bool,
) -> Tensor:
    """The precision of the grid with the least `score` of (mean, covariance, targets) over the validation set."""
    scores = []
    for precision in tqdm(grid, desc="Prior precision", disable=not progress_bar):
        moments = [
            (*part.moments(posterior, precision.reshape(1), noise_scale, refined=refined), part.targets)
            for part in parts
        ]
        scores.append(score(moments))
    values = torch.tensor(scores)
    if not bool(torch.isfinite(values).any()):
        raise ValueError(
            "The validation loss is expected to be finite somewhere on the grid, but it is NaN throughout."
        )
    return grid[int(torch.where(values.isfinite(), values, torch.inf).argmin())].reshape(1)


def gaussian_nll(moments: Sequence[Moments], noise_variance: Tensor) -> float:
    """Σ −log N(y; mean, variance + noise): unlike the squared error it depends on the prior precision."""
    total = 0.0
    for mean, covariance, targets in moments:
        variance = covariance.diagonal(dim1=1, dim2=2) + noise_variance
        squares = (targets.reshape(mean.shape) - mean).square()
        total += 0.5 * float((squares / variance + (2 * torch.pi * variance).log()).sum())
    return total


def categorical_nll(predictions: Sequence[tuple[Any, Tensor]]) -> float:
    """Σ −log p(y) for class probabilities, a probability of zero counting as the smallest normal number."""
    return sum(float(nll_loss(p.clamp_min(1e-38).log(), targets, reduction="sum")) for p, targets in predictions)


def metric_value(loss: Any, predictions: Sequence[tuple[Any, ...]]) -> float:
    """A user's loss over batches of (…, targets): a torchmetrics metric is reset first, so candidates do not add up."""
    if isinstance(loss, torchmetrics.Metric):
        loss.reset()
        for batch in predictions:
            try:
                loss.update(*batch)
            except TypeError:  # a metric of the mean alone
                loss.update(batch[0], batch[-1])
        return float(loss.compute().sum())
    return float(loss(*(torch.cat(items) for items in zip(*predictions, strict=True))))
