"""Random augmentation, frozen: the draw of datum i depends on i alone.

Each datum has its rows in the Jacobian J, and K = J Λ⁻¹ Jᵀ is only a matrix if every sweep sees the same data. So the
three global generators that augmentation draws from (torch's on the CPU, numpy's and Python's) are seeded from i before
datum i is read, and put back afterwards: the result is the same in every worker, batch, order and process, and the
caller's random numbers stay their own. A `collate_fn` is seeded from the indices of its batch, and a stream, which has
no indices, at the start of each sweep.

Seeding takes 12 µs for each datum, and putting back 0.2 ms for each batch. What draws from a generator of its own
cannot be frozen; `repeatability.py` finds that out.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, get_worker_info

SWEEP_KEY = 0
_lock = threading.RLock()  # the generators are those of all threads


class RandomState(NamedTuple):
    """The state of the global generators, and of others."""

    torch: Tensor
    python: Any
    numpy: Any
    own: list[Tensor]

    def is_that_of(self, other: RandomState) -> bool:
        return (
            torch.equal(self.torch, other.torch)
            and self.python == other.python
            and all(map(np.array_equal, self.numpy, other.numpy))
            and all(map(torch.equal, self.own, other.own))
        )


def random_state(own: Sequence[torch.Generator] = ()) -> RandomState:
    return RandomState(
        torch.get_rng_state(), random.getstate(), np.random.get_state(), [generator.get_state() for generator in own]
    )


def set_random_state(state: RandomState, own: Sequence[torch.Generator] = ()) -> None:
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
    """The user's `worker_init_fn`, to which `get_worker_info().dataset` is the user's own dataset: it may open files
    there, or choose a part of the data."""

    function: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Wraps):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self.function is not None:
            self.function(worker_id)


class FrozenReader(Wraps, Dataset):
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
