"""What a data set is to a run: tensors, how they were scaled, and the names of the classes.

Targets of a regression are scaled to mean zero and unit variance, (N, 1); classes are whole numbers, (N,).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from ntk_iterncgp.experiments.settings import ConfigError


@dataclass(frozen=True)
class Scaling:
    """(x − mean) / std, channel by channel for images, column by column for tables."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, inputs: Tensor) -> Tensor:  # (b, channels, side, side) or (b, d)
        """(x − mean) / std."""
        return (inputs - self._like(self.mean, inputs)) / self._like(self.std, inputs)

    def undo(self, inputs: Tensor) -> Tensor:
        """std · x + mean."""
        return inputs * self._like(self.std, inputs) + self._like(self.mean, inputs)

    @staticmethod
    def _like(values: tuple[float, ...], inputs: Tensor) -> Tensor:
        return torch.tensor(values, dtype=inputs.dtype, device=inputs.device).reshape(1, -1, *[1] * (inputs.ndim - 2))


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test data, and others that are like neither; `held_out` is in none of them."""

    train: Dataset[Any]
    test: Dataset[Any]
    scaling: Scaling
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    ood: dict[str, Dataset[Any]] = field(default_factory=dict)
    held_out: Dataset[Any] | None = None  # neither trained on nor fitted to: what the prior precision is chosen on
    target_scaling: Scaling | None = None  # of a regression; None: classes

    @property
    def num_outputs(self) -> int:
        """The number of classes, or 1 for real targets."""
        return len(self.class_names) if self.target_scaling is None else 1

    @property
    def task(self) -> str:
        """Classification or regression, as in the settings."""
        return "classification" if self.target_scaling is None else "regression"

    def put_aside(self, count: int, source: str, seed: int) -> Data:
        """`count` inputs of "train" or "test", drawn at random, as `held_out`."""
        if count == 0:
            return self
        data: Dataset[Any] = getattr(self, source)
        size = len(data)  # type: ignore[arg-type]
        if size - count < 2:
            raise ConfigError(
                f"data.held_out must be at least two inputs fewer than the {size} of the {source} set; got "
                f"{count}. Try null."
            )
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        rest = chosen_of(data, order[count:].sort().values)
        held_out = chosen_of(data, order[:count].sort().values)
        return replace(self, held_out=held_out, **{source: rest})  # type: ignore[arg-type]


Arrays = tuple[Tensor, Tensor]  # inputs in [0, 1] (N, channels, side, side) or (N, d), and labels or targets (N,)


def from_arrays(train: Arrays, test: Arrays, scaling: Scaling, names: tuple[str, ...]) -> Data:
    """Make data of inputs and labels that are in memory."""
    parts = [TensorDataset(scaling.apply(x), y) for x, y in (train, test)]
    return Data(parts[0], parts[1], scaling, names, tuple(train[0].shape[1:]))


def chosen_of(data: Dataset[Any], chosen: Tensor) -> Dataset[Any]:
    """Some of the data; tensors are copied, so that they stay one block."""
    if isinstance(data, TensorDataset):
        return TensorDataset(*(tensor[chosen] for tensor in data.tensors))
    return Subset(data, chosen.tolist())


def labels_of(data: Dataset[Any]) -> Tensor:  # (N,), or (N, 1)
    """The labels or targets alone, without reading images where that can be helped."""
    if isinstance(data, TensorDataset):
        return data.tensors[1]
    if isinstance(data, Subset):
        return labels_of(data.dataset)[torch.as_tensor(data.indices)]
    return torch.as_tensor(data.targets)  # type: ignore[attr-defined]


def line(error: BaseException) -> str:
    """Return the first line of an error message, shortened."""
    return (str(error).partition("\n")[0] or type(error).__name__)[:120]
