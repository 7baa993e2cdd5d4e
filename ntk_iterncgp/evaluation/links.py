"""From latent moments to class probabilities, for every method alike.

accurate   fixed quasi-random points with the whole C×C covariance
probit     the variances alone, in closed form; beside the accurate one in every table
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.likelihoods.quadrature import covariance_root, normal_points
from ntk_iterncgp.predictive import expected_response

LINKS = ("accurate", "probit")
CHUNK_BYTES = 64 * 2**20  # latent values at the fixed points


def class_probabilities(mean: Tensor, covariance: Tensor, *, link: str, num_samples: int) -> Tensor:  # (b, C)
    """E[softmax(f)] for f ~ N(mean (b, C), covariance (b, C, C)); rows add up to one."""
    method = {"accurate": "quadrature", "probit": "probit"}[link]
    likelihood, parts = Softmax(mean.shape[1]), []
    for m, c in _chunks(mean, covariance, num_samples):
        parts.append(expected_response(likelihood, m, c, link=method, num_samples=num_samples))
    probabilities = torch.cat(parts).clamp_min(0)
    return probabilities / probabilities.sum(1, keepdim=True)


def mutual_information(mean: Tensor, covariance: Tensor, *, num_samples: int) -> Tensor:  # (b,)
    """Entropy of the expected probabilities less the expected entropy: the doubt that more data would remove."""
    points, weights = normal_points(mean.shape[1], num_samples, mean.device)
    parts = []
    for m, c in _chunks(mean, covariance, num_samples):
        latent = m[:, None] + points.to(m.dtype) @ covariance_root(c).mT  # (b, q, C)
        log_p = latent.log_softmax(2)
        within = -torch.einsum("q,bqc->b", weights.to(m.dtype), log_p.exp() * log_p)
        parts.append(entropy(torch.einsum("q,bqc->bc", weights.to(m.dtype), log_p.exp())) - within)
    return torch.cat(parts).clamp_min(0)


def entropy(probabilities: Tensor) -> Tensor:  # (b, C) -> (b,)
    return -torch.xlogy(probabilities, probabilities).sum(1)


def _chunks(mean: Tensor, covariance: Tensor, num_samples: int) -> zip[tuple[Tensor, Tensor]]:
    size = max(1, CHUNK_BYTES // (8 * num_samples * mean.shape[1]))
    return zip(mean.split(size), covariance.split(size), strict=True)
