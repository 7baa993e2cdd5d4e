"""Gaussian regression, p(y | f) = N(y; f, σ² I): ∇ = (y − f)/σ², W = 1/σ², W⁺ = σ². One Newton step; ŷ = y."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.base import Likelihood


class Gaussian(Likelihood):
    """Independent Gaussian noise of variance `noise` on each of `num_outputs` outputs."""

    is_quadratic = True
    has_exact_response = True

    def __init__(self, noise: float, num_outputs: int = 1) -> None:
        if torch.as_tensor(noise).ndim > 0:
            raise TypeError(
                "`noise` must be one variance for all data; got several. Try FixedNoiseGaussian for one for each."
            )
        if not (math.isfinite(noise) and noise > 0):
            raise ValueError(f"`noise` must be a positive, finite variance; got {noise}. Try noise=0.01.")
        if num_outputs != int(num_outputs) or num_outputs < 1:
            raise ValueError(f"`num_outputs` must be a whole number of at least one; got {num_outputs}. Try 1.")
        self.variance = float(noise)
        self.num_outputs = int(num_outputs)

    def __repr__(self) -> str:
        outputs = f", num_outputs={self.num_outputs}" if self.num_outputs > 1 else ""
        return f"Gaussian(noise={self.variance:g}{outputs})"

    def settings(self) -> dict[str, Any]:
        return {"noise": self.variance, "num_outputs": self.num_outputs}

    def check_targets(self, targets: Tensor) -> Tensor:
        return values_of_outputs(targets, self.num_outputs)

    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:
        constant = self.num_outputs * math.log(2 * math.pi * self.variance)
        return -0.5 * (((targets - latent) ** 2).sum(1) / self.variance + constant)

    def score(self, latent: Tensor, targets: Tensor) -> Tensor:
        return (targets - latent) / self.variance

    def curvature(self, latent: Tensor, block: Tensor) -> Tensor:
        return block / self.variance

    def curvature_root(self, latent: Tensor, block: Tensor) -> Tensor:
        return block / math.sqrt(self.variance)

    def curvature_traces(self, latent: Tensor) -> Tensor:
        return latent.new_full((len(latent),), self.num_outputs / self.variance)

    def noise(self, latent: Tensor, block: Tensor) -> Tensor:
        return block * self.variance

    def noise_diagonal(self, latent: Tensor) -> Tensor:
        return latent.new_full(latent.shape, self.variance)

    def response(self, latent: Tensor) -> Tensor:
        return latent

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean

    def expected_log_prob(self, mean: Tensor, covariance: Tensor, targets: Tensor) -> Tensor:
        spread = covariance.diagonal(dim1=1, dim2=2).sum(1)
        return self.log_prob(mean, targets) - 0.5 * spread / self.variance


def values_of_outputs(targets: Tensor, num_outputs: int) -> Tensor:  # (N, C)
    """Targets with one number for each output, in float64, or a ValueError."""
    targets = targets.double()
    if targets.ndim == 1:
        targets = targets[:, None]
    if targets.ndim != 2 or targets.shape[1] != num_outputs:
        raise ValueError(
            f"`y` must have the shape (N, {num_outputs}){' or (N,)' if num_outputs == 1 else ''} for "
            f"Gaussian with {num_outputs} output(s); got {tuple(targets.shape)}. Try a network, or "
            "num_outputs, with as many outputs as y has columns."
        )
    return targets
