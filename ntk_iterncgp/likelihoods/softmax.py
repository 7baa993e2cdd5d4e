"""Multi-class classification, p(y = c | f) = π_c = softmax(f)_c: ∇ = y − π, W = diag π − ππᵀ, W⁺ = Π diag(1/π) Π.

Π = I − 11ᵀ/C. W is zero along 1 in every datum: the data say nothing about Σ_c f_c, so the noise there is infinite,
while W⁺ puts *none* there. `project` keeps every action zero-sum over the classes, and then W⁺ is right for any prior
(a departure from the paper, essential where outputs are correlated as in every network).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.base import Likelihood, one_dimensional, require

MANY_CLASSES, MANY_NUMBERS = 64, 2**24  # outputs and data from which on only the leading classes are stored


class Softmax(Likelihood):
    """`num_classes` latent functions, the logits. Targets are labels (N,), or probabilities of the classes (N, C)."""

    has_monotone_response = False  # each probability depends on all latent values

    def __init__(self, num_classes: int) -> None:
        if num_classes != int(num_classes) or num_classes < 2:
            raise ValueError(
                f"`num_classes` must be a whole number of at least two; got {num_classes}. Try Bernoulli() for two "
                "classes with a single latent function."
            )
        self.num_outputs = int(num_classes)

    def __repr__(self) -> str:
        return f"Softmax({self.num_outputs})"

    def settings(self) -> dict[str, Any]:
        return {"num_classes": self.num_outputs}

    def keeps_leading(self, num_data: int) -> bool:
        C = self.num_outputs
        return type(self) is Softmax and C >= MANY_CLASSES and num_data * C >= MANY_NUMBERS

    @property
    def curvature_rank(self) -> int:
        return self.num_outputs - 1

    def check_targets(self, targets: Tensor) -> Tensor:
        if targets.ndim == 2 and targets.shape[1] == self.num_outputs and targets.is_floating_point():
            sums = targets.double().sum(1)
            message = f"`y` must hold probabilities that sum to one in each row for Softmax({self.num_outputs})"
            require((targets >= 0).all(1) & ((sums - 1).abs() < 1e-3), sums, message)
            return targets.double() / sums[:, None]
        targets = one_dimensional(targets, "Softmax", "each a class label")
        message = f"`y` must be whole numbers from 0 to {self.num_outputs - 1} for Softmax({self.num_outputs})"
        require((targets == targets.long()) & (targets >= 0) & (targets < self.num_outputs), targets, message)
        return targets.long()

    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:
        log_probabilities = torch.log_softmax(latent, 1)
        if targets.ndim == 2:  # what they expect of it
            return (targets.to(latent) * log_probabilities).sum(1)
        return log_probabilities.gather(1, targets[:, None])[:, 0]

    def score(self, latent: Tensor, targets: Tensor) -> Tensor:
        score = -torch.softmax(latent, 1)
        if targets.ndim == 2:
            return score + targets.to(latent)
        return score.scatter_add(1, targets[:, None], score.new_ones(len(score), 1))

    def curvature(self, latent: Tensor, block: Tensor) -> Tensor:
        probabilities = self._probabilities(latent)[..., None]
        # W does not see what is added to all classes. Measured from the likeliest one nothing cancels: π(1 − π) of a
        # saturated datum would be a difference of ones.
        block = block - block.gather(1, probabilities.argmax(1, keepdim=True).expand(-1, -1, block.shape[2]))
        weighted = probabilities * block
        return weighted - probabilities * weighted.sum(1, keepdim=True)

    def noise(self, latent: Tensor, block: Tensor) -> Tensor:
        return self.project(self.noise_diagonal(latent)[..., None] * self.project(block))

    def noise_diagonal(self, latent: Tensor) -> Tensor:
        return 1 / self._probabilities(latent)

    def project(self, block: Tensor) -> Tensor:
        return block - block.mean(1, keepdim=True)

    def project_in_noise(self, block: Tensor, noise: Tensor) -> Tensor:
        """s − π Σ_c s_c.

        The entry of the likeliest class is what the others leave, so that the sum is zero to the rounding of the
        smallest entries: 1 − π of a saturated datum would be rounding alone.
        """
        probabilities = (1 / noise).to(block.dtype)[..., None]
        inside = block - probabilities * block.sum(1, keepdim=True)
        likeliest = probabilities.argmax(1, keepdim=True).expand(-1, -1, block.shape[2])
        inside = inside.scatter(1, likeliest, 0.0)
        return inside.scatter(1, likeliest, -inside.sum(1, keepdim=True))

    def contrasts(self, device: torch.device) -> Tensor:
        """Helmert's contrasts: class j against the mean of the classes before it."""
        classes = torch.arange(self.num_outputs, dtype=torch.float64, device=device)
        column = classes[1:][None]  # j = 1 … C−1
        below, at = (classes[:, None] < column).double(), (classes[:, None] == column).double()
        return (below - column * at) / torch.sqrt(column * (column + 1))

    def cotangent(self, latent: Tensor, index: int) -> Tensor:
        """The likeliest class against the next, then both against the third, and so on.

        u = (π_k / Σ_{i<k} π_i) on the likelier classes, −1 on the k-th, hence Wu = π_k (their probabilities among
        themselves, −1): a split of one side of an earlier contrast is orthogonal to it in the metric of W.
        """
        probabilities = self._probabilities(latent)
        top, ranked = probabilities.topk(index + 2, 1)
        ratio = top[:, -1:] / top[:, :-1].sum(1, keepdim=True)
        contrast = torch.zeros_like(latent).scatter_(1, ranked[:, :-1], ratio.expand(-1, index + 1))
        return contrast.scatter_(1, ranked[:, -1:], -1)

    def curvature_root(self, latent: Tensor, block: Tensor) -> Tensor:
        """H = diag √π − π √πᵀ."""
        probabilities = self._probabilities(latent)
        root = probabilities.sqrt()[..., None]
        return self.project_in_noise(root * block, 1 / probabilities)

    def curvature_traces(self, latent: Tensor) -> Tensor:
        """Σ_c π_c (1 − π_c), of the likeliest class by the others: 1 − π of a saturated datum is rounding."""
        probabilities = self._probabilities(latent)
        top = probabilities.max(1, keepdim=True)
        others = probabilities.scatter(1, top.indices, 0.0)
        return (others * (1 - others)).sum(1) + top.values[:, 0] * others.sum(1)

    def response(self, latent: Tensor) -> Tensor:
        return torch.softmax(latent, -1)

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:
        return torch.softmax(mean / torch.sqrt(1 + math.pi / 8 * variance), -1)

    def _probabilities(self, latent: Tensor) -> Tensor:  # (N, C)
        """π, held at the floor and normalised again: the one place where W and W⁺ get it."""
        floored = torch.softmax(latent, 1).clamp_min(self.curvature_floor)
        return floored / floored.sum(1, keepdim=True)
