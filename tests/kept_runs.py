"""The programs whose files are in tests/kept: with weights and data that are the same bits on every machine.

python -m tests.kept_runs       after a new format version: writes its files beside the older ones, which stay
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp import Checkpoint, NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.experiments import cli
from ntk_iterncgp.persistence import checkpoint as module
from ntk_iterncgp.persistence import files
from tests.checkpoint_helpers import Killed, checkpoint_in, die_at_save

KEPT = Path(__file__).parent / "kept"
NEW = torch.tensor([[0.0, 0.0], [1.0, -0.5], [-3.0, 4.0]], dtype=torch.float64)


def fractions(*shape: int) -> Tensor:
    """Multiples of 1/16 in no order."""
    number = int(np.prod(shape))
    return ((torch.arange(number) * 37 % 61 - 30).double() / 16).reshape(shape)


def data() -> tuple[Tensor, Tensor]:
    return fractions(20, 2), torch.arange(20) * 7 % 11 % 3


def network(checkpoint: Checkpoint | None) -> tuple[Tensor, Tensor]:
    """Moments after a fit by clusters."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    for p in model.parameters():
        p.data = 0.5 * fractions(*p.shape)
    la: Any = Laplace(model, "classification", "all", "iterncgp", num_actions=3)
    la.fit(DataLoader(TensorDataset(*data()), 4), checkpoint=checkpoint)
    mean, covariance = la.predictive_moments(NEW)
    return mean, covariance.diagonal(dim1=1, dim2=2).sum(1)


def gp(checkpoint: Checkpoint | None) -> tuple[Tensor, Tensor]:
    """The same after a fit with a kernel."""
    model = NonConjugateGP(
        kernels.Matern32(0.75, 2.0), likelihoods.Softmax(3), max_products=6, seed=0, policy="curvature_residual"
    )
    model.fit(*data(), checkpoint=checkpoint)
    mean, covariance = model.latent(NEW)
    return mean, covariance.diagonal(dim1=1, dim2=2).sum(1)


CHECKPOINTS: dict[str, Callable[[Checkpoint | None], tuple[Tensor, Tensor]]] = {"network": network, "kernel": gp}
SAVES = {"network": 9, "kernel": 3}  # after which they were killed: half-way


def write_checkpoint(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SAVING_SHARE", float("inf"))
        die_at_save(SAVES[name], patch)
        try:
            CHECKPOINTS[name](checkpoint_in(Path(folder)))
        except Killed:
            newest = max(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
            newest.rename(KEPT / f"checkpoint-{name}-{module.VERSION}.safetensors")


def write_kernel_posterior(task: str) -> None:
    X, y = data()
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # no path of this machine is to be in the file
        np.savez("data.npz", x=X.float(), y=y if task == "classification" else X.sum(1).float())
        Path("empty.yaml").touch()
        settings = ["data.name=arrays", f"data.task={task}", "data.train=data.npz", "data.test=data.npz"]
        settings += ["kernel.name=Matern32", "kernel.lengthscale=0.75", "kernel.max_products=4", "kernel.noise=0.25"]
        code = cli.main(["fit", "empty.yaml", "--output-dir", "out", *(t for s in settings for t in ("--set", s))])
        os.chdir(here)
        assert code == 0
        (Path(folder) / "out" / "posterior.safetensors").rename(
            KEPT / f"posterior-kernel-{task}-{files.POSTERIOR_VERSION}.safetensors"
        )


if __name__ == "__main__":
    for name in CHECKPOINTS:
        write_checkpoint(name)
        print(name, *CHECKPOINTS[name](None))
    for task in ("classification", "regression"):
        write_kernel_posterior(task)
