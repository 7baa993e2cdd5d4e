"""The Laplace evidence of an exact fit and its gradient in the hyperparameters (R&W, Alg. 5.1, for any likelihood).

At the mode f̂ = m + K v, with C = (K + W⁺)⁻¹ on the range of W and Σ = K − K C K, a change of K has the effect

    d log Z = ½ vᵀ dK v − ½ tr(C dK) + sᵀ df̂          df̂ = (I + K W)⁻¹ dK v          s = −½ ∂/∂f Σ_n tr(Σ_n W_n(f))

since Ψ is stationary in f̂, and only the determinant moves with it. All of it is Σ_c ⟨Γ_c, dK_c⟩ with

    Γ_c = ½ v_c v_cᵀ − ½ C_cc + u_c v_cᵀ                  u = (I − C K) s,

so that one backward pass through the kernel, weighted by Γ, gives the derivatives in all of its hyperparameters. The
factors are those of the fit; nothing is differentiated through a Cholesky factorisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ntk_iterncgp.gp.hyperparameters import MEAN, NOISE, kernels_with, with_values
from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.posterior.exact import ExactPosterior
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver import Problem
from ntk_iterncgp.solver.exact import ExactState, exact_newton, exact_state, written_out

GRAPH_BYTES = 2**28  # of one kernel's graph that is held at once, about sixteen matrices


class ExactEvidence:
    """log Z as a function of log-hyperparameters. Each evaluation starts from the mode of the one before."""

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        kernels: Sequence[Kernel],
        likelihood: Likelihood,
        mean: Tensor,
        *,
        chunk_bytes: int,
    ) -> None:
        self.inputs, self.targets, self.kernels, self.likelihood = inputs, targets, list(kernels), likelihood
        self.mean, self.chunk_bytes = mean, chunk_bytes
        self.weights: Tensor | None = None  # v of the last mode

    def mode(self, values: Mapping[str, Tensor]) -> ExactState:
        """The fit at some hyperparameters."""
        kernels, likelihood = with_values(self.kernels, self.likelihood, values)
        mean = values.get(MEAN, self.mean)
        prior = GramPrior(kernels, self.inputs, mean, chunk_bytes=self.chunk_bytes)
        state: ExactState = exact_state(Problem(prior, likelihood, self.targets), written_out(prior), self.weights)
        steps = exact_newton(state)
        while True:
            try:
                state = next(steps)
            except StopIteration as end:
                state, _ = end.value
                break
        self.weights = state.iterate.representer_weights
        return state

    def __call__(self, values: Mapping[str, Tensor], names: Sequence[str]) -> tuple[float, Tensor]:
        """log Z, and its derivatives in the logarithms of the named hyperparameters and in the mean, in one vector."""
        with torch.no_grad():
            state = self.mode({name: value.detach() for name, value in values.items()})
            weights, by_mean = evidence_weights(state)
        leaves = {n: values[n].detach().clone().requires_grad_() for n in names if n != MEAN}
        kernels = kernels_with(self.kernels, dict(values) | leaves)
        backward_through(kernels, self.inputs, weights)
        slopes = {n: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in leaves.items()}
        gradient = {n: slope * values[n] for n, slope in slopes.items()}
        if NOISE in gradient:  # d(K + σ²I) is that of K, and log Z knows their sum alone
            own = weights.diagonal(dim1=1, dim2=2).sum()
            gradient[NOISE] = own.cpu() * values[NOISE]
        if MEAN in names:
            gradient[MEAN] = by_mean.sum(0).cpu()
        return state.log_evidence, torch.cat([gradient[name].reshape(-1) for name in names])


def evidence_weights(state: ExactState) -> tuple[Tensor, Tensor]:  # (1 or C, N, N), (N, C)
    """Γ, the derivative of log Z by each K_c, and v + u, that by the prior mean of each latent value."""
    system, shape = state.system, state.latent.shape
    v = state.iterate.representer_weights.reshape(shape)
    moved = torch.zeros_like(v)  # u
    if not state.problem.likelihood.is_quadratic:
        s = curvature_slope(state)
        moved = s - system.solve(state.multiply(s.flatten()).reshape(shape))
    shared = len(state.matrices) == 1
    weights = torch.zeros_like(state.matrices)
    for c in range(shape[1]):
        inverse = system.inverse_of_output(c)
        if system.unseen is not None and system.unseen_lower is not None:
            half = torch.linalg.solve_triangular(system.unseen_lower, system.unseen[c] * inverse, upper=False)
            inverse = inverse - half.T @ half
        skew = (0.5 * v[:, c] + moved[:, c])[:, None] * v[:, c]
        weights[0 if shared else c] += 0.5 * (skew + skew.T) - 0.5 * inverse
    return weights, v + moved


def curvature_slope(state: ExactState) -> Tensor:  # s (N, C)
    """−½ ∂/∂f tr(Σ W(f)) at the mode, with Σ held: third derivatives of the likelihood."""
    slope = torch.zeros_like(state.latent)
    for data, covariance in ExactPosterior(state).training_covariances():
        with torch.enable_grad():
            latent = state.latent[data].detach().clone().requires_grad_()
            weighted = state.problem.likelihood.on(data).curvature(latent, covariance).diagonal(dim1=1, dim2=2).sum()
            if weighted.requires_grad:
                (slope[data],) = torch.autograd.grad(-0.5 * weighted, latent)
    return slope


def backward_through(kernels: Sequence[Kernel], inputs: Tensor, weights: Tensor) -> None:
    """Add the gradient of Σ_c ⟨Γ_c, k_c(X, X)⟩ to the leaves of the kernels, some rows at a time."""
    step = max(1, GRAPH_BYTES // (8 * 16 * len(inputs)))
    for kernel, weight in zip(kernels, weights, strict=True):
        for start in range(0, len(inputs), step):
            rows = slice(start, start + step)
            part = inputs if step >= len(inputs) else inputs[rows]
            with torch.enable_grad():
                total = (weight[rows] * kernel(part, inputs)).sum()
                if total.requires_grad:
                    total.backward()
