"""Every configuration is a run from beginning to end, here on a handful of made-up images in the official layouts."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.io import savemat

from ntk_iterncgp.experiments import cli, datasets, models
from ntk_iterncgp.experiments.config import DataConfig

ROOT = Path(__file__).resolve().parents[2]
TOY = "data.train_limit=40 data.test_limit=20 data.ood_limit=10 data.held_out=0 data.download=false fit.num_actions=3"
TOY += " model.train_epochs=1 model.train_batch_size=20 evaluate.link_samples=32 evaluate.bootstrap=50"
KERNEL = "data.train_limit=40 data.test_limit=20 data.ood_limit=10 data.download=false kernel.max_products=2"


def pixels(number: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (number, *shape), dtype=np.uint8)


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder as a user has it; the checkpoints are networks as initialised."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("MNIST", "FashionMNIST", "KMNIST"):
        for part, number in (("train", 50), ("t10k", 30)):
            write_idx(folder / name / "raw" / f"{part}-images-idx3-ubyte", pixels(number, 28, 28))
            write_idx(folder / name / "raw" / f"{part}-labels-idx1-ubyte", (np.arange(number) % 10).astype(np.uint8))
    for sub, heads, files in (
        ("cifar-10-batches-bin", 1, ("data_batch_1.bin", "test_batch.bin")),
        ("cifar-100-binary", 2, ("train.bin", "test.bin")),
    ):
        (folder / sub).mkdir()
        for file in files:
            rows = pixels(50, heads + 3072)
            rows[:, heads - 1] = np.arange(50) % (10 if heads == 1 else 100)
            rows.tofile(folder / sub / file)
    for part in ("train", "test"):  # zeros are called 10 in the official files
        labels = (1 + np.arange(20) % 10).astype(np.uint8)[:, None]
        savemat(folder / f"{part}_32x32.mat", {"X": np.moveaxis(pixels(20, 32, 32, 3), 0, 3), "y": labels})
    (folder / "pretrained").mkdir()
    for depth in (20, 56):
        torch.manual_seed(0)
        state = models.build(f"cifar_resnet{depth}", 10, (3, 32, 32)).state_dict()
        save_file(state, folder / "pretrained" / f"cifar10_resnet{depth}.safetensors")
    return folder


@pytest.mark.cli
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configuration_runs_and_compares_ours_with_its_baselines(
    path: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NTK_ITERNCGP_DATA", str(root))
    monkeypatch.chdir(root)
    toy = (KERNEL if "matern" in path.name else TOY).split()
    settings = [text for setting in toy for text in ("--set", setting)]
    assert cli.main(["evaluate", str(path), *settings, "--output-dir", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    names = {method["name"] for method in results["methods"]}
    assert {"map", "temperature", "iterncgp"} <= names and all(0 < m["nll"] < 100 for m in results["methods"])
    assert {"report.html", "config.yaml", "posterior.safetensors"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("name", "shape", "first"),
    [("kmnist", (1, 28, 28), [0, 1, 2]), ("cifar100", (3, 32, 32), [0, 1, 2]), ("svhn", (3, 32, 32), [1, 2, 3])],
)
def test_the_official_layouts_of_the_other_data_sets_are_read(
    name: str, shape: tuple[int, ...], first: list[int], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda *_: True)  # no checksum fits made-up files
    data = datasets.load(DataConfig(name=name, root=str(root), download=False), seed=0)
    assert data.input_shape == shape and datasets.labels_of(data.test)[:3].tolist() == first
    image = data.scaling.undo(data.test[0][0][None])[0]
    assert 0 <= float(image.min()) < 0.1 and 0.9 < float(image.max()) <= 1.0
