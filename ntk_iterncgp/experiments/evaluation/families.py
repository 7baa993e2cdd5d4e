"""A method as a family of predictions, one for each value of its only hyperparameter, at inputs that were seen once.

    temperature        softmax(f / T)
    prior, SoD         cov(δ) = J Jᵀ/δ − Z diag(1/(δ(γ + δ))) Zᵀ
    exact, last layer, ELLA, KFAC    cov(δ) = Z diag(1/(λ + δ)) Zᵀ
    iterncgp           `ValidationPart`: J Jᵀ and J A at unit precision
    calibrated         the same over an output temperature, both chosen at once: not by a grid

The rows of J at an input are the expensive part, and all methods share them; afterwards a prior precision costs small
products, so that all hyperparameters can be chosen by the same protocol (`crossfit.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from ntk_iterncgp.experiments.evaluation.links import class_probabilities, mutual_information
from ntk_iterncgp.posterior.calibration import LEAST_DATA, calibrate
from ntk_iterncgp.posterior.predictive import margin_variance
from ntk_iterncgp.posterior.tuning import ValidationPart
from ntk_iterncgp.posterior.weight_space import WeightPosterior

INPUTS_AT_ONCE = 2000


class Family(ABC):
    """Predictions for each value of `grid`."""

    grid: Tensor
    start: int  # the index used where nothing is tuned
    is_fixed: bool = False  # `start` is all there is: a refined mean of a classifier is the mode under one prior

    @abstractmethod
    def probabilities(self, index: int, chosen: Tensor, link: str) -> Tensor:  # (b, C)
        """Class probabilities at the inputs `chosen`, with hyperparameter `grid[index]`."""

    def doubt(self, index: int, chosen: Tensor) -> Tensor | None:  # (b,)
        """Epistemic uncertainty, or None where a method has no notion of it."""
        return None

    def choose(self, chosen: Tensor) -> int | None:
        """The index that these data choose; None: that of the least NLL on them."""
        return None

    def output_temperature(self, index: int) -> float | None:
        """Of a method that has one beside the hyperparameter of the grid."""
        return None


@final
class Tempered(Family):
    """softmax(f / T); a grid of one is the network as it is."""

    def __init__(self, outputs: Tensor, grid: Tensor) -> None:  # (N, C), (g,)
        self.outputs, self.grid = outputs.double(), grid
        self.start = int((grid - 1).abs().argmin())

    def probabilities(self, index: int, chosen: Tensor, link: str) -> Tensor:
        return (self.outputs[chosen] / self.grid[index]).softmax(1)


class Latent(Family):
    """A Gaussian over the outputs. Abstract."""

    def __init__(self, grid: Tensor, start: float, num_samples: int) -> None:
        self.grid, self.num_samples = grid, num_samples
        self.start = int((grid.log() - torch.tensor(start).log()).abs().argmin())

    @abstractmethod
    def moments(self, index: int, chosen: Tensor) -> tuple[Tensor, Tensor]:  # (b, C), (b, C, C)
        """Mean and covariance at the inputs `chosen`."""

    def probabilities(self, index: int, chosen: Tensor, link: str) -> Tensor:
        return torch.cat(
            [
                class_probabilities(*self.moments(index, part), link=link, num_samples=self.num_samples)
                for part in chosen.split(INPUTS_AT_ONCE)
            ]
        )

    def doubt(self, index: int, chosen: Tensor) -> Tensor | None:
        parts = chosen.split(INPUTS_AT_ONCE)
        return torch.cat([mutual_information(*self.moments(index, p), num_samples=self.num_samples) for p in parts])

    def margin(self, index: int, chosen: Tensor) -> Tensor:  # (b,)
        """The variance of the difference between the two largest outputs."""
        return torch.cat([margin_variance(*self.moments(index, part)) for part in chosen.split(INPUTS_AT_ONCE)])


@final
class Downdated(Latent):
    """The prior less what some actions say: Z (N, C, B) and γ (B,); none of them, and it is the prior alone."""

    def __init__(
        self, outputs: Tensor, prior: Tensor, Z: Tensor, gamma: Tensor, grid: Tensor, start: float, num_samples: int
    ) -> None:
        super().__init__(grid, start, num_samples)
        self.outputs, self.prior, self.Z, self.gamma = outputs.double(), prior, Z, gamma

    def moments(self, index: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        precision, Z = self.grid[index], self.Z[chosen].double()
        known = (Z / (precision * (self.gamma + precision))) @ Z.mT
        return self.outputs[chosen], self.prior[chosen].double() / precision - known


@final
class Spectral(Latent):
    """Z diag(1/(λ + δ)) Zᵀ: Z (N, C, K) are rows of J in the eigenbasis of the curvature, λ (K,) its eigenvalues."""

    def __init__(
        self, outputs: Tensor, Z: Tensor, eigenvalues: Tensor, grid: Tensor, start: float, num_samples: int
    ) -> None:
        super().__init__(grid, start, num_samples)
        self.outputs, self.Z, self.eigenvalues = outputs.double(), Z, eigenvalues.clamp_min(0)

    def moments(self, index: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        root = (self.eigenvalues + self.grid[index]).rsqrt()
        half = self.Z[chosen] * root.to(self.Z.dtype)  # a sum of squares: nothing cancels, so float32 will do
        return self.outputs[chosen], (half @ half.mT).double()


@final
class Tabulated(Latent):
    """Covariances (g, N, C, C) that were computed for each precision of the grid while the rows were at hand."""

    def __init__(self, outputs: Tensor, covariances: Tensor, grid: Tensor, start: float, num_samples: int) -> None:
        super().__init__(grid, start, num_samples)
        self.outputs, self.covariances = outputs.double(), covariances

    def moments(self, index: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self.outputs[chosen], self.covariances[index, chosen].double()


@final
class IterNCGP(Latent):
    """The fitted posterior, at any prior precision."""

    def __init__(
        self,
        posterior: WeightPosterior,
        parts: Sequence[ValidationPart],
        noise_scale: Tensor,
        *,
        refined: bool,
        grid: Tensor,
        start: float,
        num_samples: int,
    ) -> None:
        super().__init__(grid, start, num_samples)
        self.posterior, self.noise_scale, self.refined = posterior, noise_scale, refined
        self.is_fixed = refined
        # Inputs are counted from the back where a leading dimension may hold the layers.
        self.places = {"outputs": 0, "shifted": 0, "covariance": -3, "cross": -3, "targets": 0}
        self.all = {name: torch.cat([getattr(part, name) for part in parts], at) for name, at in self.places.items()}
        self.first = parts[0]

    def prior_variance(self, index: int, chosen: Tensor) -> Tensor:  # (b,)
        """The trace of the prior covariance."""
        unit = self.all["covariance"].index_select(-3, chosen.to(self.all["covariance"].device))
        return unit.diagonal(dim1=-2, dim2=-1).sum(-1).reshape(-1, len(chosen)).sum(0) / self.grid[index].to(unit)

    def at(self, chosen: Tensor) -> ValidationPart:
        """What was seen of some of the inputs."""
        rows: dict[str, Any] = {
            name: value.index_select(self.places[name], chosen.to(value.device)) for name, value in self.all.items()
        }
        return replace(self.first, **rows)

    def moments(self, index: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        precision = self.grid[index].reshape(1).to(self.posterior.images.device)
        return self.at(chosen).moments(self.posterior, precision, self.noise_scale, refined=self.refined)


@final
class Calibrated(Family):
    """The same with an output temperature T beside the precision, chosen together as `la.calibrate` does.

    Its grid is that of the precisions it was calibrated to so far; the first pair is that of the fit.
    """

    def __init__(self, ours: IterNCGP, pair: tuple[float, float]) -> None:
        self.ours, self.pairs, self.start = ours, [pair], 0

    @property
    def grid(self) -> Tensor:  # type: ignore[override]
        return torch.tensor([precision for _, precision in self.pairs], dtype=torch.float64)

    def choose(self, chosen: Tensor) -> int:
        if len(chosen) < LEAST_DATA:
            return self.start
        found = calibrate([self.ours.at(chosen)], self.ours.posterior, self.ours.noise_scale)
        self.pairs.append((found.output_temperature, found.prior_precision))
        return len(self.pairs) - 1

    def output_temperature(self, index: int) -> float:
        return self.pairs[index][0]

    def _moments(self, index: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        T, precision = self.pairs[index]
        ours = self.ours
        some = torch.tensor([precision], dtype=torch.float64, device=ours.posterior.images.device)
        mean, covariance = ours.at(chosen).moments(ours.posterior, some, ours.noise_scale, refined=ours.refined)
        return mean / T, covariance / T**2

    def probabilities(self, index: int, chosen: Tensor, link: str) -> Tensor:
        parts, number = chosen.split(INPUTS_AT_ONCE), self.ours.num_samples
        found = [class_probabilities(*self._moments(index, part), link=link, num_samples=number) for part in parts]
        return torch.cat(found)

    def doubt(self, index: int, chosen: Tensor) -> Tensor:
        parts, number = chosen.split(INPUTS_AT_ONCE), self.ours.num_samples
        return torch.cat([mutual_information(*self._moments(index, part), num_samples=number) for part in parts])
