"""Whether inputs are those of the fit: the same data set, or the same numbers in memory, as far as can be seen."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils.data import Subset, TensorDataset

_fitted: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The data set of the last fit of each flavour. Not an attribute of it, which could not be copied or sent elsewhere."""


def noted(la: Any, loader: Any) -> None:
    """Remember the data set of a fit, without keeping it alive."""
    _fitted.pop(la, None)
    with suppress(TypeError):  # a list has no weak references
        _fitted[la] = weakref.ref(getattr(loader, "dataset", loader))


def draws_from(la: Any, x: Any) -> bool:
    """Whether `x`, a tensor or a loader, holds data of the last fit. False where it cannot be seen."""
    fitted = _fitted[la]() if la in _fitted else None
    return fitted is not None and _overlap(fitted, getattr(x, "dataset", x))


def _overlap(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Subset) and isinstance(other, Subset):
        same = one.dataset is other.dataset
        return same and not set(map(int, one.indices)).isdisjoint(map(int, other.indices))
    if isinstance(other, Subset):
        return one is other.dataset
    if isinstance(one, Subset):  # of a larger set, all of which is given
        return one.dataset is other
    inputs = [data.tensors[0] if isinstance(data, TensorDataset) else data for data in (one, other)]
    return all(isinstance(value, Tensor) and value.numel() for value in inputs) and (
        inputs[0].data_ptr() == inputs[1].data_ptr()
    )
