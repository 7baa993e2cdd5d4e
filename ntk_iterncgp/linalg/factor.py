"""Solves with the small matrix M = SᵀKS + SᵀW⁺S, in float64.

Departure from the paper's eigendecomposition, and from a cut of small eigenvalues: M is scaled to a unit diagonal
(Jacobi) and Cholesky-factored, which is some twenty times cheaper. Rounding is paid for like any other missing
computation, with more noise: what it amounts to is added to the diagonal of SᵀW⁺S, and the variance can then only come
out larger.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Factor:
    """The Cholesky factor of a positive definite B×B matrix, scaled to a unit diagonal."""

    def __init__(self, matrix: Tensor) -> None:  # (B, B)
        self.scale = matrix.diagonal().clamp_min(torch.finfo(matrix.dtype).tiny).rsqrt()
        scaled = matrix * self.scale[:, None] * self.scale
        eye, jitter = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device), 0.0
        self.lower, info = torch.linalg.cholesky_ex(scaled)
        while int(info) != 0:  # not positive definite in rounding: more noise, until it is
            jitter = max(10 * jitter, 1e-15)
            if jitter > 1:
                raise ArithmeticError("Expected small matrices with finite entries, but they hold NaN or infinity.")
            self.lower, info = torch.linalg.cholesky_ex(scaled + jitter * eye)

    def half_solve(self, block: Tensor) -> Tensor:  # (B, k)
        """H with HᵀH = VᵀM⁻¹V."""
        return torch.linalg.solve_triangular(self.lower, self.scale[:, None] * block, upper=False)

    def solve(self, block: Tensor) -> Tensor:  # (B, k)
        """M⁻¹V."""
        return self.scale[:, None] * torch.cholesky_solve(self.scale[:, None] * block, self.lower)

    def root(self) -> Tensor:  # (B, B)
        """A₀ with A₀A₀ᵀ = M⁻¹."""
        eye = torch.eye(len(self.lower), dtype=self.lower.dtype, device=self.lower.device)
        return self.scale[:, None] * torch.linalg.solve_triangular(self.lower.T, eye, upper=True)

    @property
    def log_determinant(self) -> float:
        return float(2 * (self.lower.diagonal().log() - self.scale.log()).sum())


def rounding_noise(gram: Tensor, noise_gram: Tensor, dtype: torch.dtype) -> float:
    """The noise that stands for the rounding error of images held in `dtype` and of sums taken in float64."""
    if gram.numel() == 0:
        return 0.0
    image_error = torch.finfo(dtype).eps * float(torch.linalg.matrix_norm(gram, torch.inf))
    return image_error + torch.finfo(torch.float64).eps * float(torch.linalg.matrix_norm(noise_gram, torch.inf))
