"""The user's own files: arrays, tables and folders of images. Nothing is unpickled."""

from __future__ import annotations

import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor
from torch.utils.data import Subset

from ntk_iterncgp.experiments.config import DataConfig
from ntk_iterncgp.experiments.datasets.base import Arrays, Data, Scaling, from_arrays, line
from ntk_iterncgp.experiments.settings import ConfigError

MOST_CLASSES = 100_000  # a larger label is no number of a class


def inputs_for(path: Path, scaling: Scaling, input_shape: tuple[int, ...]) -> Tensor:
    """New inputs from an .npz, .npy, .csv or image file, or a folder of images, scaled as in the fit."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise ConfigError(f"--input must be a file that exists; got '{path}'. Try an .npz, .npy, .csv or image.")
    if path.is_dir() or suffix in (".png", ".jpg", ".jpeg", ".bmp"):
        files = sorted(path.glob("*.*")) if path.is_dir() else [path]
        raw: Any = [
            _image(file, input_shape) for file in files if file.suffix.lower() in (".png", ".jpg", ".jpeg", ".bmp")
        ]
        if not raw:
            raise ConfigError(f"The folder '{path}' must hold images; got none. Try .png, .jpg or .bmp.")
        inputs = torch.stack(raw)
    elif suffix not in (".csv", ".npz", ".npy"):
        raise ConfigError(
            f"'{path}' must be an .npz with x, an .npy, a .csv or an image; got '{suffix}'. Try another name."
        )
    elif suffix == ".csv":
        inputs = _read_csv(path, last_is_label=None, num_inputs=math.prod(input_shape))[0]
    else:
        inputs = _read_numpy(path, need_labels=False)[0]
    if len(inputs) == 0 or not bool(inputs.isfinite().all()):
        what = "none" if len(inputs) == 0 else "NaN or infinity"
        raise ConfigError(f"'{path}' must hold inputs of finite numbers; got {what}. Try without those rows.")
    if inputs[0].numel() != math.prod(input_shape):
        raise ConfigError(
            f"'{path}' must hold inputs of shape {input_shape}, as in the fit; got {tuple(inputs.shape[1:])}. Try to "
            "reshape them."
        )
    return scaling.apply(inputs.reshape(-1, *input_shape))


def user_arrays(config: DataConfig, seed: int) -> Data:
    """Read data.train and data.test; without the latter a fifth of the former is held out."""
    x, y = _read_arrays(config.train, "data.train", config.task)
    if config.test is not None:
        test = _read_arrays(config.test, "data.test", config.task)
    elif len(y) < 3:
        raise ConfigError(f"'{config.train}' must hold three x, one to be tested on; got {len(y)}. Try a data.test.")
    else:
        chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        held_out = chosen[: max(1, len(y) // 5)]
        test, (x, y) = (x[held_out], y[held_out]), (x[chosen[len(held_out) :]], y[chosen[len(held_out) :]])
    if x.shape[1:] != test[0].shape[1:]:
        raise ConfigError(
            f"Test inputs must have the shape of training inputs, {tuple(x.shape[1:])}; got "
            f"{tuple(test[0].shape[1:])}. Try another data.test."
        )
    dims = [0, *range(2, x.ndim)]
    std = x.std(dims).clamp_min(1e-6)
    scaling = Scaling(tuple(x.mean(dims).tolist()), tuple(std.tolist()))
    if config.task == "regression":
        targets = Scaling((float(y.mean()),), (float(y.std().clamp_min(1e-12)),))
        scaled = [targets.apply(part[:, None]).float() for part in (y, test[1])]
        return replace(from_arrays((x, scaled[0]), (test[0], scaled[1]), scaling, ()), target_scaling=targets)
    names = tuple(map(str, range(int(max(y.max(), test[1].max())) + 1)))
    return from_arrays((x, y), test, scaling, names)


def _read_arrays(name: str | None, setting: str, task: str) -> Arrays:
    if name is None:
        raise ConfigError(
            f"{setting} must be a file where data.name is 'arrays'; got null. Try an .npz with x and y, or a .csv."
        )
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"{setting} must be a file that exists; got '{path}'. Try an .npz with x and y, or a .csv.")
    inputs, labels = _read(path)
    assert labels is not None
    if len(labels) != len(inputs) or len(labels) < 2:
        raise ConfigError(
            f"'{path}' must hold one y for each of at least two x; got {len(inputs)} x and {len(labels)} y. Try to "
            "drop the rest."
        )
    if not bool(inputs.isfinite().all() and labels.isfinite().all()):
        raise ConfigError(f"'{path}' must hold finite numbers; got NaN or infinity. Try without those rows.")
    if task == "regression":
        return inputs, labels.double()
    whole = labels.long()
    if not torch.equal(whole.to(labels), labels) or int(whole.min()) < 0:
        raise ConfigError(
            f"The labels in '{path}' must be whole numbers from 0; got others. Try data.task=regression for real "
            "targets."
        )
    if int(whole.max()) >= MOST_CLASSES:
        raise ConfigError(
            f"The labels in '{path}' must be the numbers of the classes, from 0 to {MOST_CLASSES - 1}; got "
            f"{int(whole.max())}. Try numbers from 0 without gaps."
        )
    return inputs, whole


def _read(path: Path) -> tuple[Tensor, Tensor | None]:
    """Inputs and labels, by the kind of the file."""
    if path.suffix.lower() == ".csv":
        return _read_csv(path, last_is_label=True)
    if path.suffix.lower() not in (".npz", ".npy"):
        raise ConfigError(f"'{path}' must be an .npz with x and y, or a .csv; got '{path.suffix}'. Try another name.")
    return _read_numpy(path, need_labels=True)


def _read_numpy(path: Path, *, need_labels: bool) -> tuple[Tensor, Tensor | None]:
    try:
        content: Any = np.load(path, allow_pickle=False)
        arrays = {"x": content} if isinstance(content, np.ndarray) else {key: content[key] for key in content.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"'{path}' must be an .npz or .npy file of numbers; got: {line(error).rstrip('.')}. Try numpy.savez."
        ) from error
    if "x" not in arrays or (need_labels and "y" not in arrays):
        wanted = "x and y" if need_labels else "x"
        found = ", ".join(arrays) or "none"
        raise ConfigError(f"'{path}' must hold the arrays {wanted}; got {found}. Try np.savez(path, x=x, y=y).")
    x = _numbers(path, "x", arrays["x"])
    x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
    x = x[:, None] if x.ndim in (1, 3) else x  # one column, or images of one channel
    return x, _one_each(path, _numbers(path, "y", arrays["y"])) if need_labels else None


def _numbers(path: Path, name: str, array: Any) -> Tensor:
    if array.dtype.kind not in "buif" or array.ndim == 0:
        what = "a single number" if array.ndim == 0 else f"the kind {array.dtype}"
        raise ConfigError(
            f"The array {name} in '{path}' must hold real numbers, a row for each datum; got {what}. Try "
            "x.astype(float)."
        )
    return torch.as_tensor(array)


def _one_each(path: Path, y: Tensor) -> Tensor:  # (N,) or (N, 1) -> (N,)
    if y.ndim > 1 and y[0].numel() != 1:
        raise ConfigError(
            f"The array y in '{path}' must hold one label or target for each x; got the shape {tuple(y.shape)}. Try "
            "y.argmax(1) where it says 1 for the class and 0 elsewhere."
        )
    return y.reshape(-1)


def _read_csv(path: Path, *, last_is_label: bool | None, num_inputs: int = 0) -> tuple[Tensor, Tensor | None]:
    """Numbers with commas, quoted or not, with or without a line of headings.

    `None`: a label is there if there is a column for it.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:  # spreadsheets mark their files as UTF-8
            first = file.readline()
        heading = any(c.isalpha() and c not in "eE" for c in first)
        how: dict[str, Any] = {"delimiter": ",", "quotechar": '"', "encoding": "utf-8-sig", "ndmin": 2}
        table = np.loadtxt(path, skiprows=int(heading), dtype=np.float64, **how)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{path}' must hold numbers with commas between; got: {line(error).rstrip('.')}. Try without a header."
        ) from error
    if table.size == 0:
        raise ConfigError(f"'{path}' must hold numbers; got an empty file. Try a line for each input.")
    labelled = table.shape[1] == num_inputs + 1 if last_is_label is None else last_is_label
    values = torch.from_numpy(table)
    return (values[:, :-1].float(), values[:, -1]) if labelled else (values.float(), None)


def image_folders(config: DataConfig, seed: int) -> Data:
    """Open folders of images, one per class; without data.test a fifth is held out."""
    scaling = Scaling((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    steps = [
        torchvision.transforms.Resize(config.image_size),
        torchvision.transforms.CenterCrop(config.image_size),
        torchvision.transforms.ToTensor(),
        torchvision.transforms.Normalize(scaling.mean, scaling.std),
    ]

    def opened(name: str | None, setting: str, classes: tuple[str, ...] | None = None) -> Any:
        try:
            return _Images(str(name), torchvision.transforms.Compose(steps), classes)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"{setting} must be a folder with a folder of images per class; got '{name}'. Try another one."
            ) from error

    train = opened(config.train, "data.train")
    names, shape = tuple(train.classes), (3, config.image_size, config.image_size)
    if config.test is not None:
        return Data(train, opened(config.test, "data.test", names), scaling, names, shape)
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    fifth = max(1, len(chosen) // 5)
    return Data(Subset(train, chosen[fifth:]), Subset(train, chosen[:fifth]), scaling, names, shape)


class _Images(torchvision.datasets.ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """A folder of images with the labels of given classes: of itself it would number those that it happens to have."""

    def __init__(self, root: str, transform: Any, given: tuple[str, ...] | None) -> None:
        self.given = given
        super().__init__(root, transform, allow_empty=given is not None)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        found, labels = super().find_classes(directory)
        if self.given is None:
            return found, labels
        unknown = sorted(set(found) - set(self.given))
        if unknown:
            raise ConfigError(
                f"data.test must have folders called like those in data.train; got {', '.join(unknown[:3])}"
                f"{' …' if len(unknown) > 3 else ''} besides, in '{directory}'. Try to rename them."
            )
        return list(self.given), {name: label for label, name in enumerate(self.given)}


def _image(path: Path, input_shape: tuple[int, ...]) -> Tensor:  # (channels, side, side), in [0, 1]
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            scaled = image.convert("L" if input_shape[0] == 1 else "RGB").resize((input_shape[2], input_shape[1]))
            pixels = torch.as_tensor(np.array(scaled), dtype=torch.float32) / 255
    except (OSError, UnidentifiedImageError) as error:
        raise ConfigError(
            f"'{path}' must be an image that can be read; got: {line(error).rstrip('.')}. Try without it."
        ) from error
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
