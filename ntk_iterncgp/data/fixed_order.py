"""The training data, the same rows in the same order on every sweep.

K = J Λ⁻¹ Jᵀ is only a matrix if its rows stay where they are. A loader that shuffles is drawn from once, and its
batches are then walked in that order; random augmentation is frozen (`order.py`); a model is put in eval mode for the
time of a sweep. Whatever still changes from one sweep to the next (augmentation that cannot be frozen, dropout that
ignores eval mode, batch statistics) would make every product inconsistent with the others: `Probe` looks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, default_collate

from ntk_iterncgp.data.determinism import Findings, examine
from ntk_iterncgp.data.order import (
    FixedBatches,
    Inputs,
    MapStyle,
    TrainingDataWarning,
    equal,
    in_fixed_order,
    slice_rows,
    to_device,
    warn_once,
)
from ntk_iterncgp.runtime import parallel


class Cache:
    """Fills up during a sweep, batch by batch."""

    def __init__(self, num_data: int, max_bytes: int) -> None:
        self.num_data, self.max_bytes = num_data, max_bytes
        self._first: list[Tensor] | None = None
        self._tensors: list[Tensor] = []
        self._filled = 0

    def add(self, batch: Any) -> bool:
        """False for a batch that cannot be cached, and then none can."""
        if not isinstance(batch, (list, tuple)) or not all(map(_is_rows, batch)):
            return False
        if self._first is None:  # alone it may be a probe, for which nothing shall be set aside
            self._first = list(batch)
            size = sum(part.numel() * part.element_size() for part in batch)
            fits: bool = size * self.num_data <= self.max_bytes * max(1, len(batch[0]))
            return fits
        if not self._tensors:
            self._tensors = [part.new_empty(self.num_data, *part.shape[1:]) for part in self._first]
            self._put(self._first)
        return self._put(batch)

    def _put(self, batch: Any) -> bool:
        stop = self._filled + len(batch[0])
        for whole, part in zip(self._tensors, batch, strict=True):
            if len(part) != stop - self._filled or stop > self.num_data or part.shape[1:] != whole.shape[1:]:
                return False
            whole[self._filled : stop] = part
        self._filled = stop
        return True

    @property
    def is_complete(self) -> bool:
        """Whether all data are cached."""
        return 0 < self._filled == self.num_data

    def as_source(self, like: MapStyle) -> tuple[FixedBatches, MapStyle]:
        """The same batches, and the same data in any order, from memory: with the draw of the sweep that was cached."""
        rows = range(self.num_data)
        settings = {"num_workers": 0, "collate_fn": default_collate, "pin_memory": like.settings["pin_memory"]}
        batches = BatchSampler(rows, like.batch_size, drop_last=False)
        source = MapStyle(TensorDataset(*self._tensors), settings, batches, like.batch_size, rows)
        return FixedBatches(source.read(batches), len(batches), source), source


def worth_caching(source: MapStyle) -> bool:
    """What is in memory already is not."""
    if source.settings["collate_fn"] is not default_collate:
        return False
    dataset = source.dataset
    while hasattr(dataset, "dataset"):  # a part of another
        dataset = dataset.dataset
    return type(dataset) is not TensorDataset


def _is_rows(part: Any) -> bool:
    return isinstance(part, Tensor) and part.ndim > 0 and part.device.type == "cpu"


__all__ = ["FixedOrderData", "Inputs", "TrainingDataWarning", "slice_rows", "to_device"]


class FixedOrderData:
    """Batches (x, y) of a loader, the same on every sweep. A mapping goes to the model whole; y is one of its items."""

    def __init__(
        self,
        loader: DataLoader[Any] | Sequence[Any],
        *,
        device: torch.device,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
    ) -> None:
        self.device, self.dict_key_x, self.dict_key_y = device, dict_key_x, dict_key_y
        self._batches = self._opened = in_fixed_order(loader)
        source = self._batches.source if isinstance(self._batches, FixedBatches) else None
        self._source = source if source is not None and source.indices else None  # what can be visited in any order
        self.num_items = None if self._source is None else len(self._source.indices)
        """How many items the loader draws from a map-style dataset; None for data that only come in order."""
        self.batch_size = 1 if self._source is None else self._source.batch_size
        """How many data the loader takes at once, where they can be visited in any order."""
        self.dataset = getattr(loader, "dataset", loader)
        self.keep_bytes = 0  # how many bytes of a first sweep may be cached

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._batches)

    def batches(self) -> Iterator[tuple[Inputs, Tensor]]:
        """One sweep, on the device."""
        source, cached = self._source, None
        if source is not None and self.keep_bytes and source.tensors is None and worth_caching(source):
            cached = Cache(len(source.indices), self.keep_bytes)
        for batch in self._batches:
            if cached is not None and not cached.add(batch):
                cached = None
            yield self.split(batch)
        if source is not None and cached is not None and cached.is_complete:
            self._batches, self._source = cached.as_source(source)

    @cached_property
    def sizes(self) -> list[int]:
        """How many data each batch holds, the same in all processes."""
        indices = [] if self._source is None else list(self._source.indices)
        if self._source is not None and self._source.settings["collate_fn"] is default_collate:
            sizes = [len(rows) for rows in torch.arange(len(indices)).split(self.batch_size)]
        else:  # only reading them tells
            sizes = [self.num_rows(x) for x, _ in self.batches()]
        same = [torch.tensor(indices), torch.tensor(sizes), next(self.batches())[1]]
        parallel.check_same(same, "The training data (all of them, without a DistributedSampler) are")
        return sizes

    def shard(self) -> parallel.Shard | None:
        """The rows of this process, whole batches; None where there is only one process, which need not count them."""
        return None if parallel.num_processes() == 1 else parallel.Shard.of_batches(self.sizes)

    def sweep(self, shard: parallel.Shard | None) -> Iterator[tuple[slice, Inputs, Tensor]]:
        """One sweep over a process's shard of the rows, in order, with their numbers; None for all of them.

        Data that only come in order are read by every process, and used by one.
        """
        start, mine, batches = 0, None, self.batches()
        if shard is not None and not shard.is_whole:
            mine = shard.mine
            if self.can_jump(shard.num_rows):
                start, rows = mine.start, torch.arange(mine.start, mine.stop)
                batches = self.visit(rows.split(self.batch_size) if len(rows) else ())
        for x, y in batches:
            stop = start + self.num_rows(x)
            if mine is None:
                yield slice(start, stop), x, y
            else:
                here = slice(max(start, mine.start), min(stop, mine.stop))
                if here.start < here.stop:
                    part = slice(here.start - start, here.stop - start)
                    yield here, slice_rows(x, part, stop - start), y[part]
            start = stop

    def each_batch(
        self, compute: Callable[[Inputs, Tensor], tuple[Tensor, ...]], *, skip: int = 0
    ) -> Iterator[tuple[Tensor, ...]]:  # (b, …) each
        """Yield what is computed, without gradients, of each batch in order, but for the first `skip`.

        Several processes take turns, and after each round all have all of it.
        """
        compute, K = torch.no_grad()(compute), parallel.num_processes()
        if K == 1:
            yield from (compute(x, y) for x, y in islice(self.batches(), skip, None))
            return
        mine = self._some_batches(range(skip + parallel.rank(), len(self.sizes), K))
        for first in range(skip, len(self.sizes), K):
            sizes = self.sizes[first : first + K]
            if parallel.rank() < len(sizes):
                own = compute(*next(mine))
            else:  # no rows of what any batch gives
                own = tuple(rows[:0] for rows in compute(*next(self.batches())))
            shard = parallel.Shard((0, *accumulate([*sizes, *[0] * (K - len(sizes))])))
            yield from zip(*(shard.gather(rows).split(sizes) for rows in _of_one_width(own)), strict=True)

    def _some_batches(self, numbers: range) -> Iterator[tuple[Inputs, Tensor]]:
        if not self.can_jump(sum(self.sizes)):
            return (batch for number, batch in enumerate(self.batches()) if number in numbers)
        starts = [0, *accumulate(self.sizes)]
        return self.visit([torch.arange(starts[number], starts[number + 1]) for number in numbers])

    def split(self, batch: Any) -> tuple[Inputs, Tensor]:
        """A batch as (x, y), on the device."""
        if isinstance(batch, Mapping):
            if self.dict_key_y not in batch:
                raise ValueError(
                    f"A batch that is a mapping must have targets under {self.dict_key_y!r} (dict_key_y); got the keys "
                    f"{sorted(map(str, batch))}. Try dict_key_y with one of these."
                )
            moved = to_device(batch, self.device)
            return moved, moved[self.dict_key_y]
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"Each batch must be a pair (x, y) or a mapping; got {type(batch).__name__}"
                f"{f' of length {len(batch)}' if isinstance(batch, (tuple, list)) else ''}. Try another collate_fn."
            )
        return to_device(batch[0], self.device), to_device(batch[1], self.device)

    def num_data(self, rows_of_first: int) -> int:
        """How many data there are, counted without loading them; from the first batch where they only come in order."""
        return len(self) * rows_of_first if self.num_items is None else self.num_items

    def can_jump(self, num_data: int) -> bool:
        """Whether these data can be visited in any order: a map-style dataset, of which each item became one row."""
        if self._source is None or len(self._source.indices) != num_data:
            return False
        return not self._source.collates_by_itself or (self.findings.in_order and not self.findings.mixes)

    @cached_property
    def findings(self) -> Findings:
        """What reading the first batch a few times says about the data.

        Plain tensors, and batches that are in memory, need not be read.
        """
        batches = self._opened
        if not isinstance(batches, FixedBatches) or (batches.source is not None and batches.source.tensors is not None):
            return Findings()
        return examine(batches, self.split, self.num_rows)

    def visit(self, batches: Sequence[Tensor]) -> Iterator[tuple[Inputs, Tensor]]:
        """Batches of chosen rows, given by their numbers in the fixed order, read straight from the dataset."""
        assert self._source is not None
        source = self._source
        chosen = [[source.indices[row] for row in rows.tolist()] for rows in batches]
        for batch in FixedBatches(source.read(chosen), len(chosen), source):
            yield self.split(batch)

    def pick(self, rows: Tensor, num_data: int, batch_size: int) -> Iterator[tuple[Tensor, Inputs]]:
        """Chosen rows in ascending order, with their numbers: visited where that is possible, else met in a sweep."""
        rows = rows.sort().values
        if len(rows) == 0:
            return
        if self.can_jump(num_data):
            parts = rows.split(min(batch_size, self.batch_size))
            for part, (x, _) in zip(parts, self.visit(parts), strict=True):
                yield part, x
            return
        start = 0
        for x, _ in self.batches():
            stop = start + self.num_rows(x)
            here = rows[(rows >= start) & (rows < stop)]
            for part in here.split(batch_size) if len(here) else ():
                yield part, slice_rows(x, part - start, stop - start)
            start = stop

    def num_rows(self, x: Inputs) -> int:
        """How many data a batch of inputs holds."""
        return len(x[self.dict_key_x] if isinstance(x, Mapping) else x)

    def chunk(self, x: Inputs, size: int) -> Iterator[Inputs]:
        """A batch of inputs in parts of at most `size` data."""
        rows = self.num_rows(x)
        for start in range(0, rows, size):
            yield slice_rows(x, slice(start, min(start + size, rows)), rows)


def _of_one_width(blocks: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Blocks that all processes can put together: without columns where batches were padded, each to its own length."""
    least, most = parallel.extremes([sum(block.shape[1] for block in blocks if block.ndim > 1)])
    if least == most:
        return blocks
    ragged = [block.ndim > 1 and len(set(parallel.extremes([block.shape[1]]))) > 1 for block in blocks]
    return tuple(block[:, :0] if is_ragged else block for block, is_ragged in zip(blocks, ragged, strict=True))


# --- the first batch --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FirstBatch:
    """The first inputs, the network's outputs there (b, C), and the number of all data, if known.

    By these a later call recognises the data of the fit.
    """

    inputs: Inputs
    outputs: Tensor
    num_items: int | None

    def check_same(self, other: FirstBatch) -> None:
        """Actions are sums over numbered data: other data, or another order, would make nonsense of them."""
        rows = min(len(self.outputs), len(other.outputs))
        same = torch.allclose(self.outputs[:rows], other.outputs[:rows], rtol=1e-3, atol=1e-4)
        if not same or (None not in (self.num_items, other.num_items) and self.num_items != other.num_items):
            found = f"{other.num_items} data instead of {self.num_items}" if same else "other data, or another order"
            raise ValueError(
                f"refine must be given the data of the fit in the same order; got {found}. Try the loader of the fit; "
                "where it draws its data at random, fit again with shuffle=False."
            )


FEW = 16  # data of the first batch that show that a known model is still what it was


class Probe:
    """Checks data and model in eval mode, then what the model returns for the first batch."""

    def __init__(self, model: nn.Module, data: FixedOrderData, *, is_known: bool = False) -> None:
        self.model, self.data, self.is_known = model, data, is_known
        self.inputs = _first_inputs(data)
        if is_known and (rows := data.num_rows(self.inputs)) > FEW:
            self.inputs = slice_rows(self.inputs, slice(0, FEW), rows)
        training = [name or type(module).__name__ for name, module in model.named_modules() if module.training]
        if training:
            raise ValueError(
                f"The model must be in eval mode after model.eval(); got modules that stay in train mode: "
                f"{', '.join(training[:5])}. Try a train() method that obeys."
            )
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def check(self, forward: Callable[[Inputs], Tensor], outputs: Tensor | None = None) -> FirstBatch:
        """Pass the first batch twice, and its first row alone; of a known model, some of it once.

        Args:
            forward: the function whose outputs are checked.
            outputs: what it has returned for the first batch, if it was asked before.

        Returns:
            The first batch, with its outputs.
        """
        outputs = forward(self.inputs) if outputs is None else outputs
        if not bool(torch.isfinite(outputs).all()):
            raise ValueError(
                "The model must return finite outputs; got NaN or infinity on the first batch. Try smaller inputs, and "
                "check its weights."
            )
        first = FirstBatch(self.inputs, outputs, self.data.num_items)
        if self.is_known:
            return first
        repeated = forward(self.inputs)
        try:
            alone = forward(slice_rows(self.inputs, slice(0, 1), self.data.num_rows(self.inputs)))
        except ValueError:  # batch statistics of a single datum
            alone = torch.full_like(outputs[:1], torch.inf)
        changed = [name for name, buffer in self.model.named_buffers() if not torch.equal(buffer, self._buffers[name])]
        if changed:
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
            raise ValueError(
                f"A forward pass in eval mode must leave the model as it is; got changed buffers: "
                f"{', '.join(changed[:5])}. Try BatchNorm in eval mode."
            )
        if not torch.equal(outputs, repeated):
            raise ValueError(
                "Two forward passes on the same batch must agree; got outputs that differ by up to "
                f"{float((outputs - repeated).abs().max()):.2g}. Try it without dropout and other noise in eval mode."
            )
        error = float((outputs[:1] - alone).abs().max())
        if error > 1e-3 * float(outputs.abs().max()) + 1e-6:
            raise ValueError(
                f"Each output must depend on its own input alone; got a first one that changed by {error:.2g} when the "
                "rest of its batch was left out. Try BatchNorm with running statistics."
            )
        return first


def _first_inputs(data: FixedOrderData) -> Inputs:
    """Those of the first batch, if it can be had again. Reports random augmentation, which is then frozen."""
    first = next(data.batches(), None)
    if first is None:
        raise ValueError(
            "The training data must give their batches on every sweep; got none. Try a dataset that can be walked more "
            "than once."
        )
    found = data.findings
    again = next(data.batches(), None) if found.batch is None else data.split(found.batch)
    if not found.repeats or again is None or not equal(first, again):
        raise ValueError(
            "The training data must be the same on every sweep; got a first batch that came out different the second "
            "time. Random augmentation is frozen where it draws from the global generators of torch (on the CPU), "
            "numpy and Python's random; here it draws from a generator of its own, or something else changes. Try "
            "the global generators, data without augmentation, or, for a stream, a fixed order."
        )
    if found.mixes:
        raise ValueError(
            "Each row of a batch must depend on its own datum alone; got other rows for the same data when the rest of "
            "their batch was exchanged. Try a collate_fn that does not mix data, as mixup, cutmix and statistics of a "
            "batch do."
        )
    if found.is_random and parallel.rank() == 0:
        warn_once(
            data.dataset,
            "The training data are drawn at random (augmentation, or the order of a stream). The draw is frozen: every "
            "sweep, also that of `refine`, sees the same one copy of each datum, whatever the workers. Try data "
            "without augmentation for the posterior of the data as they are; to silence this, filter the category "
            "ntk_iterncgp.data.fixed_order.TrainingDataWarning.",
        )
    return first[0]
