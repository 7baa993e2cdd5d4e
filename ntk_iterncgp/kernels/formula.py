"""The formula of a kernel of distances, apart from its points and hyperparameters.

`Formula.of(kernel)` lists the lengthscales and the other hyperparameters in the order in which the formula asks for
them; `evaluate` then runs it on any r² and any numbers given in that order: tensors, nodes of a graph, KeOps' symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import Kernel, cast_like
from .stationary import scaled_points


@dataclass(frozen=True, eq=False)
class Formula:
    """`num_distances` scaled distances and the numbers that the formula puts around them."""

    kernel: Kernel
    lengthscales: list[Tensor]
    numbers: list[Tensor]

    @classmethod
    def of(cls, kernel: Kernel) -> Formula:
        """Record which distances and numbers the formula of a kernel asks for."""
        lengthscales: list[Tensor] = []
        numbers: list[Tensor] = []

        def squared(lengthscale: Tensor) -> Tensor:
            lengthscales.append(lengthscale.detach())
            return torch.zeros((), dtype=torch.float64)

        def number(hyperparameter: Tensor) -> Tensor:
            numbers.append(hyperparameter.detach())
            return hyperparameter.detach()

        kernel.on_distances(squared, number)
        return cls(kernel, lengthscales, numbers)

    def evaluate(self, squared: Iterable[Any], numbers: Iterable[Any]) -> Any:
        """The formula at one r² for each lengthscale."""
        next_squared, next_number = iter(squared), iter(numbers)
        return self.kernel.on_distances(lambda _: next(next_squared), lambda _: next(next_number))

    def points(self, X1: Tensor, X2: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Both sets of points in units of each lengthscale; the very same tensor twice where X1 is X2."""
        return [scaled_points(lengthscale, X1, X2) for lengthscale in self.lengthscales]

    def numbers_like(self, X: Tensor) -> list[Tensor]:
        """The numbers in the dtype and on the device of X."""
        return [cast_like(number, X) for number in self.numbers]

    def at(self, squared: Callable[[Tensor], Tensor]) -> Tensor:
        """In float64, given a function from lengthscale to r²."""
        distances = [squared(lengthscale) for lengthscale in self.lengthscales]
        values: Tensor = self.evaluate(distances, [number.to(distances[0].device) for number in self.numbers])
        return values
