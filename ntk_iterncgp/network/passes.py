"""One pass over the data: the sums that it fills in, and the order in which it goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ntk_iterncgp.data import FixedOrderData, Inputs, slice_rows

PADDING = 8


@dataclass(eq=False)
class Pass:
    """One partition of the data, with q directions for each datum: q·B actions. Filled in place while data are swept.

    The directions are scaled so that each action has unit noise, sᵀW⁺s = 1: a group of decided data then does not
    vanish beside the others in rounding.
    """

    labels: Tensor  # the group of each datum (N,)
    directions: Tensor  # u (q, N, C), float64
    images: Tensor  # A (q·B, P)
    swept: Tensor  # which data are in A already (N,)
    checksums: Tensor  # A h for a fixed h, summed on the way (q·B,), float64: what A is compared with in the end
    by_group: bool = False  # the data are visited group by group
    num_kept: int | None = None  # how many combinations of the groups' actions are kept; None: each of them by itself

    SUMS: ClassVar[tuple[str, ...]] = ("images", "checksums")
    """What is summed over data. Of several processes each has its own part of it while a sweep goes on."""

    @property
    def num_groups(self) -> int:
        return len(self.images) // len(self.directions)

    @property
    def is_complete(self) -> bool:
        return bool(self.swept.all())

    def counted(self) -> Tensor:  # (N,)
        """Which data are in the posterior. Where they come group by group, those of whole groups: an unfinished sum may
        say more about some input than the finished one, and the variance shall only fall."""
        if not self.by_group:
            return self.swept
        unfinished = torch.zeros(self.num_groups, dtype=torch.bool, device=self.swept.device)
        unfinished[self.labels[~self.swept]] = True
        return ~unfinished[self.labels]

    def add(self, rows: Tensor, gradients: Tensor, h: Tensor) -> None:
        """Put the gradients of some data, (r, q, P), or (q, P) summed over one group, where they belong."""
        images = self.images.view(len(self.directions), self.num_groups, -1)
        checksums = self.checksums.view(len(self.directions), -1)
        if gradients.ndim == 2:
            images[:, self.labels[rows[0]]] += gradients
            checksums[:, self.labels[rows[0]]] += gradients @ h
        else:
            images.index_add_(1, self.labels[rows], gradients.transpose(0, 1))
            checksums.index_add_(1, self.labels[rows], (gradients @ h).T.double())
        self.swept[rows] = True


def checksum_vector(images: Tensor) -> Tensor:  # (q·B, P) -> (P,)
    """The h of the checksums: the same random numbers for every pass over the same weights."""
    drawn = torch.randn(images.shape[1], generator=torch.Generator().manual_seed(0))
    return drawn.to(images)


def group_batches(labels: Tensor, missing: Tensor, batch_size: int) -> list[Tensor]:
    """The rows that are missing, group by group: a group in as few batches as it takes, of nearly the same size."""
    rows = missing.nonzero()[:, 0]
    rows = rows[labels[rows].argsort(stable=True)]
    sizes = torch.bincount(labels[rows]).tolist() if len(rows) else []
    groups = [whole for whole in rows.split(sizes) if len(whole)]
    return [part for whole in groups for part in whole.tensor_split(-(-len(whole) // batch_size))]


def padded(rows: Tensor, batch_size: int) -> Tensor:
    """Filled up with copies to a multiple of `PADDING`: convolutions are prepared anew for every size of a batch."""
    size = max(len(rows), min(batch_size, -(-len(rows) // PADDING) * PADDING))
    return torch.cat([rows, rows[:1].expand(size - len(rows))])


def missing_rows(data: FixedOrderData, swept: Tensor) -> Iterator[tuple[Tensor, Inputs]]:
    """The rows not swept yet, in the order in which they come."""
    start = 0
    for x, _ in data.batches():
        size = data.num_rows(x)
        here = (~swept[start : start + size]).nonzero()[:, 0]
        if len(here):
            yield start + here, slice_rows(x, here, size)
        start += size
