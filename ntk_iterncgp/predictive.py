"""From the latent Gaussian to predictions: E[response(f)], by one of three links, and credible intervals.

probit      closed form where there is one (Gaussian, Poisson), the probit approximation for classification. Cheap;
            for softmax it uses the diagonal of the C×C covariance alone
quadrature  fixed points: Gauss–Hermite for one output, quasi-random for several. Deterministic, uses the whole
            covariance
mc          plain Monte Carlo with the whole covariance
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods import Likelihood, Softmax
from ntk_iterncgp.likelihoods.quadrature import covariance_root, normal_points
from ntk_iterncgp.posterior import standard_normal_quantile

LINKS = ("probit", "quadrature", "mc")


def check_link(link: str) -> None:
    if link not in LINKS:
        raise ValueError(f"link expects one of {', '.join(map(repr, LINKS))}, but got {link!r}.")


def expected_response(
    likelihood: Likelihood,
    mean: Tensor,  # (b, C)
    covariance: Tensor,  # (b, C, C)
    *,
    link: str = "probit",
    num_samples: int = 512,
    generator: torch.Generator | None = None,
) -> Tensor:  # (b, C)
    """E[y] at each input: class probabilities, rates, or means."""
    check_link(link)
    if num_samples < 1:
        raise ValueError(f"num_samples expects a whole number of at least 1, but got {num_samples}.")
    if link == "probit":
        return likelihood.expected_response(mean, covariance.diagonal(dim1=1, dim2=2))
    root = covariance_root(covariance)
    if link == "quadrature":
        points, weights = normal_points(mean.shape[1], num_samples, mean.device)
    else:
        shape = (num_samples, mean.shape[1])
        points = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
        weights = torch.full((num_samples,), 1 / num_samples, dtype=mean.dtype, device=mean.device)
    latent = mean[:, None] + points.to(mean.dtype) @ root.mT  # (b, q, C)
    return torch.einsum("q,bqc->bc", weights.to(mean.dtype), likelihood.response(latent))


def credible_interval(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, *, level: float = 0.95
) -> tuple[Tensor, Tensor]:  # (b, C), (b, C)
    """The central interval of response(f): quantiles pass through a monotone response."""
    check_interval(likelihood, level)
    spread = standard_normal_quantile(level) * variance.sqrt()
    return likelihood.response(mean - spread), likelihood.response(mean + spread)


def check_interval(likelihood: Likelihood, level: float) -> None:
    if isinstance(likelihood, Softmax):
        raise ValueError(
            "Credible intervals expect outputs that respond to one latent function each, but softmax probabilities "
            "depend on all of them. Use sample(x, n_samples) and take quantiles of its softmax."
        )
    if not 0 < level < 1:
        raise ValueError(f"level expects a probability between 0 and 1, but got {level}. Pass for instance 0.95.")
