"""Entropies, in nats: of the network's own probabilities, and of those that the posterior leaves.

H[softmax(f)]      H[softmax(f / √(1 + π v/8))], v = hᵀΣh: the probit approximation with one variance for all classes
"""

from typing import final

from torch import Tensor

from ntk_iterncgp.posterior.scores.base import Latent, Score, softened


def entropy_of(outputs: Tensor) -> Tensor:  # (b, C) -> (b,)
    """H[softmax(f)], which keeps its order where a probability of the likeliest class rounds to one."""
    log_p = outputs.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


@final
class Entropy(Score):
    """The network's own doubt. It needs no posterior."""

    name = "entropy"

    def __call__(self, latent: Latent) -> Tensor:
        return entropy_of(latent.outputs)


@final
class PosteriorEntropy(Score):
    """The entropy of the prediction that the posterior makes, with one variance for all classes."""

    name = "posterior_entropy"

    def __call__(self, latent: Latent) -> Tensor:
        return entropy_of(softened(latent))
