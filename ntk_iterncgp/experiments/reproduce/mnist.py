"""MNIST with a Matérn kernel on raw pixels, against SVGP over time.

The paper stopped at 20 000 images for want of memory; here the kernel matrix is never held, so that `--n 60000` takes
longer but no more memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_iterncgp.experiments.config import DataConfig
from ntk_iterncgp.experiments.datasets.known import IDX_FILES, data_root, packed, read_idx
from ntk_iterncgp.experiments.reproduce import race_figures, svgp
from ntk_iterncgp.experiments.reproduce.contenders import ours, papers, svgps
from ntk_iterncgp.experiments.reproduce.outcome import Outcome
from ntk_iterncgp.experiments.reproduce.race import Classes
from ntk_iterncgp.experiments.reproduce.race_claims import claims
from ntk_iterncgp.experiments.reproduce.settings import Settings
from ntk_iterncgp.experiments.reproduce.style import style
from ntk_iterncgp.experiments.settings import ConfigError
from ntk_iterncgp.kernels import Matern32
from ntk_iterncgp.solver import Stopping

NUM_CLASSES = 10
MAX_NEWTON_STEPS = 20


@dataclass(frozen=True)
class MnistSettings(Settings):
    """As the paper; SVGP is given the time that IterNCGP took (the paper: 200 s on a GPU)."""

    QUICK: ClassVar[dict[str, Any]] = {
        "num_test": 1000,
        "num_seen": 500,
        "learning_rates": (0.01, 0.05),
        "inducing_points": (500,),
    }
    num_train: int = 20_000
    num_test: int = 10_000
    num_seen: int = 5000  # training data on which methods are scored
    lengthscale: float = 1.550934
    outputscale: float = 0.451591
    iterations_per_step: tuple[int, ...] = (5, 1)
    max_products: int = 50
    newton_tol: float = 0.01
    learning_rates: tuple[float, ...] = (0.001, 0.01, 0.05)
    inducing_points: tuple[int, ...] = (1000, 2500, 5000, 10_000)
    num_best: int = 4  # settings of SVGP that are shown
    svgp: bool = True
    svgp_time: float = 1.0  # of SVGP, in times of the slowest IterNCGP run


SETTINGS = MnistSettings


def run(settings: MnistSettings) -> Outcome:
    """Run the experiment: its table, figures and claims."""
    classes = load_mnist(settings)
    if settings.svgp:
        svgp.require_gpytorch()  # before any work is done
    kernel = Matern32(lengthscale=settings.lengthscale, outputscale=settings.outputscale)

    def stopping(j: int) -> Stopping:
        return Stopping(settings.max_products, j, MAX_NEWTON_STEPS, settings.newton_tol)

    first, *others = settings.iterations_per_step
    clocks = [papers(classes, kernel, stopping(first), None, "paper")]
    clocks += [papers(classes, kernel, stopping(j), None, f"paper, j ≤ {j}") for j in others]
    clocks += [ours(classes, kernel, stopping(first))]
    grid = [(U, rate) for U in settings.inducing_points for rate in settings.learning_rates] if settings.svgp else []
    seconds = settings.svgp_time * max(clock.seconds for clock in clocks)
    _, variational, heats = svgps(classes, kernel, grid, seconds, settings.seed, settings.num_best)
    rows, trials = (
        [{"seed": settings.seed} | row for clock in several for row in clock.rows]
        for several in ([*clocks, *variational], heats)
    )
    summary = race_figures.summary(rows)
    with style():
        figure = race_figures.curves(rows)
    tables = {"mnist": rows, "mnist_summary": summary} | ({"mnist_heats": trials} if trials else {})
    return Outcome({"mnist": figure}, tables, claims(summary))


def load_mnist(settings: MnistSettings) -> Classes:
    """A random part of the training images and of the test images; pixels in [0, 1]."""
    folder = data_root(DataConfig()) / "MNIST" / "raw"
    generator = torch.Generator().manual_seed(settings.seed)

    def part(name: str, is_train: bool, number: int) -> tuple[Tensor, Tensor]:
        files = [packed(folder / file) for file in IDX_FILES[is_train]]
        if None in files:
            raise ConfigError(
                f"'{folder}' must hold {' and '.join(f'{file}.gz' for file in IDX_FILES[is_train])}; got none of that. "
                "Try torchvision.datasets.MNIST(root, download=True), or the environment variable NTK_ITERNCGP_DATA "
                "for the folder above MNIST/raw."
            )
        images, labels = (read_idx(file) for file in files if file is not None)
        if len(images) != len(labels):
            raise ConfigError(
                f"'{folder}' must hold a label for each {name} image; got {len(images)} images, {len(labels)} "
                "labels. Try to download it again."
            )
        if number > len(labels):
            key = "num_train" if is_train else "num_test"
            raise ConfigError(
                f"{key} must be at most {len(labels)}, the {name} images there are; got {number}. Try less."
            )
        chosen = torch.randperm(len(labels), generator=generator)[:number]
        return images[chosen].flatten(1).float() / 255, labels[chosen].long()

    train, test = part("training", True, settings.num_train), part("test", False, settings.num_test)
    return Classes(*train, *test, NUM_CLASSES, min(settings.num_seen, settings.num_train))
