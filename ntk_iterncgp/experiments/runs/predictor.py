"""What a posterior file can be asked: latent moments at new inputs, of a network or of a kernel.

Both kinds are a tree of tensors and numbers (`state`). A network's needs no training data. A kernel's holds them, since
k(x, X) S is asked at every new input. Neither holds what the solver needs: they can be asked, not refined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from ntk_iterncgp import kernels
from ntk_iterncgp.experiments.evaluation.links import class_probabilities
from ntk_iterncgp.gp.non_conjugate import NonConjugateGP
from ntk_iterncgp.laplace_torch.detector import Detector
from ntk_iterncgp.likelihoods import Gaussian
from ntk_iterncgp.linalg.columns import Buffer, DenseColumns, KroneckerColumns
from ntk_iterncgp.linalg.factor import Factor
from ntk_iterncgp.posterior.predictive import Uncertainty, classification_uncertainty
from ntk_iterncgp.priors.gram import GramPrior


class Predictor(ABC):
    """Latent moments, in float64 on the CPU."""

    detector: Detector | None = None  # of unfamiliar inputs, where one was made by the fit

    @property
    @abstractmethod
    def noise_variance(self) -> float:
        """Of a regression; one otherwise."""

    @abstractmethod
    def latent(self, x: Tensor, contrasts: int | str = "auto") -> tuple[Tensor, Tensor]:  # (b, C), (b, C, C)
        """Mean and covariance at inputs scaled as in the fit; of a network from so many contrasts of its outputs."""

    def scored(
        self, x: Tensor, link: str, num_points: int, contrasts: int | str = "auto"
    ) -> tuple[Tensor, Uncertainty]:
        """Class probabilities (b, C) by a link, and the scores of each input."""
        mean, covariance = self.latent(x, contrasts)
        return class_probabilities(mean, covariance, link=link, num_samples=num_points), classification_uncertainty(
            mean, covariance, num_samples=num_points
        )

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What the posterior file holds."""


@final
class NetworkPredictor(Predictor):
    """A fitted flavour of laplace-torch."""

    def __init__(self, la: Any) -> None:
        self.la, self.detector = la, la._detector_now()

    @property
    def noise_variance(self) -> float:
        return float(self.la.sigma_noise) ** 2

    def latent(self, x: Tensor, contrasts: int | str = "auto") -> tuple[Tensor, Tensor]:
        mean, covariance = self.la.latent(x.to(self.la._device), contrasts=contrasts)
        return mean.double().cpu(), covariance.double().cpu()

    def scored(
        self, x: Tensor, link: str, num_points: int, contrasts: int | str = "auto"
    ) -> tuple[Tensor, Uncertainty]:
        by_probit, by_points, scores = self.la._scored(x.to(self.la._device), contrasts, num_points)
        found = (by_probit if link == "probit" else by_points).double().cpu()
        return found / found.sum(1, keepdim=True), Uncertainty.joined([scores], lambda parts: parts[0].double().cpu())

    def state(self) -> dict[str, Any]:
        return dict(self.la.state_dict())


@final
@dataclass(frozen=True, eq=False)
class KernelPredictor(Predictor):
    """A fitted Gaussian process: its prior, actions S, coefficients w and M = SᵀKS + SᵀW⁺S."""

    kind: str  # the kernel's name
    prior: GramPrior
    actions: DenseColumns | KroneckerColumns
    coefficients: Tensor  # w (B,)
    action_gram: Tensor  # M (B, B)
    noise: float

    @classmethod
    def of(cls, gp: NonConjugateGP) -> KernelPredictor:
        """Keep of a fitted Gaussian process what predictions need."""
        state, prior = gp.posterior_.state, gp.posterior_.prior
        actions = state.buffer.actions.whole()
        assert isinstance(prior, GramPrior) and isinstance(actions, (DenseColumns, KroneckerColumns))
        if not prior.shard.is_whole:  # fitted by several processes, asked by one
            prior = GramPrior(prior.kernels, prior.inputs, prior.mean[0], shard=actions.shard)
        M = state.gram + state.noise_gram
        M.diagonal().add_(state.rounding)
        noise = gp.likelihood.variance if isinstance(gp.likelihood, Gaussian) else 1.0
        kind = type(prior.kernels[0]).__name__
        return cls(kind, prior, actions, state.iterate.coefficients, M, noise)

    @property
    def noise_variance(self) -> float:
        return self.noise

    @cached_property
    def factor(self) -> Factor:
        return Factor(self.action_gram)

    def latent(self, x: Tensor, contrasts: int | str = "auto") -> tuple[Tensor, Tensor]:
        x = x.to(self.prior.inputs)
        buffer = Buffer(self.actions, self.actions)  # predictions ask for the actions alone
        prior_mean, cross, covariance = self.prior.at(x, buffer)
        half = self.factor.half_solve(cross.flatten(0, 1).T).T.unflatten(0, cross.shape[:2])
        mean = prior_mean + cross @ self.coefficients
        return mean.cpu(), (covariance - half @ half.mT).cpu()

    def state(self) -> dict[str, Any]:
        values = {name: value.detach() for name, value in self.prior.kernels[0].hyperparameters().items()}
        shared = self.actions.contrasts if isinstance(self.actions, KroneckerColumns) else None
        return {
            "kernel": self.kind,
            "hyperparameters": values,
            "inputs": self.prior.inputs,
            "prior_mean": self.prior.mean[0],
            "actions": self.actions.factor.matrix,
            "contrasts": shared,
            "coefficients": self.coefficients,
            "action_gram": self.action_gram,
            "noise": self.noise,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> KernelPredictor:
        """The same again; a `ValueError` where its parts do not fit together."""
        kernel = getattr(kernels, state["kernel"])(**{k: v.to(device) for k, v in state["hyperparameters"].items()})
        inputs, mean, matrix = (state[name].to(device) for name in ("inputs", "prior_mean", "actions"))
        contrasts = state["contrasts"]
        actions: DenseColumns | KroneckerColumns
        if contrasts is None:
            actions = DenseColumns.of(matrix, len(mean))
        else:
            actions = KroneckerColumns(DenseColumns.of(matrix, 1), contrasts.to(device))
        coefficients, M = state["coefficients"].to(device), state["action_gram"].to(device)
        if (actions.num_data, actions.size, actions.size) != (len(inputs), len(coefficients), len(M)):
            raise ValueError("its inputs, actions and matrices are of different sizes")
        prior = GramPrior([kernel], inputs, mean, shard=actions.shard)
        return cls(state["kernel"], prior, actions, coefficients, M, float(state["noise"]))
