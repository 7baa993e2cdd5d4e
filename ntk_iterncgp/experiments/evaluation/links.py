"""From latent moments to class probabilities, for every method alike.

quadrature   fixed points with the whole C×C covariance
probit       the variances alone, in closed form; beside the other one in every table
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.posterior.predictive import classification_uncertainty, expected_response

LINKS = ("quadrature", "probit")


def class_probabilities(mean: Tensor, covariance: Tensor, *, link: str, num_samples: int) -> Tensor:  # (b, C)
    """E[softmax(f)] for f ~ N(mean (b, C), covariance (b, C, C)); rows add up to one."""
    found = expected_response(Softmax(mean.shape[1]), mean, covariance, link=link, num_samples=num_samples)
    probabilities = found.clamp_min(0)
    return probabilities / probabilities.sum(1, keepdim=True)


def mutual_information(mean: Tensor, covariance: Tensor, *, num_samples: int) -> Tensor:  # (b,)
    """The doubt that more data would remove."""
    return classification_uncertainty(mean, covariance, num_samples=num_samples).epistemic


def entropy(probabilities: Tensor) -> Tensor:  # (b, C) -> (b,)
    """Return −Σ p log p of each row."""
    return -torch.xlogy(probabilities, probabilities).sum(1)
