"""How far from typical the posterior is at an input, whichever way: a distance in the logarithms of variances.

A variance that is much too small is as strange as one much too large: faint or blurred images have small Jacobians, and
so little variance that one-sided scores take them for familiar. The features are the logarithms of hᵀK_l h for each
parameter tensor l and of the posterior variance, and the evidence and energy of a classifier. They are robustly
standardised, and the distance is Mahalanobis's from the mean of the inputs of the same predicted class, with one
covariance for all, shrunk by the rule of Chen, Wiesel, Eldar and Hero (2010, OAS), since some hundred inputs must do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

WIDEST = 8.0  # standard deviations, beyond which one feature alone says no more
NARROWEST = 0.01  # a variance that differs by less than one per cent is the same
PRIOR_COUNT = 5.0  # as many inputs as the mean of all classes counts beside those of one
FOLDS = 4


@dataclass(frozen=True, eq=False)
class Typicality:
    """Location, scale, class means and precision matrix of the features of familiar inputs."""

    location: Tensor  # (d,)
    scale: Tensor  # (d,)
    means: Tensor  # (C, d), standardised
    precision: Tensor  # (d, d)

    @classmethod
    def of(cls, features: Tensor, classes: Tensor, num_classes: int) -> Typicality:  # (n, d), (n,)
        """Fit to the features of n familiar inputs and the classes predicted there."""
        location = features.median(0).values
        quantiles = torch.tensor([0.16, 0.84], dtype=features.dtype, device=features.device)
        lower, upper = features.quantile(quantiles, dim=0)
        scale = (0.5 * (upper - lower)).clamp_min(NARROWEST)
        standard = ((features - location) / scale).clamp(-WIDEST, WIDEST)
        mean = standard.mean(0)
        sums = (PRIOR_COUNT * mean).expand(num_classes, -1).index_add(0, classes, standard)
        means = sums / (PRIOR_COUNT + classes.bincount(minlength=num_classes))[:, None]
        return cls(location, scale, means, _shrunk(standard - means[classes]).inverse())

    def __call__(self, features: Tensor, classes: Tensor) -> Tensor:  # (b, d), (b,) -> (b,)
        """The squared distance of each input."""
        away = ((features - self.location) / self.scale).clamp(-WIDEST, WIDEST) - self.means[classes]
        return ((away @ self.precision) * away).sum(1)

    @classmethod
    def of_others(cls, features: Tensor, classes: Tensor, num_classes: int) -> Tensor:  # (n,)
        """The distance of each familiar input by a fit to others: its own would make it too small."""
        fold = torch.arange(len(features), device=features.device) % FOLDS
        distances = torch.empty_like(features[:, 0])
        for k in range(FOLDS):
            own = fold == k
            distances[own] = cls.of(features[~own], classes[~own], num_classes)(features[own], classes[own])
        return distances

    def to_dict(self) -> dict[str, Tensor]:
        """Plain tensors."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, saved: Any, device: torch.device) -> Typicality:
        """What `to_dict` made, on a device; a `ValueError` where it is damaged."""
        parts: list[Any] = [saved.get(field.name) if isinstance(saved, Mapping) else None for field in fields(cls)]
        if all(isinstance(p, Tensor) and p.dtype == torch.float64 and bool(p.isfinite().all()) for p in parts):
            location, scale, means, precision = (part.to(device) for part in parts)
            d = location.numel()
            shapes = [tuple(t.shape) for t in (location, scale, means[:1], precision)]
            if shapes == [(d,), (d,), (1, d), (d, d)] and bool((scale > 0).all()):
                return cls(location, scale, means, precision)
        raise ValueError(
            "The features of a saved detector must be finite and of one size; got others. Try to save it again, or "
            "la.detector(inputs)."
        )


def _shrunk(residuals: Tensor) -> Tensor:  # (n, d) -> (d, d)
    """(1 − ρ) S + ρ μ I, with the ρ of least expected error for normal data."""
    n, d = residuals.shape
    S = residuals.T @ residuals / n
    mu, alpha = S.trace() / d, S.square().mean()
    rho = ((alpha + mu**2) / ((n + 1) * (alpha - mu**2 / d)).clamp_min(1e-300)).clamp(max=1)
    floor = (rho * mu).clamp_min(1e-9)
    shrunk: Tensor = (1 - rho) * S + floor * torch.eye(d, dtype=S.dtype, device=S.device)
    return shrunk
