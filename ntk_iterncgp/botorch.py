"""Posteriors as BoTorch models, for Bayesian optimisation on a network or on a Gaussian process.

    model = GPModel(gp)                                  # or LaplaceModel(la)
    acquisition = qLogExpectedImprovement(model, best_f=y.max())
    candidate, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=8, raw_samples=64)

A batch of b × q inputs gets b joint Gaussians over q inputs and all outputs, differentiable in the inputs; samples are
BoTorch's own. What is modelled is the latent function f: for a Gaussian likelihood the mean of an observation, for
counts a log-rate, for classes the logits. Observing one more point is `update`, at its own cost and not that of a fit.

Fantasies, for qKnowledgeGradient, are Gaussian observations Y at points X that nobody has made. For all of them at once

    E[f(x) | Y] = f(x) + k(x, X) (k(X, X) + σ²I)⁻¹ (Y − f(X)),    k the posterior covariance,

which is differentiable in X. For a network this is its linearised model, whose mean moves with the fantasies.
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
from botorch.sampling.base import MCSampler
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from laplace.utils.enums import Likelihood
from linear_operator import to_linear_operator
from linear_operator.utils.cholesky import psd_safe_cholesky
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

    @abstractmethod
    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:  # (…, q, d) -> (…, q, C), (…, q·C, q·C)
        """Joint moments of each batch, with the output index fastest."""

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
        mean, covariance = self._joint(X)
        *batch, q, C = mean.shape
        if observation_noise is not False:
            noise = observation_noise if isinstance(observation_noise, Tensor) else self._noise()
            covariance = covariance + torch.diag_embed(noise.to(mean).expand(*batch, q, C).flatten(-2))
        if output_indices is not None:
            mean, covariance = _of_outputs(mean, covariance, output_indices)
            C = mean.shape[-1]
        # As an operator it is factored when samples are drawn, with jitter where points nearly coincide.
        mean, operator = mean.to(X), to_linear_operator(covariance.to(X))
        if C == 1:
            found = GPyTorchPosterior(MultivariateNormal(mean[..., 0], operator))
        else:
            found = GPyTorchPosterior(MultitaskMultivariateNormal(mean, operator))
        return found if posterior_transform is None else posterior_transform(found)

    def subset_output(self, idcs: list[int]) -> Model:
        """Return the model of some outputs."""
        return _OutputsOf(self, idcs)

    def fantasize(  # type: ignore[override]
        self, X: Tensor, sampler: MCSampler, observation_noise: Tensor | None = None, **kwargs: Any
    ) -> Model:
        """Return the models given sampled observations at X, one for each sample and batch.

        Args:
            X: The points (…, n, d).
            sampler: Draws the observations (s, …, n, C) from their posterior, noise included.
            observation_noise: Its variances (…, n or 1, C); None: that of the likelihood.
            **kwargs: BoTorch's others, ignored.

        Returns:
            A model of batch shape (s, …), differentiable in X.
        """
        noise = self._noise() if observation_noise is None else observation_noise
        return _Fantasies(self, X, sampler(self.posterior(X, observation_noise=noise)), noise)

    def _given(self, X: Tensor, Y: Tensor, noise: Tensor | None = None) -> Model:
        """Of batches of observations: a model for each."""
        if X.ndim < 2 or Y.ndim < 2 or Y.shape[-2:] != (X.shape[-2], self.num_outputs):
            raise ValueError(
                f"`X` and `Y` must have the shapes (…, n, d) and (…, n, {self.num_outputs}); got {tuple(X.shape)} and "
                f"{tuple(Y.shape)}. Try Y[..., None] for one output."
            )
        return _Fantasies(self, X, Y, self._noise() if noise is None else noise)


class _OutputsOf(_LatentModel):
    """Some outputs of a model."""

    def __init__(self, whole: _LatentModel, outputs: list[int]) -> None:
        super().__init__()
        self.whole, self.outputs = whole, list(outputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @property
    def batch_shape(self) -> torch.Size:
        return self.whole.batch_shape

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        return _of_outputs(*self.whole._joint(X), self.outputs)

    def _noise(self) -> Tensor:
        return self.whole._noise().expand(self.whole.num_outputs)[self.outputs]

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Model:  # type: ignore[override]
        return self._given(X, Y, kwargs.get("noise"))


class _Fantasies(_LatentModel):
    """A model given observations that were not made, for each batch of them."""

    def __init__(self, base: _LatentModel, X: Tensor, Y: Tensor, noise: Tensor) -> None:
        super().__init__()
        self.base, self.X, self.Y, self.noise = base, X, Y, noise

    @property
    def num_outputs(self) -> int:
        return self.base.num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size(torch.broadcast_shapes(self.X.shape[:-2], self.Y.shape[:-2]))

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        batch, q = torch.broadcast_shapes(X.shape[:-2], self.batch_shape), X.shape[-2]
        both = torch.cat([X.expand(*batch, *X.shape[-2:]), self.X.expand(*batch, *self.X.shape[-2:])], -2)
        mean, covariance = self.base._joint(both)  # (…, q + n, C), (…, (q + n)·C, (q + n)·C)
        here, C = q * mean.shape[-1], mean.shape[-1]
        cross, among = covariance[..., :here, here:], covariance[..., here:, here:]
        noise = self.noise.to(mean).expand(*mean[..., q:, :].shape).flatten(-2)
        factor = psd_safe_cholesky(among + torch.diag_embed(noise))
        gain = torch.cholesky_solve(cross.mT, factor).mT  # k(x, X) (k(X, X) + σ²I)⁻¹
        misfit = (self.Y.to(mean) - mean[..., q:, :]).flatten(-2)
        moved = (gain @ misfit[..., None])[..., 0].unflatten(-1, (q, C))
        return mean[..., :q, :] + moved, covariance[..., :here, :here] - gain @ cross.mT

    def _noise(self) -> Tensor:
        return self.base._noise()

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Model:  # type: ignore[override]
        return self._given(X, Y, kwargs.get("noise"))


class _OneModel(_LatentModel):
    """A posterior of this library. Abstract."""

    @property
    def batch_shape(self) -> torch.Size:
        """None: there is one model."""
        return torch.Size()

    @abstractmethod
    def _latent(self, x: Tensor, *, joint: bool) -> tuple[Tensor, Tensor]:  # (n, d)
        """Moments (n, C) and (n, C, C), or (n·C, n·C) with the output index fastest."""

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        batch, (q, d) = X.shape[:-2], X.shape[-2:]
        mean, covariance = self._moments(X.reshape(-1, q, d))
        return mean.reshape(*batch, *mean.shape[1:]), covariance.reshape(*batch, *covariance.shape[1:])

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


class GPModel(_OneModel):
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

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Model:  # type: ignore[override]
        """Return the model given more data (n, d) and (n, C); this one stays as it is.

        Of batches (…, n, d) and (…, n, C) a model for each, as for fantasies.
        """
        if X.ndim != 2 or Y.ndim != 2:
            return self._given(X, Y, kwargs.get("noise"))
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
                f"{self.gp.likelihood!r}. Try the response of samples of f; fantasies need Gaussian "
                "observations."
            )
        return torch.as_tensor(self.gp.likelihood.variance, dtype=torch.float64)


class LaplaceModel(_OneModel):
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

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Model:  # type: ignore[override]
        """Return the model given more data (n, d) and (n, C); this one stays as it is.

        With mean="network" only the variance changes: the mean is that of the network. Of batches (…, n, d) and
        (…, n, C) a model for each, as for fantasies, whose mean moves.
        """
        if X.ndim != 2 or Y.ndim != 2:
            return self._given(X, Y, kwargs.get("noise"))
        la = copy(self.la)
        la.update(DataLoader(TensorDataset(X.detach(), Y.detach()), batch_size=len(X)))
        return LaplaceModel(la)

    def _latent(self, x: Tensor, *, joint: bool) -> tuple[Tensor, Tensor]:
        return self.la.latent(x.to(self.la._dtype), joint=joint, contrasts="all")

    def _noise(self) -> Tensor:
        if self.la.likelihood != Likelihood.REGRESSION:
            raise ValueError(
                "`observation_noise` must be False for classification; got True. Try the response of samples of f; "
                "fantasies need Gaussian observations."
            )
        return self.la.sigma_noise.detach().square()


def _as_inputs_of(gp: NonConjugateGP, X: Tensor) -> Tensor:
    """In the dtype of the training inputs."""
    return X.to(gp._trained_inputs)


def _of_outputs(mean: Tensor, covariance: Tensor, outputs: list[int]) -> tuple[Tensor, Tensor]:
    """Moments (…, q, C) and (…, q·C, q·C) of some outputs."""
    kept = torch.arange(covariance.shape[-1], device=mean.device).reshape(mean.shape[-2:])[:, outputs].flatten()
    return mean[..., outputs], covariance[..., kept, :][..., kept]
