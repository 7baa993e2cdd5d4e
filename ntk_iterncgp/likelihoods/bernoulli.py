"""Binary classification, p(y = 1 | f) = σ(f), y ∈ {0, 1}: ∇ = y − σ, W = σ(1 − σ), W⁺ = 1/W."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ntk_iterncgp.likelihoods.base import OneLatent, one_dimensional, require


class Bernoulli(OneLatent):
    """One latent function, the logit of class 1."""

    def __repr__(self) -> str:
        return "Bernoulli()"

    def settings(self) -> dict[str, Any]:
        return {}

    def check_targets(self, targets: Tensor) -> Tensor:
        targets = one_dimensional(targets, "Bernoulli", "each 0 or 1").double()
        message = "`y` must be labels 0 and 1 for Bernoulli"
        require((targets == 0) | (targets == 1), targets, message)
        return targets

    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:
        return logsigmoid((2 * targets - 1) * latent[:, 0])

    def score(self, latent: Tensor, targets: Tensor) -> Tensor:
        sign = (2 * targets - 1)[:, None]
        return sign * torch.sigmoid(-sign * latent)  # y − σ(f), without the cancellation at saturated points

    def response(self, latent: Tensor) -> Tensor:
        return torch.sigmoid(latent)

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:
        return torch.sigmoid(mean / torch.sqrt(1 + math.pi / 8 * variance))

    def weight(self, latent: Tensor) -> Tensor:  # (N, 1)
        return (torch.sigmoid(latent) * torch.sigmoid(-latent)).clamp_min(self.curvature_floor)
