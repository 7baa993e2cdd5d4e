"""Networks and images for the benchmarks: the package's LeNet and CIFAR ResNet-20, with weights and data if there."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ntk_iterncgp.experiments.config import DataConfig
from ntk_iterncgp.experiments.datasets import load
from ntk_iterncgp.experiments.models import CifarResNet, lenet, load_checkpoint

__all__ = ["CifarResNet", "cifar_images", "cifar_resnet20", "data_root", "lenet", "mnist_images"]


def data_root() -> Path | None:
    root = os.environ.get("NTK_ITERNCGP_DATA")
    return Path(root) if root else None


def cifar_images(num_images: int) -> tuple[Tensor, Tensor]:
    """Training images of CIFAR-10 (binary version) where there are any, else noise: costs are the same."""
    root = data_root()
    if root is None or not (root / "cifar-10-batches-bin" / "data_batch_1.bin").exists():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(num_images, 3, 32, 32, generator=generator), torch.arange(num_images) % 10
    data = load(DataConfig(name="cifar10", train_limit=num_images, test_limit=2), seed=0)
    images, labels = data.train.tensors  # type: ignore[attr-defined]
    return images, labels


def cifar_resnet20() -> nn.Module:
    """With the public weights where they are, else as initialised."""
    model, root = CifarResNet(), data_root()
    file = root / "pretrained" / "cifar10_resnet20.safetensors" if root else None
    if file is not None and file.exists():
        load_checkpoint(model, file, "cifar_resnet20")
    return model.eval()


def mnist_images(num_images: int, *, train: bool = True, name: str = "MNIST") -> tuple[Tensor, Tensor]:
    """Images of MNIST or Fashion-MNIST (the official files) where there are any, else noise: costs are the same."""
    root, part = data_root(), "train" if train else "t10k"
    files = [root / name / "raw" / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")] if root else []
    if not files or not all(file.exists() for file in files):
        generator = torch.Generator().manual_seed(0)
        return torch.randn(num_images, 1, 28, 28, generator=generator), torch.arange(num_images) % 10
    pixels, labels = (np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8) for file in files)
    images = torch.from_numpy(pixels[16:].reshape(-1, 1, 28, 28)[:num_images].copy()).float() / 255
    return (images - 0.1307) / 0.3081, torch.from_numpy(labels[8:][:num_images].astype(np.int64))
