"""Which squared distance a kernel of distances is a function of.

    Scaled      r² = Σ_i ((x_i − z_i) / ℓ_i)²
    Periodic    r² = Σ_i (2 sin(π (x_i − z_i) / p_i) / ℓ_i)², that of two points on circles of radius 1 / ℓ_i

over all coordinates, or the active ones. Either is the Euclidean distance of mapped points, so whoever knows how to
compute distances needs nothing but the map: `points`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import cast_like

ActiveDims = Sequence[int] | None


@dataclass(frozen=True, eq=False)
class Geometry:
    """Euclidean distances of points in units of `lengthscale`, of the coordinates `active_dims` (None: all)."""

    lengthscale: Tensor
    active_dims: tuple[int, ...] | None = None

    def detached(self) -> Geometry:
        """The same without a graph of autograd."""
        return Geometry(self.lengthscale.detach(), self.active_dims)

    def points(self, X1: Tensor, X2: Tensor) -> tuple[Tensor, Tensor]:
        """Both sets of points in units of the lengthscale; the very same tensor twice where X1 is X2.

        Centring changes no distance, and the division then rounds numbers the size of the spread, not of the offset.
        """
        first, second = self._centred(X1, X2)
        scale = cast_like(self.lengthscale, X1)
        mapped = first / scale
        return mapped, mapped if second is first else second / scale

    def spread(self, X1: Tensor, X2: Tensor) -> float:
        """How large the numbers are that are rounded when points are mapped."""
        return max(float(torch.linalg.vector_norm(x, dim=1).max()) for x in self.points(X1, X2))

    def gap(self, lower1: Tensor, upper1: Tensor, lower2: Tensor, upper2: Tensor) -> Tensor:  # (a, d), …, (b, d)
        """A lower bound on r² between the points of boxes, (a, b)."""
        every = range(lower1.shape[1]) if self.active_dims is None else self.active_dims
        scale = self.lengthscale.to(lower1.device).expand(len(every))
        total = lower1.new_zeros(len(lower1), len(lower2))
        for place, c in enumerate(every):
            gap = torch.maximum(lower1[:, None, c] - upper2[:, c], lower2[:, c] - upper1[:, None, c])
            total += (gap.clamp_min(0) / scale[place]).square()
        return total

    def _centred(self, X1: Tensor, X2: Tensor) -> tuple[Tensor, Tensor]:
        first, second = active(self.active_dims, X1), active(self.active_dims, X2)
        centre = second.detach().mean(0)
        shifted = first - centre
        return shifted, shifted if X1 is X2 else second - centre


@dataclass(frozen=True, eq=False)
class Circles(Geometry):
    """Distances of points on circles, one for each coordinate: two points a period apart coincide."""

    period: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))

    def detached(self) -> Circles:
        return Circles(self.lengthscale.detach(), self.active_dims, self.period.detach())

    def points(self, X1: Tensor, X2: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self._centred(X1, X2)
        mapped = self._on_circles(first)
        return mapped, mapped if second is first else self._on_circles(second)

    def spread(self, X1: Tensor, X2: Tensor) -> float:
        period, scale = cast_like(self.period, X1), cast_like(self.lengthscale, X1)
        angles = (2 * math.pi * x / (period * scale) for x in self._centred(X1, X2))
        return max(float(torch.linalg.vector_norm(x, dim=1).max()) for x in angles)

    def gap(self, lower1: Tensor, upper1: Tensor, lower2: Tensor, upper2: Tensor) -> Tensor:
        """Points of far boxes may coincide."""
        return lower1.new_zeros(len(lower1), len(lower2))

    def _on_circles(self, centred: Tensor) -> Tensor:  # (a, d) -> (a, 2d)
        turns = centred / cast_like(self.period, centred)
        angle = 2 * math.pi * (turns - turns.detach().round())
        scale = cast_like(self.lengthscale, centred).expand(centred.shape[1])
        return torch.cat([angle.cos() / scale, angle.sin() / scale], 1)


def active(active_dims: tuple[int, ...] | None, X: Tensor) -> Tensor:
    """The coordinates that a kernel depends on; X itself where these are all."""
    return X if active_dims is None else X[:, list(active_dims)]


def checked_active_dims(active_dims: ActiveDims, name: str, num_scales: int | None) -> tuple[int, ...] | None:
    """Distinct numbers of coordinates, as many as there are lengthscales where these are several; None for all."""
    if active_dims is None:
        return None
    given = active_dims.tolist() if isinstance(active_dims, Tensor) else active_dims
    if isinstance(given, (str, int, float)) or not all(
        isinstance(c, int) and not isinstance(c, bool) and c >= 0 for c in given
    ):
        raise TypeError(
            f"`active_dims` of {name} must be a list of coordinates, counted from 0; got {active_dims!r}. "
            "Try active_dims=[0]."
        )
    found = tuple(given)
    if not found or len(set(found)) < len(found):
        raise ValueError(
            f"`active_dims` of {name} must be one or more different coordinates; got {list(found)}. "
            "Try active_dims=None for all."
        )
    if num_scales is not None and num_scales != len(found):
        raise ValueError(
            f"`active_dims` of {name} must be as many as its per-dimension hyperparameters, {num_scales}; got "
            f"{len(found)}. Try a single number for all."
        )
    return found
