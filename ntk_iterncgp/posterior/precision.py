"""The precision of the weights' posterior as a linear operator, Σ_θ⁻¹ = Λ + A (τR + D)⁻¹ Aᵀ, which is never formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_iterncgp.linalg.factor import Factor


@dataclass(frozen=True, eq=False)
class PosteriorPrecision:
    """Products with Σ_θ⁻¹ in float64, at the cost of two with A."""

    prior: Tensor  # the diagonal of Λ (P,)
    images: Tensor  # A (P, B)
    noise: Factor  # of τR + D
    log_ratio: Tensor  # log|Σ_θ⁻¹| − log|Λ|

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P)."""
        return len(self.prior), len(self.prior)

    def __repr__(self) -> str:
        return f"PosteriorPrecision({len(self.prior)} weights, {self.images.shape[1]} actions)"

    def __matmul__(self, weights: Tensor) -> Tensor:  # (P,) or (P, k)
        columns = (weights if weights.ndim == 2 else weights[:, None]).double()
        dtype = torch.promote_types(self.images.dtype, torch.float32)  # A may be stored in half precision
        seen = (self.images.T.to(dtype) @ columns.to(dtype)).double()  # (B, k)
        of_data = (self.images.to(dtype) @ self.noise.solve(seen).to(dtype)).double()
        product = self.prior[:, None] * columns + of_data
        return product if weights.ndim == 2 else product[:, 0]

    def diagonal(self) -> Tensor:  # (P,)
        """Λ_ii and what the data add."""
        half = self.noise.half_solve(self.images.T.double())  # (B, P)
        return self.prior + half.square().sum(0)

    def logdet(self) -> Tensor:
        """The log-determinant."""
        return self.prior.log().sum() + self.log_ratio

    def to_dense(self) -> Tensor:  # (P, P)
        """Write it out, for few weights."""
        return self @ torch.eye(len(self.prior), dtype=torch.float64, device=self.prior.device)
