"""Data sets known by name: from official files under the data root where they lie, else through torchvision."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path
from urllib.error import URLError

import numpy as np
import torch
import torchvision
from torch import Tensor

from ntk_iterncgp.experiments.config import DataConfig
from ntk_iterncgp.experiments.datasets.base import Arrays, Scaling, line
from ntk_iterncgp.experiments.settings import ConfigError

# Folder under the root, torchvision's class, mean and standard deviation of each channel, names of the classes.
DIGIT_NAMES = tuple(map(str, range(10)))
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
KNOWN: dict[str, tuple[str, str, Scaling, tuple[str, ...]]] = {
    "mnist": ("MNIST/raw", "MNIST", Scaling((0.1307,), (0.3081,)), DIGIT_NAMES),
    "fashion_mnist": ("FashionMNIST/raw", "FashionMNIST", Scaling((0.2860,), (0.3530,)), CLOTHES),
    "kmnist": ("KMNIST/raw", "KMNIST", Scaling((0.1918,), (0.3483,)), DIGIT_NAMES),
    "cifar10": (
        "cifar-10-batches-bin",
        "CIFAR10",
        Scaling((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        CIFAR10_NAMES,
    ),
    "cifar100": (
        "cifar-100-binary",
        "CIFAR100",
        Scaling((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        tuple(map(str, range(100))),
    ),
    "svhn": ("", "SVHN", Scaling((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)), DIGIT_NAMES),
}
IDX_FILES = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def data_root(config: DataConfig) -> Path:
    """Return the folder of data sets: data.root, NTK_ITERNCGP_DATA or data/."""
    return Path(config.root or os.environ.get("NTK_ITERNCGP_DATA") or "data")


def digits(seed: int) -> tuple[Arrays, Arrays]:
    """A stratified split of the 1797 digits: 1347 to learn from, 450 to be tested on."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=450, random_state=seed, stratify=labels)
    x, x_test = (torch.as_tensor(p, dtype=torch.float32).reshape(-1, 1, 8, 8) for p in parts[:2])
    return (x, torch.as_tensor(parts[2])), (x_test, torch.as_tensor(parts[3]))


def known(name: str, train: bool, config: DataConfig) -> Arrays:
    """From files under the root where they are, else through torchvision."""
    root, (folder, class_name, _, _) = data_root(config), KNOWN[name]
    if folder.endswith("/raw"):
        files = [packed(root / folder / file) for file in IDX_FILES[train]]
        if all(files):
            images, labels = (read_idx(file) for file in files if file is not None)
            return images[:, None].float() / 255, labels.long()
    if folder.startswith("cifar"):
        found = _read_cifar(root / folder, train)
        if found is not None:
            return found
    maker = getattr(torchvision.datasets, class_name)
    which = {"split": "train" if train else "test"} if name == "svhn" else {"train": train}
    try:
        raw = maker(str(root), download=config.download, **which)
    except (URLError, OSError, RuntimeError) as error:
        files_needed = {
            "/raw": f"{', '.join(f'{f}.gz' for f in (*IDX_FILES[True], *IDX_FILES[False]))} into '{root / folder}'",
            "bin": f"data_batch_1.bin to data_batch_5.bin and test_batch.bin into '{root / folder}'",
            "binary": f"train.bin and test.bin into '{root / folder}'",
        }
        where = next((text for end, text in files_needed.items() if folder and folder.endswith(end)), None)
        where = where or f"train_32x32.mat and test_32x32.mat into '{root}'"
        raise ConfigError(
            f"{class_name} must be under '{root}' or be downloadable; got: {line(error).rstrip('.')}. Try to put "
            f"{where}, or another folder in data.root or the environment variable NTK_ITERNCGP_DATA."
        ) from error
    images, labels = (
        torch.as_tensor(np.asarray(raw.data)),
        torch.as_tensor(raw.labels if name == "svhn" else raw.targets),
    )
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] == 3:
        images = images.permute(0, 3, 1, 2)
    return images.float() / 255, labels.long()


def packed(path: Path) -> Path | None:
    """The file as it is, or as it was downloaded."""
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def read_idx(path: Path) -> Tensor:
    """The IDX format: magic number with the number of dimensions, sizes, bytes; packed or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
        ndim = content[3]
        shape = struct.unpack(f">{ndim}I", content[4 : 4 + 4 * ndim])
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape).copy())
    except (OSError, EOFError, ValueError, IndexError, struct.error, zlib.error) as error:
        raise ConfigError(f"'{path}' must be whole; got: {line(error).rstrip('.')}. Try to get it again.") from error


def _read_cifar(folder: Path, train: bool) -> Arrays | None:
    """The binary version: one label byte (CIFAR-100: two, the second is the fine one), then 3072 bytes per image."""
    ten = folder.name.startswith("cifar-10-")
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    names = names if ten else ["train.bin" if train else "test.bin"]
    files, head = [folder / name for name in names if (folder / name).is_file()], 1 if ten else 2
    if not files:
        return None
    parts = []
    for file in files:
        raw = np.fromfile(file, dtype=np.uint8)
        if raw.size == 0 or raw.size % (3072 + head):
            raise ConfigError(
                f"'{file}' must be a multiple of {3072 + head} bytes; got {raw.size}. Try to get it again."
            )
        parts.append(raw.reshape(-1, 3072 + head))
    rows = np.concatenate(parts)
    images = torch.from_numpy(rows[:, head:].reshape(-1, 3, 32, 32).copy()).float() / 255
    return images, torch.from_numpy(rows[:, head - 1].astype(np.int64))
