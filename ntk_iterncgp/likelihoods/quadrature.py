"""Fixed points of a standard normal, so that expectations over a latent Gaussian are deterministic and differentiable.

One dimension: Gauss–Hermite. More: scrambled Sobol points, paired with their mirror images so that odd moments vanish.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

GAUSS_HERMITE_NODES = 64
MAX_JITTERS = 12  # each ten times the last
_JITTER = {torch.float64: 1e-10, torch.float32: 1e-5}


def normal_points(num_outputs: int, num_points: int, device: torch.device) -> tuple[Tensor, Tensor]:  # (q, C), (q,)
    """Points and weights with Σ w_i h(z_i) ≈ E[h(z)], z ~ N(0, I)."""
    if num_outputs == 1:
        nodes, weights = np.polynomial.hermite_e.hermegauss(GAUSS_HERMITE_NODES)
        points = torch.as_tensor(nodes, device=device)[:, None]
        return points, torch.as_tensor(weights / math.sqrt(2 * math.pi), device=device)
    half = SobolEngine(num_outputs, scramble=True, seed=0).draw(max(1, num_points // 2), dtype=torch.float64).to(device)
    points = torch.special.ndtri(half.clamp(1e-12, 1 - 1e-12))
    points = torch.cat([points, -points])
    return points, torch.full((len(points),), 1 / len(points), dtype=torch.float64, device=device)


def covariance_root(covariance: Tensor) -> Tensor:  # (..., C, C)
    """R with RRᵀ = covariance, for positive semidefinite matrices too.

    The directions of most variance come first, where quasi-random points are spread best: with ten outputs this takes
    half as many points for the same error. Where a gradient is asked for it is a Cholesky factor, since eigenvectors
    of equal eigenvalues have none.
    """
    if covariance.requires_grad:
        size = covariance.diagonal(dim1=-2, dim2=-1).detach().mean(-1)[..., None, None].clamp_min(1e-30)
        eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        jitter = _JITTER[covariance.dtype] * size
        for _ in range(MAX_JITTERS):  # a variance that is nearly all removed may come out negative in rounding
            lower, info = torch.linalg.cholesky_ex(covariance + jitter * eye)
            if not bool(info.any()):
                return lower
            jitter = torch.where(info[..., None, None] > 0, 10 * jitter, jitter)
        raise ArithmeticError("Expected a covariance that is positive semidefinite up to rounding, but it is not.")
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp_min(0).sqrt()[..., None, :]).flip(-1)
