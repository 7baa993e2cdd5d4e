"""Kernels of the distance between two inputs.

    k(x, z) = outputscale * profile(r^2),    r^2 = sum_i ((x_i - z_i) / lengthscale_i)^2

Each kernel below is its profile: an elementwise function of r^2, written once, for whoever supplies the r^2.
A profile is 1 at 0, so k(x, x) is the outputscale exactly. Two kernels need a hyperparameter more: the rational
quadratic a power in its formula, and the periodic one a period in its distance.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from .base import Kernel, Positive, cast_like, positive, written
from .distance import squared_distances
from .geometry import ActiveDims, Circles, Geometry, checked_active_dims


class Stationary(Kernel):
    """outputscale * profile(r^2). A subclass writes the profile, and says whether it falls as r grows.

    Args:
        lengthscale: a positive number, or one per input dimension (automatic relevance determination).
        outputscale: the variance k(x, x), a positive number.
        active_dims: the coordinates that it depends on, counted from 0; None: all.
    """

    def __init__(
        self,
        lengthscale: Positive = 1.0,
        outputscale: float | Tensor = 1.0,
        *,
        active_dims: ActiveDims = None,
    ) -> None:
        self.lengthscale = positive(lengthscale, "lengthscale", per_dimension=True)
        self.outputscale = positive(outputscale, "outputscale")
        self.active_dims = checked_active_dims(active_dims, type(self).__name__, self._per_dimension)

    @staticmethod
    @abstractmethod
    def profile(squared: Tensor) -> Tensor:
        """The kernel at outputscale 1, elementwise, as a function of the squared scaled distance r^2."""

    @property
    def _per_dimension(self) -> int | None:
        return len(self.lengthscale) if self.lengthscale.ndim else None

    @property
    def input_dimension(self) -> int | None:
        return self._per_dimension if self.active_dims is None else None

    @property
    def least_dimension(self) -> int:
        return 0 if self.active_dims is None else 1 + max(self.active_dims)

    @property
    def geometry(self) -> Geometry:
        """Which distance r² is."""
        return Geometry(self.lengthscale, self.active_dims)

    def hyperparameters(self) -> dict[str, Tensor]:
        return {"lengthscale": self.lengthscale, "outputscale": self.outputscale}

    def settings(self) -> dict[str, Any]:
        return {**self.hyperparameters(), "active_dims": self.active_dims}

    is_of_distance = True

    def on_distances(self, squared: Callable[[Any], Any], number: Callable[[Tensor], Any]) -> Any:
        return number(self.outputscale) * self.profile(squared(self.geometry))

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        def squared(geometry: Geometry) -> Tensor:
            return squared_distances(*geometry.points(X1, X2))

        values: Tensor = self.on_distances(squared, lambda hyperparameter: cast_like(hyperparameter, X1))
        return values

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return cast_like(self.outputscale, X) * X.new_ones(len(X))

    def __repr__(self) -> str:
        shown = [f"{name}={written(value)}" for name, value in self.hyperparameters().items()]
        shown += [] if self.active_dims is None else [f"active_dims={list(self.active_dims)}"]
        return f"{type(self).__name__}({', '.join(shown)})"


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


@final
class RationalQuadratic(Stationary):
    """k = outputscale * (1 + r^2 / (2 alpha))^-alpha: a mixture of RBF kernels of many lengthscales.

    Args:
        lengthscale: a positive number, or one per input dimension.
        outputscale: the variance k(x, x), a positive number.
        alpha: how alike the lengthscales are, a positive number; as it grows the kernel becomes RBF.
        active_dims: the coordinates that it depends on; None: all.
    """

    is_decreasing = True

    def __init__(
        self,
        lengthscale: Positive = 1.0,
        outputscale: float | Tensor = 1.0,
        alpha: float | Tensor = 1.0,
        *,
        active_dims: ActiveDims = None,
    ) -> None:
        super().__init__(lengthscale, outputscale, active_dims=active_dims)
        self.alpha = positive(alpha, "alpha")

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        """At alpha = 1; the formula with any other one is in `on_distances`."""
        return 1 / (1 + squared / 2)

    def hyperparameters(self) -> dict[str, Tensor]:
        return super().hyperparameters() | {"alpha": self.alpha}

    def on_distances(self, squared: Callable[[Any], Any], number: Callable[[Tensor], Any]) -> Any:
        outputscale, alpha = number(self.outputscale), number(self.alpha)
        return outputscale * (-(alpha * (1 + squared(self.geometry) / (2 * alpha)).log())).exp()


@final
class Periodic(Stationary):
    """k = outputscale * exp(-r^2 / 2),  r^2 = sum_i (2 sin(pi (x_i - z_i) / period_i) / lengthscale_i)^2.

    In one dimension that of MacKay, exp(-2 sin^2(pi |x - z| / period) / lengthscale^2); in several a product of them.

    Args:
        lengthscale: a positive number, or one per input dimension.
        outputscale: the variance k(x, x), a positive number.
        period: a positive number, or one per input dimension.
        active_dims: the coordinates that it depends on; None: all.
    """

    def __init__(
        self,
        lengthscale: Positive = 1.0,
        outputscale: float | Tensor = 1.0,
        period: Positive = 1.0,
        *,
        active_dims: ActiveDims = None,
    ) -> None:
        self.period = positive(period, "period", per_dimension=True)
        super().__init__(lengthscale, outputscale, active_dims=active_dims)

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        return (-0.5 * squared).exp()

    @property
    def _per_dimension(self) -> int | None:
        found = {len(value) for value in (self.lengthscale, self.period) if value.ndim}
        if len(found) > 1:
            raise ValueError(
                f"`lengthscale` and `period` must be single numbers or equally many; got {len(self.lengthscale)} and "
                f"{len(self.period)}. Try one of each for every coordinate."
            )
        return found.pop() if found else None

    @property
    def geometry(self) -> Geometry:
        return Circles(self.lengthscale, self.active_dims, self.period)

    def hyperparameters(self) -> dict[str, Tensor]:
        return super().hyperparameters() | {"period": self.period}


def root(squared: Tensor) -> Tensor:
    """The square root with derivative 0 at 0 in place of infinity, which would meet a 0 and become NaN."""
    if not isinstance(squared, Tensor):  # a symbolic expression (KeOps), whose own root has derivative 0 at 0
        return squared.sqrt()
    return squared.clamp_min(torch.finfo(squared.dtype).tiny).sqrt()
