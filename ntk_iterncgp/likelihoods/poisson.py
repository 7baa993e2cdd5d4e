"""Counts with rate eᶠ, p(y | f) = Poisson(y; eᶠ): ∇ = y − eᶠ, W = eᶠ, W⁺ = e⁻ᶠ."""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.base import Likelihood, one_dimensional, require


class Poisson(Likelihood):
    """One latent function, the logarithm of the rate."""

    has_exact_response = True

    def __repr__(self) -> str:
        return "Poisson()"

    def check_targets(self, targets: Tensor) -> Tensor:
        targets = one_dimensional(targets, "Poisson", "each a count").double()
        message = "`y` must be counts 0, 1, 2, … for Poisson, no negative and no fractional numbers"
        require((targets >= 0) & (targets == targets.round()), targets, message)
        return targets

    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:
        log_rate = latent[:, 0]
        return targets * log_rate - log_rate.exp() - torch.lgamma(targets + 1)

    def score(self, latent: Tensor, targets: Tensor) -> Tensor:
        return targets[:, None] - latent.exp()

    def curvature(self, latent: Tensor, block: Tensor) -> Tensor:
        return self._rate(latent)[..., None] * block

    def noise(self, latent: Tensor, block: Tensor) -> Tensor:
        return self.noise_diagonal(latent)[..., None] * block

    def noise_diagonal(self, latent: Tensor) -> Tensor:
        return 1 / self._rate(latent)

    def response(self, latent: Tensor) -> Tensor:
        return latent.exp()

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:
        return (mean + variance / 2).exp()  # the mean of a log-normal: exact

    def expected_log_prob(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        rate = self.expected_response(mean[:, 0], covariance[:, 0, 0])
        return targets * mean[:, 0] - rate - torch.lgamma(targets + 1)

    def _rate(self, latent: Tensor) -> Tensor:  # (N, 1)
        return latent.exp().clamp_min(self.curvature_floor)
