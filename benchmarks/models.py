"""Networks and images for the benchmarks: a LeNet-size CNN and the CIFAR ResNet-20."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def lenet(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(hidden + (x if self.downsample is None else self.downsample(x)))


class CifarResNet(nn.Module):
    """ResNet-(6n + 2) with widths 16, 32, 64; state dict keys as in the public CIFAR-10 weights."""

    def __init__(self, blocks: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = (
            nn.Conv2d(3, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
        )
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(inner, outer, stride), *(Block(outer, outer, 1) for _ in range(blocks - 1)))
            for inner, outer, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        )
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def data_root() -> Path | None:
    root = os.environ.get("NTK_ITERNCGP_DATA")
    return Path(root) if root else None


def cifar_images(num_images: int) -> tuple[Tensor, Tensor]:
    """Training images of CIFAR-10 (binary version) where there are any, else noise: costs are the same."""
    root = data_root()
    file = root / "cifar-10-batches-bin" / "data_batch_1.bin" if root else None
    if file is None or not file.exists():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(num_images, 3, 32, 32, generator=generator), torch.arange(num_images) % 10
    raw = np.fromfile(file, dtype=np.uint8).reshape(-1, 3073)[:num_images]
    images = torch.from_numpy(raw[:, 1:].reshape(-1, 3, 32, 32).copy()).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (CIFAR_MEAN, CIFAR_STD))
    return (images - mean) / std, torch.from_numpy(raw[:, 0].astype(np.int64))


def cifar_resnet20() -> nn.Module:
    """With the public weights where they are, else as initialised."""
    model, root = CifarResNet(), data_root()
    file = root / "pretrained" / "cifar10_resnet20.safetensors" if root else None
    if file is not None and file.exists():
        model.load_state_dict(load_file(file))
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
