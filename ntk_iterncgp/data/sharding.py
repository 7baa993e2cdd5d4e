"""Every K-th datum: a part of the training data for one of K machines that never talk.

Rows k, k + K, k + 2K, … of the fixed order: the parts are disjoint, are all of the data together, differ in size by at
most one datum, and each is as mixed as the whole where the data come sorted by class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from ntk_iterncgp.data.order import MapStyle, loader_settings, map_style, slice_rows


def shard_of(loader: DataLoader[Any] | Sequence[Any], shard: tuple[int, int]) -> Any:
    """One part of the training data.

    Args:
        loader: A DataLoader of a map-style dataset, or a list of batches.
        shard: (k, K), the k-th of K parts, counted from 1.

    Returns:
        A loader of this part with the settings of the whole, or a list of batches.

    Raises:
        ValueError: for other numbers, for data that only come in order, and for a part without data.
    """
    number, total = checked_shard(shard)
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset) or type(loader).__iter__ is not DataLoader.__iter__:
            raise ValueError(
                "`shard` must be of data that can be visited in any order; got a stream. Try a stream of this part "
                "of the data, without shard."
            )
        part: Any = _part_of(loader, map_style(loader), slice(number - 1, None, total))
    elif isinstance(loader, (list, tuple)):
        part = _part_of_batches(loader, number - 1, total)
    else:
        raise TypeError(f"`shard` must be of a DataLoader or a list of batches; got {type(loader).__name__}.")
    if not len(part):
        raise ValueError(f"`shard` must hold data; got part {number} of {total} of fewer data. Try fewer parts.")
    return part


def checked_shard(shard: Any) -> tuple[int, int]:
    """(k, K) with 1 ≤ k ≤ K."""
    is_pair = isinstance(shard, (tuple, list)) and len(shard) == 2 and all(type(part) is int for part in shard)
    if not is_pair or not 1 <= shard[0] <= shard[1]:
        raise ValueError(f"`shard` must be (k, K) with 1 ≤ k ≤ K; got {shard!r}. Try (1, 4), (2, 4), … on 4 machines.")
    return shard[0], shard[1]


def _part_of(loader: DataLoader[Any], source: MapStyle, part: slice) -> DataLoader[Any]:
    settings = loader_settings(loader)
    if not source.is_batched:
        return DataLoader(loader.dataset, batch_size=None, sampler=list(source.batches)[part], **settings)
    if not source.indices:  # a batch sampler of the user's own: whole batches
        return DataLoader(loader.dataset, batch_sampler=source.batches[part], **settings)
    chosen, dataset = list(source.indices[part]), loader.dataset
    if type(dataset) is Subset:  # not a subset of a subset: of tensors they are read a batch at a time
        chosen, dataset = [dataset.indices[i] for i in chosen], dataset.dataset
    return DataLoader(Subset(dataset, chosen), source.batch_size, **settings)


def _part_of_batches(batches: Sequence[Any], first: int, step: int) -> list[Any]:
    """The rows of each batch that belong to the part, numbered through all batches."""
    found, start = [], 0
    for batch in batches:
        size = _num_rows(batch)
        rows = slice((first - start) % step, None, step)
        if rows.start < size:
            sliced = (
                slice_rows(batch, rows, size)
                if isinstance(batch, Mapping)
                else type(batch)(slice_rows(_with_rows(item), rows, size) for item in batch)
            )
            found.append(sliced)
        start += size
    return found


def _num_rows(batch: Any) -> int:
    """Of the targets of (x, y), or of the first tensor with rows of a mapping."""
    values = batch.values() if isinstance(batch, Mapping) else reversed(list(batch))
    sizes = [len(value) for value in values if isinstance(value, Tensor) and value.ndim]
    if not sizes:
        raise ValueError("`shard` must be of batches (x, y) or mappings of tensors; got others. Try a DataLoader.")
    return sizes[0]


def _with_rows(item: Any) -> Any:
    return item if isinstance(item, (Tensor, Mapping)) else torch.as_tensor(item)
