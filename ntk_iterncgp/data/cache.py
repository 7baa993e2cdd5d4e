"""The data of a first sweep, kept where there is room: later sweeps then need not load and transform them again.

A fit by groups reads the data twice. Where images are decoded and normalised one by one, as torchvision's data sets do,
that can take as long as the network.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, TensorDataset, default_collate

from ntk_iterncgp.data.order import FixedBatches, MapStyle


class Kept:
    """Fills up while a sweep goes on, batch by batch."""

    def __init__(self, num_data: int, max_bytes: int) -> None:
        self.num_data, self.max_bytes = num_data, max_bytes
        self._first: list[Tensor] | None = None
        self._tensors: list[Tensor] = []
        self._filled = 0

    def add(self, batch: Any) -> bool:
        """False for a batch that cannot be kept, and then none can."""
        if not isinstance(batch, (list, tuple)) or not all(map(_is_rows, batch)):
            return False
        if self._first is None:  # alone it may be a probe, for which nothing shall be set aside
            self._first = list(batch)
            size = sum(part.numel() * part.element_size() for part in batch)
            return size * self.num_data <= self.max_bytes * max(1, len(batch[0]))
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
        return 0 < self._filled == self.num_data

    def as_source(self, like: MapStyle) -> tuple[FixedBatches, MapStyle]:
        """The same batches, and the same data in any order, from memory: with the draw of the sweep that was kept."""
        rows = range(self.num_data)
        settings = {"num_workers": 0, "collate_fn": default_collate, "pin_memory": like.settings["pin_memory"]}
        batches = BatchSampler(rows, like.batch_size, drop_last=False)
        source = MapStyle(TensorDataset(*self._tensors), settings, batches, like.batch_size, rows)
        return FixedBatches(source.read(batches), len(batches), source), source


def worth_keeping(source: MapStyle | None) -> bool:
    """What is in memory already is not."""
    if source is None or source.settings["collate_fn"] is not default_collate:
        return False
    dataset = source.dataset
    while hasattr(dataset, "dataset"):  # a part of another
        dataset = dataset.dataset
    return type(dataset) is not TensorDataset


def _is_rows(part: Any) -> bool:
    return isinstance(part, Tensor) and part.ndim > 0 and part.device.type == "cpu"
