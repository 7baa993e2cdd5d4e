"""Kernels of the distance between two inputs.

    k(x, z) = outputscale * profile(r^2),    r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2

Each kernel below is its profile: an elementwise function of r^2, written once, for whoever supplies the r^2.
A profile is 1 at 0, so k(x, x) is the outputscale exactly.
"""

from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from .base import Kernel, Positive, cast_like, positive, written
from .distance import squared_distances


class Stationary(Kernel):
    """outputscale * profile(r^2). A subclass writes the profile.

    Args:
        lengthscale: a positive number, or one per input dimension.
        outputscale: the variance k(x, x), a positive number.
    """

    def __init__(self, lengthscale: Positive = 1.0, outputscale: float | Tensor = 1.0) -> None:
        self.lengthscale = positive(lengthscale, "lengthscale", per_dimension=True)
        self.outputscale = positive(outputscale, "outputscale")

    @staticmethod
    @abstractmethod
    def profile(squared: Tensor) -> Tensor:
        """The kernel at outputscale 1, elementwise, as a function of the squared scaled distance r^2."""

    @property
    def input_dimension(self) -> int | None:
        return len(self.lengthscale) if self.lengthscale.ndim else None

    def hyperparameters(self) -> dict[str, Tensor]:
        return {"lengthscale": self.lengthscale, "outputscale": self.outputscale}

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        # Centring changes no distance, and the division then rounds numbers the size of the spread, not of the offset.
        centre = X2.detach().mean(0)
        lengthscale = cast_like(self.lengthscale, X1)
        squared = squared_distances((X1 - centre) / lengthscale, (X2 - centre) / lengthscale)
        return cast_like(self.outputscale, X1) * self.profile(squared)

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return cast_like(self.outputscale, X) * X.new_ones(len(X))

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}(lengthscale={written(self.lengthscale)}, outputscale={written(self.outputscale)})"


@final
class RBF(Stationary):
    """k = outputscale * exp(-r^2 / 2)."""

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        return (-0.5 * squared).exp()


@final
class Matern12(Stationary):
    """k = outputscale * exp(-r)."""

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        return (-root(squared)).exp()


@final
class Matern32(Stationary):
    """k = outputscale * (1 + s) exp(-s),  s = sqrt(3) r."""

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        s = root(3 * squared)
        return (1 + s) * (-s).exp()


@final
class Matern52(Stationary):
    """k = outputscale * (1 + s + s^2 / 3) exp(-s),  s = sqrt(5) r."""

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        s = root(5 * squared)
        return (1 + s + s * s / 3) * (-s).exp()


def root(squared: Tensor) -> Tensor:
    """The square root with derivative 0 at 0 in place of infinity, which would meet a 0 and become NaN."""
    if not isinstance(squared, Tensor):  # a symbolic expression (KeOps), whose own root has derivative 0 at 0
        return squared.sqrt()
    return squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()
