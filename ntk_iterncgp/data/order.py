"""Which batches a loader gives, and in which order: drawn once, so that every sweep sees the same.

All training data are read: `drop_last=True`, which trainers set for the sake of batch statistics, would leave out up to
a batch of them on every sweep. Random augmentation is frozen on the way (`frozen.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from ntk_iterncgp.data.augmentation import SWEEP_KEY, FrozenReader, WorkerInit, frozen_sweep, seed_from, undisturbed


class TrainingDataWarning(UserWarning):
    """The data are not read quite as their loader says: a random draw is frozen, or `drop_last` is overruled."""


@dataclass(frozen=True, eq=False)
class MapStyle:
    """A map-style dataset, how to load from it, and which batches."""

    dataset: Any
    settings: dict[str, Any]  # of a DataLoader
    batches: Any  # lists of indices; single indices where the loader does not batch
    batch_size: int = 1
    indices: Sequence[Any] = ()  # of all rows, where other batches can be made of them
    is_batched: bool = True

    @property
    def collates_by_itself(self) -> bool:
        """With a collate_fn of the user's own, which may do anything to a batch."""
        return self.is_batched and self.settings["collate_fn"] is not default_collate

    @property
    def tensors(self) -> TensorsAtOnce | None:
        """The data, where they are plain tensors: then nothing about them is random."""
        return _tensors_of(self.dataset) if self.is_batched and not self.collates_by_itself else None

    def read(self, batches: Any) -> DataLoader:
        """A loader of these batches, with frozen random numbers. Tensors are indexed by a whole batch: datum by datum
        took as long as a third of the forward pass of a small network."""
        init = WorkerInit(self.settings.get("worker_init_fn"))
        settings = self.settings | {"collate_fn": as_it_is, "worker_init_fn": init}
        reader = self.tensors or FrozenReader(self.dataset, self.settings["collate_fn"])
        if not self.is_batched:
            return DataLoader(reader, batch_size=None, sampler=batches, **settings)
        return DataLoader(reader, batch_sampler=batches, **settings)


class FixedBatches:
    """A re-iterable over the batches of a loader, the same on every sweep."""

    def __init__(self, iterable: Iterable[Any], length: int, source: MapStyle | None = None) -> None:
        self.iterable, self._length, self.source = iterable, length, source

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if self.source is None:
            return frozen_sweep(self.iterable, _generators(self.iterable))
        with undisturbed():  # a DataLoader draws a seed for its workers from the caller's random numbers
            seed_from(SWEEP_KEY)
            return iter(self.iterable)


def in_fixed_order(loader: DataLoader | Sequence[Any]) -> FixedBatches | Sequence[Any]:
    """The batches of a loader, the same on every sweep.

    Args:
        loader: A torch DataLoader, or a sequence of batches.

    Returns:
        A re-iterable that knows its length: the sequence itself where that is a list or a tuple.
    """
    if not isinstance(loader, DataLoader):
        if not isinstance(loader, Sequence):
            raise TypeError(
                f"The training data are expected as a torch DataLoader or a list of batches, since they are swept "
                f"several times, but got {type(loader).__name__}."
            )
        return _nonempty(loader if isinstance(loader, (list, tuple)) else FixedBatches(loader, len(loader)))
    if isinstance(loader.dataset, IterableDataset) or type(loader).__iter__ is not DataLoader.__iter__:
        return _stream(loader)
    source = map_style(loader)
    return _nonempty(FixedBatches(source.read(source.batches), len(source.batches), source))


def _stream(loader: DataLoader) -> FixedBatches:
    """Data that only come in order: an IterableDataset, or a loader with an `__iter__` of its own."""
    can_rebuild = type(loader) is DataLoader and not isinstance(loader.dataset, IterDataPipe)
    if loader.drop_last:
        _report_drop_last(loader.dataset, loader.batch_size, _length_of(loader.dataset), is_overruled=can_rebuild)
    if can_rebuild and (loader.drop_last or loader.persistent_workers):  # which are not seeded again for a new sweep
        loader = DataLoader(loader.dataset, batch_size=loader.batch_size, **loader_settings(loader))
    length = _length_of(loader)
    if length is None:
        raise ValueError(
            "An IterableDataset is expected to know its length, so that costs can be told and rows be numbered, "
            "but this one does not. Give it a __len__, or use a map-style dataset."
        )
    return _nonempty(FixedBatches(loader, length))


def map_style(loader: DataLoader) -> MapStyle:
    batched, settings = loader.batch_sampler, loader_settings(loader)
    if batched is None:
        return MapStyle(loader.dataset, settings, _indices(loader, loader.sampler), is_batched=False)
    if type(batched) is BatchSampler:
        indices, size = _indices(loader, batched.sampler), batched.batch_size
        if batched.drop_last:
            _report_drop_last(loader.dataset, size, len(indices), is_overruled=True)
        return MapStyle(loader.dataset, settings, BatchSampler(indices, size, drop_last=False), size, indices)
    if getattr(batched, "drop_last", False):
        _report_drop_last(loader.dataset, None, None, is_overruled=False)
    return MapStyle(loader.dataset, settings, [list(batch) for batch in _drawn_once(loader, batched)])


def _indices(loader: DataLoader, sampler: Any) -> Sequence[Any]:
    """What a sampler gives. A plain permutation of the dataset or of a part of it is put in order, so that it is the
    same in every loader."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(sampler.indices)
    if (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return range(sampler.num_samples)
    return _drawn_once(loader, sampler)


def _drawn_once(loader: DataLoader, sampler: Iterable[Any]) -> list[Any]:
    """What other samplers give, from a fixed seed or a generator of their own, which is left as it was."""
    with undisturbed(_generators(loader)):
        seed_from(SWEEP_KEY)
        return list(sampler)


def _generators(loader: Any) -> list[torch.Generator]:
    """Those that a loader and its samplers draw from, beside the global ones."""
    holders = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def loader_settings(loader: DataLoader) -> dict[str, Any]:
    """Workers do not persist: each loader made here is for one purpose, and a sweep starts from their seeds."""
    return dict(
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )


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


def as_it_is(batch: Any) -> Any:
    return batch


def _length_of(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _nonempty(batches: Any) -> Any:
    if len(batches) == 0:
        raise ValueError("The training data are expected to hold at least one batch, but the loader is empty.")
    return batches


# --- what the user is told ----------------------------------------------------------------------------------------


def _report_drop_last(dataset: Any, batch_size: int | None, num_data: int | None, *, is_overruled: bool) -> None:
    """Unless no datum would be left out."""
    left_out = "the last data"
    if num_data is not None and batch_size is not None:
        if num_data % batch_size == 0:
            return
        left_out = f"{num_data % batch_size} of {num_data} data"
    if is_overruled:
        message = (
            f"`drop_last=True` would leave {left_out} out of the posterior; it is overruled, and all data are used. "
            "Try drop_last=False, or a Subset to leave data out on purpose."
        )
    else:
        message = f"`drop_last=True` leaves {left_out} out of the posterior. Try drop_last=False."
    warn_once(dataset, message)


_warned: dict[str, WeakValueDictionary[int, Any]] = {}


def warn_once(dataset: Any, message: str) -> None:
    """A warning about a dataset, the first time only. By its identity, since a dataset need not be hashable."""
    known = _warned.setdefault(message, WeakValueDictionary())
    if known.get(id(dataset)) is dataset:
        return
    warnings.warn(message, TrainingDataWarning, stacklevel=3)
    with suppress(TypeError):  # of a list, which has no weak references
        known[id(dataset)] = dataset
