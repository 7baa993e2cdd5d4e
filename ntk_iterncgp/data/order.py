"""Which batches a loader gives, and in which order: drawn once, so that every sweep sees the same.

All training data are read: `drop_last=True`, which trainers set for the sake of batch statistics, would leave out up to
a batch of them on every sweep. Random augmentation is frozen on the way (`frozen.py`).
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from operator import index
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
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
    get_worker_info,
)

Inputs = Any  # a tensor, or a mapping of tensors and other things
Batches = TypeVar("Batches", bound=Sized)


def slice_rows(x: Inputs, part: slice | Tensor, num_rows: int) -> Inputs:
    """Some rows of a batch; items of a mapping that do not have one entry per datum are passed on whole."""
    if not isinstance(x, Mapping):
        return x[part]
    sliced = {
        key: value[part] if isinstance(value, Tensor) and value.ndim and len(value) == num_rows else value
        for key, value in x.items()
    }
    kind: Any = type(x)
    return kind(sliced)  # a mapping of the same kind: models may read it by attribute


def to_device(x: Inputs, device: torch.device) -> Inputs:
    """The inputs where the model is; as in training, data may come from another device."""
    if isinstance(x, Mapping):
        kind: Any = type(x)
        return kind({key: to_device(value, device) for key, value in x.items()})
    if not isinstance(x, Tensor):
        return x
    if x.is_meta and device.type != "meta":
        raise ValueError(
            f"The data must have values, to be moved to the model's device {device}; got a tensor on the meta device, "
            "which has a shape and no values. Try to load the data on a real device."
        )
    return x.to(device)


def equal(a: Inputs, b: Inputs) -> bool:
    """Whether two batches hold the same numbers, where NaN is the same as NaN; what is no number is not compared."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.shape != b.shape:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return True


SWEEP_KEY = 0
_lock = threading.RLock()  # the generators are those of all threads


class RandomState(NamedTuple):
    """The state of the global generators, and of others."""

    torch: Tensor
    python: Any
    numpy: Any
    own: list[Tensor]

    def is_that_of(self, other: RandomState) -> bool:
        """Whether both states are the same."""
        return (
            torch.equal(self.torch, other.torch)
            and self.python == other.python
            and all(map(np.array_equal, self.numpy, other.numpy))
            and all(map(torch.equal, self.own, other.own))
        )


def random_state(own: Sequence[torch.Generator] = ()) -> RandomState:
    """Return the state of the global random numbers, and of generators of one's own."""
    return RandomState(
        torch.get_rng_state(), random.getstate(), np.random.get_state(), [generator.get_state() for generator in own]
    )


def set_random_state(state: RandomState, own: Sequence[torch.Generator] = ()) -> None:
    """Set the global random numbers, and generators of one's own, to a state of `random_state`."""
    torch.set_rng_state(state.torch)
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    for generator, its_state in zip(own, state.own, strict=True):
        generator.set_state(its_state)


@contextmanager
def undisturbed(own: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Put the random state back afterwards, whatever happens; one thread at a time.

    Not in a worker: its random numbers are nobody's, and it may have been forked while a thread held the lock.
    """
    if get_worker_info() is not None:
        yield
        return
    with _lock:
        before = random_state(own)
        try:
            yield
        finally:
            set_random_state(before, own)


def seed_from(key: int) -> None:
    """Seed the global generators. `torch.manual_seed` would seed those of all devices, which takes 25 times as long."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)


def key_of(*indices: Any) -> int:
    """A seed for some indices of a dataset, of any kind; not by `hash`, which differs between processes."""
    return int.from_bytes(blake2b(repr([_plain(i) for i in indices]).encode(), digest_size=8).digest(), "big") >> 1


def _plain(i: Any) -> Any:
    """The whole number that an index is: samplers also give those of numpy, and tensors."""
    try:
        return index(i)
    except TypeError:
        return i


class Wraps:
    """Stands for a dataset of the user's in a loader."""

    dataset: Any


@dataclass(frozen=True)
class WorkerInit:
    """The user's `worker_init_fn`, to which `get_worker_info().dataset` is the user's own dataset.

    It may open files there, or choose a part of the data.
    """

    function: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Wraps):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self.function is not None:
            self.function(worker_id)


class FrozenReader(Wraps, Dataset[Any]):
    """Batches of a map-style dataset, read and collated with frozen random numbers.

    Args:
        dataset: The user's dataset.
        collate_fn: Makes a batch of a list of items; of one item where the loader does not batch.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self._reads_batches = _reads_batches(dataset)
        self._is_random = False  # of a dataset that reads batches: found on the way

    def __getitem__(self, i: Any) -> Any:
        """An item, where the loader does not batch."""
        with undisturbed():
            return self.collated(self._item(i), key_of(i))

    def __getitems__(self, batch: Sequence[Any]) -> Any:
        """A whole batch, collated."""
        with undisturbed():
            return self.collated(self.items(batch), key_of(*batch))

    def items(self, batch: Sequence[Any]) -> Sequence[Any]:
        """The items of a batch, each with a seed of its own; all at once if the dataset does that and draws nothing."""
        if self._reads_batches and not self._is_random:
            items, self._is_random = self.items_at_once(batch)
            if not self._is_random:
                return items
        return [self._item(i) for i in batch]

    def items_at_once(self, batch: Sequence[Any]) -> tuple[Sequence[Any], bool]:
        """The items as torch's own loader reads them, and whether random numbers were drawn for them."""
        seed_from(key_of(*batch))
        before = random_state()
        items = self.dataset.__getitems__(batch) if self._reads_batches else [self.dataset[i] for i in batch]
        return items, not before.is_that_of(random_state())

    def collated(self, items: Any, key: int) -> Any:
        """A batch of items, or one item where the loader does not batch."""
        seed_from(key)
        return self.collate_fn(items)

    def _item(self, i: Any) -> Any:
        seed_from(key_of(i))
        if not self._reads_batches:
            return self.dataset[i]
        items = self.dataset.__getitems__([i])
        if not isinstance(items, (list, tuple)) or len(items) != 1:
            raise ValueError(
                "`__getitems__` of a dataset with random augmentation must return a list with one item for each index, "
                f"so that each can have a seed of its own; got {type(items).__name__} for one index. Try a "
                "`__getitem__` instead, or a dataset without augmentation."
            )
        return items[0]


def _reads_batches(dataset: Any) -> bool:
    """Whether a dataset has its own way to read several items at once; a `Subset` has that of the whole."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def frozen_sweep(iterable: Iterable[Any], own: Sequence[torch.Generator] = ()) -> Iterator[Any]:
    """One sweep over data that only come in order, with random numbers from a fixed seed: all sweeps are the same.

    Args:
        iterable: A loader or a sequence of batches; torch seeds its workers from the global generator.
        own: Generators of the loader itself, which start each sweep where the caller left them.
    """
    with undisturbed(own):
        seed_from(SWEEP_KEY)
        iterator, state = iter(iterable), random_state(own)
    while True:
        with undisturbed(own):
            set_random_state(state, own)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            state = random_state(own)
        yield batch


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

    @cached_property
    def tensors(self) -> tuple[Sequence[Tensor], Tensor | None] | None:
        """The data, where they are plain tensors, and which rows of them. A subclass may do anything."""
        dataset: Any = self.dataset
        indices: Tensor | None = None
        if not self.is_batched or self.collates_by_itself:
            return None
        if type(dataset) is Subset:
            dataset, indices = dataset.dataset, torch.as_tensor(dataset.indices)
        return (dataset.tensors, indices) if type(dataset) is TensorDataset else None

    def read(self, batches: Any) -> DataLoader[Any] | TensorBatches:
        """Return a re-iterable over these batches, with frozen random numbers."""
        if self.tensors is not None:
            return TensorBatches(*self.tensors, batches)
        init = WorkerInit(self.settings.get("worker_init_fn"))
        settings = self.settings | {"collate_fn": as_it_is, "worker_init_fn": init}
        reader = FrozenReader(self.dataset, self.settings["collate_fn"])
        if not self.is_batched:
            return DataLoader(reader, batch_size=None, sampler=batches, **settings)
        return DataLoader(reader, batch_sampler=batches, **settings)


@dataclass(frozen=True, eq=False)
class FixedBatches:
    """A re-iterable over the batches of a loader, the same on every sweep."""

    iterable: Iterable[Any]
    length: int
    source: MapStyle | None = None

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.iterable, TensorBatches):
            return iter(self.iterable)
        if self.source is None:
            return frozen_sweep(self.iterable, _generators(self.iterable))
        with undisturbed():  # a DataLoader draws a seed for its workers from the caller's random numbers
            seed_from(SWEEP_KEY)
            return iter(self.iterable)


def in_fixed_order(loader: DataLoader[Any] | Iterable[Any]) -> FixedBatches | Sequence[Any]:
    """The batches of a loader, the same on every sweep.

    Args:
        loader: A torch DataLoader, a sequence of batches, or another iterable that gives the same batches each time
            it is walked, as WebDataset's loaders do. Batches that come without a number are counted in a first walk.

    Returns:
        A re-iterable that knows its length: the sequence itself where that is a list or a tuple.
    """
    if not isinstance(loader, DataLoader):
        if not isinstance(loader, Iterable) or isinstance(loader, (Iterator, Tensor, np.ndarray, Mapping, str)):
            raise TypeError(
                f"The training data must be a torch DataLoader, a list of batches, or an iterable that gives the same "
                f"batches each time it is walked, for they are swept several times; got {type(loader).__name__}. "
                "Try list(batches)."
            )
        return _nonempty(loader if isinstance(loader, (list, tuple)) else _counted(loader))
    if isinstance(loader.dataset, IterableDataset) or type(loader).__iter__ is not DataLoader.__iter__:
        return _stream(loader)
    source = map_style(loader)
    return _nonempty(FixedBatches(source.read(source.batches), len(source.batches), source))


def _stream(loader: DataLoader[Any]) -> FixedBatches:
    """Data that only come in order: an IterableDataset, or a loader with an `__iter__` of its own."""
    can_rebuild = type(loader) is DataLoader and not isinstance(loader.dataset, IterDataPipe)
    if loader.drop_last:
        _report_drop_last(loader.dataset, loader.batch_size, _length_of(loader.dataset), is_overruled=can_rebuild)
    if can_rebuild and (loader.drop_last or loader.persistent_workers):  # which are not seeded again for a new sweep
        loader = DataLoader(loader.dataset, batch_size=loader.batch_size, **loader_settings(loader))
    return _nonempty(_counted(loader))


def _counted(batches: Iterable[Any]) -> FixedBatches:
    """With the number of batches, by which costs are estimated: from reading them all where nobody knows it."""
    length = _length_of(batches)
    if length is None:
        length = sum(1 for _ in frozen_sweep(batches, _generators(batches)))
    return FixedBatches(batches, length)


def map_style(loader: DataLoader[Any]) -> MapStyle:
    """Return the dataset of a loader and its batches, drawn once."""
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


def _indices(loader: DataLoader[Any], sampler: Any) -> Sequence[Any]:
    """Return what a sampler gives.

    A plain permutation of the dataset or of a part of it is put in order, so that it is the same in every loader.
    """
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


def _drawn_once(loader: DataLoader[Any], sampler: Iterable[Any]) -> list[Any]:
    """What other samplers give, from a fixed seed or a generator of their own, which is left as it was."""
    with undisturbed(_generators(loader)):
        seed_from(SWEEP_KEY)
        return list(sampler)


def _generators(loader: Any) -> list[torch.Generator]:
    """Those that a loader and its samplers draw from, beside the global ones."""
    holders = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def loader_settings(loader: DataLoader[Any]) -> dict[str, Any]:
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


@dataclass(frozen=True, eq=False)
class TensorBatches:
    """Batches of a TensorDataset, or of a part of one, where there is nothing to load or to draw.

    Tensors are indexed by a whole batch: datum by datum took as long as a third of the forward pass of a small network.
    """

    tensors: Sequence[Tensor]
    indices: Tensor | None  # of the part
    batches: Iterable[list[int]]

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batch in self.batches:
            rows = torch.tensor(batch) if self.indices is None else self.indices[batch]
            yield [tensor[rows.to(tensor.device)] for tensor in self.tensors]


def as_it_is(batch: Any) -> Any:
    """Return the batch as it is: it is collated already."""
    return batch


def _length_of(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _nonempty(batches: Batches) -> Batches:
    if len(batches) == 0:
        raise ValueError("The training data must hold at least one batch; got an empty loader. Try other data.")
    return batches


# --- warnings ----------------------------------------------------------------------------------------------------


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
