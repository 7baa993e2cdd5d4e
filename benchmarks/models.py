"""Networks and images for the benchmarks: the package's LeNet and CIFAR ResNet-20, with weights and data if there."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from ntk_iterncgp.config import DataConfig
from ntk_iterncgp.datasets import load
from ntk_iterncgp.models import CifarResNet, lenet, load_checkpoint

__all__ = ["CifarResNet", "cifar_images", "cifar_resnet20", "data_root", "lenet"]


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
