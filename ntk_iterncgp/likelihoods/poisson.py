"""Counts with rate e·eᶠ at exposure e, p(y | f) = Poisson(y; e·eᶠ): ∇ = y − e·eᶠ, W = e·eᶠ, W⁺ = 1/W."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.base import (
    OneLatent,
    column,
    described_per_datum,
    is_one,
    one_dimensional,
    positive_per_datum,
    require,
)


class Poisson(OneLatent):
    """Counts; one latent function, the logarithm of the rate per unit of exposure.

    Predictions are rates per unit of exposure: multiply them by the exposure of a new datum.

    Args:
        exposure: For how long, or over how large an area, each datum was counted: one number for all, or (N,).
        fractional: Whether targets may be fractional, such as rates: the quasi-Poisson likelihood.
    """

    has_exact_response = True
    per_datum = per_datum_arguments = ("exposure",)

    def __init__(self, exposure: float | Sequence[float] | Tensor = 1.0, *, fractional: bool = False) -> None:
        self.exposure = positive_per_datum(exposure, "exposure", "Try exposure=1.0.")
        self.fractional = bool(fractional)

    def __repr__(self) -> str:
        shown = [] if is_one(self.exposure) else [f"exposure={described_per_datum(self.exposure)}"]
        return f"Poisson({', '.join(shown + ['fractional=True'] * self.fractional)})"

    def settings(self) -> dict[str, Any]:
        return {"exposure": self.exposure, "fractional": self.fractional}

    def check_targets(self, targets: Tensor) -> Tensor:
        targets = one_dimensional(targets, "Poisson", "each a count").double()
        if self.fractional:
            require(targets >= 0, targets, "`y` must be rates for Poisson, no negative numbers")
        else:
            message = "`y` must be counts 0, 1, 2, … for Poisson, no negative and no fractional numbers"
            require((targets >= 0) & (targets == targets.round()), targets, message)
        self.check_length(len(targets))
        return targets

    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:
        log_rate = (latent + column(self.exposure, latent).log())[:, 0]
        return targets * log_rate - log_rate.exp() - torch.lgamma(targets + 1)

    def score(self, latent: Tensor, targets: Tensor) -> Tensor:
        return targets[:, None] - column(self.exposure, latent) * latent.exp()

    def response(self, latent: Tensor) -> Tensor:
        return latent.exp()

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:
        return (mean + variance / 2).exp()  # the mean of a log-normal: exact

    def expected_log_prob(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        log_rate = (mean + column(self.exposure, mean).log())[:, 0]
        return targets * log_rate - (log_rate + covariance[:, 0, 0] / 2).exp() - torch.lgamma(targets + 1)

    def weight(self, latent: Tensor) -> Tensor:  # (N, 1)
        return (column(self.exposure, latent) * latent.exp()).clamp_min(self.curvature_floor)
