"""The training data, the same rows in the same order on every sweep; and the probe that proves it.

K = J Λ⁻¹ Jᵀ is only a matrix if its rows stay where they are. A loader that shuffles is drawn from once, and its
batches are then walked in that order; a model is put in eval mode for the time of a sweep. Whatever still changes from
one sweep to the next (random augmentation, dropout that ignores eval mode, batch statistics) would make every product
inconsistent with the others, so it is looked for at the door and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

from ntk_iterncgp.threads import enter_eval_mode, leave_eval_mode, together

Inputs = Any  # a tensor, or a mapping of tensors and other things


class FixedOrderData:
    """Batches (x, y) of a loader, the same on every sweep. A mapping goes to the model whole; y is one of its items."""

    def __init__(
        self,
        loader: DataLoader | Sequence[Any],
        *,
        device: torch.device,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
    ) -> None:
        self.device, self.dict_key_x, self.dict_key_y = device, dict_key_x, dict_key_y
        self._batches = _in_fixed_order(loader)
        self._source = _random_access(loader, self._batches)
        self._keeps_order: bool | None = None  # not looked at yet

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._batches)

    @property
    def batch_size(self) -> int:
        """How many data the loader takes at once, where they can be visited in any order."""
        return 1 if self._source is None else self._source.batch_size

    def batches(self) -> Iterator[tuple[Inputs, Tensor]]:
        """One sweep, on the device."""
        for batch in self._batches:
            yield self.split(batch)

    def split(self, batch: Any) -> tuple[Inputs, Tensor]:
        """A batch as (x, y), on the device."""
        if isinstance(batch, Mapping):
            if self.dict_key_y not in batch:
                raise ValueError(
                    f"A batch that is a mapping is expected to hold targets under {self.dict_key_y!r} (dict_key_y), "
                    f"but this one has the keys {sorted(map(str, batch))}. Set dict_key_y to the right one."
                )
            return to_device(batch, self.device), to_device(batch[self.dict_key_y], self.device)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"Each batch is expected to be a pair (x, y) or a mapping, but got {type(batch).__name__}"
                f"{f' of length {len(batch)}' if isinstance(batch, (tuple, list)) else ''}."
            )
        return to_device(batch[0], self.device), to_device(batch[1], self.device)

    @property
    def num_items(self) -> int | None:
        """How many items the loader draws from a map-style dataset; None for data that only come in order."""
        return None if self._source is None else len(self._source.indices)

    def num_data(self, rows_of_first: int) -> int:
        """How many data there are, counted without loading them; from the first batch where they only come in order."""
        return len(self) * rows_of_first if self.num_items is None else self.num_items

    def can_jump(self, num_data: int) -> bool:
        """Whether these data can be visited in any order: a map-style dataset, of which each item became one row."""
        if self._source is None or len(self._source.indices) != num_data:
            return False
        if self._keeps_order is None:
            self._keeps_order = self._source.settings["collate_fn"] is default_collate or self._collates_in_order()
        return self._keeps_order

    def _collates_in_order(self) -> bool:
        """Whether the rows of a batch come as they were asked for: a collate_fn may sort them, say by their length."""
        rows = torch.arange(min(self.batch_size, self.num_data(0)))
        (x, y), (reversed_x, reversed_y) = self.visit([rows, rows.flip(0)])
        if not (self.num_rows(x) == len(y) == len(rows)):
            return False
        return _equal(slice_rows(x, rows.flip(0), len(rows)), reversed_x) and _equal(y.flip(0), reversed_y)

    def visit(self, batches: Sequence[Tensor]) -> Iterator[tuple[Inputs, Tensor]]:
        """Batches of chosen rows, given by their numbers in the fixed order, read straight from the dataset."""
        assert self._source is not None
        source = self._source
        chosen = [[source.indices[row] for row in rows.tolist()] for rows in batches]
        for batch in _FixedBatches(DataLoader(source.dataset, batch_sampler=chosen, **source.settings), len(chosen)):
            yield self.split(batch)

    def pick(self, rows: Tensor, num_data: int, batch_size: int) -> Iterator[tuple[Tensor, Inputs]]:
        """Chosen rows in ascending order, with their numbers: visited where that is possible, else met in a sweep."""
        rows = rows.sort().values
        if self.can_jump(num_data):
            parts = rows.split(batch_size)
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


def slice_rows(x: Inputs, part: slice | Tensor, num_rows: int) -> Inputs:
    """Some rows of a batch; items of a mapping that do not have one entry per datum are passed on whole."""
    if not isinstance(x, Mapping):
        return x[part]
    sliced = {
        key: value[part] if isinstance(value, Tensor) and value.ndim and len(value) == num_rows else value
        for key, value in x.items()
    }
    return _rebuilt(x, sliced)


def _rebuilt(like: Inputs, items: dict[Any, Any]) -> Inputs:
    """A mapping of the same kind: models may read it by attribute."""
    return type(like)(items)


def to_device(x: Inputs, device: torch.device) -> Inputs:
    """The inputs where the model is; as in training, data may come from another device."""
    if isinstance(x, Mapping):
        return _rebuilt(x, {key: to_device(value, device) for key, value in x.items()})
    if not isinstance(x, Tensor):
        return x
    if x.is_meta and device.type != "meta":
        raise ValueError(
            f"Expected data with values, to be moved to the model's device {device}, but got a tensor on the meta "
            "device, which holds a shape and no values. Load the data on a real device."
        )
    return x.to(device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; each module's own train/eval flag comes back afterwards, whatever happens."""
    with together(model, partial(enter_eval_mode, model), leave_eval_mode):
        yield


def probe(model: nn.Module, forward: Callable[[Inputs], Tensor], data: FixedOrderData) -> None:
    """Look at the first batch twice, in eval mode, and name what is not the same the second time."""
    first, again = next(data.batches(), None), next(data.batches(), None)
    if first is None:
        raise ValueError(
            "The training data are expected to give their batches on every sweep, but they came out empty. Use a "
            "dataset that can be walked more than once."
        )
    if again is None or not (_equal(first[0], again[0]) and _equal(first[1], again[1])):
        raise ValueError(
            "Two sweeps over the training data are expected to give the same rows, but the first batch came out "
            "different the second time. Turn off random augmentation, and give the loader a fixed order."
        )
    training = [name or type(module).__name__ for name, module in model.named_modules() if module.training]
    if training:
        raise ValueError(
            f"The model is expected to be in eval mode after model.eval(), but these modules stay in train mode: "
            f"{', '.join(training[:5])}. Let their train() method obey."
        )
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        outputs, repeated = forward(first[0]), forward(first[0])
        rows = data.num_rows(first[0])
        try:
            alone = forward(slice_rows(first[0], slice(0, 1), rows))
        except ValueError:  # batch statistics of a single datum
            alone = torch.full_like(outputs[:1], torch.inf)
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])]
    if changed:
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        raise ValueError(
            f"A forward pass in eval mode is expected to leave the model as it is, but it changed the buffers "
            f"{', '.join(changed[:5])}. Put BatchNorm in eval mode."
        )
    if not bool(torch.isfinite(outputs).all()):
        raise ValueError(
            "The model is expected to return finite outputs, but it returned NaN or infinity on the first batch. "
            "Check its weights and the scale of its inputs."
        )
    if not torch.equal(outputs, repeated):
        raise ValueError(
            "Two forward passes on the same batch are expected to agree, but they differ by up to "
            f"{float((outputs - repeated).abs().max()):.2g}. Turn off dropout and other noise in eval mode."
        )
    error = float((outputs[:1] - alone).abs().max())
    if error > 1e-3 * float(outputs.abs().max()) + 1e-6:
        raise ValueError(
            "Each output is expected to depend on its own input alone, but the first one changed by "
            f"{error:.2g} when the rest of its batch was left out. Use BatchNorm with running statistics."
        )


class _FixedBatches:
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


def _in_fixed_order(loader: DataLoader | Sequence[Any]) -> Any:
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
        return _nonempty(_FixedBatches(loader, length), length)
    batched = loader.batch_sampler
    if type(batched) is BatchSampler and isinstance(batched.sampler, SequentialSampler):
        return _nonempty(_FixedBatches(loader, len(loader)), len(loader))
    drawn, settings = _drawn_once(loader), _loader_settings(loader)
    if loader.batch_sampler is None:
        fixed: DataLoader = DataLoader(loader.dataset, batch_size=None, sampler=drawn, **settings)
    else:
        fixed = DataLoader(loader.dataset, batch_sampler=drawn, **settings)
    return _nonempty(_FixedBatches(fixed, len(drawn), drawn), len(drawn))


def _loader_settings(loader: DataLoader) -> dict[str, Any]:
    return dict(
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


class _RandomAccess(NamedTuple):
    """A dataset, the index of each row in it, and how to load from it."""

    dataset: Any
    indices: Sequence[int]
    settings: dict[str, Any]
    batch_size: int


def _random_access(loader: Any, batches: Any) -> _RandomAccess | None:
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
    return _RandomAccess(loader.dataset, indices, _loader_settings(loader), loader.batch_sampler.batch_size)


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


def _equal(a: Inputs, b: Inputs) -> bool:
    if isinstance(a, Tensor):
        same = a.shape == b.shape and (a == b)
        return bool(same) if isinstance(same, bool) else bool((same | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping):
        return all(_equal(a[key], b[key]) for key in a)
    return True
