"""The exact posterior GP, at the mode, from the factored linear system: what `Posterior` is once all is computed.

    mean(x) = m(x) + k(x, X) v            cov(x, x') = k(x, x') − k(x, X) (K + W⁺)⁻¹ k(X, x')

(K + W⁺)⁻¹ on the range of W: R&W, Alg. 3.2 and 3.4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ntk_iterncgp.posterior.function_space import Evidence, FunctionPosterior, floor_diagonal
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver.exact import ExactState


class ExactPosterior(FunctionPosterior):
    """The posterior GP of an exact fit, evaluated at new inputs, in float64."""

    state: ExactState
    prior: GramPrior

    def __init__(self, state: ExactState) -> None:
        assert isinstance(state.problem.prior, GramPrior)
        self.state, self.prior = state, state.problem.prior

    def latent(self, x: Tensor, *, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Mean (b, C) and covariance (b, C, C), or (b·C, b·C) if joint, of the latent functions at x."""
        x, cross = self._cross(x)
        half, unseen = self.state.system.halves(cross)
        mean = self._mean(cross)
        if joint:
            removed = half.mT @ half  # (1 or C, b, b)
            covariance = self.prior.covariance_at(x, joint=True).unflatten(0, mean.shape)
            covariance = covariance.unflatten(2, mean.shape) - _on_diagonal(removed, mean.shape[1])
            if unseen is not None:
                covariance = covariance + torch.einsum("cib,die->bced", unseen, unseen)
            return mean, floor_diagonal(covariance.flatten(2).flatten(0, 1))
        covariance = self.prior.covariance_at(x)
        removed = half.square().sum(1).T.expand(mean.shape)  # (b, C)
        covariance = covariance - torch.diag_embed(removed)
        if unseen is not None:
            covariance = covariance + torch.einsum("cib,dib->bcd", unseen, unseen)
        return mean, floor_diagonal(covariance)

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (b, C) and variances (b, C)."""
        x, cross = self._cross(x)
        half, unseen = self.state.system.halves(cross)
        mean = self._mean(cross)
        variance = self.prior.covariance_at(x).diagonal(dim1=1, dim2=2) - half.square().sum(1).T
        if unseen is not None:
            variance = variance + unseen.square().sum(1).T
        return mean, variance.clamp_min(0)

    def log_evidence(self) -> Evidence:
        """The Laplace log-evidence; the bounds agree."""
        value = self.state.log_evidence
        return Evidence(lower=value, upper=value, value=value)

    def elbo(self) -> float:
        """E_q[log p(y | f)] − KL(q ‖ p), KL = ½ [vᵀg + log|I + W^½ K W^½| − tr(W Σ)]."""
        state, problem = self.state, self.state.problem
        total = -0.5 * (state.iterate.penalty(None) + state.system.log_determinant)
        for data, covariance in self.training_covariances():
            latent, targets, likelihood = state.latent[data], problem.targets[data], problem.likelihood.on(data)
            total += float(likelihood.expected_log_prob(latent, covariance, targets).sum())
            weighted = likelihood.curvature(latent, covariance)
            total += 0.5 * float(weighted.diagonal(dim1=1, dim2=2).sum())
        return total

    def training_covariances(self) -> Iterator[tuple[slice, Tensor]]:
        """The covariances (rows, C, C) at the training inputs, some data at a time."""
        num_data = self.prior.num_data
        step = max(1, self.prior.chunk_bytes // self.bytes_per_input())
        for start in range(0, num_data, step):
            data = slice(start, min(start + step, num_data))
            half, unseen = self.state.system.halves(self.state.matrices[:, data])
            covariance = self.prior.blocks_of(self.prior.inputs[data])
            removed = half.square().sum(1).T.expand(covariance.shape[:2])
            covariance = covariance - torch.diag_embed(removed)
            if unseen is not None:
                covariance = covariance + torch.einsum("cib,dib->bcd", unseen, unseen)
            yield data, floor_diagonal(covariance)

    def bytes_per_input(self, *, marginal: bool = False) -> int:
        """The memory that one input takes in `latent`, or in `marginals`."""
        C = self.prior.num_outputs
        return 8 * (3 * C * self.prior.num_data + 2 * C * C)

    def _cross(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (b, d), (1 or C, b, N)
        """The inputs in the dtype that is computed with, and k(x, X)."""
        x = x.to(self.prior.inputs.dtype)
        return x, self.prior.between(x, self.prior.inputs)

    def _mean(self, cross: Tensor) -> Tensor:  # (1 or C, b, N) -> (b, C)
        weights = self.state.iterate.representer_weights.reshape(self.state.latent.shape)
        lifted = (cross @ weights.T[..., None])[..., 0].T if len(cross) > 1 else cross[0] @ weights
        return self.prior.mean[:1] + lifted


def _on_diagonal(removed: Tensor, num_outputs: int) -> Tensor:  # (1 or C, b, b) -> (b, C, b, C)
    """Of independent outputs, between which there is nothing."""
    eye = torch.eye(num_outputs, dtype=removed.dtype, device=removed.device)
    return torch.einsum("cij,cd->icjd", removed.expand(num_outputs, -1, -1), eye)
