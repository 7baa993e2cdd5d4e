"""The posterior GP: a small-matrix downdate of the prior, ready at any state of the solver.

    mean(x) = m(x) + k(x, X) S w            cov(x, x') = k(x, x') − k(x, X) S M⁻¹ Sᵀ k(X, x')

with M = SᵀKS + SᵀW⁺S at the current point. The second term grows with every action, so the variance only falls, and
stays at or above that of the exact posterior for the same curvature W.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.quadrature import covariance_root
from ntk_iterncgp.linalg.columns import Buffer, KroneckerColumns
from ntk_iterncgp.priors.base import Prior
from ntk_iterncgp.solver.state import State


@dataclass(frozen=True)
class Evidence:
    """Bounds on the Laplace log-evidence log p(y | f) − ½ vᵀg − ½ log|I + W^{½}KW^{½}| at the current point.

    `lower` is safe to maximise, `upper` is not; `value` takes the middle of the two log-determinants. Once all actions
    have been taken, the three agree.
    """

    lower: float
    upper: float
    value: float


class FunctionPosterior(ABC):
    """A posterior GP, whichever way it was computed: what a front door asks of it."""

    state: Any  # of the run that made it
    prior: Prior

    @abstractmethod
    def latent(self, x: Tensor, *, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Mean (b, C) and covariance (b, C, C), or (b·C, b·C) if joint, of the latent functions at x."""

    @abstractmethod
    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (b, C) and variances (b, C): those of `latent`, without the covariances between outputs."""

    def sample(self, x: Tensor, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Joint draws of the latent functions at x: (num_samples, b, C)."""
        mean, covariance = self.latent(x, joint=True)
        noise = torch.randn(num_samples, mean.numel(), generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + (noise @ covariance_root(covariance).T).reshape(num_samples, *mean.shape)

    @abstractmethod
    def log_evidence(self) -> Evidence:
        """Two-sided bounds on the Laplace log-evidence."""

    @abstractmethod
    def elbo(self) -> float:
        """E_q[log p(y | f)] − KL(q ‖ p): a lower bound on the true log-evidence for any likelihood."""

    @abstractmethod
    def bytes_per_input(self, *, marginal: bool = False) -> int:
        """The memory that one input takes in `latent`, or in `marginals`."""


class Posterior(FunctionPosterior):
    """The posterior GP of a solver's state, evaluated at new inputs; small matrices are in float64."""

    state: State

    def __init__(self, state: State) -> None:
        self.state = state
        self.prior = state.problem.prior

    def latent(self, x: Tensor, *, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Mean (b, C) and covariance (b, C, C), or (b·C, b·C) if joint, of the latent functions at x."""
        prior_mean, cross, covariance = self.prior.at(x, self.state.buffer, joint=joint)
        mean = prior_mean + cross @ self.state.iterate.coefficients
        half = self.state.factor.half_solve(cross.flatten(0, 1).T)  # (B, b·C)
        if joint:
            covariance = covariance - half.T @ half
        else:
            half = half.T.unflatten(0, cross.shape[:2])  # (b, C, B)
            covariance = covariance - half @ half.mT
        return mean, floor_diagonal(covariance)

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (b, C) and variances (b, C): those of `latent`, without the covariances between outputs.

        With Kronecker actions U ⊗ H that is far less work. Output c sees U ⊗ h_c, so that r² numbers for each of them
        take the place of the whole factor of M, which has (r q)².
        """
        state, actions = self.state, self.state.buffer.actions
        if isinstance(actions, KroneckerColumns):
            data = KroneckerColumns(actions.factor, actions.contrasts.new_ones(1, 1))  # U alone
            prior_mean, cross, covariance = self.prior.at(x, Buffer(data, data))
            u = cross[:, 0]  # k(x, X) U (b, r)
            w = state.iterate.coefficients.reshape(-1, actions.contrasts.shape[1])  # (r, q)
            mean = prior_mean + u @ (w @ actions.contrasts.T)
            removed = torch.stack([(u @ root.T).square().sum(1) for root in self._roots_by_output], 1)
        else:
            prior_mean, cross, covariance = self.prior.at(x, state.buffer)
            mean = prior_mean + cross @ state.iterate.coefficients
            removed = state.factor.half_solve(cross.flatten(0, 1).T).square().sum(0).reshape(mean.shape)
        return mean, (covariance.diagonal(dim1=1, dim2=2) - removed).clamp_min(0)

    @cached_property
    def _roots_by_output(self) -> list[Tensor]:
        """R_c (r, r) with R_cᵀR_c = (I ⊗ h_c)ᵀM⁻¹(I ⊗ h_c), triangular.

        Through QR, which rounds no more than a solve with the factor of M does; the product itself would square its
        condition.
        """
        actions = self.state.buffer.actions
        assert isinstance(actions, KroneckerColumns)
        eye = torch.eye(actions.factor.size, dtype=torch.float64, device=actions.device)
        halves = (self.state.factor.half_solve(torch.kron(eye, h[:, None])) for h in actions.contrasts)  # (B, r)
        return [torch.linalg.qr(half, mode="r").R for half in halves]

    def log_evidence(self) -> Evidence:
        """Two-sided bounds on the Laplace log-evidence, from those on the log-determinant."""
        lower, upper = self.state.tight_log_determinant_bounds
        fit = self.state.objective
        return Evidence(lower=fit - upper / 2, upper=fit - lower / 2, value=fit - (lower + upper) / 4)

    def elbo(self) -> float:
        """E_q[log p(y | f)] − KL(q ‖ p): a lower bound on the true log-evidence for any likelihood."""
        state, problem = self.state, self.state.problem
        w = state.iterate.coefficients
        removed = float(state.factor.solve(state.gram).trace()) if state.buffer.size else 0.0
        divergence = 0.5 * (float(w @ state.gram @ w) + state.span_bounds[1] - removed)
        images = self.prior.lift(state.buffer.images)
        total = torch.zeros((), dtype=torch.float64, device=state.latent.device)
        for data, covariance in self.prior.blocks():
            rows = images.rows(data)
            half = state.factor.half_solve(rows.flatten(0, 1).T).T.unflatten(0, rows.shape[:2])
            covariance = floor_diagonal(covariance - half @ half.mT)
            targets = problem.targets[data]
            total += problem.likelihood.on(data).expected_log_prob(state.latent[data], covariance, targets).sum()
        return float(self.prior.shard.sum(total)) - divergence

    def bytes_per_input(self, *, marginal: bool = False) -> int:
        """The memory that one input takes in `latent`, or in `marginals`."""
        C, actions = self.prior.num_outputs, self.state.buffer.actions
        if marginal and isinstance(actions, KroneckerColumns):
            return 8 * (3 * actions.factor.size + C * (2 * C + 2))
        return 8 * C * (3 * self.state.buffer.size + 2 * C + 2)


def floor_diagonal(covariance: Tensor) -> Tensor:
    """A variance that came out negative by rounding is zero."""
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    return covariance.diagonal_scatter(diagonal.clamp_min(0.0), dim1=-2, dim2=-1)
