"""What the label would say about the weights: H[E p] − E H[p], for the likeliest class against the rest."""

from typing import final

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.quadrature import line_points
from ntk_iterncgp.posterior.scores.base import Latent, Score


@final
class MutualInformation(Score):
    """The mutual information between the weights and whether the answer is right, for p = σ(hᵀf)."""

    name = "mutual_information"

    def __call__(self, latent: Latent) -> Tensor:
        mean, deviation = latent.evidence, latent.variance.sqrt()
        points, weights = line_points(mean, deviation)
        p = torch.sigmoid(mean[:, None] + deviation[:, None] * points)  # (b, q)
        expected = (weights * p).sum(1)
        return _binary_entropy(expected) - (weights * _binary_entropy(p)).sum(1)


def _binary_entropy(p: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(p) + torch.special.entr(1 - p)
    return entropy
