"""Kernels of the distance between two inputs.

    k(x, z) = outputscale * profile(r^2),    r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2

Each kernel below is its profile: an elementwise function of r^2, written once, for whoever supplies the r^2.
A profile is 1 at 0, so k(x, x) is the outputscale exactly.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from .base import Kernel, Positive, cast_like, positive, written
from .distance import squared_distances


class Stationary(Kernel):
    """outputscale * profile(r^2). A subclass writes the profile, and says whether it falls as r grows.

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

    is_of_distance = True

    def on_distances(self, squared: Callable[[Tensor], Any], number: Callable[[Tensor], Any]) -> Any:
        return number(self.outputscale) * self.profile(squared(self.lengthscale))

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        def squared(lengthscale: Tensor) -> Tensor:
            return squared_distances(*scaled_points(lengthscale, X1, X2))

        values: Tensor = self.on_distances(squared, lambda hyperparameter: cast_like(hyperparameter, X1))
        return values

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return cast_like(self.outputscale, X) * X.new_ones(len(X))

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}(lengthscale={written(self.lengthscale)}, outputscale={written(self.outputscale)})"


@final
class RBF(Stationary):
    """k = outputscale * exp(-r^2 / 2)."""

    is_decreasing = True

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        return (-0.5 * squared).exp()


@final
class Matern12(Stationary):
    """k = outputscale * exp(-r)."""

    is_decreasing = True

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        return (-root(squared)).exp()


@final
class Matern32(Stationary):
    """k = outputscale * (1 + s) exp(-s),  s = sqrt(3) r."""

    is_decreasing = True

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        s = root(3 * squared)
        return (1 + s) * (-s).exp()


@final
class Matern52(Stationary):
    """k = outputscale * (1 + s + s^2 / 3) exp(-s),  s = sqrt(5) r."""

    is_decreasing = True

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        s = root(5 * squared)
        return (1 + s + s * s / 3) * (-s).exp()


def scaled_points(lengthscale: Tensor, X1: Tensor, X2: Tensor) -> tuple[Tensor, Tensor]:
    """Both sets of points in units of the lengthscale.

    Centring changes no distance, and the division then rounds numbers the size of the spread, not of the offset.
    """
    centre, scale = X2.detach().mean(0), cast_like(lengthscale, X1)
    first = (X1 - centre) / scale
    return first, first if X1 is X2 else (X2 - centre) / scale


def root(squared: Tensor) -> Tensor:
    """The square root with derivative 0 at 0 in place of infinity, which would meet a 0 and become NaN."""
    if not isinstance(squared, Tensor):  # a symbolic expression (KeOps), whose own root has derivative 0 at 0
        return squared.sqrt()
    return squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()
