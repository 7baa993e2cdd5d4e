"""A batch of inputs: a tensor, or a mapping of tensors and other things, as Hugging Face models take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Any  # a tensor, or a mapping of tensors and other things


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
