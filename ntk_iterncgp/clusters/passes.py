"""One pass over the data: the sums that it fills in, and the order in which it goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ntk_iterncgp.data.fixed_order import FixedOrderData, Inputs, slice_rows

PADDING = 8


@dataclass(eq=False)
class Pass:
    """Groups of data, with q directions for each: q·B actions. Filled in place while data are swept.

    A datum may be in it several times, each time with another direction and maybe in another group, or not at all.
    The directions are scaled so that each action has unit noise, sᵀW⁺s = 1: a group of decided data then does not
    vanish beside the others in rounding.
    """

    rows: Tensor  # which data these are, in ascending order (m,)
    labels: Tensor  # the group of each (m,)
    directions: Tensor  # u (q, m, C), float64
    images: Tensor  # A (q·B, P)
    swept: Tensor  # which are in A already (m,)
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

    def counted(self) -> Tensor:  # (m,)
        """Which are in the posterior. Where they come group by group, those of whole groups: an unfinished sum may say
        more about some input than the finished one, and the variance shall only fall."""
        if not self.by_group:
            return self.swept
        unfinished = torch.zeros(self.num_groups, dtype=torch.bool, device=self.swept.device)
        unfinished[self.labels[~self.swept]] = True
        return ~unfinished[self.labels]

    def add(self, items: Tensor, gradients: Tensor, h: Tensor) -> None:
        """Put the gradients of some of them, (r, q, P), or (q, P) summed over one group, where they belong."""
        images = self.images.view(len(self.directions), self.num_groups, -1)
        checksums = self.checksums.view(len(self.directions), -1)
        if gradients.ndim == 2:
            images[:, self.labels[items[0]]] += gradients
            checksums[:, self.labels[items[0]]] += gradients @ h
        else:
            images.index_add_(1, self.labels[items], gradients.transpose(0, 1))
            checksums.index_add_(1, self.labels[items], (gradients @ h).T.double())
        self.swept[items] = True


def epochs_of(num_items: int, number: int, num_data: int) -> float:
    """A forward pass and a backward pass for each of `number` directions, which is twice as much."""
    return num_items * (1 + 2 * number) / (3 * num_data)


def same_datum(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:  # (m,), (m',) -> (k,), (k,)
    """All pairs of places at which two ascending lists of rows have the same datum."""
    first, last = torch.searchsorted(right, left), torch.searchsorted(right, left, right=True)
    times = last - first
    i = torch.arange(len(left), device=left.device).repeat_interleave(times)
    within = torch.arange(len(i), device=left.device) - (times.cumsum(0) - times)[i]
    return i, first[i] + within


def checksum_vector(images: Tensor) -> Tensor:  # (q·B, P) -> (P,)
    """The h of the checksums: the same random numbers for every pass over the same weights."""
    drawn = torch.randn(images.shape[1], generator=torch.Generator().manual_seed(0))
    return drawn.to(images)


def group_batches(labels: Tensor, missing: Tensor, batch_size: int) -> list[Tensor]:
    """The items that are missing, group by group: a group in as few batches as it takes, of nearly the same size."""
    items = missing.nonzero()[:, 0]
    items = items[labels[items].argsort(stable=True)]
    sizes = torch.bincount(labels[items]).tolist() if len(items) else []
    groups = [whole for whole in items.split(sizes) if len(whole)]
    return [part for whole in groups for part in whole.tensor_split(-(-len(whole) // batch_size))]


def padded(items: Tensor, batch_size: int) -> Tensor:
    """Filled up with copies to one of a few sizes: convolutions are prepared anew for every size of a batch."""
    return torch.cat([items, items[:1].expand(padded_size(len(items), batch_size) - len(items))])


def padded_size(size: int, batch_size: int) -> int:
    """A power of two up to `PADDING`, then its multiples: a group of one datum does not cost as much as eight."""
    whole = -(-size // PADDING) * PADDING if size > PADDING else 2 ** (size - 1).bit_length()
    return max(size, min(batch_size, whole))


def missing_items(data: FixedOrderData, rows: Tensor, swept: Tensor) -> Iterator[tuple[Tensor, Inputs]]:
    """Those not swept yet, with their inputs, in the order in which the data come."""
    start = 0
    for x, _ in data.batches():
        size = data.num_rows(x)
        here = ((rows >= start) & (rows < start + size) & ~swept).nonzero()[:, 0]
        if len(here):
            yield here, slice_rows(x, rows[here] - start, size)
        start += size
