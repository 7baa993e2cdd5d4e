"""Whether a dataset and its `collate_fn` are random, and whether that can be frozen: by reading the first batch again.

All readings are made in one process: in a worker where the loader has workers, since a file that is opened in the main
process may not survive being forked. One worker is enough, and necessary: two of them start with copies of the same
generator, so that a draw which is not frozen would look as if it were.

    the first batch again            a generator of its own, the clock, a stream that runs dry: cannot be frozen
    in reverse order                 a collate_fn that sorts or drops: its batches are left as they are
    with other data in its second    a collate_fn that mixes data (mixup, batch statistics): J has no row for a datum
    half                             that is another one in other company
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe

from ntk_iterncgp.data.order import (
    FixedBatches,
    FrozenReader,
    Inputs,
    MapStyle,
    WorkerInit,
    Wraps,
    as_it_is,
    equal,
    key_of,
    random_state,
    seed_from,
    slice_rows,
    undisturbed,
)

TRIAL_KEY = 1  # not that of a sweep: what depends on the seed of its worker shall come out different
NUM_MIXES, MIX_ROWS = 8, 8
"""How many draws of a random collate_fn are tried, with how many data each: mixup may be applied now and then."""

Pair = tuple[Inputs, Tensor]


@dataclass(frozen=True, eq=False)
class Findings:
    """What is known about the data; by default what holds for plain tensors."""

    batch: Any = None  # the first one, read again; None: not read
    repeats: bool = True  # the same data come out the same
    is_random: bool = False  # random numbers are drawn for them
    in_order: bool = True  # the rows of a batch come as they were asked for, whichever they are
    mixes: bool = False  # a row depends on the others in its batch


class Request(NamedTuple):
    """What a watched reader is asked for."""

    indices: Any  # of a batch; one index where the loader does not batch
    key: int  # of the collate_fn
    watch: bool = False


class Reading(NamedTuple):
    """A batch as it was read, and whether items or their collation drew random numbers."""

    batch: Any
    draws_items: bool
    draws_batch: bool


class WatchedReader(Wraps, Dataset[Any]):
    """Reads as `FrozenReader` does, and watches for random numbers."""

    def __init__(self, source: MapStyle) -> None:
        self.dataset, self.is_batched = source.dataset, source.is_batched
        self.reader = FrozenReader(source.dataset, source.settings["collate_fn"])

    def __getitem__(self, request: Request) -> Reading:
        with undisturbed():
            batch = request.indices if self.is_batched else [request.indices]
            items, draws_items = self.reader.items_at_once(batch) if request.watch else (None, False)
            if items is None or draws_items:
                items = self.reader.items(batch)
            seed_from(request.key)
            before = random_state()
            collated = self.reader.collate_fn(items if self.is_batched else items[0])
            return Reading(collated, draws_items, not before.is_that_of(random_state()))


class WatchedStream(Wraps, IterableDataset[Any]):
    """The first batch of a stream, twice."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset, self.collate_fn, self.batch_size = loader.dataset, loader.collate_fn, loader.batch_size

    def __iter__(self) -> Iterator[tuple[Any, bool, int]]:
        yield self._read()
        yield self._read()

    def _read(self) -> tuple[Any, bool, int]:
        """A batch, whether random numbers were drawn for it, and its size."""
        with undisturbed():
            seed_from(TRIAL_KEY)
            before = random_state()
            items = list(islice(iter(self.dataset), self.batch_size or 1))
            batch = self.collate_fn(items if self.batch_size else items[0]) if items else None
            return batch, not before.is_that_of(random_state()), len(items)


def examine(batches: FixedBatches, split: Callable[[Any], Pair], num_rows: Callable[[Inputs], int]) -> Findings:
    """Read the first batch as often as it takes.

    Args:
        batches: The training data in their fixed order.
        split: Takes a batch apart, into inputs and targets.
        num_rows: Says how many data some inputs hold.

    Returns:
        What was found.
    """
    if batches.source is None:
        return _examine_stream(batches.iterable)
    source = batches.source
    indices = next(iter(source.batches))
    key = key_of(*indices) if source.is_batched else key_of(indices)
    requests = [Request(indices, key), Request(indices, key, watch=True)]
    if source.collates_by_itself:
        requests += [Request(indices[::-1], key), Request(_regrouped(indices), key)]
    readings = list(_watched(source, requests))
    first, again = readings[:2]
    repeats = equal(first.batch, again.batch)
    if not source.collates_by_itself or not repeats:
        return Findings(again.batch, repeats, again.draws_items or again.draws_batch, in_order=repeats)
    if again.draws_batch:  # for each batch, so these stay as they are
        mixes = _mixes_at_random(source, indices, split, num_rows)
        return Findings(again.batch, is_random=True, in_order=False, mixes=mixes)
    original, reverse, regrouped = (split(reading.batch) for reading in readings[1:])
    in_order = _is_reversed(original, reverse, len(indices), num_rows)
    mixes = in_order and not _same_first_half(original, regrouped, len(indices), num_rows)
    return Findings(again.batch, is_random=again.draws_items, in_order=in_order, mixes=mixes)


def _watched(source: MapStyle, requests: list[Request]) -> Iterator[Reading]:
    return _in_one_process(WatchedReader(source), source.settings, sampler=requests)


def _in_one_process(dataset: Dataset[Any], settings: dict[str, Any], **what: Any) -> Iterator[Any]:
    changed = {
        "num_workers": min(1, settings["num_workers"]),
        "worker_init_fn": WorkerInit(settings["worker_init_fn"]),
        "collate_fn": as_it_is,
        "pin_memory": False,
    }
    with undisturbed():
        seed_from(TRIAL_KEY)
        return iter(DataLoader(dataset, batch_size=None, **{**settings, **changed}, **what))


def _regrouped(indices: list[Any]) -> list[Any]:
    """A batch of the same size with the same data in its first half, and in its second half the first one only."""
    half = -(-len(indices) // 2)
    return [*indices[:half], *[indices[0]] * (len(indices) - half)]


def _is_reversed(original: Pair, reverse: Pair, size: int, num_rows: Callable[[Inputs], int]) -> bool:
    """Whether the rows of a batch come as they were asked for: a collate_fn may sort them, say by their length."""
    if not (num_rows(original[0]) == len(original[1]) == size):
        return False
    turned = torch.arange(size - 1, -1, -1)
    return equal(slice_rows(original[0], turned, size), reverse[0]) and equal(original[1].flip(0), reverse[1])


def _same_first_half(original: Pair, regrouped: Pair, size: int, num_rows: Callable[[Inputs], int]) -> bool:
    """Whether rows are the same in other company; not compared where they are padded to another length."""
    if {num_rows(original[0]), num_rows(regrouped[0])} != {size}:
        return True  # some were left out
    half, (columns, others) = -(-size // 2), (_columns(batch, size) for batch in (original, regrouped))
    pairs = [(columns[name], others[name]) for name in columns.keys() & others.keys()]
    return all(equal(one[:half], other[:half]) for one, other in pairs if one.shape == other.shape)


def _columns(batch: Pair, size: int) -> dict[Any, Tensor]:
    """The tensors of a batch that have a row for each datum; None is the name of the targets."""
    x, y = batch
    named = {**(x if isinstance(x, Mapping) else {"inputs": x}), None: y}
    return {name: part for name, part in named.items() if isinstance(part, Tensor) and part.ndim and len(part) == size}


def _mixes_at_random(
    source: MapStyle, indices: list[Any], split: Callable[[Any], Pair], num_rows: Callable[[Inputs], int]
) -> bool:
    """By several draws, each of them for a batch and for its regrouped sibling."""
    some = indices[:MIX_ROWS]
    requests = [Request(batch, key) for key in range(NUM_MIXES) for batch in (some, _regrouped(some))]
    batches = [split(reading.batch) for reading in _watched(source, requests)]
    pairs = zip(batches[::2], batches[1::2], strict=True)
    return not all(_same_first_half(one, other, len(some), num_rows) for one, other in pairs)


def _examine_stream(loader: Any) -> Findings:
    """Of loaders that are not torch's own, and of data pipes, two sweeps will be compared, as of all streams."""
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterDataPipe):
        return Findings(in_order=False)
    settings = dict(
        num_workers=loader.num_workers,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    (first, is_random, size), (again, _, size_again) = _in_one_process(WatchedStream(loader), settings)
    # A stream that can be read only once in a process may still be read once in each: that is for the sweeps to say.
    return Findings(None, size != size_again or equal(first, again), is_random, in_order=False)
