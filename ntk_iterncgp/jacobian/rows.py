"""The network at some inputs: its outputs, and products with the rows J(x) of its Jacobian there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Contrasts = Tensor | Callable[[Tensor], Tensor]
"""Combinations of the outputs: H (C, r), the same at all inputs; (b, C, r), each input its own; or a function that
makes one of these of the outputs (b, C), so that contrasts may follow from the forward pass that is made anyway."""

SLICE_ENTRIES = 2**18  # of J at once, where a product with it is needed only to be summed


class Rows(ABC):
    """The network at b inputs: its outputs, and products with the rows J(x) of its Jacobian."""

    outputs: Tensor  # f(x; θ*) (b, C)

    @abstractmethod
    def written_out(self) -> Tensor:  # (b, C, P)
        """The rows themselves."""

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> Rows:
        """The same rows in another dtype, for products that are summed in it."""

    @abstractmethod
    def times(self, weights: Tensor) -> Tensor:  # (P, k) -> (b, C, k)
        """J(x) V, in float64."""

    @abstractmethod
    def covariance(self, variance: Tensor, *, joint: bool = False) -> Tensor:  # (P,)
        """J(x) diag(variance) J(x)ᵀ in float64: (b, C, C), or (b·C, b·C) if joint."""

    def products(self, weights: Tensor, variance: Tensor, *, joint: bool = False) -> tuple[Tensor, Tensor]:
        """`times` and `covariance` together, in the dtype of the weights: rows that are not kept are computed once."""
        rows = self.in_dtype(weights.dtype)
        return rows.times(weights), rows.covariance(variance, joint=joint)

    def by_layer(self, weights: Tensor, sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield J_l V_l (b, C, k) and J_l J_lᵀ (b, C, C) for each parameter tensor, in the dtype of the weights.

        Here from all rows, with zeros.
        """
        start = 0
        for size in sizes:
            only = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
            only[start : start + size] = 1
            yield self.products(only.to(weights.dtype)[:, None] * weights, only)
            start += size

    @abstractmethod
    def curvature_diagonal(self, curvature: Callable[[Tensor], Tensor]) -> Tensor:  # (P,)
        """The diagonal of Σ_n J_nᵀ W_n J_n, for products with W (b, C, k) -> (b, C, k) given by `curvature`."""


class DenseRows(Rows):
    """Rows that are written out, J (b, C, P)."""

    def __init__(self, outputs: Tensor, jacobian: Tensor) -> None:
        self.outputs, self.jacobian = outputs, jacobian

    def written_out(self) -> Tensor:
        return self.jacobian

    def in_dtype(self, dtype: torch.dtype) -> DenseRows:
        return DenseRows(self.outputs, self.jacobian.to(dtype))

    def times(self, weights: Tensor) -> Tensor:
        return (self.jacobian @ weights.to(self.jacobian.dtype)).double()

    def covariance(self, variance: Tensor, *, joint: bool = False) -> Tensor:
        one = variance.numel() == 1  # for all weights: no second copy of J
        scaled = self.jacobian if one else self.jacobian * variance.sqrt().to(self.jacobian.dtype)
        if joint:
            scaled = scaled.flatten(0, 1)
        product = (scaled @ scaled.mT).double()
        return product * variance.double() if one else product

    def by_layer(self, weights: Tensor, sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        for rows, part in zip(self.jacobian.to(weights.dtype).split(sizes, 2), weights.split(sizes), strict=True):
            yield (rows @ part).double(), (rows @ rows.mT).double()

    def curvature_diagonal(self, curvature: Callable[[Tensor], Tensor]) -> Tensor:
        return diagonal(self.jacobian, curvature_blocks(curvature, self.outputs.shape, self.jacobian)).double()


def contrasts_at(contrasts: Contrasts | None, outputs: Tensor) -> Tensor:  # (b, C) -> (C, r) or (b, C, r)
    """The contrasts at these outputs, in their dtype; of all outputs alone where none are given."""
    b, C = outputs.shape
    if contrasts is None:
        return torch.eye(C, dtype=outputs.dtype, device=outputs.device)
    found = contrasts if isinstance(contrasts, Tensor) else contrasts(outputs.detach())
    if found.ndim not in (2, 3) or found.shape[-2] != C or (found.ndim == 3 and len(found) != b):
        raise ValueError(
            f"`contrasts` must have shape ({C}, k), or ({b}, {C}, k) for each input its own; got "
            f"{tuple(found.shape)}. Try one row for each of the {C} outputs."
        )
    return found.to(outputs)


def contrasts_of(contrasts: Contrasts | None, part: slice) -> Contrasts | None:
    """The contrasts at some of the inputs."""
    return contrasts[part] if isinstance(contrasts, Tensor) and contrasts.ndim == 3 else contrasts


def curvature_blocks(curvature: Callable[[Tensor], Tensor], shape: torch.Size, like: Tensor) -> Tensor:  # (b, C, C)
    """W_n of each datum."""
    b, C = shape
    return curvature(torch.eye(C, dtype=torch.float64, device=like.device).expand(b, C, C)).to(like.dtype)


def diagonal(jacobian: Tensor, weight: Tensor) -> Tensor:  # (b, C, P), (b, C, C) -> (P,)
    """The diagonal of Σ_n J_nᵀ W_n J_n, a slice of weights at a time."""
    b, C, _ = jacobian.shape
    parts = jacobian.split(1 + SLICE_ENTRIES // max(1, b * C), 2)
    return torch.cat([((weight @ part) * part).sum((0, 1)) for part in parts])
