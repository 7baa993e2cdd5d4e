"""Which tiles of a local kernel's matrix need not be made at all.

Both sets of points are sorted by a k-d tree into leaves of neighbouring points, each with its bounding box. The
distance between two boxes is a lower bound on every distance between their points, so for a kernel that falls with
distance the formula at that distance is an upper bound on the whole tile: where it is below `tolerance` times k(x, x)
the tile is left out. Every entry is then right to that tolerance, and a symmetric matrix stays symmetric, since the
distance between two boxes does not depend on their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .formula import Formula
from .geometry import Geometry
from .tiles import WHOLE, Engine, Part, listed_product

LEAF_SIZE = (
    64  # on the paper's mixture, 30 000 points: 3.4 times as fast as all tiles; 2.8 with 128 or 256, 2.9 with 32
)
MAX_LEAVES = 2048  # their pairs are held
TILE_ENTRIES = 2**19


@dataclass(frozen=True, eq=False)
class Leaves:
    """Points sorted so that neighbours lie together: leaf l holds order[bounds[l] : bounds[l + 1]]."""

    order: Tensor  # (N,)
    bounds: list[int]
    lower: Tensor  # (leaves, d), float64
    upper: Tensor  # (leaves, d), float64

    @classmethod
    def of(cls, X: Tensor, leaf_size: int = LEAF_SIZE) -> Leaves:  # (N, d)
        """Halve at the median of the widest coordinate until at most `leaf_size` points are left."""
        leaf_size = max(leaf_size, 2 * len(X) // MAX_LEAVES)  # a leaf is at least half full
        leaves: list[Tensor] = []
        stack = [torch.arange(len(X), device=X.device)]
        while stack:
            members = stack.pop()
            if len(members) <= leaf_size:
                leaves.append(members)
                continue
            points = X[members]
            widest = int((points.amax(0) - points.amin(0)).argmax())
            members = members[points[:, widest].argsort(stable=True)]
            stack += [members[len(members) // 2 :], members[: len(members) // 2]]
        sizes = torch.tensor([0] + [len(leaf) for leaf in leaves])
        boxes = [(X[leaf].amin(0), X[leaf].amax(0)) for leaf in leaves]
        lower, upper = (torch.stack(side).double() for side in zip(*boxes, strict=True))
        return cls(torch.cat(leaves), sizes.cumsum(0).tolist(), lower, upper)

    def __len__(self) -> int:
        return len(self.lower)

    @property
    def slices(self) -> list[slice]:
        """The rows of each leaf."""
        return [slice(*pair) for pair in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def sizes(self) -> Tensor:  # (leaves,), float64
        """How many points each leaf has."""
        return torch.tensor(self.bounds, device=self.lower.device).diff().double()


@dataclass(frozen=True, eq=False)
class Pattern:
    """The pairs of leaves whose tile is made."""

    rows: Leaves
    columns: Leaves
    keep: Tensor  # (row leaves, column leaves), bool
    left_out: float = 0.0  # the largest sum of a row or column of the entries that are not: no less than their norm

    @classmethod
    def of(cls, formula: Formula, X1: Tensor, X2: Tensor, tolerance: float) -> Pattern:
        """Find the pairs of leaves that are near enough to matter."""
        rows = Leaves.of(X1)
        columns = rows if X1 is X2 else Leaves.of(X2)

        def squared(geometry: Geometry) -> Tensor:  # between boxes
            return geometry.gap(rows.lower, rows.upper, columns.lower, columns.upper)

        bound = formula.at(squared)
        largest = formula.at(lambda geometry: torch.zeros((), dtype=torch.float64, device=bound.device))
        keep = bound > tolerance * largest
        rest = torch.where(keep, 0.0, bound)
        left_out = max(float((rest @ columns.sizes).max()), float((rows.sizes @ rest).max()))
        return cls(rows, columns, keep, left_out)

    @property
    def fraction(self) -> float:
        """The fraction of all pairs of points that is left."""
        pairs = self.rows.sizes @ self.keep.double() @ self.columns.sizes
        return float(pairs) / max(1, self.rows.bounds[-1] * self.columns.bounds[-1])

    def of_rows(self, part: Part) -> Pattern:
        """With some of the leaves of rows alone. Every K-th: neighbours have as many partners as each other."""
        keep = torch.zeros_like(self.keep)
        keep[part.number :: part.of] = self.keep[part.number :: part.of]
        return replace(self, keep=keep)

    def product(self, engine: Engine, V: Tensor, *, symmetric: bool, chunk_bytes: int, part: Part = WHOLE) -> Tensor:
        """k(X1, X2) @ V with an engine for the sorted points."""
        every = torch.arange(self.columns.bounds[-1], device=V.device)
        ranges = [every[s] for s in self.columns.slices]
        partners, num_own = [], []
        for i, row in enumerate(self.keep.cpu()):
            others = row.nonzero()[:, 0].tolist()
            if symmetric:  # the leaf itself first, then those after it
                others = [i] + [j for j in others if j > i]
            partners.append(torch.cat([ranges[j] for j in others]) if others else every[:0])
            num_own.append(len(ranges[i]) if symmetric else -1)
        tile_entries = min(TILE_ENTRIES, chunk_bytes // (engine.live_tiles * V.element_size()))
        sorted_result = listed_product(
            engine,
            self.rows.slices,
            partners,
            V[self.columns.order],
            num_own,
            tile_columns=max(1, tile_entries // int(self.rows.sizes.max())),
            part=part,
        )
        result = torch.empty_like(sorted_result)
        result[self.rows.order] = sorted_result
        return result
