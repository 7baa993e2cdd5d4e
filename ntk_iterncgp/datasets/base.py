"""What a data set is to a run: tensors, how they were scaled, and the names of the classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset


@dataclass(frozen=True)
class Scaling:
    """(x − mean) / std, channel by channel for images, column by column for tables."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, inputs: Tensor) -> Tensor:  # (b, channels, side, side) or (b, d)
        return (inputs - self._like(self.mean, inputs)) / self._like(self.std, inputs)

    def undo(self, inputs: Tensor) -> Tensor:
        return inputs * self._like(self.std, inputs) + self._like(self.mean, inputs)

    @staticmethod
    def _like(values: tuple[float, ...], inputs: Tensor) -> Tensor:
        return torch.tensor(values, dtype=inputs.dtype, device=inputs.device).reshape(1, -1, *[1] * (inputs.ndim - 2))


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test data, and others that are like neither."""

    train: Dataset[Any]
    test: Dataset[Any]
    scaling: Scaling
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    ood: dict[str, Dataset[Any]] = field(default_factory=dict)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


Arrays = tuple[Tensor, Tensor]  # inputs in [0, 1] (N, channels, side, side) or (N, d), and labels (N,)


def from_arrays(train: Arrays, test: Arrays, scaling: Scaling, names: tuple[str, ...]) -> Data:
    parts = [TensorDataset(scaling.apply(x), y) for x, y in (train, test)]
    return Data(parts[0], parts[1], scaling, names, tuple(train[0].shape[1:]))


def labels_of(data: Dataset[Any]) -> Tensor:  # (N,)
    """The labels alone, without reading images where that can be helped."""
    if isinstance(data, TensorDataset):
        return data.tensors[1]
    if isinstance(data, Subset):
        return labels_of(data.dataset)[torch.as_tensor(data.indices)]
    return torch.as_tensor(data.targets)  # type: ignore[attr-defined]


def line(error: BaseException) -> str:
    return (str(error).partition("\n")[0] or type(error).__name__)[:120]
