"""Gaussian regression with a noise of its own on each output, p(y | f) = N(y; f, diag σ_c²): W = 1/σ_c², W⁺ = σ_c²."""

from __future__ import annotations

import math

from torch import Tensor

from ntk_iterncgp.likelihoods.base import Likelihood
from ntk_iterncgp.likelihoods.gaussian import values_of_outputs


class OutputNoise(Likelihood):
    """Independent Gaussian noise of variance `variances[c]` on output c: of networks, whose outputs have one prior."""

    is_quadratic = True
    has_exact_response = True

    def __init__(self, variances: Tensor) -> None:  # (C,)
        self.variances = variances.detach().double()
        self.num_outputs = len(variances)

    def __repr__(self) -> str:
        return f"OutputNoise({self.variances.tolist()})"

    def scaled(self, factor: float) -> OutputNoise:
        """The same with so many times the noise."""
        return OutputNoise(factor * self.variances)

    def misfit(self, missed: Tensor) -> float:  # y − f (N, C)
        """½ (y − f)ᵀW(y − f): −log p(y | f) without constants."""
        return 0.5 * float((missed.square() / self.variances.to(missed)).sum())

    def loss(self, latent: Tensor, targets: Tensor) -> float:
        return self.misfit(targets - latent)

    def check_targets(self, targets: Tensor) -> Tensor:
        return values_of_outputs(targets, self.num_outputs)

    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:
        variances = self.variances.to(latent)
        return -0.5 * ((targets - latent).square() / variances + (2 * math.pi * variances).log()).sum(1)

    def score(self, latent: Tensor, targets: Tensor) -> Tensor:
        return (targets - latent) / self.variances.to(latent)

    def curvature(self, latent: Tensor, block: Tensor) -> Tensor:
        return block / self.variances.to(block)[:, None]

    def curvature_root(self, latent: Tensor, block: Tensor) -> Tensor:
        return block / self.variances.to(block).sqrt()[:, None]

    def curvature_traces(self, latent: Tensor) -> Tensor:
        return latent.new_full((len(latent),), float((1 / self.variances).sum()))

    def noise(self, latent: Tensor, block: Tensor) -> Tensor:
        return block * self.variances.to(block)[:, None]

    def noise_diagonal(self, latent: Tensor) -> Tensor:
        return self.variances.to(latent).repeat(len(latent), 1)

    def response(self, latent: Tensor) -> Tensor:
        return latent

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean
