"""Fixed points for expectations over a latent Gaussian: deterministic and differentiable.

More than one dimension: scrambled Sobol points, paired with their mirror images so that odd moments vanish. The points
follow a Cholesky factor of the covariance, the largest output first: quasi-random points are spread best over their
first dimensions, and a softmax depends most on its likeliest classes. Unlike eigenvectors, which turn with the last bit
where eigenvalues are nearly equal, the factor is a continuous function of the covariance: so the same input gets the
same prediction in any batch.

One dimension (one output, or two classes): E[h(m + s z)] to about ten digits whatever m and s are. A response such as a
sigmoid changes over a few units of f around zero, the density over a few units of z. Gauss–Hermite points know only the
second scale, and for s = 60 the whole sigmoid falls between two of them. So the line is cut at fixed places of both
scales, and each piece gets a Gauss–Legendre rule: on every piece both factors are smooth.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

DENSITY_CUTS = (-12.0, -8.0, -5.0, -3.0, -1.5, 1.5, 3.0, 5.0, 8.0, 12.0)  # in z; the first and last are the ends
RESPONSE_CUTS = (-36.0, -12.0, -5.0, -2.0, 0.0, 2.0, 5.0, 12.0, 36.0)  # in f; a sigmoid is flat in float64 beyond
LEGENDRE_NODES = 10  # per piece
LINE_POINTS = LEGENDRE_NODES * (len(DENSITY_CUTS) + len(RESPONSE_CUTS) - 1)
MAX_JITTERS = 12  # each ten times the last
JITTER = 1e-10  # of a covariance, relative to its mean variance


def gaussian_points(
    mean: Tensor,  # (b, C)
    covariance: Tensor,  # (b, C, C), or (b, r, r) of the contrasts
    contrasts: Tensor,  # H (C, r), float64
    num_points: int,
) -> tuple[Tensor, Tensor, Tensor]:  # (b, C, r), (b or 1, q, r), (b or 1, q)
    """Points and weights for expectations over f ~ N(mean, covariance) of functions of the contrasts Hᵀf.

    Args:
        mean: the latent means.
        covariance: the latent covariances, or those of the contrasts alone.
        contrasts: an orthonormal basis of what the function depends on, whatever the order of the outputs.
        num_points: how many points, where there is more than one contrast. With one there are `LINE_POINTS`.

    Returns:
        The root R = H L of the covariance of the contrasts, points z and weights w, in the dtype of the mean:
        Σ_i w_i h(mean + R z_i) ≈ E[h(f)].
    """
    spread = contrast_root(mean, covariance, contrasts)
    if contrasts.shape[1] == 1:
        h = contrasts[:, 0].to(mean)
        points, weights = line_points(mean.detach() @ h, spread[..., 0].detach() @ h)
        return spread, points[..., None], weights
    points, weights = normal_points(contrasts.shape[1], num_points, mean.device)
    return spread, points[None].to(mean.dtype), weights[None].to(mean.dtype)


def contrast_root(mean: Tensor, covariance: Tensor, contrasts: Tensor) -> Tensor:  # -> (b, C, r)
    """R with RRᵀ the covariance of H Hᵀf: what is the same for all classes does not change a softmax.

    R = H L for the Cholesky factor L of the contrasts Hᵀf, with the rows of H in the order of the means.

    Args:
        mean: the latent means (b, C).
        covariance: the latent covariances (b, C, C), or (b, r, r) those of Hᵀf.
        contrasts: H (C, r).

    Returns:
        The root, in the dtype of the covariance.
    """
    H = contrasts.to(covariance)
    if H.shape[1] == 1:
        return H @ covariance_root(covariance if covariance.shape[-1] == 1 else H.T @ covariance @ H)
    ranked = H[mean.detach().argsort(dim=1, descending=True, stable=True).argsort(1)]  # (b, C, r)
    change = ranked if covariance.shape[-1] == len(H) else H.T @ ranked
    return ranked @ covariance_root(change.mT @ covariance @ change)


def line_points(mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:  # (b,), (b,) -> (b, q), (b, q)
    """Points z and weights with Σ w_i h(m + s z_i) ≈ E[h(m + s z)], z ~ N(0, 1), for each m and s ≥ 0."""
    nodes, node_weights = (
        torch.as_tensor(values, dtype=torch.float64, device=mean.device)
        for values in np.polynomial.legendre.leggauss(LEGENDRE_NODES)
    )
    density_cuts = nodes.new_tensor(DENSITY_CUTS).expand(len(mean), -1)
    scale = deviation.double().clamp_min(1e-300)[:, None]
    response_cuts = (nodes.new_tensor(RESPONSE_CUTS) - mean.double()[:, None]) / scale
    response_cuts = response_cuts.clamp(DENSITY_CUTS[0], DENSITY_CUTS[-1])
    cuts = torch.cat([density_cuts, response_cuts], 1).sort(1).values
    half, centre = cuts.diff(dim=1) / 2, (cuts[:, 1:] + cuts[:, :-1]) / 2  # (b, pieces)
    z = (centre[..., None] + half[..., None] * nodes).flatten(1)
    weights = (half[..., None] * node_weights).flatten(1) * (-0.5 * z.square()).exp()
    return z.to(mean.dtype), (weights / weights.sum(1, keepdim=True)).to(mean.dtype)


def normal_points(num_outputs: int, num_points: int, device: torch.device) -> tuple[Tensor, Tensor]:  # (q, C), (q,)
    """Points and weights with Σ w_i h(z_i) ≈ E[h(z)], z ~ N(0, I)."""
    half = SobolEngine(num_outputs, scramble=True, seed=0).draw(max(1, num_points // 2), dtype=torch.float64).to(device)
    points = torch.special.ndtri(half.clamp(1e-12, 1 - 1e-12))
    points = torch.cat([points, -points])
    return points, torch.full((len(points),), 1 / len(points), dtype=torch.float64, device=device)


def covariance_root(covariance: Tensor) -> Tensor:  # (..., C, C)
    """The Cholesky factor, for positive semidefinite matrices too: in float64, with as little added as it takes."""
    if covariance.shape[-1] == 1:
        return covariance.clamp_min(1e-300 if covariance.dtype == torch.float64 else 1e-36).sqrt()
    wide = covariance.double()
    size = wide.diagonal(dim1=-2, dim2=-1).detach().mean(-1)[..., None, None].clamp_min(1e-30)
    eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    jitter = JITTER * size
    root: Tensor
    for _ in range(MAX_JITTERS):  # a variance that is nearly all removed may come out negative in rounding
        root, info = torch.linalg.cholesky_ex(wide + jitter * eye)
        if not bool(info.any()):
            return root.to(covariance.dtype)
        jitter = torch.where(info[..., None, None] > 0, 10 * jitter, jitter)
    raise ArithmeticError("Expected a covariance that is positive semidefinite up to rounding, but it is not.")


def standard_normal_quantile(level: float) -> float:
    """z with P(|Z| ≤ z) = level."""
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
