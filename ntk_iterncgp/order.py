"""Which batches a loader gives, and in which order: drawn once, so that every sweep sees the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)


class FixedBatches:
    """A re-iterable over a loader's batches: those drawn from its sampler once."""

    def __init__(self, iterable: Iterable[Any], length: int, drawn: list[Any] | None = None) -> None:
        self._iterable, self._length, self.drawn = iterable, length, drawn

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        state = torch.get_rng_state()  # a DataLoader draws a seed for its workers from the caller's random numbers
        iterator = iter(self._iterable)
        torch.set_rng_state(state)
        return iterator


def in_fixed_order(loader: DataLoader | Sequence[Any]) -> Any:
    if not isinstance(loader, DataLoader):
        if not isinstance(loader, Sequence):
            raise TypeError(
                f"The training data are expected as a torch DataLoader or a list of batches, since they are swept "
                f"several times, but got {type(loader).__name__}."
            )
        return _nonempty(loader, len(loader))
    if isinstance(loader.dataset, IterableDataset):
        try:
            length = len(loader)
        except TypeError:
            raise ValueError(
                "An IterableDataset is expected to know its length, so that costs can be told and rows be numbered, "
                "but this one does not. Give it a __len__, or use a map-style dataset."
            ) from None
        return _nonempty(FixedBatches(loader, length), length)
    batched, settings = loader.batch_sampler, _loader_settings(loader)
    if type(batched) is BatchSampler and isinstance(batched.sampler, SequentialSampler):
        holds_tensors = type(loader) is DataLoader and _tensors_of(loader.dataset) is not None
        fixed = reading(loader.dataset, batched, settings) if holds_tensors else loader
        return _nonempty(FixedBatches(fixed, len(loader)), len(loader))
    drawn = _drawn_once(loader)
    if batched is None:
        fixed = DataLoader(loader.dataset, batch_size=None, sampler=drawn, **settings)
    else:
        fixed = reading(loader.dataset, drawn, settings)
    return _nonempty(FixedBatches(fixed, len(drawn), drawn), len(drawn))


def reading(dataset: Any, batches: Any, settings: dict[str, Any]) -> DataLoader:
    """A loader of these batches, each a list of indices. Tensors are indexed by a whole batch: datum by datum took as
    long as a third of the forward pass of a small network."""
    tensors = _tensors_of(dataset) if settings["collate_fn"] is default_collate else None
    if tensors is not None:
        dataset, settings = tensors, settings | {"collate_fn": _as_it_is}
    return DataLoader(dataset, batch_sampler=batches, **settings)


class TensorsAtOnce(Dataset):
    """The items of a TensorDataset, or of a part of one, a batch at a time."""

    def __init__(self, tensors: Sequence[Tensor], indices: Tensor | None) -> None:
        self._tensors, self._indices = tensors, indices

    def __getitems__(self, batch: list[int]) -> list[Tensor]:
        rows = torch.tensor(batch) if self._indices is None else self._indices[batch]
        return [tensor[rows.to(tensor.device)] for tensor in self._tensors]


def _tensors_of(dataset: Any) -> TensorsAtOnce | None:
    """None for what may do more than index: a subclass may do anything."""
    if type(dataset) is TensorDataset:
        return TensorsAtOnce(dataset.tensors, None)
    if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
        return TensorsAtOnce(dataset.dataset.tensors, torch.as_tensor(dataset.indices))
    return None


def _as_it_is(batch: Any) -> Any:
    return batch


def _loader_settings(loader: DataLoader) -> dict[str, Any]:
    return dict(
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


class RandomAccess(NamedTuple):
    """A dataset, the index of each row in it, and how to load from it."""

    dataset: Any
    indices: Sequence[int]
    settings: dict[str, Any]
    batch_size: int


def random_access(loader: Any, batches: Any) -> RandomAccess | None:
    """None for data that only come in order."""
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or type(loader.batch_sampler) is not BatchSampler
    ):
        return None
    drawn = batches.drawn
    if drawn is None:  # in the order of the dataset
        sampler = loader.batch_sampler
        size = len(loader.dataset)  # type: ignore[arg-type]
        indices: Sequence[int] = range(size - size % sampler.batch_size if sampler.drop_last else size)
    else:
        indices = [index for batch in drawn for index in batch]
    return RandomAccess(loader.dataset, indices, _loader_settings(loader), loader.batch_sampler.batch_size)


def _drawn_once(loader: DataLoader) -> list[Any]:
    """The indices of each batch. A plain permutation of the data set or of a part is put in order, so that it is the
    same in every loader; other samplers are drawn from once, with the random state of the caller left as it was."""
    batched = loader.batch_sampler
    sampler = batched.sampler if type(batched) is BatchSampler else loader.sampler
    indices = _permuted(sampler)
    if indices is not None and type(batched) is BatchSampler and not batched.drop_last:
        return [list(indices[i : i + batched.batch_size]) for i in range(0, len(indices), batched.batch_size)]
    with torch.random.fork_rng(devices=[]):
        return list(sampler) if batched is None else [list(batch) for batch in batched]


def _permuted(sampler: Any) -> Sequence[int] | None:
    """What a sampler only changes the order of."""
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(sampler.indices)
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        return range(sampler.num_samples) if sampler.num_samples == len(sampler.data_source) else None
    return None


def _nonempty(batches: Any, length: int) -> Any:
    if length == 0:
        raise ValueError("The training data are expected to hold at least one batch, but the loader is empty.")
    return batches
