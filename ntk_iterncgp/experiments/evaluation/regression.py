"""Real targets: every method as a Gaussian over them, its hyperparameters chosen by the same protocol, side by side.

    map          N(f(x), σ²)
    prior        N(f(x), J Jᵀ/δ + σ²)
    exact        N(f(x), Z (λ/σ² + δ)⁻¹ Zᵀ + σ²), Z the rows of J in the eigenbasis of JᵀJ over the training data
    iterncgp     the fitted posterior at δ and σ²

Each method has the noise σ², and all but the first a prior precision δ. Both are chosen by the NLL, on targets that the
method is not scored on (`crossfit.folds`): on a coarse grid, then around its best point.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from ntk_iterncgp.experiments.config import RunConfig
from ntk_iterncgp.experiments.evaluation.crossfit import Fold
from ntk_iterncgp.experiments.evaluation.stopwatch import Stopwatch
from ntk_iterncgp.experiments.evaluation.uncertainty import (
    Difference,
    RegressionMetrics,
    bootstrap_difference,
    gaussian_losses,
    regression_metrics,
)
from ntk_iterncgp.likelihoods.quadrature import standard_normal_quantile
from ntk_iterncgp.posterior.tuning import ValidationPart
from ntk_iterncgp.posterior.weight_space import WeightPosterior

COARSE = 4
NOISES = torch.logspace(-6, 1, 57, dtype=torch.float64)  # variances, targets having unit variance
LABELS = {
    "map": "constant noise (MAP)",
    "prior": "prior only",
    "exact": "exact linearised Laplace",
    "iterncgp": "IterNCGP",
}


class GaussianFamily(ABC):
    """Predictions of one method for each δ of `precisions` and each σ²; targets are scaled to unit variance."""

    precisions: Tensor  # (g,); one where a method has none

    @abstractmethod
    def moments(self, precision: Tensor, noise: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:  # (b,), (b,)
        """Mean and variance of the latent function at the inputs `chosen`, without the noise."""


@final
class Fixed(GaussianFamily):
    """Moments that no prior precision changes: a mean alone, or a Gaussian process with a given kernel."""

    precisions = torch.ones(1, dtype=torch.float64)

    def __init__(self, mean: Tensor, variance: Tensor) -> None:  # (N,), (N,)
        self.mean, self.variance = mean.double(), variance.double()

    def moments(self, precision: Tensor, noise: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean[chosen], self.variance[chosen]


@final
class Spectral(GaussianFamily):
    """Z (λ/σ² + δ)⁻¹ Zᵀ; with λ = 0 it is the prior alone."""

    def __init__(self, mean: Tensor, Z: Tensor, eigenvalues: Tensor, precisions: Tensor) -> None:  # (N,), (N, K), (K,)
        self.mean, self.squares = mean.double(), Z.double().square()
        self.eigenvalues, self.precisions = eigenvalues.double().clamp_min(0), precisions

    def moments(self, precision: Tensor, noise: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean[chosen], self.squares[chosen] @ (1 / (self.eigenvalues / noise + precision))


@final
class IterNCGP(GaussianFamily):
    """The fitted posterior, at any precision and noise."""

    def __init__(
        self, posterior: WeightPosterior, parts: Sequence[ValidationPart], precisions: Tensor, *, refined: bool
    ) -> None:
        self.posterior, self.refined, self.precisions = posterior, refined, precisions
        self.places = {"outputs": 0, "shifted": 0, "covariance": -3, "cross": -3, "targets": 0}
        self.all = {name: torch.cat([getattr(part, name) for part in parts], at) for name, at in self.places.items()}
        self.first = parts[0]

    def moments(self, precision: Tensor, noise: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        device = self.posterior.images.device
        rows: dict[str, Any] = {
            name: value.index_select(self.places[name], chosen.to(value.device)) for name, value in self.all.items()
        }
        part = replace(self.first, **rows)
        mean, covariance = part.moments(
            self.posterior, precision.reshape(1).to(device), noise.to(device), refined=self.refined
        )
        return mean[:, 0].cpu(), covariance[:, 0, 0].clamp_min(0).cpu()


@dataclass(frozen=True, eq=False)
class RegressionResult:
    """One method's line of the table; `mean`, `variance` (with noise) and `losses` in the units of the targets."""

    name: str
    metrics: RegressionMetrics
    width: float  # of the 95 % interval, on average
    values: list[tuple[float, float]]  # δ and σ (in the units of the targets) of each fold
    mean: Tensor = field(repr=False)  # (b,) at the scored inputs
    variance: Tensor = field(repr=False)
    losses: Tensor = field(repr=False)
    fit_seconds: float = 0.0
    predict_seconds: float = 0.0
    fit_bytes: int | None = None  # the peak of memory, where it was measured
    difference: Difference | None = None  # its NLL less that of IterNCGP

    @property
    def label(self) -> str:
        """The name that tables show."""
        return LABELS[self.name]


@dataclass(frozen=True, eq=False)
class RegressionComparison:
    """Everything a report shows."""

    results: list[RegressionResult]
    targets: Tensor  # of the scored inputs (b,), in their own units
    unavailable: dict[str, str]  # label -> why
    exact_ratio: Tensor | None = None  # our latent variance over the exact one at each test input, same δ and σ²
    information: float | None = None

    def __getitem__(self, name: str) -> RegressionResult:
        return next(result for result in self.results if result.name == name)


Loss = Callable[[int, int], float]  # of places on the grids of δ and σ²


def best_pair(num_precisions: int, num_noises: int, loss: Loss) -> tuple[int, int]:
    """The place of the least loss: every fourth of both, then around the best, by halves."""
    sizes = (num_precisions, num_noises)
    known: dict[tuple[int, int], float] = {}

    def look(places: Sequence[tuple[int, int]]) -> tuple[int, int]:
        for place in places:
            if place not in known and all(0 <= i < size for i, size in zip(place, sizes, strict=True)):
                known[place] = loss(*place)
        return min(known, key=lambda place: (known[place], place))

    best = look(list(itertools.product(*({*range(0, size, COARSE), size - 1} for size in sizes))))
    for step in (2, 1):
        moved = True
        while moved:  # along a valley of equal loss the best point may lie further on
            around = [(best[0] + i, best[1] + j) for i in (-step, 0, step) for j in (-step, 0, step)]
            found = look(around)
            best, moved = found, found != best
    return best


def tune(family: GaussianFamily, targets: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """δ and σ² with the least NLL of the targets (N,) at the inputs `chosen`."""
    y = targets[chosen]

    def loss(i: int, j: int) -> float:
        mean, variance = family.moments(family.precisions[i], NOISES[j], chosen)
        return float(gaussian_losses(mean, variance + NOISES[j], y).mean())

    i, j = best_pair(len(family.precisions), len(NOISES), loss)
    return family.precisions[i], NOISES[j]


@dataclass(frozen=True)
class Units:
    """From targets scaled to mean zero and unit variance back to their own units."""

    mean: float
    std: float

    def value(self, scaled: Tensor) -> Tensor:
        """From scaled to original units."""
        return scaled * self.std + self.mean

    def variance(self, scaled: Tensor) -> Tensor:
        """From scaled to original units, squared."""
        return scaled * self.std**2


def compare(
    families: dict[str, GaussianFamily],
    targets: Tensor,  # (N,), scaled
    folds: Sequence[Fold],
    *,
    start: tuple[float, float],  # δ and σ² where nothing is tuned
    units: Units,
    watch: Stopwatch,  # what fitting and predicting took
    config: RunConfig,
    unavailable: dict[str, str],
) -> RegressionComparison:
    """Tune each method, score it in the units of the targets, and set its NLL beside that of IterNCGP."""
    results = {name: _scored(name, family, targets, folds, start, units) for name, family in families.items()}
    iterncgp, compared = results["iterncgp"], []
    for name, result in results.items():
        difference = None
        if name != "iterncgp":
            resamples = config.evaluate.bootstrap
            difference = bootstrap_difference(iterncgp.losses, result.losses, num_resamples=resamples, seed=config.seed)
        compared.append(
            replace(
                result,
                difference=difference,
                fit_seconds=watch.seconds.get(f"fit {name}", 0.0),
                predict_seconds=watch.seconds.get(f"see {name}", 0.0),
                fit_bytes=watch.peak_bytes.get(f"fit {name}"),
            )
        )
    ratio = None
    if "exact" in families:
        precision, std = iterncgp.values[0]
        pair, everything = torch.tensor([precision, (std / units.std) ** 2]).double(), torch.arange(len(targets))
        variances = [families[name].moments(pair[0], pair[1], everything)[1] for name in ("iterncgp", "exact")]
        ratio = variances[0] / variances[1]
    y = units.value(targets[_scored_places(folds)])
    return RegressionComparison(compared, y, unavailable, ratio)


def _scored(
    name: str, family: GaussianFamily, targets: Tensor, folds: Sequence[Fold], start: tuple[float, float], units: Units
) -> RegressionResult:
    pairs, parts = [], []
    for tuning, score in folds:
        pair = tune(family, targets, tuning) if len(tuning) else _nearest(family, start)
        mean, variance = family.moments(*pair, score)
        pairs.append((float(pair[0]), float(pair[1].sqrt()) * units.std))
        parts.append((units.value(mean), units.variance(variance + pair[1])))
    order = torch.cat([score for _, score in folds]).argsort()
    mean, variance = (torch.cat(part)[order] for part in zip(*parts, strict=True))
    y = units.value(targets[_scored_places(folds)])
    width = 2 * standard_normal_quantile(0.95) * float(variance.sqrt().mean())
    losses = gaussian_losses(mean, variance, y)
    return RegressionResult(name, regression_metrics(mean, variance, y), width, pairs, mean, variance, losses)


def _scored_places(folds: Sequence[Fold]) -> Tensor:
    return torch.cat([score for _, score in folds]).sort().values


def _nearest(family: GaussianFamily, start: tuple[float, float]) -> tuple[Tensor, Tensor]:
    precision, noise = torch.tensor(start, dtype=torch.float64)
    return family.precisions[(family.precisions.log() - precision.log()).abs().argmin()], noise
