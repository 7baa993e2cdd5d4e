"""The formula of a kernel of distances, apart from its points and hyperparameters.

`Formula.of(kernel)` lists the geometries of its distances and the other hyperparameters in the order in which the
formula asks for them; `evaluate` then runs it on any r² and any numbers given in that order: tensors, nodes of a graph,
KeOps' symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import Kernel, cast_like
from .geometry import Geometry


@dataclass(frozen=True, eq=False)
class Formula:
    """Some distances and the numbers that the formula puts around them."""

    kernel: Kernel
    geometries: list[Geometry]
    numbers: list[Tensor]

    @classmethod
    def of(cls, kernel: Kernel) -> Formula:
        """Record which distances and numbers the formula of a kernel asks for."""
        geometries: list[Geometry] = []
        numbers: list[Tensor] = []

        def squared(geometry: Geometry) -> Tensor:
            geometries.append(geometry.detached())
            return torch.zeros((), dtype=torch.float64)

        def number(hyperparameter: Tensor) -> Tensor:
            numbers.append(hyperparameter.detach())
            return hyperparameter.detach()

        kernel.on_distances(squared, number)
        return cls(kernel, geometries, numbers)

    def evaluate(self, squared: Iterable[Any], numbers: Iterable[Any]) -> Any:
        """The formula at one r² for each geometry."""
        next_squared, next_number = iter(squared), iter(numbers)
        return self.kernel.on_distances(lambda _: next(next_squared), lambda _: next(next_number))

    def points(self, X1: Tensor, X2: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Both sets of points as each geometry maps them; the very same tensor twice where X1 is X2."""
        return [geometry.points(X1, X2) for geometry in self.geometries]

    def numbers_like(self, X: Tensor) -> list[Tensor]:
        """The numbers in the dtype and on the device of X."""
        return [cast_like(number, X) for number in self.numbers]

    def at(self, squared: Callable[[Geometry], Tensor]) -> Tensor:
        """In float64, given a function from geometry to r²."""
        distances = [squared(geometry) for geometry in self.geometries]
        values: Tensor = self.evaluate(distances, [number.to(distances[0].device) for number in self.numbers])
        return values
