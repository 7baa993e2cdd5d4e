"""Tiles for many coordinates: distances from one matrix product, made safe where it cancels.

    r² = |x|² + |z|² − 2 x·z

errs by a few roundings of the norms, e. That does no harm where the kernel is flat, but near r = 0 a Matern-1/2 takes
the square root of it. So before the first tile the formula itself is asked how close two points must be for an error
e in r² to change the kernel by more than a tolerance (`reach`); pairs that come out closer than that are computed again
from their differences, and a tile with many of them is computed again in float64. The product runs in the dtype of the
data: float32 stays float32, at twice the speed, and the result is still accurate to 1e-5.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import Kernel
from .distance import GATHERED_ENTRIES, squared_distances
from .formula import Formula
from .tiles import Engine, Index

ROUNDINGS = 4.0  # e is about this many units of the last place of |x|² + |z|²
TOLERANCE = {torch.float32: 3e-6, torch.float64: 2e-13}  # of the kernel's value at distance 0
FEW_PAIRS = 1 / 128  # the fraction of a tile beyond which doing it again in float64 is cheaper than pair by pair


class Norms(NamedTuple):
    """Points and their squared norms."""

    points: Tensor  # (a, d)
    norms: Tensor  # (a,)


class ExpandedDistances:
    """r² for one geometry of a formula, tile by tile."""

    def __init__(self, formula: Formula, place: int, X1: Tensor, X2: Tensor) -> None:
        self.X1, self.X2 = X1, X2
        self.norms1 = X1.square().sum(1)
        self.norms2 = self.norms1 if X2 is X1 else X2.square().sum(1)
        size = float(self.norms1.max()) + float(self.norms2.max())
        error = ROUNDINGS * torch.finfo(X1.dtype).eps * size
        self.reach = reach(formula, place, error, TOLERANCE[X1.dtype])

    def rows(self, index: Index) -> Norms:
        """Some points of X1."""
        return Norms(self.X1[index], self.norms1[index])

    def columns(self, index: Index) -> Norms:
        """Some points of X2."""
        return Norms(self.X2[index], self.norms2[index])

    def tile(self, rows: Norms, columns: Norms) -> Tensor:  # (a, b)
        """r² of all pairs; close ones from differences, since the expansion cancels there."""
        x, z = rows.points, columns.points
        squared = torch.addmm(columns.norms, x, z.T, alpha=-2).add_(rows.norms[:, None])
        close = squared <= self.reach
        count = int(close.count_nonzero())
        if count > FEW_PAIRS * squared.numel() + sum(squared.shape):
            return squared_distances(x, z)
        if count:
            for pairs in close.nonzero().split(1 + GATHERED_ENTRIES // x.shape[1]):
                i, j = pairs.unbind(1)
                squared[i, j] = (x[i] - z[j]).square_().sum(1)
        return squared


class GemmEngine(Engine):
    """Tiles from expanded distances, with the formula in eager PyTorch."""

    cpu_tile_bytes = 2**20  # a matrix product likes larger tiles than a formula does

    def __init__(self, kernel: Kernel, X1: Tensor, X2: Tensor) -> None:
        self.formula = Formula.of(kernel)
        self.numbers = self.formula.numbers_like(X1)
        points = self.formula.points(X1, X2)
        self.distances = [ExpandedDistances(self.formula, i, *pair) for i, pair in enumerate(points)]

    def rows(self, index: Index) -> list[Norms]:
        return [distances.rows(index) for distances in self.distances]

    def columns(self, index: Index) -> list[Norms]:
        return [distances.columns(index) for distances in self.distances]

    def tile(self, rows: list[Norms], columns: list[Norms]) -> Tensor:
        squared = [d.tile(x, z) for d, x, z in zip(self.distances, rows, columns, strict=True)]
        values: Tensor = self.formula.evaluate(squared, self.numbers)
        return values


def reach(formula: Formula, place: int, error: float, tolerance: float) -> float:
    """The largest r² at which an error in it changes the kernel by more than the tolerance, a fraction of k(x, x).

    At least the error itself, so that no r² stays negative.
    """
    grid = torch.logspace(-14, 6, 801, dtype=torch.float64)  # steps of 6 %

    def value(squared: Tensor) -> Tensor:
        others = [torch.zeros_like(squared) for _ in formula.geometries]
        others[place] = squared
        values: Tensor = formula.evaluate(others, [number.cpu() for number in formula.numbers])
        return values

    change = (value((grid - error).clamp_min(0)) - value(grid + error)).abs()
    sensitive = grid[change > tolerance * value(torch.zeros_like(grid)).abs()]
    return error + (1.06 * float(sensitive.max()) if len(sensitive) else 0.0)
