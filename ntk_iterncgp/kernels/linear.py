"""Kernels of no distance: a linear function of the inputs, and a constant.

    Linear      k(x, z) = Σ_i v_i x_i z_i, that of f(x) = Σ_i w_i x_i with weights w_i ~ N(0, v_i)
    Constant    k(x, z) = c, that of f(x) = b with b ~ N(0, c)

`Linear` is no formula of distances, so products with it, and with sums and products that hold it, take the plain path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from .base import Kernel, Positive, cast_like, positive, written
from .geometry import ActiveDims, active, checked_active_dims


@final
class Linear(Kernel):
    """k = Σ_i variance_i x_i z_i; for a line with an intercept, Linear() + Constant().

    Args:
        variance: Of the weights: a positive number, or one per input dimension.
        active_dims: The coordinates that it depends on; None: all.
    """

    def __init__(self, variance: Positive = 1.0, *, active_dims: ActiveDims = None) -> None:
        self.variance = positive(variance, "variance", per_dimension=True)
        several = len(self.variance) if self.variance.ndim else None
        self.active_dims = checked_active_dims(active_dims, "Linear", several)

    @property
    def input_dimension(self) -> int | None:
        return len(self.variance) if self.variance.ndim and self.active_dims is None else None

    @property
    def least_dimension(self) -> int:
        return 0 if self.active_dims is None else 1 + max(self.active_dims)

    def hyperparameters(self) -> dict[str, Tensor]:
        return {"variance": self.variance}

    def settings(self) -> dict[str, Any]:
        return {"variance": self.variance, "active_dims": self.active_dims}

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        return (active(self.active_dims, X1) * cast_like(self.variance, X1)) @ active(self.active_dims, X2).T

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return (active(self.active_dims, X).square() * cast_like(self.variance, X)).sum(1)

    def __repr__(self) -> str:
        dims = "" if self.active_dims is None else f", active_dims={list(self.active_dims)}"
        return f"Linear(variance={written(self.variance)}{dims})"


@final
class Constant(Kernel):
    """k = value: adds an unknown constant to a function.

    Args:
        value: Its prior variance, a positive number.
    """

    is_of_distance = True
    is_decreasing = True  # it never rises

    def __init__(self, value: float | Tensor = 1.0) -> None:
        self.value = positive(value, "value")

    @property
    def input_dimension(self) -> int | None:
        return None

    def hyperparameters(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def settings(self) -> dict[str, Any]:
        return {"value": self.value}

    def on_distances(self, squared: Callable[[Any], Any], number: Callable[[Tensor], Any]) -> Any:
        return number(self.value)

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        return cast_like(self.value, X1) * X1.new_ones(len(X1), len(X2))

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return cast_like(self.value, X) * X.new_ones(len(X))

    def __repr__(self) -> str:
        return f"Constant({written(self.value)})"
