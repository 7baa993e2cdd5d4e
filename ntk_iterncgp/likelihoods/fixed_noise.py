"""Gaussian regression with a known noise at each datum, p(y | f) = N(y; f, diag σ_n²): W = 1/σ_n², W⁺ = σ_n²."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ntk_iterncgp.likelihoods.base import Likelihood, column, one_dimensional, positive_per_datum


class FixedNoiseGaussian(Likelihood):
    """Values with independent Gaussian noise whose variance is known for each datum; one latent function.

    The noise is taken as it is: `optimize` does not change it. Predictions are those of the noise-free value; add the
    variance of a new observation to its latent variance, since nobody else knows it.

    Args:
        noise: The variances (N,).
    """

    is_quadratic = True
    has_exact_response = True
    per_datum = ("noise_variance",)
    per_datum_arguments = ("noise",)

    def __init__(self, noise: Sequence[float] | Tensor) -> None:
        advice = "Try the squared standard error of each datum, or Gaussian(0.1) for one noise for all."
        self.noise_variance = positive_per_datum(noise, "noise", advice)
        if self.noise_variance.ndim == 0:
            raise ValueError(f"`noise` must have one variance for each datum (N,); got a single number. {advice}")

    def __repr__(self) -> str:
        return f"FixedNoiseGaussian({len(self.noise_variance)} values)"

    def settings(self) -> dict[str, Any]:
        return {"noise": self.noise_variance}

    def check_targets(self, targets: Tensor) -> Tensor:
        targets = one_dimensional(targets, "FixedNoiseGaussian", "each a value").double()
        self.check_length(len(targets))
        return targets[:, None]

    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:
        variance = column(self.noise_variance, latent)
        return -0.5 * ((targets - latent).square() / variance + (2 * math.pi * variance).log())[:, 0]

    def score(self, latent: Tensor, targets: Tensor) -> Tensor:
        return (targets - latent) / column(self.noise_variance, latent)

    def curvature(self, latent: Tensor, block: Tensor) -> Tensor:
        return block / column(self.noise_variance, latent)[..., None]

    def noise(self, latent: Tensor, block: Tensor) -> Tensor:
        return block * column(self.noise_variance, latent)[..., None]

    def noise_diagonal(self, latent: Tensor) -> Tensor:
        return column(self.noise_variance, latent).expand_as(latent).clone()

    def response(self, latent: Tensor) -> Tensor:
        return latent

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean

    def expected_log_prob(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        spread = covariance[:, 0, 0] / column(self.noise_variance, mean)[:, 0]
        return self.log_prob(mean, targets) - 0.5 * spread
