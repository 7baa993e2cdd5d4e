"""The data of a run, as tensors a network takes: embedded, under a data root, downloaded, or the user's own files.

    digits                                  8×8, comes with scikit-learn
    mnist, fashion_mnist, kmnist            the official files under <root>/MNIST/raw and the like, packed or not
    cifar10, cifar100                       the official binary version, or torchvision's
    svhn                                    torchvision's
    image_folder                            a folder per class
    arrays                                  .npz with x and y, or .csv with y in its last column: labels or real targets

Inputs are scaled to [0, 1] and standardised with the constants of the data set, which are kept: `predict` needs them,
and so do pictures. What is not there is downloaded by torchvision; where there is no network, a sentence says which
files go where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from ntk_iterncgp.experiments.config import DataConfig
from ntk_iterncgp.experiments.datasets.base import Data, Scaling, chosen_of, from_arrays, labels_of
from ntk_iterncgp.experiments.datasets.known import DIGIT_NAMES, KNOWN, data_root, digits, known
from ntk_iterncgp.experiments.datasets.own import image_folders, inputs_for, user_arrays
from ntk_iterncgp.experiments.settings import ConfigError, require_choice

__all__ = ["Data", "Scaling", "chosen_of", "data_root", "inputs_for", "labels_of", "load"]

NAMES = ("digits", *KNOWN, "image_folder", "arrays")


def load(config: DataConfig, *, seed: int) -> Data:
    """Everything a run needs, limited as the settings say."""
    require_choice("data.name", config.name, NAMES)
    if config.name == "digits":
        data = from_arrays(*digits(seed), Scaling((0.3053,), (0.3762,)), DIGIT_NAMES)
    elif config.name in KNOWN:
        scaling, names = KNOWN[config.name][2:]
        data = from_arrays(known(config.name, True, config), known(config.name, False, config), scaling, names)
    elif config.name == "arrays":
        data = user_arrays(config, seed)
    else:
        data = image_folders(config, seed)
    train, test = _limited(data.train, config.train_limit, seed), _limited(data.test, config.test_limit, seed)
    if len(train) < 2 or len(test) < 1:  # type: ignore[arg-type]
        raise ConfigError(
            f"data.name '{config.name}' must have at least two inputs to learn from and one to be tested on; got "
            f"{len(train)} and {len(test)}. Try more data."  # type: ignore[arg-type]
        )
    if data.task == "classification" and data.num_outputs < 2:
        raise ConfigError(f"data.name '{config.name}' must have at least two classes; got one. Try other labels.")
    data = replace(data, train=train, test=test)
    ood = {name: _limited(_other(name, data, config, seed), config.ood_limit, seed) for name in config.ood}
    return replace(data, ood=ood)


def _other(name: str, data: Data, config: DataConfig, seed: int) -> Dataset[Any]:
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "rotated": lambda x: x.rot90(1, (2, 3)),
        "noise": lambda x: data.scaling.apply(torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))),
    }
    if name in changes:
        if len(data.input_shape) != 3:
            raise ConfigError(
                f"data.ood '{name}' must be left out where inputs are no images; got {data.input_shape}. Try []."
            )
        pairs = [data.test[i] for i in range(min(len(data.test), config.ood_limit or len(data.test)))]  # type: ignore[arg-type]
        inputs = torch.stack([x for x, _ in pairs])
        return TensorDataset(changes[name](inputs), torch.zeros(len(inputs), dtype=torch.long))
    require_choice("data.ood", name, (*changes, *KNOWN))
    inputs, labels = known(name, False, config)
    if tuple(inputs.shape[1:]) != data.input_shape:
        shape = tuple(inputs.shape[1:])
        raise ConfigError(f"data.ood '{name}' must have inputs of shape {data.input_shape}; got {shape}. Try 'noise'.")
    return TensorDataset(data.scaling.apply(inputs), labels)


def _limited(data: Dataset[Any], limit: int | None, seed: int) -> Dataset[Any]:
    """The first so many: official sets are shuffled already, and a fixed choice makes runs comparable."""
    size = len(data)  # type: ignore[arg-type]
    if limit is None or limit >= size:
        return data
    if isinstance(data, TensorDataset):
        return TensorDataset(*(tensor[:limit] for tensor in data.tensors))
    chosen = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:limit]
    return chosen_of(data, chosen)  # a folder is sorted by class
