"""Posteriors as BoTorch models, for Bayesian optimisation on a network or on a Gaussian process.

    model = GPModel(gp)                                  # or LaplaceModel(la)
    acquisition = qLogExpectedImprovement(model, best_f=y.max())
    candidate, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=8, raw_samples=64)

A batch of b × q inputs gets b joint Gaussians over q inputs and all outputs, differentiable in the inputs; samples are
BoTorch's own. What is modelled is the latent function f: for a Gaussian likelihood the mean of an observation, for
counts a log-rate, for classes the logits. Observing one more point is `update`, at its own cost and not that of a fit.
"""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import FantasizeMixin, Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from laplace.utils.enums import Likelihood
from linear_operator import to_linear_operator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.gp.non_conjugate import NonConjugateGP
from ntk_iterncgp.laplace_torch import IterNCGPAllLaplace, IterNCGPLastLayerLaplace
from ntk_iterncgp.likelihoods import Gaussian

__all__ = ["GPModel", "LaplaceModel"]

JOINT_ENTRIES = 2**22  # of a covariance between all inputs of several batches, of which the blocks are wanted


class _LatentModel(Model, FantasizeMixin):  # type: ignore[misc]
    """Latent moments as a BoTorch posterior. Abstract."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """C."""

    @property
    def batch_shape(self) -> torch.Size:
        """None: there is one model."""
        return torch.Size()

    @abstractmethod
    def _latent(self, x: Tensor, *, joint: bool) -> tuple[Tensor, Tensor]:  # (n, d)
        """Moments (n, C) and (n, C, C), or (n·C, n·C) with the output index fastest."""

    def _moments(self, X: Tensor) -> tuple[Tensor, Tensor]:  # (b, q, d) -> (b, q, C), (b, q·C, q·C)
        """Joint moments of each batch: the blocks of those of several batches."""
        _, q, d = X.shape
        if q == 1:
            mean, covariance = self._latent(X[:, 0], joint=False)
            return mean[:, None], covariance
        size = q * self.num_outputs
        means, blocks = [], []
        for part in X.split(max(1, int(JOINT_ENTRIES**0.5) // size)):
            mean, joint = self._latent(part.reshape(-1, d), joint=True)
            each = torch.arange(len(part), device=X.device)
            means.append(mean.reshape(len(part), q, -1))
            blocks.append(joint.reshape(len(part), size, len(part), size)[each, :, each])
        return torch.cat(means), torch.cat(blocks)

    @abstractmethod
    def _noise(self) -> Tensor:  # (1,) or (C,)
        """The variance of an observation around f."""

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """Compute the joint posterior of f at q points each.

        Args:
            X: The points (…, q, d).
            output_indices: Which outputs are wanted; None: all.
            observation_noise: Whether to add that of the likelihood, or the variances to add (…, q or 1, C).
            posterior_transform: BoTorch's, applied to the posterior.

        Returns:
            The posterior, of event shape (q, C), differentiable in X.
        """
        if X.ndim < 2:
            raise ValueError(f"`X` must have the shape (…, q, d); got {tuple(X.shape)}. Try X[None] for one point.")
        batch, (q, d) = X.shape[:-2], X.shape[-2:]
        mean, covariance = self._moments(X.reshape(-1, q, d))
        C = mean.shape[-1]
        if observation_noise is not False:
            noise = observation_noise if isinstance(observation_noise, Tensor) else self._noise()
            noise = noise.to(mean).expand(*batch, q, C).reshape(-1, q * C)
            covariance = covariance + torch.diag_embed(noise)
        if output_indices is not None:
            kept = torch.arange(q * C, device=X.device).reshape(q, C)[:, output_indices]
            mean, C = mean[..., output_indices], kept.shape[1]
            covariance = covariance[:, kept.flatten()][:, :, kept.flatten()]
        mean = mean.reshape(*batch, q, C).to(X)
        # As an operator it is factored when samples are drawn, with jitter where points nearly coincide.
        operator = to_linear_operator(covariance.reshape(*batch, q * C, q * C).to(X))
        if C == 1:
            found = GPyTorchPosterior(MultivariateNormal(mean[..., 0], operator))
        else:
            found = GPyTorchPosterior(MultitaskMultivariateNormal(mean, operator))
        return found if posterior_transform is None else posterior_transform(found)


class GPModel(_LatentModel):
    """A fitted `NonConjugateGP` as a BoTorch model.

    Args:
        gp: The Gaussian process.
    """

    def __init__(self, gp: NonConjugateGP) -> None:
        super().__init__()
        gp.report_  # noqa: B018  raises if it is not fitted
        self.gp = gp

    @property
    def num_outputs(self) -> int:
        """C, the number of latent functions."""
        return self.gp.likelihood.num_outputs

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> GPModel:
        """Return the model given more data (n, d) and (n, C); this one stays as it is."""
        _require_one_batch(X)
        gp = copy(self.gp)
        gp.update(
            _as_inputs_of(gp, X), Y if self.num_outputs > 1 and isinstance(gp.likelihood, Gaussian) else Y[..., 0]
        )
        return GPModel(gp)

    def _latent(self, x: Tensor, *, joint: bool) -> tuple[Tensor, Tensor]:
        return self.gp.latent(_as_inputs_of(self.gp, x), joint=joint)

    def _noise(self) -> Tensor:
        if not isinstance(self.gp.likelihood, Gaussian):
            raise ValueError(
                "`observation_noise` must be False where observations are not Gaussian around f; got True with "
                f"{self.gp.likelihood!r}. Try the response of samples of f."
            )
        return torch.as_tensor(self.gp.likelihood.variance, dtype=torch.float64)


class LaplaceModel(_LatentModel):
    """A network with its fitted posterior as a BoTorch model.

    Args:
        la: The posterior, made with `enable_backprop=True`, for inputs that are vectors.
    """

    def __init__(self, la: IterNCGPAllLaplace | IterNCGPLastLayerLaplace) -> None:
        super().__init__()
        if not la.enable_backprop:
            raise ValueError(
                "`la` must be differentiable in its inputs; got one that is not. Try Laplace(model, …, "
                "enable_backprop=True)."
            )
        la.report_  # noqa: B018  raises if it is not fitted
        self.la = la

    @property
    def num_outputs(self) -> int:
        """C, the outputs of the network."""
        return int(self.la.n_outputs)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> LaplaceModel:
        """Return the model given more data (n, d) and (n, C); this one stays as it is.

        With mean="network" only the variance changes: the mean is that of the network.
        """
        _require_one_batch(X)
        la = copy(self.la)
        la.update(DataLoader(TensorDataset(X.detach(), Y.detach()), batch_size=len(X)))
        return LaplaceModel(la)

    def _latent(self, x: Tensor, *, joint: bool) -> tuple[Tensor, Tensor]:
        return self.la.latent(x.to(self.la._dtype), joint=joint, contrasts="all")

    def _noise(self) -> Tensor:
        if self.la.likelihood != Likelihood.REGRESSION:
            raise ValueError(
                "`observation_noise` must be False for classification; got True. Try the response of samples of f."
            )
        return self.la.sigma_noise.detach().square()


def _as_inputs_of(gp: NonConjugateGP, X: Tensor) -> Tensor:
    """In the dtype of the training inputs."""
    return X.to(gp._trained_inputs)


def _require_one_batch(X: Tensor) -> None:
    if X.ndim != 2:
        raise ValueError(
            f"`X` must be one batch of points (n, d); got {tuple(X.shape)}. Try one batch after the other."
        )
